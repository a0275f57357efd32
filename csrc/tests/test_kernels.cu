// The CUDA launchers against the CPU launchers, over sizes, layouts and dtypes. Exits with
// 77 where there is no GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "launchers.h"
#include "tests/cases.h"
#include "tests/check.h"
#include "tests/token_cases.h"

namespace lossops {
namespace {

using test::ClassLayout;
using test::CrossEntropyCase;
using test::ElementwiseCase;
using test::Layout;
using test::on_host;
using test::Random;
using test::TestTensor;
using test::TokenCase;

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n    %s\n", cudaGetErrorString(error), test::subject().c_str());
    std::exit(1);
  }
}

// Copies of tensors in device memory, made when they are first asked for. Data begins
// `shift` elements behind what cudaMalloc aligns.
class Device {
 public:
  explicit Device(int64_t shift) : shift_(shift) {}
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() {
    for (const auto& [tensor, memory] : copies_) {
      check_cuda(cudaFree(memory));
    }
    for (void* memory : scratch_) {
      check_cuda(cudaFree(memory));
    }
  }

  test::Place place() {
    return [this](const TestTensor& tensor) { return copy_of(tensor); };
  }

  double* scratch(int64_t doubles) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, static_cast<size_t>(doubles + 1) * sizeof(double)));
    scratch_.push_back(memory);
    return static_cast<double*>(memory);
  }

  // Fills a result with NaN: what a kernel leaves out must not be right by chance.
  void poison(const TestTensor& tensor) {
    if (!tensor.absent()) {
      check_cuda(cudaMemset(copy_of(tensor), 0xff, tensor.bytes.size()));
    }
  }

  TestTensor download(const TestTensor& tensor) {
    TestTensor result = tensor;
    check_cuda(cudaDeviceSynchronize());
    check_cuda(cudaMemcpy(result.bytes.data(), copy_of(tensor), tensor.bytes.size(),
                          cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  void* copy_of(const TestTensor& tensor) {
    if (tensor.absent()) {
      return nullptr;
    }
    const int64_t bytes = shift_ * element_size(tensor.dtype);
    void*& memory = copies_[&tensor];
    if (memory == nullptr) {
      check_cuda(cudaMalloc(&memory, tensor.bytes.size() + static_cast<size_t>(bytes)));
      check_cuda(cudaMemcpy(static_cast<unsigned char*>(memory) + bytes, tensor.bytes.data(),
                            tensor.bytes.size(), cudaMemcpyHostToDevice));
    }
    return static_cast<unsigned char*>(memory) + bytes;
  }

  int64_t shift_;
  std::map<const TestTensor*, void*> copies_;
  std::vector<void*> scratch_;
};

void serial(int64_t count, int64_t /*grain*/, void (*body)(void*, int64_t, int64_t), void* data) {
  body(data, 0, count);
}
constexpr cpu::Context kSerial{serial};

double largest_of(const TestTensor& tensor) {
  double largest = 0;
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const double value = std::fabs(tensor.at(i));
    largest = std::isfinite(value) ? std::max(largest, value) : largest;
  }
  return largest;
}

// Both backends compute in the same type, in other orders. magnitude: of what cancels in a
// result, where that is more than the result.
void check_same(const TestTensor& got, const TestTensor& want, bool acc_double, double magnitude) {
  const int64_t numel = want.numel();
  const double largest = std::max(largest_of(want), magnitude);
  const double accumulation = acc_double ? 0x1p-44 : 0x1p-18;
  for (int64_t i = 0; i < numel; ++i) {
    CHECK_CLOSE(got.at(i), want.at(i),
                2 * test::epsilon(want.dtype) * std::fabs(want.at(i)) + accumulation * largest +
                    2 * test::underflow(want.dtype));
  }
}

// What lies between the elements of a result is as poison() left it.
void check_gaps(const TestTensor& got) {
  std::vector<bool> is_element(got.bytes.size());
  const auto size = element_size(got.dtype);
  for (int64_t i = 0; i < got.numel(); ++i) {
    std::fill_n(is_element.begin() + got.offset(i) * size, size, true);
  }
  bool are_untouched = true;
  for (size_t i = 0; i < got.bytes.size(); ++i) {
    are_untouched = are_untouched && (is_element[i] || got.bytes[i] == 0xff);
  }
  CHECK(are_untouched);
}

// Runs on a fresh copy twice, and checks that the results have the same bits and are close
// to what the CPU left in the tensors, and that nothing else is written.
template <typename Run>
void run_on_device(const std::vector<const TestTensor*>& results, bool acc_double, int64_t shift,
                   const Run& run, double magnitude = 0) {
  std::vector<TestTensor> first;
  for (int repeat = 0; repeat < 2; ++repeat) {
    Device device(shift);
    for (const TestTensor* result : results) {
      device.poison(*result);
    }
    run(device);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i]->absent()) {
        first.push_back(*results[i]);
        continue;
      }
      const TestTensor got = device.download(*results[i]);
      if (repeat == 0) {
        first.push_back(got);
        check_same(got, *results[i], acc_double, magnitude);
        check_gaps(got);
      }
      CHECK(got.bytes == first[i].bytes);
    }
  }
}

// ------------------------------------------------------------------- elementwise

void test_forward(ElementwiseCase& c, int64_t shift) {
  const ElementwiseForwardArgs args = c.forward_args(on_host);
  std::vector<double> scratch(static_cast<size_t>(cpu::elementwise_forward_scratch(args)));
  cpu::launch_elementwise_forward(args, scratch.data(), kSerial);
  if (c.weight.absent() || c.reduction != Reduction::kMean) {
    c.mean_terms = TestTensor();  // of a weighted mean only
  }
  run_on_device({&c.output, &c.mean_terms}, c.acc_double(), shift, [&](Device& device) {
    const ElementwiseForwardArgs device_args = c.forward_args(device.place());
    cuda::launch_elementwise_forward(
        device_args, device.scratch(cuda::elementwise_forward_scratch(device_args)), nullptr);
  });
}

