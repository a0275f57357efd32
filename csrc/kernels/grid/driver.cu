#include <cuda_runtime.h>
#include <pthread.h>

#include <atomic>
#include <string>

#include "launchers.h"

namespace lossops::cuda {
namespace {

// The driver does not survive a fork once it is initialised, and the runtime then still answers
// what it knows.
enum class Driver { kUnknown, kUsable, kLost };
std::atomic<Driver> state{Driver::kUnknown};
[[maybe_unused]] const int watched = pthread_atfork(nullptr, nullptr, [] {
  if (state == Driver::kUsable) {
    state = Driver::kLost;
  }
});

std::string version_of(int cuda) {
  return std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10);
}

// The oldest CUDA whose drivers run what was built with this toolkit, and the oldest of those for
// Linux: any of the same major version, but for the way in which setup.py may have machine code
// packed.
#if defined(LOSSOPS_COMPRESSED_BY_SIZE)
constexpr int kOldestPacked = 12040;
#else
constexpr int kOldestPacked = 12000;
#endif
constexpr int kOldestCuda = CUDART_VERSION >= 13000 ? 13000 : kOldestPacked;
constexpr const char* kOldestDriver = kOldestCuda == 13000   ? "580"
                                      : kOldestCuda == 12040 ? "550.54"
                                                             : "525";

std::string describe(cudaError_t error, int driver) {
  if (error == cudaErrorInitializationError) {
    return "CUDA was in use before this process was forked and cannot be used in it: start it with "
           "the start method 'spawn', as torch.multiprocessing.get_context('spawn') does";
  }
  if (driver > 0 && driver < kOldestCuda) {
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
  const Driver known = state.load(std::memory_order_relaxed);
  if (known == Driver::kUsable) {
    return {};
  }
  int devices = 0;
  const cudaError_t error =
      known == Driver::kLost ? cudaErrorInitializationError : cudaGetDeviceCount(&devices);
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (error == cudaSuccess && driver >= kOldestCuda) {
    state = Driver::kUsable;
    return {};
  }
  cudaGetLastError();  // it is no error of a launch
  return describe(error, driver);
}

}  // namespace lossops::cuda
