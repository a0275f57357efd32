// Forward, class by class.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/columns.h"
#include "cpu/thread_buffers.h"
#include "cpu/tokens/forward_by_rows.h"

namespace lossops::cpu {
namespace {

// A block of rows, padded, with all their classes.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void reduce_columns(const Columns<acc_t>& z, int classes, int width,
                                              RowBlock<acc_t>& rows) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    for (int first = 0; first < width; first += kVector) {
      acc_t max[kVector];
      acc_t shifts[kVector];
      std::fill_n(max, kVector, -math::infinity<acc_t>());
      for (int c = 0; c < classes; ++c) {
        const acc_t* column = z.first + c * z.stride + first;
        for (int lane = 0; lane < kVector; ++lane) {
          max[lane] = column[lane] > max[lane] ? column[lane] : max[lane];
        }
      }
      for (int lane = 0; lane < kVector; ++lane) {
        shifts[lane] = softmax_shift(max[lane]);
      }
      LaneSums<acc_t, true, kEntropy> sums;
      sums.add_all(z.first + first, z.stride, classes, shifts);
      for (int lane = 0; lane < kVector; ++lane) {
        State state;
        state.ones = static_cast<double>(sums.ones[lane]);
        state.below = sums.below[lane];
        state.distance = sums.distance[lane];
        rows.max[first + lane] = max[lane];
        rows.rest[first + lane] = static_cast<acc_t>(state.rest());
        rows.mean_distance[first + lane] = static_cast<acc_t>(state.mean_distance());
      }
    }
  });
}

// Rows [begin, end) of few classes. See write_values().
template <typename acc_t>
int64_t forward_short_rows(const TokenForwardArgs& args, int64_t begin, int64_t end) {
  ForwardWalker walker = forward_walker(args, begin);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  const int classes = static_cast<int>(args.num_classes);
  const int block = column_rows(args);
  int64_t first_invalid = args.rows.numel;
  for (int64_t first = begin; first < end; first += block) {
    const int count = static_cast<int>(std::min<int64_t>(block, end - first));
    walker.next(count);
    const Columns<acc_t> x =
        load_columns(args.input, {walker[0], args.input_class_stride, 0, classes, count}, buffers.x,
                     buffers.staging);
    const Columns<acc_t> z = map_columns(args.map, x, classes, padded(count), buffers);
    RowBlock<acc_t> rows;
    rows.load_mask(args, walker[2], count);
    args.has_entropy ? reduce_columns<true>(z, classes, padded(count), rows)
                     : reduce_columns<false>(z, classes, padded(count), rows);
    first_invalid = std::min(first_invalid, write_values(args, walker, first, count, rows));
  }
  return first_invalid;
}

}  // namespace
}  // namespace lossops::cpu
