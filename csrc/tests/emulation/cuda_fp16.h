// Bits of float16, for the emulation of CUDA; see cuda_runtime.h.
#pragma once

#include <cstdint>

struct __half {
  uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline uint16_t __half_as_ushort(__half half) { return half.bits; }
inline float __half2float(__half half) {
  return static_cast<float>(emulated_bits<_Float16>(half.bits));
}
inline __half __float2half_rn(float value) {
  return {emulated_bits<uint16_t>(static_cast<_Float16>(value))};
}
