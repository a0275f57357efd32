// Where what a thread takes of a tile begins in each operand: a table in shared memory.
#pragma once

#include <cstdint>

#include "kernels/elements/operands.h"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// A thread reads what it wrote: shared memory takes the place of registers here.
class ThreadBegins {
 public:
#if __CUDA_ARCH__ >= 800
  // By an address that is kept: of a plain pointer the compiler works it out anew wherever it is
  // used, in six instructions on sm_90.
  __device__ __forceinline__ ThreadBegins() : own_(unfolded(shared_address(&at(0)))) {}

  __device__ __forceinline__ char* get(int slot) const {
    char* begin;
    asm volatile("ld.shared.u64 %0, [%1];"
                 : "=l"(begin)
                 : "r"(own_ + static_cast<uint32_t>(slot * kSlotBytes))
                 : "memory");
    return begin;
  }
#else
  __device__ __forceinline__ char* get(int slot) const { return at(slot); }
#endif
  // Of another thread: after a barrier.
  __device__ __forceinline__ static char* get(int slot, int thread) {
    return table()[slot * kTileThreads + thread];
  }

  // Calls body(begin, operand) for each operand of the plan.
  template <typename Plan, typename Body>
  __device__ __forceinline__ static void for_each(const Plan& plan, const Body& body) {
#pragma unroll 1
    for (int slot = 0; slot < plan.num_slots; ++slot) {
      body(at(slot), plan.operands[plan.slots[slot]]);
    }
  }

 private:
  static constexpr int kSlotBytes = kTileThreads * static_cast<int>(sizeof(char*));

  __device__ __forceinline__ static char** table() {
    LOSSOPS_DYNAMIC_SHARED(char*, addresses);
    return addresses;
  }
  __device__ __forceinline__ static char*& at(int slot) {
    return table()[slot * kTileThreads + static_cast<int>(threadIdx.x)];
  }

#if __CUDA_ARCH__ >= 800
  uint32_t own_;  // a shared_address()
#endif
};

}  // namespace lossops::cuda
