// Cross entropy on the CPU.
//
// Two walks through the logits. Row by row, along the classes, where those lie together in memory
// and are many. Else class by class, along a block of rows: as the spatial dimensions of an image
// want it, and rows so short that what a row costs beside its elements would count.
#include "losses/rows/cross_entropy.h"

#include <atomic>
#include <cmath>
#include <cstdlib>

#include "cpu/block.h"
#include "cpu/columns.h"
#include "cpu/rows.h"
#include "cpu/thread_buffers.h"
#include "cross_entropy_row.h"

namespace lossops::cpu {
namespace {

// Rows of up to this many classes are taken many at a time.
constexpr int64_t kShortRow = 256;
constexpr int64_t kShortGradientRow = 64;  // which are also written

// ------------------------------------------------------- targets and coefficients

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
      // Without classes there is nothing to lose.
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

// The coefficients of a row are uniform ones, q_c = w_c p'_c with p'_c = eps / C for a
// class index, and one more at the class index.
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

  // Of a block of rows: what their class indices have beyond the uniform coefficients, and what
  // they add to the mean's denominator.
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
        // A class index out of range counts.
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

// ---------------------------------------------------- forward, what both walks share

// The online softmax of each row of a block, its sums in fp64; see DenseOnlineSoftmax.
template <typename acc_t>
struct RowStates {
  acc_t max[kBlock];
  double sum[kBlock];
  double q_sum[kBlock];
  double dot[kBlock];

