// Token losses on the CPU: log-probabilities of K classes a row, the entropy of its softmax, and
// its lse.
//
// Forward first reduces each piece of each row to a state. Then it merges the states of a row and
// reads its values off. The order of a row's sums follows from the number of its classes alone: a
// row has equal bits in any layout, in any batch and for any number of threads. Rows of many
// classes are reduced one by one, along the classes. Rows of few classes are the lanes of vectors.
#include "losses/rows/tokens.h"

#include <atomic>
#include <cstdlib>
#include <tuple>
#include <vector>

#include "cpu/columns.h"
#include "cpu/rows.h"
#include "cpu/thread_buffers.h"
#include "cross_entropy_row.h"

namespace lossops::cpu {
namespace {

// The most classes of a row that is one of the lanes of vectors.
constexpr int64_t kShortRow = 256;
// Classes of a piece. A piece is the least that a thread takes of a long row.
constexpr int64_t kPiece = 32768;
// Rows that are read together where the classes of a row lie far apart, but rows are neighbours.
constexpr int kTileRows = kVector;

bool is_short(const TokenArgs& args) { return args.num_classes <= kShortRow; }
bool is_far(const TokenArgs& args) { return std::abs(args.input_class_stride) > kNear; }
int64_t num_pieces(const TokenArgs& args) {
  return std::max<int64_t>(divide_up(args.num_classes, kPiece), 1);
}

// Rows of a block of all classes, or of as many as fit, one class after the other.
int column_rows(const TokenArgs& args) {
  const int64_t fitting = kColumns / std::max<int64_t>(args.num_classes, 1) / kVector * kVector;
  return static_cast<int>(std::clamp<int64_t>(fitting, kVector, kBlock));
}

// Whether a row counts, by row_mask.
bool counts(const TokenArgs& args, int64_t mask_offset) {
  return args.row_mask.data == nullptr || load_operand<double>(args.row_mask, mask_offset) != 0;
}

// ------------------------------------------------------------------ the logit map

// z of count logits: in place if the map changes nothing, else in z.
template <typename acc_t>
__attribute__((noinline)) const acc_t* map_block(const LogitMapParams& params, const acc_t* x,
                                                 int count, acc_t* z) {
  if (params.is_identity()) {
    return x;
  }
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    visit_logit_map<acc_t>(params, [&](const auto& map) LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < count; ++i) {
        z[i] = map.map(x[i]);
      }
    });
  });
  return z;
}

// Turns a gradient with respect to z into the one with respect to x.
template <typename acc_t>
__attribute__((noinline)) void unmap_gradient(const LogitMapParams& params, const acc_t* x,
                                              int count, acc_t* grad) {
  if (params.is_identity()) {
    return;
  }
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    visit_logit_map<acc_t>(params, [&](const auto& map) LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < count; ++i) {
        grad[i] *= map.derivative(x[i]);
      }
    });
  });
}

template <typename acc_t>
acc_t map_one(const LogitMapParams& params, acc_t x) {
  visit_logit_map<acc_t>(params, [&](const auto& map) { x = map.map(x); });
  return x;
}

// ------------------------------------------------------------- the values of rows

// The planes of row_stats, (3, rows).
template <typename acc_t>
struct StatsPlanes {
  acc_t* max;
  acc_t* rest;
  acc_t* mean_distance;

  StatsPlanes(void* data, int64_t rows)
      : max(static_cast<acc_t*>(data)), rest(max + rows), mean_distance(rest + rows) {}

  TokenStats<acc_t> operator[](int64_t row) const {
    return {max[row], rest[row], mean_distance[row]};
  }
};

// What is known of a block of rows once they are reduced.
template <typename acc_t>
struct RowBlock {
  acc_t max[kBlock] = {};
  acc_t rest[kBlock] = {};
  acc_t mean_distance[kBlock] = {};
  acc_t is_counted[kBlock];  // 0 or 1: as wide as what it chooses, for the vectors' sake
  bool all_count = true;

  void load_mask(const TokenArgs& args, const BlockOffsets& at, int count) {
    std::fill_n(is_counted, padded(count), acc_t(1));
    for (int j = 0; args.row_mask.data != nullptr && j < count; ++j) {
      const bool counts = load_operand<double>(args.row_mask, at[j]) != 0;
      is_counted[j] = counts ? acc_t(1) : acc_t(0);
      all_count = all_count && counts;
    }
  }

  LOSSOPS_HOST_DEVICE TokenStats<acc_t> stats(int j) const {
    return {max[j], rest[j], mean_distance[j]};
  }

