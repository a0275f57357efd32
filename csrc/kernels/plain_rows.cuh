// Rows of fp32 with a class index whose logits are small enough for exponentials without a shift.
//
//   others   = sum_{c != t} exp(x_c)
//   loss     = log1p(others / exp(x_t))
//   d / dx_c = factor exp(x_c), d / dx_t = -factor others,   factor = scale / (others + exp(x_t))
//
// The differences x - max, and what rounding takes from them, do not occur: one pass over the row
// instead of two, and a third of the instructions of a gradient. Nothing cancels: the class index is
// not in the sum.
#pragma once

#include "kernels/row_terms.cuh"
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

  __device__ __forceinline__ float loss(float x_at_index, float weight) const {
    if (is_plain()) {
      return weight * math::log1p(math::divide_by_sum(-rest, plain_exp(x_at_index), 0.0f));
    }
    return sparse_row_loss(max, rest, x_at_index, weight);
  }

  __device__ __forceinline__ RowSoftmax<float> softmax(float x_at_index, float scale,
                                                       float weight) const {
    if (is_plain()) {
      const float sum_scale = math::divide_by_sum(scale * weight, plain_exp(x_at_index), -rest);
      return {0, rest, sum_scale, 0};
    }
    return RowSoftmax<float>::of(max, rest, scale, weight);
  }

  // softmax: of this row.
  __device__ __forceinline__ float gradient_at_index(const RowSoftmax<float>& softmax,
                                                     float x_at_index) const {
    return is_plain() ? softmax.factor * rest : softmax.gradient_at_index(x_at_index);
  }
};

}  // namespace lossops::cuda
