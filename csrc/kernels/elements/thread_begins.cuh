// Where what a thread takes of a tile begins in each operand: a table in shared memory.
#pragma once

#include "kernels/elements/operands.h"
#include "kernels/primitives/dynamic_shared.cuh"

namespace lossops::cuda {

// A thread reads what it wrote: shared memory takes the place of registers here.
class ThreadBegins {
 public:
  __device__ __forceinline__ static char* get(int slot) {
    return get(slot, static_cast<int>(threadIdx.x));
  }
  // Of another thread: after a barrier.
  __device__ __forceinline__ static char* get(int slot, int thread) {
    return table()[slot * kTileThreads + thread];
  }

  // Calls body(begin, operand) for each operand of the plan.
  template <typename Plan, typename Body>
  __device__ __forceinline__ static void for_each(const Plan& plan, const Body& body) {
#pragma unroll 1
    for (int slot = 0; slot < plan.num_slots; ++slot) {
      body(table()[slot * kTileThreads + threadIdx.x], plan.operands[plan.slots[slot]]);
    }
  }

 private:
  __device__ __forceinline__ static char** table() {
    LOSSOPS_DYNAMIC_SHARED(char*, addresses);
    return addresses;
  }
};

}  // namespace lossops::cuda
