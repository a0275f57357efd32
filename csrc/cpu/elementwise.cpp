// Elementwise losses on the CPU: the launchers.
//
// A space of elements is cut into boxes, which the operands' layouts decide, and each box into
// chunks, which are shared among threads. The gradient of a broadcast operand is cut another way.
#include <algorithm>
#include <cstdint>

#include "cpu/elementwise/backward.h"
#include "cpu/elementwise/boxes.h"
#include "cpu/elementwise/broadcast_gradient.h"
#include "cpu/elementwise/forward.h"
#include "cpu/elementwise/prepared_target.h"
#include "cpu/parallel.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

// Calls body(acc_t(), term) with the types that the arguments choose.
template <typename Body>
void visit_types(const ElementwiseArgs& args, const Body& body) {
  visit_elementwise_loss(args.loss, args.params, [&](auto term) {
    args.acc_double ? body(double(), term) : body(float(), term);
  });
}

}  // namespace

// At most: what is prepared of a box is no more than of the whole, and each box may end with a
// chunk that is not full. The boxes are cut once, by the launch.
int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args) {
  const int64_t chunks = num_chunks(args.space) + kMaxBoxes - 1;
  return num_prepared(args) + (args.reduction == Reduction::kNone ? 0 : 2 * chunks);
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
  if (is_weighted_mean(args)) {
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
  Wanted wanted;
  wanted_gradient(args, wanted);
  return plan.kept * plan.splits + num_prepared(args, wanted);
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
    Operand prepared;
    if constexpr (decltype(term)::kPreparesTarget) {
      if (num_prepared(args, wanted) > 0) {
        prepared = prepare_target<acc_t>(args, term, scratch + plan.kept * plan.splits, context);
      }
    }
    parallel_for_each(context, plan.tiles * plan.splits, [&](int64_t task) {
      const int64_t split = task / plan.tiles;
      const int64_t first = task % plan.tiles * plan.tile;
      const int64_t last = std::min(first + plan.tile, plan.kept);
      const int64_t begin = std::min(split * terms_per_split, plan.reduced);
      const int64_t end = std::min(begin + terms_per_split, plan.reduced);
      double* sums = scratch + split * plan.kept + first;
      with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
        if (plan.reduced_inner) {
          reduce_along_terms(args, scalars, prepared, wanted, term, plan, first, last, begin, end,
                             sums);
        } else {
          reduce_along_elements(args, scalars, prepared, wanted, term, plan, first, last, begin,
                                end, sums);
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
