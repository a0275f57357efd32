// Rows with several coefficients q, of half types, whose exponentials are relative to a reference:
//
//   total    = sum_c exp(x_c - reference),   Q = sum_c q_c
//   loss     = Q log(total) + sum_c q_c (reference - x_c)
//   d / dx_c = scale (Q exp(x_c - reference) / total - q_c)
//
// A smooth row has a class index, label smoothing and no class weights. Its reference is the logit
// at the class index, and it needs no maximum. The reference of any other row is its largest logit.
//
// The terms of the reference are not told from others, which saves a third of the instructions. But
// a sum that includes a term of 1 rounds the others to some 2^-24. A confident row, in which the
// others are small, would lose too much. Of a row with probabilities the others are then added up
// once more, without the reference. A confident smooth row needs that only if its loss is small, or
// if smoothing takes little from the class index. Else that error is nothing beside its loss and
// its gradients.
//
// Rows within these bounds, and those of finish(), are called plain. All others are summed in
// another way.
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
  bool is_coarse = false;  // with probabilities: `below` is to be added up once more
};

// A thread's share of the sums. kIsSmooth: of smooth rows.
template <bool kIsSmooth>
class PlainDenseSum {
 public:
  __device__ __forceinline__ explicit PlainDenseSum(float reference)
      : reference_(reference), terms_(reference) {}

  // q: of rows that are not smooth.
  template <int kCount>
  __device__ __forceinline__ void add(const float (&x)[kCount], const float (&q)[kCount]) {
    float exponents[kCount];
    float powers[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      exponents[i] = terms_.exponent(x[i]);
      powers[i] = math::exp2(exponents[i]);
    }
    // Rounding errors are kept: equal terms behind a larger one would all be rounded the same way.
    // An error is exact if the total is the larger summand, and else nothing beside the new total.
    const float sum = pairwise_sum(powers);
    const float before = total_;
    total_ += sum;
    lost_ += sum - (total_ - before);
    if constexpr (kIsSmooth) {
      dot_ += pairwise_sum(exponents);
    } else {
      q_sum_ += pairwise_sum(q);
      dot_ += weighted_sum(q, exponents);
    }
  }
  // The sums of all lanes of a team, in each of them.
  __device__ __forceinline__ void add_lanes(int team) {
    total_ = warp_sum(total_, team);
    lost_ = warp_sum(lost_, team);
    dot_ = warp_sum(dot_, team);
    q_sum_ = kIsSmooth ? q_sum_ : warp_sum(q_sum_, team);
  }

  // The row, from the sums over all classes. smooth, num_classes: read only for smooth rows.
  __device__ __forceinline__ DenseRow finish(const SmoothedIndex& smooth, int num_classes) const {
    // What rounding takes from a smaller rest counts, unless the loss and 1 - q of the class index
    // are as large as these.
    constexpr float kLeastRest = 0.25f;
    constexpr float kLeastLoss = 0x1p-5f;
    constexpr float kLeastSmoothing = 0x1p-9f;
    // The reference's own term is not quite 1. The rest is NaN if the sum is infinite.
    const float rest = terms_.corrected((total_ - terms_(reference_)) + lost_, reference_);
    const float distance =
        terms_.distance(dot_, kIsSmooth ? static_cast<float>(num_classes) : q_sum_, reference_);
    DenseRow row;
    row.state.max = reference_;
    row.state.ones = 1;
    row.state.below = ::fmaxf(rest, 0.0f);
    row.state.q_sum = kIsSmooth ? SmoothedIndex::kSum : q_sum_;
    row.state.dot = kIsSmooth ? smooth.of_other(distance) : distance;
    const float loss = ::fmaf(row.state.q_sum, math::log1p(row.state.below), row.state.dot);
    // & instead of &&: for fewer branches. False of NaN. With a larger rest, the factor of
    // gradients might leave fp32's range where no gradient does.
    row.is_plain = (rest <= IndexRow::kMostSmoothRest) & (::fabsf(reference_) <= 0x1p14f) &
                   (::fabsf(loss) < math::infinity<float>());
    const bool is_large =
        kIsSmooth && loss >= kLeastLoss && 1.0f - smooth.at_index >= kLeastSmoothing;
    const bool is_coarse = rest < kLeastRest && !is_large;  // fault: plain-dense
    row.is_plain = row.is_plain && !(kIsSmooth && is_coarse);
    row.is_coarse = is_coarse;
    return row;
  }

 private:
  float reference_;
  PlainTerms terms_;
  float total_ = 0;
  float lost_ = 0;   // what rounding took from the total
  float dot_ = 0;    // sum_c q_c (x_c - reference) log2(e), of smooth rows without the q_c
  float q_sum_ = 0;  // of rows that are not smooth
};

}  // namespace lossops::cuda
