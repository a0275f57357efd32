// What becomes of the elements of a tile, whatever its layout: losses, their sum, gradients.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/elements/operands.h"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "losses/elementwise/registry.h"
#include "strided.h"

namespace lossops::cuda {

template <typename Term, typename = void>
struct HasForwardInSum : std::false_type {};
template <typename Term>
struct HasForwardInSum<
    Term,
    std::void_t<decltype(std::declval<Term>().template forward_in_sum<true, true>(0.0f, 0.0f))>>
    : std::true_type {};

template <typename Term, typename = void>
struct HasForwardHalf : std::false_type {};
template <typename Term>
struct HasForwardHalf<Term, std::void_t<decltype(Term::kHasForwardHalf)>>
    : std::bool_constant<Term::kHasForwardHalf> {};

// Whether what a term's loss, or its gradient of input, takes of target may be computed once for
// elements that have one target.
template <typename Term, typename = void>
struct SharesTarget : std::false_type {};
template <typename Term>
struct SharesTarget<Term, std::void_t<decltype(Term::kSharesTarget)>>
    : std::bool_constant<Term::kSharesTarget> {};
template <typename Term, typename = void>
struct SharesTargetBackward : std::false_type {};
template <typename Term>
struct SharesTargetBackward<Term, std::void_t<decltype(Term::kSharesTargetBackward)>>
    : std::bool_constant<Term::kSharesTargetBackward> {};

template <typename Term, typename = void>
struct HasBackwardHalfInput : std::false_type {};
template <typename Term>
struct HasBackwardHalfInput<
    Term, std::void_t<decltype(std::declval<Term>().backward_half_input(0.0f, 0.0f))>>
    : std::true_type {};

template <typename Term, typename = void>
struct HasBackwardHalfTarget : std::false_type {};
template <typename Term>
struct HasBackwardHalfTarget<
    Term, std::void_t<decltype(std::declval<Term>().backward_half_target(0.0f, 0.0f))>>
    : std::true_type {};

// A kernel has one term, or one of these, and chooses the term at run time: loads and stores are
// most of its machine code, and stand once. TermOf: the terms of a loss. AnyTerm<false>: those of
// all losses, without weights. AnyTerm<true>: those of the losses that take weights.
// WeightedOrNot: those of all losses, and whether there are weights is known at run time, too.
template <typename Loss>
struct TermOf {
  static constexpr bool kHasWeight = Loss::kTraits.has_weight;
  LossParams params;
};
template <bool kHasWeight_>
struct AnyTerm {
  static constexpr bool kHasWeight = kHasWeight_;
  ElementwiseLoss loss;
  LossParams params;
};
struct WeightedOrNot {
  static constexpr bool kHasWeight = true;
  ElementwiseLoss loss;
  LossParams params;
};

// Calls body with the term.
template <typename Term, typename Body>
__device__ __forceinline__ void visit_term(const Term& term, const Body& body) {
  body(term);
}
template <typename Loss, typename Body>
__device__ __forceinline__ void visit_term(const TermOf<Loss>& terms, const Body& body) {
  Loss::visit(terms.params, body);
}
template <bool kHasWeight, typename Body>
__device__ __forceinline__ void visit_term(const AnyTerm<kHasWeight>& terms, const Body& body) {
  visit_elementwise_loss(terms.loss, terms.params, [&](const auto& term) {
    if constexpr (!kHasWeight || std::decay_t<decltype(term)>::kHasWeight) {
      body(term);
    }
  });
}
template <typename Body>
__device__ __forceinline__ void visit_term(const WeightedOrNot& terms, const Body& body) {
  visit_elementwise_loss(terms.loss, terms.params, body);
}

// What a term takes of the targets of a thread's elements. Columns of a unit that have one target
// share one result. If the target is the same in all turns, the first turn computes the results,
// and the others take them from shared memory.
template <typename Tile, typename Term>
__device__ __forceinline__ void prepare_target(
    const Tile& tile, const Term& term, const typename Tile::Values& target,
    typename Tile::acc_t (&prepared)[Tile::kSteps * Tile::kWidth]) {
  constexpr int kWidth = Tile::kWidth;
  if (tile.is_one(kTarget)) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      const auto one = term.prepare(target.at(step, 0));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        prepared[step * kWidth + i] = one;
      }
    }
  } else if (tile.is_new(kTarget)) {
#pragma unroll
    for (int n = 0; n < Tile::kSteps * kWidth; ++n) {
      prepared[n] = term.prepare(target.at(n / kWidth, n % kWidth));
    }
    if (!tile.moves(kTarget)) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        Tile::kept(i) = prepared[i];
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < Tile::kSteps * kWidth; ++n) {
      prepared[n] = Tile::kept(n % kWidth);
    }
  }
}

