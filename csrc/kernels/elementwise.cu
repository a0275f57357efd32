// Elementwise losses: forward (with or without the reduction) and backward, one family of
// kernels for every row of losses/registry.h.

#include <algorithm>
#include <cstdint>

#include "kernels/block_reduce.cuh"
#include "kernels/check.cuh"
#include "kernels/column_reduce.cuh"
#include "kernels/device.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/grid_reduce.cuh"
#include "kernels/integers.h"
#include "kernels/launch.cuh"
#include "kernels/thread_reduce.cuh"
#include "kernels/vectorized.cuh"
#include "launchers.h"
#include "strided.h"

namespace lossops::cuda {
namespace {

constexpr int kThreads = 256;
// 16-byte vectors a thread and operand, all in flight at once: 4, and 2 of half types.
// Measured on an H200: more vectors, more threads or a persistent grid lose 4 to 14 %. fp64 has 1,
// for less machine code.
template <typename scalar_t>
constexpr int kVectors = sizeof(scalar_t) == 8   ? 1
                         : sizeof(scalar_t) == 2 ? 2
                                                 : 4;
// That shall fit a multiprocessor: 67 registers instead of 64 cost KL of fp16 11 % of its step.
template <typename scalar_t>
constexpr int kMinBlocks = sizeof(scalar_t) == 2 ? 4 : 1;
// Tiles a block of a reduction, the same with a gradient and without one, for the same bits. Many
// share a block's start and its reduction; of few, those on their way are closer in memory.
// Measured on an H200, 16384x16384, forward / step in us with 1, 2, 4, 8 tiles: KL of bf16
// probabilities 263, 241, 241, 240 / 411, 386, 381, 387, of bf16 log-probabilities 241, 239, 239,
// 239 / 376, 378, 382, 388; MSE of fp32 32768x32768 1849, 1837, 1831, 1832 / 2953, 2972, 3004,
// 3045.
constexpr int64_t kTilesOfBlock = 4;
// But no fewer blocks than these where there are as many tiles: a step of MSE of fp32 8192x8192
// takes 197 us with 4 tiles a block and 195 with 2.
constexpr int64_t kFewBlocks = 8192;
// 1 MiB of partials, which a cluster folds in microseconds.
constexpr int64_t kMaxPartials = 65536;
constexpr int64_t kMaxStridedBlocks = 16384;

template <typename scalar_t>
constexpr int64_t kTile = int64_t{kThreads} * kVectors<scalar_t> * kVectorSize<scalar_t>;

// ---------------------------------------------------------------- contiguous

// A tile of an operand: a thread's vectors, all in flight at once.
template <typename scalar_t>
struct Tile {
  using acc_t = acc_type_t<scalar_t>;
  Vector<scalar_t> vectors[kVectors<scalar_t>];

  // first: of this thread, in vectors.
  __device__ __forceinline__ void load(const scalar_t* data, int64_t first) {
#pragma unroll
    for (int v = 0; v < kVectors<scalar_t>; ++v) {
      vectors[v] = load_vector(data, first + v * kThreads);
    }
  }

  __device__ __forceinline__ acc_t at(int v, int i) const {
    return to_acc<acc_t>(vectors[v].get(i));
  }
};

// What a forward kernel writes beside its partial sum.
enum class Stores : int8_t { kNothing, kLosses, kGradients };

template <typename Term, typename = void>
struct HasForwardInSum : std::false_type {};
template <typename Term>
struct HasForwardInSum<
    Term,
    std::void_t<decltype(std::declval<Term>().template forward_in_sum<true, true>(0.0f, 0.0f))>>
    : std::true_type {};

// The loss of an element, by the term's faster way if it has one and the result allows it.
template <typename scalar_t, Stores kStores, typename Term, typename acc_t>
__device__ __forceinline__ acc_t forward_of(const Term& term, acc_t x, acc_t t) {
  if constexpr (HasForwardInSum<Term>::value && sizeof(scalar_t) <= 4 &&
                kStores != Stores::kLosses) {
    return term.template forward_in_sum<sizeof(scalar_t) == 2, !std::is_same_v<scalar_t, half_t>>(
        x, t);
  } else {
    return term.forward(x, t);
  }
}

// A block's sum where there are no weights: half of a Partial.
struct Sum {
  double value = 0;

