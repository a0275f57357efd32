// Backward: the gradients of a chunk of elements.
//
// Only elementwise.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/elementwise/operand_blocks.h"
#include "cpu/elementwise/prepared_target.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

bool is_weighted_mean(const ElementwiseArgs& args) {
  return args.reduction == Reduction::kMean && args.weight.data != nullptr;
}

// What the gradients of one launch have in common.
template <typename acc_t>
struct BackwardScalars {
  acc_t scale = 0;       // of the whole launch; none: each element has its own
  acc_t mean_share = 0;  // what the mean takes off the gradient of a weight

  explicit BackwardScalars(const ElementwiseBackwardArgs& args) {
    if (args.reduction != Reduction::kNone) {
      scale = reduction_scale(args, load_grad_output<acc_t>(args.grad_output, 0), args.mean_terms);
    }
    if (is_weighted_mean(args) && args.grad_weight.data != nullptr) {
      mean_share = static_cast<acc_t>(args.mean_terms[1] / args.weight_copies);
    }
  }
};

// One block of the operands that the gradients need.
template <typename acc_t>
class BackwardBlock {
 public:
  // prepared: what prepare_target() returned, or absent. It must outlive the block.
  BackwardBlock(const ElementwiseBackwardArgs& args, const BackwardScalars<acc_t>& scalars,
                const Operand& prepared)
      : args_(args), scalars_(scalars), prepared_operand_(prepared) {
    std::fill_n(shared_scale_, kVector, scalars.scale);
  }

  // The blocks begin at element `begin`, or where seek() says.
  void start(int64_t begin) {
    if (args_.takes_input) {
      input_.start(args_.space, args_.input, begin);
    }
    target_.start(args_.space, args_.target, begin);
    prepared_.start(args_.space, prepared_operand_, begin);
    start_factors(begin);
  }

  // The blocks are those of elements [begin, end), in order.
  void start(int64_t begin, int64_t end) {
    if (args_.takes_input) {
      input_.start(args_.space, args_.input, begin, end);
    }
    target_.start(args_.space, args_.target, begin, end);
    prepared_.start(args_.space, prepared_operand_, begin, end);
    start_factors(begin);
  }

  // Only after start(begin).
  void seek(int64_t index) {
    for (OperandReader<acc_t>* reader : {&input_, &target_, &prepared_, &weight_, &grad_output_}) {
      if (reader->exists()) {
        reader->seek(index);
      }
    }
  }

  // Reads the next block.
  __attribute__((noinline)) void next(int count) {
    t_ = target_.next(count);
    x_ = input_.exists() ? input_.next(count) : t_;  // t_: no gradient takes input
    p_ = prepared_.exists() ? prepared_.next(count) : Elements<acc_t>{};
    scale_ = {shared_scale_, 0};
    if (grad_output_.exists()) {
      scale_ = grad_output_.next(count);
    }
    weighted_ = scale_;
    if (weight_.exists()) {
      const auto product = [](acc_t a, acc_t b) LOSSOPS_ALWAYS_INLINE { return a * b; };
      weight_.next(count, weighted_buffer_);
      weighted_ = {weighted_buffer_};
      with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
        compute_block(padded(count), weighted_buffer_, product, weighted_, scale_);
      });
    }
  }

  // All callers share one copy: the others were 56 KB of the wheel.
  template <typename Term>
  __attribute__((noinline)) void gradient(Wanted wanted, const Term& term, int width, acc_t* grad) {
    with_widest_vectors<acc_t>(
        [&]() LOSSOPS_ALWAYS_INLINE { gradient_inline(wanted, term, width, grad); });
  }

 private:
  void start_factors(int64_t begin) {
    weight_.start(args_.space, args_.weight, begin);
    if (args_.reduction == Reduction::kNone) {
      grad_output_.start(args_.space, args_.grad_output, begin);
    }
  }

  template <typename Term>
  LOSSOPS_HOST_DEVICE void gradient_inline(Wanted wanted, const Term& term, int width,
                                           acc_t* grad) {
    if constexpr (Term::kPreparesTarget) {
      if (p_.data == nullptr && takes_prepared<Term>(wanted)) {
        p_ = prepare_block(term, t_, width, p_buffer_);
      }
    }
    const Elements<acc_t> p = p_.data == nullptr ? t_ : p_;
    const PreparedTerm<Term> prepared_term{term};
    if (wanted == Wanted::kInput) {
      const auto body = [&](acc_t factor, acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
        return factor * prepared_term.backward_input(x, t, p);
      };
      compute_block(width, grad, body, weighted_, x_, t_, p);
    } else if (wanted == Wanted::kTarget) {
      const auto body = [&](acc_t factor, acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
        return factor * prepared_term.backward_target(x, t, p);
      };
      compute_block(width, grad, body, weighted_, x_, t_, p);
    } else if constexpr (Term::kHasWeight) {
      // d/dw of sum(w v) / sum(w); the broadcast copies of a weight share its -mean.
      const auto body = [&](acc_t factor, acc_t x, acc_t t) LOSSOPS_ALWAYS_INLINE {
        return factor * (term.forward(x, t) - scalars_.mean_share);  // fault: weight-mean-share
      };
      compute_block(width, grad, body, scale_, x_, t_);
    }
  }

  const ElementwiseBackwardArgs& args_;
  const BackwardScalars<acc_t> scalars_;
  const Operand& prepared_operand_;
  OperandReader<acc_t> input_;
  OperandReader<acc_t> target_;
  OperandReader<acc_t> prepared_;
  OperandReader<acc_t> weight_;
  OperandReader<acc_t> grad_output_;  // of a reduction: absent, its share is in scalars_
  Elements<acc_t> x_;
  Elements<acc_t> t_;
  Elements<acc_t> p_;         // what is prepared of t_, once a gradient took it
  Elements<acc_t> scale_;     // grad_output of the element, normalised
  Elements<acc_t> weighted_;  // scale * weight
  alignas(64) acc_t p_buffer_[kBlock];
  alignas(64) acc_t weighted_buffer_[kBlock];
  alignas(64) acc_t shared_scale_[kVector];
};

// Gradients of elements [begin, end).
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void backward_chunk(const ElementwiseBackwardArgs& args,
                                        const BackwardScalars<acc_t>& scalars, const Term& term,
                                        int64_t begin, int64_t end) {
  const Operand absent;
  BackwardBlock<acc_t> block(args, scalars, absent);
  OperandWriter<acc_t> grad_input;
  OperandWriter<acc_t> grad_target;
  OperandWriter<acc_t> grad_weight;
  block.start(begin, end);
  grad_input.start(args.space, args.grad_input, begin);
  grad_target.start(args.space, args.grad_target, begin);
  grad_weight.start(args.space, args.grad_weight, begin);
  alignas(64) acc_t buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    block.next(count);
    const auto write = [&](Wanted wanted, OperandWriter<acc_t>& gradient) {
      if (gradient.exists()) {
        block.gradient(wanted, term, padded(count), gradient.next(count, buffer));
        gradient.finish(count, buffer);
      }
    };
    write(Wanted::kInput, grad_input);
    write(Wanted::kTarget, grad_target);
    write(Wanted::kWeight, grad_weight);
  }
}

}  // namespace
}  // namespace lossops::cpu
