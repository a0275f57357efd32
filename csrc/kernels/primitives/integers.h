// Integer arithmetic of launchers.
#pragma once

#include <cstdint>

#include "losses/math.h"

namespace lossops::cuda {

// a / b, rounded up; both positive.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// The least multiple of b that is at least a; both positive.
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
// The size of equal shares of `count`: the fewest of which none is larger than `most`.
constexpr int64_t even_share(int64_t count, int64_t most) {
  return ceil_div(count, ceil_div(count, most));
}

// Division of numbers below 2^31 by one that launchers know, without a division (Granlund and
// Montgomery, PLDI 1994).
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while (shift < 31 && (uint32_t{1} << shift) < divisor) {
      ++shift;
    }
    const uint64_t one = 1;
    multiplier = static_cast<uint32_t>(((one << 32) * ((one << shift) - divisor)) / divisor + 1);
  }

  LOSSOPS_HOST_DEVICE uint32_t quotient(uint32_t n) const {
#if defined(__CUDA_ARCH__)
    return (__umulhi(n, multiplier) + n) >> shift;
#else
    return n / value;
#endif
  }
};

constexpr int64_t kMaxDividend = (int64_t{1} << 31) - 1;

}  // namespace lossops::cuda
