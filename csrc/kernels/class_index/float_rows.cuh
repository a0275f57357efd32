// Cross entropy of rows of fp32 that a few warps hold in their registers.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How rows are spread over the device.
struct FloatRowPlan {
  int threads = 0;  // of a team, which has a row at a time; 0: these rows are not for this kernel
  int teams = 1;    // of a block, whose rows they take in turn
  bool words = false;    // rows are not whole vectors
  bool aligned = false;  // vectors can access all rows
  BlockShares shares;    // of rows
  int64_t blocks = 0;
};

// Logits of contiguous classes, class indices without smoothing.
FloatRowPlan plan_float_rows(const CrossEntropyForwardArgs& args);

void launch_float_rows(const CrossEntropyForwardArgs& args, const FloatRowPlan& plan,
                       const Denominator& denominator, Partial* partials, const Finalize& finalize,
                       cudaStream_t stream);

}  // namespace lossops::cuda