  LOSSOPS_HOST_DEVICE void clear(int width, acc_t least) {
    std::fill_n(max, width, least);
    std::fill_n(sum, width, 0);
    std::fill_n(q_sum, width, 0);
    std::fill_n(dot, width, 0);
  }
};

// What finish_rows() computes on the way.
template <typename acc_t>
struct FinishedRows {
  acc_t x[kBlock];  // the logit at the class index
  acc_t q[kBlock];
  acc_t weight[kBlock];
  acc_t rest[kBlock];
  acc_t q_sum[kBlock];
  acc_t loss[kBlock];
  BlockTargets<acc_t> targets;
};

// Over the rows of a chunk.
struct ChunkSums {
  LaneSum loss;
  LaneSum weight;         // the mean's denominator
  bool all_valid = true;  // no class index is out of range
};

using ForwardWalker = BlockWalker<3>;  // over input, target, output

// Beside the 1 of the maximum, an fp64 sum of `terms` may lose terms / 2^53, and the terms of fp32
// have rounded distances from the maximum, which may be all of a confident row's rest. A rest of
// less than this would miss bits of an acc_t, and is summed apart.
template <typename acc_t>
acc_t least_rest(int64_t terms) {
  return sizeof(acc_t) < 8 ? std::max(static_cast<acc_t>(terms) * acc_t(0x1p-28), acc_t(0.125))
                           : acc_t(0.5);
}

// The sum of exp(x - max) of a row over the classes below its maximum, with exact differences.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t sum_below_max(const CrossEntropyForwardArgs& args, int64_t row_offset,
                                        acc_t max) {
  acc_t buffer[kBlock];
  acc_t terms[kBlock];
  LaneSum sum;
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const acc_t* x = view_block(args.input, classes_of_row(row_offset, args.input_class_stride, c),
                                count, buffer, -math::infinity<acc_t>());
    for (int i = 0; i < padded(count); ++i) {
      acc_t difference = x[i];
      const acc_t lost = math::lost_by_adding(difference, -max);
      const acc_t term = math::exp_times(acc_t(1), difference, lost);  // fault: ce-distances
      terms[i] = x[i] == max ? acc_t(0) : term;
    }
    sum.add(terms, padded(count));
  }
  return static_cast<acc_t>(sum.total());
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void finish_rows_inline(const CrossEntropyForwardArgs& args,
                                            const Coefficients<acc_t>& coefficients,
                                            const ForwardWalker& walker, int64_t first, int count,
                                            int64_t terms_per_sum, RowStates<acc_t>& states,
                                            ChunkSums& chunk) {
  const int width = padded(count);
  auto& buffers = buffers_of_this_thread<FinishedRows<acc_t>>();
  acc_t* const x = buffers.x;
  acc_t* const q = buffers.q;
  acc_t* const weight = buffers.weight;
  acc_t* const rest = buffers.rest;
  acc_t* const q_sum = buffers.q_sum;
  acc_t* const loss = buffers.loss;
  BlockTargets<acc_t>& targets = buffers.targets;
  targets.load(args, walker[1], count);
  chunk.all_valid = chunk.all_valid && targets.all_valid;
  coefficients.load_at_indices(targets, count, q, weight);
  if (args.target_is_probability || args.num_classes == 0) {
    std::fill_n(x, count, acc_t(0));
  } else {
    walker[0].for_each_run(count, [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
      gather(args.input.data, args.input.dtype, offset, walker[0].stride, targets.index + j,
             args.input_class_stride, length, x + j);
    });
  }
  std::fill(x + count, x + width, acc_t(0));
  std::fill(q + count, q + width, acc_t(0));
  if (!targets.all_have_loss) {
    for (int j = 0; j < width; ++j) {
      const bool has_loss = targets.has_loss[j] != acc_t(0);
      x[j] = has_loss ? x[j] : acc_t(0);
      states.max[j] = has_loss ? states.max[j] : acc_t(0);
    }
    for (int j = 0; j < width; ++j) {
      states.sum[j] = targets.has_loss[j] != acc_t(0) ? states.sum[j] : 1.0;
    }
  }

  const acc_t least = least_rest<acc_t>(terms_per_sum);
  int with_few_bits = 0;
  for (int j = 0; j < width; ++j) {
    // The sum holds exp(0) = 1 for the maximum. An empty row has -1.
    rest[j] = static_cast<acc_t>(states.sum[j] - 1);
    with_few_bits += std::fabs(rest[j]) < least && targets.has_loss[j] != acc_t(0) ? 1 : 0;
  }
  if (with_few_bits != 0) {  // fault: ce-few-bits
    for (int j = 0; j < count; ++j) {
      if (std::fabs(rest[j]) < least && targets.has_loss[j] != acc_t(0)) {
        rest[j] = sum_below_max(args, walker[0][j], states.max[j]);
      }
    }
  }
  if (args.dense()) {
    for (int j = 0; j < width; ++j) {
      const double at_index = static_cast<double>(q[j] * (softmax_shift(states.max[j]) - x[j]));
      q_sum[j] = static_cast<acc_t>(states.q_sum[j] + static_cast<double>(q[j]));
      const double dot = states.dot[j] + (q[j] == acc_t(0) ? 0.0 : at_index);
      loss[j] = dense_row_loss(rest[j], q_sum[j], static_cast<acc_t>(dot));
    }
  } else {
    for (int j = 0; j < width; ++j) {
      loss[j] = sparse_row_loss(states.max[j], rest[j], x[j], q[j]);
    }
  }
  if (!targets.all_have_loss) {
    for (int j = 0; j < width; ++j) {
      loss[j] = targets.has_loss[j] != acc_t(0) ? loss[j] : targets.without_loss[j];
    }
  }

  if (args.row_stats != nullptr) {
    const RowStats<acc_t> stats(args.row_stats, args.rows.numel);
    std::copy_n(states.max, count, stats.max + first);
    std::copy_n(rest, count, stats.rest + first);
    if (args.dense()) {
      std::copy_n(q_sum, count, stats.q_sum + first);
    }
  }
  if (args.reduction == Reduction::kNone) {
    store_block(args.output, walker[2], count, loss);
  } else {
    chunk.loss.add_unpadded(loss, count);
    chunk.weight.add_unpadded(weight, count);
  }
}

// Completes rows [first, first + count) by their class indices, and leaves behind their
// statistics and losses. A sum of states has added up terms_per_sum terms one after the other.
// Both walks call one copy: a second one is 25 KB of the wheel.
template <typename acc_t>
__attribute__((noinline)) void finish_rows(const CrossEntropyForwardArgs& args,
                                           const Coefficients<acc_t>& coefficients,
                                           const ForwardWalker& walker, int64_t first, int count,
                                           int64_t terms_per_sum, RowStates<acc_t>& states,
                                           ChunkSums& chunk) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    finish_rows_inline(args, coefficients, walker, first, count, terms_per_sum, states, chunk);
  });
}

// ------------------------------------------------------------ forward, row by row

