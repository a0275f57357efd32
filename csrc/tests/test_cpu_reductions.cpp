// The CPU launchers against plain loops in fp64, over sizes, layouts, dtypes and numbers of
// threads.
#include <algorithm>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "launchers.h"
#include "tests/cases.h"
#include "tests/check.h"

namespace lossops {
namespace {

using test::CrossEntropyCase;
using test::ElementwiseCase;
using test::Layout;
using test::on_host;
using test::Random;
using test::TestTensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// ------------------------------------------------------------------------ threads

using Body = void (*)(void*, int64_t, int64_t);

void serial(int64_t count, int64_t /*grain*/, Body body, void* data) { body(data, 0, count); }

void one_by_one_backwards(int64_t count, int64_t /*grain*/, Body body, void* data) {
  for (int64_t i = count; i > 0; --i) {
    body(data, i - 1, i);
  }
}

void three_threads(int64_t count, int64_t /*grain*/, Body body, void* data) {
  std::vector<std::thread> threads;
  const int64_t cuts[4] = {0, count / 7, count / 2, count};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back(body, data, cuts[i], cuts[i + 1]);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Runs a launcher under every split of its work, and checks that the results have the same
// bits.
template <typename Run>
void run_everywhere(const std::vector<TestTensor*>& results, const Run& run) {
  std::vector<std::vector<unsigned char>> first;
  for (auto* parallel_for : {serial, one_by_one_backwards, three_threads}) {
    for (TestTensor* result : results) {
      std::fill(result->bytes.begin(), result->bytes.end(), 0xa5);
    }
    run(cpu::Context{parallel_for});
    for (size_t i = 0; i < results.size(); ++i) {
      if (first.size() <= i) {
        first.push_back(results[i]->bytes);
      }
      CHECK(first[i] == results[i]->bytes);
    }
  }
}

void run_forward(ElementwiseCase& c) {
  run_everywhere({&c.output, &c.mean_terms}, [&](cpu::Context context) {
    const ElementwiseForwardArgs args = c.forward_args(on_host);
    std::vector<double> scratch(static_cast<size_t>(cpu::elementwise_forward_scratch(args)));
    cpu::launch_elementwise_forward(args, scratch.data(), context);
  });
}

void run_backward(ElementwiseCase& c) {
  run_everywhere({&c.grad_input, &c.grad_target, &c.grad_weight}, [&](cpu::Context context) {
    cpu::launch_elementwise_backward(c.backward_args(on_host), context);
  });
}

void run_backward_reduce(ElementwiseCase& c) {
  run_everywhere({&c.grad_input, &c.grad_target, &c.grad_weight}, [&](cpu::Context context) {
    const ElementwiseBackwardReduceArgs args = c.backward_args(on_host);
    std::vector<double> scratch(
        static_cast<size_t>(cpu::elementwise_backward_reduce_scratch(args)));
    cpu::launch_elementwise_backward_reduce(args, scratch.data(), context);
  });
}

// ------------------------------------------------------------------- elementwise

// Loops over fp64 data must be more exact than what they judge.
using real = long double;

// A number and how far from it a result computed in the accumulation type may be.
struct Expected {
  real value = 0;
  real tolerance = 0;

  void add(const Expected& other) {
    value += other.value;
    tolerance += other.tolerance;
  }
};

// Of a sum of some ten thousand terms of one sign in fp64, relative.
constexpr real kSumError = 256 * 0x1p-53L;

void check_element(const TestTensor& result, int64_t i, const Expected& want) {
  if (result.dtype == DType::kFloat16 && std::fabs(want.value) > 65504) {
    return;  // rounds to infinity, or nearly so
  }
  const real rounding = test::epsilon(result.dtype) * std::fabs(want.value);
  CHECK_CLOSE(result.at(i), want.value,
              want.tolerance + 1.01L * rounding + test::underflow(result.dtype));
}

struct ElementwiseReference {
  const ElementwiseCase& c;
  real epsilon;

  explicit ElementwiseReference(const ElementwiseCase& c_)
      : c(c_), epsilon(c.acc_double() ? 0x1p-53 : 0x1p-24) {}

  real x(int64_t i) const { return c.input.at(i); }
  real t(int64_t i) const { return c.target.at(i); }
  real w(int64_t i) const { return c.weight.absent() ? 1 : c.weight.at(i); }
  bool is_mse() const { return c.loss == ElementwiseLoss::mse_loss; }
  real log_p(int64_t i) const { return c.log_input ? x(i) : std::log(x(i)); }
  real probability(int64_t i) const { return c.log_target ? std::exp(t(i)) : t(i); }
  real log_t(int64_t i) const { return c.log_target ? t(i) : std::log(t(i)); }

  Expected expect(real value, real magnitude) const { return {value, 16 * epsilon * magnitude}; }

  // Without the weight.
  Expected loss(int64_t i) const {
    if (is_mse()) {
      const real difference = x(i) - t(i);
      return expect(difference * difference, difference * difference);
    }
    if (probability(i) == 0) {
      return {0, 0};
    }
    const real magnitude = std::fabs(log_t(i)) + std::fabs(log_p(i));
    return expect(probability(i) * (log_t(i) - log_p(i)), probability(i) * (1 + magnitude));
  }

  Expected weighted_loss(int64_t i) const {
    const Expected plain = loss(i);
    return {w(i) * plain.value, w(i) * (plain.tolerance + 2 * epsilon * std::fabs(plain.value))};
  }

  real scale(int64_t i) const {
    if (c.reduction == Reduction::kNone) {
      return c.grad_output.at(i);
    }
    const real grad_output = c.grad_output.at(0);
    if (c.reduction == Reduction::kSum) {
      return grad_output;
    }
    return grad_output /
           (c.weight.absent() ? static_cast<real>(c.input.numel()) : c.mean_terms.at(0));
  }

  Expected grad_input(int64_t i) const {
    const real factor = scale(i) * w(i);
    const real slope =
        is_mse() ? 2 * (x(i) - t(i)) : (c.log_input ? -probability(i) : -probability(i) / x(i));
    return expect(factor * slope, std::fabs(factor * slope));
  }

  Expected grad_target(int64_t i) const {
    const real factor = scale(i) * w(i);
    if (is_mse()) {
      return expect(factor * 2 * (t(i) - x(i)), std::fabs(factor * 2 * (t(i) - x(i))));
    }
    if (probability(i) == 0) {
      return {c.log_target ? 0 : kNan, 0};
    }
    const real outer = c.log_target ? factor * probability(i) : factor;
    const real magnitude = std::fabs(log_t(i)) + std::fabs(log_p(i)) + 1;
    return expect(outer * (log_t(i) + 1 - log_p(i)), std::fabs(outer) * magnitude);
  }

  Expected grad_weight(int64_t i) const {
    const real share = c.reduction == Reduction::kMean ? c.mean_terms.at(1) / c.weight_copies() : 0;
    const Expected plain = loss(i);
    return expect(scale(i) * (plain.value - share),
                  std::fabs(scale(i)) * (std::fabs(plain.value) + std::fabs(share)));
  }
};

void check_forward(const ElementwiseCase& c) {
  const ElementwiseReference reference(c);
  const int64_t numel = c.input.numel();
  if (c.reduction == Reduction::kNone) {
    for (int64_t i = 0; i < numel; ++i) {
      check_element(c.output, i, reference.weighted_loss(i));
    }
    return;
  }
  Expected sum;
  real weight = 0;
  for (int64_t i = 0; i < numel; ++i) {
    sum.add(reference.weighted_loss(i));
    weight += reference.w(i);
  }
  sum.tolerance += kSumError * std::fabs(sum.value);
  if (c.reduction == Reduction::kMean) {
    const real denominator = weight / c.weight_copies();
    sum.value /= denominator;
    sum.tolerance /= denominator;
    if (!c.weight.absent()) {
      CHECK_CLOSE(c.mean_terms.at(0), denominator, 1e-12 * denominator);
      CHECK_CLOSE(c.mean_terms.at(1), sum.value, sum.tolerance);
    }
  }
  check_element(c.output, 0, sum);
}

using Gradient = Expected (ElementwiseReference::*)(int64_t) const;

// The gradient of a broadcast operand sums over its copies.
void check_gradient(const ElementwiseCase& c, const TestTensor& result, Gradient gradient) {
  const ElementwiseReference reference(c);
  int64_t kept = 1;
  for (size_t dim = 0; dim < c.sizes.size(); ++dim) {
    kept *= result.strides[dim] != 0 || c.sizes[dim] == 1 ? c.sizes[dim] : 1;
  }
  std::vector<Expected> sums(static_cast<size_t>(kept));
  for (int64_t i = 0; i < c.input.numel(); ++i) {
    sums[static_cast<size_t>(i % kept)].add((reference.*gradient)(i));
  }
  for (int64_t i = 0; i < kept; ++i) {
    Expected& sum = sums[static_cast<size_t>(i)];
    sum.tolerance += kSumError * std::fabs(sum.value);
    check_element(result, i, sum);
  }
}

// Forward leaves what backward computes for a grad_output of 1, bit by bit.
void check_gradients_of_forward(ElementwiseCase c) {
  c.grad_output.set(0, 1);
  run_backward(c);
  const std::vector<uint8_t> output = c.output.bytes;
  const std::vector<uint8_t> of_input = c.grad_input.bytes;
  const std::vector<uint8_t> of_target = c.grad_target.bytes;
  for (const bool wants_input : {true, false}) {
    for (const bool wants_target : {true, false}) {
      run_everywhere({&c.output, &c.grad_input, &c.grad_target}, [&](cpu::Context context) {
        ElementwiseForwardArgs args = c.forward_args(on_host);
        args.grad_input = wants_input ? operand_of(c.grad_input, on_host) : Operand{};
        args.grad_target = wants_target ? operand_of(c.grad_target, on_host) : Operand{};
        std::vector<double> scratch(static_cast<size_t>(cpu::elementwise_forward_scratch(args)));
        cpu::launch_elementwise_forward(args, scratch.data(), context);
      });
      CHECK(c.output.bytes == output);
      CHECK(!wants_input || c.grad_input.bytes == of_input);
      CHECK(!wants_target || c.grad_target.bytes == of_target);
    }
  }
}

void test_elementwise(Random& random, const std::vector<int64_t>& sizes, Layout layout) {
  const int ndim = static_cast<int>(sizes.size());
  ElementwiseCase c = test::random_elementwise(random, sizes, layout, ndim);
  test::subject() = c.describe();
  run_forward(c);
  check_forward(c);

  c.grad_input = TestTensor(c.input.dtype, sizes, layout);
  c.grad_target = TestTensor(c.target.dtype, sizes, layout);
  if (!c.weight.absent()) {
    c.grad_weight = TestTensor(c.weight.dtype, sizes, layout);
  }
  run_backward(c);
  check_gradient(c, c.grad_input, &ElementwiseReference::grad_input);
  check_gradient(c, c.grad_target, &ElementwiseReference::grad_target);
  if (c.reduction != Reduction::kNone && c.weight.absent()) {
    check_gradients_of_forward(c);
  }
  if (!c.weight.absent()) {
    check_gradient(c, c.grad_weight, &ElementwiseReference::grad_weight);
  }
}

void test_broadcast(Random& random, const std::vector<int64_t>& sizes, Layout layout,
                    int num_kept) {
  ElementwiseCase c = test::random_elementwise(random, sizes, layout, num_kept);
  test::subject() = c.describe() + " kept dims " + std::to_string(num_kept);
  run_forward(c);
  check_forward(c);

  c.grad_input = TestTensor(c.input.dtype, sizes, layout);
  run_backward(c);
  check_gradient(c, c.grad_input, &ElementwiseReference::grad_input);
  c.grad_input = TestTensor();

  const auto gradient_like = [&](const TestTensor& operand) {
    std::vector<bool> broadcast;
    for (int dim = 0; dim < static_cast<int>(sizes.size()); ++dim) {
      broadcast.push_back(dim >= num_kept);
    }
    return TestTensor(operand.dtype, sizes, layout, broadcast);
  };
  c.grad_target = gradient_like(c.target);
  run_backward_reduce(c);
  check_gradient(c, c.grad_target, &ElementwiseReference::grad_target);
  c.grad_target = TestTensor();
  if (!c.weight.absent()) {
    c.grad_weight = gradient_like(c.weight);
    run_backward_reduce(c);
    check_gradient(c, c.grad_weight, &ElementwiseReference::grad_weight);
  }
}

// A sum of one sign is within 2 ulp of the exact one.
void test_long_sum() {
  test::subject() = "long fp32 sum";
  Random random(3);
  constexpr int64_t kNumel = (1 << 22) + 77;
  for (const bool constant : {false, true}) {
    ElementwiseCase c;
    c.sizes = {kNumel};
    c.contiguous = true;
    c.input = TestTensor(DType::kFloat32, c.sizes, Layout::kDense);
    c.target = c.input;
    c.input.fill([&] { return constant ? 0.1 : random.uniform(0, 10); });
    c.output = TestTensor(DType::kFloat32, {}, Layout::kDense);
    c.reduction = Reduction::kSum;
    run_forward(c);
    double sum = 0;
    for (int64_t i = 0; i < kNumel; ++i) {
      const double x = c.input.at(i);
      sum += x * x;
    }
    CHECK_CLOSE(c.output.at(0), sum, 2 * 0x1p-23 * sum);
  }
}

// mean([300, 0, 0, 0]^2) is 22500, although the sum overflows fp16.
void test_half_mean() {
  test::subject() = "fp16 mean";
  ElementwiseCase c;
  c.sizes = {4};
  c.input = TestTensor(DType::kFloat16, c.sizes, Layout::kDense);
  c.target = c.input;
  c.input.set(0, 300);
  c.output = TestTensor(DType::kFloat16, {}, Layout::kDense);
  run_forward(c);
  CHECK_CLOSE(c.output.at(0), 22496, 0);  // 22500 rounded to fp16
}

// An integral operand and a floating one.
void test_integer_target() {
  test::subject() = "int64 target";
  ElementwiseCase c;
  c.sizes = {3};
  c.input = TestTensor(DType::kFloat32, c.sizes, Layout::kDense);
  c.target = TestTensor(DType::kInt64, c.sizes, Layout::kDense);
  for (int64_t i = 0; i < 3; ++i) {
    c.input.set(i, 0.5);
    c.target.set(i, static_cast<double>(i - 1));
  }
  c.reduction = Reduction::kSum;
  c.output = TestTensor(DType::kFloat32, {}, Layout::kDense);
  run_forward(c);
  CHECK_CLOSE(c.output.at(0), 2.25 + 0.25 + 0.25, 1e-6);
}

void test_empty() {
  for (const Reduction reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    ElementwiseCase c;
    test::subject() = "empty";
    c.sizes = {0};
    c.reduction = reduction;
    c.input = TestTensor(DType::kFloat32, c.sizes, Layout::kDense);
    c.target = c.input;
    c.output = TestTensor(DType::kFloat32, {}, Layout::kDense);
    c.grad_output = c.output;
    run_forward(c);
    if (reduction != Reduction::kNone) {
      CHECK_CLOSE(c.output.at(0), reduction == Reduction::kMean ? kNan : 0, 0);
    }
    c.grad_input = c.input;
    run_backward(c);

    // (4, 0) with a target of shape (4, 1): nothing to sum.
    c.sizes = {4, 0};
    c.num_kept = 1;
    c.grad_output.set(0, 1);
    c.input = TestTensor(DType::kFloat32, c.sizes, Layout::kDense);
    c.target = TestTensor(DType::kFloat32, c.sizes, Layout::kDense, {false, true});
    c.grad_input = TestTensor();
    c.grad_target = c.target;
    run_backward_reduce(c);
    if (reduction != Reduction::kMean) {
      for (int i = 0; i < 4; ++i) {
        CHECK_CLOSE(load_as<float>(c.grad_target.bytes.data(), DType::kFloat32, i), 0, 0);
      }
    }
  }
}

// ------------------------------------------------------------------ cross entropy

void run_forward(CrossEntropyCase& c, int64_t& first_invalid_row) {
  run_everywhere({&c.output, &c.row_stats, &c.mean_terms}, [&](cpu::Context context) {
    CrossEntropyForwardArgs args = c.forward_args(on_host);
    args.first_invalid_row = &first_invalid_row;
    first_invalid_row = -2;
    const CrossEntropyPlan plan = cpu::plan_cross_entropy_forward(args);
    std::vector<double> scratch(static_cast<size_t>(plan.scratch));
    cpu::launch_cross_entropy_forward(args, plan, scratch.data(), context);
  });
}

void run_backward(CrossEntropyCase& c) {
  run_everywhere({&c.grad_input, &c.grad_target, &c.grad_weight}, [&](cpu::Context context) {
    const CrossEntropyBackwardArgs args = c.backward_args(on_host);
    std::vector<double> scratch(static_cast<size_t>(cpu::cross_entropy_backward_scratch(args)));
    cpu::launch_cross_entropy_backward(args, scratch.data(), context);
  });
}

struct CrossEntropyReference {
  const CrossEntropyCase& c;
  real epsilon;
  int64_t rows;

  // Sums are in fp64 always: there the number of classes counts.
  explicit CrossEntropyReference(const CrossEntropyCase& c_)
      : c(c_),
        epsilon(c.acc_double() ? 0x1p-53 * (1 + static_cast<double>(c.num_classes) / 32) : 0x1p-24),
        rows(c.num_rows()) {}

  real x(int64_t row, int64_t k) const { return c.input.at(row + k * rows); }
  real w(int64_t k) const { return c.weight.absent() ? 1 : c.weight.at(k); }
  int64_t index(int64_t row) const { return static_cast<int64_t>(c.target.at(row)); }
  bool ignored(int64_t row) const {
    return !c.target_is_probability && index(row) == c.ignore_index;
  }
  bool invalid(int64_t row) const {
    return !c.target_is_probability && !ignored(row) &&
           (index(row) < 0 || index(row) >= c.num_classes);
  }

  // p'_k
  real p(int64_t row, int64_t k) const {
    const real given =
        c.target_is_probability ? c.target.at(row + k * rows) : (k == index(row) ? 1 : 0);
    return (1 - c.label_smoothing) * given + c.label_smoothing / static_cast<real>(c.num_classes);
  }
  real q(int64_t row, int64_t k) const { return w(k) * p(row, k); }

  real max(int64_t row) const {
    real result = -kInf;
    for (int64_t k = 0; k < c.num_classes; ++k) {
      result = std::max(result, x(row, k));
    }
    return result;
  }
  real log_sum(int64_t row) const {
    const real shift = max(row);
    real sum = 0;
    for (int64_t k = 0; k < c.num_classes; ++k) {
      sum += std::exp(x(row, k) - shift);
    }
    return std::log(sum);
  }

  Expected loss(int64_t row) const {
    if (ignored(row)) {
      return {0, 0};
    }
    if (invalid(row)) {
      return {kNan, 0};
    }
    const real shift = max(row);
    const real log = log_sum(row);
    Expected result;
    for (int64_t k = 0; k < c.num_classes; ++k) {
      if (q(row, k) != 0) {
        const real distance = shift - x(row, k);
        result.add({q(row, k) * (log + distance), 8 * epsilon * q(row, k) * (log + distance + 1)});
      }
    }
    return result;
  }

  // In the mean's denominator.
  real weight(int64_t row) const {
    if (c.target_is_probability) {
      return 1;
    }
    return ignored(row) ? 0 : w(index(row));
  }

  real scale(int64_t row) const {
    if (c.reduction == Reduction::kNone) {
      return c.grad_output.at(row);
    }
    return c.grad_output.at(0) / (c.reduction == Reduction::kMean ? c.mean_terms.at(0) : 1);
  }
};

void check_forward(const CrossEntropyCase& c) {
  const CrossEntropyReference reference(c);
  Expected sum;
  real weight = 0;
  for (int64_t row = 0; row < c.num_rows(); ++row) {
    const Expected loss = reference.loss(row);
    if (c.reduction == Reduction::kNone) {
      check_element(c.output, row, loss);
    }
    sum.add(loss);
    weight += reference.weight(row);
  }
  if (c.reduction == Reduction::kNone) {
    return;
  }
  if (c.reduction == Reduction::kMean) {
    CHECK_CLOSE(c.mean_terms.at(0), weight, 1e-12 * weight);
    sum.value /= weight;
    sum.tolerance /= weight;
    CHECK_CLOSE(c.mean_terms.at(1), sum.value, sum.tolerance);
  }
  check_element(c.output, 0, sum);
}

void check_gradients(const CrossEntropyCase& c) {
  const CrossEntropyReference reference(c);
  const int64_t rows = c.num_rows();
  std::vector<Expected> grad_weight(static_cast<size_t>(c.num_classes));
  for (int64_t row = 0; row < rows; ++row) {
    const bool ignored = reference.ignored(row);
    const real max = reference.max(row);
    const real log_sum = reference.log_sum(row);
    const real scale = reference.scale(row);
    real q_sum = 0;
    for (int64_t k = 0; k < c.num_classes; ++k) {
      q_sum += reference.q(row, k);
    }
    for (int64_t k = 0; k < c.num_classes; ++k) {
      const int64_t i = row + k * rows;
      const real distance = max - reference.x(row, k);
      const real surprise = log_sum + distance;
      const real softmax = std::exp(-surprise);
      const real q = reference.q(row, k);
      const real magnitude = q_sum * softmax * (1 + distance) + q;
      check_element(c.grad_input, i,
                    ignored ? Expected{0, 0}
                            : Expected{scale * (q_sum * softmax - q),
                                       16 * reference.epsilon * std::fabs(scale) * magnitude});
      // The sum is rounded near 1, so a small surprise has the error of 1.
      const real surprise_error = 8 * reference.epsilon * (surprise + 1);
      const real target_factor = scale * (1 - c.label_smoothing) * reference.w(k);
      if (!c.grad_target.absent()) {
        check_element(c.grad_target, i,
                      {target_factor * surprise, std::fabs(target_factor) * surprise_error});
      }
      const real weight_factor = scale * reference.p(row, k);
      grad_weight[static_cast<size_t>(k)].add(
          {weight_factor * surprise, std::fabs(weight_factor) * surprise_error});
    }
  }
  if (!c.grad_weight.absent()) {
    for (int64_t k = 0; k < c.num_classes; ++k) {
      check_element(c.grad_weight, k, grad_weight[static_cast<size_t>(k)]);
    }
  }
}

void test_cross_entropy(Random& random, const std::vector<int64_t>& rows, int64_t num_classes,
                        test::ClassLayout layout) {
  CrossEntropyCase c = test::random_cross_entropy(random, rows, num_classes, layout);
  test::subject() = c.describe();
  int64_t first_invalid_row = 0;
  run_forward(c, first_invalid_row);
  CHECK(first_invalid_row == -1);
  check_forward(c);
  run_backward(c);
  check_gradients(c);
}

// (rows, classes) of fp32 with int64 indices.
CrossEntropyCase plain_case(const std::vector<std::vector<double>>& logits,
                            const std::vector<double>& indices, test::ClassLayout layout,
                            Reduction reduction) {
  CrossEntropyCase c;
  const auto rows = static_cast<int64_t>(logits.size());
  c.rows = {rows};
  c.num_classes = logits.empty() ? 0 : static_cast<int64_t>(logits[0].size());
  c.reduction = reduction;
  c.input = test::class_tensor(DType::kFloat32, c.rows, c.num_classes, layout);
  c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < c.num_classes; ++k) {
      c.input.set(row + k * rows, logits[static_cast<size_t>(row)][static_cast<size_t>(k)]);
    }
    c.target.set(row, indices[static_cast<size_t>(row)]);
  }
  c.grad_input = c.input;
  const bool none = reduction == Reduction::kNone;
  c.output = TestTensor(DType::kFloat32, none ? c.rows : std::vector<int64_t>{}, Layout::kDense);
  c.grad_output = c.output;
  c.grad_output.fill([] { return 1; });
  c.mean_terms = TestTensor(DType::kFloat64, {2}, Layout::kDense);
  c.row_stats = TestTensor(DType::kFloat32, {rows, 3}, Layout::kDense);
  return c;
}

void test_corner_cases(test::ClassLayout layout) {
  int64_t first_invalid_row = 0;
  test::subject() = "label smoothing with weight and ignored rows";
  for (const double second : {0.0, -100.0}) {
    CrossEntropyCase c = plain_case({{1, 2, 3}, {1, 1, 1}}, {2, second}, layout, Reduction::kMean);
    c.label_smoothing = 0.1;
    c.weight = TestTensor(DType::kFloat32, {3}, Layout::kDense);
    c.weight.set(0, 1);
    c.weight.set(1, 2);
    c.weight.set(2, 4);
    run_forward(c, first_invalid_row);
    CHECK_CLOSE(c.output.at(0), second == 0 ? 0.58818 : 0.42396, 5e-6);
    run_backward(c);
    check_gradients(c);
  }

  test::subject() = "ignored rows of NaN";
  {
    CrossEntropyCase c =
        plain_case({{1, 2}, {kNan, kInf}, {0, 1}}, {0, -100, 1}, layout, Reduction::kSum);
    run_forward(c, first_invalid_row);
    CHECK(first_invalid_row == -1);
    CHECK_CLOSE(c.output.at(0), std::log1p(std::exp(1.0)) + std::log1p(std::exp(-1.0)), 1e-6);
    for (int64_t i = 0; i < 6; ++i) {
      CHECK(std::isfinite(c.row_stats.at(i)));
    }
    run_backward(c);
    CHECK_CLOSE(c.grad_input.at(1), 0, 0);
    CHECK_CLOSE(c.grad_input.at(4), 0, 0);
    CHECK_CLOSE(c.grad_input.at(0), 1 / (1 + std::exp(1.0)) - 1, 1e-7);
  }

  test::subject() = "all rows ignored";
  {
    CrossEntropyCase c = plain_case({{1, 2}, {3, 4}}, {-100, -100}, layout, Reduction::kMean);
    run_forward(c, first_invalid_row);
    CHECK_CLOSE(c.output.at(0), kNan, 0);
    CHECK_CLOSE(c.mean_terms.at(0), 0, 0);
    run_backward(c);
    for (int64_t i = 0; i < 4; ++i) {
      CHECK_CLOSE(c.grad_input.at(i), 0, 0);
    }
  }

  test::subject() = "class indices out of range";
  for (const double smoothing : {0.0, 0.1}) {
    CrossEntropyCase c =
        plain_case({{1, 2}, {3, 4}, {5, 6}, {7, 8}}, {0, 2, -1, 1e18}, layout, Reduction::kNone);
    c.label_smoothing = smoothing;
    run_forward(c, first_invalid_row);
    CHECK(first_invalid_row == 1);
    CHECK(std::isfinite(c.output.at(0)));
    run_backward(c);
    CHECK(std::isfinite(c.grad_input.at(0)) && std::isfinite(c.grad_input.at(4)));
    for (int64_t row = 1; row < 4; ++row) {
      CHECK_CLOSE(c.output.at(row), kNan, 0);
      CHECK_CLOSE(c.grad_input.at(row), kNan, 0);
      CHECK_CLOSE(c.grad_input.at(row + 4), kNan, 0);
    }
    int64_t result = 0;
    cpu::launch_first_invalid_target(c.forward_args(on_host), &result, {serial});
    CHECK(result == 1);
    c.ignore_index = 2;
    cpu::launch_first_invalid_target(c.forward_args(on_host), &result, {serial});
    CHECK(result == 2);
  }

  test::subject() = "infinite logits";
  {
    CrossEntropyCase c = plain_case(
        {{0, 0, -kInf}, {0, 0, -kInf}, {-kInf, -kInf, -kInf}, {0, kInf, 0}, {0, kNan, 0}},
        {0, 2, 0, 0, 0}, layout, Reduction::kNone);
    run_forward(c, first_invalid_row);
    CHECK_CLOSE(c.output.at(0), std::log(2.0), 1e-7);
    CHECK_CLOSE(c.output.at(1), kInf, 0);
    for (int64_t row = 2; row < 5; ++row) {
      CHECK_CLOSE(c.output.at(row), kNan, 0);
    }
    run_backward(c);
    CHECK_CLOSE(c.grad_input.at(0), -0.5, 1e-7);
    CHECK_CLOSE(c.grad_input.at(10), 0, 0);
    CHECK_CLOSE(c.grad_input.at(11), -1, 0);
  }

  test::subject() = "no classes";
  {
    CrossEntropyCase c = plain_case({{}, {}}, {-100, 0}, layout, Reduction::kNone);
    run_forward(c, first_invalid_row);
    CHECK(first_invalid_row == 1);
    CHECK_CLOSE(c.output.at(0), 0, 0);
    CHECK_CLOSE(c.output.at(1), kNan, 0);
    run_backward(c);
    c.target_is_probability = true;
    c.target = c.input;
    run_forward(c, first_invalid_row);
    CHECK(first_invalid_row == -1);
    CHECK_CLOSE(c.output.at(1), 0, 0);
    run_backward(c);
  }

  test::subject() = "no rows";
  for (const Reduction reduction : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    CrossEntropyCase c = plain_case({}, {}, layout, reduction);
    c.num_classes = 5;
    run_forward(c, first_invalid_row);
    CHECK(first_invalid_row == -1);
    if (reduction != Reduction::kNone) {
      CHECK_CLOSE(c.output.at(0), reduction == Reduction::kMean ? kNan : 0, 0);
    }
    run_backward(c);
  }
}

// A zero probability counts 0 also against an infinite logit.
void test_masked_probabilities(test::ClassLayout layout) {
  test::subject() = "masked probabilities";
  CrossEntropyCase c = plain_case({{0, 0, -kInf}}, {0}, layout, Reduction::kSum);
  int64_t first_invalid_row = 0;
  c.target_is_probability = true;
  c.target = c.input;
  c.target.set(0, 0.25);
  c.target.set(1, 0.75);
  c.target.set(2, 0);
  c.weight = TestTensor(DType::kFloat32, {3}, Layout::kDense);
  c.weight.fill([] { return 2; });
  c.grad_weight = c.weight;
  c.grad_target = c.target;
  run_forward(c, first_invalid_row);
  CHECK_CLOSE(c.output.at(0), 2 * std::log(2.0), 1e-6);
  run_backward(c);
  CHECK_CLOSE(c.grad_input.at(0), 2 * 0.25, 1e-6);
  CHECK_CLOSE(c.grad_input.at(2), 0, 0);
  CHECK_CLOSE(c.grad_weight.at(1), 0.75 * std::log(2.0), 1e-6);
  CHECK_CLOSE(c.grad_weight.at(2), 0, 0);
  CHECK_CLOSE(c.grad_target.at(0), 2 * std::log(2.0), 1e-6);
}

// The loss of a row does not depend on the rows beside it.
void test_row_alone() {
  test::subject() = "a row alone";
  Random random(5);
  for (const int64_t num_classes : {5, 100, 3000}) {
    CrossEntropyCase all;
    std::vector<std::vector<double>> logits(40);
    for (auto& row : logits) {
      for (int64_t k = 0; k < num_classes; ++k) {
        row.push_back(random.uniform(-9, 9));
      }
    }
    int64_t ignored = 0;
    all =
        plain_case(logits, std::vector<double>(40, 3), test::ClassLayout::kInner, Reduction::kNone);
    run_forward(all, ignored);
    for (const size_t row : {0, 17, 39}) {
      CrossEntropyCase one =
          plain_case({logits[row]}, {3}, test::ClassLayout::kInner, Reduction::kNone);
      run_forward(one, ignored);
      CHECK(one.output.at(0) == all.output.at(static_cast<int64_t>(row)));
    }
  }
}

}  // namespace
}  // namespace lossops

