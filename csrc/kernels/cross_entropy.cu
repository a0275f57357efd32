// Cross entropy, forward and backward.
//
// Rows whose classes are contiguous are read by a team of threads each: part of a warp
// for few classes, a block for many. Rows whose classes are strided, such as the pixels
// of an (N, C, H, W) tensor, take a thread each, so that a warp reads neighbouring rows.

#include <algorithm>
#include <cstdint>

#include "cross_entropy_row.h"
#include "kernels/block_reduce.cuh"
#include "kernels/check.cuh"
#include "kernels/column_reduce.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/grid_reduce.cuh"
#include "kernels/vectorized.cuh"
#include "launchers.h"
#include "losses/cross_entropy.h"

namespace lossops::cuda {
namespace {

// Threads of a block whose rows share it, and of one that takes a thread a row.
constexpr int kThreads = 256;
// A row of more bytes than this is worth a block of its own.
constexpr int64_t kWarpRowBytes = 4096;
// Threads of a block with one row: few enough that each has several vectors in flight.
constexpr int kMaxRowThreads = 256;
// Longer rows would overflow the 32-bit indices of a row's classes.
constexpr int64_t kMaxRowClasses = int64_t{1} << 30;
// Vectors of a row that a thread has in flight. Dense coefficients are bound by arithmetic, and
// their code is long.
template <bool kDense>
constexpr int kRowUnroll = kDense ? 1 : 4;
// Vectors of a row for each thread of a block, where the row is short enough: in two rounds, to
// share the cost of the reduction and of the row's target among more classes.
constexpr int kVectorsPerThread = 8;
// Vectors of a row that a thread holds in registers, and the bytes of the longest row that the
// threads of a block then hold.
constexpr int kRegisterVectors = 8;
constexpr int64_t kRegisterRowBytes = int64_t{kMaxRowThreads} * kRegisterVectors * kVectorBytes;
// Classes of a strided row that a thread has in flight.
constexpr int kClassUnroll = 8;
// Blocks of a reduction: several waves on any GPU, and partials that one block folds in
// microseconds.
constexpr int64_t kMaxBlocks = 8192;
// Blocks of a grid without one.
constexpr int64_t kMaxGrid = 1 << 30;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of kMaxRowThreads that shall fit a multiprocessor: while one row is reduced, the
// others load.
template <typename scalar_t>
constexpr int kMinRowBlocks = sizeof(scalar_t) <= 4 ? 4 : 1;

// The same for rows in registers, whose loads are all in flight at once.
template <typename scalar_t>
constexpr int kMinRegisterBlocks = sizeof(scalar_t) == 4 ? 4 : 3;

template <typename acc_t, bool kDense>
using RowState = std::conditional_t<kDense, DenseOnlineSoftmax<acc_t>, OnlineSoftmax<acc_t>>;

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(OnlineSoftmax<acc_t>& state, acc_t x, acc_t shift,
                                              const RowTarget<acc_t>& /*target*/, int64_t /*c*/) {
  state.template add_below_max<kExact>(x, shift);
}

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(DenseOnlineSoftmax<acc_t>& state, acc_t x,
                                              acc_t shift, const RowTarget<acc_t>& target,
                                              int64_t c) {
  state.template add_below_max<kExact>(x, shift, target.coefficient(c));
}

// Half types: exact in fp32, and so are the differences of any two that are near each other.
template <typename scalar_t>
constexpr bool kExactExponentials = sizeof(scalar_t) >= 4;

// An empty state to sum a few terms in, before they join a sum of many: that keeps the rounding of
// long rows small.
template <typename State>
__device__ __forceinline__ State same_max(const State& state) {
  State local;
  local.max = state.max;
  return local;
}

// A thread's share of a row as it grows, and what rounding took from its sums.
template <typename State>
struct RowSum {
  State sums;
  State lost;

  template <typename acc_t>
  __device__ __forceinline__ void raise_max(acc_t max) {
    sums.raise_max(max);
    lost.raise_max(max);
  }

