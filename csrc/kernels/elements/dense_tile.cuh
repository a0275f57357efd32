// Tiles of dense operands of one dtype, read and written by whole vectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/elements/operands.h"
#include "kernels/thread_reduce.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {

// 16-byte vectors a thread and dense operand, all in flight at once: 4, and 2 of half types.
// Measured on an H200: more vectors, more threads or a persistent grid lose 4 to 14 %. fp64 has 1,
// for less machine code.
template <typename scalar_t>
constexpr int kVectors = sizeof(scalar_t) == 8   ? 1
                         : sizeof(scalar_t) == 2 ? 2
                                                 : 4;

template <typename scalar_t>
constexpr int64_t kDenseTile = int64_t{kTileThreads} * kVectors<scalar_t> * kVectorSize<scalar_t>;

// Dense operands of one dtype: element i of each is data[i].
struct DenseOperands {
  void* data[kNumOperands];  // null: absent
  int64_t numel;
};

// A whole tile of dense operands.
template <typename scalar_t_>
class DenseTile {
 public:
  using scalar_t = scalar_t_;
  using acc_t = acc_type_t<scalar_t>;
  static constexpr int kSteps = kVectors<scalar_t>;
  static constexpr int kWidth = kVectorSize<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  // Numbers may be subnormal, as float: those of float16 are not.
  static constexpr bool kHasSubnormals = !std::is_same_v<scalar_t, half_t>;

  __device__ __forceinline__ DenseTile(const DenseOperands& operands, int64_t tile)
      : operands_(operands), first_(tile * (kDenseTile<scalar_t> / kWidth) + threadIdx.x) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseTile& tile, Which which) {
      const auto* const data = static_cast<const scalar_t*>(tile.operands_.data[which]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        vectors_[step] = load_vector(data, tile.first_ + step * kTileThreads);
      }
    }
    __device__ __forceinline__ void convert(const DenseTile& /*tile*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int step, int i) const {
      return to_acc<acc_t>(vectors_[step].get(i));
    }

   private:
    Vector<scalar_t> vectors_[kSteps];
  };

  __device__ __forceinline__ bool is_half() const { return kIsHalf; }

  __device__ __forceinline__ void store(Which which, int step, const acc_t (&results)[kWidth]) {
    store_vector(static_cast<scalar_t*>(operands_.data[which]), first_ + step * kTileThreads,
                 pack<scalar_t>(results));
  }
  __device__ __forceinline__ void finish_store(Which /*which*/) {}

  __device__ __forceinline__ void add(const acc_t (&values)[kSteps * kWidth], double& sum) const {
    sum += static_cast<double>(pairwise_sum(values));
  }

 private:
  const DenseOperands& operands_;
  int64_t first_;  // of this thread, in vectors
};

// An element of dense operands after the last whole tile.
template <typename scalar_t_>
class DenseRest {
 public:
  using scalar_t = scalar_t_;
  using acc_t = acc_type_t<scalar_t>;
  static constexpr int kSteps = 1;
  static constexpr int kWidth = 1;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = !std::is_same_v<scalar_t, half_t>;

  __device__ __forceinline__ DenseRest(const DenseOperands& operands, int64_t index)
      : operands_(operands), index_(index) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseRest& tile, Which which) {
      value_ = static_cast<const scalar_t*>(tile.operands_.data[which])[tile.index_];
    }
    __device__ __forceinline__ void convert(const DenseRest& /*tile*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int /*step*/, int /*i*/) const {
      return to_acc<acc_t>(value_);
    }

   private:
    scalar_t value_;
  };

  __device__ __forceinline__ bool is_half() const { return kIsHalf; }

  __device__ __forceinline__ void store(Which which, int /*step*/, const acc_t (&results)[1]) {
    static_cast<scalar_t*>(operands_.data[which])[index_] = from_acc<scalar_t>(results[0]);
  }
  __device__ __forceinline__ void finish_store(Which /*which*/) {}

  __device__ __forceinline__ void add(const acc_t (&values)[1], double& sum) const {
    sum += static_cast<double>(values[0]);
  }

 private:
  const DenseOperands& operands_;
  int64_t index_;
};

}  // namespace lossops::cuda
