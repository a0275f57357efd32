// The gradient of an operand that is broadcast: the sum over the elements that read the same number
// of it. In two stages, in a fixed order: a block adds up the tiles of its walk, which keeps to the
// same numbers; then the parts of all blocks are folded.
#pragma once

#include <cstdint>

#include "kernels/elements/tiles.cuh"

namespace lossops::cuda {

// A thread's part of a walk, in fp64. The operand `which` of the tile has the place of each sum in
// `partials` (splits, outputs) by its strides, which are 0 along the dimensions of the walk.
template <typename Tile>
class GradientSum {
 public:
  static constexpr bool kSums = true;
  static constexpr int kSteps = Tile::kSteps;
  using acc_t = typename Tile::acc_t;

  const Which which;

  __device__ __forceinline__ explicit GradientSum(Which summed) : which(summed) {}

  __device__ __forceinline__ bool takes(Which gradient) const { return gradient == which; }

  __device__ __forceinline__ void add(const Tile& tile, int step, const acc_t (&results)[1]) {
    sums_[step] += tile.has(step) ? static_cast<double>(results[0]) : 0.0;
  }

  // After the last tile of a walk. buffer: of kTileThreads.
  __device__ __forceinline__ void finish(const Tile& tile, double* buffer, double* partials) {
    const TilePlan& plan = tile.plan();
    // Bits of an element's number in a tile that lie along the walk.
    unsigned along = 0;
    for (int d = 0; d < plan.num_walked; ++d) {
      along |= ((1u << plan.dims[d].bits) - 1) << plan.dims[d].shift;
    }
#pragma unroll
    for (int bit = 1; bit < kSteps; bit *= 2) {
      if ((along & bit * kTileThreads) != 0) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if ((step & bit) == 0) {
            sums_[step] += sums_[step | bit];
          }
        }
      }
    }
    // The element whose bits along the walk are all 0 has the smallest coordinates among those that
    // share a sum: it is there if any of them is.
#pragma unroll 1  // by turns in sums_[0]: the code of a sum over threads stands once
    for (int step = 0; step < kSteps; ++step) {
      const unsigned number = threadIdx.x + step * kTileThreads;
      if ((along & step * kTileThreads) == 0) {
        const double sum = over_threads(sums_[0], along, buffer);
        if ((number & along) == 0 && tile.has(step)) {
          partials[tile.distance(which, step) / static_cast<int64_t>(sizeof(double))] = sum;
        }
      }
#pragma unroll
      for (int next = 1; next < kSteps; ++next) {
        sums_[next - 1] = sums_[next];
      }
    }
  }

 private:
  // The sum over the threads whose numbers differ in the bits of `along`, in the first of them.
  static __device__ __forceinline__ double over_threads(double sum, unsigned along,
                                                        double* buffer) {
    constexpr unsigned kLanes = 32;
#pragma unroll 1
    for (unsigned bit = 1; bit < kLanes; bit *= 2) {
      const double other = __shfl_xor_sync(0xffffffffu, sum, static_cast<int>(bit));
      sum += (along & bit) != 0 ? other : 0.0;
    }
    for (unsigned bit = kLanes; bit < kTileThreads; bit *= 2) {
      if ((along & bit) != 0) {
        buffer[threadIdx.x] = sum;
        __syncthreads();
        sum += buffer[threadIdx.x ^ bit];
        __syncthreads();
      }
    }
    return sum;
  }

  double sums_[kSteps] = {};
};

}  // namespace lossops::cuda
