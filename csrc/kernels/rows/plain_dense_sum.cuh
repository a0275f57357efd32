// Rows with several coefficients q, of half types, whose exponentials are relative to a reference:
//
//   total    = sum_c exp(x_c - reference),   Q = sum_c q_c
//   loss     = Q log(total) + sum_c q_c (reference - x_c)
//   d / dx_c = scale (Q exp(x_c - reference) / total - q_c)
//
// A smooth row has a class index, label smoothing and no class weights. Its reference is the logit
// at the class index, and it needs no maximum. The reference of any other row is its largest logit.
//
// The sum includes the reference's own term, which is about 1: to leave it out would take a third
// more instructions. Terms that are added to it are rounded to about 2^-24, which is too coarse
// where all other terms are small, in a confident row. Therefore batches whose terms add up to
// kLarge or more have a sum of their own. In a confident row only the reference's batch is that
// large, and its other terms are added up a second time.
//
// A row is plain if its sums are within the bounds at the end of finish(). The caller sums any
// other row relative to its maximum.
#pragma once

#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// What a row with several coefficients is reduced to. Of a plain row state.max is the reference,
// which need not be the largest logit, `ones` is 1, and `below` the sum of the other terms.
struct DenseRow {
  DenseOnlineSoftmax<float> state;
  bool is_plain = false;
};

// A thread's share of the sums. kIsSmooth: of smooth rows.
template <bool kIsSmooth>
class PlainDenseSum {
 public:
  static constexpr float kLarge = 0.75f;
  // If the rest is less than this, only the reference's batch can reach kLarge.
  static constexpr float kConfident = 0.25f;

  __device__ __forceinline__ explicit PlainDenseSum(float reference)
      : reference_(reference), terms_(reference) {}

  // k: where the batch begins. q: of rows that are not smooth.
  template <int kCount>
  __device__ __forceinline__ void add(int k, const float (&x)[kCount], const float (&q)[kCount]) {
    float exponents[kCount];
    float powers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      exponents[i] = terms_.exponent(x[i]);
      powers[i] = math::exp2(exponents[i]);
    }
    const float sum = pairwise_sum(powers);
    if (sum >= kLarge) {
      large_ += sum;
      large_at_ = k;
    } else {
      small_ += sum;
    }
    if constexpr (kIsSmooth) {
      dot_ += pairwise_sum(exponents);
    } else {
      q_sum_ += pairwise_sum(q);
      dot_ += weighted_sum(q, exponents);
    }
  }

  // The row of a team of lanes. All lanes of a warp must call this. rest_of(k, terms): the sum of
  // the terms of the batch k that are less than kLarge. smooth, num_classes: read only for smooth
  // rows.
  template <typename RestOf>
  __device__ __forceinline__ DenseRow finish(int team, const RestOf& rest_of,
                                             const SmoothedIndex& smooth, int num_classes) {
    const float large = warp_sum(large_, team);
    float small = warp_sum(small_, team);
    dot_ = warp_sum(dot_, team);
    q_sum_ = kIsSmooth ? static_cast<float>(num_classes) : warp_sum(q_sum_, team);
    // The reference's own term is not quite 1.
    float rest = (large - terms_(reference_)) + small;
    const bool is_confident = rest < kConfident;  // fault: plain-dense
    if (__any_sync(kAllLanes, is_confident)) {
      if (is_confident && large_at_ >= 0) {
        small_ += rest_of(large_at_, terms_);
      }
      small = warp_sum(small_, team);
      rest = is_confident ? small : rest;
    }
    rest = terms_.corrected(rest, reference_);
    const float distance = terms_.distance(dot_, q_sum_, reference_);
    DenseRow row;
    row.state.max = reference_;
    row.state.ones = 1;
    row.state.below = rest;
    row.state.q_sum = kIsSmooth ? SmoothedIndex::kSum : q_sum_;
    row.state.dot = kIsSmooth ? smooth.of_other(distance) : distance;
    const float loss = ::fmaf(row.state.q_sum, math::log1p(rest), row.state.dot);
    const float most_rest = kIsSmooth ? most_rest_of_smooth(smooth.at_index) : kMostPlainRest;
    // & instead of &&: for fewer branches. False of NaN and of infinite sums.
    row.is_plain = (rest <= most_rest) & (::fabsf(reference_) <= 0x1p14f) &
                   (::fabsf(loss) < math::infinity<float>());
    return row;
  }

 private:
  float reference_;
  PlainTerms terms_;
  float large_ = 0;    // the sum of the batches that are large
  int large_at_ = -1;  // the last such batch; -1 also of one that is a single element
  float small_ = 0;    // the sum of the others
  float dot_ = 0;      // sum_c q_c (x_c - reference) log2(e), of smooth rows without the q_c
  float q_sum_ = 0;    // of rows that are not smooth
};

}  // namespace lossops::cuda
