// How a warp walks through rows that are not one run of whole vectors, such as padded ones, to copy
// them to shared memory and their gradients back.
#pragma once

#include <cstdint>

#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_layout.h"

namespace lossops::cuda {

// Calls body(r, c, offset) for each `kStep`th class c of the rows first_row + r, r < rows. offset:
// of that class in the operand, in elements. steps: of a row; the last of them may have fewer
// classes. Neighbouring lanes take neighbouring classes, across rows, so that short rows keep all
// lanes at work. All lanes of a warp must call it. kInFlight: steps of a lane that overlap, of rows
// of one dimension. Stores lose nothing with 1; loads and asynchronous copies take 1.5 times as
// long.
template <int kStep, int kInFlight, typename Body>
__device__ __forceinline__ void for_classes(const IterationSpace& space, const Operand& operand,
                                            int64_t class_stride, const Divisor& steps,
                                            int64_t first_row, int rows, const Body& body) {
  const int row_steps = static_cast<int>(steps.value);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (space.ndim > 1) {
    // Offsets of several dimensions take long: each lane works out those of a row.
    for (int row = 0; row < rows; row += kWarpSize) {
      const int64_t own = row_offset(space, operand, first_row + min(row + lane, rows - 1));
      const int count = min(rows - row, kWarpSize) * row_steps;
#pragma unroll 1
      for (int first = 0; first < count; first += kWarpSize) {
        const int step = min(first + lane, count - 1);
        const int r = static_cast<int>(steps.quotient(static_cast<uint32_t>(step)));
        const int64_t offset = __shfl_sync(kAllLanes, own, r);
        const int c = (step - r * row_steps) * kStep;
        if (first + lane < count) {
          body(row + r, c, offset + c * class_stride);
        }
      }
    }
    return;
  }
  const int64_t first = first_row * operand.strides[0];
#pragma unroll kInFlight
  for (int step = lane; step < rows * row_steps; step += kWarpSize) {
    const int r = static_cast<int>(steps.quotient(static_cast<uint32_t>(step)));
    const int c = (step - r * row_steps) * kStep;
    body(r, c, first + r * operand.strides[0] + c * class_stride);
  }
}

// Elements of half types that are written at a time.
constexpr int kQuad = 4;

// Whether store_rows() may write gradients in quads: contiguous rows of half types, at any address.
inline bool may_store_quads(const CrossEntropyForwardArgs& args) {
  return element_size(args.input.dtype) == 2 &&
         rows_follow(args, args.grad_input, args.grad_input_class_stride);
}

// Writes the gradients of half types of the rows first_row + r, r < rows, which lie at elements + r
// * pitch in shared memory. in_quads: may_store_quads(). Quads are the aligned 8 bytes of memory.
// The first and the last one may hold elements of other rows, too: then they are written one by
// one.
template <typename scalar_t>
__device__ __forceinline__ void store_rows(const CrossEntropyForwardArgs& args,
                                           const Divisor& classes, const scalar_t* elements,
                                           int pitch, bool in_quads, int64_t first_row, int rows) {
  const int num_classes = static_cast<int>(args.num_classes);
  auto* const gradients = static_cast<scalar_t*>(args.grad_input.data);
  const int count = rows * num_classes;
  // How many elements of the first quad lie before these rows.
  const auto* const begin_of_rows = gradients + first_row * num_classes;
  const int before = in_quads ? static_cast<int>(reinterpret_cast<uintptr_t>(begin_of_rows) /
                                                 sizeof(scalar_t) % kQuad)  // fault: tile-quads
                              : 0;
#pragma unroll 1
  for (int begin_of_quad = static_cast<int>(threadIdx.x) % kWarpSize * kQuad - before;
       begin_of_quad < count; begin_of_quad += kWarpSize * kQuad) {
    const int e = max(begin_of_quad, 0);
    int r = static_cast<int>(classes.quotient(static_cast<uint32_t>(e)));
    int c = e - r * num_classes;
    if (in_quads && begin_of_quad >= 0 && begin_of_quad + kQuad <= count) {
      const scalar_t* from = elements + r * pitch + c;
      uint32_t bits[kQuad];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        bits[i] = word_of(*from, 0);
        ++from;
        if (++c == num_classes) {
          c = 0;
          from += pitch - num_classes;
        }
      }
      *reinterpret_cast<uint2*>(gradients + first_row * num_classes + e) = {
          bits[0] | bits[1] << 16, bits[2] | bits[3] << 16};  // fault: gradient-quads
      continue;
    }
#pragma unroll 1
    for (int i = e; i < min(begin_of_quad + kQuad, count); ++i) {
      gradients[row_offset(args.rows, args.grad_input, first_row + r) +
                c * args.grad_input_class_stride] = elements[r * pitch + c];
      if (++c == num_classes) {
        c = 0;
        ++r;
      }
    }
  }
}

}  // namespace lossops::cuda
