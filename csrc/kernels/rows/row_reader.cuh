// Reads a row of logits in vectors of 16 bytes that count from the row's own elements, wherever the
// row lies: at any address, with any distance between classes.
//
// Two aligned granules make one misaligned vector. Which elements are in a vector does not depend
// on the address, so neither does the order of a sum.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_words.cuh"
#include "scalar_types.h"

namespace lossops::cuda {

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
struct RowType<AnyHalf> {
  using scalar_type = AnyHalf;
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
    type.visit([&](auto like) { unpack_as<decltype(like)>(values); });
  }
  template <typename scalar_t, typename acc_t, int kCount>
  __device__ __forceinline__ void unpack_as(acc_t (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = get<scalar_t>(i);
    }
  }

  // From any element's address, by the words that the elements lie in.
  template <typename scalar_t>
  static __device__ __forceinline__ RowVector load_by_words(const scalar_t* elements) {
    UnalignedWords<scalar_t, 4> found;
    found.load(elements);
    RowVector vector;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      vector.words[i] = found.word(i);
    }
    return vector;
  }

  template <typename scalar_t>
  static __device__ __forceinline__ RowVector
  pack(const RowType<scalar_t>& type, const acc_type_t<scalar_t> (&values)[kVectorSize<scalar_t>]) {
    return type.visit([&](auto like) { return pack_as<decltype(like)>(values); });
  }
  template <typename scalar_t, typename acc_t, int kCount>
  static __device__ __forceinline__ RowVector pack_as(const acc_t (&values)[kCount]) {
    return bits_as<RowVector>(lossops::cuda::pack<scalar_t>(values));
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

// The largest elements of a vector; of a NaN and a number, the number. Of half types one for each
// half of a word.
template <typename scalar_t>
using LargestOfVector = std::conditional_t<sizeof(scalar_t) == 2, uint32_t, acc_type_t<scalar_t>>;

// The largest element of several vectors, and `largest` of each. -inf of NaN alone.
template <typename scalar_t, int kVectors>
__device__ __forceinline__ acc_type_t<scalar_t> largest_of(
    const RowType<scalar_t>& type, const RowVector (&vectors)[kVectors],
    LargestOfVector<scalar_t> (&largest)[kVectors]) {
  using acc_t = acc_type_t<scalar_t>;
  return type.visit([&](auto like) {
    using own_t = decltype(like);
    if constexpr (sizeof(own_t) == 2) {
      uint32_t words = lowest_word<own_t>();
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        largest[u] = lowest_word<own_t>();
#pragma unroll
        for (const uint32_t word : vectors[u].words) {
          largest[u] = max_of_words<own_t>(word, largest[u]);
        }
        words = max_of_words<own_t>(largest[u], words);
      }
      return max_of_elements<own_t>(words);
    } else {
      acc_t max = -math::infinity<acc_t>();
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        largest[u] = -math::infinity<acc_t>();
#pragma unroll
        for (int i = 0; i < kVectorSize<own_t>; ++i) {
          largest[u] = math::max_number(vectors[u].template get<own_t>(i), largest[u]);
        }
        max = math::max_number(largest[u], max);
      }
      return max;
    }
  });
}

// How many elements of several vectors are the same number as `top`, which is finite; they become
// -inf. `largest`: of each vector, so that few are searched.
template <typename scalar_t, int kVectors>
__device__ __forceinline__ int take_equals(const RowType<scalar_t>& type,
                                           RowVector (&vectors)[kVectors],
                                           const LargestOfVector<scalar_t> (&largest)[kVectors],
                                           acc_type_t<scalar_t> top) {
  return type.visit([&](auto like) {
    using own_t = decltype(like);
    if constexpr (sizeof(own_t) == 2) {
      const uint32_t wanted = word_to_take<own_t>(top);
      uint32_t taken = 0;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (equal_elements<own_t>(largest[u], wanted) != 0) {
#pragma unroll
          for (uint32_t& word : vectors[u].words) {
            word = take_equals<own_t>(word, wanted, taken);
          }
        }
      }
      return sum_of_taken<own_t>(taken);
    } else {
      int count = 0;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (largest[u] == top) {
#pragma unroll
          for (int i = 0; i < kVectorSize<own_t>; ++i) {
            if (vectors[u].template get<own_t>(i) == top) {
              count += 1;
              vectors[u].template set<own_t>(i, -math::infinity<own_t>());
            }
          }
        }
      }
      return count;
    }
  });
}

