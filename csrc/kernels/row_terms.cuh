// The exponentials of a row whose maximum is known, for its sum and for its gradient.
#pragma once

#include "losses/cross_entropy.h"

namespace lossops::cuda {

// Half types: exact in fp32, and so are the differences of any two that are near each other.
template <typename scalar_t>
constexpr bool kExactExponentials = sizeof(scalar_t) >= 4;

// exp(x - max), times `unit`.
template <bool kExact>
struct RowTerms {
  float shift = 0;
  // Logits of 11 bits are scaled and shifted in one instruction. What rounding takes from the
  // shift is a factor of every term, `unit`: the term of the maximum. fp32 has differences first.
  float offset = 0;
  float unit = 1;

  RowTerms() = default;

  __device__ __forceinline__ explicit RowTerms(float max) : shift(softmax_shift(max)) {
    if constexpr (!kExact) {
      offset = -shift * math::kLog2E;
      unit = math::exp2(__fmaf_rn(shift, math::kLog2E, offset));
    }
  }

  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kExact) {
      return math::exp_in_sum<true>(x - shift);
    } else {
      return math::exp2(__fmaf_rn(x, math::kLog2E, offset));
    }
  }

  // 1 / unit
  __device__ __forceinline__ float correction() const {
    if constexpr (kExact) {
      return 1;
    } else {
      return math::exp2(-__fmaf_rn(shift, math::kLog2E, offset));
    }
  }
};

}  // namespace lossops::cuda
