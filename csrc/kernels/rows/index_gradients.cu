// Gradients of cross entropy with class indices, by the kernels of short_gradients.cuh and
// row_pass.cuh. policy.cpp chooses short_gradients_kernel for rows of at most 4 KB, and
// row_gradients_kernel for longer rows whose gradients are not written over the logits.
//
// A gradient depends on its own logit and on what forward left of the row. So it has the same bits
// here as in every other kernel.
#include <cstdint>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/indexed_source.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/short_gradients.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

template <bool kExact>
struct IndexGradients {
  using Gradient = IndexGradient<kExact>;
  CrossEntropyBackwardArgs args;  // operands are those of a slice of the rows

  // For row_gradients_kernel. of() loads the class index, and then the logit there: so parts are
  // longer than those of tokens, and gradients must not overwrite logits (policy.cpp), as another
  // warp may have replaced that one.
  static constexpr int kPartVectors = 256;
  // With 6 some registers are spilled: the step of bf16 16384x50257 is then at .595 of the floor,
  // with 5 at .660. Those of fp32 are spilled with 5. (H200, 2026-11)
  static constexpr int kBlocks = kExact ? 4 : 5;
  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    return index_gradient<kExact>(args, place.row, place.offset(args.input),
                                  place.offset(args.target), place.offset(args.grad_output));
  }

  // The class index once more, by the warp that wrote it.
  __device__ __forceinline__ void finish(const RowGrid::Place& place, const RowPart& part,
                                         const Gradient& gradient) const {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0 && gradient.index >= 0 && part.has(gradient.index)) {
      store_operand(args.grad_input, place.offset(args.grad_input) + gradient.index,
                    gradient.at_index);
    }
  }

  // For short_gradients_kernel.
  using Numbers = IndexRowNumbers;
  static constexpr bool kManyIndices = false;
  __device__ __forceinline__ int lanes() const { return 1; }
  __device__ __forceinline__ int indices() const { return 1; }
  __device__ __forceinline__ Numbers load(const RowGrid::Place& place, int /*lane*/) const {
    return {args, place.row, place.offset(args.target), place.offset(args.grad_output)};
  }
  template <typename LogitOf>
  __device__ __forceinline__ Gradient of(const Numbers& numbers, const LogitOf& logit_of) const {
    return numbers.gradient<kExact>(args, logit_of);
  }
};

CrossEntropyBackwardArgs slice_of(const RowSlice& slice, CrossEntropyBackwardArgs args) {
  args.input = slice(args.input);
  args.target = slice(args.target);
  args.grad_output = slice(args.grad_output);
  args.grad_input = slice(args.grad_input);
  return args;
}

// Calls body with the type of logits: fp32, or any half type.
template <typename Body>
void visit_type(const CrossEntropyBackwardArgs& args, Body&& body) {
  visit_float_or_any_half(args.input.dtype, [&](auto like) {
    body(RowType<typename decltype(like)::type>(args.input.dtype));
  });
}

}  // namespace

void launch_index_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  visit_type(args, [&](auto type) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Gradients = IndexGradients<kExactExponentials<scalar_t>>;
    const auto plan = RowParts::of(args.num_classes, sizeof(scalar_t), Gradients::kPartVectors);
    for_each_slice(args.rows, kMaxDividend / plan.parts, [&](const RowSlice& slice) {
      const RowGrid grid(slice, plan.parts);
      const Gradients rows{slice_of(slice, args)};
      const RowSource source = indexed_source(slice, args);
      launch_kernel("row_gradients_kernel", row_gradients_kernel<Gradients, scalar_t, NoMap>,
                    {grid.blocks(kWarpSize), kRowThreads, 0, 1, true}, stream, rows, source,
                    rows.args.grad_input, 1, grid, plan, type, NoMap{});
    });
  });
}

void launch_short_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  visit_type(args, [&](auto type) {
    using scalar_t = typename decltype(type)::scalar_type;
    using Gradients = IndexGradients<kExactExponentials<scalar_t>>;
    for_each_slice(args.rows, kMaxDividend, [&](const RowSlice& slice) {
      const Gradients rows{slice_of(slice, args)};
      const RowSource source(slice, args.input, args.input_class_stride, Operand{});
      launch_short_gradients_of(slice, rows, source, rows.args.grad_input,
                                args.grad_input_class_stride, args.num_classes, 1, type, NoMap{},
                                stream);
    });
  });
}

}  // namespace lossops::cuda
