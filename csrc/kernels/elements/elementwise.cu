// Elementwise losses: forward, with or without the reduction, and backward. One kernel for dense
// operands of one dtype, one for rows of others, one for any layout; process() is the same in all.

#include <algorithm>
#include <cstdint>
#include <optional>

#include "kernels/block_reduce.cuh"
#include "kernels/check.cuh"
#include "kernels/column_reduce.cuh"
#include "kernels/device.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/elements/gradient_sum.cuh"
#include "kernels/elements/process.cuh"
#include "kernels/elements/run_plan.h"
#include "kernels/elements/run_tile.cuh"
#include "kernels/elements/tile_plan.h"
#include "kernels/elements/tiles.cuh"
#include "kernels/grid_reduce.cuh"
#include "kernels/integers.h"
#include "kernels/launch.cuh"
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
// Resident blocks a multiprocessor of the kernel of rows, at the least.
template <int kWidth>
constexpr int kRunBlocks = kWidth == 8 ? 4 : 3;
// 1 MiB of partials, which a cluster folds in microseconds.
constexpr int64_t kMaxPartials = 65536;

// ------------------------------------------------------------------- kernels

// Blocks stride over the tiles of dense operands.
template <typename scalar_t, typename Work, typename Term>
__global__ void __launch_bounds__(kTileThreads, kMinBlocks<scalar_t>)
    elementwise_dense_kernel(const __grid_constant__ DenseOperands operands, Work work, Term term,
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
    process(tile, work, scales, block.scale, term, partial, no_sum);
  }
  if (index == whole_tiles) {
    // fault: elementwise-tail
    for (int64_t i = index * kDenseTile<scalar_t> + threadIdx.x; i < operands.numel;
         i += kTileThreads) {
      DenseRest<scalar_t> rest(operands, i);
      process(rest, work, scales, block.scale, term, partial, no_sum);
    }
  }
  block.finish(partial, partials, finalize);
}

// Which gradient is added up, and in how many parts each of its sums.
struct SummedGradient {
  Which which = kNumOperands;  // none
  double* partials = nullptr;  // (splits, outputs)
  int64_t outputs = 0;
};

// A block takes neighbouring rows, a team of its lanes one of them at a time.
template <int kWidth, typename Work, typename Term>
__global__ void __launch_bounds__(kTileThreads, kRunBlocks<kWidth>)
    elementwise_runs_kernel(const __grid_constant__ RunPlan plan, Work work, Term term,
                            const __grid_constant__ ElementScales scales, float unit_scale,
                            Partial* partials, Finalize finalize) {
  constexpr int kSteps = Work::all().has(kHasWeights) ? RunSteps::kWithWeights
                         : kWidth == 8                ? RunSteps::kOfHalves
                                                      : RunSteps::kOfFloats;
  using Tile = RunTile<Work, kWidth, kSteps>;
  BlockWork<float, Work> block(work, scales, unit_scale);
  if (!block.begin()) {
    return;
  }
  Partial partial;
  NoGradientSum no_sum;
  Tile tile(plan);
  const RowRange range(plan.rows, plan.teams(), blockIdx.x, gridDim.x);
  for (uint32_t row = range.first + (threadIdx.x >> plan.team_bits); row < range.last;
       row += plan.teams()) {
    for (tile.move_to(row); tile.is_in_row(); tile.move_on()) {
      process(tile, work, scales, block.scale, term, partial, no_sum);
    }
  }
  block.finish(partial, partials, finalize);
}

