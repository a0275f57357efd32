#include "kernels/cross_entropy_columns.cuh"

#include <algorithm>
#include <cstdint>

#include "kernels/async_copy.cuh"
#include "kernels/block_reduce.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/integers.h"
#include "kernels/launch.cuh"
#include "kernels/row_words.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {
namespace {

// Measured on an H200, 21 classes: 64 threads are as fast, 32 lose 5 %.
constexpr int kMaxThreads = 128;
// A multiprocessor shall hold as many blocks. Measured on an H200: 8 spill, and fp16 takes 10 %
// longer.
constexpr int kMinBlocks = 6;
// Several waves on any GPU. Measured on an H200: 660 to 16384 make no difference.
constexpr int64_t kMaxBlocks = 4096;
// What the threads of a block have in shared memory, at most.
constexpr int kMaxSharedBytes = 44 << 10;
// Neighbouring rows that a thread takes: 8 bytes of a class. Measured on an H200: 16 of fp32 leave
// room for half the threads, and the step takes 2 % longer.
constexpr int64_t group_rows(int64_t element_bytes) { return 8 / element_bytes; }
template <typename scalar_t>
constexpr int kGroupRows = static_cast<int>(group_rows(sizeof(scalar_t)));

// The logits of one class, of a thread's rows.
template <typename scalar_t>
struct alignas(kGroupRows<scalar_t> * sizeof(scalar_t)) RowGroup {
  static constexpr int kRows = kGroupRows<scalar_t>;
  static constexpr int kWords = kRows / kWordElements<scalar_t>;
  uint32_t words[kWords];

  __device__ __forceinline__ float get(int row) const {
    constexpr int kPerWord = kWordElements<scalar_t>;
    return word_element<scalar_t>(words[row / kPerWord], row % kPerWord);
  }

  __device__ __forceinline__ void raise_to(const RowGroup& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = max_of_words<scalar_t>(other.words[i], words[i]);
    }
  }

  __device__ __forceinline__ void reach_to(const RowGroup& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = reach_of_words<scalar_t>(other.words[i], words[i]);
    }
  }

  static __device__ __forceinline__ RowGroup of(const float (&values)[kRows]) {
    RowGroup result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      result.words[i] = pack_word<scalar_t>(values + i * kWordElements<scalar_t>);
    }
    return result;
  }
};

// What is stored at once, aligned to its size.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) VectorOf {
  T values[kCount];
};

// Where groups of rows are.
struct ColumnShape {
  int64_t groups;
  // Rows of one dimension or two, few enough for 32 bits: groups of the first dimension.
  bool by_divisor;
  Divisor first_dimension;
};

// Offsets of a group's first row.
template <int kRows, int N>
__device__ __forceinline__ void group_offsets(const IterationSpace& rows, const ColumnShape& shape,
                                              const Operand* const (&operands)[N], int64_t group,
                                              int64_t (&offsets)[N]) {
  if (!shape.by_divisor) {
    row_offsets(rows, operands, group * kRows, offsets);
    return;
  }
  const auto index = static_cast<uint32_t>(group);
  const uint32_t outer = shape.first_dimension.quotient(index);
  const int64_t inner = int64_t{index - outer * shape.first_dimension.value} * kRows;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    offsets[n] = inner * operands[n]->strides[0] + outer * operands[n]->strides[1];
  }
}

