// Backward, row by row and class by class.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/columns.h"
#include "cpu/thread_buffers.h"
#include "cpu/tokens/gradient_terms.h"

namespace lossops::cpu {
namespace {

// Writes the gradients of a block of classes of a row, as if none of them were an index.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void gradient_block(const TokenGradient<acc_t>& row, const acc_t* z,
                                              int width, acc_t* grad) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    const TokenGradient<acc_t> gradient = row;
    for (int i = 0; i < width; ++i) {
      grad[i] = gradient.template of_class<kEntropy>(z[i]);
    }
  });
}

// Classes [begin, end) of rows [first_row, end_row), row by row.
template <typename acc_t>
void backward_rows(const TokenBackwardArgs& args, int64_t first_row, int64_t end_row, int64_t begin,
                   int64_t end) {
  auto walker = RowGradients<acc_t>::walker(args, first_row);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  acc_t x_buffer[kBlock];
  acc_t z_buffer[kBlock];
  acc_t grad[kBlock];
  for (int64_t row = first_row; row < end_row; ++row) {
    walker.next(1);
    rows.load(args, walker, row, 1);
    const TokenGradient<acc_t> gradient = rows[0];
    size_t next = 0;
    while (next < rows.indexed.size() && rows.indexed[next].index < begin) {
      ++next;
    }
    for (int64_t c = begin; c < end; c += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - c));
      const BlockOffsets grad_at = classes_of_row(walker[6][0], args.grad_input_class_stride, c);
      if (!rows.all_count) {
        std::fill_n(grad, count, acc_t(0));
        store_block(args.grad_input, grad_at, count, grad);
        continue;
      }
      const acc_t* x = view_block(
          args.input, classes_of_row(walker[0][0], args.input_class_stride, c), count, x_buffer);
      const acc_t* z = map_block(args.map, x, padded(count), z_buffer);
      args.grad_entropy.data != nullptr ? gradient_block<true>(gradient, z, padded(count), grad)
                                        : gradient_block<false>(gradient, z, padded(count), grad);
      gradients_at_indices(rows, next, c, c + count, {z, 1}, grad, 1);
      unmap_gradient(args.map, x, count, grad);
      store_block(args.grad_input, grad_at, count, grad);
    }
  }
  rows.release();
}

// A block of rows, padded, and classes. What a row has in common is in local arrays: the compiler
// would otherwise have to fear that the results overwrite it.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void gradient_columns(const Columns<acc_t>& z,
                                                const RowGradients<acc_t>& rows, int classes,
                                                int width, acc_t* grad) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    for (int first = 0; first < width; first += kVector) {
      acc_t max[kVector];
      acc_t mean_distance[kVector];
      acc_t inverse_sum[kVector];
      acc_t of_softmax[kVector];
      acc_t of_entropy[kVector];
      std::copy_n(rows.max + first, kVector, max);
      std::copy_n(rows.mean_distance + first, kVector, mean_distance);
      std::copy_n(rows.inverse_sum + first, kVector, inverse_sum);
      std::copy_n(rows.of_softmax + first, kVector, of_softmax);
      std::copy_n(rows.of_entropy + first, kVector, of_entropy);
      for (int c = 0; c < classes; ++c) {
        const acc_t* column = z.first + c * z.stride + first;
        acc_t result[kVector];
        for (int lane = 0; lane < kVector; ++lane) {
          const TokenGradient<acc_t> gradient{{max[lane], acc_t(0), mean_distance[lane]},
                                              of_softmax[lane],
                                              of_entropy[lane],
                                              inverse_sum[lane]};
          result[lane] = gradient.template of_class<kEntropy>(column[lane]);
        }
        std::copy_n(result, kVector, grad + c * width + first);
      }
    }
  });
}

// Rows [begin, end), class by class.
template <typename acc_t>
void backward_columns(const TokenBackwardArgs& args, int64_t begin, int64_t end) {
  auto walker = RowGradients<acc_t>::walker(args, begin);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  acc_t* const grad = buffers.grad;
  const int block = column_rows(args);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first = begin; first < end; first += block) {
    const int count = static_cast<int>(std::min<int64_t>(block, end - first));
    const int width = padded(count);
    const int classes_at_once = kColumns / width;
    walker.next(count);
    rows.load(args, walker, first, count);
    size_t next = 0;
    for (int64_t c = 0; c < args.num_classes; c += classes_at_once) {
      const int classes =
          static_cast<int>(std::min<int64_t>(classes_at_once, args.num_classes - c));
      const Columns<acc_t> x =
          load_columns(args.input, {walker[0], args.input_class_stride, c, classes, count},
                       buffers.x, buffers.staging);
      const Columns<acc_t> z = map_columns(args.map, x, classes, width, buffers);
      args.grad_entropy.data != nullptr ? gradient_columns<true>(z, rows, classes, width, grad)
                                        : gradient_columns<false>(z, rows, classes, width, grad);
      gradients_at_indices(rows, next, c, c + classes, z, grad, width);
      for (int i = 0; i < classes && !args.map.is_identity(); ++i) {
        unmap_gradient(args.map, x.first + i * x.stride, width, grad + i * width);
      }
      for (int j = 0; j < count && !rows.all_count; ++j) {
        for (int i = 0; i < classes && rows.is_counted[j] == acc_t(0); ++i) {
          grad[i * width + j] = acc_t(0);
        }
      }
      store_columns(args.grad_input, {walker[6], args.grad_input_class_stride, c, classes, count},
                    grad, buffers.staging);
    }
  }
  rows.release();
}

}  // namespace
}  // namespace lossops::cpu
