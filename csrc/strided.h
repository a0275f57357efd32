// Offsets into strided tensors, and single elements of any dtype. Host and device.
#pragma once

#include <type_traits>
#include <utility>

#include "launchers.h"

namespace lossops {

// Where a linear index is in one dimension; what is left of it is of those after it.
LOSSOPS_HOST_DEVICE int64_t take_coordinate(const IterationSpace& space, int dim, int64_t& index) {
  // The slowest dimension takes what is left, undivided.
  if (dim >= space.ndim - 1) {
    return index;
  }
  const int64_t size = space.sizes[dim];
  // 32-bit division is several times cheaper than 64-bit.
  if ((index >> 32) == 0 && (size >> 32) == 0) {
    const uint32_t dividend = static_cast<uint32_t>(index);
    const uint32_t quotient = dividend / static_cast<uint32_t>(size);
    index = quotient;
    return dividend - quotient * static_cast<uint32_t>(size);
  }
  const int64_t quotient = index / size;
  const int64_t coordinate = index - quotient * size;
  index = quotient;
  return coordinate;
}

// Offsets, in elements, of one linear index into N operands of the same space. On a GPU the
// compiler would unroll the loop, which makes kernels some tens of KB larger.
template <int N>
LOSSOPS_HOST_DEVICE void strided_offsets(const IterationSpace& space,
                                         const Operand* const (&operands)[N], int64_t index,
                                         int64_t (&offsets)[N]) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int dim = 0; dim < space.ndim; ++dim) {
    const int64_t coordinate = take_coordinate(space, dim, index);
    for (int n = 0; n < N; ++n) {
      offsets[n] += coordinate * operands[n]->strides[dim];
    }
  }
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t load_operand(const Operand& operand, int64_t offset) {
  return load_as<acc_t>(operand.data, operand.dtype, offset);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void store_operand(const Operand& operand, int64_t offset, acc_t value) {
  store_as<acc_t>(operand.data, operand.dtype, offset, value);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t load_grad_output(const Operand& grad_output, int64_t offset) {
  // fault: grad-output
  return grad_output.data == nullptr ? acc_t(1) : load_operand<acc_t>(grad_output, offset);
}

// grad_output of a reduction, divided by what the mean divides by. args: ElementwiseArgs, or what
// has the same members. mean_terms: of a weighted mean; else null.
template <typename acc_t, typename Args>
LOSSOPS_HOST_DEVICE acc_t reduction_scale(const Args& args, acc_t grad_output,
                                          const double* mean_terms = nullptr) {
  if (args.reduction != Reduction::kMean) {
    return grad_output;
  }
  // fault: weighted-mean-scale
  return grad_output / static_cast<acc_t>(mean_terms != nullptr ? mean_terms[0] : args.denominator);
}

// Whether a kept gradient is the one that is wanted.
template <typename BackwardArgs>
LOSSOPS_HOST_DEVICE bool kept_is_right(const BackwardArgs& args) {
  return args.kept && load_operand<double>(args.grad_output, 0) == 1;  // fault: kept-is-right
}

enum class Wanted : int8_t { kInput, kTarget, kWeight };

}  // namespace lossops
