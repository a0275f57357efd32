// The first pass over long rows: of tokens, and of cross entropy by two passes.
#pragma once

#include <cuda_runtime.h>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "losses/rows/logit_map.h"

namespace lossops::cuda {

// Leaves an EntropySoftmax, of fp64 logits in fp64, of each piece of a slice's rows: (rows,
// pieces), of all rows. wants_entropy: else distances are anything.
void launch_row_states(const RowSlice& slice, const RowSource& source, const RowCut& cut,
                       const LogitMapParams& map, bool wants_entropy, void* states,
                       cudaStream_t stream);

}  // namespace lossops::cuda
