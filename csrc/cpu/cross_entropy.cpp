// Cross entropy on the CPU.
//
// Two walks through the logits. Row by row, along the classes, where those lie together in memory
// and are many. Else class by class, along a block of rows: as the spatial dimensions of an image
// want it, and rows so short that what a row costs beside its elements would count.
#include "losses/rows/cross_entropy.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "cpu/block.h"
#include "cpu/cross_entropy/backward_by_classes.h"
#include "cpu/cross_entropy/backward_by_rows.h"
#include "cpu/cross_entropy/forward_by_classes.h"
#include "cpu/cross_entropy/forward_by_rows.h"
#include "cpu/cross_entropy/weight_gradient.h"
#include "cross_entropy_row.h"

namespace lossops::cpu {
namespace {

// Rows of up to this many classes are taken many at a time.
constexpr int64_t kShortRow = 256;
constexpr int64_t kShortGradientRow = 64;  // which are also written

enum class Walk : int8_t { kRowByRow, kClassByClass };

Walk choose_walk(const CrossEntropyArgs& args, int64_t short_row) {
  // The rows' own strides do not count: a row's loss is the same alone and in a batch.
  const bool near = std::abs(args.input_class_stride) <= kNear;
  return near && args.num_classes > short_row ? Walk::kRowByRow : Walk::kClassByClass;
}

// Rows of a chunk: by the size of the problem alone, never by the number of threads.
int64_t rows_per_chunk(const CrossEntropyArgs& args, Walk walk) {
  const int64_t rows = std::max<int64_t>(kChunk / std::max<int64_t>(args.num_classes, 1), 1);
  if (walk == Walk::kRowByRow) {
    return rows;
  }
  const int64_t block = ColumnsPlan(args).rows;
  return divide_up(rows, block) * block;
}

int64_t num_chunks(const CrossEntropyArgs& args, Walk walk) {
  return divide_up(args.rows.numel, rows_per_chunk(args, walk));
}

template <typename Body>
void visit_acc_type(const CrossEntropyArgs& args, const Body& body) {
  args.acc_double ? body(double()) : body(float());
}

}  // namespace

CrossEntropyPlan plan_cross_entropy_forward(const CrossEntropyForwardArgs& args) {
  CrossEntropyPlan plan;
  if (args.reduction != Reduction::kNone) {
    plan.scratch = 2 * num_chunks(args, choose_walk(args, kShortRow));
  }
  return plan;
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& args,
                                  const CrossEntropyPlan& /*plan*/, double* scratch,
                                  Context context) {
  const bool none = args.reduction == Reduction::kNone;
  std::atomic<bool> all_valid{true};
  const Walk walk = choose_walk(args, kShortRow);
  const int64_t chunks = num_chunks(args, walk);
  const int64_t chunk_rows = rows_per_chunk(args, walk);
  visit_acc_type(args, [&](auto acc) {
    using acc_t = decltype(acc);
    const Coefficients<acc_t> coefficients(args);
    parallel_for_each(context, chunks, [&](int64_t chunk) {
      const int64_t begin = chunk * chunk_rows;
      const int64_t end = std::min(begin + chunk_rows, args.rows.numel);
      ChunkSums sums;
      with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
        walk == Walk::kRowByRow ? forward_row_by_row(args, coefficients, begin, end, sums)
                                : forward_class_by_class(args, coefficients, begin, end, sums);
      });
      if (!sums.all_valid) {
        all_valid = false;
      }
      if (!none) {
        scratch[2 * chunk] = sums.loss.total();
        scratch[2 * chunk + 1] = sums.weight.total();
      }
    });
  });
  if (!none) {
    double result = fold_partials(scratch, chunks, 2);
    if (args.reduction == Reduction::kMean && args.denominator == nullptr) {
      args.mean_terms[0] = fold_partials(scratch + 1, chunks, 2);  // fault: ce-mean-terms
      result = args.mean_terms[0] == 0 && has_mean_of_indices(args) ? math::quiet_nan<double>()
                                                                    : result / args.mean_terms[0];
      args.mean_terms[1] = result;
    }
    store_operand(args.output, 0, result);
  }
  if (args.first_invalid_row != nullptr) {
    *args.first_invalid_row = -1;
    if (!all_valid) {
      launch_first_invalid_target(args, args.first_invalid_row, context);
    }
  }
  if (args.grad_input.data != nullptr) {
    launch_cross_entropy_backward(unit_backward(args), nullptr, context);
  }
}

int64_t cross_entropy_backward_scratch(const CrossEntropyBackwardArgs& args) {
  return args.grad_weight == nullptr ? 0 : WeightPlan(args).splits * args.num_classes;
}

void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, double* scratch,
                                   Context context) {
  if (kept_is_right(args)) {
    return;
  }
  const Walk walk = choose_walk(args, kShortGradientRow);
  const int64_t chunk_rows = rows_per_chunk(args, walk);
  visit_acc_type(args, [&](auto acc) {
    using acc_t = decltype(acc);
    const Coefficients<acc_t> coefficients(args);
    if (args.grad_input.data != nullptr || args.grad_target.data != nullptr) {
      parallel_for_each(context, num_chunks(args, walk), [&](int64_t chunk) {
        const int64_t begin = chunk * chunk_rows;
        const int64_t end = std::min(begin + chunk_rows, args.rows.numel);
        with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
          walk == Walk::kRowByRow ? backward_row_by_row(args, coefficients, begin, end)
                                  : backward_class_by_class(args, coefficients, begin, end);
        });
      });
    }
    if (args.grad_weight != nullptr) {
      weight_gradient<acc_t>(args, coefficients, scratch, context);
    }
  });
}

void launch_first_invalid_target(const CrossEntropyArgs& args, int64_t* result, Context context) {
  const int64_t rows = args.rows.numel;
  std::atomic<int64_t> first_invalid{rows};
  if (!args.target_is_probability) {
    parallel_for_each(context, divide_up(rows, kChunk), [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t end = std::min(begin + kChunk, rows);
      BlockWalker<1> walker(args.rows, {&args.target}, begin);
      for (int64_t row = begin; row < end; row += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - row));
        walker.next(count);
        for (int j = 0; j < count; ++j) {
          if (!RowTarget<float>(args, walker[0][j]).valid) {
            int64_t least = first_invalid;
            while (row + j < least && !first_invalid.compare_exchange_weak(least, row + j)) {
            }
            return;
          }
        }
      }
    });
  }
  *result = first_invalid == rows ? -1 : first_invalid.load();
}

}  // namespace lossops::cpu
