// Tiles of an ElementPlan: operands of any layout, with the members that process.cuh asks of tiles.
// RowTile is for plans without boxes, BoxTile for those with.
#pragma once

#include <cstdint>

#include "kernels/elements/values.cuh"
#include "kernels/thread_reduce.cuh"

namespace lossops::cuda {

// Where the chunk of a tile lies. Worked out for the next tile while a block takes this one.
class ChunkPlaces {
 public:
  struct Shared {
    int64_t offsets[2][kNumOperands];
  };

  // tile: the first.
  __device__ __forceinline__ ChunkPlaces(const ElementPlan& plan, Shared& shared, int64_t tile)
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
  __device__ __forceinline__ const PlanOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ char* data(Which which) const {
    char* const data = plan_.operands[which].data;
    return plan_.chunks > 1 ? data + shared_.offsets[turn_][which] : data;
  }

  __device__ __forceinline__ uint32_t units() const {
    if (plan_.last_units != 0) {
      // The dimension that was cut is the first after those of a chunk.
      const int64_t pieces = plan_.extents.sizes[plan_.extents.chunk_ndim];
      if (chunk_ % pieces == pieces - 1) {
        return static_cast<uint32_t>(plan_.last_units);
      }
    }
    return static_cast<uint32_t>(plan_.chunk_units);
  }

  const ElementPlan& plan() const { return plan_; }

 private:
  __device__ __forceinline__ int64_t chunk_of(int64_t tile) const {
    return plan_.chunk_tiles == 1 ? tile : tile / plan_.chunk_tiles;
  }
  // A thread for each operand.
  __device__ __forceinline__ void locate(int64_t tile, int turn) const {
    if (threadIdx.x < kNumOperands) {
      const Extents& extents = plan_.extents;
      shared_.offsets[turn][threadIdx.x] =
          extents.offset(plan_.operands[threadIdx.x].strides, chunk_of(tile), extents.chunk_ndim,
                         extents.ndim);
    }
  }

  const ElementPlan& plan_;
  Shared& shared_;
  int turn_ = 1;
  int64_t chunk_ = 0;
};

// kSteps units of a thread, kTileThreads apart; all of them are there.
template <typename acc_t_, int kWidth_, int kSteps_, bool kIsHalf_>
class RowTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = kIsHalf_;
  static constexpr bool kHasSubnormals = true;
  using Values = PlannedValues<RowTile>;
  friend Values;

  // first: the thread's first unit in the chunk.
  __device__ __forceinline__ RowTile(const ElementPlan& plan, const ChunkPlaces& places,
                                     uint32_t first)
      : plan_(plan), places_(places), first_(first) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      rows_[step] = plan.extents.divisors[0].quotient(first + step * kTileThreads);
    }
  }

  __device__ __forceinline__ bool is_half() const {
    return kIsHalf || is_half_type(plan_.operands[kInput].dtype);
  }
  __device__ __forceinline__ const PlanOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ void store(Which /*which*/, int step, const acc_t (&results)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      results_.at(step, i) = results[i];
    }
  }
  __device__ __forceinline__ void finish_store(Which which) { results_.store(*this, which); }
  __device__ __forceinline__ void add(const acc_t (&values)[kSteps * kWidth], double& sum) const {
    sum += static_cast<double>(pairwise_sum(values));
  }

 private:
  // kBytes: of an element.
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_unit(Which which, Body&& body) const {
    constexpr int kUnit = kBytes * kWidth;
    const PlanOperand& operand = plan_.operands[which];
    const int32_t stride = operand.gaps[0];
    // One register pair, to which offsets are added in one instruction.
    char* const data = unfolded(places_.data(which) + times(first_, stride));
    __builtin_assume(__isGlobal(data));
    if (kSteps > 1 && operand.is_simple && stride == kUnit) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        body(step, data + times(rows_[step], operand.gaps[1]) + step * (kTileThreads * kUnit),
             true);
      }
      keep_apart();
      return;
    }
    int64_t offsets[kSteps];
    uint32_t rest[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      rest[step] = rows_[step];
      offsets[step] = times(rest[step], operand.gaps[1]) +
                      static_cast<int64_t>(step * kTileThreads) * stride;
    }
#pragma unroll 1
    for (int dim = 1; dim + 1 < plan_.extents.chunk_ndim; ++dim) {
      const Divisor divisor = plan_.extents.divisors[dim];
      const int32_t gap = operand.gaps[dim + 1];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        rest[step] = divisor.quotient(rest[step]);
        offsets[step] += times(rest[step], gap);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, data + offsets[step], stride != 0);
    }
  }
  // The compiler would make one of the accesses of both branches, for which it would compute 64-bit
  // addresses instead of constant distances.
  static __device__ __forceinline__ void keep_apart() { asm volatile(""); }
  static __device__ __forceinline__ int64_t times(uint32_t number, int32_t gap) {
    // fault: elementwise-offset
    return static_cast<int64_t>(static_cast<int32_t>(number)) * gap;
  }

  __device__ __forceinline__ bool has_own(Which /*which*/, int /*step*/) const { return true; }
  __device__ __forceinline__ char* address(Which which, int step) const {
    const PlanOperand& operand = plan_.operands[which];
    const uint32_t unit = first_ + step * kTileThreads;
    return places_.data(which) + times(unit, operand.gaps[0]) +
           further_gaps(plan_.extents, operand.gaps, unit, 0);
  }
  __device__ __forceinline__ void take(Which /*which*/, Values& /*values*/) const {}
  __device__ __forceinline__ void give(Which /*which*/, Values& /*values*/) const {}

  const ElementPlan& plan_;
  const ChunkPlaces& places_;
  const uint32_t first_;
  uint32_t rows_[kSteps];  // by step
  Values results_;
};