void test_backward(ElementwiseCase& c, int64_t shift) {
  cpu::launch_elementwise_backward(c.backward_args(on_host), kSerial);
  run_on_device({&c.grad_input, &c.grad_target, &c.grad_weight}, c.acc_double(), shift,
                [&](Device& device) {
                  cuda::launch_elementwise_backward(c.backward_args(device.place()), nullptr);
                });
}

// After test_backward(): the gradient of input alone, where that does not depend on input.
void test_input_that_is_not_taken(ElementwiseCase& c, int64_t shift) {
  c.grad_target = TestTensor();
  c.grad_weight = TestTensor();
  if (input_gradient_takes_input(c.loss, c.backward_args(on_host).params)) {
    return;
  }
  c.input.fill([] { return std::numeric_limits<double>::quiet_NaN(); });
  const auto args_of = [&](const test::Place& place) {
    ElementwiseBackwardArgs args = c.backward_args(place);
    args.takes_input = false;
    return args;
  };
  const std::vector<unsigned char> expected = c.grad_input.bytes;
  c.grad_input.fill([] { return std::numeric_limits<double>::quiet_NaN(); });
  cpu::launch_elementwise_backward(args_of(on_host), kSerial);
  CHECK(c.grad_input.bytes == expected);
  run_on_device({&c.grad_input}, c.acc_double(), shift, [&](Device& device) {
    cuda::launch_elementwise_backward(args_of(device.place()), nullptr);
  });
}

void backward_reduce_on_host(ElementwiseCase& c) {
  const ElementwiseBackwardReduceArgs args = c.backward_args(on_host);
  std::vector<double> scratch(static_cast<size_t>(cpu::elementwise_backward_reduce_scratch(args)));
  cpu::launch_elementwise_backward_reduce(args, scratch.data(), kSerial);
}

void test_backward_reduce(ElementwiseCase& c, int64_t shift) {
  double magnitude = 0;
  if (!c.grad_weight.absent()) {
    // A weight's gradient is of the differences to the mean, which cancel: without the mean.
    ElementwiseCase about_zero = c;
    if (!about_zero.mean_terms.absent()) {
      about_zero.mean_terms.set(1, 0);
    }
    backward_reduce_on_host(about_zero);
    magnitude = largest_of(about_zero.grad_weight);
  }
  backward_reduce_on_host(c);
  run_on_device(
      {&c.grad_input, &c.grad_target, &c.grad_weight}, c.acc_double(), shift,
      [&](Device& device) {
        const ElementwiseBackwardReduceArgs device_args = c.backward_args(device.place());
        cuda::launch_elementwise_backward_reduce(
            device_args, device.scratch(cuda::elementwise_backward_reduce_scratch(device_args)),
            nullptr);
      },
      magnitude);
}

TestTensor gradient_like(const TestTensor& operand) {
  TestTensor result = operand;
  std::fill(result.bytes.begin(), result.bytes.end(), 0);
  return result;
}

// A forward pass that computes gradients too: the loss has the same bits as without them.
// is_summed: target is broadcast.
void test_forward_gradients(const ElementwiseCase& forward, bool is_summed) {
  ElementwiseCase c = forward;  // its output is computed
  if (c.reduction == Reduction::kNone || !c.weight.absent()) {
    return;
  }
  c.grad_output.fill([] { return 1.0; });
  c.grad_target = gradient_like(c.target);
  is_summed ? backward_reduce_on_host(c)
            : cpu::launch_elementwise_backward(c.backward_args(on_host), kSerial);
  ElementwiseCase of_input = c;
  of_input.grad_target = TestTensor();
  of_input.grad_input = gradient_like(c.input);
  cpu::launch_elementwise_backward(of_input.backward_args(on_host), kSerial);
  const auto loss = [&](const ElementwiseCase& of) {
    TestTensor result;
    run_on_device({&of.output, &of.grad_input, &of.grad_target}, c.acc_double(), 0,
                  [&](Device& device) {
                    ElementwiseForwardArgs args = of.forward_args(device.place());
                    args.grad_input = test::operand_of(of.grad_input, device.place());
                    args.grad_target = test::operand_of(of.grad_target, device.place());
                    cuda::launch_elementwise_forward(
                        args, device.scratch(cuda::elementwise_forward_scratch(args)), nullptr);
                    result = device.download(of.output);
                  });
    return result.bytes;
  };
  ElementwiseCase both = of_input;
  both.grad_target = c.grad_target;
  const auto expected = loss(forward);
  CHECK(loss(of_input) == expected);
  CHECK(loss(c) == expected);
  CHECK(loss(both) == expected);
}

void test_elementwise(Random& random, const std::vector<int64_t>& sizes, Layout layout,
                      int64_t shift) {
  ElementwiseCase c =
      test::random_elementwise(random, sizes, layout, static_cast<int>(sizes.size()));
  test::subject() = c.describe() + " shift " + std::to_string(shift);
  test_forward(c, shift);
  test_forward_gradients(c, false);
  c.grad_input = TestTensor(c.input.dtype, sizes, layout);
  c.grad_target = TestTensor(c.target.dtype, sizes, layout);
  if (!c.weight.absent()) {
    c.grad_weight = TestTensor(c.weight.dtype, sizes, layout);
  }
  test_backward(c, shift);
  test_input_that_is_not_taken(c, shift);
}

void test_broadcast(Random& random, const std::vector<int64_t>& sizes, Layout layout,
                    int num_kept) {
  ElementwiseCase c = test::random_elementwise(random, sizes, layout, num_kept);
  test::subject() = c.describe() + " kept dims " + std::to_string(num_kept);
  test_forward(c, 0);
  test_forward_gradients(c, true);
  c.grad_target = gradient_like(c.target);
  test_backward_reduce(c, 0);
  c.grad_target = TestTensor();
  if (!c.weight.absent()) {
    c.grad_weight = gradient_like(c.weight);
    test_backward_reduce(c, 0);
  }
}