  __attribute__((noinline)) void entropies(int width, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t entropy = stats(j).entropy();
        values[j] = is_counted[j] != acc_t(0) ? entropy : acc_t(0);
      }
    });
  }

  __attribute__((noinline)) void lses(int width, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t lse = stats(j).lse();
        values[j] = is_counted[j] != acc_t(0) ? lse : acc_t(0);
      }
    });
  }

  // Of one class of each row, whose mapped logits are z.
  __attribute__((noinline)) void log_probs(int width, const acc_t* z, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t log_prob = stats(j).log_prob(z[j]);
        values[j] = is_counted[j] != acc_t(0) ? log_prob : acc_t(0);
      }
    });
  }
};

using ForwardWalker = BlockWalker<6>;  // input, index, row_mask, log_probs, entropy, lse

ForwardWalker forward_walker(const TokenForwardArgs& args, int64_t first) {
  return ForwardWalker(
      args.rows,
      {&args.input, &args.index, &args.row_mask, &args.log_probs, &args.entropy, &args.lse}, first);
}

// Writes what forward returns of rows [first, first + count). Returns the first row with an index
// that is no class, or the number of all rows.
template <typename acc_t>
int64_t write_values(const TokenForwardArgs& args, const ForwardWalker& walker, int64_t first,
                     int count, RowBlock<acc_t>& rows) {
  for (int j = 0; j < count && !rows.all_count; ++j) {
    if (rows.is_counted[j] == acc_t(0)) {
      rows.max[j] = rows.rest[j] = rows.mean_distance[j] = acc_t(0);
    }
  }
  if (args.row_stats != nullptr) {
    const StatsPlanes<acc_t> stats(args.row_stats, args.rows.numel);
    std::copy_n(rows.max, count, stats.max + first);
    std::copy_n(rows.rest, count, stats.rest + first);
    std::copy_n(rows.mean_distance, count, stats.mean_distance + first);
  }
  acc_t values[kBlock];
  if (args.entropy.data != nullptr) {
    rows.entropies(padded(count), values);
    store_block(args.entropy, walker[4], count, values);
  }
  if (args.lse.data != nullptr) {
    rows.lses(padded(count), values);
    store_block(args.lse, walker[5], count, values);
  }
  int64_t first_invalid = args.rows.numel;
  for (int64_t k = 0; k < args.num_indices; ++k) {
    int64_t index[kBlock];
    acc_t x[kBlock] = {};
    acc_t z_buffer[kBlock];
    load_indices(args.index, walker[1].shifted(k * args.index_stride), count, index);
    for (int j = 0; j < count; ++j) {
      const bool is_class = index[j] >= 0 && index[j] < args.num_classes;
      if (!is_class && rows.is_counted[j] != acc_t(0)) {
        first_invalid = std::min(first_invalid, first + j);
      }
      index[j] = is_class ? index[j] : 0;
    }
    if (args.num_classes > 0) {
      walker[0].for_each_run(count, [&](int j, int length, int64_t offset) {
        gather(args.input.data, args.input.dtype, offset, walker[0].stride, index + j,
               args.input_class_stride, length, x + j);
      });
    }
    rows.log_probs(padded(count), map_block(args.map, x, padded(count), z_buffer), values);
    store_block(args.log_probs, walker[3].shifted(k * args.log_probs_stride), count, values);
  }
  return first_invalid;
}

// -------------------------------------------------------- forward, row by row

// The state of a piece of a row. Its sums are in fp64.
using State = EntropySoftmax<double>;

// Sums of exponentials and distances in kVector lanes. Four terms at a time are added in acc_t, by
// a tree, and their sums in fp64: exact enough for any number of terms, and a quarter of the
// conversions. The maximum itself is left out where kHasMax is set, and counted apart: beside its
// 1, small terms would lose their bits.
template <typename acc_t, bool kHasMax, bool kEntropy>
struct LaneSums {
  double below[kVector] = {};
  double distance[kVector] = {};
  acc_t ones[kVector] = {};

