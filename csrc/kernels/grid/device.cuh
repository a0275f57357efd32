// The limits of the current device, asked once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "kernels/grid/device_limits.h"

// Whether this is code for sm_90 or sm_100: kernels for Hopper are empty in all other. No device of
// sm_120 has their shared memory, and without them its code is a third smaller.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define LOSSOPS_HOPPER_CODE 1
#else
#define LOSSOPS_HOPPER_CODE 0
#endif

namespace lossops::cuda {

// Whether this machine code has bulk copies. Kernels that also have another way to copy use them
// only if DeviceLimits::hopper is set too.
[[maybe_unused]] constexpr bool kMayCopyInBulk = LOSSOPS_HOPPER_CODE != 0;

// Its PTX version is that of the code this device runs, which may be older than the device.
static __global__ void code_version_kernel() {}

// For backward passes, which take their blocks' shares from the last to the first: forward read the
// last ones last, so in a step their logits may still be in the L2 cache.
__device__ __forceinline__ uint32_t block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

inline bool hopper_is_disabled() {
  static const bool disabled = [] {
    const char* const value = std::getenv("LOSSOPS_DISABLE_HOPPER");
    return value != nullptr && value[0] != '\0' && value[0] != '0';
  }();
  return disabled;
}

// Before CUDA 12.3, graphs had no such edges.
inline bool driver_captures_overlaps() {
  static const bool captures = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
  }();
  return captures;
}

// Whether a device of that capability has code for Hopper, LOSSOPS_HOPPER_CODE, and the shared
// memory for it.
constexpr bool has_hopper(int major, int shared_bytes) {
  constexpr int kHopperSharedBytes = 200 << 10;
  return major >= 9 && major < 12 && shared_bytes >= kHopperSharedBytes;
}

inline DeviceLimits current_device_limits() {
  constexpr int kMaxDevices = 64;
  // All of it in one word, so that no thread sees half.
  static std::atomic<uint64_t> known[kMaxDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) {
    return {};
  }
  uint64_t packed = known[device].load(std::memory_order_relaxed);
  if (packed == 0) {
    int multiprocessors = 0;
    int shared_bytes = 0;
    int major = 0;
    if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                               device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) {
      return {};
    }
    cudaFuncAttributes code = {};
    if (cudaFuncGetAttributes(&code, code_version_kernel) != cudaSuccess) {
      cudaGetLastError();  // it is no error of the launch that follows
      return {};
    }
    major = std::min(major, code.ptxVersion / 10);
    const uint64_t found = static_cast<uint64_t>(shared_bytes) << 32 |
                           static_cast<uint64_t>(multiprocessors) << 8 |
                           static_cast<uint64_t>(major);
    // What another thread has found first stays: plans and launches must agree.
    packed = known[device].compare_exchange_strong(packed, found, std::memory_order_relaxed)
                 ? found
                 : packed;
  }
  DeviceLimits limits;
  limits.shared_bytes = static_cast<int>(packed >> 32);
  limits.multiprocessors = static_cast<int>(packed >> 8 & 0xfff);
  limits.overlaps =
      driver_captures_overlaps() && static_cast<int>(packed & 0xff) >= 9 && !hopper_is_disabled();
  limits.hopper =
      has_hopper(static_cast<int>(packed & 0xff), limits.shared_bytes) && !hopper_is_disabled();
  return limits;
}

// Blocks of a backward pass that mostly finds its gradient computed: a wave or two, which end at
// once. Measured on an H200: half as many take 1.5 us, and steps 4 to 7 us less than with 8192.
inline int64_t most_blocks_of_kept(int threads) {
  constexpr int kThreadsOfMultiprocessor = 2048;
  return int64_t{std::max(1, current_device_limits().multiprocessors)} *
         std::max(1, kThreadsOfMultiprocessor / threads);
}

}  // namespace lossops::cuda
