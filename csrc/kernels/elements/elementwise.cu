// Launches of elementwise losses: forward, with or without the reduction, and backward, with or
// without a gradient that is summed. visit_kernel() chooses the kernel.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/elements/elementwise.cuh"
#include "kernels/elements/gradient_sums.cuh"
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
// 3045, where tiles of fp32 were twice as large.
constexpr int64_t kTilesOfBlock = 4;
// But no fewer blocks than these where there are as many tiles: a step of MSE of fp32 8192x8192
// took 197 us with 4 tiles a block, as large as that, and 195 with 2.
constexpr int64_t kFewBlocks = 8192;
// Tiles of boxes of a block, also where nothing is reduced; and four waves of an H200's blocks.
// Choices, not measurements.
constexpr int64_t kBoxTilesOfBlock = 4;
constexpr int64_t kFewBoxBlocks = 2112;
// 1 MiB of partials, which a cluster folds in microseconds.
constexpr int64_t kMaxPartials = 65536;

// What kernels may be asked for.
constexpr unsigned kForwardWork = kSumsLosses | kStoresLosses | kHasWeights | kWantsGradInput;
constexpr unsigned kWeightWork = kHasWeights | kWantsGradWeight;
constexpr unsigned kBackwardWork = kHasWeights | kHasGradOutputs | kWantsGradInput |
                                   kWantsGradTarget | kWantsGradWeight | kIsBackward;
// What backward passes may be asked for that sum nothing and have no weights, but for those in
// InDoubles. All others read input, taken or not: one branch more made the sums of fp32
// 20x2744x3133 take 1.09 times as long.
constexpr unsigned kPlainBackwardWork = (kBackwardWork & ~kWeightWork) | kIgnoresInput;
// Of dense operands: of these, and of forward passes that compute more than the gradient of input.
constexpr unsigned kGradientsWork = kSumsLosses | kPlainBackwardWork;

// Whether a gradient is that of a broadcast operand, a sum along the dimensions where it is.
bool is_summed(const IterationSpace& space, const Operand& gradient) {
  for (int dim = 0; dim < space.ndim; ++dim) {
    if (gradient.data != nullptr && gradient.strides[dim] == 0 && space.sizes[dim] != 1) {
      return true;
    }
  }
  return false;
}

// An elementwise operator as its kernel sees it.
struct Launch {
  Operand operands[kNumOperands];
  DenseOperands dense;
  ElementScales scales;
  unsigned work = 0;
  Which summed = kNumOperands;  // a gradient; kNumOperands: none

