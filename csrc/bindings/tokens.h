// The ops of token values, with the arguments of their schemas in bindings.cpp.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"

namespace lossops::bindings {

// log_probs; entropy and lse, of the rows' shape, or with a further dimension of 0 where they are
// not wanted; row_stats, which has no elements unless keeps_stats is set.
std::tuple<Tensor, Tensor, Tensor, Tensor> token_values_forward(
    Tensor logits, OptionalTensor index, OptionalTensor row_mask, double temperature,
    double logit_scale, std::optional<double> softcap, bool has_entropy, bool has_lse,
    bool keeps_stats);

// The gradient of logits.
std::vector<Tensor> token_values_backward(OptionalTensor grad_log_probs,
                                          OptionalTensor grad_entropy, OptionalTensor grad_lse,
                                          Tensor logits, OptionalTensor index,
                                          OptionalTensor row_mask, Tensor row_stats,
                                          double temperature, double logit_scale,
                                          std::optional<double> softcap, bool has_entropy,
                                          bool has_lse, std::vector<bool> output_mask);

// Writes the gradient over the logits, which share memory with no other argument.
void token_values_backward_inplace(Tensor logits, OptionalTensor grad_log_probs,
                                   OptionalTensor grad_entropy, OptionalTensor grad_lse,
                                   OptionalTensor index, OptionalTensor row_mask, Tensor row_stats,
                                   double temperature, double logit_scale,
                                   std::optional<double> softcap, bool has_entropy, bool has_lse);

}  // namespace lossops::bindings
