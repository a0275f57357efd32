// Blocks of elements: what is read through any layout and any dtype becomes a short
// array of acc_t, and the math of a loss is one simple loop over such arrays.
//
// Arrays are computed up to a multiple of kVector, tail included, so that an element's
// bits do not depend on its place in the block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"
#include "launchers.h"

namespace lossops::cpu {

constexpr int kBlock = 256;  // five fp32 arrays of it fit in a quarter of an L1 cache
constexpr int kVector = 16;  // fp32 elements of the widest vector

LOSSOPS_HOST_DEVICE int padded(int count) { return (count + kVector - 1) / kVector * kVector; }

// Where the elements of a block lie in one operand: element j at base + j * stride, or
// at base + scattered[j].
struct BlockOffsets {
  int64_t base = 0;
  int64_t stride = 0;
  const int64_t* scattered = nullptr;

  LOSSOPS_HOST_DEVICE int64_t operator[](int j) const {
    return base + (scattered != nullptr ? scattered[j] : j * stride);
  }
  LOSSOPS_HOST_DEVICE BlockOffsets shifted(int64_t offset) const {
    return {base + offset, stride, scattered};
  }
  LOSSOPS_HOST_DEVICE bool contiguous() const { return scattered == nullptr && stride == 1; }
};

// Walks an iteration space block by block and says where each block lies in N operands.
template <int N>
class BlockWalker {
 public:
  BlockWalker(const IterationSpace& space, const Operand* const (&operands)[N], int64_t begin)
      : space_(space) {
    for (int n = 0; n < N; ++n) {
      operands_[n] = operands[n];
    }
    seek(begin);
  }

  // The next block starts at this linear index.
  void seek(int64_t index) {
    for (int n = 0; n < N; ++n) {
      offsets_[n] = 0;
    }
    for (int dim = 0; dim < space_.ndim; ++dim) {
      const int64_t size = std::max<int64_t>(space_.sizes[dim], 1);
      coordinates_[dim] = index % size;
      index /= size;
      for (int n = 0; n < N; ++n) {
        offsets_[n] += coordinates_[dim] * operands_[n]->strides[dim];
      }
    }
  }

  // Moves on to the next count <= kBlock elements.
  void next(int count) {
    const int64_t run = space_.ndim > 0 ? space_.sizes[0] - coordinates_[0] : 1;
    if (count <= run) {
      for (int n = 0; n < N; ++n) {
        block_[n] = {offsets_[n], stride(n), nullptr};
      }
      advance(count);
      return;
    }
    int done = 0;
    while (done < count) {
      const int length =
          static_cast<int>(std::min<int64_t>(count - done, space_.sizes[0] - coordinates_[0]));
      for (int n = 0; n < N; ++n) {
        for (int j = 0; j < length; ++j) {
          scattered_[n][done + j] = offsets_[n] + j * stride(n);
        }
      }
      done += length;
      advance(length);
    }
    for (int n = 0; n < N; ++n) {
      block_[n] = {0, 0, scattered_[n]};
    }
  }

  const BlockOffsets& operator[](int n) const { return block_[n]; }

 private:
  int64_t stride(int n) const { return space_.ndim > 0 ? operands_[n]->strides[0] : 0; }

  // Within the run along dimension 0.
  void advance(int64_t count) {
    if (space_.ndim == 0) {
      return;
    }
    coordinates_[0] += count;
    for (int n = 0; n < N; ++n) {
      offsets_[n] += count * operands_[n]->strides[0];
    }
    for (int dim = 0; coordinates_[dim] == space_.sizes[dim] && dim + 1 < space_.ndim; ++dim) {
      coordinates_[dim] = 0;
      coordinates_[dim + 1] += 1;
      for (int n = 0; n < N; ++n) {
        offsets_[n] += operands_[n]->strides[dim + 1] - space_.sizes[dim] * operands_[n]->strides[dim];
      }
    }
  }

