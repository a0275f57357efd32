// Reads a row of logits in vectors of 16 bytes that count from the row's own elements, wherever the
// row lies: at any address, with any distance between classes.
//
// Two aligned loads make one misaligned vector; the second of them finds in the L1 cache what the
// next lane's first one has fetched. Which elements are in a vector does not depend on the address,
// so neither does the order of a sum.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_words.cuh"
#include "scalar_types.h"

namespace lossops::cuda {

// One of the half types, known at launch: kernels of rows are long, and have one for both.
struct any_half_t {
  uint16_t bits;
};

// Of the elements of a row: what they are, where their type does not say so.
template <typename scalar_t>
struct RowType {
  using scalar_type = scalar_t;
  explicit RowType(DType /*dtype*/) {}

  template <typename Body>
  __device__ __forceinline__ auto visit(const Body& body) const {
    return body(scalar_t{});
  }
};
template <>
struct RowType<any_half_t> {
  using scalar_type = any_half_t;
  bool is_bfloat16;

  explicit RowType(DType dtype) : is_bfloat16(dtype == DType::kBFloat16) {}

  // A branch that a whole grid takes the same way.
  template <typename Body>
  __device__ __forceinline__ auto visit(const Body& body) const {
    if (is_bfloat16) {
      keep_apart();
      return body(bfloat16_t{});
    }
    return body(half_t{});
  }
};

// An element as one of the same size.
template <typename To, typename From>
__device__ __forceinline__ To bits_as(From element) {
  static_assert(sizeof(To) == sizeof(From), "types of one size");
  To result;
  memcpy(&result, &element, sizeof(To));
  return result;
}

// A vector in 32-bit words, of fp64 too.
struct alignas(kVectorBytes) RowVector {
  uint32_t words[4];

  template <typename scalar_t>
  __device__ __forceinline__ void unpack(
      const RowType<scalar_t>& type, acc_type_t<scalar_t> (&values)[kVectorSize<scalar_t>]) const {
    type.visit([&](auto like) {
#pragma unroll
      for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
        values[i] = get<decltype(like)>(i);
      }
    });
  }

  template <typename scalar_t>
  static __device__ __forceinline__ RowVector
  pack(const RowType<scalar_t>& type, const acc_type_t<scalar_t> (&values)[kVectorSize<scalar_t>]) {
    return type.visit(
        [&](auto like) { return bits_as<RowVector>(lossops::cuda::pack<decltype(like)>(values)); });
  }

  template <typename scalar_t>
  __device__ __forceinline__ acc_type_t<scalar_t> get(int i) const {
    if constexpr (sizeof(scalar_t) == 8) {
      return __hiloint2double(static_cast<int>(words[2 * i + 1]), static_cast<int>(words[2 * i]));
    } else {
      constexpr int kElements = kWordElements<scalar_t>;
      return word_element<scalar_t>(words[i / kElements], i % kElements);
    }
  }

  template <typename scalar_t>
  __device__ __forceinline__ void set(int i, scalar_t value) {
    if constexpr (sizeof(scalar_t) == 8) {
      words[2 * i] = static_cast<uint32_t>(__double2loint(value));
      words[2 * i + 1] = static_cast<uint32_t>(__double2hiint(value));
    } else if constexpr (sizeof(scalar_t) == 4) {
      words[i] = __float_as_uint(value);
    } else {
      const uint32_t bits = value.bits;
      words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
    }
  }
};

// Changes the sign of every element of a word where a map falls as logits rise: maps are odd.
template <typename scalar_t>
__device__ __forceinline__ uint32_t sign_bits(int word) {
  if constexpr (sizeof(scalar_t) == 2) {
    return 0x80008000u;
  } else {
    return sizeof(scalar_t) == 4 || word % 2 == 1 ? 0x80000000u : 0;
  }
}

