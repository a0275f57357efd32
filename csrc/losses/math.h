// Host-device basics of the loss functors: qualifiers, and the few elementary
// functions they need. Includes neither torch nor CUDA headers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define LOSSOPS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define LOSSOPS_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace lossops::math {

// std::numeric_limits<T>::infinity() is a host function; these are not.
template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t infinity() {
  return static_cast<acc_t>(HUGE_VALF);
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE acc_t quiet_nan() {
  return static_cast<acc_t>(__builtin_nanf(""));
}

template <typename acc_t>
LOSSOPS_HOST_DEVICE bool is_nan(acc_t x) {
  return x != x;
}

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ double log(double x) { return ::log(x); }
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
__device__ __forceinline__ double exp(double x) { return ::exp(x); }

#else

LOSSOPS_HOST_DEVICE float log(float x) { return std::log(x); }
LOSSOPS_HOST_DEVICE double log(double x) { return std::log(x); }
LOSSOPS_HOST_DEVICE float exp(float x) { return std::exp(x); }
LOSSOPS_HOST_DEVICE double exp(double x) { return std::exp(x); }

#endif

}  // namespace lossops::math
