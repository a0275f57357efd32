// Short rows of half types: how tiles, a warp each, are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/tile_layout.h"

namespace lossops::cuda::tiles {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
// Resident blocks a multiprocessor, at the least. 8 blocks have 32 warps of 64 registers a thread,
// 7 have 28 of 72, because the gradient spills with 64. Measured on an H200: the steps of 100 and
// 10 classes are 1 % and 4 % faster with 7.
constexpr int min_blocks(bool gradient) { return gradient ? 7 : 8; }
// What a block has of shared memory beside its tiles, at most.
constexpr int kStaticSharedBytes = 1152;
// Of the tiles of a block, at most: with those, all that a GPU of 2018 has for a block.
constexpr int kMaxSharedBytes = (64 << 10) - kStaticSharedBytes;
// Of a tile, with a gradient or without one: it decides what blocks add up, and so a bit of a loss.
// Measured on an H200, 10 classes: with 7700 forward takes 5 % longer, and the step 3 % less.
constexpr int kTileBytes = 5000;
// Tiles of a warp, at least. Measured on an H200, 100 classes: 2 are 1 % faster than 3, and 5 %
// than 6; 1 is as fast.
constexpr int64_t kTilesPerWarp = 2;
// Lanes that may share a row. Each of them does what a row takes apart from its classes. Measured
// on an H200, bf16, forward / step, fractions of the floor: 256 classes by 8 lanes .52 / .65, by 4
// .64 / .75, by 2 .74 / .80; 512 classes by 8 .65 / .75, by 4, for which a wheel has no room, .76 /
// .82; 896 classes by 8 .74 / .82, by 4 .65 / .68.
constexpr int kTeams[] = {1, 2, 8};
// Words of a lane. Of more, tiles are so large that a multiprocessor has few warps.
constexpr int kMaxLaneWords = 80;
// Of rows that are not whole vectors; whole vectors are for other kernels from kMinStagedBytes on.
// The largest tiles, of rows with gaps of half their size, still fit.
constexpr int64_t kMaxRowBytes = kTeams[2] * kMaxLaneWords * 4;

// Accesses of a warp that may meet in one bank of shared memory. If more would meet, the rows of a
// run are copied word by word, which puts them at other distances.
constexpr int kMaxConflict = 4;

// How rows lie in shared memory: sets `by_words`, `padding` and `row_bytes`.
inline void place_rows(const RowProblem& problem, RowPlan& plan) {
  const int words = (static_cast<int>(problem.bytes) + 3) / 4;
  plan.by_words = !copied_as_run(problem.args, problem.args.input);
  if (!plan.by_words) {
    // Rows have the same distance as in global memory, or 16 bytes more.
    plan.row_bytes =
        static_cast<int>(row_stride(problem.args, problem.args.input) * problem.element_bytes);
    if (plan.row_bytes % kVectorBytes == 0) {  // all rows begin at the same place of a granule
      plan.padding = padding_of(plan.row_bytes, plan.team);
      plan.row_bytes += plan.padding * kVectorBytes;
    } else {
      plan.by_words =
          bank_conflict(plan.row_bytes, plan.team) > kMaxConflict && plan.row_bytes % 4 == 0;
    }
  }
  if (plan.by_words) {
    plan.row_bytes = 4 * (words | 1);  // an odd number of words: few lanes meet in a bank
  }
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kThreads;
  const int words = (static_cast<int>(problem.bytes) + 3) / 4;
  // The fewest lanes. They decide the order of the sums, so they depend on the row alone.
  for (const int team : kTeams) {
    plan.team = team;
    if (words <= team * kMaxLaneWords) {
      break;
    }
  }
  place_rows(problem, plan);
  const int step_bytes = std::max(plan.row_bytes, 4 * words) * (kWarpSize / plan.team);
  plan.steps = std::max(1, kTileBytes / step_bytes);
  // A granule before the tile and one after it may be its in part, and a word more is read.
  plan.warp_bytes = (step_bytes * plan.steps / kVectorBytes + 3) * kVectorBytes;
  plan.shared_bytes = kWarps * plan.warp_bytes;
  const int64_t tile_rows = int64_t{plan.steps} * (kWarpSize / plan.team);
  const int64_t tiles = ceil_div(problem.rows, tile_rows);
  plan.blocks = blocks_of_tiles(tiles, problem.device, kThreads,
                                kWarps * plan.warp_bytes + kStaticSharedBytes, kTilesPerWarp);
  return plan;
}

}  // namespace lossops::cuda::tiles