  const IterationSpace& space_;
  const Operand* operands_[N];
  int64_t coordinates_[kMaxDims];
  int64_t offsets_[N];
  BlockOffsets block_[N];
  int64_t scattered_[N][kBlock];
};

namespace detail {

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void load_typed(const scalar_t* data, const BlockOffsets& at, int count,
                                    acc_t* values) {
  if (at.contiguous()) {
    const scalar_t* run = data + at.base;
    for (int j = 0; j < count; ++j) {
      values[j] = to_acc<acc_t>(run[j]);
    }
  } else {
    for (int j = 0; j < count; ++j) {
      values[j] = to_acc<acc_t>(data[at[j]]);
    }
  }
}

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void store_typed(scalar_t* data, const BlockOffsets& at, int count,
                                     const acc_t* values) {
  if (at.contiguous()) {
    scalar_t* run = data + at.base;
    for (int j = 0; j < count; ++j) {
      run[j] = from_acc<scalar_t>(values[j]);
    }
  } else {
    for (int j = 0; j < count; ++j) {
      data[at[j]] = from_acc<scalar_t>(values[j]);
    }
  }
}

}  // namespace detail

// Reads the count elements of a block; the padding becomes 1. Not inlined: one copy of
// these loops serves every loss.
template <typename acc_t>
__attribute__((noinline)) void load_block(const Operand& operand, const BlockOffsets& at, int count,
                                          acc_t* values) {
  with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
    switch (operand.dtype) {
      case DType::kFloat64:
        detail::load_typed(static_cast<const double*>(operand.data), at, count, values);
        break;
      case DType::kFloat32:
        detail::load_typed(static_cast<const float*>(operand.data), at, count, values);
        break;
      case DType::kFloat16:
        detail::load_typed(static_cast<const half_t*>(operand.data), at, count, values);
        break;
      case DType::kBFloat16:
        detail::load_typed(static_cast<const bfloat16_t*>(operand.data), at, count, values);
        break;
      default:
        for (int j = 0; j < count; ++j) {
          values[j] = load_as<acc_t>(operand.data, operand.dtype, at[j]);
        }
    }
  });
  for (int j = count; j < padded(count); ++j) {
    values[j] = acc_t(1);
  }
}

template <typename acc_t>
__attribute__((noinline)) void store_block(const Operand& operand, const BlockOffsets& at,
                                           int count, const acc_t* values) {
  with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
    switch (operand.dtype) {
      case DType::kFloat64:
        return detail::store_typed(static_cast<double*>(operand.data), at, count, values);
      case DType::kFloat32:
        return detail::store_typed(static_cast<float*>(operand.data), at, count, values);
      case DType::kFloat16:
        return detail::store_typed(static_cast<half_t*>(operand.data), at, count, values);
      case DType::kBFloat16:
        return detail::store_typed(static_cast<bfloat16_t*>(operand.data), at, count, values);
      default:
        return;  // gradients and losses are floating
    }
  });
}

// A sum in independent fp64 lanes: exact enough for any number of terms, and what the
// vectoriser may not reorder by itself.
struct LaneSum {
  double lanes[kVector] = {};

  // Adds values[0..count); the padding is overwritten.
  template <typename acc_t>
  LOSSOPS_HOST_DEVICE void add(acc_t* values, int count) {
    const int width = padded(count);
    for (int j = count; j < width; ++j) {
      values[j] = acc_t(0);
    }
    for (int j = 0; j < width; j += kVector) {
      for (int lane = 0; lane < kVector; ++lane) {
        lanes[lane] += static_cast<double>(values[j + lane]);
      }
    }
  }

  LOSSOPS_HOST_DEVICE void scale(double factor) {
    for (double& lane : lanes) {
      lane *= factor;
    }
  }

  LOSSOPS_HOST_DEVICE double total() const {
    double sum = 0;
    for (const double lane : lanes) {
      sum += lane;
    }
    return sum;
  }
};

}  // namespace lossops::cpu
