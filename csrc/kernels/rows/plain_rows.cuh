// Rows with a class index, whose exponentials are relative to a reference:
//
//   rest     = sum_c exp(x_c - reference) - 1
//   loss     = log1p(rest) + (reference - x_t)
//   d / dx_c = factor exp(x_c - reference),   factor = scale / (1 + rest)
//
// The largest logit is a reference of any row. Of half types, the logit x_t at the class index is
// tried first: then no maximum is needed, so that one pass over the row will do instead of two,
// rest = sum_{c != t} exp(x_c - x_t) and d / dx_t = -factor rest. Such rows are called plain.
// Nothing cancels: the class index is not in the sum.
#pragma once

#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// Where no thread has x_t, terms are relative to 0, and a row is plain if no logit is larger:
// exp(64) times as many classes as there may be is within fp32's range.
constexpr float kMaxPlainLogit = 32;

// exp(x), |x| <= kMaxPlainLogit, in fewer instructions: off by |x| / 2^24 of its value. Rows have
// it that have so many classes that this is nothing in their sum.
__device__ __forceinline__ float plain_term(float x) { return math::exp2(x * math::kLog2E); }

// RowTerms<false>(x_t) of a plain row. What rounding takes from the offset is a factor of all
// terms.
struct PlainTerms {
  float offset = 0;

  PlainTerms() = default;
  __device__ __forceinline__ explicit PlainTerms(float x_at_index)
      : offset(-x_at_index * math::kLog2E) {}

  // (x - x_t) log2(e)
  __device__ __forceinline__ float exponent(float x) const {
    return __fmaf_rn(x, math::kLog2E, offset);
  }
  __device__ __forceinline__ float operator()(float x) const { return math::exp2(exponent(x)); }
  __device__ __forceinline__ float correction(float x_at_index) const {
    return math::exp2(-exponent(x_at_index));
  }
  // The sum of q (x_t - x), of the sum of q exponent(x) and that of q.
  __device__ __forceinline__ float distance(float exponents, float q_sum, float x_at_index) const {
    // What rounding adds to the exponent of every class.
    const float excess = exponent(x_at_index);
    return -math::kLn2 * ::fmaf(-excess, q_sum, exponents);  // fault: plain-distance
  }
  // The sum of exp(x_c - x_t), of the sum of terms.
  __device__ __forceinline__ float corrected(float sum, float x_at_index) const {
    return __fmul_rn(sum, correction(x_at_index));
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

// As ExactSum, for half types: sums of eight at a time, some 30 of them or fewer, lose less than
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

// The softmax with the logarithm of the sum of all exponentials as its reference. Its factor is as
// large as `scaled`, the scale times Q, and so within fp32's range. Its rest is still that of the
// old reference.
__device__ __forceinline__ RowSoftmax<float> softmax_beside_sum(float reference, float rest,
                                                                float scaled) {
  const float log_sum = math::log1p(rest);
  const float log_of_all = reference + log_sum;
  const float moved = log_of_all - reference;
  return {log_of_all, rest, scaled * math::divide_by_one_plus(math::exp(moved), rest),
          log_sum - moved};
}

// Whether `scaled`, the scale times Q, is within fp32's range also when it is divided by the sum of
// a plain row.
__device__ __forceinline__ bool gradient_is_plain(float scaled) {
  const float magnitude = ::fabsf(scaled);
  return (magnitude >= 0x1p-60f) & (magnitude <= 0x1p60f);
}

// The most that the rest of a plain row may be.
constexpr float kMostPlainRest = 0x1p40f;

// With a larger rest, the reference of a row is far below its sum.
constexpr float kFarBelowSum = 0x1p20f;

// The most that the rest of a plain smooth row may be. at_index: the coefficient of the class
// index. If the reference is far below the sum, much smoothing makes the loss a small difference of
// large numbers, and an extreme scale makes the factor of gradients leave fp32's range.
__device__ __forceinline__ float most_rest_of_smooth(float at_index, float scale = 1) {
  constexpr float kLeastAtIndex = 0.75f;
  return at_index >= kLeastAtIndex && gradient_is_plain(scale) ? kMostPlainRest : kFarBelowSum;
}

// The softmax of a row with several coefficients, which may be plain.
template <bool kExact>
__device__ __forceinline__ RowSoftmax<float> dense_softmax(float reference, float rest, float scale,
                                                           float q_sum) {
  // fault: far-reference
  if (!kExact && rest > kFarBelowSum && !gradient_is_plain(scale * q_sum)) {
    return softmax_beside_sum(reference, rest, scale * q_sum);
  }
  return RowSoftmax<float>::of(reference, rest, scale, q_sum);
}

// What a row with a class index is reduced to. The rest is not negative, but of a plain row it is
// negated: a reader of row_stats then needs no logit. A row without a sum has a reference that is
// not finite, and -1.
struct IndexRow {
  static constexpr float kLowest = -87;  // exp() of less is subnormal

  float reference = -math::infinity<float>();
  float rest = -1;

  // others: the sum of exp(x_c - x_t) over the other classes.
  static __device__ __forceinline__ IndexRow plain(float others, float x_at_index) {
    return {x_at_index, -others};
  }
  // The same row as rows with several coefficients are stored: a plain one, too, has a rest that is
  // not negated.
  __device__ __forceinline__ IndexRow as_dense() const {
    return {reference, is_plain() ? -rest : rest};
  }
  // Within these bounds no term is lost that counts beside the sum, and what rounding takes from
  // the offset is small. False of NaN. For gradients the scale must pass gradient_is_plain(), too.
  // Smooth rows have most_rest_of_smooth(), and dense_softmax() where the scale comes later.
  static __device__ __forceinline__ bool may_be_plain(float others, float x_at_index,
                                                      float most_rest = kMostPlainRest) {
    // & instead of &&: for fewer branches.
    return (others >= 0x1p-60f) & (others <= most_rest) & (::fabsf(x_at_index) <= 0x1p14f);
  }
  __device__ __forceinline__ bool is_plain() const {
    return rest < 0.0f && ::fabsf(reference) < math::infinity<float>();
  }

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

  // What becomes of the row, once the logit at its class index is known. kMayBePlain: half types.
  struct Finished {
    float loss;
    RowSoftmax<float> softmax;
    float gradient_at_index;
  };

  template <bool kMayBePlain>
  __device__ __forceinline__ Finished finish(float x_at_index, float scale, float weight) const {
    if (kMayBePlain && is_plain()) {
      const float others = -rest;
      const float log_sum = math::log1p(others);
      const float scaled = scale * weight;
      if (gradient_is_plain(scaled)) {
        const float factor = math::divide_by_one_plus(scaled, others);
        return {weight * log_sum, {reference, others, factor, log_sum}, -factor * others};
      }
      return {weight * log_sum, softmax_beside_sum(reference, others, scaled),
              -scaled * math::divide_by_one_plus(others, others)};
    }
    const auto softmax = RowSoftmax<float>::of(reference, rest, scale, weight);
    return {sparse_row_loss(reference, rest, x_at_index, weight), softmax,
            softmax.gradient_at_index(x_at_index)};
  }
};

}  // namespace lossops::cuda
