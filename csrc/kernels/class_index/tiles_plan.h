// Rows of half types: how tiles of them, a warp each, are spread over the device.
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
// capability 7.5 has for a block.
constexpr int kMaxSharedBytes = (64 << 10) - kStaticSharedBytes;
// Of a tile, with a gradient or without one: it decides what blocks add up, and so a bit of a loss.
// Measured on an H200, 10 classes: with 7700 forward takes 5 % longer, and the step 3 % less.
constexpr int kTileBytes = 5000;
// Tiles of a warp, at least. Measured on an H200, 100 classes: 2 are 1 % faster than 3, and 5 %
// than 6; 1 is as fast.
constexpr int64_t kTilesPerWarp = 2;
// Words of a row that a lane takes, at most, unless all lanes share the row. More leave a
// multiprocessor room for the tiles of few warps. Measured on an H200, forward: 300 classes are at
// .65 of the floor with 64, at .75 with 80.
constexpr int kMaxLaneWords = 80;
// What a lane takes, in instructions, for a word of a row and for the row (team_cost()).
constexpr double kOfWord = 11;
constexpr double kOfRow = 170;
// A team of twice as many lanes is taken if it costs less by more than this factor.
constexpr double kLeastGain = 1.15;
// The longest row: blocks whose warps have one such row each fit kMaxSharedBytes. On Hopper longer
// ones are staged. Measured on an H200, forward / step, here and staged: 4501 classes .78 / .81,
// .65 / .81; 5001 classes .76 / .79, .62 / .80; 6501 classes .75 / .78, .74 / .81; 7501 classes .71
// / .70, .79 / .82. Without Hopper's kernels, here and by a team a row: 4096 classes .77 / .80, .58
// / .63; 7800 classes .68 / .67, .49 / .56.
constexpr int64_t kMaxRowBytes = 16000;
constexpr int64_t kMaxHopperRowBytes = kWarpSize * kMaxLaneWords * 4;
// The most from a row to the next where gaps are not copied: offsets in a tile have 32 bits.
constexpr int64_t kMaxStrideBytes = 1 << 20;

// Whether tiles take these rows: of half types and class indices.
inline bool fits(const RowProblem& problem) {
  return problem.bytes <= (problem.device.hopper ? kMaxHopperRowBytes : kMaxRowBytes);
}

// Lanes that share a row. Their number decides the order of the sums, so it depends on the row's
// length alone.
//
// Each lane repeats what a row takes once, such as the logarithm, so few are best. Measured on an
// H200, bf16, forward / step, fractions of the floor: 256 classes by 8 lanes .51 / .65, by 4 .63 /
// .74, by 2 .72 / .80; 512 classes by 8 .63 / .76, by 4 .75 / .82; 2501 classes by 32 .71 / .79, by
// 16 .76 / .78; 3501 classes by 32 .76 / .82, by 16 .75 / .77.
//
// A row that may begin within a word takes two reads a word. Where many reads meet in a bank, more
// lanes a row are better: 269 classes by 2 .66 / .69, by 4 .76 / .77; 1151 classes by 8 .62 / .62,
// by 16 .71 / .78.
inline int team_of(int row_bytes) {
  const int words = (row_bytes + 3) / 4;
  int team = 1;
  while (team < kWarpSize && words > team * kMaxLaneWords) {
    team *= 2;
  }
  const auto gains = [&](int more) {
    return kLeastGain * team_cost(row_bytes, more, kOfWord, kOfRow) <
           team_cost(row_bytes, team, kOfWord, kOfRow);
  };
  while (row_bytes % 4 != 0 && team < kWarpSize && gains(2 * team)) {
    team *= 2;
  }
  return team;
}

// How rows are copied to shared memory, and how they lie there: sets `by_rows`, `by_words`,
// `padding` and `row_bytes`.
inline void place_rows(const RowProblem& problem, RowPlan& plan) {
  const auto bytes = static_cast<int>(problem.bytes);
  const int64_t stride = row_stride(problem.args, problem.args.input) * problem.element_bytes;
  if (copied_as_run(problem.args, problem.args.input)) {
    // Rows have the same distance as in global memory, or 16 bytes more if they are whole granules:
    // then they begin at the same place of a granule, and the most accesses meet in a bank.
    plan.row_bytes = static_cast<int>(stride);
    plan.padding = padding_of(plan.row_bytes, plan.team);
    plan.by_rows = plan.padding > 0;
    plan.row_bytes += plan.padding * kVectorBytes;
  } else if (problem.args.rows.ndim == 1 && stride > 0 && stride <= kMaxStrideBytes &&
             stride % kVectorBytes == 0) {
    // Each row by the granules that hold it, without the gap behind it. As rows are whole granules
    // apart, all begin at the same place of a granule, at most 14 bytes behind its beginning.
    plan.by_rows = true;
    plan.row_bytes = static_cast<int>(round_up(bytes + kVectorBytes - 2, kVectorBytes));
    plan.padding = padding_of(plan.row_bytes, plan.team);
    plan.row_bytes += plan.padding * kVectorBytes;
  } else {
    plan.by_words = true;
    plan.row_bytes = 4 * ((bytes + 3) / 4 | 1);  // an odd number of words: few lanes meet in a bank
  }
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kThreads;
  const auto row_bytes = static_cast<int>(problem.bytes);
  plan.team = team_of(row_bytes);
  place_rows(problem, plan);
  const int rows_of_step = kWarpSize / plan.team;
  plan.steps = std::max(1, kTileBytes / (plan.row_bytes * rows_of_step));
  // A granule before the tile and one after it may be its in part, and a word more is read.
  const int distance = (plan.steps * rows_of_step - 1) * plan.row_bytes;  // of the last row
  plan.warp_bytes = ((distance + row_bytes) / kVectorBytes + 3) * kVectorBytes;
  plan.shared_bytes = kWarps * plan.warp_bytes;
  plan.blocks = blocks_of_tiles(
      ceil_div(problem.rows, int64_t{plan.steps} * rows_of_step), problem.device, kThreads,
      static_cast<int>(plan.shared_bytes) + kStaticSharedBytes, kTilesPerWarp);
  return plan;
}

}  // namespace lossops::cuda::tiles
