// How the elements of rows are dealt out. Host code without CUDA; kernels read the plan by tiles.h.
//
// One dimension is that of the columns, as Layout chooses it; the others number the rows.
// A unit is a few columns of a row that a thread takes at once. Rows are cut into strips, which
// have as many units as threads side by side. Eight columns of half types are neighbours: a few
// accesses, wherever they begin. Fewer columns, of any type, are spread: as many units as a warp
// has lanes share a group of columns, and each has one of every share of it. So threads have
// neighbours, and each access of a warp is one piece of memory.
//
// A thread keeps its columns and walks along one dimension, from row to row, so that all the rest
// is found once a tile: where its first unit lies, and which of its columns count. If strips are
// short, several rows lie side by side in a block: neighbours, but only a few of them where threads
// share sums along them, and not where they read across the rows. If rows are few and long, a
// thread walks along its row instead, from strip to strip.
//
// If fewer columns are left for the last unit of a row, or for the last share of a group, than it
// has, it begins earlier and has columns of the one before, too: whatever is read is there, and
// what is written twice is the same.
//
// The gradient of an operand that is broadcast is a sum along the dimensions where it is. So a
// thread walks along one of these, if it can, and adds up as it walks (strip_sums.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/elements/plan.h"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"

namespace lossops::cuda {

// Whether units of so many columns are spread.
LOSSOPS_HOST_DEVICE constexpr bool spreads_units(int width) { return width < kVectorSize<half_t>; }

// How a unit of neighbours lies in an operand. Of units that are spread, kOne is all that counts.
enum class UnitKind : int8_t {
  kVector,   // an aligned vector, but for a last one that begins earlier: that is as kStrided
  kOne,      // one number for all columns
  kWords,    // neighbours, anywhere
  kStrided,  // at equal distances
};

struct StripOperand : PlanOperand {
  UnitKind kind = UnitKind::kStrided;
  int32_t walk_stride = 0;    // bytes that one more of Walk::index() makes
  int32_t column_stride = 0;  // from a column to the next, if units have several
};

// What turns ask of operands, for all of them in one word, which is found once a turn: how each
// lies, whether it is of a half type, and whether it is another in each turn.
class UnitTraits {
 public:
  UnitTraits() = default;
  LOSSOPS_HOST_DEVICE explicit UnitTraits(uint32_t bits) : bits_(bits) {}

  void set(int which, UnitKind kind, bool is_half, bool moves) {
    const uint32_t own = static_cast<uint32_t>(kind) | (is_half ? kHalf : 0) | (moves ? kMoves : 0);
    bits_ = (bits_ & ~(kAll << kBits * which)) | own << kBits * which;
  }

  LOSSOPS_HOST_DEVICE uint32_t bits() const { return bits_; }
  LOSSOPS_HOST_DEVICE UnitKind kind(int which) const {
    return static_cast<UnitKind>(bits_ >> kBits * which & kKind);
  }
  LOSSOPS_HOST_DEVICE bool is_half(int which) const { return has(which, kHalf); }
  LOSSOPS_HOST_DEVICE bool moves(int which) const { return has(which, kMoves); }

 private:
  static constexpr int kBits = 4;
  static constexpr uint32_t kKind = 3;
  static constexpr uint32_t kHalf = 4;
  static constexpr uint32_t kMoves = 8;
  static constexpr uint32_t kAll = 15;
  static_assert(kBits * kNumOperands <= 32);

  LOSSOPS_HOST_DEVICE bool has(int which, uint32_t bit) const {
    return (bits_ >> kBits * which & bit) != 0;
  }

  uint32_t bits_ = 0;
};

// Rows of which each thread keeps its values before the block adds them up. A choice, not measured.
constexpr int kRowsAtOnce = 8;

// What the sums of a gradient are of.
enum class SumOf : int8_t {
  kNothing,  // the plan is not made for sums
  kColumn,   // one for each column, over the rows that are walked along
  kWalk,     // one over all columns and these rows
  kRow,      // one for each row, over its columns
};

struct StripPlan : PlanOperands<StripOperand> {
  // Dimension 0 has the columns, 1 is walked along. Of the rest, those that are kept come first,
  // and those that are summed follow.
  int64_t columns = 1;
  int64_t kept = 1;
  int64_t summed = 1;
  int64_t rest = 1;            // both
  bool walks_columns = false;  // threads walk within a row; dimension 1 then has size 1

