#include "bindings/tokens.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

#include "bindings/launch.h"
#include "bindings/rows.h"
#include "cross_entropy_row.h"

namespace lossops::bindings {
namespace {

constexpr char kTokens[] = "token_values";

// The checked arguments that forward and backward have in common. Classes are the last dimension.
struct TokenProblem {
  View logits;
  std::optional<View> index;  // (..., K)
  std::optional<View> row_mask;
  Dims rows;  // shape of logits without classes
  bool has_lse;

  TokenProblem(const Tensor& logits_, const OptionalTensor& index_, const OptionalTensor& mask_,
               double temperature, double logit_scale, std::optional<double> softcap,
               bool has_entropy, bool has_lse_, TokenArgs& args)
      : logits(logits_), has_lse(has_lse_) {
    check_floating(kTokens, "logits", logits);
    check_cuda(kTokens, "logits", logits_);
    LOSSOPS_CHECK(kTokens, logits.sizes.size >= 1,
                  "logits must have at least 1 dimension, (..., classes), but is 0-d");
    rows = without_last(logits.sizes);
    args.num_classes = last(logits.sizes);
    args.has_entropy = has_entropy;
    args.acc_double = logits.dtype == ScalarType::Double;
    args.map = checked_map(temperature, logit_scale, softcap);
    set_data(kTokens, args.input, logits);
    if (index_) {
      add_index(*index_, args);
    }
    if (mask_) {
      row_mask.emplace(*mask_);
      check_device(kTokens, "row_mask", *row_mask, logits, "logits");
      check_real(kTokens, "row_mask", *row_mask);
      LOSSOPS_CHECK(kTokens, row_mask->sizes == rows, "row_mask must have the shape of the rows, ",
                    rows, ", but has ", row_mask->sizes);
      set_data(kTokens, args.row_mask, *row_mask);
    }
  }

