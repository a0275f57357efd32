// Cross entropy on the CPU.
//
// Two walks through the logits, chosen by the layout: along the classes of one row, where
// those are closer together in memory than the rows are; else along a block of rows, one
// class after the other, as the spatial dimensions of an image want it.
#include "losses/cross_entropy.h"

#include <atomic>
#include <cmath>
#include <limits>

#include "cpu/block.h"
#include "cpu/parallel.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

// ------------------------------------------------------------------- targets

int64_t load_index(const Operand& target, int64_t offset) {
  switch (target.dtype) {
    case DType::kInt64:
      return static_cast<const int64_t*>(target.data)[offset];
    case DType::kInt32:
      return static_cast<const int32_t*>(target.data)[offset];
    default:
      return static_cast<const uint8_t*>(target.data)[offset];
  }
}

bool out_of_range(const CrossEntropyArgs& args, int64_t index) {
  return index != args.ignore_index && (index < 0 || index >= args.num_classes);
}

// The target of one row, as the coefficients q_c = uniform * w_c + [c = index] q. Of
// probabilities only the kind matters.
template <typename acc_t>
struct RowTarget {
  enum class Kind : int8_t { kKept, kIgnored, kInvalid };
  Kind kind = Kind::kKept;
  int64_t index = -1;
  acc_t weight = 1;  // w of the class, 0 for an ignored row
  acc_t q = 0;

  RowTarget(const CrossEntropyArgs& args, int64_t offset) {
    if (args.target_is_probability) {
      return;
    }
    const int64_t label = load_index(args.target, offset);
    if (label == args.ignore_index) {
      kind = Kind::kIgnored;
      weight = 0;
    } else if (out_of_range(args, label)) {
      kind = Kind::kInvalid;
    } else {
      index = label;
      if (args.weight != nullptr) {
        weight = load_as<acc_t>(args.weight, args.weight_dtype, label * args.weight_stride);
      }
      q = static_cast<acc_t>(1 - args.label_smoothing) * weight;
    }
  }

  bool kept() const { return kind == Kind::kKept; }

  // The value of what depends on the logits of a row that is not kept.
  acc_t fill() const { return kind == Kind::kIgnored ? acc_t(0) : math::quiet_nan<acc_t>(); }
};

// Coefficients of a block of classes of one row, or of one class of a block of rows.
template <typename acc_t>
struct Coefficients {
  const CrossEntropyArgs& args;
  const acc_t smoothing = static_cast<acc_t>(args.label_smoothing);
  const acc_t smoothing_per_class =
      static_cast<acc_t>(args.label_smoothing / static_cast<double>(args.num_classes));
  Operand weight;

  explicit Coefficients(const CrossEntropyArgs& args) : args(args) {
    weight.data = const_cast<void*>(args.weight);
    weight.dtype = args.weight_dtype;
  }

  // p'_c of probabilities, 1/C of the smoothing of a class index.
  LOSSOPS_HOST_DEVICE void load_unweighted(const BlockOffsets& target, int count, acc_t* p) const {
    if (!args.target_is_probability) {
      for (int j = 0; j < padded(count); ++j) {
        p[j] = smoothing_per_class;
      }
      return;
    }
    load_block(args.target, target, count, p);
    if (args.label_smoothing > 0) {
      for (int j = 0; j < padded(count); ++j) {
        p[j] = smoothed(p[j], smoothing, smoothing_per_class);
      }
    }
  }

  // w_c of classes [first, first + count).
  LOSSOPS_HOST_DEVICE void load_weights(int64_t first, int count, acc_t* w) const {
    load_block(weight, {first * args.weight_stride, args.weight_stride, nullptr}, count, w);
  }

  acc_t class_weight(int64_t c) const {
    return args.weight == nullptr
               ? acc_t(1)
               : load_as<acc_t>(args.weight, args.weight_dtype, c * args.weight_stride);
  }
};

// ----------------------------------------------------------- state of one row

// What a row leaves behind, accumulated in fp64.
struct RowSums {
  double sum = 0;    // of exp(x - max)
  double q_sum = 0;  // Q
  double dot = 0;    // sum_c q_c (max - x_c), over q_c != 0
};

