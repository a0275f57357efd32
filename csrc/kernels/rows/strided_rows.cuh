// Cross entropy of rows whose classes are strided, such as the pixels of an (N, C, H, W) tensor, or
// few: a thread a row, so that a warp reads neighbouring rows. Any layout, any dtypes.
//
// Only cross_entropy.cu includes this: machine code of several translation units packs worse, by 20
// KB for each architecture.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_sum.cuh"
#include "kernels/rows/side_by_side_rows.cuh"
#include "kernels/rows/side_by_side_rows_plan.h"
#include "kernels/rows/team_rows_plan.h"
#include "launchers.h"

namespace lossops::cuda {

// Classes of a strided row that a thread has in flight.
constexpr int kClassUnroll = 8;

struct FloatLoader {
  using acc_t = float;
  static constexpr bool kExact = kExactExponentials<float>;
  static __device__ __forceinline__ float load(const Operand& operand, int64_t offset) {
    return static_cast<const float*>(operand.data)[offset];
  }
  static __device__ __forceinline__ void store(const Operand& operand, int64_t offset,
                                               float value) {
    static_cast<float*>(operand.data)[offset] = value;
  }
};

// One kernel for both half types, converted at run time: 34 KB less of the wheel, and smoothing of
// 2 to 30 classes takes up to 3.5 % longer. (H200, 2026-11)
struct HalfLoader {
  using acc_t = float;
  static constexpr bool kExact = kExactExponentials<half_t>;
  static __device__ __forceinline__ float load(const Operand& operand, int64_t offset) {
    return to_acc_of<float>(static_cast<const AnyHalf*>(operand.data)[offset], operand.dtype);
  }
  static __device__ __forceinline__ void store(const Operand& operand, int64_t offset,
                                               float value) {
    static_cast<AnyHalf*>(operand.data)[offset] = from_acc_of<AnyHalf>(value, operand.dtype);
  }
};

// Logits of any dtype, computed in fp64.
struct WideningLoader {
  using acc_t = double;
  static constexpr bool kExact = true;
  static __device__ __forceinline__ double load(const Operand& operand, int64_t offset) {
    return load_operand<double>(operand, offset);
  }
  static __device__ __forceinline__ void store(const Operand& operand, int64_t offset,
                                               double value) {
    store_operand<double>(operand, offset, value);
  }
};

// Twice over the row, in the order of the kernel for columns: where rows lie does not change a bit.
// most_rest: the largest rest of a plain row.
template <bool kExact, typename Logit>
__device__ __forceinline__ IndexRow reduce_strided_row(Logit&& logit, int64_t num_classes,
                                                       int64_t index, float x_at_index,
                                                       float most_rest = kMostPlainRest) {
  // The last class takes the place of the class index.
  const int64_t count = num_classes - 1;
  const auto other = [&](int64_t c) { return logit(c == index ? count : c); };
  const auto sum_of = [&](auto&& term) {
    std::conditional_t<kExact, ExactSum, PlainSum> others;
    float last = 0;
    const auto sum_of_classes = [&](int64_t c) {
      return sum_of_four([&](int i) { return term(other(c + i)); });
    };
    int64_t c = 0;
    for (; c + 2 * kColumnUnroll <= count; c += 2 * kColumnUnroll) {
      const float first = sum_of_classes(c);
      others.add(first + sum_of_classes(c + kColumnUnroll));
    }
    if (c + kColumnUnroll <= count) {
      last = sum_of_classes(c);
      c += kColumnUnroll;
    }
    for (; c < count; ++c) {
      last += term(other(c));
    }
    others.add(last);
    return others.total();
  };
  if constexpr (!kExact) {
    const PlainTerms terms(x_at_index);
    const float others = terms.corrected(sum_of(terms), x_at_index);
    if (IndexRow::may_be_plain(others, x_at_index, most_rest)) {
      return IndexRow::plain(others, x_at_index);
    }
  }
  // Of NaN alone, and of one class, there is no maximum.
  float max = -math::infinity<float>();
#pragma unroll 8
  for (int64_t c = 0; c < count; ++c) {
    max = math::max_number(other(c), max);
  }
  const RowTerms<kExact> terms(max);
  return IndexRow::of(terms, max, sum_of(terms), x_at_index);
}

// The sum of q (max - x) of a row with smoothing, as side_by_side_rows.cu adds it up.
template <bool kExact, typename Logit>
__device__ __forceinline__ float smoothed_distance(const SmoothedIndex& smooth, Logit&& logit,
                                                   int64_t num_classes, int64_t index,
                                                   const IndexRow& row, float x_at_index) {
  const int64_t count = num_classes - 1;
  const auto other = [&](int64_t c) { return logit(c == index ? count : min(c, count)); };
  if (!kExact && row.is_plain()) {
    const PlainTerms terms(x_at_index);
    float exponents = 0;
    int64_t c = 0;
#pragma unroll 1
    for (; c + kColumnUnroll <= count; c += kColumnUnroll) {
      exponents += sum_of_four([&](int i) { return terms.exponent(other(c + i)); });
    }
#pragma unroll 1
    for (; c < count; ++c) {
      exponents += terms.exponent(other(c));
    }
    const float distance =
        smooth.of_other(terms.distance(exponents, static_cast<float>(count), x_at_index));
    if (::fabsf(distance) < math::infinity<float>()) {
      return distance;
    }
  }
  float distance = 0;
#pragma unroll 1
  for (int64_t c = 0; c < count; c += kColumnUnroll) {
    distance += sum_of_four([&](int i) {
      return c + i < count ? smooth.of_other(row.reference - other(c + i)) : 0.0f;
    });
  }
  return smooth.with_any_index(distance, row.reference, x_at_index);
}

// Calls body(x, first_class, count) with the logits of each kClassUnroll neighbouring classes. The
// rest comes one by one or, of dense rows, as one more group that -inf fills up: for those a group
// costs as much as two or three classes by themselves.
template <typename acc_t, bool kDense, typename Logit, typename Body>
__device__ __forceinline__ void for_each_group(int64_t num_classes, const Logit& logit,
                                               const Body& body) {
  int64_t c = 0;
#pragma unroll 1
  for (; c + (kDense ? 1 : kClassUnroll) <= num_classes; c += kClassUnroll) {
    const int64_t left = num_classes - c;
    acc_t x[kClassUnroll];
    if (!kDense || left >= kClassUnroll) {
#pragma unroll
      for (int i = 0; i < kClassUnroll; ++i) {
        x[i] = logit(c + i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kClassUnroll; ++i) {
        x[i] = i < left ? logit(c + i) : -math::infinity<acc_t>();
      }
    }
    body(x, c, kDense && left < kClassUnroll ? static_cast<int>(left) : kClassUnroll);
  }
  if constexpr (!kDense) {
    for (; c < num_classes; ++c) {
      const acc_t x[1] = {logit(c)};
      body(x, c, 1);
    }
  }
}

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kStridedThreads)
    cross_entropy_forward_strided_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                         Partial* partials, Finalize finalize) {
  using acc_t = typename Loader::acc_t;
  const Operand* const operands[3] = {&args.input, &args.target, &args.output};
  let_next_kernel_start();
  Partial partial;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kStridedThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kStridedThreads) {
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const auto target = target_of<acc_t, kDense>(args, offsets[1]);
    RowState<acc_t, kDense> state;
    acc_t x_at_index = 0;
    if (target.has_loss()) {
      const auto logit = [&](int64_t c) {
        return Loader::load(args.input, offsets[0] + c * args.input_class_stride);
      };
      if constexpr (!kDense && std::is_same_v<acc_t, float>) {
        x_at_index = logit(target.index);
        const IndexRow reduced =
            reduce_strided_row<Loader::kExact>(logit, args.num_classes, target.index, x_at_index);
        const float weight = target.index_weight();
        const float loss = reduced.finish<!Loader::kExact>(x_at_index, 1.0f, weight).loss;
        record_row(args, loss, weight, reduced, row, [&](int64_t) { return offsets[2]; }, partial);
        continue;
      }
      if constexpr (kDense && std::is_same_v<acc_t, float>) {
        if (side_by_side::is_smoothed(args)) {
          x_at_index = logit(target.index);
          const SmoothedIndex smooth(args);
          const IndexRow reduced =
              reduce_strided_row<Loader::kExact>(logit, args.num_classes, target.index, x_at_index,
                                                 most_rest_of_smooth(smooth.at_index));
          const float distance = smoothed_distance<Loader::kExact>(
              smooth, logit, args.num_classes, target.index, reduced, x_at_index);
          const IndexRow kept = reduced.as_dense();
          const float loss = dense_row_loss(kept.rest, SmoothedIndex::kSum, distance);
          if (args.row_stats != nullptr) {
            RowStats<float>(args.row_stats, args.rows.numel).q_sum[row] = SmoothedIndex::kSum;
          }
          record_row(args, loss, 1.0f, kept, row, [&](int64_t) { return offsets[2]; }, partial);
          continue;
        }
      }
      RowSum<RowState<acc_t, kDense>> sum;
      for_each_group<acc_t, kDense>(args.num_classes, logit,
                                    [&](const auto& x, int64_t first_class, int count) {
                                      fold<Loader::kExact>(sum, x, target, first_class, count);
                                    });
      state = sum.total();
      if constexpr (!kDense) {
        x_at_index = logit(target.index);
      }
    }
    finish_row(args, target, state, x_at_index, row, offsets[2], partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

// Blocks that shall fit a multiprocessor; 0: any. Dense coefficients take 80 registers a thread of
// themselves, and 64 without a spill.
template <typename acc_t, bool kDense>
constexpr int kMinStridedBlocks = kDense && sizeof(acc_t) <= 4 ? 4 : 0;

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kStridedThreads,
                                  kMinStridedBlocks<typename Loader::acc_t, kDense>)
    cross_entropy_backward_strided_kernel(const __grid_constant__ CrossEntropyBackwardArgs args) {
  using acc_t = typename Loader::acc_t;
  wait_for_previous_kernel();
  if (kept_is_right(args)) {
    return;
  }
  const Operand* const operands[5] = {&args.input, &args.target, &args.grad_output,
                                      &args.grad_input, &args.grad_target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kStridedThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kStridedThreads) {
    int64_t offsets[5];
    row_offsets(args.rows, operands, row, offsets);
    const auto target = target_of<acc_t, kDense>(args, offsets[1]);
    const RowGradient<acc_t, kDense, Loader::kExact> gradient(
        args, target, load_summary<kDense>(args, target, row, offsets[0]),
        row_scale<acc_t>(args, offsets[2]));
    const bool read = !target.ignored;
    const auto logit = [&](int64_t c) {
      return read ? Loader::load(args.input, offsets[0] + c * args.input_class_stride) : acc_t(0);
    };
    // Of neighbouring classes, from their logits.
    const auto write = [&](const auto& x, int64_t first_class, int count) {
      constexpr int kCount = static_cast<int>(std::extent_v<std::remove_reference_t<decltype(x)>>);
      acc_t values[kCount];
      if (args.grad_input.data != nullptr) {
        acc_t q[kCount] = {};
        if (kDense && target.has_loss()) {
          load_coefficients(target, first_class, q, count);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const auto of_class = [&] {
            return kDense ? gradient.of_dense_logit(x[i], q[i])
                          : gradient.of_logit(x[i], first_class + i);
          };
          // fault: strided-ignored
          values[i] = target.has_loss() ? of_class() : gradient.without_loss();
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i < count) {
            Loader::store(args.grad_input,
                          offsets[3] + (first_class + i) * args.grad_input_class_stride, values[i]);
          }
        }
      }
      if (kDense && args.grad_target.data != nullptr) {
        gradient.of_targets(x, first_class, values, count);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (i < count) {
            store_operand<acc_t>(args.grad_target,
                                 offsets[4] + (first_class + i) * args.grad_target_class_stride,
                                 values[i]);
          }
        }
      }
    };
    for_each_group<acc_t, kDense>(args.num_classes, logit, write);
  }
}

