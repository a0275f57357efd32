// Neighbours of a half type that a thread reads and writes at once: a unit.
#pragma once

#include <cstdint>

#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

// The lower half of an address: enough to see how it is aligned.
__device__ __forceinline__ uint32_t low_bits(const char* data) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data));
}

// What was read of a unit of kWidth elements of 2 bytes: in the layout of an aligned vector of 16
// bytes, and a cell more.
template <int kWidth>
struct UnitCells {
  static constexpr int kWords = kWidth / 2;
  static_assert(kWords == 4, "an aligned unit is a vector of 16 bytes");
  uint32_t cells[kWords + 1];

  // Each of these starts to read. Nothing waits here.
  __device__ __forceinline__ void load_vector(const char* data) {
    const uint4 vector = *reinterpret_cast<const uint4*>(data);
    cells[0] = vector.x;
    cells[1] = vector.y;
    cells[2] = vector.z;
    cells[3] = vector.w;
  }
  __device__ __forceinline__ void load_one(const char* data) {
    cells[0] = *reinterpret_cast<const uint16_t*>(data);
  }
  // By the words they lie in: also where half of a word is another's.
  __device__ __forceinline__ void load_words(const char* data) {
    const uint32_t* const words = word_around(data);
    __builtin_assume(__isGlobal(words));
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      cells[i] = words[i];
    }
    // The last element by itself, if its word is not read yet: nothing behind the operand is read.
    cells[kWords] = *reinterpret_cast<const uint16_t*>(data + 2 * (kWidth - 1));
  }

  // The bits of the first word before the first element of a unit: 0 or 16.
  __device__ __forceinline__ static uint32_t shift_of(const char* data) {
    return (low_bits(data) & 2) << 3;
  }

  // These bring what was read into the layout of an aligned vector.
  __device__ __forceinline__ void settle_one() {
    const uint32_t one = cells[0] << 16 | cells[0];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      cells[i] = one;
    }
  }
  // shift: shift_of(), modulo 32.
  __device__ __forceinline__ void settle_words(uint32_t shift) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      cells[i] = __funnelshift_r(cells[i], cells[i + 1], shift);
    }
  }

  template <typename scalar_t>
  __device__ __forceinline__ float get(int i) const {
    return to_acc<float>(scalar_t{static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16))});
  }
  // The other way: rounds.
  template <typename scalar_t>
  __device__ __forceinline__ static UnitCells pack(const float* values) {
    UnitCells unit;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      unit.cells[i] = pack_word<scalar_t>(values + 2 * i);
    }
    return unit;
  }

  __device__ __forceinline__ void store_vector(char* data) const {
    Vector<half_t> vector;  // of a uint4 the compiler makes four accesses
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      vector.set_word(i, cells[i]);
    }
    cuda::store_vector(reinterpret_cast<half_t*>(data), 0, vector);
  }
  // The last cell of the lane before. All lanes of the warp must call it.
  __device__ __forceinline__ uint32_t cell_before() const {
    return __shfl_up_sync(kAllLanes, cells[kWords - 1], 1);
  }
  // At any address, by whole words. Of a word that two lanes fill, the second writes all. before:
  // cell_before(). joins_previous: the lane before has the elements just before this unit in
  // memory. joins_next: the next lane has those just after it.
  __device__ __forceinline__ void store_words(char* data, uint32_t before, bool joins_previous,
                                              bool joins_next) const {
    const bool odd = (low_bits(data) & 2) != 0;
    auto* const words = reinterpret_cast<uint32_t*>(data - (odd ? 2 : 0));
    uint32_t shifted[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      shifted[i] = __funnelshift_l(before, cells[i], odd ? 16 : 0);
      before = cells[i];
    }
    if (!odd || joins_previous) {
      words[0] = shifted[0];
    } else {
      *reinterpret_cast<uint16_t*>(data) = static_cast<uint16_t>(cells[0]);
    }
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      words[i] = shifted[i];
    }
    if (odd && !joins_next) {
      *reinterpret_cast<uint16_t*>(data + 2 * (kWidth - 1)) = static_cast<uint16_t>(before >> 16);
    }
  }
  __device__ __forceinline__ void store_strided(char* data, int distance) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      *reinterpret_cast<uint16_t*>(data + int64_t{i} * distance) =
          static_cast<uint16_t>(cells[i / 2] >> (i % 2 * 16));
    }
  }
};

}  // namespace lossops::cuda
