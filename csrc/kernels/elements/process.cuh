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
struct HasBackwardHalfInput : std::false_type {};
template <typename Term>
struct HasBackwardHalfInput<
    Term, std::void_t<decltype(std::declval<Term>().backward_half_input(0.0f, 0.0f))>>
    : std::true_type {};

// A kernel has one term, or one of these, and chooses the term at run time: loads and stores are
// most of its machine code, and stand once. TermOf: the terms of a loss. AnyTerm: those of all
// losses; if kHasWeight_, of all that take weights.
template <typename Loss>
struct TermOf {
  static constexpr bool kHasWeight = false;
  LossParams params;
};
template <bool kHasWeight_>
struct AnyTerm {
  static constexpr bool kHasWeight = kHasWeight_;
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

// Calls body with a function of input and target: the loss of an element, by the term's faster way
// if it has one and the loss is only added up.
template <typename Tile, typename Work, typename Term, typename Body>
__device__ __forceinline__ void visit_forward(const Tile& tile, Work work, const Term& term,
                                              const Body& body) {
  if constexpr (HasForwardInSum<Term>::value && std::is_same_v<typename Tile::acc_t, float>) {
    if (!work.has(kStoresLosses)) {
      const auto visit = [&](auto subnormals) {
        body([&](float x, float t) {
          return term.template forward_in_sum<Tile::kIsHalf, decltype(subnormals)::value>(x, t);
        });
      };
      tile.has_subnormals() ? visit(std::true_type{}) : visit(std::false_type{});
      return;
    }
  }
  body([&](auto x, auto t) { return term.forward(x, t); });
}

// A thread's part of the gradient of a broadcast operand. process() adds that gradient up, and then
// writes no gradient at all.
struct GradientSum {
  static constexpr bool kSums = true;
  Which which;
  double value = 0;
};
struct NoGradientSum {
  static constexpr bool kSums = false;
};

// What a thread read of a tile.
template <typename Tile>
struct Operands {
  using Values = typename Tile::Values;
  Values x;
  Values t;
  Values w;
  Values g;

  // All reads are on their way before the first is waited for.
  __device__ __forceinline__ void read(Tile& tile, bool weighted, bool own_scale) {
    x.load(tile, kInput);
    t.load(tile, kTarget);
    if (weighted) {
      w.load(tile, kWeight);
    }
    if (own_scale) {
      g.load(tile, kGradOutput);
    }
    x.convert(tile, kInput);
    t.convert(tile, kTarget);
    if (weighted) {
      w.convert(tile, kWeight);
    }
    if (own_scale) {
      g.convert(tile, kGradOutput);
    }
  }
};

// The sum of a thread's values of a tile; those of elements that are not there do not count.
template <typename Tile, int kCount, typename acc_t>
__device__ __forceinline__ double total(const Tile& tile, const acc_t (&values)[kCount]) {
  acc_t own[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    own[n] = values[n];
  }
  if (!tile.has_all()) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      own[n] = tile.has(n) ? own[n] : acc_t(0);
    }
  }
  return static_cast<double>(pairwise_sum(own));
}

// Reads the operands of a tile, adds its losses to `partial` and writes what `work` asks for.
// scale: of a reduction's gradients. sum: takes one of the gradients.
template <typename Tile, typename Work, typename Terms, typename GradientSum>
__device__ __forceinline__ void process(Tile& tile, Work work, const ElementScales& scales,
                                        typename Tile::acc_t scale, const Terms& terms,
                                        Partial& partial, GradientSum& sum) {
  using acc_t = typename Tile::acc_t;
  constexpr int kWidth = Tile::kWidth;
  constexpr int kCount = Tile::kSteps * kWidth;
  const bool weighted = Terms::kHasWeight && work.has(kHasWeights);
  const bool own_scale = work.has(kHasGradOutputs);
  Operands<Tile> operands;
  operands.read(tile, weighted, own_scale);
  const auto at = [](const typename Tile::Values& values, int n) {
    return values.at(n / kWidth, n % kWidth);
  };

  if (work.has(kSumsLosses) || work.has(kStoresLosses)) {
    acc_t losses[kCount];
    acc_t weights[kCount];
    visit_term(terms, [&](const auto& term) {
      visit_forward(tile, work, term, [&](const auto& forward) {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          weights[n] = weighted ? at(operands.w, n) : acc_t(1);
          losses[n] = forward(at(operands.x, n), at(operands.t, n)) * weights[n];
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

  // What multiplies a derivative. Selected here, once: else the compiler makes loops over the
  // elements for each case.
  acc_t factors[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    factors[n] = own_scale ? at(operands.g, n) : scale;
  }
  // derivative: of the loss of an element, by its term, input and target.
  const auto store_gradient = [&](Which which, auto&& derivative) {
    acc_t results[kCount];
    visit_term(terms, [&](const auto& term) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        results[n] = factors[n] * derivative(term, at(operands.x, n), at(operands.t, n));
      }
    });
    if constexpr (!GradientSum::kSums) {
      tile.store(which, results);
    } else if (sum.which == which) {
      sum.value += total(tile, results);
    }
  };
  if constexpr (Terms::kHasWeight) {
    if (work.has(kWantsGradWeight)) {
      // d/dw of sum(w v) / sum(w); the broadcast copies of a weight share its -mean.
      const bool is_mean = scales.reduction == Reduction::kMean;
      const acc_t mean_share =
          is_mean ? static_cast<acc_t>(scales.mean_terms[1] / scales.weight_copies) : acc_t(0);
      store_gradient(kGradWeight, [&](const auto& term, acc_t x, acc_t t) {
        const acc_t loss = term.forward(x, t);
        return is_mean ? loss - mean_share : loss;
      });
    }
  }
  if (weighted) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      factors[n] *= at(operands.w, n);
    }
  }
  if (work.has(kWantsGradInput)) {
    store_gradient(kGradInput, [&](const auto& term, acc_t x, acc_t t) {
      using Term = std::decay_t<decltype(term)>;
      if constexpr (HasBackwardHalfInput<Term>::value && std::is_same_v<acc_t, float>) {
        if (tile.is_half()) {
          return term.backward_half_input(x, t);
        }
      }
      return term.backward_input(x, t);
    });
  }
  if (work.has(kWantsGradTarget)) {
    store_gradient(kGradTarget,
                   [&](const auto& term, acc_t x, acc_t t) { return term.backward_target(x, t); });
  }
}

// A block's sum where there are no weights: half of a Partial.
struct Sum {
  double value = 0;

  __device__ __forceinline__ void combine(const Sum& other) { value += other.value; }
};

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
    const auto grad_output = [&](auto like) {
      using type = decltype(like);
      return scales_.grad_output == nullptr
                 ? type(1)
                 : load_as<type>(scales_.grad_output, scales_.grad_output_dtype, 0);
    };
    if (scales_.kept && grad_output(double()) == 1) {  // fault: elementwise-kept
      return false;
    }
    if (!work_.has(kHasGradOutputs)) {
      scale = reduction_scale(scales_, grad_output(acc_t()), scales_.mean_terms);
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
