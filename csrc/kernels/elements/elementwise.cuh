// Kernels of elementwise losses. elementwise_kernel computes losses and gradients; how it takes its
// operands, as dense runs or by a plan, is a parameter. elementwise_sums_kernel computes gradients
// of operands that are broadcast. process() is the same in both.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/box_tile.cuh"
#include "kernels/elements/dense_tile.cuh"
#include "kernels/elements/process.cuh"
#include "kernels/elements/quad_tile.cuh"
#include "kernels/elements/single_tile.cuh"
#include "kernels/elements/sum_tile.cuh"
#include "kernels/elements/unit_tile.cuh"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// How a kernel takes its operands (Taken) says:
//
// - Plan, tiles(plan): the operands as the kernel is told of them, and how many tiles they make;
// - bytes(plan): of dynamic shared memory;
// - kBlocks: resident blocks a multiprocessor, at the least. As many as leave a thread its
// registers;
// - for_each_tile(plan, body): calls body with each tile of a block, and with each element that no
//   whole tile has. Blocks stride over tiles.
template <typename scalar_t>
struct Dense {
  using Plan = DenseOperands;
  using acc_t = acc_type_t<scalar_t>;
  // Of half types, 67 registers instead of 64 cost KL of fp16 11 % of its step.
  static constexpr int kBlocks = sizeof(scalar_t) == 2 ? 4 : 1;

  static int64_t tiles(const DenseOperands& operands) {
    return std::max<int64_t>(ceil_div(operands.numel, kDenseTile<scalar_t>), 1);
  }

  static int64_t bytes(const DenseOperands& /*operands*/) { return 0; }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const DenseOperands& operands,
                                                       const Body& body) {
    const int64_t whole_tiles = operands.numel / kDenseTile<scalar_t>;
    int64_t index = blockIdx.x;
    for (; index < whole_tiles; index += gridDim.x) {
      DenseTile<scalar_t> tile(operands, index);
      body(tile);
    }
    if (index == whole_tiles) {
      // fault: elementwise-tail
      for (int64_t i = index * kDenseTile<scalar_t> + threadIdx.x; i < operands.numel;
           i += kTileThreads) {
        DenseRest<scalar_t> rest(operands, i);
        body(rest);
      }
    }
  }
};

// Elements of a matrix.
template <typename WholeTile, int kBlocks_>
struct InMatrix {
  using Plan = MatrixPlan;
  using acc_t = typename WholeTile::acc_t;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kTileElements = kTileThreads * WholeTile::kSteps * WholeTile::kWidth;

  static int64_t tiles(const MatrixPlan& plan) { return plan.tiles(); }
  static int64_t bytes(const MatrixPlan& /*plan*/) { return 0; }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const MatrixPlan& plan, const Body& body) {
    __shared__ ChunkPlaces::Shared shared;
    ChunkPlaces places(plan, shared, blockIdx.x);
    const int64_t tiles = plan.tiles();
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
      places.move_to(index, index + gridDim.x);
      take(plan, places, index, body);
    }
  }

 private:
  template <typename Body>
  static __device__ __forceinline__ void take(const MatrixPlan& plan, const ChunkPlaces& places,
                                              int64_t tile, const Body& body) {
    const auto first =
        static_cast<uint32_t>(tile - places.chunk() * plan.chunk_tiles) * kTileElements;
    const uint32_t elements = places.elements();
    if (first + kTileElements <= elements) {
      WholeTile whole(plan, places, first + threadIdx.x * WholeTile::kWidth);
      body(whole);
      return;
    }
    const uint32_t last = first + kTileElements < elements ? first + kTileElements : elements;
    for (uint32_t number = first + threadIdx.x; number < last; number += kTileThreads) {
      SingleTile<acc_t, 1, WholeTile::kIsHalf> rest(plan, places, number);
      body(rest);
    }
  }
};

// Tiles of forward are the same with a gradient and without one, for the same bits; but not where a
// chunk is one row, and the rows of the gradient alone are not aligned.
template <bool kIsHalf, unsigned kWork>
using InQuads = InMatrix<QuadTile<kIsHalf ? 4 : 2, kIsHalf>, (kWork & kIsBackward) != 0 ? 3 : 4>;
template <bool kIsHalf, unsigned kWork>
using InSingles = InMatrix<SingleTile<float, 8, kIsHalf>, (kWork & kIsBackward) != 0 ? 3 : 4>;

