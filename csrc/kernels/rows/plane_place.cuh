// Where rows are whose classes are not neighbours. plane_grid.cuh says what a plane and a position
// are. A group is kRows neighbouring rows of a plane: 8 bytes of each class in plane_rows.cu, a
// word of 4 bytes in plane_words.cu and soft_planes.cu.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda::plane_rows {

// The groups of all rows, numbered plane by plane.
struct PlaneGroups {
  uint32_t groups;
  Divisor groups_of_plane;
  int64_t positions;  // of a plane

  // Groups that are words.
  static PlaneGroups of_words(const CrossEntropyArgs& args) {
    return {static_cast<uint32_t>(side_by_side::words_of(args)),
            Divisor(static_cast<uint32_t>(side_by_side::words_of_plane(args))),
            side_by_side::positions_of(args)};
  }
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
  int rows;  // of the group that exist: fewer at the end of a plane, or none

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
                                              : kRows};
  }
};

// These load 4 and 2 bytes of global memory. The compiler does not know that the addresses are
// global, so it would load from any memory.
__device__ __forceinline__ uint32_t load_word(const void* from) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(__cvta_generic_to_global(from)));
  return word;
#else
  return *static_cast<const uint32_t*>(from);
#endif
}
__device__ __forceinline__ uint32_t load_half(const void* from) {
#if __CUDA_ARCH__ >= 800
  uint32_t half;
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(half) : "l"(__cvta_generic_to_global(from)));
  return half;
#else
  return *static_cast<const uint16_t*>(from);
#endif
}

// Where the logits, probabilities or gradients of a word's rows are: those of one row of fp32, or
// of two neighbouring rows of half types.
template <typename T>
struct WordPlace {
  T* data;               // of the first row, class 0
  uint32_t class_bytes;  // from a class to the next
  int64_t next_row;      // elements from the first row to the second; 0 if there is none
  bool is_whole;         // an access of 4 bytes may take the word, whatever its second half is

  // aligned: the operand lies in words, or the caller checks begins_mid_word() before it reads a
  // word.
  static __device__ __forceinline__ WordPlace of(const PlanePlace& place, const Operand& operand,
                                                 int64_t class_stride, bool aligned) {
    return {static_cast<T*>(operand.data) + place.offset(operand),
            static_cast<uint32_t>(class_stride * int64_t{sizeof(T)}),
            place.rows > 1 ? operand.strides[0] : 0, aligned && place.rows * sizeof(T) == 4};
  }

  __device__ __forceinline__ T* of_class(int c) const { return after(data, c, class_bytes); }
  __device__ __forceinline__ bool has_words() const { return sizeof(T) == 4 || is_whole; }
  // Of half types: whether the first row, in class c, is the second half of a word.
  __device__ __forceinline__ bool begins_mid_word(int c) const {
    return reinterpret_cast<uintptr_t>(of_class(c)) % 4 != 0;
  }
  // The word whose second row is the first one here. Its own first row may lie before the operand,
  // but in the same word of memory.
  __device__ __forceinline__ WordPlace row_before() const {
    return {data - 1, class_bytes, next_row, true};
  }
  // The address count * bytes behind `from`. The product of 32-bit numbers is one instruction.
  static __device__ __forceinline__ T* after(T* from, int count, uint32_t bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(from) +
                                static_cast<uint64_t>(static_cast<uint32_t>(count)) * bytes);
  }
};

// A row of a block. first: the number of the block's first group.
struct PlaneRow {
  PlanePlace place;  // of its group
  int i;             // in its group

  template <int kRows>
  static __device__ __forceinline__ PlaneRow of(const IterationSpace& space,
                                                const PlaneGroups& grid, uint32_t first, int row) {
    return {PlanePlace::of<kRows>(space, grid, first + row / kRows), row % kRows};
  }
  __device__ __forceinline__ bool is_there() const { return i < place.rows; }
  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    return place.offset(operand) + i * operand.strides[0];
  }
  __device__ __forceinline__ int64_t number(const PlaneGroups& grid) const {
    return place.row(grid.positions) + i;
  }
};

// put_numbers() writes the floats of a value to places that lie `pitch` floats apart, and
// get_numbers() reads them.
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
