// Where the elements of a block's tiles lie in a matrix.
#pragma once

#include <cstdint>

#include "kernels/elements/matrix_plan.h"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// Where the chunk of a tile lies. While a block takes one tile, it works out the chunk of the next.
class ChunkPlaces {
 public:
  struct Shared {
    int64_t offsets[2][kNumOperands];
  };

  // tile: the first.
  __device__ __forceinline__ ChunkPlaces(const MatrixPlan& plan, Shared& shared, int64_t tile)
      : plan_(plan), shared_(shared) {
    if (plan.chunks > 1) {
      locate(tile, 0);
    }
  }

  // All threads of a block. next: the tile that comes after this.
  __device__ __forceinline__ void move_to(int64_t tile, int64_t next) {
    if (plan_.chunks > 1) {
      turn_ ^= 1;
      __syncthreads();
      locate(next, turn_ ^ 1);
      chunk_ = chunk_of(tile);
    }
  }

  __device__ __forceinline__ int64_t chunk() const { return chunk_; }
  // The address of element `number` of the chunk, without the gaps. It is kept in one pair of
  // registers, so that adding an offset takes one instruction.
  __device__ __forceinline__ char* address(Which which, uint32_t number) const {
    char* data = plan_.operands[which].data;
    data = plan_.chunks > 1 ? data + shared_.offsets[turn_][which] : data;
    char* const address = unfolded(data + times(number, plan_.operands[which].stride));
    __builtin_assume(__isGlobal(address));
    return address;
  }

  __device__ __forceinline__ uint32_t elements() const {
    const int64_t parts = plan_.chunk_extents.sizes[0];
    const bool is_last = plan_.chunks == 1 || chunk_ % parts == parts - 1;
    return static_cast<uint32_t>(is_last ? plan_.last_elements : plan_.chunk_elements);
  }

 private:
  __device__ __forceinline__ int64_t chunk_of(int64_t tile) const {
    return plan_.chunk_tiles == 1 ? tile : tile / plan_.chunk_tiles;
  }
  // A thread for each operand.
  __device__ __forceinline__ void locate(int64_t tile, int turn) const {
    if (threadIdx.x < kNumOperands) {
      const Extents& extents = plan_.chunk_extents;
      shared_.offsets[turn][threadIdx.x] = extents.offset(plan_.operands[threadIdx.x].chunk_strides,
                                                          chunk_of(tile), 0, extents.ndim);
    }
  }

  const MatrixPlan& plan_;
  Shared& shared_;
  int turn_ = 1;
  int64_t chunk_ = 0;
};

// Where a thread's elements lie in rows: kSteps times kWidth neighbours, which all are there.
template <int kSteps, int kWidth>
class MatrixPlaces {
 public:
  // first: the thread's first element in the chunk.
  __device__ __forceinline__ MatrixPlaces(const MatrixPlan& plan, const ChunkPlaces& chunk,
                                          uint32_t first)
      : plan_(plan), chunk_(chunk), first_(first) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      rows_[step] = plan.columns.quotient(first + step * kStride);
    }
  }

  __device__ __forceinline__ const MatrixOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  // Elements from the first one of a step to the end of its row.
  __device__ __forceinline__ int left(int step) const {
    const uint32_t row = plan_.columns.value;
    return static_cast<int>((rows_[step] + 1) * row - (first_ + step * kStride));
  }

  // Calls body(step, address of the first element). stride: bytes from an element of a row to the
  // next.
  template <typename Body>
  __device__ __forceinline__ void for_each_step(Which which, int32_t stride,
                                                const Body& body) const {
    char* const data = chunk_.address(which, first_);
    const int32_t gap = operand(which).gap;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, data + times(rows_[step], gap) + int64_t{step} * kStride * stride);
    }
  }

 private:
  static constexpr int kStride = kTileThreads * kWidth;

  const MatrixPlan& plan_;
  const ChunkPlaces& chunk_;
  const uint32_t first_;
  uint32_t rows_[kSteps];  // by step
};

}  // namespace lossops::cuda
