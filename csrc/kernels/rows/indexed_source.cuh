// The rows of a call of cross entropy with class indices, for the kernels of row_pass.cuh.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "launchers.h"

namespace lossops::cuda {

// Whether the dtype of targets holds `ignore_index`. RowSource compares as many bits as a target
// has: -100 would be equal to a target of 156 in uint8.
inline bool targets_hold_ignore_index(const CrossEntropyArgs& args) {
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

// The rows of a slice, of which ignored ones do not count.
inline RowSource indexed_source(const RowSlice& slice, const CrossEntropyArgs& args) {
  return RowSource(slice, args.input, args.input_class_stride,
                   targets_hold_ignore_index(args) ? args.target : Operand{}, args.ignore_index);
}

}  // namespace lossops::cuda