template <typename scalar_t, bool kGradient>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    cross_entropy_forward_column_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                        const ColumnShape shape, Denominator denominator,
                                        Partial* partials, Finalize finalize) {
  constexpr bool kExact = kExactExponentials<scalar_t>;
  using Group = RowGroup<scalar_t>;
  constexpr int kRows = Group::kRows;
  using Terms = RowTerms<kExact>;
  extern __shared__ uint4 stage[];
  const Operand* const operands[3] = {&args.input, &args.target, &args.grad_input};
  const int num_classes = static_cast<int>(args.num_classes);
  const int threads = static_cast<int>(blockDim.x);
  // Class c of this thread's rows. No other thread reads it.
  Group* const own = reinterpret_cast<Group*>(stage) + threadIdx.x;
  auto* const scalars = reinterpret_cast<scalar_t*>(own);
  const int class_pitch = threads * kRows;
  int64_t group = int64_t{blockIdx.x} * threads + threadIdx.x;
  int64_t offsets[3];
  const auto start = [&] {
    if (group >= shape.groups) {
      return;
    }
    group_offsets<kRows>(args.rows, shape, operands, group, offsets);
    const auto* logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
#pragma unroll 4
    for (int c = 0; c < num_classes; ++c) {
      start_own_copy(own + c * threads, logits);
      logits += args.input_class_stride;
    }
  };
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  start();
  unit.wait(args, denominator);
  const float scale = unit.get();
  Partial partial;
  while (group < shape.groups) {
    int64_t targets[kRows];
    load_class_indices(args.target, offsets[1], args.target.strides[0], targets);
    int indices[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      indices[i] = checked_index(args, targets[i]);
    }
    wait_for_own_copies();
    // The last class takes the place of the class index, and rows end before it.
    const int count = num_classes - 1;
    float x_at_index[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x_at_index[i] = 0;
      if (indices[i] >= 0) {
        scalar_t& logit = scalars[indices[i] * class_pitch + i];
        x_at_index[i] = to_acc<float>(logit);
        logit = scalars[count * class_pitch + i];
      }
    }
    // The sums of terms of the rows.
    const auto sum_terms = [&](auto& totals, auto&& term, auto&& see) {
      ExactSum sums[kRows];
      float last[kRows] = {};
      const auto add_classes = [&](int c, auto& totals) {
        Group x[kColumnUnroll];
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u) {
          x[u] = own[(c + u) * threads];
          see(x[u]);
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float values[kColumnUnroll];
#pragma unroll
          for (int u = 0; u < kColumnUnroll; ++u) {
            values[u] = term(i, x[u].get(i));
          }
          totals[i] += pairwise_sum(values);
        }
      };
      int c = 0;
#pragma unroll 1
      for (; c + 2 * kColumnUnroll <= count; c += 2 * kColumnUnroll) {
        float both[kRows] = {};
        add_classes(c, both);
        add_classes(c + kColumnUnroll, both);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          sums[i].add(both[i]);
        }
      }
      if (c + kColumnUnroll <= count) {
        add_classes(c, last);
        c += kColumnUnroll;
      }
#pragma unroll 1
      for (; c < count; ++c) {
        const Group x = own[c * threads];
        see(x);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          last[i] += term(i, x.get(i));
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sums[i].add(last[i]);
        totals[i] = sums[i].total();
      }
    };
    IndexRow reduced[kRows];
    float others[kRows];
    bool all_plain = !kExact;
    if constexpr (!kExact) {
      Group reaches = {};
      sum_terms(
          others, [](int, float x) { return plain_exp(x); },
          [&](const Group& x) { reaches.reach_to(x); });
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float reach = math::max_number(reaches.get(i), ::fabsf(x_at_index[i]));
        const bool plain = IndexRow::may_be_plain(reach, others[i]);
        if (plain) {
          reduced[i] = IndexRow::plain(others[i]);
        }
        all_plain = all_plain && (plain || indices[i] < 0);
      }
    }
    if (!all_plain) {
      Group largest = own[0];
#pragma unroll 4
      for (int c = 1; c < count; ++c) {
        largest.raise_to(own[c * threads]);
      }
      float maxima[kRows];
      Terms terms[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Of one class there are no others, and of NaN alone no maximum.
        const float largest_other = count > 0 ? largest.get(i) : -math::infinity<float>();
        maxima[i] = math::max_number(largest_other, -math::infinity<float>());
        terms[i] = Terms(maxima[i]);
      }
      sum_terms(others, [&](int i, float x) { return terms[i](x); }, [](const Group&) {});
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (!reduced[i].is_plain()) {
          reduced[i] = IndexRow::of(terms[i], maxima[i], others[i], x_at_index[i]);
        }
      }
    }
    LogitGradient<float, kExact> gradients[kRows];
    float at_index[kRows];
    float losses[kRows];
    // Whether one formula gives the gradients of all rows: PlainGradient's, or that of exact ones
    // above `lowest`.
    bool all_alike = true;
    float lowest = -math::infinity<float>();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float weight = row_weight(args, indices[i]);
      const auto finished = reduced[i].template finish<!kExact>(x_at_index[i], scale, weight);
      losses[i] = indices[i] >= 0 ? finished.loss : gradient_without_loss(indices[i]);
      partial.sum += static_cast<double>(losses[i]);
      partial.weight += static_cast<double>(weight);
      gradients[i] = LogitGradient<float, kExact>(finished.softmax, scale * weight);
      at_index[i] = finished.gradient_at_index;
      if constexpr (kExact) {
        all_alike = all_alike && indices[i] >= 0;
        lowest = math::max_number(gradients[i].lowest, lowest);
      } else {
        all_alike = all_alike && indices[i] >= 0 && finished.has_plain_gradient;
      }
    }
    if (args.row_stats != nullptr) {
      const RowStats<float> stats(args.row_stats, args.rows.numel);
      using RowFloats = VectorOf<float, kRows>;
      RowFloats maxima;
      RowFloats rests;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        maxima.values[i] = reduced[i].max;
        rests.values[i] = reduced[i].rest;
      }
      reinterpret_cast<RowFloats*>(stats.max)[group] = maxima;
      reinterpret_cast<RowFloats*>(stats.rest)[group] = rests;
    }
    if (args.reduction == Reduction::kNone) {
      const Operand* const output[1] = {&args.output};
      int64_t offset[1];
      group_offsets<kRows>(args.rows, shape, output, group, offset);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        store_operand<float>(args.output, offset[0] + i * args.output.strides[0], losses[i]);
      }
    }
    if constexpr (kGradient) {
      // In the place of the logits first, then to where they belong.
      const auto write = [&](auto&& replace) {
#pragma unroll 2
        for (int k = 0; k < count; ++k) {
          const Group x = own[k * threads];
          float values[kRows];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            values[i] = x.get(i);
          }
          replace(values);
          own[k * threads] = Group::of(values);
        }
      };
      const auto replace_each = [&](auto& x) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float value[1] = {x[i]};
          gradients[i].replace(value);
          x[i] = indices[i] >= 0 ? value[0] : gradient_without_loss(indices[i]);
        }
      };
      if (!all_alike) {
        write(replace_each);
      } else if constexpr (kExact) {
        write([&](auto& x) {
          if (least_of(x) > lowest) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              x[i] = gradients[i].multiple(x[i]);
            }
          } else {
            replace_each(x);
          }
        });
      } else {
        write([&](auto& x) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            float value[1] = {x[i]};
            PlainGradient{gradients[i].softmax.factor}.replace(value);
            x[i] = value[0];
          }
        });
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        scalar_t& last = scalars[count * class_pitch + i];
        if (indices[i] >= 0) {
          scalar_t& result = scalars[indices[i] * class_pitch + i];
          last = result;
          result = from_acc<scalar_t>(at_index[i]);
        } else {
          last = from_acc<scalar_t>(gradient_without_loss(indices[i]));
        }
      }
      auto* results = static_cast<scalar_t*>(args.grad_input.data) + offsets[2];
