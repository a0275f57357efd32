// Forward of tokens (losses/rows/tokens.h) for fp32 and half rows of at most 4 KB: one kernel that
// reads rows and writes their values, without states in between. token_rows.cu chooses it by the
// number of classes and the dtype alone, so a row has the same bits in any batch and layout.
//
// A block first copies its rows to shared memory: by vectors where the rows follow one another,
// else each row by its lanes, by unaligned vectors, or element by element if its classes are no
// neighbours. ShortRows of row_cut.h deals the rows out. Then the lanes of a row take its words,
// first for the maximum, then for the sums, and at last a thread has each value to write.
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

// Calls put(v, load(v)) for v = begin, begin + stride, ... below end. A few loads are on their way
// at once.
template <typename Load, typename Put>
__device__ __forceinline__ void copy_vectors(int begin, int end, int stride, const Load& load,
                                             const Put& put) {
  constexpr int kFlight = 4;
#pragma unroll 1
  for (int v = begin; v < end; v += kFlight * stride) {
    RowVector loaded[kFlight];
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (v + u * stride < end) {
        loaded[u] = load(v + u * stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kFlight; ++u) {
      if (v + u * stride < end) {
        put(v + u * stride, loaded[u]);
      }
    }
  }
}

// Copies a row, whose classes are neighbours, by its lanes. to: at a vector if rows are whole
// vectors, else at a word.
template <typename scalar_t>
__device__ __forceinline__ void copy_row(const scalar_t* row, const ShortRows& plan, int lane,
                                         scalar_t* to) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const int vectors = plan.num_classes / kSize;
  copy_vectors(
      lane, vectors, plan.lanes, [&](int v) { return RowVector::load_by_words(row + v * kSize); },
      [&](int v, const RowVector& vector) {
        if (plan.in_vectors) {
          reinterpret_cast<RowVector*>(to)[v] = vector;
          return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          reinterpret_cast<uint32_t*>(to)[v * 4 + i] = vector.words[i];
        }
      });
#pragma unroll 1
  for (int c = vectors * kSize + lane; c < plan.num_classes; c += plan.lanes) {
    to[c] = row[c];
  }
}

// Copies the rows of this block, as far as this thread does, and returns where the first begins: so
// many elements behind the beginning of shared memory.
template <typename scalar_t>
__device__ __forceinline__ int copy_rows(const RowSource& source, const RowGrid& grid,
                                         const ShortRows& plan, RowVector* shared) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const auto thread = static_cast<int>(threadIdx.x);
  const uint32_t first_row = blockIdx.x * static_cast<uint32_t>(plan.rows);
  const auto rows =
      static_cast<int>(min(static_cast<uint32_t>(plan.rows), grid.groups - first_row));
  const int elements = rows * plan.num_classes;
  const auto* const data = static_cast<const scalar_t*>(source.input.data);
  auto* const copies = reinterpret_cast<scalar_t*>(shared);
  if (!plan.is_run && source.class_stride == 1) {
    const auto own = static_cast<int>(group_of_thread(plan.lanes) - first_row);
    if (own < rows) {
      const RowGrid::Place place = grid.place(first_row + own);
      copy_row(data + place.offset(source.input), plan, thread & (plan.lanes - 1),
               copies + own * plan.pitch);
    }
    return 0;
  }
  if (!plan.is_run) {
#pragma unroll 4
    for (int e = thread; e < elements; e += kRowThreads) {
      const uint32_t row = plan.classes.quotient(static_cast<uint32_t>(e));
      const int64_t c = e - static_cast<int>(row) * plan.num_classes;
      copies[static_cast<int>(row) * plan.pitch + c] =
          data[grid.place(first_row + row).offset(source.input) + c * source.class_stride];
    }
    return 0;
  }
  const int64_t before = int64_t{first_row} * plan.num_classes;
  const int64_t left = int64_t{grid.groups} * plan.num_classes - before;
  const scalar_t* const first = data + before;
  const auto phase =
      static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t));
  const auto* const aligned = reinterpret_cast<const RowVector*>(first - phase);
  const int vectors = (phase + elements + kSize - 1) / kSize;
  // Vectors whose elements are all of the slice, if not of the block.
  const int begin = before < phase ? 1 : 0;
  const auto end = static_cast<int>(min(int64_t{vectors}, (left + phase) / kSize));
