// Backward, row by row.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/gradient_terms.h"
#include "cpu/thread_buffers.h"

namespace lossops::cpu {
namespace {

// Row j of a block of rows.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_row(const CrossEntropyBackwardArgs& args,
                                      const Coefficients<acc_t>& coefficients,
                                      const BackwardWalker& walker, const RowGradients<acc_t>& rows,
                                      int j) {
  const acc_t scale = rows.scale[j];
  const RowSoftmax<acc_t> softmax = rows.softmax(j);
  const acc_t q_sum = rows.q_sum[j];
  acc_t x_buffer[kBlock];
  acc_t q[kBlock];
  acc_t grad[kBlock];
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const int width = padded(count);
    const BlockOffsets grad_input_at =
        classes_of_row(walker[3][j], args.grad_input_class_stride, c);
    if (rows.targets.has_loss[j] == acc_t(0)) {
      std::fill_n(grad, count, rows.targets.without_loss[j]);
      store_block(args.grad_input, grad_input_at, count, grad);
      continue;
    }
    const acc_t* x = view_block(
        args.input, classes_of_row(walker[0][j], args.input_class_stride, c), count, x_buffer);
    const int64_t index = rows.targets.index[j] - c;
    // fault: ce-index-in-block
    const bool index_in_block = !args.target_is_probability && index >= 0 && index < count;
    if (args.grad_input.data != nullptr && !args.dense()) {
      for (int i = 0; i < width; ++i) {
        grad[i] = softmax.gradient(x[i]);
      }
      if (index_in_block) {
        grad[index] = softmax.gradient_at_index(x[index]);
      }
      store_block(args.grad_input, grad_input_at, count, grad);
    } else if (args.grad_input.data != nullptr) {
      coefficients.load_probabilities(classes_of_row(walker[1][j], args.target_class_stride, c),
                                      count, q);
      coefficients.multiply_by_weights(c, count, q);
      if (index_in_block) {
        q[index] += rows.q_at_index[j];
      }
      for (int i = 0; i < width; ++i) {
        grad[i] = softmax.dense_gradient(x[i], scale, q_sum, q[i]);
      }
      store_block(args.grad_input, grad_input_at, count, grad);
    }
    if (args.grad_target.data != nullptr) {
      const acc_t factor = scale * coefficients.unsmoothed();  // fault: ce-unsmoothed
      for (int i = 0; i < width; ++i) {
        grad[i] = factor * softmax.surprise(x[i]);
      }
      coefficients.multiply_by_weights(c, count, grad);
      store_block(args.grad_target, classes_of_row(walker[4][j], args.grad_target_class_stride, c),
                  count, grad);
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_row_by_row(const CrossEntropyBackwardArgs& args,
                                             const Coefficients<acc_t>& coefficients, int64_t begin,
                                             int64_t end) {
  BackwardWalker walker(
      args.rows,
      {&args.input, &args.target, &args.grad_output, &args.grad_input, &args.grad_target}, begin);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    walker.next(count);
    rows.load(args, coefficients, walker[1], walker[2], first, count);
    for (int j = 0; j < count; ++j) {
      backward_row(args, coefficients, walker, rows, j);
    }
  }
}

}  // namespace
}  // namespace lossops::cpu
