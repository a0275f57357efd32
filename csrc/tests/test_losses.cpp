// The math that both backends share: elementary functions, conversions, loss functors and
// the online softmax.
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "losses/elementwise/registry.h"
#include "losses/rows/cross_entropy.h"
#include "scalar_types.h"
#include "tests/check.h"

namespace lossops {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr float kInfFloat = std::numeric_limits<float>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

float float_of(uint32_t bits) { return detail::bit_cast<float>(bits); }

// ---------------------------------------------------------- elementary functions

// Distance in units of the last place of an fp32 result; infinity counts as 2^128.
double ulp_distance(float got, double want) {
  if (std::isnan(want) || std::isnan(got)) {
    return std::isnan(want) && std::isnan(got) ? 0 : kInf;
  }
  const double a = std::clamp(static_cast<double>(got), -0x1p128, 0x1p128);
  const double b = std::clamp(want, -0x1p128, 0x1p128);
  int exponent;
  std::frexp(b, &exponent);
  return std::fabs(a - b) / std::ldexp(1.0, std::clamp(exponent - 24, -149, 104));
}

void test_exp_and_log() {
  double worst_exp = 0;
  double worst_exp_times = 0;
  double worst_log = 0;
  double worst_log1p = 0;
  constexpr uint64_t kStep = 1531;  // a prime: no bit stands still
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += kStep) {
    const float x = float_of(static_cast<uint32_t>(bits));
    worst_exp = std::max(worst_exp, ulp_distance(math::exp(x), std::exp(static_cast<double>(x))));
    worst_log = std::max(worst_log, ulp_distance(math::log(x), std::log(static_cast<double>(x))));
    worst_log1p =
        std::max(worst_log1p, ulp_distance(math::log1p(x), std::log1p(static_cast<double>(x))));
  }
  // The range that losses use, closer.
  for (int i = 0; i < 2000000; ++i) {
    const float x = -104.5f + static_cast<float>(i) * 1e-4f;
    worst_exp = std::max(worst_exp, ulp_distance(math::exp(x), std::exp(static_cast<double>(x))));
    if (x <= 0) {
      const float factor = 0.3f + static_cast<float>(i % 1000) * 1e-3f;
      const double exact = static_cast<double>(factor) * std::exp(static_cast<double>(x));
      worst_exp_times =
          std::max(worst_exp_times, ulp_distance(math::exp_times(factor, x, 0), exact));
    }
    const float y = static_cast<float>(i) * 1e-6f;
    worst_log = std::max(worst_log, ulp_distance(math::log(y), std::log(static_cast<double>(y))));
    worst_log1p =
        std::max(worst_log1p, ulp_distance(math::log1p(y), std::log1p(static_cast<double>(y))));
  }
  std::printf("ulp: exp %.3f, exp_times %.3f, log %.3f, log1p %.3f\n", worst_exp, worst_exp_times,
              worst_log, worst_log1p);
  CHECK(worst_exp < 1.0);
  CHECK(worst_exp_times < 1.5);
  CHECK(worst_log < 1.0);
  CHECK(worst_log1p < 1.5);

