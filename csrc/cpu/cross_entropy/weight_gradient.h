// The gradient of class weights.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/gradient_terms.h"
#include "cpu/parallel.h"
#include "cpu/thread_buffers.h"

namespace lossops::cpu {
namespace {

// The classes are cut into tiles, the rows into splits; a task sums one tile over one
// split. Probability targets only.
struct WeightPlan {
  int64_t tiles = 0;
  int64_t splits = 1;
  int64_t rows_per_split = 0;

  explicit WeightPlan(const CrossEntropyBackwardArgs& args) {
    const int64_t rows = args.rows.numel;
    tiles = divide_up(args.num_classes, kBlock);
    if (tiles > 0) {
      const int64_t chunks = std::max<int64_t>(divide_up(rows * kBlock, kChunk), 1);
      splits = std::clamp<int64_t>(kMaxTasks / tiles, 1, chunks);
    }
    rows_per_split = divide_up(rows, splits);
  }
};

// sums[c - first_class] = sum over rows [begin, end) of g p'_c (lse - x_c).
template <typename acc_t>
LOSSOPS_HOST_DEVICE void sum_weight_gradient(const CrossEntropyBackwardArgs& args,
                                             const Coefficients<acc_t>& coefficients,
                                             int64_t first_class, int64_t begin, int64_t end,
                                             double* sums) {
  BlockWalker<3> walker(args.rows, {&args.input, &args.target, &args.grad_output}, begin);
  const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - first_class));
  const int width = padded(count);
  acc_t x_buffer[kBlock];
  acc_t p[kBlock];
  double lanes[kBlock] = {};
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first_row = begin; first_row < end; first_row += kBlock) {
    const int row_count = static_cast<int>(std::min<int64_t>(kBlock, end - first_row));
    walker.next(row_count);
    rows.load(args, coefficients, walker[1], walker[2], first_row, row_count);
    for (int row = 0; row < row_count; ++row) {
      const acc_t* x = view_block(
          args.input, classes_of_row(walker[0][row], args.input_class_stride, first_class), count,
          x_buffer);
      coefficients.load_probabilities(
          classes_of_row(walker[1][row], args.target_class_stride, first_class), count, p);
      for (int j = 0; j < width; ++j) {
        const acc_t term = rows.scale[row] * p[j] * rows.softmax(row).surprise(x[j]);
        lanes[j] += static_cast<double>(p[j] == acc_t(0) ? acc_t(0) : term);
      }
    }
  }
  std::copy_n(lanes, count, sums);
}

template <typename acc_t>
void weight_gradient(const CrossEntropyBackwardArgs& args, const Coefficients<acc_t>& coefficients,
                     double* scratch, Context context) {
  const WeightPlan plan(args);
  parallel_for_each(context, plan.tiles * plan.splits, [&](int64_t task) {
    const int64_t split = task / plan.tiles;
    const int64_t first_class = task % plan.tiles * kBlock;
    const int64_t begin = std::min(split * plan.rows_per_split, args.rows.numel);
    const int64_t end = std::min(begin + plan.rows_per_split, args.rows.numel);
    double* sums = scratch + split * args.num_classes + first_class;
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      sum_weight_gradient(args, coefficients, first_class, begin, end, sums);
    });
  });
  for (int64_t c = 0; c < args.num_classes; ++c) {
    // fault: ce-weight-splits
    store_as(args.grad_weight, args.weight_dtype, c,
             fold_partials(scratch + c, plan.splits, args.num_classes));
  }
}

}  // namespace
}  // namespace lossops::cpu
