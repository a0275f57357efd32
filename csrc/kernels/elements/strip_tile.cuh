// Tiles of strips: see strip_plan.h.
#pragma once

#include <cstdint>

#include "kernels/elements/single_values.cuh"
#include "kernels/elements/thread_begins.cuh"
#include "kernels/elements/tiles.h"
#include "kernels/elements/unit_values.cuh"
#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/async_copy.cuh"

namespace lossops::cuda {

// Where the walks of a strip begin.
template <int kWidth>
__device__ __forceinline__ void set_begins(const StripPlan& plan, const Strip& strip,
                                           const Walk<kWidth>& walk) {
  const int64_t column = walk.column(strip);
  const int64_t walked = walk.walked(strip);
  ThreadBegins::for_each(plan, [&](char*& begin, const StripOperand& operand) {
    // fault: elementwise-offset
    begin = operand.data + column * operand.strides[0] + walked * operand.strides[1];
  });
  plan.extents.for_each_index(walk.rest(strip), 2, [&](int dim, int64_t index) {
    ThreadBegins::for_each(plan, [&](char*& begin, const StripOperand& operand) {
      begin += index * operand.strides[dim];
    });
  });
}

// The units that a thread takes at once: kSteps of kWidth columns. scalar_t: a half type, of all
// operands; else each has its own type.
template <typename acc_t_, int kSteps_, int kWidth_, typename scalar_t_>
class StripTile {
 public:
  using acc_t = acc_t_;
  using scalar_t = scalar_t_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = kMayBeSubnormal<scalar_t>;
  // Only units of neighbours, which are the half types. Of units that are spread, a thread would
  // ask for one column each, and float32 was slower so.
  static constexpr bool kLooksAhead = kIsHalf;

  // turn: see Walk::end().
  __device__ __forceinline__ StripTile(const StripPlan& plan, const Walk<kWidth>& walk,
                                       const ThreadBegins& begins, int turn)
      : plan_(plan), walk_(walk), begins_(begins), turn_(turn), traits_(plan.traits) {
    if (!Walk<kWidth>::kSpreads && !walk.is_aligned(plan, turn, kSteps - 1)) {
      traits_ = plan.part_traits;
    }
    traits_ = UnitTraits(unfolded(traits_.bits()));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      indices_[step] = walk.index(plan, turn, step);
    }
  }

  __device__ __forceinline__ const StripOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ bool is_half(Which which) const {
    return kIsHalf || traits_.is_half(which);
  }
  // Whether all operands are of one half type.
  __device__ __forceinline__ bool has_common_half() const {
    return kIsHalf || plan_.has_common_half;
  }
  // Whether the columns of a unit have one number.
  __device__ __forceinline__ bool is_one(Which which) const {
    return kWidth > 1 && traits_.kind(which) == UnitKind::kOne;
  }
  __device__ __forceinline__ unsigned counted(int step) const {
    return unfolded(walk_.counted(plan_, turn_, step));
  }
  __device__ __forceinline__ bool has_all() const {
    return walk_.has_all(plan_, turn_, kSteps - 1);
  }
  // See Walk::has_rows().
  __device__ __forceinline__ bool has_rows() const {
    return walk_.has_rows(plan_, turn_, kSteps - 1);
  }

  // Whether an operand is another in each turn; else all steps have the same unit.
  __device__ __forceinline__ bool moves(Which which) const { return traits_.moves(which); }
  // Whether an operand must be read again in this turn.
  __device__ __forceinline__ bool is_new(Which which) const { return turn_ == 0 || moves(which); }
  // Numbers of a thread that it keeps from turn to turn, one a column. They lie in shared memory,
  // because registers are short.
  static constexpr bool kKeeps = sizeof(acc_t) == 4 && kWidth > 1;
  __device__ __forceinline__ static acc_t& kept(int i) {
    __shared__ acc_t numbers[kWidth][kTileThreads];
    return numbers[i][threadIdx.x];
  }

  // The addresses of a thread's units.
  __device__ __forceinline__ void locate(Which which, char* (&addresses)[kSteps]) const {
    // Kept in one pair of registers, so that adding a distance takes one instruction.
    char* const begin = unfolded(begins_.get(plan_.slot_of(which)));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      addresses[step] = begin + int64_t{indices_[step]} * operand(which).walk_stride;
      __builtin_assume(__isGlobal(addresses[step]));
    }
  }

  // Asks for the units of the next turn, so that they are in the L2 cache when they are read. After
  // the last turn there are none, and it asks for some again.
  __device__ __forceinline__ void ask_for_next(Which which) const {
    if (moves(which)) {
      const char* const begin = begins_.get(plan_.slot_of(which));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int index = walk_.index(plan_, turn_ + plan_.walk_turn, step);
        prefetch(begin + int64_t{index} * operand(which).walk_stride);
      }
    }
  }

 protected:
  const StripPlan& plan_;
  const Walk<kWidth>& walk_;
  const ThreadBegins& begins_;
  const int turn_;
  UnitTraits traits_;
  int indices_[kSteps];  // see Walk::index()
};

// Units of neighbours: 16 bytes of a half type.
template <typename scalar_t, int kSteps>
class JoinedStripTile : public StripTile<float, kSteps, kVectorSize<scalar_t>, scalar_t> {
 public:
  using StripTile<float, kSteps, kVectorSize<scalar_t>, scalar_t>::StripTile;
  using Values = UnitValues<JoinedStripTile>;

  __device__ __forceinline__ UnitKind kind(Which which) const { return this->traits_.kind(which); }
  __device__ __forceinline__ int stride(Which which) const {
    return this->operand(which).column_stride;
  }
  // Whether the next lane of the warp, or the one before, has what lies beside the unit of a step.
  __device__ __forceinline__ bool joins_next(int step) const {
    return this->walk_.joins_next(this->plan_, this->turn_, step);
  }
  __device__ __forceinline__ bool joins_previous(int step) const {
    return this->walk_.joins_previous(this->plan_, this->turn_, step);
  }
  __device__ __forceinline__ void store(Which which, const float (&values)[Values::kCount]) const {
    Values::store(*this, which, values);
  }
};

// Units that are spread, of operands of any type, or of double.
template <typename acc_t, int kSteps, int kWidth>
class SpreadStripTile : public StripTile<acc_t, kSteps, kWidth, acc_t> {
 public:
  using Values = SingleValues<SpreadStripTile>;

  __device__ __forceinline__ SpreadStripTile(const StripPlan& plan, const Walk<kWidth>& walk,
                                             const ThreadBegins& begins, int turn)
      : StripTile<acc_t, kSteps, kWidth, acc_t>(plan, walk, begins, turn) {
    // Else the compiler would keep their products with the strides of all operands, of 64 bits.
#pragma unroll
    for (int i = 1; i < kWidth; ++i) {
      offsets_[i] = unfolded(walk.offset(i));
    }
  }

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[Values::kCount]) const {
    Values(results).store(*this, which);
  }
  template <typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    char* addresses[kSteps];
    this->locate(which, addresses);
    const int stride = this->operand(which).column_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step * kWidth, addresses[step]);
#pragma unroll
      for (int i = 1; i < kWidth; ++i) {
        body(step * kWidth + i, addresses[step] + int64_t{offsets_[i]} * stride);
      }
    }
  }

 private:
  int offsets_[kWidth];  // see Walk::offset()
};

}  // namespace lossops::cuda
