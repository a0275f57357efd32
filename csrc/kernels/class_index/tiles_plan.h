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
// Static shared memory of a block, at most. Kernels with a gradient use 1072 bytes (nvcc 13.0).
constexpr int kStaticSharedBytes = 1152;
// Dynamic shared memory of a block, at most. With the static part it is 64 KB, all that compute
// capability 7.5 has for a block. Hopper takes longer rows.
constexpr int kMaxSharedBytes = (64 << 10) - kStaticSharedBytes;
constexpr int kMaxHopperSharedBytes = 76 << 10;
constexpr int max_shared_bytes(const DeviceLimits& device) {
  return device.hopper ? kMaxHopperSharedBytes : kMaxSharedBytes;
}
// Of a tile, with a gradient or without one: it decides what blocks add up, and so a bit of a loss.
// Measured on an H200, 10 classes: with 7700 forward takes 5 % longer, and the step 3 % less.
constexpr int kTileBytes = 5000;
// Tiles of a warp, at least. Measured on an H200, 100 classes: 2 are 1 % faster than 3, and 5 %
// than 6; 1 is as fast.
constexpr int64_t kTilesPerWarp = 2;
// Lanes that may share a row. Each of them repeats what a row takes once, such as the logarithm, so
// few are best. 4 would be better for 321 to 640 classes, but the wheel has no room for their
// kernels. Measured on an H200, bf16, forward / step, fractions of the floor: 256 classes by 8
// lanes .51 / .65, by 4 .63 / .74, by 2 .72 / .80; 512 classes by 8 .63 / .76, by 4 .75 / .82; 896
// classes by 8 .74 / .82, by 4 .65 / .68.
constexpr int kTeams[] = {1, 2, 8};
// Words of a row that a lane takes, at most. Measured on an H200, forward: 300 classes are at .65
// of the floor with 64, at .75 with 80. More leave a multiprocessor room for the tiles of few
// warps.
constexpr int kMaxLaneWords = 80;
// The longest row that is not whole vectors; rows of whole vectors are for other kernels from
// kMinStagedBytes on. Its tile fits in max_shared_bytes(), also with gaps of half a row.
constexpr int64_t kMaxRowBytes = kTeams[2] * kMaxLaneWords * 4;
// The same on Hopper, but for rows of nearly whole lines: of these, three or four accesses of a
// warp meet in a bank. Measured on an H200, forward / step, staged rows and this: 1301 classes .50
// / .71, .84 / .84; 1501 classes .57 / .77, .79 / .81; 1601 classes, of which four meet, .59 / .78,
// .66 / .65.
constexpr int64_t kMaxHopperRowBytes = 3072;
constexpr int64_t kNearLineBytes = 14;

constexpr bool are_nearly_lines(int64_t bytes) {
  return (bytes + kNearLineBytes) % kLineBytes <= 2 * kNearLineBytes;
}

// Whether tiles take these rows: of half types and class indices.
inline bool fits(const RowProblem& problem) {
  const bool is_longer = problem.device.hopper && problem.bytes <= kMaxHopperRowBytes &&
                         !are_nearly_lines(problem.bytes);
  return problem.bytes < kMinStagedBytes ||
         (!problem.whole_vectors && (problem.bytes <= kMaxRowBytes || is_longer));
}

// How rows lie in shared memory: sets `by_words`, `padding` and `row_bytes`.
inline void place_rows(const RowProblem& problem, RowPlan& plan) {
  const int words = (static_cast<int>(problem.bytes) + 3) / 4;
  plan.by_words = !copied_as_run(problem.args, problem.args.input);
  if (plan.by_words) {
    plan.row_bytes = 4 * (words | 1);  // an odd number of words: few lanes meet in a bank
    return;
  }
  // Rows have the same distance as in global memory, or 16 bytes more if they are whole granules:
  // then they begin at the same place of a granule, and the most accesses meet in a bank.
  plan.row_bytes =
      static_cast<int>(row_stride(problem.args, problem.args.input) * problem.element_bytes);
  plan.padding = padding_of(plan.row_bytes, plan.team);
  plan.row_bytes += plan.padding * kVectorBytes;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kThreads;
  const int words = (static_cast<int>(problem.bytes) + 3) / 4;
  // The smallest team. It decides the order of the sums, so it depends on the row's length alone.
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
