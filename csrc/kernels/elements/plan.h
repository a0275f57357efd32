// How elements of any layout are dealt out to threads. Host code without CUDA; kernels read the
// plan by tiles.h.
//
// An ElementPlan serves operands that no MatrixPlan serves: more than two dimensions, fp64,
// weights, columns that are far apart, and boxes. One dimension is that of the columns, along which
// operands are read; the others number the rows. A unit is a few columns of a row, which a thread
// has. They follow each other where all operands can be read by vectors; else they are further
// apart, so that a warp reads neighbours each time: a group of units has a stretch of columns, and
// they take turns. If a row is no whole groups, its last group begins further ahead and shares
// columns with the one before: so whatever a unit reads is there, and what it writes twice is the
// same. Units are numbered row by row, and a tile is so many of them.
//
// Where operands disagree on which dimension is contiguous, rows are cut into units as well, and a
// tile is a box of both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "kernels/elements/matrix_plan.h"
#include "kernels/primitives/sizes.h"

namespace lossops::cuda {

// A box has 2^kBoxShift units of columns times units of rows. Its sides are powers of two.
constexpr int kBoxShift = 7;
constexpr int kBoxElements = (kQuad * kQuad) << kBoxShift;
// Boxes of a tile, at the most. A choice, not measured.
constexpr int kBoxesOfTile = 4;

// How a unit of an operand lies in memory.
enum class UnitKind : int8_t {
  kVector,   // an aligned vector; if a row is no whole units, its last one is not aligned
  kOne,      // one number
  kStrided,  // at equal distances
};

// An operand, as plans number its elements. Strides are in bytes, and [0] is that of the columns.
struct PlanOperand {
  char* data = nullptr;  // null: absent
  int64_t strides[kPlanDims] = {};
  DType dtype = DType::kFloat32;
  int32_t bytes = 4;  // of an element
  UnitKind kind = UnitKind::kStrided;
  bool is_turned = false;  // its neighbours are those of a column: see boxes
  int8_t slot = 0;         // its number among those that are there
};

struct ElementPlan {
  // Dimension 0 numbers the units of a row, or its tiles where rows are cut; the others number the
  // rows. Where there are boxes, dimensions 0 and 1 number the tiles along the columns and the rows
  // of a matrix.
  Extents extents;
  PlanOperand operands[kNumOperands];
  int8_t slots[kNumOperands] = {};  // which operands are there
  int32_t num_slots = 0;
  bool has_boxes = false;
  bool cuts_rows = false;  // each tile lies in one row
  int32_t width = 1;       // columns of a unit
  int32_t spread = 1;      // how many columns they are apart, and units of a group: a power of two

  int64_t columns = 1;
  int64_t row_units = 1;
  Divisor row_divisor;  // of row_units; where rows are cut, of more than any tile has
  int64_t units = 0;    // of all rows
  int32_t tile_units = 1;
  int32_t tile_rows = 1;  // rows that a tile has a part of, at the most
  int64_t tiles = 0;

  int32_t box_shifts[2] = {};    // logarithms of the sides of a box in units, to base 2
  int32_t matrix_units[2] = {};  // of columns and rows
  int32_t matrix_last[2] = {};   // where the last unit of each begins

  // Of what a block works out for a tile, and for the next one: an address for each row and
  // operand.
  int64_t table_bytes() const {
    return int64_t{2} * tile_rows * num_slots * static_cast<int64_t>(sizeof(char*));
  }
};

// Makes an ElementPlan.
class ElementPlanner {
 public:
  // operands: kNumOperands of them; null data: absent. may_pack: the plan may have boxes and units
  // of several columns.
  ElementPlanner(const IterationSpace& space, const Operand* operands, bool may_pack)
      : space_(space), operands_(operands), may_pack_(may_pack) {
    if (space_.ndim == 0 || space_.numel == 0) {
      space_.ndim = 1;
      space_.sizes[0] = 1;
    }
    lead_ = leading_dim(0, [](const Operand& /*operand*/) { return true; });
    other_ = leading_dim(lead_, [&](const Operand& operand) { return is_turned(operand, lead_); });
    for_each_operand(operands_, plan_.operands, [&](const Operand& operand, PlanOperand& own) {
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.bytes = static_cast<int32_t>(element_size(operand.dtype));
      own.slot = static_cast<int8_t>(plan_.num_slots);
      plan_.slots[plan_.num_slots++] = static_cast<int8_t>(&operand - operands_);
    });
    plan_.columns = space_.sizes[lead_];
    plan_.has_boxes = may_pack_ && chooses_boxes();
  }

