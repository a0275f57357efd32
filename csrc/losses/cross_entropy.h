// Cross entropy of a row of logits x[0..C) against class coefficients q[0..C).
//
//   loss     = sum_c q_c (lse - x_c),   lse = log sum_c exp(x_c)
//   d / dx_c = Q softmax(x)_c - q_c,    Q   = sum_c q_c
//   d / dp_c = (1 - eps) w_c (lse - x_c)                       for probabilities p
//   d / dw_c = p'_c (lse - x_c)                                 likewise
//
//   class index t, no smoothing:  q_c = w_t [c = t]
//   class index t, smoothing eps: q_c = (1 - eps) w_t [c = t] + eps / C w_c
//   probabilities p:              q_c = w_c p'_c,  p'_c = (1 - eps) p_c + eps / C
//
// lse is never formed: lse - x_c = log(sum) + (max - x_c), so that large logits
// cost no accuracy. The running pair {max, sum} is the online softmax of
// Milakov and Gimelshein (arXiv:1805.02867).
#pragma once

#include "losses/math.h"

namespace lossops {

// exp(x - max), with max = -inf (nothing finite seen yet) taken as 0: exp(-inf) is
// then 0 and a NaN is still a NaN.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t softmax_shift(acc_t max) {
  return max == -math::infinity<acc_t>() ? acc_t(0) : max;
}

// A NaN logit does not raise max, but makes sum NaN.
template <typename acc_t>
struct OnlineSoftmax {
  acc_t max = -math::infinity<acc_t>();
  acc_t sum = 0;  // of exp(x - max)

  LOSSOPS_HOST_DEVICE void raise_max(acc_t new_max) {
    if (new_max > max) {
      sum *= math::exp(max - new_max);
      max = new_max;
    }
  }

  // Folds in a logit that is not above max.
  LOSSOPS_HOST_DEVICE void add_below_max(acc_t x) {
    sum += math::exp_in_sum(x - softmax_shift(max));
  }

  // Folds in a state of the same max.
  LOSSOPS_HOST_DEVICE void add(const OnlineSoftmax& other) { sum += other.sum; }

  LOSSOPS_HOST_DEVICE void combine(const OnlineSoftmax& other) {
    const acc_t new_max = math::max_number(other.max, max);
    const acc_t shift = softmax_shift(new_max);
    sum = sum * math::exp(max - shift) + other.sum * math::exp(other.max - shift);
    max = new_max;
  }
};

// Adds to the online softmax what a row of dense coefficients needs. Every part of
// dot has the sign of its q, so nothing cancels.
template <typename acc_t>
struct DenseOnlineSoftmax : OnlineSoftmax<acc_t> {
  acc_t q_sum = 0;  // Q
  acc_t dot = 0;    // sum_c q_c (max - x_c), over q_c != 0
  using Base = OnlineSoftmax<acc_t>;

  LOSSOPS_HOST_DEVICE void raise_max(acc_t new_max) {
    if (new_max > this->max) {
      dot += moved(q_sum, this->max, new_max);
      Base::raise_max(new_max);
    }
  }

  LOSSOPS_HOST_DEVICE void add_below_max(acc_t x, acc_t q) {
    Base::add_below_max(x);
    q_sum += q;
    // A zero coefficient counts as 0 also against an infinite logit.
    dot += q == acc_t(0) ? acc_t(0) : q * (softmax_shift(this->max) - x);
  }

  LOSSOPS_HOST_DEVICE void add(const DenseOnlineSoftmax& other) {
    Base::add(other);
    q_sum += other.q_sum;
    dot += other.dot;
  }

  LOSSOPS_HOST_DEVICE void combine(const DenseOnlineSoftmax& other) {
    const acc_t new_max = math::max_number(other.max, this->max);
    dot =
        dot + moved(q_sum, this->max, new_max) + other.dot + moved(other.q_sum, other.max, new_max);
    q_sum += other.q_sum;
    Base::combine(other);
  }

 private:
  // What dot gains when its reference moves from `from` up to `to`. Before the
  // first finite logit the reference is 0 (softmax_shift).
  static LOSSOPS_HOST_DEVICE acc_t moved(acc_t q_sum, acc_t from, acc_t to) {
    const acc_t distance = softmax_shift(to) - softmax_shift(from);
    return q_sum == acc_t(0) ? acc_t(0) : q_sum * distance;
  }
};

// Loss of a row with one coefficient q at logit x.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t sparse_row_loss(const OnlineSoftmax<acc_t>& row, acc_t x, acc_t q) {
  return q * (math::log(row.sum) + (row.max - x));
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t dense_row_loss(const DenseOnlineSoftmax<acc_t>& row) {
  // A row of -inf only (or of NaN) has no softmax: sum is 0 or NaN, the loss NaN.
  const acc_t empty_row = row.sum > acc_t(0) ? acc_t(0) : math::quiet_nan<acc_t>();
  return row.q_sum * math::log(row.sum) + row.dot + empty_row;
}

// softmax(x)_c from what a row left behind; inverse_sum = 1 / sum.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t softmax_probability(acc_t x, acc_t max, acc_t inverse_sum) {
  const acc_t difference = x - max;
  acc_t exponential = math::exp(difference);
  // What rounding took from the difference (Knuth's exact sum) would cost the exponential
  // |difference| / 2^24 of its value.
  const acc_t shadow = difference - x;
  const acc_t rounded_off = (x - (difference - shadow)) - (max + shadow);
  if (exponential > acc_t(0)) {
    exponential += exponential * rounded_off;
  }
  return exponential * inverse_sum;
}

// Label smoothing of one class probability.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t smoothed(acc_t probability, acc_t smoothing, acc_t smoothing_per_class) {
  return (acc_t(1) - smoothing) * probability + smoothing_per_class;
}

}  // namespace lossops
