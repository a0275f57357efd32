// Sizes of the hardware that kernels share with the host code that plans them.
#pragma once

#include <cstdint>

#include "losses/math.h"

namespace lossops::cuda {

constexpr int kWarpSize = 32;

// An access of a thread.
constexpr int kVectorBytes = 16;

template <typename scalar_t>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(scalar_t));

LOSSOPS_HOST_DEVICE bool is_vector_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// Bytes of a sector: the smallest unit that GPU memory reads or writes.
constexpr int kSectorBytes = 32;
// Bytes of a line of the caches. Bulk copies take half the requests of the L2 cache where shared
// memory lies as global memory does within such lines.
constexpr int kLineBytes = 128;

}  // namespace lossops::cuda
