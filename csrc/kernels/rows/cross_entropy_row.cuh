// What every kernel of cross entropy does with one row: where it lies, its target, its loss.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cross_entropy_row.h"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "launchers.h"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// A row's offsets into input, target and output (or gradient).
template <int N>
__device__ __forceinline__ void row_offsets(const IterationSpace& rows,
                                            const Operand* const (&operands)[N], int64_t row,
                                            int64_t (&offsets)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    offsets[n] = 0;
  }
  strided_offsets(rows, operands, row, offsets);
}

// The same without the divisions of several dimensions where there is one.
template <int N>
__device__ __forceinline__ void plain_row_offsets(const IterationSpace& rows,
                                                  const Operand* const (&operands)[N], int64_t row,
                                                  int64_t (&offsets)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    offsets[i] = row * operands[i]->strides[0];
  }
  if (rows.ndim > 1) {
    row_offsets(rows, operands, row, offsets);
  }
}

// Of one operand, likewise.
__device__ __forceinline__ int64_t row_offset(const IterationSpace& rows, const Operand& operand,
                                              int64_t row) {
  if (rows.ndim <= 1) {
    return row * operand.strides[0];
  }
  const Operand* const operands[1] = {&operand};
  int64_t offsets[1];
  row_offsets(rows, operands, row, offsets);
  return offsets[0];
}

// The same, but several dimensions take a call: for kernels that ask for many offsets. So
// staged_rows.cu has 210 KB less machine code for an architecture. Steps of tiles.cu take 3 %
// longer with it. (nvcc 13.0, H200, 2026-11)
static __device__ __attribute__((noinline)) int64_t called_row_offset(const IterationSpace& rows,
                                                                      const Operand& operand,
                                                                      int64_t row) {
  return row_offset(rows, operand, row);
}
__device__ __forceinline__ int64_t row_offset_by_call(const IterationSpace& rows,
                                                      const Operand& operand, int64_t row) {
  return rows.ndim <= 1 ? row * operand.strides[0] : called_row_offset(rows, operand, row);
}

// Calls body with the kind of rows without both class weights and dense coefficients.
template <typename Body>
void visit_row_kind(const CrossEntropyArgs& args, Body&& body) {
  args.target_is_probability ? body(std::integral_constant<RowKind, RowKind::kProbability>{})
  : args.dense()             ? body(std::integral_constant<RowKind, RowKind::kSmooth>{})
                             : body(std::integral_constant<RowKind, RowKind::kIndex>{});
}

LOSSOPS_HOST_DEVICE Smoothing smoothing_of(const CrossEntropyArgs& args) {
  return {static_cast<float>(args.label_smoothing),
          static_cast<float>(args.label_smoothing / static_cast<double>(args.num_classes))};
}

// Calls body with the tag of a floating dtype that a call computed in acc_t may have: fp64 only
// where acc_t is (CrossEntropyArgs::acc_double).
template <typename acc_t, typename Body>
__device__ __forceinline__ void visit_up_to(DType dtype, Body&& body) {
  if constexpr (std::is_same_v<acc_t, double>) {
    visit_floating(dtype, body);
  } else {
    switch (dtype) {
      case DType::kFloat32:
        return body(TypeTag<float>{});
      case DType::kFloat16:
        return body(TypeTag<half_t>{});
      case DType::kBFloat16:
        return body(TypeTag<bfloat16_t>{});
      default:
        return;
    }
  }
}

// kCount elements that are neighbours, in whole vectors if they are aligned.
template <int kCount, typename acc_t, typename T>
__device__ __forceinline__ void load_neighbours(const T* data, acc_t (&values)[kCount]) {
  if constexpr (kCount * sizeof(T) % kVectorBytes == 0) {
    if (is_vector_aligned(data)) {
#pragma unroll
      for (int v = 0; v < kCount / kVectorSize<T>; ++v) {
        const Vector<T> loaded = load_vector(data, v);
#pragma unroll
        for (int i = 0; i < kVectorSize<T>; ++i) {
          values[v * kVectorSize<T> + i] = to_acc<acc_t>(loaded.get(i));
        }
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = to_acc<acc_t>(data[i]);
  }
}

// q *= the weights of neighbouring classes: the first `count` of them. Weights of integers, and
// weights that are not neighbours, are rare. They take a loop: a switch over all dtypes for each
// class was a third of the machine code of dense rows.
template <int kCount, typename acc_t>
__device__ __forceinline__ void multiply_by_weights(const CrossEntropyArgs& args,
                                                    int64_t first_class, acc_t (&q)[kCount],
                                                    int count = kCount) {
  if (args.weight == nullptr) {
    return;
  }
  if (kCount > 1 && count == kCount && args.weight_stride == 1 && is_floating(args.weight_dtype)) {
    visit_up_to<acc_t>(args.weight_dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      acc_t weights[kCount];
      load_neighbours(static_cast<const T*>(args.weight) + first_class, weights);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        q[i] *= weights[i];
      }
    });
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const acc_t weight = class_weight<acc_t>(args, first_class + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      q[j] *= j == i ? weight : acc_t(1);
    }
  }
}

