// Blocks of a cluster, which read and write each other's shared memory: sm_90 on.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"

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

// Orders accesses to shared memory across the cluster, as __syncthreads() does across a block. In
// two halves: all threads of the cluster that have waited see what a thread did before it arrived.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Stores `value` to *shared, which is of the block of that rank, and counts 4 bytes as arrived at
// its *barrier. Neither waits for what was stored before, as a release does.
__device__ __forceinline__ void store_at_rank(uint32_t* shared, uint32_t value,
                                              CopyBarrier* barrier, int rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [counter];\n"
      "}\n"
      :
      : "r"(shared_address(shared)), "r"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
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
