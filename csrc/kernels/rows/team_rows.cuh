// Cross entropy of rows of contiguous classes, whatever they are: a block a row, and in backward
// passes a part of a warp for few classes.
//
// Only cross_entropy.cu includes this: machine code of several translation units packs worse, by 20
// KB for each architecture.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_sum.cuh"
#include "kernels/rows/team_rows_plan.h"
#include "launchers.h"

namespace lossops::cuda {

// Vectors of a row that a thread has in flight. Dense coefficients are bound by arithmetic, and
// their code is long.
template <bool kDense>
constexpr int kRowUnroll = kDense ? 2 : 4;
// What a kernel has of shared memory beside a row, at most.
constexpr int kTeamStaticSharedBytes = 4096;
// A row of more than this would be alone on its multiprocessor, of the largest there are.
constexpr int64_t kMaxSharedRowBytes = 112 << 10;

// Blocks of kMaxRowThreads that shall fit a multiprocessor: while one row is reduced, the
// others load.
template <typename scalar_t>
constexpr int kMinRowBlocks = sizeof(scalar_t) <= 4 ? 4 : 1;

// The same for dense coefficients, which take more registers.
template <typename scalar_t>
constexpr int kMinDenseBlocks = sizeof(scalar_t) <= 4 ? 3 : 1;

// One thread's share of a row of contiguous classes. row: (C,). The threads of a team take
// vectors in turn, kUnroll at a time. 32-bit indices leave registers for more loads in flight.
template <typename scalar_t, int kUnroll>
struct TeamReader {
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
  __device__ __forceinline__ TeamReader(const scalar_t* row_, int num_classes_, int lane_,
                                        int team_)
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
    for (int c = vectors * kSize + lane; c < num_classes; c += team) {  // fault: team-singles
      body(c);
    }
  }
};

// cache: leaves the row's whole vectors there, for the thread that reads them here; may be null.
template <typename State, typename scalar_t, int kUnroll, typename acc_t = acc_type_t<scalar_t>>
__device__ __forceinline__ State reduce_row(TeamReader<scalar_t, kUnroll>& reader,
                                            const RowTarget<acc_t>& target, DType dtype,
                                            scalar_t* cache) {
  constexpr int kSize = kVectorSize<scalar_t>;
  RowSum<State> row;
  for (; reader.more(); reader.advance()) {
    acc_t max = -math::infinity<acc_t>();
    reader.for_each_vector([&](int u) {
      acc_t x[kSize];
      unpack_of<scalar_t>(reader.loaded[u], dtype, x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        max = math::max_number(x[i], max);
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
      acc_t x[kSize];
      unpack_of<scalar_t>(reader.loaded[u], dtype, x);
      acc_t q[kSize];
      load_coefficients_for<State>(target, reader.first_class(u), q);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        add_below_max<kExactExponentials<scalar_t>>(local, x[i], shift, q[i]);
      }
    });
    row.add(local);
  }
  reader.for_each_single([&](int c) {
    const acc_t x[1] = {to_acc_of<acc_t>(reader.row[c], dtype)};
    fold<kExactExponentials<scalar_t>>(row, x, target, c);
  });
  return row.total();
}