// KL without a reduction of a target that all rows share, in tiles of several turns: what the
// losses take of the target is kept from turn to turn.
void test_shared_targets(Random& random) {
  for (const int64_t columns : {45, 203}) {
    for (int accepted = 0; accepted < 4;) {
      ElementwiseCase c = test::random_elementwise(random, {columns, 1200}, Layout::kDense, 1);
      if (c.loss == ElementwiseLoss::kl_div && c.log_input && c.reduction == Reduction::kNone &&
          !c.acc_double()) {
        test::subject() = c.describe() + " shared target";
        test_forward(c, accepted % 2);
        ++accepted;
      }
    }
  }
}

// ------------------------------------------------------------------ cross entropy

void test_forward(CrossEntropyCase& c, int64_t shift) {
  const CrossEntropyForwardArgs args = c.forward_args(on_host);
  const CrossEntropyPlan plan = cpu::plan_cross_entropy_forward(args);
  std::vector<double> scratch(static_cast<size_t>(plan.scratch));
  cpu::launch_cross_entropy_forward(args, plan, scratch.data(), kSerial);
  if (c.reduction != Reduction::kMean) {
    c.mean_terms = TestTensor();
  }
  run_on_device({&c.output, &c.mean_terms}, c.acc_double(), shift, [&](Device& device) {
    const CrossEntropyForwardArgs device_args = c.forward_args(device.place());
    const CrossEntropyPlan device_plan = cuda::plan_cross_entropy_forward(device_args);
    cuda::launch_cross_entropy_forward(device_args, device_plan,
                                       device.scratch(device_plan.scratch), nullptr);
  });
}

void test_backward(CrossEntropyCase& c, int64_t shift) {
  const CrossEntropyBackwardArgs args = c.backward_args(on_host);
  std::vector<double> scratch(static_cast<size_t>(cpu::cross_entropy_backward_scratch(args)));
  cpu::launch_cross_entropy_backward(args, scratch.data(), kSerial);
  // Of a single class the gradient is 0: what cancels is a coefficient, at most 1.1 here.
  const double denominator = c.reduction == Reduction::kMean ? std::fabs(c.mean_terms.at(0)) : 1;
  const double magnitude =
      c.num_classes == 1 && denominator > 0 ? largest_of(c.grad_output) / denominator : 0;
  run_on_device(
      {&c.grad_input, &c.grad_target, &c.grad_weight}, c.acc_double(), shift,
      [&](Device& device) {
        const CrossEntropyBackwardArgs device_args = c.backward_args(device.place());
        cuda::launch_cross_entropy_backward(
            device_args, device.scratch(cuda::cross_entropy_backward_scratch(device_args)),
            nullptr);
      },
      magnitude);
}

void test_cross_entropy(Random& random, const std::vector<int64_t>& rows, int64_t num_classes,
                        ClassLayout layout, int64_t shift) {
  CrossEntropyCase c = test::random_cross_entropy(random, rows, num_classes, layout);
  test::subject() = c.describe() + " shift " + std::to_string(shift);
  test_forward(c, shift);
  test_backward(c, shift);
}

// The results of a step of contiguous tensors, with a grad_output of 1: fp32 losses, statistics and
// the gradient of input.
void prepare_step(CrossEntropyCase& c, Reduction reduction) {
  const bool none = reduction == Reduction::kNone;
  c.reduction = reduction;
  c.output = TestTensor(DType::kFloat32, none ? c.rows : std::vector<int64_t>{}, Layout::kDense);
  c.row_stats = TestTensor(DType::kFloat32, {c.dense() ? 3 : 2, c.num_rows()}, Layout::kDense);
  c.grad_input = c.input;
  c.grad_output = c.output;
  c.grad_output.fill([] { return 1.0; });
}

// Runs it: gradients are those of the forward pass or, without a reduction, those of a backward
// pass that has its statistics. The gradients may be in a Device of another shift.
void launch_step(const CrossEntropyCase& c, Device& device, Device& of_gradients) {
  const bool none = c.reduction == Reduction::kNone;
  CrossEntropyForwardArgs args = c.forward_args(device.place());
  if (!none) {
    args.grad_input = test::operand_of(c.grad_input, of_gradients.place());
    args.grad_input_class_stride = c.grad_input.strides.back();
  }
  const CrossEntropyPlan plan = cuda::plan_cross_entropy_forward(args);
  cuda::launch_cross_entropy_forward(args, plan, device.scratch(plan.scratch), nullptr);
  if (none) {
    CrossEntropyBackwardArgs backward = c.backward_args(device.place());
    backward.grad_input = test::operand_of(c.grad_input, of_gradients.place());
    cuda::launch_cross_entropy_backward(
        backward, device.scratch(cuda::cross_entropy_backward_scratch(backward)), nullptr);
  }
}

void launch_step(const CrossEntropyCase& c, Device& device) { launch_step(c, device, device); }

// Class indices, and float logits that fill_input draws.
template <typename FillInput>
CrossEntropyCase float_case(Random& random, int64_t rows, int64_t num_classes, ClassLayout layout,
                            Reduction reduction, const FillInput& fill_input) {
  CrossEntropyCase c;
  c.rows = {rows};
  c.num_classes = num_classes;
  c.reduction = reduction;
  c.input = test::class_tensor(DType::kFloat32, c.rows, num_classes, layout);
  fill_input(c.input);
  c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
  c.target.fill([&] { return static_cast<double>(random.below(num_classes)); });
  const bool none = reduction == Reduction::kNone;
  c.output = TestTensor(DType::kFloat32, none ? c.rows : std::vector<int64_t>{}, Layout::kDense);
  c.row_stats = TestTensor(DType::kFloat32, {2, rows}, Layout::kDense);
  return c;
}

