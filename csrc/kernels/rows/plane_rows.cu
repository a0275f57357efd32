// Cross entropy of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W)
// tensor, with class indices. Up to 88 classes may lie at any address. More must lie in aligned
// groups, and those of 8 groups of rows must fit shared memory.
//
// A block has lanes x shares threads (plane_grid.cuh defines lane, share and part).
//   1. Each thread sums the classes of its lane and share, which lie in shared memory.
//   2. A few threads a row merge the partial sums. One of them computes the loss and the row's
//      factors.
//   3. Each thread writes the gradients of its classes.
#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/plane_merge.cuh"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/plane_share.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_reader.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace plane_rows {
namespace {

// Step 2, for the rows of the groups from `first` on: records their losses, and leaves what their
// gradients need in `numbers`. scale: of the gradients.
template <typename scalar_t>
__device__ __forceinline__ void finish_rows(const CrossEntropyForwardArgs& args,
                                            const PlaneGrid& grid, const RowNumbers& numbers,
                                            uint32_t first, int slot, float scale,
                                            Partial& partial) {
  constexpr int kRows = GroupShare<scalar_t>::kRows;
  constexpr bool kExact = GroupShare<scalar_t>::kExact;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int team_bits = grid.merging_bits;
  const int team = 1 << team_bits;
  const int member = thread & (team - 1);
#pragma unroll 1
  for (int row = thread >> team_bits; row < numbers.rows; row += threads >> team_bits) {
    const auto of_row = PlaneRow::of<kRows>(args.rows, grid, first, row);
    const int index = numbers.index(row, slot);
    const bool is_there = of_row.is_there();
    const int64_t number = of_row.number(grid);
    const float weight = row_weight(args, index);
    const float x_at_index = index >= 0 && member == 0 ? numbers.of(RowNumbers::kLogit)[row] : 0.0f;
    const IndexRow reduced =
        index_row_of(merge_parts<kExact>(grid.parts, member, team,
                                         [&](int n) {
                                           return OthersSum<kExact>{
                                               numbers.of_part(n, RowNumbers::kReference)[row],
                                               numbers.of_part(n, RowNumbers::kTotal)[row]};
                                         }),
                     x_at_index, grid.share_bits == 0);
    if (member > 0) {
      continue;
    }
    const auto finished = reduced.template finish<!kExact>(x_at_index, scale, weight);
    if (is_there) {
      const float loss = index >= 0 ? finished.loss : gradient_without_loss(index);
      record_row(
          args, loss, weight, reduced, number, [&](int64_t) { return of_row.offset(args.output); },
          partial);
    }
    if (args.grad_input.data != nullptr) {
      using Gradient = IndexGradient<kExact>;
      numbers.put(row, index >= 0 ? Gradient::of(LogitGradient<float, kExact>(finished.softmax,
                                                                              scale * weight),
                                                 finished.gradient_at_index, index)
                                  : Gradient::without_loss(gradient_without_loss(index)));
    }
  }
}

// Losses, and gradients where args.grad_input exists. A block takes `lanes` groups at a time. It
// copies the logits of the next groups over the present ones: after the sums or, where it writes
// gradients, after these.
template <typename scalar_t>
__global__ void __launch_bounds__(resident_threads(sizeof(scalar_t)), 1)
    plane_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                      const __grid_constant__ PlaneGrid grid, const RowType<scalar_t> type,
                      Denominator denominator, GradOutput grad_output, Partial* partials,
                      Finalize finalize) {
  using Share = GroupShare<scalar_t>;
  constexpr int kRows = Share::kRows;
  constexpr bool kExact = Share::kExact;
  LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
  float scale = 1;
  if (grad_output.is_one(scale)) {
    return;
  }
  let_next_kernel_start();
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (grid.lanes - 1);
  const RowNumbers numbers{
      reinterpret_cast<float*>(reinterpret_cast<uint2*>(dynamic) + grid.places(args) * grid.pitch),
      grid.lanes * kRows};
  const bool writes = args.grad_input.data != nullptr;
  const auto place_of = [&](uint32_t group) {
    return PlanePlace::of<kRows>(args.rows, grid, group);
  };
  const auto prefetch_indices = [&](uint32_t of_first) {
#pragma unroll 1
    for (int row = thread; row < numbers.rows; row += threads) {
      const auto of_row = PlaneRow::of<kRows>(args.rows, grid, of_first, row);
      if (of_row.is_there()) {
        prefetch(static_cast<const char*>(args.target.data) +
                 of_row.offset(args.target) * element_size(args.target.dtype));
      }
    }
  };
  const auto put_indices = [&](uint32_t of_first, int slot) {
#pragma unroll 1
    for (int row = thread; row < numbers.rows; row += threads) {
      const auto of_row = PlaneRow::of<kRows>(args.rows, grid, of_first, row);
      int index = kIgnoredRow;
      if (of_row.is_there()) {
        index = checked_index(args, load_class_index(args.target, of_row.offset(args.target)));
      }
      numbers.index(row, slot) = index;
    }
  };
  Share share(grid, args, dynamic);
  uint32_t first = blockIdx.x * grid.lanes;
  const uint32_t groups_at_once = gridDim.x * grid.lanes;
  share.start(place_of(first + lane));
  if (writes) {
    UnitScale<float, true> unit(args, denominator, scale);
    unit.wait(args, denominator);
    scale = unit.get();
  }
  Partial partial;
#pragma unroll 1
  for (int slot = 0; first < grid.groups; slot ^= 1) {
    put_indices(first, slot);
    __syncthreads();
    const uint32_t next_first = first + groups_at_once;
    prefetch_indices(next_first);
    share.take(place_of(first + lane).rows, &numbers.index(lane * kRows, slot));
    wait_for_own_copies();
    share.settle();
    const auto visit = [&](const auto& body) {
      return type.visit([&](auto like) { return body(TypeTag<decltype(like)>{}); });
    };
    visit([&](auto element) {
      share.take_indices_out(element, numbers.of(RowNumbers::kLogit) + lane * kRows);
      if constexpr (kExact) {
        share.add_shifted(element);
      } else {
        share.add_plain(element);
      }
    });
    if constexpr (!kExact) {
      const int shifted = visit([&](auto element) { return share.find_plain(element); });
      if (__any_sync(kAllLanes, shifted != 0)) {
        share.sum_shifted(shifted,
                          [&] { visit([&](auto element) { share.add_shifted(element); }); });
      }
    }
    if (!writes) {
      share.start(place_of(next_first + lane));
    }
    float references[kRows];
    float totals[kRows];
    share.get_sums(references, totals);
    if (thread % kWarpSize < grid.lanes) {
      const int part = grid.lanes < kWarpSize ? thread / kWarpSize : share.share;
      RowNumbers::store(numbers.of_part(part, RowNumbers::kReference) + lane * kRows, references);
      RowNumbers::store(numbers.of_part(part, RowNumbers::kTotal) + lane * kRows, totals);
    }
    __syncthreads();
    finish_rows<scalar_t>(args, grid, numbers, first, slot, scale, partial);
    if (writes) {
      __syncthreads();
      IndexGradient<kExact> gradients[kRows];
      numbers.get(lane * kRows, share.indices, gradients);
      auto* const to = static_cast<scalar_t*>(args.grad_input.data) +
                       place_of(first + lane).offset(args.grad_input);
      visit([&](auto element) { share.write_gradients(element, gradients, to); });
      share.start(place_of(next_first + lane));
    }
    first = next_first;
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace plane_rows

void launch_plane_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput& grad_output,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace plane_rows;
  const Spread spread(args, current_device_limits());
  LaunchShape shape;
  shape.blocks = plan.blocks;
  // Blocks that begin beside those of another kernel begin one by one. If they have several rounds,
  // neighbours then read neighbouring memory at different times all the while: steps of 150 to 1203
  // classes took 8 to 12 % longer. (H100, 2026-11)
  shape.overlap = grad_output.exists() || (denominator.is_left() && spread.has_one_round());
  shape.threads = plan.threads;
  shape.shared_bytes = plan.shared_bytes;
  const PlaneGrid grid(args, spread);
  visit_float_or_any_half(args.input.dtype, [&](auto like) {
    const RowType<typename decltype(like)::type> type(args.input.dtype);
    const auto kernel = plane_rows_kernel<typename decltype(like)::type>;
    allow_shared_bytes(kernel, shape.shared_bytes,
                       static_cast<int>(most_shared_bytes(current_device_limits().shared_bytes)));
    launch_kernel("plane_rows_kernel", kernel, shape, stream, args, grid, type, denominator,
                  grad_output, partials, finalize);
  });
}

}  // namespace lossops::cuda
