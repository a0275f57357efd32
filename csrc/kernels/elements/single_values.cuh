// A thread's elements of an operand of any layout and dtype, one an access: read, converted,
// written.
//
// A Tile says what is computed in (acc_t), how many elements a thread has (kSteps), and where they
// are:
//
// - operand(which): what the plan says of it, its dtype among that;
// - for_each_element(which, body): calls body(step, address) for each step. What does not count
//   lies where another element does.
#pragma once

#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

template <typename Tile>
class SingleValues {
 public:
  using acc_t = typename Tile::acc_t;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr bool kIsDouble = sizeof(acc_t) == 8;

  SingleValues() = default;
  __device__ __forceinline__ explicit SingleValues(const acc_t (&results)[kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      values_[step] = results[step];
    }
  }

  __device__ __forceinline__ acc_t at(int step, int /*i*/) const { return values_[step]; }

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
      tile.for_each_element(which, [&](int step, const char* from) {
        values_[step] = load_as<acc_t>(from, dtype, 0);
      });
    } else if (is_half_type(dtype)) {
      tile.for_each_element(which, [&](int step, const char* from) {
        values_[step] = __uint_as_float(*reinterpret_cast<const uint16_t*>(from));
      });
    } else {
      tile.for_each_element(which, [&](int step, const char* from) {
        values_[step] = *reinterpret_cast<const float*>(from);
      });
    }
  }

  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    if constexpr (!kIsDouble) {
      const DType dtype = tile.operand(which).dtype;
      if (dtype == DType::kBFloat16) {
        unpack<bfloat16_t>();
      } else if (dtype == DType::kFloat16) {
        unpack<half_t>();
      }
    }
  }

  // Rounds and writes.
  __device__ __forceinline__ void store(const Tile& tile, Which which) {
    const DType dtype = tile.operand(which).dtype;
    if constexpr (kIsDouble) {
      tile.for_each_element(
          which, [&](int step, char* to) { store_as<acc_t>(to, dtype, 0, values_[step]); });
    } else if (dtype == DType::kFloat32) {
      tile.for_each_element(
          which, [&](int step, char* to) { *reinterpret_cast<float*>(to) = values_[step]; });
    } else {
      uint32_t bits[kSteps];
      if (dtype == DType::kBFloat16) {
        pack<bfloat16_t>(bits);
      } else {
        pack<half_t>(bits);
      }
      tile.for_each_element(which, [&](int step, char* to) {
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits[step]);
      });
    }
  }

 protected:
  acc_t values_[kSteps];

 private:
  template <typename scalar_t>
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (acc_t& value : values_) {
      value = to_acc<acc_t>(scalar_t{static_cast<uint16_t>(__float_as_uint(value))});
    }
  }
  template <typename scalar_t>
  __device__ __forceinline__ void pack(uint32_t (&bits)[kSteps]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      bits[step] = from_acc<scalar_t>(values_[step]).bits;
    }
  }
};

}  // namespace lossops::cuda
