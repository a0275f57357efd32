// What the kernel of rows that lie side by side, such as the pixels of an (N, C, H, W) tensor, has
// in common with the kernel of strided rows: the order of sums.
#pragma once

#include "kernels/primitives/thread_reduce.cuh"

namespace lossops::cuda {

// Classes that a thread sums up at a time.
constexpr int kColumnUnroll = 4;

// The sum of term(0) to term(kColumnUnroll - 1).
template <typename Term>
__device__ __forceinline__ float sum_of_four(const Term& term) {
  float values[kColumnUnroll];
#pragma unroll
  for (int i = 0; i < kColumnUnroll; ++i) {
    values[i] = term(i);
  }
  return pairwise_sum(values);
}

}  // namespace lossops::cuda
