#include "bindings/elementwise.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "bindings/elementwise_problem.h"
#include "bindings/launch.h"

namespace lossops::bindings {

namespace {

// Whether a dense tensor of the shape of a view may have other neighbours than the view, because
// several elements of the view share a place: as those of torch.Tensor.expand(), of stride 0, and
// of windows of torch.Tensor.unfold(), which overlap.
bool has_shared_places(const View& view) {
  int64_t places = 1;  // from the first to the last
  for (int dim = 0; dim < view.sizes.size; ++dim) {
    if (view.sizes[dim] <= 1) {
      continue;
    }
    places += (view.sizes[dim] - 1) * view.strides[dim];
    if (view.strides[dim] == 0) {
      return true;
    }
    for (int other = 0; other < dim; ++other) {
      if (view.sizes[other] > 1 && view.strides[other] == view.strides[dim]) {
        return true;
      }
    }
  }
  return places < view.sizes.numel();
}

// Whether the kernel of the loss, or of other gradients, can sum the gradient of a broadcast
// operand beside its other work.
bool sums_beside_others(const Tensor& like) { return like.is_cuda(); }

// A gradient that is wanted.
struct Gradient {
  Operand ElementwiseBackwardArgs::* which;
  const View* operand;
  const Tensor* tensor;

  // If it has fewer elements than the loss, or more than an empty one.
  bool is_summed(const ElementwiseProblem& problem) const {
    return operand->sizes.numel() != problem.shape.numel();
  }
  void add_to(ElementwiseSpace& space, const ElementwiseProblem& problem,
              ElementwiseBackwardArgs& args) const {
    set_result(args.*which, *tensor);
    space.add(args.*which, problem.strides_of(operand->sizes, to_dims(tensor->strides())));
  }
};

// Computes the gradient of an operand that was broadcast, the sum over the added dimensions, and
// beside it others that are no sums.
void launch_broadcast_gradient(const ElementwiseProblem& problem,
                               const ElementwiseBackwardArgs& base, const Dims& grad_output,
                               const Gradient& summed, const std::vector<Gradient>& others) {
  ElementwiseBackwardReduceArgs args;
  static_cast<ElementwiseBackwardArgs&>(args) = base;
  ElementwiseSpace space(problem, args);
  if (args.reduction == Reduction::kNone) {
    space.add(args.grad_output, grad_output);
  }
  summed.add_to(space, problem, args);
  for (const Gradient& other : others) {
    other.add_to(space, problem, args);
  }
  if (sums_beside_others(problem.input.tensor)) {
    space.finish();
  } else {
    args.num_kept = space.finish_with_kept_first(summed.operand->sizes);
  }
  const OnDevice device(problem.input.tensor);
  LOSSOPS_LAUNCH_WITH_SCRATCH(problem.input.tensor, elementwise_backward_reduce, args);
}

// Computes a gradient for a grad_output of 1 by a launch of its own.
void launch_gradient_apart(const ElementwiseProblem& problem, const ElementwiseArgs& base,
                           const Gradient& gradient) {
  ElementwiseBackwardArgs args;
  static_cast<ElementwiseArgs&>(args) = base;
  if (gradient.is_summed(problem)) {
    launch_broadcast_gradient(problem, args, Dims{}, gradient, {});
    return;
  }
  ElementwiseSpace space(problem, args);
  gradient.add_to(space, problem, args);
  space.finish();
  LOSSOPS_LAUNCH(problem.input.tensor, elementwise_backward, args);
}

}  // namespace

ElementwiseResult elementwise_forward(ElementwiseLoss loss, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const LossParams& params, const std::string& reduction,
                                      bool float32_result, Extra extra,
                                      std::array<bool, 2> wanted) {
  ElementwiseForwardArgs args;
  const ElementwiseProblem problem(loss, input, target, weight, params, reduction, args);
  const ScalarType dtype = widen_if(float32_result, problem.result_dtype);
  const bool reduce = args.reduction != Reduction::kNone;
  const bool weighted_mean = problem.weighted_mean(args);

  ElementwiseResult result{
      // fault: result-strides
      reduce
          ? empty_dense(Dims{}, dtype, input)
          : empty_strided(problem.shape, dense_strides(problem.shape, problem.order), dtype, input),
      std::nullopt,
      {}};
  set_result(args.output, result.loss);
  if (extra == Extra::kBackwardTerms) {
    result.mean_terms = empty_vector(weighted_mean ? 2 : 0, ScalarType::Double, input);
  }

  ElementwiseSpace space(problem, args);
  if (!reduce) {
    space.add(args.output, to_dims(result.loss.strides()));
  }
  const View* const operands[2] = {&problem.input, &problem.target};
  Operand* const gradients[2] = {&args.grad_input, &args.grad_target};
  Operand ElementwiseBackwardArgs::* const members[2] = {&ElementwiseBackwardArgs::grad_input,
                                                         &ElementwiseBackwardArgs::grad_target};
  std::vector<Gradient> apart;
  for (int i = 0; extra == Extra::kGradient && i < 2; ++i) {
    if (!wanted[i]) {
      continue;
    }
    const View& operand = *operands[i];
    LOSSOPS_CHECK(problem.op, reduce && !weighted_mean && is_floating(operand.dtype),
                  "there is no gradient in forward without a reduction, for a weighted mean, or "
                  "for an operand that is integral");
    const Gradient gradient{members[i], &operand, &result.kept[i].emplace(empty_like(operand))};
    // The gradient of a view with shared places is dense, and the view is not. In the kernel of the
    // loss it would change the tiles and the order of the sums: the last bit of the loss would
    // depend on whether a gradient is wanted.
    if (has_shared_places(operand) || (gradient.is_summed(problem) && !sums_beside_others(input))) {
      apart.push_back(gradient);
    } else {
      set_result(*gradients[i], *gradient.tensor);
      space.add(*gradients[i],
                problem.strides_of(operand.sizes, to_dims(gradient.tensor->strides())));
    }
  }
  space.finish();
  const int64_t mean_doubles = weighted_mean ? 2 : 0;
  const OnDevice device(input);
  const Scratch scratch(LOSSOPS_SCRATCH(input, elementwise_forward, args) + mean_doubles, input);
  if (weighted_mean) {
    args.mean_terms = result.mean_terms
                          ? static_cast<double*>(result.mean_terms->mutable_data_ptr())
                          : scratch.data();
  }
  LOSSOPS_LAUNCH(input, elementwise_forward, args, scratch.data() + mean_doubles);
  for (const Gradient& gradient : apart) {
    launch_gradient_apart(problem, args, gradient);
  }
  return result;
}

namespace {

// Whether the gradients that are wanted take input.
bool takes_input(ElementwiseLoss loss, const LossParams& params,
                 const std::vector<bool>& output_mask) {
  const bool wants_others = output_mask[1] || output_mask[2];  // fault: takes-input
  return wants_others || input_gradient_takes_input(loss, params);
}

// The gradient of a target that was broadcast to no elements, for losses with
// LossTraits::target_has_factor: 0 times the derivative at an input of 1.
Tensor gradient_of_nothing(ElementwiseLoss loss, const LossParams& params, const View& target) {
  const OnDevice device(target.tensor);
  const Tensor zero = torch::stable::fill_(empty_dense(Dims{}, target.dtype, target.tensor), 0);
  const Tensor input = torch::stable::fill_(empty_like(target), 1);
  return elementwise_backward(loss, zero, input, target.tensor, std::nullopt, std::nullopt, params,
                              "sum", {false, true, false})
      .front();
}

}  // namespace

std::vector<Tensor> elementwise_backward(
    ElementwiseLoss loss, const Tensor& grad_output_, const Tensor& input, const Tensor& target,
    const OptionalTensor& weight, const OptionalTensor& mean_terms, const LossParams& params,
    const std::string& reduction, const std::vector<bool>& output_mask, const KeptGradients& kept) {
  ElementwiseBackwardArgs args;
  args.kept = kept[0] || kept[1];
  const ElementwiseProblem problem(loss, input, target, weight, params, reduction, args);
  const char* const op = problem.op;
  const View grad_output(grad_output_);
  const bool reduce = args.reduction != Reduction::kNone;
  LOSSOPS_CHECK(op, reduce || !args.kept, "no gradient is kept without a reduction");
  LOSSOPS_CHECK(op, output_mask.size() == 3, "output_mask must have 3 entries, but has ",
                output_mask.size());
  check_floating(op, "grad_output", grad_output);
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
  const char* kept_names[2] = {"grad_input", "grad_target"};
  // fault: gradient-order
  Operand ElementwiseBackwardArgs::* const gradients[3] = {&ElementwiseBackwardArgs::grad_input,
                                                           &ElementwiseBackwardArgs::grad_target,
                                                           &ElementwiseBackwardArgs::grad_weight};
  std::vector<Tensor> results;
  results.reserve(3);
  std::vector<Gradient> direct;
  std::vector<Gradient> summed;
  for (int i = 0; i < 3; ++i) {
    if (!output_mask[i]) {
      continue;
    }
    LOSSOPS_CHECK(op, operands[i] != nullptr && is_floating(operands[i]->dtype),
                  "there is no gradient for ", names[i]);
    if (i == 1 && problem.shape.numel() == 0 && problem.target.sizes.numel() > 0 &&
        traits_of(loss).target_has_factor) {
      results.push_back(gradient_of_nothing(loss, params, problem.target));
      continue;
    }
    results.push_back(args.kept ? check_kept(op, kept_names[i], *kept[i], *operands[i])
                                : empty_like(*operands[i]));
    const Gradient gradient{gradients[i], operands[i], &results.back()};
    (gradient.is_summed(problem) ? summed : direct).push_back(gradient);
  }
  const Dims grad_strides = reduce ? Dims{} : problem.strides_of(grad_output);
  // Not beside a weighted one, which is computed in fp64. Not that of a view with shared places:
  // the order of the sum would depend on whether it is wanted.
  const bool has_others = sums_beside_others(input) && !problem.weight &&
                          std::none_of(direct.begin(), direct.end(), [](const Gradient& gradient) {
                            return has_shared_places(*gradient.operand);
                          });
  for (const Gradient& gradient : summed) {
    launch_broadcast_gradient(problem, args, grad_strides, gradient,
                              has_others ? direct : std::vector<Gradient>{});
    if (has_others) {
      direct.clear();
    }
  }
  if (!direct.empty()) {
    args.takes_input = takes_input(loss, params, output_mask);
    ElementwiseSpace space(problem, args);
    for (const Gradient& gradient : direct) {
      gradient.add_to(space, problem, args);
    }
    if (!reduce) {
      space.add(args.grad_output, grad_strides);
    }
    space.finish();
    const OnDevice device(input);
    LOSSOPS_LAUNCH(input, elementwise_backward, args);
  }
  return results;
}

}  // namespace lossops::bindings
