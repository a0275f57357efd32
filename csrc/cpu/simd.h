// Runs code compiled for the widest vectors that the processor has.
//
// The body must be always_inline, and so must what it calls in its loops: it then takes
// over the instruction set of the function that it is inlined into. Loops are plain and
// left to the compiler's vectoriser.
#pragma once

#include <cstdint>

#include "losses/math.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#define LOSSOPS_ALWAYS_INLINE __attribute__((always_inline))

namespace lossops::cpu {

#if defined(__x86_64__) && defined(__GNUC__)

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

inline InstructionSet detect_instruction_set() {
  __builtin_cpu_init();
  // By hand: not every compiler's __builtin_cpu_supports knows it.
  unsigned eax, ebx, ecx, edx;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx2 && avx512 ? InstructionSet::kAvx512
                        : (avx2 ? InstructionSet::kAvx2 : InstructionSet::kBaseline);
}

inline InstructionSet instruction_set() {
  static const InstructionSet detected = detect_instruction_set();
  return detected;
}

template <typename Body>
__attribute__((target("avx2,fma"), noinline)) void call_with_avx2(const Body& body) {
  body();
}

template <typename Body>
__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"), noinline)) void
call_with_avx512(const Body& body) {
  body();
}

// Processors without AVX2 are older than 2013, or small: less code for them keeps the wheel small.
template <typename Body>
__attribute__((optimize("Os"), noinline)) void call_with_baseline(const Body& body) {
  body();
}

// acc_t: the type that the body computes in. fp64 is rare, so it has no code for AVX-512: that
// would be 0.12 MB of the wheel.
template <typename acc_t, typename Body>
void with_widest_vectors(const Body& body) {
  const InstructionSet set = instruction_set();
  if constexpr (sizeof(acc_t) < sizeof(double)) {
    if (set == InstructionSet::kAvx512) {
      return call_with_avx512(body);
    }
  }
  set == InstructionSet::kBaseline ? call_with_baseline(body) : call_with_avx2(body);
}

#else

template <typename acc_t, typename Body>
void with_widest_vectors(const Body& body) {
  body();
}

#endif

}  // namespace lossops::cpu
