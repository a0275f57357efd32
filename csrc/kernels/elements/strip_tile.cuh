// Tiles of strips: see strip_plan.h.
#pragma once

#include <cstdint>

#include "kernels/elements/single_values.cuh"
#include "kernels/elements/thread_begins.cuh"
#include "kernels/elements/tiles.h"
#include "kernels/elements/unit_values.cuh"
#include "kernels/primitives/any_half.cuh"

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

  // turn: see Walk::end().
  __device__ __forceinline__ StripTile(const StripPlan& plan, const Walk<kWidth>& walk,
                                       const ThreadBegins& begins, int turn)
      : plan_(plan), walk_(walk), begins_(begins), turn_(turn) {
    const bool is_aligned = walk.is_aligned(plan, turn, kSteps - 1);
    const UnitTraits traits = is_aligned ? plan.traits : plan.part_traits;
    traits_ = UnitTraits(unfolded(traits.bits()));
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
  __device__ __forceinline__ bool has(int n) const {
    return walk_.has(plan_, turn_, n / kWidth, n % kWidth);
  }
  __device__ __forceinline__ bool has_all() const {
    return walk_.has_all(plan_, turn_, kSteps - 1);
  }

  // Whether an operand must be read again in this turn.
  __device__ __forceinline__ bool is_new(Which which) const {
    return turn_ == 0 || traits_.moves(which);
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

 protected:
  const StripPlan& plan_;
  const Walk<kWidth>& walk_;
  const ThreadBegins& begins_;
  const int turn_;
  UnitTraits traits_;
  int indices_[kSteps];  // see Walk::index()
};

// Units of 16 bytes of scalar_t. Half types beside float32 have four columns, too: 8 bytes.
template <typename scalar_t, int kSteps>
class UnitStripTile : public StripTile<float, kSteps, kVectorSize<scalar_t>, scalar_t> {
 public:
  using StripTile<float, kSteps, kVectorSize<scalar_t>, scalar_t>::StripTile;
  using Values = UnitValues<UnitStripTile>;

  __device__ __forceinline__ UnitKind kind(Which which) const {
    return this->traits_.kind(which);
  }
  __device__ __forceinline__ int stride(Which which) const {
    return static_cast<int>(this->operand(which).strides[0]);
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

// Units of one column.
template <typename acc_t, int kSteps>
class SingleStripTile : public StripTile<acc_t, kSteps, 1, acc_t> {
 public:
  using StripTile<acc_t, kSteps, 1, acc_t>::StripTile;
  using Values = SingleValues<SingleStripTile>;

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps]) const {
    Values(results).store(*this, which);
  }
  template <typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    char* addresses[kSteps];
    this->locate(which, addresses);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, addresses[step]);
    }
  }
};

}  // namespace lossops::cuda
