// Losses of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W) tensor,
// with class indices. More than 88 classes, any number of positions, at any address; it is made for
// rows that lie side by side.
//
// A block has lanes x team threads (plane_words_plan.h defines lane, team and turn).
//   1. Each thread sums its parts of a word's rows, share by share and turn by turn.
//   2. A few threads a row merge its parts, and one of them computes the loss. Meanwhile the first
//      turn of the next rows is on its way, if they are of fp32.
// Shares and parts are those of plane_rows.cu where a block of it has room for the logits.
//
// With an odd number of rows in a plane of half types, a class may begin in the middle of a word.
// Either all classes of a share do, or none. A grid of such planes shifts: where the classes of a
// share begin in the middle of a word, a lane reads the aligned words that hold the row before its
// first row, and its first row. The lane gives the sum of the row before to the previous lane, and
// gets the sum of its second row from the next lane. The last word of a plane has only one row: the
// sum that its lane gets from the next plane is that of a row that does not exist, and is not used.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/float_turn.cuh"
#include "kernels/rows/half_turn.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/plane_merge.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_words_plan.h"
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
  int lane_bits;   // log2(lanes)
  int share_bits;  // log2(shares)
  int parts;
  int shares_of_part;
  int merging_bits;    // log2 of the threads that merge the parts of a row
  bool lies_in_words;  // the logits
  bool shifts;         // see the top
  // If the grid shifts, this is log2 of the lanes of a span, at most a warp. The last lane of a
  // span has no next lane to get a sum from, so it finishes no word. That lane only gives a sum to
  // the lane before it. The first lane of the next span, or of the next block, has the same word
  // and finishes it.
  int span_bits;
  uint32_t planes_before_last;  // see planes_before_last() in plane_words_plan.h

  __device__ __forceinline__ bool finishes(int lane) const {
    return !shifts || ((lane + 1) & ((1 << span_bits) - 1)) != 0;  // fault: plane-words-finishes
  }
  // The word of a lane of the block whose first word is `first`.
  __device__ __forceinline__ uint32_t word(uint32_t first, int lane) const {
    return first + lane - (shifts ? lane >> span_bits : 0);
  }
  __device__ __forceinline__ uint32_t words_of_block() const {
    return (1 << lane_bits) - (shifts ? 1 << (lane_bits - span_bits) : 0);
  }
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

// The classes of a share.
struct ShareClasses {
  int first;
  int count;
  int step_bits;

  __device__ __forceinline__ ShareClasses(const WordGrid& grid, int num_classes, int share)
      : first(share),
        count((num_classes - share + (1 << grid.share_bits) - 1) >> grid.share_bits),
        step_bits(grid.share_bits) {}
  // The number of a class among them, or -1.
  __device__ __forceinline__ int number_of(int index) const {
    const int distance = index - first;
    const bool is_own = index >= 0 && (distance & ((1 << step_bits) - 1)) == 0;
    return is_own ? distance >> step_bits : -1;
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
    const int lane = row / kRows;
    // A lane that finishes no word gets a place without rows.
    const PlaneRow of_row = {
        PlanePlace::of<kRows>(args.rows, grid,
                              grid.finishes(lane) ? grid.word(first, lane) : grid.groups),
        row % kRows};
    const int index = numbers.index(row);
    const float weight = row_weight(args, index);
    const float x_at_index = index >= 0 ? numbers.logit(row) : 0.0f;
    const auto others = plane_rows::merge_parts<kExact>(
        grid.parts, member, merging_team, [&](int n) { return numbers.part<kExact>(n, row); });
    if (member > 0 || !of_row.is_there()) {
      continue;
    }
    const IndexRow reduced = plane_rows::index_row_of(others, x_at_index, false);
    const float loss = index >= 0 ? reduced.template finish<!kExact>(x_at_index, 1, weight).loss
                                  : gradient_without_loss(index);
    record_row(
        args, loss, weight, reduced, of_row.number(grid),
        [&](int64_t) { return of_row.offset(args.output); }, partial);
  }
}

