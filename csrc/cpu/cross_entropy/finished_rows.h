// What both walks of forward share: the softmax of each row of a block, and what follows from it.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/cross_entropy/targets.h"
#include "cpu/rows.h"
#include "cpu/thread_buffers.h"
#include "losses/rows/cross_entropy.h"

namespace lossops::cpu {
namespace {

// The online softmax of each row of a block, its sums in fp64; see DenseOnlineSoftmax.
template <typename acc_t>
struct RowStates {
  acc_t max[kBlock];
  double sum[kBlock];
  double q_sum[kBlock];
  double dot[kBlock];
  // If has_below: the sum over the classes below the maximum, with exact distances. Only of vectors
  // of rows in which one has few bits.
  double below[kBlock];
  bool has_below = false;

  LOSSOPS_HOST_DEVICE void clear(int width, acc_t initial_max) {
    std::fill_n(max, width, initial_max);
    std::fill_n(sum, width, 0);
    std::fill_n(q_sum, width, 0);
    std::fill_n(dot, width, 0);
    has_below = false;
  }
  // Whether one of rows [first, last) has a rest below least_rest() beside the 1 of its maximum.
  LOSSOPS_HOST_DEVICE bool any_has_few_bits(int first, int last, acc_t least) const {
    int with_few_bits = 0;
    for (int j = first; j < last; ++j) {
      with_few_bits += std::fabs(static_cast<acc_t>(sum[j] - 1)) < least ? 1 : 0;
    }
    return with_few_bits != 0;
  }
};

// What finish_rows() computes on the way.
template <typename acc_t>
struct FinishedRows {
  acc_t x[kBlock];  // the logit at the class index
  acc_t q[kBlock];
  acc_t weight[kBlock];
  acc_t rest[kBlock];
  acc_t q_sum[kBlock];
  acc_t loss[kBlock];
  BlockTargets<acc_t> targets;
};

// Over the rows of a chunk.
struct ChunkSums {
  LaneSum loss;
  LaneSum weight;         // the mean's denominator
  bool all_valid = true;  // no class index is out of range
};

using ForwardWalker = BlockWalker<3>;  // over input, target, output

// Beside the 1 of the maximum, an fp64 sum of `terms` may lose terms / 2^53, and the terms of fp32
// logits have rounded distances from the maximum, which may be all of a confident row's rest. Of
// half types a distance is exact, or its logit 2^12 times smaller than the maximum. A rest of less
// than this would miss bits of an acc_t, and is summed apart.
template <typename acc_t>
acc_t least_rest(const CrossEntropyArgs& args, int64_t terms) {
  if (sizeof(acc_t) == 8) {
    return acc_t(0.5);
  }
  const acc_t of_sum = static_cast<acc_t>(terms) * acc_t(0x1p-28);
  return element_size(args.input.dtype) == 2 ? of_sum : std::max(of_sum, acc_t(0.125));
}

// exp(x - max) of a class below the maximum, with an exact difference; 0 of the maximum.
template <typename acc_t>
LOSSOPS_HOST_DEVICE double exp_below_max(acc_t x, acc_t max) {
  acc_t difference = x;
  const acc_t lost = math::lost_by_adding(difference, -max);
  const double term = math::exp_in_double(difference, lost);  // fault: ce-distances
  return x == max ? 0.0 : term;
}

// The sum of exp_below_max() of a row.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t sum_below_max(const CrossEntropyForwardArgs& args, int64_t row_offset,
                                        acc_t max) {
  acc_t buffer[kBlock];
  double terms[kBlock];
  LaneSum sum;
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const acc_t* x = view_block(args.input, classes_of_row(row_offset, args.input_class_stride, c),
                                count, buffer, -math::infinity<acc_t>());
    for (int i = 0; i < padded(count); ++i) {
      terms[i] = exp_below_max(x[i], max);
    }
    sum.add(terms, padded(count));
  }
  return static_cast<acc_t>(sum.total());
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void finish_rows_inline(const CrossEntropyForwardArgs& args,
                                            const Coefficients<acc_t>& coefficients,
                                            const ForwardWalker& walker, int64_t first, int count,
                                            int64_t terms_per_sum, RowStates<acc_t>& states,
                                            ChunkSums& chunk) {
  const int width = padded(count);
  auto& buffers = buffers_of_this_thread<FinishedRows<acc_t>>();
  acc_t* const x = buffers.x;
  acc_t* const q = buffers.q;
  acc_t* const weight = buffers.weight;
  acc_t* const rest = buffers.rest;
  acc_t* const q_sum = buffers.q_sum;
  acc_t* const loss = buffers.loss;
  BlockTargets<acc_t>& targets = buffers.targets;
  targets.load(args, walker[1], count);
  chunk.all_valid = chunk.all_valid && targets.all_valid;
  coefficients.load_at_indices(targets, count, q, weight);
  if (args.target_is_probability || args.num_classes == 0) {
    std::fill_n(x, count, acc_t(0));
  } else {
    walker[0].for_each_run(count, [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
      gather(args.input.data, args.input.dtype, offset, walker[0].stride, targets.index + j,
             args.input_class_stride, length, x + j);
    });
  }
  std::fill(x + count, x + width, acc_t(0));
  std::fill(q + count, q + width, acc_t(0));
  if (!targets.all_have_loss) {
    for (int j = 0; j < width; ++j) {
      const bool has_loss = targets.has_loss[j] != acc_t(0);
      x[j] = has_loss ? x[j] : acc_t(0);
      states.max[j] = has_loss ? states.max[j] : acc_t(0);
    }
    for (int j = 0; j < width; ++j) {
      states.sum[j] = targets.has_loss[j] != acc_t(0) ? states.sum[j] : 1.0;
    }
  }

  const acc_t least = least_rest<acc_t>(args, terms_per_sum);
  const auto has_few_bits = [&](int j) LOSSOPS_ALWAYS_INLINE {
    return std::fabs(rest[j]) < least && targets.has_loss[j] != acc_t(0);
  };
  int with_few_bits = 0;
  for (int j = 0; j < width; ++j) {
    // The sum holds exp(0) = 1 for the maximum. An empty row has -1.
    rest[j] = static_cast<acc_t>(states.sum[j] - 1);
    with_few_bits += has_few_bits(j) ? 1 : 0;
  }
  if (states.has_below) {
    for (int j = 0; j < width; ++j) {
      const acc_t below = static_cast<acc_t>(states.below[j]);
      rest[j] = has_few_bits(j) ? below : rest[j];  // fault: ce-few-bits-of-columns
    }
  } else if (with_few_bits != 0) {  // fault: ce-few-bits
    for (int j = 0; j < count; ++j) {
      if (has_few_bits(j)) {
        rest[j] = sum_below_max(args, walker[0][j], states.max[j]);
      }
    }
  }
  if (args.dense()) {
    for (int j = 0; j < width; ++j) {
      const double at_index = static_cast<double>(q[j] * (softmax_shift(states.max[j]) - x[j]));
      q_sum[j] = static_cast<acc_t>(states.q_sum[j] + static_cast<double>(q[j]));
      const double dot = states.dot[j] + (q[j] == acc_t(0) ? 0.0 : at_index);
      loss[j] = dense_row_loss(rest[j], q_sum[j], static_cast<acc_t>(dot));
    }
  } else {
    for (int j = 0; j < width; ++j) {
      loss[j] = sparse_row_loss(states.max[j], rest[j], x[j], q[j]);
    }
  }
  if (!targets.all_have_loss) {
    for (int j = 0; j < width; ++j) {
      loss[j] = targets.has_loss[j] != acc_t(0) ? loss[j] : targets.without_loss[j];
    }
  }

  if (args.row_stats != nullptr) {
    const RowStats<acc_t> stats(args.row_stats, args.rows.numel);
    std::copy_n(states.max, count, stats.max + first);
    std::copy_n(rest, count, stats.rest + first);
    if (args.dense()) {
      std::copy_n(q_sum, count, stats.q_sum + first);
    }
  }
  if (args.reduction == Reduction::kNone) {
    store_block(args.output, walker[2], count, loss);
  } else {
    chunk.loss.add_unpadded(loss, count);
    chunk.weight.add_unpadded(weight, count);
  }
}

// Completes rows [first, first + count) by their class indices, and leaves behind their
// statistics and losses. A sum of states has added up terms_per_sum terms one after the other.
// Both walks call one copy: a second one is 25 KB of the wheel.
template <typename acc_t>
__attribute__((noinline)) void finish_rows(const CrossEntropyForwardArgs& args,
                                           const Coefficients<acc_t>& coefficients,
                                           const ForwardWalker& walker, int64_t first, int count,
                                           int64_t terms_per_sum, RowStates<acc_t>& states,
                                           ChunkSums& chunk) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    finish_rows_inline(args, coefficients, walker, first, count, terms_per_sum, states, chunk);
  });
}

}  // namespace
}  // namespace lossops::cpu
