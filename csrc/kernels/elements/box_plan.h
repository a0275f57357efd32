// How the elements of operands are dealt out that disagree on which dimension is contiguous. Host
// code without CUDA; kernels read the plan by tiles.h.
//
// Two dimensions, columns and rows, make matrices; the others number these. A box has some columns
// and rows of a matrix, or of several matrices that follow each other along dimension 2. A thread
// has an element a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>

#include "kernels/elements/plan.h"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// Elements of a thread, and of a box, at the most.
constexpr int kBoxSteps = 8;
constexpr int kBoxElements = kBoxSteps * kTileThreads;
// Columns, rows, matrices.
constexpr int kBoxDims = 3;
// Narrower matrices are for strips.
constexpr int64_t kLeastBoxSide = 2;
// Boxes that a block works out at once. With 8, forward passes of half types are a twentieth faster
// on an H200, but what writes is up to a third slower: neighbours are written less closely in time.
constexpr int kBoxesOfTile = 4;
// Of shared memory: see BoxPlan::cells.
constexpr int kBoxCells = kBoxElements + kBoxElements / kLeastBoxSide;

struct BoxOperand : PlanOperand {
  bool is_transposed = false;  // its neighbours are those of a column
  int64_t step_stride = 0;     // from a thread's step to the next one, in bytes
};

// How a block's threads take a box. Threads side by side have neighbours along columns, or along
// rows. A thread takes kBoxSteps elements along `walked`; its place says where the first one is.
struct BoxOrder {
  int32_t walked = 0;
  int32_t size = 0;      // of the box along it: at least kBoxSteps
  int32_t distance = 1;  // from step to step
  int32_t threads = 0;   // that have a place
  Divisor near;          // places along the side of neighbours, and along the other one
  Divisor far;
  int32_t step_cells = 0;  // from a step's cell to the next one's

  // Where the elements of a place begin along `walked`. Distance 1: they are neighbours, and the
  // last place begins earlier if fewer are left. Above 1: places are neighbours, and a thread's
  // steps are `distance` apart.
  LOSSOPS_HOST_DEVICE int first(int place) const {
    const int begin = place * kBoxSteps;
    const int last = size - kBoxSteps;
    return distance > 1 ? place : begin < last ? begin : last;
  }
  // Several places and steps may have one element. Whether this is the one that counts.
  LOSSOPS_HOST_DEVICE bool counts(int place, int step) const {
    return distance > 1 ? place < distance || step == kBoxSteps - 1
                        : first(place) + step >= place * kBoxSteps;
  }
};

struct BoxPlan : PlanOperands<BoxOperand> {
  // Dimensions 0, 1 and 2 number the boxes along columns, groups of boxes along rows, and the boxes
  // along matrices. The boxes of a group follow each other, so that what lies side by side in
  // memory is read at one time, whichever way an operand lies.
  int64_t boxes = 0;
  int64_t tiles = 0;
  Divisor group;                       // boxes of a group
  int64_t space_sizes[kBoxDims] = {};  // how many there are along these in all
  int32_t sizes[kBoxDims] = {};        // how many a box has
  BoxOrder orders[2];                  // of straight operands, and of transposed ones
  // Where an element is while a box is turned from one order to the other: how far it is to the
  // next column, row and matrix. The neighbours of the short side are neighbours, those of the
  // other one an odd distance apart: few threads of a warp share a bank.
  int32_t cells[kBoxDims] = {};
};

// Makes a BoxPlan.
class BoxPlanner {
 public:
  BoxPlanner(const Layout& layout, const Operand* operands) : layout_(layout), operands_(operands) {
    if (has_sides()) {
      number();
      choose_sizes();
    }
  }

  bool has_boxes() const { return has_boxes_; }

  // To be called once.
  const BoxPlan& plan() {
    number_boxes();
    set_cells();
    for (const int near : {0, 1}) {
      set_order(near, plan_.orders[near]);
    }
    for (int slot = 0; slot < plan_.num_slots; ++slot) {
      BoxOperand& own = plan_.operands[plan_.slots[slot]];
      const BoxOrder& order = plan_.orders[own.is_transposed ? 1 : 0];
      own.step_stride = order.distance * own.strides[order.walked];
    }
    return plan_;
  }

 private:
  struct Shape {
    int64_t sizes[kBoxDims];
    int walked[2];  // by the orders
  };
  struct Best {
    double cost = std::numeric_limits<double>::infinity();  // there is none
    Shape shape = {};
  };

  bool has_sides() const {
    const IterationSpace& space = layout_.space();
    const int64_t sizes[2] = {space.sizes[layout_.lead()], space.sizes[layout_.other()]};
    return layout_.other() != layout_.lead() && std::min(sizes[0], sizes[1]) >= kLeastBoxSide &&
           std::max(sizes[0], sizes[1]) <= kMaxDividend;
  }

