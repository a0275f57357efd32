// How the sums that threads have of a row become one.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/primitives/warp_reduce.cuh"
#include "losses/math.h"

namespace lossops::cuda {

// The largest of numbers, none of them NaN, over aligned groups of lanes: in each of them.
template <typename acc_t, bool kOften = true>
__device__ __forceinline__ acc_t max_over_lanes(acc_t x, int lanes) {
  if constexpr (kOften && sizeof(acc_t) == 4) {
    if (lanes == kWarpSize) {
      return warp_max(x);
    }
  }
#pragma unroll 1
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x = math::max_number(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// The state of the lane whose number differs in one bit.
template <typename State>
__device__ __forceinline__ State exchange(const State& state, int bit) {
  static_assert(sizeof(State) % 4 == 0, "states are made of 4-byte words");
  uint32_t words[sizeof(State) / 4];
  memcpy(words, &state, sizeof(State));
#pragma unroll
  for (uint32_t& word : words) {
    word = __shfl_xor_sync(kAllLanes, word, bit);
  }
  State other = state;
  memcpy(&other, words, sizeof(State));
  return other;
}

// The state of a row, in each of the aligned lanes that call it; load(piece): that of a piece.
template <typename State, typename Load>
__device__ __forceinline__ State merge_states(int pieces, int lanes, const Load& load) {
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  State total;
  for (int piece = lane; piece < pieces; piece += lanes) {
    total.max = math::max_number(load(piece).max, total.max);
  }
  total.max = max_over_lanes<decltype(total.max), false>(total.max, lanes);
#pragma unroll 1
  for (int piece = lane; piece < pieces; piece += lanes) {
    State own = load(piece);
    own.raise_max(total.max);
    total.add(own);
  }
#pragma unroll 1
  for (int bit = lanes / 2; bit > 0; bit /= 2) {
    total.add(exchange(total, bit));
  }
  return total;
}

}  // namespace lossops::cuda
