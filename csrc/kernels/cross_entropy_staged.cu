#include "kernels/cross_entropy_staged.cuh"

#include <algorithm>
#include <cstdint>

#include "kernels/async_copy.cuh"
#include "kernels/block_reduce.cuh"
#include "kernels/check.cuh"
#include "kernels/cluster.cuh"
#include "kernels/device.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/row_words.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxBlockWarps = kMaxThreads / kWarpSize;
constexpr int kMaxCluster = 8;
constexpr int kMaxPieces = 64;
// Shorter rows are for tiles.
constexpr int kMinRowBytes = 2001;
// Of a warp's piece of a row. Measured on an H200, step: 4 KB lose 2 % for 50257 classes of bf16
// and nothing for 32768; 10 KB lose 1 to 4 %.
constexpr int kPieceBytes = 8 << 10;
// Longer rows are for a cluster: of 64 KB a block's step reaches 0.83 of the floor, of 98 KB 0.82
// to 0.83 and two blocks' 0.84.
constexpr int kMaxBlockShare = 80 << 10;
// Of a row in a cluster, for each of its blocks: 64 KB of 256 reach 0.82, 43 KB 0.74.
constexpr int kMaxClusterShare = 72 << 10;
// Warps of a block that leaves no gradient.
constexpr int kMaxForwardWarps = 8;
// What a block has of shared memory beside its pieces and their states, at most.
constexpr int kStaticSharedBytes = 2048;
// Granules that a thread has in flight between shared memory and its registers. Measured on an
// H200: to load the next ones before these are done takes registers, and loses 3 %.
constexpr int kGranuleUnroll = 4;
// Rows that a block prepares at a time, one a lane, and finishes at a time.
constexpr int kBatch = 16;
// Rows without gradients whose pieces wait to be put together.
constexpr int kGroup = 8;
// Rows whose states are kept. The warps meet in the middle of each group, where one of them puts
// the group before together; the others go on to the middle of the next.
constexpr int kStateRows = 3 * kGroup;
// Of the state of a piece, or of a row.
constexpr int kStateWords = 4;

// What a block needs to know of a row.
struct alignas(16) StagedRow {
  const void* logits;
  void* gradient;
  int index;     // checked_index()
  float weight;  // row_weight()
};

// A warp's piece of a row in granules of 16 bytes: the granules in [whole_begin, whole_end) are the
// piece's alone. Elements count from the start of the first granule.
template <typename scalar_t>
struct Granules {
  static constexpr int kSize = kVectorSize<scalar_t>;
  int phase;  // elements of the first granule that are before the piece
  int count;  // elements of the piece

  __device__ __forceinline__ int whole_begin() const { return phase > 0 ? 1 : 0; }
  __device__ __forceinline__ int whole_end() const { return (phase + count) / kSize; }

  // For each of this lane's whole granules: body(g, load(g)), several loads at a time.
  template <typename Load, typename Body>
  __device__ __forceinline__ void for_each_whole(int lane, Load&& load, Body&& body) const {
    const int end = whole_end();
    int g = lane >= whole_begin() ? lane : lane + kWarpSize;
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

  // This lane's element of a granule that is not whole; -1: it has none.
  __device__ __forceinline__ int edge(int lane) const {
    const bool head = lane < kSize;
    const int e = head ? lane : whole_end() * kSize + lane - kSize;
    const bool is_edge =
        head ? whole_begin() > 0 && e >= phase : lane < 2 * kSize && whole_end() >= whole_begin();
    return is_edge && e < phase + count ? e : -1;
  }

  // Whether element e is in a whole granule of this lane.
  __device__ __forceinline__ bool has(int e, int lane) const {
    const int g = e / kSize;
    return g >= whole_begin() && g < whole_end() && g % kWarpSize == lane;
  }
};

// How a row is cut: the same with a gradient and without one, for the same bits.
struct Pieces {
  int count;
  int size;  // elements, a multiple of those of a granule
};

template <typename scalar_t>
__device__ __forceinline__ StagedRow find_row(const CrossEntropyForwardArgs& args, int64_t row) {
  StagedRow result;
  result.logits =
      static_cast<const scalar_t*>(args.input.data) + row_offset(args.rows, args.input, row);
  result.gradient =
      static_cast<scalar_t*>(args.grad_input.data) + row_offset(args.rows, args.grad_input, row);
  result.index =
      checked_index(args, load_class_index(args.target, row_offset(args.rows, args.target, row)));
  result.weight = row_weight(args, result.index);
  return result;
}

// What is known of a piece, or of a row.
struct StagedState : OnlineSoftmax<float> {
  float distance = 0;  // sum of max - x; label smoothing

