// A thread's elements of an operand of any layout and dtype: read, converted, written.
//
// A Tile says where they are:
//   acc_t, kSteps, kWidth, kIsHalf  what is computed in; units of a thread, elements of a unit;
//                                   whether all operands are of half types
//   operand(which)                  its PlanOperand
//   for_each_unit<kBytes>(which, body)  calls body(step, address, is_vector) for the units that are
//                                   there; is_vector: else the unit is one number, repeated
//   has_own(which, step), address(which, step)  the same for one unit, of any dtype; in fp64 alone
#pragma once

#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {

// kCount words from an address that is aligned to all of them.
template <int kCount>
__device__ __forceinline__ void load_words(const char* from, uint32_t (&words)[kCount]) {
  if constexpr (kCount == 1) {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (kCount == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    words[0] = pair.x;
    words[1] = pair.y;
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
  }
}
template <int kCount>
__device__ __forceinline__ void store_words(char* to, const uint32_t (&words)[kCount]) {
  if constexpr (kCount == 1) {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  } else if constexpr (kCount == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <typename Tile>
class PlannedValues {
 public:
  using acc_t = typename Tile::acc_t;
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr bool kIsDouble = sizeof(acc_t) == 8;

  __device__ __forceinline__ acc_t at(int step, int i) const { return values_[step * kWidth + i]; }
  __device__ __forceinline__ acc_t& at(int step, int i) { return values_[step * kWidth + i]; }

  // Starts to read. Half types stay packed until convert(), so that nothing waits for them here.
  __device__ __forceinline__ void load(Tile& tile, Which which) {
    const DType dtype = tile.operand(which).dtype;
    if constexpr (kIsDouble) {
      if (dtype == DType::kFloat64) {
        tile.template for_each_unit<8>(which, [&](int step, const char* from, bool) {
          values_[step] = *reinterpret_cast<const double*>(from);
        });
        return;
      }
    } else {
      if (Tile::kIsHalf || is_half_type(dtype)) {
        tile.template for_each_unit<2>(which, [&](int step, const char* from, bool is_vector) {
          load_halves(step, from, is_vector);
        });
        return;
      }
      tile.template for_each_unit<4>(which, [&](int step, const char* from, bool is_vector) {
        load_floats(step, from, is_vector);
      });
    }
    if constexpr (kIsDouble) {
      acc_t values[kSteps];  // in local memory, for little code: other dtypes are rare
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        values[step] = tile.has_own(which, step) ? load_as<acc_t>(tile.address(which, step), dtype, 0)
                                                 : acc_t(0);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        values_[step] = values[step];
      }
    }
  }

  __device__ __forceinline__ void convert(Tile& tile, Which which) {
    if constexpr (!kIsDouble) {
      const DType dtype = tile.operand(which).dtype;
      if (dtype == DType::kBFloat16) {
        unpack<bfloat16_t>();
      } else if (Tile::kIsHalf || dtype == DType::kFloat16) {
        unpack<half_t>();
      }
    }
    tile.take(which, *this);
  }

  // Rounds and writes.
  __device__ __forceinline__ void store(Tile& tile, Which which) {
    tile.give(which, *this);
    const DType dtype = tile.operand(which).dtype;
    if constexpr (kIsDouble) {
      if (dtype == DType::kFloat64) {
        tile.template for_each_unit<8>(which, [&](int step, char* to, bool) {
          *reinterpret_cast<double*>(to) = values_[step];
        });
        return;
      }
    } else {
      if (dtype == DType::kBFloat16) {
        store_halves<bfloat16_t>(tile, which);
        return;
      }
      if (Tile::kIsHalf || dtype == DType::kFloat16) {
        store_halves<half_t>(tile, which);
        return;
      }
      tile.template for_each_unit<4>(which, [&](int step, char* to, bool) {
        uint32_t words[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          words[i] = __float_as_uint(at(step, i));
        }
        store_words(to, words);
      });
    }
    if constexpr (kIsDouble) {
      acc_t values[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        values[step] = values_[step];
      }
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        if (tile.has_own(which, step)) {
          store_as<acc_t>(tile.address(which, step), dtype, 0, values[step]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ void load_floats(int step, const char* from, bool is_vector) {
    uint32_t words[kWidth];
    if (kWidth == 1 || is_vector) {
      load_words(from, words);
    } else {
      const uint32_t one = *reinterpret_cast<const uint32_t*>(from);
#pragma unroll
      for (uint32_t& word : words) {
        word = one;
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      at(step, i) = __uint_as_float(words[i]);
    }
  }
  __device__ __forceinline__ void load_halves(int step, const char* from, bool is_vector) {
    if constexpr (kWidth == 1) {
      at(step, 0) = __uint_as_float(*reinterpret_cast<const uint16_t*>(from));
    } else {
      uint32_t words[kWidth / 2];
      if (is_vector) {
        load_words(from, words);
      } else {
        const uint32_t one = *reinterpret_cast<const uint16_t*>(from);
#pragma unroll
        for (uint32_t& word : words) {
          word = one << 16 | one;
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth / 2; ++i) {
        at(step, i) = __uint_as_float(words[i]);
      }
    }
  }

  static __device__ __forceinline__ uint16_t low(uint32_t word) {
    return static_cast<uint16_t>(word);
  }
  template <typename scalar_t>
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kWidth == 1) {
        at(step, 0) = to_acc<acc_t>(scalar_t{low(__float_as_uint(at(step, 0)))});
      } else {
        // From the last, so that no word is overwritten before it is read.
#pragma unroll
        for (int i = kWidth / 2 - 1; i >= 0; --i) {
          const uint32_t word = __float_as_uint(at(step, i));
          at(step, 2 * i + 1) = to_acc<acc_t>(scalar_t{low(word >> 16)});
          at(step, 2 * i) = to_acc<acc_t>(scalar_t{low(word)});
        }
      }
    }
  }
  template <typename scalar_t>
  __device__ __forceinline__ void store_halves(Tile& tile, Which which) {
    tile.template for_each_unit<2>(which, [&](int step, char* to, bool) {
      if constexpr (kWidth == 1) {
        *reinterpret_cast<uint16_t*>(to) = from_acc<scalar_t>(at(step, 0)).bits;
      } else {
        uint32_t words[kWidth / 2];
#pragma unroll
        for (int i = 0; i < kWidth / 2; ++i) {
          words[i] = pack_word<scalar_t>(values_ + step * kWidth + 2 * i);
        }
        store_words(to, words);
      }
    });
  }

  acc_t values_[kSteps * kWidth];
};

}  // namespace lossops::cuda
