// Log-probabilities of classes and entropies of rows (losses/rows/tokens.h) on the machine of
// row_pass.cuh: the launches.
//
// Forward leaves the states of each row's pieces; a small kernel after it merges them, reads the
// logits at the class indices and writes the results. Backward is a small kernel for what is known
// of each row, one that writes all gradients, and a small one that rewrites those at class indices.
// Most rows of at most 1 KB take one kernel forward, and most of at most 4 KB one backward.
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_states.cuh"
#include "kernels/rows/short_gradients.cuh"
#include "kernels/rows/short_token_rows.cuh"
#include "kernels/rows/token_gradients.cuh"
#include "kernels/rows/token_values.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {
namespace {

// Arguments of a slice of the rows.
TokenForwardArgs slice_of(const RowSlice& slice, TokenForwardArgs args) {
  args.index = slice(args.index);
  args.log_probs = slice(args.log_probs);
  args.entropy = slice(args.entropy);
  args.lse = slice(args.lse);
  return args;
}
TokenBackwardArgs slice_of(const RowSlice& slice, TokenBackwardArgs args) {
  args.index = slice(args.index);
  args.grad_log_probs = slice(args.grad_log_probs);
  args.grad_entropy = slice(args.grad_entropy);
  args.grad_lse = slice(args.grad_lse);
  args.grad_input = slice(args.grad_input);
  return args;
}

RowCut cut_of(const TokenArgs& args) {
  return RowCut::of(args.num_classes, element_size(args.input.dtype));
}

// Short rows of fp64 or with a softcap are rare. They take the general kernels, which saves machine
// code.
template <typename scalar_t, typename Map>
constexpr bool kHasShortKernels = sizeof(scalar_t) < 8 && std::is_same_v<Map, LinearMap<float>>;

// Whether rows are short, and of a dtype and a map that kernels of short rows take.
bool is_short(const TokenArgs& args) {
  const int64_t element_bytes = element_size(args.input.dtype);
  return element_bytes < 8 && args.map.softcap == 0 &&
         ShortRows::are_short(args.num_classes, element_bytes);
}

// Whether forward is short_token_values_kernel's.
bool takes_short_rows(const TokenArgs& args) {
  return is_short(args) && args.num_classes * element_size(args.input.dtype) <= kMostValuesBytes;
}

// Whether backward is short_gradients_kernel's. The kernels around row_gradients_kernel cost too
// much for short rows: rows of 26 bytes were at .01 of the floor, of 664 at .11 (step, H200,
// 2026-11).
bool takes_short_gradients(const TokenBackwardArgs& args) {
  return is_short(args) && args.num_indices <= kFewIndices;
}

}  // namespace

int64_t token_forward_scratch(const TokenForwardArgs& args) {
  if (takes_short_rows(args)) {
    return 0;
  }
  const int64_t state = args.input.dtype == DType::kFloat64 ? sizeof(EntropySoftmax<double>)
                                                            : sizeof(EntropySoftmax<float>);
  return args.rows.numel * cut_of(args).pieces * state / static_cast<int64_t>(sizeof(double));
}

void launch_token_forward(const TokenForwardArgs& args, double* scratch, Context context) {
  auto* const stream = static_cast<cudaStream_t>(context);
  if (takes_short_rows(args)) {
    const RisingMap rising(args.map);
    visit_row_types(
        args.input.dtype, args.num_classes, rising.params, [&](auto type, const auto& map) {
          using scalar_t = typename decltype(type)::scalar_type;
          using Map = std::decay_t<decltype(map)>;
          if constexpr (kHasShortKernels<scalar_t, Map>) {
            for_each_slice(args.rows, kMaxDividend, [&](const RowSlice& slice) {
              const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
              launch_short_token_values(slice, slice_of(slice, args), source, type,
                                        map_of_pass(map), Map(args.map), rising.changes_signs,
                                        stream);
            });
          }
        });
    return;
  }
  const RowCut cut = cut_of(args);
  const int lanes = lanes_for(cut.pieces);
  for_each_slice(args.rows, kMaxDividend / cut.pieces, [&](const RowSlice& slice) {
    const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
    launch_row_states(slice, source, cut, args.map, args.entropy.data != nullptr, scratch, stream);
    const RowGrid rows(slice, 1);
    LaunchShape shape = {rows.blocks(lanes), kRowThreads};
    shape.overlap = true;
    launch_kernel("token_values_kernel", token_values_kernel, shape, stream, slice_of(slice, args),
                  source, rows, cut.pieces, lanes, scratch);
  });
}