  __device__ __forceinline__ void add(const State& local) { sums.add(local, lost); }

  __device__ __forceinline__ State total() const {
    State result = sums;
    result.add(lost);
    return result;
  }
};

// Folds kCount logits into a row, with one rescaling for all of them. Their classes are
// first_class, first_class + 1, ...
template <bool kExact, int kCount, typename State, typename acc_t>
__device__ __forceinline__ void fold(RowSum<State>& row, const acc_t (&x)[kCount],
                                     const RowTarget<acc_t>& target, int64_t first_class) {
  acc_t max = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    max = math::max_number(x[i], max);
  }
  row.raise_max(max);
  const acc_t shift = softmax_shift(row.sums.max);
  State local = same_max(row.sums);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    add_below_max<kExact>(local, x[i], shift, target, first_class + i);
  }
  row.add(local);
}

// One thread's share of a row of contiguous classes. row: (C,). The threads of a team take
// vectors in turn, kUnroll at a time. 32-bit indices leave registers for more loads in flight.
template <typename scalar_t, int kUnroll>
struct RowReader {
  static constexpr int kSize = kVectorSize<scalar_t>;

  const scalar_t* row;
  int num_classes;
  int width;    // of an access
  int vectors;  // whole ones
  int lane;
  int team;
  int next;  // the first of the vectors that `loaded` holds
  Vector<scalar_t> loaded[kUnroll];

  // Starts loading at once: what else the row needs can be fetched meanwhile.
  __device__ __forceinline__ RowReader(const scalar_t* row_, int num_classes_, int lane_, int team_)
      : row(row_),
        num_classes(num_classes_),
        width(access_width(row_)),
        vectors(num_classes_ / kSize),
        lane(lane_),
        team(team_),
        next(lane_) {
    load();
  }

  __device__ __forceinline__ int vector(int u) const { return next + u * team; }
  __device__ __forceinline__ bool has(int u) const { return vector(u) < vectors; }
  __device__ __forceinline__ int first_class(int u) const { return vector(u) * kSize; }
  __device__ __forceinline__ bool more() const { return has(0); }

  __device__ __forceinline__ void load() {
    if (width == kVectorBytes && has(kUnroll - 1)) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        loaded[u] = load_vector(row, vector(u));
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (has(u)) {
          loaded[u] = load_vector_at(row + first_class(u), width);
        }
      }
    }
  }

  __device__ __forceinline__ void advance() {
    next += kUnroll * team;
    load();
  }

  // Calls body(u) for every loaded vector.
  template <typename Body>
  __device__ __forceinline__ void for_each_vector(Body&& body) const {
    if (has(kUnroll - 1)) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        body(u);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll - 1; ++u) {
        if (has(u)) {
          body(u);
        }
      }
    }
  }

  // Calls body(c) for every class after the last whole vector that is this thread's.
  template <typename Body>
  __device__ __forceinline__ void for_each_single(Body&& body) const {
    for (int c = vectors * kSize + lane; c < num_classes; c += team) {
      body(c);
    }
  }
};

// A thread's share of a row of contiguous classes that a block holds whole. The threads take
// vectors in turn, the last of which may be a part of one. What is not there is -inf.
template <typename scalar_t>
struct RegisterRow {
  static constexpr int kSize = kVectorSize<scalar_t>;
  Vector<scalar_t> vectors[kRegisterVectors];