  __device__ __forceinline__ void publish(uint32_t* words, int pieces) const {
    words[0] = __float_as_uint(max);
    words[pieces] = __float_as_uint(ones);
    words[2 * pieces] = __float_as_uint(below);
    words[3 * pieces] = __float_as_uint(distance);
  }
};

// A warp's buffer for pieces, and the piece that is in it or on its way.
template <typename scalar_t>
struct PieceStage {
  scalar_t* elements;  // shared memory
  CopyBarrier& arrived;
  int lane;
  uint32_t parity = 0;
  Granules<scalar_t> granules = {0, 0};
  int edge = -1;
  scalar_t x_at_edge = {};

  __device__ __forceinline__ PieceStage(scalar_t* elements_, CopyBarrier& arrived_, int lane_)
      : elements(elements_), arrived(arrived_), lane(lane_) {}

  // The warp must be done with the piece before.
  __device__ __forceinline__ void start(const scalar_t* row, int num_classes, int begin, int size) {
    const scalar_t* const first = row + begin;
    granules.phase =
        static_cast<int>(reinterpret_cast<uintptr_t>(first) % kVectorBytes / sizeof(scalar_t));
    granules.count = min(size, num_classes - begin);
    const scalar_t* const base = first - granules.phase;
    edge = granules.edge(lane);
    if (edge >= 0) {
      x_at_edge = base[edge];
    }
    if (lane == 0) {
      const int skipped = granules.whole_begin() * Granules<scalar_t>::kSize;
      const int whole = max(granules.whole_end() - granules.whole_begin(), 0);
      arrived.expect(static_cast<uint32_t>(whole) * kVectorBytes);
      arrived.copy(elements + skipped, base + skipped, static_cast<uint32_t>(whole) * kVectorBytes);
    }
  }

  __device__ __forceinline__ Vector<scalar_t> load(int g) const { return load_vector(elements, g); }

  // The state of the piece.
  template <bool kSmooth>
  __device__ __forceinline__ StagedState reduce() {
    arrived.wait(parity);
    parity ^= 1;
    uint32_t maxima = lowest_word<scalar_t>();
    granules.for_each_whole(
        lane, [&](int g) { return load(g); },
        [&](int, const Vector<scalar_t>& x) { maxima = max_of_vector(x, maxima); });
    StagedState state;
    state.max = max_of_elements<scalar_t>(maxima);
    if (edge >= 0) {
      elements[edge] = x_at_edge;
      state.max = math::max_number(to_acc<float>(x_at_edge), state.max);
    }
    __syncwarp();
    state.max = warp_max(state.max);
    const RowTerms<kExactExponentials<scalar_t>> terms(state.max);
    TermSum sum;
    add_terms<scalar_t, kSmooth>(sum, terms, reinterpret_cast<const uint32_t*>(elements),
                                 granules.phase, granules.count, lane);
    state.below = warp_sum(sum.below) * terms.correction();
    state.ones = static_cast<float>(warp_sum(sum.ones));
    if constexpr (kSmooth) {
      state.distance = warp_sum(sum.distance);
    }
    return state;
  }
};

// The states of a row's pieces, put together by a warp: in every lane.
template <bool kSmooth>
__device__ __forceinline__ StagedState combine_pieces(const uint32_t* states, const Pieces& cut,
                                                      int num_classes, int lane) {
  const int pieces = cut.count;
  float max = -math::infinity<float>();
  for (int i = lane; i < pieces; i += kWarpSize) {
    max = math::max_number(__uint_as_float(states[i]), max);
  }
  StagedState total;
  total.max = warp_max(max);
  const float shift = softmax_shift(total.max);
  for (int i = lane; i < pieces; i += kWarpSize) {
    const float piece_max = __uint_as_float(states[i]);
    const float ones = __uint_as_float(states[pieces + i]);
    const float below = __uint_as_float(states[2 * pieces + i]);
    if (piece_max == total.max) {
      total.ones += ones;
      total.below += below;
    } else {
      total.below += (ones + below) * math::exp(piece_max - shift);
    }
  }
  total.ones = warp_sum(total.ones);
  total.below = warp_sum(total.below);
  if constexpr (kSmooth) {
    for (int i = lane; i < pieces; i += kWarpSize) {
      // From the maximum of the piece to that of the row.
      const int count = min(cut.size, num_classes - i * cut.size);
      const float moved = shift - softmax_shift(__uint_as_float(states[i]));
      total.distance += __uint_as_float(states[3 * pieces + i]) + static_cast<float>(count) * moved;
    }
    total.distance = warp_sum(total.distance);
  }
  return total;
}

// Rows of a block: prepared and finished in batches, a row a lane.
template <typename scalar_t>
struct RowBatches {
  const CrossEntropyForwardArgs& args;
  StagedRow (&rows)[2][kBatch];  // shared memory
  int64_t first;
  int64_t stride;
  int count;
  int lane;

