// Forward of tokens (losses/rows/tokens.h) for fp32 and half rows of at most 1 KB: one kernel that
// reads rows and writes their values, without states in between. token_rows.cu chooses it by the
// number of classes, the dtype and whether there is a softcap, so a row has the same bits in any
// batch and layout.
//
// A block first copies its rows to shared memory (short_rows.cuh). Then the lanes of a row take its
// words, first for the maximum, then for the sums. Finally a thread has each row, and a lane some
// class indices of one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cross_entropy_row.h"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_merge.cuh"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/short_rows.cuh"
#include "kernels/rows/token_values.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

// Reduces a row to its state, which each of its lanes then has. All lanes of a warp must call it.
// map must not fall as the logits in shared memory rise. wants_products: else the state's distance
// is undefined.
template <typename scalar_t, typename Map>
__device__ __forceinline__ EntropySoftmax<float> state_of_row(const RowType<scalar_t>& type,
                                                              const LaneWords<scalar_t>& row,
                                                              const Map& map, int lanes,
                                                              bool wants_products) {
  using Term = RowTerm<scalar_t>;
  SoftmaxTerms<scalar_t, Map> terms(map);
  EntropySoftmax<float> state;
  type.visit([&](auto like) {
    using own_t = decltype(like);
    const uint32_t lowest = lowest_word<own_t>();
    uint32_t largest = lowest;
    row.template for_each_batch<false>(lowest, [&](const auto& words) {
#pragma unroll
      for (const uint32_t word : words) {
        largest = max_of_words<own_t>(word, largest);
      }
    });
    const float top = max_over_lanes<float, false>(max_of_elements<own_t>(largest), lanes);
    state.max = terms.set_top(top);
    const uint32_t to_take = word_to_take<own_t>(top);
    uint32_t taken = 0;
    EntropyRow<float>::Sums sums;
    row.template for_each_batch<false>(lowest, [&](const auto& words) {
      constexpr int kPerWord = kWordElements<own_t>;
      constexpr int kWords = sizeof(words) / sizeof(uint32_t);
      TermBatch<scalar_t, kWords * kPerWord> batch;
#pragma unroll
      for (int u = 0; u < kWords; ++u) {
        const uint32_t word = take_equals<own_t>(words[u], to_take, taken);
#pragma unroll
        for (int i = 0; i < kPerWord; ++i) {
          const float difference =
              terms.template difference<!Term::kIsHalf>(word_element<own_t>(word, i));
          batch.powers[u * kPerWord + i] = Term::exp(difference);
          batch.differences[u * kPerWord + i] = difference;
        }
      }
      if (wants_products) {
        if constexpr (Term::kIsHalf) {
          // Differences of -inf harm only products.
#pragma unroll
          for (float& difference : batch.differences) {
            difference = Term::bounded(difference);
          }
        }
        sums.add<true>(batch);
      } else {
        sums.add<false>(batch);
      }
    });
    state.ones = static_cast<float>(sum_of_taken<own_t>(taken));
    sums.move_to(state, Term::kUnit, terms.excess());
  });
#pragma unroll 1
  for (int bit = lanes / 2; bit > 0; bit /= 2) {
    state.add(exchange(state, bit));
  }
  return state;
}

// Class indices of a row that a lane takes: a lane also has work that does not depend on their
// number. 32 lanes for 20 indices: .55 to .40 of the floor, 4 a lane .59. (H200, 2026-11)
constexpr int64_t kLaneValues = 4;

// The most bytes of a row that short_token_values_kernel takes: those of 8 lanes. Where there are
// many rows, row_states_kernel is faster for longer ones, since its warps do not wait for one
// another. By the two, forward of bf16 600000x512 is at .62 and .58 of the floor, of 400000x600 at
// .49 and .57, of 131072x2048 at .61 and .75. (H200, 2026-11)
constexpr int64_t kMostValuesBytes = 8 * ShortRows::kLaneBytes;

// What log-probabilities need of their row.
struct ShortRowNormalizer {
  TokenNormalizer<float> normalizer;
  bool counts;
};

