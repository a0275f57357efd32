// Few classes: how rows, a thread each, are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::few_classes {

// Measured on an H200, 10 classes, forward: blocks of one warp take 17 % longer, of two some 10 %.
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxClasses = 15;
constexpr int kAnyClasses = 0;  // a kernel's that takes them all
// Resident blocks a multiprocessor, at the least. 8 blocks leave a thread 64 registers, 7 leave 72,
// which kernels take that spill with 64.
constexpr int min_blocks(int classes, bool gradient) {
  return (classes > 12 || classes == kAnyClasses) && gradient ? 7 : 8;
}
// A thread has two rows of a step, one after the other.
constexpr int kThreadRows = 2;
constexpr int kStepRows = kThreadRows * kWarpSize;
static_assert(kIndexPadding % kStepRows == 0, "whole steps of class indices are copied");
constexpr int kBlockRows = kWarps * kStepRows;  // of a step of all warps
// Steps of a warp in shared memory: one that it computes, and one that is on its way. Measured on
// an H200: three or four steps of 32 rows are no faster, nor with 40 warps a multiprocessor; with
// 48 forward takes 8 % longer.
constexpr int kStages = 2;
constexpr int kTargetBytes = kStepRows * static_cast<int>(sizeof(int64_t));  // of a step
// What a warp reads, unless there are few rows or very many. Measured on an H200, 10 classes: half
// of it makes no difference, a quarter, one step, takes 5 % longer forward and 16 % with gradients.
constexpr int kWarpBytes = 12 << 10;
// The last blocks have a step for each warp: together this part of what all blocks that run at a
// time have in front. Measured on an H200, 4 million rows of 10 classes, forward and step: without
// 57.0 and 107.5 us, a quarter 55.0 and 106.4, half 55.8 and 107.2.
constexpr int kPartOfLateBlocks = 4;

LOSSOPS_HOST_DEVICE constexpr int logit_bytes(int classes) {
  return kStepRows * classes * static_cast<int>(sizeof(float));
}
LOSSOPS_HOST_DEVICE constexpr int stage_bytes(int classes) {
  return logit_bytes(classes) + kTargetBytes;
}

// fp32 logits of contiguous classes, class indices without smoothing.
inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kThreads;
  const int step_bytes = stage_bytes(static_cast<int>(problem.classes));
  plan.warp_bytes = kStages * step_bytes;
  plan.shared_bytes = kWarps * plan.warp_bytes;
  // Not of the gradient: what blocks add up decides a bit of a loss.
  const int64_t steps = ceil_div(problem.rows, int64_t{kBlockRows});
  const int64_t resident = int64_t{problem.device.multiprocessors} * min_blocks(2, false);
  const int64_t large = std::max(std::clamp<int64_t>(steps / resident, 1, kWarpBytes / step_bytes),
                                 ceil_div(steps, kMaxWorkers));
  plan.block_shares =
      BlockShares::of(steps, static_cast<int>(large), 1, resident * large / kPartOfLateBlocks);
  plan.blocks = plan.block_shares.blocks(steps);
  return plan;
}

}  // namespace lossops::cuda::few_classes