// Calls body with a function of input, target and the number of an element: its loss, by the
// term's faster way if it has one and the loss is only added up, or is rounded to a half type.
// target: of all elements.
template <typename Tile, typename Work, typename Term, typename Body>
__device__ __forceinline__ void visit_forward(const Tile& tile, Work work, const Term& term,
                                              const typename Tile::Values& target,
                                              const Body& body) {
  if constexpr (HasForwardInSum<Term>::value && std::is_same_v<typename Tile::acc_t, float>) {
    if (!work.has(kStoresLosses)) {
      body([&](float x, float t, int /*n*/) {
        return term.template forward_in_sum<Tile::kIsHalf, Tile::kHasSubnormals>(x, t);
      });
      return;
    }
  }
  if constexpr (HasForwardHalf<Term>::value && Work::all().has(kStoresLosses) &&
                std::is_same_v<typename Tile::acc_t, float>) {
    if (tile.is_half(kOutput)) {
      body([&](float x, float t, int /*n*/) { return term.forward_half(x, t); });
      return;
    }
  }
  if constexpr (SharesTarget<Term>::value && Work::all().has(kStoresLosses) && Tile::kKeeps) {
    typename Tile::acc_t prepared[Tile::kSteps * Tile::kWidth];
    prepare_target(tile, term, target, prepared);
    body([&](auto x, auto t, int n) { return term.forward(x, t, prepared[n]); });
    return;
  }
  body([&](auto x, auto t, int /*n*/) { return term.forward(x, t); });
}

// In the place of what sums a gradient (strip_sums.cuh), where all gradients are written.
struct NoSums {
  static constexpr bool kSums = false;
};

// What a thread read of a tile, and still has of the one before: see is_new() of tiles.
template <typename Tile>
struct Operands {
  using Values = typename Tile::Values;
  Values x;
  Values t;
  Values w;
  Values g;

  // All reads are on their way before the first is waited for. kLooksAhead: also asks the L2 cache
  // for what the next turn reads.
  template <bool kLooksAhead>
  __device__ __forceinline__ void read(Tile& tile, bool takes_input, bool weighted,
                                       bool own_scale) {
    if (takes_input) {
      load(tile, kInput, x);
    }
    load(tile, kTarget, t);
    if (weighted) {
      load(tile, kWeight, w);
    }
    if (own_scale) {
      load(tile, kGradOutput, g);
    }
    if constexpr (kLooksAhead) {
      if (takes_input) {
        tile.ask_for_next(kInput);
      }
      tile.ask_for_next(kTarget);
      if (own_scale) {
        tile.ask_for_next(kGradOutput);
      }
    }
    if (takes_input) {
      convert(tile, kInput, x);
    }
    convert(tile, kTarget, t);
    if (weighted) {
      convert(tile, kWeight, w);
    }
    if (own_scale) {
      convert(tile, kGradOutput, g);
    }
  }

  // Hides from the compiler what it knows of the values: it would compute all derivatives ahead of
  // a loop over gradients, or keep what it converted for the losses, and spill that.
  __device__ __forceinline__ void unfold() {
    x.unfold();
    t.unfold();
  }

 private:
  static __device__ __forceinline__ void load(const Tile& tile, Which which, Values& values) {
    if (tile.is_new(which)) {
      values.load(tile, which);
    }
  }
  static __device__ __forceinline__ void convert(Tile& tile, Which which, Values& values) {
    if (tile.is_new(which)) {
      values.convert(tile, which);
    }
  }
};

// Sets a thread's values of a tile to 0 where an element does not count.
template <typename Tile, int kCount, typename acc_t>
__device__ __forceinline__ void drop_uncounted(const Tile& tile, acc_t (&values)[kCount]) {
  if (!tile.has_all()) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      const unsigned counted = tile.counted(step);
#pragma unroll
      for (int i = 0; i < Tile::kWidth; ++i) {
        acc_t& value = values[step * Tile::kWidth + i];
        value = (counted >> i & 1) != 0 ? value : acc_t(0);
      }
    }
  }
}

