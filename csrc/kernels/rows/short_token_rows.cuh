// Forward of tokens (losses/rows/tokens.h) for fp32 and half rows of at most 4 KB: one kernel that
// reads rows and writes their values, without states in between. token_rows.cu chooses it by the
// number of classes, the dtype and whether there is a softcap, so a row has the same bits in any
// batch and layout.
//
// A block first copies its rows to shared memory. Rows that follow one another, or have small gaps,
// are copied as one run of vectors. Other rows are copied each by its lanes: by aligned vectors,
// and by elements at its ends. Rows whose classes are no neighbours are copied by elements alone.
// ShortRows of row_cut.h deals the rows out. Then the lanes of a row take its words, first for the
// maximum, then for the sums. Finally a thread has each row, and a lane some class indices of one.
#pragma once

#include <algorithm>
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
#include "kernels/rows/token_values.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

// Copies a row whose classes are neighbours by its lanes. Vectors that are the row's alone are
// copied asynchronously, the elements before and behind them one by one. phase: elements from the
// aligned vector in which the row begins to the row; to: the place of that vector in shared memory.
template <typename scalar_t>
__device__ __forceinline__ void copy_row(const scalar_t* row, int phase, const ShortRows& plan,
                                         int lane, RowVector* to) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const scalar_t* const first = row - phase;
  const int end = phase + plan.num_classes;
  const int whole_begin = phase > 0 ? 1 : 0;
  const int whole_end = max(end / kSize, whole_begin);
#pragma unroll 1
  for (int v = whole_begin + lane; v < whole_end; v += plan.lanes) {
    start_own_copy(to + v, reinterpret_cast<const RowVector*>(first) + v);
  }
  auto* const elements = reinterpret_cast<scalar_t*>(to);
  const auto copy_elements = [&](int begin, int stop) {
#pragma unroll 1
    for (int e = begin + lane; e < stop; e += plan.lanes) {
      elements[e] = first[e];
    }
  };
  copy_elements(phase, min(whole_begin * kSize, end));
  copy_elements(whole_end * kSize, end);
}

// The number of the block's row r in a slice.
__device__ __forceinline__ uint32_t number_of(int r, const ShortRows& plan) {
  return blockIdx.x * static_cast<uint32_t>(plan.rows) + static_cast<uint32_t>(r);
}
// Its logits in global memory.
template <typename scalar_t>
__device__ __forceinline__ const scalar_t* logits_of(int r, const RowSource& source,
                                                     const RowGrid& grid, const ShortRows& plan) {
  return static_cast<const scalar_t*>(source.input.data) +
         grid.place(number_of(r, plan)).offset(source.input);
}
// The phase of a row that is copied alone, as above; 0 where !has_phases.
template <typename scalar_t>
__device__ __forceinline__ int phase_of(const scalar_t* row, const ShortRows& plan) {
  const auto address = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row));
  return plan.has_phases ? static_cast<int>(address % kVectorBytes / sizeof(scalar_t)) : 0;
}

// Starts to copy this thread's share of the block's rows to shared memory, until
// wait_for_own_copies(). Returns the phase of the first row of a run; 0 where rows are copied
// alone.
template <typename scalar_t>
__device__ __forceinline__ int copy_rows(const RowSource& source, const RowGrid& grid,
                                         const ShortRows& plan, int rows, RowVector* shared) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const auto thread = static_cast<int>(threadIdx.x);
  auto* const copies = reinterpret_cast<scalar_t*>(shared);
  if (plan.run_stride == 0 && source.class_stride == 1) {
    const int own = thread >> (__ffs(plan.lanes) - 1);
    if (own < rows) {
      const auto* const row = logits_of<scalar_t>(own, source, grid, plan);
      copy_row(row, phase_of(row, plan), plan, thread & (plan.lanes - 1),
               shared + own * (plan.pitch / kSize));
    }
    return 0;
  }
  if (plan.run_stride == 0) {
#pragma unroll 1
    for (int e = thread; e < rows * plan.num_classes; e += kRowThreads) {
      const auto r = static_cast<int>(plan.classes.quotient(static_cast<uint32_t>(e)));
      const int64_t c = e - r * plan.num_classes;
      copies[r * plan.pitch + c] =
          logits_of<scalar_t>(r, source, grid, plan)[c * source.class_stride];
    }
    return 0;
  }
  const int elements = (rows - 1) * plan.run_stride + plan.num_classes;
  const int64_t before = int64_t{number_of(0, plan)} * plan.run_stride;
  const int64_t left =
      int64_t{grid.groups - 1} * plan.run_stride + plan.num_classes - before;  // of the slice
  const scalar_t* const first = static_cast<const scalar_t*>(source.input.data) + before;
  const auto phase =
      static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t));
  const auto* const aligned = reinterpret_cast<const RowVector*>(first - phase);
  const int vectors = (phase + elements + kSize - 1) / kSize;
  // Vectors whose elements are all of the slice, if not of the block.
  const int begin = before < phase ? 1 : 0;
  const auto end = static_cast<int>(min(int64_t{vectors}, (left + phase) / kSize));