// Writes the row's loss and statistics.
template <typename acc_t>
acc_t finish_row(const CrossEntropyForwardArgs& args, const RowTarget<acc_t>& target, int64_t row,
                 int64_t input_offset, acc_t max, RowSums sums) {
  acc_t* row_stats = static_cast<acc_t*>(args.row_stats);
  const int64_t rows = args.rows.numel;
  DenseOnlineSoftmax<acc_t> state;
  acc_t loss = target.fill();
  if (target.kept()) {
    acc_t x = 0;
    if (target.index >= 0) {
      x = load_operand<acc_t>(args.input, input_offset + target.index * args.input_class_stride);
      sums.q_sum += target.q;
      sums.dot += target.q == acc_t(0) ? acc_t(0) : target.q * (softmax_shift(max) - x);
    }
    state.max = max;
    state.sum = static_cast<acc_t>(sums.sum);
    state.q_sum = static_cast<acc_t>(sums.q_sum);
    state.dot = static_cast<acc_t>(sums.dot);
    if (args.num_classes == 0) {
      loss = 0;
    } else {
      loss = args.dense() ? dense_row_loss(state) : sparse_row_loss(state, x, target.q);
    }
  } else {
    state.max = 0;
    state.sum = 1;
  }
  row_stats[row] = state.max;
  row_stats[rows + row] = state.sum;
  if (args.dense()) {
    row_stats[2 * rows + row] = state.q_sum;
  }
  return loss;
}

// Sums over the rows of a chunk.
struct ChunkSums {
  double loss = 0;
  double weight = 0;
};

// A row's part in the result of the launch.
template <typename acc_t>
void add_row(const CrossEntropyForwardArgs& args, const RowTarget<acc_t>& target,
             int64_t output_offset, acc_t loss, ChunkSums& sums) {
  if (args.reduction == Reduction::kNone) {
    store_operand(args.output, output_offset, loss);
  } else {
    sums.loss += loss;
    sums.weight += target.weight;
  }
}

// -------------------------------------------------------- forward, along a row

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t block_max(acc_t* x, int count) {
  acc_t lanes[kVector];
  for (int lane = 0; lane < kVector; ++lane) {
    lanes[lane] = -math::infinity<acc_t>();
  }
  for (int j = count; j < padded(count); ++j) {
    x[j] = -math::infinity<acc_t>();
  }
  for (int j = 0; j < padded(count); j += kVector) {
    for (int lane = 0; lane < kVector; ++lane) {
      lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    }
  }
  acc_t max = lanes[0];
  for (int lane = 1; lane < kVector; ++lane) {
    max = lanes[lane] > max ? lanes[lane] : max;
  }
  return max;
}

// The online softmax of a row, a block of classes at a time.
template <typename acc_t>
LOSSOPS_HOST_DEVICE RowSums reduce_row(const CrossEntropyForwardArgs& args,
                                       const Coefficients<acc_t>& coefficients,
                                       int64_t input_offset, int64_t target_offset, acc_t& max) {
  acc_t x[kBlock];
  acc_t q[kBlock];
  acc_t w[kBlock];
  LaneSum sum;
  LaneSum q_sum;
  LaneSum dot;
  double q_so_far = 0;
  double dot_moved = 0;
  max = -math::infinity<acc_t>();
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const int width = padded(count);
    load_block(args.input,
               {input_offset + c * args.input_class_stride, args.input_class_stride, nullptr},
               count, x);
    const acc_t new_max = block_max(x, count);
    if (new_max > max) {
      // In fp64, so that a maximum that rises in every block costs no accuracy.
      sum.scale(std::exp(static_cast<double>(max) - static_cast<double>(new_max)));
      if (args.dense()) {
        q_so_far = q_sum.total();
        const double distance =
            static_cast<double>(softmax_shift(new_max)) - static_cast<double>(softmax_shift(max));
        dot_moved += q_so_far == 0 ? 0 : q_so_far * distance;
      }
      max = new_max;
    }
    const acc_t shift = softmax_shift(max);
    if (args.dense()) {
      coefficients.load_unweighted(
          {target_offset + c * args.target_class_stride, args.target_class_stride, nullptr}, count,
          q);
      if (args.weight != nullptr) {
        coefficients.load_weights(c, count, w);
        for (int j = 0; j < width; ++j) {
          q[j] *= w[j];
        }
      }
      for (int j = 0; j < width; ++j) {
        const acc_t term = q[j] * (shift - x[j]);
        w[j] = q[j] == acc_t(0) ? acc_t(0) : term;
      }
      q_sum.add(q, count);
      dot.add(w, count);
    }
    for (int j = 0; j < width; ++j) {
      x[j] = math::exp(x[j] - shift);
    }
    sum.add(x, count);
  }
  return {sum.total(), q_sum.total(), dot.total() + dot_moved};
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE ChunkSums forward_along_classes(const CrossEntropyForwardArgs& args,
                                                    const Coefficients<acc_t>& coefficients,
                                                    int64_t begin, int64_t end) {
  BlockWalker<3> walker(args.rows, {&args.input, &args.target, &args.output}, begin);
  ChunkSums chunk;
  for (int64_t row = begin; row < end; ++row) {
    walker.next(1);
    const RowTarget<acc_t> target(args, walker[1].base);
    acc_t max = 0;
    RowSums sums;
    if (target.kept()) {
      sums = reduce_row(args, coefficients, walker[0].base, walker[1].base, max);
    }
    const acc_t loss = finish_row(args, target, row, walker[0].base, max, sums);
    add_row(args, target, walker[2].base, loss, chunk);
  }
  return chunk;
}