  bool has_boxes() const { return plan_.has_boxes; }
  // In rows of 4 to 7 columns many columns would belong to two units. A choice, not measured.
  bool has_quads() const { return may_pack_ && plan_.columns >= 2 * kQuad && has_near_columns(); }
  // Whether two dimensions tell where elements lie: see matrix_plan.h.
  bool is_matrix() const {
    return may_pack_ && space_.ndim <= 2 && has_near_columns() && has_long_chunks();
  }
  MatrixPlan matrix() const { return MatrixPlanner(space_, operands_, lead_).plan(); }

  // To be called once. width: of a unit. at_once: units that a block takes at a time; boxes do not
  // ask.
  const ElementPlan& plan(int width, int at_once) {
    plan_.width = width;
    add(plan_.columns, lead_);
    if (plan_.has_boxes) {
      add(space_.sizes[other_], other_);
    }
    for (int dim = 0; dim < space_.ndim; ++dim) {
      if (dim != lead_ && !(plan_.has_boxes && dim == other_)) {
        add(space_.sizes[dim], dim);
      }
    }
    bool are_vectors = true;
    for_each_operand(operands_, plan_.operands, [&](const Operand& operand, PlanOperand& own) {
      own.is_turned = plan_.has_boxes && operand.strides[other_] == 1 && is_turned(operand, lead_);
      own.kind = kind_of(operand, own, own.is_turned ? 1 : 0);
      // Gradients do not count, so that elements are numbered alike with them and without them.
      const bool is_gradient = &operand - operands_ > kOutput;
      are_vectors = are_vectors && (is_gradient || own.kind != UnitKind::kStrided);
    });
    if (plan_.has_boxes) {
      number_boxes();
    } else {
      if (width > 1 && !are_vectors) {
        spread();
      }
      number_units(at_once);
    }
    plan_.extents.set_divisors();
    return plan_;
  }

 private:
  // The dimension along which most bytes that are read are neighbours; of several such dimensions,
  // the longest. Operands that are written do not count, so a plan is the same with a gradient and
  // without one. counts(operand): whether one does that is read. If none does, it is `otherwise`.
  template <typename Counts>
  int leading_dim(int otherwise, const Counts& counts) {
    int found = otherwise;
    int64_t most = 0;
    for (int dim = 0; dim < space_.ndim; ++dim) {
      int64_t bytes = 0;
      for (int which = kInput; which <= kGradOutput; ++which) {
        const Operand& operand = operands_[which];
        if (operand.data != nullptr && operand.strides[dim] == 1 && counts(operand)) {
          // Caches hold most of a broadcast operand, so its bytes count a 16th. A choice, not
          // measured.
          constexpr int64_t kMore = 16;
          bytes += element_size(operand.dtype) * (is_broadcast(operand) ? 1 : kMore);
        }
      }
      const bool is_longer = bytes == most && space_.sizes[dim] > space_.sizes[found];
      if (bytes > 0 && space_.sizes[dim] > 1 && (bytes > most || is_longer)) {
        most = bytes;
        found = dim;
      }
    }
    return found;
  }