  __device__ __forceinline__ RegisterRow(const scalar_t* row, int num_classes) {
    const int width = access_width(row);
    const int whole = num_classes / kSize;
    const int part = num_classes % kSize;
    Vector<scalar_t> nothing;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      nothing.values[i] = from_acc<scalar_t>(-math::infinity<acc_type_t<scalar_t>>());
    }
    if (width == kVectorBytes) {
      load<kVectorBytes>(row, whole, nothing);
    } else if (width == 8) {
      load<8>(row, whole, nothing);
    } else if (width == 4) {
      load<4>(row, whole, nothing);
    } else {
      load<2>(row, whole, nothing);
    }
    if (part > 0 && whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      Vector<scalar_t> last = nothing;
#pragma unroll
      for (int i = 0; i < kSize - 1; ++i) {
        if (i < part) {
          last.values[i] = row[whole * kSize + i];
        }
      }
#pragma unroll
      for (int u = 0; u < kRegisterVectors; ++u) {
        if (vector(u) == whole) {
          vectors[u] = last;
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int vector(int u) const {
    return static_cast<int>(threadIdx.x) + u * static_cast<int>(blockDim.x);
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const scalar_t* row, int whole,
                                       const Vector<scalar_t>& nothing) {
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      vectors[u] = vector(u) < whole ? load_vector_at(row + vector(u) * kSize, kWidth) : nothing;
    }
  }
};

template <typename State, typename scalar_t, int kUnroll, typename acc_t = acc_type_t<scalar_t>>
__device__ __forceinline__ State reduce_row(RowReader<scalar_t, kUnroll>& reader,
                                            const RowTarget<acc_t>& target) {
  constexpr int kSize = kVectorSize<scalar_t>;
  RowSum<State> row;
  for (; reader.more(); reader.advance()) {
    acc_t max = -math::infinity<acc_t>();
    reader.for_each_vector([&](int u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        max = math::max_number(to_acc<acc_t>(reader.loaded[u].values[i]), max);
      }
    });
    row.raise_max(max);
    const acc_t shift = softmax_shift(row.sums.max);
    State local = same_max(row.sums);
    reader.for_each_vector([&](int u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        add_below_max<kExactExponentials<scalar_t>>(local,
                                                    to_acc<acc_t>(reader.loaded[u].values[i]),
                                                    shift, target, reader.first_class(u) + i);
      }
    });
    row.add(local);
  }
  reader.for_each_single([&](int c) {
    const acc_t x[1] = {to_acc<acc_t>(reader.row[c])};
    fold<kExactExponentials<scalar_t>>(row, x, target, c);
  });
  return row.total();
}

// What one row leaves behind, once its state is complete. x_at_index is the logit of the
// class index, unused by dense rows.
template <typename acc_t, typename State>
__device__ __forceinline__ void finish_row(const CrossEntropyForwardArgs& args,
                                           const RowTarget<acc_t>& target, const State& state,
                                           acc_t x_at_index, int64_t row, int64_t output_offset,
                                           Partial& partial) {
  constexpr bool kDense = std::is_same_v<State, DenseOnlineSoftmax<acc_t>>;
  const RowStats<acc_t> stats(args.row_stats, args.rows.numel);
  acc_t loss = 0;
  acc_t weight = 0;
  if (!target.valid) {
    loss = math::quiet_nan<acc_t>();
    weight = args.weight == nullptr ? acc_t(1) : acc_t(0);
  } else if (!target.ignored) {
    weight = args.target_is_probability ? acc_t(1) : target.index_weight();
    if constexpr (kDense) {
      // Without classes there is nothing to lose.
      loss = args.num_classes > 0 ? dense_row_loss(state.rest(), state.q_sum, state.dot) : acc_t(0);
    } else {
      loss = sparse_row_loss(state.max, state.rest(), x_at_index, weight);
    }
  }
  stats.max[row] = state.max;
  stats.rest[row] = state.rest();
  if constexpr (kDense) {
    stats.q_sum[row] = state.q_sum;
  }
  if (args.reduction == Reduction::kNone) {
    store_operand<acc_t>(args.output, output_offset, loss);
  }
  partial.sum += static_cast<double>(loss);
  partial.weight += static_cast<double>(weight);
}

