// A thread's elements of an operand of any layout and dtype, one an access: read, converted,
// written.
//
// A Tile says what is computed in (acc_t), how many elements a thread has (kSteps times kWidth),
// and where they are:
//
// - operand(which): what the plan says of it, its dtype among that; is_half(which): whether that is
//   a half type;
// - for_each_element(which, body): calls body(n, address) for each. What does not count lies where
//   another element does.
#pragma once

#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

template <typename Tile>
class SingleValues {
 public:
  using acc_t = typename Tile::acc_t;
  static constexpr int kCount = Tile::kSteps * Tile::kWidth;
  static constexpr bool kIsDouble = sizeof(acc_t) == 8;

  SingleValues() = default;
  __device__ __forceinline__ explicit SingleValues(const acc_t (&results)[kCount]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      values_[n] = results[n];
    }
  }

  __device__ __forceinline__ acc_t at(int step, int i) const {
    return values_[step * Tile::kWidth + i];
  }

  __device__ __forceinline__ void unfold() {
#pragma unroll
    for (acc_t& value : values_) {
      value = unfolded(value);
    }
  }

  // Starts to read. Half types stay bits until convert(), so that nothing waits for them here.
  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    const DType dtype = tile.operand(which).dtype;
    if constexpr (kIsDouble) {
      tile.for_each_element(
          which, [&](int n, const char* from) { values_[n] = load_as<acc_t>(from, dtype, 0); });
    } else if (tile.is_half(which)) {
      tile.for_each_element(which, [&](int n, const char* from) {
        values_[n] = __uint_as_float(*reinterpret_cast<const uint16_t*>(from));
      });
    } else {
      tile.for_each_element(which, [&](int n, const char* from) {
        values_[n] = *reinterpret_cast<const float*>(from);
      });
    }
  }

  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    if constexpr (!kIsDouble) {
      if (tile.is_half(which)) {
        tile.operand(which).dtype == DType::kBFloat16 ? unpack<bfloat16_t>() : unpack<half_t>();
      }
    }
  }

  // Rounds and writes.
  __device__ __forceinline__ void store(const Tile& tile, Which which) {
    const DType dtype = tile.operand(which).dtype;
    if constexpr (kIsDouble) {
      tile.for_each_element(which,
                            [&](int n, char* to) { store_as<acc_t>(to, dtype, 0, values_[n]); });
    } else if (!tile.is_half(which)) {
      tile.for_each_element(which,
                            [&](int n, char* to) { *reinterpret_cast<float*>(to) = values_[n]; });
    } else {
      uint32_t bits[kCount];
      if (dtype == DType::kBFloat16) {
        pack<bfloat16_t>(bits);
      } else {
        pack<half_t>(bits);
      }
      tile.for_each_element(which, [&](int n, char* to) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits[n]);
      });
    }
  }

 protected:
  acc_t values_[kCount];

 private:
  template <typename scalar_t>
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (acc_t& value : values_) {
      value = to_acc<acc_t>(scalar_t{static_cast<uint16_t>(__float_as_uint(value))});
    }
  }
  template <typename scalar_t>
  __device__ __forceinline__ void pack(uint32_t (&bits)[kCount]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      bits[n] = from_acc<scalar_t>(values_[n]).bits;
    }
  }
};

}  // namespace lossops::cuda
