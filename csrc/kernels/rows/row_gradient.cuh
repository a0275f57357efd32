// The gradient of a row of cross entropy, from what forward has left of the row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/any_half.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/row_terms.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// What a row's softmax leaves to its gradients.
template <typename acc_t>
struct RowSummary {
  acc_t max;
  acc_t rest;
  acc_t q_sum;       // dense rows
  acc_t x_at_index;  // others
};

// The least of kCount numbers; NaN is ignored.
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
  // exp(x - max)
  __device__ __forceinline__ acc_t exponential(acc_t x) const {
    return softmax.times_exp(acc_t(1), x);
  }
  // scale (Q softmax(x) - q), for a row of dense coefficients
  template <bool kMayOutweigh = true>
  __device__ __forceinline__ acc_t dense(acc_t x, acc_t scale, acc_t q_sum, acc_t q) const {
    return softmax.template dense_gradient_of<kMayOutweigh>(exponential(x), scale, q_sum, q);
  }
};

// fp32: scale Q / sum exp(x) times exp(x). The exponential of a difference from the maximum takes
// twice the instructions: what rounding took from the difference counts too.
template <>
struct LogitGradient<float, true> {
  // Bounds of |max|, of |scale Q| and of the factor, for that product.
  static constexpr float kMaxDistance = 2048;
  static constexpr float kMinScale = 0x1p-40f;
  static constexpr float kMaxScale = 0x1p60f;
  static constexpr float kMinFactor = 0x1p-126f;  // normal

  RowSoftmax<float> softmax;
  math::MultipleOfExp multiple;
  float lowest = math::infinity<float>();  // logits above it have the product for a gradient

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

  // Whether logits of which this is the least have that product for a gradient. False of infinity:
  // it is the least of NaN alone, and `lowest` of a row that has a NaN is infinity too.
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

  __device__ __forceinline__ float exponential(float x) const { return softmax.times_exp(1.0f, x); }
  template <bool kMayOutweigh = true>
  __device__ __forceinline__ float dense(float x, float scale, float q_sum, float q) const {
    return softmax.dense_gradient_of<kMayOutweigh>(exponential(x), scale, q_sum, q);
  }
};

// Half types: the terms of the row's sum, times a factor.
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
  __device__ __forceinline__ float exponential(float x) const {
    return __fmul_rn(terms(x), correction);
  }
  template <bool kMayOutweigh = true>
  __device__ __forceinline__ float dense(float x, float scale, float q_sum, float q) const {
    const float term = terms(x);
    if constexpr (kMayOutweigh) {
      const float e = exponential(x);
      if (softmax.one_may_outweigh() && e > softmax.all_but(e)) {
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
    } else if constexpr (kDense && std::is_same_v<acc_t, float>) {
      softmax = dense_softmax<kExact>(row.max, row.rest, scale, q_sum);
    } else {
      softmax = RowSoftmax<acc_t>::of(row.max, row.rest, scale, q_sum);
      if constexpr (!kDense) {
        at_index = softmax.gradient_at_index(row.x_at_index);
      }
    }
    logit_gradient = LogitGradient<acc_t, kExact>(softmax, scale * q_sum);
  }

  // The gradient at every logit of a row that has no loss.
  __device__ __forceinline__ acc_t without_loss() const {
    return target.ignored ? acc_t(0) : math::quiet_nan<acc_t>();
  }

  // The gradient at a logit of a row that has a loss.
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

// A row with a class index as forward left it. logit_of(c): the logit of class c.
template <typename acc_t, typename LogitOf>
__device__ __forceinline__ RowSummary<acc_t> kept_summary(acc_t max, acc_t rest,
                                                          const RowTarget<acc_t>& target,
                                                          const LogitOf& logit_of) {
  if constexpr (std::is_same_v<acc_t, float>) {
    if (IndexRow{max, rest}.is_plain()) {
      return {max, rest, 0, max};
    }
  }
  return {max, rest, 0, target.has_loss() ? logit_of(target.index) : acc_t(0)};
}

// The row as forward left it. input_offset: of the row.
template <bool kDense, typename acc_t>
__device__ __forceinline__ RowSummary<acc_t> load_summary(const CrossEntropyBackwardArgs& args,
                                                          const RowTarget<acc_t>& target,
                                                          int64_t row, int64_t input_offset) {
  const RowStats<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
  if constexpr (kDense) {
    return {stats.max[row], stats.rest[row], stats.q_sum[row], 0};
  } else {
    return kept_summary(stats.max[row], stats.rest[row], target, [&](int64_t c) {
      return load_operand<acc_t>(args.input, input_offset + c * args.input_class_stride);
    });
  }
}

// The summary of a row from the block's first thread to all of them.
template <typename acc_t>
__device__ __forceinline__ RowSummary<acc_t> share_summary(const RowSummary<acc_t>& summary) {
  __shared__ RowSummary<acc_t> shared;
  if (threadIdx.x == 0) {
    shared = summary;
  }
  __syncthreads();
  const RowSummary<acc_t> result = shared;
  __syncthreads();  // it may be used again
  return result;
}

template <typename acc_t, typename State>
__device__ __forceinline__ RowSummary<acc_t> summarize(const State& state, acc_t x_at_index) {
  RowSummary<acc_t> summary{state.max, state.rest(), 0, x_at_index};
  if constexpr (std::is_same_v<State, DenseOnlineSoftmax<acc_t>>) {
    summary.q_sum = state.q_sum;
  }
  return summary;
}

// The gradient of one vector of a row. kDirect: LogitGradient::is_direct() says so.
template <bool kDirect = false, typename scalar_t, typename Gradient>
__device__ __forceinline__ Vector<scalar_t> gradient_of(const Gradient& gradient,
                                                        const Vector<scalar_t>& x,
                                                        int first_class) {
  constexpr int kSize = kVectorSize<scalar_t>;
  using acc_t = acc_type_t<scalar_t>;
  const DType dtype = gradient.args.input.dtype;
  acc_t values[kSize];
  unpack_of<scalar_t>(x, dtype, values);
  if constexpr (Gradient::kIsDense) {
    acc_t q[kSize];
    load_coefficients(gradient.target, first_class, q);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = gradient.of_dense_logit(values[i], q[i]);
    }
  } else if constexpr (kDirect) {
    gradient.logit_gradient.replace_direct(values);
  } else {
    gradient.logit_gradient.replace(values);
  }
  Vector<scalar_t> results = pack_of<scalar_t>(values, dtype);
  // At the class index, where it is one of these: a branch for a few threads, not for all.
  const int at = static_cast<int>(gradient.target.index) - first_class;
  if (!Gradient::kIsDense && at >= 0 && at < kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i == at) {
        results.set(i, from_acc_of<scalar_t>(gradient.at_index, dtype));
      }
    }
  }
  return results;
}

}  // namespace lossops::cuda