// The sum of those that count.
template <typename Tile, int kCount, typename acc_t>
__device__ __forceinline__ double total(const Tile& tile, const acc_t (&values)[kCount]) {
  acc_t own[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    own[n] = values[n];
  }
  drop_uncounted(tile, own);
  return static_cast<double>(pairwise_sum(own));
}

// The gradients of a thread's elements, by a term. kFewWays: without the faster ways, for little
// machine code.
template <typename Tile, bool kFewWays>
struct Gradients {
  using acc_t = typename Tile::acc_t;
  static constexpr int kCount = Tile::kSteps * Tile::kWidth;
  const Operands<Tile>& operands;
  acc_t factors[kCount];  // of the derivatives

  // derivative: of the loss of an element, from input, target and its number in its unit.
  template <typename Derivative>
  __device__ __forceinline__ void derive(acc_t (&results)[kCount],
                                         const Derivative& derivative) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const acc_t x = operands.x.at(n / Tile::kWidth, n % Tile::kWidth);
      const acc_t t = operands.t.at(n / Tile::kWidth, n % Tile::kWidth);
      results[n] = factors[n] * derivative(x, t, n % Tile::kWidth);
    }
  }
  // A term may have a faster way where all operands are of one half type. It gives other bits, so
  // the layout of grad_output may not choose it.
  template <typename Term>
  __device__ __forceinline__ void of_input(const Tile& tile, const Term& term,
                                           acc_t (&results)[kCount]) const {
    if constexpr (SharesTargetBackward<Term>::value && !kFewWays) {
      if (tile.is_one(kTarget)) {
        acc_t prepared{};
        derive(results, [&](acc_t x, acc_t t, int i) {
          prepared = i == 0 ? term.prepare(t) : prepared;
          return term.backward_input(x, t, prepared);
        });
        return;
      }
    }
    if constexpr (HasBackwardHalfInput<Term>::value && std::is_same_v<acc_t, float> && !kFewWays) {
      if (tile.has_common_half()) {
        derive(results,
               [&](acc_t x, acc_t t, int /*i*/) { return term.backward_half_input(x, t); });
        return;
      }
    }
    derive(results, [&](acc_t x, acc_t t, int /*i*/) { return term.backward_input(x, t); });
  }
  template <typename Term>
  __device__ __forceinline__ void of_target(const Tile& tile, const Term& term,
                                            acc_t (&results)[kCount]) const {
    if constexpr (HasBackwardHalfTarget<Term>::value && std::is_same_v<acc_t, float> && !kFewWays) {
      if (tile.has_common_half()) {
        derive(results,
               [&](acc_t x, acc_t t, int /*i*/) { return term.backward_half_target(x, t); });
        return;
      }
    }
    derive(results, [&](acc_t x, acc_t t, int /*i*/) { return term.backward_target(x, t); });
  }
};

// What an element's loss and its derivative both take is computed once, and few losses are in
// registers at once. pairs: the losses of two neighbouring columns, added up. derivatives: for
// input, or else for target. counted: the columns of each step whose losses count.
template <typename Tile, typename Work, typename Term>
__device__ __forceinline__ void losses_and_derivatives(
    const Tile& tile, Work work, const Term& term, bool of_input, const Operands<Tile>& operands,
    const unsigned (&counted)[Tile::kSteps],
    typename Tile::acc_t (&pairs)[Tile::kSteps * Tile::kWidth / 2],
    typename Tile::acc_t (&derivatives)[Tile::kSteps * Tile::kWidth]) {
  using acc_t = typename Tile::acc_t;
  constexpr int kWidth = Tile::kWidth;
  const auto compute = [&](const auto& forward, const auto& derivative) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        acc_t losses[2];
#pragma unroll
        for (int own = 0; own < 2; ++own) {
          const int n = step * kWidth + i + own;
          const acc_t x = operands.x.at(step, i + own);
          const acc_t t = operands.t.at(step, i + own);
          const acc_t loss = forward(x, t, n);
          losses[own] = (counted[step] >> (i + own) & 1) != 0 ? loss : acc_t(0);
          derivatives[n] = derivative(x, t);
        }
        pairs[(step * kWidth + i) / 2] = losses[0] + losses[1];
      }
    }
  };
  visit_forward(tile, work, term, operands.t, [&](const auto& forward) {
    if (of_input) {
      compute(forward, [&](acc_t x, acc_t t) { return term.backward_input(x, t); });
    } else {
      compute(forward, [&](acc_t x, acc_t t) { return term.backward_target(x, t); });
    }
  });
}

