// Elementwise losses: forward, with or without the reduction, and backward. One kernel for dense
// operands of one dtype, one for any others, one for gradients of operands that are broadcast;
// process() is the same in all.

#include <algorithm>
#include <cstdint>

#include "kernels/elements/box_tile.cuh"
#include "kernels/elements/dense_tile.cuh"
#include "kernels/elements/process.cuh"
#include "kernels/elements/quad_tile.cuh"
#include "kernels/elements/row_tile.cuh"
#include "kernels/elements/sum_tile.cuh"
#include "kernels/grid/check.cuh"
#include "kernels/grid/column_reduce.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/integers.h"
#include "launchers.h"
#include "strided.h"

namespace lossops::cuda {
namespace {

// Resident blocks a multiprocessor, at the least: 67 registers instead of 64 cost KL of fp16 11 %
// of its step.
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

// ------------------------------------------------------------------- kernels

// Blocks stride over the tiles of dense operands.
template <typename scalar_t, typename Work, typename Terms>
__global__ void __launch_bounds__(kTileThreads, kMinBlocks<scalar_t>)
    elementwise_dense_kernel(const __grid_constant__ DenseOperands operands, Work work, Terms terms,
                             const __grid_constant__ ElementScales scales,
                             acc_type_t<scalar_t> unit_scale, Partial* partials,
                             Finalize finalize) {
  BlockWork<acc_type_t<scalar_t>, Work> block(work, scales, unit_scale);
  if (!block.begin()) {
    return;
  }
  Partial partial;
  NoGradientSum no_sum;
  const int64_t whole_tiles = operands.numel / kDenseTile<scalar_t>;
  int64_t index = blockIdx.x;
  for (; index < whole_tiles; index += gridDim.x) {
    DenseTile<scalar_t> tile(operands, index);
    process(tile, work, scales, block.scale, terms, partial, no_sum);
  }
  if (index == whole_tiles) {
    // fault: elementwise-tail
    for (int64_t i = index * kDenseTile<scalar_t> + threadIdx.x; i < operands.numel;
         i += kTileThreads) {
      DenseRest<scalar_t> rest(operands, i);
      process(rest, work, scales, block.scale, terms, partial, no_sum);
    }
  }
  block.finish(partial, partials, finalize);
}

constexpr unsigned kForwardWork = kSumsLosses | kStoresLosses | kHasWeights | kWantsGradInput;
constexpr unsigned kWeightWork = kHasWeights | kWantsGradWeight;
constexpr unsigned kBackwardWork = kHasWeights | kHasGradOutputs | kWantsGradInput |
                                   kWantsGradTarget | kWantsGradWeight | kIsBackward;

// How a kernel takes the elements of a plan. kBlocks: resident a multiprocessor, at the least; as
// many as leave a thread its registers.
template <typename WholeTile, int kBlocks_>
struct InRows {
  using acc_t = typename WholeTile::acc_t;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kTileElements = kTileThreads * WholeTile::kSteps * WholeTile::kWidth;
  struct Shared {};

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const ElementPlan& plan,
                                                       const ChunkPlaces& places, Shared&,
                                                       int64_t tile, Body&& body) {
    const auto first =
        static_cast<uint32_t>(tile - places.chunk() * plan.chunk_tiles) * kTileElements;
    const uint32_t elements = places.elements();
    if constexpr (WholeTile::kSteps > 1) {
      if (first + kTileElements <= elements) {
        WholeTile whole(plan, places, first + threadIdx.x * WholeTile::kWidth);
        body(whole);
        return;
      }
    }
    const uint32_t last = first + kTileElements < elements ? first + kTileElements : elements;
    for (uint32_t number = first + threadIdx.x; number < last; number += kTileThreads) {
      RowTile<acc_t, 1, WholeTile::kIsHalf> rest(plan, places, number);
      body(rest);
    }
  }
};
// Tiles of forward are the same with a gradient and without one, for the same bits.
template <bool kIsHalf, unsigned kWork>
using Quads = InRows<QuadTile<kIsHalf ? 4 : 2, kIsHalf>, (kWork & kIsBackward) != 0 ? 3 : 4>;
template <bool kIsHalf, unsigned kWork>
using Rows = InRows<RowTile<float, 8, kIsHalf>, (kWork & kIsBackward) != 0 ? 3 : 4>;
using WeightedRows = InRows<RowTile<float, 2>, 3>;
using DoubleRows = InRows<RowTile<double, 1>, 2>;  // for little machine code

template <bool kIsBackward>
struct Boxes {
  using acc_t = BoxTile::acc_t;
  using Shared = BoxTile::Shared;
  static constexpr int kBlocks = kIsBackward ? 3 : 4;
  static constexpr int kTileElements = kBoxElements;

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const ElementPlan& plan,
                                                       const ChunkPlaces& places, Shared& shared,
                                                       int64_t /*tile*/, Body&& body) {
    BoxTile tile(plan, places, shared);
    body(tile);
  }
};

