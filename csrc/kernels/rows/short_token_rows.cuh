// Forward of tokens (losses/rows/tokens.h) for fp32 and half rows of at most 4 KB: one kernel that
// reads rows and writes their values, without states in between. token_rows.cu chooses it by the
// number of classes and the dtype alone, so a row has the same bits in any batch and layout.
//
// A block first copies its rows to shared memory: by vectors where the rows follow one another,
// which may begin anywhere, or by words if there are to be gaps between rows in shared memory. Each
// other row is copied by its lanes, by unaligned vectors, or element by element if its classes are
// no neighbours. ShortRows of row_cut.h deals the rows out.
//
// What a row takes is computed in fp64, as in token_values_kernel, but with log_of_sum() and
// inverse_of(): a logarithm of the library would take longer than a row of ten classes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cross_entropy_row.h"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

// 1 / x within 2^-45 of it.
__device__ __forceinline__ double inverse_of(double x) {
  const double first = static_cast<double>(1.0f / static_cast<float>(x));
  return first * (2.0 - x * first);
}

// log1p(rest) within 2^-38 of it, of a sum of fp32: 2 atanh(f / (2 + f)) for the f in [-.3, .42] of
// 1 + rest = 2^k (1 + f). -inf of -1, which stands for no sum; NaN of NaN.
__device__ __forceinline__ double log_of_sum(double rest) {
  const double sum = 1.0 + rest;
  const int high = __double2hiint(sum);
  const int k = (high - 0x3fe6a09e) >> 20;  // the high word of sqrt(1/2)
  const double scaled = __hiloint2double(high - k * (1 << 20), __double2loint(sum));
  const double f = k == 0 ? rest : scaled - 1.0;  // rounding of the sum would cost a small rest
  const double s = f * inverse_of(2.0 + f);
  const double z = s * s;
  double p = 1.0 / 13;
  p = p * z + 1.0 / 11;
  p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7;
  p = p * z + 1.0 / 5;
  p = p * z + 1.0 / 3;
  const double log = k * 0.6931471805599453 + (2.0 * s + 2.0 * s * (z * p));
  if (rest > -1.0 && rest < math::infinity<double>()) {
    return log;
  }
  return rest == -1.0 ? -math::infinity<double>() : rest;
}

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

// Copies a row, whose classes are neighbours, by its lanes. to: at a word.
template <typename scalar_t>
__device__ __forceinline__ void copy_row(const scalar_t* row, int num_classes, int lane, int lanes,
                                         scalar_t* to) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const int vectors = num_classes / kSize;
  copy_vectors(
      lane, vectors, lanes, [&](int v) { return RowVector::load_by_words(row + v * kSize); },
      [&](int v, const RowVector& vector) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          reinterpret_cast<uint32_t*>(to)[v * 4 + i] = vector.words[i];
        }
      });
#pragma unroll 1
  for (int c = vectors * kSize + lane; c < num_classes; c += lanes) {
    to[c] = row[c];
  }
}

// Copies the rows of this block and returns the first.
template <typename scalar_t>
__device__ __forceinline__ const scalar_t* copy_rows(const RowSource& source, const RowGrid& grid,
                                                     const ShortRows& plan, RowVector* shared) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const auto thread = static_cast<int>(threadIdx.x);
  const uint32_t first_row = blockIdx.x * static_cast<uint32_t>(plan.rows);
  const auto rows =
      static_cast<int>(min(static_cast<uint32_t>(plan.rows), grid.groups - first_row));
  const int elements = rows * plan.num_classes;
  const auto* const data = static_cast<const scalar_t*>(source.input.data);
  auto* const copies = reinterpret_cast<scalar_t*>(shared);
  const bool has_gaps = plan.gap_words > 0;
  if (!plan.is_run && source.class_stride == 1) {
    const auto own = static_cast<int>(group_of_thread(plan.lanes) - first_row);
    if (own < rows) {
      const RowGrid::Place place = grid.place(first_row + own);
      copy_row(data + place.offset(source.input), plan.num_classes, thread & (plan.lanes - 1),
               plan.lanes, copies + own * plan.pitch);
    }
    __syncthreads();
    return copies;
  }
  if (!plan.is_run) {
#pragma unroll 4
    for (int e = thread; e < elements; e += kRowThreads) {
      const uint32_t row = plan.classes.quotient(static_cast<uint32_t>(e));
      const int64_t c = e - static_cast<int>(row) * plan.num_classes;
      copies[static_cast<int>(row) * plan.pitch + c] =
          data[grid.place(first_row + row).offset(source.input) + c * source.class_stride];
    }
    __syncthreads();
    return copies;
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
  // Rows with gaps between them in shared memory are whole words.
  const auto put = [&](int v, const RowVector& vector) {
    if (!has_gaps) {
      shared[v] = vector;
      return;
    }
    const int first_word = v * 4 - phase * static_cast<int>(sizeof(scalar_t)) / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int word = first_word + i;
      const auto row = static_cast<int>(plan.words.quotient(static_cast<uint32_t>(max(word, 0))));
      if (word >= 0 && row < rows) {
        reinterpret_cast<uint32_t*>(shared)[word + row * plan.gap_words] = vector.words[i];
      }
    }
  };
  copy_vectors(thread + begin, end, kRowThreads, [&](int v) { return aligned[v]; }, put);
  scalar_t* const own = has_gaps ? copies : copies + phase;
  // The slice's first vector and its last, element by element.
  if (thread < 2 * kSize) {
    const int v = thread < kSize ? 0 : vectors - 1;
    const int e = v * kSize + thread % kSize - phase;
    if ((v < begin || v >= end) && e >= 0 && e < elements) {
      const auto row = static_cast<int>(plan.classes.quotient(static_cast<uint32_t>(e)));
      own[e + row * (plan.pitch - plan.num_classes)] = first[e];
    }
  }
  __syncthreads();
  return own;
}

