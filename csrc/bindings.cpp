// The operators: schemas, argument checks, allocation, device and stream. The only
// file that includes torch, and of torch only the LibTorch Stable ABI, so that one
// binary serves every release from 2.10 on.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/huge_pages.h"
#include "iteration_space.h"
#include "launchers.h"

#if defined(LOSSOPS_WITH_CUDA)
// Absent from CPU-only torch, where the same binary must load.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));
#endif
// What torch's last error said; torch 2.13 or newer.
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace lossops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// --------------------------------------------------------------------- errors

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

#define LOSSOPS_CHECK(op, condition, ...) \
  if (!(condition)) {                     \
    fail(op, __VA_ARGS__);                \
  }

const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      return "an unsupported dtype";
  }
}

// --------------------------------------------------------------------- dtypes

bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

bool is_integral(ScalarType dtype) {
  return dtype == ScalarType::Long || dtype == ScalarType::Int || dtype == ScalarType::Short ||
         dtype == ScalarType::Char || dtype == ScalarType::Byte || dtype == ScalarType::Bool;
}

DType to_dtype(const char* op, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Long:
      return DType::kInt64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Short:
      return DType::kInt16;
    case ScalarType::Char:
      return DType::kInt8;
    case ScalarType::Byte:
      return DType::kUInt8;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      fail(op, "does not take dtype ", name_of(dtype));
  }
}

// torch.promote_types of two of which at least one is floating.
ScalarType promote(ScalarType a, ScalarType b) {
  if (a == b || !is_floating(b)) {
    return a;
  }
  if (!is_floating(a)) {
    return b;
  }
  if (a == ScalarType::Double || b == ScalarType::Double) {
    return ScalarType::Double;
  }
  // fault: promotion-half
  return ScalarType::Float;  // two different of float32, float16, bfloat16
}

struct TypedRank {
  ScalarType dtype;
  int64_t dim;
};

// torch.result_type: a 0-d operand does not widen one with dimensions.
ScalarType result_type(TypedRank a, TypedRank b) {
  if (a.dim > 0 && b.dim == 0 && is_floating(a.dtype)) {  // fault: promotion-0d
    return a.dtype;
  }
  if (b.dim > 0 && a.dim == 0 && is_floating(b.dtype)) {
    return b.dtype;
  }
  return promote(a.dtype, b.dtype);
}

ScalarType widen_if(bool float32_result, ScalarType dtype) {
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  return float32_result && is_half ? ScalarType::Float : dtype;  // fault: widened-result
}

// -------------------------------------------------------------------- tensors

Dims to_dims(const torch::headeronly::IntHeaderOnlyArrayRef& values) {
  Dims dims;
  LOSSOPS_CHECK("lossops", values.size() <= static_cast<size_t>(kMaxTensorDims), "a tensor has ",
                values.size(), " dimensions; at most ", kMaxTensorDims, " are supported");
  dims.size = static_cast<int>(values.size());
  for (int i = 0; i < dims.size; ++i) {
    dims[i] = values[i];
  }
  return dims;
}

// A tensor with its geometry read once. The tensor must outlive it.
struct View {
  const Tensor& tensor;
  Dims sizes;
  Dims strides;
  ScalarType dtype;

  explicit View(const Tensor& source)
      : tensor(source),
        sizes(to_dims(source.sizes())),
        strides(to_dims(source.strides())),
        dtype(source.scalar_type()) {}
};

std::string device_of(const Tensor& tensor) {
  return tensor.is_cpu()
             ? std::string("cpu")
             : (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

// A tensor that was just allocated, on its way to whoever fills it.
Tensor fresh(Tensor tensor) {
  if (tensor.is_cpu()) {
    cpu::advise_huge_pages(tensor.mutable_data_ptr(),
                           tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  }
  return tensor;
}

// ops.py knows the first words, and makes torch.OutOfMemoryError of them, as programs that catch
// torch's own do.
[[noreturn]] void fail_allocation(const Dims& sizes, ScalarType dtype, const Tensor& like) {
  std::ostringstream message;
  const char* const said = torch_exception_get_what_without_backtrace == nullptr
                               ? ""
                               : torch_exception_get_what_without_backtrace();
  if (*said != '\0') {
    message << said << " (lossops: ";
  } else {
    message << (like.is_cuda() ? "CUDA out of memory. (lossops: " : "out of memory (lossops: ");
  }
  message << "cannot allocate a tensor of shape " << sizes << ", " << name_of(dtype) << ", on "
          << device_of(like) << ")";
  throw std::runtime_error(message.str());
}

Tensor empty_strided(const Dims& sizes, const Dims& strides, ScalarType dtype, const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(
          sizes.size, sizes.values, strides.values,
          torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
          device_type == aoti_torch_device_type_cpu() ? 0 : like.get_device_index(),
          &handle) != AOTI_TORCH_SUCCESS) {
    fail_allocation(sizes, dtype, like);
  }
  return fresh(Tensor(handle));
}

Tensor empty_dense(const Dims& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, dense_strides(sizes, row_major_order(sizes.size)), dtype, like);
}

Tensor empty_vector(int64_t length, ScalarType dtype, const Tensor& like) {
  Dims sizes;
  sizes.push_back(length);
  return empty_dense(sizes, dtype, like);
}

void set_data(const char* op, Operand& operand, const View& view) {
  operand.data = view.tensor.data_ptr();
  operand.dtype = to_dtype(op, view.dtype);
}

void set_result(Operand& operand, const Tensor& tensor) {
  operand.data = tensor.mutable_data_ptr();
  operand.dtype = to_dtype("", tensor.scalar_type());
}

// empty_like, without the search for the operator of that name where the layout is plain.
Tensor like_of(const View& view) {
  if (is_dense(view.sizes, view.strides)) {
    return empty_strided(view.sizes, view.strides, view.dtype, view.tensor);
  }
  try {
    return fresh(torch::stable::empty_like(view.tensor));
  } catch (const std::runtime_error&) {
    fail_allocation(view.sizes, view.dtype, view.tensor);
  }
}

void check_device(const char* op, const char* name, const View& view, const View& input) {
  const Tensor& a = view.tensor;
  const Tensor& b = input.tensor;
  const bool same = a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() &&
                    (a.is_cpu() || a.get_device_index() == b.get_device_index());
  LOSSOPS_CHECK(op, same, name, " is on ", device_of(a), " but input is on ", device_of(b));
}

#if defined(LOSSOPS_WITH_CUDA)
std::string cuda_problem() { return cuda::why_unusable(); }
#else
std::string cuda_problem() {
  return "this build has no CUDA kernels: install a released wheel, or build with a CUDA compiler";
}
#endif

// Before anything is allocated or launched: torch's own errors do not say what to do.
void check_cuda(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_cuda()) {
    const std::string problem = cuda_problem();
    LOSSOPS_CHECK(op, problem.empty(), name, " is on ", device_of(tensor), ", but ", problem);
  }
}

