// The gradient of a broadcast operand: a sum over the elements that share one of its elements.
//
// Only elementwise.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cpu/elementwise/backward.h"
#include "cpu/parallel.h"

namespace lossops::cpu {
namespace {

// The one gradient that is wanted.
const Operand& wanted_gradient(const ElementwiseBackwardArgs& args, Wanted& wanted) {
  if (args.grad_input.data != nullptr) {
    wanted = Wanted::kInput;
    return args.grad_input;
  }
  if (args.grad_target.data != nullptr) {
    wanted = Wanted::kTarget;
    return args.grad_target;
  }
  wanted = Wanted::kWeight;
  return args.grad_weight;
}

// A gradient of K elements, each the sum of R terms, is cut into tiles of elements and
// splits of terms. A task is one tile of one split.
struct ReducePlan {
  int64_t kept = 1;     // K
  int64_t reduced = 1;  // R
  // Blocks run along the summed dimensions (one element a tile), or along the kept ones.
  bool reduced_inner = false;
  int64_t tile = 1;  // elements
  int64_t tiles = 0;
  int64_t splits = 1;  // more than one: partials[split][element] are folded afterwards

  // A block along the summed dimensions then has all terms of each of its elements.
  bool several_elements_a_block() const { return reduced_inner && reduced <= kBlock / 2; }
};

// Whether memory is denser along the summed dimensions than along the kept ones. Operands
// without the summed dimensions are read again and again, from a cache.
bool reduced_dims_are_dense(const ElementwiseBackwardReduceArgs& args) {
  int64_t least_kept = INT64_MAX;
  int64_t least_reduced = INT64_MAX;
  for (const Operand* operand : {&args.input, &args.target, &args.weight, &args.grad_output}) {
    const auto least_stride = [&](int begin, int end) {
      int64_t least = INT64_MAX;
      for (int dim = begin; dim < end; ++dim) {
        const int64_t stride = std::abs(operand->strides[dim]);
        least = stride != 0 && args.space.sizes[dim] > 1 ? std::min(least, stride) : least;
      }
      return least;
    };
    const int64_t reduced = least_stride(args.num_kept, args.space.ndim);
    if (operand->data != nullptr && reduced != INT64_MAX) {
      least_reduced = std::min(least_reduced, reduced);
      least_kept = std::min(least_kept, least_stride(0, args.num_kept));
    }
  }
  return least_reduced < least_kept;
}

ReducePlan plan_reduce(const ElementwiseBackwardReduceArgs& args) {
  ReducePlan plan;
  for (int dim = 0; dim < args.space.ndim; ++dim) {
    (dim < args.num_kept ? plan.kept : plan.reduced) *= args.space.sizes[dim];
  }
  plan.reduced_inner = plan.reduced >= kVector / 2 && reduced_dims_are_dense(args);
  plan.tile =
      std::min<int64_t>(plan.reduced_inner ? divide_up(kChunk, plan.reduced) : kBlock, plan.kept);
  if (plan.kept == 0) {
    return plan;
  }
  plan.tiles = divide_up(plan.kept, plan.tile);
  const int64_t terms_per_task = std::max<int64_t>(kChunk / plan.tile, 1);
  plan.splits = std::clamp<int64_t>(kMaxTasks / plan.tiles, 1,
                                    std::max<int64_t>(divide_up(plan.reduced, terms_per_task), 1));
  if (plan.several_elements_a_block()) {
    plan.splits = 1;
  }
  return plan;
}

// Brings the summed dimensions first.
void rotate_dims(ElementwiseBackwardReduceArgs& args) {
  const auto rotate = [&](int64_t* values) {
    std::rotate(values, values + args.num_kept, values + args.space.ndim);
  };
  rotate(args.space.sizes);
  for (Operand* operand : {&args.input, &args.target, &args.weight, &args.grad_output}) {
    rotate(operand->strides);
  }
}

// Sums of elements [first, last) over terms [begin, end); args with the summed
// dimensions first.
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void reduce_along_terms(const ElementwiseBackwardReduceArgs& args,
                                            const BackwardScalars<acc_t>& scalars,
                                            const Operand& prepared, Wanted wanted,
                                            const Term& term, const ReducePlan& plan, int64_t first,
                                            int64_t last, int64_t begin, int64_t end,
                                            double* sums) {
  BackwardBlock<acc_t> block(args, scalars, prepared);
  const bool in_order = plan.splits == 1;  // all terms of one element, then those of the next
  if (in_order) {
    block.start(first * plan.reduced, last * plan.reduced);
  } else {
    block.start(begin);
  }
  alignas(64) acc_t grad[kBlock];
  const auto next_gradients = [&](int count) LOSSOPS_ALWAYS_INLINE {
    block.next(count);
    block.gradient(wanted, term, padded(count), grad);
  };
  if (plan.several_elements_a_block()) {
    const int terms = static_cast<int>(plan.reduced);
    const int64_t elements_per_block = kBlock / terms;
    for (int64_t element = first; element < last; element += elements_per_block) {
      const int elements = static_cast<int>(std::min(elements_per_block, last - element));
      next_gradients(elements * terms);
      for (int k = 0; k < elements; ++k) {
        alignas(64) acc_t of_element[kBlock / 2];
        std::copy_n(grad + k * terms, terms, of_element);
        LaneSum sum;
        sum.add_unpadded(of_element, terms);
        sums[element - first + k] = sum.total();
      }
    }
    return;
  }
  for (int64_t element = first; element < last; ++element) {
    if (!in_order) {
      block.seek(element * plan.reduced + begin);
    }
    LaneSum sum;
    for (int64_t i = begin; i < end; i += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
      next_gradients(count);
      sum.add_unpadded(grad, count);
    }
    sums[element - first] = sum.total();
  }
}

// The same for a tile of at most kBlock elements, dimensions in their own order. Where
// all elements are in the tile, a block holds several terms of each.
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void reduce_along_elements(const ElementwiseBackwardReduceArgs& args,
                                               const BackwardScalars<acc_t>& scalars,
                                               const Operand& prepared, Wanted wanted,
                                               const Term& term, const ReducePlan& plan,
                                               int64_t first, int64_t last, int64_t begin,
                                               int64_t end, double* sums) {
  const int64_t elements = last - first;
  const int64_t terms_per_block = elements == plan.kept ? kBlock / elements : 1;
  BackwardBlock<acc_t> block(args, scalars, prepared);
  if (elements == plan.kept) {
    block.start(begin * plan.kept, end * plan.kept);
  } else {
    block.start(begin * plan.kept + first);
  }
  alignas(64) acc_t grad[kBlock];
  double lanes[kBlock] = {};
  for (int64_t i = begin; i < end; i += terms_per_block) {
    const int count = static_cast<int>(elements * std::min(terms_per_block, end - i));
    if (elements != plan.kept) {
      block.seek(i * plan.kept + first);
    }
    block.next(count);
    block.gradient(wanted, term, padded(count), grad);
    for (int j = 0; j < count; ++j) {
      lanes[j] += static_cast<double>(grad[j]);
    }
  }
  for (int64_t element = 0; element < elements; ++element) {
    sums[element] = fold_partials(lanes + element, terms_per_block, elements);
  }
}

// Writes elements [begin, end) of the gradient, each the sum of what the splits have of it.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void fold_splits(const ReducePlan& plan, const IterationSpace& kept_space,
                                     const Operand& gradient, const double* partials, int64_t begin,
                                     int64_t end) {
  BlockWalker<1> walker(kept_space, {&gradient}, begin);
  double sums[kBlock];
  alignas(64) acc_t grad[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    std::fill_n(sums, count, 0.0);
    for (int64_t split = 0; split < plan.splits; ++split) {  // fault: broadcast-splits
      const double* const partial = partials + split * plan.kept + i;
      for (int j = 0; j < count; ++j) {
        sums[j] += partial[j];
      }
    }
    std::copy_n(sums, count, grad);
    walker.next(count);
    store_block(gradient, walker[0], count, grad);
  }
}

}  // namespace
}  // namespace lossops::cpu
