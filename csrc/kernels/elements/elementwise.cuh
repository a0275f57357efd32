// The kernel of elementwise losses. It computes losses and gradients; how it takes its operands, as
// dense runs or by a plan, is a parameter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/elements/box_tile.cuh"
#include "kernels/elements/dense_tile.cuh"
#include "kernels/elements/process.cuh"
#include "kernels/elements/strip_sums.cuh"
#include "kernels/elements/strip_tile.cuh"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// How a kernel takes its operands (Taken) says:
//
// - Plan, tiles(plan): the operands as the kernel is told of them, and how many tiles they make;
// - threads(plan): of a block: kTileThreads, or fewer;
// - bytes(plan): of dynamic shared memory;
// - kBlocks: resident blocks a multiprocessor, at the least: as many as leave a thread its
//   registers;
// - for_each_tile(plan, body): calls body(tile, operands, sums) with each tile of a block, and with
//   each element that no whole tile has. Blocks stride over tiles. operands: what is read of the
//   tile. sums: what sums a gradient, if any.
// kTakesHalves: see DenseTraits.
template <typename scalar_t, bool kTakesHalves = false>
struct Dense {
  using Tile = DenseTile<scalar_t, kTakesHalves>;
  using Rest = DenseRest<scalar_t, kTakesHalves>;
  using Plan = DenseOperands;
  using acc_t = acc_type_t<scalar_t>;
  // More than 64 registers, which 4 blocks leave, cost KL of fp16 11 % of its step. Kernels of
  // AnyHalf, and those that take operands of two dtypes, need more. With no limit the backward
  // kernel of the latter takes 95, and is 1.1 times as slow (H200).
  static constexpr int kBlocks = kTakesHalves                        ? 3
                                 : sizeof(scalar_t) != 2             ? 1
                                 : std::is_same_v<scalar_t, AnyHalf> ? 3
                                                                     : 4;

  static int64_t tiles(const DenseOperands& operands) {
    return std::max<int64_t>(ceil_div(operands.numel, kDenseTile<scalar_t>), 1);
  }

  static int threads(const DenseOperands& /*operands*/) { return kTileThreads; }
  static int64_t bytes(const DenseOperands& /*operands*/) { return 0; }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const DenseOperands& operands,
                                                       const Body& body) {
    const int64_t whole_tiles = operands.numel / kDenseTile<scalar_t>;
    NoSums no_sums;
    int64_t index = blockIdx.x;
    for (; index < whole_tiles; index += gridDim.x) {
      Tile tile(operands, index);
      Operands<Tile> read;
      body(tile, read, no_sums);
    }
    if (index == whole_tiles) {
      // fault: elementwise-tail
#pragma unroll 1
      for (int64_t i = index * kDenseTile<scalar_t> + threadIdx.x; i < operands.numel;
           i += kTileThreads) {
        Rest rest(operands, i);
        Operands<Rest> read;
        body(rest, read, no_sums);
      }
    }
  }
};

// How the kernel of a loss takes dense operands. Only without weights may they be of two dtypes.
template <typename scalar_t, bool kHasWeight>
using DenseOf = Dense<scalar_t, std::is_same_v<scalar_t, float> && !kHasWeight>;

// kSums: a gradient may be summed.
template <typename Tile, int kBlocks_, bool kSums = false>
struct InStrips {
  using Plan = StripPlan;
  using acc_t = typename Tile::acc_t;
  using Sums = std::conditional_t<kSums, StripSums<Tile>, NoSums>;
  static constexpr int kBlocks = kBlocks_;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kSteps = Tile::kSteps;

