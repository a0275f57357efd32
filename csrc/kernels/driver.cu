#include <cuda_runtime.h>
#include <pthread.h>

#include <atomic>
#include <string>

#include "launchers.h"

namespace lossops::cuda {
namespace {

// Asked once in a process: a forked one starts anew.
std::atomic<bool> usable{false};
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] { usable = false; });

std::string version_of(int cuda) {
  return std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

// The oldest driver for Linux that runs what was built with any minor version of this toolkit.
constexpr const char* kOldestDriver = CUDART_VERSION >= 13000 ? "580" : "525";

std::string describe(cudaError_t error, int driver) {
  if (error == cudaErrorInitializationError) {
    return "CUDA was in use before this process was forked and cannot be used in it: start it with "
           "the start method 'spawn', as torch.multiprocessing.get_context('spawn') does";
  }
  if (error == cudaErrorInsufficientDriver && driver > 0) {
    return "the NVIDIA driver knows CUDA " + version_of(driver) +
           " and lossops is built with CUDA " + version_of(CUDART_VERSION) +
           ": update the driver to " + kOldestDriver + " or newer";
  }
  if (driver <= 0) {
    return "no NVIDIA driver is found";
  }
  return cudaGetErrorString(error);
}

}  // namespace

std::string why_unusable() {
  if (usable.load(std::memory_order_relaxed)) {
    return {};
  }
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess) {
    usable = true;
    return {};
  }
  cudaGetLastError();  // it is no error of a launch
  int driver = 0;
  cudaDriverGetVersion(&driver);
  return describe(error, driver);
}

}  // namespace lossops::cuda