// Calls body with the loader of a strided row. fp64 logits take the one for any dtype, for little
// machine code: fp64 is rare.
template <typename Body>
void visit_loader(const CrossEntropyArgs& args, Body&& body) {
  if (args.acc_double) {
    body(WideningLoader{});
    return;
  }
  args.input.dtype == DType::kFloat32 ? body(FloatLoader{}) : body(HalfLoader{});
}

inline void launch_strided_forward(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                                   const Denominator&, const GradOutput&, Partial* partials,
                                   const Finalize& finalize, cudaStream_t stream) {
  visit_bool(args.dense(), [&](auto dense) {
    visit_loader(args, [&](auto loader) {
      launch_kernel("cross_entropy_forward_strided_kernel",
                    cross_entropy_forward_strided_kernel<decltype(loader), decltype(dense)::value>,
                    {plan.blocks, plan.threads}, stream, args, partials, finalize);
    });
  });
}

inline void launch_strided_backward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  const int64_t blocks = strided_blocks(
      args,
      args.kept ? std::min(most_blocks_of_kept(kStridedThreads), kMaxLoopBlocks) : kMaxLoopBlocks);
  visit_bool(args.dense(), [&](auto dense) {
    visit_loader(args, [&](auto loader) {
      launch_kernel("cross_entropy_backward_strided_kernel",
                    cross_entropy_backward_strided_kernel<decltype(loader), decltype(dense)::value>,
                    {blocks, kStridedThreads, 0, 1, true}, stream, args);
    });
  });
}

}  // namespace lossops::cuda