  __device__ __forceinline__ void combine(const Sum& other) { value += other.value; }
};

// input, target, weight, output: (numel,). output: the losses, or the input's gradients, times
// scale. Blocks stride over tiles.
template <typename scalar_t, typename Term, Stores kStores, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kMinBlocks<scalar_t>)
    elementwise_forward_kernel(const scalar_t* input, const scalar_t* target,
                               const scalar_t* weight, scalar_t* output, int64_t numel, Term term,
                               acc_type_t<scalar_t> scale, Partial* partials, Finalize finalize) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kCount = kVectors<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  let_next_kernel_start();
  Partial partial;
  // The loss of one element; returns what is to be stored.
  const auto visit = [&](acc_t x, acc_t t, acc_t w, acc_t& value) {
    value = forward_of<scalar_t, kStores>(term, x, t) * w;
    if constexpr (kStores == Stores::kGradients) {
      return input_gradient(term, sizeof(scalar_t) == 2, x, t, w, scale);
    } else {
      return value;
    }
  };
  const int64_t whole_tiles = numel / kTile<scalar_t>;
  int64_t tile = blockIdx.x;
  for (; tile < whole_tiles; tile += gridDim.x) {
    const int64_t first = tile * (kTile<scalar_t> / kSize) + threadIdx.x;
    Tile<scalar_t> x;
    Tile<scalar_t> t;
    Tile<scalar_t> w;
    x.load(input, first);
    t.load(target, first);
    if constexpr (kWeighted) {
      w.load(weight, first);
    }
    acc_t values[kCount * kSize];
    acc_t weights[kCount * kSize];
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      acc_t results[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int n = v * kSize + i;
        weights[n] = kWeighted ? w.at(v, i) : acc_t(1);
        results[i] = visit(x.at(v, i), t.at(v, i), weights[n], values[n]);
      }
      if constexpr (kStores != Stores::kNothing) {
        store_vector(output, first + v * kThreads, pack<scalar_t>(results));
      }
    }
    partial.sum += static_cast<double>(pairwise_sum(values));
    if constexpr (kWeighted) {
      partial.weight += static_cast<double>(pairwise_sum(weights));
    }
  }
  if (tile == whole_tiles) {
#pragma unroll 4
    // fault: elementwise-tail
    for (int64_t i = tile * kTile<scalar_t> + threadIdx.x; i < numel; i += kThreads) {
      acc_t value;
      const acc_t own = kWeighted ? to_acc<acc_t>(weight[i]) : acc_t(1);
      const acc_t result = visit(to_acc<acc_t>(input[i]), to_acc<acc_t>(target[i]), own, value);
      if constexpr (kStores != Stores::kNothing) {
        output[i] = from_acc<scalar_t>(result);
      }
      partial.sum += static_cast<double>(value);
      partial.weight += static_cast<double>(own);
    }
  }
  if constexpr (kStores == Stores::kLosses) {
    return;
  } else if constexpr (kWeighted) {
    reduce_to_grid(partial, partials, finalize);
  } else {
    leave_to_grid({block_reduce(Sum{partial.sum}).value, 0}, partials, finalize);
  }
}

