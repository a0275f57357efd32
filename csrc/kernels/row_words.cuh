// A row of logits in shared memory, wherever it starts there, and the sum of its exponentials.
//
// Rows are copied in granules of 16 bytes, as they lie in global memory: a row that is not aligned
// starts within a granule. Sums are taken over 32-bit words that count from the row's first
// element, so that their order, and with it every bit, is the same wherever the row lies.
#pragma once

#include <cstdint>

#include "kernels/row_terms.cuh"
#include "kernels/thread_reduce.cuh"
#include "kernels/vectorized.cuh"
#include "kernels/warp_reduce.cuh"
#include "losses/cross_entropy.h"
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

// -inf in every element.
template <typename scalar_t>
__device__ __forceinline__ uint32_t lowest_word() {
  constexpr bool kHalf = std::is_same_v<scalar_t, half_t>;
  return sizeof(scalar_t) == 4 ? 0xff800000u : kHalf ? 0xfc00fc00u : 0xff80ff80u;
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

// Element by element the larger, as above.
template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> max_of_vectors(const Vector<scalar_t>& a,
                                                           const Vector<scalar_t>& b) {
  Vector<scalar_t> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.set_word(i, max_of_words<scalar_t>(a.word(i), b.word(i)));
  }
  return result;
}

// Word k of a row whose first element lies in words[0]: in its upper half if kOdd.
template <bool kOdd>
__device__ __forceinline__ uint32_t row_word(const uint32_t* words, int k) {
  return kOdd ? __funnelshift_r(words[k], words[k + 1], 16) : words[k];
}

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

// A thread's share of a row's sum, apart from the terms of the maximum, which are counted: what is
// small beside 1 keeps all of its bits.
struct TermSum {
  float below = 0;
  int ones = 0;
  float distance = 0;  // sum of max - x, where it is wanted

  template <int kCount>
  __device__ __forceinline__ void add(float (&terms)[kCount], float unit) {
    // Sums of four that are less than the maximum's term have none.
    constexpr int kGroup = kCount < 4 ? kCount : 4;
    constexpr int kGroups = kCount / kGroup;
    float sums[kGroups];
    const auto add_groups = [&] {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float group[kGroup];
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          group[i] = terms[g * kGroup + i];
        }
        sums[g] = pairwise_sum(group);
      }
    };
    add_groups();
    float largest = sums[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      largest = math::max_number(sums[g], largest);
    }
    if (largest >= unit) {
      ones += count_ones(terms, unit);
      add_groups();
    }
    below += pairwise_sum(sums);
  }
};

// Words a thread has in flight.
constexpr int kWordUnroll = 8;

// Adds a row of `count` elements, or a share of one, by a warp: words `lane`, `lane + 32`, ...
template <typename scalar_t, bool kDistance, bool kOdd>
__device__ __forceinline__ void add_terms(TermSum& sum,
                                          const RowTerms<kExactExponentials<scalar_t>>& terms,
                                          const uint32_t* words, int count, int lane) {
  constexpr int kSize = kWordElements<scalar_t>;
  const int whole = count / kSize;
  // kCount words, kWarpSize apart.
  const auto add_words = [&](int k, auto words_at_a_time) {
    constexpr int kCount = decltype(words_at_a_time)::value;
    float values[kCount * kSize];
    float distances[kCount * kSize];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const uint32_t word = row_word<kOdd>(words, k + u * kWarpSize);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = word_element<scalar_t>(word, i);
        values[u * kSize + i] = terms(x);
        distances[u * kSize + i] = terms.shift - x;
      }
    }
    sum.add(values, terms.unit);
    if constexpr (kDistance) {
      sum.distance += pairwise_sum(distances);
    }
  };
  int k = lane;
  for (; k + (kWordUnroll - 1) * kWarpSize < whole; k += kWordUnroll * kWarpSize) {
    add_words(k, std::integral_constant<int, kWordUnroll>{});
  }
  constexpr int kFewer = kWordUnroll / 2;
  for (; k + (kFewer - 1) * kWarpSize < whole; k += kFewer * kWarpSize) {
    add_words(k, std::integral_constant<int, kFewer>{});
  }
  for (; k < whole; k += kWarpSize) {
    add_words(k, std::integral_constant<int, 1>{});
  }
  if (kSize > 1 && count % kSize != 0 && k == whole) {
    const float x = word_element<scalar_t>(row_word<kOdd>(words, whole), 0);
    float values[1] = {terms(x)};
    sum.add(values, terms.unit);
    if constexpr (kDistance) {
      sum.distance += terms.shift - x;
    }
  }
}

// The row's first element is `phase` elements after `stage`.
template <typename scalar_t, bool kDistance>
__device__ __forceinline__ void add_terms(TermSum& sum,
                                          const RowTerms<kExactExponentials<scalar_t>>& terms,
                                          const uint32_t* stage, int phase, int count, int lane) {
  const uint32_t* const words = stage + phase / kWordElements<scalar_t>;
  if (phase % kWordElements<scalar_t> != 0) {
    add_terms<scalar_t, kDistance, true>(sum, terms, words, count, lane);
  } else {
    add_terms<scalar_t, kDistance, false>(sum, terms, words, count, lane);
  }
}

}  // namespace lossops::cuda
