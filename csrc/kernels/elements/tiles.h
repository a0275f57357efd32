// Which elements the tiles of a plan have. Arithmetic of kernels, and of their tests on the host
// (csrc/tests/test_{box,strip,strip_sums}_plan.cpp).
#pragma once

#include <cstdint>

#include "kernels/elements/box_plan.h"
#include "kernels/elements/strip_plan.h"

namespace lossops::cuda {

// A tile of strips.
struct Strip {
  // Its first column, and its first of dimension 1 and of the rest.
  int64_t column;
  int64_t walked;
  int64_t rest;
  int32_t columns_left;  // of the row, from the first column on
  int32_t walked_left;   // of dimension 1, and of the rest, from the first on
  int32_t rest_left;
  // Of kernels that sum a gradient.
  bool is_last;   // in this tile, of what is summed
  int64_t split;  // where its part of the sums lies: see StripPlan::split_strides

  // More than a tile has.
  static constexpr int32_t kFar = 1 << 29;

  static LOSSOPS_HOST_DEVICE Strip of(const StripPlan& plan, int64_t tile) {
    const Extents& tiles = plan.tile_extents;
    const int64_t across = tiles.quotient(tile, 0);
    const int64_t rest = tiles.quotient(across, 1);
    return at(plan, tile - across * tiles.sizes[0], across - rest * tiles.sizes[1],
              rest * plan.side_kept);
  }
  // The same for a kernel that sums a gradient, whose tiles go through StripPlan::tile_summed
  // indices of the summed rest. number: that of the index, from 0.
  static LOSSOPS_HOST_DEVICE Strip of_sums(const StripPlan& plan, int64_t tile, int number) {
    const Extents& tiles = plan.tile_extents;
    const int64_t across = tiles.quotient(tile, 0);
    const int64_t rest = tiles.quotient(across, 1);
    const int64_t summed = tiles.quotient(rest, 2);
    const int64_t column = tile - across * tiles.sizes[0];
    const int64_t walked = across - rest * tiles.sizes[1];
    const int64_t own_summed = summed * plan.tile_summed + number;
    const int64_t kept = (rest - summed * tiles.sizes[2]) * plan.side_kept;
    Strip own = at(plan, column, walked, own_summed * plan.kept + kept);
    own.rest_left = bounded(plan.kept - kept);
    own.is_last = number + 1 >= plan.tile_summed || own_summed + 1 >= plan.summed;
    own.split = column * plan.split_strides[0] + walked * plan.split_strides[1] +
                summed * plan.split_strides[2];
    return own;
  }

 private:
  // column, walked: numbers of tiles.
  static LOSSOPS_HOST_DEVICE Strip at(const StripPlan& plan, int64_t column, int64_t walked,
                                      int64_t rest) {
    Strip own;
    own.column = column * plan.tile_columns;
    own.walked = walked * plan.tile_walked;
    own.rest = rest;
    own.columns_left = bounded(plan.columns - own.column);
    own.walked_left = bounded(plan.extents.sizes[1] - own.walked);
    own.rest_left = bounded(plan.rest - rest);
    return own;
  }
  static LOSSOPS_HOST_DEVICE int32_t bounded(int64_t number) {
    return static_cast<int32_t>(number < kFar ? number : kFar);
  }
};

// A thread's units of a tile, one a step of a turn. Where there is none, another is taken again,
// and does not count. kWidth: columns of a unit.
template <int kWidth>
class Walk {
 public:
  static constexpr bool kSpreads = spreads_units(kWidth);

  LOSSOPS_HOST_DEVICE Walk(const StripPlan& plan, const Strip& strip, int thread) {
    const auto units = static_cast<int>(plan.strip_units.value);
    const auto side = static_cast<int>(plan.strip_units.quotient(static_cast<uint32_t>(thread)));
    const int lane = thread - side * units;
    side_kept_ = static_cast<int>(plan.side_walked.quotient(static_cast<uint32_t>(side)));
    side_walked_ = side - side_kept_ * static_cast<int>(plan.side_walked.value);
    const bool is_there = side_kept_ < plan.side_kept && side_kept_ < strip.rest_left &&
                          side_walked_ < strip.walked_left;
    side_kept_ = is_there ? side_kept_ : 0;
    side_walked_ = is_there ? side_walked_ : 0;
    if constexpr (kSpreads) {
      spread(plan, strip, is_there, lane);
    } else {
      join(plan, strip, is_there, lane, thread % kWarpSize);
    }
  }