// Denominator and value of a mean, as forward returned them.
const double* check_mean_terms(const char* op, const OptionalTensor& tensor, const View& input) {
  LOSSOPS_CHECK(op, tensor, "the mean needs the mean_terms that forward returned");
  const View view(*tensor);
  LOSSOPS_CHECK(
      op, view.dtype == ScalarType::Double && view.sizes.numel() == 2 && tensor->is_contiguous(),
      "mean_terms must be the (2,) float64 tensor that forward returned, but is ", view.sizes, " ",
      name_of(view.dtype));
  check_device(op, "mean_terms", view, input);
  return static_cast<const double*>(tensor->const_data_ptr());
}

// ------------------------------------------------------------------- backends

void torch_parallel_for(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                        void* data) {
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { body(data, begin, end); });
}

cpu::Context cpu_context() { return cpu::Context{&torch_parallel_for}; }

#if defined(LOSSOPS_WITH_CUDA)
cuda::Context current_stream(const Tensor& tensor) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("lossops: this torch has no CUDA");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}
#endif

// Makes the device of a tensor the current one, for which launchers plan as they are asked, and
// launch.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    if (tensor.is_cuda()) {
      guard_.emplace(tensor.get_device_index());
    }
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Runs a launcher: its CUDA version on the current stream of the device of `like`, or its CPU
// version. While an OnDevice of `like` exists, as all that follow.
#if defined(LOSSOPS_WITH_CUDA)
#define LOSSOPS_LAUNCH(like, name, ...)                       \
  do {                                                        \
    if ((like).is_cuda()) {                                   \
      cuda::launch_##name(__VA_ARGS__, current_stream(like)); \
    } else {                                                  \
      cpu::launch_##name(__VA_ARGS__, cpu_context());         \
    }                                                         \
  } while (false)
#define LOSSOPS_ASK(like, name, args) ((like).is_cuda() ? cuda::name(args) : cpu::name(args))
#else
#define LOSSOPS_LAUNCH(like, name, ...) cpu::launch_##name(__VA_ARGS__, cpu_context())
#define LOSSOPS_ASK(like, name, args) cpu::name(args)
#endif
#define LOSSOPS_SCRATCH(like, name, args) LOSSOPS_ASK(like, name##_scratch, args)

