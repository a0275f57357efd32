// Short rows with smoothing or probabilities: how tiles, a warp each, are spread over the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/tile_layout.h"

namespace lossops::cuda::soft_tiles {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
// Resident blocks a multiprocessor, at the least. 6 leave a thread 80 registers, and 7 leave 72.
constexpr int min_blocks(bool is_smooth) { return is_smooth ? 7 : 6; }
// Bytes of a row of logits, at most: with probabilities, and with class indices.
constexpr int64_t kMaxRowBytes = 4096;
constexpr int64_t kMaxIndexRowBytes = 8192;
// What a block has of shared memory beside its tiles and the class weights, at most.
constexpr int kStaticSharedBytes = 1152;
// Bytes of a tile, probabilities included, about. A choice, not measured.
constexpr int kTileBytes = 4096;
// A warp has at most so many bytes of rows in hand at a time, gaps not counted. Longer rows have
// larger teams, up to a whole warp.
constexpr int kMostTeamBytes = 8192;
// Dynamic shared memory of a block, at most. Each warp has 12 KB of rows (a half-type row of 4 KB
// with 8 KB of fp32 probabilities, or 8 KB of shorter rows with gaps of half their size) and 1 KB
// for padding and granules in part; the block has fp32 weights of 2048 classes. Rows without
// probabilities take less: 8 KB a warp, with weights of 4096 classes.
constexpr int kMaxSharedBytes =
    kWarps * (3 * static_cast<int>(kMaxRowBytes) + 1024) + 2 * static_cast<int>(kMaxRowBytes);
static_assert(kWarps * (static_cast<int>(kMaxIndexRowBytes) + 1024) +
                  2 * static_cast<int>(kMaxIndexRowBytes) <=
              kMaxSharedBytes);
// Rows with gaps between them, and at least so many bytes, have their gradients written row by row
// in vectors of 16 bytes. Then half of a warp's lanes have a vector.
constexpr int kMinVectorRowBytes = 256;
// Rows that a team takes one after the other, at most.
constexpr int kMostSteps = 16;
// Each warp has at least so many tiles. A choice, not measured.
constexpr int64_t kTilesPerWarp = 2;

// Bytes of a probability in a tile. Those of another dtype than the logits' are fp32 there.
inline int probability_bytes(const CrossEntropyArgs& args) {
  return !args.target_is_probability             ? 0
         : args.target.dtype == args.input.dtype ? static_cast<int>(element_size(args.input.dtype))
                                                 : static_cast<int>(sizeof(float));
}

inline TileLayout logit_layout(const CrossEntropyArgs& args, int team) {
  return {args, args.input, 1, static_cast<int>(element_size(args.input.dtype)), team};
}
inline TileLayout probability_layout(const CrossEntropyArgs& args, int team) {
  return {args, args.target, args.target_class_stride, probability_bytes(args), team};
}

// Lanes that share a row. They decide the order of the sums, so they depend on the row alone, not
// on its layout.
inline int team_of(const RowProblem& problem) {
  const auto bytes = static_cast<int>(problem.bytes);
  const int all_bytes = bytes + static_cast<int>(problem.classes) * probability_bytes(problem.args);
  int best = kWarpSize;
  double least = HUGE_VAL;
  for (int team = 1; team <= kWarpSize; team *= 2) {
    if (kWarpSize / team * all_bytes > kMostTeamBytes && team < kWarpSize) {
      continue;
    }
    // 45 and 350 were counted roughly, not fitted.
    const double cost = team_cost(bytes, team, 45, 350);
    if (cost < least) {
      least = cost;
      best = team;
    }
  }
  return best;
}

inline bool fits(const RowProblem& problem) {
  return problem.contiguous && !problem.indices && problem.classes >= 2 &&
         problem.bytes <= (problem.args.target_is_probability ? kMaxRowBytes : kMaxIndexRowBytes);
}

inline RowPlan plan(const RowProblem& problem) {
  const CrossEntropyArgs& args = problem.args;
  RowPlan plan;
  plan.threads = kThreads;
  plan.team = team_of(problem);
  const TileLayout logits = logit_layout(args, plan.team);
  const TileLayout probabilities =
      args.target_is_probability ? probability_layout(args, plan.team) : TileLayout();
  const auto element_bytes = static_cast<int>(problem.element_bytes);
  const auto bytes_of = [&](int rows) {
    return logits.bytes(rows, problem.classes, element_bytes) +
           (args.target_is_probability
                ? probabilities.bytes(rows, problem.classes, probability_bytes(args))
                : 0);
  };
  const int team_rows = kWarpSize / plan.team;
  plan.steps = std::clamp(kTileBytes / bytes_of(team_rows), 1, kMostSteps);
  const int tile_rows = plan.steps * team_rows;
  plan.by_words = !logits.in_run;
  plan.padding = logits.padding;
  plan.warp_bytes = bytes_of(tile_rows);
  const int weight_bytes =
      args.weight == nullptr ? 0 : (static_cast<int>(args.num_classes) + 3) / 4 * kVectorBytes;
  plan.shared_bytes = kWarps * plan.warp_bytes + weight_bytes;
  const int64_t tiles = ceil_div(problem.rows, int64_t{tile_rows});
  plan.blocks =
      blocks_of_tiles(tiles, problem.device, kThreads,
                      static_cast<int>(plan.shared_bytes) + kStaticSharedBytes, kTilesPerWarp);
  return plan;
}

}  // namespace lossops::cuda::soft_tiles
