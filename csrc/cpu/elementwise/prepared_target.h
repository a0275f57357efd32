// What a loss prepares of its target, as its logarithm: once for all results that take it, and once
// an element of a broadcast target, not once a copy.
//
// Only elementwise.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/elementwise/operand_blocks.h"
#include "cpu/parallel.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

// The functions of a loss, with what is prepared of the target as their last argument, also if the
// loss prepares nothing.
template <typename Term>
struct PreparedTerm {
  const Term& term;

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t forward(acc_t x, acc_t t, acc_t p) const {
    if constexpr (Term::kPreparesTarget) {
      return term.forward(x, t, p);
    } else {
      return term.forward(x, t);
    }
  }

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t backward_input(acc_t x, acc_t t, acc_t p) const {
    if constexpr (Term::kPreparesTarget) {
      return term.backward_input(x, t, p);
    } else {
      return term.backward_input(x, t);
    }
  }

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t backward_target(acc_t x, acc_t t, acc_t p) const {
    if constexpr (Term::kPreparesTarget) {
      return term.backward_target(x, t, p);
    } else {
      return term.backward_target(x, t);
    }
  }
};

// Prepares one block. Returns it, in buffer.
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE Elements<acc_t> prepare_block(const Term& term, const Elements<acc_t>& t,
                                                  int count, acc_t* buffer) {
  const auto prepare = [&](acc_t value) LOSSOPS_ALWAYS_INLINE { return term.prepare(value); };
  compute_block(t.width(count), buffer, prepare, t);
  return {buffer, t.step};
}

// Whether a gradient takes what is prepared.
template <typename Term>
constexpr bool takes_prepared(Wanted wanted) {
  if constexpr (Term::kPreparesTarget) {
    return wanted != Wanted::kInput || Term::kInputTakesPrepared;
  }
  return false;
}

// An operand of what is prepared, without memory. Its strides are dense over the dimensions that
// target has, which are `own`.
Operand prepared_target(const ElementwiseArgs& args, IterationSpace& own) {
  Operand prepared;
  own.numel = 1;
  for (int dim = 0; dim < args.space.ndim; ++dim) {
    if (args.target.strides[dim] != 0) {
      own.sizes[own.ndim++] = args.space.sizes[dim];
      prepared.strides[dim] = own.numel;
      own.numel *= args.space.sizes[dim];
    }
  }
  return prepared;
}

// Elements of that operand; 0: each block prepares its own.
int64_t num_prepared(const ElementwiseArgs& args) {
  IterationSpace own;
  prepared_target(args, own);
  bool prepares = false;
  visit_elementwise_loss(args.loss, args.params,
                         [&](auto term) { prepares = decltype(term)::kPreparesTarget; });
  return prepares && own.numel <= args.space.numel / 2 ? own.numel : 0;
}

// The same, for a gradient.
int64_t num_prepared(const ElementwiseArgs& args, Wanted wanted) {
  bool takes = false;
  visit_elementwise_loss(args.loss, args.params,
                         [&](auto term) { takes = takes_prepared<decltype(term)>(wanted); });
  return takes ? num_prepared(args) : 0;
}

template <typename acc_t, typename Term>
Operand prepare_target(const ElementwiseArgs& args, const Term& term, double* scratch,
                       Context context) {
  IterationSpace own;
  Operand prepared = prepared_target(args, own);
  Operand target;  // over its own dimensions
  target.data = args.target.data;
  target.dtype = args.target.dtype;
  std::copy_if(args.target.strides, args.target.strides + args.space.ndim, target.strides,
               [](int64_t stride) { return stride != 0; });
  prepared.data = scratch;
  prepared.dtype = dtype_of<acc_t>::value;
  acc_t* const values = reinterpret_cast<acc_t*>(scratch);
  parallel_for_each(context, num_chunks(own), [&](int64_t chunk) {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      const int64_t end = std::min((chunk + 1) * kChunk, own.numel);
      BlockWalker<1> walker(own, {&target}, chunk * kChunk);
      alignas(64) acc_t t[kBlock];
      for (int64_t i = chunk * kChunk; i < end; i += kBlock) {
        const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
        walker.next(count);
        load_block(target, walker[0], count, t);
        for (int j = 0; j < padded(count); ++j) {
          t[j] = term.prepare(t[j]);
        }
        std::copy_n(t, count, values + i);
      }
    });
  });
  return prepared;
}

}  // namespace
}  // namespace lossops::cpu
