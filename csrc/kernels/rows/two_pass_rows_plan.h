// Rows that are read once for the loss, and once more for the gradient: how they are spread over
// the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/team_rows_plan.h"

namespace lossops::cuda::two_pass_rows {

// Floats of a piece's state, an EntropySoftmax<float>.
constexpr int64_t kStateFloats = 4;

inline RowCut cut_of(const CrossEntropyArgs& args) {
  return RowCut::of(args.num_classes, element_size(args.input.dtype));
}

// Class indices without smoothing, of rows longer than tiles have; not where team_rows is faster.
inline bool fits(const RowProblem& problem) {
  return problem.contiguous && problem.indices && problem.bytes > kWarpRowBytes &&
         !team_rows::three_rows_fit(problem);
}

// The plan of the kernel that merges states: `team` lanes share the pieces of a row.
inline RowPlan plan(const RowProblem& problem) {
  const RowCut cut = cut_of(problem.args);
  RowPlan plan;
  plan.threads = kRowThreads;
  plan.team = lanes_for(cut.pieces);
  plan.blocks =
      std::clamp<int64_t>(ceil_div(problem.rows * plan.team, kRowThreads), 1, kMaxLoopBlocks);
  plan.state_bytes = problem.rows * cut.pieces * kStateFloats * int64_t{sizeof(float)};
  return plan;
}

}  // namespace lossops::cuda::two_pass_rows
