// Rows of half types in the registers of a few warps: how they are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::half_rows {

// Logits of a row that a thread holds.
constexpr int kThreadLogits = 32;
// Measured on an H200, steps: of 4096 classes 0.90 of the floor, staged 0.85; of 8192, with the
// warps for it, a kernel much like this one 0.74, staged 0.82.
constexpr int64_t kMaxClasses = 4096;
constexpr int kMaxThreads = kMaxClasses / kThreadLogits;
// Resident blocks a multiprocessor, at the least. 8 blocks leave a thread 64 registers, 7 leave 72,
// which kernels take that spill with 64. Rows that are read by words take a register more for each
// vector, and kernels spill with fewer than 72, or with a gradient 96: 7 and 5 blocks.
constexpr int min_blocks(bool gradient, bool aligned) {
  if (aligned) {
    return gradient ? 7 : 8;
  }
  return gradient ? 5 : 7;
}
// Rows that a block takes one after the other, at most: a thread of a warp prepares and finishes
// each.
constexpr int kMaxRows = kWarpSize;
// A block has rows of so many bytes, and so many of them at most, unless there are few or very
// many. Measured on an H200, 4096 classes: forward, 16 and 128 KB take 2 to 6 % longer; with
// gradients, 8 KB 9 % for 16384 rows, 32 KB 2 to 4 %.
constexpr int64_t kForwardBytes = 64 << 10;
constexpr int64_t kForwardRows = 16;
constexpr int64_t kGradientBytes = 16 << 10;
constexpr int64_t kGradientRows = 4;

// Threads of a block, whole warps.
inline int threads_of(const RowProblem& problem) {
  return static_cast<int>(ceil_div(problem.classes, kWarpSize * kThreadLogits)) * kWarpSize;
}

// Rows that leave more than 5/16 of their threads' room empty are faster by tiles. Measured on an
// H200, bf16, forward / step, fractions of the floor, by this kernel and by tiles: 1152 classes .64
// / .75, .78 / .78; 1408 classes .75 / .80, .77 / .80; 1792 classes .76 / .83, .79 / .80; 2056
// classes .73 / .77, .79 / .80; 2304 classes .76 / .82, .79 / .79. Rows that are not aligned are
// faster by tiles also with 2048 classes (.67 / .71, .76 / .77), but the kernel may depend on a
// row's length alone.
inline bool fits(const RowProblem& problem) {
  return problem.hopper_half && problem.indices && problem.whole_vectors &&
         problem.bytes >= kMinStagedBytes && problem.classes <= kMaxClasses &&
         16 * problem.classes >= 11 * int64_t{threads_of(problem)} * kThreadLogits;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = threads_of(problem);
  plan.team = plan.threads;
  plan.aligned = problem.aligned();
  const int64_t fit = (problem.gradient ? kGradientBytes : kForwardBytes) / problem.bytes;
  const int64_t resident =
      int64_t{problem.device.multiprocessors} * min_blocks(problem.gradient, plan.aligned);
  const int64_t rows =
      std::min({fit, problem.gradient ? kGradientRows : kForwardRows, problem.rows / resident});
  plan.rows = static_cast<int>(rows_of_worker(rows, problem.rows, kMaxRows));
  plan.blocks = ceil_div(problem.rows, int64_t{plan.rows});
  return plan;
}

}  // namespace lossops::cuda::half_rows
