// Where rows are whose classes are not neighbours: plane_grid.cuh says what a plane, a position and
// a group are.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"

namespace lossops::cuda::plane_rows {

// The groups of all rows, numbered plane by plane.
struct PlaneGroups {
  uint32_t groups;
  Divisor groups_of_plane;
  int64_t positions;  // of a plane
};

// Where a row is.
struct PlaneRowPlace {
  const IterationSpace& space;
  int64_t position;  // in its plane
  uint32_t plane;

  // positions: of a plane.
  __device__ __forceinline__ int64_t row(int64_t positions) const {
    return plane * positions + position;
  }
  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    return position * operand.strides[0] +
           (space.ndim <= 2 ? plane * operand.strides[1] : of_dimensions(space, operand, plane));
  }

 private:
  // Not inlined: it is long, rare, and asked for in many places.
  static __device__ __attribute__((noinline)) int64_t of_dimensions(const IterationSpace& space,
                                                                    const Operand& operand,
                                                                    uint32_t plane) {
    int64_t offset = 0;
    uint32_t rest = plane;
#pragma unroll 1
    for (int dim = 1; dim < space.ndim; ++dim) {
      const auto size = static_cast<uint32_t>(space.sizes[dim]);
      const uint32_t outer = rest / size;
      offset += (rest - outer * size) * operand.strides[dim];
      rest = outer;
    }
    return offset;
  }
};

// Where a group of rows is: its first row.
struct PlanePlace : PlaneRowPlace {
  int rows;       // of the group that exist: fewer at the end of a plane, or none
  bool is_there;  // the group's number is below that of all groups

  template <int kRows>
  static __device__ __forceinline__ PlanePlace of(const IterationSpace& space,
                                                  const PlaneGroups& grid, uint32_t group) {
    const uint32_t own = group < grid.groups ? group : grid.groups - 1;
    const uint32_t plane = grid.groups_of_plane.quotient(own);
    const int64_t position = int64_t{own - plane * grid.groups_of_plane.value} * kRows;
    const int64_t left = grid.positions - position;
    return {{space, position, plane},
            group >= grid.groups || left <= 0 ? 0
            : left < kRows                    ? static_cast<int>(left)
                                              : kRows,
            group < grid.groups};
  }
};

// Numbers in shared memory that lie `pitch` words apart.
template <typename T>
__device__ __forceinline__ void put_numbers(float* to, int pitch, const T& value) {
  constexpr int kCount = sizeof(T) / sizeof(float);
  float words[kCount];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    to[k * pitch] = words[k];
  }
}
template <typename T>
__device__ __forceinline__ T get_numbers(const float* from, int pitch) {
  constexpr int kCount = sizeof(T) / sizeof(float);
  float words[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    words[k] = from[k * pitch];
  }
  T value;
  memcpy(&value, words, sizeof(T));
  return value;
}

}  // namespace lossops::cuda::plane_rows
