// Blocks of elements. An operand of any layout and dtype is read into a short array of acc_t, and
// the math of a loss is one simple loop over such arrays.
//
// The loop runs up to a multiple of kVector, past the last element. So each element is computed in
// a vector, and its bits do not depend on its place in the block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/half.h"
#include "cpu/simd.h"
#include "cpu/transpose.h"
#include "launchers.h"

namespace lossops::cpu {

// Elements of a block: many, as each block has a fixed cost; few enough for a dozen fp32 arrays to
// fit in an L1 cache.
constexpr int kBlock = 512;
constexpr int kVector = 32;  // two of the widest vectors of fp32

LOSSOPS_HOST_DEVICE int padded(int count) { return (count + kVector - 1) / kVector * kVector; }

// Where the elements of a block lie in one operand. A run is elements that are `stride` apart; a
// block is a run, and further ones of one length if the first does not hold it all.
struct BlockOffsets {
  int64_t base = 0;  // where the first run begins
  int64_t stride = 0;
  int first_length = kBlock;             // of the first run
  int length = kBlock;                   // of each further run
  const int64_t* run_offsets = nullptr;  // where the further runs begin, from base

  int64_t operator[](int j) const {
    if (j < first_length) {
      return base + j * stride;
    }
    const int behind = j - first_length;
    return base + run_offsets[behind / length] + behind % length * stride;
  }

  // The same block, `offset` elements further on in memory.
  BlockOffsets shifted(int64_t offset) const {
    BlockOffsets result = *this;
    result.base += offset;
    return result;
  }

  // Calls body(j, length, offset) for each run: elements [j, j + length) of the block, which begin
  // at offset.
  template <typename Body>
  LOSSOPS_HOST_DEVICE void for_each_run(int count, const Body& body) const {
    int run = std::min(first_length, count);
    body(0, run, base);
    for (int j = run, k = 0; j < count; j += run, ++k) {
      run = std::min(length, count - j);
      body(j, run, base + run_offsets[k]);
    }
  }

  // The same, but calls columns(j, runs, offset) for `runs` runs at once, a multiple of `side`,
  // whose elements are neighbours of those of the next: columns of a matrix in memory.
  template <typename Body, typename Columns>
  LOSSOPS_HOST_DEVICE void for_each_run_or_columns(int count, int side, const Body& body,
                                                   const Columns& columns) const {
    const auto begin_of = [&](int k) { return base + (k == 0 ? 0 : run_offsets[k - 1]); };
    for (int j = 0, k = 0; j < count;) {
      const int own = std::min(k == 0 ? first_length : length, count - j);
      const int whole_runs = own == length ? (count - j) / length : 0;
      int runs = std::min(1, whole_runs);
      while (runs < whole_runs && begin_of(k + runs) == begin_of(k) + runs) {
        ++runs;
      }
      runs -= runs % side;
      if (runs > 0) {
        columns(j, runs, begin_of(k));
        j += runs * length;
        k += runs;
      } else {
        body(j, own, begin_of(k));
        j += own;
        ++k;
      }
    }
  }
};

// Walks one operand block by block. Dimensions that make one run of this operand are merged, even
// if they do not in other operands: beside a broadcast row, a dense operand still is a single run.
class OperandWalker {
 public:
  void start(const IterationSpace& space, const Operand& operand, int64_t begin) {
    ndim_ = 1;
    sizes_[0] = space.ndim > 0 ? std::max<int64_t>(space.sizes[0], 1) : 1;
    strides_[0] = space.ndim > 0 ? operand.strides[0] : 0;
    for (int dim = 1; dim < space.ndim; ++dim) {
      const int64_t size = std::max<int64_t>(space.sizes[dim], 1);
      if (operand.strides[dim] == sizes_[ndim_ - 1] * strides_[ndim_ - 1]) {
        sizes_[ndim_ - 1] *= size;
      } else {
        sizes_[ndim_] = size;
        strides_[ndim_++] = operand.strides[dim];
      }
    }
    block_.stride = strides_[0];
    block_.run_offsets = run_offsets_;
    seek(begin);
  }

