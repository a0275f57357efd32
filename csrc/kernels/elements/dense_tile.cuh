// Tiles of dense operands of one dtype, read and written by whole vectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/elements/operands.h"
#include "kernels/primitives/any_half.cuh"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// 16-byte vectors a thread and dense operand, all in flight at once. Measured on an H200: 8
// vectors, 1024 threads or a persistent grid lose 4 to 14 %. On an H100, 4 of fp32 are as fast as 2
// from 128 MB on, and slower below. fp64 has 1, for less machine code.
template <typename scalar_t>
constexpr int kVectors = sizeof(scalar_t) == 8 ? 1 : 2;

template <typename scalar_t>
constexpr int64_t kDenseTile = int64_t{kTileThreads} * kVectors<scalar_t> * kVectorSize<scalar_t>;

// Dense operands of one dtype: element i of each is data[i].
struct DenseOperands {
  void* data[kNumOperands];  // null: absent
  int64_t numel;
  DType dtype;
};

// What tiles of dense operands say about numbers.
template <typename scalar_t>
struct DenseTraits {
  using acc_t = acc_type_t<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = kMayBeSubnormal<scalar_t>;
  static constexpr bool kKeeps = false;
  static constexpr bool kLooksAhead = false;
  // Whether all operands are of one half type.
  __device__ __forceinline__ static constexpr bool has_common_half() { return kIsHalf; }
  __device__ __forceinline__ static bool is_half(Which /*which*/) { return kIsHalf; }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ static constexpr bool is_one(Which /*which*/) { return false; }
  __device__ __forceinline__ static constexpr unsigned counted(int /*step*/) { return ~0U; }
  __device__ __forceinline__ static bool has_all() { return true; }
};

// A whole tile of dense operands.
template <typename scalar_t>
class DenseTile : public DenseTraits<scalar_t> {
 public:
  using typename DenseTraits<scalar_t>::acc_t;
  static constexpr int kSteps = kVectors<scalar_t>;
  static constexpr int kWidth = kVectorSize<scalar_t>;

  __device__ __forceinline__ DenseTile(const DenseOperands& operands, int64_t tile)
      : operands_(operands), first_(tile * (kDenseTile<scalar_t> / kWidth) + threadIdx.x) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseTile& tile, Which which) {
      dtype_ = tile.operands_.dtype;
      const auto* const data = static_cast<const scalar_t*>(tile.operands_.data[which]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        vectors_[step] = load_vector(data, tile.first_ + step * kTileThreads);
      }
    }
    __device__ __forceinline__ void convert(const DenseTile& /*tile*/, Which /*which*/) {}
    // Converted here: before, gradients would take up to 20 registers more.
    __device__ __forceinline__ acc_t at(int step, int i) const {
      return to_acc_of<acc_t>(vectors_[step].get(i), dtype_);
    }
    __device__ __forceinline__ void unfold() {
      if constexpr (sizeof(scalar_t) <= 4) {  // unfolded() changes no double
#pragma unroll
        for (int n = 0; n < kSteps * 4; ++n) {
          vectors_[n / 4].set_word(n % 4, unfolded(vectors_[n / 4].word(n % 4)));
        }
      }
    }

   private:
    Vector<scalar_t> vectors_[kSteps];
    DType dtype_;
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps * kWidth]) {
    auto* const data = static_cast<scalar_t*>(operands_.data[which]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Vector<scalar_t> vector;
      if constexpr (sizeof(scalar_t) == 8) {
        vector.set(0, results[2 * step]);
        vector.set(1, results[2 * step + 1]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto* const values = results + step * kWidth + i * (kWidth / 4);
          vector.set_word(i, pack_word_of<scalar_t>(values, operands_.dtype));
        }
      }
      store_vector(data, first_ + step * kTileThreads, vector);
    }
  }

 private:
  const DenseOperands& operands_;
  int64_t first_;  // of this thread, in vectors
};

// An element of dense operands after the last whole tile.
template <typename scalar_t>
class DenseRest : public DenseTraits<scalar_t> {
 public:
  using typename DenseTraits<scalar_t>::acc_t;
  static constexpr int kSteps = 1;
  static constexpr int kWidth = 1;

  __device__ __forceinline__ DenseRest(const DenseOperands& operands, int64_t index)
      : operands_(operands), index_(index) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseRest& rest, Which which) {
      const auto* const data = static_cast<const scalar_t*>(rest.operands_.data[which]);
      value_ = to_acc_of<acc_t>(data[rest.index_], rest.operands_.dtype);
    }
    __device__ __forceinline__ void convert(const DenseRest& /*rest*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int /*step*/, int /*i*/) const { return value_; }
    __device__ __forceinline__ void unfold() { value_ = unfolded(value_); }

   private:
    acc_t value_;
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[1]) {
    auto* const data = static_cast<scalar_t*>(operands_.data[which]);
    data[index_] = from_acc_of<scalar_t>(results[0], operands_.dtype);
  }

 private:
  const DenseOperands& operands_;
  int64_t index_;
};

}  // namespace lossops::cuda
