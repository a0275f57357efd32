// Cross entropy of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W)
// tensor, with class indices. Any number of classes and positions, at any address; it is made for
// rows that lie side by side.
//
// A block, or a cluster of them, has lanes x shares threads (plane_grid.cuh defines lane, share,
// range and part).
//   1. Each thread sums the classes of its lane and share, which lie in shared memory.
//   2. A few threads a row merge the partial sums. One of them computes the loss and the row's
//      factors.
//   3. Each thread writes the gradients of its classes.
// If the classes do not fit shared memory, they are taken in ranges. Then two ranges are in shared
// memory at a time, and step 3 reads all others from global memory again.
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
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/plane_share.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_reader.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace plane_rows {
namespace {

// Merges the parts of one of the block's own rows: the sum of all classes but its index, in all
// threads of a team.
template <bool kExact>
__device__ __forceinline__ OthersSum<kExact> merge_parts(const RowNumbers& numbers, int parts,
                                                         int own, int member, int team) {
  auto sum = OthersSum<kExact>::of_parts(parts, member, team, [&](int n) {
    return OthersSum<kExact>{numbers.of_part(n, RowNumbers::kReference)[own],
                             numbers.of_part(n, RowNumbers::kTotal)[own]};
  });
  sum.add_lanes(team / 2, 1);
  return sum;
}

// The row that these others and its class index make.
template <bool kExact>
__device__ __forceinline__ IndexRow row_of(const OthersSum<kExact>& others, float x_at_index) {
  OthersSum<kExact> shifted = others;
  if constexpr (!kExact) {
    if (OthersSum<kExact>::is_plain(others.reference) &&
        IndexRow::may_be_plain(::fabsf(x_at_index), others.total)) {
      return IndexRow::plain(others.total);
    }
    shifted = others.near_largest();
  }
  const float largest = shifted.reference;
  return IndexRow::of(RowTerms<kExact>(largest), largest, shifted.rounded(), x_at_index);
}

// A row that is one of a thread's, in the groups of a block.
struct PlaneRow {
  PlanePlace place;  // of its group
  int i;             // in its group

  template <int kRows>
  static __device__ __forceinline__ PlaneRow of(const IterationSpace& space, const PlaneGrid& grid,
                                                uint32_t first, int row) {
    return {PlanePlace::of<kRows>(space, grid, first + row / kRows), row % kRows};
  }
  __device__ __forceinline__ bool is_there() const { return i < place.rows; }
  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    return place.offset(operand) + i * operand.strides[0];
  }
  __device__ __forceinline__ int64_t number(const PlaneGrid& grid) const {
    return place.row(grid.positions) + i;
  }
};

// Step 2, for the block's own rows of the groups from `first` on: records their losses, and leaves
// what their gradients need in the `numbers` of all blocks of the cluster. scale: of the gradients.
template <typename scalar_t>
__device__ __forceinline__ void finish_rows(const CrossEntropyForwardArgs& args,
                                            const PlaneGrid& grid, const RowNumbers& numbers,
                                            uint32_t first, int turn, float scale,
                                            Partial& partial) {
  constexpr int kRows = GroupShare<scalar_t>::kRows;
  constexpr bool kExact = GroupShare<scalar_t>::kExact;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int team_bits = grid.merging_bits;
  const int team = 1 << team_bits;
  const int member = thread & (team - 1);
#pragma unroll 1
  for (int own = thread >> team_bits; own < numbers.own_rows; own += threads >> team_bits) {
    const int row = numbers.first_own + own;
    const auto of_row = PlaneRow::of<kRows>(args.rows, grid, first, row);
    const int index = numbers.index(row, turn);
    const bool is_there = of_row.is_there();
    const int64_t number = of_row.number(grid);
    const float weight = row_weight(args, index);
    const float x_at_index = index >= 0 && member == 0 ? numbers.of(RowNumbers::kLogit)[row] : 0.0f;
    const IndexRow reduced =
        row_of(merge_parts<kExact>(numbers, grid.parts, own, member, team), x_at_index);
    if (member > 0) {
      continue;
    }
    const auto finished = reduced.template finish<!kExact>(x_at_index, scale, weight);
    if (is_there) {
      const float loss = index >= 0 ? finished.loss : gradient_without_loss(index);
      record_row(
          args, loss, weight, reduced, x_at_index, number,
          [&](int64_t) { return of_row.offset(args.output); }, partial);
    }
    if (args.grad_input.data != nullptr) {
      using Gradient = IndexGradient<kExact>;
      const auto gradient =
          index >= 0 ? Gradient::of(LogitGradient<float, kExact>(finished.softmax, scale * weight),
                                    finished.gradient_at_index, index)
                     : Gradient::without_loss(gradient_without_loss(index));
#pragma unroll 1
      for (int rank = 0; rank < grid.blocks_of_cluster(); ++rank) {
        numbers.at(rank).put(row, gradient);
      }
    }
  }
}

// Losses, and gradients where args.grad_input exists. A block, or a cluster of them, takes groups
// one after the other. If all classes fit, those of the next groups are copied as soon as the block
// needs its own no more, to the same place. Else, while it needs one range, the next one is copied
// to the other buffer.
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
      reinterpret_cast<float*>(reinterpret_cast<uint2*>(dynamic) +
                               grid.buffers * grid.places_of_range() * grid.pitch),
      grid.lanes * kRows, grid.own_lanes * kRows, grid.rank() * grid.own_lanes * kRows};
  // The blocks of a cluster write to each other's numbers. They meet in a turn when they have
  // handed over sums and logits of class indices, then when they have handed over the numbers of
  // gradients; and no block writes what another one may still read of the turn before.
  const auto meet = [&] { grid.is_clustered() ? cluster_sync() : __syncthreads(); };
  const auto leave_places = [&] {
    if (grid.is_clustered()) {
      cluster_arrive();
    }
  };
  const auto wait_for_places = [&] {
    if (grid.is_clustered()) {
      cluster_wait();
    }
  };
  leave_places();
  const int last_range =
      (static_cast<int>(args.num_classes) - 1) / grid.range * grid.range;  // its first class
  const bool writes = args.grad_input.data != nullptr;
  const auto logits_of = [&](const PlanePlace& place) {
    return static_cast<const scalar_t*>(args.input.data) + place.offset(args.input);
  };
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
  const auto put_indices = [&](uint32_t of_first, int turn) {
#pragma unroll 1
    for (int row = thread; row < numbers.rows; row += threads) {
      const auto of_row = PlaneRow::of<kRows>(args.rows, grid, of_first, row);
      int index = kIgnoredRow;
      if (of_row.is_there()) {
        index = checked_index(args, load_class_index(args.target, of_row.offset(args.target)));
      }
      numbers.index(row, turn) = index;
    }
  };
  Share share(grid, args, dynamic);
  uint32_t first = (blockIdx.x - grid.rank()) * grid.own_lanes;
  const uint32_t groups_at_once = gridDim.x * grid.own_lanes;
  // Starts to copy a range of the groups from `of_first` on.
  const auto start = [&](uint32_t of_first, int range, int of_buffer) {
    share.start(place_of(of_first + lane), range, of_buffer);
  };
  start(first, 0, 0);
  end_group_of_copies();
  if (writes) {
    UnitScale<float, true> unit(args, denominator, scale);
    unit.wait(args, denominator);
    scale = unit.get();
  }
  Partial partial;
  int buffer = 0;  // of the next range