  void seek(int64_t index) {
    offset_ = 0;
    for (int dim = 0; dim < ndim_; ++dim) {
      coordinates_[dim] = index % sizes_[dim];
      index /= sizes_[dim];
      offset_ += coordinates_[dim] * strides_[dim];
    }
  }

  void next(int count) {
    block_.base = offset_;
    if (ndim_ == 1) {
      offset_ += count * strides_[0];
      return;
    }
    const int64_t size = sizes_[0];
    const int64_t left = size - coordinates_[0];
    block_.first_length = static_cast<int>(std::min<int64_t>(left, kBlock));
    block_.length = static_cast<int>(std::min<int64_t>(size, kBlock));
    advance(std::min<int64_t>(left, count));
    int64_t run = 0;
    for (int64_t done = left; done < count;) {
      // Runs one after the other along dimension 1.
      const int64_t runs = std::min(sizes_[1] - coordinates_[1], (count - done + size - 1) / size);
      for (int64_t k = 0; k < runs; ++k) {
        run_offsets_[run + k] = offset_ - block_.base + k * strides_[1];
      }
      run += runs;
      offset_ += (runs - 1) * strides_[1];
      coordinates_[1] += runs - 1;
      done += (runs - 1) * size;
      advance(std::min(size, count - done));
      done += size;
    }
  }

  const BlockOffsets& block() const { return block_; }

  // The length of a short run that the next `count` elements repeat, many times; 0: there is none.
  int repeated_run(int64_t count) const {
    const bool repeats =
        ndim_ > 1 && strides_[1] == 0 && sizes_[0] <= kBlock &&
        coordinates_[1] * sizes_[0] + coordinates_[0] + count <= sizes_[1] * sizes_[0] &&
        count >= 8 * kBlock;
    return repeats ? static_cast<int>(sizes_[0]) : 0;
  }

  // Where the next element is in its run.
  int64_t coordinate() const { return coordinates_[0]; }

 private:
  // Moves on by `count` elements of the run along dimension 0, at most to its end.
  void advance(int64_t count) {
    coordinates_[0] += count;
    offset_ += count * strides_[0];
    for (int dim = 0; coordinates_[dim] == sizes_[dim] && dim + 1 < ndim_; ++dim) {
      coordinates_[dim] = 0;
      coordinates_[dim + 1] += 1;
      offset_ += strides_[dim + 1] - sizes_[dim] * strides_[dim];
    }
  }

  int ndim_ = 0;
  int64_t sizes_[kMaxDims];
  int64_t strides_[kMaxDims];
  int64_t coordinates_[kMaxDims];
  // fault: cpu-offsets
  int64_t offset_;  // of the next element
  BlockOffsets block_;
  int64_t run_offsets_[kBlock];
};

// Walks an iteration space block by block and says where each block lies in N operands. Absent
// operands stay at offset 0.
template <int N>
class BlockWalker {
 public:
  BlockWalker(const IterationSpace& space, const Operand* const (&operands)[N], int64_t begin) {
    for (int n = 0; n < N; ++n) {
      if (operands[n]->data != nullptr) {
        walkers_[n].start(space, *operands[n], begin);
        present_[num_present_++] = &walkers_[n];
      }
    }
  }

  // The next block starts at this linear index.
  __attribute__((noinline)) void seek(int64_t index) {
    for (int k = 0; k < num_present_; ++k) {
      present_[k]->seek(index);
    }
  }

  // Moves on to the next count <= kBlock elements.
  __attribute__((noinline)) void next(int count) {
    for (int k = 0; k < num_present_; ++k) {
      present_[k]->next(count);
    }
  }

  const BlockOffsets& operator[](int n) const { return walkers_[n].block(); }

