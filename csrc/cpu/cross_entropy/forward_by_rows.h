// Forward, row by row.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/finished_rows.h"

namespace lossops::cpu {
namespace {

// Rows that are read in lockstep: from its maximum to the sum of its exponentials, a short
// row is one chain of dependent instructions. A long row is better off alone, as one
// stream from memory.
constexpr int kLockstep = 4;

// Rows `numbers` of a block of rows, a block of classes at a time.
template <bool kDense, typename acc_t>
LOSSOPS_HOST_DEVICE void reduce_rows(const CrossEntropyForwardArgs& args,
                                     const Coefficients<acc_t>& coefficients,
                                     const ForwardWalker& walker, const int* numbers, int rows,
                                     RowStates<acc_t>& states) {
  acc_t x_buffer[kLockstep][kBlock];
  acc_t terms[kBlock];
  acc_t q[kBlock];
  const acc_t* x[kLockstep];
  acc_t max[kLockstep];
  acc_t new_max[kLockstep];
  LaneSum sum[kLockstep];
  LaneSum q_sum[kLockstep];
  LaneSum dot[kLockstep];
  double dot_moved[kLockstep] = {};
  std::fill_n(max, kLockstep, -math::infinity<acc_t>());
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const int width = padded(count);
    for (int r = 0; r < rows; ++r) {
      x[r] =
          view_block(args.input, classes_of_row(walker[0][numbers[r]], args.input_class_stride, c),
                     count, x_buffer[r], -math::infinity<acc_t>());
      new_max[r] = block_max(x[r], width);
    }
    for (int r = 0; r < rows; ++r) {
      if (new_max[r] > max[r]) {
        // In fp64, so that a maximum that rises in every block costs no accuracy.
        const double rise = static_cast<double>(softmax_shift(new_max[r])) -
                            static_cast<double>(softmax_shift(max[r]));
        if (max[r] > -math::infinity<acc_t>()) {
          sum[r].scale(math::exp(-rise));  // fault: ce-sum-rescaled
        }
        if (kDense && c > 0) {
          const double q_so_far = q_sum[r].total();
          dot_moved[r] += q_so_far == 0 ? 0 : q_so_far * rise;  // fault: ce-dot-moved
        }
        max[r] = new_max[r];
      }
      const acc_t shift = softmax_shift(max[r]);
      for (int i = 0; i < width; ++i) {
        terms[i] = math::exp_in_sum<true>(x[r][i] - shift);
      }
      sum[r].add(terms, width);  // exp(-inf) is 0
      if (kDense) {
        coefficients.load_probabilities(
            classes_of_row(walker[1][numbers[r]], args.target_class_stride, c), count, q);
        coefficients.multiply_by_weights(c, count, q);
        for (int i = 0; i < width; ++i) {
          const acc_t term = q[i] * (shift - x[r][i]);
          terms[i] = q[i] == acc_t(0) ? acc_t(0) : term;  // fault: ce-zero-probability
        }
        q_sum[r].add_unpadded(q, count);
        dot[r].add_unpadded(terms, count);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    states.max[numbers[r]] = max[r];
    states.sum[numbers[r]] = sum[r].total();
    if (kDense) {
      states.q_sum[numbers[r]] = q_sum[r].total();
      states.dot[numbers[r]] = dot[r].total() + dot_moved[r];
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void forward_row_by_row(const CrossEntropyForwardArgs& args,
                                            const Coefficients<acc_t>& coefficients, int64_t begin,
                                            int64_t end, ChunkSums& chunk) {
  ForwardWalker walker(args.rows, {&args.input, &args.target, &args.output}, begin);
  const int lockstep = args.num_classes <= kBlock ? kLockstep : 1;
  auto& states = buffers_of_this_thread<RowStates<acc_t>>();
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    walker.next(count);
    states.clear(padded(count), 0);
    int numbers[kLockstep];
    int rows = 0;
    for (int j = 0; j < count; ++j) {
      if (RowTarget<acc_t>(args, walker[1][j]).has_loss()) {
        numbers[rows++] = j;
      }
      if (rows == lockstep || (rows > 0 && j + 1 == count)) {
        args.dense() ? reduce_rows<true>(args, coefficients, walker, numbers, rows, states)
                     : reduce_rows<false>(args, coefficients, walker, numbers, rows, states);
        rows = 0;
      }
    }
    finish_rows(args, coefficients, walker, first, count, divide_up(args.num_classes, kVector),
                states, chunk);
  }
}

}  // namespace
}  // namespace lossops::cpu