// Writes the log-probabilities, the entropy, the lse and the statistics of a block's rows. If
// changes_signs, the logits in shared memory have other signs, for pass_map; log-probabilities take
// map of the call's logits. index_lanes: threads that share the class indices of a row, a power of
// two.
template <typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, kShortRowBlocks)
    short_token_values_kernel(const __grid_constant__ TokenForwardArgs args,
                              const __grid_constant__ RowSource source,
                              const __grid_constant__ RowGrid grid,
                              const __grid_constant__ ShortRows plan, int index_lanes,
                              const RowType<scalar_t> type, const Map pass_map, const Map map,
                              bool changes_signs) {
  __shared__ RowVector shared[ShortRows::kSharedBytes / kVectorBytes];
  __shared__ uint4 of_rows[kRowThreads];  // the state of each row, and then its normalizer
  auto* const states = reinterpret_cast<EntropySoftmax<float>*>(of_rows);
  auto* const normalizers = reinterpret_cast<ShortRowNormalizer*>(of_rows);
  static_assert(sizeof(*states) == sizeof(uint4) && sizeof(*normalizers) == sizeof(uint4));
  let_next_kernel_start();
  const int lanes = plan.lanes;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread & (lanes - 1);
  const int index_lane = thread & (index_lanes - 1);
  const int index_row = thread >> (__ffs(index_lanes) - 1);
  const auto load_index = [&](const RowGrid::Place& place, int64_t k) {
    return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
  };
  const BlockRows<scalar_t> block(source, grid, plan, blockIdx.x, shared);
  const uint32_t flip = changes_signs ? sign_bits<scalar_t>(0) : 0;
#pragma unroll 1
  for (int first = 0; first < block.rows(); first += plan.turn_rows) {
    const int turn_rows = min(block.rows() - first, plan.turn_rows);
    // The place of the row whose class index this lane has, and the index. In the first turn it is
    // on its way while the rows are copied.
    RowGrid::Place place = grid.place(block.number(first + index_row));
    int64_t c =
        index_row < turn_rows && index_lane < args.num_indices ? load_index(place, index_lane) : -1;
    if (first == 0) {
      wait_for_own_copies();
      __syncthreads();
      if (changes_signs) {
        auto* const words = reinterpret_cast<uint32_t*>(shared);
#pragma unroll 1
        for (int i = thread; i * kWordElements<scalar_t> < block.end(); i += kRowThreads) {
          words[i] ^= flip;
        }
        __syncthreads();
      }
    }
    // Lanes without a row have the turn's last, for shuffles.
    const int own = min(thread >> (__ffs(lanes) - 1), turn_rows - 1);
    const LaneWords<scalar_t> row(block, plan, first + own, lane);
    const EntropySoftmax<float> state =
        state_of_row(type, row, pass_map, lanes, args.entropy.data != nullptr);
    if (lane == 0 && thread < turn_rows * lanes) {
      states[own] = state;
    }
    if (lanes > 1) {  // else a thread reads what it wrote
      __syncthreads();
    }

    if (thread < turn_rows) {
      const RowGrid::Place own_place =
          index_lanes == 1 ? place : grid.place(block.number(first + thread));
      const bool counts = source.counts(own_place);
      const EntropySoftmax<float> of_row = states[thread];
      const TokenStats<float> stats = {
          of_row.max, of_row.rest(), args.entropy.data != nullptr ? of_row.mean_distance() : 0.0f};
      const TokenNormalizer<float> normalizer = stats.normalizer();
      normalizers[thread] = {normalizer, counts};
      const auto store = [&](void* data, int64_t at, float value) {
        static_cast<float*>(data)[at] = counts ? value : 0.0f;
      };
      if (args.entropy.data != nullptr) {
        store(args.entropy.data, own_place.offset(args.entropy), normalizer.entropy());
      }
      if (args.lse.data != nullptr) {
        store(args.lse.data, own_place.offset(args.lse), normalizer.lse());
      }
      if (args.row_stats != nullptr) {
        store(args.row_stats, own_place.row, stats.max);
        store(args.row_stats, args.rows.numel + own_place.row, stats.rest);
        store(args.row_stats, 2 * args.rows.numel + own_place.row, stats.mean_distance);
      }
    }
    if (index_lanes > 1) {
      __syncthreads();
    }
#pragma unroll 1
    for (int r = index_row; r < turn_rows; r += kRowThreads >> (__ffs(index_lanes) - 1)) {
      if (r != index_row) {
        place = grid.place(block.number(first + r));
        c = index_lane < args.num_indices ? load_index(place, index_lane) : -1;
      }
      const ShortRowNormalizer of_row = normalizers[r];
#pragma unroll 1
      for (int64_t k = index_lane; k < args.num_indices; k += index_lanes) {
        if (k != index_lane) {
          c = load_index(place, k);
        }
        float log_prob = math::quiet_nan<float>();
        if (c >= 0 && c < plan.num_classes) {
          using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, uint32_t>;
          const scalar_t logit = block.elements()[block.begin(first + r) + static_cast<int>(c)];
          const auto bits = static_cast<bits_t>(bits_as<bits_t>(logit) ^ flip);
          const float z = type.visit(
              [&](auto like) { return map.map(to_acc<float>(bits_as<decltype(like)>(bits))); });
          log_prob = of_row.normalizer.log_prob(z);
        }
        static_cast<float*>(
            args.log_probs.data)[place.offset(args.log_probs) + k * args.log_probs_stride] =
            of_row.counts ? log_prob : 0.0f;
      }
    }
  }
}

// Launches short_token_values_kernel for a slice. args: their operands are those of the slice.
template <typename scalar_t, typename Map>
void launch_short_token_values(const RowSlice& slice, const TokenForwardArgs& args,
                               const RowSource& source, const RowType<scalar_t>& type,
                               const Map& pass_map, const Map& map, bool changes_signs,
                               cudaStream_t stream) {
  const int index_lanes = lanes_for(ceil_div(args.num_indices, kLaneValues));
  // In several turns a thread has its rows alone, with their class indices.
  const ShortRows plan = short_rows_of<scalar_t>(slice, source, args.num_classes,
                                                 index_lanes > 1 ? 1 : ShortRows::kMostTurns);
  launch_kernel("short_token_values_kernel", short_token_values_kernel<scalar_t, Map>,
                {plan.blocks(slice.rows()), kRowThreads}, stream, args, source, RowGrid(slice, 1),
                plan, index_lanes, type, pass_map, map, changes_signs);
}

}  // namespace lossops::cuda
