#include "bindings/cross_entropy.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "bindings/cross_entropy_problem.h"
#include "bindings/launch.h"

namespace lossops::bindings {
namespace {

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

// The layout of `saved`, a float64 tensor in which forward leaves what backward needs beside a
// gradient: mean_terms (2,), row_stats (2 or 3, rows) of acc_t, and scratch memory if it is small.
// If the launcher needs no row_stats, `saved` is shorter than with them.
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

  // The length with row_stats. It is even, so that the scratch behind it is aligned to 16 bytes.
  int64_t doubles() const { return (kMeanTerms + stats_doubles + 1) / 2 * 2; }

  // The most doubles of scratch that may follow.
  int64_t max_scratch(bool has_stats) const {
    return has_stats ? kSmallScratch : std::min(kSmallScratch, stats_doubles - 1);
  }
};

const double* check_denominator(const Tensor& tensor, const View& input) {
  const View view(tensor);
  LOSSOPS_CHECK(kCrossEntropy, view.sizes.numel() == 1 && view.dtype == ScalarType::Double,
                "denominator must be a float64 tensor of one element, but is ", view.sizes, " ",
                name_of(view.dtype));
  check_device(kCrossEntropy, "denominator", view, input);
  return static_cast<const double*>(tensor.const_data_ptr());
}

struct CrossEntropyResult {
  Tensor loss;
  OptionalTensor row_stats;   // Extra::kBackwardTerms
  OptionalTensor mean_terms;  // Extra::kBackwardTerms
  OptionalTensor grad_input;  // Extra::kGradient
  OptionalTensor saved;       // Extra::kGradient
};

// is_in_place: the gradient takes the place of input. denominator: what a mean divides by, where
// the caller knows it.
CrossEntropyResult cross_entropy_forward_pass(const Tensor& input, const Tensor& target,
                                              const OptionalTensor& weight, int64_t ignore_index,
                                              const std::string& reduction, double label_smoothing,
                                              bool float32_result, Extra extra,
                                              bool is_in_place = false,
                                              const OptionalTensor& denominator = std::nullopt) {
  CrossEntropyForwardArgs args;
  const CrossEntropyProblem problem(input, target, weight, ignore_index, reduction, label_smoothing,
                                    float32_result, args);
  const bool reduce = args.reduction != Reduction::kNone;
  const bool mean = args.reduction == Reduction::kMean;
  if (denominator) {
    args.denominator = check_denominator(*denominator, problem.input);
  }
  CrossEntropyResult result{empty_dense(reduce ? Dims{} : problem.rows,
                                        widen_if(float32_result, problem.result_dtype), input),
                            std::nullopt, std::nullopt, std::nullopt, std::nullopt};
  set_result(args.output, result.loss);

  RowSpace space(problem.rows);
  problem.add_inputs(space, args);
  if (!reduce) {
    space.add_values(args.output, dense_strides(problem.rows, row_major_order(problem.rows.size)));
  }
  if (extra == Extra::kGradient) {
    LOSSOPS_CHECK(kCrossEntropy, reduce, "there is no gradient in forward without a reduction");
    result.grad_input = is_in_place ? input : empty_gradient(problem.input, args.reduction);
    set_result(args.grad_input, *result.grad_input);
    space.add_classes(args.grad_input, args.grad_input_class_stride,
                      to_dims(result.grad_input->strides()));
  }
  space.finish(kCrossEntropy, args.rows);

  const SavedLayout layout(args, problem.rows.numel());
  const OnDevice device(input);
  const CrossEntropyPlan plan = LOSSOPS_ASK(input, plan_cross_entropy_forward, args);
  int64_t scratch_doubles = plan.scratch;
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
    const bool has_stats = plan.needs_row_stats;
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
  LOSSOPS_LAUNCH(input, cross_entropy_forward, args, plan, scratch_data);
  if (first_invalid_row >= 0) {
    fail_invalid_target(problem, args, first_invalid_row);
  }
  return result;
}

// What the launcher of backward gets from forward.
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

// get_terms: returns the ForwardTerms of a problem and its arguments. overwritten: the memory that
// grad_input takes, if not null.
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
  check_floating(kCrossEntropy, "grad_output", grad_output);
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
  RowSpace space(problem.rows);
  problem.add_inputs(space, args);
  const auto add_gradient = [&](const Tensor& tensor, Operand& gradient, int64_t& class_stride) {
    set_result(gradient, tensor);
    space.add_classes(gradient, class_stride, to_dims(tensor.strides()));
  };
  if (output_mask[0]) {
    if (overwritten == nullptr) {
      results.push_back(empty_gradient(problem.input, args.reduction));
    }
    add_gradient(overwritten == nullptr
                     ? results.back()
                     : check_kept(kCrossEntropy, "grad_input", *overwritten, problem.input),
                 args.grad_input, args.grad_input_class_stride);
  }
  if (output_mask[1]) {
    results.push_back(empty_like(problem.target));
    add_gradient(results.back(), args.grad_target, args.grad_target_class_stride);
  }
  if (output_mask[2]) {
    results.push_back(empty_dense(problem.weight->sizes, problem.weight->dtype, input));
    args.grad_weight = results.back().mutable_data_ptr();
  }
  if (!reduce) {
    space.add_values(args.grad_output, grad_output.strides);
  }
  space.finish(kCrossEntropy, args.rows);
  const OnDevice device(input);
  OptionalTensor row_stats;
  if (is_kept && args.row_stats == nullptr &&
      LOSSOPS_ASK(input, plan_cross_entropy_forward, forward_of(args)).needs_row_stats) {
    // A saved-tensor hook has changed the layout of input. The kernel of this one needs row_stats.
    row_stats = cross_entropy_forward_pass(input, target, weight, ignore_index, reduction,
                                           label_smoothing, true, Extra::kBackwardTerms)
                    .row_stats;
    args.row_stats = row_stats->const_data_ptr();
  }
  LOSSOPS_LAUNCH_WITH_SCRATCH(input, cross_entropy_backward, args);
  return results;
}

}  // namespace