  // Where the walk begins, along dimension 0, along 1 and along the rest.
  LOSSOPS_HOST_DEVICE int64_t column(const Strip& strip) const { return strip.column + column_; }
  LOSSOPS_HOST_DEVICE int64_t walked(const Strip& strip) const {
    return strip.walked + side_walked_;
  }
  LOSSOPS_HOST_DEVICE int64_t rest(const Strip& strip) const { return strip.rest + side_kept_; }

  // Turns begin at multiples of plan.walk_turn. The last one in which a thread has something begins
  // below this; if one has, the first thread has.
  LOSSOPS_HOST_DEVICE static int end(const StripPlan& plan, const Strip& strip) {
    const int end = plan.walks_columns ? strip.columns_left : last_of(plan, strip, 0) + 1;
    return least(end, plan.tile_turns * plan.walk_turn);
  }

  // How far a step's unit is from where the walk begins: see StripOperand::walk_stride.
  LOSSOPS_HOST_DEVICE int index(const StripPlan& plan, int turn, int step) const {
    return least(unbounded(plan, turn, step), last_);
  }
  // How far column i of a unit is from its first one.
  LOSSOPS_HOST_DEVICE int offset(int i) const {
    if constexpr (kSpreads) {
      return offsets_[i];
    } else {
      return i;
    }
  }

  // The columns of the unit that count, as bits.
  LOSSOPS_HOST_DEVICE unsigned counted(const StripPlan& plan, int turn, int step) const {
    const int over = unbounded(plan, turn, step) - index(plan, turn, step);
    if constexpr (!kSpreads) {
      const int repeated = plan.walks_columns ? over : over * kWidth + lacking_;
      return repeated < kWidth ? ~0U << repeated : 0;
    }
    if (!plan.walks_columns) {
      return over > 0 ? 0 : counted_;
    }
    unsigned repeated = 0;  // as the walk begins earlier
    for (int i = 0; i < kWidth; ++i) {
      if (column_ + offsets_[i] < over) {
        repeated |= 1U << i;
      }
    }
    return counted_ & ~repeated;
  }
  // Of units that are spread, where threads walk from row to row: whether all steps of the turn up
  // to `last` have columns that count, the same of each row.
  LOSSOPS_HOST_DEVICE bool has_rows(const StripPlan& plan, int turn, int last) const {
    return unbounded(plan, turn, last) <= last_ && counted_ != 0;
  }
  // Whether all steps of the turn up to `last` have a whole unit.
  LOSSOPS_HOST_DEVICE bool has_all(const StripPlan& plan, int turn, int last) const {
    return unbounded(plan, turn, last) <= all_until_;
  }
  // Whether the thread has anything in a tile.
  LOSSOPS_HOST_DEVICE bool has_any(const StripPlan& plan) const { return counted(plan, 0, 0) != 0; }

  // Of neighbours: whether no step of the turn up to `last` has the last unit of a row that is not
  // whole units.
  LOSSOPS_HOST_DEVICE bool is_aligned(const StripPlan& plan, int turn, int last) const {
    return unbounded(plan, turn, last) <= aligned_until_;
  }
  // Of neighbours: whether the unit of the next thread of the warp, or of the one before, lies
  // beside this one, in operands that are written.
  LOSSOPS_HOST_DEVICE bool joins_next(const StripPlan& plan, int turn, int step) const {
    return unbounded(plan, turn, step) <= next_until_;
  }
  LOSSOPS_HOST_DEVICE bool joins_previous(const StripPlan& plan, int turn, int step) const {
    return unbounded(plan, turn, step) <= previous_until_;
  }

 private:
  static LOSSOPS_HOST_DEVICE int least(int a, int b) { return a < b ? a : b; }