  // Whether 31 bits hold the distance of the columns of a unit, in bytes. Elements have at most 4.
  bool has_near_columns() const {
    constexpr int64_t kMostBytes = 4;
    bool are_near = true;
    for (int which = 0; which < kNumOperands; ++which) {
      const Operand& operand = operands_[which];
      const int64_t stride = operand.data != nullptr ? std::abs(operand.strides[lead_]) : 0;
      are_near = are_near && stride <= kMaxDividend / kWarpSize / kMostBytes;
    }
    return are_near;
  }

  // Whether a chunk of a matrix has enough for a tile. It is one row where a gap has more than 31
  // bits. Gradients do not count, so that elements are numbered alike with them and without them.
  bool has_long_chunks() const {
    constexpr int64_t kLongChunk = 2048;
    bool are_long = plan_.columns >= kLongChunk || space_.ndim < 2;
    if (!are_long) {
      are_long = true;
      for (int which = 0; which <= kOutput; ++which) {
        const Operand& operand = operands_[which];
        if (operand.data != nullptr) {
          const int64_t gap = operand.strides[1 - lead_] - plan_.columns * operand.strides[lead_];
          const int64_t bytes = element_size(operand.dtype);
          are_long = are_long && std::abs(gap) <= kMaxDividend / bytes;
        }
      }
    }
    return are_long;
  }

  bool is_broadcast(const Operand& operand) const {
    return std::any_of(operand.strides, operand.strides + space_.ndim,
                       [](int64_t stride) { return stride == 0; });
  }
  static bool is_turned(const Operand& operand, int lead) {
    return operand.strides[lead] != 0 && operand.strides[lead] != 1;
  }

  // Chooses the sides of boxes that the two dimensions fill best. Returns whether they fill at
  // least half of the boxes. Rows are faster for matrices that fill less: these are so small that
  // the cache holds what a warp reads across the rows (docs/experiments/elementwise.md).
  bool chooses_boxes() {
    const int64_t sizes[2] = {space_.sizes[lead_], space_.sizes[other_]};
    if (other_ == lead_ || std::min(sizes[0], sizes[1]) < kQuad ||
        std::max(sizes[0], sizes[1]) > kMaxDividend || !has_near_columns()) {
      return false;
    }
    int64_t units[2];
    for (int i = 0; i < 2; ++i) {
      units[i] = ceil_div(sizes[i], kQuad);
      plan_.matrix_units[i] = static_cast<int32_t>(units[i]);
      plan_.matrix_last[i] = static_cast<int32_t>(sizes[i] - kQuad);
    }
    const auto padded = [&](int i, int shift) { return (((units[i] - 1) >> shift) + 1) << shift; };
    int64_t least = 0;
    // Of sides that are filled alike, the first are chosen: those nearest to a square.
    for (const int shift : {4, 3, 5, 2}) {
      const int64_t filled = padded(0, shift) * padded(1, kBoxShift - shift);
      if (least == 0 || filled < least) {
        least = filled;
        plan_.box_shifts[0] = shift;
        plan_.box_shifts[1] = kBoxShift - shift;
      }
    }
    return 2 * sizes[0] * sizes[1] >= kQuad * kQuad * least;
  }

  // dim: that of the plan along which the operand's units lie.
  UnitKind kind_of(const Operand& operand, const PlanOperand& own, int dim) const {
    const int64_t size = space_.sizes[dim == 0 ? lead_ : other_];
    if (own.strides[dim] == 0) {
      return UnitKind::kOne;
    }
    if (own.strides[dim] != own.bytes || plan_.width == 1) {
      return UnitKind::kStrided;
    }
    // Rows that are no whole units have one that is not aligned, and a warp with that unit reads
    // twice. From so many columns on, those warps are few. A choice, not measured.
    constexpr int64_t kLongRow = 2048;
    const int64_t bytes = plan_.width * own.bytes;
    bool is_aligned = reinterpret_cast<uintptr_t>(operand.data) % bytes == 0 &&
                      (size % plan_.width == 0 || size >= kLongRow);
    for (int other = 0; other < plan_.extents.ndim; ++other) {
      is_aligned = is_aligned && (other == dim || own.strides[other] % bytes == 0);
    }
    return is_aligned ? UnitKind::kVector : UnitKind::kStrided;
  }