// Blocks stride over the tiles of a plan.
template <typename Taken, typename Work, typename Terms>
__global__ void __launch_bounds__(kTileThreads, Taken::kBlocks)
    elementwise_planned_kernel(const __grid_constant__ ElementPlan plan, Work work, Terms terms,
                               const __grid_constant__ ElementScales scales,
                               typename Taken::acc_t unit_scale, Partial* partials,
                               Finalize finalize) {
  __shared__ ChunkPlaces::Shared chunks;
  __shared__ typename Taken::Shared shared;
  BlockWork<typename Taken::acc_t, Work> block(work, scales, unit_scale);
  if (!block.begin()) {
    return;
  }
  Partial partial;
  NoGradientSum no_sum;
  ChunkPlaces places(plan, chunks, blockIdx.x);
  const int64_t tiles = plan.tiles();
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    places.move_to(index, index + gridDim.x);
    Taken::for_each_tile(plan, places, shared, index, [&](auto& tile) {
      process(tile, work, scales, block.scale, terms, partial, no_sum);
    });
  }
  block.finish(partial, partials, finalize);
}

template <typename acc_t>
constexpr int kSumSteps = sizeof(acc_t) == 8 ? 1 : 4;

// A block adds up its share of some sums.
template <typename acc_t, typename Work, typename Terms>
__global__ void __launch_bounds__(kTileThreads, sizeof(acc_t) == 8 ? 2 : 3)
    elementwise_sums_kernel(const __grid_constant__ SumPlan plan, Work work, Terms terms,
                            const __grid_constant__ ElementScales scales, Which which,
                            double* partials) {
  __shared__ double buffer[kTileThreads];
  BlockWork<acc_t, Work> block(work, scales, acc_t(1));
  if (!block.begin()) {
    return;
  }
  Partial no_losses;
  SumTile<acc_t, kSumSteps<acc_t>> tile(plan, blockIdx.x);
  GradientSum sum{which};
  while (tile.move_on()) {
    process(tile, work, scales, block.scale, terms, no_losses, sum);
  }
  tile.finish(sum.value, buffer, partials);
}

// ------------------------------------------------------------------ launches

// An elementwise operator as its kernels see it.
struct Launch {
  Operand operands[kNumOperands];
  DenseOperands dense;
  ElementScales scales;
  unsigned work = 0;

  explicit Launch(const ElementwiseForwardArgs& args) : scales(args) {
    add(args);
    if (args.reduction == Reduction::kNone) {
      add(kOutput, args.output);
    }
    add(kGradInput, args.grad_input);
    work = (args.reduction == Reduction::kNone ? kStoresLosses : kSumsLosses) |
           bit_if(args.weight, kHasWeights) | bit_if(args.grad_input, kWantsGradInput);
  }

  explicit Launch(const ElementwiseBackwardArgs& args) : scales(args) {
    add(args);
    if (args.reduction == Reduction::kNone) {
      add(kGradOutput, args.grad_output);
      work |= kHasGradOutputs;
    }
    add(kGradInput, args.grad_input);
    add(kGradTarget, args.grad_target);
    add(kGradWeight, args.grad_weight);
    work |= kIsBackward | bit_if(args.weight, kHasWeights) |
            bit_if(args.grad_input, kWantsGradInput) | bit_if(args.grad_target, kWantsGradTarget) |
            bit_if(args.grad_weight, kWantsGradWeight);
  }

  // Whether the kernel of dense operands takes it.
  bool is_dense(const ElementwiseArgs& args) const {
    return args.contiguous && std::all_of(std::begin(dense.data), std::end(dense.data),
                                          [](const void* data) { return is_vector_aligned(data); });
  }

  // In fp64, for little machine code, where a dtype is rare.
  bool computes_double(const ElementwiseArgs& args) const {
    return args.acc_double ||
           std::any_of(std::begin(operands), std::end(operands), [](const Operand& operand) {
             return operand.data != nullptr && operand.dtype != DType::kFloat32 &&
                    !is_half_type(operand.dtype);
           });
  }

  bool has_weights() const { return (work & kWeightWork) != 0; }
  bool is_backward() const { return (work & kIsBackward) != 0; }

