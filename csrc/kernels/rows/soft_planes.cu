// Cross entropy with smoothing or, of half types, probabilities of rows whose classes are not
// neighbours, such as the pixels of an (N, C, H, W) tensor. From 2 classes, any number of
// positions, at any address; it is made for rows that lie side by side.
//
// A thread has a word of each class: a row of fp32, or two neighbouring rows of half types. A block
// has lanes x shares threads: a lane is a word's number in the block. Chunks of kChunk neighbouring
// classes are dealt out to the shares: chunk k to share k % shares.
//   1. Each thread folds its chunks into a sum a row.
//   2. A few threads a row merge the sums of all shares. One of them computes the loss and what the
//      gradient needs.
//   3. Each thread reads its chunks again, mostly from a cache, and writes their gradients.
// One share meets nobody, and its threads finish their own rows.

#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_merge.cuh"
#include "kernels/rows/soft_planes_plan.h"
#include "kernels/rows/soft_share.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace soft_planes {
namespace {

using plane_rows::get_numbers;
using plane_rows::PlaneGrid;
using plane_rows::put_numbers;

// Losses, and gradients where args.grad_input exists.
template <typename scalar_t, bool kIsSmooth>
__global__ void __launch_bounds__(kMostThreads, min_blocks(kIsSmooth))
    soft_planes_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                       const __grid_constant__ SoftGrid grid, const RowType<scalar_t> type,
                       Denominator denominator, const __grid_constant__ GradOutput grad_output,
                       Partial* partials, Finalize finalize) {
  using Share = SoftShare<scalar_t, kIsSmooth>;
  using State = typename Share::State;
  using Row = typename Share::Row;
  constexpr int kRows = Share::kRows;
  // Shared memory has these numbers of a row: the logit at its class index, the index, and a Row.
  constexpr int kLogit = 0;
  constexpr int kIndex = 1;
  constexpr int kRow = 2;
  static_assert(sizeof(State) == kSumNumbers * sizeof(float));
  static_assert(kRow * sizeof(float) + sizeof(Row) <= kRowNumbers * sizeof(float));
  LOSSOPS_DYNAMIC_SHARED(float, dynamic);
  float given = 1;
  if (grad_output.is_one(given)) {
    return;
  }
  let_next_kernel_start();
  UnitScale<float, true> unit(args, denominator, given);
  const bool writes = args.grad_input.data != nullptr;
  const int lanes = 1 << grid.lane_bits;
  const int shares = 1 << grid.share_bits;
  const int team = 1 << grid.team_bits;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (lanes - 1);
  const int own_share = thread >> grid.lane_bits;
  const auto sums_of = [&](int share, int i, int of_lane) {
    return dynamic + (((share * kRows + i) * kSumNumbers) << grid.lane_bits) + of_lane;
  };
  const auto row_of = [&](int i, int of_lane) {
    return sums_of(shares, 0, 0) + ((i * kRowNumbers) << grid.lane_bits) + of_lane;
  };
  const auto meet = [&] {
    if (shares > 1) {
      __syncthreads();
    }
  };
  const SmoothedIndex smooth(grid.smoothing);
  Partial partial;
  bool waits = writes;
#pragma unroll 1
  for (uint32_t first = blockIdx.x << grid.lane_bits; first < grid.groups;
       first += gridDim.x << grid.lane_bits) {
    const Share share(args, grid, type, PlanePlace::of<kRows>(args.rows, grid, first + lane),
                      own_share);
    int next = share.first_class();
    do {
      const bool is_first = next == share.first_class();
      typename Share::Sum sums[kRows];
      next = share.sum(next, sums);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float* const numbers = sums_of(own_share, i, lane);
        State total = sums[i].total();
        if (!Share::kExact && !is_first) {
          State before = get_numbers<State>(numbers, lanes);
          before.raise_max(total.max);
          total.raise_max(before.max);
          total.add(before);
        }
        put_numbers(numbers, lanes, total);
      }
    } while (!Share::kExact && next <= share.last_class());
    if (own_share == 0) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float* const numbers = row_of(i, lane);
        reinterpret_cast<int*>(numbers)[kIndex * lanes] = share.index(i);
        if (kIsSmooth && share.index(i) >= 0) {
          numbers[kLogit * lanes] = share.logit_at_index(i);
        }
      }
    }
    if (waits) {
      unit.wait(args, denominator);
      waits = false;
    }
    meet();