  const float inf = std::numeric_limits<float>::infinity();
  CHECK_CLOSE(math::exp(-inf), 0, 0);
  CHECK_CLOSE(math::exp(inf), kInf, 0);
  CHECK_CLOSE(math::exp(0.0f), 1, 0);
  CHECK_CLOSE(math::exp(-0.0f), 1, 0);
  CHECK_CLOSE(math::exp(std::numeric_limits<float>::quiet_NaN()), kNan, 0);
  CHECK_CLOSE(math::exp(88.8f), kInf, 0);
  CHECK_CLOSE(math::exp(-FLT_MAX), 0, 0);
  CHECK_CLOSE(math::exp_times(3.0f, 0.0f, 0.0f), 3, 0);
  CHECK_CLOSE(math::exp_times(3.0f, -inf, std::numeric_limits<float>::quiet_NaN()), 0, 0);
  CHECK_CLOSE(math::exp_times(3.0f, -FLT_MAX, 0.0f), 0, 0);
  CHECK_CLOSE(math::exp_times(3.0f, std::numeric_limits<float>::quiet_NaN(), 0.0f), kNan, 0);
  CHECK_CLOSE(math::exp_times(0x1p60f, -130.0f, 0.0f), 0x1p60 * std::exp(-130.0), 1e-45);
  CHECK_CLOSE(math::exp_times(FLT_MAX, -45.5f, 0.0f), FLT_MAX * std::exp(-45.5), 1e13);
  CHECK_CLOSE(math::exp_times(1.0f, -2.0f, 0x1p-23f), std::exp(-2.0 + 0x1p-23), 2e-8);
  float sum = 1;
  float lost = 0;
  for (int i = 0; i < 1000; ++i) {
    math::add_exactly(sum, 0x1p-30f, lost);
  }
  CHECK_CLOSE(static_cast<double>(sum) + lost, 1 + 1000 * 0x1p-30, 0);
  math::add_exactly(sum, inf, lost);
  CHECK_CLOSE(sum, kInf, 0);
  CHECK(!math::is_nan(lost));
  CHECK_CLOSE(math::log(0.0f), -kInf, 0);
  CHECK_CLOSE(math::log(-0.0f), -kInf, 0);
  CHECK_CLOSE(math::log(inf), kInf, 0);
  CHECK_CLOSE(math::log(1.0f), 0, 0);
  CHECK_CLOSE(math::log(-1.0f), kNan, 0);
  CHECK_CLOSE(math::log(-inf), kNan, 0);
  CHECK_CLOSE(math::log(-1e-45f), kNan, 0);
  CHECK_CLOSE(math::log(std::numeric_limits<float>::quiet_NaN()), kNan, 0);
  CHECK_CLOSE(math::log1p(0.0f), 0, 0);
  CHECK_CLOSE(math::log1p(-1.0f), -kInf, 0);
  CHECK_CLOSE(math::log1p(inf), kInf, 0);
  CHECK_CLOSE(math::log1p(-2.0f), kNan, 0);
  CHECK_CLOSE(math::log1p(std::numeric_limits<float>::quiet_NaN()), kNan, 0);
}

double ulp_distance(double got, long double want) {
  int exponent;
  std::frexp(static_cast<double>(want), &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent - 53, -1074));
  return static_cast<double>(std::fabs(static_cast<long double>(got) - want)) / unit;
}

// As far as long double is wider than double.
void test_exp_and_log_of_doubles() {
  double worst_exp = 0;
  double worst_exp_in_sum = 0;
  double worst_log = 0;
  std::mt19937_64 generator(1);
  std::uniform_real_distribution<double> uniform;
  for (int i = 0; i < 1000000; ++i) {
    const double unit = uniform(generator);
    for (const double x : {1454 * unit - 744.5, 2 * unit - 1.0, -40 * unit}) {
      const long double want = std::exp(static_cast<long double>(x));
      worst_exp = std::max(worst_exp, ulp_distance(math::exp(x), want));
      if (x <= 0 && x > -708) {
        worst_exp_in_sum =
            std::max(worst_exp_in_sum, ulp_distance(math::exp_in_sum<true>(x), want));
      }
    }
    for (const double x : {unit, 2 * unit, std::ldexp(1 + unit, i % 2040 - 1050)}) {
      if (x > 0) {
        const long double want = std::log(static_cast<long double>(x));
        worst_log = std::max(worst_log, ulp_distance(math::log(x), want));
      }
    }
  }
  std::printf("ulp of doubles: exp %.3f, exp_in_sum %.3f, log %.3f\n", worst_exp, worst_exp_in_sum,
              worst_log);
  CHECK(worst_exp < 1.2);
  CHECK(worst_exp_in_sum < 1.2);
  CHECK(worst_log < 1.2);

  CHECK_CLOSE(math::exp(-kInf), 0, 0);
  CHECK_CLOSE(math::exp(kInf), kInf, 0);
  CHECK_CLOSE(math::exp(709.79), kInf, 0);
  CHECK_CLOSE(math::exp(0.0), 1, 0);
  CHECK_CLOSE(math::exp(-0.0), 1, 0);
  CHECK_CLOSE(math::exp(-DBL_MAX), 0, 0);
  CHECK_CLOSE(math::exp(kNan), kNan, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(0.0), 1, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(-kInf), 0, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(kNan), kNan, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(0.0f), 1, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(-kInfFloat), 0, 0);
  CHECK_CLOSE(math::exp_in_sum<true>(std::numeric_limits<float>::quiet_NaN()), kNan, 0);
  CHECK_CLOSE(math::log(0.0), -kInf, 0);
  CHECK_CLOSE(math::log(-0.0), -kInf, 0);
  CHECK_CLOSE(math::log(kInf), kInf, 0);
  CHECK_CLOSE(math::log(1.0), 0, 0);
  CHECK_CLOSE(math::log(-1.0), kNan, 0);
  CHECK_CLOSE(math::log(-kInf), kNan, 0);
  CHECK_CLOSE(math::log(kNan), kNan, 0);
}

