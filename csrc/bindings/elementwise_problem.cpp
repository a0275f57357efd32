#include "bindings/elementwise_problem.h"

#include "bindings/launch.h"

namespace lossops::bindings {

ElementwiseProblem::ElementwiseProblem(ElementwiseLoss loss, const Tensor& input_,
                                       const Tensor& target_, const OptionalTensor& weight_,
                                       const LossParams& params, const std::string& reduction,
                                       ElementwiseArgs& args)
    : op(name_of(loss)), input(input_), target(target_) {
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
    // The mean is a sum of nothing over the weights' own sum. No kernel needs to know that sum.
    args.weight_copies = 0;
    args.denominator = 1;
  }
  order = traits.target_first ? fastest_first_order(shape, strides_of(target), strides_of(input))
                              : fastest_first_order(shape, strides_of(input), strides_of(target));
}

void ElementwiseProblem::check_dtypes(bool takes_integers) const {
  const auto check = takes_integers ? check_real : check_floating;
  check(op, "input", input);
  check(op, "target", target);  // fault: dtype-of-target
  LOSSOPS_CHECK(op, is_floating(input.dtype) || is_floating(target.dtype),
                "input or target must be ", kFloatingDtypes, ", but they are ",
                name_of(input.dtype), " and ", name_of(target.dtype));
}

void ElementwiseProblem::add_weight(const Tensor& tensor, Reduction reduction) {
  weight.emplace(tensor);
  check_device(op, "weight", *weight, input);
  check_real(op, "weight", *weight);
  LOSSOPS_CHECK(op, weight->sizes == input.sizes, "weight of shape ", weight->sizes,
                " must have the shape of input, ", input.sizes);
  result_dtype = result_type({result_dtype, shape.size}, {weight->dtype, weight->sizes.size});
  if (reduction == Reduction::kMean) {
    result_dtype = promote(result_dtype, weight->dtype);
  }
}

ElementwiseSpace::ElementwiseSpace(const ElementwiseProblem& problem, ElementwiseArgs& args)
    : problem_(problem), args_(args), builder_(problem.shape) {
  add(args.input, problem.strides_of(problem.input));
  add(args.target, problem.strides_of(problem.target));
  if (problem.weight) {
    add(args.weight, problem.strides_of(*problem.weight));
  }
}

void ElementwiseSpace::finish() {
  check_ndim(problem_.op, builder_.finish(problem_.order, args_.space));
  args_.contiguous = is_contiguous();
}

int ElementwiseSpace::finish_with_kept_first(const Dims& sizes) {
  const Dims& shape = problem_.shape;
  const int missing = shape.size - sizes.size;
  const auto kept = [&](int64_t dim) {
    const int own = static_cast<int>(dim) - missing;
    return own >= 0 && sizes[own] == shape[static_cast<int>(dim)];
  };
  Dims order;
  int num_kept = 0;
  for (const bool want_kept : {true, false}) {
    for (int i = 0; i < problem_.order.size; ++i) {
      if (kept(problem_.order[i]) == want_kept) {
        order.push_back(problem_.order[i]);
      }
    }
    num_kept = want_kept ? order.size : num_kept;
  }
  const int merged = builder_.finish(order, args_.space, num_kept);
  check_ndim(problem_.op, merged);
  return merged;
}

bool ElementwiseSpace::is_contiguous() const {
  if (!is_floating(args_.input.dtype) || !is_floating(args_.target.dtype) || args_.space.ndim > 1) {
    return false;
  }
  for (int i = 0; i < builder_.size(); ++i) {
    const Operand& operand = builder_.operand(i);
    if (operand.data != nullptr &&
        (!is_floating(operand.dtype) || (args_.space.ndim == 1 && operand.strides[0] != 1))) {
      return false;
    }
  }
  return true;
}

}  // namespace lossops::bindings