#pragma unroll 4
      for (int k = 0; k < num_classes; ++k) {
        *reinterpret_cast<Group*>(results) = own[k * threads];
        results += args.grad_input_class_stride;
      }
    }
    group += int64_t{gridDim.x} * threads;
    start();
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace

bool lies_in_columns(const CrossEntropyArgs& args, const Operand& operand, int64_t class_stride) {
  const int64_t group = group_rows(element_size(operand.dtype));
  const int64_t bytes = group * element_size(operand.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(operand.data) % static_cast<uint64_t>(bytes) == 0 &&
                 args.rows.ndim >= 1 && args.rows.sizes[0] % group == 0 &&
                 operand.strides[0] == 1 && class_stride % group == 0;
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    aligned = aligned && operand.strides[dim] % group == 0;
  }
  return aligned;
}

ColumnPlan plan_columns(const CrossEntropyForwardArgs& args) {
  ColumnPlan plan;
  if (args.dense() || args.acc_double || args.input_class_stride == 1 ||
      args.num_classes > kMaxColumnClasses ||
      !lies_in_columns(args, args.input, args.input_class_stride)) {
    return plan;
  }
  static_assert(kMaxColumnClasses * kWarpSize * sizeof(RowGroup<float>) <= kMaxSharedBytes,
                "a warp's classes");
  plan.threads = kMaxThreads;
  const int64_t group = group_rows(element_size(args.input.dtype));
  plan.class_bytes = static_cast<int>(group * element_size(args.input.dtype));
  while (plan.threads * args.num_classes * plan.class_bytes > kMaxSharedBytes) {
    plan.threads /= 2;
  }
  plan.blocks = std::clamp<int64_t>(ceil_div(args.rows.numel / group, plan.threads), 1, kMaxBlocks);
  return plan;
}

void launch_columns(const CrossEntropyForwardArgs& args, const ColumnPlan& plan,
                    const Denominator& denominator, Partial* partials, const Finalize& finalize,
                    cudaStream_t stream) {
  const int64_t group = group_rows(element_size(args.input.dtype));
  ColumnShape shape = {args.rows.numel / group, false, {}};
  shape.by_divisor = args.rows.ndim <= 2 && shape.groups <= kMaxDividend;
  if (shape.by_divisor) {
    shape.first_dimension = Divisor(static_cast<uint32_t>(args.rows.sizes[0] / group));
  }
  const int64_t shared = plan.threads * args.num_classes * plan.class_bytes;
  visit_floating(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if constexpr (sizeof(scalar_t) <= 4) {
      const auto launch = [&](auto kernel) {
        launch_kernel("cross_entropy_forward_column_kernel", kernel,
                      {plan.blocks, plan.threads, shared, 1, denominator.is_computed()}, stream,
                      args, shape, denominator, partials, finalize);
      };
      args.grad_input.data != nullptr
          ? launch(cross_entropy_forward_column_kernel<scalar_t, true>)
          : launch(cross_entropy_forward_column_kernel<scalar_t, false>);
    }
  });
}

}  // namespace lossops::cuda