  __device__ __forceinline__ const StagedRow& row(int n) const {
    return rows[n / kBatch % 2][n % kBatch];
  }

  // By a warp, when all others are done with batch - 2.
  __device__ __forceinline__ void prepare(int batch) {
    const int n = batch * kBatch + lane;
    if (lane < kBatch && n < count) {
      rows[batch % 2][lane] = find_row<scalar_t>(args, first + n * stride);
    }
  }

  // By a warp whose lanes have the softmax of a row each.
  template <bool kSmooth>
  __device__ __forceinline__ void finish(int batch, const StagedState& state, Partial& partial) {
    const int n = batch * kBatch + lane;
    if (lane >= kBatch || n >= count) {
      return;
    }
    const StagedRow& row = rows[batch % 2][lane];
    const int64_t number = first + n * stride;
    float x_at_index = 0;
    if (row.index >= 0) {
      x_at_index = to_acc<float>(static_cast<const scalar_t*>(row.logits)[row.index]);
    }
    finish_indexed_row<kSmooth>(
        args, row.index, row.weight, state, state.distance, x_at_index, number,
        args.reduction == Reduction::kNone ? row_offset(args.rows, args.output, number) : 0,
        partial);
  }
};

// One row after the other, its pieces spread over the block's warps. The warps meet once in kGroup
// rows.
template <typename scalar_t, bool kSmooth>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_forward_staged_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                        Pieces pieces, int buffer_bytes,
                                        Denominator /*denominator*/, Partial* partials,
                                        Finalize finalize) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic[];
  __shared__ StagedRow rows[2][kBatch];
  __shared__ CopyBarrier arrived[kMaxBlockWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  auto* const buffer =
      reinterpret_cast<scalar_t*>(reinterpret_cast<char*>(dynamic) + warp * buffer_bytes);
  // [kStateRows][kStateWords][pieces.count]
  auto* const states =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(dynamic) + warps * buffer_bytes);
  const auto states_of = [&](int n) {
    return states + n % kStateRows * kStateWords * pieces.count;
  };
  const int num_classes = static_cast<int>(args.num_classes);
  RowBatches<scalar_t> batches{args, rows, blockIdx.x, gridDim.x, 0, lane};
  batches.count = static_cast<int>((args.rows.numel - blockIdx.x + gridDim.x - 1) / gridDim.x);
  PieceStage<scalar_t> stage(buffer, arrived[warp], lane);
  if (lane == 0) {
    stage.arrived.init();
  }
  if (warp == 0) {
    batches.prepare(0);
  }
  __syncthreads();
  const auto start = [&](int n, int piece) {
    if (n < batches.count && batches.row(n).index >= 0) {
      stage.start(static_cast<const scalar_t*>(batches.row(n).logits), num_classes,
                  piece * pieces.size, pieces.size);
    }
  };
  StagedState finished;
  Partial partial;
  // Puts the rows [n - kGroup, n) together.
  const auto finish_group = [&](int n) {
    for (int m = max(0, (n - 1) / kGroup * kGroup); m < n; ++m) {
      StagedState state;
      if (batches.row(m).index >= 0) {
        state = combine_pieces<kSmooth>(states_of(m), pieces, num_classes, lane);
      }
      if (lane == m % kBatch) {
        finished = state;
      }
      if (m % kBatch == kBatch - 1 || m == batches.count - 1) {
        batches.template finish<kSmooth>(m / kBatch, finished, partial);
      }
    }
  };
  start(0, warp);
  for (int n = 0; n < batches.count; ++n) {
    if (n % kGroup == kGroup / 2) {
      __syncthreads();
      if (warp == 0) {
        if (n >= kGroup && pieces.count > 1) {
          finish_group(n / kGroup * kGroup);
        }
        // Read half a batch and another meeting later.
        if (n % kBatch == kGroup / 2) {
          __syncwarp();
          batches.prepare(n / kBatch + 1);
        }
      }
    }
    StagedState current;
    for (int piece = warp; piece < pieces.count; piece += warps) {
      if (batches.row(n).index >= 0) {
        const StagedState state = stage.template reduce<kSmooth>();
        __syncwarp();
        if (pieces.count == 1) {
          current = state;
        } else if (lane == 0) {
          state.publish(states_of(n) + piece, pieces.count);
        }
      }
      if (piece + warps < pieces.count) {
        start(n, piece + warps);
      } else {
        start(n + 1, warp);
      }
    }
    if (pieces.count == 1) {
      if (lane == n % kBatch) {
        finished = current;
      }
      if (n % kBatch == kBatch - 1 || n == batches.count - 1) {
        batches.template finish<kSmooth>(n / kBatch, finished, partial);
      }
    }
  }
  __syncthreads();
  if (warp == 0 && pieces.count > 1) {
    const int last = (batches.count - 1) / kGroup * kGroup;
    // The group before was put together in the middle of the last one, if it got so far.
    if (last > 0 && batches.count - last <= kGroup / 2) {
      finish_group(last);
    }
    finish_group(batches.count);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
#endif
}

