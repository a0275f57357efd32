// Cross entropy of rows that lie side by side, such as the pixels of an (N, C, H, W) tensor: a
// thread takes as many neighbouring rows as 16 bytes hold, and copies all of their classes to
// shared memory first.
#pragma once

#include "kernels/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

struct ColumnPlan {
  int threads = 0;  // of a block; 0: these rows are not for this kernel
  int64_t blocks = 0;
};

// logits of fp32, fp16 or bf16, class indices without smoothing, few classes.
ColumnPlan plan_columns(const CrossEntropyForwardArgs& args);

void launch_columns(const CrossEntropyForwardArgs& args, const ColumnPlan& plan,
                    const Denominator& denominator, Partial* partials, const Finalize& finalize,
                    cudaStream_t stream);

}  // namespace lossops::cuda