// Doubles of scratch memory that the TokenLogitGradient of all rows take.
static int64_t gradient_doubles(const TokenBackwardArgs& args) {
  return ceil_div(args.rows.numel * kGradientNumbers * element_size(stats_dtype(args)),
                  static_cast<int64_t>(sizeof(double)));
}

// Scratch memory has a TokenLogitGradient a row, of_softmax a row and, in place, a kept gradient an
// index.
int64_t token_backward_scratch(const TokenBackwardArgs& args) {
  if (takes_short_gradients(args)) {
    return 0;
  }
  const bool keeps = args.is_in_place() && args.grad_log_probs.data != nullptr;
  return gradient_doubles(args) + args.rows.numel +
         (keeps ? args.rows.numel * args.num_indices : 0);
}

void launch_token_backward(const TokenBackwardArgs& args, double* scratch, Context context) {
  auto* const stream = static_cast<cudaStream_t>(context);
  if (args.num_classes == 0) {
    return;
  }
  const int64_t indices = args.grad_log_probs.data != nullptr ? args.num_indices : 0;
  const int lanes = lanes_of_sum(indices);
  double* const of_softmax = scratch + gradient_doubles(args);
  double* const kept = of_softmax + args.rows.numel;
  const IndexPass at_end = args.is_in_place() ? IndexPass::kRestore : IndexPass::kRewrite;
  visit_row_types(args.input.dtype, args.num_classes, args.map, [&](auto type, const auto& map) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Map = std::decay_t<decltype(map)>;
    using acc_t = acc_type_t<scalar_t>;
    using Gradient = TokenLogitGradient<scalar_t>;
    if constexpr (kHasShortKernels<scalar_t, Map>) {
      if (takes_short_gradients(args)) {
        for_each_slice(args.rows, kMaxDividend, [&](const RowSlice& slice) {
          const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
          const ShortTokenGradients<scalar_t> rows{slice_of(slice, args), source, type, map, lanes};
          launch_short_gradients_of(slice, rows, source, rows.args.grad_input,
                                    args.grad_input_class_stride, args.num_classes, indices, type,
                                    map, stream);
        });
        return;
      }
    }
    using Gradients = TokenGradients<scalar_t>;
    const auto plan = RowParts::of(args.num_classes, sizeof(scalar_t), Gradients::kPartVectors);
    for_each_slice(args.rows, kMaxDividend / plan.parts, [&](const RowSlice& slice) {
      const RowGrid grid(slice, plan.parts);
      const TokenBackwardArgs own = slice_of(slice, args);
      const RowSource source(slice, args.input, args.input_class_stride, args.row_mask);
      const RowGrid rows(slice, 1);
      const auto launch_classes = [&](IndexPass todo) {
        LaunchShape shape = {rows.blocks(lanes), kRowThreads};
        shape.overlap = true;
        if (args.grad_log_probs.data != nullptr) {
          launch_kernel("token_classes_kernel", token_classes_kernel<acc_t>, shape, stream, own,
                        source, rows, lanes, todo, of_softmax, kept);
        }
      };
      launch_kernel("token_gradients_kernel", token_gradients_kernel<acc_t>,
                    {rows.blocks(lanes), kRowThreads}, stream, own, rows, lanes,
                    RowTerm<scalar_t>::kUnit, reinterpret_cast<acc_t*>(scratch), of_softmax);
      if (args.is_in_place()) {
        launch_classes(IndexPass::kKeep);
      }
      LaunchShape passing = {grid.blocks(kWarpSize), kRowThreads};
      passing.overlap = true;
      launch_kernel("row_gradients_kernel", row_gradients_kernel<Gradients, scalar_t, Map>, passing,
                    stream, Gradients{reinterpret_cast<const Gradient*>(scratch)}, source,
                    own.grad_input, args.grad_input_class_stride, grid, plan, type, map);
      launch_classes(at_end);
    });
  });
}

}  // namespace lossops::cuda
