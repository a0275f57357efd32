// Cross entropy of rows of half types with probability targets of the same type, whose logits a
// block holds in registers and whose probabilities it holds in shared memory.
#pragma once

#include "kernels/grid/row_shares.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/staged_rows.cuh"
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

// Whether logits and probabilities are fp16 or bf16, of contiguous classes in whole vectors that
// lie at addresses of vectors, without class weights, and a block has room for a row. Cut as
// `staged` says.
bool probability_rows_fit(const CrossEntropyForwardArgs& args, const StagedPlan& staged);

// Of these, rows without a gradient from so many bytes on are for cross_entropy_long_rows.cu.
// Measured on an H200: rows of 2 KB take 19 % longer there and of 4 KB 4 %, of 8 KB 3 % less, of 16
// and 64 KB 7 to 8 %.
constexpr int64_t kLongProbabilityBytes = 8 << 10;

// Cut as `staged` says, for the bits of rows that lie otherwise.
ProbabilityRowPlan plan_probability_rows(const CrossEntropyForwardArgs& args,
                                         const StagedPlan& staged);

void launch_probability_rows(const CrossEntropyForwardArgs& args, const ProbabilityRowPlan& plan,
                             Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
