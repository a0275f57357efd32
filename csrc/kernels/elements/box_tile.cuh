// Tiles of operands that disagree on which dimension is contiguous.
#pragma once

#include <cstdint>

#include "kernels/elements/places.cuh"
#include "kernels/elements/values.cuh"

namespace lossops::cuda {

// A box. Operands whose rows lie along its dimension 1 are read and written in that order; shared
// memory turns them.
class BoxTile {
 public:
  using acc_t = float;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kBoxElements / kTileThreads;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;
  using Values = PlannedValues<BoxTile>;
  friend Values;

  // Rows of a box lie one element further apart than they are long, so that columns are in
  // different banks. The most rows are those of 8 elements.
  struct Shared {
    acc_t values[kBoxElements + kBoxElements / 8];
  };

  __device__ __forceinline__ BoxTile(const ElementPlan& plan, const ChunkPlaces& places,
                                     Shared& shared)
      : plan_(plan),
        places_(places),
        shared_(shared),
        shift_(plan.box_shifts[0]),
        turned_shift_(plan.box_shifts[1]) {
    const Extents& extents = plan.extents;
    const int64_t box = places.chunk();
    const int64_t rest = extents.quotient(box, 2);
    const int64_t second = rest - extents.quotient(rest, 3) * extents.sizes[3];
    const int64_t left = plan.box_extents[0] - ((box - rest * extents.sizes[2]) << shift_);
    const int64_t turned_left = plan.box_extents[1] - (second << turned_shift_);
    if (left >> shift_ == 0 || turned_left >> turned_shift_ == 0) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool is_there = column() < left && row(step) < turned_left;
        const bool is_turned_there = turned_column() < turned_left && turned_row(step) < left;
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
  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps]) {
    Values(results).store(*this, which);
  }
  __device__ __forceinline__ bool has(int step) const { return (there_ >> step & 1u) != 0; }

 private:
  static constexpr uint32_t kAll = (1u << kSteps) - 1;

  // The row and the column, in the box, of the thread's element of a step. The threads of a block
  // take whole rows, so the column is the same in each step.
  __device__ __forceinline__ uint32_t row(int step) const {
    return (threadIdx.x >> shift_) + step * (kTileThreads >> shift_);
  }
  __device__ __forceinline__ uint32_t column() const { return threadIdx.x & ((1u << shift_) - 1); }
  // The same in the order of turned operands, whose rows are the columns of the box.
  __device__ __forceinline__ uint32_t turned_row(int step) const {
    return (threadIdx.x >> turned_shift_) + step * (kTileThreads >> turned_shift_);
  }
  __device__ __forceinline__ uint32_t turned_column() const {
    return threadIdx.x & ((1u << turned_shift_) - 1);
  }
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_element(Which which, Body&& body) const {
    const PlanOperand& operand = plan_.operands[which];
    char* const data =
        places_.data(which) +
        (operand.is_turned
             ? turned_column() * operand.strides[1] + turned_row(0) * operand.strides[0]
             : column() * operand.strides[0] + row(0) * operand.strides[1]);
    const int64_t further = operand.is_turned ? (kTileThreads >> turned_shift_) * operand.strides[0]
                                              : (kTileThreads >> shift_) * operand.strides[1];
    const uint32_t there = operand.is_turned ? turned_there_ : there_;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if ((there >> step & 1u) != 0) {
        body(step, data + step * further);
      }
    }
  }

  // What was read of a turned operand: from its own order to that of the plan.
  __device__ __forceinline__ void take(Which which, Values& values) const {
    exchange(
        which, values, [&](int step) { return turned_place(step); },
        [&](int step) { return place(step); });
  }
  // What is to be written: the way back.
  __device__ __forceinline__ void give(Which which, Values& values) const {
    exchange(
        which, values, [&](int step) { return place(step); },
        [&](int step) { return turned_place(step); });
  }
  template <typename From, typename To>
  __device__ __forceinline__ void exchange(Which which, Values& values, From&& from,
                                           To&& to) const {
    if (!plan_.operands[which].is_turned) {
      return;
    }
    __syncthreads();  // nothing is read of what was exchanged before
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      shared_.values[from(step)] = values.at(step);
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      values.at(step) = shared_.values[to(step)];
    }
  }
  // An element of the box in shared memory: the thread's own, and in the order of turned operands.
  __device__ __forceinline__ uint32_t place(int step) const {
    return row(step) * ((1u << shift_) + 1) + column();
  }
  __device__ __forceinline__ uint32_t turned_place(int step) const {
    return turned_column() * ((1u << shift_) + 1) + turned_row(step);
  }

  const ElementPlan& plan_;
  const ChunkPlaces& places_;
  Shared& shared_;
  const int shift_;               // side 0 is 2^shift_
  const int turned_shift_;        // the same of side 1
  uint32_t there_ = kAll;         // bit by bit, the steps whose elements are there
  uint32_t turned_there_ = kAll;  // the same in the order of turned operands
};

}  // namespace lossops::cuda
