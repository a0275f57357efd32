// Reduction across a block: warps by shuffle, then one warp over their results.
#pragma once

#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

constexpr int kMaxWarps = 32;

// All threads of the block must call it; blockDim.x is a multiple of 32 and there is no
// other dimension. The result is valid in thread 0. State{} is the identity. The second stage
// is not unrolled (warp_reduce()'s kInLoop, which states with a maximum ignore): less machine code.
// kInLoop: neither is the first. Forward of short rows takes 1 to 3 % longer with it. (H100,
// 2026-11)
template <bool kInLoop = false, typename State>
__device__ __forceinline__ State block_reduce(State state) {
  // Raw storage: shared variables take no initialiser.
  alignas(State) __shared__ unsigned char storage[kMaxWarps * sizeof(State)];
  State* const warps = reinterpret_cast<State*>(storage);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_warps = static_cast<int>(blockDim.x) / kWarpSize;

  state = warp_reduce<kInLoop>(state);
  if (num_warps == 1) {
    return state;
  }
  if (lane == 0) {
    warps[warp] = state;
  }
  __syncthreads();
  if (warp == 0) {
    state = lane < num_warps ? warps[lane] : State{};
    state = warp_reduce<true>(state);
  }
  __syncthreads();  // storage may be used again
  return state;
}

}  // namespace lossops::cuda