// A row's offsets into input, target and output (or gradient).
template <int N>
__device__ __forceinline__ void row_offsets(const IterationSpace& rows,
                                            const Operand* const (&operands)[N], int64_t row,
                                            int64_t (&offsets)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    offsets[n] = 0;
  }
  strided_offsets(rows, operands, row, offsets);
}

// ---------------------------------------------------- rows of contiguous classes

// kTeamIsBlock: one row a block at a time; else `team` lanes, a power of two, a row.
template <typename scalar_t, bool kDense, bool kTeamIsBlock>
__global__ void __launch_bounds__(kTeamIsBlock ? kMaxRowThreads : kThreads,
                                  kTeamIsBlock && !kDense ? kMinRowBlocks<scalar_t> : 1)
    cross_entropy_forward_kernel(const __grid_constant__ CrossEntropyForwardArgs args, int team,
                                 Partial* partials, Finalize finalize) {
  using acc_t = acc_type_t<scalar_t>;
  using State = RowState<acc_t, kDense>;
  const int lane =
      kTeamIsBlock ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) & (team - 1);
  const int rows_per_block = kTeamIsBlock ? 1 : kThreads / team;
  const int first = kTeamIsBlock ? 0 : static_cast<int>(threadIdx.x) / team;
  const Operand* const operands[3] = {&args.input, &args.target, &args.output};
  Partial partial;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * rows_per_block; base < args.rows.numel;
       base += static_cast<int64_t>(gridDim.x) * rows_per_block) {
    const bool exists = base + first < args.rows.numel;
    // A team past the end takes part in the shuffles with the last row.
    const int64_t row = exists ? base + first : args.rows.numel - 1;
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    RowReader<scalar_t, kRowUnroll<kDense>> reader(logits, static_cast<int>(args.num_classes), lane,
                                                   team);
    const RowTarget<acc_t> target(args, offsets[1]);
    acc_t x_at_index = 0;
    if (!kDense && lane == 0 && target.has_loss()) {
      x_at_index = to_acc<acc_t>(logits[target.index]);
    }
    State state;
    if (target.has_loss()) {
      state = reduce_row<State>(reader, target);
    }
    state = kTeamIsBlock ? block_reduce(state) : warp_reduce(state, team);
    if (lane == 0 && exists) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

// Rows short enough for the registers of a block: all of a row is in flight at once, and its
// maximum is known before the first exponential. One row a block at a time.
template <typename scalar_t>
__global__ void __launch_bounds__(kMaxRowThreads, kMinRegisterBlocks<scalar_t>)
    cross_entropy_forward_register_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                          Partial* partials, Finalize finalize) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const Operand* const operands[3] = {&args.input, &args.target, &args.output};
  const bool first = threadIdx.x == 0;
  Partial partial;
  for (int64_t row = blockIdx.x; row < args.rows.numel; row += gridDim.x) {
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    RegisterRow<scalar_t> loaded(logits, static_cast<int>(args.num_classes));
    const RowTarget<acc_t> target(args, offsets[1]);
    acc_t x_at_index = 0;
    if (first && target.has_loss()) {
      x_at_index = to_acc<acc_t>(logits[target.index]);
    }
    OnlineSoftmax<acc_t> state;
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        state.max = math::max_number(to_acc<acc_t>(loaded.vectors[u].values[i]), state.max);
      }
    }
    const acc_t shift = softmax_shift(state.max);
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      OnlineSoftmax<acc_t> local = same_max(state);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        local.template add_below_max<kExactExponentials<scalar_t>>(
            to_acc<acc_t>(loaded.vectors[u].values[i]), shift);
      }
      state.add(local);
    }
    state = block_reduce(state);
    if (first) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

// Everything of a row that its gradients need. offsets: of the row in input, target, grad_output.
template <typename acc_t, bool kDense, bool kExact>
struct RowGradient {
  const CrossEntropyBackwardArgs& args;
  RowTarget<acc_t> target;
  acc_t scale;
  acc_t q_sum;
  acc_t at_index = 0;  // the gradient at the class index
  RowSoftmax<acc_t> softmax;

