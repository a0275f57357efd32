// What every kernel of cross entropy does with one row: its target, its loss, its gradient.
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

// What the mean divides by, where it is known before any row is done: partial sums, or, where they
// are null, of so few rows that every block adds them up, or of rows of probabilities, which
// count 1.
struct Denominator {
  const double* partials = nullptr;  // one, or kMaxDenominatorBlocks: those of no block are 0
  int count = 0;                     // blocks
  const int8_t* indices = nullptr;  // checked_index() of every row, where the same kernel left them
  bool is_given = false;            // by the caller: no kernel of this call leaves it

  __host__ __device__ bool is_computed() const { return partials != nullptr; }
  // By the kernel before this one, with which a kernel may overlap: there are logits to read by the
  // time it lets this one start.
  __host__ __device__ bool is_left() const { return is_computed() && !is_given; }

  // By the blocks of the kernel that computes it; total: of a block, in its first thread.
  static __device__ __forceinline__ void leave(double total, double* partials) {
    if (threadIdx.x == 0) {
      partials[blockIdx.x] = total;
    } else if (blockIdx.x == 0 && gridDim.x > 1 && threadIdx.x >= gridDim.x &&
               threadIdx.x < kMaxDenominatorBlocks) {
      partials[threadIdx.x] = 0;
    }
  }

  // What a lane has of the sum. kInLoop: by a loop after all.
  template <bool kInLoop = false>
  __device__ __forceinline__ double of_lane() const {
    constexpr int kPairs = kMaxDenominatorBlocks / (2 * kWarpSize);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if constexpr (kInLoop) {
      double total = 0;
      for (int i = lane; i < count; i += kWarpSize) {
        total += partials[i];
      }
      return total;
    }
    if (count == 1) {
      return lane == 0 ? *partials : 0.0;
    }
    const auto* const of_lanes = reinterpret_cast<const double2*>(partials) + lane;
    double2 pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = of_lanes[i * kWarpSize];
    }
    double total = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      total += pairs[i].x + pairs[i].y;
    }
    return total;
  }
};

// The grad_output of a backward pass that computes a gradient again, by the kernel that left one
// for a grad_output of 1. In forward there is none.
struct GradOutput {
  const void* data = nullptr;  // one element
  DType dtype = DType::kFloat32;

  __host__ __device__ bool exists() const { return data != nullptr; }

  // Blocks to launch of a kernel that has `blocks` of them in forward, of so many threads: where
  // there is a grad_output, mostly there is nothing to do.
  int64_t limit_blocks(int64_t blocks, int threads) const {
    return exists() ? std::min(blocks, most_blocks_of_kept(threads)) : blocks;
  }

  // Whether it is 1, and forward's gradient the one that is wanted. value: becomes what there is.
  __device__ __forceinline__ bool is_one(float& value) const {
    if (!exists()) {
      return false;
    }
    wait_for_previous_kernel();
    visit_floating(dtype, [&](auto type) {
      value = to_acc<float>(*static_cast<const typename decltype(type)::type*>(data));
    });
    return value == 1;
  }
};

// Whether a kernel that takes these calls wait_for_previous_kernel().
inline bool waits_for_previous_kernel(const Denominator& denominator,
                                      const GradOutput& grad_output) {
  return denominator.is_left() || grad_output.exists();
}

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

  __device__ __forceinline__ explicit SmoothedIndex(const CrossEntropyArgs& args) {
    const Smoothing smoothing = smoothing_of(args);
    at_index = smoothing(1.0f);
    other = smoothing(0.0f);
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
  if (args.reduction == Reduction::kNone) {
    store_operand<float>(args.output, output_offset(row), loss);
  }
  partial.sum += static_cast<double>(loss);
  partial.weight += static_cast<double>(weight);
}

// As finish_row(). distance, q_sum: TermSum's, of the row.
template <RowKind kKind = RowKind::kIndex>
__device__ __forceinline__ void finish_indexed_row(const CrossEntropyForwardArgs& args, int index,
                                                   float weight,
                                                   const OnlineSoftmax<float>& softmax,
                                                   float distance, float q_sum, float x_at_index,
                                                   int64_t row, int64_t output_offset,
                                                   Partial& partial) {
  float loss = gradient_without_loss(index);
  if constexpr (kKind == RowKind::kProbability) {
    loss = dense_row_loss(softmax.rest(), q_sum, distance);
  } else if (index >= 0) {
    if constexpr (kKind == RowKind::kSmooth) {
      const SmoothedIndex q(args);
      loss =
          dense_row_loss(softmax.rest(), SmoothedIndex::kSum,
                         q.other * distance + (q.at_index - q.other) * (softmax.max - x_at_index));
    } else {
      loss = sparse_row_loss(softmax.max, softmax.rest(), x_at_index, weight);
    }
  }
  if (kKind != RowKind::kIndex && args.row_stats != nullptr) {
    RowStats<float>(args.row_stats, args.rows.numel).q_sum[row] =
        kKind == RowKind::kSmooth ? SmoothedIndex::kSum : q_sum;
  }
  record_row(
      args, loss, weight, softmax.max, softmax.rest(), row, [&](int64_t) { return output_offset; },
      partial);
}