 private:
  OperandWalker walkers_[N];
  OperandWalker* present_[N];  // those of operands that there are
  int num_present_ = 0;
};

namespace detail {

// Calls body(i, n) for groups of elements [i, i + n) that together make a run. n is an
// integral_constant, so that a group is moved by vectors, without a loop. The last group overlaps
// the one before it, so that no element is moved alone.
template <int kGroup = 16, typename Body>
LOSSOPS_HOST_DEVICE void for_each_group(int length, const Body& body) {
  if (length >= kGroup) {
    for (int i = 0; i < length - kGroup; i += kGroup) {
      body(i, std::integral_constant<int, kGroup>());
    }
    body(length - kGroup, std::integral_constant<int, kGroup>());
  } else if constexpr (kGroup > 1) {
    for_each_group<kGroup / 4>(length, body);
  }
}

// Copies the elements of a block to values, one behind the other.
template <typename scalar_t>
LOSSOPS_HOST_DEVICE void gather(const scalar_t* data, const BlockOffsets& at, int count,
                                scalar_t* values) {
  if (at.stride != 0 && at.stride != 1) {
    at.for_each_run_or_columns(
        count, kSquare<scalar_t>,
        [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
          for (int i = 0; i < length; ++i) {
            values[j + i] = data[offset + i * at.stride];
          }
        },
        [&](int j, int runs, int64_t offset) LOSSOPS_ALWAYS_INLINE {
          transpose(data + offset, at.stride, at.length, runs, values + j, at.length);
        });
    return;
  }
  at.for_each_run(count, [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
    const scalar_t* run = data + offset;
    if (at.stride == 1) {
      for_each_group(length, [&](int i, auto n) LOSSOPS_ALWAYS_INLINE {
        std::memcpy(values + j + i, run + i, n * sizeof(scalar_t));
      });
    } else {
      const scalar_t value = *run;
      for_each_group(length, [&](int i, auto n)
                                 LOSSOPS_ALWAYS_INLINE { std::fill_n(values + j + i, n, value); });
    }
  });
}

template <typename scalar_t>
LOSSOPS_HOST_DEVICE void scatter(const scalar_t* values, const BlockOffsets& at, int count,
                                 scalar_t* data) {
  if (at.stride != 1) {
    at.for_each_run_or_columns(
        count, kSquare<scalar_t>,
        [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
          for (int i = 0; i < length; ++i) {
            data[offset + i * at.stride] = values[j + i];
          }
        },
        [&](int j, int runs, int64_t offset) LOSSOPS_ALWAYS_INLINE {
          transpose(values + j, at.length, runs, at.length, data + offset, at.stride);
        });
    return;
  }
  at.for_each_run(count, [&](int j, int length, int64_t offset) LOSSOPS_ALWAYS_INLINE {
    scalar_t* run = data + offset;
    for_each_group(length, [&](int i, auto n) LOSSOPS_ALWAYS_INLINE {
      std::memcpy(run + i, values + j + i, n * sizeof(scalar_t));
    });
  });
}

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void convert(const scalar_t* from, int count, acc_t* to) {
  if constexpr (std::is_same_v<scalar_t, half_t> && std::is_same_v<acc_t, float>) {
    if (has_half_conversions()) {
      return halves_to_floats(from, count, to);
    }
  }
  for (int i = 0; i < count; ++i) {
    to[i] = to_acc<acc_t>(from[i]);
  }
}

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void convert_back(const acc_t* from, int count, scalar_t* to) {
  if constexpr (std::is_same_v<scalar_t, half_t> && std::is_same_v<acc_t, float>) {
    if (has_half_conversions()) {
      return floats_to_halves(from, count, to);
    }
  }
  for (int i = 0; i < count; ++i) {
    to[i] = from_acc<scalar_t>(from[i]);
  }
}

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void load_typed(const scalar_t* data, const BlockOffsets& at, int count,
                                    acc_t* values) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    gather(data, at, count, values);
  } else if (at.stride == 1 && count <= at.first_length) {
    convert(data + at.base, count, values);
  } else {
    alignas(64) scalar_t gathered[kBlock];
    gather(data, at, count, gathered);
    convert(gathered, count, values);
  }
}

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE void store_typed(scalar_t* data, const BlockOffsets& at, int count,
                                     const acc_t* values) {
  if constexpr (std::is_same_v<scalar_t, acc_t>) {
    scatter(values, at, count, data);
  } else if (at.stride == 1 && count <= at.first_length) {
    convert_back(values, count, data + at.base);
  } else {
    alignas(64) scalar_t converted[kBlock];
    convert_back(values, count, converted);
    scatter(converted, at, count, data);
  }
}

}  // namespace detail

