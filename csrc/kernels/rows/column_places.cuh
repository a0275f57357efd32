// Where the groups of rows that lie side by side are: side_by_side_rows.cu.
#pragma once

#include <cstdint>

#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda::side_by_side {

// The groups, as the kernel is told.
struct ColumnShape {
  int64_t groups;
  bool aligned;          // groups of logits and gradients, and rows are whole groups
  bool targets_in_line;  // int64, one after the other
  // Rows of one dimension or two, whose numbers have 31 bits. The divisor is the number of groups
  // along the first dimension.
  bool by_divisor;
  Divisor first_dimension;
  // The groups of a warp are neighbours where that of its first lane has a number below this: all
  // are in one plane, none is moved back, and an element lies behind them, for WarpWords.
  uint32_t before_warps;
};

// The plane of a group of rows, and its number there. Both are 0 where `by_divisor` is not set:
// rows are aligned then, and their places do not come from here.
template <int kRows>
struct GroupPlace {
  uint32_t plane;
  uint32_t number;  // of the group in its plane

  static __device__ __forceinline__ GroupPlace of(const ColumnShape& shape, int64_t group) {
    if (!shape.by_divisor) {
      return {};
    }
    const auto index = static_cast<uint32_t>(group);
    const uint32_t plane = shape.first_dimension.quotient(index);
    return {plane, index - plane * shape.first_dimension.value};
  }

  // The position of the group's first row in the plane. The last group is moved back where that
  // makes all of its rows exist.
  __device__ __forceinline__ uint32_t position(const IterationSpace& rows) const {
    return min(number * kRows, static_cast<uint32_t>(rows.sizes[0]) - kRows);
  }
  // How many of its rows, the first ones, count in the group before it.
  __device__ __forceinline__ int shared_rows(const IterationSpace& rows) const {
    return static_cast<int>(number * kRows - position(rows));
  }
  // Whether a warp's groups are neighbours. This one is that of `lane`; all lanes get the same.
  __device__ __forceinline__ bool has_neighbours(const ColumnShape& shape, uint32_t lane) const {
    return number - lane < shape.before_warps;  // fault: columns-neighbours
  }
};

// Offsets of a group's first row.
template <int kRows, int N>
__device__ __forceinline__ void group_offsets(const IterationSpace& rows, const ColumnShape& shape,
                                              const Operand* const (&operands)[N], int64_t group,
                                              const GroupPlace<kRows>& place,
                                              int64_t (&offsets)[N]) {
  if (!shape.by_divisor) {
    row_offsets(rows, operands, group * kRows, offsets);
    return;
  }
  const uint32_t position = place.position(rows);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    offsets[n] = position * operands[n]->strides[0] + place.plane * operands[n]->strides[1];
  }
}

// The number of a group's first row.
template <int kRows>
__device__ __forceinline__ int64_t first_row(const IterationSpace& rows, const ColumnShape& shape,
                                             int64_t group, const GroupPlace<kRows>& place) {
  return shape.aligned ? group * kRows : place.plane * rows.sizes[0] + place.position(rows);
}

}  // namespace lossops::cuda::side_by_side
