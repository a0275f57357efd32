// Pointwise Kullback-Leibler divergence KL(target || input), as
// torch.nn.functional.kl_div defines it.
//
//   x is the input's log-probability: input itself, or log(input) when the
//   input holds probabilities (log_input = false);
//   t is the target's probability: target itself, or exp(target) when the
//   target holds log-probabilities (log_target = true).
//
//   loss          = t (log t - x)
//   d / d x       = -t                  d / d p       = -t / p,  x = log p
//   d / d t       = log t + 1 - x       d / d (log t) = t (log t + 1 - x)
//
// Limits: a weight t of zero makes the term zero, also where x is -inf; a NaN on
// either side stays NaN.
#pragma once

#include "losses/elementwise/params.h"
#include "losses/math.h"

namespace lossops {

template <bool kLogTarget, bool kLogInput>
struct KlDivTerm {
  static constexpr bool kHasWeight = false;
  static constexpr bool kPreparesTarget = true;
  static constexpr bool kHasTargetGradientKernel = false;  // they would take 0.2 MB of the wheel

  // Whether backward_input() takes input.
  static constexpr bool kInputGradientTakesInput = !kLogInput;

  // Whether backward_input() takes what is prepared.
  static constexpr bool kInputTakesPrepared = kLogTarget;

  // Whether the loss that forward() computes, and the gradient of input, are little more than what
  // is prepared of target, and have the same bits with it, also as half types.
  static constexpr bool kSharesTarget = kLogInput;
  static constexpr bool kSharesTargetBackward = kLogTarget && kLogInput;

  // exp or log of target, which the other functions take where it is there already.
  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t prepare(acc_t target) const {
    return kLogTarget ? probability(target) : math::log(target);
  }

  template <typename acc_t, typename... Prepared>
  LOSSOPS_HOST_DEVICE acc_t forward(acc_t input, acc_t target, Prepared... prepared) const {
    return value<true>(input, target, prepared...);
  }

  // For a sum of terms, whose errors average out: by the hardware's logarithm, on the CPU as
  // forward(). kHalf: input and target are of half types. kSubnormal: they may be subnormal, as
  // float, which no float16 is.
  template <bool kHalf, bool kSubnormal, typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t forward_in_sum(acc_t input, acc_t target) const {
    if constexpr (kHalf) {
      return half_value<kSubnormal>(input, target);
    } else {
      return value<false>(input, target);
    }
  }

  // Whether a loss that is rounded to a half type has a faster way. Of an exponential the
  // hardware's errors would show.
  static constexpr bool kHasForwardHalf = !kLogTarget;

  // Where log t and x nearly cancel, the errors of the hardware's logarithms would show.
  LOSSOPS_HOST_DEVICE float forward_half(float input, float target) const {
    if constexpr (kLogInput) {
      return half_term(target, math::log_minus(target, input), input);
    } else {
      const float x = math::log_in_sum<false>(input);
      const float ratio = half_log_ratio(target, x);
      return half_term(target, math::log_quotient_near_1(target, input, ratio), x);
    }
  }

  template <typename acc_t, typename... Prepared>
  LOSSOPS_HOST_DEVICE acc_t backward_input(acc_t input, acc_t target, Prepared... prepared) const {
    const acc_t t = probability(target, prepared...);
    if constexpr (kLogInput) {
      return -t;
    } else {
      return t == acc_t(0) ? math::zero_unless_nan(input) : -t / input;
    }
  }

  // The same where all operands are of one half type.
  LOSSOPS_HOST_DEVICE float backward_half_input(float input, float target) const {
    const float t = probability(target);
    if constexpr (kLogInput) {
      return -t;
    } else {
      const float quotient = math::divide_half(-t, input);
      return t == 0.0f ? math::zero_unless_nan(input) : quotient;
    }
  }

  template <typename acc_t, typename... Prepared>
  LOSSOPS_HOST_DEVICE acc_t backward_target(acc_t input, acc_t target, Prepared... prepared) const {
    if constexpr (kLogTarget) {
      const acc_t x = log_probability(input);
      const acc_t t = probability(target, prepared...);
      return t == acc_t(0) ? math::zero_unless_nan(x) : t * (target - x + acc_t(1));
    } else {
      acc_t log_ratio;
      if constexpr (kLogInput) {
        log_ratio = log_for_gradient(target, prepared...) - input;
      } else {
        log_ratio = log_of_quotient<true>(target, input, prepared...);
      }
      // Not differentiable at 0: NaN, as torch's xlogy gives.
      // fault: kl-target
      return target == acc_t(0) ? math::quiet_nan<acc_t>() : log_ratio + acc_t(1);
    }
  }

  // The same where all operands are of one half type.
  LOSSOPS_HOST_DEVICE float backward_half_target(float input, float target) const {
    float x = input;
    if constexpr (!kLogInput) {
      x = math::log_in_sum<false>(input);
    }
    if constexpr (kLogTarget) {
      const float t = math::exp_of_half(target);
      return t == 0.0f ? math::zero_unless_nan(x) : t * (target - x + 1.0f);
    } else {
      // fault: kl-half-target
      return target == 0.0f ? math::quiet_nan<float>() : half_log_ratio(target, x) + 1.0f;
    }
  }