 private:
  static unsigned bit_if(const Operand& operand, unsigned bit) {
    return operand.data != nullptr ? bit : 0;
  }
  void add(Which which, const Operand& operand) {
    operands[which] = operand;
    dense.data[which] = operand.data;
  }
  void add(const ElementwiseArgs& args) {
    std::fill(std::begin(dense.data), std::end(dense.data), nullptr);
    dense.numel = args.space.numel;
    dense.dtype = args.input.dtype;
    add(kInput, args.input);
    add(kTarget, args.target);
    add(kWeight, args.weight);
  }
};

// Blocks of a reduction over tiles.
int64_t reduce_blocks(int64_t tiles) {
  const int64_t most = std::min(ceil_div(tiles, kTilesOfBlock), kMaxPartials);
  return std::max(most, std::min(tiles, kFewBlocks));
}

// Blocks of a launch over the tiles of a plan. They have 256 (fp64) to 4096 (half types) elements,
// most of them 2048: half of what a tile of dense operands has. So a block has more of them than
// kTilesOfBlock, and few blocks are fewer. How many is a choice, not a measurement.
int64_t planned_blocks(int64_t tiles) {
  constexpr int64_t kTiles = 16;  // tiles of a block
  const int64_t most = std::min(ceil_div(tiles, kTiles), kMaxPartials);
  return std::max({most, std::min(tiles, kFewBlocks / 2), int64_t{1}});
}

int64_t dense_tiles(const ElementwiseArgs& args) {
  int64_t tile = 1;
  visit_floating(args.input.dtype,
                 [&](auto type) { tile = kDenseTile<typename decltype(type)::type>; });
  return std::max<int64_t>(ceil_div(args.space.numel, tile), 1);
}

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

// The factor of a gradient for a grad_output of 1.
template <typename acc_t>
acc_t unit_scale(const ElementwiseArgs& args) {
  return args.reduction == Reduction::kMean ? acc_t(1) / static_cast<acc_t>(args.denominator)
                                            : acc_t(1);
}

// What a loss can do of kPossible.
template <unsigned kPossible, typename Terms>
using WorkOf = AnyWork<Terms::kHasWeight ? kPossible : kPossible & ~kWeightWork>;

template <typename scalar_t, typename Terms>
void forward_dense(const ElementwiseForwardArgs& args, const Launch& what, int64_t blocks,
                   const Terms& terms, Partial* partials, const Finalize& finalize,
                   cudaStream_t stream) {
  const auto launch = [&](auto work) {
    using Work = decltype(work);
    launch_kernel("elementwise_dense_kernel", elementwise_dense_kernel<scalar_t, Work, Terms>,
                  {blocks, kTileThreads}, stream, what.dense, work, terms, what.scales,
                  unit_scale<acc_type_t<scalar_t>>(args), partials, finalize);
  };
  const auto launch_with = [&](auto weights) {
    constexpr unsigned kWeights = decltype(weights)::value;
    if ((what.work & kStoresLosses) != 0) {
      launch(FixedWork<kStoresLosses | kWeights>{});
    } else if ((what.work & kWantsGradInput) != 0) {
      launch(FixedWork<kSumsLosses | kWantsGradInput | kWeights>{});
    } else {
      launch(FixedWork<kSumsLosses | kWeights>{});
    }
  };
  if constexpr (std::is_same_v<scalar_t, double>) {  // for little machine code
    launch(WorkOf<kForwardWork, Terms>{what.work});
  } else {
    if constexpr (Terms::kHasWeight) {
      if (what.has_weights()) {
        launch_with(std::integral_constant<unsigned, kHasWeights>{});
        return;
      }
    }
    launch_with(std::integral_constant<unsigned, 0>{});
  }
}

// Calls body with the terms of a kernel that takes any loss.
template <typename Body>
void visit_any_term(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  if (what.has_weights()) {
    body(AnyTerm<true>{args.loss, args.params});
  } else {
    body(AnyTerm<false>{args.loss, args.params});
  }
}

// Calls body with the work and terms of a kernel without weights. Sums, which are what is asked for
// most, have kernels of their own for each loss: those need fewer registers.
template <typename Body>
void visit_work(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  const AnyTerm<false> any{args.loss, args.params};
  if (what.is_backward()) {
    body(AnyWork<kBackwardWork & ~kWeightWork>{what.work}, any);
  } else if ((what.work & kStoresLosses) != 0) {
    body(FixedWork<kStoresLosses>{}, any);
  } else {
    visit_loss_type(args.loss, [&](auto loss) {
      const TermOf<decltype(loss)> terms{args.params};
      if ((what.work & kWantsGradInput) == 0) {
        body(FixedWork<kSumsLosses>{}, terms);
      } else {
        body(FixedWork<kSumsLosses | kWantsGradInput>{}, terms);
      }
    });
  }
}

