// What forward and backward of cross entropy have in common: the checked arguments, and the rows
// that a kernel runs over.
#pragma once

#include <optional>
#include <string>

#include "bindings/rows.h"

namespace lossops::bindings {

constexpr char kCrossEntropy[] = "cross_entropy";

struct CrossEntropyProblem {
  View input;
  View target;
  std::optional<View> weight;
  Dims rows;  // shape of the target's rows: input's without the class dimension
  ScalarType result_dtype;

  // Checks the arguments, and fills args, except for its rows.
  CrossEntropyProblem(const Tensor& input_, const Tensor& target_, const OptionalTensor& weight_,
                      int64_t ignore_index, const std::string& reduction, double label_smoothing,
                      bool float32_result, CrossEntropyArgs& args);

  // Adds input and target.
  void add_inputs(RowSpace& space, CrossEntropyArgs& args) const;

 private:
  void check_probabilities(int64_t ignore_index) const;
  void check_indices() const;
  void add_weight(const Tensor& tensor, bool float32_result, CrossEntropyArgs& args);
};

void check_index_dtype(const View& target);

inline ScalarType acc_dtype(const CrossEntropyArgs& args) {
  return args.acc_double ? ScalarType::Double : ScalarType::Float;
}

}  // namespace lossops::bindings