  bool has_common_half = false;  // see common_half_type()

  int32_t width = 1;         // columns of a unit
  bool has_parts = false;    // rows are not whole units, so their last ones are not aligned
  Divisor strip_units;       // units of a strip
  Divisor side_walked = {};  // rows side by side along dimension 1
  int32_t side_kept = 1;     // along the kept rest
  int32_t strip_columns = 1;
  // A row is one strip, and the next one of dimension 1 lies beside it in all operands that are
  // written.
  bool rows_join = false;

  // Of turns whose units are all aligned, and of turns that have a row's last one, which is not.
  UnitTraits traits;
  UnitTraits part_traits;

  // The threads of a tile take some steps at once, in turns.
  int32_t walk_step = 1;  // how much a step adds to Walk::index()
  int32_t walk_turn = 1;  // and a turn
  int32_t tile_turns = 1;
  int64_t tile_walked = 1;  // of dimension 1, from a tile to the next
  int64_t tile_columns = 1;
  int64_t tile_summed = 1;  // indices of the summed rest that a tile goes through, one by one
  // How many tiles there are along the columns, along 1, along what is kept and what is summed.
  Extents tile_extents;
  int64_t tiles = 0;

  // A gradient that is summed. Its sums are split if several tiles have parts of the same ones.
  SumOf sum_of = SumOf::kNothing;
  Which summed_gradient = kNumOperands;  // kNumOperands: none
  int64_t sums = 1;
  int64_t splits = 1;
  int64_t split_strides[3] = {};  // bytes to the next part: along the columns, along 1, summed
  int32_t row_lane_bits = 0;      // log2 of the threads that add up the values of a row

  // Threads that have units.
  LOSSOPS_HOST_DEVICE int used_threads() const {
    return static_cast<int>(strip_units.value * side_walked.value) * side_kept;
  }
  // Threads of a block: whole warps.
  int block_threads() const { return static_cast<int>(round_up(used_threads(), kWarpSize)); }
  // The dimensions of the sums, in the order in which parts of them are numbered.
  bool is_kept(int dim) const {
    return extents.sizes[dim] == 1 || operands[summed_gradient].strides[dim] != 0;
  }
  // Writes parts of sums, (splits, sums), where the gradient would be. The traits of the gradient
  // are not asked any more.
  void sum_into(void* parts, DType dtype) {
    StripOperand& own = operands[summed_gradient];
    own.data = static_cast<char*>(parts);
    own.dtype = dtype;
    own.bytes = static_cast<int32_t>(element_size(dtype));
    int64_t stride = own.bytes;
    for (int dim = 0; dim < extents.ndim; ++dim) {
      own.strides[dim] = is_kept(dim) ? stride : 0;
      stride *= is_kept(dim) ? extents.sizes[dim] : 1;
    }
    own.walk_stride =
        static_cast<int32_t>(walks_columns ? own.strides[0] : side_walked.value * own.strides[1]);
    int64_t split = stride;
    const bool is_split[3] = {sum_of != SumOf::kColumn, sum_of != SumOf::kRow, true};
    const int64_t counts[3] = {tile_extents.sizes[0], tile_extents.sizes[1], tile_extents.sizes[3]};
    for (int i = 0; i < 3; ++i) {
      split_strides[i] = is_split[i] ? split : 0;
      split *= is_split[i] ? counts[i] : 1;
    }
  }
};

// Makes a StripPlan.
class StripPlanner {
 public:
  // summed: plans for the sums of this gradient, whatever else would be faster. kNumOperands: the
  // plan does not follow from gradients, so that it is the same with one and without.
  StripPlanner(const Layout& layout, const Operand* operands, Which summed = kNumOperands)
      : layout_(&layout),
        operands_(operands),
        has_near_columns_(are_near(operands, layout.lead())) {
    const IterationSpace& space = layout.space();
    plan_.set(operands);
    plan_.has_common_half = common_half_type(operands) != DType::kFloat32;
    plan_.columns = space.sizes[layout.lead()];
    if (summed != kNumOperands) {
      must_sum_ = true;
      sum_along(operands[summed], true);
    } else if (layout.other() == layout.lead()) {
      // In whole sums, if there are such, rather than in parts.
      for (const bool in_parts : {false, true}) {
        for (const Which which : {kInput, kTarget}) {
          if (!sums_) {
            sum_along(operands[which], in_parts);
          }
        }
      }
    }
  }

