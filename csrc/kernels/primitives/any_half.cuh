// Half types of which a kernel is told when it is launched: one kernel for both, for less machine
// code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// In the place of half_t and bfloat16_t.
struct AnyHalf {
  uint16_t bits;
};

// Calls body with the tag of the type of elements. dtype: of an AnyHalf.
template <typename scalar_t, typename Body>
__device__ __forceinline__ void visit_type_of(DType dtype, const Body& body) {
  if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
    dtype == DType::kBFloat16 ? body(TypeTag<bfloat16_t>{}) : body(TypeTag<half_t>{});
  } else {
    body(TypeTag<scalar_t>{});
  }
}

// Calls body with the tag of float, or with that of AnyHalf.
template <typename Body>
void visit_float_or_any_half(DType dtype, const Body& body) {
  dtype == DType::kFloat32 ? body(TypeTag<float>{}) : body(TypeTag<AnyHalf>{});
}

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

// The elements of a vector, and the way back: rounds.
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ void unpack_of(const Vector<scalar_t>& vector, DType dtype,
                                          acc_t (&values)[kVectorSize<scalar_t>]) {
  visit_type_of<scalar_t>(dtype, [&](auto type) {
#pragma unroll
    for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
      if constexpr (sizeof(scalar_t) == 2) {
        values[i] = to_acc<acc_t>(typename decltype(type)::type{vector.get(i).bits});
      } else {
        values[i] = to_acc<acc_t>(vector.get(i));
      }
    }
  });
}
template <typename scalar_t, typename acc_t>
__device__ __forceinline__ Vector<scalar_t> pack_of(const acc_t (&values)[kVectorSize<scalar_t>],
                                                    DType dtype) {
  if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
    Vector<scalar_t> vector;
    visit_type_of<scalar_t>(dtype, [&](auto type) {
      const auto packed = pack<typename decltype(type)::type>(values);
#pragma unroll
      for (int i = 0; i < kVectorBytes / 4; ++i) {
        vector.set_word(i, packed.word(i));
      }
    });
    return vector;
  } else {
    return pack<scalar_t>(values);
  }
}

}  // namespace lossops::cuda