#pragma unroll 1
  for (int v = thread + begin; v < end; v += kRowThreads) {
    start_own_copy(shared + plan.place(v), aligned + v);
  }
  // The slice's first vector and its last, where they reach beyond it: element by element.
  if (thread < 2 * kSize) {
    const int v = thread < kSize ? 0 : vectors - 1;
    const int e = v * kSize + thread % kSize - phase;
    if ((v < begin || v >= end) && e >= 0 && e < elements) {
      copies[phase + e] = first[e];
    }
  }
  return phase;
}

// The words of 32 bits of a row in shared memory that one of its lanes takes, four at a time. Where
// rows are whole vectors, these are the words of every lanes-th vector; else every lanes-th word,
// and the last ones come one at a time. So the order follows from the number of classes and the
// dtype.
template <typename scalar_t>
class LaneWords {
 public:
  // The row begins at element `offset` of the buffer.
  __device__ __forceinline__ LaneWords(scalar_t* buffer, int offset, const ShortRows& plan,
                                       int lane, bool splits_words)
      : row_(buffer, offset, splits_words), plan_(plan), lane_(lane) {}

  // Calls body with an array of four words, or of one. lowest: a word of -inf, for the half of the
  // last word that the row does not have.
  template <typename Body>
  __device__ __forceinline__ void for_each_batch(uint32_t lowest, const Body& body) const {
    constexpr int kPerWord = kWordElements<scalar_t>;
    constexpr int kBatch = 4;
    const int whole = plan_.num_classes / kPerWord;
    const int distance = plan_.in_vectors ? 1 : plan_.lanes;
    int k = plan_.in_vectors ? kBatch * lane_ : lane_;
#pragma unroll 1
    for (; k + (kBatch - 1) * distance < whole; k += kBatch * plan_.lanes) {
      uint32_t words[kBatch];
      if (plan_.is_aligned) {
        const RowVector vector = reinterpret_cast<const RowVector*>(&row_[0])[k / kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          words[i] = vector.words[i];
        }
      } else {
        row_.load(k, distance, words);
      }
      body(words);
    }
#pragma unroll 1
    for (; k * kPerWord < plan_.num_classes; k += plan_.lanes) {
      uint32_t words[1];
      row_.load(k, 0, words);
      if (kPerWord == 2 && k == whole) {
        words[0] = (words[0] & 0xffffu) | (lowest & 0xffff0000u);
      }
      body(words);
    }
  }

 private:
  RowWords<scalar_t> row_;
  const ShortRows& plan_;
  int lane_;
};