// A row of a plane has the same bits in aligned memory, where plane_rows sums half types, and one
// element further, where plane_words does; and in a plane with an odd number of rows. Also where
// the last class of a share is not plain. Smoothed rows of few classes have the same bits side by
// side, and where strided_rows takes them.
void test_bits_of_planes(Random& random, DType dtype, int64_t num_classes, double smoothing = 0) {
  constexpr int64_t kRows = 32;
  CrossEntropyCase c;
  c.num_classes = num_classes;
  c.reduction = Reduction::kNone;
  c.label_smoothing = smoothing;
  std::vector<std::vector<double>> logits(kRows);
  std::vector<double> targets(kRows);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t k = 0; k < num_classes; ++k) {
      logits[row].push_back(random.uniform(-4, 4));
    }
    logits[row][std::max<int64_t>(num_classes - 1 - random.below(4), 0)] = -40;
    logits[row][random.below(num_classes)] += row % 3 == 0 ? 20 : 0;
    targets[row] = static_cast<double>(random.below(num_classes));
  }
  // Those of the first `rows` rows.
  const auto statistics = [&](int64_t rows, int64_t shift,
                              ClassLayout layout = ClassLayout::kOuter) {
    c.rows = {rows};
    c.input = test::class_tensor(dtype, c.rows, num_classes, layout);
    c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < num_classes; ++k) {
        c.input.set(row + k * rows, logits[row][k]);
      }
      c.target.set(row, targets[row]);
    }
    test::subject() = c.describe() + ", bits";
    c.output = TestTensor(DType::kFloat32, c.rows, Layout::kDense);
    c.row_stats = TestTensor(DType::kFloat32, {3, rows}, Layout::kDense);
    Device device(shift);
    const CrossEntropyForwardArgs args = c.forward_args(device.place());
    const CrossEntropyPlan plan = cuda::plan_cross_entropy_forward(args);
    cuda::launch_cross_entropy_forward(args, plan, device.scratch(plan.scratch), nullptr);
    const TestTensor downloaded = device.download(c.row_stats);
    const TestTensor losses = device.download(c.output);
    std::vector<std::array<uint32_t, 3>> of_rows(rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t part = 0; part < 2; ++part) {
        std::memcpy(&of_rows[row][part],
                    downloaded.bytes.data() + (part * rows + row) * sizeof(float), sizeof(float));
      }
      std::memcpy(&of_rows[row][2], losses.bytes.data() + row * sizeof(float), sizeof(float));
    }
    return of_rows;
  };
  auto expected = statistics(kRows, 0);
  CHECK(statistics(kRows, 1) == expected);
  if (smoothing > 0) {
    CHECK(statistics(kRows, 0, ClassLayout::kSparse) == expected);
  }
  expected.pop_back();
  CHECK(statistics(kRows - 1, 0) == expected);
  CHECK(statistics(kRows - 1, 1) == expected);
}

// Rows of neighbouring classes, with `gap` elements between them.
TestTensor rows_with_gaps(DType dtype, int64_t rows, int64_t num_classes, int64_t gap) {
  TestTensor tensor = test::class_tensor(dtype, {rows}, num_classes + gap, ClassLayout::kInner);
  tensor.sizes.back() = num_classes;
  return tensor;
}

// Rows of half types whose logits are near the one at the class index, or so far below or above it
// that the sum relative to it is out of range; near 0 and far from it. Losses, gradients of the
// forward pass, and those of a backward pass that has its statistics. shift: of the logits, but not
// of their gradients. gap: elements between the rows of logits.
void test_far_rows(Random& random, DType dtype, int64_t num_classes, ClassLayout layout,
                   int64_t shift = 0, int64_t gap = 0) {
  CrossEntropyCase c;
  c.num_classes = num_classes;
  std::vector<double> distances;
  std::vector<double> places;
  for (const double place : {0.0, -100.0, 12496.0, 16384.0, -17000.0, 30000.0}) {
    for (const double distance :
         {0.0, 3.0, 20.0, 27.0, 28.0, 30.0, 41.0, 42.0, 60.0, 90.0, 300.0}) {
      distances.insert(distances.end(), {distance, -distance});
      places.insert(places.end(), {place, place});
    }
  }
  const auto rows = static_cast<int64_t>(places.size());
  c.rows = {rows};
  c.input = gap > 0 ? rows_with_gaps(dtype, rows, num_classes, gap)
                    : test::class_tensor(dtype, c.rows, num_classes, layout);
  c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = random.below(num_classes);
    c.target.set(row, static_cast<double>(target));
    for (int64_t k = 0; k < num_classes; ++k) {
      const bool is_masked = row % 5 == 4 && k % 3 == 1;
      const double other =
          is_masked ? -std::numeric_limits<double>::infinity() : random.uniform(-0.5, 0.5);
      c.input.set(row + k * rows, places[row] + (k == target ? distances[row] : other));
    }
  }
  const double unit = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double least = dtype == DType::kBFloat16 ? 0x1p-116 : 0x1p-24;
  // Exponentials that are subnormal may count as 0.
  const double least_loss = std::max(0x1p-116, static_cast<double>(num_classes) * 0x1p-126);
  for (const Reduction reduction : {Reduction::kSum, Reduction::kNone}) {
    const bool none = reduction == Reduction::kNone;
    prepare_step(c, reduction);
    test::subject() = c.describe() + ", far rows, shift " + std::to_string(shift);
    Device device(shift);
    Device of_gradients(0);
    launch_step(c, device, of_gradients);
    const TestTensor losses = device.download(c.output);
    const TestTensor gradients = of_gradients.download(c.grad_input);
    for (int64_t row = 0; row < rows; ++row) {
      const auto target = static_cast<int64_t>(c.target.at(row));
      const double x_at_index = c.input.at(row + target * rows);
      double others = 0;
      for (int64_t k = 0; k < num_classes; ++k) {
        others += k == target ? 0 : std::exp(c.input.at(row + k * rows) - x_at_index);
      }
      if (none) {
        const double loss = std::log1p(others);
        CHECK_CLOSE(losses.at(row), loss, 0x1p-18 * loss + least_loss);
      }
      for (int64_t k = 0; k < num_classes; ++k) {
        const double term = std::exp(c.input.at(row + k * rows) - x_at_index);
        const double exact = (k == target ? -others : term) / (1 + others);
        CHECK_CLOSE(gradients.at(row + k * rows), exact,
                    (unit + 0x1p-18) * std::fabs(exact) + least);
      }
    }
  }
}