  // As many units as a warp has share a group of columns. Column i of a unit is the thread's in the
  // i-th share of its group. If less is left for the last share, it begins earlier.
  LOSSOPS_HOST_DEVICE void spread(const StripPlan& plan, const Strip& strip, bool is_there,
                                  int lane) {
    const auto units = static_cast<int>(plan.strip_units.value);
    const int columns = least(strip.columns_left, plan.strip_columns);
    const int lane_of_group = lane % kWarpSize;
    const int group = lane - lane_of_group;  // its first unit
    const int share = least(kWarpSize, units - group);
    const int left = columns - group * kWidth;  // 0 or less: nothing
    const int own = lane_of_group < left ? lane_of_group : left - 1;
    column_ = left > 0 ? group * kWidth + own : 0;
    first_ = 0;
    last_ = last_of(plan, strip, side_walked_);
    if (plan.walks_columns) {
      last_ = strip.columns_left - columns;
    }
    counted_ = 0;
    const int last_share = left > share ? left - share : 0;
    for (int i = 0; i < kWidth; ++i) {
      const int begin = i * share;
      offsets_[i] = least(begin, last_share);
      const bool counts = is_there && lane_of_group < left && own + offsets_[i] >= begin;
      counted_ |= (counts && begin < left ? 1U : 0U) << i;
    }
    all_until_ = counted_ == (1U << kWidth) - 1 ? last_ : -1;
  }

  // Columns of a unit are neighbours. lane: in the strip.
  LOSSOPS_HOST_DEVICE void join(const StripPlan& plan, const Strip& strip, bool is_there, int lane,
                                int lane_of_warp) {
    const int last_column = strip.columns_left - kWidth;
    // Behind every column.
    constexpr int kBehind = 2 * Strip::kFar;
    const int column = is_there ? lane * kWidth : kBehind;
    column_ = least(column, last_column);
    lacking_ = column - column_;
    first_ = 0;
    const auto sides = static_cast<int>(plan.side_walked.value);
    last_ = last_of(plan, strip, side_walked_);
    const bool begins_strip = lane == 0;
    const bool ends_strip = lane + 1 == static_cast<int>(plan.strip_units.value);
    const bool begins_warp = lane_of_warp == 0;
    const bool ends_warp = lane_of_warp == kWarpSize - 1;
    if (plan.walks_columns) {
      first_ = column;
      last_ = last_column;
      column_ = lacking_ = 0;
      aligned_until_ = last_;
      next_until_ = ends_strip || ends_warp ? -1 : last_ - kWidth;
      previous_until_ = begins_strip || begins_warp ? -1 : last_;
    } else {
      aligned_until_ = lacking_ == 0 ? kBehind : -1;
      const bool has_next = !ends_strip && column + kWidth <= last_column;
      const bool has_next_row = plan.rows_join && ends_strip && side_walked_ + 1 < sides;
      const bool has_previous = !begins_strip && lacking_ == 0;
      const bool has_previous_row = plan.rows_join && begins_strip && side_walked_ > 0;
      if (is_there && has_next_row && !ends_warp) {
        next_until_ = last_of(plan, strip, side_walked_ + 1);
      } else if (is_there && has_next && !ends_warp) {
        next_until_ = last_;
      }
      if (is_there && (has_previous || has_previous_row) && !begins_warp) {
        previous_until_ = last_;
      }
    }
    all_until_ = lacking_ == 0 ? last_ : -1;
    aligned_until_ = plan.has_parts ? aligned_until_ : kBehind;
  }

  // The last index of a row side by side with others; -1: there is no such row.
  LOSSOPS_HOST_DEVICE static int last_of(const StripPlan& plan, const Strip& strip,
                                         int side_walked) {
    const int left = strip.walked_left - 1 - side_walked;
    return left < 0 ? -1 : static_cast<int>(plan.side_walked.quotient(static_cast<uint32_t>(left)));
  }
  LOSSOPS_HOST_DEVICE int unbounded(const StripPlan& plan, int turn, int step) const {
    return first_ + turn + step * plan.walk_step;
  }

  int side_kept_;
  int side_walked_;
  int column_;  // where all units begin; of neighbours that walk along columns, 0
  int first_;   // indices
  int last_;
  int all_until_;  // the last index up to which units are whole

  // Of units that are spread.
  int offsets_[kWidth];
  unsigned counted_ = 0;  // columns that count, as bits

  // Of neighbours.
  int lacking_ = 0;  // columns of a unit that do not count
  // The last indices up to which: units are aligned, the next thread, or the one before, has what
  // lies beside this unit.
  int aligned_until_ = -1;
  int next_until_ = -1;
  int previous_until_ = -1;
};

// Where a box begins. If less is left for the last box along a dimension than it has, it begins
// earlier, and repeats some of the box before, or all of it.
struct Box {
  int64_t begin[kBoxDims];
  int32_t repeated[kBoxDims];
  int64_t rest;  // the number of what the dimensions behind those of the box number