// Rows that are read in lockstep: from its maximum to the sum of its exponentials, a short
// row is one chain of dependent instructions. A long row is better off alone, as one
// stream from memory.
constexpr int kLockstep = 4;

// Rows `numbers` of a block of rows, a block of classes at a time.
template <bool kDense, typename acc_t>
LOSSOPS_HOST_DEVICE void reduce_rows(const CrossEntropyForwardArgs& args,
                                     const Coefficients<acc_t>& coefficients,
                                     const ForwardWalker& walker, const int* numbers, int rows,
                                     RowStates<acc_t>& states) {
  acc_t x_buffer[kLockstep][kBlock];
  acc_t terms[kBlock];
  acc_t q[kBlock];
  const acc_t* x[kLockstep];
  acc_t max[kLockstep];
  acc_t new_max[kLockstep];
  LaneSum sum[kLockstep];
  LaneSum q_sum[kLockstep];
  LaneSum dot[kLockstep];
  double dot_moved[kLockstep] = {};
  std::fill_n(max, kLockstep, -math::infinity<acc_t>());
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const int width = padded(count);
    for (int r = 0; r < rows; ++r) {
      x[r] =
          view_block(args.input, classes_of_row(walker[0][numbers[r]], args.input_class_stride, c),
                     count, x_buffer[r], -math::infinity<acc_t>());
      new_max[r] = block_max(x[r], width);
    }
    for (int r = 0; r < rows; ++r) {
      if (new_max[r] > max[r]) {
        // In fp64, so that a maximum that rises in every block costs no accuracy.
        const double rise = static_cast<double>(softmax_shift(new_max[r])) -
                            static_cast<double>(softmax_shift(max[r]));
        if (max[r] > -math::infinity<acc_t>()) {
          sum[r].scale(math::exp(-rise));  // fault: ce-sum-rescaled
        }
        if (kDense && c > 0) {
          const double q_so_far = q_sum[r].total();
          dot_moved[r] += q_so_far == 0 ? 0 : q_so_far * rise;  // fault: ce-dot-moved
        }
        max[r] = new_max[r];
      }
      const acc_t shift = softmax_shift(max[r]);
      for (int i = 0; i < width; ++i) {
        terms[i] = math::exp_in_sum<true>(x[r][i] - shift);
      }
      sum[r].add(terms, width);  // exp(-inf) is 0
      if (kDense) {
        coefficients.load_probabilities(
            classes_of_row(walker[1][numbers[r]], args.target_class_stride, c), count, q);
        coefficients.multiply_by_weights(c, count, q);
        for (int i = 0; i < width; ++i) {
          const acc_t term = q[i] * (shift - x[r][i]);
          terms[i] = q[i] == acc_t(0) ? acc_t(0) : term;  // fault: ce-zero-probability
        }
        q_sum[r].add_unpadded(q, count);
        dot[r].add_unpadded(terms, count);
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    states.max[numbers[r]] = max[r];
    states.sum[numbers[r]] = sum[r].total();
    if (kDense) {
      states.q_sum[numbers[r]] = q_sum[r].total();
      states.dot[numbers[r]] = dot[r].total() + dot_moved[r];
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void forward_row_by_row(const CrossEntropyForwardArgs& args,
                                            const Coefficients<acc_t>& coefficients, int64_t begin,
                                            int64_t end, ChunkSums& chunk) {
  ForwardWalker walker(args.rows, {&args.input, &args.target, &args.output}, begin);
  const int lockstep = args.num_classes <= kBlock ? kLockstep : 1;
  auto& states = buffers_of_this_thread<RowStates<acc_t>>();
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    walker.next(count);
    states.clear(padded(count), 0);
    int numbers[kLockstep];
    int rows = 0;
    for (int j = 0; j < count; ++j) {
      if (RowTarget<acc_t>(args, walker[1][j]).has_loss()) {
        numbers[rows++] = j;
      }
      if (rows == lockstep || (rows > 0 && j + 1 == count)) {
        args.dense() ? reduce_rows<true>(args, coefficients, walker, numbers, rows, states)
                     : reduce_rows<false>(args, coefficients, walker, numbers, rows, states);
        rows = 0;
      }
    }
    finish_rows(args, coefficients, walker, first, count, divide_up(args.num_classes, kVector),
                states, chunk);
  }
}

// -------------------------------------------------------- forward, class by class

// p'_c of a block of rows and classes.
template <typename acc_t>
class ProbabilityColumns {
 public:
  LOSSOPS_HOST_DEVICE explicit ProbabilityColumns(ColumnBuffers<acc_t>& buffers)
      : buffer_(buffers.p), staging_(buffers.staging) {}

  LOSSOPS_HOST_DEVICE void load(const CrossEntropyArgs& args, const BlockOffsets& rows,
                                int64_t first_class, int classes, int count) {
    smoothing_ = static_cast<acc_t>(args.label_smoothing);
    smoothing_per_class_ =
        static_cast<acc_t>(args.label_smoothing / static_cast<double>(args.num_classes));
    if (args.target_is_probability) {
      columns_ =
          load_columns(args.target, {rows, args.target_class_stride, first_class, classes, count},
                       buffer_, staging_);
    } else {
      // The class index comes on top.
      std::fill_n(buffer_, padded(count), acc_t(0));
      columns_ = {buffer_, 0};
    }
  }

  LOSSOPS_HOST_DEVICE acc_t operator()(int c, int j) const {
    return smoothed(columns_.first[c * columns_.stride + j], smoothing_, smoothing_per_class_);
  }

 private:
  acc_t smoothing_ = 0;
  acc_t smoothing_per_class_ = 0;
  Columns<acc_t> columns_ = {};
  acc_t* buffer_;
  acc_t* staging_;
};

// The walk class by class takes blocks of rows and classes.
struct ColumnsPlan {
  int classes;  // of a block at most
  int rows;

  explicit ColumnsPlan(const CrossEntropyArgs& args) {
    // What is read more than once should stay in an L1 cache meanwhile.
    constexpr int64_t kElements = kColumns / 2;
    // Where a class is a run of rows, the run should be long enough to be read at full speed.
    const bool image = std::abs(args.input_class_stride) > kNear;
    const int64_t least_rows = image ? 128 : kVector;
    classes = static_cast<int>(std::clamp<int64_t>(args.num_classes, 1, kColumns / least_rows));
    rows = static_cast<int>(
        std::clamp<int64_t>(kElements / classes / kVector * kVector, least_rows, kBlock));
  }
};

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
  for (int64_t first = begin; first < end; first += plan.rows) {
    const int count = static_cast<int>(std::min<int64_t>(plan.rows, end - first));
    const int width = padded(count);
    walker.next(count);
    states.clear(width, -math::infinity<acc_t>());
    for (int64_t c = 0; c < args.num_classes; c += plan.classes) {
      const int classes = static_cast<int>(std::min<int64_t>(plan.classes, args.num_classes - c));
      const Columns<acc_t> x =
          load_columns(args.input, {walker[0], args.input_class_stride, c, classes, count},
                       buffers.x, buffers.staging);
      if (args.dense()) {
        p.load(args, walker[1], c, classes, count);
        coefficients.load_weights(c, classes, weights);
      }
      for (int j = 0; j < width; j += kVector) {
        args.dense() ? fold_columns<true>(x, p, weights, classes, j, states)
                     : fold_columns<false>(x, p, weights, classes, j, states);
      }
    }
    finish_rows(args, coefficients, walker, first, count, args.num_classes, states, chunk);
  }
}

// ---------------------------------------------------- backward, what the walks share

// What forward left of each row of a block, and its share of grad_output.
template <typename acc_t>
struct RowGradients {
  acc_t scale[kBlock];  // grad_output, divided by what the mean divides by
  acc_t max[kBlock] = {};
  acc_t rest[kBlock] = {};
  acc_t factor[kBlock] = {};
  acc_t log_sum[kBlock] = {};
  acc_t q_sum[kBlock] = {};
  acc_t q_at_index[kBlock] = {};
  BlockTargets<acc_t> targets;

  LOSSOPS_HOST_DEVICE void load_inline(const CrossEntropyBackwardArgs& args,
                                       const Coefficients<acc_t>& coefficients,
                                       const BlockOffsets& target_at,
                                       const BlockOffsets& grad_output_at, int64_t first,
                                       int count) {
    const RowStats<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    const int width = padded(count);
    if (args.reduction == Reduction::kNone) {
      load_block(args.grad_output, grad_output_at, count, scale);
      for (int j = 0; j < width && args.num_classes == 1; ++j) {
        scale[j] = gradient_scale(args, scale[j]);
      }
    } else {
      std::fill_n(scale, width, row_scale<acc_t>(args, 0));
    }
    std::copy_n(stats.max + first, count, max);
    std::copy_n(stats.rest + first, count, rest);
    targets.load(args, target_at, count);
    acc_t mean_weight[kBlock];
    coefficients.load_at_indices(targets, count, q_at_index, mean_weight);
    std::copy_n(args.dense() ? stats.q_sum + first : q_at_index, count, q_sum);
    for (int j = 0; j < width; ++j) {
      const auto row = RowSoftmax<acc_t>::of(max[j], rest[j], scale[j], q_sum[j]);
      factor[j] = row.factor;
      log_sum[j] = row.log_sum;
    }
  }

  // Rows [first, first + count), which lie in target and grad_output as given. All walks call
  // one copy: the other two were 59 KB of the wheel.
  __attribute__((noinline)) void load(const CrossEntropyBackwardArgs& args,
                                      const Coefficients<acc_t>& coefficients,
                                      const BlockOffsets& target_at,
                                      const BlockOffsets& grad_output_at, int64_t first,
                                      int count) {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      load_inline(args, coefficients, target_at, grad_output_at, first, count);
    });
  }

  LOSSOPS_HOST_DEVICE RowSoftmax<acc_t> softmax(int j) const {
    return {max[j], rest[j], factor[j], log_sum[j]};
  }
};

