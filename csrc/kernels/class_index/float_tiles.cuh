// Cross entropy of short rows of fp32: a warp takes a tile of consecutive rows, a lane or a few of
// them a row.
#pragma once

#include "kernels/rows/cross_entropy_row.cuh"
#include "launchers.h"

namespace lossops::cuda {

// How tiles are spread over the device.
struct FloatTilePlan {
  int threads = 0;     // of a block; 0: these rows are not for this kernel
  int log_team = 0;    // 2^log_team lanes share a row
  int share = 0;       // units of each of them, but the last
  int tiles = 1;       // of a warp
  int tile_bytes = 0;  // of shared memory
  int64_t blocks = 0;
};

// logits of fp32, contiguous classes, class indices without smoothing.
FloatTilePlan plan_float_tiles(const CrossEntropyForwardArgs& args);

void launch_float_tiles(const CrossEntropyForwardArgs& args, const FloatTilePlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream);

}  // namespace lossops::cuda