// -------------------------------------------------------------------- conversions

// A format of 1 sign bit, exponent_bits and mantissa_bits, read by its definition.
double value_of_bits(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = (bits >> (exponent_bits + mantissa_bits)) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? kNan : sign * kInf;
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                               : std::ldexp(1 + fraction, exponent - bias));
}

bool is_nan_bits(uint16_t bits, int exponent_bits, int mantissa_bits) {
  return std::isnan(value_of_bits(bits, exponent_bits, mantissa_bits));
}

template <typename scalar_t>
void test_conversions(int exponent_bits, int mantissa_bits) {
  const uint32_t infinity_bits = ((1u << exponent_bits) - 1) << mantissa_bits;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double want = value_of_bits(bits, exponent_bits, mantissa_bits);
    const scalar_t scalar{static_cast<uint16_t>(bits)};
    CHECK_CLOSE(to_acc<float>(scalar), want, 0);
    CHECK_CLOSE(to_acc<double>(scalar), want, 0);
    const scalar_t back = from_acc<scalar_t>(to_acc<float>(scalar));
    if (std::isnan(want)) {
      CHECK(is_nan_bits(back.bits, exponent_bits, mantissa_bits));
    } else {
      CHECK(back.bits == bits);
    }
  }
  // Between two neighbours: the nearer, at the middle the even one. The neighbour of the
  // largest value is what the next exponent would begin with.
  const int extra = 23 - mantissa_bits;
  for (uint32_t bits = 0; bits < infinity_bits; ++bits) {
    const double low = value_of_bits(bits, exponent_bits, mantissa_bits);
    const double high = bits + 1 == infinity_bits
                            ? 2 * low - value_of_bits(bits - 1, exponent_bits, mantissa_bits)
                            : value_of_bits(bits + 1, exponent_bits, mantissa_bits);
    const double middle = (low + high) / 2;
    const double fraction = std::ldexp(high - low, -extra);
    const uint32_t even = bits + (bits & 1);
    for (const double sign : {1.0, -1.0}) {
      const uint32_t sign_bit = sign < 0 ? 0x8000 : 0;
      const auto convert = [&](double value) {
        return from_acc<scalar_t>(static_cast<float>(sign * value)).bits;
      };
      CHECK(convert(middle) == (sign_bit | even));
      if (static_cast<double>(static_cast<float>(middle + fraction)) == middle + fraction) {
        CHECK(convert(middle + fraction) == (sign_bit | (bits + 1)));
        CHECK(convert(middle - fraction) == (sign_bit | bits));
      }
    }
  }
  CHECK(from_acc<scalar_t>(std::numeric_limits<float>::infinity()).bits == infinity_bits);
  CHECK(is_nan_bits(from_acc<scalar_t>(std::numeric_limits<float>::quiet_NaN()).bits, exponent_bits,
                    mantissa_bits));
  CHECK(is_nan_bits(from_acc<scalar_t>(float_of(0x7f800001u)).bits, exponent_bits, mantissa_bits));
  CHECK(is_nan_bits(from_acc<scalar_t>(float_of(0xffffffffu)).bits, exponent_bits, mantissa_bits));
}

void test_runtime_dtypes() {
  unsigned char storage[16] = {};
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    store_as<double>(storage, dtype, 1, -2.5);
    CHECK_CLOSE(load_as<double>(storage, dtype, 1), -2.5, 0);
    CHECK_CLOSE(load_as<float>(storage, dtype, 1), -2.5, 0);
  }
  const int64_t int64 = -7;
  const int32_t int32 = -7;
  const int16_t int16 = -7;
  const int8_t int8 = -7;
  const uint8_t uint8 = 249;
  CHECK_CLOSE(load_as<float>(&int64, DType::kInt64, 0), -7, 0);
  CHECK_CLOSE(load_as<float>(&int32, DType::kInt32, 0), -7, 0);
  CHECK_CLOSE(load_as<float>(&int16, DType::kInt16, 0), -7, 0);
  CHECK_CLOSE(load_as<float>(&int8, DType::kInt8, 0), -7, 0);
  CHECK_CLOSE(load_as<float>(&uint8, DType::kUInt8, 0), 249, 0);
  CHECK_CLOSE(load_as<float>(&uint8, DType::kBool, 0), 249, 0);
}

