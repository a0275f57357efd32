#include "kernels/cross_entropy_few.cuh"

#include <algorithm>
#include <cstdint>

#include "kernels/async_copy.cuh"
#include "kernels/block_reduce.cuh"
#include "kernels/device.cuh"
#include "kernels/launch.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
// Classes beside the class index that are added at a time; what is left is added one by one.
constexpr int kGroup = 4;
constexpr int kMaxFull = 3;  // groups
// Of a multiprocessor: with 64 registers, or 72, where 64 spill.
constexpr int min_blocks(int full, bool gradient) { return full == kMaxFull && gradient ? 7 : 8; }
// A thread has one row at a time, and a warp these.
constexpr int kStepRows = kWarpSize;
// Steps of a warp in shared memory: one that it computes, and those that are on their way. Measured
// on an H200: 4 are no faster.
constexpr int kStages = 3;
constexpr int kTargetBytes = kStepRows * static_cast<int>(sizeof(int64_t));  // of a step
// What a warp reads, unless there are few rows or very many. Measured on an H200, 10 classes: half
// of it makes no difference, twice as much takes 3 % longer. 2 classes: half takes 3 % longer.
constexpr int kWarpBytes = 8 << 10;

// How steps are copied, and their gradients stored.
struct FewShape {
  int steps;               // of a warp
  int logit_bytes;         // of a step
  bool input_in_vectors;   // else word by word
  bool targets_in_copies;  // else loaded
  bool gradient_in_vectors;
};

// kFull: groups of every row; there may be some classes more.
template <int kFull, bool kGradient>
__global__ void __launch_bounds__(kThreads, min_blocks(kFull, kGradient))
    cross_entropy_forward_few_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                     const FewShape shape, Denominator denominator,
                                     Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr int kSure = kFull * kGroup;
  constexpr int kMost = kSure + kGroup - 1;
  extern __shared__ uint4 dynamic[];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_classes = static_cast<int>(args.num_classes);
  const int count = num_classes - 1;
  const int stage_bytes = shape.logit_bytes + kTargetBytes;
  char* const stages = reinterpret_cast<char*>(dynamic) + warp * kStages * stage_bytes;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  const auto* const input = static_cast<const float*>(args.input.data);
  const int64_t first_row = (int64_t{blockIdx.x} * kWarps + warp) * shape.steps * kStepRows;
  // Rows of this warp.
  const int rows = static_cast<int>(
      max(min(int64_t{shape.steps * kStepRows}, args.rows.numel - first_row), int64_t{0}));
  const auto offset_of = [&](const Operand& operand, int r) {
    return row_offset(args.rows, operand, first_row + r);
  };
  // Where this thread's next copies come from: of a whole step in vectors, else of its row.
  const uint4* granules = reinterpret_cast<const uint4*>(input + first_row * num_classes) + lane;
  const int64_t* target =
      static_cast<const int64_t*>(args.target.data) + (first_row + lane) * args.target.strides[0];
  const int64_t target_stride = kStepRows * args.target.strides[0];
  // In the last vectors of a step not every thread has one.
  const bool has_last = lane < num_classes * 8 - kFull * kWarpSize;
  // Starts the copies of a step, one after the other.
  const auto start = [&](int step_row, char* stage) {
    const int r = step_row + lane;
    if (shape.input_in_vectors && step_row + kStepRows <= rows) {
      auto* const staged = reinterpret_cast<uint4*>(stage) + lane;
#pragma unroll
      for (int i = 0; i < kFull; ++i) {
        start_own_copy(staged + i * kWarpSize, granules + i * kWarpSize);
      }
      if (has_last) {
        start_own_copy(staged + kFull * kWarpSize, granules + kFull * kWarpSize);
      }
      granules += num_classes * 8;
    } else if (r < rows) {
      const float* const logits = input + offset_of(args.input, r);
#pragma unroll 1
      for (int c = 0; c < num_classes; ++c) {
        start_own_copy(reinterpret_cast<float*>(stage) + lane * num_classes + c, logits + c);
      }
    }
    if (r < rows) {
      auto* const staged = reinterpret_cast<int64_t*>(stage + shape.logit_bytes) + lane;
      if (shape.targets_in_copies) {
        start_own_copy(staged, target);
        target += target_stride;
      } else {
        *staged = load_class_index(args.target, offset_of(args.target, r));
      }
    }
    end_group_of_copies();
  };

  Partial partial;
  int counted = 0;  // rows for the mean, if they have no weights
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    start(i * kStepRows, stages + i * stage_bytes);
  }
  unit.wait(args, denominator);
  const float scale = unit.get();
  auto* const grad_input = static_cast<float*>(args.grad_input.data);
  uint4* gradient_granules = reinterpret_cast<uint4*>(grad_input + first_row * num_classes) + lane;
  // Of the step, and of the step before it.
  int slot = 0;
  char* free_stage = stages + (kStages - 1) * stage_bytes;