// ------------------------------------------------- forward, along a block of rows

template <typename acc_t>
LOSSOPS_HOST_DEVICE ChunkSums forward_along_rows(const CrossEntropyForwardArgs& args,
                                                 const Coefficients<acc_t>& coefficients,
                                                 int64_t begin, int64_t end) {
  BlockWalker<3> walker(args.rows, {&args.input, &args.target, &args.output}, begin);
  acc_t x[kBlock];
  acc_t q[kBlock];
  acc_t max[kBlock];
  acc_t shift[kBlock];
  double sum[kBlock];
  double q_sum[kBlock];
  double dot[kBlock];
  ChunkSums chunk;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    const int width = padded(count);
    walker.next(count);
    for (int j = 0; j < width; ++j) {
      max[j] = -math::infinity<acc_t>();
      sum[j] = q_sum[j] = dot[j] = 0;
    }
    for (int64_t c = 0; c < args.num_classes; ++c) {
      load_block(args.input, walker[0].shifted(c * args.input_class_stride), count, x);
      for (int j = 0; j < width; ++j) {
        max[j] = x[j] > max[j] ? x[j] : max[j];
      }
    }
    for (int j = 0; j < width; ++j) {
      shift[j] = softmax_shift(max[j]);
    }
    for (int64_t c = 0; c < args.num_classes; ++c) {
      load_block(args.input, walker[0].shifted(c * args.input_class_stride), count, x);
      if (args.dense()) {
        coefficients.load_unweighted(walker[1].shifted(c * args.target_class_stride), count, q);
        const acc_t w = coefficients.class_weight(c);
        for (int j = 0; j < width; ++j) {
          q[j] *= w;
          const acc_t term = q[j] * (shift[j] - x[j]);
          q_sum[j] += q[j];
          dot[j] += q[j] == acc_t(0) ? acc_t(0) : term;
        }
      }
      for (int j = 0; j < width; ++j) {
        sum[j] += math::exp(x[j] - shift[j]);
      }
    }
    for (int j = 0; j < count; ++j) {
      const RowTarget<acc_t> target(args, walker[1][j]);
      const acc_t loss = finish_row(args, target, first + j, walker[0][j], max[j],
                                    {sum[j], q_sum[j], dot[j]});
      add_row(args, target, walker[2][j], loss, chunk);
    }
  }
  return chunk;
}

// ------------------------------------------------------------------ backward

// What a row left behind, and its share of grad_output.
template <typename acc_t>
struct RowGradient {
  acc_t grad = 0;  // grad_output of the row, normalised
  acc_t max = 0;
  acc_t inverse_sum = 1;
  acc_t log_sum = 0;
  acc_t q_sum = 0;

  RowGradient(const CrossEntropyBackwardArgs& args, const RowTarget<acc_t>& target, int64_t row,
              int64_t grad_output_offset) {
    const acc_t* row_stats = static_cast<const acc_t*>(args.row_stats);
    const int64_t rows = args.rows.numel;
    grad = load_operand<acc_t>(args.grad_output, grad_output_offset);
    if (args.reduction == Reduction::kMean) {
      grad /= static_cast<acc_t>(args.mean_terms[0]);
    }
    max = row_stats[row];
    const acc_t sum = row_stats[rows + row];
    inverse_sum = acc_t(1) / sum;
    log_sum = math::log(sum);
    q_sum = args.dense() ? row_stats[2 * rows + row] : target.q;
  }
};