// What rows have several coefficients for.
enum class Soft { kSmoothed, kWeighted, kProbabilities };

// Rows with several coefficients, from rows that are sure of a class, of the target's
// or of another one, to rows that know nothing. Ignored rows, and some with an index out of range,
// are as sure. Losses, gradients of the forward pass and of a backward pass that has its
// statistics, and those of probabilities.
void test_soft_rows(Random& random, DType dtype, int64_t num_classes, ClassLayout layout,
                    Soft soft) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CrossEntropyCase c;
  c.num_classes = num_classes;
  c.target_is_probability = soft == Soft::kProbabilities;
  std::vector<double> places;
  std::vector<double> distances;
  for (const double place : {0.0, -30.0, 400.0}) {
    for (const double distance : {0.0, 0.5, 2.0, 4.0, 6.0, 9.0, 12.0, 16.0, 20.0, 25.0, 40.0}) {
      distances.insert(distances.end(), {distance, -distance, distance, distance});
      places.insert(places.end(), {place, place, place, place});
    }
  }
  const auto rows = static_cast<int64_t>(places.size());
  c.rows = {rows};
  c.input = test::class_tensor(dtype, c.rows, num_classes, layout);
  if (soft == Soft::kWeighted) {
    c.weight = TestTensor(dtype, {num_classes}, Layout::kDense);
    c.weight.fill([&] { return random.uniform(0.5, 1.5); });
  }
  c.target = c.target_is_probability
                 ? test::class_tensor(DType::kFloat32, c.rows, num_classes, layout)
                 : TestTensor(DType::kInt64, c.rows, Layout::kDense);
  std::vector<int64_t> sure(rows);
  for (int64_t row = 0; row < rows; ++row) {
    sure[row] = random.below(num_classes);
    const int64_t other = (sure[row] + 1) % num_classes;
    const bool is_masked = c.target_is_probability && row % 5 == 4;
    for (int64_t k = 0; k < num_classes; ++k) {
      const bool is_hidden = is_masked && k % 3 == 1 && k != sure[row] && k != other;
      c.input.set(row + k * rows, is_hidden        ? -kInfinity
                                  : k == sure[row] ? places[row] + distances[row]
                                                   : places[row] + random.uniform(-0.5, 0.5));
      if (c.target_is_probability) {
        const double share = row % 4 < 2 ? 0.5 : row % 4 == 2 ? 1 - 0x1p-12 : 1;
        const double rest =
            num_classes > 1 ? (1 - share) / static_cast<double>(num_classes - 1) : 0;
        c.target.set(row + k * rows, is_hidden ? 0 : k == sure[row] ? share : rest);
      }
    }
    if (!c.target_is_probability) {
      const int64_t index = row % 4 == 3 ? other : sure[row];
      c.target.set(row, static_cast<double>(row % 7 == 3    ? c.ignore_index
                                            : row % 11 == 5 ? num_classes + 7
                                                            : index));
    }
  }
  const bool is_float = dtype == DType::kFloat32;
  const double unit = is_float ? 0x1p-24 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  const double least = dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-116;
  // Half types are summed relative to any logit, and coefficients with weights are rounded.
  const double slack = !is_float ? 1 : soft == Soft::kSmoothed ? 0x1p-5 : 0x1p-1;
  for (const double smoothing : {0.1, 0x1p-12, 0.0}) {
    if ((smoothing == 0) != c.target_is_probability) {
      continue;
    }
    c.label_smoothing = smoothing;
    for (const Reduction reduction : {Reduction::kSum, Reduction::kNone}) {
      const bool none = reduction == Reduction::kNone;
      prepare_step(c, reduction);
      c.grad_target = none && c.target_is_probability ? c.target : TestTensor();
      test::subject() = c.describe() + ", soft rows";
      Device device(0);
      launch_step(c, device);
      const TestTensor losses = device.download(c.output);
      const TestTensor gradients = device.download(c.grad_input);
      const TestTensor of_targets =
          c.grad_target.absent() ? c.grad_target : device.download(c.grad_target);
      for (int64_t row = 0; row < rows; ++row) {
        const auto index = c.target_is_probability ? 0 : static_cast<int64_t>(c.target.at(row));
        if (index < 0 || index >= num_classes) {
          for (int64_t k = 0; k < num_classes; ++k) {
            const double gradient = gradients.at(row + k * rows);
            CHECK(index == c.ignore_index ? gradient == 0 : std::isnan(gradient));
          }
          continue;
        }
        double max = -kInfinity;
        for (int64_t k = 0; k < num_classes; ++k) {
          max = std::max(max, c.input.at(row + k * rows));
        }
        double beside = 0;  // the largest, which is one alone or among equals
        bool is_first = true;
        for (int64_t k = 0; k < num_classes; ++k) {
          const double x = c.input.at(row + k * rows);
          beside += x == max && is_first ? 0 : std::exp(x - max);
          is_first = is_first && x != max;
        }
        const auto coefficient = [&](int64_t k) {
          const double p =
              c.target_is_probability
                  ? c.target.at(row + k * rows)
                  : (k == index ? 1 - smoothing : 0) + smoothing / static_cast<double>(num_classes);
          return c.weight.absent() ? p : p * c.weight.at(k);
        };
        double loss = 0;
        double q_sum = 0;
        for (int64_t k = 0; k < num_classes; ++k) {
          const double q = coefficient(k);
          q_sum += q;
          loss += q == 0 ? 0 : q * (std::log1p(beside) + (max - c.input.at(row + k * rows)));
        }
        if (none) {
          CHECK_CLOSE(
              losses.at(row), loss,
              std::min(4 * slack, 1.0) * (0x1p-18 * loss + (loss < 0x1p-5 ? 0x1p-40 : 0x1p-21)));
        }
        for (int64_t k = 0; k < num_classes; ++k) {
          const double x = c.input.at(row + k * rows);
          const double q = coefficient(k);
          const double e = std::exp(x - max);
          const bool outweighs = x == max && beside < 1;
          // The two that are subtracted: of the class that outweighs others, from the others. The
          // coefficients and their sum are rounded, too.
          const double a = outweighs ? q_sum - q : q_sum * e / (1 + beside);
          const double b = outweighs ? q_sum * beside / (1 + beside) : q;
          CHECK_CLOSE(gradients.at(row + k * rows), a - b,
                      (unit + slack * 0x1p-18) * std::fabs(a - b) +
                          slack * (0x1p-19 * (std::fabs(a) + b) + 0x1p-20 * q_sum) + least);
          if (!of_targets.absent()) {
            const double exact = std::log1p(beside) + (max - x);
            CHECK_CLOSE(of_targets.at(row + k * rows), exact, 0x1p-17 * exact);
          }
        }
      }
    }
  }
}

