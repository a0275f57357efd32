// What reinforcement learning and metrics read off a row of mapped logits z[0..C): the
// log-probabilities of K classes, the log of the sum of exponentials and the entropy of the
// softmax.
//
//   log p_k = z[index_k] - lse                 d / dz_c = [c = index_k] - s_c
//   lse     = max + log1p(rest)                d / dz_c = s_c
//   H       = log1p(rest) + D                  d / dz_c = s_c ((max - z_c) - D)
//
// s is the softmax, and D = sum_c s_c (max - z_c). All terms of H and D are positive, so nothing
// cancels, however confident the row is. A z of -inf adds 0 to D and has a gradient of 0.
#pragma once

#include "losses/math.h"
#include "losses/rows/logit_map.h"
#include "losses/rows/softmax_state.h"

namespace lossops {

// The online softmax with the sum of exp(z - max) (max - z).
template <typename acc_t>
struct EntropySoftmax : OnlineSoftmax<acc_t> {
  acc_t distance = 0;
  using Base = OnlineSoftmax<acc_t>;

  LOSSOPS_HOST_DEVICE void raise_max(acc_t new_max) {
    if (new_max > this->max) {
      if (this->max > -math::infinity<acc_t>()) {
        const acc_t moved = (this->ones + this->below) * (new_max - this->max);
        distance = (distance + moved) * math::exp(this->max - new_max);
      }
      Base::raise_max(new_max);
    }
  }

  // exp(z - max), and what it adds to distance; shift is softmax_shift(max).
  struct Term {
    acc_t exp;
    acc_t distance;
  };
  template <bool kExact = true>
  static LOSSOPS_HOST_DEVICE Term term(acc_t z, acc_t shift) {
    const acc_t below_max = shift - z;
    const acc_t exp = math::exp_in_sum<kExact>(-below_max);
    return {exp, exp == acc_t(0) ? acc_t(0) : exp * below_max};
  }

  // Folds in a logit that is not above max.
  template <bool kExact = true>
  LOSSOPS_HOST_DEVICE void add_below_max(acc_t z, acc_t shift) {
    const Term added = term<kExact>(z, shift);
    if (added.exp == acc_t(1)) {
      this->ones += added.exp;
    } else {
      this->below += added.exp;
    }
    distance += added.distance;
  }

  // Folds in a state of the same max.
  LOSSOPS_HOST_DEVICE void add(const EntropySoftmax& other) {
    Base::add(other);
    distance += other.distance;
  }
  // Folds in any state.
  LOSSOPS_HOST_DEVICE void merge(EntropySoftmax other) {
    raise_max(other.max);
    other.raise_max(this->max);
    add(other);
  }
  // See OnlineSoftmax::add().
  LOSSOPS_HOST_DEVICE void add(const EntropySoftmax& other, EntropySoftmax& lost) {
    Base::add(other, lost);
    math::add_exactly(distance, other.distance, lost.distance);
  }

  // D
  LOSSOPS_HOST_DEVICE acc_t mean_distance() const {
    return math::divide_by_one_plus(distance, this->rest());
  }
};

// What the log-probabilities, the lse and the entropy of a row are computed from.
template <typename acc_t>
struct TokenNormalizer {
  acc_t max;
  acc_t log_sum;        // log1p(rest)
  acc_t mean_distance;  // D; 0 where no entropy is wanted

  LOSSOPS_HOST_DEVICE acc_t log_prob(acc_t z) const { return mapped_difference(z, max) - log_sum; }
  // -inf of a row of -inf only.
  LOSSOPS_HOST_DEVICE acc_t lse() const { return max + log_sum; }
  // A row of -inf only, or of NaN, has no softmax, and its entropy is NaN.
  LOSSOPS_HOST_DEVICE acc_t entropy() const {
    const acc_t empty_row =
        log_sum > -math::infinity<acc_t>() ? acc_t(0) : math::quiet_nan<acc_t>();
    return log_sum + mean_distance + empty_row;
  }
};

// What forward leaves of a row to its backward pass.
template <typename acc_t>
struct TokenStats {
  acc_t max;
  acc_t rest;           // OnlineSoftmax::rest()
  acc_t mean_distance;  // as in TokenNormalizer

  LOSSOPS_HOST_DEVICE TokenNormalizer<acc_t> normalizer() const {
    return {max, math::log1p(rest), mean_distance};
  }
};

// The gradient with respect to the mapped logits of a row.
template <typename acc_t>
struct TokenGradient {
  TokenStats<acc_t> stats;
  acc_t of_softmax;   // grad_lse - sum_k grad_log_prob_k
  acc_t of_entropy;   // grad_entropy
  acc_t inverse_sum;  // 1 / (1 + rest): once a row, not once a class

  static LOSSOPS_HOST_DEVICE TokenGradient of(const TokenStats<acc_t>& stats, acc_t of_softmax,
                                              acc_t of_entropy) {
    return {stats, of_softmax, of_entropy, math::divide_by_one_plus(acc_t(1), stats.rest)};
  }

  // Of a class that is not among the indices. kEntropy: false where of_entropy is 0.
  template <bool kEntropy = true>
  LOSSOPS_HOST_DEVICE acc_t of_class(acc_t z) const {
    return of_exp<kEntropy>(math::exp_in_sum<true>(z - stats.max), z, of_softmax);
  }

  // Of a class among the indices; grad: the sum of their grad_log_prob; common: of_softmax + grad,
  // added up in fp64, as they nearly cancel. 1 - softmax is computed from the other classes.
  LOSSOPS_HOST_DEVICE acc_t at_index(acc_t z, acc_t grad, acc_t common) const {
    const acc_t e = math::exp(mapped_difference(z, stats.max));
    const acc_t others = (acc_t(1) - e + stats.rest) * inverse_sum;
    return math::product_plus(grad, others, of_exp<true>(e, z, common));
  }

 private:
  // e = exp(z - max)
  template <bool kEntropy>
  LOSSOPS_HOST_DEVICE acc_t of_exp(acc_t e, acc_t z, acc_t common) const {
    const acc_t softmax = e * inverse_sum;
    if constexpr (!kEntropy) {
      return softmax * common;
    }
    // Where the softmax is 0, an infinite distance counts as 0.
    const acc_t slope = softmax == acc_t(0)
                            ? acc_t(0)
                            : of_entropy * (-mapped_difference(z, stats.max) - stats.mean_distance);
    return softmax * (common + slope);
  }
};

}  // namespace lossops
