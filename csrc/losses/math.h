// Host-device basics of the loss functors: qualifiers, and the few elementary
// functions they need. Includes neither torch nor CUDA headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include "losses/instructions.h"
#define LOSSOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOSSOPS_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace lossops::math {

// std::numeric_limits<T>::infinity() is a host function; these are not.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t infinity() {
  return static_cast<acc_t>(HUGE_VALF);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t quiet_nan() {
  return static_cast<acc_t>(__builtin_nanf(""));
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE bool is_nan(acc_t x) {
  return x != x;
}

namespace detail {

LOSSOPS_HOST_DEVICE float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

LOSSOPS_HOST_DEVICE uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

LOSSOPS_HOST_DEVICE double double_from_bits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

LOSSOPS_HOST_DEVICE uint64_t bits_of_double(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// log(2^exponent x) of a normal x > 0: x = 2^e (1 + r) with r in [-1/3, 1/3],
// log x = e ln 2 + r - r^2/2 + r^3 P(r), P by the Remez algorithm.
LOSSOPS_HOST_DEVICE float log_of_normal(float x, float exponent = 0.0f) {
  constexpr uint32_t kTwoThirds = 0x3f2aaaab;
  const uint32_t offset = bits_of_float(x) - kTwoThirds;
  exponent += static_cast<float>(static_cast<int32_t>(offset) >> 23);
  const float r = float_from_bits((offset & 0x7fffffu) + kTwoThirds) - 1.0f;
  float p = -0x1.080578p-3f;
  p = p * r + 0x1.1e66a0p-3f;
  p = p * r - 0x1.f31148p-4f;
  p = p * r + 0x1.1ed71cp-3f;
  p = p * r - 0x1.559dcap-3f;
  p = p * r + 0x1.99d028p-3f;
  p = p * r - 0x1.fffef0p-3f;
  p = p * r + 0x1.555506p-2f;
  // ln 2 in two parts: the product with the first is exact.
  const float small = (p * r - 0.5f) * (r * r) + exponent * 0x1.7f7d1cp-20f;
  return exponent * 0x1.62e4p-1f + (r + small);
}

}  // namespace detail

constexpr float kLn2 = 0x1.62e430p-1f;
// For log_in_sum() of probabilities: the hardware truncates logarithms. Measured on an H200, mean
// of p log p in units of 2^-24 of itself: -2.1 for p uniform in [0, 1], -1.6 for its fourth power,
// -0.8 for p below 0.01; with the next larger float for ln 2 -0.6, -0.1 and 0.7.
constexpr float kLn2OfProbability = 0x1.62e432p-1f;

#if defined(__CUDACC__)

constexpr float kLog2E = 0x1.715476p+0f;

// 2^x within 2 units in the last place, 0 for what is subnormal.
__device__ __forceinline__ float exp2(float x) { return ex2_approx_ftz(x); }

// exp_in_sum<true>(x), but NaN of an infinity.
__device__ __forceinline__ float exp_of_finite_in_sum(float x) {
  const float t = x * kLog2E;
  const float power = exp2(t);
  return ::fmaf(power, ::fmaf(t, -0x1.62e430p-1f, x), power);
}

// What rounding took from x log2(e) = t, as an exponent of e. ln 2 in two parts: the first alone
// would leave 2^-29 of t.
__device__ __forceinline__ float lost_by_log2(float x, float t) {
  return ::fmaf(t, 0x1.05c610p-29f, ::fmaf(t, -0x1.62e430p-1f, x));
}

// a / (b + c), rounded once but for one quotient in many; b and c not negative, their sum from
// 2^-126 to 2^126.
__device__ __forceinline__ float divide_by_sum(float a, float b, float c) {
  const float sum = b + c;
  const float lost_by_sum = ::fminf(b, c) - (sum - ::fmaxf(b, c));
  const float inverse = rcp_approx_ftz(sum);
  const float quotient = a * inverse;
  const float lost = ::fmaf(-quotient, lost_by_sum, ::fmaf(-quotient, sum, a));
  const float corrected = ::fmaf(lost, inverse, quotient);
  return is_nan(corrected) ? quotient : corrected;  // an infinity has no remainder
}

// The hardware's powers of negative exponents are too small by as much of themselves: measured on
// an H200, mean of -8 to 0; elsewhere it may be less, and then costs as much. Of a sum of them it
// can be given back.
constexpr float kLostByPowers = 0x1.4p-25f;

// a exp(x), a = factor (1 + lost) 2^(round - kRound): where the result is normal, within 2^-24 of
// it and a rounding. The hardware's powers would be off by 2.5 units in the last place, and those
// of the row's sum are already.
struct MultipleOfExp {
  static constexpr float kRound = 0x1.8p23f;  // what is added to it is rounded to an integer

  float factor = 0;
  float lost = 0;
  float round = kRound;

  __device__ __forceinline__ float operator()(float x) const {
    const float rounded = ::fmaf(x, kLog2E, round);
    const float n = rounded - round;
    // log2(e) in two parts; 2^(n + r) = 2^n (1 + r P(r)), P by the Remez algorithm.
    const float r = ::fmaf(x, 0x1.4ae0c0p-26f, ::fmaf(x, kLog2E, -n));
    float p = 0x1.41fbbcp-13f;
    p = ::fmaf(p, r, 0x1.5f3e54p-10f);
    p = ::fmaf(p, r, 0x1.3b2d4cp-7f);
    p = ::fmaf(p, r, 0x1.c6aee8p-5f);
    p = ::fmaf(p, r, 0x1.ebfbdcp-3f);
    p = ::fmaf(p, r, 0x1.62e430p-1f);
    const float product = ::fmaf(factor, ::fmaf(p, r, lost), factor);
    return __int_as_float(__float_as_int(product) + (__float_as_int(rounded) << 23));
  }

  // Above this the result is normal, and 8 times as large as need be.
  __device__ __forceinline__ float lowest() const {
    const int exponent = (__float_as_int(factor) >> 23 & 0xff) - 127;
    return (static_cast<float>(-122 - exponent) - (round - kRound)) * 0x1.62e430p-1f;
  }
};

// a / ((1 + b) exp(x)) times an exponential, where b >= 0 is a sum of exp_in_sum<true>();
// |x| <= 2048, a from 2^-40 to 2^60.
__device__ __forceinline__ MultipleOfExp divide_by_one_plus_times_exp(float a, float b, float x) {
  // -x = n ln 2 + r + r_lost; exp(-x) = 2^n (high + low), high = 1 + r rounded.
  const float round = ::fmaf(x, -kLog2E, MultipleOfExp::kRound);
  const float n = round - MultipleOfExp::kRound;
  const float r_high = ::fmaf(n, -0x1.62ep-1f, -x);  // exact
  const float r_low = __fmul_rn(n, -0x1.0bfbe8p-15f);
  const float r = r_high + r_low;
  const float r_lost = (r_high - r) + r_low;
  float p = 0x1.6a244ep-10f;
  p = ::fmaf(p, r, 0x1.1239d4p-7f);
  p = ::fmaf(p, r, 0x1.5558f2p-5f);
  p = ::fmaf(p, r, 0x1.555492p-3f);
  p = ::fmaf(p, r, 0x1.fffffcp-2f);
  const float high = 1.0f + r;
  const float low = (r - (high - 1.0f)) + ::fmaf(p, __fmul_rn(r, r), r_lost);
  const float product = __fmul_rn(a, high);
  const float product_lost = ::fmaf(a, low, ::fmaf(a, high, -product));
  const float sum = 1.0f + b;
  // A whole number is the sum of terms that are exactly 1, as those of equal logits.
  const float lost_by_powers = b == ::rintf(b) ? 0.0f : kLostByPowers;
  const float lost_by_sum = ::fmaf(b, lost_by_powers, ::fminf(b, 1.0f) - (sum - ::fmaxf(b, 1.0f)));
  const float inverse = rcp_approx_ftz(sum);
  const float quotient = __fmul_rn(product, inverse);
  const float lost = ::fmaf(-quotient, lost_by_sum, ::fmaf(-quotient, sum, product)) + product_lost;
  const float factor = ::fmaf(lost, inverse, quotient);
  const float inverse_factor = rcp_approx_ftz(factor);
  return {factor, ::fmaf(lost, inverse, quotient - factor) * inverse_factor, round};
}

#endif

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
// Calls, for little machine code: fp64 is rare.
static __device__ __attribute__((noinline)) double log(double x) { return ::log(x); }
static __device__ __attribute__((noinline)) double exp(double x) { return ::exp(x); }
__device__ __forceinline__ float log1p(float x) { return ::log1pf(x); }
static __device__ __attribute__((noinline)) double log1p(double x) { return ::log1p(x); }

// The larger of two; of a NaN and a number, the number.
__device__ __forceinline__ float max_number(float a, float b) { return ::fmaxf(a, b); }
__device__ __forceinline__ double max_number(double a, double b) { return ::fmax(a, b); }

// The larger of two; NaN where one is NaN.
__device__ __forceinline__ float at_least(float x, float bound) {
#if __CUDA_ARCH__ >= 800
  return max_nan(x, bound);
#else
  return x < bound ? bound : x;
#endif
}

// exp of a term x <= 0 of a sum of exponentials; exactly 1 at 0, 0 for what is subnormal. kExact:
// within 3 units in the last place, in half the instructions of expf. Else off by another |x| /
// 2^24 of its value, which is nothing beside a logit of 11 bits.
template <bool kExact>
__device__ __forceinline__ float exp_in_sum(float x) {
  if constexpr (kExact) {
    return exp_of_finite_in_sum(at_least(x, -128.0f));  // as of -inf, 0
  } else {
    return exp2(x * kLog2E);
  }
}
template <bool kExact>
__device__ __forceinline__ double exp_in_sum(double x) {
  return exp(x);
}

// factor exp(x + lost) for x <= 0 and a lost that is nothing beside x: one rounding less than the
// product with an exponential, which has its own, and half its instructions. A power of t + 32, to
// be spared the subnormal ones, is off by another half unit.
__device__ __forceinline__ float exp_times(float factor, float x, float lost) {
  const float t = x * kLog2E;
  const float power = ex2_approx(t);  // subnormal where it must be
  const float product = factor * power;
  const float rest = lost_by_log2(x, t) + lost;
  // Where t is -inf there is no remainder, but an infinity or a NaN: the largest of integers.
  const float bounded = __int_as_float(::min(__float_as_int(rest), __float_as_int(1.0f)));
  return ::fmaf(product, bounded, product);
}

// a b + c with one rounding, also where the compiler would share the product with another sum.
__device__ __forceinline__ float product_plus(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double product_plus(double a, double b, double c) {
  return ::fma(a, b, c);
}

// a b - c d with one rounding of the difference, the same wherever the compiler meets it.
__device__ __forceinline__ float difference_of_products(float a, float b, float c, float d) {
  return ::fmaf(a, b, -::__fmul_rn(c, d));
}
__device__ __forceinline__ double difference_of_products(double a, double b, double c, double d) {
  return ::fma(a, b, -::__dmul_rn(c, d));
}

// a / (1 + b), b >= 0.
__device__ __forceinline__ float divide_by_one_plus(float a, float b) {
  return divide_by_sum(a, 1.0f, b);
}
__device__ __forceinline__ double divide_by_one_plus(double a, double b) { return a / (1.0 + b); }

__device__ __forceinline__ float zero_unless_nan(float x) { return at_least(-::fabsf(x), 0.0f); }
__device__ __forceinline__ double zero_unless_nan(double x) { return is_nan(x) ? x : 0.0; }

// exp(x) for what forgives an error of |x| / 2^24 of it.
__device__ __forceinline__ float exp_of_half(float x) { return ex2_approx(x * kLog2E); }

// Infinite where b is subnormal.
__device__ __forceinline__ float divide_fast(float a, float b) { return a * rcp_approx_ftz(b); }
// a / b within 2^-22 of it, which half types forgive: a few instructions instead of thirty, none of
// them a branch. Scaled, so that neither b nor 1 / b is subnormal.
__device__ __forceinline__ float divide_half(float a, float b) {
  const float scale = ::fabsf(b) < 0x1p-100f ? 0x1p60f : 0x1p-2f;
  return divide_fast(a * scale, b * scale);
}

// log of a term of a sum, or of what is rounded to a half type: within 2^-22 of it, and 2^-22
// near 1. kSubnormal: x may be.
template <bool kExact, bool kSubnormal = true, typename acc_t>
__device__ __forceinline__ acc_t log_in_sum(acc_t x, float ln_2 = kLn2) {
  if constexpr (kExact || sizeof(acc_t) > 4) {
    return log(x);
  } else {
    return (kSubnormal ? lg2_approx(x) : lg2_approx_ftz(x)) * ln_2;
  }
}

// log(a) - b, as exact as half types need. The hardware's logarithm is that of a number from 1 to
// 2, and so off by 2^-22 at most. The exponent's share is as large as log(a), and b is taken from
// it without a rounding between: where log(a) and b nearly cancel, less is lost than by a rounding
// of log(a). Only for a between 1/2 and 1, where log(a) is small, more may be lost.
__device__ __forceinline__ float log_minus(float a, float b) {
  constexpr uint32_t kOne = 0x3f800000;
  constexpr uint32_t kSmallestNormal = 0x00800000;
  constexpr uint32_t kInfinity = 0x7f800000;
  const uint32_t bits = detail::bits_of_float(a);
  const bool normal = bits - kSmallestNormal < kInfinity - kSmallestNormal;
  const float fraction = normal ? detail::float_from_bits((bits & 0x7fffff) | kOne) : a * 0x1p24f;
  const float exponent =
      normal ? static_cast<float>(static_cast<int32_t>(bits - kOne) >> 23) : -24.0f;
  return ::fmaf(lg2_approx_ftz(fraction), kLn2, ::fmaf(exponent, kLn2, -b));
}

// log(a / b). One logarithm instead of two: two are bound by arithmetic, not by memory. The error
// of the quotient, 2^-23 of it and a rounding, is as much in the logarithm, except where the
// quotient leaves the normal range. There the larger of the two logarithms is at least 43, beside
// which the errors of the hardware's are small.
template <bool kExact>
__device__ __forceinline__ float log_quotient(float a, float b) {
  const float quotient = a == b ? 1.0f : divide_fast(a, b);
  const bool normal =
      a > 0.0f && a < infinity<float>() && quotient > 1.2e-38f && quotient < 3.4e38f;
  if (normal) {
    return kExact ? detail::log_of_normal(quotient) : log_in_sum<false, false>(quotient);
  }
  return (lg2_approx(a) - lg2_approx(b)) * kLn2;
}
template <bool kExact>
static __device__ __attribute__((noinline)) double log_quotient(double a, double b) {
  const double quotient = a / b;
  const bool normal = a > 0.0 && quotient > 1.2e-38 && quotient < 3.4e38;
  return normal ? log(quotient) : log(a) - log(b);
}

#else

// Branch-free, so that loops over them vectorise; less than 1 ulp from the exact value
// over all of fp32, and about as much over fp64. Polynomials by the Remez algorithm, those of fp64
// by Chebyshev interpolation.

LOSSOPS_HOST_DEVICE float log(float x) {
  const bool subnormal = x < 0x1p-126f;
  const float scaled = subnormal ? x * 0x1p23f : x;
  float result = detail::log_of_normal(scaled, subnormal ? -23.0f : 0.0f);
  result = x == 0.0f ? -infinity<float>() : result;
  result = x < 0.0f ? quiet_nan<float>() : result;
  return x < infinity<float>() ? result : x;  // inf, NaN
}

namespace detail {

// x = n ln 2 + r with |r| <= ln 2 / 2; exp x = 2^n (1 + r + r^2 P(r)). round is 1.5 2^23, which
// rounds to an integer when it is added, plus what the low bits of `biased` shall have beside n.
struct ExpParts {
  uint32_t biased;  // n + what round has
  float e;          // r + r^2 P(r)
};

template <typename... Lost>
LOSSOPS_HOST_DEVICE ExpParts split_exp(float x, float round, Lost... lost) {
  const float biased = x * 0x1.715476p+0f + round;
  const float n = biased - round;
  // ln 2 in two parts: the product with the first is exact.
  const float r = ((x - n * 0x1.62ep-1f - n * 0x1.0bfbe8p-15f) + ... + lost);
  float p = 0x1.6a244ep-10f;
  p = p * r + 0x1.1239d4p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  return {bits_of_float(biased), p * (r * r) + r};
}

}  // namespace detail

LOSSOPS_HOST_DEVICE float exp(float x) {
  // Beyond these exp is 0 or infinite. A NaN passes.
  float clamped = -104.0f > x ? -104.0f : x;
  clamped = 89.0f < clamped ? 89.0f : clamped;
  // 2^n may be out of range where the result is not (subnormals, the largest floats): two factors.
  const detail::ExpParts parts = detail::split_exp(clamped, 0x1.8p23f + 254.0f);
  const uint32_t half = parts.biased >> 1;
  const float power = detail::float_from_bits(half << 23);
  return (parts.e * power + power) * detail::float_from_bits((parts.biased - half) << 23);
}

// log(u) of the rounded u = 1 + x, and what rounding took from it.
LOSSOPS_HOST_DEVICE float log1p(float x) {
  const float u = 1.0f + x;
  const float lost = (x - (u - 1.0f)) / u;
  const float result = log(u);
  return u > 0.0f && u < infinity<float>() ? result + lost : result;
}

// x = 2^e (1 + f) with 1 + f in [sqrt 1/2, sqrt 2), s = f / (2 + f);
// log x = e ln 2 + 2 s + s^3 P(s^2), and 2 s = f - f^2 / 2 + s f^2 / 2.
LOSSOPS_HOST_DEVICE double log(double x) {
  const bool subnormal = x < 0x1p-1022;
  const double scaled = subnormal ? x * 0x1p54 : x;
  constexpr uint64_t kRootOfHalf = 0x3fe6a09e667f3bcd;
  const uint64_t offset = detail::bits_of_double(scaled) + (0x3ff0000000000000 - kRootOfHalf);
  // As the low bits of 2^52: not every processor converts 64-bit integers in vectors.
  const double exponent = detail::double_from_bits((offset >> 52) | 0x4330000000000000) -
                          (0x1p52 + 1023.0 + (subnormal ? 54.0 : 0.0));
  const double f = detail::double_from_bits((offset & 0xfffffffffffff) + kRootOfHalf) - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double p = 0x1.2b5900de53b32p-3;
  p = p * z + 0x1.39fe51a7c18f9p-3;
  p = p * z + 0x1.7462b51cb66b1p-3;
  p = p * z + 0x1.c71c62e3f11e6p-3;
  p = p * z + 0x1.2492492df281ap-2;
  p = p * z + 0x1.99999999952d7p-2;
  p = p * z + 0x1.5555555555558p-1;
  const double half_square = 0.5 * f * f;
  // ln 2 in two parts: the product with the first is exact.
  const double small = s * (half_square + z * p) + exponent * 0x1.a39ef35793c76p-33;
  double result = exponent * 0x1.62e42feep-1 - ((half_square - small) - f);
  result = x == 0.0 ? -infinity<double>() : result;
  result = x < 0.0 ? quiet_nan<double>() : result;
  return x < infinity<double>() ? result : x;  // inf, NaN
}

namespace detail {

// As that of float; round is of 1.5 2^52.
struct ExpPartsDouble {
  uint64_t biased;
  double e;
};

LOSSOPS_HOST_DEVICE ExpPartsDouble split_exp(double x, double round) {
  const double biased = x * 0x1.71547652b82fep+0 + round;
  const double n = biased - round;
  const double r = x - n * 0x1.62e42feep-1 - n * 0x1.a39ef35793c76p-33;
  double p = 0x1.1f730349868cep-29;
  p = p * r + 0x1.af4de97ca4194p-26;
  p = p * r + 0x1.27e4db646b17ep-22;
  p = p * r + 0x1.71de0231960ebp-19;
  p = p * r + 0x1.a01a01a6d889cp-16;
  p = p * r + 0x1.a01a01abe7fe1p-13;
  p = p * r + 0x1.6c16c16c162d4p-10;
  p = p * r + 0x1.11111111100dcp-7;
  p = p * r + 0x1.5555555555556p-5;
  p = p * r + 0x1.5555555555557p-3;
  p = p * r + 0x1p-1;
  return {bits_of_double(biased), p * (r * r) + r};
}

}  // namespace detail

LOSSOPS_HOST_DEVICE double exp(double x) {
  double clamped = -746.0 > x ? -746.0 : x;
  clamped = 710.0 < clamped ? 710.0 : clamped;
  const detail::ExpPartsDouble parts = detail::split_exp(clamped, 0x1.8p52 + 2046.0);
  const uint64_t half = parts.biased >> 1;
  const double power = detail::double_from_bits(half << 52);
  return (parts.e * power + power) * detail::double_from_bits((parts.biased - half) << 52);
}

LOSSOPS_HOST_DEVICE double log1p(double x) { return std::log1p(x); }  // of rows, not elements

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t max_number(acc_t a, acc_t b) {
  return a > b || b != b ? a : b;
}

// exp of a term x <= 0 of a sum of exponentials; exactly 1 at 0, 0 for what is subnormal.
template <bool kExact>
LOSSOPS_HOST_DEVICE float exp_in_sum(float x) {
  const float clamped = -88.0f > x ? -88.0f : x;  // there n is -127, and the power 0
  const detail::ExpParts parts = detail::split_exp(clamped, 0x1.8p23f + 127.0f);
  const float power = detail::float_from_bits(parts.biased << 23);
  return parts.e * power + power;
}
template <bool kExact>
LOSSOPS_HOST_DEVICE double exp_in_sum(double x) {
  const double clamped = -709.0 > x ? -709.0 : x;  // there n is -1023, and the power 0
  const detail::ExpPartsDouble parts = detail::split_exp(clamped, 0x1.8p52 + 1023.0);
  const double power = detail::double_from_bits(parts.biased << 52);
  return parts.e * power + power;
}

template <bool kExact, bool kSubnormal = true, typename acc_t>
LOSSOPS_HOST_DEVICE acc_t log_in_sum(acc_t x, float = kLn2) {
  return log(x);
}
LOSSOPS_HOST_DEVICE float log_minus(float a, float b) { return log(a) - b; }
LOSSOPS_HOST_DEVICE float exp_of_half(float x) { return exp(x); }

LOSSOPS_HOST_DEVICE float at_least(float x, float bound) { return x < bound ? bound : x; }
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t zero_unless_nan(acc_t x) {
  return is_nan(x) ? x : acc_t(0);
}

namespace detail {

template <typename result_t>
LOSSOPS_HOST_DEVICE result_t exp_times_as(float factor, float x, float lost) {
  // Where 2^n might be out of range, the power is 2^(n + 64), and the rest comes last.
  const bool deep = x < -45.0f;
  const float round = 0x1.8p23f + (deep ? 127.0f + 64.0f : 127.0f);
  const ExpParts parts = split_exp(x, round, lost);
  const float scaled = factor * float_from_bits(parts.biased << 23);
  const auto result = static_cast<result_t>(parts.e * scaled + scaled);
  // There the power wraps around; -inf.
  return x < -131.0f ? result_t(factor * 0.0f) : result * (deep ? result_t(0x1p-64) : result_t(1));
}

}  // namespace detail

// factor exp(x + lost) for x <= 0 and a lost that is nothing beside x, within 1.5 units in the last
// place.
LOSSOPS_HOST_DEVICE float exp_times(float factor, float x, float lost) {
  return detail::exp_times_as<float>(factor, x, lost);
}
// The same with a factor of 1, as fp64: arithmetic on results that are subnormal in fp32 is slow. 0
// for x < -131.
LOSSOPS_HOST_DEVICE double exp_in_double(float x, float lost) {
  return detail::exp_times_as<double>(1.0f, x, lost);
}

LOSSOPS_HOST_DEVICE float divide_by_one_plus(float a, float b) {
  return static_cast<float>(static_cast<double>(a) / (1.0 + static_cast<double>(b)));
}
LOSSOPS_HOST_DEVICE double divide_by_one_plus(double a, double b) { return a / (1.0 + b); }

LOSSOPS_HOST_DEVICE float divide_fast(float a, float b) { return a / b; }
LOSSOPS_HOST_DEVICE float divide_half(float a, float b) { return a / b; }

// Vectors of logarithms take no branch, so the two stay two.
template <bool kExact, typename acc_t>
LOSSOPS_HOST_DEVICE acc_t log_quotient(acc_t a, acc_t b) {
  return log(a) - log(b);
}

#endif

// log(a / b) of positive numbers with a / b between 1/2 and 2, of half types within 3 units in the
// last place: twice the inverse hyperbolic tangent of s, 2 s + s^3 P(s^2), P by the Remez
// algorithm. Elsewhere, and where a + b is 2^126 or more, it is `otherwise`.
LOSSOPS_HOST_DEVICE double log_quotient_near_1(double, double, double otherwise) {
  return otherwise;
}
LOSSOPS_HOST_DEVICE float log_quotient_near_1(float a, float b, float otherwise) {
  const float sum = a + b;
  const float s = divide_fast(a - b, sum);
  const float z = s * s;
  float p = 0x1.1ef86ep-2f;
  p = p * z + 0x1.1eb612p-2f;
  p = p * z + 0x1.99d27cp-2f;
  p = p * z + 0x1.555500p-1f;
  // Of negative numbers and NaN the bits are larger than those of 2^126.
  constexpr uint32_t kLargeBits = 0x7e800000;
  const bool is_near = ::fabsf(s) < 0x1.555554p-2f && detail::bits_of_float(sum) < kLargeBits;
  return is_near ? s * z * p + (s + s) : otherwise;
}

// tanh within 2 units in the last place. Where it is small, an odd polynomial (Remez; within
// 2^-26): from exponentials alone it would be a difference that cancels.
LOSSOPS_HOST_DEVICE float tanh(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float square = x * x;
  float p = 0x1.18b6acp-6f;
  p = p * square - 0x1.b20e66p-5f;
  p = p * square + 0x1.10e42cp-3f;
  p = p * square - 0x1.5554a4p-2f;
  const float small = (p * square) * magnitude + magnitude;
#if defined(__CUDA_ARCH__)
  const float u = exp_of_half(-2.0f * magnitude);
  const float large = 1.0f - ::__fdividef(2.0f * u, 1.0f + u);
#else
  const float u = exp(-2.0f * magnitude);
  const float large = 1.0f - (2.0f * u) / (1.0f + u);
#endif
  const float result = magnitude < 0.5f ? small : large;
  return x < 0.0f ? -result : result;
}
#if defined(__CUDA_ARCH__)
static __device__ __attribute__((noinline)) double tanh(double x) { return ::tanh(x); }
#else
LOSSOPS_HOST_DEVICE double tanh(double x) { return std::tanh(x); }
#endif

// sum += x; what rounding took from it (Knuth's exact sum). NaN of infinities.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t lost_by_adding(acc_t& sum, acc_t x) {
  const acc_t before = sum;
  sum = before + x;
  const acc_t added = sum - before;
  return (before - (sum - added)) + (x - added);
}

// The same, and lost += that; of infinities, nothing.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void add_exactly(acc_t& sum, acc_t x, acc_t& lost) {
  const acc_t error = lost_by_adding(sum, x);
  lost += is_nan(error) ? acc_t(0) : error;
}

#if !defined(__CUDA_ARCH__)
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t product_plus(acc_t a, acc_t b, acc_t c) {
  return a * b + c;
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t difference_of_products(acc_t a, acc_t b, acc_t c, acc_t d) {
  return a * b - c * d;
}
#endif

LOSSOPS_HOST_DEVICE double exp_times(double factor, double x, double lost) {
  const double exponential = exp(x);
  return factor * (exponential > 0 ? exponential + exponential * lost : exponential);
}
LOSSOPS_HOST_DEVICE double exp_in_double(double x, double lost) { return exp_times(1.0, x, lost); }

}  // namespace lossops::math
