// What launches the kernels of cross entropy's families, a function each. cross_entropy.cu calls
// the one that the plan names.
#pragma once

#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/scales.cuh"
#include "launchers.h"

namespace lossops::cuda {

// args.grad_input: null unless plan.writes_gradient. grad_output: where the gradient is computed
// again, and nothing else is left.
using LaunchRows = void(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream);

LaunchRows launch_side_by_side_rows;
LaunchRows launch_plane_rows;
LaunchRows launch_plane_words;
LaunchRows launch_soft_planes;
LaunchRows launch_few_classes;
LaunchRows launch_float_tiles;
LaunchRows launch_tiles;
LaunchRows launch_half_rows;
LaunchRows launch_float_rows;
LaunchRows launch_probability_rows;
LaunchRows launch_long_rows;
LaunchRows launch_split_rows;
LaunchRows launch_staged_rows;
LaunchRows launch_two_pass_rows;
LaunchRows launch_soft_tiles;

// Writes the gradients of a backward pass of which takes() of plane_gradients_plan.h is true.
void launch_plane_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream);
// Writes the gradients of a backward pass of fp32 and half types with class indices, without
// smoothing. Classes are contiguous. Logits and gradients do not share memory.
void launch_index_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream);
// Writes such gradients of rows of at most 4 KB. They may take the place of the logits.
void launch_short_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream);

}  // namespace lossops::cuda
