// Cross entropy of few classes: a thread a row, which is whole in its registers.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/class_index/few_classes_plan.h"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_walk.cuh"

namespace lossops::cuda {
namespace few_classes {
namespace {

// How steps are copied, and their gradients stored, by the kernel of any number of classes.
struct FewShape {
  BlockShares shares;     // steps of each warp
  bool input_in_vectors;  // whole steps; else word by word
  bool gradient_in_vectors;
  Divisor classes;
};

// Shared memory by its address, which the compiler would compute anew from a pointer for each
// access.
[[maybe_unused]] __device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
[[maybe_unused]] __device__ __forceinline__ void store_shared(uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" : : "r"(address), "f"(value) : "memory");
}
[[maybe_unused]] __device__ __forceinline__ int64_t load_shared_index(uint32_t address) {
  int64_t value;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}
[[maybe_unused]] __device__ __forceinline__ void store_shared_index(uint32_t address,
                                                                    int64_t value) {
  asm volatile("st.shared.b64 [%0], %1;" : : "r"(address), "l"(value) : "memory");
}
[[maybe_unused]] __device__ __forceinline__ int load_shared_byte(uint32_t address) {
  int value;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
[[maybe_unused]] __device__ __forceinline__ uint4 load_shared_vector(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Words of a row that are accessed at once, without more conflicts of banks than one by one.
[[maybe_unused]] __host__ __device__ constexpr int words_at_once(int classes) {
  return classes == kAnyClasses ? 1 : classes % 4 == 0 ? 4 : classes % 2 == 0 ? 2 : 1;
}

// The first `count` words of a row of kClasses.
template <int kClasses, int kMost>
__device__ __forceinline__ void load_words(uint32_t address, float (&x)[kMost], int count) {
  constexpr int kWords = words_at_once(kClasses);
#pragma unroll
  for (int k = 0; k < kMost; k += kWords) {
    float v[4];
    if constexpr (kWords == 4) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                   : "r"(address + 4 * k)
                   : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(v[0]), "=f"(v[1])
                   : "r"(address + 4 * k)
                   : "memory");
    } else if (k < count) {
      v[0] = load_shared(address + 4 * k);
    }
#pragma unroll
    for (int i = 0; i < kWords && k + i < kMost; ++i) {
      x[k + i] = v[i];
    }
  }
}

template <int kClasses, int kMost>
__device__ __forceinline__ void store_words(uint32_t address, const float (&x)[kMost], int count) {
  constexpr int kWords = words_at_once(kClasses);
#pragma unroll
  for (int k = 0; k < kMost; k += kWords) {
    if (kWords == 4 && k + 4 <= kMost) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                   :
                   : "r"(address + 4 * k), "f"(x[k]), "f"(x[k + 1]), "f"(x[k + 2]), "f"(x[k + 3])
                   : "memory");
    } else if (kWords >= 2 && k + 2 <= kMost) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                   :
                   : "r"(address + 4 * k), "f"(x[k]), "f"(x[k + 1])
                   : "memory");
    } else if (k < count) {
      store_shared(address + 4 * k, x[k]);
    }
    if (kWords == 4 && k + 3 == kMost) {
      store_shared(address + 4 * (k + 2), x[k + 2]);
    }
  }
}

// The sum over the threads of a block, in thread 0, after one barrier. Measured on an H200, forward
// of 4194304x10: with block_reduce() 64.4 us, with this 55.5.
[[maybe_unused]] __device__ __forceinline__ Partial block_total(Partial partial) {
  __shared__ double sums[kWarps];
  __shared__ double warp_weights[kWarps];
  partial = warp_reduce<true>(partial);
  if (threadIdx.x % kWarpSize == 0) {
    sums[threadIdx.x / kWarpSize] = partial.sum;
    warp_weights[threadIdx.x / kWarpSize] = partial.weight;
  }
  __syncthreads();
  Partial totals[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    totals[w] = {sums[w], warp_weights[w]};
  }
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
    for (int w = 0; w < half; ++w) {
      totals[w].combine(totals[w + half]);
    }
  }
  return totals[0];
}

// As UnitScale, where the kernel before this one left partial sums of the denominator.
[[maybe_unused]] __device__ __forceinline__ float computed_scale(
    const CrossEntropyForwardArgs& args, const Denominator& denominator) {
  wait_for_previous_kernel();
  if (args.reduction != Reduction::kMean) {
    return 1;
  }
  const Partial partial = warp_reduce<true>(Partial{0, denominator.of_lane()});
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    args.mean_terms[0] = partial.weight;
  }
  return 1.0f / static_cast<float>(partial.weight);
}