// Calls body(i) with the numbers below count that a lane has, four at a time: loads of shared
// memory then overlap.
template <typename Body>
__device__ __forceinline__ void for_lane(int count, int lane, int lanes, const Body& body) {
  constexpr int kUnroll = 4;
  int i = lane;
#pragma unroll 1
  for (; i + (kUnroll - 1) * lanes < count; i += kUnroll * lanes) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      body(i + u * lanes);
    }
  }
#pragma unroll 1
  for (; i < count; i += lanes) {
    body(i);
  }
}

// The largest logit of a row in shared memory, as far as a lane has it; -inf of NaN alone. flip:
// words are changed by it first.
template <typename scalar_t>
__device__ __forceinline__ float largest_of_lane(const RowType<scalar_t>& type, const scalar_t* row,
                                                 const ShortRows& plan, int lane, uint32_t flip) {
  float top = -math::infinity<float>();
  if constexpr (sizeof(scalar_t) == 4) {
    for_lane(plan.num_classes, lane, plan.lanes, [&](int i) {
      top = math::max_number(__uint_as_float(__float_as_uint(row[i]) ^ flip), top);
    });
  } else {
    type.visit([&](auto like) {
      using own_t = decltype(like);
      // The row may begin and end within a word.
      const int head = reinterpret_cast<uintptr_t>(row) % 4 == 0 ? 0 : 1;
      const int words = (plan.num_classes - head) / 2;
      const auto* const pairs = reinterpret_cast<const uint32_t*>(row + head);
      uint32_t largest = lowest_word<own_t>();
      for_lane(words, lane, plan.lanes,
               [&](int i) { largest = max_of_words<own_t>(pairs[i] ^ flip, largest); });
      const auto add = [&](int i) {
        const uint32_t bits = row[i].bits;
        largest = max_of_words<own_t>((bits << 16 | bits) ^ flip, largest);
      };
      add(0);
      add(plan.num_classes - 1);
      top = math::max_number(max_of_elements<own_t>(largest), top);
    });
  }
  return top;
}

// EntropySoftmax's, with what rounding took from its sum: a lane adds up to 16 times to the
// largest.
struct ShortRowState {
  float max = 0;
  float ones = 0;
  ExactSum below;
  float distance = 0;

  __device__ __forceinline__ double rest() const {
    return (static_cast<double>(ones) - 1.0) +
           (static_cast<double>(below.sum) + static_cast<double>(below.lost));
  }
};

