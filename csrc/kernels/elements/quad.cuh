// Four elements with neighbouring numbers, read and written at once.
#pragma once

#include <cstdint>

#include "kernels/elements/extents.h"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// What was read of a quad. In the layout of an aligned vector, an element of 4 bytes has a cell of
// its own; elements of 2 bytes lie in the first two cells, two in each.
struct QuadCells {
  uint32_t cells[kQuad];

  // Each of these starts to read. Nothing waits here.
  template <int kBytes>
  __device__ __forceinline__ void load_vector(const char* data) {
    if constexpr (kBytes == 4) {
      const uint4 vector = *reinterpret_cast<const uint4*>(data);
      cells[0] = vector.x;
      cells[1] = vector.y;
      cells[2] = vector.z;
      cells[3] = vector.w;
    } else {
      const uint2 vector = *reinterpret_cast<const uint2*>(data);
      cells[0] = vector.x;
      cells[1] = vector.y;
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void load_one(const char* data) {
    if constexpr (kBytes == 4) {
      cells[0] = *reinterpret_cast<const uint32_t*>(data);
    } else {
      cells[0] = *reinterpret_cast<const uint16_t*>(data);
    }
  }
  // Elements of 2 bytes, by the words they lie in: also where half of a word is another's.
  __device__ __forceinline__ void load_words(const char* data) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    const auto* const words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    cells[0] = words[0];
    cells[1] = words[1];
    if ((address & 2) != 0) {
      cells[2] = words[2];
    }
  }
  // Elements of 2 bytes, one by one. The row ends after `left` of them; the others are `jump` bytes
  // further on.
  __device__ __forceinline__ void load_halves(const char* data, int left, int32_t jump) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      cells[i] = *reinterpret_cast<const uint16_t*>(data + 2 * i + (i < left ? 0 : jump));
    }
  }

  // Elements `distance` bytes apart.
  template <int kBytes>
  __device__ __forceinline__ void load_strided(const char* data, int distance) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if constexpr (kBytes == 4) {
        cells[i] = *reinterpret_cast<const uint32_t*>(data + int64_t{i} * distance);
      } else {
        cells[i] = *reinterpret_cast<const uint16_t*>(data + int64_t{i} * distance);
      }
    }
  }

  // These bring what was read into the layout of an aligned vector.
  template <int kBytes>
  __device__ __forceinline__ void settle_one() {
    const uint32_t one = kBytes == 4 ? cells[0] : cells[0] << 16 | cells[0];
#pragma unroll
    for (uint32_t& cell : cells) {
      cell = one;
    }
  }
  // are_halves: load_halves() read them. is_odd: the first element is the second of its word.
  __device__ __forceinline__ void settle_words(bool are_halves, bool is_odd) {
    const uint32_t shift = is_odd ? 16 : 0;
    const uint32_t low = are_halves ? __byte_perm(cells[0], cells[1], 0x5410)
                                    : __funnelshift_r(cells[0], cells[1], shift);
    cells[1] = are_halves ? __byte_perm(cells[2], cells[3], 0x5410)
                          : __funnelshift_r(cells[1], cells[2], shift);
    cells[0] = low;
  }

  // Of elements of 2 bytes.
  __device__ __forceinline__ void settle_strided() {
    cells[0] = __byte_perm(cells[0], cells[1], 0x5410);
    cells[1] = __byte_perm(cells[2], cells[3], 0x5410);
  }

  // Elements of 2 bytes to float.
  template <typename scalar_t>
  __device__ __forceinline__ void unpack() {
    // From the last, so that no word is overwritten before it is read.
#pragma unroll
    for (int i = kQuad - 1; i >= 0; --i) {
      const scalar_t value{static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16))};
      cells[i] = __float_as_uint(to_acc<float>(value));
    }
  }
  // The other way: rounds.
  template <typename scalar_t>
  __device__ __forceinline__ static QuadCells pack(const float* values) {
    QuadCells quad;
#pragma unroll
    for (int word = 0; word < static_cast<int>(sizeof(scalar_t)); ++word) {
      quad.cells[word] = pack_word<scalar_t>(values + word * (4 / sizeof(scalar_t)));
    }
    return quad;
  }

  template <int kBytes>
  __device__ __forceinline__ void store_vector(char* data) const {
    if constexpr (kBytes == 4) {
      *reinterpret_cast<uint4*>(data) = make_uint4(cells[0], cells[1], cells[2], cells[3]);
    } else {
      *reinterpret_cast<uint2*>(data) = make_uint2(cells[0], cells[1]);
    }
  }
  __device__ __forceinline__ void store_halves(char* data, int left, int32_t jump) const {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      *reinterpret_cast<uint16_t*>(data + 2 * i + (i < left ? 0 : jump)) =
          static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16));
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void store_strided(char* data, int distance) const {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if constexpr (kBytes == 4) {
        *reinterpret_cast<uint32_t*>(data + int64_t{i} * distance) = cells[i];
      } else {
        *reinterpret_cast<uint16_t*>(data + int64_t{i} * distance) =
            static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16));
      }
    }
  }
};

}  // namespace lossops::cuda
