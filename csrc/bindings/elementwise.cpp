#include "bindings/elementwise.h"

#include <torch/csrc/stable/ops.h>

#include "bindings/elementwise_problem.h"
#include "bindings/launch.h"

namespace lossops::bindings {

namespace {

// Whether a dense tensor of the shape of a view may have other neighbours than the view, because
// several elements of the view share a place: as those of torch.Tensor.expand(), of stride 0, and
// of windows of torch.Tensor.unfold() with a step of 1, whose two strides are alike.
bool has_shared_places(const View& view) {
  for (int dim = 0; dim < view.sizes.size; ++dim) {
    if (view.sizes[dim] <= 1) {
      continue;
    }
    if (view.strides[dim] == 0) {
      return true;
    }
    for (int other = 0; other < dim; ++other) {
      if (view.sizes[other] > 1 && view.strides[other] == view.strides[dim]) {
        return true;
      }
    }
  }
  return false;
}

// Computes the gradient of such a view, for a grad_output of 1, by a launch of its own. The
// gradient is dense, and the view is not. In the kernel of the loss it would change the tiles and
// the order of the sums: the last bit of the loss would depend on whether a gradient is wanted.
void launch_gradient_apart(const ElementwiseProblem& problem, const ElementwiseArgs& base,
                           Operand ElementwiseBackwardArgs::* which, const View& operand,
                           const Tensor& gradient) {
  ElementwiseBackwardArgs args;
  static_cast<ElementwiseArgs&>(args) = base;
  set_result(args.*which, gradient);
  ElementwiseSpace space(problem, args);
  space.add(args.*which, problem.strides_of(operand.sizes, to_dims(gradient.strides())));
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
  bool is_apart[2] = {};
  for (int i = 0; extra == Extra::kGradient && i < 2; ++i) {
    if (!wanted[i]) {
      continue;
    }
    const View& operand = *operands[i];
    LOSSOPS_CHECK(
        problem.op,
        reduce && !weighted_mean && is_floating(operand.dtype) &&
            operand.sizes.numel() == problem.shape.numel(),
        "there is no gradient in forward without a reduction, for a weighted mean, or for "
        "an operand that is broadcast or integral");
    const Tensor& gradient = result.kept[i].emplace(empty_like(operand));
    is_apart[i] = has_shared_places(operand);
    if (!is_apart[i]) {
      set_result(*gradients[i], gradient);
      space.add(*gradients[i], problem.strides_of(operand.sizes, to_dims(gradient.strides())));
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
  for (int i = 0; i < 2; ++i) {
    if (is_apart[i]) {
      launch_gradient_apart(
          problem, args,
          i == 0 ? &ElementwiseBackwardArgs::grad_input : &ElementwiseBackwardArgs::grad_target,
          *operands[i], *result.kept[i]);
    }
  }
  return result;
}

namespace {

// Computes the gradient of an operand that was broadcast: the sum over the added dimensions.
void launch_broadcast_gradient(const ElementwiseProblem& problem,
                               const ElementwiseBackwardArgs& base,
                               Operand ElementwiseBackwardArgs::* which, const View& operand,
                               const View& grad_output, const Tensor& gradient) {
  ElementwiseBackwardReduceArgs args;
  static_cast<ElementwiseBackwardArgs&>(args) = base;
  args.grad_input.data = args.grad_target.data = args.grad_weight.data = nullptr;
  set_result(args.*which, gradient);

  ElementwiseSpace space(problem, args);
  if (args.reduction == Reduction::kNone) {
    space.add(args.grad_output, problem.strides_of(grad_output));
  }
  space.add(args.*which, problem.strides_of(operand.sizes, to_dims(gradient.strides())));
  args.num_kept = space.finish_with_kept_first(operand.sizes);
  const OnDevice device(problem.input.tensor);
  LOSSOPS_LAUNCH_WITH_SCRATCH(problem.input.tensor, elementwise_backward_reduce, args);
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
  bool any_direct = false;
  ElementwiseSpace space(problem, args);
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
    LOSSOPS_CHECK(op, !args.kept || operands[i]->sizes.numel() == problem.shape.numel(),
                  "no forward pass keeps the gradient of ", names[i], ", which is broadcast");
    results.push_back(args.kept ? check_kept(op, kept_names[i], *kept[i], *operands[i])
                                : empty_like(*operands[i]));
    // With as many elements as the loss has, or with none as the loss, there is nothing to sum.
    if (operands[i]->sizes.numel() == problem.shape.numel()) {
      set_result(args.*gradients[i], results.back());
      space.add(args.*gradients[i],
                problem.strides_of(operands[i]->sizes, to_dims(results.back().strides())));
      any_direct = true;
    } else {
      launch_broadcast_gradient(problem, args, gradients[i], *operands[i], grad_output,
                                results.back());
    }
  }
  if (any_direct) {
    if (!reduce) {
      space.add(args.grad_output, problem.strides_of(grad_output));
    }
    space.finish();
    const OnDevice device(input);
    LOSSOPS_LAUNCH(input, elementwise_backward, args);
  }
  return results;
}

}  // namespace lossops::bindings