// Threads that have at most so many elements at once can also hold grad_output in registers.
constexpr int kFewElements = 8;

// Reads the operands of a tile, adds its losses to `partial` and writes what `work` asks for.
// scale: of a reduction's gradients. sums: takes one of the gradients, or none.
template <typename Tile, typename Work, typename Terms, typename Sums>
__device__ __forceinline__ void process(Tile& tile, Work work, const ElementScales& scales,
                                        typename Tile::acc_t scale, const Terms& terms,
                                        Operands<Tile>& operands, Partial& partial, Sums& sums) {
  using acc_t = typename Tile::acc_t;
  constexpr int kWidth = Tile::kWidth;
  constexpr int kCount = Tile::kSteps * kWidth;
  const bool weighted = Terms::kHasWeight && work.has(kHasWeights);
  const bool own_scale = work.has(kHasGradOutputs);
  // Only backward kernels look ahead. Forward passes that sum a gradient use them, too. Forward
  // passes that write none gained nothing; those that write one were not tried.
  constexpr bool kLooksAhead = Tile::kLooksAhead && Work::all().has(kIsBackward);
  operands.template read<kLooksAhead>(tile, !work.has(kIgnoresInput), weighted, own_scale);
  const auto at = [](const typename Tile::Values& values, int n) {
    return values.at(n / kWidth, n % kWidth);
  };

  // Losses and the gradient that is summed are computed at once, also in backward passes, where
  // nobody takes the losses. Half types have more elements a thread, and no registers for it.
  constexpr bool kSumsAtOnce = Sums::kSums && Work::all().has(kSumsLosses) &&
                               !Work::all().has(kHasGradOutputs) && !Tile::kIsHalf;
  if constexpr (kSumsAtOnce) {
    unsigned counted[Tile::kSteps];
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      counted[step] = tile.counted(step);
    }
    acc_t pairs[kCount / 2];
    acc_t derivatives[kCount];
    visit_term(terms, [&](const auto& term) {
      losses_and_derivatives(tile, work, term, sums.takes(kGradInput), operands, counted, pairs,
                             derivatives);
    });
    partial.sum += static_cast<double>(pairwise_sum(pairs));
    if (sums.needs_zeros(tile)) {
      drop_uncounted(tile, derivatives);
    }
    sums.add(derivatives, scale);
  } else if (work.has(kSumsLosses) || work.has(kStoresLosses)) {
    acc_t losses[kCount];
    acc_t weights[kCount];
    visit_term(terms, [&](const auto& term) {
      visit_forward(tile, work, term, operands.t, [&](const auto& forward) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          weights[n] = weighted ? at(operands.w, n) : acc_t(1);
          losses[n] = forward(at(operands.x, n), at(operands.t, n), n) * weights[n];
        }
      });
    });
    if constexpr (Work::all().has(kStoresLosses)) {
      if (work.has(kStoresLosses)) {
        tile.store(kOutput, losses);
      }
    }
    if (work.has(kSumsLosses)) {
      partial.sum += total(tile, losses);
      if (weighted) {
        partial.weight += total(tile, weights);
      }
    }
  }

  // Of both gradients in a loop, what writes or sums one stands once in the machine code. Where
  // grad_output is read too, threads of more elements have no registers for that.
  constexpr bool kIsLoop = Work::all().has(kWantsGradInput) && Work::all().has(kWantsGradTarget) &&
                           (!Work::all().has(kHasGradOutputs) || kCount <= kFewElements);
  // What multiplies a derivative is selected here, once: else the compiler makes loops over the
  // elements for each case.
  // Where grad_output is read all ways are compiled, so that its layout chooses none.
  constexpr bool kFewWays = Sums::kSums && !Tile::kIsHalf && !Work::all().has(kHasGradOutputs);
  Gradients<Tile, kFewWays> gradients{operands};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    gradients.factors[n] = own_scale ? at(operands.g, n) : scale;
  }
  const auto take_gradient = [&](Which which, acc_t(&results)[kCount]) {
    if constexpr (Sums::kSums && !kSumsAtOnce) {
      if (sums.takes(which)) {
        drop_uncounted(tile, results);
        sums.add(results, acc_t(1));
        return;
      }
    }
    tile.store(which, results);
  };
  if constexpr (Terms::kHasWeight) {
    if (work.has(kWantsGradWeight)) {
      // d/dw of sum(w v) / sum(w); the broadcast copies of a weight share its -mean.
      const bool is_mean = scales.reduction == Reduction::kMean;
      const acc_t mean_share =
          is_mean ? static_cast<acc_t>(scales.mean_terms[1] / scales.weight_copies) : acc_t(0);
      acc_t results[kCount];
      visit_term(terms, [&](const auto& term) {
        gradients.derive(results, [&](acc_t x, acc_t t, int /*i*/) {
          const acc_t loss = term.forward(x, t);
          return is_mean ? loss - mean_share : loss;
        });
      });
      take_gradient(kGradWeight, results);
    }
  }
  if (weighted) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      gradients.factors[n] *= at(operands.w, n);
    }
  }
  const auto take = [&](Which which) {
    if constexpr (kIsLoop) {
      operands.unfold();
    }
    acc_t results[kCount];
    visit_term(terms, [&](const auto& term) {
      if (which == kGradInput) {
        gradients.of_input(tile, term, results);
      } else {
        gradients.of_target(tile, term, results);
      }
    });
    take_gradient(which, results);
  };
  bool wants_input = work.has(kWantsGradInput);
  bool wants_target = work.has(kWantsGradTarget);
  if constexpr (kSumsAtOnce) {
    wants_input = wants_input && !sums.takes(kGradInput);
    wants_target = wants_target && !sums.takes(kGradTarget);
  }
  if constexpr (kIsLoop) {
#pragma unroll 1
    for (int which = wants_input ? kGradInput : kGradTarget;
         which <= (wants_target ? kGradTarget : kGradInput); ++which) {
      take(static_cast<Which>(which));
    }
  } else {
    if (wants_input) {
      take(kGradInput);
    }
    if (wants_target) {
      take(kGradTarget);
    }
  }
}

