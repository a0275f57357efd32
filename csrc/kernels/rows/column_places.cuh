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
  // Rows of one dimension or two, whose groups have numbers of 31 bits. The divisor is the number
  // of groups along the first dimension.
  bool by_divisor;
  Divisor first_dimension;
};

// Of groups of rows that are counted along two dimensions. Computed where it is needed: kept, it
// would take registers.
struct GroupPlace {
  uint32_t plane;
  int64_t begin;     // the group's number in its plane, times its rows
  int64_t position;  // of its first row in the plane: begin, but so that all of its rows exist

  template <int kRows>
  static __device__ __forceinline__ GroupPlace of(const IterationSpace& rows,
                                                  const ColumnShape& shape, int64_t group) {
    const auto index = static_cast<uint32_t>(group);
    const uint32_t plane = shape.first_dimension.quotient(index);
    const int64_t begin = int64_t{index - plane * shape.first_dimension.value} * kRows;
    return {plane, begin, min(begin, rows.sizes[0] - kRows)};
  }
};

// Offsets of a group's first row.
template <int kRows, int N>
__device__ __forceinline__ void group_offsets(const IterationSpace& rows, const ColumnShape& shape,
                                              const Operand* const (&operands)[N], int64_t group,
                                              int64_t (&offsets)[N]) {
  if (!shape.by_divisor) {
    row_offsets(rows, operands, group * kRows, offsets);
    return;
  }
  const auto place = GroupPlace::of<kRows>(rows, shape, group);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    offsets[n] = place.position * operands[n]->strides[0] + place.plane * operands[n]->strides[1];
  }
}

// The number of a group's first row.
template <int kRows>
__device__ __forceinline__ int64_t first_row(const IterationSpace& rows, const ColumnShape& shape,
                                             int64_t group) {
  if (shape.aligned) {
    return group * kRows;
  }
  const auto place = GroupPlace::of<kRows>(rows, shape, group);
  return place.plane * rows.sizes[0] + place.position;
}

// How many of a group's rows, the first ones, count in the group before it.
template <int kRows>
__device__ __forceinline__ int shared_rows(const IterationSpace& rows, const ColumnShape& shape,
                                           int64_t group) {
  if (shape.aligned) {
    return 0;
  }
  const auto place = GroupPlace::of<kRows>(rows, shape, group);
  return static_cast<int>(place.begin - place.position);
}

}  // namespace lossops::cuda::side_by_side