// Blocks stride over tiles. Operands that args leaves null are not touched.
template <typename scalar_t, typename Term>
__global__ void __launch_bounds__(kThreads)
    elementwise_backward_kernel(const __grid_constant__ ElementwiseBackwardArgs args, Term term) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kCount = kVectors<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  const auto* const target = static_cast<const scalar_t*>(args.target.data);
  const auto* const weight =
      Term::kHasWeight ? static_cast<const scalar_t*>(args.weight.data) : nullptr;
  const auto* const grad_output = static_cast<const scalar_t*>(args.grad_output.data);
  wait_for_previous_kernel();
  if (kept_is_right(args)) {  // fault: elementwise-kept
    return;
  }
  const bool full_grad_output = args.reduction == Reduction::kNone;
  const acc_t scale = full_grad_output ? acc_t(1) : reduction_scale<acc_t>(args);
  const int64_t numel = args.space.numel;
  for (int64_t base = blockIdx.x * kTile<scalar_t>; base < numel;
       base += gridDim.x * kTile<scalar_t>) {
    if (base + kTile<scalar_t> <= numel) {
      const int64_t first = base / kSize + threadIdx.x;
      Tile<scalar_t> x;
      Tile<scalar_t> t;
      Tile<scalar_t> w;
      Tile<scalar_t> g;
      x.load(input, first);
      t.load(target, first);
      if (weight != nullptr) {
        w.load(weight, first);
      }
      if (full_grad_output) {
        g.load(grad_output, first);
      }
      const auto store_gradient = [&](Wanted wanted, const Operand& gradient) {
        if (gradient.data == nullptr) {
          return;
        }
#pragma unroll
        for (int v = 0; v < kCount; ++v) {
          acc_t results[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            results[i] = elementwise_gradient(wanted, args, term, sizeof(scalar_t) == 2, x.at(v, i),
                                              t.at(v, i), weight != nullptr ? w.at(v, i) : acc_t(1),
                                              full_grad_output ? g.at(v, i) : scale);
          }
          store_vector(static_cast<scalar_t*>(gradient.data), first + v * kThreads,
                       pack<scalar_t>(results));
        }
      };
      store_gradient(Wanted::kInput, args.grad_input);
      store_gradient(Wanted::kTarget, args.grad_target);
      if constexpr (Term::kHasWeight) {
        store_gradient(Wanted::kWeight, args.grad_weight);
      }
      continue;
    }
    for (int64_t i = base + threadIdx.x; i < numel; i += kThreads) {
      const auto store_gradient = [&](Wanted wanted, const Operand& gradient) {
        if (gradient.data != nullptr) {
          static_cast<scalar_t*>(gradient.data)[i] = from_acc<scalar_t>(elementwise_gradient(
              wanted, args, term, sizeof(scalar_t) == 2, to_acc<acc_t>(input[i]),
              to_acc<acc_t>(target[i]), weight != nullptr ? to_acc<acc_t>(weight[i]) : acc_t(1),
              full_grad_output ? to_acc<acc_t>(grad_output[i]) : scale));
        }
      };
      store_gradient(Wanted::kInput, args.grad_input);
      store_gradient(Wanted::kTarget, args.grad_target);
      if constexpr (Term::kHasWeight) {
        store_gradient(Wanted::kWeight, args.grad_weight);
      }
    }
  }
}

// ------------------------------------------------- any layout, mixed dtypes

template <typename acc_t>
__device__ __forceinline__ acc_t element_weight(const ElementwiseArgs& args, int64_t offset) {
  return args.weight.data == nullptr ? acc_t(1) : load_operand<acc_t>(args.weight, offset);
}

