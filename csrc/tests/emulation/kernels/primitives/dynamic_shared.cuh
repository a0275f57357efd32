// In the emulation of CUDA, in the place of kernels/primitives/dynamic_shared.cuh; see
// cuda_runtime.h.
#pragma once

namespace lossops::test {
// Every kernel has the same memory, as one block runs at a time.
alignas(128) inline char dynamic_shared[64 << 10];
}  // namespace lossops::test

#define LOSSOPS_DYNAMIC_SHARED(T, name) \
  T* const name = reinterpret_cast<T*>(::lossops::test::dynamic_shared)
