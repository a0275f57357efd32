// Log-probabilities of classes and entropies of rows (losses/rows/tokens.h) on the machine of
// row_pass.cuh: the functors of tokens, and their launches.
//
// Forward leaves the states of each row's pieces; a small kernel after it merges them, reads the
// logits at the class indices and writes the results. Backward is a small kernel for what is known
// of each row, one that writes all gradients, and a small one that rewrites those at class indices.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "cross_entropy_row.h"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/flat_gradients.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/short_token_rows.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"
#include "strided.h"

namespace lossops::cuda {
namespace {

template <typename acc_t>
struct TokenRow {
  using State = EntropySoftmax<acc_t>;
  bool wants_products;  // else distances are anything

  struct Sums {
    acc_t powers = 0;    // of p = exp(z - max)
    acc_t products = 0;  // of p (z - max) / unit

    template <bool kProducts, typename Batch>
    __device__ __forceinline__ void add(const Batch& batch) {
      powers += pairwise_sum(batch.powers);
      if constexpr (kProducts) {
        acc_t product = batch.powers[0] * batch.differences[0];
#pragma unroll
        for (int i = 1; i < Batch::kSize; ++i) {
          product += batch.powers[i] * batch.differences[i];
        }
        products += product;
      }
    }

    // With z - max too large by t = excess unit, exp(-t) = 1 + less gives it back.
    __device__ __forceinline__ void move_to(State& state, acc_t unit, acc_t excess) const {
      const acc_t t = -excess * unit;
      const acc_t less = t + t * t * (acc_t(0.5) + t * acc_t(1.0 / 6));
      const acc_t distance = (excess * powers - products) * unit;
      state.below += powers + powers * less;
      state.distance += distance + distance * less;
    }
  };
};

// ------------------------------------------------------------------------ forward

// The dtype of statistics.
LOSSOPS_HOST_DEVICE DType stats_dtype(const TokenArgs& args) {
  return args.input.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Values of rows and their gradients have the dtype of statistics. A switch over all dtypes would
// be a KB of code at each of their loads and stores.
__device__ __forceinline__ double load_value(const TokenArgs& args, const Operand& operand,
                                             int64_t offset) {
  return load_as<double>(operand.data, stats_dtype(args), offset);
}
__device__ __forceinline__ void store_value(const TokenArgs& args, const Operand& operand,
                                            int64_t offset, double value) {
  store_as(operand.data, stats_dtype(args), offset, value);
}

// The mapped logit of a class, as its pass has computed it.
__device__ __forceinline__ double mapped_logit(const TokenArgs& args, const RowSource& source,
                                               int64_t offset) {
  double z = 0;
  const auto map_as = [&](auto like) {
    using acc_t = decltype(like);
    const auto x = load_operand<acc_t>(source.input, offset);
    visit_logit_map<acc_t>(args.map, [&](const auto& map) { z = map.map(x); });
  };
  source.input.dtype == DType::kFloat64 ? map_as(double()) : map_as(float());
  return z;
}

// Merges the states of each row's pieces, writes its statistics where a backward pass will come,
// its log-probabilities, entropy and lse. Log-probabilities of class indices out of range are NaN.
// lanes: merging_lanes(). What a row takes is computed in fp64: a kernel for all dtypes.
__global__ void __launch_bounds__(kRowThreads)
    token_values_kernel(const __grid_constant__ TokenForwardArgs args,
                        const __grid_constant__ RowSource source,
                        const __grid_constant__ RowGrid grid, int pieces, int lanes,
                        const void* states) {
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const bool is_double = args.input.dtype == DType::kFloat64;
  wait_for_previous_kernel();
  const auto state = merge_states<EntropySoftmax<double>>(pieces, lanes, [&](int piece) {
    const int64_t i = place.row * pieces + piece;
    if (is_double) {
      return static_cast<const EntropySoftmax<double>*>(states)[i];
    }
    const auto own = static_cast<const EntropySoftmax<float>*>(states)[i];
    EntropySoftmax<double> result;
    result.max = own.max;
    result.ones = own.ones;
    result.below = own.below;
    result.distance = own.distance;
    return result;
  });
  if (group >= grid.groups) {
    return;
  }
  const bool counts = source.counts(place);
  TokenStats<double> stats = {};
  if (counts) {
    stats = {state.max, state.rest(), args.entropy.data != nullptr ? state.mean_distance() : 0.0};
  }
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
#pragma unroll 1
  for (int64_t k = lane; k < args.num_indices; k += lanes) {
    double log_prob = 0;
    if (counts) {
      const int64_t c =
          load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
      log_prob = math::quiet_nan<double>();
      if (c >= 0 && c < args.num_classes) {
        log_prob = stats.log_prob(
            mapped_logit(args, source, place.offset(source.input) + c * source.class_stride));
      }
    }
    store_value(args, args.log_probs, place.offset(args.log_probs) + k * args.log_probs_stride,
                log_prob);
  }
  if (lane == 0) {
    if (args.entropy.data != nullptr) {
      store_value(args, args.entropy, place.offset(args.entropy), counts ? stats.entropy() : 0.0);
    }
    if (args.lse.data != nullptr) {
      store_value(args, args.lse, place.offset(args.lse), counts ? stats.lse() : 0.0);
    }
    if (args.row_stats != nullptr) {
      const DType dtype = stats_dtype(args);
      store_as(args.row_stats, dtype, place.row, stats.max);
      store_as(args.row_stats, dtype, args.rows.numel + place.row, stats.rest);
      store_as(args.row_stats, dtype, 2 * args.rows.numel + place.row, stats.mean_distance);
    }
  }
}

// ----------------------------------------------------------------------- backward

// The class index k of a row, and its gradient; operands are those of a slice.
__device__ __forceinline__ int64_t load_index(const TokenBackwardArgs& args,
                                              const RowGrid::Place& place, int64_t k) {
  return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
}
__device__ __forceinline__ double load_grad(const TokenBackwardArgs& args,
                                            const RowGrid::Place& place, int64_t k) {
  return load_value(args, args.grad_log_probs,
                    place.offset(args.grad_log_probs) + k * args.grad_log_probs_stride);
}

// The gradient of a row's entropy or lse.
__device__ __forceinline__ double load_row_grad(const TokenBackwardArgs& args,
                                                const RowGrid::Place& place, const Operand& grad) {
  return grad.data != nullptr ? load_value(args, grad, place.offset(grad)) : 0.0;
}

// So few class indices are added up by a thread, one after the other; more by a warp.
constexpr int64_t kFewIndices = 32;

// What the gradient of a row that counts is made of. By all lanes of a warp, if the row has more
// than kFewIndices. What a row takes is computed in fp64, as in token_values_kernel.
__device__ __forceinline__ TokenGradient<double> load_gradient(const TokenBackwardArgs& args,
                                                               const RowGrid::Place& place) {
  double of_softmax = 0;
  const int64_t count = args.grad_log_probs.data != nullptr ? args.num_indices : 0;
  const bool is_shared = args.num_indices > kFewIndices;
#pragma unroll 1
  for (int64_t k = is_shared ? threadIdx.x % kWarpSize : 0; k < count;
       k += is_shared ? kWarpSize : 1) {
    const int64_t c = load_index(args, place, k);
    of_softmax -=
        c >= 0 && c < args.num_classes ? load_grad(args, place, k) : math::quiet_nan<double>();
  }
  of_softmax = is_shared ? warp_sum(of_softmax) : of_softmax;
  of_softmax += load_row_grad(args, place, args.grad_lse);
  const auto kept = [&](int64_t plane) {
    return load_as<double>(args.row_stats, stats_dtype(args), plane * args.rows.numel + place.row);
  };
  return TokenGradient<double>::of({kept(0), kept(1), kept(2)}, of_softmax,
                                   load_row_grad(args, place, args.grad_entropy));
}

// TokenGradient::of_class() in few operations.
constexpr int kGradientNumbers = 4;
template <typename scalar_t>
struct TokenLogitGradient {
  using acc_t = acc_type_t<scalar_t>;
  using Term = RowTerm<scalar_t>;
  acc_t max = 0;
  acc_t mean_distance = 0;
  acc_t of_softmax = 0;  // over the sum of exponentials
  acc_t of_entropy = 0;  // likewise
  static_assert(kGradientNumbers == 4, "the four above");

  template <int kCount, typename Map>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const Map& map) const {
#pragma unroll
    for (acc_t& value : x) {
      value = of_mapped(map.map(value)) * map.derivative(value);
    }
  }

 private:
  __device__ __forceinline__ acc_t of_mapped(acc_t z) const {
    const acc_t difference = Term::bounded((z - max) * Term::kPerUnit);
    const acc_t below_mean = -Term::kUnit * difference - mean_distance;
    return Term::exp(difference) * (of_softmax + of_entropy * below_mean);
  }
};

// Those that token_gradients_kernel has left, (rows,).
template <typename scalar_t>
struct TokenGradients {
  using Gradient = TokenLogitGradient<scalar_t>;
  const Gradient* of_rows;