template <typename acc_t, typename Term>
__global__ void __launch_bounds__(kThreads)
    elementwise_forward_strided_kernel(const __grid_constant__ ElementwiseForwardArgs args,
                                       Term term, Partial* partials, Finalize finalize) {
  const bool reduce = args.reduction != Reduction::kNone;
  const Operand* const operands[5] = {&args.input, &args.target, &args.weight, &args.output,
                                      &args.grad_input};
  const bool is_half = is_half_type(args.input.dtype);
  let_next_kernel_start();
  Partial partial;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < args.space.numel;
       i += gridDim.x * int64_t{kThreads}) {
    int64_t offsets[5] = {};
    strided_offsets(args.space, operands, i, offsets);
    const acc_t x = load_operand<acc_t>(args.input, offsets[0]);  // fault: elementwise-offset
    const acc_t t = load_operand<acc_t>(args.target, offsets[1]);
    const acc_t weight = element_weight<acc_t>(args, offsets[2]);
    const acc_t value = term.forward(x, t) * weight;
    if (args.grad_input.data != nullptr) {
      store_operand<acc_t>(args.grad_input, offsets[4],
                           input_gradient(term, is_half, x, t, weight, unit_scale<acc_t>(args)));
    }
    if (reduce) {
      partial.sum += static_cast<double>(value);
      partial.weight += static_cast<double>(weight);
    } else {
      store_operand<acc_t>(args.output, offsets[3], value);
    }
  }
  if (reduce) {
    reduce_to_grid(partial, partials, finalize);
  }
}

// grad_output of one element: its own, or the reduction's scaled one.
template <typename acc_t>
__device__ __forceinline__ acc_t element_scale(const ElementwiseBackwardArgs& args,
                                               int64_t offset) {
  return args.reduction == Reduction::kNone ? load_operand<acc_t>(args.grad_output, offset)
                                            : reduction_scale<acc_t>(args);
}

template <typename acc_t, typename Term>
__global__ void __launch_bounds__(kThreads)
    elementwise_backward_strided_kernel(const __grid_constant__ ElementwiseBackwardArgs args,
                                        Term term) {
  const Operand* const operands[7] = {&args.input,       &args.target,     &args.weight,
                                      &args.grad_output, &args.grad_input, &args.grad_target,
                                      &args.grad_weight};
  const bool is_half = is_half_type(args.input.dtype);
  wait_for_previous_kernel();
  if (kept_is_right(args)) {
    return;
  }
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < args.space.numel;
       i += gridDim.x * int64_t{kThreads}) {
    int64_t offsets[7] = {};
    strided_offsets(args.space, operands, i, offsets);
    const acc_t x = load_operand<acc_t>(args.input, offsets[0]);
    const acc_t t = load_operand<acc_t>(args.target, offsets[1]);
    const acc_t weight = element_weight<acc_t>(args, offsets[2]);
    const acc_t scale = element_scale<acc_t>(args, offsets[3]);
    const auto store_gradient = [&](Wanted wanted, const Operand& gradient, int64_t offset) {
      if (gradient.data != nullptr) {
        store_operand<acc_t>(
            gradient, offset,
            elementwise_gradient(wanted, args, term, is_half, x, t, weight, scale));
      }
    };
    store_gradient(Wanted::kInput, args.grad_input, offsets[4]);
    store_gradient(Wanted::kTarget, args.grad_target, offsets[5]);
    store_gradient(Wanted::kWeight, args.grad_weight, offsets[6]);
  }
}

// ------------------------------------------- gradient of a broadcast operand

// Element r of the dimensions summed over, for element `output` of the gradient.
template <typename acc_t, typename Term>
struct BroadcastGradientSource {
  ElementwiseBackwardReduceArgs args;
  Term term;
  Wanted wanted;

  __device__ double operator()(int64_t output, int64_t r) const {
    const Operand* const operands[4] = {&args.input, &args.target, &args.weight, &args.grad_output};
    int64_t offsets[4] = {};
    strided_offsets(args.space, operands, output, offsets, 0, args.num_kept);
    strided_offsets(args.space, operands, r, offsets, args.num_kept);
    return static_cast<double>(elementwise_gradient(
        wanted, args, term, is_half_type(args.input.dtype),
        load_operand<acc_t>(args.input, offsets[0]), load_operand<acc_t>(args.target, offsets[1]),
        element_weight<acc_t>(args, offsets[2]), element_scale<acc_t>(args, offsets[3])));
  }
};

struct GradientSink {
  IterationSpace space;
  Operand gradient;
  int num_kept;