  // Adds kCount <= 4 vectors, `stride` apart. shifts: of each lane.
  template <int kCount>
  LOSSOPS_HOST_DEVICE void add(const acc_t* z, int64_t stride, const acc_t* shifts) {
    acc_t exps[kCount][kVector];
    acc_t distances[kCount][kVector];
#pragma GCC unroll 4
    for (int64_t n = 0; n < kCount; ++n) {
      const acc_t* const vector = z + n * stride;
      for (int lane = 0; lane < kVector; ++lane) {
        const auto term = EntropySoftmax<acc_t>::template term<true>(vector[lane], shifts[lane]);
        // Not where both are infinite: that row has no softmax.
        const bool is_max = kHasMax && shifts[lane] - vector[lane] == acc_t(0);
        exps[n][lane] = is_max ? acc_t(0) : term.exp;
        distances[n][lane] = term.distance;
      }
      for (int lane = 0; kHasMax && lane < kVector; ++lane) {
        ones[lane] += shifts[lane] - vector[lane] == acc_t(0) ? acc_t(1) : acc_t(0);
      }
    }
    for (int lane = 0; lane < kVector; ++lane) {
      below[lane] += static_cast<double>(tree<kCount>(exps, lane));
    }
    for (int lane = 0; kEntropy && lane < kVector; ++lane) {
      distance[lane] += static_cast<double>(tree<kCount>(distances, lane));
    }
  }

  // Adds count vectors, `stride` apart.
  LOSSOPS_HOST_DEVICE void add_all(const acc_t* z, int64_t stride, int64_t count,
                                   const acc_t* shifts) {
    for (; count >= 4; count -= 4, z += 4 * stride) {
      add<4>(z, stride, shifts);
    }
    for (; count > 0; --count, z += stride) {
      add<1>(z, stride, shifts);
    }
  }

 private:
  template <int kCount>
  static LOSSOPS_HOST_DEVICE acc_t tree(const acc_t (&values)[kCount][kVector], int lane) {
    if constexpr (kCount == 1) {
      return values[0][lane];
    } else {
      return (values[0][lane] + values[1][lane]) + (values[2][lane] + values[3][lane]);
    }
  }
};

// Adds a block to the sums of a state whose maximum is raised already.
template <bool kHasMax, bool kEntropy, typename acc_t>
LOSSOPS_HOST_DEVICE void add_block(State& state, const acc_t* z, int width) {
  acc_t shifts[kVector];
  std::fill_n(shifts, kVector, softmax_shift(static_cast<acc_t>(state.max)));
  LaneSums<acc_t, kHasMax, kEntropy> sums;
  sums.add_all(z, kVector, width / kVector, shifts);
  LaneSum totals[3];
  totals[0].add(sums.below, kVector);
  state.below += totals[0].total();
  if (kHasMax) {
    totals[1].add(sums.ones, kVector);
    state.ones += totals[1].total();
  }
  if (kEntropy) {
    totals[2].add(sums.distance, kVector);
    state.distance += totals[2].total();
  }
}

// Folds in a block of mapped logits, padded with -inf.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void fold_block(State& state, const acc_t* z, int width) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    const acc_t max = block_max(z, width);
    state.raise_max(static_cast<double>(max));
    static_cast<double>(max) == state.max ? add_block<true, kEntropy>(state, z, width)
                                          : add_block<false, kEntropy>(state, z, width);
  });
}

template <typename acc_t>
void fold_block(const TokenArgs& args, State& state, const acc_t* z, int width) {
  args.has_entropy ? fold_block<true>(state, z, width) : fold_block<false>(state, z, width);
}

// Classes [begin, end) of one row.
template <typename acc_t>
State reduce_row(const TokenArgs& args, int64_t row_offset, int64_t begin, int64_t end) {
  acc_t x_buffer[kBlock];
  acc_t z_buffer[kBlock];
  State state;
  for (int64_t c = begin; c < end; c += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - c));
    const acc_t* x = view_block(args.input, classes_of_row(row_offset, args.input_class_stride, c),
                                count, x_buffer, -math::infinity<acc_t>());
    const acc_t* z = map_block(args.map, x, count, z_buffer);
    if (z == z_buffer) {
      std::fill(z_buffer + count, z_buffer + padded(count), -math::infinity<acc_t>());
    }
    fold_block(args, state, z, padded(count));
  }
  return state;
}

