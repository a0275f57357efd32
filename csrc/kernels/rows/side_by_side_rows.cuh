// Cross entropy of rows that lie side by side, such as the pixels of an (N, C, H, W) tensor: a
// thread takes a few neighbouring rows, and copies all of their classes to shared memory first.
#pragma once

#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// Classes that a thread sums up at a time.
constexpr int kColumnUnroll = 4;

// More do not fit the shared memory of a block of 32 threads.
constexpr int kMaxColumnClasses = 88;
static_assert(kMaxColumnClasses <= kMaxIndexClasses, "class indices in bytes");

// As ExactSum, for half types: sums of eight at a time, of few classes, lose less than what their
// logits were rounded by.
struct PlainSum {
  float sum = 0;

  __device__ __forceinline__ void add(float x) { sum += x; }
  __device__ __forceinline__ float total() const { return sum; }
};

struct ColumnPlan {
  int threads = 0;  // of a block; 0: these rows are not for this kernel
  int64_t blocks = 0;
  int class_bytes = 0;  // of a thread
};

// Whether rows of logits, or of their gradient, lie side by side, in whole groups of a thread.
bool lies_in_columns(const CrossEntropyArgs& args, const Operand& operand, int64_t class_stride);

// logits of fp32, fp16 or bf16, class indices without smoothing, few classes.
ColumnPlan plan_columns(const CrossEntropyForwardArgs& args);

void launch_columns(const CrossEntropyForwardArgs& args, const ColumnPlan& plan,
                    const Denominator& denominator, const GradOutput& grad_output,
                    Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
