// A warp's piece of a staged row in shared memory, and what a block needs to know of the row.
//
// Only staged_rows.cu includes this.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/phased_pieces.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda {
namespace {

using namespace staged_rows;

// Granules that a thread has in flight between shared memory and its registers. Measured on an
// H200: to load the next ones before these are done takes registers, and loses 3 %.
constexpr int kGranuleUnroll = 4;

// What a block needs to know of a row.
template <RowKind kKind>
struct StagedRow {
  const void* logits;
  void* gradient;
  int index;     // checked_index()
  float weight;  // row_weight()
};

template <>
struct StagedRow<RowKind::kProbability> {
  const void* logits;
  void* gradient;
  const void* probabilities;
  static constexpr int index = 0;  // all of these rows have a loss
  static constexpr float weight = 1;
};

// A warp's piece of a row in granules of 16 bytes: the granules in [whole_begin, whole_end) are the
// piece's alone. Elements count from the start of the first granule.
template <typename scalar_t>
struct Granules {
  static constexpr int kSize = kVectorSize<scalar_t>;
  int phase;  // elements of the first granule that are before the piece
  int count;  // elements of the piece

  // The number of granules that have an element of the piece.
  __device__ __forceinline__ int end() const { return (phase + count + kSize - 1) / kSize; }
  __device__ __forceinline__ int whole_begin() const { return phase > 0 ? 1 : 0; }
  __device__ __forceinline__ int whole_end() const { return (phase + count) / kSize; }

  // For each of this lane's granules in [begin, end): body(g, load(g)), several loads at a time.
  // begin: 0 or 1.
  template <typename Load, typename Body>
  static __device__ __forceinline__ void for_each(int begin, int end, int lane, Load&& load,
                                                  Body&& body) {
    int g = lane >= begin ? lane : lane + kWarpSize;
    for (; g + (kGranuleUnroll - 1) * kWarpSize < end; g += kGranuleUnroll * kWarpSize) {
      Vector<scalar_t> vectors[kGranuleUnroll];
#pragma unroll
      for (int u = 0; u < kGranuleUnroll; ++u) {
        vectors[u] = load(g + u * kWarpSize);
      }
#pragma unroll
      for (int u = 0; u < kGranuleUnroll; ++u) {
        body(g + u * kWarpSize, vectors[u]);
      }
    }
    for (; g < end; g += kWarpSize) {
      body(g, load(g));
    }
  }

  // This lane's element of a granule that is not whole, of the piece or beside it; -1: it has none.
  __device__ __forceinline__ int beside(int lane) const {
    const bool head = lane < kSize;
    const int e = head ? lane : whole_end() * kSize + lane - kSize;
    const bool is_edge =
        head ? whole_begin() > 0
             : lane < 2 * kSize && whole_end() >= whole_begin() && whole_end() < end();
    return is_edge ? e : -1;
  }
  // The same, of the piece alone.
  __device__ __forceinline__ int edge(int lane) const {
    const int e = beside(lane);
    return e >= phase && e < phase + count ? e : -1;
  }

  // Whether element e is in a whole granule of this lane.
  __device__ __forceinline__ bool has(int e, int lane) const {
    const int g = e / kSize;
    return g >= whole_begin() && g < whole_end() && g % kWarpSize == lane;
  }
};

// Writes `value` to all elements of a piece, by a warp.
template <typename scalar_t>
__device__ __forceinline__ void fill_piece(scalar_t* first, int count, scalar_t value, int lane) {
  constexpr int kSize = Granules<scalar_t>::kSize;
  const auto phase =
      static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t));
  const Granules<scalar_t> granules = {phase, count};
  scalar_t* const base = first - phase;
  Vector<scalar_t> vector;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    vector.set(i, value);
  }
#pragma unroll 1
  for (int g = granules.whole_begin() + lane; g < granules.whole_end(); g += kWarpSize) {
    store_vector(base, g, vector);
  }
  const int edge = granules.edge(lane);
  if (edge >= 0) {
    base[edge] = value;
  }
}

// A warp's buffer for pieces, and the piece that is in it or on its way. kInLines: the buffer has
// room for a piece to begin as far from a boundary of kLineBytes as it does in global memory.
template <typename scalar_t, RowKind kKind, bool kInLines>
struct PieceStage {
  static constexpr bool kProbability = kKind == RowKind::kProbability;
  scalar_t* elements;       // shared memory
  scalar_t* probabilities;  // likewise
  CopyBarrier& arrived;
  int lane;
  uint32_t parity = 0;
  Granules<scalar_t> granules = {0, 0};
  int edge = -1;
  scalar_t x_at_edge = {};
  scalar_t p_at_edge = {};

