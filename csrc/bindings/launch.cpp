#include "bindings/launch.h"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>

#if defined(LOSSOPS_WITH_CUDA)
// Absent from CPU-only torch, where the same binary must load.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                             void** ret_stream)
    __attribute__((weak));
#endif

namespace lossops::bindings {

void torch_parallel_for(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                        void* data) {
  torch::stable::parallel_for(0, count, grain,
                              [&](int64_t begin, int64_t end) { body(data, begin, end); });
}

#if defined(LOSSOPS_WITH_CUDA)
std::string cuda_problem() { return cuda::why_unusable(); }

cuda::Context current_stream(const Tensor& tensor) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    throw std::runtime_error("lossops: this torch has no CUDA");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return stream;
}
#else
std::string cuda_problem() {
  return "this build has no CUDA kernels: install a released wheel, or build with a CUDA compiler";
}
#endif

}  // namespace lossops::bindings
