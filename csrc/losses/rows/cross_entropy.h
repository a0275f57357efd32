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
#pragma once

#include "losses/math.h"
#include "losses/rows/softmax_state.h"

namespace lossops {

// Adds to the online softmax what a row of dense coefficients needs. Every part of dot that is
// added here has the sign of its q, so nothing cancels.
template <typename acc_t>
struct DenseOnlineSoftmax : OnlineSoftmax<acc_t> {
  acc_t q_sum = 0;  // Q
  acc_t dot = 0;    // sum_c q_c (max - x_c), over q_c != 0
  using Base = OnlineSoftmax<acc_t>;

  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE void raise_max(acc_t new_max) {
    if (new_max > this->max) {
      dot += moved(q_sum, this->max, new_max);
      Base::template raise_max<kExact>(new_max);
    }
  }

  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE void add_below_max(acc_t x, acc_t shift, acc_t q) {
    Base::template add_below_max<kExact>(x, shift);
    q_sum += q;
    // A zero coefficient counts as 0 also against an infinite logit.
    dot += q == acc_t(0) ? acc_t(0) : q * (shift - x);
  }

  LOSSOPS_HOST_DEVICE void add(const DenseOnlineSoftmax& other) {
    Base::add(other);
    q_sum += other.q_sum;
    dot += other.dot;
  }

  LOSSOPS_HOST_DEVICE void add(const DenseOnlineSoftmax& other, DenseOnlineSoftmax& lost) {
    Base::add(other, lost);
    math::add_exactly(q_sum, other.q_sum, lost.q_sum);
    math::add_exactly(dot, other.dot, lost.dot);
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
LOSSOPS_HOST_DEVICE acc_t sparse_row_loss(acc_t max, acc_t rest, acc_t x, acc_t q) {
  return q * (math::log1p(rest) + (max - x));
}

// Loss of a row with coefficients of sum q_sum; dot = sum_c q_c (max - x_c).
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t dense_row_loss(acc_t rest, acc_t q_sum, acc_t dot) {
  // A row of -inf only (or of NaN) has no softmax, and its loss is NaN.
  const acc_t empty_row = rest > acc_t(-1) ? acc_t(0) : math::quiet_nan<acc_t>();
  return q_sum * math::log1p(rest) + dot + empty_row;  // fault: ce-loss
}

// Label smoothing of one class probability.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t smoothed(acc_t probability, acc_t smoothing, acc_t smoothing_per_class) {
  // fault: ce-smoothed
  return math::product_plus(acc_t(1) - smoothing, probability, smoothing_per_class);
}

}  // namespace lossops