template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_along_classes(const CrossEntropyBackwardArgs& args,
                                                const Coefficients<acc_t>& coefficients,
                                                int64_t begin, int64_t end) {
  BlockWalker<5> walker(
      args.rows, {&args.input, &args.target, &args.grad_output, &args.grad_input, &args.grad_target},
      begin);
  const acc_t unsmoothed = static_cast<acc_t>(1 - args.label_smoothing);
  acc_t x[kBlock];
  acc_t q[kBlock];
  acc_t w[kBlock];
  acc_t grad[kBlock];
  for (int64_t row = begin; row < end; ++row) {
    walker.next(1);
    const RowTarget<acc_t> target(args, walker[1].base);
    const RowGradient<acc_t> stats(args, target, row, walker[2].base);
    for (int64_t c = 0; c < args.num_classes; c += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
      const int width = padded(count);
      const BlockOffsets grad_input_at{walker[3].base + c * args.grad_input_class_stride,
                                       args.grad_input_class_stride, nullptr};
      if (!target.kept()) {
        std::fill_n(grad, count, target.fill());
        store_block(args.grad_input, grad_input_at, count, grad);
        continue;
      }
      load_block(args.input,
                 {walker[0].base + c * args.input_class_stride, args.input_class_stride, nullptr},
                 count, x);
      if (args.weight != nullptr && args.dense()) {
        coefficients.load_weights(c, count, w);
      }
      if (args.grad_input.data != nullptr) {
        for (int j = 0; j < width; ++j) {
          grad[j] = stats.q_sum * softmax_probability(x[j], stats.max, stats.inverse_sum);
        }
        if (args.dense()) {
          coefficients.load_unweighted(
              {walker[1].base + c * args.target_class_stride, args.target_class_stride, nullptr},
              count, q);
          if (args.weight != nullptr) {
            for (int j = 0; j < width; ++j) {
              q[j] *= w[j];
            }
          }
          for (int j = 0; j < width; ++j) {
            grad[j] -= q[j];
          }
        }
        if (target.index >= c && target.index < c + count) {
          grad[target.index - c] -= target.q;
        }
        for (int j = 0; j < width; ++j) {
          grad[j] *= stats.grad;
        }
        store_block(args.grad_input, grad_input_at, count, grad);
      }
      if (args.grad_target.data != nullptr) {
        for (int j = 0; j < width; ++j) {
          grad[j] = stats.grad * unsmoothed * (stats.log_sum + (stats.max - x[j]));
        }
        if (args.weight != nullptr) {
          for (int j = 0; j < width; ++j) {
            grad[j] *= w[j];
          }
        }
        store_block(args.grad_target,
                    {walker[4].base + c * args.grad_target_class_stride,
                     args.grad_target_class_stride, nullptr},
                    count, grad);
      }
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_along_rows(const CrossEntropyBackwardArgs& args,
                                             const Coefficients<acc_t>& coefficients, int64_t begin,
                                             int64_t end) {
  BlockWalker<5> walker(
      args.rows, {&args.input, &args.target, &args.grad_output, &args.grad_input, &args.grad_target},
      begin);
  const acc_t unsmoothed = static_cast<acc_t>(1 - args.label_smoothing);
  acc_t x[kBlock];
  acc_t q[kBlock];
  acc_t grad[kBlock];
  // Per row of the block.
  acc_t scale[kBlock] = {};
  acc_t max[kBlock] = {};
  acc_t inverse_sum[kBlock] = {};
  acc_t log_sum[kBlock] = {};
  acc_t q_sum[kBlock] = {};
  acc_t target_q[kBlock] = {};
  int64_t index[kBlock] = {};
  acc_t fill[kBlock] = {};
  int32_t kept[kBlock] = {};
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    const int width = padded(count);
    walker.next(count);
    bool all_kept = true;
    for (int j = 0; j < count; ++j) {
      const RowTarget<acc_t> target(args, walker[1][j]);
      const RowGradient<acc_t> stats(args, target, first + j, walker[2][j]);
      scale[j] = stats.grad;
      max[j] = stats.max;
      inverse_sum[j] = stats.inverse_sum;
      log_sum[j] = stats.log_sum;
      q_sum[j] = stats.q_sum;
      target_q[j] = target.q;
      index[j] = target.index;
      fill[j] = target.fill();
      kept[j] = target.kept();
      all_kept = all_kept && target.kept();
    }
    for (int64_t c = 0; c < args.num_classes; ++c) {
      load_block(args.input, walker[0].shifted(c * args.input_class_stride), count, x);
      const acc_t w = coefficients.class_weight(c);
      if (args.grad_input.data != nullptr) {
        for (int j = 0; j < width; ++j) {
          grad[j] = q_sum[j] * softmax_probability(x[j], max[j], inverse_sum[j]);
        }
        if (args.dense()) {
          coefficients.load_unweighted(walker[1].shifted(c * args.target_class_stride), count, q);
          for (int j = 0; j < width; ++j) {
            grad[j] -= q[j] * w;
          }
        }
        for (int j = 0; j < width; ++j) {
          grad[j] = (grad[j] - (index[j] == c ? target_q[j] : acc_t(0))) * scale[j];
        }
        if (!all_kept) {
          for (int j = 0; j < width; ++j) {
            grad[j] = kept[j] ? grad[j] : fill[j];
          }
        }
        store_block(args.grad_input, walker[3].shifted(c * args.grad_input_class_stride), count,
                    grad);
      }
      if (args.grad_target.data != nullptr) {
        for (int j = 0; j < width; ++j) {
          grad[j] = scale[j] * unsmoothed * (log_sum[j] + (max[j] - x[j])) * w;
        }
        store_block(args.grad_target, walker[4].shifted(c * args.grad_target_class_stride), count,
                    grad);
      }
    }
  }
}

// Class weights of probability targets: the classes are cut into tiles, the rows into
// splits; a task sums one tile over one split.
struct WeightPlan {
  int64_t tiles = 0;
  int64_t splits = 1;
  int64_t rows_per_split = 0;
};

WeightPlan plan_weight_gradient(const CrossEntropyBackwardArgs& args) {
  constexpr int64_t kMaxTasks = 256;  // enough for the threads of any machine
  WeightPlan plan;
  plan.tiles = divide_up(args.num_classes, kBlock);
  const int64_t rows = args.rows.numel;
  if (plan.tiles > 0) {
    plan.splits = std::clamp<int64_t>(kMaxTasks / plan.tiles, 1,
                                      std::max<int64_t>(divide_up(rows * kBlock, kChunk), 1));
  }
  plan.rows_per_split = divide_up(rows, plan.splits);
  return plan;
}

// sums[c - first_class] = sum over rows of g p'_c (lse - x_c).
template <typename acc_t>
LOSSOPS_HOST_DEVICE void weight_gradient_tile(const CrossEntropyBackwardArgs& args,
                                              const Coefficients<acc_t>& coefficients,
                                              int64_t first_class, int64_t begin, int64_t end,
                                              double* sums) {
  BlockWalker<3> walker(args.rows, {&args.input, &args.target, &args.grad_output}, begin);
  const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - first_class));
  const int width = padded(count);
  acc_t x[kBlock];
  acc_t p[kBlock];
  double lanes[kBlock] = {};
  for (int64_t row = begin; row < end; ++row) {
    walker.next(1);
    const RowTarget<acc_t> target(args, walker[1].base);
    const RowGradient<acc_t> stats(args, target, row, walker[2].base);
    load_block(args.input,
               {walker[0].base + first_class * args.input_class_stride, args.input_class_stride,
                nullptr},
               count, x);
    coefficients.load_unweighted({walker[1].base + first_class * args.target_class_stride,
                                  args.target_class_stride, nullptr},
                                 count, p);
    for (int j = 0; j < width; ++j) {
      const acc_t term = stats.grad * p[j] * (stats.log_sum + (stats.max - x[j]));
      lanes[j] += p[j] == acc_t(0) ? acc_t(0) : term;
    }
  }
  std::copy_n(lanes, count, sums);
}

