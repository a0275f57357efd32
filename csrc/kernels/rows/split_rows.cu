// Cross entropy and its gradient, of rows of half types that are too long for registers.
//
// A row is cut as staged rows are, a piece a warp, and held half in registers and half in shared
// memory: two blocks of a multiprocessor hold 256 KB, where shared memory alone holds 192. A row
// then takes a block where staged rows take two, or a cluster of half the size.

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
#include "kernels/rows/split_rows_plan.h"

namespace lossops::cuda {
namespace split_rows {
namespace {

// A lane's share of a piece: the first vectors in registers, the others in shared memory.
template <typename scalar_t>
struct SplitShare {
  static constexpr int kSize = kVectorSize<scalar_t>;
  static constexpr int kStride = kWarpSize * kSize;  // elements, from one vector to the next
  int count;                                         // vectors
  const scalar_t* far;                               // vector kNear
  Vector<scalar_t> near[kNear];                      // -inf where there is none

  __device__ __forceinline__ SplitShare(int count_, const scalar_t* far_)
      : count(count_), far(far_) {
#pragma unroll
    for (Vector<scalar_t>& vector : near) {
      set_lowest(vector);
    }
  }

  // Vector u, if it is one of the first `wanted`.
  __device__ __forceinline__ void load(const scalar_t* row, int u, int wanted) {
    load_vector_if(u < wanted, near[u], row + u * kStride);
  }
  __device__ __forceinline__ void store(scalar_t* row, int u,
                                        const Vector<scalar_t>& vector) const {
    store_vector_if(u < count, row + u * kStride, vector);
  }

  __device__ __forceinline__ Vector<scalar_t> get_far(int u) const {
    return load_vector(far, (u - kNear) * kWarpSize);
  }
};

// The place of the lowest bit; -1: there is none.
[[maybe_unused]] __device__ __forceinline__ int lowest_bit(uint32_t bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}

// What the threads of a block know of its rows.
struct SplitRows {
  int64_t logits[kMaxRows];  // offsets
  int64_t gradients[kMaxRows];
  int index[kMaxRows];  // checked_index()
  int next[kMaxRows];   // that has a loss; -1: none
  float weight[kMaxRows];
  float x_at_index[kMaxRows];
  KeptState states[kMaxRows];
  float scale;
  CopyBarrier arrived[kMaxBlockWarps];
  CopyBarrier met[kMaxRows];  // the states of a row's pieces, in a cluster
};

// Each warp of a block, or of a cluster of blocks, has a piece of the row. As the gradient of a
// vector is stored, the next row's takes its place. Rows without a loss are written first, while
// the first of the others is on its way.
template <typename scalar_t>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks)
    cross_entropy_split_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                    Pieces pieces, RowShares shares, int cluster,
                                    Denominator denominator, Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr RowKind kKind = RowKind::kIndex;
  using Share = SplitShare<scalar_t>;
  constexpr int kSize = Share::kSize;
  constexpr int kNearSize = kNear * Share::kStride;
  extern __shared__ __align__(kLineBytes) uint4 dynamic[];
  __shared__ SplitRows rows;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const int warp = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int rank = cluster_rank();
  const int piece = rank * warps + warp;
  const int begin = piece * pieces.size;
  const int num_classes = static_cast<int>(args.num_classes);
  const int size = max(0, min(pieces.size, num_classes - begin));
  const int far_size = max(0, size - kNearSize);
  const int far_room = max(0, pieces.size - kNearSize);
  auto* const far = reinterpret_cast<scalar_t*>(dynamic) + warp * far_room;
  // [rows of the block][kStateWords<kKind>][pieces.count]
  auto* const states =
      reinterpret_cast<uint32_t*>(reinterpret_cast<scalar_t*>(dynamic) + warps * far_room);
  CopyBarrier& arrived = rows.arrived[warp];
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data);
  const int64_t worker = int64_t{blockIdx.x} / cluster;
  const int64_t first_row = shares.first(worker);
  const int count = shares.count(worker, args.rows.numel);
  const int64_t stride = shares.stride(worker);
  const int first = begin + lane * kSize;
  Share share(max(0, (size / kSize - lane + kWarpSize - 1) / kWarpSize), far + lane * kSize);
  // By one lane.
  const auto start_far = [&](const scalar_t* row) {
    const uint32_t bytes = far_size * sizeof(scalar_t);
    arrived.expect(bytes);
    arrived.copy(far, row + begin + kNearSize, bytes);
  };
  if (lane == 0) {
    arrived.init();
  }
  __syncwarp();
  // By each warp, to read nothing of a row that has no loss, and to wait for no other warp.
  int own_index = kIgnoredRow;
  int64_t offsets[3] = {};
  if (lane < count) {
    const Operand* const operands[] = {&args.target, &args.input, &args.grad_input};
    plain_row_offsets(args.rows, operands, first_row + lane * stride, offsets);
    own_index = checked_index(args, load_class_index(args.target, offsets[0]));
  }
  const uint32_t with_loss = __ballot_sync(kAllLanes, own_index >= 0);
  int n = lowest_bit(with_loss);
  if (n >= 0) {
    const scalar_t* const logits = input + __shfl_sync(kAllLanes, offsets[1], n);
    if (lane == 0) {
      start_far(logits);
    }
#pragma unroll
    for (int u = 0; u < kNear; ++u) {
      share.load(logits + first, u, share.count);
    }
  }
  let_next_kernel_start();
  UnitScale<float> unit(args, denominator);
  if (thread < kWarpSize) {
    if (thread < count) {
      rows.logits[thread] = offsets[1];
      rows.gradients[thread] = offsets[2];
      rows.index[thread] = own_index;
      rows.next[thread] = lowest_bit(with_loss & ~1u << thread);  // fault: split-rows-next
      rows.weight[thread] = row_weight(args, own_index);
      rows.x_at_index[thread] =
          own_index >= 0 ? to_acc<float>(input[offsets[1] + own_index]) : 0.0f;
      rows.states[thread] = KeptState::of({});
      rows.met[thread].init();
      rows.met[thread].expect(kStateWords<kKind> * sizeof(uint32_t) * pieces.count);
    }
    unit.wait(args, denominator);
    if (thread == 0) {
      rows.scale = unit.get();
    }
  }
  __syncwarp();
  if (cluster > 1) {
    cluster_sync();  // all blocks run before one stores to another
  } else {
    __syncthreads();
  }
  const float scale = rows.scale;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int index = rows.index[i];
    if (index >= 0) {
      continue;
    }
    const auto value = from_acc<scalar_t>(gradient_without_loss(index));
    Vector<scalar_t> vector;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      vector.set(k, value);
    }
    scalar_t* const gradient = grad_input + rows.gradients[i] + first;
