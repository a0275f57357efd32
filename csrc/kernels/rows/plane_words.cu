// Losses of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W) tensor,
// with class indices. More than 88 classes, any number of positions, at any address; it is made for
// rows that lie side by side.
//
// A block has lanes x team threads (plane_words_plan.h defines lane, team and turn).
//   1. Each thread sums its parts of a word's rows, from registers, a turn at a time.
//   2. A few threads a row merge its parts, and one of them computes the loss. The first turn of
//      the next rows is on its way meanwhile.
// Shares and parts are those of plane_rows.cu. A share of more turns is their sum.
#include <cstdint>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/plane_merge.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/word_turn.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace plane_words {
namespace {

using plane_rows::PlaneGrid;
using plane_rows::PlaneGroups;
using plane_rows::PlanePlace;
using plane_rows::PlaneRow;

// How the rows are dealt out, for the kernel. A group is a word.
struct WordGrid : PlaneGroups {
  int lane_bits;      // log2(lanes)
  int share_bits;     // log2(shares)
  int share_classes;  // of the longest shares
  int parts;
  int shares_of_part;
  int merging_bits;  // log2 of the threads that merge the parts of a row
  bool reads_words;  // logits are aligned to words
};

// A block's numbers of its rows in shared memory.
struct WordNumbers {
  float* numbers;
  int rows;

  // The logit at the class index.
  __device__ __forceinline__ float& logit(int row) const { return numbers[row]; }
  __device__ __forceinline__ int& index(int row) const {
    return reinterpret_cast<int*>(numbers)[rows + row];
  }
  template <bool kExact>
  __device__ __forceinline__ void put_part(int part, int row, const OthersSum<kExact>& sum) const {
    float* const to = of_part(part) + row;
    to[0] = sum.reference;
    to[rows] = sum.rounded();
  }
  template <bool kExact>
  __device__ __forceinline__ OthersSum<kExact> part(int n, int row) const {
    const float* const from = of_part(n) + row;
    return {from[0], from[rows]};
  }

 private:
  __device__ __forceinline__ float* of_part(int part) const {
    return numbers + (kRowNumbers + 2 * part) * rows;
  }
};

// Which turn of a row a thread takes: it takes all turns of a share, all shares of a part, and then
// its next part. A part has 1, 2 or 4 shares. All threads of a block take as many turns, because
// they meet afterwards.
struct TurnPlace {
  int part;
  int share_of_part = 0;
  int before = 0;  // classes of the share before the turn

