// Cross entropy, forward and backward.
//
// Rows whose classes are contiguous are read by a team of threads each: part of a warp
// for few classes, a block for many. Rows whose classes are strided, such as the pixels
// of an (N, C, H, W) tensor, take a thread each, so that a warp reads neighbouring rows.

#include <algorithm>
#include <cstdint>

#include "kernels/block_reduce.cuh"
#include "kernels/column_reduce.cuh"
#include "kernels/cross_entropy_columns.cuh"
#include "kernels/cross_entropy_few.cuh"
#include "kernels/cross_entropy_float_rows.cuh"
#include "kernels/cross_entropy_float_tile.cuh"
#include "kernels/cross_entropy_half_rows.cuh"
#include "kernels/cross_entropy_long_rows.cuh"
#include "kernels/cross_entropy_probability_rows.cuh"
#include "kernels/cross_entropy_row.cuh"
#include "kernels/cross_entropy_split_rows.cuh"
#include "kernels/cross_entropy_staged.cuh"
#include "kernels/cross_entropy_tile.cuh"
#include "kernels/device.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/grid_reduce.cuh"
#include "kernels/integers.h"
#include "kernels/launch.cuh"
#include "kernels/row_words.cuh"
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
// Rows of so few classes take a thread each, as strided rows do: what a team shares costs more than
// the classes. A gradient is written with better order by a team, from fewer classes on. Measured
// on an H200: 10 classes 6 times as fast, 100 classes forward 5 times, but with its gradient 0.6
// times.
constexpr int64_t kFewClassesForward = 128;
constexpr int64_t kFewClassesBackward = 32;
// Longer rows would overflow the 32-bit indices of a row's classes.
constexpr int64_t kMaxRowClasses = int64_t{1} << 30;
// Vectors of a row that a thread has in flight. Dense coefficients are bound by arithmetic, and
// their code is long.
template <bool kDense>
constexpr int kRowUnroll = kDense ? 2 : 4;
// Vectors of a row for each thread of a block, where the row is short enough: in two rounds, to
// share the cost of the reduction and of the row's target among more classes.
constexpr int kVectorsPerThread = 8;
// Vectors of a row that a thread holds in registers, and the bytes of the longest row that the
// threads of a block then hold. The same with and without a gradient, for the same bits.
template <typename scalar_t>
constexpr int kRegisterVectors = sizeof(scalar_t) == 2 ? 4 : 8;
template <typename scalar_t>
constexpr int64_t kRegisterRowBytes =
    int64_t{kMaxRowThreads} * kRegisterVectors<scalar_t> * kVectorBytes;
// What a kernel has of shared memory beside a row, at most.
constexpr int kStaticSharedBytes = 4096;
// A row of more than this would be alone on its multiprocessor, of the largest there are.
constexpr int64_t kMaxSharedRowBytes = 112 << 10;
// Classes of a strided row that a thread has in flight.
constexpr int kClassUnroll = 8;
// Blocks of a reduction: several waves on any GPU, and partials that one block folds in
// microseconds.
constexpr int64_t kMaxBlocks = 8192;
// Blocks of a grid without one.
constexpr int64_t kMaxGrid = 1 << 30;

// Blocks of kMaxRowThreads that shall fit a multiprocessor: while one row is reduced, the
// others load.
template <typename scalar_t>
constexpr int kMinRowBlocks = sizeof(scalar_t) <= 4 ? 4 : 1;

// The same for dense coefficients, which take more registers.
template <typename scalar_t>
constexpr int kMinDenseBlocks = sizeof(scalar_t) <= 4 ? 3 : 1;

// The same for rows in registers, whose loads are all in flight at once.
constexpr int kMinRegisterBlocks = 4;

template <typename acc_t, bool kDense>
using RowState = std::conditional_t<kDense, DenseOnlineSoftmax<acc_t>, OnlineSoftmax<acc_t>>;

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(OnlineSoftmax<acc_t>& state, acc_t x, acc_t shift,
                                              acc_t /*q*/) {
  state.template add_below_max<kExact>(x, shift);
}

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(DenseOnlineSoftmax<acc_t>& state, acc_t x,
                                              acc_t shift, acc_t q) {
  state.template add_below_max<kExact>(x, shift, q);
}

// The coefficients of a state that needs some.
template <typename State, int kCount, typename acc_t>
__device__ __forceinline__ void load_coefficients_for(const RowTarget<acc_t>& target,
                                                      int64_t first_class, acc_t (&q)[kCount]) {
  if constexpr (std::is_same_v<State, DenseOnlineSoftmax<acc_t>>) {
    load_coefficients(target, first_class, q);
  }
}

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
  acc_t q[kCount];
  load_coefficients_for<State>(target, first_class, q);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    add_below_max<kExact>(local, x[i], shift, q[i]);
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

// The gradient of one vector of a row. kDirect: LogitGradient::is_direct() says so.
template <bool kDirect = false, typename scalar_t, typename Gradient>
__device__ __forceinline__ Vector<scalar_t> gradient_of(const Gradient& gradient,
                                                        const Vector<scalar_t>& x,
                                                        int first_class) {
  constexpr int kSize = kVectorSize<scalar_t>;
  using acc_t = acc_type_t<scalar_t>;
  acc_t values[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    values[i] = to_acc<acc_t>(x.get(i));
  }
  if constexpr (Gradient::kIsDense) {
    acc_t q[kSize];
    load_coefficients(gradient.target, first_class, q);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = gradient.of_dense_logit(values[i], q[i]);
    }
  } else if constexpr (kDirect) {
    gradient.logit_gradient.replace_direct(values);
  } else {
    gradient.logit_gradient.replace(values);
  }
  Vector<scalar_t> results = pack<scalar_t>(values);
  // At the class index, where it is one of these: a branch for a few threads, not for all.
  const int at = static_cast<int>(gradient.target.index) - first_class;
  if (!Gradient::kIsDense && at >= 0 && at < kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i == at) {
        results.set(i, from_acc<scalar_t>(gradient.at_index));
      }
    }
  }
  return results;
}