  // Chooses how far the columns of a unit are apart: as far as groups fill rows well.
  void spread() {
    // A choice, not measured: up to an eighth of the columns may belong to two groups.
    constexpr int64_t kShare = 8;
    plan_.spread = kWarpSize;
    const auto fills = [&] {
      const int64_t group = int64_t{plan_.width} * plan_.spread;
      const int64_t shared = ceil_div(plan_.columns, group) * group - plan_.columns;
      return group <= plan_.columns && shared * kShare <= plan_.columns;
    };
    while (plan_.spread > 1 && !fills()) {
      plan_.spread /= 2;
    }
    for_each_operand(operands_, plan_.operands, [&](const Operand& /*operand*/, PlanOperand& own) {
      own.kind = own.kind == UnitKind::kOne ? own.kind : UnitKind::kStrided;
    });
  }

  // Adds a dimension to the plan.
  void add(int64_t size, int dim) {
    for_each_operand(operands_, plan_.operands, [&](const Operand& operand, PlanOperand& own) {
      own.strides[plan_.extents.ndim] = operand.strides[dim] * own.bytes;
    });
    plan_.extents.add(size);
  }

  void number_boxes() {
    Extents& extents = plan_.extents;
    extents.sizes[0] = ceil_div(plan_.matrix_units[0], int64_t{1} << plan_.box_shifts[0]);
    extents.sizes[1] =
        ceil_div(plan_.matrix_units[1], int64_t{kBoxesOfTile} << plan_.box_shifts[1]);
    plan_.tiles = count();
  }

  int64_t count() const {
    int64_t count = space_.numel > 0 ? 1 : 0;
    for (int dim = 0; dim < plan_.extents.ndim; ++dim) {
      count *= plan_.extents.sizes[dim];
    }
    return count;
  }

  void number_units(int at_once) {
    const int64_t group = int64_t{plan_.width} * plan_.spread;
    plan_.row_units = ceil_div(plan_.columns, group) * plan_.spread;
    plan_.extents.sizes[0] = plan_.row_units;
    plan_.units = count();
    // A block works out some numbers once a tile, so tiles are long. They are shorter where there
    // are few tiles, or many rows in each. A choice, not measured.
    constexpr int kMostTurns = 4;
    constexpr int64_t kManyTiles = 2048;
    constexpr int64_t kManyRows = 411;  // their tables fit in the 48 KB that kernels get unasked
    for (int turns = kMostTurns; turns > 0; turns /= 2) {
      plan_.tile_units = turns * at_once;
      plan_.tiles = ceil_div(plan_.units, plan_.tile_units);
      plan_.tile_rows = static_cast<int32_t>(std::min<int64_t>(
          (plan_.tile_units - 2) / plan_.row_units + 2, plan_.units / plan_.row_units));
      if (plan_.tiles >= kManyTiles && plan_.tile_rows <= kManyRows) {
        break;
      }
    }
    // Numbers in a tile have 31 bits, so tiles do not cross the ends of rows that are so long.
    // Their last tile is not full.
    constexpr int64_t kCutRow = int64_t{1} << 22;
    if (plan_.row_units >= kCutRow) {
      plan_.cuts_rows = true;
      plan_.tile_rows = 1;
      const int64_t pieces = ceil_div(plan_.row_units, plan_.tile_units);
      plan_.tiles = plan_.units / plan_.row_units * pieces;
      plan_.extents.sizes[0] = pieces;
    }
    plan_.row_divisor =
        Divisor(static_cast<uint32_t>(plan_.cuts_rows ? kMaxDividend : plan_.row_units));
  }

  IterationSpace space_;
  const Operand* const operands_;
  const bool may_pack_;
  int lead_ = 0;   // the dimension of the space along which rows lie
  int other_ = 0;  // the dimension along which rows of turned operands lie; lead_: there are none
  ElementPlan plan_;
};

}  // namespace lossops::cuda
