#include "bindings/tensors.h"

#include <torch/csrc/stable/ops.h>

#include <sstream>
#include <stdexcept>

#include "cpu/huge_pages.h"

// What torch's last error said. torch has this function from 2.13 on.
extern "C" const char* torch_exception_get_what_without_backtrace() __attribute__((weak));

namespace lossops::bindings {

std::string device_of(const Tensor& tensor) {
  return tensor.is_cpu()
             ? std::string("cpu")
             : (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(tensor.get_device_index());
}

namespace {

// Advises huge pages for a tensor that was just allocated and not filled yet.
Tensor fresh(Tensor tensor) {
  if (tensor.is_cpu()) {
    cpu::advise_huge_pages(tensor.mutable_data_ptr(),
                           tensor.numel() * static_cast<int64_t>(tensor.element_size()));
  }
  return tensor;
}

// Fails with a message whose first words errors.py recognises. It raises torch.OutOfMemoryError
// then, which programs catch.
[[noreturn]] void fail_allocation(const Dims& sizes, ScalarType dtype, const Tensor& like) {
  std::ostringstream message;
  const char* const said = torch_exception_get_what_without_backtrace == nullptr
                               ? ""
                               : torch_exception_get_what_without_backtrace();
  if (*said != '\0') {
    message << said << " (lossops: ";
  } else {
    message << (like.is_cuda() ? "CUDA out of memory. (lossops: " : "out of memory (lossops: ");
  }
  message << "cannot allocate a tensor of shape " << sizes << ", " << name_of(dtype) << ", on "
          << device_of(like) << ")";
  throw std::runtime_error(message.str());
}

}  // namespace

Tensor empty_strided(const Dims& sizes, const Dims& strides, ScalarType dtype, const Tensor& like) {
  const int32_t device_type = device_type_of(like);
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(
          sizes.size, sizes.values, strides.values,
          torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
          device_type == aoti_torch_device_type_cpu() ? 0 : like.get_device_index(),
          &handle) != AOTI_TORCH_SUCCESS) {
    fail_allocation(sizes, dtype, like);
  }
  return fresh(Tensor(handle));
}

Tensor empty_dense(const Dims& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, dense_strides(sizes, row_major_order(sizes.size)), dtype, like);
}

Tensor empty_vector(int64_t length, ScalarType dtype, const Tensor& like) {
  Dims sizes;
  sizes.push_back(length);
  return empty_dense(sizes, dtype, like);
}

// For a dense layout, empty_strided: it spares the search for the operator empty_like by its name.
Tensor empty_like(const View& view) {
  if (is_dense(view.sizes, view.strides)) {
    return empty_strided(view.sizes, view.strides, view.dtype, view.tensor);
  }
  try {
    return fresh(torch::stable::empty_like(view.tensor));
  } catch (const std::runtime_error&) {
    fail_allocation(view.sizes, view.dtype, view.tensor);
  }
}

}  // namespace lossops::bindings
