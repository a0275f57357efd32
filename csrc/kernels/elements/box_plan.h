// How the elements of operands are dealt out that disagree on which dimension is contiguous. Host
// code without CUDA; kernels read the plan by tiles.h.
//
// Two dimensions, columns and rows, make matrices; the others number these. A tile is up to
// kBoxesOfTile boxes, one after another along the rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/elements/plan.h"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// A box has 2^kBoxShift elements. Its sides are powers of two.
constexpr int kBoxShift = 11;
constexpr int kBoxElements = 1 << kBoxShift;
// Elements of a thread: neighbours along the far side.
constexpr int kBoxStepsShift = kBoxShift - kTileShift;
constexpr int kBoxSteps = 1 << kBoxStepsShift;
// 2^kLeastBoxShift is the shortest side: at least one thread's elements.
constexpr int kLeastBoxShift = kBoxStepsShift;
// Narrower matrices are for strips.
constexpr int64_t kLeastBoxSide = 4;
// Boxes of a tile, at the most. A choice, not measured.
constexpr int kBoxesOfTile = 4;

struct BoxOperand : PlanOperand {
  bool is_transposed = false;  // its neighbours are those of a column
  int32_t far_stride = 0;      // in bytes, from its neighbours to those beside them
};

// Side 0 of a box is along the columns of a matrix, side 1 along its rows. Neighbouring threads
// have neighbouring elements along a side, the near one, and each thread has kBoxSteps along the
// other side, the far one.
struct BoxPlan : PlanOperands<BoxOperand> {
  // Dimensions 0 and 1 number the tiles along the columns and the rows of a matrix.
  int64_t tiles = 0;
  int32_t shifts[2] = {};        // logarithms of the sides of a box, to base 2
  int32_t matrix_sizes[2] = {};  // columns and rows
  int32_t sizes[2] = {};         // of what a box has of these: less than its side if the matrix has

  // Where a box begins along a side. nominal: its number times its side. If less is left for the
  // last box than a side, it begins earlier, and repeats elements of the one before.
  LOSSOPS_HOST_DEVICE int begin(int side, int nominal) const {
    const int last = matrix_sizes[side] - sizes[side];
    return nominal < last ? nominal : last;
  }
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
      own.is_transposed = is_transposed(operand);
      const int side = own.is_transposed ? 1 : 0;
      own.far_stride = static_cast<int32_t>(own.strides[1 - side]);
    });
    Extents& extents = plan_.extents;
    extents.sizes[0] = ceil_div(plan_.matrix_sizes[0], int64_t{1} << plan_.shifts[0]);
    extents.sizes[1] = ceil_div(plan_.matrix_sizes[1], int64_t{kBoxesOfTile} << plan_.shifts[1]);
    plan_.tiles = space.numel > 0 ? 1 : 0;
    for (int dim = 0; dim < extents.ndim; ++dim) {
      plan_.tiles *= extents.sizes[dim];
    }
    extents.set_divisors();
    return plan_;
  }

 private:
  // Chooses the sides of boxes among those that the two dimensions fill at least half. Returns
  // whether there are any. Rows are faster for matrices that fill less: these are so small that the
  // cache holds what a warp reads across the rows (docs/experiments/elementwise.md).
  bool chooses_boxes() {
    const IterationSpace& space = layout_.space();
    const int64_t sizes[2] = {space.sizes[layout_.lead()], space.sizes[layout_.other()]};
    if (layout_.other() == layout_.lead() || std::min(sizes[0], sizes[1]) < kLeastBoxSide ||
        std::max(sizes[0], sizes[1]) > kMaxDividend || !are_near(operands_, layout_.lead()) ||
        !are_near(operands_, layout_.other())) {
      return false;
    }
    double least = 0;
    // Sides that are nearly a square come first: of those that cost the same, the first are chosen.
    for (const int shift : {5, 6, 4, 7, kLeastBoxShift, kBoxShift - kLeastBoxShift}) {
      const int shifts[2] = {shift, kBoxShift - shift};
      const int64_t filled =
          round_up(sizes[0], int64_t{1} << shifts[0]) * round_up(sizes[1], int64_t{1} << shifts[1]);
      if (filled > 2 * sizes[0] * sizes[1]) {
        continue;
      }
      const double cost = static_cast<double>(filled) * cost_of_element(sizes, shifts);
      if (least == 0 || cost < least) {
        least = cost;
        std::copy(std::begin(shifts), std::end(shifts), plan_.shifts);
      }
    }
    for (int i = 0; i < 2; ++i) {
      plan_.matrix_sizes[i] = static_cast<int32_t>(sizes[i]);
      plan_.sizes[i] = std::min(plan_.matrix_sizes[i], 1 << plan_.shifts[i]);
    }
    return least > 0;
  }

  // What an element of a box costs: three accesses, and a share of the runs of neighbours in which
  // they lie. A run of n elements costs as much as n + kRun accesses: fitted to times of an H100
  // (docs/experiments/elementwise.md).
  double cost_of_element(const int64_t (&sizes)[2], const int (&shifts)[2]) const {
    constexpr double kRun = 32;
    const auto cost = [&](Which which) {
      const int side = is_transposed(operands_[which]) ? 1 : 0;
      const int64_t run = std::min(sizes[side], int64_t{1} << shifts[side]);
      return 1 + kRun / static_cast<double>(run);
    };
    // Where no losses are written, the gradient of the input counts, which lies as the input does.
    // Whether a caller wants it makes no difference: plans are the same with gradients and without.
    const Which written = operands_[kOutput].data != nullptr ? kOutput : kInput;
    return cost(kInput) + cost(kTarget) + cost(written);
  }
  bool is_transposed(const Operand& operand) const {
    return operand.strides[layout_.other()] == 1 && Layout::is_transposed(operand, layout_.lead());
  }

  const Layout& layout_;
  const Operand* const operands_;
  BoxPlan plan_;
  bool has_boxes_;
};

}  // namespace lossops::cuda