  __device__ void operator()(int64_t output, double sum) const {
    const Operand* const operands[1] = {&gradient};
    int64_t offsets[1] = {};
    strided_offsets(space, operands, output, offsets, 0, num_kept);
    store_operand<double>(gradient, offsets[0], sum);
  }
};

struct BroadcastExtent {
  int64_t outputs = 1;
  int64_t reduced = 1;

  explicit BroadcastExtent(const ElementwiseBackwardReduceArgs& args) {
    for (int dim = 0; dim < args.space.ndim; ++dim) {
      (dim < args.num_kept ? outputs : reduced) *= args.space.sizes[dim];
    }
  }
};

// ------------------------------------------------------------------ launches

bool vectorizable(const ElementwiseArgs& args, std::initializer_list<const Operand*> more) {
  if (!args.contiguous) {
    return false;
  }
  for (const Operand* operand : {&args.input, &args.target, &args.weight}) {
    if (!is_vector_aligned(operand->data)) {
      return false;
    }
  }
  return std::all_of(more.begin(), more.end(),
                     [](const Operand* operand) { return is_vector_aligned(operand->data); });
}

// Of any layout and dtype.
int64_t most_partials(int64_t numel) {
  return std::clamp<int64_t>(ceil_div(numel, kThreads), 1, kMaxPartials);
}

// For contiguous operands: no more than most_partials(), as a tile has kThreads elements or more.
int64_t reduce_blocks(int64_t tiles) {
  const int64_t most = std::min(ceil_div(tiles, kTilesOfBlock), kMaxPartials);
  return std::max(most, std::min(tiles, kFewBlocks));
}

int64_t strided_blocks(int64_t numel) { return std::min(most_partials(numel), kMaxStridedBlocks); }

Finalize make_finalize(const ElementwiseForwardArgs& args) {
  Finalize finalize;
  finalize.output = args.output.data;
  finalize.dtype = args.output.dtype;
  finalize.mean = args.reduction == Reduction::kMean;
  finalize.denominator_is_weight = args.weight.data != nullptr;
  finalize.denominator = args.denominator;
  finalize.weight_copies = args.weight_copies;  // fault: elementwise-weight-copies
  finalize.mean_terms = args.mean_terms;
  return finalize;
}

template <typename scalar_t, typename Term>
void forward_contiguous(const ElementwiseForwardArgs& args, const Term& term, Partial* partials,
                        cudaStream_t stream) {
  const auto* input = static_cast<const scalar_t*>(args.input.data);
  const auto* target = static_cast<const scalar_t*>(args.target.data);
  const auto* weight = static_cast<const scalar_t*>(args.weight.data);
  const int64_t tiles = std::max<int64_t>(ceil_div(args.space.numel, kTile<scalar_t>), 1);
  const auto launch = [&](auto stores, scalar_t* output, int64_t blocks, const Finalize& finalize) {
    const auto launch_weighted = [&](auto weighted) {
      launch_kernel("elementwise_forward_kernel",
                    elementwise_forward_kernel<scalar_t, Term, decltype(stores)::value,
                                               decltype(weighted)::value>,
                    {blocks, kThreads}, stream, input, target, weight, output, args.space.numel,
                    term, unit_scale<acc_type_t<scalar_t>>(args), partials, finalize);
    };
    if constexpr (Term::kHasWeight) {
      if (weight != nullptr) {
        launch_weighted(std::true_type{});
        return;
      }
    }
    launch_weighted(std::false_type{});
  };
  if (args.reduction == Reduction::kNone) {
    launch(std::integral_constant<Stores, Stores::kLosses>{},
           static_cast<scalar_t*>(args.output.data), tiles, Finalize{});
    return;
  }
  const Finalize finalize = make_finalize(args);
  const int64_t blocks = reduce_blocks(tiles);
  if (args.grad_input.data != nullptr) {
    launch(std::integral_constant<Stores, Stores::kGradients>{},
           static_cast<scalar_t*>(args.grad_input.data), blocks, finalize);
  } else {
    launch(std::integral_constant<Stores, Stores::kNothing>{}, nullptr, blocks, finalize);
  }
  launch_grid_reduce(partials, blocks, finalize, stream);
}