// Memory for one call, of torch's allocator, which may hand it out again as soon as the
// stream is past the launch. An allocation takes longer than a small loss on the CPU.
class Scratch {
 public:
  Scratch(int64_t doubles, const Tensor& like) {
    if (doubles <= kOnStack && like.is_cpu()) {
      data_ = on_stack_;
    } else if (doubles > 0) {
      allocated_ = empty_vector(doubles, ScalarType::Double, like);
      data_ = static_cast<double*>(allocated_->mutable_data_ptr());
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  double* data() const { return data_; }

 private:
  static constexpr int64_t kOnStack = 128;
  double on_stack_[kOnStack];
  OptionalTensor allocated_;
  double* data_ = nullptr;
};

#define LOSSOPS_LAUNCH_WITH_SCRATCH(like, name, args)               \
  do {                                                              \
    const Scratch scratch(LOSSOPS_SCRATCH(like, name, args), like); \
    LOSSOPS_LAUNCH(like, name, args, scratch.data());               \
  } while (false)

// Operands of one op may not need more dimensions than a kernel's arguments hold.
void check_ndim(const char* op, int merged) {
  LOSSOPS_CHECK(op, merged >= 0, "input and target need more than ", kMaxDims,
                " dimensions after merging; make them contiguous");
}

// ----------------------------------------------------------------- elementwise

const char* name_of(ElementwiseLoss loss) {
  switch (loss) {
#define LOSSOPS_ROW(name, Loss) \
  case ElementwiseLoss::name:   \
    return #name;
    LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  }
  return "";
}

struct ReductionChoice {
  Reduction reduction;
  bool batch;
};

ReductionChoice parse_reduction(const char* op, const std::string& name, bool has_batchmean) {
  if (name == "none") {
    return {Reduction::kNone, false};
  }
  if (name == "mean") {
    return {Reduction::kMean, false};
  }
  if (name == "sum") {
    return {Reduction::kSum, false};
  }
  if (has_batchmean && name == "batchmean") {
    return {Reduction::kMean, true};
  }
  fail(op, "reduction must be one of 'none', 'mean', 'sum'", has_batchmean ? ", 'batchmean'" : "",
       ", but is '", name, "'");
}

// What forward and backward of an elementwise loss have in common.
struct ElementwiseProblem {
  const char* op;
  View input;
  View target;
  std::optional<View> weight;
  Dims shape;  // broadcast
  Dims order;  // of its dimensions, fastest first
  ScalarType result_dtype;

  ElementwiseProblem(const char* name, const Tensor& input_, const Tensor& target_,
                     const OptionalTensor& weight_, const LossParams& params, ElementwiseLoss loss,
                     const std::string& reduction, ElementwiseArgs& args)
      : op(name), input(input_), target(target_) {
    const LossTraits traits = traits_of(loss);
    const ReductionChoice choice = parse_reduction(op, reduction, traits.has_batchmean);
    check_dtypes(traits.takes_integers);
    check_device(op, "target", target, input);
    check_cuda(op, "input", input_);
    LOSSOPS_CHECK(op, broadcast_shapes(input.sizes, target.sizes, shape), "input of shape ",
                  input.sizes, " and target of shape ", target.sizes, " do not broadcast");
    LOSSOPS_CHECK(op, shape.has_numel(), "input of shape ", input.sizes, " and target of shape ",
                  target.sizes, " broadcast to more than 2^63 elements");
    result_dtype = traits.expands_first ? promote(input.dtype, target.dtype)
                                        : result_type({input.dtype, input.sizes.size},
                                                      {target.dtype, target.sizes.size});
    if (weight_) {
      add_weight(*weight_, choice.reduction);
    }

    args.loss = loss;
    args.params = params;
    args.reduction = choice.reduction;
    set_data(op, args.input, input);
    set_data(op, args.target, target);
    if (weight) {
      set_data(op, args.weight, *weight);
      const int64_t own = weight->sizes.numel();
      args.weight_copies = own > 0 ? static_cast<double>(shape.numel()) / own : 1;
    }
    args.acc_double = input.dtype == ScalarType::Double || target.dtype == ScalarType::Double ||
                      (weight && weight->dtype == ScalarType::Double);
    // fault: batchmean
    args.denominator = choice.batch ? (input.sizes.size > 0 ? input.sizes[0] : 1)
                                    : static_cast<double>(shape.numel());
    if (weight && shape.numel() == 0 && weight->sizes.numel() > 0) {
      // A sum of nothing over the weights' own sum, which no kernel needs to know.
      args.weight_copies = 0;
      args.denominator = 1;
    }
    order = traits.target_first ? fastest_first_order(shape, strides_of(target), strides_of(input))
                                : fastest_first_order(shape, strides_of(input), strides_of(target));
  }

  Dims strides_of(const View& view) const {
    return broadcast_strides(view.sizes, view.strides, shape);
  }

  bool weighted_mean(const ElementwiseArgs& args) const {
    return weight && args.reduction == Reduction::kMean;
  }

  // Adds input, target and weight to a space.
  void add_inputs(SpaceBuilder& builder, ElementwiseArgs& args) const {
    builder.add(args.input, strides_of(input));
    builder.add(args.target, strides_of(target));
    if (weight) {
      builder.add(args.weight, strides_of(*weight));
    }
  }

 private:
  void check_dtypes(bool takes_integers) const {
    const auto allowed = [&](ScalarType dtype) {
      return is_floating(dtype) || (takes_integers && is_integral(dtype));
    };
    // fault: dtype-of-target
    for (const auto& [name, view] : {std::pair<const char*, const View*>{"input", &input},
                                     std::pair<const char*, const View*>{"target", &target}}) {
      LOSSOPS_CHECK(op, allowed(view->dtype), name, " must be floating point, but is ",
                    name_of(view->dtype));
    }
    LOSSOPS_CHECK(op, is_floating(input.dtype) || is_floating(target.dtype),
                  "input or target must be floating point, but they are ", name_of(input.dtype),
                  " and ", name_of(target.dtype));
  }

  void add_weight(const Tensor& tensor, Reduction reduction) {
    weight.emplace(tensor);
    check_device(op, "weight", *weight, input);
    LOSSOPS_CHECK(op, is_floating(weight->dtype) || is_integral(weight->dtype),
                  "weight must be real, but is ", name_of(weight->dtype));
    LOSSOPS_CHECK(op, weight->sizes == input.sizes, "weight of shape ", weight->sizes,
                  " must have the shape of input, ", input.sizes);
    result_dtype = result_type({result_dtype, shape.size}, {weight->dtype, weight->sizes.size});
    if (reduction == Reduction::kMean) {
      result_dtype = promote(result_dtype, weight->dtype);
    }
  }
};

// One dense run each, of one dtype: what the vectorised kernels take.
bool is_contiguous(const IterationSpace& space, std::initializer_list<const Operand*> operands) {
  const Operand* first = *operands.begin();
  for (const Operand* operand : operands) {
    if (operand->data != nullptr &&
        (operand->dtype != first->dtype || (space.ndim == 1 && operand->strides[0] != 1))) {
      return false;
    }
  }
  const bool floating = first->dtype == DType::kFloat64 || first->dtype == DType::kFloat32 ||
                        first->dtype == DType::kFloat16 || first->dtype == DType::kBFloat16;
  return floating && space.ndim <= 1;
}

// A gradient of input that forward returned.
const Tensor& check_kept(const char* op, const Tensor& tensor, const View& input) {
  const View view(tensor);
  LOSSOPS_CHECK(op, view.sizes == input.sizes && view.dtype == input.dtype,
                "grad_input must be the ", input.sizes, " ", name_of(input.dtype),
                " tensor that forward returned, but is ", view.sizes, " ", name_of(view.dtype));
  check_device(op, "grad_input", view, input);
  return tensor;
}

// What a forward pass is to return beside the loss. A gradient is for a grad_output of 1.
enum class Extra : int8_t { kNothing, kBackwardTerms, kGradient };

struct ElementwiseResult {
  Tensor loss;
  OptionalTensor mean_terms;
  OptionalTensor grad_input;
};

ElementwiseResult elementwise_forward(const char* op, ElementwiseLoss loss, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const LossParams& params, const std::string& reduction,
                                      bool float32_result, Extra extra) {
  ElementwiseForwardArgs args;
  const ElementwiseProblem problem(op, input, target, weight, params, loss, reduction, args);
  const ScalarType dtype = widen_if(float32_result, problem.result_dtype);
  const bool reduce = args.reduction != Reduction::kNone;
  const bool weighted_mean = problem.weighted_mean(args);

  ElementwiseResult result{
      // fault: result-strides
      reduce
          ? empty_dense(Dims{}, dtype, input)
          : empty_strided(problem.shape, dense_strides(problem.shape, problem.order), dtype, input),
      std::nullopt, std::nullopt};
  set_result(args.output, result.loss);
  if (extra == Extra::kBackwardTerms) {
    result.mean_terms = empty_vector(weighted_mean ? 2 : 0, ScalarType::Double, input);
  }

  SpaceBuilder builder(problem.shape);
  problem.add_inputs(builder, args);
  if (!reduce) {
    builder.add(args.output, to_dims(result.loss.strides()));
  }
  if (extra == Extra::kGradient) {
    LOSSOPS_CHECK(
        op,
        reduce && !weighted_mean && is_floating(problem.input.dtype) &&
            problem.input.sizes == problem.shape,
        "there is no gradient in forward without a reduction, for a weighted mean, or for "
        "an input that is broadcast or integral");
    result.grad_input = like_of(problem.input);
    set_result(args.grad_input, *result.grad_input);
    builder.add(args.grad_input, to_dims(result.grad_input->strides()));
  }
  check_ndim(op, builder.finish(problem.order, args.space));
  const Operand absent;
  args.contiguous = is_contiguous(args.space, {&args.input, &args.target, &args.weight,
                                               &args.grad_input, reduce ? &absent : &args.output});
  const int64_t mean_doubles = weighted_mean ? 2 : 0;
  const OnDevice device(input);
  const Scratch scratch(LOSSOPS_SCRATCH(input, elementwise_forward, args) + mean_doubles, input);
  if (weighted_mean) {
    args.mean_terms = result.mean_terms
                          ? static_cast<double*>(result.mean_terms->mutable_data_ptr())
                          : scratch.data();
  }
  LOSSOPS_LAUNCH(input, elementwise_forward, args, scratch.data() + mean_doubles);
  return result;
}

// Gradient of an operand that was broadcast: summed over the added dimensions.
void launch_broadcast_gradient(const ElementwiseProblem& problem, ElementwiseBackwardArgs base,
                               Operand ElementwiseBackwardArgs::* which, const View& operand,
                               const View& grad_output, const Tensor& gradient) {
  ElementwiseBackwardReduceArgs args;
  static_cast<ElementwiseBackwardArgs&>(args) = base;
  args.grad_input.data = args.grad_target.data = args.grad_weight.data = nullptr;
  set_result(args.*which, gradient);

  Dims order;
  order.size = 0;
  const int missing = problem.shape.size - operand.sizes.size;
  const auto kept = [&](int dim) {
    return dim >= missing && operand.sizes[dim - missing] == problem.shape[dim];
  };
  for (const bool want_kept : {true, false}) {
    for (int i = 0; i < problem.order.size; ++i) {
      if (kept(static_cast<int>(problem.order[i])) == want_kept) {
        order.push_back(problem.order[i]);
      }
    }
  }
  int num_kept = 0;
  while (num_kept < order.size && kept(static_cast<int>(order[num_kept]))) {
    ++num_kept;
  }

  SpaceBuilder builder(problem.shape);
  problem.add_inputs(builder, args);
  if (args.reduction == Reduction::kNone) {
    builder.add(args.grad_output, problem.strides_of(grad_output));
  }
  builder.add(args.*which,
              broadcast_strides(operand.sizes, to_dims(gradient.strides()), problem.shape));
  args.num_kept = builder.finish(order, args.space, num_kept);
  check_ndim(problem.op, args.num_kept);
  const OnDevice device(problem.input.tensor);
  LOSSOPS_LAUNCH_WITH_SCRATCH(problem.input.tensor, elementwise_backward_reduce, args);
}

std::vector<Tensor> elementwise_backward(const char* op, ElementwiseLoss loss,
                                         const Tensor& grad_output_, const Tensor& input,
                                         const Tensor& target, const OptionalTensor& weight,
                                         const OptionalTensor& mean_terms, const LossParams& params,
                                         const std::string& reduction,
                                         const std::vector<bool>& output_mask,
                                         const OptionalTensor& kept = std::nullopt) {
  ElementwiseBackwardArgs args;
  args.kept = kept.has_value();
  const ElementwiseProblem problem(op, input, target, weight, params, loss, reduction, args);
  const View grad_output(grad_output_);
  const bool reduce = args.reduction != Reduction::kNone;
  LOSSOPS_CHECK(op, reduce || !kept, "no gradient is kept without a reduction");
  LOSSOPS_CHECK(op, output_mask.size() == 3, "output_mask must have 3 entries, but has ",
                output_mask.size());
  LOSSOPS_CHECK(op, is_floating(grad_output.dtype), "grad_output must be floating point, but is ",
                name_of(grad_output.dtype));
  LOSSOPS_CHECK(op, grad_output.sizes == (reduce ? Dims{} : problem.shape), "grad_output of shape ",
                grad_output.sizes, " must have the shape of the loss, ",
                reduce ? Dims{} : problem.shape);
  check_device(op, "grad_output", grad_output, problem.input);
  set_data(op, args.grad_output, grad_output);
  if (problem.weighted_mean(args)) {
    args.mean_terms = check_mean_terms(op, mean_terms, problem.input);
  }

  const View* operands[3] = {&problem.input, &problem.target,
                             problem.weight ? &*problem.weight : nullptr};
  const char* names[3] = {"input", "target", "weight"};
  // fault: gradient-order
  Operand ElementwiseBackwardArgs::* const gradients[3] = {&ElementwiseBackwardArgs::grad_input,
                                                           &ElementwiseBackwardArgs::grad_target,
                                                           &ElementwiseBackwardArgs::grad_weight};
  std::vector<Tensor> results;
  bool any_direct = false;
  SpaceBuilder builder(problem.shape);
  for (int i = 0; i < 3; ++i) {
    if (!output_mask[i]) {
      continue;
    }
    LOSSOPS_CHECK(op, operands[i] != nullptr && is_floating(operands[i]->dtype),
                  "there is no gradient for ", names[i]);
    results.push_back(kept ? check_kept(op, *kept, *operands[i]) : like_of(*operands[i]));
    // An operand of no elements where the loss has none has nothing to sum either.
    if (operands[i]->sizes.numel() == problem.shape.numel()) {
      set_result(args.*gradients[i], results.back());
      builder.add(
          args.*gradients[i],
          broadcast_strides(operands[i]->sizes, to_dims(results.back().strides()), problem.shape));
      any_direct = true;
    } else {
      launch_broadcast_gradient(problem, args, gradients[i], *operands[i], grad_output,
                                results.back());
    }
  }
  if (any_direct) {
    problem.add_inputs(builder, args);
    if (!reduce) {
      builder.add(args.grad_output, problem.strides_of(grad_output));
    }
    check_ndim(op, builder.finish(problem.order, args.space));
    const Operand absent;
    args.contiguous = is_contiguous(
        args.space, {&args.input, &args.target, &args.weight, &args.grad_input, &args.grad_target,
                     &args.grad_weight, reduce ? &absent : &args.grad_output});
    const OnDevice device(input);
    LOSSOPS_LAUNCH(input, elementwise_backward, args);
  }
  return results;
}

// The ops of one elementwise loss, whose schemas add Params... to the common arguments.
template <typename Loss, ElementwiseLoss kLoss, typename ParamList>
struct ElementwiseOps;

template <typename Loss, ElementwiseLoss kLoss, typename... Params>
struct ElementwiseOps<Loss, kLoss, ParamTypes<Params...>> {
  // The public op without autograd, whose kernel is in ops.py.
  static Tensor loss(Tensor input, Tensor target, std::string reduction, Params... params) {
    return value(input, target, std::nullopt, reduction, false, params...);
  }

  static Tensor weighted_loss(Tensor input, Tensor target, std::string reduction,
                              OptionalTensor weight, Params... params) {
    return value(input, target, weight, reduction, false, params...);
  }

  static Tensor value(Tensor input, Tensor target, OptionalTensor weight, std::string reduction,
                      bool float32_result, Params... params) {
    return run_forward(input, target, weight, reduction, float32_result, Extra::kNothing, params...)
        .loss;
  }

  static std::tuple<Tensor, Tensor> forward(Tensor input, Tensor target, OptionalTensor weight,
                                            std::string reduction, bool float32_result,
                                            Params... params) {
    const ElementwiseResult result = run_forward(input, target, weight, reduction, float32_result,
                                                 Extra::kBackwardTerms, params...);
    return {result.loss, *result.mean_terms};
  }

  static std::tuple<Tensor, Tensor> forward_gradient(Tensor input, Tensor target,
                                                     OptionalTensor weight, std::string reduction,
                                                     bool float32_result, Params... params) {
    const ElementwiseResult result =
        run_forward(input, target, weight, reduction, float32_result, Extra::kGradient, params...);
    return {result.loss, *result.grad_input};
  }

  static void backward_kept(Tensor grad_input, Tensor grad_output, Tensor input, Tensor target,
                            OptionalTensor weight, std::string reduction, bool /*float32_result*/,
                            Params... params) {
    elementwise_backward(name_of(kLoss), kLoss, grad_output, input, target, weight, std::nullopt,
                         LossParams{{static_cast<double>(params)...}}, reduction,
                         {true, false, false}, grad_input);
  }

  static std::vector<Tensor> backward(Tensor grad_output, Tensor input, Tensor target,
                                      OptionalTensor weight, OptionalTensor mean_terms,
                                      std::string reduction, std::vector<bool> output_mask,
                                      Params... params) {
    return elementwise_backward(name_of(kLoss), kLoss, grad_output, input, target, weight,
                                mean_terms, LossParams{{static_cast<double>(params)...}}, reduction,
                                output_mask);
  }

  static ElementwiseResult run_forward(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, const std::string& reduction,
                                       bool float32_result, Extra extra, Params... params) {
    return elementwise_forward(name_of(kLoss), kLoss, input, target, weight,
                               LossParams{{static_cast<double>(params)...}}, reduction,
                               float32_result, extra);
  }

  static void define(torch::stable::detail::StableLibrary& m) {
    const std::string name = name_of(kLoss);
    const std::string params = Loss::kSchema;
    const std::string weight = Loss::kTraits.has_weight ? ", Tensor? weight=None" : "";
    m.def((name + "(Tensor input, Tensor target, *, str reduction=\"mean\"" + weight + params +
           ") -> Tensor")
              .c_str());
    m.def((name +
           "_forward(Tensor input, Tensor target, Tensor? weight, str reduction, "
           "bool float32_result" +
           params + ") -> (Tensor loss, Tensor mean_terms)")
              .c_str());
    // With defaults: an argument that is left out costs nothing, any other 0.15 us.
    const std::string arguments =
        "Tensor input, Tensor target, Tensor? weight=None, str reduction=\"mean\", "
        "bool float32_result=False" +
        params + ")";
    m.def((name + "_value(" + arguments + " -> Tensor").c_str());
    m.def(
        (name + "_forward_gradient(" + arguments + " -> (Tensor loss, Tensor grad_input)").c_str());
    m.def(
        (name + "_backward_kept(Tensor(a!) grad_input, Tensor grad_output, " + arguments + " -> ()")
            .c_str());
    m.def((name +
           "_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
           "Tensor? mean_terms, str reduction, bool[] output_mask" +
           params + ") -> Tensor[]")
              .c_str());
  }

  static void implement(torch::stable::detail::StableLibrary& m) {
    const std::string name = name_of(kLoss);
    m.impl(name.c_str(), Loss::kTraits.has_weight ? TORCH_BOX(&ElementwiseOps::weighted_loss)
                                                  : TORCH_BOX(&ElementwiseOps::loss));
    m.impl((name + "_forward").c_str(), TORCH_BOX(&ElementwiseOps::forward));
    m.impl((name + "_value").c_str(), TORCH_BOX(&ElementwiseOps::value));
    m.impl((name + "_forward_gradient").c_str(), TORCH_BOX(&ElementwiseOps::forward_gradient));
    m.impl((name + "_backward").c_str(), TORCH_BOX(&ElementwiseOps::backward));
    m.impl((name + "_backward_kept").c_str(), TORCH_BOX(&ElementwiseOps::backward_kept));
  }
};

#define LOSSOPS_OPS(name, Loss) ElementwiseOps<Loss, ElementwiseLoss::name, Loss::Params>

// --------------------------------------------------------------- cross entropy

constexpr char kCrossEntropy[] = "cross_entropy";

Dims without_class_dim(const Dims& dims) {
  Dims result;
  const int class_dim = dims.size == 1 ? 0 : 1;
  for (int i = 0; i < dims.size; ++i) {
    if (i != class_dim) {
      result.push_back(dims[i]);
    }
  }
  return result;
}

int64_t class_entry(const Dims& dims) { return dims[dims.size == 1 ? 0 : 1]; }

// What forward and backward of cross entropy have in common.
struct CrossEntropyProblem {
  View input;
  View target;
  std::optional<View> weight;
  Dims rows;  // shape of the target's rows: input's without the class dimension
  ScalarType result_dtype;

  CrossEntropyProblem(const Tensor& input_, const Tensor& target_, const OptionalTensor& weight_,
                      int64_t ignore_index, const std::string& reduction, double label_smoothing,
                      bool float32_result, CrossEntropyArgs& args)
      : input(input_), target(target_), result_dtype(input.dtype) {
    args.reduction = parse_reduction(kCrossEntropy, reduction, false).reduction;
    LOSSOPS_CHECK(kCrossEntropy, is_floating(input.dtype), "input must be floating point, but is ",
                  name_of(input.dtype));
    check_device(kCrossEntropy, "target", target, input);
    check_cuda(kCrossEntropy, "input", input_);
    LOSSOPS_CHECK(
        kCrossEntropy, input.sizes.size >= 1,
        "input must have at least 1 dimension, (C,), (N, C) or (N, C, d1, ...), but is 0-d");
    // fault: smoothing-range
    LOSSOPS_CHECK(kCrossEntropy, label_smoothing >= 0 && label_smoothing <= 1,
                  "label_smoothing must be between 0 and 1, but is ", label_smoothing);
    rows = without_class_dim(input.sizes);
    args.num_classes = class_entry(input.sizes);
    args.target_is_probability = target.sizes == input.sizes;
    args.target_is_probability ? check_probabilities(ignore_index) : check_indices();
    if (weight_) {
      add_weight(*weight_, float32_result, args);
    }
    if (args.target_is_probability) {
      result_dtype = promote(result_dtype, target.dtype);
    }

    args.ignore_index = ignore_index;
    args.label_smoothing = label_smoothing;
    set_data(kCrossEntropy, args.input, input);
    args.input_class_stride = class_entry(input.strides);
    set_data(kCrossEntropy, args.target, target);
    if (args.target_is_probability) {
      args.target_class_stride = class_entry(target.strides);
    }
    args.acc_double = input.dtype == ScalarType::Double ||
                      (args.target_is_probability && target.dtype == ScalarType::Double) ||
                      (weight && weight->dtype == ScalarType::Double);
  }

  // Adds input and target, rows in row-major order.
  void add_inputs(SpaceBuilder& builder, CrossEntropyArgs& args) const {
    builder.add(args.input, without_class_dim(input.strides));
    if (args.target_is_probability) {
      builder.add(args.target, without_class_dim(target.strides));
    } else {
      // (1,) stands for () where input is (C,).
      builder.add(args.target, rows.size == 0 ? Dims{} : target.strides);
    }
  }

  void finish(SpaceBuilder& builder, CrossEntropyArgs& args) const {
    check_ndim(kCrossEntropy, builder.finish(row_major_order(rows.size), args.rows));
  }

 private:
  void check_probabilities(int64_t ignore_index) const {
    LOSSOPS_CHECK(kCrossEntropy, is_floating(target.dtype),
                  "target of input's shape holds class probabilities and must be floating point, "
                  "but is ",
                  name_of(target.dtype));
    // fault: ignore-index-range
    LOSSOPS_CHECK(kCrossEntropy, ignore_index < 0,
                  "ignore_index is not supported for class probabilities, but is ", ignore_index);
  }

  void check_indices() const {
    const bool is_row = rows.size == 0 && target.sizes.size <= 1 && target.sizes.numel() == 1;
    LOSSOPS_CHECK(kCrossEntropy, is_row || target.sizes == rows, "input of shape ", input.sizes,
                  " needs class indices of shape ", rows, " or probabilities of shape ",
                  input.sizes, ", but target has shape ", target.sizes);
    LOSSOPS_CHECK(kCrossEntropy,
                  target.dtype == ScalarType::Long || target.dtype == ScalarType::Int ||
                      target.dtype == ScalarType::Byte,
                  "target of class indices must be int64, int32 or uint8, but is ",
                  name_of(target.dtype));
  }

  void add_weight(const Tensor& tensor, bool float32_result, CrossEntropyArgs& args) {
    weight.emplace(tensor);
    check_device(kCrossEntropy, "weight", *weight, input);
    LOSSOPS_CHECK(
        kCrossEntropy,
        is_floating(weight->dtype) || (args.target_is_probability && is_integral(weight->dtype)),
        "weight must be floating point, but is ", name_of(weight->dtype));
    LOSSOPS_CHECK(kCrossEntropy, weight->sizes.size == 1 && weight->sizes[0] == args.num_classes,
                  "weight must have shape (", args.num_classes, ",), one for each class, but has ",
                  weight->sizes);
    LOSSOPS_CHECK(kCrossEntropy,
                  args.target_is_probability || float32_result || weight->dtype == input.dtype,
                  "weight must have input's dtype ", name_of(input.dtype),
                  " where target holds class indices, but is ", name_of(weight->dtype));
    if (args.target_is_probability) {
      result_dtype = promote(result_dtype, weight->dtype);
    }
    args.weight = weight->tensor.data_ptr();
    args.weight_dtype = to_dtype(kCrossEntropy, weight->dtype);
    args.weight_stride = weight->strides[0];
  }
};

ScalarType acc_dtype(const CrossEntropyArgs& args) {
  return args.acc_double ? ScalarType::Double : ScalarType::Float;
}

[[noreturn]] void fail_invalid_target(const CrossEntropyProblem& problem,
                                      const CrossEntropyArgs& args, int64_t row) {
  int64_t offset = 0;
  int64_t index = row;
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    offset += index % args.rows.sizes[dim] * args.target.strides[dim];  // fault: index-in-error
    index /= args.rows.sizes[dim];
  }
  int64_t value = 0;
  switch (args.target.dtype) {
    case DType::kInt64:
      value = static_cast<const int64_t*>(args.target.data)[offset];
      break;
    case DType::kInt32:
      value = static_cast<const int32_t*>(args.target.data)[offset];
      break;
    default:
      value = static_cast<const uint8_t*>(args.target.data)[offset];
  }
  std::ostringstream message;
  message << "cross_entropy: target " << value << " at row " << row << " (target of shape "
          << problem.target.sizes << ") is out of range for " << args.num_classes << " classes";
  // torch turns this one into an IndexError.
  throw std::out_of_range(message.str());
}

// Where forward leaves what backward needs beside a gradient, one after the other in one float64
// tensor: mean_terms (2,), row_stats (2 or 3, rows) of acc_t, and scratch where that is small.
// Without row_stats, where the launcher needs none, it is shorter than with them.
struct SavedLayout {
  static constexpr int64_t kMeanTerms = 2;
  static constexpr int64_t kSmallScratch = 2048;