  __device__ __forceinline__ bool begin() const { return true; }
  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    return of_rows[place.row];
  }
  __device__ __forceinline__ void finish(const RowGrid::Place&, const RowPart&,
                                         const Gradient&) const {}
};

// The numbers of a TokenLogitGradient.
__device__ __forceinline__ void numbers_of(const TokenGradient<double>& gradient,
                                           double (&numbers)[kGradientNumbers]) {
  numbers[0] = gradient.stats.max;
  numbers[1] = gradient.stats.mean_distance;
  numbers[2] = gradient.of_softmax * gradient.inverse_sum;
  numbers[3] = gradient.of_entropy * gradient.inverse_sum;
}

// The gradient at a class index of logit z after the map; slope: of the map; sum: of the gradients
// of its log-probabilities.
__device__ __forceinline__ double gradient_at(const TokenGradient<double>& gradient, double z,
                                              double slope, double sum) {
  return gradient.at_index(z, sum, gradient.of_softmax + sum) * slope;
}

// Leaves what the kernels of gradients take of each row, (rows,) TokenLogitGradient. lanes: of a
// row; a warp, if it has more than kFewIndices.
__global__ void __launch_bounds__(kRowThreads)
    token_gradients_kernel(const __grid_constant__ TokenBackwardArgs args,
                           const __grid_constant__ RowSource source,
                           const __grid_constant__ RowGrid grid, int lanes, void* of_rows) {
  let_next_kernel_start();
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const TokenGradient<double> gradient = load_gradient(args, place);
  if ((threadIdx.x & (lanes - 1)) == 0 && group < grid.groups) {
    const bool counts = source.counts(place);
    double numbers[kGradientNumbers];
    numbers_of(gradient, numbers);
#pragma unroll
    for (int i = 0; i < kGradientNumbers; ++i) {
      store_as(of_rows, stats_dtype(args), place.row * kGradientNumbers + i,
               counts ? numbers[i] : 0.0);
    }
  }
}

// What token_classes_kernel does with the gradients at class indices. In place, they are computed
// before the other gradients are written over the logits, and kept until these are.
enum class AtIndices : int8_t { kRewrite, kKeep, kRestore };

// Lanes that share the class indices of a row: a warp, if there are more than kFewIndices; else
// about one for five indices, because each lane repeats the work that a row has beside them. Step
// of 157 classes with 20 indices: 1.9 ms in this kernel, 2.8 with a lane for each index (H200,
// 2026-11).
int lanes_of_indices(int64_t num_indices) {
  return num_indices > kFewIndices
             ? kWarpSize
             : merging_lanes(static_cast<int>(std::max<int64_t>(num_indices / 5, 1)));
}

// Rewrites the gradients at class indices. Those of repeated indices add up: the first of them
// writes the sum. Like token_values_kernel for all dtypes. lanes: lanes_of_indices(). kept:
// (rows, indices), unless kRewrite.
__global__ void __launch_bounds__(kRowThreads)
    token_classes_kernel(const __grid_constant__ TokenBackwardArgs args,
                         const __grid_constant__ RowSource source,
                         const __grid_constant__ RowGrid grid, int lanes, AtIndices todo,
                         double* kept) {
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const TokenGradient<double> gradient = load_gradient(args, place);
  wait_for_previous_kernel();
  if (group >= grid.groups || !source.counts(place)) {
    return;
  }
#pragma unroll 1
  for (int64_t k = threadIdx.x & (lanes - 1); k < args.num_indices; k += lanes) {
    const int64_t c = load_index(args, place, k);
    if (c < 0 || c >= args.num_classes) {
      continue;
    }
    double sum = 0;
    bool is_first = true;
#pragma unroll 1
    for (int64_t other = 0; other < args.num_indices; ++other) {
      if (load_index(args, place, other) == c) {
        is_first = is_first && other >= k;
        sum += load_grad(args, place, other);
      }
    }
    if (is_first) {
      double value = 0;
      if (todo == AtIndices::kRestore) {
        value = kept[place.row * args.num_indices + k];
      } else {
        const int64_t offset = place.offset(source.input) + c * source.class_stride;
        const auto x = load_operand<double>(source.input, offset);
        double slope = 0;
        visit_logit_map<double>(args.map, [&](const auto& map) { slope = map.derivative(x); });
        value = gradient_at(gradient, mapped_logit(args, source, offset), slope, sum);
      }
      if (todo == AtIndices::kKeep) {
        kept[place.row * args.num_indices + k] = value;
      } else {
        store_operand(args.grad_input,
                      place.offset(args.grad_input) + c * args.grad_input_class_stride, value);
      }
    }
  }
}

// The same of short rows, for flat_gradients_kernel: by a thread each, with the gradient at the
// class index, if a row has one.
template <typename scalar_t>
struct FlatTokenGradient {
  static constexpr int kDoesNotCount = -2;
  using acc_t = acc_type_t<scalar_t>;
  TokenLogitGradient<scalar_t> of_logit;
  acc_t at_index;
  int index;

