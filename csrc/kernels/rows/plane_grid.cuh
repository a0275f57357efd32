// The terms of plane_rows.cu and plane_words.cu; how plane_rows.cu spreads rows over the threads of
// a block, and the numbers of each row that the block keeps in shared memory.
//
//   plane     the rows along the first dimension of the target, such as the pixels of one image
//   position  the number of a row in its plane
//   group     neighbouring rows of a plane, 8 bytes of each class: 2 of fp32, 4 of half types. A
//             group of plane_words.cu is a word of 4 bytes
//   lane      the number of a group in a block, 0 to lanes - 1: not the lane of a warp
//   segment   the groups of 32 neighbouring lanes, or of all lanes if they are fewer
//   share     share number s: the classes c with c % shares == s. A thread of plane_rows.cu has one
//             lane and one share
//   part      the sum of the shares, 1, 2 or 4, of a row that a warp of plane_rows.cu has; of one
//             share, where the logits do not fit a block of plane_rows.cu
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/row_groups.cuh"

namespace lossops::cuda::plane_rows {

// Of any dtype: the logits of one class, of a group of rows.
using GroupWords = VectorOf<uint32_t, kGroupBytes / 4>;

// How the rows are dealt out, for the kernel.
struct PlaneGrid : PlaneGroups {
  int lanes;
  int lane_bits;   // log2(lanes)
  int share_bits;  // log2(shares)
  int parts;
  int merging_bits;  // log2 of the threads that merge the parts of a row
  int width;         // lanes of a segment
  int pitch;         // groups from a share's class to its next one in shared memory
  PlaneReads reads;
  bool bypasses_l1;  // copies of kPairs do not go through L1

  PlaneGrid(const CrossEntropyArgs& args, const Spread& spread)
      : PlaneGroups{static_cast<uint32_t>(spread.groups),
                    Divisor(static_cast<uint32_t>(plane_rows::groups_of_plane(args))),
                    positions_of(args)},
        lanes(spread.cut.lanes),
        lane_bits(log2_of(lanes)),
        share_bits(log2_of(spread.cut.shares)),
        parts(spread.cut.parts()),
        merging_bits(spread.cut.merging_bits()),
        width(spread.cut.segment()),
        pitch(static_cast<int>(spread.cut.pitch(spread.reads))),
        reads(spread.reads),
        bypasses_l1(spread.bypasses_l1) {}

  // The thread's number in its segment.
  __device__ __forceinline__ int lane_of_segment() const {
    return static_cast<int>(threadIdx.x) & (width - 1);
  }
  // From a logit to that of the share's next class.
  __device__ __forceinline__ int64_t share_step(const CrossEntropyArgs& args) const {
    return args.input_class_stride << share_bits;
  }
  // The classes that a share has at most.
  __device__ __forceinline__ int places(const CrossEntropyArgs& args) const {
    return (static_cast<int>(args.num_classes) + (1 << share_bits) - 1) >> share_bits;
  }

  static int log2_of(int power) {
    int bits = 0;
    while (1 << bits < power) {
      ++bits;
    }
    return bits;
  }
};

// Numbers in the shared memory of a block: kRowNumbers of each row; behind them the parts but part
// 0, two numbers each, (parts - 1, 2, rows).
struct RowNumbers {
  // While rows are summed: OthersSum's reference and total of part 0, and the logit of the class
  // index. Afterwards the same places hold the numbers of an IndexGradient.
  static constexpr int kReference = 0;
  static constexpr int kTotal = 1;
  static constexpr int kLogit = 2;
  // Class indices of the rows that the block has, and of those that it has next, in two slots.
  static constexpr int kIndex = kRowNumbers - 2;

  float* numbers;
  int rows;

  __device__ __forceinline__ float* of(int number) const { return numbers + number * rows; }
  // The numbers of a part. Part 0 is among the numbers of the rows.
  __device__ __forceinline__ float* of_part(int part, int number) const {
    return part == 0 ? of(number) : of(kRowNumbers + 2 * (part - 1) + number);
  }
  __device__ __forceinline__ int& index(int row, int slot) const {
    return reinterpret_cast<int*>(of(kIndex + slot))[row];
  }

  // Numbers of neighbouring rows.
  template <int kRows>
  static __device__ __forceinline__ void load(const float* from, float (&values)[kRows]) {
    const auto loaded = *reinterpret_cast<const VectorOf<float, kRows>*>(from);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = loaded.values[i];
    }
  }
  template <int kRows>
  static __device__ __forceinline__ void store(float* to, const float (&values)[kRows]) {
    VectorOf<float, kRows> stored;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      stored.values[i] = values[i];
    }
    *reinterpret_cast<VectorOf<float, kRows>*>(to) = stored;
  }

  template <bool kExact>
  __device__ __forceinline__ void put(int row, const IndexGradient<kExact>& gradient) const {
    constexpr int kCount = sizeof(LogitNumbers<kExact>) / sizeof(float);
    static_assert(kCount + 1 <= kIndex, "of_logit, at_index");
    put_numbers(numbers + row, rows, gradient.of_logit);
    of(kCount)[row] = gradient.at_index;
  }
  // row: the first of a group. indices: theirs.
  template <bool kExact, int kRows>
  __device__ __forceinline__ void get(int row, const int (&indices)[kRows],
                                      IndexGradient<kExact> (&gradients)[kRows]) const {
    constexpr int kCount = sizeof(LogitNumbers<kExact>) / sizeof(float);
    float values[kCount + 1][kRows];
#pragma unroll
    for (int k = 0; k <= kCount; ++k) {
      load(of(k) + row, values[k]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float own[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        own[k] = values[k][i];
      }
      memcpy(&gradients[i].of_logit, own, sizeof(own));
      gradients[i].at_index = values[kCount][i];
      gradients[i].index = indices[i];
    }
  }
};

}  // namespace lossops::cuda::plane_rows
