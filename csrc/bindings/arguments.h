// The arguments that ops of both families take, and their checks.
#pragma once

#include <string>

#include "bindings/tensors.h"
#include "launchers.h"

namespace lossops::bindings {

// What a forward pass returns beside the loss. kGradient: the gradient for a grad_output of 1.
enum class Extra : int8_t { kNothing, kBackwardTerms, kGradient };

struct ReductionChoice {
  Reduction reduction;
  bool batch;  // batchmean: a mean over the first dimension
};

ReductionChoice parse_reduction(const char* op, const std::string& name, bool has_batchmean);

void check_floating(const char* op, const char* name, const View& view);

// Fails for a dtype that is neither floating nor integral.
void check_real(const char* op, const char* name, const View& view);

void check_device(const char* op, const char* name, const View& view, const View& input,
                  const char* input_name = "input");

// Fails for a CUDA tensor if CUDA cannot be used, before anything is allocated or launched. torch's
// own errors do not say what to do.
void check_cuda(const char* op, const char* name, const Tensor& tensor);

// Fails if the operands, merged, have more dimensions than a kernel's arguments hold.
void check_ndim(const char* op, int merged, const char* operands = "input and target");

// Checks mean_terms, which forward returned: the denominator and the value of a mean.
const double* check_mean_terms(const char* op, const OptionalTensor& tensor, const View& input);

// Checks a gradient of `operand` that forward returned.
const Tensor& check_kept(const char* op, const char* name, const Tensor& tensor,
                         const View& operand);

}  // namespace lossops::bindings
