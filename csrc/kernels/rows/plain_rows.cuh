// Rows of half types with a class index whose logits are small enough for exponentials without a
// shift.
//
//   others   = sum_{c != t} exp(x_c)
//   loss     = log1p(others / exp(x_t))
//   d / dx_c = factor exp(x_c), d / dx_t = -factor others,   factor = scale / (others + exp(x_t))
//
// The differences x - max, and what rounding takes from them, do not occur: one pass over the row
// instead of two, and fewer instructions of a gradient. Nothing cancels: the class index
// is not in the sum.
#pragma once

#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// exp(64) times as many classes as there may be is within fp32's range.
constexpr float kMaxPlainLogit = 32;

// exp(x), |x| <= kMaxPlainLogit, within 3 units in the last place. fp32 would leave gradients at 5:
// with a shift the largest term is exactly 1, and only the others' errors count.
__device__ __forceinline__ float plain_exp(float x) { return math::exp_of_finite_in_sum(x); }

// plain_exp(x) in fewer instructions, off by another |x| / 2^24 of its value. Rows have it that
// have so many classes that this is nothing in their sum.
__device__ __forceinline__ float plain_term(float x) { return math::exp2(x * math::kLog2E); }

// The same, relative to the logit at the class index: off by |x_c - x_t| / 2^24 instead, as the
// loss of a row that has such a logit is. Relative to 0 they are plain_term()'s.
class PlainTerms {
 public:
  PlainTerms() = default;
  __device__ __forceinline__ explicit PlainTerms(float x_at_index)
      : offset_(-x_at_index * math::kLog2E) {}

  __device__ __forceinline__ float operator()(float x) const {
    return math::exp2(__fmaf_rn(x, math::kLog2E, offset_));
  }
  // The sum of exponentials that is the sum of terms.
  __device__ __forceinline__ float exponentials(float sum, float x_at_index) const {
    const float lost = __fmaf_rn(x_at_index, math::kLog2E, offset_);  // by rounding of the offset
    const float at_index = plain_exp(x_at_index);
    return __fmul_rn(sum, __fmaf_rn(at_index, -math::kLn2 * lost, at_index));
  }

 private:
  float offset_ = 0;
};

// The gradients of a plain row, but for the class index: LogitGradient's, to the bit.
struct PlainGradient {
  float factor;

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = factor * math::exp2(x[i] * math::kLog2E);
    }
  }
};

// The magnitudes of the two elements of a word.
__device__ __forceinline__ uint32_t without_signs(uint32_t word) { return word & 0x7fff7fffu; }

