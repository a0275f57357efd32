// Tensors and arguments for tests of launchers: random data of any dtype and layout, in
// host memory, and the argument structs that point to it or to a copy of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "launchers.h"

namespace lossops::test {

// Unit roundoff.
inline double epsilon(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x1p-53;
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kFloat16:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

// Half of the smallest number above zero.
inline double underflow(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1p-25;
    case DType::kFloat64:
      return 0;
    default:
      return 0x1p-134;
  }
}

inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float64", "float32", "float16", "bfloat16", "int64",
                                    "int32",   "int16",   "int8",    "uint8",    "bool"};
  return kNames[static_cast<int>(dtype)];
}

enum class Layout {
  kDense,
  kReversed,  // dense with dimension 0 the slowest
  kPadded,    // gaps between rows
  kSparse,    // and between elements
};

// Sizes and strides with dimension 0 the fastest, as in IterationSpace.
struct TestTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // 0 where broadcast
  std::vector<unsigned char> bytes;

  TestTensor() = default;

  // A dimension in broadcast has stride 0.
  TestTensor(DType dtype_, std::vector<int64_t> sizes_, Layout layout,
             const std::vector<bool>& broadcast = {})
      : dtype(dtype_), sizes(std::move(sizes_)), strides(sizes.size(), 0) {
    const int ndim = static_cast<int>(sizes.size());
    const bool has_gaps = layout == Layout::kSparse || layout == Layout::kPadded;
    int64_t stride = layout == Layout::kSparse ? 2 : 1;
    for (int i = 0; i < ndim; ++i) {
      const int dim = layout == Layout::kReversed ? ndim - 1 - i : i;
      if (!broadcast.empty() && broadcast[dim]) {
        continue;
      }
      strides[dim] = stride;
      stride = stride * sizes[dim] + (has_gaps ? 3 : 0);
    }
    bytes.resize(static_cast<size_t>((stride + 1) * element_size(dtype)));
  }

  bool absent() const { return bytes.empty(); }

  int64_t numel() const {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      product *= size;
    }
    return product;
  }

  // Of a linear index with dimension 0 the fastest.
  int64_t offset(int64_t index) const {
    int64_t result = 0;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      result += index % sizes[dim] * strides[dim];
      index /= sizes[dim];
    }
    return result;
  }

  double at(int64_t index) const { return load_as<double>(bytes.data(), dtype, offset(index)); }

  void set(int64_t index, double value) {
    const int64_t i = offset(index);
    switch (dtype) {
      case DType::kInt64:
        reinterpret_cast<int64_t*>(bytes.data())[i] = static_cast<int64_t>(value);
        return;
      case DType::kInt32:
        reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(value);
        return;
      case DType::kUInt8:
        bytes[static_cast<size_t>(i)] = static_cast<unsigned char>(value);
        return;
      default:
        store_as<double>(bytes.data(), dtype, i, value);
    }
  }

  void fill(const std::function<double()>& value) {
    for (int64_t i = 0; i < numel() && !absent(); ++i) {
      set(i, value());
    }
  }
};

// Where the memory of a tensor is: its own, or a copy of it.
using Place = std::function<void*(const TestTensor&)>;

inline void* on_host(const TestTensor& tensor) {
  return tensor.absent() ? nullptr : const_cast<unsigned char*>(tensor.bytes.data());
}

inline Operand operand_of(const TestTensor& tensor, const Place& place) {
  Operand operand;
  operand.data = place(tensor);
  operand.dtype = tensor.dtype;
  for (size_t dim = 0; dim < tensor.strides.size(); ++dim) {
    operand.strides[dim] = tensor.strides[dim];
  }
  return operand;
}

// As Python writes a tuple of them.
inline std::string text_of(const std::vector<int64_t>& sizes) {
  std::string text = "(";
  for (const int64_t size : sizes) {
    text += std::to_string(size) + ",";
  }
  return text + ")";
}

inline IterationSpace space_of(const std::vector<int64_t>& sizes) {
  IterationSpace space;
  space.ndim = static_cast<int>(sizes.size());
  space.numel = 1;
  for (int dim = 0; dim < space.ndim; ++dim) {
    space.sizes[dim] = sizes[static_cast<size_t>(dim)];
    space.numel *= space.sizes[dim];
  }
  return space;
}

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}

  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(generator_() >> 11) * 0x1p-53;
  }
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(bound));
  }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 generator_;
};