// Classes [begin, end) of up to kTileRows rows whose classes lie far apart.
template <typename acc_t>
void reduce_far_rows(const TokenArgs& args, const BlockOffsets& rows, int count, int64_t begin,
                     int64_t end, State* states, int64_t states_stride) {
  constexpr int kClasses = kColumns / kTileRows;  // that are read at a time
  static_assert(kBlock % kClasses == 0 && kTileRows == kVector);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  std::vector<acc_t> tile(static_cast<size_t>(kTileRows) * kBlock);
  acc_t z_buffer[kBlock];
  for (int64_t first = begin; first < end; first += kBlock) {
    const int width = static_cast<int>(std::min<int64_t>(kBlock, end - first));
    for (int c = 0; c < width; c += kClasses) {
      const int classes = std::min(kClasses, width - c);
      for (int i = 0; i < classes; ++i) {
        load_block(args.input, rows.shifted((first + c + i) * args.input_class_stride), count,
                   buffers.x + i * kTileRows);
      }
      transpose<true>(buffers.x, kTileRows, classes, kTileRows, tile.data() + c, kBlock);
    }
    for (int r = 0; r < count; ++r) {
      acc_t* x = tile.data() + r * kBlock;
      const acc_t* z = map_block(args.map, x, width, z_buffer);
      acc_t* end_of_z = (z == z_buffer ? z_buffer : x) + width;
      std::fill_n(end_of_z, padded(width) - width, -math::infinity<acc_t>());
      fold_block(args, states[r * states_stride], z, padded(width));
    }
  }
}

// -------------------------------------------------------- forward, class by class

// A block of rows, padded, with all their classes.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void reduce_columns(const Columns<acc_t>& z, int classes, int width,
                                              RowBlock<acc_t>& rows) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    for (int first = 0; first < width; first += kVector) {
      acc_t max[kVector];
      acc_t shifts[kVector];
      std::fill_n(max, kVector, -math::infinity<acc_t>());
      for (int c = 0; c < classes; ++c) {
        const acc_t* column = z.first + c * z.stride + first;
        for (int lane = 0; lane < kVector; ++lane) {
          max[lane] = column[lane] > max[lane] ? column[lane] : max[lane];
        }
      }
      for (int lane = 0; lane < kVector; ++lane) {
        shifts[lane] = softmax_shift(max[lane]);
      }
      LaneSums<acc_t, true, kEntropy> sums;
      sums.add_all(z.first + first, z.stride, classes, shifts);
      for (int lane = 0; lane < kVector; ++lane) {
        State state;
        state.ones = static_cast<double>(sums.ones[lane]);
        state.below = sums.below[lane];
        state.distance = sums.distance[lane];
        rows.max[first + lane] = max[lane];
        rows.rest[first + lane] = static_cast<acc_t>(state.rest());
        rows.mean_distance[first + lane] = static_cast<acc_t>(state.mean_distance());
      }
    }
  });
}

// The logits of a block of rows and classes, mapped, in buffers.p where they are not as in memory.
template <typename acc_t>
Columns<acc_t> map_columns(const LogitMapParams& params, const Columns<acc_t>& x, int classes,
                           int width, ColumnBuffers<acc_t>& buffers) {
  if (params.is_identity()) {
    return x;
  }
  for (int c = 0; c < classes; ++c) {
    map_block(params, x.first + c * x.stride, width, buffers.p + c * width);
  }
  return {buffers.p, width};
}

// Rows [begin, end) of few classes. See write_values().
template <typename acc_t>
int64_t forward_short_rows(const TokenForwardArgs& args, int64_t begin, int64_t end) {
  ForwardWalker walker = forward_walker(args, begin);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  const int classes = static_cast<int>(args.num_classes);
  const int block = column_rows(args);
  int64_t first_invalid = args.rows.numel;
  for (int64_t first = begin; first < end; first += block) {
    const int count = static_cast<int>(std::min<int64_t>(block, end - first));
    walker.next(count);
    const Columns<acc_t> x =
        load_columns(args.input, {walker[0], args.input_class_stride, 0, classes, count}, buffers.x,
                     buffers.staging);
    const Columns<acc_t> z = map_columns(args.map, x, classes, padded(count), buffers);
    RowBlock<acc_t> rows;
    rows.load_mask(args, walker[2], count);
    args.has_entropy ? reduce_columns<true>(z, classes, padded(count), rows)
                     : reduce_columns<false>(z, classes, padded(count), rows);
    first_invalid = std::min(first_invalid, write_values(args, walker, first, count, rows));
  }
  return first_invalid;
}

// Rows [first, first + count) of many classes, by the states of their pieces. See write_values().
template <typename acc_t>
int64_t finish_long_rows(const TokenForwardArgs& args, int64_t first, int count,
                         const State* states) {
  ForwardWalker walker = forward_walker(args, first);
  walker.next(count);
  const int64_t pieces = num_pieces(args);
  RowBlock<acc_t> rows;
  rows.load_mask(args, walker[2], count);
  for (int j = 0; j < count; ++j) {
    const State* const parts = states + (first + j) * pieces;
    State state = parts[0];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      state.merge(parts[piece]);
    }
    rows.max[j] = static_cast<acc_t>(state.max);
    rows.rest[j] = static_cast<acc_t>(state.rest());
    rows.mean_distance[j] = static_cast<acc_t>(state.mean_distance());
  }
  return write_values(args, walker, first, count, rows);
}

