// Tiles of operands that disagree on which dimension is contiguous.
#pragma once

#include <cstdint>

#include "kernels/elements/tiles.h"
#include "kernels/elements/unit_values.cuh"

namespace lossops::cuda {

// A box. It is computed in the order of its rows: a thread has units of columns. Operands
// whose neighbours lie along the columns are read and written in units of rows. Shared memory
// transposes them.
//
// Places in a box count columns and rows of units, as if those did not share any.
class BoxTile {
 public:
  using acc_t = float;
  using scalar_t = float;
  static constexpr int kWidth = kBoxUnit;
  static constexpr int kSteps = kBoxElements / kBoxUnit / kTileThreads;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;
  static constexpr bool kHasWords = false;
  using Values = UnitValues<BoxTile>;

  // Rows lie one element further apart than they are long, so that units of rows are in different
  // banks. A box has the most rows if they are four units long.
  struct Shared {
    float values[kBoxElements + kBoxElements / (4 * kBoxUnit)];
    char* matrices[kNumOperands];  // where the matrix of the tile begins, by slot
  };

  // All threads of the block.
  __device__ __forceinline__ BoxTile(const BoxPlan& plan, const BoxesTile& boxes, Shared& shared)
      : plan_(plan), boxes_(boxes), shared_(shared), straight_(plan, 0), transposed_(plan, 1) {
    __syncthreads();
    if (const auto slot = static_cast<int>(threadIdx.x); slot < plan.num_slots) {
      const BoxOperand& operand = plan.operands[plan.slots[slot]];
      const Extents& extents = plan.extents;
      shared.matrices[slot] = operand.data + extents.offset(operand.strides, boxes.matrix, 2);
    }
    __syncthreads();
    const int first = boxes.first[0];
    straight_.place_units(plan, 0, first);
    transposed_.place_others(plan, 0, first);
  }

  // Goes to a box of the tile.
  __device__ __forceinline__ void move_to(int box) {
    first_row_ = boxes_.first_row(plan_, box);
    transposed_.place_units(plan_, 1, first_row_);
    straight_.place_others(plan_, 1, first_row_);
  }

  __device__ __forceinline__ const BoxOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ bool is_half(Which which) const {
    return is_half_type(operand(which).dtype);
  }
  __device__ __forceinline__ void store(Which which, const float (&values)[Values::kCount]) {
    Values::store(*this, which, values);
  }

  __device__ __forceinline__ bool has(int n) const {
    const int row = first_row_ * kBoxUnit + straight_.other(n / kBoxUnit);
    return n % kBoxUnit >= straight_.skipped &&
           straight_.others[n / kBoxUnit] >= row / kBoxUnit * kBoxUnit;
  }
  __device__ __forceinline__ bool has_all() const {
    return straight_.skipped == 0 && !straight_.lacks_others;
  }

  __device__ __forceinline__ int stride(Which which) const {
    return static_cast<int>(operand(which).strides[operand(which).is_transposed ? 1 : 0]);
  }
  __device__ __forceinline__ UnitKind kind(Which which) const {
    const UnitKind kind = operand(which).kind;
    return kind == UnitKind::kVector && column(which) % kBoxUnit != 0 ? UnitKind::kStrided : kind;
  }
  __device__ __forceinline__ void locate(Which which, char* (&addresses)[kSteps]) const {
    const BoxOperand& own = operand(which);
    char* const first =
        shared_.matrices[own.slot] + static_cast<int64_t>(column(which)) * stride(which);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      addresses[step] = first + (own.is_transposed ? transposed_.others[step] * own.strides[0]
                                                   : straight_.others[step] * own.strides[1]);
      __builtin_assume(__isGlobal(addresses[step]));
    }
  }

  // What was read of a transposed operand: from units of rows to units of columns.
  __device__ __forceinline__ void transpose_read(Which which, Values& values) const {
    if (!operand(which).is_transposed) {
      return;
    }
    exchange([&](int step, int i, float& cell) { cell = values.at(step, i); }, true);
    collect([&](int step, int i, float cell) { values.set(step, i, cell); }, false);
  }
  // What is to be written: the way back.
  __device__ __forceinline__ void transpose_results(Which which,
                                                    float (&values)[Values::kCount]) const {
    if (!operand(which).is_transposed) {
      return;
    }
    exchange([&](int step, int i, float& cell) { cell = values[step * kBoxUnit + i]; }, false);
    collect([&](int step, int i, float cell) { values[step * kBoxUnit + i] = cell; }, true);
  }

 private:
  // The column where the thread's units begin.
  __device__ __forceinline__ int column(Which which) const {
    return operand(which).is_transposed ? transposed_.begin : straight_.begin;
  }

  // The units of a thread along one side of the box. In each step it has another row, or column, of
  // the other side.
  struct Side {
    __device__ __forceinline__ Side(const BoxPlan& plan, int side)
        : shift(plan.shifts[side]), unit(static_cast<int>(threadIdx.x) & ((1 << shift) - 1)) {}

    // In the box.
    __device__ __forceinline__ int other(int step) const {
      return (static_cast<int>(threadIdx.x) >> shift) + step * (kTileThreads >> shift);
    }
    // side: along which the units lie. first: its first unit in the box.
    __device__ __forceinline__ void place_units(const BoxPlan& plan, int side, int first) {
      const int own = (first + unit) * kBoxUnit;
      begin = place_in_matrix(plan, side, own);
      skipped = own - begin;
    }
    // Places the rows, or columns, that the steps have. side, first: as of place_units().
    __device__ __forceinline__ void place_others(const BoxPlan& plan, int side, int first) {
      lacks_others = false;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int own = first * kBoxUnit + other(step);
        others[step] = place_in_matrix(plan, side, own);
        lacks_others = lacks_others || others[step] < own;
      }
    }

    const int shift;
    const int unit;      // in the box
    int begin;           // its first element, in the matrix
    int skipped;         // how many of them do not count
    int others[kSteps];  // in the matrix
    bool lacks_others;   // some of these do not count
  };

  __device__ __forceinline__ float& cell(bool is_transposed, int step, int i) const {
    const int pitch = (kBoxUnit << straight_.shift) + 1;
    return is_transposed
               ? shared_.values[(transposed_.unit * kBoxUnit + i) * pitch + transposed_.other(step)]
               : shared_.values[straight_.other(step) * pitch + straight_.unit * kBoxUnit + i];
  }
  template <typename Put>
  __device__ __forceinline__ void exchange(const Put& put, bool is_transposed) const {
    __syncthreads();  // nothing is read of what was exchanged before
#pragma unroll
    for (int n = 0; n < Values::kCount; ++n) {
      put(n / kBoxUnit, n % kBoxUnit, cell(is_transposed, n / kBoxUnit, n % kBoxUnit));
    }
    __syncthreads();
  }
  template <typename Get>
  __device__ __forceinline__ void collect(const Get& get, bool is_transposed) const {
#pragma unroll
    for (int n = 0; n < Values::kCount; ++n) {
      get(n / kBoxUnit, n % kBoxUnit, cell(is_transposed, n / kBoxUnit, n % kBoxUnit));
    }
  }

  const BoxPlan& plan_;
  const BoxesTile& boxes_;
  Shared& shared_;
  Side straight_;    // units of columns
  Side transposed_;  // units of rows
  int first_row_;    // the first unit of rows of the box
};

}  // namespace lossops::cuda
