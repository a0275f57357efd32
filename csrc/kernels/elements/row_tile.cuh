// Tiles of rows whose elements lie anywhere: one element a thread and access.
#pragma once

#include <cstdint>

#include "kernels/elements/places.cuh"
#include "kernels/elements/values.cuh"
#include "kernels/primitives/thread_reduce.cuh"

namespace lossops::cuda {

// kSteps elements of a thread, kTileThreads apart; all of them are there. kIsHalf: all operands are
// of half types.
template <typename acc_t_, int kSteps_, bool kIsHalf_ = false>
class RowTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = kIsHalf_;
  static constexpr bool kHasSubnormals = true;
  using Values = PlannedValues<RowTile>;
  friend Values;

  // first: the thread's first element in the chunk.
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
  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps]) {
    Values values;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      values.at(step) = results[step];
    }
    values.store(*this, which);
  }
  __device__ __forceinline__ acc_t total(const acc_t (&values)[kSteps]) const {
    return pairwise_sum(values);
  }

 private:
  __device__ __forceinline__ const PlanOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_element(Which which, Body&& body) const {
    const PlanOperand& operand = plan_.operands[which];
    const int32_t stride = operand.gaps[0];
    char* const data = places_.address(which, first_);
    if (kSteps > 1 && operand.is_simple && stride == kBytes) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        body(step, data + times(rows_[step], operand.gaps[1]) + step * (kTileThreads * kBytes));
      }
      keep_apart();
      return;
    }
    int64_t offsets[kSteps];
    uint32_t rest[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      rest[step] = rows_[step];
      offsets[step] =
          times(rest[step], operand.gaps[1]) + static_cast<int64_t>(step * kTileThreads) * stride;
    }
    add_further_gaps(plan_.extents, operand.gaps, rest, offsets);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, data + offsets[step]);
    }
  }
  __device__ __forceinline__ void take(Which /*which*/, Values& /*values*/) const {}
  __device__ __forceinline__ void give(Which /*which*/, Values& /*values*/) const {}

  const ElementPlan& plan_;
  const ChunkPlaces& places_;
  const uint32_t first_;
  uint32_t rows_[kSteps];  // by step
};

}  // namespace lossops::cuda