// Operands that are not dense, and the kernel that takes them: calls body with the plan and what
// the kernel is of.
template <typename Body>
void visit_planned(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  const bool is_double = what.computes_double(args);
  const bool packs = !is_double && !what.has_weights();
  ElementPlan plan = ElementPlanner(args.space, what.operands, packs).plan();
  const auto visit = [&](auto taken, auto work, auto terms) {
    plan.cut(decltype(taken)::kTileElements);
    body(plan, taken, work, terms);
  };
  constexpr unsigned kAll = kForwardWork | kBackwardWork;
  if (is_double) {
    visit_any_term(args, what, [&](auto terms) {
      visit(DoubleRows{}, WorkOf<kAll, decltype(terms)>{what.work}, terms);
    });
  } else if (what.has_weights()) {
    visit(WeightedRows{}, AnyWork<kAll>{what.work}, AnyTerm<true>{args.loss, args.params});
  } else if (plan.has_boxes) {
    const AnyTerm<false> any{args.loss, args.params};
    if (what.is_backward()) {
      visit(Boxes<true>{}, AnyWork<kBackwardWork & ~kWeightWork>{what.work}, any);
    } else {
      visit(Boxes<false>{}, AnyWork<kForwardWork & ~kWeightWork>{what.work}, any);
    }
  } else {
    visit_work(args, what, [&](auto work, auto terms) {
      constexpr unsigned kWork = decltype(work)::kBits;
      // A sum of losses of half types takes fewer instructions.
      constexpr bool kHalf = (kWork & kSumsLosses) != 0;
      if (kHalf && plan.is_half) {
        plan.has_quads ? visit(Quads<kHalf, kWork>{}, work, terms)
                       : visit(Rows<kHalf, kWork>{}, work, terms);
      } else {
        plan.has_quads ? visit(Quads<false, kWork>{}, work, terms)
                       : visit(Rows<false, kWork>{}, work, terms);
      }
    });
  }
}

// blocks: for a number of tiles.
template <typename Blocks>
int64_t launch_planned(const ElementwiseArgs& args, const Launch& what, const Blocks& blocks_of,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  int64_t blocks = 0;
  visit_planned(args, what, [&](const ElementPlan& plan, auto taken, auto work, auto terms) {
    using Taken = decltype(taken);
    blocks = blocks_of(plan.tiles());
    launch_kernel("elementwise_planned_kernel",
                  elementwise_planned_kernel<Taken, decltype(work), decltype(terms)>,
                  {blocks, kTileThreads, 0, 1, what.is_backward()}, stream, plan, work, terms,
                  what.scales, unit_scale<typename Taken::acc_t>(args), partials, finalize);
  });
  return blocks;
}

// ------------------------------------------- gradient of a broadcast operand

// The element of a gradient that a sum belongs to.
struct GradientSink {
  IterationSpace space;  // of the dimensions that are kept
  Operand gradient;      // strides over them

  __device__ void operator()(int64_t output, double sum) const {
    const Operand* const operands[1] = {&gradient};
    int64_t offsets[1] = {};
    strided_offsets(space, operands, output, offsets);
    store_operand<double>(gradient, offsets[0], sum);
  }
};

Which summed_gradient(const ElementwiseBackwardReduceArgs& args) {
  return args.grad_input.data != nullptr    ? kGradInput
         : args.grad_target.data != nullptr ? kGradTarget
                                            : kGradWeight;
}

GradientSink make_sink(const SumPlan& plan, Which which) {
  GradientSink sink;
  const PlanOperand& gradient = plan.operands[which];
  sink.gradient.data = gradient.data;
  sink.gradient.dtype = gradient.dtype;
  sink.space.ndim = plan.extents.ndim - plan.num_walked;
  sink.space.numel = plan.sums;
  for (int dim = 0; dim < sink.space.ndim; ++dim) {
    sink.space.sizes[dim] = plan.extents.sizes[plan.num_walked + dim];
    sink.gradient.strides[dim] = gradient.strides[plan.num_walked + dim] / gradient.bytes;
  }
  return sink;
}

// Weighted gradients too, for little machine code.
bool sums_double(const ElementwiseArgs& args, const Launch& what) {
  return what.has_weights() || what.computes_double(args);
}

SumPlan plan_sums(const ElementwiseBackwardReduceArgs& args, const Launch& what) {
  const int steps = sums_double(args, what) ? kSumSteps<double> : kSumSteps<float>;
  return SumPlanner(args.space, what.operands, args.num_kept, steps).plan();
}

}  // namespace

