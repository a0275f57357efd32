// Half types of which a kernel is told when it is launched: one kernel for both, for less machine
// code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// In the place of half_t and bfloat16_t.
struct AnyHalf {
  uint16_t bits;
};

// Whether elements may be subnormal, as float: those of float16 are not.
template <typename scalar_t>
constexpr bool kMayBeSubnormal = !std::is_same_v<scalar_t, half_t>;

// dtype: of an AnyHalf. Other types are their own.
template <typename acc_t, typename scalar_t>
__device__ __forceinline__ acc_t to_acc_of(scalar_t value, DType dtype) {
  if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
    return dtype == DType::kBFloat16 ? to_acc<acc_t>(bfloat16_t{value.bits})
                                     : to_acc<acc_t>(half_t{value.bits});
  } else {
    return to_acc<acc_t>(value);
  }
}
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ scalar_t from_acc_of(acc_t value, DType dtype) {
  if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
    return {dtype == DType::kBFloat16 ? from_acc<bfloat16_t>(value).bits
                                      : from_acc<half_t>(value).bits};
  } else {
    return from_acc<scalar_t>(value);
  }
}

// 32 bits of elements, rounded.
template <typename scalar_t>
__device__ __forceinline__ uint32_t pack_word_of(const float* values, DType dtype) {
  if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
    return dtype == DType::kBFloat16 ? pack_word<bfloat16_t>(values) : pack_word<half_t>(values);
  } else {
    return pack_word<scalar_t>(values);
  }
}

}  // namespace lossops::cuda
