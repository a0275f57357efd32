// Cross entropy and its gradient, of rows of half types that are too long for registers.
//
// A row is cut as staged rows are, a piece a warp, and held half in registers and half in shared
// memory: two blocks of a multiprocessor hold 256 KB, where shared memory alone holds 192. A row
// then takes a block where staged rows take two, or a cluster of half the size.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/staged_rows.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How rows are spread over the device.
struct SplitRowPlan {
  int threads = 0;   // of a block; 0: these rows are not for this kernel
  int cluster = 1;   // blocks a row
  RowShares shares;  // rows of a block or cluster, one after the other
  int64_t shared_bytes = 0;
  int64_t blocks = 0;
  Pieces pieces = {0, 0};
};

// With a gradient; fp16 and bf16 logits of contiguous classes in whole vectors, class indices
// without smoothing. Cut as `staged` says.
SplitRowPlan plan_split_rows(const CrossEntropyForwardArgs& args, const StagedPlan& staged);

void launch_split_rows(const CrossEntropyForwardArgs& args, const SplitRowPlan& plan,
                       const Denominator& denominator, Partial* partials, const Finalize& finalize,
                       cudaStream_t stream);

}  // namespace lossops::cuda