// --------------------------------------------------------------- elementwise terms

// Gradients against central differences of the value.
template <typename Term>
void check_gradients(const Term& term, double x, double t) {
  constexpr double kStep = 1e-6;
  const double by_x = (term.forward(x + kStep, t) - term.forward(x - kStep, t)) / (2 * kStep);
  const double by_t = (term.forward(x, t + kStep) - term.forward(x, t - kStep)) / (2 * kStep);
  CHECK_CLOSE(term.backward_input(x, t), by_x, 1e-6 * (1 + std::fabs(by_x)));
  CHECK_CLOSE(term.backward_target(x, t), by_t, 1e-6 * (1 + std::fabs(by_t)));
}

void test_mse() {
  const MseTerm term;
  for (const double x : {-3.0, 0.0, 0.5, 100.0}) {
    for (const double t : {-2.0, 0.0, 0.25}) {
      CHECK_CLOSE(term.forward(x, t), (x - t) * (x - t), 1e-12);
      CHECK_CLOSE(term.forward(static_cast<float>(x), static_cast<float>(t)), (x - t) * (x - t), 0);
      check_gradients(term, x, t);
    }
  }
  CHECK_CLOSE(term.forward(kInf, 0.0), kInf, 0);
  CHECK_CLOSE(term.forward(kInf, kInf), kNan, 0);
  CHECK_CLOSE(term.forward(kNan, 0.0), kNan, 0);
}

// The definition, with the limits of SEMANTICS: nothing lost where the target is zero.
double kl_div_value(double input, double target, bool log_target, bool log_input) {
  const double x = log_input ? input : std::log(input);
  const double t = log_target ? std::exp(target) : target;
  const double log_t = log_target ? target : std::log(target);
  if (std::isnan(x) || std::isnan(t)) {
    return kNan;
  }
  return t == 0 ? 0 : t * (log_t - x);
}

template <bool kLogTarget, bool kLogInput>
void test_kl_div_term() {
  const KlDivTerm<kLogTarget, kLogInput> term;
  test::subject() = std::string("kl_div, log_target ") + (kLogTarget ? "true" : "false") +
                    ", log_input " + (kLogInput ? "true" : "false");
  for (const double p : {1e-3, 0.2, 0.5, 0.99, 1.0}) {
    for (const double q : {1e-3, 0.3, 0.5, 1.0}) {
      const double input = kLogInput ? std::log(p) : p;
      const double target = kLogTarget ? std::log(q) : q;
      const double want = kl_div_value(input, target, kLogTarget, kLogInput);
      CHECK_CLOSE(term.forward(input, target), want, 1e-12);
      const double scale = std::max({1.0, std::fabs(std::log(p)), std::fabs(std::log(q))});
      CHECK_CLOSE(term.forward(static_cast<float>(input), static_cast<float>(target)), want,
                  8 * 0x1p-24 * q * scale + 1e-7 * std::fabs(want));
      check_gradients(term, input, target);
    }
  }
  const double some_input = kLogInput ? -1.0 : 0.4;
  const double zero_target = kLogTarget ? -kInf : 0.0;
  const double impossible = kLogInput ? -kInf : 0.0;
  const double half_target = kLogTarget ? std::log(0.5) : 0.5;
  CHECK_CLOSE(term.forward(some_input, zero_target), 0, 0);
  CHECK_CLOSE(term.forward(impossible, zero_target), 0, 0);
  CHECK_CLOSE(term.forward(impossible, half_target), kInf, 0);
  CHECK_CLOSE(term.forward(kNan, zero_target), kNan, 0);
  CHECK_CLOSE(term.forward(kNan, half_target), kNan, 0);
  CHECK_CLOSE(term.forward(some_input, kNan), kNan, 0);
  CHECK_CLOSE(term.backward_input(some_input, zero_target), 0, 0);
  CHECK_CLOSE(term.backward_input(some_input, kNan), kNan, 0);
  CHECK_CLOSE(term.backward_target(kNan, half_target), kNan, 0);
  if constexpr (kLogTarget) {
    CHECK_CLOSE(term.backward_target(some_input, zero_target), 0, 0);
    CHECK_CLOSE(term.backward_target(impossible, zero_target), 0, 0);
  } else {
    CHECK_CLOSE(term.forward(some_input, -0.0), 0, 0);
    CHECK_CLOSE(term.forward(some_input, -0.1), kNan, 0);
    CHECK_CLOSE(term.backward_target(some_input, 0.0), kNan, 0);
  }
  if constexpr (kLogInput && !kLogTarget) {
    CHECK_CLOSE(term.backward_input(some_input, -0.1), 0.1, 0);
  }
}