  __device__ __forceinline__ int share(const WordGrid& grid) const {
    return part * grid.shares_of_part + share_of_part;
  }
  // The classes of the turn. 0 where the longest shares have one class more, and with it one turn.
  __device__ __forceinline__ int count(const WordGrid& grid, int num_classes) const {
    const int of_share =
        (num_classes - share(grid) + (1 << grid.share_bits) - 1) >> grid.share_bits;
    return min(of_share - before, kTurnClasses);
  }
  // Where a class is among those of the turn, of which there are `count`; or -1.
  __device__ __forceinline__ int place_of(const WordGrid& grid, int index, int count) const {
    const int distance = index - share(grid);
    const int place = (distance >> grid.share_bits) - before;
    const bool is_of_share = (distance & ((1 << grid.share_bits) - 1)) == 0;
    return index >= 0 && is_of_share && place >= 0 && place < count ? place : -1;
  }
};

// Step 2, for the rows of the words from `first` on.
template <bool kExact, int kRows>
__device__ __forceinline__ void finish_rows(const CrossEntropyForwardArgs& args,
                                            const WordGrid& grid, const WordNumbers& numbers,
                                            uint32_t first, Partial& partial) {
  const int merging_team = 1 << grid.merging_bits;
  const int member = static_cast<int>(threadIdx.x) & (merging_team - 1);
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) >> grid.merging_bits; row < numbers.rows;
       row += static_cast<int>(blockDim.x) >> grid.merging_bits) {
    const auto of_row = PlaneRow::of<kRows>(args.rows, grid, first, row);
    const int index = numbers.index(row);
    const float weight = row_weight(args, index);
    const float x_at_index = index >= 0 ? numbers.logit(row) : 0.0f;
    const auto others = plane_rows::merge_parts<kExact>(
        grid.parts, member, merging_team, [&](int n) { return numbers.part<kExact>(n, row); });
    if (member > 0 || !of_row.is_there()) {
      continue;
    }
    const IndexRow reduced = plane_rows::index_row_of(others, x_at_index);
    const float loss = index >= 0 ? reduced.template finish<!kExact>(x_at_index, 1, weight).loss
                                  : gradient_without_loss(index);
    record_row(
        args, loss, weight, reduced, x_at_index, of_row.number(grid),
        [&](int64_t) { return of_row.offset(args.output); }, partial);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(kMostThreads, kResidentBlocks)
    plane_words_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                       const __grid_constant__ WordGrid grid, Partial* partials,
                       Finalize finalize) {
  using Turn = WordTurn<scalar_t>;
  using Sum = typename Turn::Sum;
  constexpr int kRows = Turn::kRows;
  LOSSOPS_DYNAMIC_SHARED(float, dynamic);
  let_next_kernel_start();
  const int lanes = 1 << grid.lane_bits;
  const int num_classes = static_cast<int>(args.num_classes);
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int member = static_cast<int>(threadIdx.x) >> grid.lane_bits;
  const int team = static_cast<int>(blockDim.x) >> grid.lane_bits;
  const bool merges_own_rows = kRows == 1 && team == 1 && grid.merging_bits == 0;
  WordNumbers numbers{dynamic, lanes * kRows};
  const int set_numbers = (kRowNumbers + 2 * grid.parts) * numbers.rows;
  const auto place_of = [&](uint32_t word) { return PlanePlace::of<kRows>(args.rows, grid, word); };
  const auto logits_of = [&](const PlanePlace& place) {
    return WordPlace<const scalar_t>::of(place, args.input, args.input_class_stride,
                                         grid.reads_words);
  };
  uint32_t first = blockIdx.x << grid.lane_bits;
  const uint32_t words_at_once = gridDim.x << grid.lane_bits;
  auto logits = logits_of(place_of(first + lane));
  TurnPlace turn_place{member};
  int indices[kRows];
  Sum share_sums[kRows];
  Sum part_sums[kRows][4];  // of the part's shares, the latest first
  Partial partial;
  bool has_all_parts = false;  // of the words before
#pragma unroll 1
  while (true) {
    const int count = turn_place.count(grid, num_classes);
    Turn turn;
    if (first < grid.groups && count > 0) {
      turn.load(logits, turn_place.share(grid) + (turn_place.before << grid.share_bits),
                grid.share_bits, count);
    }
    if (has_all_parts) {
      if (!merges_own_rows) {
        __syncthreads();
      }
      finish_rows<Turn::kExact, kRows>(args, grid, numbers, first - words_at_once, partial);
      numbers.numbers = numbers.numbers == dynamic ? dynamic + set_numbers : dynamic;
      has_all_parts = false;
    }
    if (first >= grid.groups) {
      break;
    }
    if (turn_place.part == member && turn_place.share_of_part == 0 && turn_place.before == 0) {
      const auto place = place_of(first + lane);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        indices[i] = kIgnoredRow;
        if (i < place.rows) {
          const int64_t target = place.offset(args.target) + i * args.target.strides[0];
          indices[i] = checked_index(args, load_class_index(args.target, target));
        }
        if (member == 0) {
          numbers.index(lane * kRows + i) = indices[i];
        }
      }
    }
    if (count > 0) {
      int places[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        places[i] = turn_place.place_of(grid, indices[i], count);
      }
      Sum sums[kRows];
      turn.sum(places, sums);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (places[i] >= 0) {
          const auto* const at_index = logits.of_class(indices[i]);  // fault: plane-words-index
          numbers.logit(lane * kRows + i) = to_acc<float>(at_index[i > 0 ? logits.next_row : 0]);
        }
        share_sums[i] = turn_place.before == 0
                            ? sums[i]
                            : share_sums[i].merged_with(sums[i]);  // fault: plane-words-turns
      }
    }
    turn_place.before += kTurnClasses;
    if (turn_place.before < grid.share_classes) {
      continue;
    }
    turn_place.before = 0;
    if (grid.shares_of_part > 1) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int n = 3; n > 0; --n) {
          part_sums[i][n] = part_sums[i][n - 1];
        }
        part_sums[i][0] = share_sums[i];
      }
      if (++turn_place.share_of_part < grid.shares_of_part) {
        continue;
      }
      turn_place.share_of_part = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        share_sums[i] = Sum::of_lanes(part_sums[i], grid.shares_of_part);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      numbers.put_part(turn_place.part, lane * kRows + i, share_sums[i]);
    }
    turn_place.part += team;
    if (turn_place.part >= grid.parts) {
      turn_place.part = member;
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
  static_cast<PlaneGroups&>(grid) = PlaneGroups::of_words(args);
  grid.lane_bits = PlaneGrid::log2_of(plan.threads / plan.team);
  grid.share_bits = PlaneGrid::log2_of(cut.shares);
  grid.share_classes = static_cast<int>(ceil_div(args.num_classes, int64_t{cut.shares}));
  grid.parts = cut.parts();
  grid.shares_of_part = cut.shares / cut.parts();
  grid.merging_bits = cut.merging_bits();
  grid.reads_words = side_by_side::lies_in_words(args, args.input, args.input_class_stride);
  visit_float_or_half(args.input.dtype, [&](auto like) {
    launch_kernel("plane_words_kernel", plane_words_kernel<typename decltype(like)::type>,
                  {plan.blocks, plan.threads, plan.shared_bytes}, stream, args, grid, partials,
                  finalize);
  });
}

}  // namespace lossops::cuda
