// Cross entropy of short rows of half types: a warp takes several at a time, a tile of consecutive
// rows.
#pragma once

#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How tiles are spread over the device.
struct TilePlan {
  int threads = 0;     // of a block; 0: these rows are not for this kernel
  int team = 1;        // lanes that share a row
  bool gaps = false;   // rows do not follow one another, in logits or gradient
  int steps = 1;       // of a tile: rows that a team takes one after the other
  int padding = 0;     // granules of 16 bytes between rows in shared memory
  int warp_bytes = 0;  // of shared memory
  int64_t blocks = 0;
};

// logits of fp16 or bf16, contiguous classes, class indices without smoothing.
TilePlan plan_tiles(const CrossEntropyForwardArgs& args);

void launch_tiles(const CrossEntropyForwardArgs& args, const TilePlan& plan,
                  const Denominator& denominator, const GradOutput& grad_output, Partial* partials,
                  const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