// The largest element of several vectors; of a NaN and a number, the number. -inf of NaN alone.
template <typename scalar_t, int kVectors>
__device__ __forceinline__ acc_type_t<scalar_t> largest_of(const RowType<scalar_t>& type,
                                                           const RowVector (&vectors)[kVectors]) {
  using acc_t = acc_type_t<scalar_t>;
  return type.visit([&](auto like) {
    using own_t = decltype(like);
    acc_t max = -math::infinity<acc_t>();
    if constexpr (sizeof(own_t) == 2) {
      uint32_t words = lowest_word<own_t>();
#pragma unroll
      for (const RowVector& vector : vectors) {
#pragma unroll
        for (const uint32_t word : vector.words) {
          words = max_of_words<own_t>(word, words);
        }
      }
      max = math::max_number(max_of_elements<own_t>(words), max);
    } else {
#pragma unroll
      for (const RowVector& vector : vectors) {
#pragma unroll
        for (int i = 0; i < kVectorSize<own_t>; ++i) {
          max = math::max_number(vector.get<own_t>(i), max);
        }
      }
    }
    return max;
  });
}

// A thread's vectors of a row, kVectors of them at a time, one in each `lanes`.
template <typename scalar_t, int kVectors>
class RowReader {
 public:
  static constexpr int kSize = kVectorSize<scalar_t>;
  RowVector vectors[kVectors];

  // first: element 0 of vector 0.
  __device__ __forceinline__ RowReader(const scalar_t* first, int lanes)
      : phase_(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)) % kVectorBytes),
        lanes_(lanes) {
    const char* const aligned = reinterpret_cast<const char*>(first) - phase_;
    // Else it would be computed for each load.
    aligned_ = unfolded(reinterpret_cast<const RowVector*>(aligned));
  }

  __device__ __forceinline__ const scalar_t* first() const {
    return reinterpret_cast<const scalar_t*>(reinterpret_cast<const char*>(aligned_) + phase_);
  }

  // Starts to read vectors v, v + lanes, ... in front of `end`; nothing waits here. Others stay as
  // they are. The vector before v, and the one behind the last that is read, must be of the row.
  __device__ __forceinline__ void load(int v, int end) {
    const RowVector* const aligned = aligned_ + v;
    __builtin_assume(__isGlobal(aligned));
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + u * lanes_ < end) {
        vectors[u] = aligned[u * lanes_];
      }
    }
    if (phase_ != 0) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (v + u * lanes_ < end) {
          next_[u] = aligned[u * lanes_ + 1];
        }
      }
    }
  }

  // What load() has read, in its place.
  __device__ __forceinline__ void settle() {
    switch (phase_ / 4) {
      case 1:
        return settle<1>();
      case 2:
        return settle<2>();
      case 3:
        return settle<3>();
      default:
        return phase_ != 0 ? settle<0>() : void();
    }
  }

  // Puts vector u in its place, which registers have no index for.
  __device__ __forceinline__ void put(int u, const RowVector& vector) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v == u) {
        vectors[v] = vector;
      }
    }
  }

  __device__ __forceinline__ void change_signs() {
#pragma unroll
    for (RowVector& vector : vectors) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        vector.words[i] ^= sign_bits<scalar_t>(i);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (RowVector& vector : vectors) {
      vector = {};
    }
  }

 private:
  // kWords: whole words of the first vector that are not wanted.
  template <int kWords>
  __device__ __forceinline__ void settle() {
    const uint32_t shift = 8 * (phase_ % 4);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const RowVector first = vectors[u];
      const auto word = [&](int i) { return i < 4 ? first.words[i] : next_[u].words[i - 4]; };
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(scalar_t) == 2) {
          vectors[u].words[i] = __funnelshift_r(word(i + kWords), word(i + kWords + 1), shift);
        } else {
          vectors[u].words[i] = word(i + kWords);
        }
      }
    }
  }

  const RowVector* aligned_;  // where vector 0 begins, or before it
  uint32_t phase_;            // bytes from there to vector 0
  int lanes_;
  RowVector next_[kVectors];  // those behind `vectors`, where these are misaligned
};

// `count` elements of a row, which are `stride` apart, and `absent` for the rest of the vector.
template <typename scalar_t>
__device__ __forceinline__ RowVector gather(const scalar_t* first, int count, int64_t stride,
                                            scalar_t absent) {
  scalar_t elements[kVectorSize<scalar_t>];
#pragma unroll
  for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
    elements[i] = absent;
    if (i < count) {
      elements[i] = *first;
    }
    first += stride;
  }
  RowVector vector = {};
#pragma unroll
  for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
    vector.set<scalar_t>(i, elements[i]);
  }
  return vector;
}

}  // namespace lossops::cuda