  void number() {
    const IterationSpace& space = layout_.space();
    plan_.set(operands_);
    plan_.add(operands_, space.sizes[layout_.lead()], layout_.lead());
    plan_.add(operands_, space.sizes[layout_.other()], layout_.other());
    for (int dim = 0; dim < space.ndim; ++dim) {
      if (dim != layout_.lead() && dim != layout_.other()) {
        plan_.add(operands_, space.sizes[dim], dim);
      }
    }
    if (plan_.extents.ndim < kBoxDims) {
      plan_.extents.add(1);
    }
    std::copy_n(plan_.extents.sizes, kBoxDims, plan_.space_sizes);
    plan_.for_each(operands_, [&](const Operand& operand, BoxOperand& own) {
      own.is_transposed =
          operand.strides[layout_.other()] == 1 && Layout::is_transposed(operand, layout_.lead());
    });
  }

  // Both orders may walk along one dimension, the other side or matrices, only where a side is not
  // longer than this: else threads side by side have enough neighbours if each order walks across
  // its own.
  static constexpr int64_t kNarrow = 32;

  // Chooses how many columns, rows and matrices a box has, and along what its orders walk: of a few
  // sizes of either side, with all that fits beside it, what costs least.
  void choose_sizes() {
    const int64_t (&all)[kBoxDims] = plan_.space_sizes;
    Best best;
    for (const int first : {0, 1}) {
      // About half powers of two.
      for (const int64_t most : {2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256}) {
        if (most < std::min(all[first], kNarrow / 2)) {
          continue;
        }
        const int64_t size = part(all[first], most, all[first] > 4 * most);
        const int64_t by_own = kTileThreads / places_along(size, false);
        const int64_t by_other = kBoxSteps * (kTileThreads / size);
        if (first == 0 || all[first] <= 2 * kNarrow) {
          consider(first, size, std::min(by_other, by_own), 1, 0, best);
        }
        if (size <= kNarrow) {
          consider(first, size, by_other, 1 - first, 1 - first, best);
          consider(first, size, kTileThreads / size, 2, 2, best);
        }
        if (size == all[first]) {
          break;
        }
      }
    }
    has_boxes_ = std::isfinite(best.cost);
    std::copy(std::begin(best.shape.sizes), std::end(best.shape.sizes), plan_.sizes);
    plan_.orders[0].walked = best.shape.walked[0];
    plan_.orders[1].walked = best.shape.walked[1];
  }

  // A part of a side, at most `most`. Of long sides: `most`, so that parts begin where sectors do
  // if the whole does. Else equal shares, which leave threads for more of the other dimensions.
  static int64_t part(int64_t all, int64_t most, bool is_long) {
    return most >= all ? all : is_long ? most : even_share(all, most);
  }

  // Considers boxes with so many columns (first: 0) or rows (1), and with at most `most_others` of
  // the other. straight, transposed: what the two orders walk along.
  void consider(int first, int64_t size, int64_t most_others, int straight, int transposed,
                Best& best) {
    const int64_t (&all)[kBoxDims] = plan_.space_sizes;
    Shape shape = {{1, 1, 1}, {straight, transposed}};
    shape.sizes[first] = size;
    const bool is_long = most_others >= kNarrow && most_others % kBoxSteps == 0;
    shape.sizes[1 - first] = part(all[1 - first], most_others, is_long);
    const bool walks_matrices = straight == 2;
    if (walks_matrices) {
      shape.sizes[2] = std::min<int64_t>(all[2], kBoxSteps);
    }
    const int64_t threads = std::max(threads_of(shape, 0), threads_of(shape, 1));
    if (threads > kTileThreads) {
      return;
    }
    const int64_t most = kTileThreads / threads * (walks_matrices ? kBoxSteps : 1);
    shape.sizes[2] = even_share(all[2], most);
    if (!can_walk(shape)) {
      return;
    }
    const double cost = cost_of(shape);
    if (cost < best.cost) {
      best = {cost, shape};
    }
  }

