// Run-time dtypes to compile-time types.
#pragma once

#include <type_traits>

#include "scalar_types.h"

namespace lossops::cuda {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body with the tag of a floating dtype; does nothing for others.
#pragma nv_exec_check_disable
template <typename Body>
__host__ __device__ void visit_floating(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body(TypeTag<double>{});
    case DType::kFloat32:
      return body(TypeTag<float>{});
    case DType::kFloat16:
      return body(TypeTag<half_t>{});
    case DType::kBFloat16:
      return body(TypeTag<bfloat16_t>{});
    default:
      return;
  }
}

// The same of the half types alone, one of which it is.
template <typename Body>
void visit_half_type(DType dtype, Body&& body) {
  dtype == DType::kFloat16 ? body(TypeTag<half_t>{}) : body(TypeTag<bfloat16_t>{});
}

// The same of these and fp32, one of which it is.
template <typename Body>
void visit_float_or_half(DType dtype, Body&& body) {
  dtype == DType::kFloat32 ? body(TypeTag<float>{}) : visit_half_type(dtype, body);
}

// Calls body with the value as a constant.
template <typename Body>
void visit_bool(bool value, Body&& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

}  // namespace lossops::cuda
