// Cross entropy, forward and backward: which kernel takes the rows, and what it is launched with.

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/class_index/few_classes.cuh"
#include "kernels/class_index/float_rows.cuh"
#include "kernels/class_index/float_tiles.cuh"
#include "kernels/class_index/half_rows.cuh"
#include "kernels/class_index/tiles.cuh"
#include "kernels/grid/column_reduce.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/long_rows.cuh"
#include "kernels/rows/probability_rows.cuh"
#include "kernels/rows/side_by_side_rows.cuh"
#include "kernels/rows/split_rows.cuh"
#include "kernels/rows/staged_rows.cuh"
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

// The kernel for these rows, of those that read them once; if there is none, a team of threads
// takes each, or a thread. It depends on the logits, not on whether there is a gradient: the bits
// of a loss do not either.
struct ReadOncePlan {
  enum class Kernel : int8_t {
    kNone,
    kFloatRows,
    kColumns,
    kFew,
    kHalfRows,
    kFloatTiles,
    kTiles,
    kProbabilityRows,
    kLongRows,
    kSplitRows,
    kStaged
  };
  Kernel kernel = Kernel::kNone;
  int64_t blocks = 0;
  // The kernel's own.
  ColumnPlan columns;
  FewPlan few;
  FloatRowPlan float_rows;
  HalfRowPlan half_rows;
  ProbabilityRowPlan probability_rows;
  FloatTilePlan float_tiles;
  TilePlan tiles;
  LongRowPlan long_rows;
  SplitRowPlan split_rows;
  StagedPlan staged;

  explicit ReadOncePlan(const CrossEntropyForwardArgs& args) {
    if (args.rows.numel == 0 || args.num_classes == 0 || args.input.dtype == DType::kFloat64 ||
        args.num_classes > kMaxRowClasses) {
      return;
    }
    const auto choose = [&](Kernel choice, const auto& plan) {
      if (plan.threads > 0) {
        kernel = choice;
        blocks = plan.blocks;
      }
      return plan.threads > 0;
    };
    if (choose(Kernel::kFloatRows, float_rows = plan_float_rows(args)) ||
        rows_are_for_registers(args) || choose(Kernel::kColumns, columns = plan_columns(args)) ||
        choose(Kernel::kFew, few = plan_few_classes(args)) ||
        choose(Kernel::kHalfRows, half_rows = plan_half_rows(args)) ||
        choose(Kernel::kFloatTiles, float_tiles = plan_float_tiles(args)) ||
        choose(Kernel::kTiles, tiles = plan_tiles(args))) {
      return;
    }
    // The others cut rows as staged rows are cut, for the same bits.
    staged = plan_staged_rows(args);
    if (choose(Kernel::kProbabilityRows, probability_rows = plan_probability_rows(args, staged)) ||
        choose(Kernel::kLongRows, long_rows = plan_long_rows(args, staged)) ||
        choose(Kernel::kSplitRows, split_rows = plan_split_rows(args, staged))) {
      return;
    }
    choose(Kernel::kStaged, staged);
  }

  bool exists() const { return kernel != Kernel::kNone; }

  // Of class indices that are checked before. Images gain where they are read before anyway, for
  // the mean.
  int64_t index_bytes(const CrossEntropyForwardArgs& args) const {
    const bool reads_bytes =
        kernel == Kernel::kFew || (kernel == Kernel::kColumns && current_device_limits().hopper &&
                                   args.reduction == Reduction::kMean);
    return reads_bytes && args.grad_input.data != nullptr
               ? ceil_div(args.rows.numel, int64_t{kIndexPadding}) * kIndexPadding
               : 0;
  }

  // Whether the kernel can write args.grad_input, too.
  bool takes_gradient(const CrossEntropyForwardArgs& args) const {
    switch (kernel) {
      case Kernel::kColumns:
        return lies_in_columns(args, args.grad_input, args.grad_input_class_stride);
      case Kernel::kFloatRows:
      case Kernel::kHalfRows:
      case Kernel::kProbabilityRows:
        return args.grad_input_class_stride == 1;
      case Kernel::kStaged:
        return gradient_lies_as_input(args);
      default:
        return true;
    }
  }

  // Whether it can compute args.grad_input again, for another grad_output, and so leaves a gradient
  // without row_stats. Of short rows these would be a part of what a step writes.
  bool computes_again(const CrossEntropyForwardArgs& args) const {
    const bool can = kernel == Kernel::kColumns || kernel == Kernel::kFew ||
                     kernel == Kernel::kFloatTiles || kernel == Kernel::kTiles;
    return can && args.grad_input.data != nullptr && takes_gradient(args);
  }

