// Cross entropy of rows that are read once: each is copied to shared memory, its loss computed
// there, and its gradient written from there.
//
// A row is cut into pieces, one for each warp of a block, or of a cluster of blocks where it is too
// long for one. Each warp loads, reduces and keeps its piece; the warps of a row meet once, to put
// its softmax together. While some warps of a multiprocessor compute, others load and store. What
// is needed of the rows beside their logits is fetched for a batch of them, and their losses are
// computed for a batch, a row a lane: by one lane a row, it took as long as the row's classes.

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/cluster.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/phased_pieces.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda {
namespace {

using namespace staged_rows;

// Granules that a thread has in flight between shared memory and its registers. Measured on an
// H200: to load the next ones before these are done takes registers, and loses 3 %.
constexpr int kGranuleUnroll = 4;
// Rows that a block prepares at a time, one a lane, and finishes at a time.
constexpr int kBatch = 16;

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

  // Of all that have an element of the piece.
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
  // The same of the piece.
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

template <typename scalar_t, RowKind kKind>
__device__ __forceinline__ StagedRow<kKind> find_row(const CrossEntropyForwardArgs& args,
                                                     int64_t row) {
  const auto offset_of = [&](const Operand& operand) {
    return row_offset(args.rows, operand, row);
  };
  StagedRow<kKind> result;
  result.logits = static_cast<const scalar_t*>(args.input.data) + offset_of(args.input);
  result.gradient = static_cast<scalar_t*>(args.grad_input.data) + offset_of(args.grad_input);
  const int64_t target = offset_of(args.target);
  if constexpr (kKind == RowKind::kProbability) {
    result.probabilities = static_cast<const scalar_t*>(args.target.data) + target;
  } else {
    result.index = checked_index(args, load_class_index(args.target, target));
    result.weight = row_weight(args, result.index);
  }
  return result;
}

// A warp's buffer for pieces, and the piece that is in it or on its way. kInLines: there is room
// for it to lie within lines as it does in global memory.
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
    // Elsewhere a lane adds up others than it compared.
    const bool adds_own = whole && granules.phase == 0;
    return reduce_below<scalar_t, kKind>(
        piece_max, adds_own ? max : piece_max, [&](TermSum& sum, const auto& terms) {
          if constexpr (kIsPhased<scalar_t, kKind>) {
            add_phased(sum, terms, PieceMaximum<scalar_t>(piece_max, max));
          } else {
            add_terms<scalar_t, kKind>(sum, terms, row, whole, lane);
          }
        });
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

  // replace(x, p) puts gradients in the place of logits, whose probabilities are p; of_index(x) is
  // that of the class index, which is counted from the piece's first class. gradient: that of the
  // first class.
  template <typename Replace, typename OfIndex>
  __device__ __forceinline__ void write_gradient(scalar_t* gradient, int index, Replace&& replace,
                                                 OfIndex&& of_index) {
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
    __syncwarp();
  }
};

// What the warps of a block have in common.
template <RowKind kKind>
struct StagedBlock {
  StagedRow<kKind> rows[2][kBatch];
  KeptState states[2][kBatch];  // of rows whose pieces are put together
  float q_sums[2][kKind == RowKind::kProbability ? kBatch : 1];  // likewise
  double sums[2][kBatch];                                        // of losses and weights
  CopyBarrier arrived[kMaxBlockWarps];
  CopyBarrier met[2];  // in a cluster: the states of the pieces of every other row
  // Rows of the block, kept here for want of registers.
  int64_t first;
  int64_t stride;
};

// Rows of a block: prepared and finished in batches, a row a lane.
template <typename scalar_t, RowKind kKind>
struct RowBatches {
  const CrossEntropyForwardArgs& args;
  StagedBlock<kKind>& block;  // shared memory
  int count;
  int lane;

  __device__ __forceinline__ const StagedRow<kKind>& row(int n) const {
    return block.rows[n / kBatch % 2][n % kBatch];
  }
  __device__ __forceinline__ int64_t number(int n) const { return block.first + n * block.stride; }

  // By the warp that prepares the first batch.
  __device__ __forceinline__ void set_rows(const RowShares& shares, int worker) {
    if (lane == 0) {
      block.first = shares.first(worker);
      block.stride = shares.stride(worker);
    }
    __syncwarp();
  }

  // By a warp, when batch - 2 is finished.
  __device__ __forceinline__ void prepare(int batch) {
    const int n = batch * kBatch + lane;
    if (lane < kBatch && n < count) {
      const StagedRow<kKind> row = find_row<scalar_t, kKind>(args, number(n));
      block.rows[batch % 2][lane] = row;
      if constexpr (kKind == RowKind::kIndex) {
        if (args.is_in_place()) {
          // Before it is overwritten, in the place of what these rows have no use for.
          block.states[batch % 2][lane].distance = x_at_index(row);
        }
      }
    }
  }

  __device__ __forceinline__ float x_at_index(const StagedRow<kKind>& row) const {
    return row.index >= 0 ? to_acc<float>(static_cast<const scalar_t*>(row.logits)[row.index])
                          : 0.0f;
  }

  __device__ __forceinline__ void clear_sums() {
    if (threadIdx.x < kBatch) {
      block.sums[0][threadIdx.x] = 0;
      block.sums[1][threadIdx.x] = 0;
    }
  }

  // By a warp with the state of a row in each of its lanes.
  __device__ __forceinline__ void keep(int n, const PieceState& state) {
    if (lane == 0) {
      KeptState kept = KeptState::of(state);
      KeptState& place = block.states[n / kBatch % 2][n % kBatch];
      if constexpr (kKind == RowKind::kIndex) {
        kept.distance = place.distance;
      }
      place = kept;
      if constexpr (kKind == RowKind::kProbability) {
        block.q_sums[n / kBatch % 2][n % kBatch] = state.q_sum;
      }
    }
  }

  // By a warp, when all states of the batch are kept.
  __device__ __forceinline__ void finish(int batch) {
    const int n = batch * kBatch + lane;
    if (lane < kBatch && n < count) {
      const StagedRow<kKind>& row = this->row(n);
      float x_at_index = 0;
      if constexpr (kKind == RowKind::kIndex) {
        x_at_index =
            args.is_in_place() ? block.states[batch % 2][lane].distance : this->x_at_index(row);
      } else if constexpr (kKind == RowKind::kSmooth) {
        x_at_index = this->x_at_index(row);
      }
      Partial partial;
      finish_kept_row<kKind>(
          args, row.index, row.weight, block.states[batch % 2][lane],
          kKind == RowKind::kProbability ? block.q_sums[batch % 2][lane] : 0.0f, x_at_index,
          number(n),
          args.reduction == Reduction::kNone ? row_offset(args.rows, args.output, number(n)) : 0,
          partial);
      block.sums[0][lane] += partial.sum;
      block.sums[1][lane] += partial.weight;
    }
  }

  // This thread's share of the block's, after a barrier.
  __device__ __forceinline__ Partial sums() const {
    Partial partial;
    if (threadIdx.x < kBatch) {
      partial.sum = block.sums[0][threadIdx.x];
      partial.weight = block.sums[1][threadIdx.x];
    }
    return partial;
  }
};

// One row after the other, its pieces spread over the block's warps. The warps meet once in `group`
// rows, a power of two.
template <typename scalar_t, RowKind kKind>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_forward_staged_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                        Pieces pieces, RowShares shares, int buffer_bytes,
                                        int group, Denominator /*denominator*/, Partial* partials,
                                        Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  extern __shared__ __align__(kLineBytes) uint4 dynamic[];
  __shared__ StagedBlock<kKind> block;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  auto* const buffer = reinterpret_cast<char*>(dynamic) + warp * buffer_bytes;
  const Smoothing smoothing = smoothing_of(args);
  // [kStateGroups * group][kStateWords<kKind>][pieces.count]
  auto* const states =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(dynamic) + warps * buffer_bytes);
  const auto states_of = [&](int n) {
    return states + (n & (kStateGroups * group - 1)) * kStateWords<kKind> * pieces.count;
  };
  const int num_classes = static_cast<int>(args.num_classes);
  const bool whole = num_classes % kVectorSize<scalar_t> == 0;
  RowBatches<scalar_t, kKind> batches{args, block, shares.count(blockIdx.x, args.rows.numel), lane};
  PieceStage<scalar_t, kKind, false> stage(buffer, buffer_bytes, block.arrived[warp], lane);
  if (lane == 0) {
    stage.arrived.init();
  }
  if (warp == 0) {
    batches.set_rows(shares, static_cast<int>(blockIdx.x));
    batches.prepare(0);
  }
  batches.clear_sums();
  let_next_kernel_start();
  __syncthreads();
  const auto start = [&](int n, int piece) {
    if (n < batches.count && batches.row(n).index >= 0) {
      stage.start(args, batches.row(n), piece * pieces.size, pieces.size);
    }
  };
  int combined = 0;  // rows
  int finished = 0;  // batches
  int turn = 0;      // the warp for the next row to combine
  // Puts together the rows before `end`, each by a warp.
  const auto combine = [&](int end) {
    if (pieces.count == 1) {
      return;
    }
    for (; combined < end; ++combined) {
      if (turn == warp) {
        PieceState state;
        if (batches.row(combined).index >= 0) {
          state = combine_pieces<kKind>(states_of(combined), pieces, num_classes, lane);
        }
        batches.keep(combined, state);
      }
      turn = turn + 1 == warps ? 0 : turn + 1;
    }
  };
  start(0, warp);
  for (int n = 0; n < batches.count; ++n) {
    if ((n & (group - 1)) == group / 2) {
      __syncthreads();
      combine(n & -group);
      // The batch before was combined by the meeting before. All warps are past it.
      if (n % kBatch == group + group / 2) {
        const int batch = n / kBatch;
        if (turn == warp) {
          if (batch > 0) {
            batches.finish(batch - 1);
            __syncwarp();
          }
          batches.prepare(batch + 1);
        }
        finished = batch;
      }
    }
    PieceState current;
    for (int piece = warp; piece < pieces.count; piece += warps) {
      if (batches.row(n).index >= 0) {
        current = stage.reduce(whole, smoothing);
        __syncwarp();
        if (pieces.count > 1 && lane == 0) {  // fault: staged-last-piece
          current.template publish<kKind>(states_of(n) + piece, pieces.count);
        }
      }
      if (piece + warps < pieces.count) {
        start(n, piece + warps);
      } else {
        start(n + 1, warp);
      }
    }
    if (pieces.count == 1) {
      batches.keep(n, current);
    }
  }
  __syncthreads();
  combine(batches.count);
  __syncthreads();
  if (warp == 0) {
    for (int batch = finished; batch * kBatch < batches.count; ++batch) {
      batches.finish(batch);
    }
  }
  __syncthreads();
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(batches.sums(), partials, finalize);
  }
