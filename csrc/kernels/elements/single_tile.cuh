// Tiles of rows whose elements lie anywhere: one element a thread and access.
#pragma once

#include <cstdint>

#include "kernels/elements/matrix_places.cuh"
#include "kernels/elements/single_values.cuh"

namespace lossops::cuda {

// kSteps elements of a thread, kTileThreads apart; all of them are there. kIsHalf: all operands are
// of half types.
template <typename acc_t_, int kSteps_, bool kIsHalf_>
class SingleTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = kIsHalf_;
  static constexpr bool kHasSubnormals = true;
  using Values = SingleValues<SingleTile>;
  friend Values;

  // first: the thread's first element in the chunk.
  __device__ __forceinline__ SingleTile(const MatrixPlan& plan, const ChunkPlaces& chunk,
                                        uint32_t first)
      : places_(plan, chunk, first) {}

  __device__ __forceinline__ bool is_half() const {
    return kIsHalf || is_half_type(operand(kInput).dtype);
  }
  __device__ __forceinline__ bool has(int /*step*/) const { return true; }
  __device__ __forceinline__ bool has_all() const { return true; }
  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps]) {
    Values(results).store(*this, which);
  }

 private:
  __device__ __forceinline__ const MatrixOperand& operand(Which which) const {
    return places_.operand(which);
  }
  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_element(Which which, const Body& body) const {
    const int32_t stride = operand(which).stride;
    if (stride == kBytes) {
      places_.for_each_step(which, kBytes, body);
      keep_apart();
    } else {
      places_.for_each_step(which, stride, body);
    }
  }

  const MatrixPlaces<kSteps, kWidth> places_;
};

}  // namespace lossops::cuda