  template <int kCount, typename Map>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const Map& map) const {
    of_logit.replace(x, map);
    if (index == kDoesNotCount) {
#pragma unroll
      for (acc_t& value : x) {
        value = 0;
      }
    }
  }
};

// As token_gradients_kernel and token_classes_kernel, with types that are known: a switch over
// dtypes and the constants of a map would take most of a short row's time.
template <typename scalar_t>
struct FlatTokenGradients {
  using Gradient = FlatTokenGradient<scalar_t>;
  using acc_t = acc_type_t<scalar_t>;
  TokenBackwardArgs args;  // operands are those of a slice
  RowSource source;
  RowType<scalar_t> type;
  LinearMap<acc_t> map;
  LinearMap<double> wide_map;  // the same in fp64
  // Of rows with several class indices, by token_gradients_kernel: the threads of a tile, one for
  // each of its rows, would wait for one index after the other. Else null.
  const TokenLogitGradient<scalar_t>* of_rows;

  __device__ __forceinline__ bool begin() const { return true; }

  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    Gradient result{{}, acc_t(0), Gradient::kDoesNotCount};
    if (!source.counts(place)) {
      return result;
    }
    result.index = -1;
    if (of_rows != nullptr) {
      result.of_logit = of_rows[place.row];
      return result;
    }
    const TokenGradient<double> gradient = load_gradient(args, place);
    double numbers[kGradientNumbers];
    numbers_of(gradient, numbers);
    result.of_logit.max = static_cast<acc_t>(numbers[0]);
    result.of_logit.mean_distance = static_cast<acc_t>(numbers[1]);
    result.of_logit.of_softmax = static_cast<acc_t>(numbers[2]);
    result.of_logit.of_entropy = static_cast<acc_t>(numbers[3]);
    if (args.grad_log_probs.data != nullptr && args.num_indices == 1) {
      const int64_t c = load_index(args, place, 0);
      if (c >= 0 && c < args.num_classes) {
        const auto* const logits = static_cast<const scalar_t*>(source.input.data);
        const scalar_t logit = logits[place.offset(source.input) + c * source.class_stride];
        const acc_t x =
            type.visit([&](auto like) { return to_acc<acc_t>(bits_as<decltype(like)>(logit)); });
        result.index = static_cast<int>(c);
        result.at_index = static_cast<acc_t>(
            gradient_at(gradient, map.map(x), wide_map.derivative(x), load_grad(args, place, 0)));
      }
    }
    return result;
  }
};