// Reduces a row to its state, which each of its lanes then has. By all lanes of a warp. map: of the
// logits as they lie in shared memory, with which it must not fall. wants_products: else the
// state's distance is undefined.
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
    row.for_each_batch(lowest, [&](const auto& words) {
#pragma unroll
      for (const uint32_t word : words) {
        largest = max_of_words<own_t>(word, largest);
      }
    });
    const float top = max_over_lanes<float, false>(max_of_elements<own_t>(largest), lanes);
    state.max = terms.set_top(top);
    const uint32_t to_take = word_to_take<own_t>(top);
    uint32_t taken = 0;
    TokenRow<float>::Sums sums;
    row.for_each_batch(lowest, [&](const auto& words) {
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

// What the log-probabilities of a row take of it.
struct ShortRowNormalizer {
  TokenNormalizer<float> normalizer;
  bool counts;
};

// Writes the log-probabilities, the entropy, the lse and the statistics of a block's rows. If
// changes_signs, the logits in shared memory have other signs, for pass_map; log-probabilities take
// map of the call's logits. index_lanes: threads that share the class indices of a row, a power of
// two.
template <typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, 5)
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
  const uint32_t first_row = number_of(0, plan);
  const auto rows =
      static_cast<int>(min(static_cast<uint32_t>(plan.rows), grid.groups - first_row));
  const int index_shift = __ffs(index_lanes) - 1;
  const int index_lane = thread & (index_lanes - 1);
  int index_row = thread >> index_shift;
  const auto load_index = [&](const RowGrid::Place& place, int64_t k) {
    return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
  };
  RowGrid::Place place = grid.place(first_row + index_row);
  // On its way while the rows are copied.
  int64_t c =
      index_row < rows && index_lane < args.num_indices ? load_index(place, index_lane) : -1;

  const int phase = copy_rows<scalar_t>(source, grid, plan, rows, shared);
  wait_for_own_copies();
  __syncthreads();
  const uint32_t flip = changes_signs ? sign_bits<scalar_t>(0) : 0;
  if (changes_signs) {
    auto* const words = reinterpret_cast<uint32_t*>(shared);
#pragma unroll 1
    for (int i = thread; i < ShortRows::kSharedBytes / 4; i += kRowThreads) {
      words[i] ^= flip;
    }
    __syncthreads();
  }
  auto* const elements = reinterpret_cast<scalar_t*>(shared);
  // Where row r of the block begins.
  const auto begin_of = [&](int r) {
    int own_phase = phase;
    if (plan.has_phases) {
      own_phase = phase_of(logits_of<scalar_t>(r, source, grid, plan), plan);
    }
    return r * plan.pitch + own_phase;
  };
  const bool splits_words =
      sizeof(scalar_t) == 2 && (plan.has_phases || phase % 2 != 0 || plan.pitch % 2 != 0);
  // Lanes without a row have the block's last, for shuffles.
  const int own = min(thread >> (__ffs(lanes) - 1), rows - 1);
  const LaneWords<scalar_t> row(elements, begin_of(own), plan, thread & (lanes - 1), splits_words);
  const EntropySoftmax<float> state =
      state_of_row(type, row, pass_map, lanes, args.entropy.data != nullptr);
  if ((thread & (lanes - 1)) == 0 && thread < rows * lanes) {
    states[own] = state;
  }
  __syncthreads();

  if (thread < rows) {
    const RowGrid::Place own_place = index_lanes == 1 ? place : grid.place(first_row + thread);
    const bool counts = source.counts(own_place);
    const EntropySoftmax<float> of_row = states[thread];
    const TokenStats<float> stats = {of_row.max, of_row.rest(),
                                     args.entropy.data != nullptr ? of_row.mean_distance() : 0.0f};
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
  if (index_lanes > 1) {  // else a thread reads what it wrote
    __syncthreads();
  }
#pragma unroll 1
  for (; index_row < rows; index_row += kRowThreads >> index_shift) {
    if (index_row != thread >> index_shift) {
      place = grid.place(first_row + index_row);
      c = index_lane < args.num_indices ? load_index(place, index_lane) : -1;
    }
    const ShortRowNormalizer of_row = normalizers[index_row];
#pragma unroll 1
    for (int64_t k = index_lane; k < args.num_indices; k += index_lanes) {
      if (k != index_lane) {
        c = load_index(place, k);
      }
      float log_prob = math::quiet_nan<float>();
      if (c >= 0 && c < plan.num_classes) {
        using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, uint32_t>;
        const scalar_t logit = elements[begin_of(index_row) + static_cast<int>(c)];
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

// Launches short_token_values_kernel for a slice. args: their operands are those of the slice.
template <typename scalar_t, typename Map>
void launch_short_token_values(const RowSlice& slice, const TokenForwardArgs& args,
                               const RowSource& source, const RowType<scalar_t>& type,
                               const Map& pass_map, const Map& map, bool changes_signs,
                               cudaStream_t stream) {
  // Memory reads whole sectors, so small gaps between rows are read as well.
  const int64_t stride = slice.sizes[0] > 1 ? source.input.strides[0] : args.num_classes;
  const int64_t gap_bytes = (stride - args.num_classes) * static_cast<int64_t>(sizeof(scalar_t));
  const bool is_strided_run = source.class_stride == 1 && slice.sizes[1] == 1 && gap_bytes >= 0 &&
                              gap_bytes <= kSectorBytes;
  ShortRows::Layout layout;
  layout.are_apart = source.class_stride != 1;
  layout.are_aligned = begin_at_vectors(slice, source.input);
  if (is_run(slice, source.input, source.class_stride, args.num_classes)) {
    layout.row_stride = args.num_classes;
  } else if (is_strided_run) {
    layout.row_stride = stride;
  }
  const ShortRows plan(args.num_classes, sizeof(scalar_t), layout);
  // A few indices a lane, because a lane also has work that does not depend on their number.
  const int index_lanes = lanes_for(ceil_div(args.num_indices, int64_t{4}));
  launch_kernel("short_token_values_kernel", short_token_values_kernel<scalar_t, Map>,
                {plan.blocks(slice.rows()), kRowThreads}, stream, args, source, RowGrid(slice, 1),
                plan, index_lanes, type, pass_map, map, changes_signs);
}

}  // namespace lossops::cuda