using BackwardWalker = BlockWalker<5>;  // over input, target and the gradients

// ------------------------------------------------------------ backward, row by row

// Row j of a block of rows.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_row(const CrossEntropyBackwardArgs& args,
                                      const Coefficients<acc_t>& coefficients,
                                      const BackwardWalker& walker, const RowGradients<acc_t>& rows,
                                      int j) {
  const acc_t scale = rows.scale[j];
  const RowSoftmax<acc_t> softmax = rows.softmax(j);
  const acc_t q_sum = rows.q_sum[j];
  acc_t x_buffer[kBlock];
  acc_t q[kBlock];
  acc_t grad[kBlock];
  for (int64_t c = 0; c < args.num_classes; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - c));
    const int width = padded(count);
    const BlockOffsets grad_input_at =
        classes_of_row(walker[3][j], args.grad_input_class_stride, c);
    if (rows.targets.has_loss[j] == acc_t(0)) {
      std::fill_n(grad, count, rows.targets.without_loss[j]);
      store_block(args.grad_input, grad_input_at, count, grad);
      continue;
    }
    const acc_t* x = view_block(
        args.input, classes_of_row(walker[0][j], args.input_class_stride, c), count, x_buffer);
    const int64_t index = rows.targets.index[j] - c;
    // fault: ce-index-in-block
    const bool index_in_block = !args.target_is_probability && index >= 0 && index < count;
    if (args.grad_input.data != nullptr && !args.dense()) {
      for (int i = 0; i < width; ++i) {
        grad[i] = softmax.gradient(x[i]);
      }
      if (index_in_block) {
        grad[index] = softmax.gradient_at_index(x[index]);
      }
      store_block(args.grad_input, grad_input_at, count, grad);
    } else if (args.grad_input.data != nullptr) {
      coefficients.load_probabilities(classes_of_row(walker[1][j], args.target_class_stride, c),
                                      count, q);
      coefficients.multiply_by_weights(c, count, q);
      if (index_in_block) {
        q[index] += rows.q_at_index[j];
      }
      for (int i = 0; i < width; ++i) {
        grad[i] = softmax.dense_gradient(x[i], scale, q_sum, q[i]);
      }
      store_block(args.grad_input, grad_input_at, count, grad);
    }
    if (args.grad_target.data != nullptr) {
      const acc_t factor = scale * coefficients.unsmoothed();  // fault: ce-unsmoothed
      for (int i = 0; i < width; ++i) {
        grad[i] = factor * softmax.surprise(x[i]);
      }
      coefficients.multiply_by_weights(c, count, grad);
      store_block(args.grad_target, classes_of_row(walker[4][j], args.grad_target_class_stride, c),
                  count, grad);
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void backward_row_by_row(const CrossEntropyBackwardArgs& args,
                                             const Coefficients<acc_t>& coefficients, int64_t begin,
                                             int64_t end) {
  BackwardWalker walker(
      args.rows,
      {&args.input, &args.target, &args.grad_output, &args.grad_input, &args.grad_target}, begin);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first = begin; first < end; first += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    walker.next(count);
    rows.load(args, coefficients, walker[1], walker[2], first, count);
    for (int j = 0; j < count; ++j) {
      backward_row(args, coefficients, walker, rows, j);
    }
  }
}

