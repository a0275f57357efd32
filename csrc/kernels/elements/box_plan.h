// How the elements of operands are dealt out that disagree on which dimension is contiguous. Host
// code without CUDA; kernels read the plan by tiles.h.
//
// Two dimensions, columns and rows, make matrices; the others number these. Both are cut into units
// of kBoxUnit, and a tile is up to kBoxesOfTile boxes, one after another along the rows. If fewer
// are left for the last unit of a side, it begins earlier and shares elements with the one before.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// Elements of a unit.
constexpr int kBoxUnit = 4;
// A box has 2^kBoxShift units of columns times units of rows. Its sides are powers of two.
constexpr int kBoxShift = 7;
constexpr int kBoxElements = (kBoxUnit * kBoxUnit) << kBoxShift;
// Boxes of a tile, at the most. A choice, not measured.
constexpr int kBoxesOfTile = 4;

struct BoxOperand : PlanOperand {
  bool is_transposed = false;  // its neighbours are those of a column
};

struct BoxPlan : PlanOperands<BoxOperand> {
  // Dimensions 0 and 1 number the tiles along the columns and the rows of a matrix.
  int64_t tiles = 0;
  int32_t shifts[2] = {};        // logarithms of the sides of a box in units, to base 2
  int32_t matrix_units[2] = {};  // of columns and rows
  int32_t matrix_last[2] = {};   // where the last unit of each begins
};

// Makes a BoxPlan.
class BoxPlanner {
 public:
  BoxPlanner(const Layout& layout, const Operand* operands)
      : layout_(layout), operands_(operands), has_boxes_(chooses_boxes()) {}

  bool has_boxes() const { return has_boxes_; }

  // To be called once.
  const BoxPlan& plan() {
    const IterationSpace& space = layout_.space();
    const int lead = layout_.lead();
    const int other = layout_.other();
    plan_.set(operands_);
    plan_.add(operands_, space.sizes[lead], lead);
    plan_.add(operands_, space.sizes[other], other);
    for (int dim = 0; dim < space.ndim; ++dim) {
      if (dim != lead && dim != other) {
        plan_.add(operands_, space.sizes[dim], dim);
      }
    }
    plan_.for_each(operands_, [&](const Operand& operand, BoxOperand& own) {
      own.is_transposed = operand.strides[other] == 1 && Layout::is_transposed(operand, lead);
      own.kind = kind_of(own, own.is_transposed ? 1 : 0);
    });
    Extents& extents = plan_.extents;
    extents.sizes[0] = ceil_div(plan_.matrix_units[0], int64_t{1} << plan_.shifts[0]);
    extents.sizes[1] = ceil_div(plan_.matrix_units[1], int64_t{kBoxesOfTile} << plan_.shifts[1]);
    plan_.tiles = space.numel > 0 ? 1 : 0;
    for (int dim = 0; dim < extents.ndim; ++dim) {
      plan_.tiles *= extents.sizes[dim];
    }
    extents.set_divisors();
    return plan_;
  }

 private:
  // Chooses the sides of boxes that the two dimensions fill best. Returns whether they fill at
  // least half of the boxes. Rows are faster for matrices that fill less: these are so small that
  // the cache holds what a warp reads across the rows (docs/experiments/elementwise.md).
  bool chooses_boxes() {
    const IterationSpace& space = layout_.space();
    const int64_t sizes[2] = {space.sizes[layout_.lead()], space.sizes[layout_.other()]};
    if (layout_.other() == layout_.lead() || std::min(sizes[0], sizes[1]) < kBoxUnit ||
        std::max(sizes[0], sizes[1]) > kMaxDividend || !are_near(operands_, layout_.lead())) {
      return false;
    }
    int64_t units[2];
    for (int i = 0; i < 2; ++i) {
      units[i] = ceil_div(sizes[i], kBoxUnit);
      plan_.matrix_units[i] = static_cast<int32_t>(units[i]);
      plan_.matrix_last[i] = static_cast<int32_t>(sizes[i] - kBoxUnit);
    }
    const auto padded = [&](int i, int shift) { return (((units[i] - 1) >> shift) + 1) << shift; };
    int64_t least = 0;
    // Of sides that are filled alike, the first are chosen: those nearest to a square.
    for (const int shift : {4, 3, 5, 2}) {
      const int64_t filled = padded(0, shift) * padded(1, kBoxShift - shift);
      if (least == 0 || filled < least) {
        least = filled;
        plan_.shifts[0] = shift;
        plan_.shifts[1] = kBoxShift - shift;
      }
    }
    return 2 * sizes[0] * sizes[1] >= kBoxUnit * kBoxUnit * least;
  }

  // dim: that of the plan along which the operand's units lie.
  UnitKind kind_of(const BoxOperand& own, int dim) const {
    if (own.strides[dim] == 0) {
      return UnitKind::kOne;
    }
    if (own.strides[dim] != own.bytes) {
      return UnitKind::kStrided;
    }
    // Rows that are no whole units have one that is not aligned, and a warp with that unit reads
    // twice. From so many columns on, those warps are few. A choice, not measured.
    constexpr int64_t kLongRow = 2048;
    const int64_t size = plan_.extents.sizes[dim];
    const int64_t bytes = int64_t{kBoxUnit} * own.bytes;
    bool is_aligned = reinterpret_cast<uintptr_t>(own.data) % bytes == 0 &&
                      (size % kBoxUnit == 0 || size >= kLongRow);
    for (int other = 0; other < plan_.extents.ndim; ++other) {
      is_aligned = is_aligned && (other == dim || own.strides[other] % bytes == 0);
    }
    return is_aligned ? UnitKind::kVector : UnitKind::kStrided;
  }

  const Layout& layout_;
  const Operand* const operands_;
  BoxPlan plan_;
  bool has_boxes_;
};

}  // namespace lossops::cuda