int main() {
  using namespace lossops;
  using test::ClassLayout;
  Random random(2024);
  const std::vector<int64_t> shapes[] = {
      {},      {1},        {7},      {31, 5},     {511},         {512},
      {513},   {3, 400},   {400, 3}, {16, 17, 5}, {2, 3, 45},    {40000},
      {70001}, {1, 1, 33}, {64, 96}, {96, 3, 64}, {32, 2, 32, 2}};
  for (int trial = 0; trial < 4; ++trial) {
    for (const auto& shape : shapes) {
      test_elementwise(random, shape,
                       random.pick({Layout::kDense, Layout::kReversed, Layout::kSparse}));
    }
  }
  const std::vector<int64_t> broadcasts[] = {{5},         {40000},     {3, 700},  {700, 3},
                                             {600, 70},   {1, 500},    {500, 1},  {257, 129},
                                             {4, 5, 600}, {70, 3, 20}, {2000, 40}};
  for (int trial = 0; trial < 3; ++trial) {
    for (const auto& shape : broadcasts) {
      for (int num_kept = 0; num_kept < static_cast<int>(shape.size()); ++num_kept) {
        test_broadcast(random, shape, random.pick({Layout::kDense, Layout::kReversed}), num_kept);
      }
    }
  }
  test_long_sum();
  test_half_mean();
  test_integer_target();
  test_empty();

  const std::vector<int64_t> rows[] = {{}, {1}, {3}, {100}, {7, 5}, {40, 30}};
  for (int trial = 0; trial < 2; ++trial) {
    for (const auto& shape : rows) {
      for (const int64_t num_classes : {1, 2, 16, 17, 33, 130, 511, 1030}) {
        for (const ClassLayout layout :
             {ClassLayout::kInner, ClassLayout::kOuter, ClassLayout::kSparse}) {
          if (num_classes < 100 || shape.size() < 2) {
            test_cross_entropy(random, shape, num_classes, layout);
          }
        }
      }
    }
  }
  for (const ClassLayout layout : {ClassLayout::kInner, ClassLayout::kOuter}) {
    test_corner_cases(layout);
    test_masked_probabilities(layout);
  }
  test_row_alone();
  return test::exit_status();
}
