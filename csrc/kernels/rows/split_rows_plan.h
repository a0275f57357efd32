// Split rows: how rows with a gradient are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda::split_rows {

// Vectors of a piece that a lane has.
constexpr int kVectors = 16;
// Of them, in registers. Measured on an H200: 6 and 8 spill, and 8192x131072 takes 6 and 22 %
// longer.
constexpr int kNear = 4;
constexpr int kFewestPieces = 8;
constexpr int kMaxThreads = 512;
constexpr int kMaxBlockWarps = kMaxThreads / kWarpSize;
constexpr int kMinBlocks = 2;  // of a multiprocessor
constexpr int kResidentWarps = kMinBlocks * kMaxBlockWarps;
// Rows that a block, or a cluster, takes one after the other, unless they are very many. Measured
// on an H200, bf16: of 16384x32768, 1, 2 and 3 rows take 534, 537 and 540 us; of 8192x131072, 3, 4,
// 5 and 8 rows 1064, 1063, 1067 and 1073; of 4096x262144, 3 and 4 rows 1093 and 1087.
constexpr int kBlockRows = 1;
constexpr int kClusterRows = 4;
// A thread of a warp prepares and finishes each, where there are very many.
constexpr int kMaxRows = 16;
constexpr int kMaxSharedBytes = 110 << 10;

// Whether rows with a gradient, fp16 and bf16 with class indices, are whole vectors of pieces that
// fit a warp.
inline bool fits(const RowProblem& problem) {
  if (!problem.hopper_half || !problem.gradient || !problem.indices ||
      !staged_rows::fits(problem) || !problem.whole_vectors || !problem.aligned() ||
      problem.args.grad_input_class_stride != 1) {
    return false;
  }
  const Pieces pieces = staged_rows::pieces_of(problem);
  return pieces.count >= kFewestPieces &&
         pieces.size * problem.element_bytes <= kVectors * kWarpSize * kVectorBytes;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.pieces = staged_rows::pieces_of(problem);
  const int pieces = plan.pieces.count;
  plan.cluster = static_cast<int>(ceil_div(pieces, kMaxBlockWarps));
  while (pieces % plan.cluster != 0) {
    ++plan.cluster;
  }
  const int warps = pieces / plan.cluster;
  plan.threads = warps * kWarpSize;
  const int64_t resident =
      int64_t{problem.device.multiprocessors} * (kResidentWarps / warps) / plan.cluster;
  const int64_t rows =
      std::min<int64_t>(plan.cluster > 1 ? kClusterRows : kBlockRows, problem.rows / resident);
  const int64_t far_bytes = std::max<int64_t>(
      0, plan.pieces.size * problem.element_bytes - kNear * kWarpSize * kVectorBytes);
  const int64_t state_bytes = kStateWords<RowKind::kIndex> * pieces * int64_t{sizeof(uint32_t)};
  const int64_t fit = (kMaxSharedBytes - warps * far_bytes) / state_bytes;
  const int64_t large =
      rows_of_worker(rows, problem.rows * plan.cluster, std::min<int64_t>(fit, kMaxRows));
  plan.shares = RowShares::of(problem.rows, large, resident);
  plan.shared_bytes = warps * far_bytes + int64_t{plan.shares.large} * state_bytes;
  plan.blocks = plan.shares.workers() * plan.cluster;
  return plan;
}

}  // namespace lossops::cuda::split_rows