// The target of a row. Its smoothing would be converted from fp64 again for every vector.
template <typename acc_t, bool kDense>
__device__ __forceinline__ RowTarget<acc_t> target_of(const CrossEntropyArgs& args,
                                                      int64_t offset) {
  RowTarget<acc_t> target(args, offset);
  if constexpr (kDense) {
    target.smoothing = unfolded(target.smoothing);
    target.smoothing_per_class = unfolded(target.smoothing_per_class);
  }
  return target;
}

// Coefficients of neighbouring classes: RowTarget::coefficient() of the first `count`, and 0. A
// switch over the dtype and a load for all of them, where one for each took most of the time.
template <int kCount, typename acc_t>
__device__ __forceinline__ void load_coefficients(const RowTarget<acc_t>& target,
                                                  int64_t first_class, acc_t (&q)[kCount],
                                                  int count = kCount) {
  const CrossEntropyArgs& args = target.args;
  if (args.target_is_probability) {
    const int64_t stride = args.target_class_stride;
    const int64_t first = target.offset + first_class * stride;
    visit_up_to<acc_t>(args.target.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const T* const data = static_cast<const T*>(args.target.data) + first;
      if (stride == 1 && count == kCount) {
        load_neighbours(data, q);
        return;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        q[i] = i < count ? to_acc<acc_t>(data[i * stride]) : acc_t(0);
      }
    });
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      q[i] = smoothed(q[i], target.smoothing, target.smoothing_per_class);
    }
  } else {
    // Else the compiler would choose between 1 and 0 and smooth every choice.
    const acc_t at_index =
        unfolded(smoothed(acc_t(1), target.smoothing, target.smoothing_per_class));
    const acc_t other = unfolded(smoothed(acc_t(0), target.smoothing, target.smoothing_per_class));
    const int64_t distance = target.index - first_class;
    const int at = distance >= 0 && distance < kCount ? static_cast<int>(distance) : -1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      q[i] = i == at ? at_index : other;
    }
  }
  multiply_by_weights(args, first_class, q, count);
  if (count < kCount) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      q[i] = i < count ? q[i] : acc_t(0);
    }
  }
}

// What one row leaves behind, once its state is complete. x_at_index is the logit of the
// class index, unused by dense rows.
template <typename acc_t, typename State>
__device__ __forceinline__ void finish_row(const CrossEntropyForwardArgs& args,
                                           const RowTarget<acc_t>& target, const State& state,
                                           acc_t x_at_index, int64_t row, int64_t output_offset,
                                           Partial& partial) {
  constexpr bool kDense = std::is_same_v<State, DenseOnlineSoftmax<acc_t>>;
  acc_t loss = 0;
  const acc_t weight = target.mean_weight();
  if (!target.valid) {
    loss = math::quiet_nan<acc_t>();
  } else if (!target.ignored) {
    if constexpr (kDense) {
      // Without classes there is nothing to lose.
      loss = args.num_classes > 0 ? dense_row_loss(state.rest(), state.q_sum, state.dot) : acc_t(0);
    } else {
      loss = sparse_row_loss(state.max, state.rest(), x_at_index, weight);
    }
  }
  if (args.row_stats != nullptr) {
    const RowStats<acc_t> stats(args.row_stats, args.rows.numel);
    stats.max[row] = state.max;
    stats.rest[row] = state.rest();
    if constexpr (kDense) {
      stats.q_sum[row] = state.q_sum;
    }
  }
  if (args.reduction == Reduction::kNone) {
    store_operand<acc_t>(args.output, output_offset, loss);
  }
  partial.sum += static_cast<double>(loss);
  partial.weight += static_cast<double>(weight);
}

// ------------------------------------ rows of fp32 arithmetic and one class index each

// What stands for the class index of a row that has no loss: its target is out of range, or
// ignored.
constexpr int kInvalidRow = -1;
constexpr int kIgnoredRow = -2;

__device__ __forceinline__ int checked_index(const CrossEntropyArgs& args, int64_t index,
                                             int64_t num_classes) {
  const bool valid = static_cast<uint64_t>(index) < static_cast<uint64_t>(num_classes);
  const int checked = valid ? static_cast<int>(index) : kInvalidRow;
  return index == args.ignore_index ? kIgnoredRow : checked;
}
__device__ __forceinline__ int checked_index(const CrossEntropyArgs& args, int64_t index) {
  return checked_index(args, index, args.num_classes);
}

