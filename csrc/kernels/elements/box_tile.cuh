// Tiles of operands that disagree on which dimension is contiguous.
#pragma once

#include <cstdint>

#include "kernels/elements/single_values.cuh"
#include "kernels/elements/thread_begins.cuh"
#include "kernels/elements/tiles.h"

namespace lossops::cuda {

// What a thread has of an operand, as neighbouring threads have neighbouring columns. It is read
// and written as the operand's neighbours lie.
template <typename Tile>
class BoxValues : public SingleValues<Tile> {
 public:
  using SingleValues<Tile>::SingleValues;

  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    SingleValues<Tile>::convert(tile, which);
    if (tile.operand(which).is_transposed) {
      tile.exchange(this->values_, /*from=*/1, /*to=*/0);
    }
  }
  __device__ __forceinline__ void store(const Tile& tile, Which which) {
    if (tile.operand(which).is_transposed) {
      tile.exchange(this->values_, /*from=*/0, /*to=*/1);
    }
    SingleValues<Tile>::store(tile, which);
  }
};

// A box. A warp reads and writes neighbours, wherever they begin: columns of straight operands,
// rows of transposed ones. Shared memory is between the two.
class BoxTile {
 public:
  using acc_t = float;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kBoxElements / kTileThreads;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;
  using Values = BoxValues<BoxTile>;

  // Rows lie one element further apart than they are long, so that a column is in different banks:
  // where a warp has several columns, some of them share banks.
  struct Shared {
    float values[kBoxElements + (kBoxElements >> kLeastBoxShift)];
    char* matrices[kNumOperands];  // where the matrix of the tile begins, by slot
  };

  // All threads of the block.
  __device__ __forceinline__ BoxTile(const BoxPlan& plan, const BoxesTile& boxes, Shared& shared)
      : plan_(plan), boxes_(boxes), shared_(shared) {
    __syncthreads();
    if (const auto slot = static_cast<int>(threadIdx.x); slot < plan.num_slots) {
      const BoxOperand& operand = plan.operands[plan.slots[slot]];
      const Extents& extents = plan.extents;
      shared.matrices[slot] = operand.data + extents.offset(operand.strides, boxes.matrix, 2);
    }
    __syncthreads();
    ThreadBegins::for_each(plan, [&](char*& begin, const BoxOperand& operand) {
      const BoxPlaces places = places_along(operand.is_transposed ? 1 : 0);
      const int column = operand.is_transposed ? places.far() : places.near();
      const int row = operand.is_transposed ? places.near() : places.far();
      begin = shared.matrices[operand.slot] +
              (int64_t{boxes.first[0]} + column) * operand.strides[0] +
              (int64_t{boxes.first[1]} + row) * operand.strides[1];
    });
  }

  // Goes to a box of the tile.
  __device__ __forceinline__ void move_to(int box) {
    box_ = box;
    const int row = boxes_.first_row(plan_, box);
    straight_steps_ = places_along(0).steps(plan_, boxes_.first[0], row);
    transposed_steps_ = places_along(1).steps(plan_, row, boxes_.first[0]);
  }

  __device__ __forceinline__ const BoxOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ bool is_half(Which which) const {
    return is_half_type(operand(which).dtype);
  }
  __device__ __forceinline__ void store(Which which, const float (&results)[kSteps]) const {
    Values(results).store(*this, which);
  }

  __device__ __forceinline__ bool has(int n) const { return n < straight_steps_; }
  __device__ __forceinline__ bool has_all() const { return has(kSteps - 1); }

  template <typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    const BoxOperand& own = operand(which);
    const int steps = own.is_transposed ? transposed_steps_ : straight_steps_;
    // Each kept in registers, so that adding a distance takes one instruction.
    char* const begin = unfolded(ThreadBegins::get(own.slot) + box_ * own.box_stride);
    const int stride = unfolded(own.step_stride);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      char* const address = begin + int64_t{step} * stride;
      __builtin_assume(__isGlobal(address));
      if (step < steps) {
        body(step, address);
      }
    }
  }

  // Each thread gives what it has along side `from`, and gets what it has along `to`. All threads
  // of the block.
  __device__ __forceinline__ void exchange(float (&values)[kSteps], int from, int to) const {
    __syncthreads();  // what was exchanged before has been read
    for_each_cell(from, [&](int step, float* cell) { *cell = values[step]; });
    __syncthreads();
    for_each_cell(to, [&](int step, const float* cell) { values[step] = *cell; });
  }

 private:
  __device__ __forceinline__ BoxPlaces places_along(int side) const {
    return {plan_, side, static_cast<int>(threadIdx.x)};
  }
  template <typename Body>
  __device__ __forceinline__ void for_each_cell(int side, const Body& body) const {
    const BoxPlaces places = places_along(side);
    const int pitch = (1 << plan_.shifts[0]) + 1;
    const int first =
        side == 0 ? places.far() * pitch + places.near() : places.near() * pitch + places.far();
    const int distance = (side == 0 ? pitch : 1) << plan_.far_shift(side);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, shared_.values + first + step * distance);
    }
  }

  const BoxPlan& plan_;
  const BoxesTile& boxes_;
  Shared& shared_;
  int box_;
  // How many of the thread's steps count, from the first on.
  int straight_steps_;
  int transposed_steps_;
};

}  // namespace lossops::cuda
