// Long rows of half types without gradients: how they are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/probability_rows_plan.h"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda::long_rows {

constexpr int kMaxThreads = 512;  // 128 registers each
constexpr int kResidentWarps = 16;
// Of a block, unless the rows are too few for the device. Measured on an H200: 131072 classes 0.98
// of the floor with 4 and 8, 0.97 with 2.
constexpr int kFewestWarps = 4;
// Of a block's rows, where there are as many. Measured on an H200, bf16, with 4, 8, 16 and 32:
// 16384x32768 takes 246, 244 and 244 us, with smoothing 8 and more of them 256, 253 and 253;
// 16384x50257 with 8 and 16 372 and 369.
constexpr int64_t kPiecesOfWarp = 16;
// Rows that a block takes one after the other, at most: a thread of a warp prepares and finishes
// each.
constexpr int kMaxRows = kWarpSize;
// What needs no permission, beside static memory.
constexpr int kMaxSharedBytes = 45 << 10;

// Of the pieces that this kernel is for. What a lane has of the least needs no question whether it
// is there.
constexpr int kMinPieceBytes = 6 << 10;
constexpr int kMaxPieceBytes = 8 << 10;

// Whether pieces of rows without a gradient fit the registers of a warp: of fp16 and bf16 in whole
// vectors, or with class indices of any number; or of probabilities as probability rows have them.
inline bool fits(const RowProblem& problem) {
  const CrossEntropyForwardArgs& args = problem.args;
  const bool whole = problem.whole_vectors && rows_are_aligned(args, args.input);
  if (!problem.hopper_half || problem.gradient || !staged_rows::fits(problem) ||
      (args.dense() && !whole)) {
    return false;
  }
  if (args.target_is_probability) {
    return problem.bytes >= probability_rows::kLongBytes && probability_rows::fits(problem);
  }
  const Pieces pieces = staged_rows::pieces_of(problem);
  const int64_t last_piece = problem.classes - int64_t{pieces.count - 1} * pieces.size;
  // A piece that is not aligned has elements of one more vector.
  const int64_t most = kMaxPieceBytes - (whole ? 0 : kVectorBytes);
  return last_piece * problem.element_bytes >= kMinPieceBytes &&
         pieces.size * problem.element_bytes <= most;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.pieces = staged_rows::pieces_of(problem);
  const int64_t resident = int64_t{problem.device.multiprocessors} * kResidentWarps;
  int64_t warps = kFewestWarps;
  while (warps < kMaxThreads / kWarpSize && problem.rows * warps * 2 <= resident) {
    warps *= 2;
  }
  warps = std::min<int64_t>(warps, plan.pieces.count);
  const int64_t rows =
      std::min(ceil_div(kPiecesOfWarp * warps, plan.pieces.count), problem.rows * warps / resident);
  const int64_t state_bytes = int64_t{sizeof(uint32_t)} * kMaxStateWords * plan.pieces.count;
  const int64_t large = rows_of_worker(rows, problem.rows,
                                       std::min<int64_t>(kMaxSharedBytes / state_bytes, kMaxRows));
  plan.threads = static_cast<int>(warps) * kWarpSize;
  plan.shares = RowShares::of(problem.rows, large, resident / warps);
  plan.shared_bytes = plan.shares.large * state_bytes;
  plan.blocks = plan.shares.workers();
  return plan;
}

}  // namespace lossops::cuda::long_rows