  __device__ __forceinline__ PieceStage(char* buffer, int buffer_bytes, CopyBarrier& arrived_,
                                        int lane_)
      : elements(reinterpret_cast<scalar_t*>(buffer)),
        probabilities(reinterpret_cast<scalar_t*>(buffer + buffer_bytes / 2)),
        arrived(arrived_),
        lane(lane_) {}

  // Moves to where `global` is in its line.
  static __device__ __forceinline__ void place_as(scalar_t*& shared, const scalar_t* global) {
    if constexpr (kInLines) {
      const auto to = static_cast<int>(reinterpret_cast<uintptr_t>(global) % kLineBytes);
      const auto from = static_cast<int>(shared_address(shared) % kLineBytes);
      shared += (to - from) / static_cast<int>(sizeof(scalar_t));
    }
  }

  // The warp must be done with the piece before.
  __device__ __forceinline__ void start(const CrossEntropyArgs& args, const StagedRow<kKind>& row,
                                        int begin, int size) {
    const scalar_t* const first = static_cast<const scalar_t*>(row.logits) + begin;
    granules.phase =
        static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t));
    granules.count = min(size, static_cast<int>(args.num_classes) - begin);
    const scalar_t* const base = first - granules.phase;
    place_as(elements, base);
    edge = granules.edge(lane);
    if (edge >= 0) {
      x_at_edge = base[edge];
    }
    const int skipped = granules.whole_begin() * Granules<scalar_t>::kSize;
    const auto bytes =
        static_cast<uint32_t>(max(granules.whole_end() - granules.whole_begin(), 0) * kVectorBytes);
    const scalar_t* other = nullptr;  // probabilities that lie as the logits do
    if constexpr (kProbability) {
      other = start_probabilities(args, row, begin);
    }
    if (lane == 0) {
      arrived.expect(kProbability && other != nullptr ? 2 * bytes : bytes);
      arrived.copy(elements + skipped, base + skipped, bytes);
      if (kProbability && other != nullptr) {
        arrived.copy(probabilities + skipped, other + skipped, bytes);
      }
    }
  }

  __device__ __forceinline__ Vector<scalar_t> load(int g) const { return load_vector(elements, g); }

  // The state of the piece. whole: rows are whole granules.
  __device__ __forceinline__ PieceState reduce(bool whole, const Smoothing& smoothing) {
    arrived.wait(parity);
    parity ^= 1;
    const int beside = granules.beside(lane);
    if (beside >= 0) {
      elements[beside] = edge >= 0 ? x_at_edge : from_acc<scalar_t>(-math::infinity<float>());
      if constexpr (kProbability) {
        probabilities[beside] = p_at_edge;
      }
    }
    __syncwarp();
    uint32_t maxima = lowest_word<scalar_t>();
    granules.for_each(
        0, granules.end(), lane, [&](int g) { return load(g); },
        [&](int, const Vector<scalar_t>& x) { maxima = max_of_vector(x, maxima); });
    const float max = max_of_elements<scalar_t>(maxima);
    const float piece_max = warp_max(max);
    const StagedElements row = {reinterpret_cast<const uint32_t*>(elements),
                                reinterpret_cast<const uint32_t*>(probabilities), granules.phase,
                                granules.count, smoothing};
    // Elsewhere a lane adds up elements that another lane compared.
    const bool adds_own = whole && granules.phase == 0;
    return reduce_below<scalar_t, kKind>(
        piece_max, adds_own ? max : piece_max,
        [&](TermSum& sum, const auto& terms) {
          if constexpr (kIsPhased<scalar_t, kKind>) {
            add_phased(sum, terms, PieceMaximum<scalar_t>(piece_max, max));
          } else {
            add_terms<scalar_t, kKind>(sum, terms, row, whole, lane);
          }
        },
        kKind == RowKind::kSmooth ? smoothing.per_class : 0.0f);
  }

  // Where `x` is among the piece's elements in this lane's granules, counted from the first
  // granule. -1: nowhere.
  __device__ __forceinline__ int find(float x) const {
    constexpr int kSize = Granules<scalar_t>::kSize;
    int found = -1;
    granules.for_each(
        0, granules.end(), lane, [&](int g) { return load(g); },
        [&](int g, const Vector<scalar_t>& vector) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            found = to_acc<float>(vector.get(i)) == x ? g * kSize + i : found;
          }
        });
    // Elements beside the piece are -inf, and so is `x` where all logits are.
    return found >= granules.phase && found < granules.phase + granules.count ? found : -1;
  }

  template <typename Terms>
  __device__ __forceinline__ void add_phased(TermSum& sum, const Terms& terms,
                                             const PieceMaximum<scalar_t>& maximum) const {
    PhasedSum<scalar_t> phased;
    uint32_t ones = 0;
#pragma unroll 2
    for (int g = lane; g < granules.end(); g += kWarpSize) {
      Vector<scalar_t> x = load(g);
      if (maximum.is_in(max_of_vector(x, lowest_word<scalar_t>()))) {
        ones += maximum.take_from(x);
      }
      phased.add(terms, x);
    }
    sum.ones = sum_of_halves(ones);
    sum.below = phased.total(granules.phase, lane);
  }

  // Where the piece's probabilities lie as its logits do: their first granule, to be copied as it
  // is. Where they do not, copies them element by element, and says null.
  __device__ __forceinline__ const scalar_t* start_probabilities(const CrossEntropyArgs& args,
                                                                 const StagedRow<kKind>& row,
                                                                 int begin) {
    const int64_t stride = args.target_class_stride;
    const scalar_t* const first = static_cast<const scalar_t*>(row.probabilities) + begin * stride;
    if (edge >= 0) {
      p_at_edge = first[(edge - granules.phase) * stride];
    }
    const auto phase = reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t);
    if (stride == 1 && static_cast<int>(phase) == granules.phase) {
      const scalar_t* const base = first - granules.phase;
      place_as(probabilities, base);
      return base;
    }
    for (int e = lane; e < granules.count; e += kWarpSize) {
      probabilities[granules.phase + e] = first[e * stride];
    }
    __syncwarp();
    return nullptr;
  }

  // replace(x, p) turns logits, whose probabilities are p, into gradients. index: the class index,
  // counted from the piece's first class; of_index(x) is its gradient. largest: an element of this
  // lane as find() counts it, or -1; of_largest(x, p) is its gradient. gradient: that of the
  // piece's first class.
  template <typename Replace, typename OfIndex, typename OfLargest>
  __device__ __forceinline__ void write_gradient(scalar_t* gradient, int index, int largest,
                                                 Replace&& replace, OfIndex&& of_index,
                                                 OfLargest&& of_largest) {
    constexpr int kSize = kVectorSize<scalar_t>;
    gradient -= granules.phase;
    const auto write = [&](int g, const Vector<scalar_t>& x) {
      Vector<scalar_t> p;
      if constexpr (kProbability) {
        p = load_vector(probabilities, g);
      }
      float values[kSize];
      float probabilities_of[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[i] = to_acc<float>(x.get(i));
        probabilities_of[i] = kProbability ? to_acc<float>(p.get(i)) : 0.0f;
      }
      replace(values, probabilities_of);
      store_vector(gradient, g, pack<scalar_t>(values));
    };
    granules.for_each(
        granules.whole_begin(), granules.whole_end(), lane, [&](int g) { return load(g); }, write);
    if (edge >= 0) {
      float values[1] = {to_acc<float>(x_at_edge)};
      const float probabilities_of[1] = {to_acc<float>(p_at_edge)};
      replace(values, probabilities_of);
      gradient[edge] = from_acc<scalar_t>(values[0]);
    }
    // The class index once more, by the lane that wrote it.
    if (!kProbability && index >= 0 && index < granules.count) {
      const int at = index + granules.phase;
      if (at == edge || granules.has(at, lane)) {
        gradient[at] = from_acc<scalar_t>(of_index(to_acc<float>(elements[at])));
      }
    }
    __syncwarp();  // at an edge of the piece another lane has written what is written again
    if (largest >= 0) {
      const float p = kProbability ? to_acc<float>(probabilities[largest]) : 0.0f;
      gradient[largest] = from_acc<scalar_t>(of_largest(to_acc<float>(elements[largest]), p));
    }
    __syncwarp();
  }
};

}  // namespace
}  // namespace lossops::cuda
