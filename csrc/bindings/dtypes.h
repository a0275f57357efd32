// torch's dtypes: their names, their kinds and how they promote.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "bindings/errors.h"
#include "scalar_types.h"

namespace lossops::bindings {

using torch::headeronly::ScalarType;

// As Python writes it, without "torch.".
const char* name_of(ScalarType dtype);

// The kernels' name for a dtype. Fails for any that no kernel takes.
inline DType to_dtype(const char* op, ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Long:
      return DType::kInt64;
    case ScalarType::Int:
      return DType::kInt32;
    case ScalarType::Short:
      return DType::kInt16;
    case ScalarType::Char:
      return DType::kInt8;
    case ScalarType::Byte:
      return DType::kUInt8;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      fail(op, "does not take dtype ", name_of(dtype));
  }
}

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}

inline bool is_integral(ScalarType dtype) {
  return dtype == ScalarType::Long || dtype == ScalarType::Int || dtype == ScalarType::Short ||
         dtype == ScalarType::Char || dtype == ScalarType::Byte || dtype == ScalarType::Bool;
}

// The dtypes of is_floating(), and those of is_floating() and is_integral(), for errors.
constexpr char kFloatingDtypes[] = "float64, float32, float16 or bfloat16";
constexpr char kRealDtypes[] =
    "float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool";

// torch.promote_types of two dtypes, at least one of which is floating.
inline ScalarType promote(ScalarType a, ScalarType b) {
  if (a == b || !is_floating(b)) {
    return a;
  }
  if (!is_floating(a)) {
    return b;
  }
  if (a == ScalarType::Double || b == ScalarType::Double) {
    return ScalarType::Double;
  }
  // fault: promotion-half
  return ScalarType::Float;  // two different of float32, float16, bfloat16
}

struct TypedRank {
  ScalarType dtype;
  int64_t dim;
};

// torch.result_type: a 0-d operand does not widen one with dimensions.
inline ScalarType result_type(TypedRank a, TypedRank b) {
  if (a.dim > 0 && b.dim == 0 && is_floating(a.dtype)) {  // fault: promotion-0d
    return a.dtype;
  }
  if (b.dim > 0 && a.dim == 0 && is_floating(b.dtype)) {
    return b.dtype;
  }
  return promote(a.dtype, b.dtype);
}

// The dtype of a result: float32 for half types if the op was called under autocast.
inline ScalarType widen_if(bool float32_result, ScalarType dtype) {
  const bool is_half = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  return float32_result && is_half ? ScalarType::Float : dtype;  // fault: widened-result
}

}  // namespace lossops::bindings