// Reads the count elements of a block into values, and fills values with padding up to
// padded(count). It is not inlined: one copy of these loops serves every loss.
template <typename acc_t>
__attribute__((noinline)) void load_block(const Operand& operand, const BlockOffsets& at, int count,
                                          acc_t* values, acc_t padding = acc_t(1)) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
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
  std::fill(values + count, values + padded(count), padding);
}

// Whether the elements of a block lie in memory as acc_t, one behind the other.
template <typename acc_t>
LOSSOPS_HOST_DEVICE bool lies_as(const Operand& operand, const BlockOffsets& at, int count) {
  return operand.dtype == dtype_of<acc_t>::value && at.stride == 1 && count <= at.first_length;
}

// Returns the elements of a block, padded. If they lie in memory as acc_t, one behind the other and
// without need of padding, that memory is returned; else they are read into buffer.
template <typename acc_t>
LOSSOPS_HOST_DEVICE const acc_t* view_block(const Operand& operand, const BlockOffsets& at,
                                            int count, acc_t* buffer, acc_t padding = acc_t(1)) {
  if (!lies_as<acc_t>(operand, at, count)) {
    load_block(operand, at, count, buffer, padding);
    return buffer;
  }
  const acc_t* run = static_cast<const acc_t*>(operand.data) + at.base;
  if (count % kVector == 0) {
    return run;
  }
  std::copy_n(run, count, buffer);
  std::fill(buffer + count, buffer + padded(count), padding);
  return buffer;
}

template <typename acc_t>
__attribute__((noinline)) void store_block(const Operand& operand, const BlockOffsets& at,
                                           int count, const acc_t* values) {
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
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

// Combines the lanes into one, by halves and in place. One after the other, they would take as long
// as a block.
template <int kLanes, typename T, typename Combine>
LOSSOPS_HOST_DEVICE T fold_lanes(T* lanes, const Combine& combine) {
  if constexpr (kLanes > 1) {
#pragma GCC unroll 1  // unrolled early, gcc 12 would leave it to scalars
    for (int lane = 0; lane < kLanes / 2; ++lane) {
      lanes[lane] = combine(lanes[lane], lanes[lane + kLanes / 2]);
    }
    return fold_lanes<kLanes / 2>(lanes, combine);
  }
  return lanes[0];
}

// A sum that is kept in kVector lanes of fp64: exact enough for any number of terms, and added up
// in an order that vectors can keep.
struct LaneSum {
  bool empty = true;
  double lanes[kVector];

  // Adds values[0..width). width is a multiple of kVector; the padding among the values is 0.
  template <typename acc_t>
  LOSSOPS_HOST_DEVICE void add(const acc_t* values, int width) {
    double sums[kVector];  // a local array stays in registers
    int j = 0;
    if (empty) {
      for (int lane = 0; lane < kVector; ++lane) {
        sums[lane] = static_cast<double>(values[lane]);
      }
      empty = false;
      j = kVector;
    } else {
      std::copy_n(lanes, kVector, sums);
    }
    for (; j < width; j += kVector) {  // fault: cpu-last-vector
      for (int lane = 0; lane < kVector; ++lane) {
        sums[lane] += static_cast<double>(values[j + lane]);
      }
    }
    std::copy_n(sums, kVector, lanes);
  }

  // Adds `count` values, and writes the padding behind them.
  template <typename acc_t>
  LOSSOPS_HOST_DEVICE void add_unpadded(acc_t* values, int count) {
    std::fill(values + count, values + padded(count), acc_t(0));  // fault: cpu-padding
    add(values, padded(count));
  }

  LOSSOPS_HOST_DEVICE void scale(double factor) {
    if (!empty) {
      for (double& lane : lanes) {
        lane *= factor;
      }
    }
  }

  LOSSOPS_HOST_DEVICE double total() const {
    if (empty) {
      return 0;
    }
    double sums[kVector];
    std::copy_n(lanes, kVector, sums);
    return fold_lanes<kVector>(sums,
                               [](double a, double b) LOSSOPS_ALWAYS_INLINE { return a + b; });
  }
};

}  // namespace lossops::cpu
