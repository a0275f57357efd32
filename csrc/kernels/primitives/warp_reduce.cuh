// Reduction across the lanes of a warp, or of each aligned group of 2, 4, 8 or 16.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/primitives/sizes.h"
#include "losses/math.h"

namespace lossops::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// Any trivially copyable state, 4 bytes at a time.
template <typename State>
__device__ __forceinline__ State shuffle_down(const State& state, int offset) {
  static_assert(sizeof(State) % 4 == 0, "states are made of 4-byte words");
  constexpr int kWords = sizeof(State) / 4;
  uint32_t words[kWords];
  memcpy(words, &state, sizeof(State));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = __shfl_down_sync(kAllLanes, words[i], offset);
  }
  State shuffled = state;
  memcpy(&shuffled, words, sizeof(State));
  return shuffled;
}

// States that combine as one value, and those with a maximum, which every lane raises its own to
// first: then they add, and the exponentials of combine() are spared.
template <typename State, typename = void>
struct HasMax : std::false_type {};
template <typename State>
struct HasMax<State, std::void_t<decltype(State::max)>> : std::true_type {};

// All lanes of the warp must call it; the result is valid in the first lane of each group
// of `width` (a power of two). kInLoop: not unrolled, for kernels whose code is long: shuffles take
// much of it where a compiler cannot know that all lanes are there.
template <bool kInLoop = false, typename State>
__device__ __forceinline__ State warp_reduce(State state, int width = kWarpSize) {
  if constexpr (HasMax<State>::value) {
    auto max = state.max;
    for (int offset = width / 2; offset > 0; offset /= 2) {
      max = math::max_number(max, __shfl_xor_sync(kAllLanes, max, offset));
    }
    state.raise_max(max);
    for (int offset = width / 2; offset > 0; offset /= 2) {
      const State other = shuffle_down(state, offset);
      state.add(other);
    }
  } else if constexpr (kInLoop) {
#pragma unroll 1
    for (int offset = width / 2; offset > 0; offset /= 2) {
      const State other = shuffle_down(state, offset);
      state.combine(other);
    }
  } else {
    for (int offset = width / 2; offset > 0; offset /= 2) {
      const State other = shuffle_down(state, offset);
      state.combine(other);
    }
  }
  return state;
}

// The largest of numbers, none of them NaN, in every lane of the group.
__device__ __forceinline__ float warp_max(float x, int width = kWarpSize) {
#if __CUDA_ARCH__ >= 800
  if (width == kWarpSize) {
    // As integers of the same order.
    const int bits = __float_as_int(x);
    const int max = __reduce_max_sync(kAllLanes, bits ^ ((bits >> 31) & 0x7fffffff));
    return __int_as_float(max ^ ((max >> 31) & 0x7fffffff));
  }
#endif
  for (int offset = width / 2; offset > 0; offset /= 2) {
    x = math::max_number(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// The sum, in every lane of the group, and the same bits in each. kInLoop: as above.
template <bool kInLoop = false, typename T>
__device__ __forceinline__ T warp_sum(T x, int width = kWarpSize) {
  if constexpr (kInLoop) {
#pragma unroll 1
    for (int offset = width / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, offset);
    }
  } else {
    for (int offset = width / 2; offset > 0; offset /= 2) {
      x += __shfl_xor_sync(kAllLanes, x, offset);
    }
  }
  return x;
}

}  // namespace lossops::cuda