Tensor cross_entropy(Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index,
                     std::string reduction, double label_smoothing) {
  return cross_entropy_value(input, target, weight, ignore_index, reduction, label_smoothing,
                             false);
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

Tensor cross_entropy_forward_inplace(Tensor input, Tensor target, OptionalTensor weight,
                                     OptionalTensor denominator, int64_t ignore_index,
                                     double label_smoothing) {
  return cross_entropy_forward_pass(input, target, weight, ignore_index,
                                    denominator ? "mean" : "sum", label_smoothing, true,
                                    Extra::kGradient, true, denominator)
      .loss;
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

std::string cross_entropy_plan(Tensor input, Tensor target, OptionalTensor weight,
                               std::string reduction, double label_smoothing, bool gradient,
                               std::string device) {
  CrossEntropyForwardArgs args;
  const CrossEntropyProblem problem(input, target, weight, -1, reduction, label_smoothing, false,
                                    args);
  RowSpace space(problem.rows);
  problem.add_inputs(space, args);
  // The data of meta tensors is null, which would stand for none. Allocators align to 512 bytes.
  void* const aligned = reinterpret_cast<void*>(uintptr_t{512});
  args.weight = problem.weight ? aligned : nullptr;
  OptionalTensor grad_input;
  if (gradient) {
    grad_input = empty_gradient(problem.input, args.reduction);
    set_result(args.grad_input, *grad_input);
    // Without a reduction the backward pass alone writes it.
    args.grad_input.data = args.reduction == Reduction::kNone ? nullptr : aligned;
    space.add_classes(args.grad_input, args.grad_input_class_stride,
                      to_dims(grad_input->strides()));
  }
  space.finish(kCrossEntropy, args.rows);
  return cuda::explain_cross_entropy(args, device);
}

std::string cross_entropy_plan_table(std::string device) {
  return cuda::explain_cross_entropy_table(device);
}

Tensor first_invalid_target(Tensor target, int64_t num_classes, int64_t ignore_index) {
  CrossEntropyArgs args;
  const View view(target);
  check_cuda(kCrossEntropy, "target", target);
  check_index_dtype(view);
  LOSSOPS_CHECK(kCrossEntropy, num_classes >= 0, "num_classes must not be negative, but is ",
                num_classes);
  set_data(kCrossEntropy, args.target, view);
  args.num_classes = num_classes;
  args.ignore_index = ignore_index;
  RowSpace space(view.sizes);
  space.add_values(args.target, view.strides);
  space.finish(kCrossEntropy, args.rows);
  const Tensor result = empty_dense(Dims{}, ScalarType::Long, target);
  int64_t* const row = static_cast<int64_t*>(result.mutable_data_ptr());
  const OnDevice device(target);
  LOSSOPS_LAUNCH(target, first_invalid_target, args, row);
  return result;
}

}  // namespace lossops::bindings