// ------------------------------------------------------ backward, what the walks share

// A class that log-probabilities of a row were wanted of, and the sum of their gradients.
struct IndexedClass {
  int64_t index;
  int row;    // of the block
  int64_t k;  // among the indices of the row
  double grad;
};

// What the gradients of a block of rows need beside their logits.
template <typename acc_t>
struct RowGradients : RowBlock<acc_t> {
  acc_t inverse_sum[kBlock];
  acc_t of_softmax[kBlock];
  double exact_of_softmax[kBlock];  // before it was rounded
  acc_t of_entropy[kBlock];
  std::vector<IndexedClass> indexed;  // by class

  // input, index, row_mask, the gradients of log_probs, entropy and lse, grad_input
  using Walker = BlockWalker<7>;

  static Walker walker(const TokenBackwardArgs& args, int64_t first) {
    return Walker(args.rows,
                  {&args.input, &args.index, &args.row_mask, &args.grad_log_probs,
                   &args.grad_entropy, &args.grad_lse, &args.grad_input},
                  first);
  }

  // Rows [first, first + count).
  void load(const TokenBackwardArgs& args, const Walker& walker, int64_t first, int count) {
    const StatsPlanes<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    std::copy_n(stats.max + first, count, this->max);
    std::copy_n(stats.rest + first, count, this->rest);
    std::copy_n(stats.mean_distance + first, count, this->mean_distance);
    this->all_count = true;
    this->load_mask(args, walker[2], count);
    std::fill_n(of_entropy, padded(count), acc_t(0));
    if (args.grad_entropy.data != nullptr) {
      load_block(args.grad_entropy, walker[4], count, of_entropy, acc_t(0));
    }
    std::fill_n(of_softmax, padded(count), acc_t(0));
    if (args.grad_lse.data != nullptr) {
      load_block(args.grad_lse, walker[5], count, of_softmax, acc_t(0));
    }
    load_indexed(args, walker, count);
    for (int j = 0; j < padded(count); ++j) {
      inverse_sum[j] =
          TokenGradient<acc_t>::of(this->stats(j), of_softmax[j], of_entropy[j]).inverse_sum;
    }
  }

  LOSSOPS_HOST_DEVICE TokenGradient<acc_t> operator[](int j) const {
    return {this->stats(j), of_softmax[j], of_entropy[j], inverse_sum[j]};
  }

  // The thread keeps this object. Of rows with many indices it shall not keep their memory.
  void release() {
    if (indexed.capacity() > kBlock) {
      std::vector<IndexedClass>().swap(indexed);
    }
  }

 private:
  void load_indexed(const TokenBackwardArgs& args, const Walker& walker, int count) {
    std::copy_n(of_softmax, padded(count), exact_of_softmax);
    indexed.clear();
    for (int64_t k = 0; args.grad_log_probs.data != nullptr && k < args.num_indices; ++k) {
      int64_t index[kBlock];
      acc_t grad[kBlock];
      load_indices(args.index, walker[1].shifted(k * args.index_stride), count, index);
      load_block(args.grad_log_probs, walker[3].shifted(k * args.grad_log_probs_stride), count,
                 grad);
      for (int j = 0; j < count; ++j) {
        if (this->is_counted[j] != acc_t(0) && index[j] >= 0 && index[j] < args.num_classes) {
          const auto own = static_cast<double>(grad[j]);
          exact_of_softmax[j] -= own;
          indexed.push_back({index[j], j, k, own});
        }
      }
    }
    for (int j = 0; j < padded(count); ++j) {
      of_softmax[j] = static_cast<acc_t>(exact_of_softmax[j]);
    }
    merge_indexed(args);
  }

  // Sorts, and adds up the gradients of repeated indices.
  void merge_indexed(const TokenBackwardArgs& args) {
    if (args.num_indices == 1 && is_short(args)) {
      return;  // nothing repeats, and all classes are in one block
    }
    std::sort(indexed.begin(), indexed.end(), [](const auto& a, const auto& b) {
      return std::tie(a.index, a.row, a.k) < std::tie(b.index, b.row, b.k);
    });
    size_t merged = 0;
    for (size_t i = 0; i < indexed.size(); ++merged) {
      IndexedClass one = indexed[i];
      double sum = 0;
      for (; i < indexed.size() && indexed[i].index == one.index && indexed[i].row == one.row;
           ++i) {
        sum += indexed[i].grad;
      }
      one.grad = sum;
      indexed[merged] = one;
    }
    indexed.resize(merged);
  }
};

