// Reduction of the values that one thread has in registers.
#pragma once

namespace lossops::cuda {

// By halves.
template <int kCount, typename acc_t, typename Op>
__device__ __forceinline__ acc_t pairwise_reduce(const acc_t (&values)[kCount], Op&& op) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    acc_t halves[(kCount + 1) / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      halves[i] = op(values[2 * i], values[2 * i + 1]);
    }
    if constexpr (kCount % 2 != 0) {
      halves[kCount / 2] = values[kCount - 1];
    }
    return pairwise_reduce(halves, op);
  }
}

// Equal terms add up exactly, where a chain would round them the same way every time.
template <int kCount, typename acc_t>
__device__ __forceinline__ acc_t pairwise_sum(const acc_t (&values)[kCount]) {
  return pairwise_reduce(values, [](acc_t a, acc_t b) { return a + b; });
}

}  // namespace lossops::cuda