#pragma unroll 4
  for (int v = thread + begin; v < end; v += kRowThreads) {
    start_own_copy(shared + plan.place(v), aligned + v);
  }
  // The slice's first vector and its last, element by element. Rows of whole vectors have neither.
  if (thread < 2 * kSize) {
    const int v = thread < kSize ? 0 : vectors - 1;
    const int e = v * kSize + thread % kSize - phase;
    if ((v < begin || v >= end) && e >= 0 && e < elements) {
      copies[phase + e] = first[e];
    }
  }
  wait_for_own_copies();
  return phase;
}

// The words of a row in shared memory that one of its lanes takes, in batches of four: those of a
// vector where rows are whole vectors, else one in each plan.lanes. What is left of a row then
// comes word by word.
template <typename scalar_t>
class LaneWords {
 public:
  // The row begins at element `offset` of the buffer.
  __device__ __forceinline__ LaneWords(scalar_t* buffer, int offset, const ShortRows& plan,
                                       int lane, bool splits_words)
      : row_(buffer, offset, splits_words), plan_(plan), lane_(lane) {}

  // Calls body(words). lowest: a word that stands for elements which the row does not have.
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
      if (plan_.in_vectors) {
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

// The state of a row in each of its lanes. By all lanes of a warp. map: of logits that rise as
// those in shared memory do.
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

// pass_map: of logits whose signs have changed, if changes_signs; map: of the logits.
// value_lanes: threads that share the values of a row, a power of two.
template <typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, 5)
    short_token_values_kernel(const __grid_constant__ TokenForwardArgs args,
                              const __grid_constant__ RowSource source,
                              const __grid_constant__ RowGrid grid,
                              const __grid_constant__ ShortRows plan, int value_lanes,
                              const RowType<scalar_t> type, const Map pass_map, const Map map,
                              bool changes_signs) {
  __shared__ RowVector shared[ShortRows::kSharedBytes / kVectorBytes];
  __shared__ EntropySoftmax<float> states[kRowThreads];  // of the block's rows
  let_next_kernel_start();
  const int lanes = plan.lanes;
  const auto thread = static_cast<int>(threadIdx.x);
  const uint32_t first_row = blockIdx.x * static_cast<uint32_t>(plan.rows);
  const auto rows =
      static_cast<int>(min(static_cast<uint32_t>(plan.rows), grid.groups - first_row));
  const int value_shift = __ffs(value_lanes) - 1;
  const int value_lane = thread & (value_lanes - 1);
  int value_row = thread >> value_shift;
  const auto load_index = [&](const RowGrid::Place& place, int64_t k) {
    return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
  };
  RowGrid::Place place = grid.place(first_row + value_row);
  // On its way while the rows are copied.
  int64_t c = value_row < rows && value_lane < args.num_indices ? load_index(place, value_lane) : -1;

  const int first = copy_rows<scalar_t>(source, grid, plan, shared);
  __syncthreads();
  const uint32_t flip = changes_signs ? sign_bits<scalar_t>(0) : 0;
  if (changes_signs) {
    auto* const words = reinterpret_cast<uint32_t*>(shared);
    const int used = (first + rows * plan.pitch) * static_cast<int>(sizeof(scalar_t)) / 4 + 1;
#pragma unroll 1
    for (int i = thread; i < used; i += kRowThreads) {
      words[i] ^= flip;
    }
    __syncthreads();
  }
  auto* const elements = reinterpret_cast<scalar_t*>(shared) + first;
  const bool splits_words = sizeof(scalar_t) == 2 && (first % 2 != 0 || plan.pitch % 2 != 0);
  const int own = thread >> (__ffs(lanes) - 1);
  // Lanes without a row have the block's first, for shuffles.
  const LaneWords<scalar_t> row(reinterpret_cast<scalar_t*>(shared),
                                first + (own < rows ? own : 0) * plan.pitch, plan,
                                thread & (lanes - 1), splits_words);
  const EntropySoftmax<float> state =
      state_of_row(type, row, pass_map, lanes, args.entropy.data != nullptr);
  if ((thread & (lanes - 1)) == 0) {
    states[own] = state;
  }
  __syncthreads();

  if (thread < rows) {
    const RowGrid::Place own_place = value_lanes == 1 ? place : grid.place(first_row + thread);
    const bool counts = source.counts(own_place);
    const EntropySoftmax<float> of_row = states[thread];
    const TokenStats<float> stats = {
        of_row.max, of_row.rest(), args.entropy.data != nullptr ? of_row.mean_distance() : 0.0f};
    const auto store = [&](void* data, int64_t at, float value) {
      static_cast<float*>(data)[at] = counts ? value : 0.0f;
    };
    if (args.entropy.data != nullptr) {
      store(args.entropy.data, own_place.offset(args.entropy), stats.entropy());
    }
    if (args.lse.data != nullptr) {
      store(args.lse.data, own_place.offset(args.lse), stats.lse());
    }
    if (args.row_stats != nullptr) {
      store(args.row_stats, own_place.row, stats.max);
      store(args.row_stats, args.rows.numel + own_place.row, stats.rest);
      store(args.row_stats, 2 * args.rows.numel + own_place.row, stats.mean_distance);
    }
    // What log-probabilities take of the row.
    states[thread].below = stats.log_sum();
    states[thread].ones = counts ? 1.0f : 0.0f;
  }
  if (value_lanes > 1) {
    __syncthreads();
  }
#pragma unroll 1
  for (; value_row < rows; value_row += kRowThreads >> value_shift) {
    if (value_row != thread >> value_shift) {
      place = grid.place(first_row + value_row);
      c = value_lane < args.num_indices ? load_index(place, value_lane) : -1;
    }
    const bool counts = states[value_row].ones != 0.0f;
#pragma unroll 1
    for (int64_t k = value_lane; k < args.num_indices; k += value_lanes) {
      if (k != value_lane) {
        c = load_index(place, k);
      }
      float log_prob = math::quiet_nan<float>();
      if (c >= 0 && c < plan.num_classes) {
        using bits_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t, uint32_t>;
        const scalar_t logit = elements[value_row * plan.pitch + static_cast<int>(c)];
        const auto bits = static_cast<bits_t>(bits_as<bits_t>(logit) ^ flip);
        const float z = type.visit(
            [&](auto like) { return map.map(to_acc<float>(bits_as<decltype(like)>(bits))); });
        log_prob = (z - states[value_row].max) - states[value_row].below;
      }
      static_cast<float*>(args.log_probs.data)[place.offset(args.log_probs) +
                                               k * args.log_probs_stride] = counts ? log_prob : 0.0f;
    }
  }
}

// rows: the call's arguments, of the slice.
template <typename scalar_t, typename Map>
void launch_short_token_values(const RowSlice& slice, const TokenForwardArgs& args,
                               const RowSource& source, const RowType<scalar_t>& type,
                               const Map& pass_map, const Map& map, bool changes_signs,
                               cudaStream_t stream) {
  const ShortRows plan(args.num_classes, sizeof(scalar_t),
                       is_run(slice, source.input, source.class_stride, args.num_classes),
                       source.input.data);
  // A few indices a lane: it has some work beside them.
  const int value_lanes = merging_lanes(ceil_div(args.num_indices, int64_t{4}));
  launch_kernel("short_token_values_kernel", short_token_values_kernel<scalar_t, Map>,
                {plan.blocks(slice.rows()), kRowThreads}, stream, args, source, RowGrid(slice, 1),
                plan, value_lanes, type, pass_map, map, changes_signs);
}

}  // namespace lossops::cuda