// ---------------------------------------------------------------- elementwise

struct ElementwiseCase {
  ElementwiseLoss loss = ElementwiseLoss::mse_loss;
  bool log_target = false;
  bool log_input = true;
  Reduction reduction = Reduction::kMean;
  std::vector<int64_t> sizes;
  TestTensor input, target, weight;  // weight may be absent
  TestTensor output, mean_terms, grad_output;
  TestTensor grad_input, grad_target, grad_weight;
  int num_kept = 0;  // backward_reduce only
  bool contiguous = false;

  std::string describe() const {
    std::string text = loss == ElementwiseLoss::mse_loss ? "mse_loss " : "kl_div ";
    text += text_of(sizes) + " " + name_of(input.dtype) + " x " + name_of(target.dtype) + " -> " +
            name_of(output.dtype) + " reduction " + std::to_string(static_cast<int>(reduction));
    text += weight.absent() ? "" : " weighted";
    text += log_target ? " log_target" : "";
    text += log_input ? " log_input" : "";
    return text;
  }

  bool acc_double() const {
    return input.dtype == DType::kFloat64 || target.dtype == DType::kFloat64 ||
           weight.dtype == DType::kFloat64;
  }

  double weight_copies() const {
    double copies = 1;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      copies *= !weight.absent() && weight.strides[dim] == 0 ? static_cast<double>(sizes[dim]) : 1;
    }
    return copies;
  }

  void fill_common(ElementwiseArgs& args, const Place& place) const {
    args.loss = loss;
    args.params.values[0] = log_target ? 1 : 0;
    args.params.values[1] = log_input ? 1 : 0;
    args.reduction = reduction;
    args.space = space_of(sizes);
    args.input = operand_of(input, place);
    args.target = operand_of(target, place);
    args.weight = operand_of(weight, place);
    args.contiguous = contiguous;
    args.acc_double = acc_double();
    args.denominator = static_cast<double>(args.space.numel);
    args.weight_copies = weight_copies();
  }

  double* mean_terms_at(const Place& place) const {
    const bool weighted_mean = reduction == Reduction::kMean && !weight.absent();
    return weighted_mean ? static_cast<double*>(place(mean_terms)) : nullptr;
  }

  ElementwiseForwardArgs forward_args(const Place& place) const {
    ElementwiseForwardArgs args;
    fill_common(args, place);
    args.output = operand_of(output, place);
    args.mean_terms = mean_terms_at(place);
    return args;
  }

  ElementwiseBackwardReduceArgs backward_args(const Place& place) const {
    ElementwiseBackwardReduceArgs args;
    fill_common(args, place);
    args.grad_output = operand_of(grad_output, place);
    args.mean_terms = mean_terms_at(place);
    args.grad_input = operand_of(grad_input, place);
    args.grad_target = operand_of(grad_target, place);
    args.grad_weight = operand_of(grad_weight, place);
    args.num_kept = num_kept;
    return args;
  }
};