// Sums and means of planes with an odd number of rows, and more rows than one block takes at a
// time. Each row must count once.
void test_sums_of_odd_planes(Random& random, DType dtype, int64_t num_classes,
                             Reduction reduction) {
  CrossEntropyCase c;
  c.rows = {777, 3};
  c.num_classes = num_classes;
  c.reduction = reduction;
  c.input = test::class_tensor(dtype, c.rows, num_classes, ClassLayout::kOuter);
  c.input.fill([&] { return random.uniform(-4, 4); });
  c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
  c.target.fill([&] { return static_cast<double>(random.below(num_classes)); });
  c.output = TestTensor(DType::kFloat32, {}, Layout::kDense);
  c.mean_terms = TestTensor(DType::kFloat64, {2}, Layout::kDense);
  test::subject() = c.describe() + ", odd planes";
  test_forward(c, 0);
}

// The gradients of float logits are within so many units in the last place.
void check_last_places(CrossEntropyCase& c, double units) {
  c.grad_input = c.input;
  test::subject() = c.describe() + ", last places";
  Device device(0);
  launch_step(c, device);
  const TestTensor gradient = device.download(c.grad_input);
  const int64_t rows = c.rows[0];
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    double others = 0;
    const auto target = static_cast<int64_t>(c.target.at(row));
    for (int64_t k = 0; k < c.num_classes; ++k) {
      const double term = std::exp(c.input.at(row + k * rows));
      sum += term;
      others += k == target ? 0 : term;
    }
    for (int64_t k = 0; k < c.num_classes; ++k) {
      const double exact = k == target ? -others / sum : std::exp(c.input.at(row + k * rows)) / sum;
      const auto rounded = static_cast<float>(std::fabs(exact));
      const double unit = std::nextafter(rounded, 2.0f) - rounded;
      CHECK_CLOSE(gradient.at(row + k * rows), exact, units * unit);
    }
  }
}

// Gradients of float logits that spread, where one class may outweigh the others: within 4 units in
// the last place, but for few. A thread that has all classes of a row adds up eight terms before it
// keeps what rounding takes: of 80000 such gradients of 21 classes, two were off by 4.14.
void test_last_places(Random& random, int64_t num_classes, ClassLayout layout) {
  constexpr int64_t kRows = 64;
  CrossEntropyCase c =
      float_case(random, kRows, num_classes, layout, Reduction::kSum, [&](TestTensor& input) {
        input.fill([&] {  // nearly normal
          double sum = -6;
          for (int i = 0; i < 12; ++i) {
            sum += random.uniform(0, 1);
          }
          return 4 * sum;
        });
        for (int64_t row = 0; row < kRows; ++row) {
          input.set(row + random.below(num_classes) * kRows, random.uniform(11, 15));
        }
      });
  const bool has_all = layout == ClassLayout::kInner || num_classes < 32;  // a thread
  const double units = has_all ? 4.25 : 4;
  check_last_places(c, units);
}

// The same where two classes have nearly the same logit, and all others so much smaller ones that
// each is less than a rounding of the two: what rounding takes from the sums counts.
void test_two_tops(Random& random, int64_t num_classes) {
  constexpr int64_t kRows = 32;
  constexpr double kTop = 18.06;
  CrossEntropyCase c = float_case(
      random, kRows, num_classes, ClassLayout::kOuter, Reduction::kSum, [&](TestTensor& input) {
        input.fill([&] { return random.uniform(-0.05, 0); });
        for (int64_t row = 0; row < kRows; ++row) {
          const int64_t first = random.below(num_classes);
          input.set(row + first * kRows, kTop);
          input.set(row + (first + 1) % num_classes * kRows, kTop - 0.01);
        }
      });
  check_last_places(c, 4);
}

// A logit of infinity makes its row's loss NaN, and no other row's.
void test_infinities(Random& random, int64_t num_classes, ClassLayout layout) {
  constexpr int64_t kRows = 40;
  const CrossEntropyCase c =
      float_case(random, kRows, num_classes, layout, Reduction::kNone, [&](TestTensor& input) {
        input.fill([&] { return random.uniform(-3, 3); });
        for (int64_t row = 0; row < kRows; row += 2) {
          input.set(row + random.below(num_classes) * kRows,
                    std::numeric_limits<double>::infinity());
        }
      });
  test::subject() = c.describe() + ", infinities";
  Device device(0);
  const CrossEntropyForwardArgs args = c.forward_args(device.place());
  const CrossEntropyPlan plan = cuda::plan_cross_entropy_forward(args);
  cuda::launch_cross_entropy_forward(args, plan, device.scratch(plan.scratch), nullptr);
  const TestTensor losses = device.download(c.output);
  for (int64_t row = 0; row < kRows; ++row) {
    CHECK(std::isnan(losses.at(row)) == (row % 2 == 0));
  }
}

