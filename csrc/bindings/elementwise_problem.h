// What forward and backward of an elementwise loss have in common: the checked arguments, and the
// space of elements that a kernel runs over.
#pragma once

#include <optional>
#include <string>

#include "bindings/arguments.h"

namespace lossops::bindings {

struct ElementwiseProblem {
  const char* op;
  View input;
  View target;
  std::optional<View> weight;
  Dims shape;  // broadcast
  Dims order;  // of its dimensions, fastest first
  ScalarType result_dtype;

  // Checks the tensors, and fills args, except for their strides.
  ElementwiseProblem(ElementwiseLoss loss, const Tensor& input_, const Tensor& target_,
                     const OptionalTensor& weight_, const LossParams& params,
                     const std::string& reduction, ElementwiseArgs& args);

  Dims strides_of(const View& view) const { return strides_of(view.sizes, view.strides); }
  Dims strides_of(const Dims& sizes, const Dims& strides) const {
    return broadcast_strides(sizes, strides, shape);
  }

  bool weighted_mean(const ElementwiseArgs& args) const {
    return weight && args.reduction == Reduction::kMean;
  }

 private:
  void check_dtypes(bool takes_integers) const;
  void add_weight(const Tensor& tensor, Reduction reduction);
};

// The elements of a problem as one launch runs over them. No other code fills the space of an
// ElementwiseArgs, the strides of its operands and `contiguous`.
class ElementwiseSpace {
 public:
  // Starts with input, target and weight.
  ElementwiseSpace(const ElementwiseProblem& problem, ElementwiseArgs& args);

  // Adds an operand with its strides over the problem's shape.
  void add(Operand& operand, const Dims& strides) { builder_.add(operand, strides); }

  void finish();

  // Puts the dimensions first along which a tensor of `sizes` is not broadcast. Returns how many of
  // these are left after merging.
  int finish_with_kept_first(const Dims& sizes);

 private:
  // Whether each operand is one dense run, all in the same order and of floating dtypes.
  bool is_contiguous() const;

  const ElementwiseProblem& problem_;
  ElementwiseArgs& args_;
  SpaceBuilder builder_;
};

}  // namespace lossops::bindings