// What ways to take an ElementPlan share. Taken has take(plan, places, body): calls body with the
// elements that a thread has of a tile.
template <typename Taken, typename Places>
struct Planned {
  using Plan = ElementPlan;

  static int64_t tiles(const ElementPlan& plan) { return plan.tiles; }
  static int64_t bytes(const ElementPlan& plan) { return plan.table_bytes(); }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const ElementPlan& plan, const Body& body) {
    __shared__ typename Places::Shared shared;
    Places places(plan, shared);
    // One tile is located, and the one before is taken; in the first turn there is none.
    for (int64_t next = blockIdx.x; next < plan.tiles + gridDim.x; next += gridDim.x) {
      if (next < plan.tiles) {
        places.locate(next);
      }
      if (next >= gridDim.x) {
        Taken::take(plan, places, body);
      }
      places.turn();
    }
  }
};

template <typename Tile, int kBlocks_>
struct InUnits : Planned<InUnits<Tile, kBlocks_>, UnitPlaces> {
  using acc_t = typename Tile::acc_t;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kAtOnce = kTileThreads * Tile::kSteps;  // units

  template <typename Body>
  static __device__ __forceinline__ void take(const ElementPlan& plan, const UnitPlaces& places,
                                              const Body& body) {
    const int units = places.tile().units;
#pragma unroll 1
    for (int first = 0; first < units; first += kAtOnce) {
      Tile tile(plan, places, first + static_cast<int>(threadIdx.x));
      body(tile);
    }
  }
};
template <unsigned kWork>
using InQuadUnits = InUnits<QuadUnitTile<2>, (kWork & kIsBackward) != 0 ? 3 : 4>;
// For little machine code.
using InSingleUnits = InUnits<SingleUnitTile<float, 2>, 3>;
using InDoubles = InUnits<SingleUnitTile<double, 1>, 2>;

template <bool kIsBackward>
struct InBoxes : Planned<InBoxes<kIsBackward>, BoxPlaces> {
  using acc_t = BoxTile::acc_t;
  static constexpr int kBlocks = kIsBackward ? 3 : 4;
  static constexpr int kWidth = kQuad;
  static constexpr int kAtOnce = 1;

  template <typename Body>
  static __device__ __forceinline__ void take(const ElementPlan& plan, const BoxPlaces& places,
                                              const Body& body) {
    __shared__ BoxTile::Shared shared;
    BoxTile tile(plan, places, shared);
    const int boxes = places.tile().boxes;
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      tile.move_to(box);
      body(tile);
    }
  }
};

template <typename Taken, typename Work, typename Terms>
__global__ void __launch_bounds__(kTileThreads, Taken::kBlocks)
    elementwise_kernel(const __grid_constant__ typename Taken::Plan plan, Work work, Terms terms,
                       const __grid_constant__ ElementScales scales,
                       typename Taken::acc_t unit_scale, Partial* partials, Finalize finalize) {
  BlockWork<typename Taken::acc_t, Work> block(work, scales, unit_scale);
  if (!block.begin()) {
    return;
  }
  Partial partial;
  NoGradientSum no_sum;
  Taken::for_each_tile(
      plan, [&](auto& tile) { process(tile, work, scales, block.scale, terms, partial, no_sum); });
  block.finish(partial, partials, finalize);
}

template <typename acc_t>
constexpr int kSumSteps = sizeof(acc_t) == 8 ? 1 : 6;

// A block adds up its shares of the sums.
template <typename acc_t, typename Work, typename Terms>
__global__ void __launch_bounds__(kTileThreads, sizeof(acc_t) == 8 ? 2 : 4)
    elementwise_sums_kernel(const __grid_constant__ SumPlan plan, Work work, Terms terms,
                            const __grid_constant__ ElementScales scales, Which which,
                            double* partials) {
  __shared__ double buffer[kTileThreads];
  BlockWork<acc_t, Work> block(work, scales, acc_t(1));
  if (!block.begin()) {
    return;
  }
  Partial no_losses;
  for (int64_t share = blockIdx.x; share < plan.shares; share += gridDim.x) {
    SumTile<acc_t, kSumSteps<acc_t>> tile(plan, share);
    GradientSum sum{which};
    while (tile.move_on()) {
      process(tile, work, scales, block.scale, terms, no_losses, sum);
    }
    tile.finish(sum.value, which, buffer, partials);
  }
}

}  // namespace lossops::cuda
