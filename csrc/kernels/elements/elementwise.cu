// Launches of elementwise losses: forward, with or without the reduction, and backward.
// visit_kernel() chooses the kernel.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/elements/elementwise.cuh"
#include "kernels/grid/column_reduce.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/integers.h"
#include "launchers.h"
#include "strided.h"

namespace lossops::cuda {
namespace {

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
// Tiles of boxes of a block, also where nothing is reduced. A choice, not a measurement.
constexpr int64_t kBoxTilesOfBlock = 4;
constexpr int64_t kFewBoxBlocks = 4096;
// 1 MiB of partials, which a cluster folds in microseconds.
constexpr int64_t kMaxPartials = 65536;

// What kernels may be asked for.
constexpr unsigned kForwardWork = kSumsLosses | kStoresLosses | kHasWeights | kWantsGradInput;
constexpr unsigned kWeightWork = kHasWeights | kWantsGradWeight;
constexpr unsigned kBackwardWork = kHasWeights | kHasGradOutputs | kWantsGradInput |
                                   kWantsGradTarget | kWantsGradWeight | kIsBackward;

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
    // In all other cases launch_elementwise_forward() launches a backward pass for it.
    if (traits_of(args.loss).writes_target_gradient && is_dense(args) &&
        is_vector_aligned(args.grad_target.data) && !has_weights() && !computes_double(args)) {
      add(kGradTarget, args.grad_target);
      work |= bit_if(args.grad_target, kWantsGradTarget);
    }
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