int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  Launch what(args);
  if (what.is_dense(args)) {
    return reduce_blocks(dense_tiles(args)) * kPartialDoubles;
  }
  int64_t blocks = 0;
  visit_planned(args, what,
                [&](const ElementPlan& plan, auto...) { blocks = planned_blocks(plan.tiles()); });
  return blocks * kPartialDoubles;
}

void launch_elementwise_forward(const ElementwiseForwardArgs& args, double* scratch,
                                Context context) {
  const bool reduce = args.reduction != Reduction::kNone;
  if (args.space.numel == 0 && !reduce) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  auto* const partials = reinterpret_cast<Partial*>(scratch);
  const Finalize finalize = make_finalize(args);
  const Launch what(args);
  int64_t blocks = 1;
  if (what.is_dense(args)) {
    blocks = reduce ? reduce_blocks(dense_tiles(args)) : dense_tiles(args);
    visit_elementwise_loss(args.loss, args.params, [&](auto term) {
      visit_floating(args.input.dtype, [&](auto type) {
        using scalar_t = typename decltype(type)::type;
        forward_dense<scalar_t>(args, what, blocks, FixedTerm<decltype(term)>{term}, partials,
                                finalize, stream);
      });
    });
  } else {
    blocks = launch_planned(args, what, planned_blocks, partials, finalize, stream);
  }
  if (reduce) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
  if (args.grad_target.data != nullptr) {
    // In a pass of its own: kernels for both would be a tenth of the machine code.
    ElementwiseBackwardArgs gradient;
    static_cast<ElementwiseArgs&>(gradient) = args;
    gradient.grad_target = args.grad_target;
    launch_elementwise_backward(gradient, context);
  }
}

void launch_elementwise_backward(const ElementwiseBackwardArgs& args, Context context) {
  if (args.space.numel == 0) {
    return;
  }
  const auto stream = static_cast<cudaStream_t>(context);
  const int64_t most_blocks = args.kept ? most_blocks_of_kept(kTileThreads) : kMaxGrid;
  const Launch what(args);
  if (!what.is_dense(args)) {
    const auto blocks = [&](int64_t tiles) { return std::min(planned_blocks(tiles), most_blocks); };
    launch_planned(args, what, blocks, nullptr, Finalize{}, stream);
    return;
  }
  visit_any_term(args, what, [&](auto terms) {
    using Terms = decltype(terms);
    const WorkOf<kBackwardWork, Terms> work{what.work};
    visit_floating(args.input.dtype, [&](auto type) {
      // Half types share a kernel, for little machine code; with weights there are not registers
      // enough for that.
      using own_t = typename decltype(type)::type;
      constexpr bool kShares = sizeof(own_t) == 2 && !Terms::kHasWeight;
      using scalar_t = std::conditional_t<kShares, AnyHalf, own_t>;
      const int64_t tiles = std::max<int64_t>(ceil_div(args.space.numel, kDenseTile<scalar_t>), 1);
      const int64_t blocks = std::min(tiles, most_blocks);
      launch_kernel("elementwise_dense_kernel",
                    elementwise_dense_kernel<scalar_t, decltype(work), Terms>,
                    {blocks, kTileThreads, 0, 1, true}, stream, what.dense, work, terms,
                    what.scales, acc_type_t<scalar_t>(1), nullptr, Finalize{});
    });
  });
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  const SumPlan plan = plan_sums(args, Launch(args));
  return plan.splits * plan.sums;
}

void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& args, double* scratch,
                                        Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  const Launch what(args);
  const SumPlan plan = plan_sums(args, what);
  const Which which = summed_gradient(args);
  if (plan.sums == 0) {
    return;
  }
  if (plan.walk > 0) {
    visit_any_term(args, what, [&](auto terms) {
      using Terms = decltype(terms);
      const WorkOf<kBackwardWork, Terms> work{what.work};
      const auto launch = [&](auto kernel) {
        launch_kernel("elementwise_sums_kernel", kernel, {plan.blocks(), kTileThreads, 0, 1, true},
                      stream, plan, work, terms, what.scales, which, scratch);
      };
      if constexpr (Terms::kHasWeight) {
        launch(elementwise_sums_kernel<double, decltype(work), Terms>);
      } else {
        sums_double(args, what) ? launch(elementwise_sums_kernel<double, decltype(work), Terms>)
                                : launch(elementwise_sums_kernel<float, decltype(work), Terms>);
      }
    });
  }
  column_fold(ColumnPartials{scratch, plan.sums}, make_sink(plan, which), plan.sums,
              plan.walk > 0 ? plan.splits : 0, stream);
}

}  // namespace lossops::cuda
