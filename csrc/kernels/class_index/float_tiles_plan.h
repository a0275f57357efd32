// Rows of fp32: how tiles of them, a warp each, are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::float_tiles {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
// Resident blocks a multiprocessor, at the least. 6 blocks leave a thread 80 registers, 8 leave 64.
// Measured on an H200: with 8 the step of 100
// classes takes 4 % longer, with 6 forward of 32 classes 6 to 9 %.
constexpr int min_blocks(bool gradient) { return gradient ? 6 : 8; }
// Classes of a lane, at most; more lanes share longer rows.
constexpr int kMaxLaneClasses = 128;
constexpr int kMaxLogTeam = 4;
// Rows of more classes than kMaxShortClasses have at most 8 lanes, so that a tile has at least four
// rows: these are whole vectors for any number of classes. Tiles of two rows may have to be copied
// word by word: 1251 classes are then at .46 / .47 of the floor, by float_rows at .73 / .76 (H200).
constexpr int kMaxShortClasses = 500;
constexpr int kMaxLongLogTeam = 3;
constexpr int kMaxClasses = kMaxLaneClasses << kMaxLongLogTeam;
// The most classes on Hopper, where float_rows.cu takes longer rows. Measured on an H200, forward /
// step, by float_rows and by tiles: 550 classes .73 / .66, .81 / .83; 700 classes .81 / .77, .82 /
// .83; 900 classes .85 / .81, .78 / .82. Without Hopper's kernels, by register rows and by tiles:
// 505 classes .42 / .42, .69 / .72; 900 classes .77 / .62, .72 / .76; 1020 classes .82 / .66, .73 /
// .76.
constexpr int kMaxHopperClasses = 700;
// What a block has of shared memory beside its tiles, at most.
constexpr int kStaticSharedBytes = 1152;
// Of a tile in shared memory. Measured on an H200: of tiles at boundaries of 16 bytes alone, a bulk
// copy asks the L2 cache for twice as much.
constexpr int kTileAlignment = 128;
// Dynamic shared memory of a block, at most.
constexpr int kMaxSharedBytes =
    kWarps * kWarpSize * kMaxLaneClasses * static_cast<int>(sizeof(float));
// How rows are accessed in shared memory: by words, or by vectors of 16 bytes where they are whole
// ones. Lanes whose rows are an odd number of these meet in no bank; of an even number of vectors,
// some lanes take those of a batch in another order.
enum class Units : int8_t { kWords, kVectors, kSwizzledVectors };
LOSSOPS_HOST_DEVICE constexpr int words_of(Units units) {
  return units == Units::kWords ? 1 : kVectorSize<float>;
}

inline Units units_of(int num_classes) {
  if (num_classes % kVectorSize<float> != 0) {
    return Units::kWords;
  }
  return num_classes / kVectorSize<float> % 2 != 0 ? Units::kVectors : Units::kSwizzledVectors;
}

// How often 2 divides a number of vectors; at most 3 times, for the 8 places that a vector may have
// in the banks of shared memory.
inline int twos_in(int vectors) {
  int twos = 0;
  while (twos < 3 && vectors % (2 << twos) == 0) {
    ++twos;
  }
  return twos;
}

// Units of each lane of a team but the last, such that those of lanes which read at the same time
// have all places. units_of_lane() says what that leaves for the last ones.
inline int share_of(int num_classes, Units kind, int log_team) {
  const int units = num_classes / words_of(kind);
  if (log_team == 0) {
    return units;
  }
  const int even = units >> log_team;
  const int twos = kind == Units::kWords ? 0 : twos_in(units);
  const int log_places = kind == Units::kWords ? 5 : 3;
  // A multiple of 8, or an odd multiple of the step.
  const int step = twos == 3 ? 4 : 1 << std::max(twos, log_places - log_team);
  const int share = twos == 3 ? (even + 4) / 8 * 8 : even / (2 * step) * (2 * step) + step;
  // With this share, the last of eight lanes and more could have several times as many units.
  const int last = units - ((1 << log_team) - 1) * share;
  const bool is_too_small = log_team >= 3 && last > share + 2 * step;
  return is_too_small ? share + 2 * step : share;
}

// How many of a row's units lane `member` of a team has. They start at unit `member * share`. A
// lane has `share` units, or what is left of the row. The last lane has all that is left.
LOSSOPS_HOST_DEVICE int units_of_lane(int units, int share, int member, int team) {
  const int left = units - member * share;
  const int most = member + 1 < team && left > share ? share : left;
  return most > 0 ? most : 0;
}

// Bytes of shared memory for a tile, in which 2^log_team lanes share a row.
inline int tile_bytes(int64_t row_bytes, int log_team) {
  const int64_t bytes = (kWarpSize >> log_team) * row_bytes;
  return static_cast<int>(round_up(bytes, kTileAlignment));
}

// Lanes that share a row, as a power of two: as few as leave room for two blocks a multiprocessor.
// It decides the order of the sums, so it depends on the number of classes and the device alone.
inline int log_team_of(const RowProblem& problem) {
  int log_team = 0;
  const auto fits = [&] {
    const int block_bytes = kWarps * tile_bytes(problem.bytes, log_team) + kStaticSharedBytes;
    return problem.classes <= kMaxLaneClasses << log_team &&
           problem.device.resident_blocks(kThreads, block_bytes) >= 2;
  };
  while (log_team < kMaxLogTeam && !fits()) {
    ++log_team;
  }
  return log_team;
}

// Whether tiles take these rows: of fp32 and class indices.
inline bool fits(const RowProblem& problem) {
  return problem.classes <= kMaxShortClasses ||
         (problem.classes <= (problem.device.hopper ? kMaxHopperClasses : kMaxClasses) &&
          log_team_of(problem) <= kMaxLongLogTeam);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  const auto num_classes = static_cast<int>(problem.classes);
  const int log_team = log_team_of(problem);
  plan.threads = kThreads;
  plan.team = 1 << log_team;
  plan.share = share_of(num_classes, units_of(num_classes), log_team);
  const int tile_rows = kWarpSize >> log_team;
  plan.warp_bytes = tile_bytes(problem.bytes, log_team);
  plan.shared_bytes = kWarps * plan.warp_bytes;
  // One tile a warp, unless there are very many. Measured on an H200, steps: with 2 those of 100
  // classes take 3 % longer, those of 32 classes 4 % less.
  const int64_t tiles = ceil_div(problem.rows, int64_t{tile_rows});
  plan.tiles = static_cast<int>(ceil_div(tiles, kMaxWorkers * kWarps));
  plan.blocks = ceil_div(tiles, int64_t{plan.tiles} * kWarps);
  return plan;
}

}  // namespace lossops::cuda::float_tiles
