// Cross entropy of long rows with class indices, without smoothing, by the two passes of
// row_pass.cuh. The loss is computed here, and reads each row once. The gradient is computed by
// index_gradients.cu, in place by team_rows.cuh, which reads it once more. With Hopper's kernels
// these are the rows that are too long to be staged, without them most rows above 4 KB.

#include <cstdint>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/indexed_source.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_merge.cuh"
#include "kernels/rows/row_states.cuh"
#include "kernels/rows/two_pass_rows_plan.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {
namespace two_pass_rows {
namespace {

static_assert(sizeof(EntropySoftmax<float>) == kStateFloats * sizeof(float));

// Merges the states of each row's pieces, by `lanes` a row, and finishes its loss.
__global__ void __launch_bounds__(kRowThreads)
    two_pass_losses_kernel(const __grid_constant__ CrossEntropyForwardArgs args, int pieces,
                           int lanes, const EntropySoftmax<float>* states, Partial* partials,
                           Finalize finalize) {
  const int rows_of_block = kRowThreads / lanes;
  const bool is_first = (static_cast<int>(threadIdx.x) & (lanes - 1)) == 0;
  let_next_kernel_start();
  wait_for_previous_kernel();
  Partial partial;
  for (int64_t first = int64_t{blockIdx.x} * rows_of_block; first < args.rows.numel;
       first += int64_t{gridDim.x} * rows_of_block) {
    const int64_t row = first + static_cast<int>(threadIdx.x) / lanes;
    // Lanes without a row merge nothing: the shuffles need all lanes of a warp.
    const bool exists = row < args.rows.numel;
    const auto state = merge_states<EntropySoftmax<float>>(
        exists ? pieces : 0, lanes, [&](int i) { return states[row * pieces + i]; });
    if (is_first && exists) {
      const int64_t target = load_class_index(args.target, row_offset(args.rows, args.target, row));
      const int index = checked_index(args, target);
      const float x_at_index =
          index >= 0
              ? load_operand<float>(args.input, row_offset(args.rows, args.input, row) + index)
              : 0.0f;
      finish_indexed_row<RowKind::kIndex>(
          args, SmoothedIndex(Smoothing{}), index, row_weight(args, index), state, /*distance=*/0,
          /*q_sum=*/0, x_at_index, row,
          [&](int64_t r) { return row_offset(args.rows, args.output, r); }, partial);
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace two_pass_rows

void launch_two_pass_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                          const Denominator&, const GradOutput&, Partial* partials,
                          const Finalize& finalize, cudaStream_t stream) {
  using namespace two_pass_rows;
  const RowCut cut = cut_of(args);
  // Behind the partials, where there are any.
  auto* const states = reinterpret_cast<EntropySoftmax<float>*>(
      args.reduction == Reduction::kNone ? partials : partials + plan.blocks);
  for_each_slice(args.rows, kMaxDividend / cut.pieces, [&](const RowSlice& slice) {
    launch_row_states(slice, indexed_source(slice, args), cut, LogitMapParams(),
                      /*wants_entropy=*/false, states, stream);
  });
  LaunchShape shape = {plan.blocks, kRowThreads};
  shape.overlap = true;
  launch_kernel("two_pass_losses_kernel", two_pass_losses_kernel, shape, stream, args, cut.pieces,
                plan.team, states, partials, finalize);
}

}  // namespace lossops::cuda
