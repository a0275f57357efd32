// Cross entropy of rows that are read once: each is copied to shared memory, its loss computed
// there, and its gradient written from there.
//
// A row is cut into pieces, one for each warp of a block, or of a cluster of blocks where it is too
// long for one. Each warp loads, reduces and keeps its piece; the warps of a row meet once, to put
// its softmax together. While some warps of a multiprocessor compute, others load and store. What
// is needed of the rows beside their logits is fetched for a batch of them, and their losses are
// computed for a batch, a row a lane: by one lane a row, it took as long as the row's classes.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// Of a row: shorter ones are for tiles.
constexpr int64_t kMinStagedBytes = 2001;

// How rows are spread over the device.
struct StagedPlan {
  int threads = 0;       // of a block; 0: these rows are not for this kernel
  int cluster = 1;       // blocks a row
  int pieces = 0;        // of a row, each for a warp: the same with a gradient and without one
  int piece_size = 0;    // elements
  int piece_bytes = 0;   // of shared memory
  int shared_bytes = 0;  // of a block
  RowShares shares;      // rows of a block or cluster, one after the other
  int64_t blocks = 0;
};

// logits of fp32, fp16 or bf16, contiguous classes; class indices, not with both smoothing and
// weights; or probabilities of the logits' dtype, without weights.
StagedPlan plan_staged_rows(const CrossEntropyForwardArgs& args);

void launch_staged_rows(const CrossEntropyForwardArgs& args, const StagedPlan& plan,
                        const Denominator& denominator, Partial* partials, const Finalize& finalize,
                        cudaStream_t stream);

}  // namespace lossops::cuda