  explicit Launch(const ElementwiseForwardArgs& args) : scales(args) {
    add(args);
    if (args.reduction == Reduction::kNone) {
      add(kOutput, args.output);
    }
    work = (args.reduction == Reduction::kNone ? kStoresLosses : kSumsLosses) |
           bit_if(args.weight, kHasWeights);
    // Gradients do not choose the kernel: the loss has the same bits with them and without.
    const bool dense = is_dense(args);
    const auto is_left = [&](const Operand& gradient) {
      return is_summed(args.space, gradient) || (dense && !is_vector_aligned(gradient.data));
    };
    if (!is_left(args.grad_input)) {
      add(kGradInput, args.grad_input);
    }
    if (dense) {
      if (!has_weights() && !computes_double(args) && !is_left(args.grad_target)) {
        add(kGradTarget, args.grad_target);
      }
    } else if (!has_weights() && !computes_double(args)) {
      add_gradients(args);
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
    work |= kIsBackward | bit_if(args.weight, kHasWeights);
    work |= args.takes_input ? 0 : kIgnoresInput;
  }

  explicit Launch(const ElementwiseBackwardReduceArgs& args)
      : Launch(static_cast<const ElementwiseBackwardArgs&>(args)) {
    for (const Which which : {kGradWeight, kGradTarget, kGradInput}) {
      summed = is_summed(args.space, operands[which]) ? which : summed;
    }
  }

  // Whether the kernel of dense operands takes it.
  bool is_dense(const ElementwiseArgs& args) const {
    const bool takes_dtypes =
        have_common_dtype(operands) || (!has_weights() && !computes_double(args));
    return args.contiguous && takes_dtypes &&
           std::all_of(std::begin(dense.data), std::end(dense.data),
                       [](const void* data) { return is_vector_aligned(data); });
  }

  // The dtype that chooses a kernel of dense operands: that of all, or float32.
  DType dense_dtype() const {
    return have_common_dtype(operands) ? operands[kInput].dtype : DType::kFloat32;
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
  bool has(Which which) const { return operands[which].data != nullptr; }

 private:
  static unsigned bit_if(const Operand& operand, unsigned bit) {
    return operand.data != nullptr ? bit : 0;
  }
  void add(Which which, const Operand& operand) {
    operands[which] = operand;
    dense.data[which] = operand.data;
    dense.dtypes[which] = operand.dtype;
    work |= which == kGradInput    ? bit_if(operand, kWantsGradInput)
            : which == kGradTarget ? bit_if(operand, kWantsGradTarget)
            : which == kGradWeight ? bit_if(operand, kWantsGradWeight)
                                   : 0;
  }
  // More gradients of a forward pass, where its kernel can take them.
  void add_gradients(const ElementwiseForwardArgs& args) {
    if (args.grad_target.data == nullptr && !is_summed(args.space, args.grad_input)) {
      return;
    }
    const Layout layout(args.space, operands);
    const bool has_boxes = BoxPlanner(layout, operands).has_boxes();
    const StripPlanner strips(layout, operands);
    for (const Which which : {kGradInput, kGradTarget}) {
      const Operand& gradient = which == kGradInput ? args.grad_input : args.grad_target;
      if (!is_summed(args.space, gradient)) {
        add(which, gradient);
      } else if (!has_boxes && summed == kNumOperands && strips.sums(gradient)) {
        add(which, gradient);
        summed = which;
      }
    }
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

// The bits of kPossible that terms allow: those of weights only if they take weights.
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
  if (!what.has_weights()) {
    visit_forward_work<0>(
        what, [&](auto work) { body(DenseOf<scalar_t, false>{}, what.dense, work, term); });
  } else if constexpr (Term::kHasWeight) {
    visit_forward_work<kHasWeights>(
        what, [&](auto work) { body(DenseOf<scalar_t, true>{}, what.dense, work, term); });
  }
}

template <typename Body>
void visit_dense_forward(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  const DType dtype = what.dense_dtype();
  if (dtype == DType::kFloat64) {  // one kernel a loss, for little machine code
    visit_loss_type(args.loss, [&](auto loss) {
      using Terms = TermOf<decltype(loss)>;
      body(Dense<double>{}, what.dense, WorkOf<kForwardWork, Terms>{what.work}, Terms{args.params});
    });
    return;
  }
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    visit_float_or_half(dtype, [&](auto type) {
      visit_dense_term<typename decltype(type)::type>(what, term, body);
    });
  });
}

// Forward with a gradient of target.
template <typename Body>
void visit_dense_gradients(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    using Term = decltype(term);
    if constexpr (Term::kHasTargetGradientKernel) {
      const AnyWork<kSumsLosses | kWantsGradInput | kWantsGradTarget> work{what.work};
      visit_float_or_half(what.dense_dtype(), [&](auto type) {
        body(DenseOf<typename decltype(type)::type, false>{}, what.dense, work, term);
      });
    } else {  // by the kernel of backward passes, whose tiles are the same
      const AnyTerm<false> any{args.loss, args.params};
      visit_float_or_any_half(what.dense_dtype(), [&](auto type) {
        body(DenseOf<typename decltype(type)::type, false>{}, what.dense,
             AnyWork<kGradientsWork>{what.work}, any);
      });
    }
  });
}

template <typename Body>
void visit_dense_backward(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  visit_any_term(args, what, [&](auto terms) {
    using Terms = decltype(terms);
    const DType dtype = what.dense_dtype();
    if (dtype == DType::kFloat64) {
      constexpr unsigned kWork = Terms::kHasWeight ? kBackwardWork : kPlainBackwardWork;
      body(Dense<double>{}, what.dense, AnyWork<kWork>{what.work}, terms);
      return;
    }
    constexpr unsigned kWork = Terms::kHasWeight ? kBackwardWork : kGradientsWork;
    visit_float_or_any_half(dtype, [&](auto type) {
      using scalar_t = typename decltype(type)::type;
      body(DenseOf<scalar_t, Terms::kHasWeight>{}, what.dense, AnyWork<kWork>{what.work}, terms);
    });
  });
}

