// A row of logits in shared memory, wherever it starts there, and the sum of its exponentials.
//
// Rows are copied in granules of 16 bytes, as they lie in global memory: a row that is not aligned
// starts within a granule. Sums are taken over vectors or 32-bit words that count from the row's
// first element, or as phased_pieces.cuh says, so that their order, and with it every bit, is the
// same wherever the row lies.
#pragma once

#include <cstdint>

#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/pieces.h"
#include "kernels/rows/row_terms.cuh"
#include "losses/rows/cross_entropy.h"
#include "scalar_types.h"

namespace lossops::cuda {

// -------------------------------------------------------- elements of a word

// fp32, fp16 and bf16.
template <typename scalar_t>
constexpr int kWordElements = 4 / static_cast<int>(sizeof(scalar_t));

template <typename scalar_t>
__device__ __forceinline__ float word_element(uint32_t word, int i) {
  if constexpr (sizeof(scalar_t) == 4) {
    return __uint_as_float(word);
  } else {
    return to_acc<float>(scalar_t{static_cast<uint16_t>(word >> (16 * i))});
  }
}

// The word that has an element at i, and zeros beside it.
template <typename scalar_t>
__device__ __forceinline__ uint32_t word_of(scalar_t element, int i) {
  if constexpr (sizeof(scalar_t) == 4) {
    return __float_as_uint(element);
  } else {
    return uint32_t{element.bits} << (16 * i);
  }
}
// The element of a word at i.
template <typename scalar_t>
__device__ __forceinline__ scalar_t element_of(uint32_t word, int i) {
  if constexpr (sizeof(scalar_t) == 4) {
    return __uint_as_float(word);
  } else {
    return {static_cast<uint16_t>(word >> (16 * i))};
  }
}

// -inf in every element.
template <typename scalar_t>
__device__ __forceinline__ uint32_t lowest_word() {
  constexpr bool kHalf = std::is_same_v<scalar_t, half_t>;
  return sizeof(scalar_t) == 4 ? 0xff800000u : kHalf ? 0xfc00fc00u : 0xff80ff80u;
}

template <typename scalar_t>
__device__ __forceinline__ void set_lowest(Vector<scalar_t>& vector) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    vector.set_word(i, lowest_word<scalar_t>());
  }
}

// Element by element the larger; of a NaN and a number, the number.
template <typename scalar_t>
__device__ __forceinline__ uint32_t max_of_words(uint32_t a, uint32_t b) {
  if constexpr (sizeof(scalar_t) == 4) {
    return __float_as_uint(math::max_number(__uint_as_float(a), __uint_as_float(b)));
  } else {
#if __CUDA_ARCH__ >= 800
    uint32_t result;
    if constexpr (std::is_same_v<scalar_t, half_t>) {
      asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    } else {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    }
    return result;
#else
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
      const float x = math::max_number(word_element<scalar_t>(a, i), word_element<scalar_t>(b, i));
      result |= static_cast<uint32_t>(from_acc<scalar_t>(x).bits) << (16 * i);
    }
    return result;
#endif
  }
}

template <typename scalar_t>
__device__ __forceinline__ float max_of_elements(uint32_t word) {
  float max = word_element<scalar_t>(word, 0);
#pragma unroll
  for (int i = 1; i < kWordElements<scalar_t>; ++i) {
    max = math::max_number(word_element<scalar_t>(word, i), max);
  }
  return max;
}

template <typename scalar_t>
__device__ __forceinline__ uint32_t max_of_vector(const Vector<scalar_t>& vector, uint32_t max) {
  return max_of_words<scalar_t>(
      max_of_words<scalar_t>(max_of_words<scalar_t>(vector.word(0), vector.word(1)),
                             max_of_words<scalar_t>(vector.word(2), vector.word(3))),
      max);
}

// All bits of each element of half types that is the same number in both words.
template <typename scalar_t>
__device__ __forceinline__ uint32_t equal_elements(uint32_t a, uint32_t b) {
#if LOSSOPS_HOPPER_CODE
  uint32_t equal;
  if constexpr (std::is_same_v<scalar_t, half_t>) {
    asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(equal) : "r"(a), "r"(b));
  } else {
    asm("set.eq.u32.bf16x2 %0, %1, %2;" : "=r"(equal) : "r"(a), "r"(b));
  }
  return equal;
