// Forward and backward of the elementwise losses, for every loss of losses/elementwise/registry.h.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "bindings/arguments.h"

namespace lossops::bindings {

// Kept gradients: those of input and target for a grad_output of 1, where there are any.
using KeptGradients = std::array<OptionalTensor, 2>;

struct ElementwiseResult {
  Tensor loss;
  OptionalTensor mean_terms;  // Extra::kBackwardTerms
  KeptGradients kept;         // Extra::kGradient
};

// wanted: of input and target, whether the gradient is. For Extra::kGradient.
ElementwiseResult elementwise_forward(ElementwiseLoss loss, const Tensor& input,
                                      const Tensor& target, const OptionalTensor& weight,
                                      const LossParams& params, const std::string& reduction,
                                      bool float32_result, Extra extra,
                                      std::array<bool, 2> wanted = {});

// The gradients of input, target and weight that output_mask asks for. Those that are kept become
// the ones for the actual grad_output, in place.
std::vector<Tensor> elementwise_backward(ElementwiseLoss loss, const Tensor& grad_output_,
                                         const Tensor& input, const Tensor& target,
                                         const OptionalTensor& weight,
                                         const OptionalTensor& mean_terms, const LossParams& params,
                                         const std::string& reduction,
                                         const std::vector<bool>& output_mask,
                                         const KeptGradients& kept = {});

}  // namespace lossops::bindings
