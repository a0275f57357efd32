// How much of the current device clusters of blocks can have.
#pragma once

#include <cuda_runtime.h>

namespace lossops::cuda {

// The multiprocessors that clusters of four blocks can have, of a block each: those of a cluster
// are neighbours, and some have too few.
inline int cluster_multiprocessors(void (*empty_kernel)(), int shared_bytes) {
  constexpr int kCluster = 4;
  const int block_bytes = shared_bytes / 2;  // no second block fits beside its reserved bytes
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(1);
  config.dynamicSmemBytes = static_cast<size_t>(block_bytes);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           block_bytes) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, empty_kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // it is no error of the launch that follows
    return 0;
  }
  return clusters * kCluster;
}

}  // namespace lossops::cuda
