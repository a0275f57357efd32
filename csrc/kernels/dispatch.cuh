// Run-time dtypes to compile-time types.
#pragma once

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

}  // namespace lossops::cuda
