// Second stage of a reduction: one partial a block, folded by one block, or one cluster of them, in
// a fixed order, so that the same input gives the same bits. No atomics.
#pragma once

#include <cstdint>

#include "kernels/grid/launch.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "losses/math.h"
#include "scalar_types.h"

namespace lossops::cuda {

// fp64: the grid stage adds thousands of partials.
struct alignas(16) Partial {
  double sum = 0;
  double weight = 0;

  __device__ __forceinline__ void combine(const Partial& other) {
    sum += other.sum;
    weight += other.weight;
  }
};

constexpr int kPartialDoubles = sizeof(Partial) / sizeof(double);

// What becomes of the total.
struct Finalize {
  void* output = nullptr;  // one element
  DType dtype = DType::kFloat32;
  bool mean = false;
  bool denominator_is_weight = false;  // mean: divide by the total weight, else by denominator
  bool denominator_is_known = false;   // mean: divide by mean_terms[0]
  bool nan_over_zero = false;          // mean: NaN where the denominator is 0
  double denominator = 1;
  double weight_copies = 1;      // how often the total counts each weight
  double* mean_terms = nullptr;  // out, (2,): denominator, mean; may be null

  __device__ __forceinline__ void operator()(const Partial& total) const {
    double result = total.sum;
    if (mean) {
      const double divisor = denominator_is_known ? mean_terms[0]
                             : denominator_is_weight && weight_copies > 0
                                 ? total.weight / weight_copies
                                 : denominator;
      result = nan_over_zero && divisor == 0 ? math::quiet_nan<double>() : result / divisor;
      if (mean_terms != nullptr) {
        mean_terms[0] = divisor;
        mean_terms[1] = result;
      }
    }
    // Normalised before it is rounded: a half-precision mean does not overflow.
    store_as<double>(output, dtype, 0, result);
  }
};

// What the first thread of a block does with its partial in the first stage, whose kernel calls
// let_next_kernel_start() before. A grid of one block finishes at once.
__device__ __forceinline__ void leave_to_grid(const Partial& partial, Partial* partials,
                                              const Finalize& finalize) {
  if (threadIdx.x == 0) {
    if (gridDim.x == 1) {
      finalize(partial);
    } else {
      partials[blockIdx.x] = partial;
    }
  }
}

// Last step of a block in the first stage. kInLoop: block_reduce()'s.
template <bool kInLoop = false>
__device__ __forceinline__ void reduce_to_grid(const Partial& partial, Partial* partials,
                                               const Finalize& finalize) {
  leave_to_grid(block_reduce<kInLoop>(partial), partials, finalize);
}

// The same by the first warp alone, of whose lanes the first `count` have a part.
__device__ __forceinline__ void reduce_warp_to_grid(const Partial& partial, Partial* partials,
                                                    const Finalize& finalize,
                                                    int count = kWarpSize) {
  const int width = count <= 1 ? 1 : 1 << (32 - __clz(count - 1));
  leave_to_grid(warp_reduce<true>(partial, width), partials, finalize);
}

// Second stage, where there is more than one partial.
void launch_grid_reduce(const Partial* partials, int64_t count, const Finalize& finalize,
                        cudaStream_t stream);

}  // namespace lossops::cuda
