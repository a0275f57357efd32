// The softmax of a row of logits x[0..C), which every loss of a row shares on both backends: the
// running state that a pass over the row keeps, and what a gradient needs of a finished row.
//
// Neither lse nor the sum of exponentials is ever formed. With rest = sum_c exp(x_c - max) - 1,
// lse - x_c = log1p(rest) + (max - x_c): large logits cost no accuracy, and neither does a row
// whose maximum outweighs all else, where the loss and 1 - softmax(x)_c are about rest. The
// running maximum and sum are the online softmax of Milakov and Gimelshein (arXiv:1805.02867).
#pragma once

#include "losses/math.h"

namespace lossops {

// exp(x - max), with max = -inf (nothing finite seen yet) taken as 0: exp(-inf) is
// then 0 and a NaN is still a NaN.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t softmax_shift(acc_t max) {
  return max == -math::infinity<acc_t>() ? acc_t(0) : max;  // fault: softmax-shift
}

// A NaN logit does not raise max, but makes the sum NaN. sum of exp(x - max) = ones + below.
template <typename acc_t>
struct OnlineSoftmax {
  acc_t max = -math::infinity<acc_t>();
  acc_t ones = 0;   // terms that are exactly 1: those of the maximum
  acc_t below = 0;  // all others

  // kExact: false where logits are exact in an acc_t of twice their bits, and need no exact
  // exponentials.
  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE void raise_max(acc_t new_max) {
    if (new_max > max) {
      below = (ones + below) *
              (kExact ? math::exp(max - new_max) : math::exp_in_sum<false>(max - new_max));
      ones = 0;
      max = new_max;
    }
  }

  // Folds in a logit that is not above max; shift is softmax_shift(max). Logits that are exact in
  // an acc_t of twice their bits need no exact exponentials.
  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE void add_below_max(acc_t x, acc_t shift) {
    const acc_t term = math::exp_in_sum<kExact>(x - shift);
    if (term == acc_t(1)) {
      ones += term;
    } else {
      below += term;
    }
  }

  // Folds in a state of the same max.
  LOSSOPS_HOST_DEVICE void add(const OnlineSoftmax& other) {
    ones += other.ones;
    below += other.below;
  }

  // The same, and what rounding took from the sums goes to lost: the equal terms of a long row
  // would round the same way every time.
  LOSSOPS_HOST_DEVICE void add(const OnlineSoftmax& other, OnlineSoftmax& lost) {
    ones += other.ones;
    math::add_exactly(below, other.below, lost.below);
  }

  // -1 where there is no finite logit.
  LOSSOPS_HOST_DEVICE acc_t rest() const { return (ones - acc_t(1)) + below; }
};

// The softmax of a row from what its forward left behind, and the gradient of its loss with
// respect to a logit, times a scale.
template <typename acc_t>
struct RowSoftmax {
  acc_t max;
  acc_t rest;
  acc_t factor;   // scale Q / sum
  acc_t log_sum;  // log1p(rest)

  static LOSSOPS_HOST_DEVICE RowSoftmax of(acc_t max, acc_t rest, acc_t scale, acc_t q_sum) {
    return {max, rest, math::divide_by_one_plus(scale * q_sum, rest), math::log1p(rest)};
  }

  // a exp(x - max)
  LOSSOPS_HOST_DEVICE acc_t times_exp(acc_t a, acc_t x) const {
    // What rounding took from the difference would cost the exponential |difference| / 2^24 of its
    // value.
    acc_t difference = x;
    const acc_t lost = math::lost_by_adding(difference, -max);
    return math::exp_times(a, difference, lost);
  }

  // scale Q softmax(x). Logits that are exact in an acc_t of twice their bits need no exact
  // exponentials.
  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE acc_t gradient(acc_t x) const {
    return kExact ? times_exp(factor, x) : factor * math::exp_in_sum<false>(x - max);
  }

  // scale Q (softmax(x) - 1)
  LOSSOPS_HOST_DEVICE acc_t gradient_at_index(acc_t x) const {
    return -factor * (rest + (acc_t(1) - times_exp(acc_t(1), x)));  // fault: ce-at-index
  }

  // scale (Q softmax(x) - q)
  LOSSOPS_HOST_DEVICE acc_t dense_gradient(acc_t x, acc_t scale, acc_t q_sum, acc_t q) const {
    return dense_gradient_of(times_exp(acc_t(1), x), scale, q_sum, q);
  }

  // The sum of all exp(x - max) but one of them.
  LOSSOPS_HOST_DEVICE acc_t all_but(acc_t e) const { return acc_t(1) - e + rest; }

  // The same of e = exp(x - max). kMayOutweigh: false where one_may_outweigh() is, for the same
  // bits with fewer operations.
  template <bool kMayOutweigh = true>
  LOSSOPS_HOST_DEVICE acc_t dense_gradient_of(acc_t e, acc_t scale, acc_t q_sum, acc_t q) const {
    if constexpr (kMayOutweigh) {
      // For the class that outweighs all others, from the others: q is then about Q.
      const acc_t others = all_but(e);
      if (one_may_outweigh() && e > others) {
        return outweighing_gradient(others, scale, q_sum, q);
      }
    }
    return math::difference_of_products(factor, e, scale, q);
  }

  // The gradient of the class that outweighs all others. others: their sum, all_but() of it.
  LOSSOPS_HOST_DEVICE acc_t outweighing_gradient(acc_t others, acc_t scale, acc_t q_sum,
                                                 acc_t q) const {
    // fault: ce-outweighs
    return math::difference_of_products(scale, q_sum - q, factor, others);
  }

  // Whether exp(x - max) of one class may be more than that of all others: only that of the largest
  // logit, and only if there is one such. Without this, e of half types, which may be 1 and a
  // rounding, would be more than that of another one as large.
  LOSSOPS_HOST_DEVICE bool one_may_outweigh() const { return rest < acc_t(1); }

  // lse - x
  LOSSOPS_HOST_DEVICE acc_t surprise(acc_t x) const { return log_sum + (max - x); }
};

}  // namespace lossops