  __device__ __forceinline__ RowGradient(const CrossEntropyBackwardArgs& args_, int64_t row,
                                         const int64_t* offsets)
      : args(args_), target(args_, offsets[1]), scale(row_scale<acc_t>(args_, offsets[2])) {
    const RowStats<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    if constexpr (kDense) {
      q_sum = stats.q_sum[row];
    } else {
      q_sum = target.has_loss() ? target.index_weight() : acc_t(0);
    }
    softmax = RowSoftmax<acc_t>::of(stats.max[row], stats.rest[row], scale, q_sum);
    if (!kDense && target.has_loss()) {
      at_index = softmax.gradient_at_index(
          load_operand<acc_t>(args.input, offsets[0] + target.index * args.input_class_stride));
    }
  }

  __device__ __forceinline__ acc_t of_logit(acc_t x, int64_t c) const {
    if (target.ignored) {
      return acc_t(0);
    }
    if (!target.valid) {
      return math::quiet_nan<acc_t>();
    }
    if constexpr (kDense) {
      return softmax.dense_gradient(x, scale, q_sum, target.coefficient(c));
    } else {
      return c == target.index ? at_index : softmax.template gradient<kExact>(x);
    }
  }

  __device__ __forceinline__ acc_t of_target(acc_t x, int64_t c) const {
    const acc_t kept = acc_t(1) - static_cast<acc_t>(args.label_smoothing);
    return scale * kept * class_weight<acc_t>(args, c) * softmax.surprise(x);
  }
};

template <typename scalar_t, bool kDense>
__global__ void __launch_bounds__(kMaxRowThreads)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardArgs args, int team) {
  using acc_t = acc_type_t<scalar_t>;
  const int lane = static_cast<int>(threadIdx.x) % team;
  const int rows_per_block = static_cast<int>(blockDim.x) / team;
  const Operand* const operands[5] = {&args.input, &args.target, &args.grad_output,
                                      &args.grad_input, &args.grad_target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + threadIdx.x / team;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * rows_per_block) {
    int64_t offsets[5];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data) + offsets[3];
    RowReader<scalar_t, kRowUnroll<kDense>> reader(logits, static_cast<int>(args.num_classes), lane,
                                                   team);
    const RowGradient<acc_t, kDense, kExactExponentials<scalar_t>> gradient(args, row, offsets);

    const auto of_one = [&](int64_t c) {
      const acc_t x = to_acc<acc_t>(logits[c]);
      if (args.grad_input.data != nullptr) {
        grad_input[c] = from_acc<scalar_t>(gradient.of_logit(x, c));
      }
      if (kDense && args.grad_target.data != nullptr) {
        store_operand<acc_t>(args.grad_target, offsets[4] + c * args.grad_target_class_stride,
                             gradient.of_target(x, c));
      }
    };
    if (args.grad_target.data != nullptr) {
      for (int c = lane; c < args.num_classes; c += team) {
        of_one(c);
      }
      continue;
    }
    const int width = access_width(grad_input);
    for (; reader.more(); reader.advance()) {
      reader.for_each_vector([&](int u) {
        Vector<scalar_t> results;
#pragma unroll
        for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
          results.values[i] = from_acc<scalar_t>(gradient.of_logit(
              to_acc<acc_t>(reader.loaded[u].values[i]), reader.first_class(u) + i));
        }
        store_vector_at(grad_input + reader.first_class(u), width, results);
      });
    }
    reader.for_each_single(of_one);
  }
}

// ------------------------------------------------------ rows of strided classes

template <typename scalar_t>
struct TypedLoader {
  using acc_t = acc_type_t<scalar_t>;
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  static __device__ __forceinline__ acc_t load(const Operand& operand, int64_t offset) {
    return to_acc<acc_t>(static_cast<const scalar_t*>(operand.data)[offset]);
  }
  static __device__ __forceinline__ void store(const Operand& operand, int64_t offset,
                                               acc_t value) {
    static_cast<scalar_t*>(operand.data)[offset] = from_acc<scalar_t>(value);
  }
};