#pragma unroll 1
    for (int u = 0; u < share.count; ++u) {
      store_vector(gradient + u * Share::kStride, 0, vector);
    }
  }
  uint32_t parity = 0;
#pragma unroll 1
  for (; n >= 0; n = rows.next[n]) {
    const bool loads = rows.next[n] >= 0;
    const scalar_t* const next = input + rows.logits[loads ? rows.next[n] : n];
    const int wanted = loads ? share.count : 0;
    scalar_t* const gradient = grad_input + rows.gradients[n] + first;
    arrived.wait(parity);
    parity ^= 1;
    uint32_t maxima = lowest_word<scalar_t>();
#pragma unroll
    for (int u = kNear; u < kVectors; ++u) {
      if (u < share.count) {
        maxima = max_of_vector(share.get_far(u), maxima);
      }
    }
#pragma unroll
    for (int u = 0; u < kNear; ++u) {
      maxima = max_of_vector(share.near[u], maxima);
    }
    const float max = max_of_elements<scalar_t>(maxima);
    const float piece_max = warp_max(max);
    const PieceMaximum<scalar_t> maximum(piece_max, max);
    const auto add_terms = [&](TermSum& sum, const auto& terms) {
      PhasedSum<scalar_t> phased;
      uint32_t ones = 0;
      const auto add = [&](Vector<scalar_t> vector) {
        if (maximum.is_in(max_of_vector(vector, lowest_word<scalar_t>()))) {
          ones += maximum.take_from(vector);
        }
        phased.add(terms, vector);
      };
#pragma unroll
      for (int u = 0; u < kNear; ++u) {
        add(share.near[u]);
      }
#pragma unroll 2
      for (int u = kNear; u < kVectors; ++u) {
        if (u < share.count) {
          add(share.get_far(u));
        }
      }
      sum.ones = sum_of_halves(ones);
      sum.below = phased.total(0, lane);
    };
    const PieceState own = reduce_below<scalar_t, kKind>(piece_max, max, add_terms);
    uint32_t* const row_states = states + n * kStateWords<kKind> * pieces.count;
    meet_with<kKind>(own, row_states, piece, pieces.count, cluster, rows.met[n], 0, lane);
    const PieceState state = combine_pieces<kKind>(row_states, pieces, num_classes, lane);
    const float weight = rows.weight[n];
    const auto softmax = RowSoftmax<float>::of(state.max, state.rest(), scale, weight);
    const LogitGradient<float, false> of_logit(softmax, scale * weight);
    const auto gradient_of = [&](const Vector<scalar_t>& vector) {
      float values[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[i] = to_acc<float>(vector.get(i));
      }
      of_logit.replace(values);
      return pack<scalar_t>(values);
    };
#pragma unroll
    for (int u = kNear; u < kVectors; ++u) {
      if (u < share.count) {
        store_vector(gradient + u * Share::kStride, 0, gradient_of(share.get_far(u)));
      }
    }
    __syncwarp();
    if (lane == 0 && loads) {
      start_far(next);
    }
#pragma unroll
    for (int u = 0; u < kNear; ++u) {
      share.store(gradient, u, gradient_of(share.near[u]));
      share.load(next + first, u, wanted);
    }
    const int index = rows.index[n];
    const int at = index - begin;
    if (at >= 0 && at < size && at / kSize % kWarpSize == lane) {
      // By the lane that wrote it before.
      grad_input[rows.gradients[n] + index] =
          from_acc<scalar_t>(softmax.gradient_at_index(rows.x_at_index[n]));
    }
    if (thread == 0) {
      rows.states[n] = KeptState::of(state);
    }
  }
  if (warp > 0) {
    return;
  }
  __syncwarp();
  Partial partial;
  if (rank == 0 && thread < count) {
    const int64_t row = first_row + thread * stride;
    finish_kept_row<kKind>(
        args, rows.index[thread], rows.weight[thread], rows.states[thread], 0.0f,
        rows.x_at_index[thread], row,
        args.reduction == Reduction::kNone ? row_offset(args.rows, args.output, row) : 0, partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace
}  // namespace split_rows

void launch_split_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput&, Partial* partials,
                       const Finalize& finalize, cudaStream_t stream) {
  using namespace split_rows;
  visit_half_type(args.input.dtype, [&](auto type) {
    const auto kernel = cross_entropy_split_rows_kernel<typename decltype(type)::type>;
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
    launch_kernel(
        "cross_entropy_split_rows_kernel", kernel,
        {plan.blocks, plan.threads, plan.shared_bytes, plan.cluster, denominator.is_left()}, stream,
        args, plan.pieces, plan.shares, plan.cluster, denominator, partials, finalize);
  });
}

}  // namespace lossops::cuda
