// Tiles of dense operands of one dtype, read and written by whole vectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/elements/operands.h"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"

namespace lossops::cuda {

// Either half type, known at launch.
struct AnyHalf {
  uint16_t bits;
};

// 16-byte vectors a thread and dense operand, all in flight at once: 4, and 2 of half types.
// Measured on an H200: more vectors, more threads or a persistent grid lose 4 to 14 %. fp64 has 1,
// for less machine code, and AnyHalf, as its elements need a register each.
template <typename scalar_t>
constexpr int kVectors = sizeof(scalar_t) == 8 || std::is_same_v<scalar_t, AnyHalf> ? 1
                         : sizeof(scalar_t) == 2                                    ? 2
                                                                                    : 4;

template <typename scalar_t>
constexpr int64_t kDenseTile = int64_t{kTileThreads} * kVectors<scalar_t> * kVectorSize<scalar_t>;

// Dense operands of one dtype: element i of each is data[i].
struct DenseOperands {
  void* data[kNumOperands];  // null: absent
  int64_t numel;
  DType dtype;
};

// Calls body with the tag of the dtype of dense operands, which are read as scalar_t.
template <typename scalar_t, typename Body>
__device__ __forceinline__ void visit_stored(const DenseOperands& operands, const Body& body) {
  if constexpr (!std::is_same_v<scalar_t, AnyHalf>) {
    body(TypeTag<scalar_t>{});
  } else if (operands.dtype == DType::kBFloat16) {
    body(TypeTag<bfloat16_t>{});
  } else {
    body(TypeTag<half_t>{});
  }
}

// What tiles of dense operands say about numbers.
template <typename scalar_t>
struct DenseTraits {
  using acc_t = acc_type_t<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  // Numbers may be subnormal, as float: those of float16 are not.
  __device__ __forceinline__ static constexpr bool has_subnormals() {
    return !std::is_same_v<scalar_t, half_t>;
  }
  __device__ __forceinline__ static bool is_half(Which /*which*/) { return kIsHalf; }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ static bool has(int /*n*/) { return true; }
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
      const auto* const data = static_cast<const scalar_t*>(tile.operands_.data[which]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        vectors_[step] = load_vector(data, tile.first_ + step * kTileThreads);
      }
    }
    __device__ __forceinline__ void convert(const DenseTile& tile, Which /*which*/) {
      if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
        visit_stored<scalar_t>(tile.operands_, [&](auto type) {
          using half = typename decltype(type)::type;
#pragma unroll
          for (int n = 0; n < kSteps * kWidth; ++n) {
            halves_[n] = to_acc<acc_t>(half{vectors_[n / kWidth].get(n % kWidth).bits});
          }
        });
      }
    }
    // Other types are converted here: before, gradients would take up to 20 registers more.
    __device__ __forceinline__ acc_t at(int step, int i) const {
      if constexpr (std::is_same_v<scalar_t, AnyHalf>) {
        return halves_[step * kWidth + i];
      } else {
        return to_acc<acc_t>(vectors_[step].get(i));
      }
    }

   private:
    Vector<scalar_t> vectors_[kSteps];
    acc_t halves_[kSteps * kWidth];  // of AnyHalf
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps * kWidth]) {
    visit_stored<scalar_t>(operands_, [&](auto type) {
      using stored_t = typename decltype(type)::type;
      auto* const data = static_cast<stored_t*>(operands_.data[which]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        acc_t own[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          own[i] = results[step * kWidth + i];
        }
        store_vector(data, first_ + step * kTileThreads, pack<stored_t>(own));
      }
    });
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
      visit_stored<scalar_t>(rest.operands_, [&](auto type) {
        using stored_t = typename decltype(type)::type;
        value_ =
            to_acc<acc_t>(static_cast<const stored_t*>(rest.operands_.data[which])[rest.index_]);
      });
    }
    __device__ __forceinline__ void convert(const DenseRest& /*rest*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int /*step*/, int /*i*/) const { return value_; }

   private:
    acc_t value_;
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[1]) {
    visit_stored<scalar_t>(operands_, [&](auto type) {
      using stored_t = typename decltype(type)::type;
      static_cast<stored_t*>(operands_.data[which])[index_] = from_acc<stored_t>(results[0]);
    });
  }

 private:
  const DenseOperands& operands_;
  int64_t index_;
};

}  // namespace lossops::cuda