// kClasses: or kAnyClasses, for rows that do not lie one after the other from a boundary of 16
// bytes, and whatever else is rare. With a gradient, the others read class indices that the kernel
// before them has checked: in bytes, they are still in the L2 cache.
template <int kClasses, bool kGradient>
__global__ void __launch_bounds__(kThreads, min_blocks(kClasses, kGradient))
    cross_entropy_forward_few_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                     const FewShape shape, Denominator denominator,
                                     const __grid_constant__ GradOutput grad_output,
                                     Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr bool kAny = kClasses == kAnyClasses;
  float given = 1;
  if (kGradient && kAny && grad_output.is_one(given)) {  // fault: few-kept
    return;
  }
  constexpr int kMost = (kAny ? kMaxClasses : kClasses) - 1;
  // Classes beside the class index that are added at a time; what is left is added one by one.
  constexpr int kGroup = 4;
  const int num_classes = kAny ? static_cast<int>(args.num_classes) : kClasses;
  const int count = num_classes - 1;  // beside the class index
  const int row_bytes = num_classes * static_cast<int>(sizeof(float));
  constexpr int kVectors = kClasses * kStepRows / 4;  // of a step
  constexpr int kLastVectors = kVectors / kWarpSize * kWarpSize;
  extern __shared__ uint4 dynamic[];
  __shared__ float weights[kMaxClasses];
  __shared__ float shared_scale;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  uint32_t stage = shared_address(dynamic) + warp * kStages * stage_bytes(num_classes);
  asm volatile("" : "+r"(stage));  // else computed anew for each access
  // Less one of the two stages, the other.
  const uint32_t both_stages = 2 * stage + stage_bytes(num_classes);
  let_next_kernel_start();
  std::conditional_t<kGradient && kAny, UnitScale<float>, NoScale> unit(args, denominator, given);
  const int most_rows = shape.shares.size(blockIdx.x) * kStepRows;
  const int64_t first_row = shape.shares.first(blockIdx.x) * kBlockRows + int64_t{warp} * most_rows;
  // Rows of this warp.
  const int rows =
      static_cast<int>(max(min(int64_t{most_rows}, args.rows.numel - first_row), int64_t{0}));
  // Where this thread's next copies come from, of whole steps.
  const auto* granules = reinterpret_cast<const uint4*>(static_cast<const float*>(args.input.data) +
                                                        first_row * num_classes) +
                         lane;
  const auto* targets =
      reinterpret_cast<const uint4*>(static_cast<const int64_t*>(args.target.data) + first_row) +
      lane;
  constexpr bool kIndices = kGradient && !kAny;
  const int8_t* indices = denominator.indices + first_row + lane * kVectorBytes;
  const auto start_logits = [&](int step_row, uint32_t to) {
    if (kAny && shape.input_in_vectors && step_row + kStepRows <= rows) {
#pragma unroll 1
      for (int i = lane; i < num_classes * kStepRows / 4; i += kWarpSize) {
        start_own_copy<16>(to + i * kVectorBytes, granules + (i - lane));
      }
      granules += num_classes * kStepRows / 4;
    } else if constexpr (kAny) {
      const auto* const logits = static_cast<const float*>(args.input.data);
      for_classes<1, 2>(args.rows, args.input, 1, shape.classes, first_row + step_row,
                        min(rows - step_row, kStepRows), [&](int r, int c, int64_t offset) {
                          start_own_copy<4>(to + r * row_bytes + 4 * c, logits + offset);
                        });
    } else if (step_row + kStepRows <= rows) {
#pragma unroll
      for (int i = 0; i < kLastVectors; i += kWarpSize) {
        start_own_copy<16>(to + (lane + i) * kVectorBytes, granules + i);
      }
      if (kVectors > kLastVectors && lane < kVectors - kLastVectors) {
        start_own_copy<16>(to + (lane + kLastVectors) * kVectorBytes, granules + kLastVectors);
      }
      granules += kVectors;
    } else {
      const float* const words =
          static_cast<const float*>(args.input.data) + (first_row + step_row) * num_classes;
#pragma unroll 1
      for (int i = lane; i < (rows - step_row) * num_classes; i += kWarpSize) {
        start_own_copy<4>(to + 4 * i, words + i);
      }
    }
  };
  const auto start_targets = [&](int step_row, uint32_t to) {
    to += kStepRows * row_bytes;
    if constexpr (kIndices) {
      if (lane < kStepRows / kVectorBytes) {
        start_own_copy<16>(to + lane * kVectorBytes, indices);
      }
      indices += kStepRows;
    } else if (!kAny && step_row + kStepRows <= rows) {
      static_assert(kTargetBytes == kWarpSize * kVectorBytes, "a vector for each thread");
      start_own_copy<16>(to + lane * kVectorBytes, targets);
      targets += kWarpSize;
    } else {
#pragma unroll 1
      for (int r = step_row + lane; r < min(rows, step_row + kStepRows); r += kWarpSize) {
        const uint32_t index = to + (r - step_row) * static_cast<int>(sizeof(int64_t));
        if constexpr (kAny) {
          store_shared_index(index, load_class_index(args.target, row_offset(args.rows, args.target,
                                                                             first_row + r)));
        } else {
          start_own_copy<8>(index, static_cast<const int64_t*>(args.target.data) + first_row + r);
        }
      }
    }
  };
  int weighted = args.weight != nullptr ? 1 : 0;
  int leaves_stats = args.row_stats != nullptr ? 1 : 0;
  int leaves_losses = args.reduction == Reduction::kNone ? 1 : 0;
  // Else each row would load them again.
  asm volatile("" : "+r"(weighted), "+r"(leaves_stats), "+r"(leaves_losses));
  const RowStats<float> stats(args.row_stats, args.rows.numel);
  float* max_of_row = stats.max + first_row + lane;
  float* rest_of_row = stats.rest + first_row + lane;
  auto* const grad_input = static_cast<float*>(args.grad_input.data);
  auto* gradients = reinterpret_cast<uint4*>(grad_input + first_row * num_classes) + lane;
  float scale = 1;
  Partial partial;
  int ignored = 0;  // rows of this thread that do not count for the mean
  // Before the first step its copies start.
