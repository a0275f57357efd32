// Forward and backward of the elementwise losses, for every loss of losses/registry.h.
#pragma once

#include <string>
#include <vector>

#include "bindings/arguments.h"

namespace lossops::bindings {

struct ElementwiseResult {
  Tensor loss;
  OptionalTensor mean_terms;  // Extra::kBackwardTerms
  OptionalTensor grad_input;  // Extra::kGradient
};

ElementwiseResult elementwise_forward(ElementwiseLoss loss, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const LossParams& params, const std::string& reduction,
                                      bool float32_result, Extra extra);

// The gradients of input, target and weight that output_mask asks for. kept: the kept gradient of
// input, for a grad_output of 1. It becomes the gradient for the actual grad_output, in place.
std::vector<Tensor> elementwise_backward(ElementwiseLoss loss, const Tensor& grad_output_,
                                         const Tensor& input, const Tensor& target,
                                         const OptionalTensor& weight,
                                         const OptionalTensor& mean_terms, const LossParams& params,
                                         const std::string& reduction,
                                         const std::vector<bool>& output_mask,
                                         const OptionalTensor& kept = std::nullopt);

}  // namespace lossops::bindings