// Element by element of half types the larger magnitude, with a sign that means nothing; of a NaN
// and a number, the number. b: without signs, or what this function returned.
template <typename scalar_t>
__device__ __forceinline__ uint32_t reach_of_pairs(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 860
  uint32_t result;
  if constexpr (std::is_same_v<scalar_t, half_t>) {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
#else
  return max_of_words<scalar_t>(without_signs(a), b);
#endif
}

// A thread's sum of exponentials to the last place: the largest may come first, and every one that
// is added to it later would be rounded as it is.
struct ExactSum {
  float sum = 0;
  float lost = 0;

  // NaN of infinities, which no row has whose sum counts.
  __device__ __forceinline__ void add(float x) { lost += math::lost_by_adding(sum, x); }
  // The same bits, whichever is added to the other.
  __device__ __forceinline__ void add(const ExactSum& other) {
    lost += other.lost;
    lost += math::lost_by_adding(sum, other.sum);
  }
  __device__ __forceinline__ float total() const { return sum + lost; }
};

// As ExactSum, for half types: sums of eight at a time, some 20 of them or fewer, lose less than
// what their logits were rounded by.
struct PlainSum {
  float sum = 0;

  __device__ __forceinline__ void add(float x) { sum += x; }
  __device__ __forceinline__ float total() const { return sum; }
};

// The total over the lanes of a team, in each of them.
__device__ __forceinline__ float team_total(ExactSum sum, int team) {
  for (int offset = team / 2; offset > 0; offset /= 2) {
    sum.add(ExactSum{__shfl_xor_sync(kAllLanes, sum.sum, offset),
                     __shfl_xor_sync(kAllLanes, sum.lost, offset)});
  }
  return sum.total();
}

// What a row with a class index is reduced to:
//   shifted  max = the largest logit, rest = sum_c exp(x_c - max) - 1, not negative
//   plain    max = 0, rest = -others, negative
// A row without a sum has a max that is not finite, and -1.
struct IndexRow {
  static constexpr float kLowest = -87;  // exp() of less is subnormal

  float max = -math::infinity<float>();
  float rest = -1;

  static __device__ __forceinline__ IndexRow plain(float others) { return {0, -others}; }

  // Of a row with a class index: `others` is the sum of `terms` over all other classes, and `max`
  // the largest of their logits. The class index joins them here, with an exact difference: as one
  // of the terms, its distance would be rounded, and with it all of a confident row's rest, or all
  // others' distances from it. kMayBeFar: the class index may be far from `max`, or a logit NaN.
  template <bool kMayBeFar = true, bool kExact>
  static __device__ __forceinline__ IndexRow of(const RowTerms<kExact>& terms, float max,
                                                float others, float x_at_index) {
    const bool is_max = x_at_index >= max;
    float difference = x_at_index;
    const float lost = math::lost_by_adding(difference, -max);
    const float distance = -::fabsf(difference);
    const float reference = is_max ? others : terms.unit;
    float scaled;
    if (!kMayBeFar || (distance >= kLowest && reference == reference)) {
      scaled = math::MultipleOfExp{reference}(distance);
      scaled = ::fmaf(scaled, is_max ? -lost : lost, scaled);  // fault: distance-at-index
    } else {
      // 0, but NaN of a NaN, and of a logit of infinity at the class index.
      scaled = reference * math::exp2(2 * distance) + 0.0f * math::max_number(x_at_index, 0.0f);
    }
    const float rest = is_max ? scaled : (others - terms.unit) + scaled;
    // As a backward pass reads it: not part of an FMA.
    return {is_max ? x_at_index : max, kExact ? rest : __fmul_rn(rest, terms.correction())};
  }

  // Whether of<false>() will do.
  static __device__ __forceinline__ bool is_near(float max, float others, float x_at_index) {
    return ::fabsf(x_at_index - max) <= -kLowest && others == others;
  }

  // others is 0 of a row of one class.
  static __device__ __forceinline__ bool may_be_plain(float reach, float others) {
    return reach <= kMaxPlainLogit && others > 0.0f;
  }

  __device__ __forceinline__ bool is_plain() const { return max == 0.0f && rest < 0.0f; }

  // What forward leaves of it in row_stats. A plain row has the logit x_t at its class index
  // instead of 0: relative to that the rest is others / exp(x_t), so a reader needs no logits.
  __device__ __forceinline__ IndexRow kept(float x_at_index) const {
    return {is_plain() ? x_at_index : max, rest};
  }
  static __device__ __forceinline__ IndexRow of_kept(float max, float rest) {
    // Only plain rows have a finite max and a negative rest.
    return {rest < 0.0f && ::fabsf(max) < math::infinity<float>() ? 0.0f : max, rest};
  }

  // Whether a plain row's gradients are PlainGradient's: else the factor might leave fp32's range
  // where no gradient does. scaled: its scale, times its weight.
  static __device__ __forceinline__ bool gradient_is_plain(float scaled) {
    const float magnitude = ::fabsf(scaled);
    return magnitude >= 0x1p-60f && magnitude <= 0x1p60f;
  }

  // What becomes of the row, once the logit at its class index is known. kMayBePlain: half types.
  struct Finished {
    float loss;
    RowSoftmax<float> softmax;
    float gradient_at_index;
    bool has_plain_gradient;
  };

  template <bool kMayBePlain>
  __device__ __forceinline__ Finished finish(float x_at_index, float scale, float weight) const {
    if (kMayBePlain && is_plain()) {
      const float at_index = plain_exp(x_at_index);
      const float loss = weight * math::log1p(math::divide_by_sum(-rest, at_index, 0.0f));
      const float scaled = scale * weight;
      if (gradient_is_plain(scaled)) {
        const float factor = math::divide_by_sum(scaled, at_index, -rest);
        return {loss, {0, rest, factor, 0}, factor * rest, true};
      }
      const float sum = at_index - rest;
      const float log_sum = math::log(sum);
      const float ratio = math::divide_by_sum(plain_exp(log_sum), sum, 0.0f);
      return {loss,
              {log_sum, rest, scaled * ratio, log_sum},
              scaled * math::divide_by_sum(rest, sum, 0.0f),
              false};
    }
    const auto softmax = RowSoftmax<float>::of(max, rest, scale, weight);
    return {sparse_row_loss(max, rest, x_at_index, weight), softmax,
            softmax.gradient_at_index(x_at_index), false};
  }
};

}  // namespace lossops::cuda