  // Whether a kernel of the plan can sum a gradient.
  bool sums(const Operand& gradient) const {
    bool sums = sums_ && has_near_columns_;
    for (int dim = 0; dim < layout_->space().ndim; ++dim) {
      sums = sums && is_along(gradient, dim) == along_[dim];
    }
    return sums;
  }

  // Whether units may have several columns.
  bool has_near_columns() const { return has_near_columns_; }
  // Whether eight columns of a row may be neighbours. Those that its last two units share are
  // computed twice: on an H200 rows of 9 to 31 columns are as fast or faster so, but for losses of
  // much arithmetic.
  bool joins_columns() const {
    bool joins = has_near_columns_ && plan_.columns >= kJoined;
    for (int which = kInput; which <= kOutput; ++which) {
      const Operand& operand = operands_[which];
      joins = joins && (operand.data == nullptr || kind_of(operand, kJoined) != UnitKind::kStrided);
    }
    return joins;
  }
  // The type of units: the half type that all operands have, if eight of it may be neighbours; else
  // float32, of four columns that are spread.
  DType unit_type() const {
    return joins_columns() ? common_half_type(operands_) : DType::kFloat32;
  }

  // To be called once. width: of a unit. steps: units that a thread takes at once. blocks: what
  // tiles are cut for, whatever the kernel, so that they are the same in all. gradient: one that
  // sums() says can be summed, or kNumOperands.
  StripPlan& plan(int width, int steps, int64_t blocks, Which gradient = kNumOperands) {
    plan_.width = width;
    plan_.has_parts = plan_.columns % width != 0;
    plan_.for_each(operands_, [&](const Operand& operand, StripOperand& own) {
      own.kind = kind_of(operand, width);
    });
    const int64_t units = ceil_div(plan_.columns, width);
    const int64_t strip = choose_strip(units);
    walk(choose_walk(units, strip, steps), strip);
    plan_.rows_join = plan_.columns <= plan_.strip_columns;
    for (int which = kOutput; which < kNumOperands; ++which) {
      const StripOperand& own = plan_.operands[which];
      const bool is_written = own.data != nullptr && which != gradient;
      plan_.rows_join =
          plan_.rows_join && (!is_written || own.strides[1] == plan_.columns * own.strides[0]);
    }
    for (int which = 0; which < kNumOperands; ++which) {
      const StripOperand& own = plan_.operands[which];
      const bool is_vector = own.kind == UnitKind::kVector;
      const bool is_half = is_half_type(own.dtype);
      const bool moves = own.walk_stride != 0;
      plan_.traits.set(which, own.kind, is_half, moves);
      plan_.part_traits.set(which, is_vector ? UnitKind::kStrided : own.kind, is_half, moves);
    }
    number_tiles(steps, blocks);
    if (gradient != kNumOperands) {
      count_sums(gradient);
    }
    return plan_;
  }

 private:
  static constexpr int kJoined = kVectorSize<half_t>;
  // The most rows, or columns, of a walk whose turns are dealt out to its tiles. A tile then
  // reaches to the end of the walk, which 31 bits must hold: in Strip, and in StripSums with the
  // rows of so many turns more.
  static constexpr int64_t kMostDealt = 1 << 28;
  static_assert(kMostDealt * kRowsAtOnce <= int64_t{1} << 31);
  // Steps of a tile. A choice, not measured.
  static constexpr int64_t kMostSteps = 64;
  // Steps of a tile of units of four columns where nothing is reduced: more tiles leave fewer
  // multiprocessors idle at the end. Measured on an H100, MSE "none" of float32, 149220x757: .88 of
  // the floor with up to 64, .92 with up to 16. Units of eight columns were slower.
  static constexpr int64_t kMostStepsOfFour = 16;