// One row after the other, a piece a warp: of the block's warps, or of a cluster's. Each warp keeps
// its piece until its gradient is written, and loads its piece of the next row meanwhile.
template <typename scalar_t, bool kSmooth, bool kCluster>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_gradient_staged_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                         Pieces pieces, int cluster, int buffer_bytes,
                                         Denominator denominator, Partial* partials,
                                         Finalize finalize) {
#if __CUDA_ARCH__ >= 900
  constexpr int kSize = kVectorSize<scalar_t>;
  extern __shared__ uint4 dynamic[];
  __shared__ StagedRow rows[2][kBatch];
  __shared__ CopyBarrier arrived[kMaxBlockWarps];
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
  auto* const buffer =
      reinterpret_cast<scalar_t*>(reinterpret_cast<char*>(dynamic) + warp * buffer_bytes);
  // [2][kStateWords][pieces.count]
  auto* const states =
      reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(dynamic) + warps * buffer_bytes);
  RowBatches<scalar_t> batches{args, rows, blockIdx.x / cluster, gridDim.x / cluster, 0, lane};
  batches.count =
      static_cast<int>((args.rows.numel - batches.first + batches.stride - 1) / batches.stride);
  PieceStage<scalar_t> stage(buffer, arrived[warp], lane);
  if (lane == 0) {
    stage.arrived.init();
  }
  if (warp == warps - 1) {
    batches.prepare(0);
  }
  const float scale = unit_scale<float>(args, denominator);
  const SmoothedIndex q(args);
  __syncthreads();
  const auto start = [&](int n) {
    if (n < batches.count && batches.row(n).index >= 0) {
      stage.start(static_cast<const scalar_t*>(batches.row(n).logits), num_classes, begin,
                  pieces.size);
    }
  };
  if constexpr (kCluster) {
    cluster_sync();  // all blocks run before one stores to another
  }
  StagedState finished;
  Partial partial;
  start(0);
  for (int n = 0; n < batches.count; ++n) {
    const StagedRow row = batches.row(n);
    // All warps are past the batch before, and its last rows are finished.
    if (n % kBatch == 1 && warp == warps - 1) {
      batches.prepare(n / kBatch + 1);
    }
    StagedState state;
    if (row.index >= 0) {
      state = stage.template reduce<kSmooth>();
      if (kCluster || warps > 1) {
        uint32_t* const row_states = states + n % 2 * kStateWords * pieces.count;
        if constexpr (kCluster) {
          // To each block by a lane.
          if (lane < cluster) {
            state.publish(at_rank(row_states, lane) + piece, pieces.count);
          }
          cluster_sync();
        } else {
          if (lane == 0) {
            state.publish(row_states + piece, pieces.count);
          }
          __syncthreads();
        }
        state = combine_pieces<kSmooth>(row_states, pieces, num_classes, lane);
      } else {
        __syncwarp();
      }
    } else if constexpr (kCluster) {
      cluster_sync();  // as other rows do: no block gets two rows ahead of another
    } else {
      __syncthreads();
    }
    if (lane == n % kBatch) {
      finished = state;
    }
    auto* const gradient = static_cast<scalar_t*>(row.gradient) + begin - stage.granules.phase;
    if (row.index >= 0) {
      const float q_sum = kSmooth ? SmoothedIndex::kSum : row.weight;
      const auto softmax = RowSoftmax<float>::of(state.max, state.rest(), scale, q_sum);
      const LogitGradient<float, kExactExponentials<scalar_t>> of_logit(softmax);
      const auto gradient_of = [&](float x) {
        return kSmooth ? of_logit.dense(x, scale, q_sum, q.other) : of_logit(x);
      };
      stage.granules.for_each_whole(
          lane, [&](int g) { return stage.load(g); },
          [&](int g, const Vector<scalar_t>& x) {
            float values[kSize];
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              values[i] = gradient_of(to_acc<float>(x.get(i)));
            }
            store_vector(gradient, g, pack<scalar_t>(values));
          });
      if (stage.edge >= 0) {
        gradient[stage.edge] = from_acc<scalar_t>(gradient_of(to_acc<float>(stage.x_at_edge)));
      }
      // The class index once more, by the lane that wrote it.
      if (row.index >= begin && row.index < begin + stage.granules.count) {
        const int at = row.index - begin + stage.granules.phase;
        if (at == stage.edge || stage.granules.has(at, lane)) {
          const float x = to_acc<float>(stage.elements[at]);
          gradient[at] = from_acc<scalar_t>(kSmooth ? of_logit.dense(x, scale, q_sum, q.at_index)
                                                    : softmax.gradient_at_index(x));
        }
      }
      __syncwarp();
    } else {
      const auto value = from_acc<scalar_t>(gradient_without_loss(row.index));
      scalar_t* const all = static_cast<scalar_t*>(row.gradient) + begin;
      const int count = min(pieces.size, num_classes - begin);
      for (int e = lane; e < count; e += kWarpSize) {
        all[e] = value;
      }
    }
    start(n + 1);
    if (warp == 0 && rank == 0 && (n % kBatch == kBatch - 1 || n == batches.count - 1)) {
      batches.template finish<kSmooth>(n / kBatch, finished, partial);
    }
  }
  if constexpr (kCluster) {
    cluster_sync();  // no block ends while another may store to it
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
#endif
}

