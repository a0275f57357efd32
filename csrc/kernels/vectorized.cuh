// 16-byte accesses.
#pragma once

#include <cstdint>

namespace lossops::cuda {

constexpr int kVectorBytes = 16;

template <typename scalar_t>
constexpr int kVectorSize = kVectorBytes / static_cast<int>(sizeof(scalar_t));

template <typename scalar_t>
struct alignas(kVectorBytes) Vector {
  scalar_t values[kVectorSize<scalar_t>];
};

__host__ __device__ inline bool is_vector_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// pointer must be 16-byte aligned; index counts vectors.
template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> load_vector(const scalar_t* pointer, int64_t index) {
  return reinterpret_cast<const Vector<scalar_t>*>(pointer)[index];
}

template <typename scalar_t>
__device__ __forceinline__ void store_vector(scalar_t* pointer, int64_t index,
                                             const Vector<scalar_t>& vector) {
  reinterpret_cast<Vector<scalar_t>*>(pointer)[index] = vector;
}

// Elements before the first 16-byte boundary.
template <typename scalar_t>
__device__ __forceinline__ int elements_to_alignment(const scalar_t* pointer) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(pointer) % kVectorBytes;
  return past == 0 ? 0 : static_cast<int>((kVectorBytes - past) / sizeof(scalar_t));
}

}  // namespace lossops::cuda
