// The ops of cross entropy, with the arguments of their schemas in bindings.cpp.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "bindings/tensors.h"

namespace lossops::bindings {

// The public op without autograd. Its autograd kernel is in lossops/_ops/calling.py.
Tensor cross_entropy(Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index,
                     std::string reduction, double label_smoothing);

Tensor cross_entropy_value(Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index,
                           std::string reduction, double label_smoothing, bool float32_result);

// loss, row_stats, mean_terms
std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward(
    Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index, std::string reduction,
    double label_smoothing, bool float32_result);

// loss, grad_input, saved
std::tuple<Tensor, Tensor, Tensor> cross_entropy_forward_gradient(
    Tensor input, Tensor target, OptionalTensor weight, int64_t ignore_index, std::string reduction,
    double label_smoothing, bool float32_result);

// The sum of the losses, in float32 for half types. Writes its gradient, divided by the denominator
// where there is one, over input, which shares memory with no other argument. It is for a part of
// the rows that a mean is of.
Tensor cross_entropy_forward_inplace(Tensor input, Tensor target, OptionalTensor weight,
                                     OptionalTensor denominator, int64_t ignore_index,
                                     double label_smoothing);

std::vector<Tensor> cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target,
                                           OptionalTensor weight, Tensor row_stats,
                                           OptionalTensor mean_terms, int64_t ignore_index,
                                           std::string reduction, double label_smoothing,
                                           std::vector<bool> output_mask);

void cross_entropy_backward_kept(Tensor grad_input, Tensor grad_output, Tensor input, Tensor target,
                                 Tensor saved, OptionalTensor weight, int64_t ignore_index,
                                 std::string reduction, double label_smoothing,
                                 bool float32_result);

// Writes the gradient of input over input. lossops/_ops/overwriting.py has checked that no other
// argument shares its memory.
void cross_entropy_backward_inplace(Tensor input, Tensor grad_output, Tensor target,
                                    OptionalTensor weight, Tensor row_stats,
                                    OptionalTensor mean_terms, int64_t ignore_index,
                                    std::string reduction, double label_smoothing);

// JSON of launchers.h: explain_cross_entropy() of a call with these tensors, which may be of the
// meta device, and explain_cross_entropy_table().
std::string cross_entropy_plan(Tensor input, Tensor target, OptionalTensor weight,
                               std::string reduction, double label_smoothing, bool gradient,
                               std::string device);
std::string cross_entropy_plan_table(std::string device);

// The first row whose class index is out of range, or -1: an int64 scalar on target's device.
Tensor first_invalid_target(Tensor target, int64_t num_classes, int64_t ignore_index);

}  // namespace lossops::bindings