// Records a row that may be a plain one (IndexRow).
template <typename OutputOffset>
__device__ __forceinline__ void record_row(const CrossEntropyForwardArgs& args, float loss,
                                           float weight, const IndexRow& row, float x_at_index,
                                           int64_t number, OutputOffset&& output_offset,
                                           Partial& partial) {
  const IndexRow kept = row.kept(x_at_index);
  record_row(args, loss, weight, kept.max, kept.rest, number, output_offset, partial);
}

// ----------------------------------------------------------------------------- gradients

// What a row's softmax leaves to its gradients.
template <typename acc_t>
struct RowSummary {
  acc_t max;
  acc_t rest;
  acc_t q_sum;       // dense rows
  acc_t x_at_index;  // others
};

// The least of kCount numbers; NaN is none.
template <int kCount, typename acc_t>
__device__ __forceinline__ acc_t least_of(const acc_t (&x)[kCount]) {
  acc_t least = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    least = ::fmin(x[i], least);
  }
  return least;
}

// The gradient at a logit that is not the class index's: scale Q softmax(x). The same in every
// kernel, for the same bits.
template <typename acc_t, bool kExact>
struct LogitGradient {
  RowSoftmax<acc_t> softmax;

  LogitGradient() = default;
  __device__ __forceinline__ explicit LogitGradient(const RowSoftmax<acc_t>& softmax_,
                                                    acc_t /*scale*/)
      : softmax(softmax_) {}
  // x: logits, then their gradients.
  template <int kCount>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = softmax.gradient(x[i]);
    }
  }
  // scale (Q softmax(x) - q), for a row of dense coefficients
  template <bool kMayOutweigh = true>
  __device__ __forceinline__ acc_t dense(acc_t x, acc_t scale, acc_t q_sum, acc_t q) const {
    return softmax.template dense_gradient_of<kMayOutweigh>(softmax.times_exp(acc_t(1), x), scale,
                                                            q_sum, q);
  }
};

// fp32: scale Q / sum exp(x) times exp(x). The exponential of a difference from the maximum takes
// twice the instructions: what rounding took from the difference counts too.
template <>
struct LogitGradient<float, true> {
  // Of the maximum from 0; of scale Q.
  static constexpr float kMaxDistance = 2048;
  static constexpr float kMinScale = 0x1p-40f;
  static constexpr float kMaxScale = 0x1p60f;
  static constexpr float kMinFactor = 0x1p-126f;  // normal

  RowSoftmax<float> softmax;
  math::MultipleOfExp multiple;
  float lowest = math::infinity<float>();  // logits above it have that product for a gradient

  LogitGradient() = default;
  __device__ __forceinline__ explicit LogitGradient(const RowSoftmax<float>& softmax_, float scale)
      : softmax(softmax_),
        multiple(math::divide_by_one_plus_times_exp(scale, softmax_.rest, softmax_.max)) {
    const float magnitude = ::fabsf(scale);
    const float factor = ::fabsf(multiple.factor);
    // A NaN among the logits is one in rest, and in the factor.
    // fault: exp-of-logits
    if (::fabsf(softmax.max) <= kMaxDistance && magnitude >= kMinScale && magnitude <= kMaxScale &&
        factor >= kMinFactor && factor < math::infinity<float>()) {
      lowest = multiple.lowest();
    }
  }

  // Of logits of which this is the least. Not of infinity, which is also the least of nothing but
  // NaN, and `lowest` of a row that has one.
  __device__ __forceinline__ bool is_direct(float least) const { return least > lowest; }

  // x: logits, then their gradients, where is_direct() of the least of them.
  template <int kCount>
  __device__ __forceinline__ void replace_direct(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = multiple(x[i]);
    }
  }

  // Of any logits.
  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
    if (is_direct(least_of(x))) {
      replace_direct(x);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = is_direct(x[i]) ? multiple(x[i]) : softmax.gradient(x[i]);
      }
    }
  }

  template <bool kMayOutweigh = true>
  __device__ __forceinline__ float dense(float x, float scale, float q_sum, float q) const {
    return softmax.dense_gradient_of<kMayOutweigh>(softmax.times_exp(1.0f, x), scale, q_sum, q);
  }
};