  int64_t stats_shape[2];
  int64_t stats_doubles;

  SavedLayout(const CrossEntropyArgs& args, int64_t num_rows)
      : stats_shape{args.dense() ? 3 : 2, num_rows} {
    const int64_t numbers = stats_shape[0] * num_rows;
    stats_doubles = args.acc_double ? numbers : (numbers + 1) / 2;
  }

  // With row_stats. Even: what follows is aligned to 16 bytes.
  int64_t doubles() const { return (kMeanTerms + stats_doubles + 1) / 2 * 2; }

  // Most scratch that may follow.
  int64_t max_scratch(bool has_stats) const {
    return has_stats ? kSmallScratch : std::min(kSmallScratch, stats_doubles - 1);
  }
};

struct CrossEntropyResult {
  Tensor loss;
  OptionalTensor row_stats;   // Extra::kBackwardTerms
  OptionalTensor mean_terms;  // Extra::kBackwardTerms
  OptionalTensor grad_input;  // Extra::kGradient
  OptionalTensor saved;       // Extra::kGradient
};

CrossEntropyResult cross_entropy_forward_pass(const Tensor& input, const Tensor& target,
                                              const OptionalTensor& weight, int64_t ignore_index,
                                              const std::string& reduction, double label_smoothing,
                                              bool float32_result, Extra extra) {
  CrossEntropyForwardArgs args;
  const CrossEntropyProblem problem(input, target, weight, ignore_index, reduction, label_smoothing,
                                    float32_result, args);
  const bool reduce = args.reduction != Reduction::kNone;
  const bool mean = args.reduction == Reduction::kMean;
  CrossEntropyResult result{empty_dense(reduce ? Dims{} : problem.rows,
                                        widen_if(float32_result, problem.result_dtype), input),
                            std::nullopt, std::nullopt, std::nullopt, std::nullopt};
  set_result(args.output, result.loss);

  SpaceBuilder builder(problem.rows);
  problem.add_inputs(builder, args);
  if (!reduce) {
    builder.add(args.output, dense_strides(problem.rows, row_major_order(problem.rows.size)));
  }
  if (extra == Extra::kGradient) {
    LOSSOPS_CHECK(kCrossEntropy, reduce, "there is no gradient in forward without a reduction");
    result.grad_input = like_of(problem.input);
    const Dims strides = to_dims(result.grad_input->strides());
    set_result(args.grad_input, *result.grad_input);
    args.grad_input_class_stride = class_entry(strides);
    builder.add(args.grad_input, without_class_dim(strides));
  }
  problem.finish(builder, args);

  const SavedLayout layout(args, problem.rows.numel());
  const OnDevice device(input);
  int64_t scratch_doubles = LOSSOPS_SCRATCH(input, cross_entropy_forward, args);
  double* scratch_data = nullptr;
  if (extra == Extra::kBackwardTerms) {
    Dims stats_shape;
    stats_shape.push_back(layout.stats_shape[0]);
    stats_shape.push_back(layout.stats_shape[1]);
    result.row_stats = empty_dense(stats_shape, acc_dtype(args), input);
    result.mean_terms = empty_vector(mean ? 2 : 0, ScalarType::Double, input);
    args.row_stats = result.row_stats->mutable_data_ptr();
    args.mean_terms = mean ? static_cast<double*>(result.mean_terms->mutable_data_ptr()) : nullptr;
  } else if (extra == Extra::kGradient) {
    const bool has_stats = LOSSOPS_ASK(input, cross_entropy_needs_row_stats, args);
    const int64_t doubles = has_stats ? layout.doubles() : SavedLayout::kMeanTerms;
    const bool carved = scratch_doubles <= layout.max_scratch(has_stats);
    result.saved =
        empty_vector(doubles + (carved ? scratch_doubles : 0), ScalarType::Double, input);
    auto* const memory = static_cast<double*>(result.saved->mutable_data_ptr());
    args.mean_terms = mean ? memory : nullptr;
    args.row_stats = has_stats ? memory + SavedLayout::kMeanTerms : nullptr;
    scratch_data = memory + doubles;
    scratch_doubles = carved ? 0 : scratch_doubles;
  } else {
    scratch_doubles += SavedLayout::kMeanTerms;
  }
  const Scratch scratch(scratch_doubles, input);
  if (extra == Extra::kNothing) {
    args.mean_terms = mean ? scratch.data() : nullptr;
    scratch_data = scratch.data() + SavedLayout::kMeanTerms;
  } else if (scratch_doubles > 0) {
    scratch_data = scratch.data();
  }
  int64_t first_invalid_row = -1;
  args.first_invalid_row = &first_invalid_row;
  LOSSOPS_LAUNCH(input, cross_entropy_forward, args, scratch_data);
  if (first_invalid_row >= 0) {
    fail_invalid_target(problem, args, first_invalid_row);
  }
  return result;
}

Tensor cross_entropy_value(Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index,
                           std::string reduction, double label_smoothing, bool float32_result) {
  return cross_entropy_forward_pass(input, target, weight, ignore_index, reduction, label_smoothing,
                                    float32_result, Extra::kNothing)
      .loss;
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward(
    Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index, std::string reduction,
    double label_smoothing, bool float32_result) {
  const CrossEntropyResult result =
      cross_entropy_forward_pass(input, target, weight, ignore_index, reduction, label_smoothing,
                                 float32_result, Extra::kBackwardTerms);
  return {result.loss, *result.row_stats, *result.mean_terms};
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward_gradient(
    Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index, std::string reduction,
    double label_smoothing, bool float32_result) {
  const CrossEntropyResult result =
      cross_entropy_forward_pass(input, target, weight, ignore_index, reduction, label_smoothing,
                                 float32_result, Extra::kGradient);
  return {result.loss, *result.grad_input, *result.saved};
}

// What backward gets from forward, as the launcher takes it.
struct ForwardTerms {
  const void* row_stats;
  const double* mean_terms;
};

ForwardTerms check_forward_terms(const CrossEntropyProblem& problem, const CrossEntropyArgs& args,
                                 const Tensor& row_stats, const OptionalTensor& mean_terms) {
  const View stats(row_stats);
  Dims stats_shape;
  stats_shape.push_back(args.dense() ? 3 : 2);
  stats_shape.push_back(problem.rows.numel());
  // fault: row-stats-size
  LOSSOPS_CHECK(
      kCrossEntropy,
      stats.sizes == stats_shape && stats.dtype == acc_dtype(args) && row_stats.is_contiguous(),
      "row_stats must be the contiguous ", stats_shape, " ", name_of(acc_dtype(args)),
      " tensor that forward returned, but is ", stats.sizes, " ", name_of(stats.dtype));
  check_device(kCrossEntropy, "row_stats", stats, problem.input);
  return {row_stats.const_data_ptr(),
          args.reduction == Reduction::kMean
              ? check_mean_terms(kCrossEntropy, mean_terms, problem.input)
              : nullptr};
}

ForwardTerms check_saved(const CrossEntropyProblem& problem, const CrossEntropyArgs& args,
                         const Tensor& tensor) {
  const View saved(tensor);
  LOSSOPS_CHECK(kCrossEntropy,
                saved.sizes.size == 1 && saved.sizes[0] >= SavedLayout::kMeanTerms &&
                    saved.dtype == ScalarType::Double && tensor.is_contiguous(),
                "saved must be the float64 tensor of ", SavedLayout::kMeanTerms,
                " or more elements that forward returned, but is ", saved.sizes, " ",
                name_of(saved.dtype));
  check_device(kCrossEntropy, "saved", saved, problem.input);
  const auto* const data = static_cast<const double*>(tensor.const_data_ptr());
  const bool has_stats = saved.sizes[0] >= SavedLayout(args, problem.rows.numel()).doubles();
  return {has_stats ? data + SavedLayout::kMeanTerms : nullptr, data};
}

// GetTerms: ForwardTerms of a problem and its arguments. overwritten: memory for grad_input.
template <typename GetTerms>
std::vector<Tensor> cross_entropy_backward_pass(const Tensor& grad_output_, const Tensor& input,
                                                const Tensor& target, const OptionalTensor& weight,
                                                int64_t ignore_index, const std::string& reduction,
                                                double label_smoothing,
                                                const std::vector<bool>& output_mask, bool is_kept,
                                                const Tensor* overwritten,
                                                const GetTerms& get_terms) {
  CrossEntropyBackwardArgs args;
  args.kept = is_kept;
  // The weight's dtype was checked in forward.
  const CrossEntropyProblem problem(input, target, weight, ignore_index, reduction, label_smoothing,
                                    true, args);
  const View grad_output(grad_output_);
  const bool reduce = args.reduction != Reduction::kNone;
  const Dims loss_shape = reduce ? Dims{} : problem.rows;
  LOSSOPS_CHECK(kCrossEntropy, reduce || !is_kept, "no gradient is kept without a reduction");
  LOSSOPS_CHECK(kCrossEntropy, is_floating(grad_output.dtype),
                "grad_output must be floating point, but is ", name_of(grad_output.dtype));
  LOSSOPS_CHECK(kCrossEntropy, grad_output.sizes == loss_shape, "grad_output of shape ",
                grad_output.sizes, " must have the shape of the loss, ", loss_shape);
  check_device(kCrossEntropy, "grad_output", grad_output, problem.input);
  set_data(kCrossEntropy, args.grad_output, grad_output);
  const ForwardTerms terms = get_terms(problem, args);
  args.row_stats = terms.row_stats;
  args.mean_terms = args.reduction == Reduction::kMean ? terms.mean_terms : nullptr;
  LOSSOPS_CHECK(kCrossEntropy, output_mask.size() == 3, "output_mask must have 3 entries, but has ",
                output_mask.size());
  LOSSOPS_CHECK(kCrossEntropy, args.target_is_probability || (!output_mask[1] && !output_mask[2]),
                "there is no gradient for target or weight where target holds class indices");
  LOSSOPS_CHECK(kCrossEntropy,
                !output_mask[2] || (problem.weight && is_floating(problem.weight->dtype)),
                "there is no gradient for weight");

  std::vector<Tensor> results;
  SpaceBuilder builder(problem.rows);
  problem.add_inputs(builder, args);
  const auto add_gradient = [&](const Tensor& tensor, Operand& gradient, int64_t& class_stride) {
    const Dims strides = to_dims(tensor.strides());
    set_result(gradient, tensor);
    class_stride = class_entry(strides);
    builder.add(gradient, without_class_dim(strides));
  };
  if (output_mask[0]) {
    if (overwritten == nullptr) {
      results.push_back(like_of(problem.input));
    }
    add_gradient(overwritten == nullptr ? results.back()
                                        : check_kept(kCrossEntropy, *overwritten, problem.input),
                 args.grad_input, args.grad_input_class_stride);
  }
  if (output_mask[1]) {
    results.push_back(like_of(problem.target));
    add_gradient(results.back(), args.grad_target, args.grad_target_class_stride);
  }
  if (output_mask[2]) {
    results.push_back(empty_dense(problem.weight->sizes, problem.weight->dtype, input));
    args.grad_weight = results.back().mutable_data_ptr();
  }
  if (!reduce) {
    builder.add(args.grad_output, grad_output.strides);
  }
  problem.finish(builder, args);
  const OnDevice device(input);
  OptionalTensor row_stats;
  if (is_kept && args.row_stats == nullptr &&
      LOSSOPS_ASK(input, cross_entropy_needs_row_stats, forward_of(args))) {
    // Hooks of saved tensors have changed the layout of input.
    row_stats = cross_entropy_forward_pass(input, target, weight, ignore_index, reduction,
                                           label_smoothing, true, Extra::kBackwardTerms)
                    .row_stats;
    args.row_stats = row_stats->const_data_ptr();
  }
  LOSSOPS_LAUNCH_WITH_SCRATCH(input, cross_entropy_backward, args);
  return results;
}

std::vector<Tensor> cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target,
                                           OptionalTensor weight, Tensor row_stats,
                                           OptionalTensor mean_terms, int64_t ignore_index,
                                           std::string reduction, double label_smoothing,
                                           std::vector<bool> output_mask) {
  return cross_entropy_backward_pass(
      grad_output, input, target, weight, ignore_index, reduction, label_smoothing, output_mask,
      false, nullptr, [&](const CrossEntropyProblem& problem, const CrossEntropyArgs& args) {
        return check_forward_terms(problem, args, row_stats, mean_terms);
      });
}

void cross_entropy_backward_kept(Tensor grad_input, Tensor grad_output, Tensor input, Tensor target,
                                 Tensor saved, OptionalTensor weight, int64_t ignore_index,
                                 std::string reduction, double label_smoothing,
                                 bool /*float32_result*/) {
  cross_entropy_backward_pass(
      grad_output, input, target, weight, ignore_index, reduction, label_smoothing,
      {true, false, false}, true, &grad_input,
      [&](const CrossEntropyProblem& problem, const CrossEntropyArgs& args) {
        return check_saved(problem, args, saved);
      });
}

// Writes the gradient of input over input. Its memory is its own, as ops.py has checked.
void cross_entropy_backward_inplace(Tensor input, Tensor grad_output, Tensor target,
                                    OptionalTensor weight, Tensor row_stats,
                                    OptionalTensor mean_terms, int64_t ignore_index,
                                    std::string reduction, double label_smoothing) {
  cross_entropy_backward_pass(
      grad_output, input, target, weight, ignore_index, reduction, label_smoothing,
      {true, false, false}, false, &input,
      [&](const CrossEntropyProblem& problem, const CrossEntropyArgs& args) {
        return check_forward_terms(problem, args, row_stats, mean_terms);
      });
}

// The public op without autograd, whose kernel is in ops.py.
Tensor cross_entropy(Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index,
                     std::string reduction, double label_smoothing) {
  return cross_entropy_value(input, target, weight, ignore_index, reduction, label_smoothing,
                             false);
}

// The first row whose class index is out of range, or -1: an int64 scalar on input's device.
Tensor first_invalid_target(Tensor target, int64_t num_classes, int64_t ignore_index) {
  CrossEntropyArgs args;
  const View view(target);
  check_cuda(kCrossEntropy, "target", target);
  LOSSOPS_CHECK(kCrossEntropy,
                view.dtype == ScalarType::Long || view.dtype == ScalarType::Int ||
                    view.dtype == ScalarType::Byte,
                "target of class indices must be int64, int32 or uint8, but is ",
                name_of(view.dtype));
  LOSSOPS_CHECK(kCrossEntropy, num_classes >= 0, "num_classes must not be negative, but is ",
                num_classes);
  set_data(kCrossEntropy, args.target, view);
  args.num_classes = num_classes;
  args.ignore_index = ignore_index;
  SpaceBuilder builder(view.sizes);
  builder.add(args.target, view.strides);
  check_ndim(kCrossEntropy, builder.finish(row_major_order(view.sizes.size), args.rows));
  const Tensor result = empty_dense(Dims{}, ScalarType::Long, target);
  int64_t* const row = static_cast<int64_t*>(result.mutable_data_ptr());
  const OnDevice device(target);
  LOSSOPS_LAUNCH(target, first_invalid_target, args, row);
  return result;
}

std::string build_info() {
#if defined(__clang__)
  constexpr const char* kCompiler = __VERSION__;
#else
  constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
  std::ostringstream json;
#if defined(LOSSOPS_WITH_CUDA)
  json << "{\"cuda\": \"" << LOSSOPS_CUDA_VERSION << "\", \"cuda_archs\": \"" << LOSSOPS_CUDA_ARCHS
       << "\"";
#else
  json << "{\"cuda\": null, \"cuda_archs\": \"\"";
#endif
  json << ", \"compiler\": \"" << kCompiler << "\", \"torch_target\": \"2.10\"}";
  return json.str();
}

// ---------------------------------------------------------------- registration

void define_ops(torch::stable::detail::StableLibrary& m) {
#define LOSSOPS_ROW(name, Loss) LOSSOPS_OPS(name, Loss)::define(m);
  LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, *, int ignore_index=-100, "
      "str reduction=\"mean\", float label_smoothing=0.0) -> Tensor");
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, "
      "str reduction, float label_smoothing, bool float32_result) "
      "-> (Tensor loss, Tensor row_stats, Tensor mean_terms)");
  m.def(
      "cross_entropy_value(Tensor input, Tensor target, Tensor? weight=None, "
      "int ignore_index=-100, str reduction=\"mean\", float label_smoothing=0.0, "
      "bool float32_result=False) -> Tensor");
  m.def(
      "cross_entropy_forward_gradient(Tensor input, Tensor target, Tensor? weight=None, "
      "int ignore_index=-100, str reduction=\"mean\", float label_smoothing=0.0, "
      "bool float32_result=False) -> (Tensor loss, Tensor grad_input, Tensor saved)");
  m.def(
      "cross_entropy_backward_kept(Tensor(a!) grad_input, Tensor grad_output, Tensor input, "
      "Tensor target, Tensor saved, Tensor? weight=None, int ignore_index=-100, "
      "str reduction=\"mean\", float label_smoothing=0.0, bool float32_result=False) -> ()");
  m.def(
      "cross_entropy_backward_inplace(Tensor(a!) input, Tensor grad_output, Tensor target, "
      "Tensor? weight, Tensor row_stats, Tensor? mean_terms, int ignore_index, str reduction, "
      "float label_smoothing) -> ()");
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor row_stats, Tensor? mean_terms, int ignore_index, str reduction, "
      "float label_smoothing, bool[] output_mask) -> Tensor[]");
  m.def("first_invalid_target(Tensor target, int num_classes, int ignore_index) -> Tensor");
  m.def("build_info() -> str");
  m.def("cuda_problem() -> str");
}