#pragma unroll 1
  for (int step_row = 0; step_row < rows; step_row += kStepRows) {
    wait_for_groups_but<kStages - 2>();
    __syncwarp();
    char* const stage = stages + slot * stage_bytes;
    slot = slot + 1 < kStages ? slot + 1 : 0;
    start(step_row + (kStages - 1) * kStepRows, free_stage);
    float* const elements = reinterpret_cast<float*>(stage);
    const int r = step_row + lane;
    if (r < rows) {
      const int index =
          checked_index(args, reinterpret_cast<const int64_t*>(stage + shape.logit_bytes)[lane]);
      float* const own = elements + lane * num_classes;
      // The last class takes the place of the class index, and the row ends before it.
      float* const at_index = own + max(index, 0);
      const float x_at_index = *at_index;
      *at_index = own[count];
      float x[kMost];
#pragma unroll
      for (int k = 0; k < kSure; ++k) {
        x[k] = own[k];
      }
      float max = -math::infinity<float>();  // of NaN alone there is none
#pragma unroll
      for (int k = 0; k < kSure; ++k) {
        max = math::max_number(x[k], max);
      }
      // f(k) for all k from kSure to count.
      const auto for_rest = [&](auto&& f) {
        if (kSure < count) {
          f(kSure);
          if (kSure + 1 < count) {
            f(kSure + 1);
            if (kSure + 2 < count) {
              f(kSure + 2);
            }
          }
        }
      };
      for_rest([&](int k) {
        x[k] = own[k];
        max = math::max_number(x[k], max);
      });
      const RowTerms<true> terms(max);
      // NaN if any logit is infinite: then the sum is taken again.
      const auto term = [&](float logit) {
        return math::exp_of_finite_in_sum(logit - terms.shift);
      };
      float sums[kFull + 1];
#pragma unroll
      for (int g = 0; g < kFull; ++g) {
        float values[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          values[i] = term(x[g * kGroup + i]);
        }
        sums[g] = pairwise_sum(values);
      }
      float others = 0;
      if constexpr (kFull % 2 == 1) {
        others = sums[kFull - 1];
      }
      for_rest([&](int k) { others += term(x[k]); });
      if constexpr (kFull >= 2) {
        others += sums[0] + sums[1];
      }
      if (math::is_nan(others)) {
        ExactSum sum;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
          sum.add(terms(own[k]));
        }
        others = sum.total();
      }
      const IndexRow reduced = IndexRow::of(terms, max, others, x_at_index);
      float weight = index == kIgnoredRow ? 0.0f : 1.0f;
      counted += index == kIgnoredRow ? 0 : 1;
      if (args.weight != nullptr) {
        weight = row_weight(args, index);
        partial.weight += static_cast<double>(weight);
      }
      const auto finished = reduced.template finish<false>(x_at_index, scale, weight);
      const float loss = index >= 0 ? finished.loss : gradient_without_loss(index);
      if (args.row_stats != nullptr) {
        const RowStats<float> stats(args.row_stats, args.rows.numel);
        const IndexRow kept = index >= 0 ? reduced : IndexRow();
        stats.max[first_row + r] = kept.max;
        stats.rest[first_row + r] = kept.rest;
      }
      if (args.reduction == Reduction::kNone) {
        store_operand<float>(args.output, offset_of(args.output, r), loss);
      }
      partial.sum += static_cast<double>(loss);
      if constexpr (kGradient) {
        const LogitGradient<float, true> gradient(finished.softmax, scale * weight);
        float least = x_at_index;
#pragma unroll
        for (int k = 0; k < kSure; ++k) {
          least = ::fminf(x[k], least);
        }
        for_rest([&](int k) { least = ::fminf(x[k], least); });
        if (gradient.is_direct(least)) {
          const auto replace = [&](int k) { own[k] = gradient.multiple(x[k]); };
#pragma unroll
          for (int k = 0; k < kSure; ++k) {
            replace(k);
          }
          for_rest(replace);
        } else {
#pragma unroll 1
          for (int k = 0; k < count; ++k) {
            float value[1] = {own[k]};
            gradient.replace(value);
            own[k] = value[0];
          }
        }
        own[count] = *at_index;
        *at_index = finished.gradient_at_index;
        if (index < 0) {
#pragma unroll 1
          for (int k = 0; k <= count; ++k) {
            own[k] = gradient_without_loss(index);
          }
        }
      }
    }
    if constexpr (kGradient) {
      if (shape.gradient_in_vectors && step_row + kStepRows <= rows) {
        __syncwarp();
        const auto* const staged = reinterpret_cast<const uint4*>(stage) + lane;
#pragma unroll
        for (int i = 0; i < kFull; ++i) {
          gradient_granules[i * kWarpSize] = staged[i * kWarpSize];
        }
        if (has_last) {
          gradient_granules[kFull * kWarpSize] = staged[kFull * kWarpSize];
        }
        gradient_granules += num_classes * 8;
      } else if (r < rows) {
        float* const gradient = grad_input + offset_of(args.grad_input, r);
        for (int c = 0; c < num_classes; ++c) {
          gradient[c * args.grad_input_class_stride] = elements[lane * num_classes + c];
        }
      }
    }
    free_stage = stage;
  }
  if (args.weight == nullptr) {
    partial.weight = static_cast<double>(counted);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace

FewPlan plan_few_classes(const CrossEntropyForwardArgs& args) {
  FewPlan plan;
  const DeviceLimits limits = current_device_limits();
  // Rows of 16 words meet in two banks of shared memory.
  if (!limits.hopper || args.dense() || args.input.dtype != DType::kFloat32 ||
      args.input_class_stride != 1 || args.num_classes < 2 ||
      args.num_classes >= (kMaxFull + 1) * kGroup) {
    return plan;
  }
  plan.threads = kThreads;
  const int step_bytes =
      kStepRows * static_cast<int>(args.num_classes * int64_t{sizeof(float)}) + kTargetBytes;
  plan.warp_bytes = kStages * step_bytes;
  // Not of the gradient: what blocks add up decides a bit of a loss.
  const int64_t steps = ceil_div(args.rows.numel, int64_t{kStepRows});
  const int64_t resident = int64_t{limits.multiprocessors} * min_blocks(0, false) * kWarps;
  plan.steps =
      static_cast<int>(std::max(std::clamp<int64_t>(steps / resident, 1, kWarpBytes / step_bytes),
                                ceil_div(steps, kMaxWorkers * kWarps)));
  plan.blocks = ceil_div(steps, int64_t{plan.steps} * kWarps);
  return plan;
}

void launch_few_classes(const CrossEntropyForwardArgs& args, const FewPlan& plan,
                        const Denominator& denominator, Partial* partials, const Finalize& finalize,
                        cudaStream_t stream) {
  const auto follow = [&](const Operand& operand) {
    return args.rows.ndim == 0 || (args.rows.ndim == 1 && operand.strides[0] == args.num_classes);
  };
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
  };
  const bool gradient = args.grad_input.data != nullptr;
  FewShape shape = {plan.steps, plan.warp_bytes / kStages - kTargetBytes, false, false, false};
  shape.input_in_vectors = follow(args.input) && aligned(args.input.data);
  shape.targets_in_copies = args.target.dtype == DType::kInt64 && args.rows.ndim <= 1;
  shape.gradient_in_vectors = gradient && follow(args.grad_input) &&
                              args.grad_input_class_stride == 1 && aligned(args.grad_input.data);
  const auto launch = [&](auto kernel) {
    launch_kernel("cross_entropy_forward_few_kernel", kernel,
                  {plan.blocks, kThreads, kWarps * plan.warp_bytes, 1, denominator.is_computed()},
                  stream, args, shape, denominator, partials, finalize);
  };
  const auto launch_full = [&](auto full) {
    constexpr int kFull = decltype(full)::value;
    gradient ? launch(cross_entropy_forward_few_kernel<kFull, true>)
             : launch(cross_entropy_forward_few_kernel<kFull, false>);
  };
  switch ((args.num_classes - 1) / kGroup) {
    case 0:
      return launch_full(std::integral_constant<int, 0>{});
    case 1:
      return launch_full(std::integral_constant<int, 1>{});
    case 2:
      return launch_full(std::integral_constant<int, 2>{});
    default:
      return launch_full(std::integral_constant<int, kMaxFull>{});
  }
}

}  // namespace lossops::cuda
