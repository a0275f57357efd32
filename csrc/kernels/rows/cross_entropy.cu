// Cross entropy, forward and backward: launches the kernels that policy.h chose.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "kernels/grid/column_reduce.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/few_soft_classes.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/policy.h"
#include "kernels/rows/register_rows.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/strided_rows.cuh"
#include "kernels/rows/targets.cuh"
#include "kernels/rows/team_rows.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

// ------------------------------------------------- gradient of the class weights

// d loss / d w_c = sum over rows of g p'_c (lse - x_c); probability targets only.
template <typename acc_t>
struct WeightGradientSource {
  CrossEntropyBackwardArgs args;

  __device__ double operator()(int64_t c, int64_t row) const {
    const Operand* const operands[3] = {&args.input, &args.target, &args.grad_output};
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const RowTarget<acc_t> target(args, offsets[1]);
    const RowGradient<acc_t, true, true> gradient(args, target,
                                                  load_summary<true>(args, target, row, offsets[0]),
                                                  row_scale<acc_t>(args, offsets[2]));
    const acc_t x = load_operand<acc_t>(args.input, offsets[0] + c * args.input_class_stride);
    const acc_t p = target.probability(c);
    return p == acc_t(0) ? 0.0
                         : static_cast<double>(gradient.scale * p * gradient.softmax.surprise(x));
  }
};

struct WeightGradientSink {
  void* data;
  DType dtype;

  __device__ void operator()(int64_t c, double sum) const { store_as<double>(data, dtype, c, sum); }
};

// ------------------------------------------------------------------ forward

// The launch of each family, in the order of Family.
constexpr LaunchRows* kLaunches[] = {
    launch_side_by_side_rows, launch_plane_rows,    launch_plane_words,
    launch_few_soft_classes,  launch_soft_planes,   launch_few_classes,
    launch_float_tiles,       launch_half_rows,     launch_tiles,
    launch_float_rows,        launch_register_rows, launch_probability_rows,
    launch_long_rows,         launch_split_rows,    launch_staged_rows,
    launch_two_pass_rows,     launch_soft_tiles,    launch_team_rows_forward,
    launch_strided_forward,
};
static_assert(std::size(kLaunches) == kFamilies);

void launch_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                 const Denominator& denominator, Partial* partials, const Finalize& finalize,
                 cudaStream_t stream, const GradOutput& grad_output = {}) {
  kLaunches[static_cast<int>(plan.family)](args, plan, denominator, grad_output, partials, finalize,
                                           stream);
}

// Computes the gradient by the forward kernel that plan_again() chose.
void launch_forward_again(const CrossEntropyBackwardArgs& args, const RowPlan& plan,
                          cudaStream_t stream) {
  CrossEntropyForwardArgs forward = forward_of(args);
  Denominator denominator;
  if (args.reduction == Reduction::kMean) {
    denominator.partials = args.mean_terms;  // the sum of one
    denominator.count = 1;
    forward.mean_terms = const_cast<double*>(args.mean_terms);  // written as it is
  }
  launch_rows(forward, plan, denominator, nullptr, Finalize(), stream,
              {args.grad_output, args.reduction == Reduction::kNone});
}

}  // namespace

DeviceLimits limits_of_current_device() { return current_device_limits(); }