template <typename acc_t, typename Term>
void forward_strided(const ElementwiseForwardArgs& args, const Term& term, Partial* partials,
                     cudaStream_t stream) {
  const int64_t blocks = strided_blocks(args.space.numel);
  const Finalize finalize = make_finalize(args);
  launch_kernel("elementwise_forward_strided_kernel",
                elementwise_forward_strided_kernel<acc_t, Term>, {blocks, kThreads}, stream, args,
                term, partials, finalize);
  if (args.reduction != Reduction::kNone) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
}

}  // namespace

int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  return most_partials(args.space.numel) * kPartialDoubles;
}

void launch_elementwise_forward(const ElementwiseForwardArgs& args, double* scratch,
                                Context context) {
  if (args.space.numel == 0 && args.reduction == Reduction::kNone) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    const Operand* output = args.reduction == Reduction::kNone ? &args.output : &args.grad_input;
    if (vectorizable(args, {output})) {
      visit_floating(args.input.dtype, [&](auto type) {
        forward_contiguous<typename decltype(type)::type>(args, term, partials, stream);
      });
    } else if (args.acc_double) {
      forward_strided<double>(args, term, partials, stream);
    } else {
      forward_strided<float>(args, term, partials, stream);
    }
  });
}

void launch_elementwise_backward(const ElementwiseBackwardArgs& args, Context context) {
  if (args.space.numel == 0) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  const int64_t max_blocks = args.kept ? most_blocks_of_kept(kThreads) : kMaxGrid;
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    using Term = decltype(term);
    const Operand* grad_output =
        args.reduction == Reduction::kNone ? &args.grad_output : &args.input;
    if (vectorizable(args, {grad_output, &args.grad_input, &args.grad_target, &args.grad_weight})) {
      visit_floating(args.input.dtype, [&](auto type) {
        using scalar_t = typename decltype(type)::type;
        const int64_t blocks = std::min(ceil_div(args.space.numel, kTile<scalar_t>), max_blocks);
        launch_kernel("elementwise_backward_kernel", elementwise_backward_kernel<scalar_t, Term>,
                      {blocks, kThreads, 0, 1, true}, stream, args, term);
      });
      return;
    }
    const int64_t blocks = std::min(strided_blocks(args.space.numel), max_blocks);
    launch_kernel("elementwise_backward_strided_kernel",
                  args.acc_double ? elementwise_backward_strided_kernel<double, Term>
                                  : elementwise_backward_strided_kernel<float, Term>,
                  {blocks, kThreads, 0, 1, true}, stream, args, term);
  });
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  const BroadcastExtent extent(args);
  return ColumnReducePlan(extent.outputs, extent.reduced).scratch(extent.outputs);
}

void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& args, double* scratch,
                                        Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  const BroadcastExtent extent(args);
  Wanted wanted = Wanted::kInput;
  Operand gradient = args.grad_input;
  if (args.grad_target.data != nullptr) {
    wanted = Wanted::kTarget;
    gradient = args.grad_target;
  } else if (args.grad_weight.data != nullptr) {
    wanted = Wanted::kWeight;
    gradient = args.grad_weight;
  }
  const GradientSink sink{args.space, gradient, args.num_kept};
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    using Term = decltype(term);
    if (args.acc_double) {
      column_reduce(BroadcastGradientSource<double, Term>{args, term, wanted}, sink, extent.outputs,
                    extent.reduced, scratch, stream);
    } else {
      column_reduce(BroadcastGradientSource<float, Term>{args, term, wanted}, sink, extent.outputs,
                    extent.reduced, scratch, stream);
    }
  });
}

}  // namespace lossops::cuda