// Logits of a narrower type than the result.
struct WideningLoader {
  using acc_t = double;
  static constexpr bool kExact = true;
  static __device__ __forceinline__ double load(const Operand& operand, int64_t offset) {
    return load_operand<double>(operand, offset);
  }
  static __device__ __forceinline__ void store(const Operand& operand, int64_t offset,
                                               double value) {
    store_operand<double>(operand, offset, value);
  }
};

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_strided_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                         Partial* partials, Finalize finalize) {
  using acc_t = typename Loader::acc_t;
  const Operand* const operands[3] = {&args.input, &args.target, &args.output};
  Partial partial;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const RowTarget<acc_t> target(args, offsets[1]);
    RowSum<RowState<acc_t, kDense>> sum;
    acc_t x_at_index = 0;
    if (target.has_loss()) {
      const auto logit = [&](int64_t c) {
        return Loader::load(args.input, offsets[0] + c * args.input_class_stride);
      };
      int64_t c = 0;
      for (; c + kClassUnroll <= args.num_classes; c += kClassUnroll) {
        acc_t x[kClassUnroll];
#pragma unroll
        for (int i = 0; i < kClassUnroll; ++i) {
          x[i] = logit(c + i);
        }
        fold<Loader::kExact>(sum, x, target, c);
      }
      for (; c < args.num_classes; ++c) {
        const acc_t x[1] = {logit(c)};
        fold<Loader::kExact>(sum, x, target, c);
      }
      if constexpr (!kDense) {
        x_at_index = logit(target.index);
      }
    }
    finish_row(args, target, sum.total(), x_at_index, row, offsets[2], partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_strided_kernel(const __grid_constant__ CrossEntropyBackwardArgs args) {
  using acc_t = typename Loader::acc_t;
  const Operand* const operands[5] = {&args.input, &args.target, &args.grad_output,
                                      &args.grad_input, &args.grad_target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t offsets[5];
    row_offsets(args.rows, operands, row, offsets);
    const RowGradient<acc_t, kDense, Loader::kExact> gradient(args, row, offsets);
    const bool read = !gradient.target.ignored;
    const auto of_class = [&](acc_t x, int64_t c) {
      if (args.grad_input.data != nullptr) {
        Loader::store(args.grad_input, offsets[3] + c * args.grad_input_class_stride,
                      gradient.of_logit(x, c));
      }
      if (kDense && args.grad_target.data != nullptr) {
        store_operand<acc_t>(args.grad_target, offsets[4] + c * args.grad_target_class_stride,
                             gradient.of_target(x, c));
      }
    };
    const auto logit = [&](int64_t c) {
      return read ? Loader::load(args.input, offsets[0] + c * args.input_class_stride) : acc_t(0);
    };
    int64_t c = 0;
    for (; c + kClassUnroll <= args.num_classes; c += kClassUnroll) {
      acc_t x[kClassUnroll];
#pragma unroll
      for (int i = 0; i < kClassUnroll; ++i) {
        x[i] = logit(c + i);
      }
#pragma unroll
      for (int i = 0; i < kClassUnroll; ++i) {
        of_class(x[i], c + i);
      }
    }
    for (; c < args.num_classes; ++c) {
      of_class(logit(c), c);
    }
  }
}

// ------------------------------------------------- gradient of the class weights

// d loss / d w_c = sum over rows of g p'_c (lse - x_c); probability targets only.
template <typename acc_t>
struct WeightGradientSource {
  CrossEntropyBackwardArgs args;

  __device__ double operator()(int64_t c, int64_t row) const {
    const Operand* const operands[3] = {&args.input, &args.target, &args.grad_output};
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const RowGradient<acc_t, true, true> gradient(args, row, offsets);
    const acc_t x = load_operand<acc_t>(args.input, offsets[0] + c * args.input_class_stride);
    const acc_t p = gradient.target.probability(c);
    return p == acc_t(0) ? 0.0
                         : static_cast<double>(gradient.scale * p * gradient.softmax.surprise(x));
  }
};

struct WeightGradientSink {
  void* data;
  DType dtype;

  __device__ void operator()(int64_t c, int64_t /*split*/, double sum) const {
    store_as<double>(data, dtype, c, sum);
  }
};

// ------------------------------------------------------------- invalid targets

constexpr unsigned long long kNoInvalidRow = ~0ull;

static __global__ void first_invalid_target_kernel(const __grid_constant__ CrossEntropyArgs args,
                                                   unsigned long long* first) {
  const Operand* const operands[1] = {&args.target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t offsets[1];
    row_offsets(args.rows, operands, row, offsets);
    if (!RowTarget<float>(args, offsets[0]).valid) {
      // A minimum of integers: the same in any order. -1 is the largest unsigned value.
      atomicMin(first, static_cast<unsigned long long>(row));
    }
  }
}

// ------------------------------------------------------------------ launches

// What the row kernels take: contiguous classes, computed in the type of the logits.
bool rows_are_contiguous(const CrossEntropyArgs& args) {
  return args.input_class_stride == 1 && args.num_classes <= kMaxRowClasses &&
         args.acc_double == (args.input.dtype == DType::kFloat64);
}

int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Threads that share a row: up to a warp, or a block.
int team_size(const CrossEntropyArgs& args) {
  const int64_t bytes = args.num_classes * bytes_of(args.input.dtype);
  int team = 1;
  if (bytes <= kWarpRowBytes) {
    while (team < kWarpSize && team * kVectorBytes < bytes) {
      team *= 2;
    }
    return team;
  }
  team = kWarpSize;
  while (team < kMaxRowThreads && team * kVectorBytes * kVectorsPerThread < bytes) {
    team *= 2;
  }
  return team;
}

int block_size(int team) { return team > kWarpSize ? team : kThreads; }

int64_t row_blocks(const CrossEntropyArgs& args, int team, int64_t max_blocks = kMaxBlocks) {
  return std::clamp<int64_t>(ceil_div(args.rows.numel, block_size(team) / team), 1, max_blocks);
}

int64_t strided_blocks(const CrossEntropyArgs& args) { return row_blocks(args, 1); }

int64_t forward_blocks(const CrossEntropyArgs& args) {
  return rows_are_contiguous(args) ? row_blocks(args, team_size(args)) : strided_blocks(args);
}

template <typename Body>
void visit_dense(bool dense, Body&& body) {
  dense ? body(std::true_type{}) : body(std::false_type{});
}

// Calls body with the loader of a strided row.
template <typename Body>
void visit_loader(const CrossEntropyArgs& args, Body&& body) {
  if (args.acc_double && args.input.dtype != DType::kFloat64) {
    body(WideningLoader{});
    return;
  }
  visit_floating(args.input.dtype,
                 [&](auto type) { body(TypedLoader<typename decltype(type)::type>{}); });
}

template <typename scalar_t, bool kDense>
void forward_rows(const CrossEntropyForwardArgs& args, Partial* partials, const Finalize& finalize,
                  unsigned blocks, cudaStream_t stream) {
  const int team = team_size(args);
  const int threads = block_size(team);
  if constexpr (!kDense && sizeof(scalar_t) <= 4) {
    const int64_t bytes = args.num_classes * static_cast<int64_t>(sizeof(scalar_t));
    if (bytes > kWarpRowBytes && bytes <= kRegisterRowBytes) {
      cross_entropy_forward_register_kernel<scalar_t>
          <<<blocks, team, 0, stream>>>(args, partials, finalize);
      check_launch("cross_entropy_forward_register_kernel");
      return;
    }
  }
  if (team > kWarpSize) {
    cross_entropy_forward_kernel<scalar_t, kDense, true>
        <<<blocks, threads, 0, stream>>>(args, team, partials, finalize);
  } else {
    cross_entropy_forward_kernel<scalar_t, kDense, false>
        <<<blocks, threads, 0, stream>>>(args, team, partials, finalize);
  }
  check_launch("cross_entropy_forward_kernel");
}

}  // namespace

int64_t cross_entropy_forward_scratch(const CrossEntropyForwardArgs& args) {
  return args.reduction == Reduction::kNone ? 0 : forward_blocks(args) * kPartialDoubles;
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& args, double* scratch,
                                  Context context) {
  if (args.rows.numel == 0 && args.reduction == Reduction::kNone) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  const auto blocks = static_cast<unsigned>(forward_blocks(args));
  Finalize finalize;
  finalize.output = args.output.data;
  finalize.dtype = args.output.dtype;
  finalize.mean = args.reduction == Reduction::kMean;
  finalize.denominator_is_weight = true;
  finalize.mean_terms = args.mean_terms;
  visit_dense(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    if (rows_are_contiguous(args)) {
      visit_floating(args.input.dtype, [&](auto type) {
        forward_rows<typename decltype(type)::type, kDense>(args, partials, finalize, blocks,
                                                            stream);
      });
      return;
    }
    visit_loader(args, [&](auto loader) {
      cross_entropy_forward_strided_kernel<decltype(loader), kDense>
          <<<blocks, kThreads, 0, stream>>>(args, partials, finalize);
      check_launch("cross_entropy_forward_strided_kernel");
    });
  });
  if (args.reduction != Reduction::kNone) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
}

