// Tiles of dense operands, read and written by whole vectors: all of one dtype, or some of float32
// and some of half types.
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

// Element i of each is data[i].
struct DenseOperands {
  void* data[kNumOperands];  // null: absent
  int64_t numel;
  DType dtypes[kNumOperands] = {};

  // Of operands that may be of two dtypes. If the compiler knew that it is the same in all tiles,
  // it would make a loop over tiles, or over elements, for each set of dtypes.
  __device__ __forceinline__ DType dtype_of(Which which) const {
    return static_cast<DType>(unfolded(static_cast<int>(dtypes[which])));
  }
};

// What tiles of dense operands say about numbers. scalar_t: the type of all operands. With
// kTakesHalves it is float, and any operand may be of a half type instead.
template <typename scalar_t, bool kTakesHalves>
struct DenseTraits {
  static_assert(!kTakesHalves || std::is_same_v<scalar_t, float>);
  using acc_t = acc_type_t<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = kMayBeSubnormal<scalar_t>;
  static constexpr bool kKeeps = false;
  static constexpr bool kLooksAhead = false;
  // Whether all operands are of one half type.
  __device__ __forceinline__ static constexpr bool has_common_half() { return kIsHalf; }
  // Asked of kOutput only. Losses of operands of two dtypes are of float32, or of a half type
  // beside an operand of no dimensions, and then computed as those of float32.
  __device__ __forceinline__ static bool is_half(Which /*which*/) { return kIsHalf; }
  __device__ __forceinline__ static constexpr bool is_new(Which /*which*/) { return true; }
  __device__ __forceinline__ static constexpr bool is_one(Which /*which*/) { return false; }
  __device__ __forceinline__ static constexpr unsigned counted(int /*step*/) { return ~0U; }
  __device__ __forceinline__ static bool has_all() { return true; }
};

// A whole tile of dense operands.
template <typename scalar_t, bool kTakesHalves>
class DenseTile : public DenseTraits<scalar_t, kTakesHalves> {
 public:
  using typename DenseTraits<scalar_t, kTakesHalves>::acc_t;
  static constexpr int kSteps = kVectors<scalar_t>;
  static constexpr int kWidth = kVectorSize<scalar_t>;

  __device__ __forceinline__ DenseTile(const DenseOperands& operands, int64_t tile)
      : operands_(operands), first_(tile * (kDenseTile<scalar_t> / kWidth) + threadIdx.x) {}

  class Values {
   public:
    // Four elements of a half type are two words. Until convert() these lie where the vector's
    // first two elements will be.
    __device__ __forceinline__ void load(const DenseTile& tile, Which which) {
      dtype_ = tile.operands_.dtypes[kInput];
      const void* const data = tile.operands_.data[which];
      if constexpr (kTakesHalves) {
        if (tile.is_narrow(which)) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const uint2 words = static_cast<const uint2*>(data)[tile.index(step)];
            vectors_[step].set_word(0, words.x);
            vectors_[step].set_word(1, words.y);
          }
          return;
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        vectors_[step] = load_vector(static_cast<const scalar_t*>(data), tile.index(step));
      }
    }
    __device__ __forceinline__ void convert(const DenseTile& tile, Which which) {
      if constexpr (kTakesHalves) {
        if (tile.is_narrow(which)) {
          tile.operands_.dtype_of(which) == DType::kBFloat16 ? widen<bfloat16_t>()
                                                             : widen<half_t>();
        }
      }
    }
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
    template <typename half>
    __device__ __forceinline__ void widen() {
#pragma unroll
      for (Vector<scalar_t>& vector : vectors_) {
        const uint32_t words[] = {vector.word(0), vector.word(1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
          vector.set(i, to_acc<float>(half{bits}));
        }
      }
    }

    Vector<scalar_t> vectors_[kSteps];
    DType dtype_;
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[kSteps * kWidth]) {
    if constexpr (kTakesHalves) {
      if (is_narrow(which)) {
        auto* const data = static_cast<uint2*>(operands_.data[which]);
        visit_type_of<AnyHalf>(operands_.dtype_of(which), [&](auto type) {
          using half = typename decltype(type)::type;
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            const float* const values = results + step * kWidth;
            data[index(step)] = make_uint2(pack_word<half>(values), pack_word<half>(values + 2));
          }
        });
        return;
      }
    }
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
          vector.set_word(i, pack_word_of<scalar_t>(values, operands_.dtypes[kInput]));
        }
      }
      store_vector(data, index(step), vector);
    }
  }

 private:
  __device__ __forceinline__ int64_t index(int step) const { return first_ + step * kTileThreads; }
  // Of operands that may be of two dtypes: whether this one is of a half type.
  __device__ __forceinline__ bool is_narrow(Which which) const {
    return is_half_type(operands_.dtype_of(which));
  }

  const DenseOperands& operands_;
  int64_t first_;  // of this thread, in vectors
};

// An element of dense operands after the last whole tile.
template <typename scalar_t, bool kTakesHalves>
class DenseRest : public DenseTraits<scalar_t, kTakesHalves> {
 public:
  using typename DenseTraits<scalar_t, kTakesHalves>::acc_t;
  static constexpr int kSteps = 1;
  static constexpr int kWidth = 1;

  __device__ __forceinline__ DenseRest(const DenseOperands& operands, int64_t index)
      : operands_(operands), index_(index) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseRest& rest, Which which) {
      const void* const data = rest.operands_.data[which];
      if constexpr (kTakesHalves) {
        const DType dtype = rest.operands_.dtype_of(which);
        if (is_half_type(dtype)) {
          value_ = to_acc_of<acc_t>(static_cast<const AnyHalf*>(data)[rest.index_], dtype);
        } else {
          value_ = static_cast<const float*>(data)[rest.index_];
        }
      } else {
        value_ = to_acc_of<acc_t>(static_cast<const scalar_t*>(data)[rest.index_],
                                  rest.operands_.dtypes[kInput]);
      }
    }
    __device__ __forceinline__ void convert(const DenseRest& /*rest*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int /*step*/, int /*i*/) const { return value_; }
    __device__ __forceinline__ void unfold() { value_ = unfolded(value_); }

   private:
    acc_t value_;
  };

  __device__ __forceinline__ void store(Which which, const acc_t (&results)[1]) {
    void* const data = operands_.data[which];
    if constexpr (kTakesHalves) {
      const DType dtype = operands_.dtype_of(which);
      if (is_half_type(dtype)) {
        static_cast<AnyHalf*>(data)[index_] = from_acc_of<AnyHalf>(results[0], dtype);
      } else {
        static_cast<float*>(data)[index_] = results[0];
      }
    } else {
      static_cast<scalar_t*>(data)[index_] =
          from_acc_of<scalar_t>(results[0], operands_.dtypes[kInput]);
    }
  }

 private:
  const DenseOperands& operands_;
  int64_t index_;
};

}  // namespace lossops::cuda