  static int64_t tiles(const StripPlan& plan) { return plan.tiles; }
  static int threads(const StripPlan& plan) { return plan.block_threads(); }
  static int64_t bytes(const StripPlan& plan) { return plan.table_bytes(); }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const StripPlan& plan, const Body& body) {
    Operands<Tile> operands;
    const ThreadBegins begins;
    if constexpr (kSums) {
      __shared__ typename Sums::Shared shared;
      for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
        Sums sums(plan, shared);
        for_each_turn(plan, begins, tile,
                      [&](const Strip& strip, const Walk<kWidth>& walk, int turn) {
                        Tile units(plan, walk, begins, turn);
                        body(units, operands, sums);
                        sums.end_turn(strip, walk, turn);
                      });
      }
    } else {
      NoSums no_sums;
      for (int64_t tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
        for_each_turn(plan, begins, tile,
                      [&](const Strip& /*strip*/, const Walk<kWidth>& walk, int turn) {
                        Tile units(plan, walk, begins, turn);
                        body(units, operands, no_sums);
                      });
      }
    }
  }

 private:
  template <typename Body>
  static __device__ __forceinline__ void for_each_turn(const StripPlan& plan,
                                                       const ThreadBegins& begins, int64_t tile,
                                                       const Body& body) {
    if constexpr (kSums) {
      bool is_last = false;
#pragma unroll 1
      for (int number = 0; !is_last; ++number) {
        const Strip strip = Strip::of_sums(plan, tile, number);
        for_each_turn(plan, begins, strip, body);
        is_last = strip.is_last;
      }
    } else {
      for_each_turn(plan, begins, Strip::of(plan, tile), body);
    }
  }
  template <typename Body>
  static __device__ __forceinline__ void for_each_turn(const StripPlan& plan,
                                                       const ThreadBegins& begins,
                                                       const Strip& strip, const Body& body) {
    const Walk<kWidth> walk(plan, strip, static_cast<int>(threadIdx.x));
    set_begins(plan, strip, walk);
    const int end = Walk<kWidth>::end(plan, strip);
#pragma unroll 1
    for (int turn = 0; turn < end; turn += plan.walk_turn) {
      body(strip, walk, turn);
    }
  }
};

// As many blocks as leave registers for what a thread reads and writes.
constexpr int blocks_of_units(bool is_half, unsigned work) {
  const bool needs_few = work == kSumsLosses || (work == kStoresLosses && !is_half);
  return needs_few ? 4 : 3;
}
// scalar_t: a half type, of all operands, or float, where operands may be of any type.
template <typename scalar_t, int kSteps = 2>
using UnitsOf = std::conditional_t<sizeof(scalar_t) == 2, JoinedStripTile<scalar_t, kSteps>,
                                   SpreadStripTile<float, kSteps, kVectorSize<float>>>;
// Forward passes. Their tiles are the same with gradients and without them, for the same bits.
template <typename scalar_t, unsigned kWork>
using InUnits = InStrips<UnitsOf<scalar_t>, blocks_of_units(sizeof(scalar_t) == 2, kWork)>;
// Of reductions, and their backward passes, where a gradient is summed as losses are.
template <typename scalar_t>
using SumsInUnits = InStrips<UnitsOf<scalar_t>, 3, true>;
// Backward passes that sum nothing. With 3 blocks half types spill registers: measured on an H100,
// steps of MSE "none" of bfloat16 were at .77 of the floor, with 2 they are at .86.
template <typename scalar_t>
using BackwardInUnits = InStrips<UnitsOf<scalar_t>, sizeof(scalar_t) == 2 ? 2 : 3>;
// Launches that sum one gradient and may write the other. Few elements a thread, eight: grad_output
// takes registers too.
template <typename scalar_t>
using GradientsInUnits = InStrips<UnitsOf<scalar_t, sizeof(scalar_t) == 2 ? 1 : 2>, 3, true>;
// For little machine code.
using InWeightedSingles = InStrips<SpreadStripTile<float, 2, 1>, 3>;
// Of double, and of columns that are far apart.
using InDoubles = InStrips<SpreadStripTile<double, 1, 1>, 2, true>;

// With 5 blocks registers spill: half types take 1.2 times as long (H200).
template <typename scalar_t>
struct InBoxes {
  using Tile = BoxTile<scalar_t>;
  using Plan = BoxPlan;
  using acc_t = typename Tile::acc_t;
  static constexpr int kBlocks = 4;

  static int64_t tiles(const BoxPlan& plan) { return plan.tiles; }
  static int threads(const BoxPlan& /*plan*/) { return kTileThreads; }
  static int64_t bytes(const BoxPlan& plan) { return plan.table_bytes(); }

  template <typename Body>
  static __device__ __forceinline__ void for_each_tile(const BoxPlan& plan, const Body& body) {
    __shared__ BoxShared shared;
    const ThreadBegins begins;
    BoxThread own(plan);
    NoSums no_sums;
    Operands<Tile> operands;
    for (int64_t number = blockIdx.x; number < plan.tiles; number += gridDim.x) {
      Tile tile(plan, begins, own, number, shared);
#pragma unroll 1
      for (int box = 0; box < tile.boxes(); ++box) {
        if (tile.move_to(box)) {
          body(tile, operands, no_sums);
        }
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
  Taken::for_each_tile(plan, [&](auto& tile, auto& operands, auto& sums) {
    process(tile, work, scales, block.scale, terms, operands, partial, sums);
  });
  block.finish(partial, partials, finalize);
}

}  // namespace lossops::cuda
