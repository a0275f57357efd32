// fp32 rows in the registers of a few warps: how they are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::float_rows {

constexpr int kSize = kVectorSize<float>;
// Vectors of a row that a thread holds.
constexpr int kVectors = 8;
constexpr int kThreadLogits = kVectors * kSize;
// Threads of a block: 128 hold one or several teams; a *wide* team, of a longer row, has up to 256.
constexpr int kThreads = 128;
constexpr int kWideThreads = 256;
constexpr int64_t kMaxClasses = kThreads * kThreadLogits;
constexpr int64_t kMaxWideClasses = kWideThreads * kThreadLogits;
// Resident blocks a multiprocessor, at the least. 7 blocks leave a thread 72 registers, 3 wide ones
// 80. Measured on an H200: with 8 the steps of 262144x1000, which then spill, take 9 % longer;
// forward of 32768x1001 is the same.
constexpr int min_blocks(int threads) { return threads == kThreads ? 7 : 3; }
// Rows of a block at most: a thread of a warp prepares and finishes each.
constexpr int kMaxRows = kWarpSize;
// A team takes one row after the other: so many at most, and so many bytes of a block's rows,
// unless there are very many rows. Measured on an H200, forward: with 16 rows of 1000 classes a
// block 262144x1000 takes 243 us, with 4, 8, 32 rows 251, 245, 247. Steps: with 4 rows 533 us, with
// 8 rows 543; with blocks of one team, which read less in a line, and 2 rows 553; of 4096 classes,
// 2 rows take 1 % longer than 1, 4 rows 4 %.
constexpr int64_t kMaxTeamRows = 8;
constexpr int64_t kForwardBytes = 64 << 10;
constexpr int64_t kGradientBytes = 16 << 10;
constexpr int64_t kGradientRows = 2;
// Bytes of a block's rows that leave a sixth of the threads' room empty, in a pass with a gradient.
// In one without, such rows have kForwardBytes for each team, not for the block. Measured on an
// H200, steps with 4, 8, 16, 32 rows a block: 262144x505 439, 383, 358, 348 us, 262144x600 419,
// 377, 348, 351, 262144x768 436, 414, 424; 131072x1500 with 2 and 4 rows of a team 439 and 426.
// Forward of 262144x768 with 20 rows a block takes 4 % longer than with 8 of a team.
constexpr int64_t kLooseBytes = 40 << 10;
// With a gradient, each multiprocessor has as many blocks as it holds at a time, so many times
// over, before blocks have more rows: few that are left for a last turn take as long as all.
constexpr int64_t kTurns = 4;
// Without one, the blocks of so many turns in the end have one row of each team; those before them
// have more, but none so many that it would end last. Measured on an H200, forward of 32768x1001
// with 2 rows of each team in all blocks, and with 4 before 0.5, 1, 1.5, 2 turns of one row: 41.8,
// 42.0, 40.6, 40.9, 41.1 us; with 30 % of the rows ignored, which are not loaded unless they are a
// team's first, 38.4, 35.6, 34.5, 35.2, 35.5. With 8 rows before 1 turn 40.3 and 33.2, but
// 262144x1000 takes 2 % longer. 4096x1000 with 4 rows in the first 25 of 949 blocks takes 12 %
// longer than with 1 row in all.
constexpr int64_t kLateTurns = 1;
// Blocks, unless there are so many rows that each has kMaxRows.
constexpr int64_t kMaxBlocks = 131072;

// Threads of a team, which has a row at a time.
inline int team_of(const RowProblem& problem) {
  return static_cast<int>(ceil_div(problem.classes, kWarpSize * kThreadLogits)) * kWarpSize;
}

// Words of several warps that leave more of their room empty are faster staged. Measured on an
// H200, steps: 262144x1030 takes 49 % longer here, 65536x3201 as long. Wide teams take no words.
inline bool fills_team(const RowProblem& problem) {
  if (problem.whole_vectors) {
    return problem.classes <= kMaxWideClasses;
  }
  const int team = team_of(problem);
  return problem.classes <= kMaxClasses &&
         (team == kWarpSize || 32 * problem.classes >= 25 * int64_t{team} * kThreadLogits);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.words = !problem.whole_vectors;
  plan.team = team_of(problem);
  plan.aligned = problem.aligned();
  // The teams of a block take its rows in turn.
  const int teams = std::max(kThreads / plan.team, 1);
  plan.threads = plan.team * teams;
  const bool loose = 6 * problem.classes < 5 * int64_t{plan.team} * kThreadLogits;
  const int64_t block_bytes = teams * problem.bytes;
  const int64_t most =
      problem.gradient
          ? (loose ? std::min(kLooseBytes / block_bytes, kMaxTeamRows)
                   : std::min(kGradientBytes / block_bytes, kGradientRows))
          : std::min(kForwardBytes / (loose ? problem.bytes : block_bytes), kMaxTeamRows);
  const int64_t resident =
      int64_t{problem.device.multiprocessors} *
      (plan.threads > kThreads ? min_blocks(kWideThreads) * kWideThreads / plan.threads
                               : min_blocks(kThreads) * (kThreads / plan.threads));
  const int64_t steps = ceil_div(problem.rows, int64_t{teams});
  const auto rows_of_block = [&](int64_t team_rows) {
    const int64_t rows = std::max({team_rows, ceil_div(steps, kMaxBlocks), int64_t{1}});
    return teams * static_cast<int>(std::min<int64_t>(rows, kMaxRows / teams));
  };
  const int large =
      rows_of_block(std::min(most, steps / (resident * (problem.gradient ? kTurns : 1))));
  plan.block_shares =
      BlockShares::of(problem.rows, large, problem.gradient ? large : rows_of_block(1),
                      problem.gradient ? 0 : resident * kLateTurns * teams);
  plan.blocks = plan.block_shares.blocks(problem.rows);
  return plan;
}

}  // namespace lossops::cuda::float_rows
