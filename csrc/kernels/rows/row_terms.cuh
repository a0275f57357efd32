// The exponentials of a row whose maximum is known, for its sum and for its gradient.
#pragma once

#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// Half types: exact in fp32, and so are the differences of any two that are near each other.
template <typename scalar_t>
constexpr bool kExactExponentials = sizeof(scalar_t) >= 4;

// A logit that is farther from the maximum has another term.
constexpr float kNearMaximum = 0x1p-6f;

// exp(x - max), times `unit`.
template <bool kExact>
struct RowTerms {
  float shift = 0;
  // Logits are scaled and shifted in one instruction. What rounding takes from the shift is a
  // factor of every term, `unit`: the term of the maximum. Exact terms have differences first.
  float scale = math::kLog2E;
  float offset = 0;
  float unit = 1;

  RowTerms() = default;

  __device__ __forceinline__ explicit RowTerms(float max) : shift(softmax_shift(max)) {
    if constexpr (!kExact) {
      // Of a large shift, rounding takes more than `unit` has room for. The next logit below the
      // maximum is then off by 64 or more: no term is lost if its exponent is doubled.
      constexpr float kLarge = 1 << 30;
      constexpr float kDoubleOverflows = 0x1p127f;
      const float magnitude = ::fabsf(shift);
      scale = magnitude < kLarge ? math::kLog2E : magnitude < kDoubleOverflows ? 2.0f : 1.0f;
      offset = -shift * scale;
      unit = math::exp2(__fmaf_rn(shift, scale, offset));
    }
  }

  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kExact) {
      return math::exp_in_sum<true>(x - shift);
    } else {
      return math::exp2(__fmaf_rn(x, scale, offset));
    }
  }

  // 1 / unit
  __device__ __forceinline__ float correction() const {
    if constexpr (kExact) {
      return 1;
    } else {
      return math::exp2(-__fmaf_rn(shift, scale, offset));
    }
  }
};

}  // namespace lossops::cuda
