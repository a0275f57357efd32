// Gradients of cross entropy with class indices, on the machine of row_pass.cuh. policy.cpp chooses
// it for long rows of which logits or gradients are not aligned.
//
// A gradient depends on its own logit and on what forward left of the row. So it has the same bits
// here as in every other kernel.
#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

// Cross entropy takes logits as they are.
struct NoMap {};

// What the gradients of a row are made of.
template <bool kExact>
struct IndexGradient {
  LogitGradient<float, kExact> of_logit;
  float at_index;
  float without_loss;  // of all logits, if the row has no loss
  int64_t index;       // -1: the row has no loss

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount], const NoMap& /*map*/) const {
    of_logit.replace(x);
    if (index < 0) {
#pragma unroll
      for (float& value : x) {
        value = without_loss;
      }
    }
  }
};

template <bool kExact>
struct IndexGradients {
  CrossEntropyBackwardArgs args;  // operands are those of a slice of the rows

  __device__ __forceinline__ bool begin() const { return !kept_is_right(args); }

  __device__ __forceinline__ IndexGradient<kExact> of(const RowGrid::Place& place) const {
    const RowTarget<float> target(args, place.offset(args.target));
    const RowSummary<float> summary =
        load_summary<false>(args, target, place.row, place.offset(args.input));
    const RowGradient<float, false, kExact> gradient(
        args, target, summary, row_scale<float>(args, place.offset(args.grad_output)));
    return {gradient.logit_gradient, gradient.at_index, gradient.without_loss(),
            target.has_loss() ? target.index : -1};
  }

  // The class index once more, by the warp that wrote it.
  __device__ __forceinline__ void finish(const RowGrid::Place& place, const RowPart& part,
                                         const IndexGradient<kExact>& gradient) const {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0 && gradient.index >= 0 && part.has(gradient.index)) {
      store_operand(args.grad_input, place.offset(args.grad_input) + gradient.index,
                    gradient.at_index);
    }
  }
};

CrossEntropyBackwardArgs slice_of(const RowSlice& slice, CrossEntropyBackwardArgs args) {
  args.input = slice(args.input);
  args.target = slice(args.target);
  args.grad_output = slice(args.grad_output);
  args.grad_input = slice(args.grad_input);
  return args;
}

}  // namespace

void launch_index_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  const auto launch = [&](auto type) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Gradients = IndexGradients<kExactExponentials<scalar_t>>;
    constexpr int kWarps = kRowThreads / kWarpSize;
    const int64_t resident_warps = int64_t{kRowBlocks<scalar_t>} * kWarps *
                                   std::max(current_device_limits().multiprocessors, 1);
    const RowParts plan =
        RowParts::of(args.rows.numel, args.num_classes, sizeof(scalar_t), resident_warps);
    for_each_slice(args.rows, kMaxDividend / plan.parts, [&](const RowSlice& slice) {
      const RowGrid grid(slice, plan.parts);
      const Gradients rows{slice_of(slice, args)};
      const RowSource source(slice, args.input, 1, Operand{});
      launch_kernel("row_gradients_kernel", row_gradients_kernel<Gradients, scalar_t, NoMap>,
                    {grid.blocks(kWarpSize), kRowThreads, 0, 1, true}, stream, rows, source,
                    rows.args.grad_input, 1, grid, plan, type, NoMap{});
    });
  };
  if (args.input.dtype == DType::kFloat32) {
    launch(RowType<float>(args.input.dtype));
  } else {
    launch(RowType<any_half_t>(args.input.dtype));
  }
}

}  // namespace lossops::cuda