// A team adds up a part of a walk at a time.
template <int kWidth, typename Work, typename Term>
__global__ void __launch_bounds__(kTileThreads, kRunBlocks<4>)
    elementwise_run_sums_kernel(const __grid_constant__ RunPlan plan, Work work, Term term,
                                const __grid_constant__ ElementScales scales,
                                SummedGradient summed) {
  // Gradients are added up, not written.
  using Tile = RunTile<AnyWork<kHasGradOutputs>, kWidth, RunSteps::kWithSums>;
  BlockWork<float, Work> block(work, scales, 1.0f);
  if (!block.begin()) {
    return;
  }
  Partial no_losses;
  Tile tile(plan);
  RunSum<Tile> sum;
  const uint32_t lane = threadIdx.x & static_cast<uint32_t>(plan.team() - 1);
  const RowRange range(plan.parts(), plan.teams(), blockIdx.x, gridDim.x);
  for (uint32_t batch = range.first; batch < range.last; batch += plan.teams()) {
    // All lanes stay for the sum over a team; those of teams that have no part add nothing.
    const uint32_t number = batch + (threadIdx.x >> plan.team_bits);
    const bool has_part = number < range.last;
    const WalkPart part(plan, has_part ? number : range.first);
    sum.clear();
    tile.set_chunk(part.chunk);
    tile.move_to(part.first);
    for (uint32_t row = part.first; has_part && row < part.last;) {
      while (tile.is_in_row()) {
        process(tile, work, scales, block.scale, term, no_losses, sum);
        if (plan.keeps_lead) {
          break;
        }
        tile.move_on();
      }
      if (++row < part.last) {
        tile.move_to_next(row);
      }
    }
    double* const partials =
        summed.partials + part.split * summed.outputs + sum_number(plan, summed.which, part.first);
    if (plan.keeps_lead) {
      if (has_part) {
        sum.write(tile, partials);
      }
    } else {
      const double total = sum.total(plan.team());
      if (has_part && lane == 0) {
        *partials = total;
      }
    }
  }
}

// A block walks over consecutive tiles of a group, which `splits` blocks share. One kernel for all
// work: it is for layouts of which few are large.
template <typename acc_t, typename Work, typename Term>
__global__ void __launch_bounds__(kTileThreads, 2)
    elementwise_planned_kernel(const __grid_constant__ TilePlan plan, Work work, Term term,
                               const __grid_constant__ ElementScales scales, acc_t unit_scale,
                               SummedGradient summed, int64_t splits, Partial* partials,
                               Finalize finalize) {
  using Tile = PlannedTile<acc_t>;
  extern __shared__ __align__(kUnitBytes) char shared[];
  __shared__ TilePlace places[Tile::kPlaces];
  BlockWork<acc_t, Work> block(work, scales, unit_scale);
  if (!block.begin()) {
    return;
  }
  const int64_t group = blockIdx.x / splits;
  const int64_t split = blockIdx.x - group * splits;
  const int64_t tiles = (plan.walk + splits - 1) / splits;
  const int64_t first = split * tiles;
  const int64_t last = first + tiles < plan.walk ? first + tiles : plan.walk;
  Partial partial;
  Tile tile(plan, places, shared);
  GradientSum<Tile> sum(summed.which);
  tile.walk(first, last, group,
            [&] { process(tile, work, scales, block.scale, term, partial, sum); });
  if (summed.partials != nullptr) {
    __shared__ double sums[kTileThreads];
    sum.finish(tile, sums, summed.partials + split * summed.outputs);
  }
  block.finish(partial, partials, finalize);
}

// ------------------------------------------------------------------ launches

constexpr unsigned kForwardWork = kSumsLosses | kStoresLosses | kHasWeights | kWantsGradInput;
constexpr unsigned kWeightWork = kHasWeights | kWantsGradWeight;
constexpr unsigned kBackwardWork = kHasWeights | kHasGradOutputs | kWantsGradInput |
                                   kWantsGradTarget | kWantsGradWeight | kIsBackward;

// An elementwise operator as its kernels see it.
struct Launch {
  Operand operands[kNumOperands];
  // One of the two by plan(): of rows where the operands have such, else of tiles. They are large,
  // and dense operands need neither.
  std::optional<RunPlan> runs;
  std::optional<TilePlan> tiles;
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

  void plan(const IterationSpace& space, bool acc_double, const Operand* summed = nullptr) {
    const RunPlanner runs_planner(space, operands, acc_double, summed);
    if (runs_planner.has_plan()) {
      runs = runs_planner.plan();
    } else {
      tiles = TilePlanner(space, operands, acc_double, summed).plan();
    }
  }