  static LOSSOPS_HOST_DEVICE Box of(const BoxPlan& plan, int64_t number) {
    const int64_t in_group = number % plan.group.value;
    number /= plan.group.value;
    Box own;
    for (int dim = 0; dim < kBoxDims; ++dim) {
      const int64_t next = plan.extents.quotient(number, dim);
      int64_t index = number - next * plan.extents.sizes[dim];
      index = dim == 1 ? index * plan.group.value + in_group : index;
      const int64_t nominal = index * plan.sizes[dim];
      const int64_t last = plan.space_sizes[dim] - plan.sizes[dim];
      own.begin[dim] = nominal < last ? nominal : last;
      own.repeated[dim] = static_cast<int32_t>(nominal - own.begin[dim]);
      number = next;
    }
    own.rest = number;
    return own;
  }

  // From where an operand begins, in bytes.
  LOSSOPS_HOST_DEVICE int64_t offset(const BoxPlan& plan, const BoxOperand& operand) const {
    int64_t offset = plan.extents.offset(operand.strides, rest, kBoxDims);
    for (int dim = 0; dim < kBoxDims; ++dim) {
      offset += begin[dim] * operand.strides[dim];
    }
    return offset;
  }
};

// A thread's place in a box, in one of the orders. Threads without a place take that of thread 0,
// and count nothing.
class BoxPlace {
 public:
  // near: the side along which threads side by side have neighbours, which is the order's number.
  LOSSOPS_HOST_DEVICE BoxPlace(const BoxPlan& plan, int near, int thread)
      : order_(plan.orders[near]), is_own_(thread < order_.threads) {
    const auto own = static_cast<uint32_t>(is_own_ ? thread : 0);
    const uint32_t across = order_.near.quotient(own);
    const uint32_t matrix = order_.far.quotient(across);
    const auto near_index = static_cast<int32_t>(own - across * order_.near.value);
    const auto far_index = static_cast<int32_t>(across - matrix * order_.far.value);
    index_[0] = near == 0 ? near_index : far_index;
    index_[1] = near == 0 ? far_index : near_index;
    index_[2] = static_cast<int32_t>(matrix);
    place_ = 0;
    // No index that is known only at run time: it would put the array in memory.
    for (int dim = 0; dim < kBoxDims; ++dim) {
      if (dim == order_.walked) {
        place_ = index_[dim];
        index_[dim] = order_.first(place_);
      }
    }
  }

  // How far it is from where a box begins: in memory, in bytes, and from cell to cell.
  LOSSOPS_HOST_DEVICE int64_t offset(const BoxOperand& operand) const {
    return index_[0] * operand.strides[0] + index_[1] * operand.strides[1] +
           index_[2] * operand.strides[2];
  }
  LOSSOPS_HOST_DEVICE int cell(const BoxPlan& plan) const {
    return index_[0] * plan.cells[0] + index_[1] * plan.cells[1] + index_[2] * plan.cells[2];
  }

  // The steps whose elements count, as bits, of a box that repeats nothing: each element once.
  LOSSOPS_HOST_DEVICE unsigned counted() const {
    unsigned counted = 0;
    for (int step = 0; step < kBoxSteps; ++step) {
      counted |= (is_own_ && order_.counts(place_, step) ? 1U : 0U) << step;
    }
    return counted;
  }
  // The steps whose elements a box does not repeat.
  LOSSOPS_HOST_DEVICE unsigned unrepeated(const int32_t (&repeated)[kBoxDims]) const {
    unsigned steps = (1U << kBoxSteps) - 1;
    for (int dim = 0; dim < kBoxDims; ++dim) {
      const int lacking = repeated[dim] - index_[dim];
      if (lacking > 0) {
        const int skipped = dim != order_.walked   ? kBoxSteps
                            : order_.distance == 1 ? lacking
                                                   : (lacking - 1) / order_.distance + 1;
        steps &= skipped < kBoxSteps ? ~0U << skipped : 0;
      }
    }
    return steps;
  }

 private:
  const BoxOrder& order_;
  bool is_own_;
  int32_t place_;  // along what is walked
  int32_t index_[kBoxDims];
};

}  // namespace lossops::cuda
