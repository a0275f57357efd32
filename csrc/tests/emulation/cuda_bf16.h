// Bits of bfloat16, for the emulation of CUDA; see cuda_runtime.h.
#pragma once

#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
};
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const auto bits = emulated_bits<uint32_t>(value);
  if (value != value) {
    return {0x7fff};
  }
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
