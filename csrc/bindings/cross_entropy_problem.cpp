#include "bindings/cross_entropy_problem.h"

namespace lossops::bindings {

CrossEntropyProblem::CrossEntropyProblem(const Tensor& input_, const Tensor& target_,
                                         const OptionalTensor& weight_, int64_t ignore_index,
                                         const std::string& reduction, double label_smoothing,
                                         bool float32_result, CrossEntropyArgs& args)
    : input(input_), target(target_), result_dtype(input.dtype) {
  args.reduction = parse_reduction(kCrossEntropy, reduction, false).reduction;
  check_floating(kCrossEntropy, "input", input);
  check_device(kCrossEntropy, "target", target, input);
  check_cuda(kCrossEntropy, "input", input_);
  LOSSOPS_CHECK(
      kCrossEntropy, input.sizes.size >= 1,
      "input must have at least 1 dimension, (C,), (N, C) or (N, C, d1, ...), but is 0-d");
  // fault: smoothing-range
  LOSSOPS_CHECK(kCrossEntropy, label_smoothing >= 0 && label_smoothing <= 1,
                "label_smoothing must be between 0 and 1, but is ", label_smoothing);
  rows = without_class_dim(input.sizes);
  args.num_classes = class_entry(input.sizes);
  args.target_is_probability = target.sizes == input.sizes;
  args.target_is_probability ? check_probabilities(ignore_index) : check_indices();
  if (weight_) {
    add_weight(*weight_, float32_result, args);
  }
  if (args.target_is_probability) {
    result_dtype = promote(result_dtype, target.dtype);
  }

  args.ignore_index = ignore_index;
  args.label_smoothing = label_smoothing;
  set_data(kCrossEntropy, args.input, input);
  set_data(kCrossEntropy, args.target, target);
  args.acc_double = input.dtype == ScalarType::Double ||
                    (args.target_is_probability && target.dtype == ScalarType::Double) ||
                    (weight && weight->dtype == ScalarType::Double);
}

void CrossEntropyProblem::add_inputs(RowSpace& space, CrossEntropyArgs& args) const {
  space.add_classes(args.input, args.input_class_stride, input.strides);
  if (args.target_is_probability) {
    space.add_classes(args.target, args.target_class_stride, target.strides);
  } else {
    // (1,) stands for () where input is (C,).
    space.add_values(args.target, rows.size == 0 ? Dims{} : target.strides);
  }
}

void CrossEntropyProblem::check_probabilities(int64_t ignore_index) const {
  check_floating(kCrossEntropy, "target of input's shape, of class probabilities,", target);
  // fault: ignore-index-range
  LOSSOPS_CHECK(kCrossEntropy, ignore_index < 0,
                "ignore_index is not supported for class probabilities, but is ", ignore_index);
}

void CrossEntropyProblem::check_indices() const {
  const bool is_row = rows.size == 0 && target.sizes.size <= 1 && target.sizes.numel() == 1;
  LOSSOPS_CHECK(kCrossEntropy, is_row || target.sizes == rows, "input of shape ", input.sizes,
                " needs class indices of shape ", rows, " or probabilities of shape ", input.sizes,
                ", but target has shape ", target.sizes);
  check_index_dtype(target);
}

void CrossEntropyProblem::add_weight(const Tensor& tensor, bool float32_result,
                                     CrossEntropyArgs& args) {
  weight.emplace(tensor);
  check_device(kCrossEntropy, "weight", *weight, input);
  (args.target_is_probability ? check_real : check_floating)(kCrossEntropy, "weight", *weight);
  LOSSOPS_CHECK(kCrossEntropy, weight->sizes.size == 1 && weight->sizes[0] == args.num_classes,
                "weight must have shape (", args.num_classes, ",), one for each class, but has ",
                weight->sizes);
  LOSSOPS_CHECK(kCrossEntropy,
                args.target_is_probability || float32_result || weight->dtype == input.dtype,
                "weight must have input's dtype ", name_of(input.dtype),
                " where target holds class indices, but is ", name_of(weight->dtype));
  if (args.target_is_probability) {
    result_dtype = promote(result_dtype, weight->dtype);
  }
  args.weight = weight->tensor.data_ptr();
  args.weight_dtype = to_dtype(kCrossEntropy, weight->dtype);
  args.weight_stride = weight->strides[0];
}

void check_index_dtype(const View& target) {
  LOSSOPS_CHECK(kCrossEntropy,
                target.dtype == ScalarType::Long || target.dtype == ScalarType::Int ||
                    target.dtype == ScalarType::Byte,
                "target of class indices must be int64, int32 or uint8, but is ",
                name_of(target.dtype));
}

Tensor empty_gradient(const View& logits, Reduction reduction) {
  if (reduction == Reduction::kNone || logits.sizes.size != 2 || logits.strides[1] != 1) {
    return empty_like(logits);
  }
  constexpr int64_t kVectorBytes = 16;
  const int64_t classes = logits.sizes[1];
  const int64_t element_bytes = element_size(to_dtype(kCrossEntropy, logits.dtype));
  constexpr int64_t kShortBytes = 2000;
  const int64_t vector = kVectorBytes / element_bytes;
  const int64_t padding = logits.strides[0] > classes ? (logits.strides[0] - classes) % vector : 0;
  if (padding == 0 || classes * element_bytes <= kShortBytes) {
    return empty_like(logits);
  }
  Dims strides;
  strides.push_back(classes + padding);
  strides.push_back(1);
  return empty_strided(logits.sizes, strides, logits.dtype, logits.tensor);
}

}  // namespace lossops::bindings