// A thread's share of a row of contiguous classes that a block holds whole. The threads take
// vectors in turn, the last of which may be a part of one. What is not there is -inf.
template <typename scalar_t, int kVectors>
struct RegisterRow {
  static constexpr int kSize = kVectorSize<scalar_t>;
  Vector<scalar_t> vectors[kVectors];

  __device__ __forceinline__ RegisterRow(const scalar_t* row, int num_classes) {
    const int width = access_width(row);
    const int whole = num_classes / kSize;
    const int part = num_classes % kSize;
    Vector<scalar_t> nothing;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      nothing.set(i, from_acc<scalar_t>(-math::infinity<acc_type_t<scalar_t>>()));
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
          last.set(i, row[whole * kSize + i]);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (vector(u) == whole) {
          vectors[u] = last;
        }
      }
    }
  }

  // Writes the row's gradient.
  template <typename Gradient>
  __device__ __forceinline__ void write_gradient(const Gradient& gradient, const scalar_t* row,
                                                 scalar_t* grad_input, int num_classes) {
    const int width = access_width(grad_input);
    const int whole = num_classes / kSize;
    const int part = whole * kSize;
    if (part < num_classes &&
        whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      for (int c = part; c < num_classes; ++c) {
        grad_input[c] =
            from_acc<scalar_t>(gradient.of_logit(to_acc<acc_type_t<scalar_t>>(row[c]), c));
      }
    }
    if constexpr (sizeof(scalar_t) == 4) {
      // Where one formula does not do for all of a thread's logits, they are read once more: the
      // code of both for each vector would be too long for the instruction cache.
      if (!gradient.logit_gradient.is_direct(least(whole))) {
        const int row_width = access_width(row);
#pragma unroll 1
        for (int v = static_cast<int>(threadIdx.x); v < whole; v += static_cast<int>(blockDim.x)) {
          const Vector<scalar_t> x = load_vector_at(row + v * kSize, row_width);
          store_vector_at(grad_input + v * kSize, width, gradient_of(gradient, x, v * kSize));
        }
        return;
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (vector(u) < whole) {
        forget_conversions(vectors[u]);
        store_vector_at(
            vector_of(grad_input, u), width,
            gradient_of<sizeof(scalar_t) == 4>(gradient, vectors[u], vector(u) * kSize));
      }
    }
  }

 private:
  static __device__ __forceinline__ int vector(int u) {
    return static_cast<int>(threadIdx.x + u * blockDim.x);
  }
  // Unsigned: an address in one instruction.
  template <typename T>
  static __device__ __forceinline__ T* vector_of(T* row, int u) {
    return row + threadIdx.x * kSize + u * blockDim.x * kSize;
  }

  // Of the logits in whole vectors.
  __device__ __forceinline__ float least(int whole) const {
    float result = math::infinity<float>();
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (vector(u) < whole) {
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = to_acc<float>(vectors[u].get(i));
        }
        result = ::fminf(least_of(values), result);
      }
    }
    return result;
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const scalar_t* row, int whole,
                                       const Vector<scalar_t>& nothing) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      vectors[u] = vector(u) < whole ? load_vector_at(vector_of(row, u), kWidth) : nothing;
    }
  }
};

