// The logit map z(x): what every loss of a row may apply to its logits first.
//
//   y = scale x;  y = softcap tanh(y / softcap), if there is a softcap;  z = y / temperature
//
// A map is a functor beside the functor of a loss: map(x), and derivative(x) = dz / dx.
#pragma once

#include "losses/math.h"

namespace lossops {

// The keywords of a call.
struct LogitMapParams {
  double scale = 1;
  double softcap = 0;  // 0: none
  double temperature = 1;

  // Whether z = x.
  LOSSOPS_HOST_DEVICE bool is_identity() const { return softcap == 0 && scale == temperature; }
};

// A constant of a map, which double holds and acc_t may not: an infinity times 0 would be NaN.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t map_constant(double value) {
  const double largest = sizeof(acc_t) == 4 ? 0x1.fffffep+127 : 0x1.fffffffffffffp+1023;
  const double bounded = value > largest ? largest : value < -largest ? -largest : value;
  return static_cast<acc_t>(bounded);
}

// Without a softcap the map is one multiplication, which is exact for the default of 1.
template <typename acc_t>
struct LinearMap {
  acc_t factor;

  LOSSOPS_HOST_DEVICE explicit LinearMap(const LogitMapParams& params)
      : factor(map_constant<acc_t>(params.scale / params.temperature)) {}

  LOSSOPS_HOST_DEVICE acc_t map(acc_t x) const { return factor * x; }
  LOSSOPS_HOST_DEVICE acc_t derivative(acc_t /*x*/) const { return factor; }
};

// With u = exp(-2 |y| / softcap), the derivative of tanh is 4 u / (1 + u)^2: no difference that
// cancels, unlike 1 - tanh^2.
template <typename acc_t>
struct SoftcapMap {
  acc_t rate;   // scale / softcap
  acc_t lost;   // what rounding took from it: alike for all logits, so it would not average out
  acc_t cap;    // softcap / temperature
  acc_t slope;  // 4 scale / temperature

  LOSSOPS_HOST_DEVICE explicit SoftcapMap(const LogitMapParams& params)
      : rate(map_constant<acc_t>(params.scale / params.softcap)),
        lost(map_constant<acc_t>(params.scale / params.softcap - static_cast<double>(rate))),
        cap(map_constant<acc_t>(params.softcap / params.temperature)),
        slope(map_constant<acc_t>(4 * params.scale / params.temperature)) {}

  LOSSOPS_HOST_DEVICE acc_t map(acc_t x) const { return cap * math::tanh(scaled(x)); }
  LOSSOPS_HOST_DEVICE acc_t derivative(acc_t x) const {
    const acc_t y = rate * x;
    const acc_t u = math::exp(acc_t(-2) * (y < acc_t(0) ? -y : y));  // NaN of NaN
    return math::divide_by_one_plus(math::divide_by_one_plus(slope * u, u), u);
  }

 private:
  // y / softcap. An infinite logit has no remainder, and a large one needs none.
  LOSSOPS_HOST_DEVICE acc_t scaled(acc_t x) const {
    const acc_t product = rate * x;
    const acc_t magnitude = product < acc_t(0) ? -product : product;
    return product + (magnitude < acc_t(32) ? lost * x : acc_t(0));
  }
};

// z - max of a mapped logit and the row's largest, rounded by itself. A map ends in a product, and
// the compiler would make one multiply-add of that and the difference: the largest logit would then
// differ from itself.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t mapped_difference(acc_t z, acc_t max) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(acc_t) == 4) {
    return __fsub_rn(z, max);
  } else {
    return __dsub_rn(z, max);
  }
#else
  return z - max;
#endif
}

// Calls body with the map of a call: run-time values become a type here.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename acc_t, typename Body>
LOSSOPS_HOST_DEVICE void visit_logit_map(const LogitMapParams& params, Body&& body) {
  if (params.softcap > 0) {
    body(SoftcapMap<acc_t>(params));
  } else {
    body(LinearMap<acc_t>(params));
  }
}

}  // namespace lossops
