// What cross entropy needs to know of one row beyond its logits: the class index or
// the coefficients q, read through any layout and dtype. Host and device.
#pragma once

#include "launchers.h"
#include "losses/rows/cross_entropy.h"
#include "strided.h"

namespace lossops {

LOSSOPS_HOST_DEVICE int64_t load_class_index(const Operand& target, int64_t offset) {
  switch (target.dtype) {
    case DType::kInt64:
      return static_cast<const int64_t*>(target.data)[offset];
    case DType::kInt32:
      return static_cast<const int32_t*>(target.data)[offset];
    default:
      return static_cast<const uint8_t*>(target.data)[offset];
  }
}

// Those of several rows: all loads are in flight at once.
template <int kCount>
LOSSOPS_HOST_DEVICE void load_class_indices(const Operand& target, int64_t offset, int64_t stride,
                                            int64_t (&indices)[kCount]) {
  const auto load = [&](const auto* data) {
    for (int i = 0; i < kCount; ++i) {
      indices[i] = data[offset + i * stride];
    }
  };
  switch (target.dtype) {
    case DType::kInt64:
      return load(static_cast<const int64_t*>(target.data));
    case DType::kInt32:
      return load(static_cast<const int32_t*>(target.data));
    default:
      return load(static_cast<const uint8_t*>(target.data));
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t class_weight(const CrossEntropyArgs& args, int64_t c) {
  return args.weight == nullptr
             ? acc_t(1)
             : load_as<acc_t>(args.weight, args.weight_dtype, c * args.weight_stride);
}

// The target of one row.
template <typename acc_t>
struct RowTarget {
  const CrossEntropyArgs& args;
  int64_t offset;      // of the row in target
  int64_t index = -1;  // class index; -1 for probabilities
  bool ignored = false;
  bool valid = true;  // false: class index out of range
  // Of label smoothing: once a row, not once a class.
  acc_t smoothing = static_cast<acc_t>(args.label_smoothing);
  acc_t smoothing_per_class =
      static_cast<acc_t>(args.label_smoothing / static_cast<double>(args.num_classes));

  LOSSOPS_HOST_DEVICE RowTarget(const CrossEntropyArgs& args_, int64_t offset_)
      : args(args_), offset(offset_) {
    if (!args.target_is_probability) {
      index = load_class_index(args.target, offset);
      ignored = index == args.ignore_index;
      valid = ignored || (index >= 0 && index < args.num_classes);
    }
  }

  // Of a class index that was loaded before.
  LOSSOPS_HOST_DEVICE RowTarget(const CrossEntropyArgs& args_, int64_t index_, int64_t offset_)
      : args(args_),
        offset(offset_),
        index(index_),
        ignored(index_ == args_.ignore_index),
        valid(ignored || (index_ >= 0 && index_ < args_.num_classes)) {}

  // Only the logits of such a row count.
  LOSSOPS_HOST_DEVICE bool has_loss() const { return valid && !ignored; }

  LOSSOPS_HOST_DEVICE acc_t index_weight() const { return class_weight<acc_t>(args, index); }

  // What the row adds to the mean's denominator.
  template <typename T = acc_t>
  LOSSOPS_HOST_DEVICE T mean_weight() const {
    if (args.target_is_probability) {
      return args.num_classes > 0 ? T(1) : T(0);  // torch: numel / C rows
    }
    if (!valid) {
      return args.weight == nullptr ? T(1) : T(0);
    }
    return ignored ? T(0) : class_weight<T>(args, index);
  }

  // p'_c: the smoothed probability of class c.
  LOSSOPS_HOST_DEVICE acc_t probability(int64_t c) const {
    const acc_t p =
        load_as<acc_t>(args.target.data, args.target.dtype, offset + c * args.target_class_stride);
    return smoothed(p, smoothing, smoothing_per_class);
  }

  // q_c of a dense row.
  LOSSOPS_HOST_DEVICE acc_t coefficient(int64_t c) const {
    const acc_t p = args.target_is_probability ? probability(c)
                                               : smoothed(c == index ? acc_t(1) : acc_t(0),
                                                          smoothing, smoothing_per_class);
    return class_weight<acc_t>(args, c) * p;
  }
};

// The planes of row_stats, (2 or 3, rows): max, rest, and Q of dense rows. A kernel for CUDA may
// leave the logit at the class index for max. Rest is then negated (plain_rows.cuh), but not that
// of dense rows, whose gradients are the same formula of either.
template <typename acc_t>
struct RowStats {
  acc_t* max;
  acc_t* rest;
  acc_t* q_sum;

  LOSSOPS_HOST_DEVICE RowStats(void* data, int64_t rows)
      : max(static_cast<acc_t*>(data)), rest(max + rows), q_sum(rest + rows) {}
};

// The backward pass of a forward that is to leave a gradient, for a grad_output of 1.
inline CrossEntropyBackwardArgs unit_backward(const CrossEntropyForwardArgs& args) {
  CrossEntropyBackwardArgs backward;
  static_cast<CrossEntropyArgs&>(backward) = args;
  backward.row_stats = args.row_stats;
  backward.mean_terms = args.denominator != nullptr ? args.denominator : args.mean_terms;
  backward.grad_input = args.grad_input;
  backward.grad_input_class_stride = args.grad_input_class_stride;
  return backward;
}

// What a row's gradients are multiplied by, of its share of grad_output. The softmax of one class
// is 1, whatever its logit: a factor of 0 makes Q softmax - q exactly 0 where rounding would leave
// something, and NaN where there is no softmax.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t gradient_scale(const CrossEntropyArgs& args, acc_t share) {
  return args.num_classes == 1 && args.dense() ? acc_t(0) * share : share;
}

// The scale of one row: grad_output, divided by what the mean divides by.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t row_scale(const CrossEntropyBackwardArgs& args, int64_t offset) {
  const acc_t grad_output = load_grad_output<acc_t>(args.grad_output, offset);
  // fault: ce-mean-scale
  return gradient_scale(args, args.reduction == Reduction::kMean
                                  ? grad_output / static_cast<acc_t>(args.mean_terms[0])
                                  : grad_output);
}

// Whether the mean over a denominator of 0, where all class weights are 0, is NaN instead of the
// sum over 0. With label smoothing torch adds two means: the one of the class indices alone is then
// 0 / 0, although all other classes add to the sum.
LOSSOPS_HOST_DEVICE bool has_mean_of_indices(const CrossEntropyArgs& args) {
  return args.label_smoothing > 0 && !args.target_is_probability;
}

}  // namespace lossops