// A thread's vectors of a row, kVectors of them at a time, one in each `lanes`. While a round of
// them is worked on, the next one is copied to shared memory, in *granules*: the aligned 16 bytes
// that global memory has. A misaligned vector consists of two of them, the second of which the next
// lane has copied.
template <typename scalar_t, int kVectors>
class RowReader {
 public:
  static constexpr int kSize = kVectorSize<scalar_t>;
  // Granules of a block, in kVectors + 1 arrays that have one for each thread. In the last array
  // the first of the lanes that share a piece has the granule behind those of all of them.
  static constexpr int kGranules = (kVectors + 1) * kRowThreads;
  RowVector vectors[kVectors];

  // first: element 0 of vector 0. end: start() copies vectors in front of it. Where it is 0,
  // start() copies nothing, and put() gives what take() takes. The vector before the first one, and
  // the one at `end`, must be of the row. granules: in shared memory.
  __device__ __forceinline__ RowReader(const scalar_t* first, int end, int lanes,
                                       RowVector* granules)
      : granules_(granules),
        phase_(end > 0 ? static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)) % kVectorBytes
                       : 0),
        lanes_(static_cast<uint32_t>(lanes)),
        last_granule_(phase_ != 0 ? end : end - 1) {
    const char* const aligned = reinterpret_cast<const char*>(first) - phase_;
    // Else they would be computed for each copy.
    aligned_ = unfolded(reinterpret_cast<const RowVector*>(aligned));
    own_ = unfolded(static_cast<int>(threadIdx.x));
    const int lane = own_ & (lanes - 1);
    next_ = unfolded(lane + 1 < lanes ? own_ + 1 : own_ - lane + kRowThreads);
    copies_extra_ = lane == 0 && phase_ != 0;
  }

  __device__ __forceinline__ const scalar_t* first() const {
    const char* const address = reinterpret_cast<const char*>(aligned_) + phase_;
    __builtin_assume(__isGlobal(address));
    return reinterpret_cast<const scalar_t*>(address);
  }

  // Starts to copy vectors v, v + lanes, ... in front of `end`.
  __device__ __forceinline__ void start(int v) {
    const char* const from = reinterpret_cast<const char*>(aligned_ + v);
    const auto copy = [&](int u) {
      start_own_copy<CopyCaches::kL1AndL2>(
          granules_ + own_ + u * kRowThreads,
          reinterpret_cast<const RowVector*>(from + uint64_t{lanes_} *
                                                        static_cast<uint64_t>(u * kVectorBytes)));
    };
    const int lanes = static_cast<int>(lanes_);
    if (v + kVectors * lanes <= last_granule_) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        copy(u);
      }
      if (copies_extra_) {
        copy(kVectors);
      }
    } else {
#pragma unroll 1
      for (int u = 0; u < kVectors && v + u * lanes <= last_granule_; ++u) {
        copy(u);
      }
    }
  }

  // Vector u of the next round.
  __device__ __forceinline__ void put(int u, const RowVector& vector) {
    granules_[own_ + u * kRowThreads] = vector;
  }

  // Waits for what was started, and takes it. By all lanes of a warp. Of vectors that were not
  // copied, anything.
  __device__ __forceinline__ void take() {
    wait_for_own_copies();
    __syncwarp();
    if (phase_ == 0) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        vectors[u] = granules_[own_ + u * kRowThreads];
      }
    } else {
      switch (phase_ / 4) {
        case 1:
          take<1>();
          break;
        case 2:
          take<2>();
          break;
        case 3:
          take<3>();
          break;
        default:
          take<0>();
      }
    }
    __syncwarp();
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

 private:
  // kWords: whole words of the first granule that are not wanted.
  template <int kWords>
  __device__ __forceinline__ void take() {
    const uint32_t shift = 8 * (phase_ % 4);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const RowVector first = granules_[own_ + u * kRowThreads];
      const RowVector next = granules_[next_ + u * kRowThreads];
      const auto word = [&](int i) { return i < 4 ? first.words[i] : next.words[i - 4]; };
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
  RowVector* granules_;       // of the block
  int own_;         // the thread's number, which is that of its granule in the first array
  int next_;        // the granule behind it
  uint32_t phase_;  // bytes from aligned_ to vector 0
  uint32_t lanes_;
  int last_granule_;   // that is copied
  bool copies_extra_;  // whether this lane copies the granule behind those of all lanes
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