#endif
}

// One row after the other, a piece a warp: of the block's warps, or of a cluster's. Each warp keeps
// its piece until its gradient is written, and loads its piece of the next row meanwhile.
template <typename scalar_t, RowKind kKind, bool kCluster>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_gradient_staged_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                         Pieces pieces, RowShares shares, int buffer_bytes,
                                         int cluster, Denominator denominator, Partial* partials,
                                         Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  extern __shared__ __align__(kLineBytes) uint4 dynamic[];
  __shared__ StagedBlock<kKind> block;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  if constexpr (!kCluster) {
    cluster = 1;
  }
  const int rank = kCluster ? cluster_rank() : 0;
  const int piece = rank * warps + warp;
  const int begin = piece * pieces.size;
  const int num_classes = static_cast<int>(args.num_classes);
  const bool whole = num_classes % kVectorSize<scalar_t> == 0;
  auto* const buffer = reinterpret_cast<char*>(dynamic) + warp * buffer_bytes;
  const Smoothing smoothing = smoothing_of(args);
  // [2][kStateWords<kKind>][pieces.count]
  auto* const states =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(dynamic) + warps * buffer_bytes);
  const int worker = static_cast<int>(blockIdx.x) / cluster;
  RowBatches<scalar_t, kKind> batches{args, block, shares.count(worker, args.rows.numel), lane};
  PieceStage<scalar_t, kKind, true> stage(buffer, buffer_bytes, block.arrived[warp], lane);
  if (lane == 0) {
    stage.arrived.init();
  }
  const auto expect_states = [&](CopyBarrier& met) {
    met.expect(kStateWords<kKind> * sizeof(uint32_t) * pieces.count);
  };
  if (kCluster && threadIdx.x == 0) {
    for (CopyBarrier& met : block.met) {
      met.init();
      expect_states(met);
    }
  }
  if (warp == warps - 1) {
    batches.set_rows(shares, worker);
    batches.prepare(0);
  }
  batches.clear_sums();
  let_next_kernel_start();
  // In a loop: else the compiler spills 12 bytes in clusters, and a step of bf16 8192x151937 takes
  // 4 % longer.
  using Scale = std::conditional_t<kKind == RowKind::kProbability, UnitScaleOfRows<float>,
                                   UnitScale<float, true>>;
  Scale unit(args, denominator);
  __syncthreads();
  const auto start = [&](int n) {
    if (n < batches.count && batches.row(n).index >= 0) {
      stage.start(args, batches.row(n), begin, pieces.size);
    }
  };
  start(0);
  unit.wait(args, denominator);
  const float scale = unit.get();
  const SmoothedIndex q(args);
  if constexpr (kCluster) {
    cluster_sync();  // all blocks run before one stores to another
  }
  int kept = 0;  // rows with a loss
  for (int n = 0; n < batches.count; ++n) {
    // A batch is prepared by one warp and finished by another, and rows without a loss are no
    // meeting in a cluster: before the row whose end reads of the next batch, and after it.
    if (kCluster && (n + 1) % kBatch <= 1) {
      __syncthreads();
    }
    const StagedRow<kKind>& row = batches.row(n);
    // All warps are past the batch before, and its last rows are finished.
    if (n % kBatch == 1 && warp == warps - 1) {
      batches.prepare(n / kBatch + 1);
    }
    PieceState state;
    if (row.index >= 0) {
      state = stage.reduce(whole, smoothing);
      if (kCluster || warps > 1) {
        uint32_t* const row_states = states + kept % 2 * kStateWords<kKind> * pieces.count;
        if constexpr (kCluster) {
          // To each block by a lane. No block gets two rows ahead of another.
          CopyBarrier& met = block.met[kept % 2];
          if (lane < cluster) {
            state.template send<kKind>(row_states + piece, pieces.count, &met, lane);
          }
          met.template wait<true>(kept / 2 % 2);
          if (threadIdx.x == 0) {
            expect_states(met);
          }
        } else {
          if (lane == 0) {
            state.template publish<kKind>(row_states + piece, pieces.count);
          }
          __syncthreads();
        }
        state = combine_pieces<kKind>(row_states, pieces, num_classes, lane);
        ++kept;
      } else {
        __syncwarp();
      }
    } else if constexpr (!kCluster) {
      __syncthreads();
    }
    auto* const gradient = static_cast<scalar_t*>(row.gradient) + begin;
    if (row.index >= 0) {
      const float q_sum = kKind == RowKind::kIndex    ? row.weight
                          : kKind == RowKind::kSmooth ? SmoothedIndex::kSum
                                                      : state.q_sum;
      const auto softmax = RowSoftmax<float>::of(state.max, state.rest(), scale, q_sum);
      const LogitGradient<float, kExactExponentials<scalar_t>> of_logit(softmax, scale * q_sum);
      const auto of_index = [&](float x) {
        return kKind == RowKind::kIndex ? softmax.gradient_at_index(x)
                                        : of_logit.dense(x, scale, q_sum, q.at_index);
      };
      const auto write = [&](auto may_outweigh) {
        stage.write_gradient(
            gradient, row.index - begin,
            [&](auto& x, const auto& p) {
              if constexpr (kKind == RowKind::kIndex) {
                of_logit.replace(x);
              } else {
#pragma unroll
                for (int i = 0; i < static_cast<int>(sizeof(x) / sizeof(float)); ++i) {
                  x[i] = of_logit.template dense<decltype(may_outweigh)::value>(
                      x[i], scale, q_sum, kKind == RowKind::kSmooth ? q.other : smoothing(p[i]));
                }
              }
            },
            of_index);
      };
      if (kKind != RowKind::kIndex && softmax.one_may_outweigh()) {
        write(std::true_type{});
      } else {
        write(std::false_type{});
      }
    } else {
      const auto value = from_acc<scalar_t>(gradient_without_loss(row.index));
      const int count = min(pieces.size, num_classes - begin);
      for (int e = lane; e < count; e += kWarpSize) {
        gradient[e] = value;
      }
    }
    start(n + 1);
    if (warp == 0 && rank == 0) {
      batches.keep(n, state);
      if (n % kBatch == kBatch - 1 || n == batches.count - 1) {
        __syncwarp();
        batches.finish(n / kBatch);
        __syncwarp();
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(batches.sums(), partials, finalize);
  }
#endif
}

}  // namespace

