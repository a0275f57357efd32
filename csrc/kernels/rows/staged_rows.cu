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
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/staged_batches.cuh"
#include "kernels/rows/staged_pieces.cuh"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda {
namespace staged_rows {
namespace {

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
    reduce_to_grid<true>(batches.sums(), partials, finalize);
  }
#endif
}

// One row after the other, a piece a warp: of the block's warps, or of a cluster's. Each warp keeps
// its piece until its gradient is written, and loads its piece of the next row meanwhile.
template <typename scalar_t, RowKind kKind>
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
  const int rank = cluster_rank();
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
  if (cluster > 1 && threadIdx.x == 0) {
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
  // In a loop: else the compiler spilt 12 bytes of a kernel for clusters alone, and a step of bf16
  // 8192x151937 took 4 % longer.
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
  if (cluster > 1) {
    cluster_sync();  // all blocks run before one stores to another
  }
  int kept = 0;  // rows with a loss
  for (int n = 0; n < batches.count; ++n) {
    // One warp prepares a batch and another one finishes it, but the warps do not meet in rows
    // without a loss. So they meet before the row whose end reads of the next batch, and after it.
    if ((n + 1) % kBatch <= 1) {
      __syncthreads();
    }
    const StagedRow<kKind>& row = batches.row(n);
    // All warps are past the batch before, and its last rows are finished.
    if (n % kBatch == 1 && warp == warps - 1) {
      batches.prepare(n / kBatch + 1);
    }
    PieceState state;
    float piece_max = 0;
    if (row.index >= 0) {
      state = stage.reduce(whole, smoothing);
      piece_max = state.max;
      if (pieces.count > 1) {
        uint32_t* const row_states = states + kept % 2 * kStateWords<kKind> * pieces.count;
        CopyBarrier& met = block.met[kept % 2];  // no block gets two rows ahead of another
        meet_with<kKind>(state, row_states, piece, pieces.count, cluster, met, kept / 2 % 2, lane);
        if (cluster > 1 && threadIdx.x == 0) {
          expect_states(met);
        }
        state = combine_pieces<kKind>(row_states, pieces, num_classes, lane);
        ++kept;
      } else {
        __syncwarp();
      }
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
      const auto coefficient = [&](float p) {
        return kKind == RowKind::kSmooth ? q.other : smoothing(p);
      };
      // Only the largest logit can outweigh all others. At the class index of a smooth row it needs
      // nothing more: of_index() has another coefficient.
      int largest = -1;
      if (kKind != RowKind::kIndex && piece_max == state.max && softmax.one_may_outweigh()) {
        largest = stage.find(piece_max);  // fault: staged-largest
        if (kKind == RowKind::kSmooth && largest == row.index - begin + stage.granules.phase) {
          largest = -1;
        }
      }
      stage.write_gradient(
          gradient, row.index - begin, largest,
          [&](auto& x, const auto& p) {
            if constexpr (kKind == RowKind::kIndex) {
              of_logit.replace(x);
            } else {
#pragma unroll
              for (int i = 0; i < static_cast<int>(sizeof(x) / sizeof(float)); ++i) {
                x[i] = of_logit.template dense<false>(x[i], scale, q_sum, coefficient(p[i]));
              }
            }
          },
          of_index,
          [&](float x, float p) { return of_logit.dense(x, scale, q_sum, coefficient(p)); });
    } else {
      fill_piece(gradient, min(pieces.size, num_classes - begin),
                 from_acc<scalar_t>(gradient_without_loss(row.index)), lane);
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
    reduce_to_grid<true>(batches.sums(), partials, finalize);
  }
#endif
}

}  // namespace
}  // namespace staged_rows

void launch_staged_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput&, Partial* partials,
                        const Finalize& finalize, cudaStream_t stream) {
  using namespace staged_rows;
  const auto launch = [&](auto kernel, int argument) {
    static_assert(kMaxSharedBytes > kMaxBlockShare + kMaxBlockWarps * 2 * kLineBytes);
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
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
      } else {
        launch(cross_entropy_gradient_staged_kernel<scalar_t, kKind>, plan.cluster);
      }
    });
  });
}

}  // namespace lossops::cuda
