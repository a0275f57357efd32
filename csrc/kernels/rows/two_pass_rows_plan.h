// Rows that are read once for the loss, and once more for the gradient: how they are spread over
// the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/team_rows_plan.h"

namespace lossops::cuda::two_pass_rows {

// Shorter rows have tiles.
constexpr int64_t kLeastBytes = 4097;
// Numbers of a piece's state: an EntropySoftmax.
constexpr int64_t kStateFloats = 4;

inline RowCut cut_of(const CrossEntropyArgs& args) {
  return RowCut::of(args.num_classes, element_size(args.input.dtype));
}

inline bool fits(const RowProblem& problem) {
  return problem.contiguous && problem.indices && problem.bytes >= kLeastBytes &&
         problem.bytes / kRowVectorBytes <= kMostVectors && !team_rows::keeps_three(problem);
}

// Of the kernel that merges states: `team` lanes have the pieces of a row.
inline RowPlan plan(const RowProblem& problem) {
  const RowCut cut = cut_of(problem.args);
  RowPlan plan;
  plan.threads = kRowThreads;
  plan.team = 1;
  while (plan.team < cut.pieces && plan.team < kWarpSize) {
    plan.team *= 2;
  }
  plan.blocks =
      std::clamp<int64_t>(ceil_div(problem.rows * plan.team, kRowThreads), 1, kMaxLoopBlocks);
  plan.state_bytes = problem.rows * cut.pieces * kStateFloats * int64_t{sizeof(float)};
  return plan;
}

}  // namespace lossops::cuda::two_pass_rows
