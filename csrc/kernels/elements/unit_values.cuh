// A thread's units of an operand, whose elements follow each other in an aligned vector, or are one
// number, or lie in words wherever they begin: read, converted, written. What is written may also
// lie at equal distances.
//
// A Tile says how many there are (kSteps) of how many elements (kWidth), of which type all operands
// are (scalar_t; float: each operand of its own), and where they are:
//
// - operand(which): its StripOperand; kind(which): how the thread takes its units;
// - locate(which, addresses): the addresses of their first elements;
// - stride(which): bytes from an element of a unit to the next;
// - joins_next(step), joins_previous(step): whether the neighbouring lanes have what lies beside a
//   unit of words.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/elements/strip_plan.h"
#include "kernels/elements/unit_cells.cuh"

namespace lossops::cuda {

template <typename Tile>
class UnitValues {
 public:
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kCount = kSteps * kWidth;

  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    dtype_ = tile.operand(which).dtype;
    if (is_half(tile, which)) {
      load<2>(tile, which);
    } else {
      load<4>(tile, which);
    }
  }
  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    if (is_half(tile, which)) {
      settle<2>(tile.kind(which));
      if constexpr (!kIsHalf) {
        unpack(tile.operand(which).dtype);
      }
    } else {
      settle<4>(tile.kind(which));
    }
  }
  // Half types stay packed, for few registers.
  __device__ __forceinline__ float at(int step, int i) const {
    if constexpr (kIsHalf) {
      return units_[step].template get<scalar_t>(i, dtype_);
    } else {
      return __uint_as_float(units_[step].cells[i]);
    }
  }

  __device__ __forceinline__ void unfold() {
#pragma unroll
    for (Unit& unit : units_) {
#pragma unroll
      for (int i = 0; i < (kIsHalf ? kWidth / 2 : kWidth); ++i) {
        unit.cells[i] = unfolded(unit.cells[i]);
      }
    }
  }

  // Rounds and writes.
  static __device__ __forceinline__ void store(const Tile& tile, Which which,
                                               const float (&results)[kCount]) {
    if constexpr (kIsHalf) {
      store_as<scalar_t>(tile, which, results);
    } else if (is_half(tile, which)) {
      store_as<AnyHalf>(tile, which, results);
    } else {
      store_as<float>(tile, which, results);
    }
  }

 private:
  using scalar_t = typename Tile::scalar_t;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  using Unit = UnitCells<kWidth, kIsHalf ? kWidth / 2 + 1 : kWidth>;

  static __device__ __forceinline__ bool is_half(const Tile& tile, Which which) {
    return tile.is_half(which);
  }

  template <int kBytes>
  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    char* addresses[kSteps];
    tile.locate(which, addresses);
    const auto for_each = [&](auto&& body) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        body(units_[step], addresses[step]);
      }
    };
    const UnitKind kind = tile.kind(which);
    if (kind == UnitKind::kVector) {
      for_each([](Unit& unit, const char* data) { unit.template load_vector<kBytes>(data); });
    } else if (kind == UnitKind::kOne) {
      for_each([](Unit& unit, const char* data) { unit.template load_one<kBytes>(data); });
    } else {  // words: no other kind is read
      for_each([](Unit& unit, const char* data) { unit.template load_words<kBytes>(data); });
      if constexpr (kBytes == 2) {
        shifts_ = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          shifts_ |= (low_bits(addresses[step]) & 2) << (3 + kShiftBits * step);
        }
      }
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void settle(UnitKind kind) {
    if (kind == UnitKind::kOne) {
#pragma unroll
      for (Unit& unit : units_) {
        unit.template settle_one<kBytes>();
      }
    } else if (kBytes == 2 && kind != UnitKind::kVector) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        units_[step].settle_words(shifts_ >> kShiftBits * step);
      }
    }
  }

  __device__ __forceinline__ void unpack(DType dtype) {
#pragma unroll
    for (Unit& unit : units_) {
      unit.template unpack<AnyHalf>(dtype);
    }
  }

  template <typename stored_t>
  static __device__ __forceinline__ void store_as(const Tile& tile, Which which,
                                                  const float (&values)[kCount]) {
    constexpr int kBytes = sizeof(stored_t);
    const DType dtype = tile.operand(which).dtype;
    char* addresses[kSteps];
    tile.locate(which, addresses);
    const auto for_each = [&](auto&& body) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Unit unit = Unit::template pack<stored_t>(values + step * kWidth, dtype);
        body(step, unit, addresses[step]);
      }
    };
    if (tile.kind(which) == UnitKind::kVector) {
      for_each([](int /*step*/, const Unit& unit, char* data) {
        unit.template store_vector<kBytes>(data);
      });
      return;
    }
    if (tile.kind(which) == UnitKind::kWords) {
      for_each([&](int step, const Unit& unit, char* data) {
        unit.template store_words<kBytes>(data, tile.joins_previous(step), tile.joins_next(step));
      });
      return;
    }
    const int stride = tile.stride(which);
    for_each([stride](int /*step*/, const Unit& unit, char* data) {
      unit.template store_strided<kBytes>(data, stride);
    });
  }

  Unit units_[kSteps];
  // Of units of words: how many bits of its first word are before the first element, 0 or 16, for
  // each step.
  static constexpr int kShiftBits = 5;
  uint32_t shifts_;
  DType dtype_;
};

}  // namespace lossops::cuda
