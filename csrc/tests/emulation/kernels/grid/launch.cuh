// Launches in the emulation of CUDA, in the place of kernels/grid/launch.cuh; see cuda_runtime.h. A
// launch runs the kernel and returns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <tuple>

#include "kernels/grid/check.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch_shape.h"

namespace lossops::cuda {

inline void let_next_kernel_start() {}
inline void wait_for_previous_kernel() {}

template <typename T>
struct Parameter {
  using type = T;
};

template <typename... Parameters>
void launch_kernel(const char* /*name*/, void (*kernel)(Parameters...), const LaunchShape& shape,
                   cudaStream_t /*stream*/,
                   const typename Parameter<Parameters>::type&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<const Parameters&...> arguments;
  } call{kernel, {arguments...}};
  const dim3 grid(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y));
  const dim3 block(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.threads_y));
  emulation::run_grid(
      grid, block,
      [](void* data) {
        const Call& own = *static_cast<Call*>(data);
        std::apply(own.kernel, own.arguments);
      },
      &call);
}

template <typename Kernel>
void allow_shared_bytes(Kernel* /*kernel*/, int64_t /*bytes*/, int /*most*/) {}

constexpr int kAnyPercent = -1;
template <typename Kernel>
void prefer_shared_percent(Kernel* /*kernel*/, int /*percent*/) {}

}  // namespace lossops::cuda
