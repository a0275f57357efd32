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
  static constexpr int kSteps = kBoxSteps;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;
  using Values = BoxValues<BoxTile>;

  // Rows lie one element further apart than they are long, so that a column is in different banks.
  // Only of sides of 16 elements do two lanes of a warp share a bank.
  struct Shared {
    float values[kBoxElements + (kBoxElements >> kLeastBoxShift)];
    BoxesTile boxes;
    // From where an operand begins to each box of the tile, by box and the operand's slot.
    int64_t offsets[kBoxesOfTile][kNumOperands];
  };

  // All threads of the block, once: where they are in a box.
  static __device__ __forceinline__ void set_begins(const BoxPlan& plan) {
    ThreadBegins::for_each(plan, [&](char*& begin, const BoxOperand& operand) {
      const int side = operand.is_transposed ? 1 : 0;
      const BoxPlaces places(plan, side, static_cast<int>(threadIdx.x));
      begin = operand.data + places.near() * operand.strides[side] +
              places.far() * operand.strides[1 - side];
    });
  }

  // All threads of the block.
  __device__ __forceinline__ BoxTile(const BoxPlan& plan, const ThreadBegins& begins,
                                     int64_t number, Shared& shared)
      : plan_(plan), begins_(begins), shared_(shared) {
    __syncthreads();
    const auto thread = static_cast<int>(threadIdx.x);
    static_assert(kBoxesOfTile * kNumOperands <= kTileThreads);
    const int box = thread / kNumOperands;
    const int slot = thread % kNumOperands;
    if (box < kBoxesOfTile && slot < plan.num_slots) {
      const BoxesTile boxes = BoxesTile::of(plan, number);
      shared.offsets[box][slot] = boxes.offset(plan, plan.operands[plan.slots[slot]], box);
      if (thread == 0) {
        shared.boxes = boxes;
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int boxes() const { return shared_.boxes.count; }
  // Goes to a box of the tile.
  __device__ __forceinline__ void move_to(int box) { box_ = box; }

  __device__ __forceinline__ const BoxOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ static constexpr bool is_one(Which /*which*/) { return false; }
  __device__ __forceinline__ bool is_half(Which which) const {
    return is_half_type(operand(which).dtype);
  }
  __device__ __forceinline__ void store(Which which, const float (&results)[kSteps]) const {
    Values(results).store(*this, which);
  }

  __device__ __forceinline__ unsigned counted(int step) const {
    return places_along(0).has(repeated(0), repeated(1), step) ? 1 : 0;
  }
  __device__ __forceinline__ bool has_all() const {
    return repeated(0) == 0 && repeated(1) == 0 && plan_.sizes[0] == 1 << plan_.shifts[0] &&
           plan_.sizes[1] == 1 << plan_.shifts[1];
  }

  template <typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    const BoxOperand& own = operand(which);
    const BoxPlaces places = places_along(own.is_transposed ? 1 : 0);
    const int slot = plan_.slot_of(which);
    // Each kept in registers, so that adding a distance takes one instruction.
    char* const begin = unfolded(begins_.get(slot) + shared_.offsets[box_][slot]);
    const int stride = unfolded(own.far_stride);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      char* const address = begin + int64_t{places.distance(step)} * stride;
      __builtin_assume(__isGlobal(address));
      body(step, address);
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
  __device__ __forceinline__ int repeated(int side) const {
    return shared_.boxes.repeated(plan_, box_, side);
  }
  template <typename Body>
  __device__ __forceinline__ void for_each_cell(int side, const Body& body) const {
    const BoxPlaces places = places_along(side);
    const int pitch = (1 << plan_.shifts[0]) + 1;
    const int first = side == 0 ? places.cell_far() * pitch + places.cell_near()
                                : places.cell_near() * pitch + places.cell_far();
    const int distance = side == 0 ? pitch : 1;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, shared_.values + first + step * distance);
    }
  }

  const BoxPlan& plan_;
  const ThreadBegins& begins_;
  Shared& shared_;
  int box_;
};

}  // namespace lossops::cuda