#pragma unroll 1
  for (int step_row = -kStepRows; step_row < rows; step_row += kStepRows) {
    const int next_row = step_row + kStepRows;
    const uint32_t next_stage = both_stages - stage;
    if (next_row < rows) {
      start_logits(next_row, next_stage);
    }
    if (step_row < 0) {
      if (weighted && threadIdx.x < num_classes) {
        if constexpr (kAny) {
          weights[threadIdx.x] = class_weight<float>(args, static_cast<int>(threadIdx.x));
        } else {
          weights[threadIdx.x] =
              static_cast<const float*>(args.weight)[threadIdx.x * args.weight_stride];
        }
      }
      if constexpr (kGradient) {
        if (warp == 0) {
          float computed = 1;
          if constexpr (kAny) {
            if (args.reduction == Reduction::kMean) {
              unit.wait(args, denominator);
            } else {
              wait_for_previous_kernel();
            }
            computed = unit.get();
          } else {
            computed = computed_scale(args, denominator);
          }
          if (lane == 0) {
            shared_scale = computed;
          }
        } else if constexpr (kIndices) {
          wait_for_previous_kernel();
        }
      }
      if (kGradient || weighted) {
        __syncthreads();
      }
      if constexpr (kGradient) {
        scale = shared_scale;
      }
    }
    if (next_row < rows) {
      start_targets(next_row, next_stage);
    }
    end_group_of_copies();
    if (step_row < 0) {
      stage = next_stage;
      continue;
    }
    wait_for_groups_but<1>();
    __syncwarp();
    const int rows_left = rows - step_row;
#pragma unroll 1
    for (int r = lane; r < kStepRows; r += kWarpSize) {
      const uint32_t own = stage + r * row_bytes;
      const uint32_t own_target = stage + kStepRows * row_bytes;
      int index;
      if constexpr (kIndices) {
        index = load_shared_byte(own_target + r);
      } else {
        index = checked_index(args,
                              load_shared_index(own_target + r * static_cast<int>(sizeof(int64_t))),
                              num_classes);
      }
      if (r >= rows_left) {
        index = kIgnoredRow;  // there is none
      }
      // Every row of the warp has a loss.
      const bool usual = __all_sync(kAllLanes, index >= 0);
      if constexpr (!kIndices) {
        ignored -= min(index, kInvalidRow) - kInvalidRow;
      }
      // The last class takes the place of the class index, and the row ends before it.
      const uint32_t at_index = own + 4 * max(index, 0);
      const float x_at_index = load_shared(at_index);
      store_shared(at_index, load_shared(own + 4 * count));
      float x[kMost];
      load_words<kClasses>(own, x, count);
      float max = x[0];
#pragma unroll
      for (int k = 1; k < kMost; ++k) {
        max = k < count ? math::max_number(x[k], max) : max;
      }
      // NaN if any logit is infinite: then the sum is taken again.
      const auto term = [&](float logit) { return math::exp_of_finite_in_sum(logit - max); };
      constexpr int kMostGroups = kMost / kGroup;
      const int groups = count / kGroup;
      float sums[kMostGroups + 1];
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        if (g < groups) {
          float values[kGroup];
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            values[i] = term(x[g * kGroup + i]);
          }
          sums[g] = pairwise_sum(values);
        }
      }
      float others = groups == 3 && kMostGroups == 3 ? sums[kMostGroups - 1] : sums[0];
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k >= groups * kGroup && k < count) {
          others = groups % 2 == 0 && k == groups * kGroup ? term(x[k]) : others + term(x[k]);
        }
      }
      if (groups >= 2) {
        const float first = sums[0] + sums[kMostGroups >= 2 ? 1 : 0];
        others = groups == 2 && count == 2 * kGroup ? first : others + first;
      }
      IndexRow reduced;
      if (IndexRow::is_near(max, others, x_at_index)) {
        reduced = IndexRow::of<false>(RowTerms<true>(), max, others, x_at_index);
      } else {
        max = math::max_number(max, -math::infinity<float>());  // of NaN alone there is none
        const RowTerms<true> terms(max);
        if (math::is_nan(others)) {
          // In the same order, which is that of strided rows.
          const int pairs_end = count / (2 * kGroup) * (2 * kGroup);
          float first = 0;
          float last = 0;
          int k = 0;
#pragma unroll 1
          for (; k + kGroup <= count; k += kGroup) {
            float values[kGroup];
#pragma unroll
            for (int i = 0; i < kGroup; ++i) {
              values[i] = terms(load_shared(own + 4 * (k + i)));
            }
            (k < pairs_end ? first : last) += pairwise_sum(values);
          }
#pragma unroll 1
          for (; k < count; ++k) {
            last += terms(load_shared(own + 4 * k));
          }
          others = first + last;
        }
        reduced = IndexRow::of(terms, max, others, x_at_index);
      }
      float weight = 1;
      if (weighted) {
        weight = index >= 0 ? weights[index] : 0.0f;
        if constexpr (!kIndices) {
          partial.weight += static_cast<double>(weight);
        }
      }
      const bool exists = r < rows_left;
      const auto finished = reduced.template finish<false>(x_at_index, scale, weight);
      float loss = finished.loss;
      if (!usual && index < 0) {
        loss = gradient_without_loss(index);
      }
      if (!kGradient && leaves_stats) {
        const IndexRow kept = usual || index >= 0 ? reduced : IndexRow();
        if (exists) {
          *max_of_row = kept.reference;
          *rest_of_row = kept.rest;
        }
        max_of_row += kWarpSize;
        rest_of_row += kWarpSize;
      }
      if (!kGradient && leaves_losses && exists) {
        const int64_t row = first_row + step_row + r;
        if constexpr (kAny) {
          store_operand<float>(args.output, row_offset(args.rows, args.output, row), loss);
        } else {
          static_cast<float*>(args.output.data)[row] = loss;
        }
      }
      partial.sum += static_cast<double>(loss);
      if constexpr (kGradient) {
        const LogitGradient<float, true> gradient(finished.softmax, scale * weight);
        float least = x_at_index;
#pragma unroll
        for (int k = 0; k < kMost; ++k) {
          least = k < count ? ::fminf(x[k], least) : least;
        }
        if (gradient.is_direct(least)) {
          gradient.replace_direct(x);
          store_words<kClasses>(own, x, count);
        } else {
#pragma unroll 1
          for (int k = 0; k < count; ++k) {
            float value[1] = {load_shared(own + 4 * k)};
            gradient.replace(value);
            store_shared(own + 4 * k, value[0]);
          }
        }
        store_shared(own + 4 * count, load_shared(at_index));
        store_shared(at_index, finished.gradient_at_index);
        if (!usual && index < 0) {
#pragma unroll 1
          for (int k = 0; k <= count; ++k) {
            store_shared(own + 4 * k, gradient_without_loss(index));
          }
        }
      }
    }
    __syncwarp();
    if constexpr (kGradient) {
      if (kAny && shape.gradient_in_vectors && next_row <= rows) {
#pragma unroll 1
        for (int i = lane; i < num_classes * kStepRows / 4; i += kWarpSize) {
          gradients[i - lane] = load_shared_vector(stage + i * kVectorBytes);
        }
        gradients += num_classes * kStepRows / 4;
      } else if constexpr (kAny) {
        for_classes<1, 1>(args.rows, args.grad_input, args.grad_input_class_stride, shape.classes,
                          first_row + step_row, min(rows_left, kStepRows),
                          [&](int r, int c, int64_t offset) {
                            grad_input[offset] = load_shared(stage + r * row_bytes + 4 * c);
                          });
      } else if (next_row <= rows) {
#pragma unroll
        for (int i = 0; i < kLastVectors; i += kWarpSize) {
          gradients[i] = load_shared_vector(stage + (lane + i) * kVectorBytes);
        }
        if (kVectors > kLastVectors && lane < kVectors - kLastVectors) {
          gradients[kLastVectors] =
              load_shared_vector(stage + (lane + kLastVectors) * kVectorBytes);
        }
        gradients += kVectors;
      } else {
        float* const words = grad_input + (first_row + step_row) * num_classes;
#pragma unroll 1
        for (int i = lane; i < (rows - step_row) * num_classes; i += kWarpSize) {
          words[i] = load_shared(stage + 4 * i);
        }
      }
      __syncwarp();
    }
    stage = next_stage;
  }
  if (!kIndices && !weighted) {
    const int steps = (rows + kStepRows - 1) / kStepRows;
    partial.weight = static_cast<double>(steps * kThreadRows - ignored);
  }
  if constexpr (kAny) {
    if (args.reduction != Reduction::kNone && !grad_output.exists()) {
      leave_to_grid(block_total(partial), partials, finalize);
    }
  } else {
    partial = block_total(partial);
    if (threadIdx.x == 0 && !leaves_losses) {
      partials[blockIdx.x] = partial;
    }
  }