// What TokenGradient::at_index() takes, of a vector of indexed classes.
template <typename acc_t>
struct IndexedVector {
  acc_t max[kVector];
  acc_t rest[kVector];
  acc_t mean_distance[kVector];
  acc_t inverse_sum[kVector];
  acc_t of_softmax[kVector];
  acc_t of_entropy[kVector];
  acc_t z[kVector];
  acc_t grad[kVector];
  acc_t common[kVector];

  __attribute__((noinline)) void evaluate(acc_t* results) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < kVector; ++i) {
        const TokenGradient<acc_t> gradient{
            {max[i], rest[i], mean_distance[i]}, of_softmax[i], of_entropy[i], inverse_sum[i]};
        results[i] = gradient.at_index(z[i], grad[i], common[i]);
      }
    });
  }
};

// Writes the gradients of indexed classes, from number `next` on, up to that of class `end`. Class
// c of row j lies at (c - first_class) * stride + j, in z and in grad.
template <typename acc_t>
void gradients_at_indices(const RowGradients<acc_t>& rows, size_t& next, int64_t first_class,
                          int64_t end, const Columns<acc_t>& z, acc_t* grad, int64_t grad_stride) {
  const size_t size = rows.indexed.size();
  const auto is_left = [&]() { return next < size && rows.indexed[next].index < end; };
  while (is_left()) {
    IndexedVector<acc_t> vector = {};
    acc_t results[kVector];
    const IndexedClass* const batch = rows.indexed.data() + next;
    int count = 0;
    for (; count < kVector && is_left(); ++count, ++next) {
      const int row = batch[count].row;
      vector.max[count] = rows.max[row];
      vector.rest[count] = rows.rest[row];
      vector.mean_distance[count] = rows.mean_distance[row];
      vector.inverse_sum[count] = rows.inverse_sum[row];
      vector.of_softmax[count] = rows.of_softmax[row];
      vector.of_entropy[count] = rows.of_entropy[row];
      vector.z[count] = z.first[(batch[count].index - first_class) * z.stride + row];
      vector.grad[count] = static_cast<acc_t>(batch[count].grad);
      vector.common[count] = static_cast<acc_t>(rows.exact_of_softmax[row] + batch[count].grad);
    }
    vector.evaluate(results);
    for (int i = 0; i < count; ++i) {
      grad[(batch[i].index - first_class) * grad_stride + batch[i].row] = results[i];
    }
  }
}

// --------------------------------------------------------------- backward, both walks

// Writes the gradients of a block of classes of a row, as if none of them were an index.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void gradient_block(const TokenGradient<acc_t>& row, const acc_t* z,
                                              int width, acc_t* grad) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    const TokenGradient<acc_t> gradient = row;
    for (int i = 0; i < width; ++i) {
      grad[i] = gradient.template of_class<kEntropy>(z[i]);
    }
  });
}

// Classes [begin, end) of rows [first_row, end_row), row by row.
template <typename acc_t>
void backward_rows(const TokenBackwardArgs& args, int64_t first_row, int64_t end_row, int64_t begin,
                   int64_t end) {
  auto walker = RowGradients<acc_t>::walker(args, first_row);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  acc_t x_buffer[kBlock];
  acc_t z_buffer[kBlock];
  acc_t grad[kBlock];
  for (int64_t row = first_row; row < end_row; ++row) {
    walker.next(1);
    rows.load(args, walker, row, 1);
    const TokenGradient<acc_t> gradient = rows[0];
    size_t next = 0;
    while (next < rows.indexed.size() && rows.indexed[next].index < begin) {
      ++next;
    }
    for (int64_t c = begin; c < end; c += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - c));
      const BlockOffsets grad_at = classes_of_row(walker[6][0], args.grad_input_class_stride, c);
      if (!rows.all_count) {
        std::fill_n(grad, count, acc_t(0));
        store_block(args.grad_input, grad_at, count, grad);
        continue;
      }
      const acc_t* x = view_block(
          args.input, classes_of_row(walker[0][0], args.input_class_stride, c), count, x_buffer);
      const acc_t* z = map_block(args.map, x, padded(count), z_buffer);
      args.grad_entropy.data != nullptr ? gradient_block<true>(gradient, z, padded(count), grad)
                                        : gradient_block<false>(gradient, z, padded(count), grad);
      gradients_at_indices(rows, next, c, c + count, {z, 1}, grad, 1);
      unmap_gradient(args.map, x, count, grad);
      store_block(args.grad_input, grad_at, count, grad);
    }
  }
  rows.release();
}