  // What is walked along, and how many are side by side.
  struct Walked {
    int dim = -1;  // of the space; -1: none, so the columns
    int64_t size = 1;
    int64_t kept = 1;  // of the rest
    int64_t side_walked = 1;
    int64_t side_kept = 1;
    bool has_summed = false;  // more of the rest
    double use = 0;           // of the threads' time, between 0 and 1
  };

  bool is_along(const Operand& operand, int dim) const {
    return operand.strides[dim] == 0 && layout_->space().sizes[dim] > 1;
  }

  // Plans for the sums of an operand's gradient, if the operand is broadcast. Sums along few rows
  // are left to a launch of their own, unless this is it. in_parts: also sums along dimensions that
  // are not neighbours, of which each tile then has parts.
  void sum_along(const Operand& operand, bool in_parts) {
    constexpr int64_t kFewRows = 8;  // a choice, not measured
    const IterationSpace& space = layout_->space();
    const int lead = layout_->lead();
    // At most so many rows lie side by side: two, if a row has several strips.
    const int64_t row_units = ceil_div(space.sizes[lead], int64_t{kVectorSize<half_t>});
    const int64_t most_sides = std::max<int64_t>(kTileThreads / row_units, 2);
    int64_t terms = 1;
    for (int dim = 0; dim < space.ndim; ++dim) {
      along_[dim] = is_along(operand, dim);
      terms *= along_[dim] ? space.sizes[dim] : 1;
      const bool is_longer = walk_dim_ < 0 || space.sizes[dim] > space.sizes[walk_dim_];
      // A launch for these sums walks along few rows only if it has no sums of rows instead.
      const bool may_be_few = must_sum_ && !is_along(operand, lead);
      if (along_[dim] && dim != lead && is_longer && (may_be_few || space.sizes[dim] >= kFewRows) &&
          are_near(operands_, dim, most_sides)) {
        walk_dim_ = dim;
      }
    }
    const int64_t walked =
        (along_[lead] ? space.sizes[lead] : 1) * (walk_dim_ >= 0 ? space.sizes[walk_dim_] : 1);
    // Along fewer terms, parts would be a burden. A choice, not measured.
    constexpr int64_t kTermsOfPart = 32;
    sums_ = terms > 1 && (must_sum_ || walked == terms || (in_parts && walked >= kTermsOfPart));
    if (!sums_) {
      std::fill(std::begin(along_), std::end(along_), false);
      walk_dim_ = -1;
    }
  }

  UnitKind kind_of(const Operand& operand, int width) const {
    const IterationSpace& space = layout_->space();
    const int64_t stride = operand.strides[layout_->lead()];
    if (stride == 0) {
      return UnitKind::kOne;
    }
    if (stride != 1 || width == 1) {
      return UnitKind::kStrided;
    }
    const int64_t bytes = width * element_size(operand.dtype);
    bool is_aligned = reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
    for (int dim = 0; dim < space.ndim; ++dim) {
      is_aligned = is_aligned && (dim == layout_->lead() || operand.strides[dim] % width == 0);
    }
    return is_aligned ? UnitKind::kVector : UnitKind::kWords;
  }

  // Which part of the places is used if `count` is rounded up to a multiple of `of`.
  static double used_part(int64_t count, int64_t of) {
    return static_cast<double>(count) / static_cast<double>(round_up(count, of));
  }

  // Units of a strip: a whole row, if the threads of a block are enough for it. Parts of a row
  // share cache lines, and none is short.
  static int64_t choose_strip(int64_t units) {
    const int64_t fewest = ceil_div(units, kTileThreads);
    int64_t strip = ceil_div(units, fewest);
    // Whole warps instead, if fewer threads are then idle. Choices, not measured.
    constexpr int64_t kMoreStrips = 2;
    for (int64_t strips = fewest; fewest > 1 && strips <= fewest + kMoreStrips; ++strips) {
      const int64_t own = round_up(ceil_div(units, strips), kWarpSize);
      strip = own <= kTileThreads && used_part(units, own) > used_part(units, strip) ? own : strip;
    }
    return strip;
  }