#endif
}

// Whether the losses of "none" are fp32 and contiguous.
bool losses_are_contiguous(const CrossEntropyForwardArgs& args) {
  return args.output.dtype == DType::kFloat32 && args.rows.ndim == 1 && args.output.strides[0] == 1;
}

// f of the number of classes as a constant.
template <int kClasses, typename F>
void visit_class_count(int classes, F&& f) {
  if (classes == kClasses) {
    f(std::integral_constant<int, kClasses>{});
  } else if constexpr (kClasses < kMaxClasses) {
    visit_class_count<kClasses + 1>(classes, f);
  }
}

}  // namespace
}  // namespace few_classes

void launch_few_classes(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace few_classes;
  const bool gradient = args.grad_input.data != nullptr;
  // Measured on an H200, 4 million rows of 10 classes: as many blocks again, which are not all
  // resident, take 1 us longer where nothing is to be done, and 30 us less of 175 else.
  int64_t blocks = grad_output.limit_blocks(plan.blocks, 2 * kThreads);
  BlockShares shares = plan.block_shares;
  if (blocks < plan.blocks) {
    const int64_t steps = ceil_div(args.rows.numel, int64_t{kBlockRows});
    const auto share = static_cast<int>(ceil_div(steps, blocks));
    shares = BlockShares::of(steps, share, share, 0);
    blocks = shares.blocks(steps);
  }
  const FewShape shape = {
      shares, rows_follow_in_vectors(args, args.input, 1),
      gradient && rows_follow_in_vectors(args, args.grad_input, args.grad_input_class_stride),
      Divisor(static_cast<uint32_t>(args.num_classes))};
  const bool usual = shape.input_in_vectors &&
                     (gradient ? denominator.indices != nullptr && shape.gradient_in_vectors
                               : targets_are_in_vectors(args)) &&
                     (args.reduction != Reduction::kNone || losses_are_contiguous(args)) &&
                     blocks > 1 && (args.weight == nullptr || args.weight_dtype == DType::kFloat32);
  const auto launch = [&](auto kernel) {
    launch_kernel("cross_entropy_forward_few_kernel", kernel,
                  {blocks, kThreads, plan.shared_bytes, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, shape, denominator, grad_output, partials, finalize);
  };
  visit_bool(gradient, [&](auto has_gradient) {
    const auto launch_classes = [&](auto classes) {
      launch(cross_entropy_forward_few_kernel<decltype(classes)::value,
                                              decltype(has_gradient)::value>);
    };
    if (usual) {
      visit_class_count<2>(static_cast<int>(args.num_classes), launch_classes);
    } else {
      launch_classes(std::integral_constant<int, kAnyClasses>{});
    }
  });
}

}  // namespace lossops::cuda
