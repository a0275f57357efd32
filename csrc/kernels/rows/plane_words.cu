// Losses of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W) tensor,
// with class indices. More than 88 classes, any number of positions, at any address; it is made for
// rows that lie side by side.
//
// A block has lanes x team threads (plane_words_plan.h).
//   1. Each thread sums its parts, a turn of classes after the other, from registers.
//   2. A few threads a row merge its parts, and one of them computes the loss. The first turn of
//      the next rows is on its way meanwhile.
// Shares, parts and the order of sums are those of plane_rows.cu.
#include <cstdint>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/plane_merge.cuh"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/word_share.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace plane_words {
namespace {

using plane_rows::PlaneGrid;
using plane_rows::PlaneGroups;
using plane_rows::PlanePlace;

// How the rows are dealt out, for the kernel. Its groups are words.
struct WordGrid : PlaneGroups {
  int lane_bits;      // log2(lanes)
  int share_bits;     // log2(shares)
  int parts;
  int shares_of_part;
  int merging_bits;   // log2 of the threads that merge the parts of a row
  bool reads_words;   // logits are aligned to words
};

template <typename scalar_t>
__global__ void __launch_bounds__(kMostThreads, kResidentBlocks)
    plane_words_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                       const __grid_constant__ WordGrid grid, Partial* partials,
                       Finalize finalize) {
  using Turn = WordTurn<scalar_t>;
  using Sum = typename Turn::Sum;
  constexpr int kRows = Turn::kRows;
  constexpr bool kExact = Turn::kExact;
  // Numbers of a row in shared memory, before those of its parts.
  constexpr int kLogit = 0;
  constexpr int kIndex = 1;
  LOSSOPS_DYNAMIC_SHARED(float, dynamic);
  let_next_kernel_start();
  const int lanes = 1 << grid.lane_bits;
  const int rows = lanes * kRows;
  const int shares = 1 << grid.share_bits;
  const int classes = static_cast<int>(args.num_classes);
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (lanes - 1);
  const int member = thread >> grid.lane_bits;
  const int team = threads >> grid.lane_bits;
  const bool merges_own_rows = kRows == 1 && team == 1 && grid.merging_bits == 0;
  const int buffer_numbers = (kRowNumbers + 2 * grid.parts) * rows;
  float* numbers = dynamic;
  const auto place_of = [&](uint32_t word) {
    return PlanePlace::of<kRows>(args.rows, grid, word);
  };
  const auto logits_of = [&](const PlanePlace& place) {
    const int64_t next_row = place.rows > 1 ? args.input.strides[0] : 0;
    return WordLogits<scalar_t>{
        static_cast<const scalar_t*>(args.input.data) + place.offset(args.input),
        args.input_class_stride, next_row, grid.reads_words};
  };
  uint32_t first = blockIdx.x << grid.lane_bits;
  const uint32_t words_at_once = gridDim.x << grid.lane_bits;
  auto logits = logits_of(place_of(first + lane));
  // What the thread takes next: a turn of a share of a part.
  int part = member;
  int of_part = 0;
  int of_share = 0;  // classes before the turn
  int indices[kRows];
  Sum of_shares[kRows][4];  // the latest first
  Sum own[kRows];
  Partial partial;
  bool has_all_parts = false;  // of the words before
#pragma unroll 1
  while (true) {
    const int share = part * grid.shares_of_part + of_part;
    const int left = ((classes - share + shares - 1) >> grid.share_bits) - of_share;
    const int count = min(left, kTurnClasses);
    Turn turn;
    if (first < grid.groups) {
      turn.load(logits, share + (of_share << grid.share_bits), shares, count);
    }
    if (has_all_parts) {
      if (!merges_own_rows) {
        __syncthreads();
      }
      const int merging = 1 << grid.merging_bits;
#pragma unroll 1
      for (int row = thread >> grid.merging_bits; row < rows; row += threads >> grid.merging_bits) {
        const auto place = place_of(first - words_at_once + row / kRows);
        const int i = row % kRows;
        const int index = reinterpret_cast<const int*>(numbers + kIndex * rows)[row];
        const float weight = row_weight(args, index);
        const float x_at_index = index >= 0 ? numbers[kLogit * rows + row] : 0.0f;
        const auto others = plane_rows::merge_parts<kExact>(
            grid.parts, thread & (merging - 1), merging, [&](int n) {
              const float* const from = numbers + (kRowNumbers + 2 * n) * rows + row;
              return Sum{from[0], from[rows]};
            });
        if ((thread & (merging - 1)) != 0 || i >= place.rows) {
          continue;
        }
        const IndexRow reduced = plane_rows::row_of(others, x_at_index);
        const float loss = index >= 0
                               ? reduced.template finish<!kExact>(x_at_index, 1, weight).loss
                               : gradient_without_loss(index);
        record_row(
            args, loss, weight, reduced, x_at_index, place.row(grid.positions) + i,
            [&](int64_t) { return place.offset(args.output) + i * args.output.strides[0]; },
            partial);
      }
      // A thread of the block may be a step ahead of another.
      numbers = numbers == dynamic ? dynamic + buffer_numbers : dynamic;
      has_all_parts = false;
    }
    if (first >= grid.groups) {
      break;
    }
    if (part == member && of_part == 0 && of_share == 0) {
      const auto place = place_of(first + lane);
      const int64_t target = place.offset(args.target);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        indices[i] = i < place.rows
                         ? checked_index(args, load_class_index(args.target,
                                                                target + i * args.target.strides[0]))
                         : kIgnoredRow;
        if (member == 0) {
          reinterpret_cast<int*>(numbers + kIndex * rows)[lane * kRows + i] = indices[i];
        }
      }
    }
    int places[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int distance = indices[i] - share;
      const int place = (distance >> grid.share_bits) - of_share;
      const bool is_here = indices[i] >= 0 && (distance & (shares - 1)) == 0 && place >= 0 &&
                           place < count;
      places[i] = is_here ? place : -1;
    }
    Sum sums[kRows];
    turn.sum(places, sums);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (places[i] >= 0) {
        numbers[kLogit * rows + lane * kRows + i] = to_acc<float>(
            logits.data[indices[i] * logits.class_stride + (i > 0 ? logits.next_row : 0)]);
      }
      own[i] = of_share == 0 ? sums[i] : own[i].merged_with(sums[i]);
    }
    if (count < left) {
      of_share += count;
      continue;
    }
    of_share = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      of_shares[i][3] = of_shares[i][2];
      of_shares[i][2] = of_shares[i][1];
      of_shares[i][1] = of_shares[i][0];
      of_shares[i][0] = own[i];
    }
    if (++of_part < grid.shares_of_part) {
      continue;
    }
    of_part = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Sum total = Sum::of_lanes(of_shares[i], grid.shares_of_part);
      float* const to = numbers + (kRowNumbers + 2 * part) * rows + lane * kRows + i;
      to[0] = total.reference;
      to[rows] = total.rounded();
    }
    part += team;
    if (part >= grid.parts) {
      part = member;
      has_all_parts = true;
      first += words_at_once;
      logits = logits_of(place_of(first + lane));
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace plane_words

void launch_plane_words(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator&, const GradOutput&, Partial* partials,
                        const Finalize& finalize, cudaStream_t stream) {
  using namespace plane_words;
  const plane_rows::Cut cut = cut_of(args, current_device_limits());
  WordGrid grid = {};
  grid.groups = static_cast<uint32_t>(words_of(args));
  grid.groups_of_plane = Divisor(static_cast<uint32_t>(words_of_plane(args)));
  grid.positions = side_by_side::positions_of(args);
  grid.lane_bits = PlaneGrid::log2_of(plan.threads / plan.team);
  grid.share_bits = PlaneGrid::log2_of(cut.shares);
  grid.parts = cut.parts();
  grid.shares_of_part = cut.shares / cut.parts();
  grid.merging_bits = cut.merging_bits();
  grid.reads_words =
      side_by_side::lies_in_columns(args, args.input, args.input_class_stride, kWordBytes);
  visit_float_or_half(args.input.dtype, [&](auto like) {
    launch_kernel("plane_words_kernel", plane_words_kernel<typename decltype(like)::type>,
                  {plan.blocks, plan.threads, plan.shared_bytes}, stream, args, grid, partials,
                  finalize);
  });
}

}  // namespace lossops::cuda
