#include "bindings/arguments.h"

#include "bindings/launch.h"

namespace lossops::bindings {

ReductionChoice parse_reduction(const char* op, const std::string& name, bool has_batchmean) {
  if (name == "none") {
    return {Reduction::kNone, false};
  }
  if (name == "mean") {
    return {Reduction::kMean, false};
  }
  if (name == "sum") {
    return {Reduction::kSum, false};
  }
  if (has_batchmean && name == "batchmean") {
    return {Reduction::kMean, true};
  }
  fail(op, "reduction must be one of 'none', 'mean', 'sum'", has_batchmean ? ", 'batchmean'" : "",
       ", but is '", name, "'");
}

void check_floating(const char* op, const char* name, const View& view) {
  LOSSOPS_CHECK(op, is_floating(view.dtype), name, " must be ", kFloatingDtypes, ", but is ",
                name_of(view.dtype));
}

void check_real(const char* op, const char* name, const View& view) {
  LOSSOPS_CHECK(op, is_floating(view.dtype) || is_integral(view.dtype), name, " must be ",
                kRealDtypes, ", but is ", name_of(view.dtype));
}

void check_device(const char* op, const char* name, const View& view, const View& input,
                  const char* input_name) {
  LOSSOPS_CHECK(op, same_device(view.tensor, input.tensor), name, " is on ", device_of(view.tensor),
                " but ", input_name, " is on ", device_of(input.tensor));
}

void check_cuda(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_cuda()) {
    const std::string problem = cuda_problem();
    LOSSOPS_CHECK(op, problem.empty(), name, " is on ", device_of(tensor), ", but ", problem);
  }
}

void check_ndim(const char* op, int merged, const char* operands) {
  LOSSOPS_CHECK(op, merged >= 0, operands, " need more than ", kMaxDims,
                " dimensions after merging; make them contiguous");
}

const double* check_mean_terms(const char* op, const OptionalTensor& tensor, const View& input) {
  LOSSOPS_CHECK(op, tensor, "the mean needs the mean_terms that forward returned");
  const View view(*tensor);
  LOSSOPS_CHECK(
      op, view.dtype == ScalarType::Double && view.sizes.numel() == 2 && tensor->is_contiguous(),
      "mean_terms must be the (2,) float64 tensor that forward returned, but is ", view.sizes, " ",
      name_of(view.dtype));
  check_device(op, "mean_terms", view, input);
  return static_cast<const double*>(tensor->const_data_ptr());
}

const Tensor& check_kept(const char* op, const char* name, const Tensor& tensor,
                         const View& operand) {
  const View view(tensor);
  LOSSOPS_CHECK(op, view.sizes == operand.sizes && view.dtype == operand.dtype, name,
                " must be the ", operand.sizes, " ", name_of(operand.dtype),
                " tensor that forward returned, but is ", view.sizes, " ", name_of(view.dtype));
  check_device(op, name, view, operand);
  return tensor;
}

}  // namespace lossops::bindings