  // Blocks of the kernel that plan() chose: enough for any GPU, so few that their start is a small
  // part of what they do.
  int64_t blocks() const {
    constexpr int64_t kBlocks = 4096;
    const int64_t parts =
        runs ? ceil_div(runs->parts(), runs->teams()) : std::max<int64_t>(tiles->walk, 1);
    return ceil_div(parts, ceil_div(parts, kBlocks));
  }

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

template <typename scalar_t, typename Term>
void forward_dense(const ElementwiseForwardArgs& args, const Launch& what, int64_t blocks,
                   const Term& term, Partial* partials, const Finalize& finalize,
                   cudaStream_t stream) {
  using acc_t = acc_type_t<scalar_t>;
  const auto launch = [&](auto work) {
    launch_kernel("elementwise_dense_kernel",
                  elementwise_dense_kernel<scalar_t, decltype(work), Term>, {blocks, kTileThreads},
                  stream, what.dense, work, term, what.scales, unit_scale<acc_t>(args), partials,
                  finalize);
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
  if constexpr (Term::kHasWeight) {
    if ((what.work & kHasWeights) != 0) {
      launch_with(std::integral_constant<unsigned, kHasWeights>{});
      return;
    }
  }
  launch_with(std::integral_constant<unsigned, 0>{});
}

// Of work, what a term has.
template <unsigned kPossible, typename Term>
using WorkOf = AnyWork<Term::kHasWeight ? kPossible : kPossible & ~kWeightWork>;

template <unsigned kPossible, typename Term>
void launch_runs(const ElementwiseArgs& args, const Launch& what, const Term& term, int64_t blocks,
                 bool overlap, Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  const auto launch = [&](auto width, auto work) {
    launch_kernel("elementwise_runs_kernel",
                  elementwise_runs_kernel<decltype(width)::value, decltype(work), Term>,
                  {blocks, kTileThreads, 0, 1, overlap}, stream, *what.runs, work, term,
                  what.scales, unit_scale<float>(args), partials, finalize);
  };
  if constexpr (Term::kHasWeight) {
    if ((what.work & kWeightWork) != 0) {
      launch(std::integral_constant<int, 4>{}, AnyWork<kPossible>{what.work});
      return;
    }
  }
  const AnyWork<kPossible & ~kWeightWork> work{what.work};
  if (what.runs->width == 8) {
    launch(std::integral_constant<int, 8>{}, work);
  } else {
    launch(std::integral_constant<int, 4>{}, work);
  }
}

template <typename Term>
void launch_run_sums(const Launch& what, const Term& term, const SummedGradient& summed,
                     cudaStream_t stream) {
  using Work = AnyWork<kBackwardWork & ~kWeightWork>;
  launch_kernel("elementwise_run_sums_kernel", elementwise_run_sums_kernel<4, Work, Term>,
                {what.blocks(), kTileThreads, 0, 1, true}, stream, *what.runs, Work{what.work},
                term, what.scales, summed);
}

// summed: the gradient that is added up, if any.
template <typename Term>
void launch_planned(const ElementwiseArgs& args, const Launch& what, const Term& term,
                    const SummedGradient& summed, int64_t splits, bool overlap, Partial* partials,
                    const Finalize& finalize, cudaStream_t stream) {
  const auto launch = [&](auto like) {
    using acc_t = decltype(like);
    using Work = WorkOf<kForwardWork | kBackwardWork, Term>;
    constexpr int kMostShared = 64 << 10;
    const auto kernel = elementwise_planned_kernel<acc_t, Work, Term>;
    const int64_t shared_bytes = what.tiles->shared_bytes();
    allow_shared_bytes(kernel, shared_bytes, (48 << 10) - kTileSharedBytes, kMostShared);
    launch_kernel("elementwise_planned_kernel", kernel,
                  {what.tiles->groups * splits, kTileThreads, shared_bytes, 1, overlap}, stream,
                  *what.tiles, Work{what.work}, term, what.scales, unit_scale<acc_t>(args), summed,
                  splits, partials, finalize);
  };
  args.acc_double ? launch(double()) : launch(float());
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

// The sums of one gradient of a launch.
struct GradientSumPlan {
  Which which = kGradInput;
  GradientSink sink;
  int64_t outputs = 1;
  int64_t splits = 1;  // blocks that share a sum

  // Makes `what` add the gradient up, in partials whose address it does not know yet.
  GradientSumPlan(const ElementwiseBackwardReduceArgs& args, Launch& what) {
    which = args.grad_input.data != nullptr    ? kGradInput
            : args.grad_target.data != nullptr ? kGradTarget
                                               : kGradWeight;
    Operand& operand = what.operands[which];
    sink.gradient = operand;
    sink.space.ndim = args.num_kept;
    for (int dim = 0; dim < args.space.ndim; ++dim) {
      const bool is_kept = dim < args.num_kept;
      operand.strides[dim] = is_kept ? outputs : 0;
      if (is_kept) {
        sink.space.sizes[dim] = args.space.sizes[dim];
        outputs *= args.space.sizes[dim];
      }
    }
    sink.space.numel = outputs;
    operand.dtype = DType::kFloat64;
    what.plan(args.space, args.acc_double, &operand);
    if (what.runs) {
      splits = what.runs->splits.value;
      return;
    }
    // Enough blocks for any GPU; each still walks over some tiles.
    constexpr int64_t kBlocks = 4096;
    constexpr int64_t kFewestTiles = 4;
    const TilePlan& plan = *what.tiles;
    const int64_t most = std::max<int64_t>(plan.walk / kFewestTiles, 1);
    splits = std::clamp<int64_t>(kBlocks / std::max<int64_t>(plan.groups, 1), 1, most);
    splits = ceil_div(std::max<int64_t>(plan.walk, 1),
                      ceil_div(std::max<int64_t>(plan.walk, 1), splits));
  }

  int64_t scratch() const { return splits * outputs; }
};

}  // namespace

int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  Launch what(args);
  if (what.is_dense(args)) {
    return reduce_blocks(dense_tiles(args)) * kPartialDoubles;
  }
  what.plan(args.space, args.acc_double);
  return what.blocks() * kPartialDoubles;
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
  Launch what(args);
  int64_t blocks = 1;
  const bool is_dense = what.is_dense(args);
  if (is_dense) {
    blocks = reduce ? reduce_blocks(dense_tiles(args)) : dense_tiles(args);
  } else {
    what.plan(args.space, args.acc_double);
    blocks = what.blocks();
  }
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    if (is_dense) {
      visit_floating(args.input.dtype, [&](auto type) {
        forward_dense<typename decltype(type)::type>(args, what, blocks, term, partials, finalize,
                                                     stream);
      });
    } else if (what.runs) {
      launch_runs<kForwardWork>(args, what, term, blocks, false, partials, finalize, stream);
    } else {
      launch_planned(args, what, term, {}, blocks, false, partials, finalize, stream);
    }
  });
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
  Launch what(args);
  const bool is_dense = what.is_dense(args);
  if (!is_dense) {
    what.plan(args.space, args.acc_double);
  }
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    using Work = AnyWork<kBackwardWork>;
    if (!is_dense) {
      const int64_t blocks = std::min(what.blocks(), most_blocks);
      if (what.runs) {
        launch_runs<kBackwardWork>(args, what, term, blocks, true, nullptr, Finalize{}, stream);
      } else {
        launch_planned(args, what, term, {}, blocks, true, nullptr, Finalize{}, stream);
      }
      return;
    }
    visit_floating(args.input.dtype, [&](auto type) {
      using scalar_t = typename decltype(type)::type;
      const int64_t blocks = std::min(dense_tiles(args), most_blocks);
      launch_kernel("elementwise_dense_kernel",
                    elementwise_dense_kernel<scalar_t, Work, decltype(term)>,
                    {blocks, kTileThreads, 0, 1, true}, stream, what.dense, Work{what.work}, term,
                    what.scales, acc_type_t<scalar_t>(1), nullptr, Finalize{});
    });
  });
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  Launch what(args);
  return GradientSumPlan(args, what).scratch();
}

void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& args, double* scratch,
                                        Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  Launch what(args);
  const GradientSumPlan sum(args, what);
  if (sum.outputs == 0) {
    return;
  }
  int64_t parts = 0;
  if (args.space.numel > 0) {
    parts = sum.splits;
    const SummedGradient summed{sum.which, scratch, sum.outputs};
    visit_elementwise_loss(args.loss, args.params, [&](auto term) {
      if (what.runs) {
        launch_run_sums(what, term, summed, stream);
        return;
      }
      launch_planned(args, what, term, summed, sum.splits, true, nullptr, Finalize{}, stream);
    });
  }
  column_fold(ColumnPartials{scratch, sum.outputs}, sum.sink, sum.outputs, parts, stream);
}

}  // namespace lossops::cuda