// Longer rows, of more bytes, take row_gradients_kernel. Its kernels around it cost too much for
// short rows: rows of 26 bytes were at .01 of the floor, of 664 at .11 (step, H200, 2026-11). The
// bound is a choice, not measured.
constexpr int64_t kMostFlatTokenBytes = 4096;

// ----------------------------------------------------------------------- launches

// Arguments of a slice of the rows.
TokenForwardArgs slice_of(const RowSlice& slice, TokenForwardArgs args) {
  args.index = slice(args.index);
  args.log_probs = slice(args.log_probs);
  args.entropy = slice(args.entropy);
  args.lse = slice(args.lse);
  return args;
}
TokenBackwardArgs slice_of(const RowSlice& slice, TokenBackwardArgs args) {
  args.index = slice(args.index);
  args.grad_log_probs = slice(args.grad_log_probs);
  args.grad_entropy = slice(args.grad_entropy);
  args.grad_lse = slice(args.grad_lse);
  args.grad_input = slice(args.grad_input);
  return args;
}

// Calls body(type, map) with the types of logits and of the map.
template <typename Body>
void visit_logits(const TokenArgs& args, const LogitMapParams& params, Body&& body) {
  if (args.num_classes * element_size(args.input.dtype) / kRowVectorBytes > kMostVectors) {
    throw std::runtime_error("lossops: CUDA kernels do not take rows of so many classes");
  }
  const auto visit_map = [&](auto like) {
    using scalar_t = decltype(like);
    visit_logit_map<acc_type_t<scalar_t>>(
        params, [&](const auto& map) { body(RowType<scalar_t>(args.input.dtype), map); });
  };
  if (args.input.dtype == DType::kFloat64) {
    body(RowType<double>(args.input.dtype), AnyMap<double>(params));
  } else if (args.input.dtype == DType::kFloat32) {
    visit_map(float{});
  } else {
    visit_map(any_half_t{});
  }
}

