// Four elements with neighbouring numbers, read and written at once.
#pragma once

#include <cstdint>

#include "kernels/elements/extents.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

// Whether an address is that of the second half of a word.
__device__ __forceinline__ bool is_odd(const char* data) {
  return (reinterpret_cast<uintptr_t>(data) & 2) != 0;
}

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
    const auto* const words =
        reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(data) & ~uintptr_t{3});
    __builtin_assume(__isGlobal(words));
    cells[0] = words[0];
    cells[1] = words[1];
    cells[2] = 0;
    if (is_odd(data)) {
      cells[2] = words[2];
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
  // is_odd: the first element is the second of its word.
  __device__ __forceinline__ void settle_words(bool is_odd) {
    const uint32_t shift = is_odd ? 16 : 0;
    cells[0] = __funnelshift_r(cells[0], cells[1], shift);
    cells[1] = __funnelshift_r(cells[1], cells[2], shift);
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
  // Elements of 2 bytes, by the words that they fill. All lanes of the warp. A word that two lanes
  // fill is written by the first of them. joins_previous, joins_next: the lane before has, or the
  // next one, what lies beside this quad.
  __device__ __forceinline__ void store_words(char* data, bool joins_previous,
                                              bool joins_next) const {
    const bool odd = is_odd(data);
    const uint32_t next = __shfl_down_sync(kAllLanes, cells[0], 1);
    auto* const words = reinterpret_cast<uint32_t*>(odd ? data + 2 : data);
    const uint32_t shift = odd ? 16 : 0;
    words[0] = __funnelshift_r(cells[0], cells[1], shift);
    if (!odd || joins_next) {
      words[1] = __funnelshift_r(cells[1], next, shift);
    } else {
      *reinterpret_cast<uint16_t*>(data + 6) = static_cast<uint16_t>(cells[1] >> 16);
    }
    if (odd && !joins_previous) {
      *reinterpret_cast<uint16_t*>(data) = static_cast<uint16_t>(cells[0]);
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
