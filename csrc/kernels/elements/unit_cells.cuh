// Elements with neighbouring numbers that a thread reads and writes at once: a unit.
#pragma once

#include <cstdint>

#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

// The lower half of an address: enough to see how it is aligned.
__device__ __forceinline__ uint32_t low_bits(const char* data) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data));
}

// What was read of a unit of kWidth elements. In the layout of an aligned vector, an element of 4
// bytes has a cell of its own; elements of 2 bytes lie in the first kWidth / 2 cells, two in each.
template <int kWidth, int kCells>
struct UnitCells {
  static constexpr int kPairs = kWidth / 2;
  template <int kBytes>
  static constexpr int kWords = kBytes * kWidth / 4;
  static_assert(kCells > kPairs);
  uint32_t cells[kCells];

  // Each of these starts to read. Nothing waits here.
  template <int kBytes>
  __device__ __forceinline__ void load_vector(const char* data) {
    if constexpr (kBytes * kWidth == 16) {
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
  // By the words they lie in: also where half of a word is another's.
  template <int kBytes>
  __device__ __forceinline__ void load_words(const char* data) {
    const auto* const words =
        kBytes == 4 ? reinterpret_cast<const uint32_t*>(data) : word_around(data);
    __builtin_assume(__isGlobal(words));
#pragma unroll
    for (int i = 0; i < kWords<kBytes>; ++i) {
      cells[i] = words[i];
    }
    if constexpr (kBytes == 2) {
      // The last element by itself, if its word is not read yet: nothing behind the operand is
      // read.
      cells[kPairs] = *reinterpret_cast<const uint16_t*>(data + 2 * (kWidth - 1));
    }
  }

  // These bring what was read into the layout of an aligned vector.
  template <int kBytes>
  __device__ __forceinline__ void settle_one() {
    const uint32_t one = kBytes == 4 ? cells[0] : cells[0] << 16 | cells[0];
#pragma unroll
    for (int i = 0; i < kWords<kBytes>; ++i) {
      cells[i] = one;
    }
  }
  // Elements of 2 bytes. shift: the bits of the first word before the first element; modulo 32.
  __device__ __forceinline__ void settle_words(uint32_t shift) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      cells[i] = __funnelshift_r(cells[i], cells[i + 1], shift);
    }
  }

  // Elements of 2 bytes. dtype: of AnyHalf.
  template <typename scalar_t>
  __device__ __forceinline__ float get(int i, DType dtype) const {
    const auto bits = static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16));
    return to_acc_of<float>(scalar_t{bits}, dtype);
  }
  // All of them to float.
  template <typename scalar_t>
  __device__ __forceinline__ void unpack(DType dtype) {
    // From the last, so that no word is overwritten before it is read.
#pragma unroll
    for (int i = kWidth - 1; i >= 0; --i) {
      cells[i] = __float_as_uint(get<scalar_t>(i, dtype));
    }
  }
  // The other way: rounds.
  template <typename scalar_t>
  __device__ __forceinline__ static UnitCells pack(const float* values, DType dtype) {
    UnitCells unit;
#pragma unroll
    for (int i = 0; i < kWords<sizeof(scalar_t)>; ++i) {
      unit.cells[i] = pack_word_of<scalar_t>(values + i * (4 / sizeof(scalar_t)), dtype);
    }
    return unit;
  }

  template <int kBytes>
  __device__ __forceinline__ void store_vector(char* data) const {
    if constexpr (kBytes * kWidth == 16) {
      *reinterpret_cast<uint4*>(data) = make_uint4(cells[0], cells[1], cells[2], cells[3]);
    } else {
      *reinterpret_cast<uint2*>(data) = make_uint2(cells[0], cells[1]);
    }
  }
  // At any address, in aligned groups of 8 bytes: L2 takes one at a time, whatever its size. All
  // lanes of the warp must call it. Of a group that two lanes fill, the second writes all.
  // joins_previous, joins_next: the lane before has, or the next one, what lies beside this unit.
  template <int kBytes>
  __device__ __forceinline__ void store_words(char* data, bool joins_previous,
                                              bool joins_next) const {
    constexpr int kCount = kWords<kBytes>;
    // From the beginning of a group to the first element, in halves of words.
    const uint32_t before = low_bits(data) / 2 % 4;
    const bool odd = kBytes == 2 && before % 2 != 0;
    const bool skips_word = before >= 2;
    // What to write, from the word before the first group on, not yet shifted by half a word.
    uint32_t words[kCount + 2];
    const uint32_t previous = __shfl_up_sync(kAllLanes, cells[kCount - 1], 1);
    words[0] = 0;
    if constexpr (kBytes == 2) {
      const uint32_t one_more = __shfl_up_sync(kAllLanes, cells[kCount - 2], 1);
      words[0] = skips_word ? one_more : previous;
    }
    words[1] = skips_word ? previous : cells[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) {
      words[i + 1] = skips_word ? cells[i - 1] : cells[i];
    }
    words[kCount + 1] = cells[kCount - 1];
    uint32_t aligned[kCount + 1];
#pragma unroll
    for (int i = 0; i <= kCount; ++i) {
      aligned[i] = kBytes == 2 ? __funnelshift_l(words[i], words[i + 1], before * 16)  // modulo 32
                               : words[i + 1];
    }
    char* const to = data - before * 2;
    if (before == 0 || joins_previous) {
      *reinterpret_cast<uint2*>(to) = make_uint2(aligned[0], aligned[1]);
    } else {
      if (odd) {
        *reinterpret_cast<uint16_t*>(data) = static_cast<uint16_t>(cells[0]);
      }
      if (before != 3) {
        *reinterpret_cast<uint32_t*>(to + 4) = aligned[1];
      }
    }
#pragma unroll
    for (int i = 2; i < kCount; i += 2) {
      *reinterpret_cast<uint2*>(to + 4 * i) = make_uint2(aligned[i], aligned[i + 1]);
    }
    if (!joins_next && before != 0) {
      if (skips_word) {
        *reinterpret_cast<uint32_t*>(to + 4 * kCount) = aligned[kCount];
      }
      if (odd) {
        *reinterpret_cast<uint16_t*>(data + 2 * (kWidth - 1)) =
            static_cast<uint16_t>(cells[kCount - 1] >> 16);
      }
    }
  }
  template <int kBytes>
  __device__ __forceinline__ void store_strided(char* data, int distance) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
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
