// Element types of the tensors that kernels read and write, the same on both
// backends, and their conversion to and from the type that arithmetic uses.
#pragma once

#include <cstdint>
#include <cstring>

#include "losses/math.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace lossops {

enum class DType : int8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool,
};

LOSSOPS_HOST_DEVICE bool is_half_type(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

LOSSOPS_HOST_DEVICE bool is_floating(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kFloat32 || is_half_type(dtype);
}

// In bytes.
constexpr int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    default:
      return 1;
  }
}

struct half_t {
  uint16_t bits;
};

struct bfloat16_t {
  uint16_t bits;
};

// acc_t: the type a loss of scalar_t is computed and accumulated in.
template <typename scalar_t>
struct acc_type {
  using type = float;
};
template <>
struct acc_type<double> {
  using type = double;
};
template <typename scalar_t>
using acc_type_t = typename acc_type<scalar_t>::type;

template <typename scalar_t>
struct dtype_of;
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<half_t> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct dtype_of<bfloat16_t> {
  static constexpr DType value = DType::kBFloat16;
};

namespace detail {

template <typename To, typename From>
LOSSOPS_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// IEEE binary16, branch-free so that host loops vectorise.
LOSSOPS_HOST_DEVICE float half_bits_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  // Scaling by 2^112 moves the exponent's bias, subnormals included.
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(0x77800000u);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // inf and NaN
  return bit_cast<float>((bit_cast<uint32_t>(scaled) | special) | sign);
}

// Rounds to nearest, ties to even.
LOSSOPS_HOST_DEVICE uint16_t float_to_half_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: rebias the exponent, then round the 13 dropped bits.
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: adding 0.5 leaves the rounded mantissa in the low bits.
  const uint32_t subnormal =
      bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? 0x7c00u : result;  // overflow and inf
  result = magnitude > 0x7f800000u ? 0x7e00u : result;   // NaN
  return static_cast<uint16_t>(result | sign);
}

LOSSOPS_HOST_DEVICE uint16_t float_to_bfloat16_bits(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  // fault: bfloat16-rounding
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

}  // namespace detail

template <typename acc_t, typename scalar_t>
LOSSOPS_HOST_DEVICE acc_t to_acc(scalar_t value) {
  return static_cast<acc_t>(value);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t to_acc(half_t value) {
#if defined(__CUDA_ARCH__)
  return static_cast<acc_t>(__half2float(__ushort_as_half(value.bits)));
#else
  return static_cast<acc_t>(detail::half_bits_to_float(value.bits));
#endif
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t to_acc(bfloat16_t value) {
  return static_cast<acc_t>(detail::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16));
}

template <typename scalar_t>
struct from_acc_impl {
  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE scalar_t convert(acc_t value) {
    return static_cast<scalar_t>(value);
  }
};

template <>
struct from_acc_impl<half_t> {
  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE half_t convert(acc_t value) {
#if defined(__CUDA_ARCH__)
    return half_t{__half_as_ushort(__float2half_rn(static_cast<float>(value)))};
#else
    return half_t{detail::float_to_half_bits(static_cast<float>(value))};
#endif
  }
};

template <>
struct from_acc_impl<bfloat16_t> {
  template <typename acc_t>
  static LOSSOPS_HOST_DEVICE bfloat16_t convert(acc_t value) {
    // Some GPUs convert by one instruction; __float2bfloat16_rn picks it.
#if defined(__CUDA_ARCH__)
    return bfloat16_t{__bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(value)))};
#else
    return bfloat16_t{detail::float_to_bfloat16_bits(static_cast<float>(value))};
#endif
  }
};

template <typename scalar_t, typename acc_t>
LOSSOPS_HOST_DEVICE scalar_t from_acc(acc_t value) {
  return from_acc_impl<scalar_t>::convert(value);
}

// Element i of data whose type is known at run time only.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t load_as(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat64:
      return static_cast<acc_t>(static_cast<const double*>(data)[i]);
    case DType::kFloat32:
      return static_cast<acc_t>(static_cast<const float*>(data)[i]);
    case DType::kFloat16:
      return to_acc<acc_t>(static_cast<const half_t*>(data)[i]);
    case DType::kBFloat16:
      return to_acc<acc_t>(static_cast<const bfloat16_t*>(data)[i]);
    case DType::kInt64:
      return static_cast<acc_t>(static_cast<const int64_t*>(data)[i]);
    case DType::kInt32:
      return static_cast<acc_t>(static_cast<const int32_t*>(data)[i]);
    case DType::kInt16:
      return static_cast<acc_t>(static_cast<const int16_t*>(data)[i]);
    case DType::kInt8:
      return static_cast<acc_t>(static_cast<const int8_t*>(data)[i]);
    case DType::kUInt8:
    case DType::kBool:
      return static_cast<acc_t>(static_cast<const uint8_t*>(data)[i]);
  }
  return acc_t(0);
}

// Results are floating.
template <typename acc_t>
LOSSOPS_HOST_DEVICE void store_as(void* data, DType dtype, int64_t i, acc_t value) {
  switch (dtype) {
    case DType::kFloat64:
      static_cast<double*>(data)[i] = static_cast<double>(value);
      return;
    case DType::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case DType::kFloat16:
      static_cast<half_t*>(data)[i] = from_acc<half_t>(value);
      return;
    case DType::kBFloat16:
      static_cast<bfloat16_t*>(data)[i] = from_acc<bfloat16_t>(value);
      return;
    default:
      return;
  }
}

}  // namespace lossops