 private:
  template <bool kExact, typename acc_t, typename... Prepared>
  static LOSSOPS_HOST_DEVICE acc_t value(acc_t input, acc_t target, Prepared... prepared) {
    if constexpr (kLogTarget) {
      const acc_t x = log_probability(input);
      const acc_t t = probability(target, prepared...);
      return t == acc_t(0) ? math::zero_unless_nan(x) : t * (target - x);
    } else if constexpr (kLogInput) {
      // fault: kl-zero-target
      const acc_t zero_weight = input == -math::infinity<acc_t>() ? acc_t(0) : acc_t(0) * input;
      const acc_t log_target = log_of_target<kExact>(target, prepared...);
      const acc_t term = target * (log_target - input);
      return target == acc_t(0) ? zero_weight : term;
    } else {
      // log(0) is -inf, which a zero weight silences; the logarithm of less is NaN.
      const bool defined = input >= acc_t(0) && input < math::infinity<acc_t>();
      const acc_t zero_weight = defined ? acc_t(0) : math::quiet_nan<acc_t>();
      const acc_t log_ratio = log_of_quotient<kExact>(target, input, prepared...);
      const acc_t term = target * log_ratio;
      return target == acc_t(0) ? zero_weight : term;
    }
  }

  // The loss of half types, of which only the sum counts. It has two logarithms instead of one of a
  // quotient, so no division, and the hardware's exponential. Their errors are relative to their
  // size, which half types forgive, and average out where the two logarithms nearly cancel.
  template <bool kSubnormal>
  static LOSSOPS_HOST_DEVICE float half_value(float input, float target) {
    float x = input;
    if constexpr (!kLogInput) {
      x = math::log_in_sum<false, kSubnormal>(input);
    }
    if constexpr (kLogTarget) {
      const float t = math::exp_of_half(target);
      return t == 0.0f ? math::zero_unless_nan(x) : t * (target - x);
    } else {
      const float ln_2 = kLogInput ? math::kLn2OfProbability : math::kLn2;
      return half_term(target, math::log_in_sum<false, kSubnormal>(target, ln_2) - x, x);
    }
  }

  // log(target) - x by the hardware's logarithm, rounded once. Else the compiler might make a
  // multiply-add of it in some kernels only, and the bits of an element would depend on its layout.
  static LOSSOPS_HOST_DEVICE float half_log_ratio(float target, float x) {
#if defined(__CUDA_ARCH__)
    return ::fmaf(math::log_in_sum<false>(target, 1.0f), math::kLn2, -x);
#else
    return math::log_in_sum<false>(target) - x;
#endif
  }

  // A zero weight silences the -inf that is the logarithm of 0, nothing else.
  static LOSSOPS_HOST_DEVICE float half_term(float target, float log_ratio, float x) {
    const float term = target * log_ratio;
    return target == 0.0f ? 0.0f * math::at_least(x, -1.0f) : term;  // fault: kl-half-zero-target
  }

  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t probability(acc_t target) {
    if constexpr (kLogTarget) {
      return math::exp(target);  // fault: kl-log-target
    } else {
      return target;
    }
  }

  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t probability(acc_t target, acc_t prepared) {
    return kLogTarget ? prepared : target;
  }

  template <bool kExact, typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_of_target(acc_t target) {
    return math::log_in_sum<kExact>(target, math::kLn2OfProbability);
  }

  template <bool kExact, typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_of_target(acc_t, acc_t prepared) {
    return prepared;
  }

  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_for_gradient(acc_t target) {
    return math::log(target);
  }

  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_for_gradient(acc_t, acc_t prepared) {
    return prepared;
  }

  template <bool kExact, typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_of_quotient(acc_t target, acc_t input) {
    return math::log_quotient<kExact>(target, input);
  }

  template <bool kExact, typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_of_quotient(acc_t target, acc_t input, acc_t prepared) {
    return math::log_quotient_near_1(target, input, prepared - math::log(input));
  }

  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE acc_t log_probability(acc_t input) {
    if constexpr (kLogInput) {
      return input;
    } else {
      return math::log(input);
    }
  }
};

struct KlDivLoss {
  using Params = ParamTypes<bool, bool>;
  static constexpr char kSchema[] = ", bool log_target=False, bool log_input=True";
  static constexpr LossTraits kTraits{/*has_weight=*/KlDivTerm<false, false>::kHasWeight,
                                      /*takes_integers=*/false,
                                      /*has_batchmean=*/true,
                                      /*expands_first=*/false,
                                      /*target_first=*/true,
                                      /*target_has_factor=*/true};

  template <typename Body>
  LOSSOPS_HOST_DEVICE static void visit(const LossParams& params, Body&& body) {
    const bool log_target = params.values[0] != 0;
    const bool log_input = params.values[1] != 0;
    if (log_target) {
      log_input ? body(KlDivTerm<true, true>{}) : body(KlDivTerm<true, false>{});
    } else {
      log_input ? body(KlDivTerm<false, true>{}) : body(KlDivTerm<false, false>{});
    }
  }
};

}  // namespace lossops
