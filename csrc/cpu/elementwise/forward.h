// Forward: the losses of a chunk of elements, and their gradients if they are wanted.
//
// Only elementwise.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/elementwise/operand_blocks.h"
#include "cpu/elementwise/prepared_target.h"

namespace lossops::cpu {
namespace {

// Losses of elements [begin, end): stored, or summed into partial[0], their weights
// into partial[1]. Leaves the gradients for a grad_output of 1 that are wanted, scale being
// what all elements share; the operations are those of BackwardBlock. prepared: what
// prepare_target() returned, or absent.
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void forward_chunk(const ElementwiseForwardArgs& args, const Term& term,
                                       const Operand& prepared, acc_t scale, int64_t begin,
                                       int64_t end, double* partial) {
  const bool none = args.reduction == Reduction::kNone;
  OperandReader<acc_t> input;
  OperandReader<acc_t> target;
  OperandReader<acc_t> prepared_reader;
  OperandReader<acc_t> weight;
  OperandWriter<acc_t> output;
  OperandWriter<acc_t> grad_input;
  OperandWriter<acc_t> grad_target;
  input.start(args.space, args.input, begin, end);
  target.start(args.space, args.target, begin, end);
  prepared_reader.start(args.space, prepared, begin, end);
  weight.start(args.space, args.weight, begin);
  if (none) {
    output.start(args.space, args.output, begin);
  }
  grad_input.start(args.space, args.grad_input, begin);
  grad_target.start(args.space, args.grad_target, begin);

  const PreparedTerm<Term> prepared_term{term};
  const auto forward = [&](acc_t x, acc_t t, acc_t p)
                           LOSSOPS_ALWAYS_INLINE { return prepared_term.forward(x, t, p); };
  const auto backward_input = [&](acc_t factor, acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
    return factor * prepared_term.backward_input(x, t, p);
  };
  const auto backward_target = [&](acc_t factor, acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
    return factor * prepared_term.backward_target(x, t, p);
  };
  const auto product = [](acc_t a, acc_t b) LOSSOPS_ALWAYS_INLINE { return a * b; };

  alignas(64) acc_t p_buffer[kBlock];
  alignas(64) acc_t w_buffer[kBlock];
  alignas(64) acc_t results[kBlock];  // one after the other
  alignas(64) acc_t scales[kVector];
  std::fill_n(scales, kVector, scale);
  LaneSum loss_sum;
  LaneSum weight_sum;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    const int width = padded(count);
    const Elements<acc_t> x = input.next(count);
    const Elements<acc_t> t = target.next(count);
    Elements<acc_t> p = t;  // what is prepared of t
    if constexpr (Term::kPreparesTarget) {
      p = prepared_reader.exists() ? prepared_reader.next(count)
                                   : prepare_block(term, t, count, p_buffer);
    }
    acc_t* const loss = none ? output.next(count, results) : results;
    compute_block(width, loss, forward, x, t, p);
    Elements<acc_t> factor{scales, 0};
    if (weight.exists()) {
      weight.next(count, w_buffer);
      const Elements<acc_t> w{w_buffer};
      compute_block(width, loss, product, w, Elements<acc_t>{loss});
      if (!none) {
        weight_sum.add_unpadded(w_buffer, count);
      }
      compute_block(width, w_buffer, product, w, factor);
      factor = w;
    }
    if (none) {
      output.finish(count, results);
    } else {
      loss_sum.add_unpadded(loss, count);
    }
    if (grad_input.exists()) {
      acc_t* const grad = grad_input.next(count, results);
      compute_block(width, grad, backward_input, factor, x, t, p);
      grad_input.finish(count, results);
    }
    if (grad_target.exists()) {
      acc_t* const grad = grad_target.next(count, results);
      compute_block(width, grad, backward_target, factor, x, t, p);
      grad_target.finish(count, results);
    }
  }
  if (!none) {
    partial[0] = loss_sum.total();
    partial[1] = weight_sum.total();
  }
}

}  // namespace
}  // namespace lossops::cpu