// Clusters of blocks that fit the device at a time.
template <typename Kernel>
int64_t resident_clusters(Kernel* kernel, cudaLaunchConfig_t config, int cluster) {
  struct Answer {
    int device = -1;
    int cluster = 0;
    unsigned threads = 0;
    size_t shared_bytes = 0;
    int count = 0;
  };
  static thread_local Answer last;  // of this kernel: the question is slow, and mostly the same
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    return 1;
  }
  if (last.device != device || last.cluster != cluster || last.threads != config.blockDim.x ||
      last.shared_bytes != config.dynamicSmemBytes) {
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    int count = 0;
    if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) {
      cudaGetLastError();  // it is no error of the launch that follows
      count = 1;
    }
    last = {device, cluster, config.blockDim.x, config.dynamicSmemBytes, count};
  }
  return std::max(1, last.count);
}

}  // namespace

StagedPlan plan_staged_rows(const CrossEntropyForwardArgs& args) {
  StagedPlan plan;
  const int size = args.input.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t bytes = args.num_classes * size;
  const DeviceLimits limits = current_device_limits();
  const bool supported = !args.dense() || (!args.target_is_probability && args.weight == nullptr);
  if (!limits.hopper || !supported || args.acc_double || args.input_class_stride != 1 ||
      bytes < kMinRowBytes || bytes > int64_t{kMaxClusterShare} * kMaxCluster) {
    return plan;
  }
  const bool gradient = args.grad_input.data != nullptr;
  const auto per = [](int64_t a, int64_t b) { return static_cast<int>(ceil_div(a, b)); };
  plan.cluster = bytes <= kMaxBlockShare ? 1 : per(bytes, kMaxClusterShare);
  const int warps = std::min(per(bytes, int64_t{kPieceBytes} * plan.cluster),
                             plan.cluster > 1 ? kMaxPieces / plan.cluster : kMaxBlockWarps);
  plan.pieces = plan.cluster * warps;
  const int granules = per(bytes, int64_t{plan.pieces} * kVectorBytes);
  plan.piece_size = granules * kVectorBytes / size;
  plan.piece_bytes = (granules + 1) * kVectorBytes;
  const int states = plan.pieces > 1 ? kStateWords * plan.pieces * 4 : 0;
  if (gradient) {
    plan.threads = warps * kWarpSize;
    plan.shared_bytes = warps * plan.piece_bytes + 2 * states;
  } else {
    // As many for each warp, as far as it goes.
    const int turns = per(plan.pieces, kMaxForwardWarps);
    plan.cluster = 1;
    plan.threads = per(plan.pieces, turns) * kWarpSize;
    plan.shared_bytes = plan.threads / kWarpSize * plan.piece_bytes + kStateRows * states;
  }
  plan.resident = limits.multiprocessors *
                  limits.resident_blocks(plan.threads, plan.shared_bytes + kStaticSharedBytes) /
                  plan.cluster;
  plan.max_blocks = std::min(args.rows.numel, plan.resident) * plan.cluster;
  return plan;
}

