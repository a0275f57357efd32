// The rows of a block of staged rows, in batches: their targets are loaded, and later their losses
// computed, one row a lane.
//
// Only staged_rows.cu includes this.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/staged_pieces.cuh"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda {
namespace {

using namespace staged_rows;

// Rows that a block prepares at a time, one a lane, and finishes at a time.
constexpr int kBatch = 16;

template <typename scalar_t, RowKind kKind>
__device__ __forceinline__ StagedRow<kKind> find_row(const CrossEntropyForwardArgs& args,
                                                     int64_t row) {
  const auto offset_of = [&](const Operand& operand) {
    return row_offset_by_call(args.rows, operand, row);
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
          // In place it is overwritten. These rows have no use for this field.
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

  // By a whole warp, each lane with the state of the same row.
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
      finish_kept_row<kKind>(args, row.index, row.weight, block.states[batch % 2][lane],
                             kKind == RowKind::kProbability ? block.q_sums[batch % 2][lane] : 0.0f,
                             x_at_index, number(n),
                             args.reduction == Reduction::kNone
                                 ? row_offset_by_call(args.rows, args.output, number(n))
                                 : 0,
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

}  // namespace
}  // namespace lossops::cuda