// cache: leaves the row's whole vectors there, for the thread that reads them here; may be null.
template <typename State, typename scalar_t, int kUnroll, typename acc_t = acc_type_t<scalar_t>>
__device__ __forceinline__ State reduce_row(RowReader<scalar_t, kUnroll>& reader,
                                            const RowTarget<acc_t>& target, scalar_t* cache) {
  constexpr int kSize = kVectorSize<scalar_t>;
  RowSum<State> row;
  for (; reader.more(); reader.advance()) {
    acc_t max = -math::infinity<acc_t>();
    reader.for_each_vector([&](int u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        max = math::max_number(to_acc<acc_t>(reader.loaded[u].get(i)), max);
      }
    });
    row.raise_max(max);
    const acc_t shift = softmax_shift(row.sums.max);
    State local = same_max(row.sums);
    reader.for_each_vector([&](int u) {
      if (cache != nullptr) {
        store_vector(cache, reader.vector(u), reader.loaded[u]);
      }
      forget_conversions(reader.loaded[u]);
      acc_t q[kSize];
      load_coefficients_for<State>(target, reader.first_class(u), q);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        add_below_max<kExactExponentials<scalar_t>>(local, to_acc<acc_t>(reader.loaded[u].get(i)),
                                                    shift, q[i]);
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

// Writes the gradient of the team's row.
template <typename scalar_t, int kUnroll, typename Gradient>
__device__ __forceinline__ void write_row_gradient(const scalar_t* row, int num_classes, int lane,
                                                   int team, const Gradient& gradient,
                                                   scalar_t* grad_input, const scalar_t* cache) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  if (!gradient.target.has_loss()) {
    const auto value = from_acc<scalar_t>(gradient.without_loss());
    for (int c = lane; c < num_classes; c += team) {
      grad_input[c] = value;
    }
    return;
  }
  const int width = access_width(grad_input);
  const auto write = [&](int vector, const Vector<scalar_t>& x) {
    store_vector_at(grad_input + vector * kSize, width, gradient_of(gradient, x, vector * kSize));
  };
  if (cache != nullptr) {
#pragma unroll 2
    for (int vector = lane; vector < num_classes / kSize; vector += team) {
      write(vector, load_vector(cache, vector));
    }
  } else {
    RowReader<scalar_t, kUnroll> reader(row, num_classes, lane, team);
    for (; reader.more(); reader.advance()) {
      reader.for_each_vector([&](int u) { write(reader.vector(u), reader.loaded[u]); });
    }
  }
  for (int c = num_classes / kSize * kSize + lane; c < num_classes; c += team) {
    grad_input[c] = from_acc<scalar_t>(gradient.of_logit(to_acc<acc_t>(row[c]), c));
  }
}

// ---------------------------------------------------- rows of contiguous classes

// Blocks whose rows leave a gradient that shall fit a multiprocessor: as rows of 64 KB do.
constexpr int kMinGradientBlocks = 3;

// kTeamIsBlock: one row a block at a time; else `team` lanes, a power of two, a row. kGradient:
// writes the row's gradient too, and keeps the row for that in shared memory where use_cache says
// so; else it is read again.
template <typename scalar_t, bool kDense, bool kTeamIsBlock, bool kGradient>
__global__ void __launch_bounds__(kTeamIsBlock ? kMaxRowThreads : kThreads,
                                  !kTeamIsBlock ? 1
                                  : kGradient   ? kMinGradientBlocks
                                  : kDense      ? kMinDenseBlocks<scalar_t>
                                                : kMinRowBlocks<scalar_t>)
    cross_entropy_forward_kernel(const __grid_constant__ CrossEntropyForwardArgs args, int team,
                                 bool use_cache, Denominator denominator, Partial* partials,
                                 Finalize finalize) {
  extern __shared__ uint4 row_cache[];
  using acc_t = acc_type_t<scalar_t>;
  using State = RowState<acc_t, kDense>;
  const int lane =
      kTeamIsBlock ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) & (team - 1);
  const int rows_per_block = kTeamIsBlock ? 1 : kThreads / team;
  const int first = kTeamIsBlock ? 0 : static_cast<int>(threadIdx.x) / team;
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  auto* const cache =
      kTeamIsBlock && kGradient && use_cache ? reinterpret_cast<scalar_t*>(row_cache) : nullptr;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<acc_t>, NoScale> unit(args, denominator);
  unit.wait(args, denominator);
  const acc_t scale = unit.get();
  Partial partial;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * rows_per_block; base < args.rows.numel;
       base += static_cast<int64_t>(gridDim.x) * rows_per_block) {
    const bool exists = base + first < args.rows.numel;
    // A team past the end takes part in the shuffles with the last row.
    const int64_t row = exists ? base + first : args.rows.numel - 1;
    int64_t offsets[4];
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
      state = reduce_row<State>(reader, target, cache);
    }
    state = kTeamIsBlock ? block_reduce(state) : warp_reduce(state, team);
    if (lane == 0 && exists) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
    if constexpr (kGradient) {
      const auto summary = share_summary<kTeamIsBlock>(summarize(state, x_at_index), team);
      if (exists) {
        const RowGradient<acc_t, kDense, kExactExponentials<scalar_t>> gradient(args, target,
                                                                                summary, scale);
        write_row_gradient<scalar_t, kRowUnroll<kDense>>(
            logits, static_cast<int>(args.num_classes), lane, team, gradient,
            static_cast<scalar_t*>(args.grad_input.data) + offsets[3], cache);
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

// Rows short enough for the registers of a block: all of a row is in flight at once, and its
// maximum is known before the first exponential. One row a block at a time.
template <typename scalar_t, bool kGradient>
__global__ void __launch_bounds__(kMaxRowThreads, kMinRegisterBlocks)
    cross_entropy_forward_register_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                          Denominator denominator, Partial* partials,
                                          Finalize finalize) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  constexpr int kVectors = kRegisterVectors<scalar_t>;
  const bool first = threadIdx.x == 0;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<acc_t>, NoScale> unit(args, denominator);
  Partial partial;
  for (int64_t row = blockIdx.x; row < args.rows.numel; row += gridDim.x) {
    int64_t offsets[4];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    RegisterRow<scalar_t, kVectors> loaded(logits, static_cast<int>(args.num_classes));
    if (row == blockIdx.x) {
      unit.wait(args, denominator);
    }
    const RowTarget<acc_t> target(args, offsets[1]);
    acc_t x_at_index = 0;
    if (first && target.has_loss()) {
      x_at_index = to_acc<acc_t>(logits[target.index]);
    }
    OnlineSoftmax<acc_t> state;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        state.max = math::max_number(to_acc<acc_t>(loaded.vectors[u].get(i)), state.max);
      }
    }
    const acc_t shift = softmax_shift(state.max);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      OnlineSoftmax<acc_t> local = same_max(state);
      forget_conversions(loaded.vectors[u]);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        local.template add_below_max<kExactExponentials<scalar_t>>(
            to_acc<acc_t>(loaded.vectors[u].get(i)), shift);
      }
      state.add(local);
    }
    state = block_reduce(state);
    if (first) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
    if constexpr (kGradient) {
      const auto summary = share_summary<true>(summarize(state, x_at_index), 0);
      const RowGradient<acc_t, false, kExactExponentials<scalar_t>> gradient(args, target, summary,
                                                                             unit.get());
      auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data) + offsets[3];
      if (target.has_loss()) {
        loaded.write_gradient(gradient, logits, grad_input, static_cast<int>(args.num_classes));
      } else {
        const auto value = from_acc<scalar_t>(gradient.without_loss());
        for (int c = static_cast<int>(threadIdx.x); c < args.num_classes; c += blockDim.x) {
          grad_input[c] = value;
        }
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

// Of the threads that share a row: a power of two of a warp's lanes, or the block.
__device__ __forceinline__ void team_sync(int team) {
  if (team > kWarpSize) {
    __syncthreads();
  } else {
    const unsigned first = threadIdx.x % kWarpSize & ~static_cast<unsigned>(team - 1);
    __syncwarp((kAllLanes >> (kWarpSize - team)) << first);
  }
}

template <typename scalar_t, bool kDense>
__global__ void __launch_bounds__(kMaxRowThreads)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyBackwardArgs args, int team) {
  using acc_t = acc_type_t<scalar_t>;
  wait_for_previous_kernel();
  if (kept_is_right(args)) {
    return;
  }
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
    const RowTarget<acc_t> target(args, offsets[1]);
    const RowGradient<acc_t, kDense, kExactExponentials<scalar_t>> gradient(
        args, target, load_summary<kDense>(args, target, row, offsets[0]),
        row_scale<acc_t>(args, offsets[2]));
    if (args.grad_input.data == args.input.data) {
      // The logit of the class index is read: it may be overwritten.
      team_sync(team);
    }
    if (args.grad_target.data == nullptr) {
      write_row_gradient<scalar_t, kRowUnroll<kDense>>(logits, static_cast<int>(args.num_classes),
                                                       lane, team, gradient, grad_input, nullptr);
      continue;
    }
    for (int c = lane; c < args.num_classes; c += team) {
      const acc_t x = to_acc<acc_t>(logits[c]);
      if (args.grad_input.data != nullptr) {
        grad_input[c] = from_acc<scalar_t>(gradient.of_logit(x, c));
      }
      if constexpr (kDense) {
        store_operand<acc_t>(args.grad_target, offsets[4] + c * args.grad_target_class_stride,
                             gradient.of_target(x, c));
      }
    }
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

// Twice over the row, in the order of the kernel for columns: where rows lie does not change a bit.
template <bool kExact, typename Logit>
__device__ __forceinline__ IndexRow reduce_strided_row(Logit&& logit, int64_t num_classes,
                                                       int64_t index, float x_at_index) {
  // The last class takes the place of the class index.
  const int64_t count = num_classes - 1;
  const auto other = [&](int64_t c) { return logit(c == index ? count : c); };
  const auto sum_of = [&](auto&& term) {
    std::conditional_t<kExact, ExactSum, PlainSum> others;
    float last = 0;
    const auto sum_of_classes = [&](int64_t c) {
      float values[kColumnUnroll];
#pragma unroll
      for (int i = 0; i < kColumnUnroll; ++i) {
        values[i] = term(other(c + i));
      }
      return pairwise_sum(values);
    };
    int64_t c = 0;
    for (; c + 2 * kColumnUnroll <= count; c += 2 * kColumnUnroll) {
      const float first = sum_of_classes(c);
      others.add(first + sum_of_classes(c + kColumnUnroll));
    }
    if (c + kColumnUnroll <= count) {
      last = sum_of_classes(c);
      c += kColumnUnroll;
    }
    for (; c < count; ++c) {
      last += term(other(c));
    }
    others.add(last);
    return others.total();
  };
  if constexpr (!kExact) {
    float reach = ::fabsf(x_at_index);
    const float plain_others = sum_of([&](float x) {
      reach = math::max_number(::fabsf(x), reach);
      return plain_exp(x);
    });
    if (IndexRow::may_be_plain(reach, plain_others)) {
      return IndexRow::plain(plain_others);
    }
  }
  // Of NaN alone, and of one class, there is no maximum.
  float max = -math::infinity<float>();
#pragma unroll 8
  for (int64_t c = 0; c < count; ++c) {
    max = math::max_number(other(c), max);
  }
  const RowTerms<kExact> terms(max);
  return IndexRow::of(terms, max, sum_of(terms), x_at_index);
}

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_strided_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                         Partial* partials, Finalize finalize) {
  using acc_t = typename Loader::acc_t;
  const Operand* const operands[3] = {&args.input, &args.target, &args.output};
  let_next_kernel_start();
  Partial partial;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t offsets[3];
    row_offsets(args.rows, operands, row, offsets);
    const RowTarget<acc_t> target(args, offsets[1]);
    RowState<acc_t, kDense> state;
    acc_t x_at_index = 0;
    if (target.has_loss()) {
      const auto logit = [&](int64_t c) {
        return Loader::load(args.input, offsets[0] + c * args.input_class_stride);
      };
      if constexpr (!kDense && std::is_same_v<acc_t, float>) {
        x_at_index = logit(target.index);
        const IndexRow reduced =
            reduce_strided_row<Loader::kExact>(logit, args.num_classes, target.index, x_at_index);
        const float weight = target.index_weight();
        const float loss = reduced.finish<!Loader::kExact>(x_at_index, 1.0f, weight).loss;
        record_row(
            args, loss, weight, reduced.max, reduced.rest, row, [&](int64_t) { return offsets[2]; },
            partial);
        continue;
      }
      RowSum<RowState<acc_t, kDense>> sum;
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
      state = sum.total();
      if constexpr (!kDense) {
        x_at_index = logit(target.index);
      }
    }
    finish_row(args, target, state, x_at_index, row, offsets[2], partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

template <typename Loader, bool kDense>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_strided_kernel(const __grid_constant__ CrossEntropyBackwardArgs args) {
  using acc_t = typename Loader::acc_t;
  wait_for_previous_kernel();
  if (kept_is_right(args)) {
    return;
  }
  const Operand* const operands[5] = {&args.input, &args.target, &args.grad_output,
                                      &args.grad_input, &args.grad_target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kThreads) {
    int64_t offsets[5];
    row_offsets(args.rows, operands, row, offsets);
    const RowTarget<acc_t> target(args, offsets[1]);
    const RowGradient<acc_t, kDense, Loader::kExact> gradient(
        args, target, load_summary<kDense>(args, target, row, offsets[0]),
        row_scale<acc_t>(args, offsets[2]));
    const bool read = !target.ignored;
    const auto of_class = [&](acc_t x, int64_t c) {
      if (args.grad_input.data != nullptr) {
        Loader::store(args.grad_input, offsets[3] + c * args.grad_input_class_stride,
                      target.has_loss() ? gradient.of_logit(x, c) : gradient.without_loss());
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
    const RowTarget<acc_t> target(args, offsets[1]);
    const RowGradient<acc_t, true, true> gradient(args, target,
                                                  load_summary<true>(args, target, row, offsets[0]),
                                                  row_scale<acc_t>(args, offsets[2]));
    const acc_t x = load_operand<acc_t>(args.input, offsets[0] + c * args.input_class_stride);
    const acc_t p = target.probability(c);
    return p == acc_t(0) ? 0.0
                         : static_cast<double>(gradient.scale * p * gradient.softmax.surprise(x));
  }
};

struct WeightGradientSink {
  void* data;
  DType dtype;

  __device__ void operator()(int64_t c, double sum) const { store_as<double>(data, dtype, c, sum); }
};

// ------------------------------------------------------- the mean's denominator

constexpr int kDenominatorThreads = 512;
static_assert(kDenominatorThreads >= Denominator::kMost, "Denominator::leave()");
// Targets that a thread has in flight. One at a time took 100 us for 4 million rows.
constexpr int kDenominatorUnroll = 8;

static __global__ void __launch_bounds__(kDenominatorThreads)
    cross_entropy_denominator_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                     bool targets_in_line, double* partials) {
  const Operand* const operands[1] = {&args.target};
  const int64_t threads = int64_t{gridDim.x} * kDenominatorThreads;
  int64_t row = int64_t{blockIdx.x} * kDenominatorThreads + threadIdx.x;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Partial total;
  if (targets_in_line) {
    const int64_t stride = args.target.strides[0];
    const bool counts = args.weight == nullptr;
    int64_t count = 0;
    for (; row + (kDenominatorUnroll - 1) * threads < args.rows.numel;
         row += kDenominatorUnroll * threads) {
      int64_t indices[kDenominatorUnroll];
      load_class_indices(args.target, row * stride, threads * stride, indices);
#pragma unroll
      for (int i = 0; i < kDenominatorUnroll; ++i) {
        if (counts) {
          count += indices[i] == args.ignore_index ? 0 : 1;
        } else {
          total.weight += RowTarget<float>(args, indices[i], 0).template mean_weight<double>();
        }
      }
    }
    total.weight += static_cast<double>(count);
  }
  for (; row < args.rows.numel; row += threads) {
    int64_t offsets[1];
    row_offsets(args.rows, operands, row, offsets);
    total.weight += RowTarget<float>(args, offsets[0]).template mean_weight<double>();
  }
  total = block_reduce(total);
  Denominator::leave(total.weight, partials);
}

[[maybe_unused]] constexpr int kIndexUnroll = 8;  // pairs that a thread has in flight

// The same, and checked_index() of every row in a byte. The kernel after it then need not read the
// class indices again: 8 bytes a row are a tenth of 10 classes of fp32, and of 21 of fp16.
static __global__ void __launch_bounds__(kDenominatorThreads)
    cross_entropy_indices_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                 bool in_vectors, bool in_line, int8_t* indices, double* partials) {
#if LOSSOPS_HOPPER_CODE
  wait_for_previous_kernel();
  let_next_kernel_start();
  const auto* const targets = static_cast<const int64_t*>(args.target.data);
  const auto* const pairs = reinterpret_cast<const longlong2*>(targets);
  const int64_t threads = int64_t{gridDim.x} * kDenominatorThreads;
  const int64_t thread = int64_t{blockIdx.x} * kDenominatorThreads + threadIdx.x;
  const int64_t num_pairs = in_vectors ? args.rows.numel / 2 : 0;
  __shared__ float weights[kMaxIndexClasses];
  const bool weighted = args.weight != nullptr;
  if (weighted) {
    if (threadIdx.x < args.num_classes) {
      weights[threadIdx.x] = class_weight<float>(args, threadIdx.x);
    }
    __syncthreads();
  }
  int counted = 0;
  Partial total;
  const auto check = [&](int64_t target) {
    const int index = checked_index(args, target);
    counted += index == kIgnoredRow ? 0 : 1;
    if (weighted && index >= 0) {
      total.weight += static_cast<double>(weights[index]);
    }
    return static_cast<signed char>(index);  // char has no sign on ARM
  };
#pragma unroll 1
  for (int64_t pair = thread; pair < num_pairs; pair += kIndexUnroll * threads) {
    longlong2 loaded[kIndexUnroll];
#pragma unroll
    for (int i = 0; i < kIndexUnroll; ++i) {
      if (pair + i * threads < num_pairs) {
        loaded[i] = pairs[pair + i * threads];
      }
    }
#pragma unroll
    for (int i = 0; i < kIndexUnroll; ++i) {
      if (pair + i * threads < num_pairs) {
        reinterpret_cast<char2*>(indices)[pair + i * threads] = {check(loaded[i].x),
                                                                 check(loaded[i].y)};
      }
    }
  }
  int64_t row = 2 * num_pairs + thread;
  if (in_line) {
    const int64_t stride = args.target.strides[0];
#pragma unroll 1
    for (; row + (kIndexUnroll - 1) * threads < args.rows.numel; row += kIndexUnroll * threads) {
      int64_t loaded[kIndexUnroll];
      load_class_indices(args.target, row * stride, threads * stride, loaded);
#pragma unroll
      for (int i = 0; i < kIndexUnroll; ++i) {
        indices[row + i * threads] = check(loaded[i]);
      }
    }
  }
#pragma unroll 1
  for (; row < args.rows.numel; row += threads) {
    indices[row] = check(load_class_index(args.target, row_offset(args.rows, args.target, row)));
  }
  const int64_t after = args.rows.numel + thread;
  if (after < (args.rows.numel + kIndexPadding - 1) / kIndexPadding * kIndexPadding) {
    indices[after] = kIgnoredRow;
  }
  if (!weighted) {
    total.weight = static_cast<double>(counted);
  }
  total = block_reduce(total);
  Denominator::leave(total.weight, partials);
#endif
}

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
bool rows_are_contiguous(const CrossEntropyArgs& args, int64_t few_classes) {
  return args.input_class_stride == 1 && args.num_classes <= kMaxRowClasses &&
         args.num_classes > few_classes && args.acc_double == (args.input.dtype == DType::kFloat64);
}

// Threads that share a row: up to a warp, or a block.
int team_size(const CrossEntropyArgs& args) {
  const int64_t bytes = args.num_classes * element_size(args.input.dtype);
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

// Whether a block can hold a row in its registers.
bool row_fits_registers(const CrossEntropyArgs& args) {
  const int64_t bytes = args.num_classes * element_size(args.input.dtype);
  const int64_t most = args.input.dtype == DType::kFloat64   ? 0
                       : args.input.dtype == DType::kFloat32 ? kRegisterRowBytes<float>
                                                             : kRegisterRowBytes<half_t>;
  return rows_are_contiguous(args, kFewClassesForward) && !args.dense() &&
         bytes >= kMinStagedBytes && bytes <= most;
}

int64_t forward_blocks(const CrossEntropyArgs& args) {
  if (!rows_are_contiguous(args, kFewClassesForward)) {
    return strided_blocks(args);
  }
  return row_fits_registers(args) ? std::clamp<int64_t>(args.rows.numel, 1, kMaxBlocks)
                                  : row_blocks(args, team_size(args));
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

// Shared memory for a row, or 0 where this device has too little for two.
template <typename Kernel>
int64_t row_cache_bytes(const CrossEntropyArgs& args, Kernel* kernel) {
  const int64_t row = args.num_classes * element_size(args.input.dtype);
  const int64_t bytes = ceil_div(row, kVectorBytes) * kVectorBytes;
  int device = 0;
  int limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  // Asked for as much as any row has: another thread may be about to launch it with more.
  const int64_t most = std::min<int64_t>(limit - kStaticSharedBytes, kMaxSharedRowBytes);
  if (bytes > most || cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(most)) != cudaSuccess) {
    return 0;
  }
  return bytes;
}

template <typename scalar_t, bool kDense, bool kGradient>
void forward_rows(const CrossEntropyForwardArgs& args, const Denominator& denominator,
                  Partial* partials, const Finalize& finalize, int64_t blocks,
                  cudaStream_t stream) {
  const int team = team_size(args);
  if constexpr (!kDense && sizeof(scalar_t) <= 4) {
    if (row_fits_registers(args)) {
      const int64_t bytes = args.num_classes * static_cast<int64_t>(sizeof(scalar_t));
      int threads = kWarpSize;
      while (int64_t{threads} * kRegisterVectors<scalar_t> * kVectorBytes < bytes) {
        threads *= 2;
      }
      launch_kernel("cross_entropy_forward_register_kernel",
                    cross_entropy_forward_register_kernel<scalar_t, kGradient>,
                    {blocks, threads, 0, 1, denominator.is_computed()}, stream, args, denominator,
                    partials, finalize);
      return;
    }
  }
  if (team > kWarpSize) {
    const auto kernel = cross_entropy_forward_kernel<scalar_t, kDense, true, kGradient>;
    const int64_t cache = kGradient ? row_cache_bytes(args, kernel) : 0;
    launch_kernel("cross_entropy_forward_kernel", kernel, {blocks, team, cache}, stream, args, team,
                  cache > 0, denominator, partials, finalize);
  } else {
    launch_kernel("cross_entropy_forward_kernel",
                  cross_entropy_forward_kernel<scalar_t, kDense, false, kGradient>,
                  {blocks, block_size(team)}, stream, args, team, false, denominator, partials,
                  finalize);
  }
}

// 0: every block of the forward kernel adds up the weights of so few rows itself, which spares a
// launch; rows of probabilities are only counted. Measured on an H200, whose launches overlap, 1000
// rows of 10, 100 and 1000 classes of fp32: steps of 21, 22 and 33 us take 17, 19 and 19 with it.
int denominator_blocks(const CrossEntropyForwardArgs& args) {
  const int64_t few_rows = current_device_limits().overlaps ? 256 : 1024;
  return args.target_is_probability || args.rows.numel <= few_rows
             ? 0
             : static_cast<int>(std::min<int64_t>(ceil_div(args.rows.numel, kDenominatorThreads),
                                                  Denominator::kMost));
}

// Rows that are faster in registers than staged, in forward by 6 to 12 %.
bool rows_are_for_registers(const CrossEntropyArgs& args) {
  return args.input.dtype == DType::kFloat32 && args.num_classes % kVectorSize<float> == 0 &&
         row_fits_registers(args);
}

// The kernel for these rows, of those that read them once; if there is none, the kernels below take
// them. It depends on the logits, not on whether there is a gradient: the bits of a loss do not
// either.
struct ReadOncePlan {
  enum class Kernel : int8_t {
    kNone,
    kFloatRows,
    kColumns,
    kFew,
    kHalfRows,
    kFloatTiles,
    kTiles,
    kProbabilityRows,
    kLongRows,
    kSplitRows,
    kStaged
  };
  Kernel kernel = Kernel::kNone;
  int64_t blocks = 0;
  // The kernel's own.
  ColumnPlan columns;
  FewPlan few;
  FloatRowPlan float_rows;
  HalfRowPlan half_rows;
  ProbabilityRowPlan probability_rows;
  FloatTilePlan float_tiles;
  TilePlan tiles;
  LongRowPlan long_rows;
  SplitRowPlan split_rows;
  StagedPlan staged;

  explicit ReadOncePlan(const CrossEntropyForwardArgs& args) {
    if (args.rows.numel == 0 || args.num_classes == 0 || args.input.dtype == DType::kFloat64 ||
        args.num_classes > kMaxRowClasses) {
      return;
    }
    const auto choose = [&](Kernel choice, const auto& plan) {
      if (plan.threads > 0) {
        kernel = choice;
        blocks = plan.blocks;
      }
      return plan.threads > 0;
    };
    if (choose(Kernel::kFloatRows, float_rows = plan_float_rows(args)) ||
        rows_are_for_registers(args) || choose(Kernel::kColumns, columns = plan_columns(args)) ||
        choose(Kernel::kFew, few = plan_few_classes(args)) ||
        choose(Kernel::kHalfRows, half_rows = plan_half_rows(args)) ||
        choose(Kernel::kFloatTiles, float_tiles = plan_float_tiles(args)) ||
        choose(Kernel::kTiles, tiles = plan_tiles(args))) {
      return;
    }
    // The others cut rows as staged rows are cut, for the same bits.
    staged = plan_staged_rows(args);
    if (choose(Kernel::kProbabilityRows, probability_rows = plan_probability_rows(args, staged)) ||
        choose(Kernel::kLongRows, long_rows = plan_long_rows(args, staged)) ||
        choose(Kernel::kSplitRows, split_rows = plan_split_rows(args, staged))) {
      return;
    }
    choose(Kernel::kStaged, staged);
  }

  bool exists() const { return kernel != Kernel::kNone; }

  // Of class indices that are checked before. Images gain where they are read before anyway, for
  // the mean.
  int64_t index_bytes(const CrossEntropyForwardArgs& args) const {
    const bool reads_bytes =
        kernel == Kernel::kFew || (kernel == Kernel::kColumns && current_device_limits().hopper &&
                                   args.reduction == Reduction::kMean);
    return reads_bytes && args.grad_input.data != nullptr
               ? ceil_div(args.rows.numel, int64_t{kIndexPadding}) * kIndexPadding
               : 0;
  }

  // Whether the kernel can write args.grad_input, too.
  bool takes_gradient(const CrossEntropyForwardArgs& args) const {
    switch (kernel) {
      case Kernel::kColumns:
        return lies_in_columns(args, args.grad_input, args.grad_input_class_stride);
      case Kernel::kFloatRows:
      case Kernel::kHalfRows:
      case Kernel::kProbabilityRows:
        return args.grad_input_class_stride == 1;
      case Kernel::kStaged:
        return gradient_lies_as_input(args);
      default:
        return true;
    }
  }

  // Whether it can compute args.grad_input again, for another grad_output, and so leaves a gradient
  // without row_stats. Of short rows these would be a part of what a step writes.
  bool computes_again(const CrossEntropyForwardArgs& args) const {
    const bool can = kernel == Kernel::kColumns || kernel == Kernel::kFew ||
                     kernel == Kernel::kFloatTiles || kernel == Kernel::kTiles;
    return can && args.grad_input.data != nullptr && takes_gradient(args);
  }

  // grad_output: where the gradient is computed again, and nothing else is left.
  void launch(const CrossEntropyForwardArgs& args, const Denominator& denominator,
              Partial* partials, const Finalize& finalize, cudaStream_t stream,
              const GradOutput& grad_output = {}) const {
    switch (kernel) {
      case Kernel::kColumns:
        launch_columns(args, columns, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kFew:
        launch_few_classes(args, few, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kFloatRows:
        launch_float_rows(args, float_rows, denominator, partials, finalize, stream);
        break;
      case Kernel::kHalfRows:
        launch_half_rows(args, half_rows, denominator, partials, finalize, stream);
        break;
      case Kernel::kProbabilityRows:
        launch_probability_rows(args, probability_rows, partials, finalize, stream);
        break;
      case Kernel::kFloatTiles:
        launch_float_tiles(args, float_tiles, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kTiles:
        launch_tiles(args, tiles, denominator, grad_output, partials, finalize, stream);
        break;
      case Kernel::kLongRows:
        launch_long_rows(args, long_rows, staged, partials, finalize, stream);
        break;
      case Kernel::kSplitRows:
        launch_split_rows(args, split_rows, denominator, partials, finalize, stream);
        break;
      default:
        launch_staged_rows(args, staged, denominator, partials, finalize, stream);
    }
  }
};

// Whether one kernel computes losses and gradients. fp64 is not worth the code.
bool one_pass_gradient(const CrossEntropyForwardArgs& args) {
  return args.grad_input.data != nullptr && rows_are_contiguous(args, kFewClassesForward) &&
         args.grad_input_class_stride == 1 && !args.acc_double && args.num_classes > 0;
}

struct ForwardPlan {
  CrossEntropyForwardArgs args;  // grad_input only where the same kernel writes it
  ReadOncePlan read_once;
  int64_t blocks;
};

ForwardPlan forward_plan(CrossEntropyForwardArgs args) {
  ReadOncePlan plan(args);
  if (args.grad_input.data != nullptr &&
      !(plan.exists() ? plan.takes_gradient(args) : one_pass_gradient(args))) {
    args.grad_input.data = nullptr;
    plan = ReadOncePlan(args);
  }
  return {args, plan, plan.exists() ? plan.blocks : forward_blocks(args)};
}

// The partial sums of the denominator, and class indices in bytes.
int64_t denominator_doubles(const ForwardPlan& plan) {
  const int64_t count = denominator_blocks(plan.args);
  const int64_t indices = count > 0 ? plan.read_once.index_bytes(plan.args) : 0;
  return Denominator::doubles(count) + indices / int64_t{sizeof(double)};
}

// Of a gradient that forward left: false if its kernel cannot compute it again.
bool launch_again(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  CrossEntropyForwardArgs forward = forward_of(args);
  const ReadOncePlan plan(forward);
  if (!plan.computes_again(forward)) {
    return false;
  }
  Denominator denominator;
  if (args.reduction == Reduction::kMean) {
    denominator.partials = args.mean_terms;  // the sum of one
    denominator.count = 1;
    forward.mean_terms = const_cast<double*>(args.mean_terms);  // written as it is
  }
  plan.launch(forward, denominator, nullptr, Finalize(), stream,
              {args.grad_output.data, args.grad_output.dtype});
  return true;
}

// The kernels that read rows as they compute.
void launch_forward_rows(const CrossEntropyForwardArgs& args, bool one_pass,
                         const Denominator& denominator, Partial* partials,
                         const Finalize& finalize, int64_t blocks, cudaStream_t stream) {
  visit_bool(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    if (rows_are_contiguous(args, kFewClassesForward)) {
      visit_floating(args.input.dtype, [&](auto type) {
        using scalar_t = typename decltype(type)::type;
        if constexpr (sizeof(scalar_t) <= 4) {
          if (one_pass) {
            forward_rows<scalar_t, kDense, true>(args, denominator, partials, finalize, blocks,
                                                 stream);
            return;
          }
        }
        forward_rows<scalar_t, kDense, false>(args, denominator, partials, finalize, blocks,
                                              stream);
      });
      return;
    }
    visit_loader(args, [&](auto loader) {
      launch_kernel("cross_entropy_forward_strided_kernel",
                    cross_entropy_forward_strided_kernel<decltype(loader), kDense>,
                    {blocks, kThreads}, stream, args, partials, finalize);
    });
  });
}

}  // namespace

int64_t cross_entropy_forward_scratch(const CrossEntropyForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  const ForwardPlan plan = forward_plan(args);
  return plan.blocks * kPartialDoubles + denominator_doubles(plan);
}

void launch_cross_entropy_forward(const CrossEntropyForwardArgs& all_args, double* scratch,
                                  Context context) {
  if (all_args.rows.numel == 0 && all_args.reduction == Reduction::kNone) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  const auto [args, plan, blocks] = forward_plan(all_args);
  Finalize finalize;
  finalize.output = args.output.data;
  finalize.dtype = args.output.dtype;
  finalize.mean = args.reduction == Reduction::kMean;
  finalize.denominator_is_weight = true;
  finalize.mean_terms = args.mean_terms;
  const bool one_pass = args.grad_input.data != nullptr;
  Denominator denominator;
  const bool indices = plan.index_bytes(args) > 0;
  if (one_pass && (finalize.mean || indices)) {
    denominator.count = denominator_blocks(args);
    if (denominator.count > 0) {
      double* const sums = scratch + blocks * kPartialDoubles;
      denominator.partials = sums;
      if (indices) {
        denominator.indices =
            reinterpret_cast<int8_t*>(sums + Denominator::doubles(denominator.count));
        launch_kernel("cross_entropy_indices_kernel", cross_entropy_indices_kernel,
                      {denominator.count, kDenominatorThreads, 0, 1, true}, stream, args,
                      targets_are_in_vectors(args), targets_are_in_line(args),
                      const_cast<int8_t*>(denominator.indices), sums);
      } else {
        launch_kernel("cross_entropy_denominator_kernel", cross_entropy_denominator_kernel,
                      {denominator.count, kDenominatorThreads, 0, 1, true}, stream, args,
                      targets_are_in_line(args), sums);
      }
    }
    finalize.denominator_is_known = finalize.mean;
  }
  if (plan.exists()) {
    plan.launch(args, denominator, partials, finalize, stream);
  } else {
    launch_forward_rows(args, one_pass, denominator, partials, finalize, blocks, stream);
  }
  if (args.reduction != Reduction::kNone) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
  if (all_args.grad_input.data != nullptr && !one_pass) {
    launch_cross_entropy_backward(unit_backward(all_args), nullptr, context);
  }
}

bool cross_entropy_needs_row_stats(const CrossEntropyForwardArgs& args) {
  return !ReadOncePlan(args).computes_again(args);
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
  if (args.kept && launch_again(args, stream)) {
    return;
  }
  visit_bool(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    if (rows_are_contiguous(args, kFewClassesBackward) && args.grad_input_class_stride == 1) {
      visit_floating(args.input.dtype, [&](auto type) {
        const int team = team_size(args);
        const int64_t max_blocks = args.kept ? most_blocks_of_kept(block_size(team)) : kMaxGrid;
        launch_kernel("cross_entropy_backward_kernel",
                      cross_entropy_backward_kernel<typename decltype(type)::type, kDense>,
                      {row_blocks(args, team, max_blocks), block_size(team), 0, 1, true}, stream,
                      args, team);
      });
      return;
    }
    const int64_t max_blocks = args.kept ? most_blocks_of_kept(kThreads) : kMaxGrid;
    visit_loader(args, [&](auto loader) {
      launch_kernel("cross_entropy_backward_strided_kernel",
                    cross_entropy_backward_strided_kernel<decltype(loader), kDense>,
                    {std::min(strided_blocks(args), max_blocks), kThreads, 0, 1, true}, stream,
                    args);
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
  launch_kernel("first_invalid_target_kernel", first_invalid_target_kernel,
                {strided_blocks(args), kThreads}, stream, args, first);
}

}  // namespace lossops::cuda
