// Tiles of operands that disagree on which dimension is contiguous.
#pragma once

#include <cstdint>

#include "kernels/elements/single_values.cuh"
#include "kernels/elements/thread_begins.cuh"
#include "kernels/elements/tiles.h"
#include "kernels/primitives/any_half.cuh"

namespace lossops::cuda {

// What a thread has of an operand, in the order of straight ones. It is read and written in the
// operand's own order.
template <typename Tile>
class BoxValues : public SingleValues<Tile> {
 public:
  using SingleValues<Tile>::SingleValues;

  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    SingleValues<Tile>::convert(tile, which);
    if (tile.operand(which).is_transposed) {
      tile.turn(this->values_, /*from=*/1, /*to=*/0);
    }
  }
  __device__ __forceinline__ void store(const Tile& tile, Which which) {
    if (tile.operand(which).is_transposed) {
      tile.turn(this->values_, /*from=*/0, /*to=*/1);
    }
    SingleValues<Tile>::store(tile, which);
  }
};

// What a thread has of every box of a plan.
struct BoxThread {
  int cells[2];      // its first, in both orders
  unsigned counted;  // steps that count where a box repeats nothing
  int turned = 0;    // which of the shared cells are free

  __device__ __forceinline__ explicit BoxThread(const BoxPlan& plan) {
    const BoxPlace straight(plan, 0, static_cast<int>(threadIdx.x));
    const BoxPlace transposed(plan, 1, static_cast<int>(threadIdx.x));
    cells[0] = straight.cell(plan);
    cells[1] = transposed.cell(plan);
    counted = straight.counted();
    ThreadBegins::for_each(plan, [&](char*& begin, const BoxOperand& operand) {
      begin = operand.data +
              (operand.is_transposed ? transposed.offset(operand) : straight.offset(operand));
    });
  }
};

struct BoxShared {
  // Used in turns: the barrier of one turn tells that all threads have read the other's cells.
  float cells[2][kBoxCells];
  // Of each box of a tile: where it begins in each operand, by the operand's slot.
  int64_t offsets[kBoxesOfTile][kNumOperands];
  int32_t repeated[kBoxesOfTile][kBoxDims];
};

// A box. A warp reads and writes neighbours, wherever they begin: columns of straight operands,
// rows of transposed ones. Shared memory is between the two. scalar_t: AnyHalf, where operands are
// of one half type, or float, where they may be of any types.
template <typename scalar_t>
class BoxTile {
 public:
  using acc_t = float;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kBoxSteps;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = kMayBeSubnormal<scalar_t>;
  static constexpr bool kKeeps = false;
  static constexpr bool kLooksAhead = false;
  using Values = BoxValues<BoxTile>;

  // All threads of the block.
  __device__ __forceinline__ BoxTile(const BoxPlan& plan, const ThreadBegins& begins,
                                     BoxThread& own, int64_t number, BoxShared& shared)
      : plan_(plan), begins_(begins), own_(own), shared_(shared) {
    const int64_t first = number * kBoxesOfTile;
    const int64_t left = plan.boxes - first;
    count_ = left < kBoxesOfTile ? static_cast<int>(left) : kBoxesOfTile;
    __syncthreads();
    const auto thread = static_cast<int>(threadIdx.x);
    static_assert(kBoxesOfTile * kNumOperands <= kTileThreads);
    const int box = thread / kNumOperands;
    const int slot = thread % kNumOperands;
    if (box < count_ && slot < plan.num_slots) {
      const Box place = Box::of(plan, first + box);
      shared.offsets[box][slot] = place.offset(plan, plan.operands[plan.slots[slot]]);
      if (slot == 0) {
#pragma unroll
        for (int dim = 0; dim < kBoxDims; ++dim) {
          shared.repeated[box][dim] = place.repeated[dim];
        }
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int boxes() const { return count_; }
  // Goes to a box of the tile. Returns whether there is anything that it does not repeat.
  __device__ __forceinline__ bool move_to(int box) {
    box_ = box;
    counted_ = own_.counted;
    const int32_t (&repeated)[kBoxDims] = shared_.repeated[box];
    if ((repeated[0] | repeated[1] | repeated[2]) != 0) {
      counted_ &= BoxPlace(plan_, 0, static_cast<int>(threadIdx.x)).unrepeated(repeated);
    }
    return repeated[1] < plan_.sizes[1];  // only groups of boxes go beyond the last row
  }

  __device__ __forceinline__ const BoxOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ static constexpr bool is_one(Which /*which*/) { return false; }
  // Whether all operands are of one half type.
  __device__ __forceinline__ static constexpr bool has_common_half() { return kIsHalf; }
  __device__ __forceinline__ bool is_half(Which which) const {
    return kIsHalf || is_half_type(operand(which).dtype);
  }
  __device__ __forceinline__ void store(Which which, const float (&results)[kSteps]) const {
    Values(results).store(*this, which);
  }

  __device__ __forceinline__ unsigned counted(int step) const { return counted_ >> step & 1; }
  __device__ __forceinline__ bool has_all() const { return counted_ == (1U << kSteps) - 1; }

  template <typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    const BoxOperand& own = operand(which);
    const int slot = plan_.slot_of(which);
    // Each kept in registers, so that adding a distance takes one instruction.
    char* const begin = unfolded(begins_.get(slot) + shared_.offsets[box_][slot]);
    const int stride = unfolded(static_cast<int>(own.step_stride));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      char* const address = begin + int64_t{step} * stride;
      __builtin_assume(__isGlobal(address));
      body(step, address);
    }
  }

  // Each thread gives what it has in the order `from`, and gets what it has in the order `to`. All
  // threads of the block.
  __device__ __forceinline__ void turn(float (&values)[kSteps], int from, int to) const {
    for_each_cell(from, [&](int step, float& cell) { cell = values[step]; });
    __syncthreads();
    for_each_cell(to, [&](int step, const float& cell) { values[step] = cell; });
    own_.turned ^= 1;
  }

 private:
  template <typename Body>
  __device__ __forceinline__ void for_each_cell(int order, const Body& body) const {
    float* const first = shared_.cells[own_.turned] + own_.cells[order];
    const int distance = plan_.orders[order].step_cells;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, first[step * distance]);
    }
  }

  const BoxPlan& plan_;
  const ThreadBegins& begins_;
  BoxThread& own_;
  BoxShared& shared_;
  int count_;
  int box_;
  unsigned counted_;
};

}  // namespace lossops::cuda