// Short rows without a reduction, whose gradients have gaps of their own.
void test_short_rows(Random& random, DType dtype, int64_t num_classes) {
  constexpr int64_t kRows = 150;
  CrossEntropyCase c;
  c.rows = {kRows};
  c.num_classes = num_classes;
  c.reduction = Reduction::kNone;
  c.target = TestTensor(DType::kInt64, c.rows, Layout::kDense);
  c.ignore_index = -100;
  c.target.fill([&] {
    return static_cast<double>(random.below(9) == 0 ? c.ignore_index : random.below(num_classes));
  });
  c.output = TestTensor(dtype, c.rows, Layout::kDense);
  c.grad_output = c.output;
  c.grad_output.fill([&] { return random.uniform(-1, 1); });
  c.row_stats = TestTensor(DType::kFloat32, {kRows, 2}, Layout::kDense);
  for (const int64_t gap : {0, 1, 8, 40}) {
    for (const int64_t gradient_gap : {0, 3, 8}) {
      c.input = rows_with_gaps(dtype, kRows, num_classes, gap);
      c.input.fill([&] { return random.uniform(-8, 8); });
      c.grad_input = rows_with_gaps(dtype, kRows, num_classes, gradient_gap);
      const int64_t shift = random.pick<int64_t>({0, 0, 1, 5});
      test_forward(c, shift);
      test_backward(c, shift);
    }
  }
}

// Values and gradients of tokens. in_place: the gradients also take the place of the logits, whose
// layout grad_input then has.
void test_tokens(TokenCase c, int64_t shift, bool in_place) {
  test::subject() = c.describe() + " shift " + std::to_string(shift);
  TokenForwardArgs args = c.forward_args(on_host);
  int64_t first_invalid = -1;
  args.first_invalid_row = &first_invalid;
  std::vector<double> scratch(static_cast<size_t>(cpu::token_forward_scratch(args)));
  cpu::launch_token_forward(args, scratch.data(), kSerial);
  run_on_device({&c.log_probs, &c.entropy, &c.lse}, c.acc_double(), shift, [&](Device& device) {
    const TokenForwardArgs own = c.forward_args(device.place());
    cuda::launch_token_forward(own, device.scratch(cuda::token_forward_scratch(own)), nullptr);
  });
  const TokenBackwardArgs backward = c.backward_args(on_host);
  scratch.resize(static_cast<size_t>(cpu::token_backward_scratch(backward)));
  cpu::launch_token_backward(backward, scratch.data(), kSerial);
  const auto magnitude = static_cast<double>(1 + c.num_indices());
  run_on_device(
      {&c.grad_input}, c.acc_double(), shift,
      [&](Device& device) {
        const TokenBackwardArgs own = c.backward_args(device.place());
        cuda::launch_token_backward(own, device.scratch(cuda::token_backward_scratch(own)),
                                    nullptr);
      },
      magnitude);
  if (in_place) {
    Device device(shift);
    TokenBackwardArgs own = c.backward_args(device.place());
    own.grad_input = own.input;
    cuda::launch_token_backward(own, device.scratch(cuda::token_backward_scratch(own)), nullptr);
    check_same(device.download(c.input), c.grad_input, c.acc_double(), magnitude);
  }
}

void test_tokens(Random& random, DType dtype, int64_t num_classes) {
  const int64_t num_rows = num_classes < 100 ? 700 : 60;  // few classes: several rows a thread
  for (const std::vector<int64_t>& rows : {std::vector<int64_t>{num_rows}, {40, 3}}) {
    const auto layout =
        random.pick({ClassLayout::kInner, ClassLayout::kOuter, ClassLayout::kSparse});
    const TestTensor tensor = test::class_tensor(dtype, rows, num_classes, layout);
    test_tokens(test::random_tokens(random, rows, tensor, tensor), random.below(9), true);
  }
  for (const bool is_same : {true, false}) {
    const TestTensor input =
        rows_with_gaps(dtype, num_rows, num_classes, random.pick<int64_t>({0, 1, 8, 40}));
    const TestTensor gradient =
        rows_with_gaps(dtype, num_rows, num_classes, random.pick<int64_t>({0, 3, 8}));
    test_tokens(test::random_tokens(random, {num_rows}, input, is_same ? input : gradient),
                random.pick<int64_t>({0, 0, 1, 5}), is_same);
  }
}

void test_invalid_targets() {
  test::subject() = "class indices out of range";
  Random random(11);
  CrossEntropyCase c;
  do {
    c = test::random_cross_entropy(random, {1000}, 300, ClassLayout::kInner);
  } while (c.target_is_probability);
  const auto first_invalid = [&] {
    Device device(0);
    TestTensor result(DType::kInt64, {}, Layout::kDense);
    auto* const row = static_cast<int64_t*>(device.place()(result));
    cuda::launch_first_invalid_target(c.forward_args(device.place()), row, nullptr);
    return device.download(result).at(0);
  };
  CHECK_CLOSE(first_invalid(), -1, 0);
  for (const int64_t row : {900, 777, 13}) {
    c.target.set(row, row == 777 ? -5 : 300);
    CHECK_CLOSE(first_invalid(), row, 0);
  }
  c.output = TestTensor(c.output.dtype, {1000}, Layout::kDense);
  c.grad_output = c.output;
  c.reduction = Reduction::kNone;
  test_forward(c, 0);
  test_backward(c, 0);
  CHECK(std::isnan(c.output.at(13)) && !std::isnan(c.output.at(14)));
}

}  // namespace
}  // namespace lossops