// A problem of random dtypes and values. target may have another layout than the rest, and
// is broadcast along the dimensions from num_kept on, if there are any.
inline ElementwiseCase random_elementwise(Random& random, std::vector<int64_t> sizes, Layout layout,
                                          int num_kept) {
  ElementwiseCase result;
  const int ndim = static_cast<int>(sizes.size());
  result.sizes = sizes;
  result.num_kept = num_kept;
  result.loss = random.pick({ElementwiseLoss::mse_loss, ElementwiseLoss::kl_div});
  result.log_target = random.below(2) == 1;
  result.log_input = random.below(2) == 1;
  result.reduction = random.pick({Reduction::kNone, Reduction::kMean, Reduction::kSum});
  const bool is_mse = result.loss == ElementwiseLoss::mse_loss;
  const bool weighted = is_mse && random.below(2) == 1;
  const bool mixed = random.below(3) == 0;
  const auto any_dtype = [&] {
    return random.pick({DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  };
  const DType dtype = any_dtype();
  const DType target_dtype = mixed ? any_dtype() : dtype;
  const bool wide = dtype == DType::kFloat64 || target_dtype == DType::kFloat64;
  const DType result_dtype =
      dtype == target_dtype ? dtype : (wide ? DType::kFloat64 : DType::kFloat32);
  std::vector<bool> broadcast(sizes.size(), false);
  for (int dim = num_kept; dim < ndim; ++dim) {
    broadcast[static_cast<size_t>(dim)] = true;
  }

  const Layout target_layout =
      ndim > 1 ? random.pick({layout, layout, Layout::kDense, Layout::kReversed}) : layout;
  result.input = TestTensor(dtype, sizes, layout);
  result.target = TestTensor(target_dtype, sizes, target_layout, broadcast);
  if (weighted) {
    result.weight = TestTensor(dtype, sizes, layout, broadcast);
  }
  const bool none = result.reduction == Reduction::kNone;
  const std::vector<int64_t> result_sizes = none ? sizes : std::vector<int64_t>{};
  result.output = TestTensor(result_dtype, result_sizes, layout);
  result.grad_output = TestTensor(result_dtype, result_sizes, layout);
  result.mean_terms = TestTensor(DType::kFloat64, {2}, Layout::kDense);

  const bool log_input = result.log_input && !is_mse;
  const bool log_target = result.log_target && !is_mse;
  const auto probability = [&](bool log, bool zeros) {
    const double p = zeros && random.below(8) == 0 ? 0 : random.uniform(0.01, 1);
    return log ? std::log(p) : p;
  };
  result.input.fill([&] { return probability(log_input, false); });
  result.target.fill([&] { return probability(log_target, !is_mse && num_kept == ndim); });
  result.weight.fill([&] { return random.uniform(0.1, 1); });
  result.grad_output.fill([&] { return random.uniform(-1, 1); });
  result.contiguous = layout == Layout::kDense && ndim == 1 && num_kept == ndim;
  return result;
}

// -------------------------------------------------------------- cross entropy

struct CrossEntropyCase {
  Reduction reduction = Reduction::kMean;
  std::vector<int64_t> rows;
  int64_t num_classes = 0;
  // The class dimension comes last in sizes and strides.
  TestTensor input, target, weight;  // target without it where it holds indices
  bool target_is_probability = false;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  TestTensor output, row_stats, mean_terms, grad_output;
  TestTensor grad_input, grad_target, grad_weight;

  int64_t num_rows() const { return space_of(rows).numel; }
  bool dense() const { return target_is_probability || label_smoothing > 0; }

  std::string describe() const {
    std::string text =
        "cross_entropy " + text_of(rows) + " of " + std::to_string(num_classes) + " classes, " +
        name_of(input.dtype) + " x " + name_of(target.dtype) + " -> " + name_of(output.dtype) +
        " reduction " + std::to_string(static_cast<int>(reduction)) + " smoothing " +
        std::to_string(label_smoothing) + " class stride " + std::to_string(input.strides.back());
    return text + (weight.absent() ? "" : " weighted");
  }

  bool acc_double() const {
    return input.dtype == DType::kFloat64 || weight.dtype == DType::kFloat64 ||
           (target_is_probability && target.dtype == DType::kFloat64);
  }

  void fill_common(CrossEntropyArgs& args, const Place& place) const {
    args.reduction = reduction;
    args.rows = space_of(rows);
    args.num_classes = num_classes;
    args.input = operand_of(input, place);
    args.input_class_stride = input.strides.back();
    args.target = operand_of(target, place);
    args.target_is_probability = target_is_probability;
    args.target_class_stride = target_is_probability ? target.strides.back() : 0;
    args.weight = place(weight);
    args.weight_dtype = weight.dtype;
    args.weight_stride = weight.absent() ? 1 : weight.strides[0];
    args.ignore_index = ignore_index;
    args.label_smoothing = label_smoothing;
    args.acc_double = acc_double();
  }

  CrossEntropyForwardArgs forward_args(const Place& place) const {
    CrossEntropyForwardArgs args;
    fill_common(args, place);
    args.output = operand_of(output, place);
    args.row_stats = place(row_stats);
    args.mean_terms = static_cast<double*>(place(mean_terms));
    return args;
  }

  CrossEntropyBackwardArgs backward_args(const Place& place) const {
    CrossEntropyBackwardArgs args;
    fill_common(args, place);
    args.grad_output = operand_of(grad_output, place);
    args.row_stats = place(row_stats);
    args.mean_terms = static_cast<const double*>(place(mean_terms));
    args.grad_input = operand_of(grad_input, place);
    args.grad_input_class_stride = grad_input.strides.back();
    args.grad_target = operand_of(grad_target, place);
    args.grad_target_class_stride = grad_target.absent() ? 1 : grad_target.strides.back();
    args.grad_weight = place(grad_weight);
    return args;
  }
};

enum class ClassLayout {
  kInner,   // classes contiguous: (N, C)
  kOuter,   // rows contiguous: (N, C, d1, ...)
  kSparse,  // neither
};

inline TestTensor class_tensor(DType dtype, const std::vector<int64_t>& rows, int64_t num_classes,
                               ClassLayout layout) {
  std::vector<int64_t> sizes = rows;
  sizes.push_back(num_classes);
  if (layout != ClassLayout::kInner) {
    return TestTensor(dtype, sizes,
                      layout == ClassLayout::kOuter ? Layout::kDense : Layout::kSparse);
  }
  TestTensor tensor(dtype, sizes, Layout::kDense);
  int64_t stride = num_classes;
  for (size_t dim = 0; dim < rows.size(); ++dim) {
    tensor.strides[dim] = stride;
    stride *= rows[dim];
  }
  tensor.strides.back() = 1;
  return tensor;
}

inline CrossEntropyCase random_cross_entropy(Random& random, std::vector<int64_t> rows,
                                             int64_t num_classes, ClassLayout layout) {
  CrossEntropyCase result;
  result.rows = rows;
  result.num_classes = num_classes;
  result.reduction = random.pick({Reduction::kNone, Reduction::kMean, Reduction::kSum});
  result.target_is_probability = random.below(3) == 0;
  result.label_smoothing = random.pick({0.0, 0.0, 0.1, 1.0});
  const DType dtype =
      random.pick({DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  result.input = class_tensor(dtype, rows, num_classes, layout);
  result.input.fill([&] { return random.uniform(-8, 8); });
  DType result_dtype = dtype;
  if (result.target_is_probability) {
    const DType target_dtype = random.pick({dtype, dtype, DType::kFloat32});
    result_dtype = dtype == target_dtype || dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    result.target =
        class_tensor(target_dtype, rows, num_classes, random.pick({layout, ClassLayout::kInner}));
    result.target.fill([&] {
      return random.below(6) == 0 ? 0 : random.uniform(0, 2 / static_cast<double>(num_classes));
    });
    result.grad_target = result.target;
  } else {
    const bool bytes = num_classes <= 255;
    result.target = TestTensor(
        random.pick({DType::kInt64, DType::kInt32, bytes ? DType::kUInt8 : DType::kInt64}), rows,
        layout == ClassLayout::kSparse ? Layout::kSparse : Layout::kDense);
    result.ignore_index = bytes ? random.pick<int64_t>({num_classes, 0}) : -1;
    result.target.fill([&] {
      const bool ignored = random.below(5) == 0;
      return static_cast<double>(ignored ? result.ignore_index : random.below(num_classes));
    });
  }
  if (random.below(2) == 1) {
    result.weight =
        TestTensor(dtype, {num_classes}, random.pick({Layout::kDense, Layout::kSparse}));
    result.weight.fill([&] { return random.uniform(0.2, 2); });
    if (result.target_is_probability) {
      result.grad_weight = TestTensor(dtype, {num_classes}, Layout::kDense);
    }
  }
  result.grad_input = result.input;
  const bool none = result.reduction == Reduction::kNone;
  const std::vector<int64_t> result_rows = none ? rows : std::vector<int64_t>{};
  const Layout result_layout = random.pick({Layout::kDense, Layout::kSparse});
  result.output = TestTensor(result_dtype, result_rows, result_layout);
  result.grad_output = TestTensor(result_dtype, result_rows, result_layout);
  result.grad_output.fill([&] { return random.uniform(-1, 1); });
  result.mean_terms = TestTensor(DType::kFloat64, {2}, Layout::kDense);
  result.row_stats = TestTensor(result.acc_double() ? DType::kFloat64 : DType::kFloat32,
                                {result.num_rows(), result.dense() ? 3 : 2}, Layout::kDense);
  return result;
}

}  // namespace lossops::test
