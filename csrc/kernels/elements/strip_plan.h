// How the elements of rows are dealt out. Host code without CUDA; kernels read the plan by tiles.h.
//
// One dimension is that of the columns, along which operands are read; the others number the rows.
// A unit is a few neighbouring columns of a row. Rows are cut into strips, which have as many units
// as threads side by side. A thread keeps its columns and walks along one dimension, from row to
// row, so that all the rest is found once a tile: where its first unit lies, whether that is the
// last of its row. If strips are short, several rows lie side by side in a block. If rows are few
// and long, a thread walks along its row instead, from strip to strip.
//
// If fewer columns are left for the last unit of a row than it has, it begins earlier and shares
// columns with the one before: whatever a unit reads is there, and what it writes twice is the
// same.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"

namespace lossops::cuda {

struct StripOperand : PlanOperand {
  int32_t walk_stride = 0;  // bytes that one more of Walk::index() makes
};

struct StripPlan : PlanOperands<StripOperand> {
  // Dimension 0 has the columns, 1 is walked along; the rest number what is walked along.
  int64_t columns = 1;
  int64_t rest = 1;
  bool is_half = false;        // all operands are of half types
  bool walks_columns = false;  // along a row: dimension 1 is empty

  int32_t width = 1;         // columns of a unit
  Divisor strip_units;       // units of a strip
  Divisor side_walked = {};  // rows side by side along dimension 1
  int32_t side_rest = 1;     // along the rest
  int32_t strip_columns = 1;

  // The threads of a tile take some steps at once, in turns.
  int32_t walk_step = 1;  // how much one step more adds to Walk::index(), and one turn
  int32_t walk_turn = 1;
  int32_t tile_turns = 1;
  int64_t tile_walked = 1;  // of dimension 1, from a tile to the next
  int64_t tile_columns = 1;
  Extents tile_extents;  // how many tiles there are along the columns, along 1, and along the rest
  int64_t tiles = 0;

  // Threads that have units.
  LOSSOPS_HOST_DEVICE int lanes() const {
    return static_cast<int>(strip_units.value * side_walked.value) * side_rest;
  }
  // The size of the table of addresses where the walks of a block's threads begin.
  int64_t table_bytes() const {
    return int64_t{kTileThreads} * num_slots * static_cast<int64_t>(sizeof(char*));
  }
};

// Makes a StripPlan.
class StripPlanner {
 public:
  StripPlanner(const Layout& layout, const Operand* operands)
      : layout_(layout), operands_(operands), has_near_columns_(are_near(operands, layout.lead())) {
    const IterationSpace& space = layout.space();
    plan_.set(operands);
    plan_.columns = space.sizes[layout.lead()];
    plan_.is_half = true;
    plan_.for_each(operands, [&](const Operand& operand, StripOperand& /*own*/) {
      plan_.is_half = plan_.is_half && is_half_type(operand.dtype);
    });
    for (int dim = 0; dim < space.ndim; ++dim) {
      rows_ *= dim == layout.lead() ? 1 : space.sizes[dim];
    }
  }

  bool is_half() const { return plan_.is_half; }

  // Whether units of kQuad columns are faster than single ones.
  bool has_quads() const {
    // Units that share columns are read twice: of so long rows, few. A choice, not measured.
    constexpr int64_t kLongRow = 32;
    const bool are_whole = plan_.columns % kQuad == 0;
    bool has_quads = has_near_columns_ && plan_.columns >= (are_whole ? kQuad : kLongRow);
    for (int which = kInput; which <= kOutput; ++which) {
      const Operand& operand = operands_[which];
      has_quads =
          has_quads && (operand.data == nullptr || kind_of(operand, kQuad) != UnitKind::kStrided);
    }
    return has_quads;
  }