#else
  uint32_t equal = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool is_equal = word_element<scalar_t>(a, i) == word_element<scalar_t>(b, i);
    equal |= is_equal ? 0xffffu << (16 * i) : 0;
  }
  return equal;
#endif
}

// `top` in each element, for take_equals(). NaN, which equals nothing, if top is not finite.
template <typename scalar_t>
__device__ __forceinline__ uint32_t word_to_take(float top) {
  const bool is_finite = ::fabsf(top) < math::infinity<float>();
  const float taken = is_finite ? top : math::quiet_nan<float>();
  if constexpr (sizeof(scalar_t) == 4) {
    return __float_as_uint(taken);
  } else {
    return from_acc<scalar_t>(taken).bits * 0x10001u;
  }
}
// Sets the elements of a word that equal those of `wanted` to -inf, and counts them in `taken`: of
// half types, the lower elements in its lower 16 bits and the upper ones in its upper.
template <typename scalar_t>
__device__ __forceinline__ uint32_t take_equals(uint32_t word, uint32_t wanted, uint32_t& taken) {
  if constexpr (sizeof(scalar_t) == 4) {
    const bool is_equal = __uint_as_float(word) == __uint_as_float(wanted);
    taken += is_equal ? 1 : 0;
    return is_equal ? lowest_word<scalar_t>() : word;
  } else {
    const uint32_t equal = equal_elements<scalar_t>(word, wanted);
    taken += equal & 0x10001u;
    return (word & ~equal) | (lowest_word<scalar_t>() & equal);
  }
}
// How many elements take_equals() has counted.
template <typename scalar_t>
__device__ __forceinline__ int sum_of_taken(uint32_t taken) {
  return static_cast<int>(sizeof(scalar_t) == 4 ? taken : (taken & 0xffffu) + (taken >> 16));
}

// Word k of a row whose first element lies in words[0]: in its upper half if kOdd.
template <bool kOdd>
__device__ __forceinline__ uint32_t row_word(const uint32_t* words, int k) {
  return kOdd ? __funnelshift_r(words[k], words[k + 1], 16) : words[k];
}

// A row in shared memory, by words of 32 bits that count from its first element.
template <typename scalar_t>
class RowWords {
 public:
  // The row begins at element `offset` of a buffer. splits_words: rows may begin within a word.
  __device__ __forceinline__ RowWords(scalar_t* buffer, int offset, bool splits_words)
      : row_(buffer + offset),
        words_(reinterpret_cast<uint32_t*>(buffer) + offset / kWordElements<scalar_t>),
        shift_(offset % kWordElements<scalar_t> * 16),
        splits_words_(sizeof(scalar_t) == 2 && splits_words) {}

  // The row from its first whole word in memory on. That begins at element before_words().
  __device__ __forceinline__ RowWords at_words() const { return after(before_words(), false); }
  __device__ __forceinline__ int before_words() const { return shift_ / 16; }
  // The row from an element on, which is 0 or 1. splits_words: of the result.
  __device__ __forceinline__ RowWords after(int element, bool splits_words) const {
    RowWords result = *this;
    const int offset = shift_ / 16 + element;
    result.row_ += element;
    result.words_ += offset / kWordElements<scalar_t>;
    result.shift_ = offset % kWordElements<scalar_t> * 16;
    result.splits_words_ = splits_words;
    return result;
  }

  __device__ __forceinline__ scalar_t& operator[](int c) const { return row_[c]; }

