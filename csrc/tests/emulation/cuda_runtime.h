// CUDA kernels as functions of the host: what kernels use of the language and of the runtime, for
// tests on machines without a GPU. Every file of kernels is compiled with this header in front.
//
// A thread of a block is a fiber. The fibers of a block take turns: one runs until it reaches a
// barrier or an operation of its warp, and waits there for the others. Blocks run one after the
// other. The order of turns changes from launch to launch, so that a result that depends on it
// shows. What a GPU does at the same time, such as clusters and bulk copies, is not there: kernels
// are compiled as for sm_75.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __CUDACC__ 1
#define __CUDA_ARCH__ 750
#define CUDART_VERSION 13000

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // one block runs at a time
#define __align__(bytes) alignas(bytes)
#define __builtin_assume(condition) static_cast<void>(0)
#define __isGlobal(pointer) true

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(16) double2 {
  double x, y;
};
inline double2 make_double2(double x, double y) { return {x, y}; }
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ----------------------------------------------------------------- a block's threads

namespace emulation {

// Of the thread that runs.
struct Position {
  dim3 thread, block;
};
extern Position position;
extern dim3 grid_size, block_size;

// Runs body once for each thread of each block.
void run_grid(dim3 grid, dim3 block, void (*body)(void*), void* arguments);

void wait_for_block();
// Of the lanes of mask. values: in, this lane's 8 bytes; out, those of all lanes by number.
void exchange(unsigned mask, uint64_t own, uint64_t (&values)[32]);
int lane();

template <typename T>
T shuffle(unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 8, "a value of up to 8 bytes");
  uint64_t own = 0;
  std::memcpy(&own, &value, sizeof(T));
  uint64_t values[32];
  exchange(mask, own, values);
  std::memcpy(&value, &values[source], sizeof(T));
  return value;
}
inline unsigned ballot(unsigned mask, bool vote) {
  uint64_t values[32] = {};
  exchange(mask, vote ? 1 : 0, values);
  unsigned votes = 0;
  for (int i = 0; i < 32; ++i) {
    votes |= (mask >> i & 1u) != 0 && values[i] != 0 ? 1u << i : 0u;
  }
  return votes;
}

}  // namespace emulation

#define threadIdx (::emulation::position.thread)
#define blockIdx (::emulation::position.block)
#define blockDim (::emulation::block_size)
#define gridDim (::emulation::grid_size)

inline void __syncthreads() { emulation::wait_for_block(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::ballot(mask, true); }
inline unsigned __ballot_sync(unsigned mask, int vote) {
  return emulation::ballot(mask, vote != 0);
}
inline int __any_sync(unsigned mask, int vote) { return emulation::ballot(mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return emulation::ballot(mask, vote == 0) == 0; }

// The lanes of mask that have the same value.
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  static_assert(sizeof(T) <= 8, "a value of up to 8 bytes");
  uint64_t own = 0;
  std::memcpy(&own, &value, sizeof(T));
  uint64_t values[32] = {};
  emulation::exchange(mask, own, values);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) {
    same |= (mask >> i & 1u) != 0 && values[i] == own ? 1u << i : 0u;
  }
  return same;
}

// Within groups of `width` lanes. A source outside of the group is the lane itself.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = emulation::lane() / width * width;
  return emulation::shuffle(mask, value, first + (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = emulation::lane();
  const int source = lane ^ bits;
  return emulation::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32) {
  const int lane = emulation::lane();
  const int source = lane + distance;
  return emulation::shuffle(mask, value, source / width == lane / width ? source : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32) {
  const int lane = emulation::lane();
  const int source = lane - distance;
  return emulation::shuffle(mask, value,
                            source >= 0 && source / width == lane / width ? source : lane);
}

// ------------------------------------------------------------------------ arithmetic

template <typename To, typename From>
inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}
// A NaN that a GPU computes is this one.
inline int __float_as_int(float x) { return x != x ? 0x7fffffff : emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __double2loint(double x) {
  return static_cast<int>(static_cast<uint32_t>(emulated_bits<uint64_t>(x)));
}
inline int __double2hiint(double x) {
  return static_cast<int>(static_cast<uint32_t>(emulated_bits<uint64_t>(x) >> 32));
}
inline double __hiloint2double(int high, int low) {
  return emulated_bits<double>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 |
                               static_cast<uint32_t>(low));
}
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32
             ? low
             : static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << shift >> 32);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
    if ((choice & 8) != 0) {
      byte = (byte & 0x80) != 0 ? 0xff : 0;
    }
    result |= byte << (8 * i);
  }
  return result;
}
// Only code for newer devices copies in bulk.
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline int64_t min(int64_t a, int64_t b) { return b < a ? b : a; }
inline int64_t max(int64_t a, int64_t b) { return a < b ? b : a; }
inline unsigned long long atomicMin(unsigned long long* place, unsigned long long value) {
  const unsigned long long before = *place;
  *place = value < before ? value : before;
  return before;
}

// --------------------------------------------------------------------- the runtime

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInitializationError };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor
};
struct cudaFuncAttributes {
  int ptxVersion;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) {
  return *version = CUDART_VERSION, cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  // Few multiprocessors, so that blocks have several tiles, and tiles several turns.
  constexpr int kValues[] = {4, 64 << 10, 64 << 10, 7};
  return *value = kValues[attribute], cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return attributes->ptxVersion = 75, cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
// Memory ends where it was asked to end, for tools that find what is beyond it.
template <typename T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  constexpr size_t kAlignment = 256;
  void* made = nullptr;
  const bool fails = posix_memalign(&made, kAlignment, bytes) != 0;
  *memory = static_cast<T*>(made);
  return fails ? cudaErrorInitializationError : cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
