// Backward, class by class.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/class_blocks.h"
#include "cpu/cross_entropy/gradient_terms.h"
#include "cpu/thread_buffers.h"

namespace lossops::cpu {
namespace {

// A gradient of rows [first, first + kVector) for all classes of a block. What a row has in common
// is in local arrays: the compiler would otherwise have to fear that the results overwrite it.
template <Wanted kWanted, bool kDense, typename acc_t>
LOSSOPS_HOST_DEVICE void gradient_columns(const Columns<acc_t>& x,
                                          const ProbabilityColumns<acc_t>& p, const acc_t* weights,
                                          acc_t unsmoothed, const RowGradients<acc_t>& rows,
                                          int classes, int first, int width, acc_t* grad) {
  acc_t max[kVector];
  acc_t rest[kVector];
  acc_t factors[kVector];
  acc_t log_sum[kVector];
  acc_t scale[kVector];
  acc_t q_sum[kVector];
  std::copy_n(rows.max + first, kVector, max);
  std::copy_n(rows.rest + first, kVector, rest);
  std::copy_n(rows.factor + first, kVector, factors);
  std::copy_n(rows.log_sum + first, kVector, log_sum);
  std::copy_n(rows.scale + first, kVector, scale);
  std::copy_n(rows.q_sum + first, kVector, q_sum);
  const auto softmax = [&](int lane) LOSSOPS_ALWAYS_INLINE {
    return RowSoftmax<acc_t>{max[lane], rest[lane], factors[lane], log_sum[lane]};
  };
  for (int c = 0; c < classes; ++c) {
    const acc_t* column = x.first + c * x.stride + first;
    acc_t result[kVector];
    if constexpr (kWanted == Wanted::kTarget) {
      const acc_t factor = unsmoothed * weights[c];
      for (int lane = 0; lane < kVector; ++lane) {
        result[lane] = scale[lane] * factor * softmax(lane).surprise(column[lane]);
      }
    } else if constexpr (kDense) {
      for (int lane = 0; lane < kVector; ++lane) {
        result[lane] = softmax(lane).dense_gradient(column[lane], scale[lane], q_sum[lane],
                                                    p(c, first + lane) * weights[c]);
      }
    } else {
      for (int lane = 0; lane < kVector; ++lane) {
        result[lane] = softmax(lane).gradient(column[lane]);
      }
    }
    std::copy_n(result, kVector, grad + c * width + first);
  }
}

// Gives rows [first, first + kVector) without a loss the gradient of such.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void silence_rows(const BlockTargets<acc_t>& targets, int classes, int first,
                                      int width, acc_t* grad) {
  acc_t has_loss[kVector];
  acc_t without_loss[kVector];
  std::copy_n(targets.has_loss + first, kVector, has_loss);
  std::copy_n(targets.without_loss + first, kVector, without_loss);
  for (int c = 0; c < classes; ++c) {
    acc_t result[kVector];
    std::copy_n(grad + c * width + first, kVector, result);
    for (int lane = 0; lane < kVector; ++lane) {
      result[lane] = has_loss[lane] != acc_t(0) ? result[lane] : without_loss[lane];
    }
    std::copy_n(result, kVector, grad + c * width + first);
  }
}

// Overwrites the gradient at the class index of each row: gradient_columns() has computed it as if
// it were any other class.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void gradient_at_indices(const CrossEntropyArgs& args, const Columns<acc_t>& x,
                                             const ProbabilityColumns<acc_t>& p,
                                             const acc_t* weights, const RowGradients<acc_t>& rows,
                                             int64_t first_class, int classes, int count,
                                             acc_t* grad) {
  const int width = padded(count);
  int at[kBlock];         // in grad
  bool in_block[kBlock];  // else at is that of some other class
  acc_t x_at[kBlock] = {};
  acc_t q[kBlock] = {};
  acc_t result[kBlock];
  for (int j = 0; j < count; ++j) {
    const int64_t c = rows.targets.index[j] - first_class;
    in_block[j] = static_cast<uint64_t>(c) < static_cast<uint64_t>(classes);
    const int64_t safe = in_block[j] ? c : 0;
    at[j] = static_cast<int>(safe) * width + j;
    x_at[j] = x.first[safe * x.stride + j];
    q[j] = rows.q_at_index[j];
    if (args.dense()) {
      q[j] += p(static_cast<int>(safe), j) * weights[safe];
    }
  }
  if (args.dense()) {
    for (int j = 0; j < width; ++j) {
      result[j] = rows.softmax(j).dense_gradient(x_at[j], rows.scale[j], rows.q_sum[j], q[j]);
    }
  } else {
    for (int j = 0; j < width; ++j) {
      result[j] = rows.softmax(j).gradient_at_index(x_at[j]);
    }
  }
  for (int j = 0; j < count; ++j) {
    grad[at[j]] = in_block[j] ? result[j] : grad[at[j]];
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_class_by_class(const CrossEntropyBackwardArgs& args,
                                                 const Coefficients<acc_t>& coefficients,
                                                 int64_t begin, int64_t end) {
  BackwardWalker walker(
      args.rows,
      {&args.input, &args.target, &args.grad_output, &args.grad_input, &args.grad_target}, begin);
  const ColumnsPlan plan(args);
  const acc_t unsmoothed = coefficients.unsmoothed();
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  acc_t* const grad = buffers.grad;
  acc_t weights[kBlock];
  ProbabilityColumns<acc_t> p(buffers);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first = begin; first < end; first += plan.rows) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows, end - first));
    const int width = padded(count);
    walker.next(count);
    rows.load(args, coefficients, walker[1], walker[2], first, count);
    for (int64_t first_class = 0; first_class < args.num_classes; first_class += plan.classes) {
      const int classes =
          static_cast<int>(std::min<int64_t>(plan.classes, args.num_classes - first_class));
      const Columns<acc_t> x = load_columns(
          args.input, {walker[0], args.input_class_stride, first_class, classes, count}, buffers.x,
          buffers.staging);
      coefficients.load_weights(first_class, classes, weights);
      if (args.grad_input.data != nullptr) {
        if (args.dense()) {
          p.load(args, walker[1], first_class, classes, count);
        }
        for (int j = 0; j < width; j += kVector) {
          args.dense() ? gradient_columns<Wanted::kInput, true>(x, p, weights, unsmoothed, rows,
                                                                classes, j, width, grad)
                       : gradient_columns<Wanted::kInput, false>(x, p, weights, unsmoothed, rows,
                                                                 classes, j, width, grad);
        }
        if (!args.target_is_probability) {
          gradient_at_indices(args, x, p, weights, rows, first_class, classes, count, grad);
        }
        if (!rows.targets.all_have_loss) {  // fault: ce-few-ignored
          for (int j = 0; j < width; j += kVector) {
            silence_rows(rows.targets, classes, j, width, grad);
          }
        }
        store_columns(args.grad_input,
                      {walker[3], args.grad_input_class_stride, first_class, classes, count}, grad,
                      buffers.staging);
      }
      if (args.grad_target.data != nullptr) {
        for (int j = 0; j < width; j += kVector) {
          gradient_columns<Wanted::kTarget, true>(x, p, weights, unsmoothed, rows, classes, j,
                                                  width, grad);
        }
        store_columns(args.grad_target,
                      {walker[4], args.grad_target_class_stride, first_class, classes, count}, grad,
                      buffers.staging);
      }
    }
  }
}

}  // namespace
}  // namespace lossops::cpu