int64_t cross_entropy_backward_scratch(const CrossEntropyBackwardArgs& args) {
  return args.grad_weight == nullptr
             ? 0
             : ColumnReducePlan(args.num_classes, args.rows.numel).scratch(args.num_classes);
}

void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, double* scratch,
                                   Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  if (args.grad_weight != nullptr) {
    const WeightGradientSink sink{args.grad_weight, args.weight_dtype};
    if (args.acc_double) {
      column_reduce(WeightGradientSource<double>{args}, sink, args.num_classes, args.rows.numel,
                    scratch, stream);
    } else {
      column_reduce(WeightGradientSource<float>{args}, sink, args.num_classes, args.rows.numel,
                    scratch, stream);
    }
  }
  const bool elementwise = args.grad_input.data != nullptr || args.grad_target.data != nullptr;
  if (!elementwise || args.rows.numel == 0 || args.num_classes == 0) {
    return;
  }
  visit_dense(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    if (rows_are_contiguous(args) && args.grad_input_class_stride == 1) {
      visit_floating(args.input.dtype, [&](auto type) {
        const int team = team_size(args);
        cross_entropy_backward_kernel<typename decltype(type)::type, kDense>
            <<<static_cast<unsigned>(row_blocks(args, team, kMaxGrid)), block_size(team), 0,
               stream>>>(args, team);
        check_launch("cross_entropy_backward_kernel");
      });
      return;
    }
    visit_loader(args, [&](auto loader) {
      cross_entropy_backward_strided_kernel<decltype(loader), kDense>
          <<<static_cast<unsigned>(strided_blocks(args)), kThreads, 0, stream>>>(args);
      check_launch("cross_entropy_backward_strided_kernel");
    });
  });
}

void launch_first_invalid_target(const CrossEntropyArgs& args, int64_t* result, Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const first = reinterpret_cast<unsigned long long*>(result);
  const cudaError_t error = cudaMemsetAsync(first, 0xff, sizeof(kNoInvalidRow), stream);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("lossops: cudaMemsetAsync failed: ") +
                             cudaGetErrorString(error));
  }
  first_invalid_target_kernel<<<static_cast<unsigned>(strided_blocks(args)), kThreads, 0, stream>>>(
      args, first);
  check_launch("first_invalid_target_kernel");
}

}  // namespace lossops::cuda