template <>
struct LogitGradient<float, false> {
  RowSoftmax<float> softmax;
  RowTerms<false> terms;
  float correction = 1;
  float factor = 0;

  LogitGradient() = default;
  __device__ __forceinline__ explicit LogitGradient(const RowSoftmax<float>& softmax_,
                                                    float /*scale*/)
      : softmax(softmax_),
        terms(softmax_.max),
        correction(terms.correction()),
        factor(softmax_.factor * correction) {}
  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = factor * terms(x[i]);
    }
  }
  template <bool kMayOutweigh = true>
  __device__ __forceinline__ float dense(float x, float scale, float q_sum, float q) const {
    const float term = terms(x);
    if constexpr (kMayOutweigh) {
      const float e = __fmul_rn(term, correction);
      if (e > softmax.all_but(e)) {
        return softmax.dense_gradient_of(e, scale, q_sum, q);
      }
    }
    return math::difference_of_products(factor, term, scale, q);
  }
};

// Everything of a row that its gradients need.
template <typename acc_t, bool kDense, bool kExact>
struct RowGradient {
  static constexpr bool kIsDense = kDense;
  const CrossEntropyArgs& args;
  const RowTarget<acc_t>& target;
  acc_t scale;  // the row's grad_output, divided by what the mean divides by
  acc_t q_sum;
  acc_t at_index = 0;  // the gradient at the class index
  RowSoftmax<acc_t> softmax;
  LogitGradient<acc_t, kExact> logit_gradient;

  __device__ __forceinline__ RowGradient(const CrossEntropyArgs& args_,
                                         const RowTarget<acc_t>& target_,
                                         const RowSummary<acc_t>& row, acc_t scale_)
      : args(args_), target(target_), scale(scale_) {
    if constexpr (kDense) {
      q_sum = row.q_sum;
    } else {
      q_sum = target.has_loss() ? target.index_weight() : acc_t(0);
    }
    if constexpr (!kDense && std::is_same_v<acc_t, float>) {
      const auto finished =
          IndexRow{row.max, row.rest}.finish<!kExact>(row.x_at_index, scale, q_sum);
      softmax = finished.softmax;
      at_index = finished.gradient_at_index;
    } else {
      softmax = RowSoftmax<acc_t>::of(row.max, row.rest, scale, q_sum);
      if constexpr (!kDense) {
        at_index = softmax.gradient_at_index(row.x_at_index);
      }
    }
    logit_gradient = LogitGradient<acc_t, kExact>(softmax, scale * q_sum);
  }

  // Of a row that has no loss.
  __device__ __forceinline__ acc_t without_loss() const {
    return target.ignored ? acc_t(0) : math::quiet_nan<acc_t>();
  }

  // Of a row that has one.
  __device__ __forceinline__ acc_t of_logit(acc_t x, int64_t c) const {
    if constexpr (kDense) {
      return of_dense_logit(x, target.coefficient(c));
    } else {
      if (c == target.index) {
        return at_index;
      }
      acc_t values[1] = {x};
      logit_gradient.replace(values);
      return values[0];
    }
  }

  __device__ __forceinline__ acc_t of_dense_logit(acc_t x, acc_t q) const {
    return logit_gradient.dense(x, scale, q_sum, q);
  }

  // The gradients of the probabilities of neighbouring classes, whose logits are x: of the first
  // `count`.
  template <int kCount>
  __device__ __forceinline__ void of_targets(const acc_t (&x)[kCount], int64_t first_class,
                                             acc_t (&results)[kCount], int count = kCount) const {
    const acc_t kept = acc_t(1) - static_cast<acc_t>(args.label_smoothing);
#pragma unroll
    for (acc_t& result : results) {
      result = scale * kept;
    }
    multiply_by_weights(args, first_class, results, count);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      results[i] *= softmax.surprise(x[i]);
    }
  }
};

// The row as forward left it. input_offset: of the row.
template <bool kDense, typename acc_t>
__device__ __forceinline__ RowSummary<acc_t> load_summary(const CrossEntropyBackwardArgs& args,
                                                          const RowTarget<acc_t>& target,
                                                          int64_t row, int64_t input_offset) {
  const RowStats<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
  RowSummary<acc_t> summary{stats.max[row], stats.rest[row], 0, 0};
  if constexpr (!kDense && std::is_same_v<acc_t, float>) {
    summary.max = IndexRow::of_kept(summary.max, summary.rest).max;
  }
  if constexpr (kDense) {
    summary.q_sum = stats.q_sum[row];
  } else if (target.has_loss()) {
    summary.x_at_index =
        load_operand<acc_t>(args.input, input_offset + target.index * args.input_class_stride);
  }
  return summary;
}