RowCut cut_of(const TokenArgs& args) {
  return RowCut::of(args.num_classes, element_size(args.input.dtype));
}

// fp64 and softcaps of short rows are rare, and spare their machine code.
template <typename scalar_t, typename Map>
constexpr bool kHasShortKernels = sizeof(scalar_t) < 8 && std::is_same_v<Map, LinearMap<float>>;

// Whether forward is short_token_values_kernel's.
bool takes_short_rows(const TokenArgs& args) {
  const int64_t element_bytes = element_size(args.input.dtype);
  return element_bytes < 8 && args.map.softcap == 0 &&
         ShortRows::are_short(args.num_classes, element_bytes);
}

}  // namespace

int64_t token_forward_scratch(const TokenForwardArgs& args) {
  if (takes_short_rows(args)) {
    return 0;
  }
  const int64_t state = args.input.dtype == DType::kFloat64 ? sizeof(EntropySoftmax<double>)
                                                            : sizeof(EntropySoftmax<float>);
  return args.rows.numel * cut_of(args).pieces * state / static_cast<int64_t>(sizeof(double));
}

void launch_token_forward(const TokenForwardArgs& args, double* scratch, Context context) {
  auto* const stream = static_cast<cudaStream_t>(context);
  LogitMapParams params = args.map;
  const bool changes_signs = params.scale < 0;
  params.scale = changes_signs ? -params.scale : params.scale;
  visit_logits(args, params, [&](auto type, const auto& call_map) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Row = TokenRow<acc_type_t<scalar_t>>;
    using Map = std::decay_t<decltype(call_map)>;
    const auto map = map_of_pass(call_map);
    if constexpr (kHasShortKernels<scalar_t, Map>) {
      if (takes_short_rows(args)) {
        for_each_slice(args.rows, kMaxDividend, [&](const RowSlice& slice) {
          const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
          launch_short_token_values(slice, slice_of(slice, args), source, type, map, Map(args.map),
                                    changes_signs, stream);
        });
        return;
      }
    }
    const RowCut cut = cut_of(args);
    const int lanes = merging_lanes(cut.pieces);
    auto* const states = reinterpret_cast<typename Row::State*>(scratch);
    for_each_slice(args.rows, kMaxDividend / cut.pieces, [&](const RowSlice& slice) {
      const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
      const RowGrid grid(slice, cut.pieces);
      launch_kernel("row_states_kernel", row_states_kernel<Row, scalar_t, Map>,
                    {grid.blocks(cut.lanes), kRowThreads}, stream, source, grid, cut,
                    Row{args.entropy.data != nullptr}, type, map, changes_signs, states);
      const RowGrid rows(slice, 1);
      LaunchShape shape = {rows.blocks(lanes), kRowThreads};
      shape.overlap = true;
      launch_kernel("token_values_kernel", token_values_kernel, shape, stream,
                    slice_of(slice, args), source, rows, cut.pieces, lanes, states);
    });
  });
}

// Doubles of what token_gradients_kernel leaves.
static int64_t gradient_doubles(const TokenBackwardArgs& args) {
  return args.rows.numel * kGradientNumbers * element_size(stats_dtype(args)) /
         static_cast<int64_t>(sizeof(double));
}

