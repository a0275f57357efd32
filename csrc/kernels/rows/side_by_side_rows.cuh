// What the kernel of rows that lie side by side, such as the pixels of an (N, C, H, W) tensor, has
// in common with the kernel of strided rows: the order of sums.
#pragma once

namespace lossops::cuda {

// Classes that a thread sums up at a time.
constexpr int kColumnUnroll = 4;

// As ExactSum, for half types: sums of eight at a time, of few classes, lose less than what their
// logits were rounded by.
struct PlainSum {
  float sum = 0;

  __device__ __forceinline__ void add(float x) { sum += x; }
  __device__ __forceinline__ float total() const { return sum; }
};

}  // namespace lossops::cuda