// -------------------------------------------------------- backward, class by class

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

// The gradient at the class index of each row, which the loops over classes have left out.
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

// ------------------------------------------------------ gradient of class weights

// The classes are cut into tiles, the rows into splits; a task sums one tile over one
// split. Probability targets only.
struct WeightPlan {
  int64_t tiles = 0;
  int64_t splits = 1;
  int64_t rows_per_split = 0;

  explicit WeightPlan(const CrossEntropyBackwardArgs& args) {
    const int64_t rows = args.rows.numel;
    tiles = divide_up(args.num_classes, kBlock);
    if (tiles > 0) {
      const int64_t chunks = std::max<int64_t>(divide_up(rows * kBlock, kChunk), 1);
      splits = std::clamp<int64_t>(kMaxTasks / tiles, 1, chunks);
    }
    rows_per_split = divide_up(rows, splits);
  }
};

// sums[c - first_class] = sum over rows [begin, end) of g p'_c (lse - x_c).
template <typename acc_t>
LOSSOPS_HOST_DEVICE void sum_weight_gradient(const CrossEntropyBackwardArgs& args,
                                             const Coefficients<acc_t>& coefficients,
                                             int64_t first_class, int64_t begin, int64_t end,
                                             double* sums) {
  BlockWalker<3> walker(args.rows, {&args.input, &args.target, &args.grad_output}, begin);
  const int count = static_cast<int>(std::min<int64_t>(kBlock, args.num_classes - first_class));
  const int width = padded(count);
  acc_t x_buffer[kBlock];
  acc_t p[kBlock];
  double lanes[kBlock] = {};
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first_row = begin; first_row < end; first_row += kBlock) {
    const int row_count = static_cast<int>(std::min<int64_t>(kBlock, end - first_row));
    walker.next(row_count);
    rows.load(args, coefficients, walker[1], walker[2], first_row, row_count);
    for (int row = 0; row < row_count; ++row) {
      const acc_t* x = view_block(
          args.input, classes_of_row(walker[0][row], args.input_class_stride, first_class), count,
          x_buffer);
      coefficients.load_probabilities(
          classes_of_row(walker[1][row], args.target_class_stride, first_class), count, p);
      for (int j = 0; j < width; ++j) {
        const acc_t term = rows.scale[row] * p[j] * rows.softmax(row).surprise(x[j]);
        lanes[j] += static_cast<double>(p[j] == acc_t(0) ? acc_t(0) : term);
      }
    }
  }
  std::copy_n(lanes, count, sums);
}

template <typename acc_t>
void weight_gradient(const CrossEntropyBackwardArgs& args, const Coefficients<acc_t>& coefficients,
                     double* scratch, Context context) {
  const WeightPlan plan(args);
  parallel_for_each(context, plan.tiles * plan.splits, [&](int64_t task) {
    const int64_t split = task / plan.tiles;
    const int64_t first_class = task % plan.tiles * kBlock;
    const int64_t begin = std::min(split * plan.rows_per_split, args.rows.numel);
    const int64_t end = std::min(begin + plan.rows_per_split, args.rows.numel);
    double* sums = scratch + split * args.num_classes + first_class;
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      sum_weight_gradient(args, coefficients, first_class, begin, end, sums);
    });
  });
  for (int64_t c = 0; c < args.num_classes; ++c) {
    // fault: ce-weight-splits
    store_as(args.grad_weight, args.weight_dtype, c,
             fold_partials(scratch + c, plan.splits, args.num_classes));
  }
}

// ------------------------------------------------------------------- the walk

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
