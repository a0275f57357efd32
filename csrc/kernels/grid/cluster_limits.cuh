// How much of the current device clusters of blocks can have.
#pragma once

#include <cuda_runtime.h>

namespace lossops::cuda {

// How many multiprocessors clusters of four blocks can use at a time, with a block on each. Those
// of a cluster are neighbours, so a few may be left over.
inline int cluster_multiprocessors(void (*empty_kernel)(), int shared_bytes) {
  constexpr int kCluster = 4;
  const int block_bytes = shared_bytes / 2;  // of two, with what is reserved for each, one fits
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