void launch_staged_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput&, Partial* partials,
                        const Finalize& finalize, cudaStream_t stream) {
  const auto launch = [&](auto kernel, int argument) {
    static_assert(kMaxSharedBytes > kMaxBlockShare + kMaxBlockWarps * 2 * kLineBytes);
    allow_shared_bytes(kernel, plan.shared_bytes, kStaticSharedBytes + kProbabilitySharedBytes,
                       kMaxSharedBytes);
    launch_kernel(
        "a kernel of staged rows", kernel,
        {plan.blocks, plan.threads, plan.shared_bytes, plan.cluster, denominator.is_left()}, stream,
        args, plan.pieces, plan.shares, plan.piece_bytes, argument, denominator, partials,
        finalize);
  };
  visit_float_or_half(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    visit_row_kind(args, [&](auto kind) {
      constexpr RowKind kKind = decltype(kind)::value;
      if (args.grad_input.data == nullptr) {
        launch(cross_entropy_forward_staged_kernel<scalar_t, kKind>, row_group(plan.pieces.count));
      } else if (plan.cluster > 1) {
        launch(cross_entropy_gradient_staged_kernel<scalar_t, kKind, true>, plan.cluster);
      } else {
        launch(cross_entropy_gradient_staged_kernel<scalar_t, kKind, false>, 1);
      }
    });
  });
}

}  // namespace lossops::cuda