// The state of a row in shared memory, in each of its lanes. By all lanes of a warp.
template <typename scalar_t, typename Map>
__device__ __forceinline__ ShortRowState state_of_row(const RowType<scalar_t>& type,
                                                      const scalar_t* row, const Map& map,
                                                      const ShortRows& plan, int lane,
                                                      bool changes_signs) {
  using Term = RowTerm<scalar_t>;
  constexpr bool kIsLinear = std::is_same_v<Map, LinearMap<float>>;
  const float top = max_over_lanes<float, false>(
      largest_of_lane(type, row, plan, lane, changes_signs ? sign_bits<scalar_t>(0) : 0),
      plan.lanes);
  ShortRowState state;
  state.max = map.map(top);
  // A linear map is taken of the difference, which is exact for logits that are near each other.
  const float shift = softmax_shift(kIsLinear ? top : state.max);
  const float rate = map.map(1.0f) * Term::kPerUnit;
  const float sign = changes_signs ? -1.0f : 1.0f;
  type.visit([&](auto like) {
    float distance = 0;  // of a few elements
    const auto power_of = [&](const scalar_t& element) {
      const float x = sign * to_acc<float>(bits_as<decltype(like)>(element));
      const float difference =
          Term::bounded(kIsLinear ? (x - shift) * rate : (map.map(x) - shift) * Term::kPerUnit);
      const float power = Term::exp(difference);
      distance -= power * difference;
      const float one = power == 1.0f ? 1.0f : 0.0f;
      state.ones += one;
      return power - one;
    };
    constexpr int kUnroll = kIsLinear ? 4 : 1;
    int i = lane;
#pragma unroll 1
    for (; i + (kUnroll - 1) * plan.lanes < plan.num_classes; i += kUnroll * plan.lanes) {
      float powers[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        powers[u] = power_of(row[i + u * plan.lanes]);
      }
      state.below.add(pairwise_sum(powers));
      state.distance += distance;
      distance = 0;
    }
#pragma unroll 1
    for (; i < plan.num_classes; i += plan.lanes) {
      state.below.add(power_of(row[i]));
    }
    state.distance = (state.distance + distance) * Term::kUnit;
  });
#pragma unroll 1
  for (int bit = plan.lanes / 2; bit > 0; bit /= 2) {
    const ShortRowState other = exchange(state, bit);
    state.ones += other.ones;
    state.below.add(other.below);
    state.distance += other.distance;
  }
  return state;
}

// pass_map: of logits whose signs have changed, if changes_signs; map: of the logits.
template <typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, 5)
    short_token_values_kernel(const __grid_constant__ TokenForwardArgs args,
                              const __grid_constant__ RowSource source,
                              const __grid_constant__ RowGrid grid,
                              const __grid_constant__ ShortRows plan, const RowType<scalar_t> type,
                              const Map pass_map, const Map map, bool changes_signs) {
  // One more, for rows that begin within a vector; a word more for each thread, for gaps.
  __shared__ RowVector shared[(ShortRows::kBlockBytes + kRowThreads * 4) / kVectorBytes + 1];
  let_next_kernel_start();
  const int lanes = plan.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const bool exists = group < grid.groups;
  const auto load_index = [&](int64_t k) {
    return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
  };
  // On its way while the rows are copied.
  int64_t c = exists && lane < args.num_indices ? load_index(lane) : -1;
  const scalar_t* const rows = copy_rows<scalar_t>(source, grid, plan, shared);
  // Lanes without a row have the block's first, for shuffles.
  const scalar_t* const row =
      rows + (exists ? (static_cast<int>(threadIdx.x) >> (__ffs(lanes) - 1)) * plan.pitch : 0);

  const ShortRowState state = state_of_row(type, row, pass_map, plan, lane, changes_signs);
  if (!exists) {
    return;
  }

  const bool counts = source.counts(place);
  const double max = state.max;
  const double rest = state.rest();
  const double log_sum = log_of_sum(rest);
  const double mean_distance = static_cast<double>(state.distance) * inverse_of(1.0 + rest);
  const auto store = [&](void* data, int64_t at, double value) {
    static_cast<float*>(data)[at] = counts ? static_cast<float>(value) : 0.0f;
  };
  const int64_t offset = place.offset(args.log_probs);
#pragma unroll 1
  for (int64_t k = lane; k < args.num_indices; k += lanes) {
    if (k != lane) {
      c = load_index(k);
    }
    double log_prob = math::quiet_nan<double>();
    if (c >= 0 && c < plan.num_classes) {
      const float z = type.visit(
          [&](auto like) { return map.map(to_acc<float>(bits_as<decltype(like)>(row[c]))); });
      log_prob = (static_cast<double>(z) - max) - log_sum;
    }
    store(args.log_probs.data, offset + k * args.log_probs_stride, log_prob);
  }
  if (lane == 0) {
    if (args.entropy.data != nullptr) {
      // As TokenStats has it: a row of -inf only, or of NaN, has none.
      store(args.entropy.data, place.offset(args.entropy),
            rest > -1.0 ? log_sum + mean_distance : math::quiet_nan<double>());
    }
    if (args.lse.data != nullptr) {
      store(args.lse.data, place.offset(args.lse), max + log_sum);
    }
    if (args.row_stats != nullptr) {
      store(args.row_stats, place.row, max);
      store(args.row_stats, args.rows.numel + place.row, rest);
      store(args.row_stats, 2 * args.rows.numel + place.row, mean_distance);
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
  launch_kernel("short_token_values_kernel", short_token_values_kernel<scalar_t, Map>,
                {plan.blocks(slice.rows()), kRowThreads}, stream, args, source, RowGrid(slice, 1),
                plan, type, pass_map, map, changes_signs);
}

}  // namespace lossops::cuda