template <typename acc_t>
void weight_gradient(const CrossEntropyBackwardArgs& args, double* scratch, Context context) {
  const WeightPlan plan = plan_weight_gradient(args);
  const Coefficients<acc_t> coefficients(args);
  parallel_for_each(context, plan.tiles * plan.splits, [&](int64_t task) {
    const int64_t split = task / plan.tiles;
    const int64_t first_class = task % plan.tiles * kBlock;
    const int64_t begin = std::min(split * plan.rows_per_split, args.rows.numel);
    const int64_t end = std::min(begin + plan.rows_per_split, args.rows.numel);
    double* sums = scratch + split * args.num_classes + first_class;
    with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
      weight_gradient_tile(args, coefficients, first_class, begin, end, sums);
    });
  });
  for (int64_t c = 0; c < args.num_classes; ++c) {
    store_as(args.grad_weight, args.weight_dtype, c,
             fold_partials(scratch + c, plan.splits, args.num_classes));
  }
}

// ------------------------------------------------------------------- dispatch

// Whether the classes of a row are closer together than the rows are.
bool classes_are_inner(const CrossEntropyArgs& args) {
  int64_t row_stride = std::numeric_limits<int64_t>::max();
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    if (args.rows.sizes[dim] > 1 && args.input.strides[dim] != 0) {
      row_stride = std::min<int64_t>(row_stride, std::abs(args.input.strides[dim]));
    }
  }
  return std::abs(args.input_class_stride) <= row_stride;
}