// Writes the gradient of the team's row. kMayBeCached: the row may lie in `cache`, which else is
// null.
template <typename scalar_t, int kUnroll, bool kMayBeCached, typename Gradient>
__device__ __forceinline__ void write_row_gradient(const scalar_t* row, int num_classes, int lane,
                                                   int team, const Gradient& gradient,
                                                   scalar_t* grad_input, const scalar_t* cache) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const DType dtype = gradient.args.input.dtype;
  if (!gradient.target.has_loss()) {
    const auto value = from_acc_of<scalar_t>(gradient.without_loss(), dtype);
    for (int c = lane; c < num_classes; c += team) {
      grad_input[c] = value;
    }
    return;
  }
  const int width = access_width(grad_input);
  const auto write = [&](int vector, const Vector<scalar_t>& x) {
    store_vector_at(grad_input + vector * kSize, width, gradient_of(gradient, x, vector * kSize));
  };
  if constexpr (Gradient::kIsDense || kMayBeCached) {
    // Generic loads, for one loop over shared and global memory. Dense targets, probabilities or
    // smoothing, take one vector at a time: their arithmetic, some 20 instructions a logit, takes
    // as long as a load, and its machine code is 7 KB. Class indices take two.
    constexpr int kAtOnce = Gradient::kIsDense ? 1 : 2;
    const scalar_t* const source = unfolded(cache != nullptr ? cache : row);
    const int source_width = access_width(source);
    const int whole = unfolded(num_classes / kSize);
#pragma unroll kAtOnce
    for (int vector = lane; vector < whole; vector += team) {
      write(vector, load_vector_at(source + vector * kSize, source_width));
    }
  } else {
    TeamReader<scalar_t, kUnroll> reader(row, num_classes, lane, team);
    for (; reader.more(); reader.advance()) {
      reader.for_each_vector([&](int u) { write(reader.vector(u), reader.loaded[u]); });
    }
  }
  // fault: team-gradient-singles
  for (int c = num_classes / kSize * kSize + lane; c < num_classes; c += team) {
    const acc_t x = to_acc_of<acc_t>(row[c], dtype);
    grad_input[c] = from_acc_of<scalar_t>(gradient.of_logit(x, c), dtype);
  }
}

// Blocks whose rows leave a gradient that shall fit a multiprocessor: as rows of 64 KB do.
constexpr int kMinGradientBlocks = 3;

// A row a block at a time. kGradient: writes the row's gradient too, and keeps the row for that in
// shared memory where use_cache says so; else it is read again.
template <typename scalar_t, bool kDense, bool kGradient>
__global__ void __launch_bounds__(kMaxRowThreads, kGradient ? kMinGradientBlocks
                                                  : kDense  ? kMinDenseBlocks<scalar_t>
                                                            : kMinRowBlocks<scalar_t>)
    cross_entropy_forward_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                 bool use_cache, Denominator denominator, Partial* partials,
                                 Finalize finalize) {
  LOSSOPS_DYNAMIC_SHARED(uint4, row_cache);
  using acc_t = acc_type_t<scalar_t>;
  using State = RowState<acc_t, kDense>;
  const auto lane = static_cast<int>(threadIdx.x);
  const auto team = static_cast<int>(blockDim.x);
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  auto* const cache = kGradient && use_cache ? reinterpret_cast<scalar_t*>(row_cache) : nullptr;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<acc_t>, NoScale> unit(args, denominator);
  unit.wait(args, denominator);
  const acc_t scale = unit.get();
  Partial partial;
  for (int64_t row = blockIdx.x; row < args.rows.numel; row += gridDim.x) {
    int64_t offsets[4];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    TeamReader<scalar_t, kRowUnroll<kDense>> reader(logits, static_cast<int>(args.num_classes),
                                                    lane, team);
    const auto target = target_of<acc_t, kDense>(args, offsets[1]);
    acc_t x_at_index = 0;
    if (!kDense && lane == 0 && target.has_loss()) {
      x_at_index = to_acc_of<acc_t>(logits[target.index], args.input.dtype);
    }
    State state;
    if (target.has_loss()) {
      state = reduce_row<State>(reader, target, args.input.dtype, cache);
    }
    state = block_reduce(state);
    if constexpr (kDense) {
      // A rounded sum would not do: gradients of confident rows have the small difference Q - q.
      if (!args.target_is_probability && args.weight == nullptr) {
        state.q_sum = SmoothedIndex::kSum;
      }
    }
    if (lane == 0) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
    if constexpr (kGradient) {
      const RowGradient<acc_t, kDense, kExactExponentials<scalar_t>> gradient(
          args, target, share_summary(summarize(state, x_at_index)), scale);
      write_row_gradient<scalar_t, kRowUnroll<kDense>, true>(
          logits, static_cast<int>(args.num_classes), lane, team, gradient,
          static_cast<scalar_t*>(args.grad_input.data) + offsets[3], cache);
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid<true>(partial, partials, finalize);
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
    const auto target = target_of<acc_t, kDense>(args, offsets[1]);
    const RowGradient<acc_t, kDense, kExactExponentials<scalar_t>> gradient(
        args, target, load_summary<kDense>(args, target, row, offsets[0]),
        row_scale<acc_t>(args, offsets[2]));
    if (args.grad_input.data == args.input.data) {
      // The logit of the class index is read: it may be overwritten.
      team_sync(team);
    }
    if (args.grad_target.data == nullptr) {
      write_row_gradient<scalar_t, kRowUnroll<kDense>, false>(
          logits, static_cast<int>(args.num_classes), lane, team, gradient, grad_input, nullptr);
      continue;
    }
    for (int c = lane; c < args.num_classes; c += team) {
      const acc_t x[1] = {to_acc_of<acc_t>(logits[c], args.input.dtype)};
      if (args.grad_input.data != nullptr) {
        grad_input[c] = from_acc_of<scalar_t>(gradient.of_logit(x[0], c), args.input.dtype);
      }
      if constexpr (kDense) {
        acc_t value[1];
        gradient.of_targets(x, c, value);
        store_operand<acc_t>(args.grad_target, offsets[4] + c * args.grad_target_class_stride,
                             value[0]);
      }
    }
  }
}

// Shared memory for a row, or 0 where this device has too little for two.
template <typename Kernel>
int64_t row_cache_bytes(const CrossEntropyArgs& args, Kernel* kernel) {
  const int64_t row = args.num_classes * element_size(args.input.dtype);
  const int64_t bytes = round_up(row, kVectorBytes);
  int device = 0;
  int limit = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    return 0;
  }
  // Asked for as much as any row has: another thread may be about to launch it with more.
  const int64_t most = std::min<int64_t>(limit - kTeamStaticSharedBytes, kMaxSharedRowBytes);
  if (bytes > most || cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(most)) != cudaSuccess) {
    cudaGetLastError();  // the launch that does without must not find it
    return 0;
  }
  return bytes;
}

