// The targets of a block of rows, and the coefficients of their classes.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/block.h"
#include "cpu/rows.h"
#include "cross_entropy_row.h"

namespace lossops::cpu {
namespace {

// The targets of a block of rows. Nothing takes a branch a row: where rows are ignored, every third
// one would be mispredicted.
template <typename acc_t>
struct BlockTargets {
  int64_t index[kBlock];       // class indices; 0 where a row has no loss
  acc_t has_loss[kBlock];      // 0 or 1: as wide as what it chooses, for the vectors' sake
  acc_t without_loss[kBlock];  // the loss and the gradient of a row without one
  bool all_have_loss;
  bool all_valid;  // no class index is out of range

  // Rows of padding have no loss.
  LOSSOPS_HOST_DEVICE void load(const CrossEntropyArgs& args, const BlockOffsets& at, int count) {
    std::fill(has_loss + count, has_loss + padded(count), acc_t(0));
    std::fill(without_loss + count, without_loss + padded(count), acc_t(0));
    all_have_loss = all_valid = true;
    if (args.target_is_probability) {
      // A row of no classes has no loss.
      all_have_loss = args.num_classes > 0;
      std::fill_n(index, count, 0);
      std::fill_n(has_loss, count, all_have_loss ? acc_t(1) : acc_t(0));
      std::fill_n(without_loss, count, acc_t(0));
      return;
    }
    int64_t valid = 0;
    int64_t ignored = 0;
    const auto load_run = [&](const auto* from, int length, int j) LOSSOPS_ALWAYS_INLINE {
      const int64_t stride = at.stride;
      const int64_t ignore_index = args.ignore_index;
      const auto classes = static_cast<uint64_t>(args.num_classes);
      for (int i = 0; i < length; ++i) {
        const int64_t t = from[i * stride];
        const int64_t is_ignored = t == ignore_index ? 1 : 0;
        // fault: ce-index-range
        const int64_t has = (static_cast<uint64_t>(t) < classes ? 1 : 0) & (1 - is_ignored);
        ignored += is_ignored;
        valid += has;
        has_loss[j + i] = static_cast<acc_t>(static_cast<int32_t>(has));
        without_loss[j + i] = is_ignored != 0 ? acc_t(0) : math::quiet_nan<acc_t>();
        index[j + i] = has != 0 ? t : 0;
      }
    };
    at.for_each_run(count, [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
      switch (args.target.dtype) {
        case DType::kInt64:
          return load_run(static_cast<const int64_t*>(args.target.data) + offset, length, j);
        case DType::kInt32:
          return load_run(static_cast<const int32_t*>(args.target.data) + offset, length, j);
        default:
          return load_run(static_cast<const uint8_t*>(args.target.data) + offset, length, j);
      }
    });
    all_have_loss = valid == count;
    all_valid = valid + ignored == count;
  }
};

// The coefficients of a row: q_c = w_c p'_c of every class, with p'_c = eps / C where the target is
// a class index t; and then (1 - eps) w_t more at t.
template <typename acc_t>
class Coefficients {
 public:
  explicit Coefficients(const CrossEntropyArgs& args)
      : args_(args),
        smoothing_(static_cast<acc_t>(args.label_smoothing)),
        smoothing_per_class_(
            static_cast<acc_t>(args.label_smoothing / static_cast<double>(args.num_classes))) {
    weight_.data = const_cast<void*>(args.weight);
    weight_.dtype = args.weight_dtype;
  }

  acc_t unsmoothed() const { return acc_t(1) - smoothing_; }

  // Loads what q has more at the class indices of a block of rows, and what these rows add to the
  // mean's denominator.
  LOSSOPS_HOST_DEVICE void load_at_indices(const BlockTargets<acc_t>& targets, int count, acc_t* q,
                                           acc_t* mean_weight) const {
    if (args_.target_is_probability) {
      std::fill_n(q, count, acc_t(0));
      // torch: numel / C rows
      std::fill_n(mean_weight, count, args_.num_classes > 0 ? acc_t(1) : acc_t(0));
    } else if (args_.weight == nullptr) {
      const acc_t at_index = unsmoothed();
      for (int j = 0; j < count; ++j) {
        q[j] = targets.has_loss[j] != acc_t(0) ? at_index : acc_t(0);
      }
      for (int j = 0; j < count; ++j) {
        // A row whose class index is out of range counts here. With weights it adds 0.
        // fault: ce-mean-weight
        mean_weight[j] = targets.without_loss[j] == acc_t(0) ? targets.has_loss[j] : acc_t(1);
      }
    } else {
      acc_t w[kBlock] = {};
      if (args_.num_classes > 0) {
        gather(args_.weight, args_.weight_dtype, 0, 0, targets.index, args_.weight_stride, count,
               w);
      }
      const acc_t at_index = unsmoothed();
      for (int j = 0; j < count; ++j) {
        mean_weight[j] = targets.has_loss[j] != acc_t(0) ? w[j] : acc_t(0);
      }
      for (int j = 0; j < count; ++j) {
        q[j] = at_index * mean_weight[j];
      }
    }
  }

  // p'_c of a block of classes of a row, or of rows of a class.
  LOSSOPS_HOST_DEVICE void load_probabilities(const BlockOffsets& target, int count,
                                              acc_t* p) const {
    if (!args_.target_is_probability) {
      std::fill_n(p, padded(count), smoothing_per_class_);
      return;
    }
    load_block(args_.target, target, count, p);
    if (args_.label_smoothing > 0) {
      for (int j = 0; j < padded(count); ++j) {
        p[j] = smoothed(p[j], smoothing_, smoothing_per_class_);
      }
    }
  }

  // w_c of the classes [first, first + count).
  LOSSOPS_HOST_DEVICE void load_weights(int64_t first, int count, acc_t* w) const {
    if (args_.weight == nullptr) {
      std::fill_n(w, padded(count), acc_t(1));
    } else {
      load_block(weight_, classes_of_row(0, args_.weight_stride, first), count, w);
    }
  }

  // Multiplies by w_c of the classes [first, first + count).
  LOSSOPS_HOST_DEVICE void multiply_by_weights(int64_t first, int count, acc_t* values) const {
    if (args_.weight == nullptr) {
      return;
    }
    acc_t w[kBlock];
    load_weights(first, count, w);
    for (int j = 0; j < padded(count); ++j) {
      values[j] *= w[j];
    }
  }

 private:
  const CrossEntropyArgs& args_;
  acc_t smoothing_;
  acc_t smoothing_per_class_;
  Operand weight_;
};

}  // namespace
}  // namespace lossops::cpu
