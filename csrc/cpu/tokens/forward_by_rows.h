// Forward, row by row.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/thread_buffers.h"
#include "cpu/tokens/row_values.h"

namespace lossops::cpu {
namespace {

// The state of a piece of a row. Its sums are in fp64.
using State = EntropySoftmax<double>;

// Sums of exponentials and distances in kVector lanes. Four terms at a time are added in acc_t, by
// a tree, and their sums in fp64: exact enough for any number of terms, and a quarter of the
// conversions. The maximum itself is left out where kHasMax is set, and counted apart: beside its
// 1, small terms would lose their bits.
template <typename acc_t, bool kHasMax, bool kEntropy>
struct LaneSums {
  double below[kVector] = {};
  double distance[kVector] = {};
  acc_t ones[kVector] = {};

  // Adds kCount <= 4 vectors, `stride` apart. shifts: of each lane.
  template <int kCount>
  LOSSOPS_HOST_DEVICE void add(const acc_t* z, int64_t stride, const acc_t* shifts) {
    acc_t exps[kCount][kVector];
    acc_t distances[kCount][kVector];
#pragma GCC unroll 4
    for (int64_t n = 0; n < kCount; ++n) {
      const acc_t* const vector = z + n * stride;
      for (int lane = 0; lane < kVector; ++lane) {
        const auto term = EntropySoftmax<acc_t>::template term<true>(vector[lane], shifts[lane]);
        // Not where both are infinite: that row has no softmax.
        const bool is_max = kHasMax && shifts[lane] - vector[lane] == acc_t(0);
        exps[n][lane] = is_max ? acc_t(0) : term.exp;
        distances[n][lane] = term.distance;
      }
      for (int lane = 0; kHasMax && lane < kVector; ++lane) {
        ones[lane] += shifts[lane] - vector[lane] == acc_t(0) ? acc_t(1) : acc_t(0);
      }
    }
    for (int lane = 0; lane < kVector; ++lane) {
      below[lane] += static_cast<double>(tree<kCount>(exps, lane));
    }
    for (int lane = 0; kEntropy && lane < kVector; ++lane) {
      distance[lane] += static_cast<double>(tree<kCount>(distances, lane));
    }
  }

  // Adds count vectors, `stride` apart.
  LOSSOPS_HOST_DEVICE void add_all(const acc_t* z, int64_t stride, int64_t count,
                                   const acc_t* shifts) {
    for (; count >= 4; count -= 4, z += 4 * stride) {
      add<4>(z, stride, shifts);
    }
    for (; count > 0; --count, z += stride) {
      add<1>(z, stride, shifts);
    }
  }

 private:
  template <int kCount>
  static LOSSOPS_HOST_DEVICE acc_t tree(const acc_t (&values)[kCount][kVector], int lane) {
    if constexpr (kCount == 1) {
      return values[0][lane];
    } else {
      return (values[0][lane] + values[1][lane]) + (values[2][lane] + values[3][lane]);
    }
  }
};

// Adds a block to the sums of a state whose maximum is raised already.
template <bool kHasMax, bool kEntropy, typename acc_t>
LOSSOPS_HOST_DEVICE void add_block(State& state, const acc_t* z, int width) {
  acc_t shifts[kVector];
  std::fill_n(shifts, kVector, softmax_shift(static_cast<acc_t>(state.max)));
  LaneSums<acc_t, kHasMax, kEntropy> sums;
  sums.add_all(z, kVector, width / kVector, shifts);
  LaneSum totals[3];
  totals[0].add(sums.below, kVector);
  state.below += totals[0].total();
  if (kHasMax) {
    totals[1].add(sums.ones, kVector);
    state.ones += totals[1].total();
  }
  if (kEntropy) {
    totals[2].add(sums.distance, kVector);
    state.distance += totals[2].total();
  }
}

// Folds in a block of mapped logits, padded with -inf.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void fold_block(State& state, const acc_t* z, int width) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    const acc_t max = block_max(z, width);
    state.raise_max(static_cast<double>(max));
    static_cast<double>(max) == state.max ? add_block<true, kEntropy>(state, z, width)
                                          : add_block<false, kEntropy>(state, z, width);
  });
}

template <typename acc_t>
void fold_block(const TokenArgs& args, State& state, const acc_t* z, int width) {
  args.has_entropy ? fold_block<true>(state, z, width) : fold_block<false>(state, z, width);
}

// Classes [begin, end) of one row.
template <typename acc_t>
State reduce_row(const TokenArgs& args, int64_t row_offset, int64_t begin, int64_t end) {
  acc_t x_buffer[kBlock];
  acc_t z_buffer[kBlock];
  State state;
  for (int64_t c = begin; c < end; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - c));
    const acc_t* x = view_block(args.input, classes_of_row(row_offset, args.input_class_stride, c),
                                count, x_buffer, -math::infinity<acc_t>());
    const acc_t* z = map_block(args.map, x, count, z_buffer);
    if (z == z_buffer) {
      std::fill(z_buffer + count, z_buffer + padded(count), -math::infinity<acc_t>());
    }
    fold_block(args, state, z, padded(count));
  }
  return state;
}

// Classes [begin, end) of up to kTileRows rows whose classes lie far apart.
template <typename acc_t>
void reduce_far_rows(const TokenArgs& args, const BlockOffsets& rows, int count, int64_t begin,
                     int64_t end, State* states, int64_t states_stride) {
  constexpr int kClasses = kColumns / kTileRows;  // that are read at a time
  static_assert(kBlock % kClasses == 0 && kTileRows == kVector);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  std::vector<acc_t> tile(static_cast<size_t>(kTileRows) * kBlock);
  acc_t z_buffer[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int width = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    for (int c = 0; c < width; c += kClasses) {
      const int classes = std::min(kClasses, width - c);
      for (int i = 0; i < classes; ++i) {
        load_block(args.input, rows.shifted((first + c + i) * args.input_class_stride), count,
                   buffers.x + i * kTileRows);
      }
      transpose<true>(buffers.x, kTileRows, classes, kTileRows, tile.data() + c, kBlock);
    }
    for (int r = 0; r < count; ++r) {
      acc_t* x = tile.data() + r * kBlock;
      const acc_t* z = map_block(args.map, x, width, z_buffer);
      acc_t* end_of_z = (z == z_buffer ? z_buffer : x) + width;
      std::fill_n(end_of_z, padded(width) - width, -math::infinity<acc_t>());
      fold_block(args, states[r * states_stride], z, padded(width));
    }
  }
}

// Rows [first, first + count) of many classes, by the states of their pieces. See write_values().
template <typename acc_t>
int64_t finish_long_rows(const TokenForwardArgs& args, int64_t first, int count,
                         const State* states) {
  ForwardWalker walker = forward_walker(args, first);
  walker.next(count);
  const int64_t pieces = num_pieces(args);
  RowBlock<acc_t> rows;
  rows.load_mask(args, walker[2], count);
  for (int j = 0; j < count; ++j) {
    const State* const parts = states + (first + j) * pieces;
    State state = parts[0];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      state.merge(parts[piece]);
    }
    rows.max[j] = static_cast<acc_t>(state.max);
    rows.rest[j] = static_cast<acc_t>(state.rest());
    rows.mean_distance[j] = static_cast<acc_t>(state.mean_distance());
  }
  return write_values(args, walker, first, count, rows);
}

}  // namespace
}  // namespace lossops::cpu