// The same functions serve both devices.
void implement_ops(torch::stable::detail::StableLibrary& m) {
#define LOSSOPS_ROW(name, Loss) LOSSOPS_OPS(name, Loss)::implement(m);
  LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_value", TORCH_BOX(&cross_entropy_value));
  m.impl("cross_entropy_forward_gradient", TORCH_BOX(&cross_entropy_forward_gradient));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_backward_kept", TORCH_BOX(&cross_entropy_backward_kept));
  m.impl("cross_entropy_backward_inplace", TORCH_BOX(&cross_entropy_backward_inplace));
  m.impl("first_invalid_target", TORCH_BOX(&first_invalid_target));
}

}  // namespace
}  // namespace lossops

STABLE_TORCH_LIBRARY(lossops, m) { lossops::define_ops(m); }

STABLE_TORCH_LIBRARY_IMPL(lossops, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&lossops::build_info));
  m.impl("cuda_problem", TORCH_BOX(&lossops::cuda_problem));
}

STABLE_TORCH_LIBRARY_IMPL(lossops, CPU, m) { lossops::implement_ops(m); }

// Registered without CUDA kernels too: the call then says what is missing.
STABLE_TORCH_LIBRARY_IMPL(lossops, CUDA, m) { lossops::implement_ops(m); }
