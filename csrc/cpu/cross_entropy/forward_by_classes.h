// Forward, class by class.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/cross_entropy/class_blocks.h"
#include "cpu/cross_entropy/finished_rows.h"

namespace lossops::cpu {
namespace {

// Folds a block of classes into the states of rows [first, first + kVector).
template <bool kDense, typename acc_t>
LOSSOPS_HOST_DEVICE void fold_columns(const Columns<acc_t>& x, const ProbabilityColumns<acc_t>& p,
                                      const acc_t* weights, int classes, int first,
                                      RowStates<acc_t>& states) {
  acc_t shift[kVector];
  double sums[kVector];
  std::copy_n(states.sum + first, kVector, sums);
  {
    acc_t max[kVector];
    acc_t old_max[kVector];
    acc_t old_shift[kVector];
    double rises[kVector];
    std::copy_n(states.max + first, kVector, old_max);
    std::copy_n(old_max, kVector, max);
    for (int c = 0; c < classes; ++c) {
      const acc_t* column = x.first + c * x.stride + first;
      for (int lane = 0; lane < kVector; ++lane) {
        max[lane] = column[lane] > max[lane] ? column[lane] : max[lane];
      }
    }
    double q_sums[kVector];
    double dots[kVector];
    if (kDense) {
      std::copy_n(states.q_sum + first, kVector, q_sums);
      std::copy_n(states.dot + first, kVector, dots);
    }
    for (int lane = 0; lane < kVector; ++lane) {
      shift[lane] = softmax_shift(max[lane]);
      old_shift[lane] = softmax_shift(old_max[lane]);
    }
    int risen = 0;
    for (int lane = 0; lane < kVector; ++lane) {
      // In fp64, so that a maximum that rises in every block costs no accuracy.
      const double rise = static_cast<double>(shift[lane]) - static_cast<double>(old_shift[lane]);
      rises[lane] = sums[lane] == 0 ? 0 : rise;
      risen += rises[lane] != 0 ? 1 : 0;
      if (kDense) {
        const double moved = q_sums[lane] * rise;
        dots[lane] += q_sums[lane] == 0 ? 0 : moved;
      }
    }
    std::copy_n(max, kVector, states.max + first);
    if (kDense) {
      std::copy_n(dots, kVector, states.dot + first);
    }
    if (risen != 0) {
      for (int lane = 0; lane < kVector; ++lane) {
        sums[lane] *= math::exp(-rises[lane]);
      }
    }
  }
  for (int c = 0; c < classes; ++c) {
    const acc_t* column = x.first + c * x.stride + first;
    for (int lane = 0; lane < kVector; ++lane) {
      sums[lane] += static_cast<double>(math::exp_in_sum<true>(column[lane] - shift[lane]));
    }
  }
  std::copy_n(sums, kVector, states.sum + first);
  if (kDense) {
    double q_sums[kVector];
    double dots[kVector];
    std::copy_n(states.q_sum + first, kVector, q_sums);
    std::copy_n(states.dot + first, kVector, dots);
    for (int c = 0; c < classes; ++c) {
      const acc_t* column = x.first + c * x.stride + first;
      for (int lane = 0; lane < kVector; ++lane) {
        const acc_t q = p(c, first + lane) * weights[c];
        const acc_t term = q * (shift[lane] - column[lane]);
        q_sums[lane] += static_cast<double>(q);
        dots[lane] += static_cast<double>(q == acc_t(0) ? acc_t(0) : term);
      }
    }
    std::copy_n(q_sums, kVector, states.q_sum + first);
    std::copy_n(dots, kVector, states.dot + first);
  }
}

// Adds exp_below_max() of a block of classes to the sums of rows [first, first + kVector), whose
// maxima are known.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void add_below_max(const Columns<acc_t>& x, int classes, int first,
                                       RowStates<acc_t>& states) {
  acc_t max[kVector];
  double sums[kVector];
  std::copy_n(states.max + first, kVector, max);
  std::copy_n(states.below + first, kVector, sums);
  for (int c = 0; c < classes; ++c) {
    const acc_t* column = x.first + c * x.stride + first;
    for (int lane = 0; lane < kVector; ++lane) {
      sums[lane] += exp_below_max(column[lane], max[lane]);
    }
  }
  std::copy_n(sums, kVector, states.below + first);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void forward_class_by_class(const CrossEntropyForwardArgs& args,
                                                const Coefficients<acc_t>& coefficients,
                                                int64_t begin, int64_t end, ChunkSums& chunk) {
  ForwardWalker walker(args.rows, {&args.input, &args.target, &args.output}, begin);
  const ColumnsPlan plan(args);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  acc_t weights[kBlock];
  ProbabilityColumns<acc_t> p(buffers);
  auto& states = buffers_of_this_thread<RowStates<acc_t>>();
  const bool is_one_block = args.num_classes <= plan.classes;
  for (int64_t first = begin; first < end; first += plan.rows) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows, end - first));
    const int width = padded(count);
    walker.next(count);
    states.clear(width, -math::infinity<acc_t>());
    Columns<acc_t> x = {};
    // Calls body(c, classes) for each block; x then holds its logits. If one block has all classes,
    // they are read once for both sums.
    const auto for_each_block = [&](const auto& body) LOSSOPS_ALWAYS_INLINE {
      for (int64_t c = 0; c < args.num_classes; c += plan.classes) {
        const int classes = static_cast<int>(std::min<int64_t>(plan.classes, args.num_classes - c));
        if (!is_one_block || x.first == nullptr) {
          x = load_columns(args.input, {walker[0], args.input_class_stride, c, classes, count},
                           buffers.x, buffers.staging);
        }
        body(c, classes);
      }
    };
    for_each_block([&](int64_t c, int classes) LOSSOPS_ALWAYS_INLINE {
      if (args.dense()) {
        p.load(args, walker[1], c, classes, count);
        coefficients.load_weights(c, classes, weights);
      }
      for (int j = 0; j < width; j += kVector) {
        args.dense() ? fold_columns<true>(x, p, weights, classes, j, states)
                     : fold_columns<false>(x, p, weights, classes, j, states);
      }
    });
    const acc_t least = least_rest<acc_t>(args, args.num_classes);
    if (states.any_has_few_bits(0, width, least)) {
      states.has_below = true;
      std::fill_n(states.below, width, 0);
      for_each_block([&](int64_t, int classes) LOSSOPS_ALWAYS_INLINE {
        for (int j = 0; j < width; j += kVector) {
          if (states.any_has_few_bits(j, j + kVector, least)) {
            add_below_max(x, classes, j, states);
          }
        }
      });
    }
    finish_rows(args, coefficients, walker, first, count, args.num_classes, states, chunk);
  }
}

}  // namespace
}  // namespace lossops::cpu
