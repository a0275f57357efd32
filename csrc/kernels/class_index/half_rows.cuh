// Cross entropy of rows of half types that a few warps hold in their registers.
#pragma once

#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How rows, a block each at a time, are spread over the device.
struct HalfRowPlan {
  int threads = 0;       // of a block; 0: these rows are not for this kernel
  bool aligned = false;  // vectors can access all rows
  int rows = 1;          // of a block, one after the other
  int64_t blocks = 0;
};

// fp16 and bf16 logits of contiguous classes in whole vectors, class indices without smoothing.
HalfRowPlan plan_half_rows(const CrossEntropyForwardArgs& args);

void launch_half_rows(const CrossEntropyForwardArgs& args, const HalfRowPlan& plan,
                      const Denominator& denominator, Partial* partials, const Finalize& finalize,
                      cudaStream_t stream);

}  // namespace lossops::cuda