  ScalarType acc_dtype() const {
    return logits.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  Dims log_probs_shape(const TokenArgs& args) const { return with_last(rows, args.num_indices); }
  Dims entropy_shape(const TokenArgs& args) const {
    return args.has_entropy ? rows : with_last(rows, 0);
  }
  Dims lse_shape() const { return has_lse ? rows : with_last(rows, 0); }
  Dims stats_shape(bool is_kept = true) const {
    Dims shape;
    shape.push_back(is_kept ? 3 : 0);
    for (int i = 0; i < rows.size; ++i) {
      shape.push_back(rows[i]);
    }
    return shape;
  }

  void add_inputs(RowSpace& space, TokenArgs& args) const {
    add(space, args.input, args.input_class_stride, logits.strides);
    if (index) {
      add(space, args.index, args.index_stride, index->strides);
    }
    if (row_mask) {
      space.add_values(args.row_mask, row_mask->strides);
    }
  }

  // Adds an operand whose last dimension is a row's.
  static void add(RowSpace& space, Operand& operand, int64_t& last_stride, const Dims& strides) {
    last_stride = last(strides);
    space.add_values(operand, without_last(strides));
  }

 private:
  static int64_t last(const Dims& dims) { return dims[dims.size - 1]; }
  static Dims without_last(Dims dims) {
    --dims.size;
    return dims;
  }
  static Dims with_last(Dims dims, int64_t value) {
    dims.push_back(value);
    return dims;
  }

  static LogitMapParams checked_map(double temperature, double logit_scale,
                                    std::optional<double> softcap) {
    LOSSOPS_CHECK(kTokens, temperature > 0 && std::isfinite(temperature),
                  "temperature must be positive and finite, but is ", temperature);
    LOSSOPS_CHECK(kTokens, std::isfinite(logit_scale), "logit_scale must be finite, but is ",
                  logit_scale);
    LOSSOPS_CHECK(kTokens, !softcap || (*softcap > 0 && std::isfinite(*softcap)),
                  "softcap must be positive and finite, but is ", *softcap);
    return {logit_scale, softcap.value_or(0), temperature};
  }

  void add_index(const Tensor& tensor, TokenArgs& args) {
    index.emplace(tensor);
    check_device(kTokens, "index", *index, logits, "logits");
    LOSSOPS_CHECK(kTokens,
                  index->dtype == ScalarType::Long || index->dtype == ScalarType::Int ||
                      index->dtype == ScalarType::Byte,
                  "index must be int64, int32 or uint8, but is ", name_of(index->dtype));
    LOSSOPS_CHECK(kTokens,
                  index->sizes.size == logits.sizes.size && without_last(index->sizes) == rows,
                  "index must have the shape of the rows, ", rows,
                  ", and one more dimension for several classes a row, but has ", index->sizes);
    args.num_indices = last(index->sizes);
    set_data(kTokens, args.index, *index);
  }
};

[[noreturn]] void fail_invalid_index(const TokenProblem& problem, const TokenArgs& args,
                                     int64_t row) {
  int64_t offset = 0;
  int64_t left = row;
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    offset += left % args.rows.sizes[dim] * args.index.strides[dim];
    left /= args.rows.sizes[dim];
  }
  int64_t value = 0;
  for (int64_t k = 0; k < args.num_indices; ++k) {
    value = load_class_index(args.index, offset + k * args.index_stride);
    if (value < 0 || value >= args.num_classes) {
      break;
    }
  }
  std::ostringstream message;
  message << kTokens << ": index " << value << " at row " << row << " (logits of shape "
          << problem.logits.sizes << ") is out of range for " << args.num_classes << " classes";
  // torch turns this one into an IndexError.
  throw std::out_of_range(message.str());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> token_values_forward(
    Tensor logits, OptionalTensor index, OptionalTensor row_mask, double temperature,
    double logit_scale, std::optional<double> softcap, bool has_entropy, bool has_lse,
    bool keeps_stats) {
  TokenForwardArgs args;
  const TokenProblem problem(logits, index, row_mask, temperature, logit_scale, softcap,
                             has_entropy, has_lse, args);
  const ScalarType dtype = problem.acc_dtype();
  Tensor log_probs = empty_dense(problem.log_probs_shape(args), dtype, logits);
  Tensor entropy = empty_dense(problem.entropy_shape(args), dtype, logits);
  Tensor lse = empty_dense(problem.lse_shape(), dtype, logits);
  Tensor row_stats = empty_dense(problem.stats_shape(keeps_stats), dtype, logits);

  RowSpace space(problem.rows);
  problem.add_inputs(space, args);
  set_result(args.log_probs, log_probs);
  TokenProblem::add(space, args.log_probs, args.log_probs_stride, to_dims(log_probs.strides()));
  if (has_entropy) {
    set_result(args.entropy, entropy);
    space.add_values(args.entropy, to_dims(entropy.strides()));
  }
  if (has_lse) {
    set_result(args.lse, lse);
    space.add_values(args.lse, to_dims(lse.strides()));
  }
  space.finish(kTokens, args.rows, "logits, index and row_mask");
  args.row_stats = keeps_stats ? row_stats.mutable_data_ptr() : nullptr;
  int64_t first_invalid_row = -1;
  args.first_invalid_row = &first_invalid_row;
  const OnDevice device(logits);
  LOSSOPS_LAUNCH_WITH_SCRATCH(logits, token_forward, args);
  if (first_invalid_row >= 0) {
    fail_invalid_index(problem, args, first_invalid_row);
  }
  return {log_probs, entropy, lse, row_stats};
}

namespace {

// overwritten: the memory that the gradient takes; null: a new tensor.
Tensor token_gradient(const OptionalTensor& grad_log_probs, const OptionalTensor& grad_entropy,
                      const OptionalTensor& grad_lse, const Tensor& logits,
                      const OptionalTensor& index, const OptionalTensor& row_mask,
                      const Tensor& row_stats, double temperature, double logit_scale,
                      std::optional<double> softcap, bool has_entropy, bool has_lse,
                      const Tensor* overwritten) {
  TokenBackwardArgs args;
  const TokenProblem problem(logits, index, row_mask, temperature, logit_scale, softcap,
                             has_entropy, has_lse, args);
  const View stats(row_stats);
  LOSSOPS_CHECK(kTokens,
                stats.sizes == problem.stats_shape() && stats.dtype == problem.acc_dtype() &&
                    row_stats.is_contiguous(),
                "row_stats must be the contiguous ", problem.stats_shape(), " ",
                name_of(problem.acc_dtype()), " tensor that forward returned, but is ", stats.sizes,
                " ", name_of(stats.dtype));
  check_device(kTokens, "row_stats", stats, problem.logits, "logits");
  args.row_stats = row_stats.const_data_ptr();

  RowSpace space(problem.rows);
  problem.add_inputs(space, args);
  const auto check_gradient = [&](const char* name, const View& grad, const Dims& shape) {
    LOSSOPS_CHECK(kTokens, grad.sizes == shape && grad.dtype == problem.acc_dtype(), name,
                  " must have the shape and the dtype of its value, ", shape, " ",
                  name_of(problem.acc_dtype()), ", but has ", grad.sizes, " ", name_of(grad.dtype));
    check_device(kTokens, name, grad, problem.logits, "logits");
  };
  if (grad_log_probs && args.num_indices > 0) {
    const View grad(*grad_log_probs);
    check_gradient("grad_log_probs", grad, problem.log_probs_shape(args));
    set_data(kTokens, args.grad_log_probs, grad);
    TokenProblem::add(space, args.grad_log_probs, args.grad_log_probs_stride, grad.strides);
  }
  if (grad_entropy && has_entropy) {
    const View grad(*grad_entropy);
    check_gradient("grad_entropy", grad, problem.rows);
    set_data(kTokens, args.grad_entropy, grad);
    space.add_values(args.grad_entropy, grad.strides);
  }
  if (grad_lse && has_lse) {
    const View grad(*grad_lse);
    check_gradient("grad_lse", grad, problem.rows);
    set_data(kTokens, args.grad_lse, grad);
    space.add_values(args.grad_lse, grad.strides);
  }
  const Tensor grad_logits = overwritten == nullptr ? empty_like(problem.logits) : *overwritten;
  set_result(args.grad_input, grad_logits);
  TokenProblem::add(space, args.grad_input, args.grad_input_class_stride,
                    to_dims(grad_logits.strides()));
  space.finish(kTokens, args.rows, "logits, index and row_mask");
  const OnDevice device(logits);
  LOSSOPS_LAUNCH_WITH_SCRATCH(logits, token_backward, args);
  return grad_logits;
}

}  // namespace

std::vector<Tensor> token_values_backward(OptionalTensor grad_log_probs,
                                          OptionalTensor grad_entropy, OptionalTensor grad_lse,
                                          Tensor logits, OptionalTensor index,
                                          OptionalTensor row_mask, Tensor row_stats,
                                          double temperature, double logit_scale,
                                          std::optional<double> softcap, bool has_entropy,
                                          bool has_lse, std::vector<bool> output_mask) {
  LOSSOPS_CHECK(kTokens, output_mask.size() == 1, "output_mask must have 1 entry, but has ",
                output_mask.size());
  if (!output_mask[0]) {
    return {};
  }
  return {token_gradient(grad_log_probs, grad_entropy, grad_lse, logits, index, row_mask, row_stats,
                         temperature, logit_scale, softcap, has_entropy, has_lse, nullptr)};
}

void token_values_backward_inplace(Tensor logits, OptionalTensor grad_log_probs,
                                   OptionalTensor grad_entropy, OptionalTensor grad_lse,
                                   OptionalTensor index, OptionalTensor row_mask, Tensor row_stats,
                                   double temperature, double logit_scale,
                                   std::optional<double> softcap, bool has_entropy, bool has_lse) {
  token_gradient(grad_log_probs, grad_entropy, grad_lse, logits, index, row_mask, row_stats,
                 temperature, logit_scale, softcap, has_entropy, has_lse, &logits);
}

}  // namespace lossops::bindings