  Walked choose_walk(int64_t units, int64_t strip, int steps) const {
    const IterationSpace& space = layout_->space();
    // Where operands are read across the rows, neighbouring rows share cache lines.
    if (const Walked other = walked(layout_->other(), strip, steps); other.use > 0 && !must_sum_) {
      return other;
    }
    if (walk_dim_ >= 0) {
      return walked(walk_dim_, strip, steps);
    }
    Walked columns = walked(-1, strip, steps);
    if (sums_ && !along_[layout_->lead()]) {
      return columns;
    }
    // A thread that walks from row to row finds the end of its row once, and shares no columns. A
    // choice, not measured.
    constexpr double kWorse = 0.9;
    if (has_near_columns_ && units > kTileThreads) {
      columns.use = kWorse * used_part(units, kTileThreads * steps) *
                    part_of_walk(ceil_div(units, kTileThreads));
    }
    Walked walks[kMaxDims];
    double most = 0;
    for (int dim = 0; dim < space.ndim; ++dim) {
      walks[dim] = walked(dim, strip, steps);
      most = std::max(most, walks[dim].use);
    }
    if (columns.use >= most) {
      return columns;
    }
    // What is read and written at a time shall lie close together. So this is not the walk that
    // uses most, but of those that use nearly as much the one along the nearest dimension.
    constexpr double kNearly = 0.93;
    return *std::find_if(walks, walks + space.ndim,
                         [&](const Walked& own) { return own.use >= kNearly * most; });
  }

  // Kept indices side by side, at most so many. Kernels without sums number what is kept and what
  // is summed as one run (Strip::of()): those of a tile must not reach into the next summed index.
  int64_t kept_beside(const Walked& walked, int64_t most) const {
    int64_t kept = even_share(walked.kept, most);
    while (!must_sum_ && walked.has_summed && walked.kept % kept != 0) {
      --kept;
    }
    return kept;
  }
  // Rows that lie side by side where threads walk along sums: a piece of memory that is not short,
  // of rows that are. Threads fold the sums of these rows once a tile, after some steps. Choices,
  // of which others were not measured.
  int64_t few_rows(int64_t rows) const {
    constexpr int64_t kFewBytes = 128;
    constexpr int64_t kFewestSteps = 8;
    const int64_t element =
        std::max(element_size(operands_[kInput].dtype), element_size(operands_[kTarget].dtype));
    return std::clamp<int64_t>(rows / kFewestSteps, 1,
                               ceil_div(kFewBytes, plan_.columns * element));
  }

  // The dimension along which rows lie nearest to each other: the order of a space's dimensions
  // goes by the strides of its operands.
  int nearest_dim() const { return layout_->lead() == 0 ? 1 : 0; }

