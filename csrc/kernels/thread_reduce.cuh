// Reduction of the values that one thread has in registers.
#pragma once

namespace lossops::cuda {

// By halves: equal terms add up exactly, where a chain would round them the same way every time.
template <int kCount, typename acc_t>
__device__ __forceinline__ acc_t pairwise_sum(const acc_t (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    acc_t sums[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      sums[i] = values[2 * i] + values[2 * i + 1];
    }
    return pairwise_sum(sums);
  }
}

}  // namespace lossops::cuda
