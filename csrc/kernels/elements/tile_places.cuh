// Where the tiles of a block lie, and the units in them.
#pragma once

#include <cstdint>

#include "kernels/elements/tiles.h"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/sizes.h"

namespace lossops::cuda {

// What the threads of a block share of a tile: a Tile, and an address for each row and operand.
// There are two of each: while a block takes one tile, it works out the next.
template <typename Tile>
class TilePlaces {
 public:
  struct Shared {
    Tile tiles[2];
  };
  __device__ __forceinline__ TilePlaces(const ElementPlan& plan, Shared& shared)
      : plan_(plan), shared_(shared) {}

  // Goes over to what was filled. All threads of the block.
  __device__ __forceinline__ void turn() {
    __syncthreads();
    turn_ ^= 1;
  }

  __device__ __forceinline__ const Tile& tile() const { return shared_.tiles[turn_]; }
  // Where the addresses of a row are.
  __device__ __forceinline__ char* const* row(int row) const {
    return table(turn_) + row * plan_.num_slots;
  }
  // The address of an operand in its row.
  __device__ __forceinline__ char* address(char* const* row, Which which) const {
    // Input and target are in every plan.
    return row[which <= kTarget ? static_cast<int>(which) : plan_.operands[which].slot];
  }

  // Works out the tile that comes after the next turn. All threads of the block.
  __device__ __forceinline__ void locate(int64_t number) const {
    TileRows rows;
    const Tile tile = Tile::of(plan_, number, rows);
    if (threadIdx.x == 0) {
      shared_.tiles[turn_ ^ 1] = tile;
    }
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x); row < rows.rows; row += kTileThreads) {
#pragma unroll 1
      for (int first = 0; first < plan_.num_slots; first += kSlotsAtOnce) {
        locate_row(rows, row, first);
      }
    }
  }

 private:
  static constexpr int kSlotsAtOnce = 4;

  __device__ __forceinline__ char** table(int turn) const {
    LOSSOPS_DYNAMIC_SHARED(char*, tables);
    return tables + turn * plan_.tile_rows * plan_.num_slots;
  }

  // first: the first of the slots that are filled.
  __device__ __forceinline__ void locate_row(const TileRows& rows, int row, int first) const {
    const Extents& extents = plan_.extents;
    char* addresses[kSlotsAtOnce];
    int operands[kSlotsAtOnce];
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      const int slot = first + i < plan_.num_slots ? first + i : first;
      operands[i] = plan_.slots[slot];
      const PlanOperand& operand = plan_.operands[operands[i]];
      addresses[i] = operand.data + rows.skipped * operand.strides[0];
    }
    int64_t n = rows.first_row + row;
#pragma unroll 1
    for (int dim = rows.first_dim; dim < extents.ndim; ++dim) {
      const int64_t rest = extents.quotient(n, dim);
      const int64_t coordinate = n - rest * extents.sizes[dim];
      n = rest;
#pragma unroll
      for (int i = 0; i < kSlotsAtOnce; ++i) {
        const int64_t stride = plan_.operands[operands[i]].strides[dim];
        addresses[i] += coordinate * stride;
      }
    }
#pragma unroll
    for (int i = 0; i < kSlotsAtOnce; ++i) {
      if (first + i < plan_.num_slots) {
        table(turn_ ^ 1)[row * plan_.num_slots + first + i] = addresses[i];
      }
    }
  }

  const ElementPlan& plan_;
  Shared& shared_;
  int turn_ = 0;
};

using UnitPlaces = TilePlaces<UnitsTile>;

// Where a thread's units lie in a tile: kSteps of kWidth columns, kTileThreads units apart.
template <int kSteps, int kWidth>
class Units {
 public:
  // number: of the first one in the tile.
  __device__ __forceinline__ Units(const ElementPlan& plan, const UnitPlaces& places, int number)
      : plan_(plan), places_(places) {
    const UnitsTile tile = places.tile();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      units_[step] = Unit::of(plan, tile, number + step * kTileThreads, kWidth);
      rows_[step] = places.row(units_[step].row);
    }
  }

  // Whether column i of a unit counts.
  __device__ __forceinline__ bool has(int step, int i) const { return units_[step].has(plan_, i); }
  // Whether all columns of all units count. Then vectors of aligned rows are aligned.
  __device__ __forceinline__ bool has_all() const {
    int lacking = 0;
#pragma unroll
    for (const Unit& unit : units_) {
      lacking = unit.lacking > lacking ? unit.lacking : lacking;
    }
    return lacking == 0;
  }
  __device__ __forceinline__ char* row(Which which, int step) const {
    return places_.address(rows_[step], which);
  }
  __device__ __forceinline__ int column(int step) const { return units_[step].column; }

 private:
  const ElementPlan& plan_;
  const UnitPlaces& places_;
  Unit units_[kSteps];
  char* const* rows_[kSteps];
};

}  // namespace lossops::cuda