// A block of rows, padded, and classes. What a row has in common is in local arrays: the compiler
// would otherwise have to fear that the results overwrite it.
template <bool kEntropy, typename acc_t>
__attribute__((noinline)) void gradient_columns(const Columns<acc_t>& z,
                                                const RowGradients<acc_t>& rows, int classes,
                                                int width, acc_t* grad) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    for (int first = 0; first < width; first += kVector) {
      acc_t max[kVector];
      acc_t mean_distance[kVector];
      acc_t inverse_sum[kVector];
      acc_t of_softmax[kVector];
      acc_t of_entropy[kVector];
      std::copy_n(rows.max + first, kVector, max);
      std::copy_n(rows.mean_distance + first, kVector, mean_distance);
      std::copy_n(rows.inverse_sum + first, kVector, inverse_sum);
      std::copy_n(rows.of_softmax + first, kVector, of_softmax);
      std::copy_n(rows.of_entropy + first, kVector, of_entropy);
      for (int c = 0; c < classes; ++c) {
        const acc_t* column = z.first + c * z.stride + first;
        acc_t result[kVector];
        for (int lane = 0; lane < kVector; ++lane) {
          const TokenGradient<acc_t> gradient{{max[lane], acc_t(0), mean_distance[lane]},
                                              of_softmax[lane],
                                              of_entropy[lane],
                                              inverse_sum[lane]};
          result[lane] = gradient.template of_class<kEntropy>(column[lane]);
        }
        std::copy_n(result, kVector, grad + c * width + first);
      }
    }
  });
}

// Rows [begin, end), class by class.
template <typename acc_t>
void backward_columns(const TokenBackwardArgs& args, int64_t begin, int64_t end) {
  auto walker = RowGradients<acc_t>::walker(args, begin);
  auto& buffers = buffers_of_this_thread<ColumnBuffers<acc_t>>();
  acc_t* const grad = buffers.grad;
  const int block = column_rows(args);
  auto& rows = buffers_of_this_thread<RowGradients<acc_t>>();
  for (int64_t first = begin; first < end; first += block) {
    const int count = static_cast<int>(std::min<int64_t>(block, end - first));
    const int width = padded(count);
    const int classes_at_once = kColumns / width;
    walker.next(count);
    rows.load(args, walker, first, count);
    size_t next = 0;
    for (int64_t c = 0; c < args.num_classes; c += classes_at_once) {
      const int classes =
          static_cast<int>(std::min<int64_t>(classes_at_once, args.num_classes - c));
      const Columns<acc_t> x =
          load_columns(args.input, {walker[0], args.input_class_stride, c, classes, count},
                       buffers.x, buffers.staging);
      const Columns<acc_t> z = map_columns(args.map, x, classes, width, buffers);
      args.grad_entropy.data != nullptr ? gradient_columns<true>(z, rows, classes, width, grad)
                                        : gradient_columns<false>(z, rows, classes, width, grad);
      gradients_at_indices(rows, next, c, c + classes, z, grad, width);
      for (int i = 0; i < classes && !args.map.is_identity(); ++i) {
        unmap_gradient(args.map, x.first + i * x.stride, width, grad + i * width);
      }
      for (int j = 0; j < count && !rows.all_count; ++j) {
        for (int i = 0; i < classes && rows.is_counted[j] == acc_t(0); ++i) {
          grad[i * width + j] = acc_t(0);
        }
      }
      store_columns(args.grad_input, {walker[6], args.grad_input_class_stride, c, classes, count},
                    grad, buffers.staging);
    }
  }
  rows.release();
}

// ------------------------------------------------------------------------ launches

// Tasks are a number of rows, or a piece of one row.
struct Tasks {
  int64_t rows_per_chunk;
  int64_t chunks;
  int64_t pieces;

  Tasks(const TokenArgs& args, bool by_columns) : pieces(by_columns ? 1 : num_pieces(args)) {
    const int64_t classes = std::max<int64_t>(args.num_classes, 1);
    rows_per_chunk = std::max<int64_t>(kChunk / classes, 1);
    const int64_t whole = by_columns ? column_rows(args) : is_far(args) ? kTileRows : 1;
    rows_per_chunk = divide_up(rows_per_chunk, whole) * whole;
    chunks = divide_up(args.rows.numel, rows_per_chunk);
  }
};

