// The first pass over long rows, which tokens and two_pass_rows share.
#pragma once

#include <cuda_runtime.h>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "losses/rows/logit_map.h"

namespace lossops::cuda {

// Leaves the state of each piece of a slice's rows in states[row][piece], where `row` counts all
// rows of the call: an EntropySoftmax<float>, of fp64 logits an EntropySoftmax<double>. Rows that
// do not count leave an empty one. wants_entropy: else the distance of a state is undefined.
void launch_row_states(const RowSlice& slice, const RowSource& source, const RowCut& cut,
                       const LogitMapParams& map, bool wants_entropy, void* states,
                       cudaStream_t stream);

}  // namespace lossops::cuda
