// Rows of classes on the CPU: where the classes of a row lie, and how long rows are cut into
// pieces.
#pragma once

#include "cpu/block.h"
#include "cpu/parallel.h"

namespace lossops::cpu {

// Where classes [first, ...) of a row lie.
inline BlockOffsets classes_of_row(int64_t row_offset, int64_t class_stride, int64_t first) {
  BlockOffsets result;
  result.base = row_offset + first * class_stride;
  result.stride = class_stride;
  return result;
}

// Classes further apart than this are those of an image, whose rows are neighbours.
constexpr int64_t kNear = 16;

// The largest of values[0..width), a NaN left aside.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t block_max(const acc_t* values, int width) {
  acc_t lanes[kVector];
  std::fill_n(lanes, kVector, -math::infinity<acc_t>());
  for (const acc_t* vector = values; vector < values + width; vector += kVector) {
    for (int lane = 0; lane < kVector; ++lane) {
      lanes[lane] = vector[lane] > lanes[lane] ? vector[lane] : lanes[lane];
    }
  }
  return fold_lanes<kVector>(lanes,
                             [](acc_t a, acc_t b) LOSSOPS_ALWAYS_INLINE { return a > b ? a : b; });
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE void gather_inline(const void* data, DType dtype, int64_t offset,
                                       int64_t stride, const int64_t* index, int64_t index_stride,
                                       int count, acc_t* __restrict values) {
  const auto gather_typed = [&](const auto* from) LOSSOPS_ALWAYS_INLINE {
    for (int i = 0; i < count; ++i) {
      values[i] = to_acc<acc_t>(from[offset + i * stride + index[i] * index_stride]);
    }
  };
  switch (dtype) {
    case DType::kFloat64:
      return gather_typed(static_cast<const double*>(data));
    case DType::kFloat32:
      return gather_typed(static_cast<const float*>(data));
    case DType::kFloat16:
      return gather_typed(static_cast<const half_t*>(data));
    case DType::kBFloat16:
      return gather_typed(static_cast<const bfloat16_t*>(data));
    default:
      for (int i = 0; i < count; ++i) {
        values[i] = load_as<acc_t>(data, dtype, offset + i * stride + index[i] * index_stride);
      }
  }
}

// values[i] = data[offset + i * stride + index[i] * index_stride]. All callers share one copy:
// the others were 26 KB of the wheel.
template <typename acc_t>
__attribute__((noinline)) void gather(const void* data, DType dtype, int64_t offset, int64_t stride,
                                      const int64_t* index, int64_t index_stride, int count,
                                      acc_t* values) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    gather_inline(data, dtype, offset, stride, index, index_stride, count, values);
  });
}

// Class indices of a block of rows.
inline void load_indices(const Operand& operand, const BlockOffsets& at, int count,
                         int64_t* indices) {
  const auto load = [&](const auto* data) {
    at.for_each_run(count, [&](int j, int length, int64_t offset) {
      for (int i = 0; i < length; ++i) {
        indices[j + i] = data[offset + i * at.stride];
      }
    });
  };
  switch (operand.dtype) {
    case DType::kInt64:
      return load(static_cast<const int64_t*>(operand.data));
    case DType::kInt32:
      return load(static_cast<const int32_t*>(operand.data));
    default:
      return load(static_cast<const uint8_t*>(operand.data));
  }
}

}  // namespace lossops::cpu