// A box. Operands whose rows lie along its dimension 1 are read and written in that order; shared
// memory turns them.
template <typename acc_t_, int kSteps_>
class BoxTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;
  using Values = PlannedValues<BoxTile>;
  friend Values;

  // Along dimension 1: a row of a turned operand.
  static constexpr int kTurnedSide = kTileThreads * kSteps / kBoxSide;
  // Odd, so that columns are in different banks.
  static constexpr int kPitch = kBoxSide + 1;
  struct Shared {
    acc_t values[kPitch * kTurnedSide];
  };

  __device__ __forceinline__ BoxTile(const ElementPlan& plan, const ChunkPlaces& places,
                                     Shared& shared)
      : plan_(plan), places_(places), shared_(shared) {
    const Extents& extents = plan.extents;
    const int64_t box = places.chunk();
    const int64_t rest = extents.quotient(box, 2);
    const int64_t second = rest - extents.quotient(rest, 3) * extents.sizes[3];
    const int64_t left = plan.box_extents[0] - (box - rest * extents.sizes[2]) * kBoxSide;
    const int64_t turned_left = plan.box_extents[1] - second * kTurnedSide;
    if (left < kBoxSide || turned_left < kTurnedSide) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto n = static_cast<int>(number(step));
        const bool is_there = n % kBoxSide < left && n / kBoxSide < turned_left;
        const bool is_turned_there = n % kTurnedSide < turned_left && n / kTurnedSide < left;
        there_ &= is_there ? kAll : ~(1u << step);
        turned_there_ &= is_turned_there ? kAll : ~(1u << step);
      }
    }
  }

  __device__ __forceinline__ bool is_half() const {
    return is_half_type(plan_.operands[kInput].dtype);
  }
  __device__ __forceinline__ const PlanOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ void store(Which /*which*/, int step, const acc_t (&results)[1]) {
    results_.at(step, 0) = results[0];
  }
  __device__ __forceinline__ void finish_store(Which which) { results_.store(*this, which); }
  __device__ __forceinline__ void add(const acc_t (&values)[kSteps], double& sum) const {
    acc_t own[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      own[step] = (there_ >> step & 1u) != 0 ? values[step] : acc_t(0);
    }
    sum += static_cast<double>(pairwise_sum(own));
  }

 private:
  static constexpr uint32_t kAll = (1u << kSteps) - 1;

  // In the box.
  static __device__ __forceinline__ uint32_t number(int step) {
    return threadIdx.x + static_cast<uint32_t>(step) * kTileThreads;
  }
  __device__ __forceinline__ bool has_own(Which which, int step) const {
    return ((plan_.operands[which].is_turned ? turned_there_ : there_) >> step & 1u) != 0;
  }
  __device__ __forceinline__ char* address(Which which, int step) const {
    const PlanOperand& operand = plan_.operands[which];
    const uint32_t n = number(step);
    return places_.data(which) + (operand.is_turned ? n % kTurnedSide * operand.strides[1] +
                                                          n / kTurnedSide * operand.strides[0]
                                                    : n % kBoxSide * operand.strides[0] +
                                                          n / kBoxSide * operand.strides[1]);
  }
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_unit(Which which, Body&& body) const {
    const PlanOperand& operand = plan_.operands[which];
    char* const data = address(which, 0);
    const int64_t further = operand.is_turned ? kTileThreads / kTurnedSide * operand.strides[0]
                                              : kTileThreads / kBoxSide * operand.strides[1];
    const uint32_t there = operand.is_turned ? turned_there_ : there_;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if ((there >> step & 1u) != 0) {
        body(step, data + step * further, true);
      }
    }
  }

  // What was read of a turned operand: from its own order to that of the plan.
  __device__ __forceinline__ void take(Which which, Values& values) const {
    exchange(which, values, turned_place, place);
  }
  // What is to be written: the way back.
  __device__ __forceinline__ void give(Which which, Values& values) const {
    exchange(which, values, place, turned_place);
  }
  template <typename From, typename To>
  __device__ __forceinline__ void exchange(Which which, Values& values, From&& from, To&& to) const {
    if (!plan_.operands[which].is_turned) {
      return;
    }
    __syncthreads();  // nothing is read of what was exchanged before
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      shared_.values[from(step)] = values.at(step, 0);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      values.at(step, 0) = shared_.values[to(step)];
    }
  }
  // An element of the box in shared memory: the thread's own, and in the order of turned operands.
  static __device__ __forceinline__ uint32_t place(int step) {
    return number(step) / kBoxSide * kPitch + number(step) % kBoxSide;
  }
  static __device__ __forceinline__ uint32_t turned_place(int step) {
    return number(step) % kTurnedSide * kPitch + number(step) / kTurnedSide;
  }

  const ElementPlan& plan_;
  const ChunkPlaces& places_;
  Shared& shared_;
  uint32_t there_ = kAll;         // bit by bit, the steps whose elements are there
  uint32_t turned_there_ = kAll;  // the same in the order of turned operands
  Values results_;
};

}  // namespace lossops::cuda
