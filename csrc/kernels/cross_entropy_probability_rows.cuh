// Cross entropy of rows of half types with probability targets of the same type, whose logits a
// block holds in registers and whose probabilities it holds in shared memory.
#pragma once

#include "kernels/cross_entropy_row.cuh"
#include "kernels/row_pieces.cuh"
#include "kernels/row_shares.h"
#include "launchers.h"

namespace lossops::cuda {

// How rows, a block each at a time, are spread over the device.
struct ProbabilityRowPlan {
  int threads = 0;     // of a block; 0: these rows are not for this kernel
  Pieces pieces = {};  // of a row, a warp each
  RowShares shares;    // rows of a block, one after the other
  int64_t shared_bytes = 0;
  int64_t blocks = 0;
};

// fp16 and bf16 logits and probabilities of contiguous classes in whole vectors that lie at
// addresses of vectors; no class weights.
ProbabilityRowPlan plan_probability_rows(const CrossEntropyForwardArgs& args);

void launch_probability_rows(const CrossEntropyForwardArgs& args, const ProbabilityRowPlan& plan,
                             Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