  bool sums_losses() const { return (work & kSumsLosses) != 0; }
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
int64_t reduce_blocks(int64_t tiles, int64_t tiles_of_block, int64_t few_blocks) {
  const int64_t most = std::min(ceil_div(tiles, tiles_of_block), kMaxPartials);
  return std::max({most, std::min(tiles, few_blocks), int64_t{1}});
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

// What a loss can do of kPossible.
template <unsigned kPossible, typename Terms>
using WorkOf = AnyWork<Terms::kHasWeight ? kPossible : kPossible & ~kWeightWork>;

// Calls body with the terms of a kernel that takes any loss.
template <typename Body>
void visit_any_term(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  if (what.has_weights()) {
    body(AnyTerm<true>{args.loss, args.params});
  } else {
    body(AnyTerm<false>{args.loss, args.params});
  }
}

// Calls body with the work of a forward pass, known when its kernel is compiled.
template <unsigned kWeights, typename Body>
void visit_forward_work(const Launch& what, const Body& body) {
  if ((what.work & kStoresLosses) != 0) {
    body(FixedWork<kStoresLosses | kWeights>{});
  } else if ((what.work & kWantsGradInput) != 0) {
    body(FixedWork<kSumsLosses | kWantsGradInput | kWeights>{});
  } else {
    body(FixedWork<kSumsLosses | kWeights>{});
  }
}

template <typename scalar_t, typename Term, typename Body>
void visit_dense_term(const Launch& what, const Term& term, const Body& body) {
  const auto visit = [&](auto work) { body(Dense<scalar_t>{}, what.dense, work, term); };
  if constexpr (std::is_same_v<scalar_t, double>) {  // for little machine code
    visit(WorkOf<kForwardWork, Term>{what.work});
  } else if (!what.has_weights()) {
    if constexpr (Term::kWritesTargetGradient) {
      if ((what.work & kWantsGradTarget) != 0) {
        visit(AnyWork<kSumsLosses | kWantsGradInput | kWantsGradTarget>{what.work});
        return;
      }
    }
    visit_forward_work<0>(what, visit);
  } else if constexpr (Term::kHasWeight) {
    visit_forward_work<kHasWeights>(what, visit);
  }
}

template <typename Body>
void visit_dense_forward(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    visit_floating(args.input.dtype, [&](auto type) {
      visit_dense_term<typename decltype(type)::type>(what, term, body);
    });
  });
}

template <typename Body>
void visit_dense_backward(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  visit_any_term(args, what, [&](auto terms) {
    using Terms = decltype(terms);
    visit_floating(args.input.dtype, [&](auto type) {
      // Half types share a kernel, for little machine code; with weights there are not registers
      // enough for that.
      using own_t = typename decltype(type)::type;
      constexpr bool kShares = sizeof(own_t) == 2 && !Terms::kHasWeight;
      using scalar_t = std::conditional_t<kShares, AnyHalf, own_t>;
      body(Dense<scalar_t>{}, what.dense, WorkOf<kBackwardWork, Terms>{what.work}, terms);
    });
  });
}

template <typename Body>
void visit_planned(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  const bool is_double = what.computes_double(args);
  const bool packs = !is_double && !what.has_weights();
  const Layout layout(args.space, what.operands);
  BoxPlanner boxes(layout, what.operands);
  StripPlanner strips(layout, what.operands);
  // All kernels take the same number of resident blocks, so that their tiles are the same.
  const int64_t resident = int64_t{4} * std::max(current_device_limits().multiprocessors, 1);
  const auto visit = [&](auto taken, auto work, auto terms) {
    using Taken = decltype(taken);
    body(taken, strips.plan(Taken::kWidth, Taken::kSteps, resident), work, terms);
  };
  const auto visit_strips = [&](auto work, auto terms) {
    constexpr unsigned kWork = decltype(work)::kBits;
    // Forward has kernels for half types alone, which take fewer instructions. Backward does not,
    // for little machine code.
    constexpr bool kHalf = (kWork & kIsBackward) == 0;
    if (kHalf && strips.is_half()) {
      strips.has_quads() ? visit(InQuads<kHalf, kWork>{}, work, terms)
                         : visit(InSingles<kHalf, kWork>{}, work, terms);
    } else {
      strips.has_quads() ? visit(InQuads<false, kWork>{}, work, terms)
                         : visit(InSingles<false, kWork>{}, work, terms);
    }
  };
  constexpr unsigned kAll = kForwardWork | kBackwardWork;
  const AnyTerm<false> any{args.loss, args.params};
  const AnyWork<kForwardWork & ~kWeightWork> forward{what.work};
  const AnyWork<kBackwardWork & ~kWeightWork> backward{what.work};
  if (is_double) {
    visit_any_term(args, what, [&](auto terms) {
      visit(InDoubles{}, WorkOf<kAll, decltype(terms)>{what.work}, terms);
    });
  } else if (!packs) {
    visit(InWeightedSingles{}, AnyWork<kAll>{what.work}, AnyTerm<true>{args.loss, args.params});
  } else if (boxes.has_boxes()) {
    what.is_backward() ? body(InBoxes<true>{}, boxes.plan(), backward, any)
                       : body(InBoxes<false>{}, boxes.plan(), forward, any);
  } else if (what.is_backward()) {
    visit_strips(backward, any);
  } else {
    visit_forward_work<0>(what, [&](auto work) {
      if constexpr (work.has(kStoresLosses)) {
        visit_strips(work, any);
      } else {  // asked for most: kernels of one loss need fewer registers
        visit_loss_type(
            args.loss, [&](auto loss) { visit_strips(work, TermOf<decltype(loss)>{args.params}); });
      }
    });
  }
}

// Calls body(taken, plan, work, terms) with what the kernel that takes the operands is made of.
template <typename Body>
void visit_kernel(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  if (!what.is_dense(args)) {
    visit_planned(args, what, body);
  } else if (what.is_backward()) {
    visit_dense_backward(args, what, body);
  } else {
    visit_dense_forward(args, what, body);
  }
}

// Blocks of a launch over tiles of `taken`.
template <typename Taken>
int64_t blocks_of(Taken /*taken*/, const typename Taken::Plan& plan, const Launch& what) {
  const int64_t tiles = Taken::tiles(plan);
  if constexpr (std::is_same_v<typename Taken::Plan, StripPlan>) {
    return reduce_blocks(tiles, 1, 1);
  } else if constexpr (std::is_same_v<typename Taken::Plan, BoxPlan>) {
    return reduce_blocks(tiles, kBoxTilesOfBlock, kFewBoxBlocks);
  } else {
    return what.sums_losses() ? reduce_blocks(tiles, kTilesOfBlock, kFewBlocks) : tiles;
  }
}

// Returns how many blocks there are: of a reduction, partials.
int64_t launch(const ElementwiseArgs& args, const Launch& what, int64_t most_blocks,
               Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  int64_t blocks = 0;
  visit_kernel(args, what, [&](auto taken, const auto& plan, auto work, auto terms) {
    using Taken = decltype(taken);
    blocks = std::min(blocks_of(taken, plan, what), most_blocks);
    launch_kernel("elementwise_kernel", elementwise_kernel<Taken, decltype(work), decltype(terms)>,
                  {blocks, kTileThreads, Taken::bytes(plan), 1, what.is_backward()}, stream, plan,
                  work, terms, what.scales, reduction_scale(args, typename Taken::acc_t(1)),
                  partials, finalize);
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
  const Launch what(args);
  int64_t blocks = 0;
  visit_kernel(args, what, [&](auto taken, const auto& plan, auto...) {
    blocks = blocks_of(taken, plan, what);
  });
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
  const int64_t blocks = launch(args, what, kMaxGrid, partials, finalize, stream);
  if (reduce) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
  if (args.grad_target.data != nullptr && (what.work & kWantsGradTarget) == 0) {
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
  const int64_t most_blocks = args.kept ? most_blocks_of_kept(kTileThreads) : kMaxGrid;
  launch(args, Launch(args), most_blocks, nullptr, Finalize{}, static_cast<cudaStream_t>(context));
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  const SumPlan plan = plan_sums(args, Launch(args));
  return plan.splits > 1 ? plan.splits * plan.sums : 0;
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
  if (plan.walk == 0 || plan.splits > 1) {
    column_fold(ColumnPartials{scratch, plan.sums}, make_sink(plan, which), plan.sums,
                plan.walk > 0 ? plan.splits : 0, stream);
  }
}

}  // namespace lossops::cuda
