// What both walks of backward share: what the gradients of a row are made of.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/targets.h"
#include "cpu/rows.h"
#include "losses/rows/cross_entropy.h"

namespace lossops::cpu {
namespace {

// What forward left of each row of a block, and its share of grad_output.
template <typename acc_t>
struct RowGradients {
  acc_t scale[kBlock];  // grad_output, divided by what the mean divides by
  acc_t max[kBlock] = {};
  acc_t rest[kBlock] = {};
  acc_t factor[kBlock] = {};
  acc_t log_sum[kBlock] = {};
  acc_t q_sum[kBlock] = {};
  acc_t q_at_index[kBlock] = {};
  BlockTargets<acc_t> targets;

  LOSSOPS_HOST_DEVICE void load_inline(const CrossEntropyBackwardArgs& args,
                                       const Coefficients<acc_t>& coefficients,
                                       const BlockOffsets& target_at,
                                       const BlockOffsets& grad_output_at, int64_t first,
                                       int count) {
    const RowStats<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    const int width = padded(count);
    if (args.reduction == Reduction::kNone) {
      load_block(args.grad_output, grad_output_at, count, scale);
      for (int j = 0; j < width && args.num_classes == 1; ++j) {
        scale[j] = gradient_scale(args, scale[j]);
      }
    } else {
      std::fill_n(scale, width, row_scale<acc_t>(args, 0));
    }
    std::copy_n(stats.max + first, count, max);
    std::copy_n(stats.rest + first, count, rest);
    targets.load(args, target_at, count);
    acc_t mean_weight[kBlock];
    coefficients.load_at_indices(targets, count, q_at_index, mean_weight);
    std::copy_n(args.dense() ? stats.q_sum + first : q_at_index, count, q_sum);
    for (int j = 0; j < width; ++j) {
      const auto row = RowSoftmax<acc_t>::of(max[j], rest[j], scale[j], q_sum[j]);
      factor[j] = row.factor;
      log_sum[j] = row.log_sum;
    }
  }

  // Rows [first, first + count), which lie in target and grad_output as given. All walks call
  // one copy: the other two were 59 KB of the wheel.
  __attribute__((noinline)) void load(const CrossEntropyBackwardArgs& args,
                                      const Coefficients<acc_t>& coefficients,
                                      const BlockOffsets& target_at,
                                      const BlockOffsets& grad_output_at, int64_t first,
                                      int count) {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      load_inline(args, coefficients, target_at, grad_output_at, first, count);
    });
  }

  LOSSOPS_HOST_DEVICE RowSoftmax<acc_t> softmax(int j) const {
    return {max[j], rest[j], factor[j], log_sum[j]};
  }
};

using BackwardWalker = BlockWalker<5>;  // over input, target and the gradients

}  // namespace
}  // namespace lossops::cpu