  // grad_output: where the gradient is computed again, and nothing else is left.
  void launch(const CrossEntropyForwardArgs& args, const Denominator& denominator,
              Partial* partials, const Finalize& finalize, cudaStream_t stream,
              const GradOutput& grad_output = {}) const {
    switch (kernel) {
      case Kernel::kColumns:
        launch_columns(args, columns, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kFew:
        launch_few_classes(args, few, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kFloatRows:
        launch_float_rows(args, float_rows, denominator, partials, finalize, stream);
        break;
      case Kernel::kHalfRows:
        launch_half_rows(args, half_rows, denominator, partials, finalize, stream);
        break;
      case Kernel::kProbabilityRows:
        launch_probability_rows(args, probability_rows, partials, finalize, stream);
        break;
      case Kernel::kFloatTiles:
        launch_float_tiles(args, float_tiles, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kTiles:
        launch_tiles(args, tiles, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kLongRows:
        launch_long_rows(args, long_rows, staged, partials, finalize, stream);
        break;
      case Kernel::kSplitRows:
        launch_split_rows(args, split_rows, denominator, partials, finalize, stream);
        break;
      default:
        launch_staged_rows(args, staged, denominator, partials, finalize, stream);
    }
  }
};

// Whether one kernel computes losses and gradients. fp64 is not worth the code.
bool one_pass_gradient(const CrossEntropyForwardArgs& args) {
  return args.grad_input.data != nullptr && rows_are_contiguous(args, kFewClassesForward) &&
         args.grad_input_class_stride == 1 && !args.acc_double && args.num_classes > 0;
}

struct ForwardPlan {
  CrossEntropyForwardArgs args;  // grad_input only where the same kernel writes it
  ReadOncePlan read_once;
  int64_t blocks;
};

ForwardPlan forward_plan(CrossEntropyForwardArgs args) {
  ReadOncePlan plan(args);
  if (args.grad_input.data != nullptr &&
      !(plan.exists() ? plan.takes_gradient(args) : one_pass_gradient(args))) {
    args.grad_input.data = nullptr;
    plan = ReadOncePlan(args);
  }
  const int64_t blocks = plan.exists()                                   ? plan.blocks
                         : rows_are_contiguous(args, kFewClassesForward) ? team_row_blocks(args)
                                                                         : strided_blocks(args);
  return {args, plan, blocks};
}

// The partial sums of the denominator, and class indices in bytes.
int64_t denominator_doubles(const ForwardPlan& plan) {
  const int64_t count = denominator_blocks(plan.args);
  const int64_t indices = count > 0 ? plan.read_once.index_bytes(plan.args) : 0;
  return Denominator::doubles(count) + indices / int64_t{sizeof(double)};
}

// Of a gradient that forward left: false if its kernel cannot compute it again.
bool launch_again(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  CrossEntropyForwardArgs forward = forward_of(args);
  const ReadOncePlan plan(forward);
  if (!plan.computes_again(forward)) {
    return false;
  }
  Denominator denominator;
  if (args.reduction == Reduction::kMean) {
    denominator.partials = args.mean_terms;  // the sum of one
    denominator.count = 1;
    forward.mean_terms = const_cast<double*>(args.mean_terms);  // written as it is
  }
  plan.launch(forward, denominator, nullptr, Finalize(), stream,
              {args.grad_output.data, args.grad_output.dtype});
  return true;
}

}  // namespace

int64_t cross_entropy_forward_scratch(const CrossEntropyForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  const ForwardPlan plan = forward_plan(args);
  return plan.blocks * kPartialDoubles + denominator_doubles(plan);
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& all_args, double* scratch,
                                  Context context) {
  if (all_args.rows.numel == 0 && all_args.reduction == Reduction::kNone) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  const auto [args, plan, blocks] = forward_plan(all_args);
  Finalize finalize;
  finalize.output = args.output.data;
  finalize.dtype = args.output.dtype;
  finalize.mean = args.reduction == Reduction::kMean;
  finalize.denominator_is_weight = true;  // fault: ce-cuda-mean
  finalize.nan_over_zero = has_mean_of_indices(args);
  finalize.mean_terms = args.mean_terms;
  const bool one_pass = args.grad_input.data != nullptr;
  Denominator denominator;
  const bool indices = plan.index_bytes(args) > 0;
  if (one_pass && (finalize.mean || indices)) {
    denominator.count = denominator_blocks(args);
    if (denominator.count > 0) {
      double* const sums = scratch + blocks * kPartialDoubles;
      denominator.partials = sums;
      if (indices) {
        denominator.indices =
            reinterpret_cast<int8_t*>(sums + Denominator::doubles(denominator.count));
      }
      launch_denominator(args, denominator, stream);
    }
    finalize.denominator_is_known = finalize.mean;
  }
  if (plan.exists()) {
    plan.launch(args, denominator, partials, finalize, stream);
  } else if (rows_are_contiguous(args, kFewClassesForward)) {
    launch_team_rows_forward(args, denominator, partials, finalize, blocks, stream);
  } else {
    launch_strided_forward(args, partials, finalize, blocks, stream);
  }
  if (args.reduction != Reduction::kNone) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
  if (all_args.grad_input.data != nullptr && !one_pass) {
    launch_cross_entropy_backward(unit_backward(all_args), nullptr, context);
  }
}

bool cross_entropy_needs_row_stats(const CrossEntropyForwardArgs& args) {
  return !ReadOncePlan(args).computes_again(args);
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
  if (args.kept && launch_again(args, stream)) {
    return;
  }
  if (rows_are_contiguous(args, kFewClassesBackward) && args.grad_input_class_stride == 1) {
    launch_team_rows_backward(args, stream);
  } else {
    launch_strided_backward(args, stream);
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
