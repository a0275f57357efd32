// How the rows of logits, gradients and targets lie in memory. Host code without CUDA.
#pragma once

#include <cstdint>

#include "kernels/primitives/sizes.h"
#include "launchers.h"

namespace lossops::cuda {

// Whether every row of `other` lies as the logits' row does, counted from the last boundary of 16
// bytes. fp32 and half types.
inline bool lies_as_input(const CrossEntropyArgs& args, const Operand& other,
                          int64_t class_stride) {
  const int64_t vector = kVectorBytes / element_size(args.input.dtype);
  bool same =
      other.dtype == args.input.dtype && class_stride == 1 &&
      (reinterpret_cast<uintptr_t>(other.data) - reinterpret_cast<uintptr_t>(args.input.data)) %
              kVectorBytes ==
          0;
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    same = same && (other.strides[dim] - args.input.strides[dim]) % vector == 0;
  }
  return same;
}

// From the first of the logits to the last, of contiguous classes.
inline int64_t elements_of(const CrossEntropyArgs& args) {
  int64_t elements = args.num_classes;
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    elements += (args.rows.sizes[dim] - 1) * args.input.strides[dim];
  }
  return elements;
}

// Whether rows of contiguous classes follow one another.
inline bool rows_follow(const CrossEntropyArgs& args, const Operand& operand,
                        int64_t class_stride) {
  return class_stride == 1 &&
         (args.rows.ndim == 0 || (args.rows.ndim == 1 && operand.strides[0] == args.num_classes));
}

// The same, from a boundary of 16 bytes.
inline bool rows_follow_in_vectors(const CrossEntropyArgs& args, const Operand& operand,
                                   int64_t class_stride) {
  return rows_follow(args, operand, class_stride) && is_vector_aligned(operand.data);
}

// Whether the class indices of all rows have one stride.
inline bool targets_are_in_line(const CrossEntropyArgs& args) {
  bool in_line = args.rows.ndim >= 1 && !args.target_is_probability;
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    in_line = in_line &&
              args.target.strides[dim] == args.target.strides[dim - 1] * args.rows.sizes[dim - 1];
  }
  return in_line;
}

// int64 class indices, one after the other from a boundary of 16 bytes.
inline bool targets_are_in_vectors(const CrossEntropyArgs& args) {
  return args.target.dtype == DType::kInt64 && is_vector_aligned(args.target.data) &&
         (args.rows.ndim == 0 || (targets_are_in_line(args) && args.target.strides[0] == 1));
}

// Whether vectors can access all rows.
inline bool rows_are_aligned(const CrossEntropyArgs& args, const Operand& operand) {
  bool aligned = is_vector_aligned(operand.data);
  for (int dim = 0; dim < args.rows.ndim; ++dim) {
    aligned = aligned && operand.strides[dim] * element_size(operand.dtype) % kVectorBytes == 0;
  }
  return aligned;
}

}  // namespace lossops::cuda