template <typename acc_t>
void reduce_long_rows(const TokenArgs& args, int64_t begin, int64_t end, int64_t piece,
                      State* states) {
  const int64_t pieces = num_pieces(args);
  const int64_t first_class = piece * kPiece;
  const int64_t end_class = std::min(first_class + kPiece, args.num_classes);
  BlockWalker<2> walker(args.rows, {&args.input, &args.row_mask}, begin);
  for (int64_t row = begin; row < end; row += kTileRows) {
    const int count = static_cast<int>(std::min<int64_t>(kTileRows, end - row));
    walker.next(count);
    State* const first_state = states + row * pieces + piece;
    for (int j = 0; j < count; ++j) {
      first_state[j * pieces] = State();
    }
    if (is_far(args)) {
      reduce_far_rows<acc_t>(args, walker[0], count, first_class, end_class, first_state, pieces);
      continue;
    }
    for (int j = 0; j < count; ++j) {
      if (counts(args, walker[1][j])) {
        first_state[j * pieces] = reduce_row<acc_t>(args, walker[0][j], first_class, end_class);
      }
    }
  }
}

// Rows whose values a task reads off: few if they have many indices.
int64_t rows_per_finish(const TokenArgs& args) {
  return std::clamp<int64_t>(4096 / (args.num_indices + 1), kVector, kBlock);
}

template <typename Body>
void visit_acc_type(const TokenArgs& args, const Body& body) {
  args.acc_double ? body(double()) : body(float());
}

}  // namespace

// A state for each piece of each row of many classes.
int64_t token_forward_scratch(const TokenForwardArgs& args) {
  static_assert(sizeof(State) % sizeof(double) == 0);
  const int64_t doubles = sizeof(State) / sizeof(double);
  return is_short(args) ? 0 : args.rows.numel * num_pieces(args) * doubles;
}

void launch_token_forward(const TokenForwardArgs& args, double* scratch, Context context) {
  auto* const states = reinterpret_cast<State*>(scratch);
  const int64_t rows = args.rows.numel;
  std::atomic<int64_t> first_invalid{rows};
  const auto add_invalid = [&](int64_t row) {
    int64_t least = first_invalid;
    while (row < least && !first_invalid.compare_exchange_weak(least, row)) {
    }
  };
  const Tasks tasks(args, is_short(args));
  visit_acc_type(args, [&](auto acc) {
    using acc_t = decltype(acc);
    parallel_for_each(context, tasks.chunks * tasks.pieces, [&](int64_t task) {
      const int64_t begin = task / tasks.pieces * tasks.rows_per_chunk;
      const int64_t end = std::min(begin + tasks.rows_per_chunk, rows);
      if (is_short(args)) {
        add_invalid(forward_short_rows<acc_t>(args, begin, end));
      } else {
        reduce_long_rows<acc_t>(args, begin, end, task % tasks.pieces, states);
      }
    });
    if (!is_short(args)) {
      const int64_t at_once = rows_per_finish(args);
      parallel_for_each(context, divide_up(rows, at_once), [&](int64_t task) {
        const int64_t begin = task * at_once;
        const int count = static_cast<int>(std::min(at_once, rows - begin));
        add_invalid(finish_long_rows<acc_t>(args, begin, count, states));
      });
    }
  });
  if (args.first_invalid_row != nullptr) {
    *args.first_invalid_row = first_invalid == rows ? -1 : first_invalid.load();
  }
}

int64_t token_backward_scratch(const TokenBackwardArgs& /*args*/) { return 0; }

void launch_token_backward(const TokenBackwardArgs& args, double* /*scratch*/, Context context) {
  // Any walk gives a gradient the same bits.
  const bool by_columns = is_short(args) || is_far(args);
  const Tasks tasks(args, by_columns);
  visit_acc_type(args, [&](auto acc) {
    using acc_t = decltype(acc);
    parallel_for_each(context, tasks.chunks * tasks.pieces, [&](int64_t task) {
      const int64_t begin = task / tasks.pieces * tasks.rows_per_chunk;
      const int64_t end = std::min(begin + tasks.rows_per_chunk, args.rows.numel);
      const int64_t first_class = task % tasks.pieces * kPiece;
      const int64_t end_class = std::min(first_class + kPiece, args.num_classes);
      by_columns ? backward_columns<acc_t>(args, begin, end)
                 : backward_rows<acc_t>(args, begin, end, first_class, end_class);
    });
  });
}

}  // namespace lossops::cpu