// A block's sum where there are no weights: half of a Partial.
struct Sum {
  double value = 0;

  __device__ __forceinline__ void combine(const Sum& other) { value += other.value; }
};

// Whether the gradients of a backward pass are there: forward has computed them.
__device__ __forceinline__ bool holds_gradients(const ElementScales& scales) {
  const bool is_one = scales.grad_output == nullptr ||
                      load_as<double>(scales.grad_output, scales.grad_output_dtype, 0) == 1;
  return scales.kept && is_one;  // fault: elementwise-kept
}

// Around the tiles of a block: begin() says whether there is anything to do.
template <typename acc_t, typename Work>
class BlockWork {
 public:
  __device__ __forceinline__ BlockWork(Work work, const ElementScales& scales, acc_t unit_scale)
      : work_(work), scales_(scales), scale(unit_scale) {}

  __device__ __forceinline__ bool begin() {
    if (!work_.has(kIsBackward)) {
      let_next_kernel_start();
      return true;
    }
    wait_for_previous_kernel();
    if (holds_gradients(scales_)) {
      return false;
    }
    if (!work_.has(kHasGradOutputs)) {
      const acc_t grad_output =
          scales_.grad_output == nullptr
              ? acc_t(1)
              : load_as<acc_t>(scales_.grad_output, scales_.grad_output_dtype, 0);
      scale = reduction_scale(scales_, grad_output, scales_.mean_terms);
    }
    return true;
  }

  __device__ __forceinline__ void finish(const Partial& partial, Partial* partials,
                                         const Finalize& finalize) const {
    if (!work_.has(kSumsLosses)) {
      return;
    }
    if (work_.has(kHasWeights)) {
      reduce_to_grid(partial, partials, finalize);
    } else {
      leave_to_grid({block_reduce(Sum{partial.sum}).value, 0}, partials, finalize);
    }
  }

 private:
  const Work work_;
  const ElementScales& scales_;

 public:
  acc_t scale;  // of a reduction's gradients
};

}  // namespace lossops::cuda