int64_t launch_staged_rows(const CrossEntropyForwardArgs& args, const StagedPlan& plan,
                           const Denominator& denominator, Partial* partials,
                           const Finalize& finalize, cudaStream_t stream) {
  int64_t blocks = 0;
  const auto launch = [&](auto kernel, auto... arguments) {
    constexpr int kFreeSharedBytes = 48 << 10;
    if (plan.shared_bytes > kFreeSharedBytes) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    }
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.blockDim = dim3(static_cast<unsigned>(plan.threads));
    config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = plan.cluster > 1 ? 1 : 0;
    int64_t resident = plan.resident;
    if (plan.cluster > 1) {
      resident = std::min(resident, resident_clusters(kernel, config, plan.cluster));
    }
    blocks = even_workers(args.rows.numel, resident) * plan.cluster;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    cudaLaunchKernelEx(&config, kernel, args, Pieces{plan.pieces, plan.piece_size}, arguments...,
                       plan.piece_bytes, denominator, partials, finalize);
    check_launch("a kernel of staged rows");
  };
  visit_floating(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if constexpr (sizeof(scalar_t) <= 4) {
      const auto launch_kind = [&](auto smooth) {
        constexpr bool kSmooth = decltype(smooth)::value;
        if (args.grad_input.data == nullptr) {
          launch(cross_entropy_forward_staged_kernel<scalar_t, kSmooth>);
        } else if (plan.cluster > 1) {
          launch(cross_entropy_gradient_staged_kernel<scalar_t, kSmooth, true>, plan.cluster);
        } else {
          launch(cross_entropy_gradient_staged_kernel<scalar_t, kSmooth, false>, 1);
        }
      };
      args.dense() ? launch_kind(std::true_type{}) : launch_kind(std::false_type{});
    }
  });
  return blocks;
}

}  // namespace lossops::cuda