  Walked walked(int dim, int64_t strip, int steps) const {
    const IterationSpace& space = layout_->space();
    Walked own;
    own.dim = dim;
    for (int other = 0; other < space.ndim; ++other) {
      const bool is_rest = other != layout_->lead() && other != dim;
      own.kept *= is_rest && !along_[other] ? space.sizes[other] : 1;
      own.has_summed = own.has_summed || (is_rest && along_[other]);
    }
    if (dim < 0 || dim == layout_->lead()) {
      return own;
    }
    own.size = space.sizes[dim];
    // That there is room for.
    const int64_t sides = std::min(kTileThreads / strip, own.kept * own.size);
    // Rows side by side are neighbours, so that the parts of sectors that they share are written
    // together: indices of the nearest dimension, whether it is this one or comes first of what is
    // kept. Threads that read across the rows walk along neighbours instead. Threads that walk
    // along sums have only few_rows() neighbours beside them.
    const bool reads_across = layout_->other() != layout_->lead();
    const bool shares_sums = sums_ && along_[dim];
    const int64_t side_near = even_share(own.size, shares_sums ? few_rows(own.size) : sides);
    const bool is_near =
        dim == nearest_dim() && !reads_across && are_near(operands_, dim, side_near);
    if (is_near && !shares_sums) {
      own.side_walked = side_near;
      own.side_kept = kept_beside(own, sides / own.side_walked);
    } else {
      const int64_t most_kept = is_near ? std::max<int64_t>(sides / side_near, 1) : sides;
      own.side_kept = kept_beside(own, most_kept);
      own.side_walked = even_share(own.size, sides / own.side_kept);
    }
    if (!are_near(operands_, dim, own.side_walked)) {
      return own;
    }
    own.use = used_part(own.size, own.side_walked * steps) * used_part(own.kept, own.side_kept) *
              used_part(strip * own.side_walked * own.side_kept, kWarpSize) *
              part_of_walk(ceil_div(own.size, own.side_walked));
    return own;
  }
  // The part of a walk's time that its steps take. What is found once a tile takes as long as
  // kFound steps: measured for units of four columns, on an H100.
  static double part_of_walk(int64_t steps) {
    constexpr double kFound = 6;
    const auto own = static_cast<double>(std::min(steps, kMostSteps));
    return own / (own + kFound);
  }

  // Log2 of the threads that add up the values of a row. As if the block were full of rows: so the
  // order of a row's sum does not depend on how many lie side by side.
  static int32_t row_lane_bits(int64_t units) {
    const int64_t rows = kRowsAtOnce * (kTileThreads / units);
    int32_t bits = 0;
    while (2 << bits <= std::min<int64_t>(units, kWarpSize) && rows << (bits + 1) <= kTileThreads) {
      ++bits;
    }
    return bits;
  }

  void walk(const Walked& walked, int64_t strip) {
    const IterationSpace& space = layout_->space();
    const int lead = layout_->lead();
    const bool sums_rows = sums_ && along_[lead];
    // If neither rows nor columns are near, a thread has one unit a tile.
    plan_.walks_columns = walked.dim < 0 && has_near_columns_ && (sums_rows || !sums_);
    if (sums_) {
      const bool walks_along = walked.dim < 0 || along_[walked.dim];
      plan_.sum_of = !sums_rows ? SumOf::kColumn : walks_along ? SumOf::kWalk : SumOf::kRow;
    }
    const int64_t units = plan_.walks_columns ? kTileThreads : strip;
    plan_.strip_units = Divisor(static_cast<uint32_t>(units));
    plan_.row_lane_bits = row_lane_bits(units);
    plan_.side_walked = Divisor(static_cast<uint32_t>(walked.side_walked));
    plan_.side_kept = static_cast<int32_t>(walked.side_kept);
    plan_.strip_columns = static_cast<int32_t>(units * plan_.width);
    plan_.walk_step = plan_.walks_columns ? plan_.strip_columns : 1;
    plan_.add(operands_, plan_.columns, lead);
    if (walked.dim < 0) {
      plan_.extents.add(1);
    } else {
      plan_.add(operands_, walked.size, walked.dim);
    }
    plan_.kept = walked.kept;
    for (const bool is_summed : {false, true}) {
      for (int dim = 0; dim < space.ndim; ++dim) {
        if (dim != lead && dim != walked.dim && along_[dim] == is_summed) {
          plan_.add(operands_, space.sizes[dim], dim);
          plan_.summed *= is_summed ? space.sizes[dim] : 1;
        }
      }
    }
    plan_.rest = plan_.kept * plan_.summed;
    plan_.extents.set_divisors();
    plan_.for_each(operands_, [&](const Operand& /*operand*/, StripOperand& own) {
      own.walk_stride = static_cast<int32_t>(
          plan_.walks_columns ? own.strides[0] : walked.side_walked * own.strides[1]);
      own.column_stride = static_cast<int32_t>(own.strides[0]);
    });
  }

