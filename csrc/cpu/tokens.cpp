// Token losses on the CPU: log-probabilities of K classes a row, the entropy of its softmax, and
// its lse.
//
// Forward first reduces each piece of each row to a state. Then it merges the states of a row and
// reads its values off. The order of a row's sums follows from the number of its classes alone: a
// row has equal bits in any layout, in any batch and for any number of threads. Rows of many
// classes are reduced one by one, along the classes. Rows of few classes are the lanes of vectors.
#include "losses/rows/tokens.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "cpu/thread_buffers.h"
#include "cpu/tokens/backward.h"
#include "cpu/tokens/forward_by_classes.h"
#include "cpu/tokens/forward_by_rows.h"
#include "cross_entropy_row.h"

namespace lossops::cpu {
namespace {

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
