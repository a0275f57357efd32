// Random calls for log-probabilities and entropies of tokens, for every backend.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launchers.h"
#include "tests/cases.h"

namespace lossops::test {

struct TokenCase {
  std::vector<int64_t> rows;
  int64_t num_classes = 0;
  // The class dimension comes last in sizes and strides, and that of the indices in theirs.
  TestTensor input, index, mask;
  LogitMapParams map;
  TestTensor log_probs, entropy, lse, row_stats;
  TestTensor grad_log_probs, grad_entropy, grad_lse, grad_input;

  bool acc_double() const { return input.dtype == DType::kFloat64; }
  int64_t num_indices() const { return index.absent() ? 0 : index.sizes.back(); }

  std::string describe() const {
    return "tokens " + text_of(rows) + " of " + std::to_string(num_classes) + " classes, " +
           name_of(input.dtype) + ", " + std::to_string(num_indices()) + " indices, scale " +
           std::to_string(map.scale) + " softcap " + std::to_string(map.softcap) +
           " class stride " + std::to_string(input.strides.back()) +
           (mask.absent() ? "" : " masked") + (entropy.absent() ? "" : " entropy") +
           (grad_log_probs.absent() ? "" : " log_probs");
  }

  void fill_common(TokenArgs& args, const Place& place) const {
    args.rows = space_of(rows);
    args.num_classes = num_classes;
    args.input = operand_of(input, place);
    args.input_class_stride = input.strides.back();
    args.map = map;
    args.index = operand_of(index, place);
    args.num_indices = num_indices();
    args.index_stride = index.absent() ? 0 : index.strides.back();
    args.row_mask = operand_of(mask, place);
    args.has_entropy = !entropy.absent();
    args.acc_double = acc_double();
  }

  TokenForwardArgs forward_args(const Place& place) const {
    TokenForwardArgs args;
    fill_common(args, place);
    args.log_probs = operand_of(log_probs, place);
    args.log_probs_stride = log_probs.absent() ? 1 : log_probs.strides.back();
    args.entropy = operand_of(entropy, place);
    args.lse = operand_of(lse, place);
    args.row_stats = place(row_stats);
    return args;
  }

  TokenBackwardArgs backward_args(const Place& place) const {
    TokenBackwardArgs args;
    fill_common(args, place);
    args.grad_log_probs = operand_of(grad_log_probs, place);
    args.grad_log_probs_stride = grad_log_probs.absent() ? 1 : grad_log_probs.strides.back();
    args.grad_entropy = operand_of(grad_entropy, place);
    args.grad_lse = operand_of(grad_lse, place);
    args.row_stats = place(row_stats);
    args.grad_input = operand_of(grad_input, place);
    args.grad_input_class_stride = grad_input.strides.back();
    return args;
  }
};

// input, grad_input: of any layout, filled by this.
inline TokenCase random_tokens(Random& random, std::vector<int64_t> rows, TestTensor input,
                               TestTensor grad_input) {
  TokenCase result;
  result.num_classes = input.sizes.back();
  input.fill([&] { return random.uniform(-8, 8); });
  result.input = std::move(input);
  result.grad_input = std::move(grad_input);
  result.map.scale = random.pick({1.0, 1.0, -1.0, 0.5});
  result.map.softcap = random.pick({0.0, 0.0, 0.0, 5.0});
  const DType dtype = result.acc_double() ? DType::kFloat64 : DType::kFloat32;
  const auto uniform = [&] { return random.uniform(-1, 1); };
  const auto num_indices = random.pick<int64_t>({0, 1, 1, 1, 2, 5, 17, 32, 40});
  if (num_indices > 0) {
    std::vector<int64_t> sizes = rows;
    sizes.push_back(num_indices);
    result.index = TestTensor(random.pick({DType::kInt64, DType::kInt32}), sizes, Layout::kDense);
    result.index.fill([&] { return static_cast<double>(random.below(result.num_classes)); });
    result.log_probs = TestTensor(dtype, sizes, Layout::kDense);
    if (random.below(4) > 0) {
      result.grad_log_probs = result.log_probs;
      result.grad_log_probs.fill(uniform);
    }
  }
  if (random.below(2) == 0) {
    result.mask = TestTensor(DType::kUInt8, rows, Layout::kDense);
    result.mask.fill([&] { return random.below(4) == 0 ? 0.0 : 1.0; });
  }
  const TestTensor of_rows(dtype, rows, Layout::kDense);
  if (random.below(2) == 0) {
    result.entropy = of_rows;
    result.grad_entropy = of_rows;
    result.grad_entropy.fill(uniform);
  }
  result.lse = of_rows;
  if (random.below(2) == 0) {
    result.grad_lse = of_rows;
    result.grad_lse.fill(uniform);
  }
  std::vector<int64_t> stats = rows;
  stats.push_back(3);
  result.row_stats = TestTensor(dtype, stats, Layout::kDense);
  result.rows = std::move(rows);
  return result;
}

}  // namespace lossops::test