// Run-time parameters reach the term they name.
void test_registry() {
  test::subject() = "registry";
  LossParams params;
  params.values[0] = 1;  // log_target
  double value = 0;
  visit_elementwise_loss(ElementwiseLoss::kl_div, params,
                         [&](auto term) { value = term.forward(0.25, std::log(0.5)); });
  CHECK_CLOSE(value, kl_div_value(0.25, std::log(0.5), true, false), 1e-15);
  params.values[0] = 0;
  params.values[1] = 1;  // log_input
  visit_elementwise_loss(ElementwiseLoss::kl_div, params,
                         [&](auto term) { value = term.forward(-1.5, 0.5); });
  CHECK_CLOSE(value, kl_div_value(-1.5, 0.5, false, true), 1e-15);
  visit_elementwise_loss(ElementwiseLoss::mse_loss, LossParams{},
                         [&](auto term) { value = term.forward(3.0, 1.0); });
  CHECK_CLOSE(value, 4, 0);
}

// ------------------------------------------------------------------ online softmax

struct Row {
  std::vector<double> x;
  std::vector<double> q;
};

DenseOnlineSoftmax<double> state_of(const Row& row, size_t begin, size_t end) {
  DenseOnlineSoftmax<double> state;
  for (size_t c = begin; c < end; ++c) {
    state.raise_max(row.x[c]);
    state.add_below_max(row.x[c], softmax_shift(state.max), row.q[c]);
  }
  return state;
}

// sum_c q_c (lse - x_c), where a zero coefficient counts 0.
double row_loss(const Row& row) {
  double max = -kInf;
  for (const double x : row.x) {
    max = std::max(max, x);
  }
  double sum = 0;
  for (const double x : row.x) {
    sum += std::exp(x - max);
  }
  double loss = 0;
  for (size_t c = 0; c < row.x.size(); ++c) {
    loss += row.q[c] == 0 ? 0 : row.q[c] * (std::log(sum) + (max - row.x[c]));
  }
  return loss;
}

DenseOnlineSoftmax<double> combined(DenseOnlineSoftmax<double> a, DenseOnlineSoftmax<double> b) {
  a.raise_max(b.max);
  b.raise_max(a.max);
  a.add(b);
  return a;
}

double row_loss(const DenseOnlineSoftmax<double>& row) {
  return dense_row_loss(row.rest(), row.q_sum, row.dot);
}

void check_same(const DenseOnlineSoftmax<double>& a, const DenseOnlineSoftmax<double>& b) {
  CHECK_CLOSE(a.max, b.max, 0);
  CHECK_CLOSE(a.rest(), b.rest(), 1e-13 * std::fabs(b.rest()));
  CHECK_CLOSE(a.q_sum, b.q_sum, 1e-13 * std::fabs(b.q_sum));
  CHECK_CLOSE(a.dot, b.dot, 1e-12 * (1 + std::fabs(b.dot)));
}

void test_online_softmax() {
  test::subject() = "online softmax";
  std::mt19937_64 generator(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int trial = 0; trial < 2000; ++trial) {
    Row row;
    const size_t length = 1 + generator() % 12;
    for (size_t c = 0; c < length; ++c) {
      row.x.push_back(uniform(generator) < 0.2 ? -kInf : 20 * uniform(generator) - 10);
      row.q.push_back(std::isinf(row.x[c]) || uniform(generator) < 0.2 ? 0 : uniform(generator));
    }
    row.x[generator() % length] = 3;
    const size_t first = generator() % (length + 1);
    const size_t second = first + generator() % (length - first + 1);
    const auto a = state_of(row, 0, first);
    const auto b = state_of(row, first, second);
    const auto c = state_of(row, second, length);
    const auto left = combined(combined(a, b), c);
    const auto nested = combined(a, combined(b, c));
    check_same(left, nested);
    const auto whole = state_of(row, 0, length);
    check_same(left, whole);
    CHECK_CLOSE(row_loss(whole), row_loss(row), 1e-12 * (1 + row_loss(row)));
    CHECK_CLOSE(row_loss(left), row_loss(row), 1e-12 * (1 + row_loss(row)));
    check_same(combined(whole, DenseOnlineSoftmax<double>()), whole);
    check_same(combined(DenseOnlineSoftmax<double>(), whole), whole);
  }

  const DenseOnlineSoftmax<double> identity;
  check_same(combined(identity, identity), identity);

  CHECK_CLOSE(row_loss(state_of({{-kInf, -kInf}, {0.5, 0.5}}, 0, 2)), kNan, 0);
  CHECK_CLOSE(row_loss(state_of({{1, kNan}, {1, 0}}, 0, 2)), kNan, 0);
  CHECK_CLOSE(row_loss(state_of({{1, kInf}, {1, 0}}, 0, 2)), kNan, 0);
  CHECK_CLOSE(row_loss(state_of({{1, -kInf}, {0.5, 0.5}}, 0, 2)), kInf, 0);
  CHECK_CLOSE(row_loss(state_of({{-kInf, 1}, {0.5, 0.5}}, 0, 2)), kInf, 0);
}

