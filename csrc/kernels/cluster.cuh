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

// Stores at the address that `shared` has in the block of that rank.
__device__ __forceinline__ void store_to_rank(uint32_t* shared, int rank, uint32_t value) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" : : "r"(address), "r"(value) : "memory");
#endif
}

}  // namespace lossops::cuda
