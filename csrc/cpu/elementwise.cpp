// Elementwise losses on the CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "cpu/block.h"
#include "cpu/boxes.h"
#include "cpu/parallel.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

bool weighted_mean(const ElementwiseArgs& args) {
  return args.reduction == Reduction::kMean && args.weight.data != nullptr;
}

// Calls body(acc_t(), term) with the types that the arguments choose.
template <typename Body>
void visit_types(const ElementwiseArgs& args, const Body& body) {
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    args.acc_double ? body(double(), term) : body(float(), term);
  });
}

Boxes<ElementwiseForwardArgs> boxes_of(const ElementwiseForwardArgs& args) {
  using Args = ElementwiseForwardArgs;
  return cut_into_boxes<Args>(args, {&Args::input, &Args::target, &Args::weight, &Args::output,
                                     &Args::grad_input, &Args::grad_target});
}

Boxes<ElementwiseBackwardArgs> boxes_of(const ElementwiseBackwardArgs& args) {
  using Args = ElementwiseBackwardArgs;
  return cut_into_boxes<Args>(args, {&Args::input, &Args::target, &Args::weight, &Args::grad_output,
                                     &Args::grad_input, &Args::grad_target, &Args::grad_weight});
}

int64_t num_chunks(const IterationSpace& space) { return divide_up(space.numel, kChunk); }

// ------------------------------------------------------------------- forward

