// Cross entropy of few classes: a thread a row, which is whole in its registers.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How rows are spread over the device.
struct FewPlan {
  int threads = 0;     // of a block; 0: these rows are not for this kernel
  int warp_bytes = 0;  // of shared memory
  BlockShares shares;  // steps of each warp, one after the other
  int64_t blocks = 0;
};

// fp32 logits of contiguous classes, class indices without smoothing.
FewPlan plan_few_classes(const CrossEntropyForwardArgs& args);

void launch_few_classes(const CrossEntropyForwardArgs& args, const FewPlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