// By the size of the problem alone, never by the number of threads.
int64_t rows_per_chunk(const CrossEntropyArgs& args) {
  const int64_t rows = std::max<int64_t>(kChunk / std::max<int64_t>(args.num_classes, 1), 1);
  return classes_are_inner(args) ? rows : divide_up(rows, kBlock) * kBlock;
}

int64_t num_chunks(const CrossEntropyArgs& args) {
  return divide_up(args.rows.numel, rows_per_chunk(args));
}

template <typename Body>
void visit_types(const CrossEntropyArgs& args, const Body& body) {
  args.acc_double ? body(double()) : body(float());
}

}  // namespace

int64_t cross_entropy_forward_scratch(const CrossEntropyForwardArgs& args) {
  return args.reduction == Reduction::kNone ? 0 : 2 * num_chunks(args);
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& args, double* scratch,
                                  Context context) {
  const int64_t chunks = num_chunks(args);
  const int64_t chunk_rows = rows_per_chunk(args);
  const bool along_classes = classes_are_inner(args);
  const bool none = args.reduction == Reduction::kNone;
  if (args.first_invalid_row != nullptr) {
    launch_first_invalid_target(args, args.first_invalid_row, context);
  }
  visit_types(args, [&](auto acc) {
    using acc_t = decltype(acc);
    const Coefficients<acc_t> coefficients(args);
    parallel_for_each(context, chunks, [&](int64_t chunk) {
      const int64_t begin = chunk * chunk_rows;
      const int64_t end = std::min(begin + chunk_rows, args.rows.numel);
      ChunkSums sums;
      with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
        sums = along_classes ? forward_along_classes(args, coefficients, begin, end)
                             : forward_along_rows(args, coefficients, begin, end);
      });
      if (!none) {
        scratch[2 * chunk] = sums.loss;
        scratch[2 * chunk + 1] = sums.weight;
      }
    });
  });
  if (none) {
    return;
  }
  double result = fold_partials(scratch, chunks, 2);
  if (args.reduction == Reduction::kMean) {
    const double total_weight = args.target_is_probability
                                    ? static_cast<double>(args.rows.numel)
                                    : fold_partials(scratch + 1, chunks, 2);
    result /= total_weight;
    args.mean_terms[0] = total_weight;
    args.mean_terms[1] = result;
  }
  store_operand(args.output, 0, result);
}

int64_t cross_entropy_backward_scratch(const CrossEntropyBackwardArgs& args) {
  return args.grad_weight == nullptr ? 0 : plan_weight_gradient(args).splits * args.num_classes;
}

void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, double* scratch,
                                   Context context) {
  const int64_t chunk_rows = rows_per_chunk(args);
  const bool along_classes = classes_are_inner(args);
  visit_types(args, [&](auto acc) {
    using acc_t = decltype(acc);
    if (args.grad_input.data != nullptr || args.grad_target.data != nullptr) {
      const Coefficients<acc_t> coefficients(args);
      parallel_for_each(context, num_chunks(args), [&](int64_t chunk) {
        const int64_t begin = chunk * chunk_rows;
        const int64_t end = std::min(begin + chunk_rows, args.rows.numel);
        with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
          along_classes ? backward_along_classes(args, coefficients, begin, end)
                        : backward_along_rows(args, coefficients, begin, end);
        });
      });
    }
    if (args.grad_weight != nullptr) {
      weight_gradient<acc_t>(args, scratch, context);
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
      for (int64_t row = begin; row < end; ++row) {
        walker.next(1);
        if (out_of_range(args, load_index(args.target, walker[0].base))) {
          int64_t first = first_invalid;
          while (row < first && !first_invalid.compare_exchange_weak(first, row)) {
          }
          return;
        }
      }
    });
  }
  *result = first_invalid == rows ? -1 : first_invalid.load();
}

}  // namespace lossops::cpu