#pragma unroll 1
    for (int own = thread >> grid.team_bits; own < kRows << grid.lane_bits;
         own += static_cast<int>(blockDim.x) >> grid.team_bits) {
      const int of_lane = own & (lanes - 1);
      const int i = own >> grid.lane_bits;
      const State state = merge_states<State>(shares, team, [&](int of_share) {
        return get_numbers<State>(sums_of(of_share, i, of_lane), lanes);
      });
      const auto place = PlanePlace::of<kRows>(args.rows, grid, first + of_lane);
      if ((thread & (team - 1)) != 0 || i >= place.rows) {
        continue;
      }
      const auto offset_of = [&](const Operand& operand) {
        return place.offset(operand) + i * operand.strides[0];
      };
      float* const numbers = row_of(i, of_lane);
      const int index = reinterpret_cast<const int*>(numbers)[kIndex * lanes];
      const float weight = grid.has_indices ? row_weight(args, index) : 1.0f;
      float dot = state.dot;
      float q_sum = state.q_sum;
      if constexpr (kIsSmooth) {
        const float x_at_index = numbers[kLogit * lanes];
        dot = smooth.with_index(dot, state.max, x_at_index);  // fault: soft-planes-index
        q_sum = SmoothedIndex::kSum;
      }
      finish_indexed_row<RowKind::kProbability>(
          args, smooth, index, weight, state, dot, q_sum, 0.0f, place.row(grid.positions) + i,
          [&](int64_t) { return offset_of(args.output); }, partial);
      if (writes) {
        const float scale =
            grad_output.is_per_row
                ? load_grad_output<float>(grad_output.operand, offset_of(grad_output.operand))
                : unit.get();
        const auto softmax = RowSoftmax<float>::of(state.max, state.rest(), scale, q_sum);
        Row gradient{LogitGradient<float, Share::kExact>(softmax, scale * q_sum), scale, q_sum, 0};
        if constexpr (kIsSmooth) {
          gradient.at_index =
              gradient.gradient.dense(numbers[kLogit * lanes], scale, q_sum, smooth.at_index);
        }
        put_numbers(numbers + kRow * lanes, lanes, gradient);
      }
    }
    meet();
    if (writes) {
      share.write_gradients(
          [&](int i) { return get_numbers<Row>(row_of(i, lane) + kRow * lanes, lanes); });
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace soft_planes

void launch_soft_planes(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace soft_planes;
  const auto lies_in_words = [&](const Operand& operand, int64_t class_stride) {
    return side_by_side::lies_in_words(args, operand, class_stride);
  };
  const bool has_indices = !args.target_is_probability;
  const bool has_weights = args.weight != nullptr;
  SoftGrid grid = {};
  static_cast<PlaneGroups&>(grid) = PlaneGroups::of_words(args);
  grid.lane_bits = PlaneGrid::log2_of(plan.threads / plan.team);
  grid.share_bits = PlaneGrid::log2_of(plan.team);
  grid.team_bits = team_bits(plan.team, element_size(args.input.dtype));
  grid.reads_words = lies_in_words(args.input, args.input_class_stride);
  grid.writes_words = args.grad_input.data != nullptr &&
                      lies_in_words(args.grad_input, args.grad_input_class_stride);
  grid.has_indices = has_indices;
  grid.is_rare =
      (!has_indices && args.target.dtype != args.input.dtype) ||
      (has_weights && (args.weight_dtype != args.input.dtype || args.weight_stride != 1));
  grid.reads_probability_words =
      !has_indices && lies_in_words(args.target, args.target_class_stride);
  grid.smoothing = smoothing_of(args);
  const auto launch = [&](auto type, auto kernel) {
    launch_kernel("soft_planes_kernel", kernel,
                  {grad_output.limit_blocks(plan.blocks, plan.threads), plan.threads,
                   plan.shared_bytes, 1, waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, grid, type, denominator, grad_output, partials, finalize);
  };
  if (args.input.dtype == DType::kFloat32) {
    launch(RowType<float>(args.input.dtype), soft_planes_kernel<float, true>);
  } else if (is_smooth(args)) {
    launch(RowType<AnyHalf>(args.input.dtype), soft_planes_kernel<AnyHalf, true>);
  } else {
    launch(RowType<AnyHalf>(args.input.dtype), soft_planes_kernel<AnyHalf, false>);
  }
}

}  // namespace lossops::cuda