  // To be called once. width: of a unit. steps: units that a thread takes at once. resident: blocks
  // that the device holds at once.
  const StripPlan& plan(int width, int steps, int64_t resident) {
    plan_.width = width;
    plan_.for_each(operands_, [&](const Operand& operand, StripOperand& own) {
      own.kind = kind_of(operand, width);
    });
    const int64_t units = ceil_div(plan_.columns, width);
    const int64_t strip = choose_strip(units);
    walk(choose_walk(units, strip, steps), strip);
    number_tiles(steps, resident);
    return plan_;
  }

 private:
  // What is walked along, and how many are side by side.
  struct Walked {
    int dim = -1;  // of the space; -1: none, so the columns
    int64_t size = 1;
    int64_t side_walked = 1;
    int64_t side_rest = 1;
    int64_t sides = 1;  // that there is room for
    double use = 0;     // of the threads' steps, between 0 and 1
  };

  UnitKind kind_of(const Operand& operand, int width) const {
    const IterationSpace& space = layout_.space();
    const int64_t stride = operand.strides[layout_.lead()];
    if (stride == 0) {
      return UnitKind::kOne;
    }
    if (stride != 1 || width == 1) {
      return UnitKind::kStrided;
    }
    const bool is_half = is_half_type(operand.dtype);
    const int64_t bytes = width * element_size(operand.dtype);
    bool is_aligned =
        reinterpret_cast<uintptr_t>(operand.data) % bytes == 0 && plan_.columns % width == 0;
    for (int dim = 0; dim < space.ndim; ++dim) {
      is_aligned = is_aligned && (dim == layout_.lead() || operand.strides[dim] % width == 0);
    }
    return is_aligned ? UnitKind::kVector : is_half ? UnitKind::kWords : UnitKind::kStrided;
  }

  static double part(int64_t count, int64_t of) {
    return static_cast<double>(count) / static_cast<double>(ceil_div(count, of) * of);
  }

  // Units of a strip: a whole row, if the threads of a block are enough for it. Parts of a row
  // share cache lines, and none is short.
  static int64_t choose_strip(int64_t units) {
    const int64_t fewest = ceil_div(units, kTileThreads);
    int64_t strip = ceil_div(units, fewest);
    // Whole warps, if few are left over. Choices, not measured.
    constexpr int64_t kMoreStrips = 2;
    for (int64_t strips = fewest; fewest > 1 && strips <= fewest + kMoreStrips; ++strips) {
      const int64_t own = ceil_div(ceil_div(units, strips), kWarpSize) * kWarpSize;
      strip = own <= kTileThreads && part(units, own) > part(units, strip) ? own : strip;
    }
    return strip;
  }

  Walked choose_walk(int64_t units, int64_t strip, int steps) const {
    const IterationSpace& space = layout_.space();
    // What is read across the rows is near there.
    if (const Walked other = walked(layout_.other(), strip, steps); other.use > 0) {
      return other;
    }
    Walked best;
    // Where rows are walked along, their ends are found once, and threads share nothing. A choice,
    // not measured.
    constexpr double kWorse = 0.9;
    if (has_near_columns_ && units > kTileThreads) {
      best.use = kWorse * part(units, kTileThreads * steps);
    }
    for (int dim = 0; dim < space.ndim; ++dim) {
      const Walked own = walked(dim, strip, steps);
      // Rows that are near each other share cache lines, if they are short or read across. They lie
      // side by side, or a thread walks along them.
      best =
          own.use > best.use || (own.use == best.use && own.use > 0 && own.sides > 1) ? own : best;
    }
    return best;
  }

  Walked walked(int dim, int64_t strip, int steps) const {
    Walked own;
    own.dim = dim;
    own.size = layout_.space().sizes[dim];
    if (dim == layout_.lead()) {
      return own;
    }
    own.sides = std::min(kTileThreads / strip, rows_);
    own.side_rest = std::min(own.sides, rows_ / own.size);
    own.side_walked = std::min(own.sides / own.side_rest, own.size);
    if (!are_near(operands_, dim, own.side_walked)) {
      return own;
    }
    own.use = part(own.size, own.side_walked * steps) * part(rows_ / own.size, own.side_rest) *
              static_cast<double>(own.side_walked * own.side_rest) / static_cast<double>(own.sides);
    return own;
  }