int main() {
  using namespace lossops;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU");
    return 77;
  }
  Random random(7);
  const std::vector<int64_t> shapes[] = {{},      {0},         {1},         {7},    {255},
                                         {1025},  {3, 400},    {16, 17, 5}, {4097}, {100003},
                                         {31, 5}, {1000, 700}, {64, 96}};
  for (int trial = 0; trial < 8; ++trial) {
    for (const auto& shape : shapes) {
      const Layout layout =
          random.pick({Layout::kDense, Layout::kReversed, Layout::kPadded, Layout::kSparse});
      test_elementwise(random, shape, layout, trial % 3);
    }
  }
  const std::vector<int64_t> broadcasts[] = {{5},        {40000},     {3, 700},    {700, 3},
                                             {1, 500},   {257, 129},  {4, 5, 600}, {2000, 40},
                                             {600, 140}, {20, 65, 30}};
  for (int trial = 0; trial < 4; ++trial) {
    for (const auto& shape : broadcasts) {
      for (int num_kept = 0; num_kept < static_cast<int>(shape.size()); ++num_kept) {
        test_broadcast(random, shape, random.pick({Layout::kDense, Layout::kReversed}), num_kept);
      }
    }
  }
  Random own(11);
  test_shared_targets(own);
  const std::vector<int64_t> rows[] = {{}, {0}, {1}, {100}, {7, 5}, {40, 30}};
  for (int trial = 0; trial < 3; ++trial) {
    for (const auto& shape : rows) {
      for (const int64_t num_classes : {1, 2, 7, 33, 64, 130, 400, 1024, 1025, 5000, 8193, 16385}) {
        for (const ClassLayout layout :
             {ClassLayout::kInner, ClassLayout::kOuter, ClassLayout::kSparse}) {
          if (num_classes < 1000 || shape.size() < 2) {
            test_cross_entropy(random, shape, num_classes, layout, trial);
          }
        }
      }
    }
  }
  // Long rows of several dimensions.
  Random dimensions(37);
  const std::vector<int64_t> few_rows[] = {{4, 3}, {2, 3, 2}};
  for (int trial = 0; trial < 3; ++trial) {
    for (const auto& shape : few_rows) {
      for (const int64_t num_classes : {8193, 16385}) {
        test_cross_entropy(dimensions, shape, num_classes, ClassLayout::kInner, trial);
      }
    }
  }
  Random short_rows(13);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t num_classes : {1, 2, 7, 16, 64, 97, 128, 401, 1024}) {
      test_short_rows(short_rows, dtype, num_classes);
    }
  }
  Random tokens(17);
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t num_classes :
         {1, 2, 5, 16, 64, 97, 256, 257, 401, 512, 513, 1025, 1665, 2100}) {
      test_tokens(tokens, dtype, num_classes);
    }
  }
  // Planes at any address, of more positions than the lanes of a block.
  const std::vector<int64_t> planes[] = {{1031}, {1100, 2}, {390, 3}, {128, 3}, {129, 2}};
  for (int trial = 0; trial < 3; ++trial) {
    for (const auto& shape : planes) {
      for (const int64_t num_classes : {7, 62, 90, 1500}) {
        test_cross_entropy(random, shape, num_classes, ClassLayout::kOuter, trial);
      }
    }
  }
  for (const int64_t num_classes : {21, 100, 500}) {
    for (int trial = 0; trial < 30; ++trial) {
      test_last_places(random, num_classes, ClassLayout::kInner);
      test_last_places(random, num_classes, ClassLayout::kOuter);
      test_infinities(random, num_classes, random.pick({ClassLayout::kInner, ClassLayout::kOuter}));
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t num_classes : {96, 97, 150, 389, 512}) {
      test_bits_of_planes(random, dtype, num_classes);
    }
    Random smoothed(23);
    for (const int64_t num_classes : {2, 3, 7, 9, 21, 33, 88}) {
      test_bits_of_planes(smoothed, dtype, num_classes, 0.1);
    }
    for (const int64_t num_classes : {2, 7, 33, 150, 401, 1100}) {
      for (const ClassLayout layout :
           {ClassLayout::kInner, ClassLayout::kOuter, ClassLayout::kSparse}) {
        test_far_rows(random, dtype, num_classes, layout);
      }
    }
    // Teams of 4 to 32 lanes. Of some of these, all tiles begin at multiples of 8 bytes.
    Random shifted(29);
    for (const int64_t num_classes : {401, 701, 1281, 1601, 2598, 3001, 4999}) {
      for (const int64_t shift : {0, 1, 5}) {
        test_far_rows(shifted, dtype, num_classes, ClassLayout::kInner, shift);
      }
    }
    // Rows so far apart that gaps are not copied: at a distance of whole vectors, and at another.
    Random apart(31);
    for (const int64_t num_classes : {3, 33, 150, 401, 1281}) {
      for (const int64_t stride : {2 * num_classes / 8 * 8 + 48, 2 * num_classes + 49}) {
        test_far_rows(apart, dtype, num_classes, ClassLayout::kInner,
                      apart.pick<int64_t>({0, 1, 5, 8}), stride - num_classes);
      }
    }
    Random soft(19);
    for (const int64_t num_classes : {2, 3, 16, 33, 88, 100, 333, 1000}) {
      for (const Soft what : {Soft::kSmoothed, Soft::kWeighted, Soft::kProbabilities}) {
        for (const ClassLayout layout :
             {ClassLayout::kInner, ClassLayout::kOuter, ClassLayout::kSparse}) {
          test_soft_rows(soft, dtype, num_classes, layout, what);
        }
      }
    }
    for (const int64_t num_classes : {96, 1500}) {
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMean}) {
        test_sums_of_odd_planes(random, dtype, num_classes, reduction);
      }
    }
  }
  Random of_floats(41);
  for (const int64_t num_classes : {3, 33, 100, 333, 1000}) {
    for (const Soft what : {Soft::kSmoothed, Soft::kWeighted}) {
      test_soft_rows(of_floats, DType::kFloat32, num_classes, ClassLayout::kInner, what);
    }
  }
  for (const int64_t num_classes : {150, 1716, 8192}) {
    for (int trial = 0; trial < 3; ++trial) {
      test_two_tops(random, num_classes);
    }
  }
  test_invalid_targets();
  return test::exit_status();
}