void test_row_softmax() {
  test::subject() = "softmax of a row";
  const double e = std::exp(-1.0);
  OnlineSoftmax<float> row;
  for (const float x : {1.0f, 1000.0f, 999.0f}) {
    row.raise_max(x);
    row.add_below_max(x, softmax_shift(row.max));
  }
  CHECK_CLOSE(sparse_row_loss(row.max, row.rest(), 999.0f, 1.0f), 1 + std::log1p(e), 1e-6);
  CHECK_CLOSE(sparse_row_loss(row.max, row.rest(), -kInfFloat, 1.0f), kInf, 0);
  const auto softmax = RowSoftmax<float>::of(row.max, row.rest(), 2.0f, 0.5f);
  CHECK_CLOSE(softmax.gradient(999.0f), e / (1 + e), 1e-7);
  CHECK_CLOSE(softmax.gradient_at_index(999.0f), -1 / (1 + e), 1e-7);
  CHECK_CLOSE(softmax.surprise(999.0f), 1 + std::log1p(e), 1e-6);
  CHECK_CLOSE(softmax.gradient(-kInfFloat), 0, 0);

  // A maximum beside which the others would be rounded away.
  OnlineSoftmax<float> confident;
  double rest = 0;
  for (const float x : {0.0f, -19.0f, -18.0f, -30.0f}) {
    confident.raise_max(x);
    confident.add_below_max(x, softmax_shift(confident.max));
    rest += x < 0 ? std::exp(static_cast<double>(x)) : 0;
  }
  CHECK_CLOSE(confident.rest(), rest, 4e-7 * rest);
  CHECK_CLOSE(sparse_row_loss(0.0f, confident.rest(), 0.0f, 1.0f), std::log1p(rest), 4e-7 * rest);
  const auto peaked = RowSoftmax<float>::of(0.0f, confident.rest(), 1.0f, 1.0f);
  CHECK_CLOSE(peaked.gradient_at_index(0.0f), -rest / (1 + rest), 4e-7 * rest);
  CHECK_CLOSE(peaked.dense_gradient(0.0f, 1.0f, 1.0f, 1.0f), -rest / (1 + rest), 4e-7 * rest);
  CHECK_CLOSE(peaked.dense_gradient(-18.0f, 1.0f, 1.0f, 0.0f), std::exp(-18.0) / (1 + rest),
              4e-7 * rest);

  CHECK_CLOSE(smoothed(1.0, 0.1, 0.1 / 4), 0.925, 1e-15);
  CHECK_CLOSE(smoothed(0.0, 0.1, 0.1 / 4), 0.025, 1e-15);
}

}  // namespace
}  // namespace lossops

int main() {
  using namespace lossops;
  test::subject() = "elementary functions";
  test_exp_and_log();
  test_exp_and_log_of_doubles();
  test::subject() = "float16";
  test_conversions<half_t>(5, 10);
  test::subject() = "bfloat16";
  test_conversions<bfloat16_t>(8, 7);
  test::subject() = "dtypes";
  test_runtime_dtypes();
  test::subject() = "mse_loss";
  test_mse();
  test_kl_div_term<false, false>();
  test_kl_div_term<false, true>();
  test_kl_div_term<true, false>();
  test_kl_div_term<true, true>();
  test_registry();
  test_online_softmax();
  test_row_softmax();
  return test::exit_status();
}