  // How far an order's steps are apart along what it walks along, and how many places the first one
  // has there. is_near: that is the side of neighbours.
  static int64_t distance_along(int64_t size, bool is_near) {
    return is_near ? size / kBoxSteps : 1;
  }
  static int64_t places_along(int64_t size, bool is_near) {
    const int64_t distance = distance_along(size, is_near);
    return distance > 1 ? size - distance * (kBoxSteps - 1) : ceil_div(size, int64_t{kBoxSteps});
  }
  // The threads of an order that have a place.
  static int64_t threads_of(const Shape& shape, int near) {
    const int walked = shape.walked[near];
    return shape.sizes[0] * shape.sizes[1] * shape.sizes[2] / shape.sizes[walked] *
           places_along(shape.sizes[walked], walked == near);
  }
  // Whether a thread has all its steps along what is walked, and 31 bits hold how far they are
  // apart, in bytes.
  bool can_walk(const Shape& shape) {
    bool can = true;
    for (const int near : {0, 1}) {
      const int walked = shape.walked[near];
      const int64_t distance = distance_along(shape.sizes[walked], walked == near);
      can = can && shape.sizes[walked] >= kBoxSteps;
      plan_.for_each(operands_, [&](const Operand& /*operand*/, const BoxOperand& own) {
        can = can && (own.is_transposed != (near == 1) ||
                      distance * std::abs(own.strides[walked]) <= kMaxDividend);
      });
    }
    return can;
  }

  // What boxes of a shape cost: three accesses for each step of their threads, and a share of the
  // runs of neighbours in which elements lie. A run of n elements costs as much as n + kRun
  // accesses (docs/experiments/elementwise.md).
  double cost_of(const Shape& shape) const {
    constexpr double kRun = 16;
    double boxes = 1;
    for (int dim = 0; dim < kBoxDims; ++dim) {
      boxes *= static_cast<double>(ceil_div(plan_.space_sizes[dim], shape.sizes[dim]));
    }
    // Where no losses are written, the gradient of the input counts, which lies as the input does.
    // Whether a caller wants it makes no difference: plans are the same with gradients and without.
    const Which written = operands_[kOutput].data != nullptr ? kOutput : kInput;
    double runs = 0;
    for (const Which which : {kInput, kTarget, written}) {
      runs += runs_of(plan_.operands[which], shape);
    }
    return boxes * (3 * kBoxElements + kRun * runs);
  }

  // In how many runs the threads of each step take a box of an operand, all steps together.
  double runs_of(const BoxOperand& operand, const Shape& shape) const {
    const int near = operand.is_transposed ? 1 : 0;
    const int walked = shape.walked[near];
    double runs = 1;
    int64_t joined = operand.bytes;  // the stride of what would lie behind a run
    for (const int dim : {near, 1 - near, 2}) {
      const int64_t size = shape.sizes[dim];
      const bool joins = operand.strides[dim] == joined;
      const bool is_whole = size == plan_.space_sizes[dim] && dim != walked;
      runs *= static_cast<double>(!joins          ? size
                                  : dim == walked ? std::min<int64_t>(size, kBoxSteps)
                                                  : 1);
      joined = joins && is_whole ? joined * size : 0;
    }
    return runs;
  }

  void number_boxes() {
    const auto boxes_along = [&](int dim) {
      return ceil_div(plan_.space_sizes[dim], int64_t{plan_.sizes[dim]});
    };
    const int64_t group = even_share(boxes_along(1), kBoxesOfTile);
    plan_.group = Divisor(static_cast<uint32_t>(group));
    Extents& extents = plan_.extents;
    for (int dim = 0; dim < kBoxDims; ++dim) {
      extents.sizes[dim] = ceil_div(boxes_along(dim), dim == 1 ? group : 1);
    }
    extents.set_divisors();
    plan_.boxes = group;
    for (int dim = 0; dim < extents.ndim; ++dim) {
      plan_.boxes *= extents.sizes[dim];
    }
    plan_.tiles = ceil_div(plan_.boxes, kBoxesOfTile);
  }

  void set_cells() {
    const int short_side = plan_.sizes[1] < plan_.sizes[0] ? 1 : 0;
    plan_.cells[short_side] = 1;
    plan_.cells[1 - short_side] = plan_.sizes[short_side] | 1;
    plan_.cells[2] = plan_.sizes[1 - short_side] * plan_.cells[1 - short_side];
  }

  void set_order(int near, BoxOrder& order) const {
    const bool is_near = order.walked == near;
    order.size = plan_.sizes[order.walked];
    order.distance = static_cast<int32_t>(distance_along(order.size, is_near));
    order.step_cells = order.distance * plan_.cells[order.walked];
    int64_t places[kBoxDims];  // columns, rows and matrices of the first step
    std::copy(std::begin(plan_.sizes), std::end(plan_.sizes), places);
    places[order.walked] = places_along(order.size, is_near);
    order.threads = static_cast<int32_t>(places[0] * places[1] * places[2]);
    order.near = Divisor(static_cast<uint32_t>(places[near]));
    order.far = Divisor(static_cast<uint32_t>(places[1 - near]));
  }

  const Layout& layout_;
  const Operand* const operands_;
  BoxPlan plan_;
  bool has_boxes_ = false;
};

}  // namespace lossops::cuda
