// Runs of float16 by the processor's conversions, where it has them: one instruction instead of a
// dozen, with the same results.
#pragma once

#include <cstring>

#include "cpu/simd.h"
#include "scalar_types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace lossops::cpu {

#if defined(__x86_64__) && defined(__GNUC__)

inline bool has_half_conversions() { return instruction_set() != InstructionSet::kBaseline; }

__attribute__((target("avx2,f16c"), noinline)) inline void halves_to_floats(const half_t* from,
                                                                            int count, float* to) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  if (i < count) {
    half_t tail[8] = {};
    float converted[8];
    std::memcpy(tail, from + i, (count - i) * sizeof(half_t));
    _mm256_storeu_ps(converted,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tail))));
    std::memcpy(to + i, converted, (count - i) * sizeof(float));
  }
}

__attribute__((target("avx2,f16c"), noinline)) inline void floats_to_halves(const float* from,
                                                                            int count, half_t* to) {
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  if (i < count) {
    float tail[8] = {};
    half_t converted[8];
    std::memcpy(tail, from + i, (count - i) * sizeof(float));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(converted),
                     _mm256_cvtps_ph(_mm256_loadu_ps(tail), _MM_FROUND_TO_NEAREST_INT));
    std::memcpy(to + i, converted, (count - i) * sizeof(half_t));
  }
}

#else

inline bool has_half_conversions() { return false; }
inline void halves_to_floats(const half_t*, int, float*) {}
inline void floats_to_halves(const float*, int, half_t*) {}

#endif

}  // namespace lossops::cpu
