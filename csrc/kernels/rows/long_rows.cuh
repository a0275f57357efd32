// Cross entropy of long rows of half types without gradients: warps hold pieces of a row in their
// registers. The pieces and the order of their sums are those of staged rows, and so are all bits.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/staged_rows.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How rows, a block each at a time, are spread over the device.
struct LongRowPlan {
  int threads = 0;   // of a block; 0: these rows are not for this kernel
  RowShares shares;  // rows of a block, one after the other
  int64_t blocks = 0;
};

// fp16 and bf16 logits of contiguous classes, no gradient; with smoothing in whole vectors, and
// with probabilities that probability_rows_fit(). staged: how staged rows would be cut.
LongRowPlan plan_long_rows(const CrossEntropyForwardArgs& args, const StagedPlan& staged);

void launch_long_rows(const CrossEntropyForwardArgs& args, const LongRowPlan& plan,
                      const StagedPlan& staged, Partial* partials, const Finalize& finalize,
                      cudaStream_t stream);

}  // namespace lossops::cuda
