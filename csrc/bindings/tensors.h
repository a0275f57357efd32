// Tensors: their geometry, their device, their place in a kernel's arguments, and new ones.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "bindings/dtypes.h"
#include "bindings/errors.h"
#include "iteration_space.h"

namespace lossops::bindings {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dims to_dims(const torch::headeronly::IntHeaderOnlyArrayRef& values) {
  Dims dims;
  LOSSOPS_CHECK("lossops", values.size() <= static_cast<size_t>(kMaxTensorDims), "a tensor has ",
                values.size(), " dimensions; at most ", kMaxTensorDims, " are supported");
  dims.size = static_cast<int>(values.size());
  for (int i = 0; i < dims.size; ++i) {
    dims[i] = values[i];
  }
  return dims;
}

// A tensor with its geometry read once. The tensor must outlive it.
struct View {
  const Tensor& tensor;
  Dims sizes;
  Dims strides;
  ScalarType dtype;

  explicit View(const Tensor& source)
      : tensor(source),
        sizes(to_dims(source.sizes())),
        strides(to_dims(source.strides())),
        dtype(source.scalar_type()) {}
};

inline int32_t device_type_of(const Tensor& tensor) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
  return device_type;
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  const int32_t device_type = device_type_of(a);
  return device_type == device_type_of(b) && (device_type == aoti_torch_device_type_cpu() ||
                                              a.get_device_index() == b.get_device_index());
}

// As torch writes it: "cpu", "cuda:0".
std::string device_of(const Tensor& tensor);

// ------------------------------------------------------- a kernel's arguments

inline void set_data(const char* op, Operand& operand, const View& view) {
  operand.data = view.tensor.data_ptr();
  operand.dtype = to_dtype(op, view.dtype);
}

inline void set_result(Operand& operand, const Tensor& tensor) {
  operand.data = tensor.mutable_data_ptr();
  operand.dtype = to_dtype("", tensor.scalar_type());
}

// ------------------------------------------------------------------ new tensors

// New tensors are on the device of `like`. If memory runs out, each function fails with an error
// that lossops/_ops/errors.py turns into torch.OutOfMemoryError.
Tensor empty_strided(const Dims& sizes, const Dims& strides, ScalarType dtype, const Tensor& like);
Tensor empty_dense(const Dims& sizes, ScalarType dtype, const Tensor& like);
Tensor empty_vector(int64_t length, ScalarType dtype, const Tensor& like);
Tensor empty_like(const View& view);

}  // namespace lossops::bindings
