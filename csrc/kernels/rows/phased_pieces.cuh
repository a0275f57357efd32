// Pieces of rows of half types with a class index, wherever they lie: in vectors of memory, of
// which the first and the last may belong to the piece in part.
//
// Which elements share a vector depends on where the row lies: on its phase, how many elements of
// its first vector are before it. The order of its sum must not. So element e of a piece is added
// to the sum e % 256 of a warp. A lane that has the vectors `lane`, `lane + 32`, ... has 8 of these
// sums, the same ones in each of its vectors, and all terms of a sum are in one lane, in order. At
// the end the sums are moved to where they are at phase 0.
#pragma once

#include <cstdint>

#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "losses/math.h"

namespace lossops::cuda {

// The maximum of a piece, to be found again among its logits.
template <typename scalar_t>
struct PieceMaximum {
  uint32_t word;  // in each element
  bool is_own;    // one of this lane's logits, and not -inf

  // own: the largest of this lane's logits.
  __device__ __forceinline__ PieceMaximum(float max, float own)
      : is_own(own == max && max > -math::infinity<float>()) {
    const float both[kWordElements<scalar_t>] = {max, max};
    word = pack_word<scalar_t>(both);
  }

  // Whether it may be among the logits of which `largest` has the largest, element by element.
  __device__ __forceinline__ bool is_in(uint32_t largest) const {
    return is_own && equal_elements<scalar_t>(largest, word) != 0;
  }

  // Puts -inf in its place. Says how often it was there, in 16 bits for each element of a word.
  __device__ __forceinline__ uint32_t take_from(Vector<scalar_t>& vector) const {
    uint32_t counts = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t equal = equal_elements<scalar_t>(vector.word(i), word);
      counts += equal & 0x00010001u;
      vector.set_word(i, (vector.word(i) & ~equal) | (lowest_word<scalar_t>() & equal));
    }
    return counts;
  }
};

// The sum of both halves.
__device__ __forceinline__ int sum_of_halves(uint32_t word) {
  return static_cast<int>((word & 0xffffu) + (word >> 16));
}

// A warp's share of the sum of a piece's exponentials.
template <typename scalar_t>
struct PhasedSum {
  static constexpr int kSize = kVectorSize<scalar_t>;
  float sums[kSize] = {};

  // What is not of the piece is -inf, and so is its maximum.
  template <typename Terms>
  __device__ __forceinline__ void add(const Terms& terms, const Vector<scalar_t>& vector) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sums[i] += terms(to_acc<float>(vector.get(i)));
    }
  }

  // This lane's share of all of it. By all lanes, at the end.
  __device__ __forceinline__ float total(int phase, int lane) {
#pragma unroll
    for (int distance = kSize / 2; distance > 0; distance /= 2) {
      float moved[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const int from = i + distance;
        moved[i] = from < kSize ? sums[from] : __shfl_sync(kAllLanes, sums[from - kSize], lane + 1);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        sums[i] = (phase & distance) != 0 ? moved[i] : sums[i];
      }
    }
    return pairwise_sum(sums);
  }
};

// Elements of the vector that holds this address before it.
template <typename scalar_t>
__device__ __forceinline__ int phase_of(const scalar_t* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / sizeof(scalar_t) %
                          kVectorSize<scalar_t>);
}

// The bits of word i of a vector that are before its element `end`.
__device__ __forceinline__ uint32_t bits_before(int end, int i) {
  return __funnelshift_lc(0xffffffffu, 0, max(16 * (end - 2 * i), 0));
}

// -inf for a vector's elements in front of `begin`.
template <typename scalar_t>
__device__ __forceinline__ void keep_from(Vector<scalar_t>& vector, int begin) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t others = bits_before(begin, i);
    vector.set_word(i, (vector.word(i) & ~others) | (lowest_word<scalar_t>() & others));
  }
}

// For a vector whose elements from `end` on are others': (vector & kept) | others has -inf there.
template <typename scalar_t>
__device__ __forceinline__ void parts_before(int end, Vector<scalar_t>& kept,
                                             Vector<scalar_t>& others) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    kept.set_word(i, bits_before(end, i));
    others.set_word(i, lowest_word<scalar_t>() & ~kept.word(i));
  }
}

// The elements [begin, end) of a vector in memory, and -inf: nothing else is read.
template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> load_part(const scalar_t* vector, int begin, int end) {
  Vector<scalar_t> part;
#pragma unroll
  for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
    part.set(i, i >= begin && i < end ? vector[i] : from_acc<scalar_t>(-math::infinity<float>()));
  }
  return part;
}

// The vectors of memory that have elements of a piece; their elements count from the first one's.
// Not kPhased: whole vectors at an aligned address.
template <typename scalar_t, bool kPhased>
struct PhasedPiece {
  static constexpr int kSize = kVectorSize<scalar_t>;
  const scalar_t* vectors;
  int phase = 0;  // elements before the piece
  int end;        // of the piece
  // Whether the first and the last vector reach beyond the tensor.
  bool is_first = false;
  bool is_last = false;

  // offset: of the piece, in elements, from `data`; the tensor has `elements`.
  __device__ __forceinline__ PhasedPiece(const scalar_t* data, int64_t elements, int64_t offset,
                                         int count)
      : vectors(data + offset), end(count) {
    if constexpr (kPhased) {
      phase = phase_of(vectors);
      vectors -= phase;
      end += phase;
      is_first = offset < phase;
      is_last = offset - phase + last() * kSize > elements;
    }
  }

  // Vectors, those that are the piece's in part too, and without the last of these.
  __device__ __forceinline__ int last() const { return (end + kSize - 1) / kSize; }
  __device__ __forceinline__ int whole_end() const { return end / kSize; }
  // Elements of the last vector that is the piece's in part.
  __device__ __forceinline__ int tail() const { return end % kSize; }
  // Vectors that may be read.
  __device__ __forceinline__ int readable() const { return is_last ? whole_end() : last(); }
};

}  // namespace lossops::cuda
