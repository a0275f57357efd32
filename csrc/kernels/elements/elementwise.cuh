// Kernels of elementwise losses. elementwise_kernel computes losses and gradients; how it takes its
// operands, as dense runs or by a plan, is a parameter. elementwise_sums_kernel computes gradients
// of operands that are broadcast. process() is the same in both.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/box_tile.cuh"
#include "kernels/elements/dense_tile.cuh"
#include "kernels/elements/process.cuh"
#include "kernels/elements/strip_tile.cuh"
#include "kernels/elements/sum_tile.cuh"
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

template <typename Tile, int kBlocks_>
struct InStrips {
  using Plan = StripPlan;
  using acc_t = typename Tile::acc_t;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kSteps = Tile::kSteps;

  static int64_t tiles(const StripPlan& plan) { return plan.tiles; }
  static int64_t bytes(const StripPlan& plan) { return plan.table_bytes(); }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const StripPlan& plan, const Body& body) {
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread / kWarpSize * kWarpSize >= plan.lanes()) {
      return;
    }
    for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
      const Strip strip = Strip::of(plan, tile);
      const Walk<kWidth> walk(plan, strip, thread);
      WalkBegins::set(plan, strip, walk);
#pragma unroll 1
      for (int turn = 0;
           turn < plan.tile_turns * plan.walk_turn && Walk<kWidth>::goes_on(plan, strip, turn);
           turn += plan.walk_turn) {
        Tile units(plan, walk, turn);
        body(units);
      }
    }
  }
};
// Tiles of forward are the same with a gradient and without one, for the same bits.
template <bool kIsHalf, unsigned kWork>
using InQuads = InStrips<QuadStripTile<kIsHalf ? 3 : 2, kIsHalf>,
                         (kWork & kIsBackward) != 0 || (kIsHalf && kWork != kSumsLosses) ? 3 : 4>;
template <bool kIsHalf, unsigned kWork>
using InSingles = InStrips<SingleStripTile<float, 8, kIsHalf>, (kWork & kIsBackward) != 0 ? 3 : 4>;
// For little machine code.
using InWeightedSingles = InStrips<SingleStripTile<float, 2, false>, 3>;
using InDoubles = InStrips<SingleStripTile<double, 1, false>, 2>;

template <bool kIsBackward>
struct InBoxes {
  using Plan = BoxPlan;
  using acc_t = BoxTile::acc_t;
  static constexpr int kBlocks = kIsBackward ? 3 : 4;

  static int64_t tiles(const BoxPlan& plan) { return plan.tiles; }
  static int64_t bytes(const BoxPlan& /*plan*/) { return 0; }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const BoxPlan& plan, const Body& body) {
    __shared__ BoxTile::Shared shared;
    for (int64_t number = blockIdx.x; number < plan.tiles; number += gridDim.x) {
      const BoxesTile boxes = BoxesTile::of(plan, number);
      BoxTile tile(plan, boxes, shared);
#pragma unroll 1
      for (int box = 0; box < boxes.boxes; ++box) {
        tile.move_to(box);
        body(tile);
      }
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