template <typename scalar_t, bool kDense, bool kGradient>
void forward_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                  const Denominator& denominator, Partial* partials, const Finalize& finalize,
                  cudaStream_t stream) {
  const auto kernel = cross_entropy_forward_kernel<scalar_t, kDense, kGradient>;
  const int64_t cache = kGradient ? row_cache_bytes(args, kernel) : 0;
  launch_kernel("cross_entropy_forward_kernel", kernel, {plan.blocks, plan.team, cache}, stream,
                args, cache > 0, denominator, partials, finalize);
}

// Calls body with the tag of a floating dtype. Half types share a kernel, for little machine code.
template <typename Body>
void visit_team_type(DType dtype, const Body& body) {
  dtype == DType::kFloat64 ? body(TypeTag<double>{}) : visit_float_or_any_half(dtype, body);
}

// Where args.grad_input is given, for fp32 and half types, writes it too.
inline void launch_team_rows_forward(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                                     const Denominator& denominator, const GradOutput&,
                                     Partial* partials, const Finalize& finalize,
                                     cudaStream_t stream) {
  visit_bool(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    visit_team_type(args.input.dtype, [&](auto type) {
      using scalar_t = typename decltype(type)::type;
      if constexpr (sizeof(scalar_t) <= 4) {
        if (args.grad_input.data != nullptr) {
          forward_rows<scalar_t, kDense, true>(args, plan, denominator, partials, finalize, stream);
          return;
        }
      }
      forward_rows<scalar_t, kDense, false>(args, plan, denominator, partials, finalize, stream);
    });
  });
}

inline void launch_team_rows_backward(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  const int team = team_size(args);
  const int64_t max_blocks = args.kept ? most_blocks_of_kept(block_size(team)) : kMaxGrid;
  visit_bool(args.dense(), [&](auto dense) {
    constexpr bool kDense = decltype(dense)::value;
    visit_team_type(args.input.dtype, [&](auto type) {
      launch_kernel("cross_entropy_backward_kernel",
                    cross_entropy_backward_kernel<typename decltype(type)::type, kDense>,
                    {team_row_blocks(args, team, max_blocks), block_size(team), 0, 1, true}, stream,
                    args, team);
    });
  });
}

}  // namespace lossops::cuda