int64_t token_backward_scratch(const TokenBackwardArgs& args) {
  const bool keeps = args.is_in_place() && args.grad_log_probs.data != nullptr;
  return gradient_doubles(args) + (keeps ? args.rows.numel * args.num_indices : 0);
}

void launch_token_backward(const TokenBackwardArgs& args, double* scratch, Context context) {
  auto* const stream = static_cast<cudaStream_t>(context);
  if (args.num_classes == 0) {
    return;
  }
  const bool has_indices = args.grad_log_probs.data != nullptr;
  const int index_lanes = lanes_of_indices(args.num_indices);
  double* const kept = scratch + gradient_doubles(args);
  const auto launch_classes = [&](const RowSlice& slice, const RowSource& source, AtIndices todo) {
    if (!has_indices) {
      return;
    }
    const RowGrid rows(slice, 1);
    LaunchShape shape = {rows.blocks(index_lanes), kRowThreads};
    shape.overlap = todo != AtIndices::kKeep;  // else the kernel before it may write the logits
    launch_kernel("token_classes_kernel", token_classes_kernel, shape, stream,
                  slice_of(slice, args), source, rows, index_lanes, todo, kept);
  };
  // What the gradients of each row are made of.
  const auto launch_row_gradients = [&](const RowSlice& slice, const RowSource& source) {
    const int lanes = args.num_indices > kFewIndices ? kWarpSize : 1;
    const RowGrid rows(slice, 1);
    launch_kernel("token_gradients_kernel", token_gradients_kernel,
                  {rows.blocks(lanes), kRowThreads}, stream, slice_of(slice, args), source, rows,
                  lanes, scratch);
  };
  const AtIndices at_end = args.is_in_place() ? AtIndices::kRestore : AtIndices::kRewrite;
  // In place, a block would read logits of a row that the block beside it has overwritten.
  const bool is_flat =
      !args.is_in_place() &&
      args.num_classes * element_size(args.input.dtype) <= kMostFlatTokenBytes &&
      args.num_indices <= kFewIndices &&
      is_run(args.rows, args.grad_input, args.grad_input_class_stride, args.num_classes);
  visit_logits(args, args.map, [&](auto type, const auto& map) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Map = std::decay_t<decltype(map)>;
    const auto* const of_rows = reinterpret_cast<TokenLogitGradient<scalar_t>*>(scratch);
    if constexpr (kHasShortKernels<scalar_t, Map>) {
      if (is_flat) {
        const LinearMap<double> wide(args.map);
        const bool has_several = has_indices && args.num_indices > 1;
        for_each_slice(args.rows, most_flat_rows(args.num_classes), [&](const RowSlice& slice) {
          const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
          if (has_several) {
            launch_row_gradients(slice, source);
          }
          using Gradients = FlatTokenGradients<scalar_t>;
          const Gradients rows{slice_of(slice, args),          source, type, map, wide,
                               has_several ? of_rows : nullptr};
          launch_flat_gradients_of(slice, rows, source, rows.args.grad_input, args.num_classes,
                                   type, map, stream);
          if (has_several) {
            launch_classes(slice, source, at_end);
          }
        });
        return;
      }
    }
    constexpr int kWarps = kRowThreads / kWarpSize;
    const int64_t resident_warps = int64_t{kRowBlocks<scalar_t>} * kWarps *
                                   std::max(current_device_limits().multiprocessors, 1);
    const RowParts plan =
        RowParts::of(args.rows.numel, args.num_classes, sizeof(scalar_t), resident_warps);
    for_each_slice(args.rows, kMaxDividend / plan.parts, [&](const RowSlice& slice) {
      const RowGrid grid(slice, plan.parts);
      const TokenBackwardArgs own = slice_of(slice, args);
      const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
      if (args.is_in_place()) {
        launch_classes(slice, source, AtIndices::kKeep);
      }
      launch_row_gradients(slice, source);
      LaunchShape passing = {grid.blocks(kWarpSize), kRowThreads};
      passing.overlap = true;
      launch_kernel("row_gradients_kernel",
                    row_gradients_kernel<TokenGradients<scalar_t>, scalar_t, Map>, passing, stream,
                    TokenGradients<scalar_t>{of_rows}, source, own.grad_input,
                    args.grad_input_class_stride, grid, plan, type, map);
      launch_classes(slice, source, at_end);
    });
  });
}

}  // namespace lossops::cuda