#pragma unroll 1
  for (int turn = 0; first < grid.groups; turn ^= 1) {
    put_indices(first, turn);
    __syncthreads();
    const uint32_t next_first = first + groups_at_once;
    prefetch_indices(next_first);
    share.take(place_of(first + lane).rows, &numbers.index(lane * kRows, turn));
    // With two buffers: starts to copy what comes after a range, unless the gradient needs the
    // other buffer. It ends a group of copies also where it starts none, as wait_for_range() counts
    // groups.
    const auto start_next = [&](int range) {
      if (grid.buffers > 1) {
        if (range < last_range) {
          start(first, range + grid.range, buffer ^ 1);
        } else if (!writes) {
          start(next_first, 0, buffer ^ 1);
        }
        end_group_of_copies();
      }
    };
    const auto wait_for_range = [&] {
      grid.buffers > 1 ? wait_for_groups_but<1>() : wait_for_own_copies();
    };
    const auto settle = [&](int range, int of_buffer) {
      share.settle(place_of(first + lane), range, of_buffer);
    };
    const auto take_indices_out = [&](int range, int of_buffer) {
      type.visit([&](auto like) {
        share.take_indices_out(
            TypeTag<decltype(like)>{}, range, of_buffer,
            grid.buffers > 1 ? logits_of(place_of(first + lane)) : nullptr,
            numbers.at(grid.rank_of(lane)).of(RowNumbers::kLogit) + lane * kRows);
      });
    };
    wait_for_places();
#pragma unroll 1
    for (int range = 0; range <= last_range; range += grid.range) {
      start_next(range);
      wait_for_range();
      settle(range, buffer);
      take_indices_out(range, buffer);
      type.visit([&](auto like) {
        if constexpr (kExact) {
          share.add_shifted(TypeTag<decltype(like)>{}, range, buffer);
        } else {
          share.add_plain(TypeTag<decltype(like)>{}, range, buffer);
        }
      });
      buffer ^= grid.buffers - 1;
    }
    if constexpr (!kExact) {
      const int shifted =
          type.visit([&](auto like) { return share.mark_plain(TypeTag<decltype(like)>{}); });
      if (__any_sync(kAllLanes, shifted != 0)) {
        share.sum_shifted(shifted, [&] {
          // The other buffer has the next groups already, or the range before the last.
          const int free = buffer ^ (grid.buffers - 1);
#pragma unroll 1
          for (int range = 0; range <= last_range; range += grid.range) {
            if (grid.buffers > 1) {
              start(first, range, free);
              wait_for_own_copies();
              settle(range, free);
              take_indices_out(range, free);
            }
            type.visit(
                [&](auto like) { share.add_shifted(TypeTag<decltype(like)>{}, range, free); });
          }
        });
      }
    }
    if (!writes && grid.buffers == 1) {
      start(next_first, 0, 0);
    }
    float references[kRows];
    float totals[kRows];
    share.get_sums(numbers, references, totals);
    if (thread % kWarpSize < grid.own_lanes) {
      const int merged_lane = thread & (grid.own_lanes - 1);
      const int part = grid.own_lanes < kWarpSize ? thread / kWarpSize : share.share;
      RowNumbers::store(numbers.of_part(part, RowNumbers::kReference) + merged_lane * kRows,
                        references);
      RowNumbers::store(numbers.of_part(part, RowNumbers::kTotal) + merged_lane * kRows, totals);
    }
    __syncthreads();
    finish_rows<scalar_t>(args, grid, numbers, first, turn, scale, partial);
    if (writes) {
      meet();
      IndexGradient<kExact> gradients[kRows];
      numbers.get(lane * kRows, share.indices, gradients);
      leave_places();
      auto* const to = static_cast<scalar_t*>(args.grad_input.data) +
                       place_of(first + lane).offset(args.grad_input);
      // After the sums the last two ranges are still in shared memory, so the last comes first.
      const bool descends = grid.buffers > 1;
      buffer ^= descends ? 1 : 0;
#pragma unroll 1
      for (int done = 0; done <= last_range; done += grid.range) {
        const int range = descends ? last_range - done : done;
        if (!descends) {
          start_next(range);
        }
        wait_for_range();
        const bool is_settled = done < 2 * grid.range;  // for the sums
        if (!is_settled) {
          settle(range, buffer);
        }
        type.visit([&](auto like) {
          share.write_range(TypeTag<decltype(like)>{}, range, buffer, gradients, to);
        });
        if (descends) {
          if (range >= 2 * grid.range) {
            start(first, range - 2 * grid.range, buffer);
          } else if (range > 0) {
            start(next_first, 0, buffer);
          }
          end_group_of_copies();
        }
        buffer ^= grid.buffers - 1;
      }
      if (grid.buffers == 1) {
        start(next_first, 0, 0);
      }
    } else {
      leave_places();
    }
    first = next_first;
  }
  wait_for_places();
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
  // Blocks that begin beside those of another kernel begin one by one. If they have several turns,
  // neighbours then read neighbouring memory at different times all the while: steps of 150 to 1203
  // classes took 8 to 12 % longer. (H100, 2026-11)
  shape.overlap = grad_output.exists() || (denominator.is_left() && spread.has_one_turn());
  shape.threads = spread.cut.threads();
  shape.shared_bytes = spread.shared_bytes;
  shape.cluster = spread.cluster;
  const PlaneGrid grid(args, spread);
  visit_float_or_any_half(args.input.dtype, [&](auto like) {
    const RowType<typename decltype(like)::type> type(args.input.dtype);
    const auto kernel = plane_rows_kernel<typename decltype(like)::type>;
    allow_shared_bytes(kernel, shape.shared_bytes, kStaticBytes,
                       static_cast<int>(most_shared_bytes(current_device_limits().shared_bytes)));
    launch_kernel("plane_rows_kernel", kernel, shape, stream, args, grid, type, denominator,
                  grad_output, partials, finalize);
  });
}

}  // namespace lossops::cuda