  void walk(const Walked& walked, int64_t strip) {
    const IterationSpace& space = layout_.space();
    // If neither rows nor columns are near, a thread has one unit a tile.
    plan_.walks_columns = walked.dim < 0 && has_near_columns_;
    const int64_t units = plan_.walks_columns ? kTileThreads : strip;
    plan_.strip_units = Divisor(static_cast<uint32_t>(units));
    plan_.side_walked = Divisor(static_cast<uint32_t>(walked.side_walked));
    plan_.side_rest = static_cast<int32_t>(walked.side_rest);
    plan_.strip_columns = static_cast<int32_t>(units * plan_.width);
    plan_.walk_step = plan_.walks_columns ? plan_.strip_columns : 1;
    plan_.add(operands_, plan_.columns, layout_.lead());
    if (walked.dim < 0) {
      plan_.extents.add(1);
    } else {
      plan_.add(operands_, walked.size, walked.dim);
    }
    for (int dim = 0; dim < space.ndim; ++dim) {
      if (dim != layout_.lead() && dim != walked.dim) {
        plan_.add(operands_, space.sizes[dim], dim);
      }
    }
    plan_.rest = rows_ / walked.size;
    plan_.extents.set_divisors();
    plan_.for_each(operands_, [&](const Operand& /*operand*/, StripOperand& own) {
      own.walk_stride = static_cast<int32_t>(
          plan_.walks_columns ? own.strides[0] : walked.side_walked * own.strides[1]);
    });
  }

  // Tiles have as many turns as leave each resident block some tiles: what a thread works out once
  // a tile then costs little, and blocks end at about the same time.
  void number_tiles(int steps, int64_t resident) {
    // Choices, not measured.
    constexpr int64_t kTilesOfBlock = 8;
    constexpr int64_t kMostSteps = 64;
    const int64_t size = plan_.walks_columns ? plan_.columns : plan_.extents.sizes[1];
    const int64_t at_once =
        steps * int64_t{plan_.walks_columns ? plan_.strip_columns : plan_.side_walked.value};
    const int64_t others =
        (plan_.walks_columns ? 1 : ceil_div(plan_.columns, plan_.strip_columns)) *
        ceil_div(plan_.rest, plan_.side_rest);
    const int64_t walks = ceil_div(size, at_once);
    const int64_t turns = std::clamp<int64_t>(ceil_div(walks * others, kTilesOfBlock * resident), 1,
                                              std::min<int64_t>(kMostSteps / steps, walks));
    const int64_t walk_tiles = ceil_div(walks, turns);
    plan_.tile_turns = static_cast<int32_t>(turns);
    plan_.walk_turn = static_cast<int32_t>(steps) * plan_.walk_step;
    plan_.tile_walked = plan_.walks_columns ? 1 : turns * at_once;
    plan_.tile_columns = plan_.walks_columns ? turns * at_once : plan_.strip_columns;
    Extents& tiles = plan_.tile_extents;
    tiles.add(plan_.walks_columns ? walk_tiles : ceil_div(plan_.columns, plan_.strip_columns));
    tiles.add(plan_.walks_columns ? 1 : walk_tiles);
    tiles.add(ceil_div(plan_.rest, plan_.side_rest));
    tiles.set_divisors();
    plan_.tiles = layout_.space().numel > 0 ? tiles.sizes[0] * tiles.sizes[1] * tiles.sizes[2] : 0;
  }

  const Layout& layout_;
  const Operand* const operands_;
  int64_t rows_ = 1;
  const bool has_near_columns_;
  StripPlan plan_;
};

}  // namespace lossops::cuda
