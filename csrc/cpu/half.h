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

#define LOSSOPS_HALVES_AVX512 \
  __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512vl"), noinline)) inline

// The first `count` < 16 elements of a vector.
inline __mmask16 first_of_16(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

// The masks of all 16 change nothing. Without them, gcc 12 warns of its own headers.
constexpr __mmask16 kAllOf16 = 0xffff;

LOSSOPS_HALVES_AVX512 void halves_to_floats_avx512(const half_t* from, int count, float* to) {
  int i = 0;
#pragma GCC unroll 4  // 6 % of a forward pass of MSE
  for (; i + 16 <= count; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(kAllOf16, halves));
  }
  const __mmask16 rest = first_of_16(count - i);
  const __m256i halves = _mm256_maskz_loadu_epi16(rest, from + i);
  _mm512_mask_storeu_ps(to + i, rest, _mm512_maskz_cvtph_ps(rest, halves));
}

LOSSOPS_HALVES_AVX512 void floats_to_halves_avx512(const float* from, int count, half_t* to) {
  int i = 0;
#pragma GCC unroll 4  // 6 % of a forward pass of MSE
  for (; i + 16 <= count; i += 16) {
    const __m512 floats = _mm512_loadu_ps(from + i);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm512_maskz_cvtps_ph(kAllOf16, floats, _MM_FROUND_TO_NEAREST_INT));
  }
  const __mmask16 rest = first_of_16(count - i);
  const __m512 floats = _mm512_maskz_loadu_ps(rest, from + i);
  _mm256_mask_storeu_epi16(to + i, rest,
                           _mm512_maskz_cvtps_ph(rest, floats, _MM_FROUND_TO_NEAREST_INT));
}

#undef LOSSOPS_HALVES_AVX512

__attribute__((target("avx2,f16c"), noinline)) inline void halves_to_floats(const half_t* from,
                                                                            int count, float* to) {
  if (instruction_set() == InstructionSet::kAvx512) {
    return halves_to_floats_avx512(from, count, to);
  }
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
  if (instruction_set() == InstructionSet::kAvx512) {
    return floats_to_halves_avx512(from, count, to);
  }
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
