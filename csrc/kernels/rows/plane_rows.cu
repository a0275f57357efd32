// Cross entropy of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W)
// tensor, with class indices. Any number of classes and positions, at any address; it is made for
// rows that lie side by side.
//
// A block has lanes x shares threads (plane_grid.cuh defines lane, share, range and part).
//   1. Each thread copies the classes of its lane and share to shared memory, and sums them.
//   2. One thread a row merges the partial sums, and computes the loss and the row's factors.
//   3. Each thread writes the gradients of its classes.
// If the classes do not fit shared memory, they are taken in ranges, and step 3 reads all ranges
// but the last from global memory again.
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
#include "launchers.h"

namespace lossops::cuda {
namespace plane_rows {
namespace {

// What a backward pass of its own has; without it, the rows are summed.
struct PlaneBackward {
  const void* row_stats = nullptr;
  Operand grad_output;

  __device__ __forceinline__ bool exists() const { return row_stats != nullptr; }
};

// Merges the parts of a row's sum.
template <bool kExact>
__device__ __forceinline__ IndexRow merge_parts(const RowNumbers& numbers, int row, int parts,
                                                float x_at_index) {
  const auto part = [&](int n) {
    return OthersSum<kExact>{numbers.of_part(n, RowNumbers::kReference)[row],
                             numbers.of_part(n, RowNumbers::kTotal)[row]};
  };
  if constexpr (!kExact) {
    ExactSum sum;
    bool all_plain = true;
#pragma unroll 1
    for (int n = 0; n < parts; ++n) {
      all_plain = all_plain && OthersSum<kExact>::is_plain(part(n).reference);
      sum.add(part(n).total);
    }
    if (all_plain && IndexRow::may_be_plain(::fabsf(x_at_index), sum.total())) {
      return IndexRow::plain(sum.total());
    }
  }
  float largest = -math::infinity<float>();
#pragma unroll 1
  for (int n = 0; n < parts; ++n) {
    largest = math::max_number(part(n).near_largest().reference, largest);
  }
  ExactSum sum;
#pragma unroll 1
  for (int n = 0; n < parts; ++n) {
    sum.add(part(n).near_largest().relative_to(largest));
  }
  return IndexRow::of(RowTerms<kExact>(largest), largest, sum.total(), x_at_index);
}

// The class indices of a block's rows, from group `first` on.
template <int kRows>
__device__ __forceinline__ void load_indices(const CrossEntropyArgs& args, const PlaneGrid& grid,
                                             uint32_t first, const RowNumbers& numbers) {
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x); row < numbers.rows;
       row += static_cast<int>(blockDim.x)) {
    const PlanePlace place = PlanePlace::of<kRows>(args.rows, grid, first + row / kRows);
    const int i = row % kRows;
    int index = kIgnoredRow;
    if (i < place.rows) {
      const int64_t offset = place.offset(args.target) + i * args.target.strides[0];
      index = checked_index(args, load_class_index(args.target, offset));
    }
    numbers.index(row) = index;
  }
}

// Losses, and gradients where args.grad_input exists.
template <typename scalar_t>
__global__ void __launch_bounds__(kMostThreads, 2)
    plane_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                      const __grid_constant__ PlaneBackward backward,
                      const __grid_constant__ PlaneGrid grid, const RowType<scalar_t> type,
                      Denominator denominator, GradOutput grad_output, Partial* partials,
                      Finalize finalize) {
  using Share = GroupShare<scalar_t>;
  constexpr int kRows = Share::kRows;
  constexpr bool kExact = Share::kExact;
  LOSSOPS_DYNAMIC_SHARED(uint4, shared);
  float scale = 1;
  if (grad_output.is_one(scale)) {
    return;
  }
  if (backward.exists()) {
    wait_for_previous_kernel();
  }
  let_next_kernel_start();
  if (args.grad_input.data != nullptr && !backward.exists()) {
    UnitScale<float, true> unit(args, denominator, scale);
    unit.wait(args, denominator);
    scale = unit.get();
  }
  const int threads = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x) & (grid.lanes - 1);
  const int places = (grid.range + (1 << grid.share_bits) - 1) >> grid.share_bits;
  const RowNumbers numbers{
      reinterpret_cast<float*>(reinterpret_cast<uint2*>(shared) + places * threads),
      grid.lanes * kRows};
  const int last_range =
      (static_cast<int>(args.num_classes) - 1) / grid.range * grid.range;  // its first class
  Partial partial;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * grid.lanes; first < grid.groups;
       first += gridDim.x * grid.lanes) {
    const PlanePlace place = PlanePlace::of<kRows>(args.rows, grid, first + lane);
    const auto* const logits =
        static_cast<const scalar_t*>(args.input.data) + place.offset(args.input);
    Share share(grid, place, args, shared);
    const auto start = [&](int first_class) {
      share.start(logits, args.input_class_stride, args.input.strides[0], first_class);
    };
    OthersSum<kExact> sums[kRows];
    const int first_range = backward.exists() ? last_range : 0;
#pragma unroll 1
    for (int range = first_range; range <= last_range; range += grid.range) {
      start(range);
      if (range == first_range) {
        load_indices<kRows>(args, grid, first, numbers);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          share.indices[i] = numbers.index(lane * kRows + i);
        }
      }
      if (!backward.exists()) {
        wait_for_own_copies();
        type.visit([&](auto like) {
          share.add_range(TypeTag<decltype(like)>{}, range,
                          numbers.of(RowNumbers::kLogit) + lane * kRows, sums);
        });
      }
    }
    if (!backward.exists()) {
      float references[kRows];
      float totals[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        for (int offset = kWarpSize / 2; offset >= grid.lanes; offset /= 2) {
          sums[i].add(sums[i].of_neighbour(offset));
        }
        references[i] = sums[i].reference;
        totals[i] = sums[i].rounded();
      }
      const int in_warp = static_cast<int>(threadIdx.x) % kWarpSize;
      if (in_warp < grid.lanes) {
        const int part =
            grid.lanes < kWarpSize ? static_cast<int>(threadIdx.x) / kWarpSize : share.share;
        RowNumbers::store(numbers.of_part(part, RowNumbers::kReference) + lane * kRows, references);
        RowNumbers::store(numbers.of_part(part, RowNumbers::kTotal) + lane * kRows, totals);
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x); row < numbers.rows; row += threads) {
      const PlanePlace of_row = PlanePlace::of<kRows>(args.rows, grid, first + row / kRows);
      const int i = row % kRows;
      const int index = numbers.index(row);
      const bool is_there = i < of_row.rows;
      const int64_t number = of_row.row(grid) + i;
      const float weight = row_weight(args, index);
      float own_scale = scale;
      float x_at_index = 0;
      IndexRow reduced;
      if (!backward.exists()) {
        if (index >= 0) {
          x_at_index = numbers.of(RowNumbers::kLogit)[row];
        }
        reduced = merge_parts<kExact>(numbers, row, grid.parts, x_at_index);
      } else if (is_there) {
        if (index >= 0) {
          const auto* const of_index = static_cast<const scalar_t*>(args.input.data) +
                                       of_row.offset(args.input) + i * args.input.strides[0] +
                                       index * args.input_class_stride;
          x_at_index = type.visit(
              [&](auto like) { return to_acc<float>(bits_as<decltype(like)>(*of_index)); });
        }
        const RowStats<float> stats(const_cast<void*>(backward.row_stats), args.rows.numel);
        reduced = IndexRow::of_kept(stats.max[number], stats.rest[number]);
        own_scale =
            load_grad_output<float>(backward.grad_output, of_row.offset(backward.grad_output) +
                                                              i * backward.grad_output.strides[0]);
        if (args.reduction == Reduction::kMean) {
          own_scale /= static_cast<float>(args.mean_terms[0]);
        }
      }
      const auto finished = reduced.template finish<!kExact>(x_at_index, own_scale, weight);
      if (is_there && !backward.exists()) {
        const float loss = index >= 0 ? finished.loss : gradient_without_loss(index);
        record_row(
            args, loss, weight, reduced, x_at_index, number,
            [&](int64_t) { return of_row.offset(args.output) + i * args.output.strides[0]; },
            partial);
      }
      if (args.grad_input.data != nullptr) {
        using Gradient = IndexGradient<kExact>;
        numbers.put(row, index >= 0 ? Gradient::of(LogitGradient<float, kExact>(finished.softmax,
                                                                                own_scale * weight),
                                                   finished.gradient_at_index, index)
                                    : Gradient::without_loss(gradient_without_loss(index)));
      }
    }
    if (args.grad_input.data != nullptr) {
      __syncthreads();
      IndexGradient<kExact> gradients[kRows];
      numbers.get(lane * kRows, share.indices, gradients);
      auto* const to = static_cast<scalar_t*>(args.grad_input.data) + place.offset(args.grad_input);
      // The last range is in shared memory.
#pragma unroll 1
      for (int range = last_range; range >= 0; range -= grid.range) {
        if (range < last_range) {
          start(range);
        }
        wait_for_own_copies();
        type.visit([&](auto like) {
          share.write_range(TypeTag<decltype(like)>{}, range, gradients, to,
                            args.grad_input_class_stride, args.grad_input.strides[0]);
        });
      }
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists() && !backward.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

void launch(const CrossEntropyForwardArgs& args, const PlaneBackward& backward,
            const LaunchShape& shape, const Cut& cut, const Denominator& denominator,
            const GradOutput& grad_output, Partial* partials, const Finalize& finalize,
            cudaStream_t stream) {
  const PlaneGrid grid(args, cut, args.grad_input, args.grad_input_class_stride);
  const auto launch_as = [&](auto type) {
    const auto kernel = plane_rows_kernel<typename decltype(type)::scalar_type>;
    allow_shared_bytes(kernel, shape.shared_bytes, kStaticBytes,
                       static_cast<int>(most_shared_bytes(current_device_limits().shared_bytes)));
    launch_kernel("plane_rows_kernel", kernel, shape, stream, args, backward, grid, type,
                  denominator, grad_output, partials, finalize);
  };
  args.input.dtype == DType::kFloat32 ? launch_as(RowType<float>(args.input.dtype))
                                      : launch_as(RowType<any_half_t>(args.input.dtype));
}

Cut cut_of(const CrossEntropyArgs& args) {
  return {args.num_classes, element_size(args.input.dtype), current_device_limits().shared_bytes};
}

}  // namespace
}  // namespace plane_rows

void launch_plane_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput& grad_output,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace plane_rows;
  const LaunchShape shape = {grad_output.limit_blocks(plan.blocks, plan.threads), plan.threads,
                             plan.shared_bytes, 1,
                             waits_for_previous_kernel(denominator, grad_output)};
  launch(args, {}, shape, cut_of(args), denominator, grad_output, partials, finalize, stream);
}

void launch_plane_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  using namespace plane_rows;
  CrossEntropyForwardArgs forward;
  static_cast<CrossEntropyArgs&>(forward) = args;
  forward.mean_terms = const_cast<double*>(args.mean_terms);  // read only
  forward.grad_input = args.grad_input;
  forward.grad_input_class_stride = args.grad_input_class_stride;
  const Cut cut = cut_of(args);
  const LaunchShape shape = {blocks_of(args, cut, kMaxGrid), cut.threads(), cut.bytes, 1, true};
  launch(forward, {args.row_stats, args.grad_output}, shape, cut, {}, {}, nullptr, {}, stream);
}

}  // namespace lossops::cuda