  // Words k, k + distance, ... kOwnOnly: reads no element beside them, which another thread may be
  // writing.
  template <bool kOwnOnly = false, int kCount>
  __device__ __forceinline__ void load(int k, int distance, uint32_t (&words)[kCount]) const {
    const uint32_t* word = words_ + k;
    if (splits_words_) {
      keep_apart();
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const int own = k + u * distance;
        words[u] = kOwnOnly ? load_half(own) | load_half(own, 1) << 16
                            : __funnelshift_r(word[0], word[1], shift_);
        word += distance;
      }
    } else {
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        words[u] = *word;
        word += distance;
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void store(int k, int distance,
                                        const uint32_t (&words)[kCount]) const {
    if (splits_words_) {
      keep_apart();
      auto* const halves = reinterpret_cast<uint16_t*>(row_);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        const int c = 2 * (k + u * distance);
        halves[c] = static_cast<uint16_t>(words[u]);
        halves[c + 1] = static_cast<uint16_t>(words[u] >> 16);
      }
    } else {
      uint32_t* word = words_ + k;
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        *word = words[u];
        word += distance;
      }
    }
  }

  // Words k to k + 3, which are an aligned vector.
  __device__ __forceinline__ void load_vector(int k, uint32_t (&words)[4]) const {
    const uint4 vector = *reinterpret_cast<const uint4*>(words_ + k);
    words[0] = vector.x;
    words[1] = vector.y;
    words[2] = vector.z;
    words[3] = vector.w;
  }
  __device__ __forceinline__ void store_vector(int k, const uint32_t (&words)[4]) const {
    *reinterpret_cast<uint4*>(words_ + k) = {words[0], words[1], words[2], words[3]};
  }

  // Half i of word k, of half types.
  __device__ __forceinline__ uint32_t load_half(int k, int i = 0) const {
    return reinterpret_cast<const uint16_t*>(row_)[2 * k + i];
  }
  __device__ __forceinline__ void store_half(int k, uint32_t half) const {
    reinterpret_cast<uint16_t*>(row_)[2 * k] = static_cast<uint16_t>(half);
  }

 private:
  scalar_t* row_;
  uint32_t* words_;
  int shift_;
  bool splits_words_;
};

// ---------------------------------------------------------- sums of exponentials

// How many terms are the maximum's; they become 0.
template <int kCount>
__device__ __forceinline__ int count_ones(float (&terms)[kCount], float unit) {
  int ones = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    ones += terms[i] == unit ? 1 : 0;
    terms[i] = terms[i] == unit ? 0.0f : terms[i];
  }
  return ones;
}

// The sum of terms, and the largest sum of four of them: less than the maximum's term where that is
// not among them.
template <int kCount>
__device__ __forceinline__ float sum_of_terms(const float (&terms)[kCount], float& largest) {
  constexpr int kGroup = kCount < 4 ? kCount : 4;
  constexpr int kGroups = kCount / kGroup;
  float sums[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    float group[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      group[i] = terms[g * kGroup + i];
    }
    sums[g] = pairwise_sum(group);
  }
  largest = sums[0];
#pragma unroll
  for (int g = 1; g < kGroups; ++g) {
    largest = math::max_number(sums[g], largest);
  }
  return pairwise_sum(sums);
}

// A thread's share of a row's sum, apart from the terms of the maximum, which are counted: what is
// small beside 1 keeps all of its bits.
struct TermSum {
  float below = 0;
  int ones = 0;
  bool may_have_ones = true;  // whether a term may be the maximum's
  // Of rows with more coefficients than that of a class index:
  float distance = 0;  // sum of max - x; of probabilities, of q (max - x)
  float q_sum = 0;     // of probabilities
  // Of probabilities: what batches add that are computed twice. A kernel may leave them to the end.
  float below_apart = 0;
  float distance_apart = 0;

  template <bool kApart = false, int kCount>
  __device__ __forceinline__ void add(float (&terms)[kCount], float unit) {
    float largest;
    float total = sum_of_terms(terms, largest);
    if (may_have_ones && largest >= unit) {
      ones += count_ones(terms, unit);
      total = sum_of_terms(terms, largest);
      if constexpr (kApart) {
        below_apart += total;
        return;
      }
    }
    below += total;
  }

  // add() without a branch, for warps that sum several rows at a time: each row has its maximum
  // elsewhere, so the warp would take the branch nearly every time.
  template <int kCount>
  __device__ __forceinline__ void add_by_lane(float (&terms)[kCount], float unit) {
    ones += count_ones(terms, unit);
    below += pairwise_sum(terms);
  }

  __device__ __forceinline__ float all_below() const { return below + below_apart; }
  __device__ __forceinline__ float all_distance() const { return distance + distance_apart; }
};

