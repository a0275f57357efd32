// A thread's units of an operand of a half type: read, written. Their elements follow each other in
// an aligned vector, or in words wherever they begin, or are one number. The last unit of aligned
// rows may not be aligned: it is read as words are, and its elements are written one by one.
//
// A Tile says how many there are (kSteps) of how many elements (kWidth), of which type all operands
// are (scalar_t), and where they are:
//
// - kind(which): how the thread takes an operand's units;
// - locate(which, addresses): the addresses of their first elements;
// - stride(which): bytes from an element of a unit to the next;
// - joins_next(step), joins_previous(step): whether the neighbouring lanes have what lies beside a
//   unit of words.
#pragma once

#include <cstdint>

#include "kernels/elements/strip_plan.h"
#include "kernels/primitives/unit_cells.cuh"

namespace lossops::cuda {

template <typename Tile>
class UnitValues {
 public:
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kCount = kSteps * kWidth;

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
      for_each([](Unit& unit, const char* data) { unit.load_vector(data); });
    } else if (kind == UnitKind::kOne) {
      for_each([](Unit& unit, const char* data) { unit.load_one(data); });
    } else {  // neighbours that are not aligned
      for_each([](Unit& unit, const char* data) { unit.load_words(data); });
      shifts_ = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        shifts_ |= Unit::shift_of(addresses[step]) << kShiftBits * step;
      }
    }
  }
  // Brings what was read into order. It stays packed, for few registers.
  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    const UnitKind kind = tile.kind(which);
    if (kind == UnitKind::kOne) {
#pragma unroll
      for (Unit& unit : units_) {
        unit.settle_one();
      }
    } else if (kind != UnitKind::kVector) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        units_[step].settle_words(shifts_ >> kShiftBits * step);
      }
    }
  }
  __device__ __forceinline__ float at(int step, int i) const {
    return units_[step].template get<scalar_t>(i);
  }

  __device__ __forceinline__ void unfold() {
#pragma unroll
    for (Unit& unit : units_) {
#pragma unroll
      for (int i = 0; i < Unit::kWords; ++i) {
        unit.cells[i] = unfolded(unit.cells[i]);
      }
    }
  }

  // Rounds and writes.
  static __device__ __forceinline__ void store(const Tile& tile, Which which,
                                               const float (&results)[kCount]) {
    char* addresses[kSteps];
    tile.locate(which, addresses);
    const auto for_each = [&](auto&& body) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Unit unit = Unit::template pack<scalar_t>(results + step * kWidth);
        body(step, unit, addresses[step]);
      }
    };
    if (tile.kind(which) == UnitKind::kVector) {
      for_each([](int /*step*/, const Unit& unit, char* data) { unit.store_vector(data); });
    } else if (tile.kind(which) == UnitKind::kWords) {
      for_each([&](int step, const Unit& unit, char* data) {
        unit.store_words(data, unit.cell_before(), tile.joins_previous(step),
                         tile.joins_next(step));
      });
    } else {
      const int stride = tile.stride(which);
      for_each([stride](int /*step*/, const Unit& unit, char* data) {
        unit.store_strided(data, stride);
      });
    }
  }

 private:
  using scalar_t = typename Tile::scalar_t;
  using Unit = UnitCells<kWidth>;

  Unit units_[kSteps];
  // Of units of words: how many bits of its first word are before the first element, 0 or 16, for
  // each step.
  static constexpr int kShiftBits = 5;
  uint32_t shifts_;
};

}  // namespace lossops::cuda