// grad_output, divided by what the mean divides by; of sums grad_output itself: row_scale(). All
// threads of a block must construct it; those of the warps that use it must wait(), when their
// first loads are on the way: it may take long. What they load is there before the kernel that is
// waited for lets this one start. kInLoop: Denominator::of_lane()'s.
template <typename acc_t, bool kInLoop = false>
class UnitScale {
 public:
  __device__ __forceinline__ UnitScale(const CrossEntropyForwardArgs& args,
                                       const Denominator& denominator, acc_t grad_output = 1)
      : grad_output_(grad_output) {
    if (args.reduction != Reduction::kMean || denominator.is_computed()) {
      return;
    }
    if (args.target_is_probability) {
      set(args, static_cast<double>(args.rows.numel));  // each counts 1
      return;
    }
    __shared__ double shared;
    Partial partial;
#pragma unroll 1
    for (int64_t row = threadIdx.x; row < args.rows.numel; row += blockDim.x) {
      const Operand* const operands[1] = {&args.target};
      int64_t offsets[1];
      row_offsets(args.rows, operands, row, offsets);
      partial.weight += RowTarget<float>(args, offsets[0]).template mean_weight<double>();
    }
    partial = block_reduce(partial);
    if (threadIdx.x == 0) {
      shared = partial.weight;
    }
    __syncthreads();
    set(args, shared);
  }

  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs& args,
                                       const Denominator& denominator) {
    if (!denominator.is_computed()) {
      return;
    }
    wait_for_previous_kernel();
    set(args, warp_sum(denominator.template of_lane<kInLoop>()));
  }

  __device__ __forceinline__ acc_t get() const { return scale_; }

 private:
  __device__ __forceinline__ void set(const CrossEntropyForwardArgs& args, double total) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      args.mean_terms[0] = total;
    }
    scale_ = grad_output_ / static_cast<acc_t>(total);
  }

  acc_t grad_output_;
  acc_t scale_ = grad_output_;
};

// The same of probability targets, of which each row counts 1.
template <typename acc_t>
class UnitScaleOfRows {
 public:
  __device__ __forceinline__ UnitScaleOfRows(const CrossEntropyForwardArgs& args,
                                             const Denominator& /*denominator*/) {
    if (args.reduction == Reduction::kMean) {
      const auto total = static_cast<double>(args.rows.numel);
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        args.mean_terms[0] = total;
      }
      scale_ = acc_t(1) / static_cast<acc_t>(total);
    }
  }
  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs&, const Denominator&) {}
  __device__ __forceinline__ acc_t get() const { return scale_; }

 private:
  acc_t scale_ = 1;
};

// Of kernels without gradients.
struct NoScale {
  __device__ __forceinline__ NoScale(const CrossEntropyForwardArgs&, const Denominator&,
                                     float = 1) {}
  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs&, const Denominator&) {}
  __device__ __forceinline__ float get() const { return 1; }
};

// The summary of a row from the team's first thread to all of them.
template <bool kTeamIsBlock, typename acc_t>
__device__ __forceinline__ RowSummary<acc_t> share_summary(const RowSummary<acc_t>& summary,
                                                           int team) {
  if constexpr (kTeamIsBlock) {
    __shared__ RowSummary<acc_t> shared;
    if (threadIdx.x == 0) {
      shared = summary;
    }
    __syncthreads();
    const RowSummary<acc_t> result = shared;
    __syncthreads();  // it may be used again
    return result;
  } else {
    return {__shfl_sync(kAllLanes, summary.max, 0, team),
            __shfl_sync(kAllLanes, summary.rest, 0, team),
            __shfl_sync(kAllLanes, summary.q_sum, 0, team),
            __shfl_sync(kAllLanes, summary.x_at_index, 0, team)};
  }
}

template <typename acc_t, typename State>
__device__ __forceinline__ RowSummary<acc_t> summarize(const State& state, acc_t x_at_index) {
  RowSummary<acc_t> summary{state.max, state.rest(), 0, x_at_index};
  if constexpr (std::is_same_v<State, DenseOnlineSoftmax<acc_t>>) {
    summary.q_sum = state.q_sum;
  }
  return summary;
}

}  // namespace lossops::cuda