// What the row adds to the mean's denominator; for a class index its weight.
__device__ __forceinline__ float row_weight(const CrossEntropyArgs& args, int index) {
  if (args.weight == nullptr) {
    return index == kIgnoredRow ? 0.0f : 1.0f;
  }
  return index >= 0 ? class_weight<float>(args, index) : 0.0f;
}

// The coefficients of a row with label smoothing and no class weights: RowTarget::coefficient().
struct SmoothedIndex {
  static constexpr float kSum = 1;  // Q
  float at_index;
  float other;

  __device__ __forceinline__ explicit SmoothedIndex(const Smoothing& smoothing)
      : at_index(smoothing(1.0f)), other(smoothing(0.0f)) {}
  __device__ __forceinline__ explicit SmoothedIndex(const CrossEntropyArgs& args)
      : SmoothedIndex(smoothing_of(args)) {}

  // The sum of q (max - x). distance: the sum of max - x.
  __device__ __forceinline__ float weighted(float distance, float max, float x_at_index) const {
    return with_index(other * distance, max, x_at_index);
  }
  // The same, of the sum of `other` times max - x.
  __device__ __forceinline__ float with_index(float weighted_others, float max,
                                              float x_at_index) const {
    // Infinite only where the class index has a coefficient of its own.
    const float gap = at_index == other ? 0.0f : max - x_at_index;
    return weighted_others + (at_index - other) * gap;
  }

  // These two for sums of `other` times max - x over the other classes, which are weighed before
  // they are added: the sum of distances may be infinite. Not part of an FMA, for the same bits
  // anywhere.
  __device__ __forceinline__ float of_other(float distance) const {
    return __fmul_rn(other, distance);
  }
  // The class index once as any class, once for what its coefficient is more.
  __device__ __forceinline__ float with_any_index(float weighted_others, float max,
                                                  float x_at_index) const {
    return with_index(weighted_others + of_other(max - x_at_index), max, x_at_index);
  }
};

// The gradient of all logits of a row that has no loss.
__device__ __forceinline__ float gradient_without_loss(int index) {
  return index == kIgnoredRow ? 0.0f : math::quiet_nan<float>();
}

// What one row of these leaves behind. output_offset(row): computed where it is needed.
template <typename OutputOffset>
__device__ __forceinline__ void record_row(const CrossEntropyForwardArgs& args, float loss,
                                           float weight, float max, float rest, int64_t row,
                                           OutputOffset&& output_offset, Partial& partial) {
  if (args.row_stats != nullptr) {
    const RowStats<float> stats(args.row_stats, args.rows.numel);
    stats.max[row] = max;
    stats.rest[row] = rest;
  }
  if (args.reduction == Reduction::kNone && args.output.data != nullptr) {
    store_operand<float>(args.output, output_offset(row), loss);
  }
  partial.sum += static_cast<double>(loss);
  partial.weight += static_cast<double>(weight);
}

// As finish_row(). distance, q_sum: TermSum's, of the row. smooth: used by kSmooth.
template <RowKind kKind = RowKind::kIndex, typename OutputOffset>
__device__ __forceinline__ void finish_indexed_row(
    const CrossEntropyForwardArgs& args, const SmoothedIndex& smooth, int index, float weight,
    const OnlineSoftmax<float>& softmax, float distance, float q_sum, float x_at_index, int64_t row,
    OutputOffset&& output_offset, Partial& partial) {
  float loss = gradient_without_loss(index);
  if (index >= 0) {
    if constexpr (kKind == RowKind::kIndex) {
      loss = sparse_row_loss(softmax.max, softmax.rest(), x_at_index, weight);
    } else if constexpr (kKind == RowKind::kSmooth) {
      loss = dense_row_loss(softmax.rest(), SmoothedIndex::kSum,
                            smooth.weighted(distance, softmax.max, x_at_index));
    } else {
      loss = dense_row_loss(softmax.rest(), q_sum, distance);
    }
  }
  if (kKind != RowKind::kIndex && args.row_stats != nullptr) {
    RowStats<float>(args.row_stats, args.rows.numel).q_sum[row] =
        kKind == RowKind::kSmooth ? SmoothedIndex::kSum : q_sum;
  }
  record_row(args, loss, weight, softmax.max, softmax.rest(), row, output_offset, partial);
}

template <typename OutputOffset>
__device__ __forceinline__ void record_row(const CrossEntropyForwardArgs& args, float loss,
                                           float weight, const IndexRow& row, int64_t number,
                                           OutputOffset&& output_offset, Partial& partial) {
  record_row(args, loss, weight, row.reference, row.rest, number, output_offset, partial);
}

}  // namespace lossops::cuda
