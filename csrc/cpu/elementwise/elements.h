// The elements of one block as vectors, and the loop that computes a loss of them.
#pragma once

#include "cpu/block.h"

namespace lossops::cpu {

// The elements of a block of an operand, padded. If they are all the same element, there is one
// vector of it, and `step` is 0.
template <typename acc_t>
struct Elements {
  const acc_t* data = nullptr;
  int step = 1;

  // The kVector elements from j on, which is a multiple of kVector.
  LOSSOPS_HOST_DEVICE const acc_t* vector(int j) const { return data + j * step; }

  // How many elements there are, of `count` in the block.
  LOSSOPS_HOST_DEVICE int width(int count) const { return step == 0 ? kVector : padded(count); }
};

namespace detail {

template <typename acc_t, typename Body, typename... Vectors>
LOSSOPS_HOST_DEVICE void compute_vector(acc_t* results, const Body& body,
                                        const Vectors*... vectors) {
#pragma GCC ivdep
#pragma GCC unroll 1  // unrolled early, gcc 12 would leave it to scalars
  for (int lane = 0; lane < kVector; ++lane) {
    results[lane] = body(vectors[lane]...);
  }
}

}  // namespace detail

// Writes body(x, y, ...) of the elements of a block to `results`, which may be one of the operands.
template <typename acc_t, typename Body, typename... Operands>
LOSSOPS_HOST_DEVICE void compute_block(int width, acc_t* results, const Body& body,
                                       const Operands&... operands) {
  for (int j = 0; j < width; j += kVector) {
    detail::compute_vector(results + j, body, operands.vector(j)...);
  }
}

}  // namespace lossops::cpu