CrossEntropyPlan plan_cross_entropy_forward(const CrossEntropyForwardArgs& args) {
  const RowPlan rows = plan_rows(args, current_device_limits());
  CrossEntropyPlan plan;
  if (args.reduction != Reduction::kNone) {
    plan.scratch = rows.blocks * kPartialDoubles + denominator_doubles(rows.denominator_blocks) +
                   rows.index_bytes / int64_t{sizeof(double)};
  }
  plan.scratch += rows.state_bytes / int64_t{sizeof(double)};
  plan.needs_row_stats = !rows.computes_again;
  plan.keep(rows);
  return plan;
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& all_args,
                                  const CrossEntropyPlan& kept, double* scratch, Context context) {
  if (all_args.rows.numel == 0 && all_args.reduction == Reduction::kNone) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  const auto plan = kept.kept<RowPlan>();
  CrossEntropyForwardArgs args = all_args;
  if (!plan.writes_gradient) {
    args.grad_input.data = nullptr;
  }
  Finalize finalize;
  finalize.output = args.output.data;
  finalize.dtype = args.output.dtype;
  finalize.mean = args.reduction == Reduction::kMean && args.denominator == nullptr;
  finalize.denominator_is_weight = true;  // fault: ce-cuda-mean
  finalize.nan_over_zero = has_mean_of_indices(args);
  finalize.mean_terms = args.mean_terms;
  Denominator denominator;
  if (args.denominator != nullptr) {
    denominator.partials = args.denominator;  // the sum of one
    denominator.count = 1;
    denominator.is_given = true;
  } else if (plan.writes_gradient && (finalize.mean || plan.index_bytes > 0)) {
    denominator.count = plan.denominator_blocks;
    if (denominator.count > 0) {
      double* const sums = scratch + plan.blocks * kPartialDoubles;
      denominator.partials = sums;
      if (plan.index_bytes > 0) {
        denominator.indices =
            reinterpret_cast<int8_t*>(sums + denominator_doubles(denominator.count));
      }
      launch_denominator(args, denominator, stream);
    }
    finalize.denominator_is_known = finalize.mean;
  }
  launch_rows(args, plan, denominator, partials, finalize, stream);
  if (args.reduction != Reduction::kNone) {
    launch_grid_reduce(partials, plan.blocks, finalize, stream);
  }
  if (all_args.grad_input.data != nullptr && !plan.writes_gradient) {
    launch_cross_entropy_backward(unit_backward(all_args), nullptr, context);
  }
}

int64_t cross_entropy_backward_scratch(const CrossEntropyBackwardArgs& args) {
  return args.grad_weight == nullptr
             ? 0
             : ColumnReducePlan(args.num_classes, args.rows.numel).scratch(args.num_classes);
}

void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, double* scratch,
                                   Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  if (args.grad_weight != nullptr) {
    const WeightGradientSink sink{args.grad_weight, args.weight_dtype};
    if (args.acc_double) {
      column_reduce(WeightGradientSource<double>{args}, sink, args.num_classes, args.rows.numel,
                    scratch, stream);
    } else {
      column_reduce(WeightGradientSource<float>{args}, sink, args.num_classes, args.rows.numel,
                    scratch, stream);
    }
  }
  const bool elementwise = args.grad_input.data != nullptr || args.grad_target.data != nullptr;
  if (!elementwise || args.rows.numel == 0 || args.num_classes == 0) {
    return;
  }
  if (const auto plan = plan_again(args, current_device_limits())) {
    return launch_forward_again(args, *plan, stream);
  }
  switch (choose_backward(args)) {
    case BackwardFamily::kShortGradients:
      return launch_short_gradients(args, stream);
    case BackwardFamily::kIndexGradients:
      return launch_index_gradients(args, stream);
    case BackwardFamily::kPlaneGradients:
      return launch_plane_gradients(args, stream);
    case BackwardFamily::kTeamRows:
      return launch_team_rows_backward(args, stream);
    default:
      return launch_strided_backward(args, stream);
  }
}

void launch_first_invalid_target(const CrossEntropyArgs& args, int64_t* result, Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const first = reinterpret_cast<unsigned long long*>(result);
  const cudaError_t error = cudaMemsetAsync(first, 0xff, sizeof(kNoInvalidRow), stream);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("lossops: cudaMemsetAsync failed: ") +
                             cudaGetErrorString(error));
  }
  const int64_t blocks =
      std::clamp<int64_t>(ceil_div(args.rows.numel, kTargetThreads), 1, kMaxLoopBlocks);
  launch_kernel("first_invalid_target_kernel", first_invalid_target_kernel,
                {blocks, kTargetThreads}, stream, args, first);
}

}  // namespace lossops::cuda
