// What launchers ask of the current device, asked once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "kernels/primitives/integers.h"

// Whether this is code for sm_90 or sm_100: kernels for Hopper are empty in all other. No device of
// sm_120 has their shared memory, and without them its code is a third smaller.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define LOSSOPS_HOPPER_CODE 1
#else
#define LOSSOPS_HOPPER_CODE 0
#endif

namespace lossops::cuda {

// Its PTX version is that of the code this device runs, which may be older than the device.
static __global__ void code_version_kernel() {}

struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of a multiprocessor
  // Bulk copies, clusters, and shared memory for three rows of 64 KB: sm_90 and sm_100. Off where
  // LOSSOPS_DISABLE_HOPPER is set, to run what older devices run.
  bool hopper = false;
  // Kernels that start before the one ahead of them has ended, also in captured graphs.
  bool overlaps = false;

  // Blocks that fit a multiprocessor, whose threads have 64 registers. shared_bytes: of a block.
  int64_t resident_blocks(int threads, int block_shared_bytes) const {
    constexpr int kReservedBytes = 1024;  // of each block, by the driver
    const int by_threads = 1024 / threads;
    const int by_memory = shared_bytes / (block_shared_bytes + kReservedBytes);
    return std::max(1, std::min({by_threads, by_memory, 32}));
  }
};

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

inline DeviceLimits current_device_limits() {
  constexpr int kMaxDevices = 64;
  constexpr int kHopperSharedBytes = 200 << 10;
  // Shared memory, multiprocessors and the capability in one word, so that no thread sees half.
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
    packed = static_cast<uint64_t>(shared_bytes) << 32 |
             static_cast<uint64_t>(multiprocessors) << 8 | static_cast<uint64_t>(major);
    known[device].store(packed, std::memory_order_relaxed);
  }
  DeviceLimits limits;
  limits.shared_bytes = static_cast<int>(packed >> 32);
  limits.multiprocessors = static_cast<int>(packed >> 8 & 0xffffff);
  limits.overlaps =
      driver_captures_overlaps() && static_cast<int>(packed & 0xff) >= 9 && !hopper_is_disabled();
  const bool hopper_code = (packed & 0xff) >= 9 && (packed & 0xff) < 12;  // LOSSOPS_HOPPER_CODE
  limits.hopper = hopper_code && limits.shared_bytes >= kHopperSharedBytes && !hopper_is_disabled();
  return limits;
}

// Blocks of a backward pass that mostly finds its gradient computed: a wave or two, which end at
// once. Measured on an H200: half as many take 1.5 us, and steps 4 to 7 us less than with 8192.
inline int64_t most_blocks_of_kept(int threads) {
  constexpr int kThreadsOfMultiprocessor = 2048;
  return int64_t{std::max(1, current_device_limits().multiprocessors)} *
         std::max(1, kThreadsOfMultiprocessor / threads);
}

// Blocks of a grid-stride loop whose partials one block folds: several waves on any GPU.
constexpr int64_t kMaxLoopBlocks = 8192;
// Blocks of a grid without one.
constexpr int64_t kMaxGrid = 1 << 30;

// One block folds what this many leave, in microseconds.
constexpr int64_t kMaxWorkers = 16384;

// Workers for `items`, each with a fixed share: as many as fit at a time, or fewer where all then
// have the same to do; but more where each still has `fewest`. The device then starts them as
// others end, and the slowest multiprocessor is not the last.
inline int64_t workers_for(int64_t items, int64_t resident, int64_t fewest,
                           int64_t most = kMaxWorkers) {
  const int64_t even = ceil_div(items, ceil_div(items, resident));
  return std::max(even, std::min(items / fewest, most));
}

// Rows that each worker takes one after the other, of `rows` in all: `wanted`, or so many more that
// there are no more than `most_workers`; but never more than `most`.
inline int64_t rows_of_worker(int64_t wanted, int64_t rows, int64_t most,
                              int64_t most_workers = kMaxWorkers) {
  return std::clamp<int64_t>(std::max(wanted, ceil_div(rows, most_workers)), 1, most);
}

}  // namespace lossops::cuda