template <typename scalar_t>
__global__ void __launch_bounds__(resident_threads(sizeof(scalar_t)), 1)
    plane_words_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                       const __grid_constant__ WordGrid grid, Partial* partials,
                       Finalize finalize) {
  constexpr bool kExact = kExactExponentials<scalar_t>;
  using Turn = std::conditional_t<kExact, FloatTurn, HalfTurn<scalar_t>>;
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
  const int floats_of_set = (kRowNumbers + 2 * grid.parts) * numbers.rows;
  const auto own_place = [&](uint32_t first) {
    return PlanePlace::of<kRows>(args.rows, grid, grid.word(first, lane));
  };
  const auto logits_of = [&](const PlanePlace& place) {
    auto logits = WordPlace<const scalar_t>::of(place, args.input, args.input_class_stride,
                                                grid.lies_in_words || grid.shifts);
    logits.is_whole = logits.is_whole || place.plane < grid.planes_before_last;
    return logits;
  };
  uint32_t first_word = blockIdx.x * grid.words_of_block();
  const uint32_t words_at_once = gridDim.x * grid.words_of_block();
  Partial partial;
  Turn turn;
  const auto load_turn = [&](const WordPlace<const scalar_t>& logits, const ShareClasses& share,
                             int before) {
    turn.load(logits, share.first + (before << share.step_bits), share.step_bits,
              min(share.count - before, Turn::kClasses));
  };
  const auto load_first_turn = [&] {
    if constexpr (Turn::kLoadsAhead) {
      load_turn(logits_of(own_place(first_word)), {grid, num_classes, member * grid.shares_of_part},
                0);
    }
  };
  load_first_turn();
#pragma unroll 1
  while (true) {
    bool is_loaded = Turn::kLoadsAhead;
    int indices[kRows];
    const auto place = own_place(first_word);
    const auto logits = logits_of(place);
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
    // The class index of the row before the thread's first. It is wrong in the first lane of a
    // span, whose sum of that row nobody takes.
    const int index_before =
        kRows > 1 && grid.shifts ? __shfl_up_sync(kAllLanes, indices[kRows - 1], 1) : kIgnoredRow;
#pragma unroll 1
    for (int part = member; part < grid.parts; part += team) {
      typename Sum::OfShares of_shares[kRows];
#pragma unroll 1
      for (int n = 0; n < grid.shares_of_part; ++n) {
        const int share_of_part = Sum::OfShares::share(n, grid.shares_of_part);
        const ShareClasses share(grid, num_classes, part * grid.shares_of_part + share_of_part);
        int at[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          at[i] = share.number_of(indices[i]);
        }
        Sum sums[kRows];
        // What is summed: the lane's own words, or those one row early. at_of_words: at of their
        // rows.
        auto words = logits;
        int at_of_words[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          at_of_words[i] = at[i];
        }
        const bool is_shifted = kRows > 1 && grid.shifts && logits.begins_mid_word(share.first);
        if (is_shifted) {
          words = logits.row_before();
          at_of_words[kRows - 1] = at[0];
          at_of_words[0] = share.number_of(index_before);  // fault: plane-words-shift
        }
#pragma unroll 1
        for (int before = 0; before < share.count; before += Turn::kClasses) {
          if (!is_loaded) {
            load_turn(words, share, before);
          }
          is_loaded = false;
          turn.add_to(sums, before, at_of_words);
        }
        if (kRows > 1 && grid.shifts) {
          const Sum of_next = shuffle_down(sums[0], 1);
          if (is_shifted) {
            sums[0] = sums[kRows - 1];
            sums[kRows - 1] = of_next;
          }
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (at[i] >= 0) {
            const auto* const at_index = logits.of_class(indices[i]);  // fault: plane-words-index
            numbers.logit(lane * kRows + i) = to_acc<float>(at_index[i > 0 ? logits.next_row : 0]);
          }
          of_shares[i].take(n, sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        numbers.put_part(part, lane * kRows + i, of_shares[i].sum(grid.shares_of_part));
      }
    }
    const uint32_t done_word = first_word;
    first_word += words_at_once;
    const bool is_last = first_word >= grid.groups;
    if (!is_last) {
      load_first_turn();
    }
    // One barrier a round: the next round writes the other set of numbers. A thread that sums and
    // merges a row alone reads only its own.
    if (!merges_own_rows) {
      __syncthreads();
    }
    finish_rows<kExact, kRows>(args, grid, numbers, done_word, partial);
    if (is_last) {
      break;
    }
    numbers.numbers = numbers.numbers == dynamic ? dynamic + floats_of_set : dynamic;
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
  grid.parts = cut.parts();
  grid.shares_of_part = cut.shares / cut.parts();
  grid.merging_bits = cut.merging_bits();
  grid.lies_in_words = side_by_side::lies_in_words(args, args.input, args.input_class_stride);
  grid.shifts = shifts(args);
  grid.span_bits = std::min(grid.lane_bits, PlaneGrid::log2_of(kWarpSize));
  grid.planes_before_last = grid.shifts ? planes_before_last(args) : 0;
  visit_float_or_half(args.input.dtype, [&](auto like) {
    launch_kernel("plane_words_kernel", plane_words_kernel<typename decltype(like)::type>,
                  {plan.blocks, plan.threads, plan.shared_bytes}, stream, args, grid, partials,
                  finalize);
  });
}

}  // namespace lossops::cuda
