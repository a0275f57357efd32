// Copies from global to shared memory that occupy neither registers nor threads on their way: by a
// thread for itself (sm_80), or in bulk by the copy engine (sm_90), which also copies back.
#pragma once

#include <cstdint>

#include "kernels/primitives/sizes.h"

namespace lossops::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Which caches a copy of 16 bytes goes through; a smaller one always takes both. Where the copies
// of a warp do not begin at a line of 128 bytes, reading is at .83 of the bandwidth of those that
// do by kL2, and at 1.00 by kL1AndL2. Where they do, kL1AndL2 costs up to .04 of the floor, and
// more where shared memory leaves little to L1: see plane_rows::Spread. (H200, 2026-11)
enum class CopyCaches { kL2, kL1AndL2 };

// 4, 8 or 16 bytes, aligned to as many, to a shared_address(). sm_80 on.
template <int kBytes, CopyCaches kCaches = CopyCaches::kL2>
__device__ __forceinline__ void start_own_copy(uint32_t shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what is copied at once");
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16 && kCaches == CopyCaches::kL2) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :
                 : "r"(shared), "l"(global)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
                 :
                 : "r"(shared), "l"(global), "n"(kBytes)
                 : "memory");
  }
#endif
}

// They are there for this thread after wait_for_own_copies().
template <CopyCaches kCaches = CopyCaches::kL2, typename T>
__device__ __forceinline__ void start_own_copy(T* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  start_own_copy<sizeof(T), kCaches>(shared_address(shared), global);
#else
  *shared = *static_cast<const T*>(global);
#endif
}

// Where copies go, one after the other. Its address is one register, a pointer's is two.
template <typename T, CopyCaches kCaches>
class CopyPlace {
 public:
  __device__ __forceinline__ explicit CopyPlace(T* shared)
#if __CUDA_ARCH__ >= 800
      : address_(shared_address(shared)) {
  }
  __device__ __forceinline__ void start_copy(const void* global) const {
    start_own_copy<sizeof(T), kCaches>(address_, global);
  }
  __device__ __forceinline__ void operator+=(int units) {
    address_ += static_cast<uint32_t>(units) * static_cast<uint32_t>(sizeof(T));
  }

 private:
  uint32_t address_;
#else
      : shared_(shared) {
  }
  __device__ __forceinline__ void start_copy(const void* global) const {
    start_own_copy(shared_, global);
  }
  __device__ __forceinline__ void operator+=(int units) { shared_ += units; }

 private:
  T* shared_;
#endif
};

__device__ __forceinline__ void wait_for_own_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The copies since the last of these are a group.
__device__ __forceinline__ void end_group_of_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Of this thread's groups, all but the kCount last.
template <int kCount>
__device__ __forceinline__ void wait_for_groups_but() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" : : "n"(kCount) : "memory");
#endif
}

// Brings what lies there from memory to the L2 cache.
__device__ __forceinline__ void prefetch(const void* global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("prefetch.global.L2 [%0];" : : "l"(global));
#endif
}

// Starts copying `bytes` bytes, whole vectors of 16, to shared memory. All lanes of a warp call it;
// each waits for its own copies.
__device__ __forceinline__ void start_warp_copy(void* shared, const void* global, int bytes) {
  auto* const to = static_cast<uint4*>(shared);
  const auto* const from = static_cast<const uint4*>(global);
#pragma unroll 4
  for (int v = static_cast<int>(threadIdx.x) % kWarpSize; v < bytes / kVectorBytes;
       v += kWarpSize) {
    start_own_copy(to + v, from + v);
  }
}

// A barrier for bulk copies, in shared memory: one thread starts them, all can wait for them.
// Completes once for every call of expect(), when as many bytes have arrived.
struct CopyBarrier {
  uint64_t state;

  // By one thread; the others may use it after a __syncthreads() or __syncwarp().
  __device__ __forceinline__ void init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                 :
                 : "r"(shared_address(&state))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  // Says how many bytes the next copies have together. By one thread, before any of them starts and
  // after a barrier that follows all reads and writes of what they overwrite.
  __device__ __forceinline__ void expect(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(&state)), "r"(bytes)
                 : "memory");
#endif
  }

  // Starts a copy. Addresses and bytes are multiples of 16; 0 bytes are none.
  __device__ __forceinline__ void copy(void* shared, const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (bytes > 0) {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
          :
          : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(&state))
          : "memory");
    }
#endif
  }

  // parity: of how many copies completed before this one. kCluster: they come from other blocks.
  template <bool kCluster = false>
  __device__ __forceinline__ void wait(uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    if constexpr (kCluster) {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "again:\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
          "@!done bra again;\n"
          "}\n"
          :
          : "r"(shared_address(&state)), "r"(parity)
          : "memory");
      return;
    }
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n"
        :
        : "r"(shared_address(&state)), "r"(parity)
        : "memory");
#endif
  }
};

// Copies to global memory in bulk. Every thread that wrote to what is copied calls this, and then
// all of them a barrier.
[[maybe_unused]] __device__ __forceinline__ void fence_before_bulk_store() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// By one thread. Addresses and bytes are multiples of 16.
[[maybe_unused]] __device__ __forceinline__ void start_bulk_store(void* global, const void* shared,
                                                                  uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :
               : "l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// What this thread's stores copy has been read: it may be overwritten, or the block end.
[[maybe_unused]] __device__ __forceinline__ void wait_for_bulk_reads() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace lossops::cuda
