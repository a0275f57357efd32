// Cross entropy with several coefficients, of rows of at most 8 classes:
// few_soft_classes_plan.h says which. The coefficients are probabilities, or a smoothed class index
// with class weights. A thread reads a whole row to registers, and computes its loss and its
// gradient there.
//
// Only cross_entropy.cu includes this, as register_rows.cuh.
#pragma once

#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/few_soft_classes_plan.h"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_terms.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace few_soft_classes {
namespace {

using plane_rows::PlaneGroups;
using plane_rows::PlanePlace;

// Calls body(u) for u = 0, 1, ... below count: a branch of the whole grid for each. Unrolled, so
// that arrays indexed by u are registers.
template <typename Body>
__device__ __forceinline__ void for_each_class(int count, const Body& body) {
#pragma unroll
  for (int u = 0; u < kMostClasses; ++u) {
    if (u < count) {
      body(u);
    }
  }
}

// The numbers of all classes of a row.
template <typename scalar_t>
__device__ __forceinline__ void load_row(const Operand& operand, int64_t offset, int64_t stride,
                                         int count, float (&values)[kMostClasses]) {
  const auto* from = static_cast<const scalar_t*>(operand.data) + offset;
  for_each_class(count, [&](int u) {
    values[u] = to_acc<float>(*from);
    from += stride;
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    few_soft_classes_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                            const __grid_constant__ PlaneGroups grid, const Smoothing smoothing,
                            Denominator denominator, const __grid_constant__ GradOutput grad_output,
                            Partial* partials, Finalize finalize) {
  constexpr bool kExact = kExactExponentials<scalar_t>;
  __shared__ float weights[kMostClasses];
  float given = 1;
  if (grad_output.is_one(given)) {
    return;
  }
  const int count = static_cast<int>(args.num_classes);
  if (static_cast<int>(threadIdx.x) < count) {
    weights[threadIdx.x] = class_weight<float>(args, threadIdx.x);
  }
  __syncthreads();
  let_next_kernel_start();
  UnitScale<float, true> unit(args, denominator, given);
  const SmoothedIndex smooth(smoothing);
  bool waits = args.grad_input.data != nullptr;
  Partial partial;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kThreads; first < grid.groups; first += gridDim.x * kThreads) {
    const auto place = PlanePlace::of<1>(args.rows, grid, first + threadIdx.x);
    const bool exists = place.rows > 0;  // else the thread has the last row, and writes nothing
    float x[kMostClasses];
    float q[kMostClasses];
    load_row<scalar_t>(args.input, place.offset(args.input), args.input_class_stride, count, x);
    int index = 0;
    if (args.target_is_probability) {
      visit_up_to<float>(args.target.dtype, [&](auto type) {
        load_row<typename decltype(type)::type>(args.target, place.offset(args.target),
                                                args.target_class_stride, count, q);
      });
    } else {
      index = checked_index(args, load_class_index(args.target, place.offset(args.target)));
      for_each_class(count, [&](int u) { q[u] = u == index ? 1.0f : 0.0f; });
    }
    DenseOnlineSoftmax<float> state;
    for_each_class(count, [&](int u) { state.max = math::max_number(x[u], state.max); });
    const float shift = softmax_shift(state.max);
    const RowTerms<kExact> terms(state.max);
    // fp32 takes the exact exponentials that its gradients need, so that a class takes only one.
    // Half types take those of the kernels of backward passes, for the same bits.
    float powers[kMostClasses];
    for_each_class(count, [&](int u) {
      if constexpr (kExact) {
        powers[u] = RowSoftmax<float>{shift, 0, 0, 0}.times_exp(1.0f, x[u]);
        (x[u] == state.max ? state.ones : state.below) += powers[u];
      } else {
        powers[u] = terms(x[u]);
        const bool is_one = powers[u] == terms.unit;
        state.ones += is_one ? 1.0f : 0.0f;
        state.below += is_one ? 0.0f : powers[u];
      }
      q[u] = smoothing(q[u]) * weights[u];  // fault: few-soft-weights
      state.q_sum += q[u];
      state.dot += q[u] == 0.0f ? 0.0f : q[u] * (shift - x[u]);
    });
    if constexpr (!kExact) {
      state.below = __fmul_rn(state.below, terms.correction());  // as a backward pass reads it
    }
    if (waits) {
      unit.wait(args, denominator);
      waits = false;
    }
    if (!exists) {
      continue;
    }
    const float weight = args.target_is_probability ? 1.0f : index >= 0 ? weights[index] : 0.0f;
    finish_indexed_row<RowKind::kProbability>(
        args, smooth, index, weight, state, state.dot, state.q_sum, 0.0f, place.row(grid.positions),
        [&](int64_t) { return place.offset(args.output); }, partial);
    if (args.grad_input.data != nullptr) {
      const float scale =
          grad_output.is_per_row
              ? load_grad_output<float>(grad_output.operand, place.offset(grad_output.operand))
              : unit.get();
      const auto softmax = dense_softmax<kExact>(state.max, state.rest(), scale, state.q_sum);
      const LogitGradient<float, kExact> of_logit(softmax, scale * state.q_sum);
      auto* to = static_cast<scalar_t*>(args.grad_input.data) + place.offset(args.grad_input);
      for_each_class(count, [&](int u) {
        const float gradient = kExact
                                   ? softmax.dense_gradient_of(powers[u], scale, state.q_sum, q[u])
                                   : of_logit.dense(x[u], scale, state.q_sum, q[u]);
        *to = from_acc<scalar_t>(index >= 0 ? gradient : gradient_without_loss(index));
        to += args.grad_input_class_stride;
      });
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace few_soft_classes

inline void launch_few_soft_classes(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                                    const Denominator& denominator, const GradOutput& grad_output,
                                    Partial* partials, const Finalize& finalize,
                                    cudaStream_t stream) {
  using namespace few_soft_classes;
  const int64_t positions = side_by_side::positions_of(args);
  const PlaneGroups grid = {static_cast<uint32_t>(args.rows.numel),
                            Divisor(static_cast<uint32_t>(positions)), positions};
  visit_float_or_half(args.input.dtype, [&](auto type) {
    launch_kernel("few_soft_classes_kernel", few_soft_classes_kernel<typename decltype(type)::type>,
                  {grad_output.limit_blocks(plan.blocks, plan.threads), plan.threads, 0, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, grid, smoothing_of(args), denominator, grad_output, partials,
                  finalize);
  });
}

}  // namespace lossops::cuda
