// The rows of a call of cross entropy with class indices, for the kernels of row_pass.cuh.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "launchers.h"

namespace lossops::cuda {

// Whether a target may be `ignore_index`.
inline bool can_be_ignored(const CrossEntropyArgs& args) {
  const auto is_in = [&](auto like) {
    using Limits = std::numeric_limits<decltype(like)>;
    return args.ignore_index >= Limits::min() && args.ignore_index <= Limits::max();
  };
  switch (args.target.dtype) {
    case DType::kInt64:
      return true;
    case DType::kInt32:
      return is_in(int32_t{});
    default:
      return is_in(uint8_t{});
  }
}

// Logits of ignored rows are not read.
inline RowSource indexed_source(const RowSlice& slice, const CrossEntropyArgs& args) {
  return RowSource(slice, args.input, args.input_class_stride,
                   can_be_ignored(args) ? args.target : Operand{}, args.ignore_index);
}

}  // namespace lossops::cuda
