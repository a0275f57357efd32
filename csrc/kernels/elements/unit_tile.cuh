// Tiles of units: see plan.h.
#pragma once

#include <cstdint>

#include "kernels/elements/quad_values.cuh"
#include "kernels/elements/single_values.cuh"
#include "kernels/elements/tile_places.cuh"

namespace lossops::cuda {

// What tiles of units have in common.
template <typename acc_t_, int kSteps_, int kWidth_>
class UnitTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = false;
  static constexpr bool kHasSubnormals = true;

  // number: of the thread's first unit in the tile.
  __device__ __forceinline__ UnitTile(const ElementPlan& plan, const UnitPlaces& places, int number)
      : plan_(plan), units_(plan, places, number) {}

  __device__ __forceinline__ const PlanOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ bool is_half() const { return is_half_type(operand(kInput).dtype); }
  __device__ __forceinline__ bool has(int n) const { return units_.has(n / kWidth, n % kWidth); }
  __device__ __forceinline__ bool has_all() const { return units_.has_all(); }

 protected:
  const ElementPlan& plan_;
  const Units<kSteps, kWidth> units_;
};

// Units of four columns.
template <int kSteps>
class QuadUnitTile : public UnitTile<float, kSteps, kQuad> {
 public:
  using UnitTile<float, kSteps, kQuad>::UnitTile;
  using Values = QuadValues<QuadUnitTile>;

  __device__ __forceinline__ UnitKind kind(Which which) const {
    const UnitKind kind = this->operand(which).kind;
    return kind == UnitKind::kVector && !this->units_.has_all() ? UnitKind::kStrided : kind;
  }
  __device__ __forceinline__ int stride(Which which) const {
    return static_cast<int>(this->operand(which).strides[0]);
  }
  __device__ __forceinline__ int spread() const { return this->plan_.spread; }
  __device__ __forceinline__ char* row(Which which, int step) const {
    return this->units_.row(which, step);
  }
  __device__ __forceinline__ int column(Which /*which*/, int step) const {
    return this->units_.column(step);
  }
  __device__ __forceinline__ void store(Which which, const float (&values)[Values::kCount]) const {
    Values::store(*this, which, values);
  }
  __device__ __forceinline__ void turn_read(Which /*which*/, Values& /*values*/) const {}
  __device__ __forceinline__ void turn_results(Which /*which*/,
                                               float (& /*values*/)[Values::kCount]) const {}
};

// Units of one column.
template <typename acc_t, int kSteps>
class SingleUnitTile : public UnitTile<acc_t, kSteps, 1> {
 public:
  using UnitTile<acc_t, kSteps, 1>::UnitTile;
  using Values = SingleValues<SingleUnitTile>;

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps]) {
    Values(results).store(*this, which);
  }
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      body(step, this->units_.row(which, step) +
                     this->units_.column(step) * this->operand(which).strides[0]);
    }
  }
};

}  // namespace lossops::cuda
