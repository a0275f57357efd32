// Cross entropy of short rows with smoothing or probabilities: a warp copies a tile of consecutive
// rows to shared memory, a lane or a few of them take a row, and the gradients take its place
// there.

#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_walk.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/soft_tile_row.cuh"
#include "kernels/rows/soft_tiles_plan.h"
#include "kernels/rows/tile_copy.cuh"

namespace lossops::cuda {
namespace soft_tiles {
namespace {

// The tiles, as the kernel is told.
struct SoftShape {
  CopyShape logits;
  CopyShape probabilities;  // of probability targets, in elements of the logits' size
  Divisor classes;
  int tile_rows;
  int log_team;       // 2^log_team lanes share a row
  int warp_bytes;     // of shared memory
  int logit_bytes;    // those of them for logits
  bool splits_words;  // rows of logits may begin in the middle of a word
  bool probabilities_split_words;
  bool probabilities_lie_apart;  // a row's logits and probabilities may begin at different halves
  bool has_float_probabilities;  // in shared memory; otherwise they have the type of the logits
  // How gradients are written, by the first that is true: by TileCopy::store_run(), by its
  // store_rows_in_vectors(), by store_rows(). If none is, lane by lane.
  bool gradient_in_run;
  bool gradient_in_rows;
  bool gradient_in_quads;
  Smoothing smoothing;
};

// kKind: kSmooth for class indices with smoothing and without class weights. All other rows are
// kProbability, class indices with smoothing and class weights too. One kernel serves calls with a
// gradient and without one, which saves machine code. By one without, smoothed losses take 1 to 4 %
// less time. (H200, 2026-11)
template <typename scalar_t, RowKind kKind>
__global__ void __launch_bounds__(kThreads, min_blocks(kKind == RowKind::kSmooth))
    cross_entropy_forward_soft_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                      const __grid_constant__ SoftShape shape,
                                      Denominator denominator,
                                      const __grid_constant__ GradOutput grad_output,
                                      Partial* partials, Finalize finalize) {
  float given = 1;
  if (grad_output.is_one(given)) {
    return;
  }
  constexpr bool kIsSmooth = kKind == RowKind::kSmooth;
  LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const auto num_classes = static_cast<int>(args.num_classes);
  const int team = unfolded(1 << shape.log_team);
  const int member = lane & (team - 1);
  const int team_rows = kWarpSize >> shape.log_team;
  const int tile_rows = unfolded(shape.tile_rows);
  const int first_own = lane >> shape.log_team;
  char* const buffer = reinterpret_cast<char*>(dynamic) + unfolded(warp * shape.warp_bytes);
  TileCopy<scalar_t> logits(shape.logits, buffer);
  TileCopy<scalar_t> probabilities(shape.probabilities, buffer + shape.logit_bytes);
  auto* const weights =
      reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + kWarps * shape.warp_bytes);
  const bool wants_gradient = args.grad_input.data != nullptr;
  let_next_kernel_start();
  UnitScale<float> unit(args, denominator, given);
  const bool has_weights = !kIsSmooth && args.weight != nullptr;
  if (has_weights) {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < num_classes; c += kThreads) {
      weights[c] = class_weight<float>(args, c);
    }
    __syncthreads();
  }
  const bool has_indices = kIsSmooth || !args.target_is_probability;
  const bool has_floats = sizeof(scalar_t) == 4 || shape.has_float_probabilities;
  const SmoothedIndex smooth(shape.smoothing);
  // The class index of row r of a tile; args.ignore_index for what has none.
  const auto load_target = [&](int64_t first_row, int r, int rows) {
    return has_indices && r < rows
               ? load_class_index(args.target,
                                  row_offset_by_call(args.rows, args.target, first_row + r))
               : args.ignore_index;
  };
  Partial partial;
  const int64_t first_of_warp = (int64_t{blockIdx.x} * kWarps + warp) * tile_rows;
#pragma unroll 1
  for (int64_t first_row = first_of_warp; first_row < args.rows.numel;
       first_row += int64_t{gridDim.x} * kWarps * tile_rows) {
    const int rows =
        unfolded(static_cast<int>(min(int64_t{tile_rows}, args.rows.numel - first_row)));
    if (shape.logits.layout.in_run) {
      logits.start_run(args.input.data, first_row, rows);
    } else {
      const auto* const from = static_cast<const scalar_t*>(args.input.data);
      for_classes<1, 2>(args.rows, args.input, 1, shape.classes, first_row, rows,
                        [&](int r, int c, int64_t offset) {
                          logits.elements()[logits.offset(r) + c] = from[offset];
                        });
    }
    if (!has_indices && shape.probabilities.layout.in_run) {
      probabilities.start_run(args.target.data, first_row, rows);
    } else if (!has_indices) {
      for_classes<1, 2>(args.rows, args.target, args.target_class_stride, shape.classes, first_row,
                        rows, [&](int r, int c, int64_t offset) {
                          const float p = load_operand<float>(args.target, offset);
                          scalar_t* const to = probabilities.elements() + probabilities.offset(r);
                          if (has_floats) {
                            reinterpret_cast<float*>(to)[c] = p;
                          } else {
                            to[c] = from_acc<scalar_t>(p);
                          }
                        });
    }
    int64_t next_target = load_target(first_row, first_own, rows);
    if (wants_gradient && first_row == first_of_warp) {
      unit.wait(args, denominator);
    }
    wait_for_own_copies();
    logits.settle();
    if (!has_indices) {
      probabilities.settle();
    }
    __syncwarp();
#pragma unroll 1
    for (int r = first_own; r - first_own < rows; r += team_rows) {
      const bool exists = r < rows;
      const int place = min(r, rows - 1);
      // Rows with probabilities all have a loss.
      const int index = !exists ? kIgnoredRow : has_indices ? checked_index(args, next_target) : 0;
      next_target = load_target(first_row, r + team_rows, rows);
      const int probabilities_at = kIsSmooth ? 0 : probabilities.offset(place);
      const TileRow<scalar_t, kKind> own(
          {logits.elements(), logits.offset(place), shape.splits_words},
          {shape.smoothing,
           has_weights,
           weights,
           has_indices,
           index,
           {probabilities.elements(), probabilities_at, shape.probabilities_split_words},
           has_floats,
           reinterpret_cast<const float*>(probabilities.elements() + probabilities_at),
           shape.probabilities_lie_apart},
          smooth, num_classes, team, member);
      const DenseOnlineSoftmax<float> state = own.reduce();
      if (exists && member == 0) {
        float weight = index == kIgnoredRow ? 0.0f : 1.0f;  // as row_weight()
        if (has_weights && has_indices) {
          weight = index >= 0 ? weights[index] : 0.0f;
        }
        finish_indexed_row<RowKind::kProbability>(
            args, smooth, index, weight, state, state.dot, state.q_sum, 0.0f, first_row + r,
            [&](int64_t number) { return row_offset_by_call(args.rows, args.output, number); },
            partial);
      }
      if (wants_gradient) {
        const float scale = exists ? grad_output.scale_of_row(first_row + r, unit.get()) : 0;
        own.write_gradients(state, scale, exists);
      }
    }
    __syncwarp();
    if (wants_gradient) {
      if (shape.gradient_in_run) {
        logits.store_run(args.grad_input.data, first_row);
      } else if (shape.gradient_in_rows) {
        logits.store_rows_in_vectors(args.grad_input.data, args.grad_input.strides[0], first_row,
                                     rows);
      } else if (sizeof(scalar_t) == 2 && shape.gradient_in_quads) {
        store_rows(args, shape.classes, logits.elements() + logits.offset(0),
                   shape.logits.layout.pitch, true, first_row, rows);
      } else {
        auto* const to = static_cast<scalar_t*>(args.grad_input.data);
        for_classes<1, 1>(args.rows, args.grad_input, 1, shape.classes, first_row, rows,
                          [&](int r, int c, int64_t offset) {
                            to[offset] = logits.elements()[logits.offset(r) + c];
                          });
      }
      __syncwarp();
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace soft_tiles

void launch_soft_tiles(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput& grad_output,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace soft_tiles;
  const auto element_bytes = static_cast<int>(element_size(args.input.dtype));
  const int64_t blocks = grad_output.limit_blocks(plan.blocks, kThreads);
  const TileLayout layout = logit_layout(args, plan.team);
  SoftShape shape = {};
  shape.classes = Divisor(static_cast<uint32_t>(args.num_classes));
  shape.logits = CopyShape(layout, args.num_classes, element_bytes);
  shape.tile_rows = plan.steps * (kWarpSize / plan.team);
  shape.smoothing = smoothing_of(args);
  shape.log_team = __builtin_ctz(static_cast<unsigned>(plan.team));
  shape.warp_bytes = plan.warp_bytes;
  shape.logit_bytes = layout.bytes(shape.tile_rows, args.num_classes, element_bytes);
  const auto splits_words = [&](const CopyShape& rows, const void* data) {
    return element_bytes == 2 &&
           (rows.layout.pitch % 2 != 0 ||
            (rows.layout.in_run && reinterpret_cast<uintptr_t>(data) % 4 != 0));
  };
  shape.splits_words = splits_words(shape.logits, args.input.data);
  if (args.target_is_probability) {
    TileLayout probabilities = probability_layout(args, plan.team);
    const int elements = probability_bytes(args) / element_bytes;  // in the place of one
    probabilities.stride *= elements;
    probabilities.pitch *= elements;
    shape.probabilities = CopyShape(probabilities, elements * args.num_classes, element_bytes);
    shape.has_float_probabilities = probability_bytes(args) == 4;
    shape.probabilities_split_words = splits_words(shape.probabilities, args.target.data);
    const auto distance = reinterpret_cast<uintptr_t>(args.input.data) -
                          reinterpret_cast<uintptr_t>(args.target.data);
    const bool lie_alike = layout.in_run && probabilities.in_run && distance % 4 == 0 &&
                           (layout.pitch - probabilities.pitch) % 2 == 0;
    shape.probabilities_lie_apart =
        (shape.splits_words || shape.probabilities_split_words) && !lie_alike;
  }
  const bool in_vectors = layout.in_run && lies_as_input(args, args.grad_input, 1);
  shape.gradient_in_run =
      in_vectors && rows_follow(args, args.grad_input, 1) && layout.stride == args.num_classes;
  shape.gradient_in_rows =
      in_vectors && args.rows.ndim == 1 && args.num_classes * element_bytes >= kMinVectorRowBytes;
  shape.gradient_in_quads = may_store_quads(args);
  const auto launch = [&](auto kernel) {
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
    launch_kernel("cross_entropy_forward_soft_kernel", kernel,
                  {blocks, kThreads, plan.shared_bytes, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, shape, denominator, grad_output, partials, finalize);
  };
  visit_float_or_half(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    is_smooth(args) ? launch(cross_entropy_forward_soft_kernel<scalar_t, RowKind::kSmooth>)
                    : launch(cross_entropy_forward_soft_kernel<scalar_t, RowKind::kProbability>);
  });
}

}  // namespace lossops::cuda