// Whether rows are summed as PhasedSum does, and not as add_terms() does.
template <typename scalar_t, RowKind kKind>
constexpr bool kIsPhased = sizeof(scalar_t) == 2 && kKind == RowKind::kIndex;

// Probability targets: how a probability becomes a coefficient.
struct Smoothing {
  float smoothing = 0;
  float per_class = 0;

  __device__ __forceinline__ float operator()(float probability) const {
    return smoothed(probability, smoothing, per_class);
  }
};

// For values that are coefficients already.
struct GivenCoefficients {
  __device__ __forceinline__ float operator()(float q) const { return q; }
};

// Terms of a thread that are added at a time.
constexpr int kTermBatch = 8;

// The sum of q x over kCount numbers.
template <int kCount>
__device__ __forceinline__ float weighted_sum(const float (&q)[kCount], const float (&x)[kCount]) {
  constexpr int kHalf = (kCount + 1) / 2;
  float sums[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float& sum = sums[i / kHalf];
    sum = i % kHalf == 0 ? __fmul_rn(q[i], x[i]) : __fmaf_rn(q[i], x[i], sum);
  }
  return kCount == 1 ? sums[0] : sums[0] + sums[1];
}

// The sum of q (shift - x) over kCount logits. A zero coefficient counts as 0 also against an
// infinite logit, or the sum may be NaN.
template <bool kMayBeInfinite, int kCount>
__device__ __forceinline__ float weighted_distance(const float (&x)[kCount],
                                                   const float (&q)[kCount], float shift) {
  float distances[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    distances[i] = kMayBeInfinite && q[i] == 0.0f ? 0.0f : shift - x[i];
  }
  return weighted_sum(q, distances);
}

// Adds the terms of kCount logits. Values p become their coefficients by to_coefficient(p).
// kByLane: see TermSum::add_by_lane().
template <RowKind kKind, bool kByLane = false, int kCount, typename Terms,
          typename ToCoefficient = Smoothing>
__device__ __forceinline__ void add_logits(TermSum& sum, const Terms& terms,
                                           const float (&x)[kCount], const float (&p)[kCount],
                                           const ToCoefficient& to_coefficient) {
  float values[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = terms(x[i]);
  }
  if constexpr (kByLane) {
    sum.add_by_lane(values, terms.unit);
  } else {
    sum.add<kKind == RowKind::kProbability>(values, terms.unit);
  }
  if constexpr (kKind == RowKind::kSmooth) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = terms.shift - x[i];
    }
    sum.distance += pairwise_sum(values);
  } else if constexpr (kKind == RowKind::kProbability) {
    float q[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      q[i] = to_coefficient(p[i]);
    }
    sum.q_sum += pairwise_sum(q);
    const float distance = weighted_distance<false>(x, q, terms.shift);
    if (math::is_nan(distance)) {
      sum.distance_apart += weighted_distance<true>(x, q, terms.shift);
    } else {
      sum.distance += distance;
    }
  }
}

// A row, or a share of one, in shared memory.
struct StagedElements {
  const uint32_t* logits;  // of the granule where it starts
  const uint32_t* probabilities;
  int phase;  // elements of that granule before it
  int count;  // elements
  Smoothing smoothing;
};

// Adds vectors by a warp: `lane`, `lane + 32`, ... of `count`. load(words, v) is vector v.
template <typename scalar_t, RowKind kKind, typename Terms, typename Load>
__device__ __forceinline__ void add_vectors(TermSum& sum, const Terms& terms,
                                            const StagedElements& row, int lane, Load&& load) {
  constexpr int kSize = kVectorSize<scalar_t>;
  constexpr int kBatch = kTermBatch / kSize;
  const int count = row.count / kSize;
  const auto add = [&](int v, auto vectors_at_a_time) {
    constexpr int kCount = decltype(vectors_at_a_time)::value;
    float x[kCount * kSize];
    float p[kCount * kSize];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const Vector<scalar_t> logits = load(row.logits, v + u * kWarpSize);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        x[u * kSize + i] = to_acc<float>(logits.get(i));
      }
      if constexpr (kKind == RowKind::kProbability) {
        const Vector<scalar_t> probabilities = load(row.probabilities, v + u * kWarpSize);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          p[u * kSize + i] = to_acc<float>(probabilities.get(i));
        }
      }
    }
    add_logits<kKind>(sum, terms, x, p, row.smoothing);
  };
  int v = lane;
