// Rows with a class index whose logits are small enough for exponentials without a shift.
//
//   others   = sum_{c != t} exp(x_c)
//   loss     = log1p(others / exp(x_t))
//   d / dx_c = factor exp(x_c), d / dx_t = -factor others,   factor = scale / (others + exp(x_t))
//
// The differences x - max, and what rounding takes from them, do not occur: one pass over the row
// instead of two, and a third of the instructions of a gradient. Nothing cancels: the class index
// is not in the sum.
#pragma once

#include "kernels/row_words.cuh"
#include "losses/cross_entropy.h"

namespace lossops::cuda {

// exp(64) times as many classes as there may be is within fp32's range.
constexpr float kMaxPlainLogit = 32;

// exp(x), |x| <= kMaxPlainLogit. RowSoftmax::times_exp() with max = 0, to the bit.
__device__ __forceinline__ float plain_exp_times(float factor, float x) {
  const float t = x * math::kLog2E;
  const float product = factor * math::exp2(t);
  const float lost = ::fmaf(t, -0x1.62e430p-1f, x);
  return ::fmaf(product, lost, product);
}
__device__ __forceinline__ float plain_exp(float x) { return plain_exp_times(1.0f, x); }

// The terms of a plain row, and its gradients but for the class index. kExact: as RowTerms'.
template <bool kExact>
struct PlainTerms {
  float factor = 1;

  __device__ __forceinline__ float operator()(float x) const {
    return kExact ? plain_exp_times(factor, x) : factor * math::exp2(x * math::kLog2E);
  }
};

// The larger distance from 0, element by element; of a NaN and a number, the number. a: without
// signs.
template <typename scalar_t>
__device__ __forceinline__ uint32_t reach_of_words(uint32_t word, uint32_t a) {
  return max_of_words<scalar_t>(word & (sizeof(scalar_t) == 4 ? 0x7fffffffu : 0x7fff7fffu), a);
}

// What forward leaves of a row with a class index: max and rest, or 0 and -others of a plain row.
struct IndexRow {
  float max = -math::infinity<float>();
  float rest = -1;

  static __device__ __forceinline__ IndexRow plain(float others) { return {0, -others}; }
  // others is 0 of a row of one class.
  static __device__ __forceinline__ bool may_be_plain(float reach, float others) {
    return reach <= kMaxPlainLogit && others > 0.0f;
  }

  __device__ __forceinline__ bool is_plain() const { return max == 0.0f && rest < 0.0f; }

  // What becomes of the row, once the logit at its class index is known.
  struct Finished {
    float loss;
    RowSoftmax<float> softmax;
    float gradient_at_index;
  };

  __device__ __forceinline__ Finished finish(float x_at_index, float scale, float weight) const {
    if (is_plain()) {
      const float at_index = plain_exp(x_at_index);
      const float factor = math::divide_by_sum(scale * weight, at_index, -rest);
      return {weight * math::log1p(math::divide_by_sum(-rest, at_index, 0.0f)),
              {0, rest, factor, 0},
              factor * rest};
    }
    const auto softmax = RowSoftmax<float>::of(max, rest, scale, weight);
    return {sparse_row_loss(max, rest, x_at_index, weight), softmax,
            softmax.gradient_at_index(x_at_index)};
  }
};

}  // namespace lossops::cuda