template <typename Body>
void visit_planned(const ElementwiseArgs& args, const Launch& what, const Body& body) {
  const bool is_double = what.computes_double(args);
  const bool sums = what.summed != kNumOperands;
  const Layout layout(args.space, what.operands);
  BoxPlanner boxes(layout, what.operands);
  StripPlanner strips(layout, what.operands);
  // Whether a gradient is summed by a launch of its own. If the forward kernel can sum it, backward
  // takes the same plan and steps, so that the gradient has the same bits.
  const bool must_sum = sums && (is_double || what.has_weights() || what.has(kGradOutput) ||
                                 boxes.has_boxes() || !strips.sums(what.operands[what.summed]));
  if (must_sum) {
    strips = StripPlanner(layout, what.operands, what.summed);
  }
  const int64_t blocks = int64_t{4} * std::max(current_device_limits().multiprocessors, 1);
  const auto visit = [&](auto taken, auto work, auto terms) {
    using Taken = decltype(taken);
    body(taken, strips.plan(Taken::kWidth, Taken::kSteps, blocks, what.summed), work, terms);
  };
  constexpr unsigned kAll = kForwardWork | kBackwardWork;
  const AnyTerm<false> any{args.loss, args.params};
  if (is_double || (sums && what.has_weights())) {
    visit(InDoubles{}, AnyWork<kAll>{what.work}, WeightedOrNot{args.loss, args.params});
  } else if (what.has_weights()) {
    visit(InWeightedSingles{}, AnyWork<kAll>{what.work}, AnyTerm<true>{args.loss, args.params});
  } else if (!sums && boxes.has_boxes()) {
    const AnyWork<(kForwardWork & ~kWeightWork) | kWantsGradTarget> forward{what.work};
    const AnyWork<kPlainBackwardWork> backward{what.work};
    visit_float_or_any_half(common_half_type(what.operands), [&](auto type) {
      const InBoxes<typename decltype(type)::type> taken;
      what.is_backward() ? body(taken, boxes.plan(), backward, any)
                         : body(taken, boxes.plan(), forward, any);
    });
  } else if (!strips.has_near_columns()) {  // rare
    visit(InDoubles{}, AnyWork<kAll>{what.work}, WeightedOrNot{args.loss, args.params});
  } else if (sums && !must_sum) {
    constexpr unsigned kWork = kSumsLosses | kWantsGradInput | kWantsGradTarget | kIsBackward;
    visit_loss_type(args.loss, [&](auto loss) {
      const TermOf<decltype(loss)> terms{args.params};
      visit_float_or_half(strips.unit_type(), [&](auto type) {
        visit(SumsInUnits<typename decltype(type)::type>{}, AnyWork<kWork>{what.work}, terms);
      });
    });
  } else if (what.is_backward() || sums) {
    const AnyWork<kBackwardWork & ~kWeightWork> summing{what.work};
    const AnyWork<kPlainBackwardWork> plain{what.work};
    visit_float_or_half(strips.unit_type(), [&](auto type) {
      using scalar_t = typename decltype(type)::type;
      sums ? visit(GradientsInUnits<scalar_t>{}, summing, any)
           : visit(BackwardInUnits<scalar_t>{}, plain, any);
    });
  } else if ((what.work & kStoresLosses) != 0) {
    visit_float_or_half(strips.unit_type(), [&](auto type) {
      visit(InUnits<typename decltype(type)::type, kStoresLosses>{}, FixedWork<kStoresLosses>{},
            any);
    });
  } else {  // asked for most: kernels of one loss need fewer registers
    visit_loss_type(args.loss, [&](auto loss) {
      const TermOf<decltype(loss)> terms{args.params};
      const auto visit_units = [&](auto work) {
        visit_float_or_half(strips.unit_type(), [&](auto type) {
          visit(InUnits<typename decltype(type)::type, decltype(work)::kBits>{}, work, terms);
        });
      };
      if (what.has(kGradInput) || what.has(kGradTarget)) {
        visit_units(AnyWork<kSumsLosses | kWantsGradInput | kWantsGradTarget>{what.work});
      } else {
        visit_units(FixedWork<kSumsLosses>{});
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
  } else if (what.has(kGradTarget)) {
    visit_dense_gradients(args, what, body);
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

struct ScratchSizes {
  int64_t blocks = 0;  // of a reduction, partials
  int64_t sums = 0;    // doubles, of a gradient that is summed
};

ScratchSizes scratch_sizes(const ElementwiseArgs& args, const Launch& what) {
  ScratchSizes sizes;
  visit_kernel(args, what, [&](auto taken, auto& plan, auto...) {
    using Taken = decltype(taken);
    sizes.blocks = blocks_of(taken, plan, what);
    if constexpr (std::is_same_v<typename Taken::Plan, StripPlan>) {
      sizes.sums = SumFold::scratch(plan, typename Taken::acc_t());
    }
  });
  return sizes;
}

// Returns how many blocks there are. sums: memory, see ScratchSizes.
int64_t launch(const ElementwiseArgs& args, const Launch& what, int64_t most_blocks,
               Partial* partials, double* sums, const Finalize& finalize, cudaStream_t stream) {
  int64_t blocks = 0;
  visit_kernel(args, what, [&](auto taken, auto& plan, auto work, auto terms) {
    using Taken = decltype(taken);
    using acc_t = typename Taken::acc_t;
    blocks = std::min(blocks_of(taken, plan, what), most_blocks);
    const auto launch = [&] {
      launch_kernel(
          "elementwise_kernel", elementwise_kernel<Taken, decltype(work), decltype(terms)>,
          {blocks, Taken::threads(plan), Taken::bytes(plan), 1, what.is_backward()}, stream, plan,
          work, terms, what.scales, reduction_scale(args, acc_t(1)), partials, finalize);
    };
    if constexpr (std::is_same_v<typename Taken::Plan, StripPlan>) {
      const SumFold fold(plan, what.operands, what.scales, sums, acc_t());
      launch();
      fold.launch(stream);
    } else {
      launch();
    }
  });
  return blocks;
}

// The gradients of forward that are left to launches of their own. Calls body(args) for each.
template <typename Body>
void for_each_left(const ElementwiseForwardArgs& args, const Launch& what, const Body& body) {
  for (const Which which : {kGradInput, kGradTarget}) {
    const Operand& gradient = which == kGradInput ? args.grad_input : args.grad_target;
    if (gradient.data != nullptr && !what.has(which)) {
      ElementwiseBackwardReduceArgs own;
      static_cast<ElementwiseArgs&>(own) = args;
      (which == kGradInput ? own.grad_input : own.grad_target) = gradient;
      body(own);
    }
  }
}

}  // namespace

int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  if (args.reduction == Reduction::kNone) {
    return 0;
  }
  const Launch what(args);
  const ScratchSizes sizes = scratch_sizes(args, what);
  int64_t doubles = sizes.blocks * kPartialDoubles + sizes.sums;
  for_each_left(args, what, [&](const ElementwiseBackwardReduceArgs& own) {
    doubles += elementwise_backward_reduce_scratch(own);
  });
  return doubles;
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
  ScratchSizes sizes;
  if (what.summed != kNumOperands) {  // else launch() plans once
    sizes = scratch_sizes(args, what);
  }
  double* const sums = scratch + sizes.blocks * kPartialDoubles;
  const int64_t blocks = launch(args, what, kMaxGrid, partials, sums, finalize, stream);
  if (reduce) {
    launch_grid_reduce(partials, blocks, finalize, stream);
  }
  // Of "none" there is no scratch, and nothing is left.
  double* free = reduce ? scratch + blocks * kPartialDoubles + sizes.sums : nullptr;
  for_each_left(args, what, [&](const ElementwiseBackwardReduceArgs& own) {
    launch_elementwise_backward_reduce(own, free, context);
    free += elementwise_backward_reduce_scratch(own);
  });
}

void launch_elementwise_backward(const ElementwiseBackwardArgs& args, Context context) {
  if (args.space.numel == 0) {
    return;
  }
  const int64_t most_blocks = args.kept ? most_blocks_of_kept(kTileThreads) : kMaxGrid;
  launch(args, Launch(args), most_blocks, nullptr, nullptr, Finalize{},
         static_cast<cudaStream_t>(context));
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  return args.space.numel == 0 ? 0 : scratch_sizes(args, Launch(args)).sums;
}

void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& args, double* scratch,
                                        Context context) {
  const auto stream = static_cast<cudaStream_t>(context);
  const Launch what(args);
  if (args.space.numel > 0) {
    const int64_t most_blocks = args.kept ? most_blocks_of_kept(kTileThreads) : kMaxGrid;
    launch(args, what, most_blocks, nullptr, scratch, Finalize{}, stream);
  } else if (what.summed != kNumOperands) {  // sums of nothing
    const Operand& gradient = what.operands[what.summed];
    GradientSink sink = make_sink(what.scales, gradient);
    for (int dim = 0; dim < args.space.ndim; ++dim) {
      if (gradient.strides[dim] != 0 || args.space.sizes[dim] == 1) {
        sink.add(args.space.sizes[dim], gradient.strides[dim]);
      }
    }
    column_fold(SumParts{}, sink, sink.space.numel, 0, stream);
  }
}

}  // namespace lossops::cuda