#pragma unroll(kKind == RowKind::kIndex ? 2 : 1)
  for (; v + (kBatch - 1) * kWarpSize < count; v += kBatch * kWarpSize) {
    add(v, std::integral_constant<int, kBatch>{});
  }
  if constexpr (kBatch > 1) {
    static_assert(kBatch == 2, "one vector is left at most");
    if (v < count) {
      add(v, std::integral_constant<int, 1>{});
    }
  }
}

// Words a thread has in flight.
constexpr int kWordUnroll = 8;

// Adds words by a warp: `lane`, `lane + 32`, ...
template <typename scalar_t, RowKind kKind, bool kOdd, typename Terms>
__device__ __forceinline__ void add_words(TermSum& sum, const Terms& terms,
                                          const StagedElements& row, int lane) {
  constexpr int kSize = kWordElements<scalar_t>;
  const uint32_t* const logits = row.logits + row.phase / kSize;
  const uint32_t* const probabilities = row.probabilities + row.phase / kSize;
  const int whole = row.count / kSize;
  // kCount words, kWarpSize apart; of the last one maybe half.
  const auto add = [&](int k, auto words_at_a_time, auto elements_of_word) {
    constexpr int kCount = decltype(words_at_a_time)::value;
    constexpr int kElements = decltype(elements_of_word)::value;
    float x[kCount * kElements];
    float p[kCount * kElements];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const uint32_t word = row_word<kOdd>(logits, k + u * kWarpSize);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        x[u * kElements + i] = word_element<scalar_t>(word, i);
      }
      if constexpr (kKind == RowKind::kProbability) {
        const uint32_t other = row_word<kOdd>(probabilities, k + u * kWarpSize);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          p[u * kElements + i] = word_element<scalar_t>(other, i);
        }
      }
    }
    add_logits<kKind>(sum, terms, x, p, row.smoothing);
  };
  constexpr std::integral_constant<int, kSize> kAll;
  int k = lane;
  if constexpr (kKind == RowKind::kIndex) {
    for (; k + (kWordUnroll - 1) * kWarpSize < whole; k += kWordUnroll * kWarpSize) {
      add(k, std::integral_constant<int, kWordUnroll>{}, kAll);
    }
  }
  constexpr int kFewer = kWordUnroll / 2;
  for (; k + (kFewer - 1) * kWarpSize < whole; k += kFewer * kWarpSize) {
    add(k, std::integral_constant<int, kFewer>{}, kAll);
  }
  for (; k < whole; k += kWarpSize) {
    add(k, std::integral_constant<int, 1>{}, kAll);
  }
  if (kSize > 1 && row.count % kSize != 0 && k == whole) {
    add(k, std::integral_constant<int, 1>{}, std::integral_constant<int, 1>{});
  }
}

// whole: rows are whole vectors, and those are taken in turn, else words.
template <typename scalar_t, RowKind kKind, typename Terms>
__device__ __forceinline__ void add_terms(TermSum& sum, const Terms& terms,
                                          const StagedElements& row, bool whole, int lane) {
  const bool odd = row.phase % kWordElements<scalar_t> != 0;
  if (whole) {
    if (row.phase == 0) {
      add_vectors<scalar_t, kKind>(sum, terms, row, lane, [](const uint32_t* words, int v) {
        return load_vector(reinterpret_cast<const scalar_t*>(words), v);
      });
    } else {
      add_vectors<scalar_t, kKind>(sum, terms, row, lane, [&](const uint32_t* words, int v) {
        Vector<scalar_t> vector;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int k = row.phase / kWordElements<scalar_t> + 4 * v + i;
          vector.set_word(i, odd ? row_word<true>(words, k) : row_word<false>(words, k));
        }
        return vector;
      });
    }
  } else if (odd) {
    add_words<scalar_t, kKind, true>(sum, terms, row, lane);
  } else {
    add_words<scalar_t, kKind, false>(sum, terms, row, lane);
  }
}

}  // namespace lossops::cuda