  // Tiles have as many turns as leave each block some tiles: what a thread works out once a tile
  // then costs little, and blocks end at about the same time. Each tile writes its parts of the
  // sums of columns, so there are fewer then.
  void number_tiles(int steps, int64_t blocks) {
    // Choices, not measured.
    const int64_t tiles_of_block = plan_.sum_of == SumOf::kColumn ? 4 : 8;
    const bool walks_columns = plan_.walks_columns;
    const int64_t size = walks_columns ? plan_.columns : plan_.extents.sizes[1];
    const int64_t at_once =
        steps * int64_t{walks_columns ? plan_.strip_columns : plan_.side_walked.value};
    const int64_t walks = ceil_div(size, at_once);
    const int64_t strips = walks_columns ? 1 : ceil_div(plan_.columns, plan_.strip_columns);
    const int64_t kept = ceil_div(plan_.kept, plan_.side_kept);
    // Turns that a tile should have, over all the indices that it goes through.
    const int64_t share = ceil_div(walks * strips * kept * plan_.summed, tiles_of_block * blocks);
    const bool is_unreduced = !must_sum_ && (operands_[kOutput].data != nullptr ||
                                             operands_[kGradOutput].data != nullptr);
    const bool is_short = is_unreduced && plan_.width == kVectorSize<float>;
    const int64_t most_steps = is_short ? kMostStepsOfFour : kMostSteps;
    const int64_t most = std::max<int64_t>(most_steps / steps, 1);
    const int64_t turns = std::clamp<int64_t>(share, 1, std::min(most, walks));
    // Only in a launch for these sums: a forward pass has the same tiles with a gradient and
    // without one, and kernels without sums go through one index.
    if (must_sum_ && plan_.sum_of != SumOf::kRow && turns == walks) {
      plan_.tile_summed =
          std::clamp<int64_t>(std::min(share, most) / turns, 1, std::max<int64_t>(plan_.summed, 1));
    }
    const int64_t walk_tiles = ceil_div(walks, turns);
    // The turns of a walk are dealt out to its tiles, turn i to tile i % walk_tiles, so that what
    // blocks read and write at a time lies together. In a longer walk than kMostDealt each tile has
    // turns that follow one another.
    const bool is_dealt = size <= kMostDealt;
    const int64_t apart = is_dealt ? 1 : turns;  // turns from a tile's first to the next tile's
    plan_.tile_turns = static_cast<int32_t>(turns);
    plan_.walk_turn = static_cast<int32_t>(steps * (is_dealt ? walk_tiles : 1)) * plan_.walk_step;
    plan_.tile_walked = walks_columns ? 1 : apart * at_once;
    plan_.tile_columns = walks_columns ? apart * at_once : plan_.strip_columns;
    Extents& tiles = plan_.tile_extents;
    tiles.add(walks_columns ? walk_tiles : strips);
    tiles.add(walks_columns ? 1 : walk_tiles);
    tiles.add(kept);
    tiles.add(ceil_div(plan_.summed, plan_.tile_summed));
    tiles.set_divisors();
    plan_.tiles = 0;
    if (layout_->space().numel > 0) {
      plan_.tiles = tiles.sizes[0] * tiles.sizes[1] * tiles.sizes[2] * tiles.sizes[3];
    }
  }

  void count_sums(Which gradient) {
    plan_.summed_gradient = gradient;
    for (int dim = 0; dim < plan_.extents.ndim; ++dim) {
      plan_.sums *= plan_.is_kept(dim) ? plan_.extents.sizes[dim] : 1;
    }
    const Extents& tiles = plan_.tile_extents;
    plan_.splits = (plan_.sum_of != SumOf::kColumn ? tiles.sizes[0] : 1) *
                   (plan_.sum_of != SumOf::kRow ? tiles.sizes[1] : 1) * tiles.sizes[3];
  }

  const Layout* layout_;
  const Operand* operands_;
  bool has_near_columns_;
  bool sums_ = false;
  bool must_sum_ = false;
  bool along_[kMaxDims] = {};  // dimensions along which a gradient is summed
  int walk_dim_ = -1;          // one of them
  StripPlan plan_;
};

}  // namespace lossops::cuda
