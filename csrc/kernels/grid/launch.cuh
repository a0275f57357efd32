// Launches of kernels, some of which start before the kernel ahead of them on the stream has ended:
// programmatic dependent launches, sm_90 on. Elsewhere they wait, as kernels do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/grid/check.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch_shape.h"

namespace lossops::cuda {

// Once all blocks of a grid have called this, or ended, the blocks of a kernel that was launched to
// overlap may start where there is room.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that overlaps: the kernel before it has ended, and all that it wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// arguments: pointers to the kernel's parameters. name: in the error.
inline void launch_kernel_with(const char* name, const void* kernel, const LaunchShape& shape,
                               cudaStream_t stream, void** arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.blocks_y));
  config.blockDim =
      dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.threads_y));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    if (shape.cluster > kPortableCluster) {
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
  }
  if (shape.overlap && current_device_limits().overlaps) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchKernelExC(&config, kernel, arguments);
  check_launch(name);
}

// A parameter that is not deduced: its argument is converted.
template <typename T>
struct Parameter {
  using type = T;
};

template <typename... Parameters>
void launch_kernel(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
                   cudaStream_t stream, const typename Parameter<Parameters>::type&... arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  launch_kernel_with(name, reinterpret_cast<const void*>(kernel), shape, stream, pointers);
}

// A kernel has 48 KB of shared memory unless it asks for more. Static memory counts, too: at most 4
// KB, so 44 are left. bytes: the dynamic memory of this launch. most: that of any launch. The
// kernel asks for `most`: another thread may be about to launch it with more than `bytes`.
template <typename... Parameters>
void allow_shared_bytes(void (*kernel)(Parameters...), int64_t bytes, int most) {
  constexpr int64_t kFreeBytes = 44 << 10;
  if (bytes > kFreeBytes) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
}

// How much shared memory a multiprocessor shall have for a kernel's next launches, in percent of
// the most; L1 has the rest. kAnyPercent: as the driver finds best. The percentage is a hint, and
// it belongs to the kernel, not to a launch: another thread may change it before the launch. (There
// is a launch attribute, too, but drivers older than CUDA 12.5 do not know it.)
constexpr int kAnyPercent = cudaSharedmemCarveoutDefault;
template <typename... Parameters>
void prefer_shared_percent(void (*kernel)(Parameters...), int percent) {
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent) !=
      cudaSuccess) {
    cudaGetLastError();  // or the launch that follows would report it
  }
}

}  // namespace lossops::cuda