// What a loss prepares of its target, as an operand: once an element of a broadcast target, not
// once a copy. Its strides are dense over the dimensions that target has.
Operand prepared_target(const ElementwiseForwardArgs& args, IterationSpace& own) {
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
int64_t num_prepared(const ElementwiseForwardArgs& args) {
  IterationSpace own;
  prepared_target(args, own);
  bool prepares = false;
  visit_elementwise_loss(args.loss, args.params,
                         [&](auto term) { prepares = decltype(term)::kPreparesTarget; });
  return prepares && own.numel <= args.space.numel / 2 ? own.numel : 0;
}

template <typename acc_t, typename Term>
Operand prepare_target(const ElementwiseForwardArgs& args, const Term& term, double* scratch,
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

// Losses of elements [begin, end): stored, or summed into partial[0], their weights
// into partial[1]. Leaves the gradients for a grad_output of 1 that are wanted, scale being
// what all elements share; the operations are those of BackwardBlock.
template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void forward_chunk(const ElementwiseForwardArgs& args, const Term& term,
                                       const Operand& prepared, acc_t scale, int64_t begin,
                                       int64_t end, double* partial) {
  const bool has_weight = args.weight.data != nullptr;
  const Operand absent;
  RepeatedRun<acc_t> x_run;
  RepeatedRun<acc_t> t_run;
  RepeatedRun<acc_t> p_run;
  alignas(64) acc_t x_buffer[kRoom<acc_t>];
  alignas(64) acc_t t_buffer[kRoom<acc_t>];
  alignas(64) acc_t p_buffer[kRoom<acc_t>];
  x_run.start(args.space, args.input, begin, end, x_buffer);
  t_run.start(args.space, args.target, begin, end, t_buffer);
  p_run.start(args.space, prepared, begin, end, p_buffer);
  BlockWalker<7> walker(args.space,
                        {x_run.exists() ? &absent : &args.input,
                         t_run.exists() ? &absent : &args.target, &args.weight, &args.output,
                         &args.grad_input, &args.grad_target, p_run.exists() ? &absent : &prepared},
                        begin);
  alignas(64) acc_t weight[kBlock];
  alignas(64) acc_t results[kBlock];  // one after the other
  alignas(64) acc_t scales[kVector];
  std::fill_n(scales, kVector, scale);
  const auto prepare = [&](acc_t t) LOSSOPS_ALWAYS_INLINE {
    if constexpr (Term::kPreparesTarget) {
      return term.prepare(t);
    }
  };
  const auto forward = [&](acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
    if constexpr (Term::kPreparesTarget) {
      return term.forward(x, t, p);
    } else {
      return term.forward(x, t);
    }
  };
  const auto backward_input = [&](acc_t factor, acc_t x, acc_t t, acc_t p) LOSSOPS_ALWAYS_INLINE {
    if constexpr (Term::kPreparesTarget) {
      return factor * term.backward_input(x, t, p);
    } else {
      return factor * term.backward_input(x, t);
    }
  };
  const auto backward_target = [&](acc_t factor, acc_t x, acc_t t) LOSSOPS_ALWAYS_INLINE {
    return factor * term.backward_target(x, t);
  };
  const auto product = [](acc_t a, acc_t b) LOSSOPS_ALWAYS_INLINE { return a * b; };
  LaneSum loss_sum;
  LaneSum weight_sum;
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    const int width = padded(count);
    walker.next(count);
    const auto x =
        x_run.exists() ? x_run.next(count) : view_elements(args.input, walker[0], count, x_buffer);
    const auto t =
        t_run.exists() ? t_run.next(count) : view_elements(args.target, walker[1], count, t_buffer);
    auto p = t;  // what is prepared of t
    if constexpr (Term::kPreparesTarget) {
      if (prepared.data != nullptr) {
        p = p_run.exists() ? p_run.next(count)
                           : view_elements(prepared, walker[6], count, p_buffer);
      } else {
        compute_block(t.width(count), p_buffer, prepare, t);
        p.data = p_buffer;
      }
    }
    const bool none = args.reduction == Reduction::kNone;
    acc_t* const loss = none ? result_block(args.output, walker[3], count, results) : results;
    compute_block(width, loss, forward, x, t, p);
    Elements<acc_t> factor{scales, 0};
    if (has_weight) {
      load_block(args.weight, walker[2], count, weight);
      const Elements<acc_t> w{weight};
      compute_block(width, loss, product, w, Elements<acc_t>{loss});
      if (!none) {
        weight_sum.add_unpadded(weight, count);
      }
      compute_block(width, weight, product, w, factor);
      factor = {weight};
    }
    if (!none) {
      loss_sum.add_unpadded(loss, count);
    } else if (loss == results) {
      store_block(args.output, walker[3], count, loss);
    }
    if (args.grad_input.data != nullptr) {
      acc_t* const grad = result_block(args.grad_input, walker[4], count, results);
      compute_block(width, grad, backward_input, factor, x, t, p);
      if (grad == results) {
        store_block(args.grad_input, walker[4], count, grad);
      }
    }
    if (args.grad_target.data != nullptr) {
      acc_t* const grad = result_block(args.grad_target, walker[5], count, results);
      compute_block(width, grad, backward_target, factor, x, t);
      if (grad == results) {
        store_block(args.grad_target, walker[5], count, grad);
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    partial[0] = loss_sum.total();
    partial[1] = weight_sum.total();
  }
}

// ------------------------------------------------------------------ backward

// What the gradients of one launch have in common.
template <typename acc_t>
struct BackwardScalars {
  acc_t scale = 0;       // of the whole launch; none: each element has its own
  acc_t mean_share = 0;  // what the mean takes off the gradient of a weight

  explicit BackwardScalars(const ElementwiseBackwardArgs& args) {
    if (args.reduction != Reduction::kNone) {
      scale = reduction_scale(args, load_grad_output<acc_t>(args.grad_output, 0), args.mean_terms);
    }
    if (weighted_mean(args) && args.grad_weight.data != nullptr) {
      mean_share = static_cast<acc_t>(args.mean_terms[1] / args.weight_copies);
    }
  }
};

// One block of the operands that the gradients need.
template <typename acc_t>
class BackwardBlock {
 public:
  BackwardBlock(const ElementwiseBackwardArgs& args, const BackwardScalars<acc_t>& scalars)
      : args_(args), scalars_(scalars) {
    std::fill_n(shared_scale_, kVector, scalars.scale);
  }

  // Says that the blocks will be those of elements [begin, end), in order.
  LOSSOPS_HOST_DEVICE void expect(int64_t begin, int64_t end) {
    x_run_.start(args_.space, args_.input, begin, end, x_buffer_);
    t_run_.start(args_.space, args_.target, begin, end, t_buffer_);
  }

  // The operands whose offsets load() needs.
  LOSSOPS_HOST_DEVICE const Operand* input() const {
    return x_run_.exists() ? &absent_ : &args_.input;
  }
  LOSSOPS_HOST_DEVICE const Operand* target() const {
    return t_run_.exists() ? &absent_ : &args_.target;
  }

  LOSSOPS_HOST_DEVICE void load(const BlockOffsets& input, const BlockOffsets& target,
                                const BlockOffsets& weight, const BlockOffsets& grad_output,
                                int count) {
    x_ = x_run_.exists() ? x_run_.next(count) : view_elements(args_.input, input, count, x_buffer_);
    t_ = t_run_.exists() ? t_run_.next(count)
                         : view_elements(args_.target, target, count, t_buffer_);
    scale_ = {shared_scale_, 0};
    if (args_.reduction == Reduction::kNone) {
      scale_ = view_elements(args_.grad_output, grad_output, count, scale_buffer_);
    }
    weighted_ = scale_;
    if (args_.weight.data != nullptr) {
      const auto product = [](acc_t a, acc_t b) LOSSOPS_ALWAYS_INLINE { return a * b; };
      load_block(args_.weight, weight, count, weighted_buffer_);
      weighted_ = {weighted_buffer_};
      compute_block(padded(count), weighted_buffer_, product, weighted_, scale_);
    }
  }

  // All callers share one copy: the others were 56 KB of the wheel.
  template <typename Term>
  __attribute__((noinline)) void gradient(Wanted wanted, const Term& term, int width,
                                          acc_t* grad) const {
    with_widest_vectors<acc_t>(
        [&]() LOSSOPS_ALWAYS_INLINE { gradient_inline(wanted, term, width, grad); });
  }

 private:
  template <typename Term>
  LOSSOPS_HOST_DEVICE void gradient_inline(Wanted wanted, const Term& term, int width,
                                           acc_t* grad) const {
    if (wanted == Wanted::kInput) {
      const auto body = [&](acc_t factor, acc_t x, acc_t t)
                            LOSSOPS_ALWAYS_INLINE { return factor * term.backward_input(x, t); };
      compute_block(width, grad, body, weighted_, x_, t_);
    } else if (wanted == Wanted::kTarget) {
      const auto body = [&](acc_t factor, acc_t x, acc_t t)
                            LOSSOPS_ALWAYS_INLINE { return factor * term.backward_target(x, t); };
      compute_block(width, grad, body, weighted_, x_, t_);
    } else {
      // d/dw of sum(w v) / sum(w); the broadcast copies of a weight share its -mean.
      const auto body = [&](acc_t factor, acc_t x, acc_t t) LOSSOPS_ALWAYS_INLINE {
        return factor * (term.forward(x, t) - scalars_.mean_share);  // fault: weight-mean-share
      };
      compute_block(width, grad, body, scale_, x_, t_);
    }
  }

  const ElementwiseBackwardArgs& args_;
  const BackwardScalars<acc_t> scalars_;
  Elements<acc_t> x_;
  Elements<acc_t> t_;
  Elements<acc_t> scale_;     // grad_output of the element, normalised
  Elements<acc_t> weighted_;  // scale * weight
  const Operand absent_;
  RepeatedRun<acc_t> x_run_;
  RepeatedRun<acc_t> t_run_;
  alignas(64) acc_t x_buffer_[kRoom<acc_t>];
  alignas(64) acc_t t_buffer_[kRoom<acc_t>];
  alignas(64) acc_t scale_buffer_[kBlock];
  alignas(64) acc_t weighted_buffer_[kBlock];
  alignas(64) acc_t shared_scale_[kVector];
};

template <typename acc_t, typename Term>
LOSSOPS_HOST_DEVICE void backward_chunk(const ElementwiseBackwardArgs& args,
                                        const BackwardScalars<acc_t>& scalars, const Term& term,
                                        int64_t begin, int64_t end) {
  BackwardBlock<acc_t> block(args, scalars);
  block.expect(begin, end);
  BlockWalker<7> walker(args.space,
                        {block.input(), block.target(), &args.weight, &args.grad_output,
                         &args.grad_input, &args.grad_target, &args.grad_weight},
                        begin);
  alignas(64) acc_t grad_buffer[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    const int width = padded(count);
    walker.next(count);
    block.load(walker[0], walker[1], walker[2], walker[3], count);
    const auto write = [&](Wanted wanted, const Operand& gradient, const BlockOffsets& at) {
      if (gradient.data != nullptr) {
        acc_t* const grad = result_block(gradient, at, count, grad_buffer);
        block.gradient(wanted, term, width, grad);
        if (grad == grad_buffer) {
          store_block(gradient, at, count, grad);
        }
      }
    };
    write(Wanted::kInput, args.grad_input, walker[4]);
    write(Wanted::kTarget, args.grad_target, walker[5]);
    write(Wanted::kWeight, args.grad_weight, walker[6]);
  }
}

// ----------------------------------------------------------- backward, reduced

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
  bool several_elements_a_block() const { return reduced_inner && reduced <= kBlock / 4; }
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
                                            const BackwardScalars<acc_t>& scalars, Wanted wanted,
                                            const Term& term, const ReducePlan& plan, int64_t first,
                                            int64_t last, int64_t begin, int64_t end,
                                            double* sums) {
  BackwardBlock<acc_t> block(args, scalars);
  alignas(64) acc_t grad[kBlock];
  BlockWalker<4> walker(args.space, {&args.input, &args.target, &args.weight, &args.grad_output},
                        begin);
  const auto next_gradients = [&](int count) LOSSOPS_ALWAYS_INLINE {
    walker.next(count);
    block.load(walker[0], walker[1], walker[2], walker[3], count);
    block.gradient(wanted, term, padded(count), grad);
  };
  if (plan.several_elements_a_block()) {
    const int terms = static_cast<int>(plan.reduced);
    const int64_t elements_per_block = kBlock / terms;
    walker.seek(first * terms);
    for (int64_t element = first; element < last; element += elements_per_block) {
      const int elements = static_cast<int>(std::min(elements_per_block, last - element));
      next_gradients(elements * terms);
      for (int k = 0; k < elements; ++k) {
        acc_t of_element[kBlock / 4];
        std::copy_n(grad + k * terms, terms, of_element);
        LaneSum sum;
        sum.add_unpadded(of_element, terms);
        sums[element - first + k] = sum.total();
      }
    }
    return;
  }
  for (int64_t element = first; element < last; ++element) {
    walker.seek(element * plan.reduced + begin);
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
                                               const BackwardScalars<acc_t>& scalars, Wanted wanted,
                                               const Term& term, const ReducePlan& plan,
                                               int64_t first, int64_t last, int64_t begin,
                                               int64_t end, double* sums) {
  const int64_t elements = last - first;
  const int64_t terms_per_block = elements == plan.kept ? kBlock / elements : 1;
  BackwardBlock<acc_t> block(args, scalars);
  if (elements == plan.kept) {
    block.expect(begin * plan.kept, end * plan.kept);
  }
  alignas(64) acc_t grad[kBlock];
  double lanes[kBlock] = {};
  BlockWalker<4> walker(args.space,
                        {block.input(), block.target(), &args.weight, &args.grad_output},
                        begin * plan.kept + first);
  for (int64_t i = begin; i < end; i += terms_per_block) {
    const int count = static_cast<int>(elements * std::min(terms_per_block, end - i));
    if (elements != plan.kept) {
      walker.seek(i * plan.kept + first);
    }
    walker.next(count);
    block.load(walker[0], walker[1], walker[2], walker[3], count);
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

int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  int64_t chunks = 0;
  int64_t prepared = 0;
  for (const ElementwiseForwardArgs& box : boxes_of(args)) {
    chunks += num_chunks(box.space);
    prepared = std::max(prepared, num_prepared(box));
  }
  return prepared + (args.reduction == Reduction::kNone ? 0 : 2 * chunks);
}

void launch_elementwise_forward(const ElementwiseForwardArgs& args, double* scratch,
                                Context context) {
  const bool with_gradient = args.grad_input.data != nullptr || args.grad_target.data != nullptr;
  const bool none = args.reduction == Reduction::kNone;
  const auto boxes = boxes_of(args);
  int64_t chunks_done = 0;
  int64_t all_chunks = 0;
  for (const ElementwiseForwardArgs& box : boxes) {
    all_chunks += num_chunks(box.space);
  }
  visit_types(args, [&](auto acc, auto term) {
    using acc_t = decltype(acc);
    const acc_t scale = with_gradient ? reduction_scale(args, acc_t(1)) : acc_t(0);
    for (const ElementwiseForwardArgs& box : boxes) {
      Operand prepared;
      if constexpr (decltype(term)::kPreparesTarget) {
        if (num_prepared(box) > 0) {
          prepared =
              prepare_target<acc_t>(box, term, scratch + (none ? 0 : 2 * all_chunks), context);
        }
      }
      double* const partials = none ? nullptr : scratch + 2 * chunks_done;
      // fault: cpu-chunks {
      parallel_for_each(context, num_chunks(box.space), [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        const int64_t end = std::min(begin + kChunk, box.space.numel);
        double* partial = none ? nullptr : partials + 2 * chunk;
        with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
          forward_chunk(box, term, prepared, scale, begin, end, partial);
        });
      });
      // fault: cpu-chunks }
      chunks_done += num_chunks(box.space);
    }
  });
  if (none) {
    return;
  }
  double result = fold_partials(scratch, all_chunks, 2);
  if (weighted_mean(args)) {
    // fault: weight-copies
    const double total_weight = args.weight_copies > 0
                                    ? fold_partials(scratch + 1, all_chunks, 2) / args.weight_copies
                                    : args.denominator;
    result /= total_weight;
    args.mean_terms[0] = total_weight;
    args.mean_terms[1] = result;
  } else if (args.reduction == Reduction::kMean) {
    result /= args.denominator;  // fault: mean-divides
  }
  store_operand(args.output, 0, result);
}

void launch_elementwise_backward(const ElementwiseBackwardArgs& args, Context context) {
  if (kept_is_right(args)) {
    return;
  }
  visit_types(args, [&](auto acc, auto term) {
    using acc_t = decltype(acc);
    if (args.space.numel == 0) {
      return;
    }
    const BackwardScalars<acc_t> scalars(args);
    for (const ElementwiseBackwardArgs& box : boxes_of(args)) {
      parallel_for_each(context, num_chunks(box.space), [&](int64_t chunk) {
        const int64_t begin = chunk * kChunk;
        const int64_t end = std::min(begin + kChunk, box.space.numel);
        with_widest_vectors<acc_t>(
            [&]() LOSSOPS_ALWAYS_INLINE { backward_chunk<acc_t>(box, scalars, term, begin, end); });
      });
    }
  });
}

int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args) {
  const ReducePlan plan = plan_reduce(args);
  return plan.kept * plan.splits;
}

void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& given, double* scratch,
                                        Context context) {
  const ReducePlan plan = plan_reduce(given);
  ElementwiseBackwardReduceArgs args = given;
  if (plan.reduced_inner) {
    rotate_dims(args);
  }
  Wanted wanted;
  const Operand& gradient = wanted_gradient(given, wanted);
  const int64_t terms_per_split = divide_up(plan.reduced, plan.splits);
  visit_types(args, [&](auto acc, auto term) {
    using acc_t = decltype(acc);
    if (plan.kept == 0) {
      return;
    }
    const BackwardScalars<acc_t> scalars(args);
    parallel_for_each(context, plan.tiles * plan.splits, [&](int64_t task) {
      const int64_t split = task / plan.tiles;
      const int64_t first = task % plan.tiles * plan.tile;
      const int64_t last = std::min(first + plan.tile, plan.kept);
      const int64_t begin = std::min(split * terms_per_split, plan.reduced);
      const int64_t end = std::min(begin + terms_per_split, plan.reduced);
      double* sums = scratch + split * plan.kept + first;
      with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
        if (plan.reduced_inner) {
          reduce_along_terms(args, scalars, wanted, term, plan, first, last, begin, end, sums);
        } else {
          reduce_along_elements(args, scalars, wanted, term, plan, first, last, begin, end, sums);
        }
      });
    });
    IterationSpace kept_space = given.space;
    kept_space.ndim = given.num_kept;
    parallel_for_each(context, divide_up(plan.kept, kChunk), [&](int64_t chunk) {
      with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
        fold_splits<acc_t>(plan, kept_space, gradient, scratch, chunk * kChunk,
                           std::min((chunk + 1) * kChunk, plan.kept));
      });
    });
  });
}

}  // namespace lossops::cpu
