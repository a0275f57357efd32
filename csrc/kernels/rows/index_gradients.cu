// Gradients of cross entropy with class indices, by two kernels of the machine of rows. policy.cpp
// chooses flat_gradients_kernel for short rows, and row_gradients_kernel for long ones of which
// logits or gradients are not aligned.
//
// A gradient depends on its own logit and on what forward left of the row. So it has the same bits
// here as in every other kernel.
#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/flat_gradients.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

// Cross entropy takes logits as they are.
struct NoMap {};

// What replace() of a LogitGradient takes of a row, and no more: flat_gradients_kernel keeps it of
// many rows in shared memory.
template <bool kExact>
struct LogitNumbers {
  float max;
  float factor;
  math::MultipleOfExp multiple;
  float lowest;

  __device__ __forceinline__ explicit LogitNumbers(const LogitGradient<float, true>& of)
      : max(of.softmax.max), factor(of.softmax.factor), multiple(of.multiple), lowest(of.lowest) {}

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
    LogitGradient<float, true> of;
    of.softmax.max = max;
    of.softmax.factor = factor;
    of.multiple = multiple;
    of.lowest = lowest;
    of.replace(x);
  }
};
template <>
struct LogitNumbers<false> {
  float scale;
  float offset;
  float factor;

  __device__ __forceinline__ explicit LogitNumbers(const LogitGradient<float, false>& of)
      : scale(of.terms.scale), offset(of.terms.offset), factor(of.factor) {}

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
    LogitGradient<float, false> of;
    of.terms.scale = scale;
    of.terms.offset = offset;
    of.factor = factor;
    of.replace(x);
  }
};

// What the gradients of a row are made of.
template <bool kExact>
struct IndexGradient {
  LogitNumbers<kExact> of_logit;
  float at_index;  // if the row has no loss, of all logits
  int index;       // -1: the row has no loss

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount], const NoMap& /*map*/) const {
    of_logit.replace(x);
    if (index < 0) {
#pragma unroll
      for (float& value : x) {
        value = at_index;
      }
    }
  }
};

template <bool kExact>
struct IndexGradients {
  using Gradient = IndexGradient<kExact>;
  CrossEntropyBackwardArgs args;  // operands are those of a slice of the rows

  __device__ __forceinline__ bool begin() const { return !kept_is_right(args); }

  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    const RowTarget<float> target(args, place.offset(args.target));
    const RowSummary<float> summary =
        load_summary<false>(args, target, place.row, place.offset(args.input));
    const RowGradient<float, false, kExact> gradient(
        args, target, summary, row_scale<float>(args, place.offset(args.grad_output)));
    const LogitNumbers<kExact> of_logit(gradient.logit_gradient);
    if (!target.has_loss()) {
      return {of_logit, gradient.without_loss(), -1};
    }
    // Else the compiler chooses between a number and the negative of another, with the sign of a NaN.
    return {of_logit, unfolded(gradient.at_index), static_cast<int>(target.index)};
  }

  // The class index once more, by the warp that wrote it.
  __device__ __forceinline__ void finish(const RowGrid::Place& place, const RowPart& part,
                                         const Gradient& gradient) const {
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

// Calls body with the type of logits: fp32, or any half type.
template <typename Body>
void visit_type(const CrossEntropyBackwardArgs& args, Body&& body) {
  if (args.input.dtype == DType::kFloat32) {
    body(RowType<float>(args.input.dtype));
  } else {
    body(RowType<any_half_t>(args.input.dtype));
  }
}

}  // namespace

void launch_index_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  visit_type(args, [&](auto type) {
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
  });
}

void launch_flat_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  visit_type(args, [&](auto type) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Gradients = IndexGradients<kExactExponentials<scalar_t>>;
    for_each_slice(args.rows, most_flat_rows(args.num_classes), [&](const RowSlice& slice) {
      const Gradients rows{slice_of(slice, args)};
      const RowSource source(slice, args.input, args.input_class_stride, Operand{});
      launch_flat_gradients_of(slice, rows, source, rows.args.grad_input, args.num_classes, type,
                               NoMap{}, stream);
    });
  });
}

}  // namespace lossops::cuda
