// How a warp walks through rows that are not one run of whole vectors, such as padded ones, to copy
// them to shared memory and their gradients back.
#pragma once

#include <cstdint>

#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"
#include "kernels/rows/cross_entropy_row.cuh"

namespace lossops::cuda {

// Calls body(r, c, offset) for each `kStep`th class c of the rows first_row + r, r < rows. offset:
// of that class in the operand, in elements. steps: of a row; the last of them may have fewer
// classes. Neighbouring lanes take neighbouring classes, across rows, so that short rows keep all
// lanes at work. kInFlight: steps of a lane that overlap, of rows of one dimension. Stores
// lose nothing with 1; loads and asynchronous copies take 1.5 times as long.
template <int kStep, int kInFlight, typename Body>
__device__ __forceinline__ void for_classes(const IterationSpace& space, const Operand& operand,
                                            int64_t class_stride, const Divisor& steps,
                                            int64_t first_row, int rows, const Body& body) {
  const int row_steps = static_cast<int>(steps.value);
  const int count = rows * row_steps;
  const auto visit = [&](int step, auto&& row_offset_of) {
    const int r = static_cast<int>(steps.quotient(static_cast<uint32_t>(step)));
    const int c = (step - r * row_steps) * kStep;
    body(r, c, row_offset_of(r) + c * class_stride);
  };
  int step = static_cast<int>(threadIdx.x) % kWarpSize;
  if (kInFlight > 1 && space.ndim <= 1) {
    const int64_t first = first_row * operand.strides[0];
#pragma unroll kInFlight
    for (; step < count; step += kWarpSize) {
      visit(step, [&](int r) { return first + r * operand.strides[0]; });
    }
    return;
  }
#pragma unroll 1
  for (; step < count; step += kWarpSize) {
    visit(step, [&](int r) { return row_offset(space, operand, first_row + r); });
  }
}

}  // namespace lossops::cuda
