// Blocks of a cluster, which read and write each other's shared memory: sm_90 on.
#pragma once

#include <cstdint>

namespace lossops::cuda {

__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// Orders accesses to shared memory across the cluster, as __syncthreads() does across a block.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// What `shared` is in the block of that rank.
template <typename T>
__device__ __forceinline__ T* at_rank(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
  return reinterpret_cast<T*>(address);
#else
  return shared;
#endif
}

}  // namespace lossops::cuda
