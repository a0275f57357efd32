// Cross entropy of rows of half types with probability targets of the same type, whose logits a
// block holds in registers and whose probabilities it holds in shared memory.
#pragma once

#include "kernels/cross_entropy_row.cuh"
#include "kernels/row_pieces.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How many rows a block takes, one after the other. The first blocks take more than the others,
// which are started as those end: neither do many blocks start, nor does one end long after others.
struct RowShares {
  int large = 1;
  int small = 1;
  int64_t num_large = 0;  // blocks

  __host__ __device__ int64_t rows(int64_t block) const {
    return block < num_large ? large : small;
  }
  __host__ __device__ int64_t first_row(int64_t block) const {
    return block < num_large ? block * large : num_large * large + (block - num_large) * small;
  }
};

// How rows, a block each at a time, are spread over the device.
struct ProbabilityRowPlan {
  int threads = 0;     // of a block; 0: these rows are not for this kernel
  Pieces pieces = {};  // of a row, a warp each
  RowShares shares;
  int64_t shared_bytes = 0;
  int64_t blocks = 0;
};

// fp16 and bf16 logits and probabilities of contiguous classes in whole vectors that lie at
// addresses of vectors; no class weights.
ProbabilityRowPlan plan_probability_rows(const CrossEntropyForwardArgs& args);

void launch_probability_rows(const CrossEntropyForwardArgs& args, const ProbabilityRowPlan& plan,
                             Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
