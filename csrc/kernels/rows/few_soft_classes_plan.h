// Few classes with probabilities, or with smoothing and class weights: how rows are spread over the
// device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda::few_soft_classes {

constexpr int kMostClasses = 8;
// With probabilities and contiguous classes, of fp32. Fractions of the floor, forward / step, H200,
// 2026-12: 5 classes by soft_tiles.cu .43 / .42, by this kernel .48 / .57; 3 classes .39 / .37, .34
// / .40.
constexpr int kFewestContiguousClasses = 5;
constexpr int kThreads = 256;
constexpr int kMinBlocks = 4;  // resident

inline bool fits(const RowProblem& problem) {
  const auto& args = problem.args;
  // Rows with smoothing and no class weights are left out: they have the same bits in every layout
  // (strided_rows.cuh).
  return problem.plain && !problem.indices && !side_by_side::is_smoothed(args) &&
         problem.classes <= kMostClasses &&
         (problem.contiguous ? problem.contiguous_fp32 && args.target_is_probability &&
                                   problem.classes >= kFewestContiguousClasses
                             : problem.classes >= 2) &&
         problem.rows <= kMaxDividend - kThreads &&
         !(args.target_is_probability && args.target.dtype == DType::kFloat64);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.team = 1;
  plan.threads = kThreads;
  plan.blocks =
      std::clamp<int64_t>(ceil_div(problem.rows, int64_t{kThreads}), 1,
                          int64_t{kMinBlocks} * std::max(problem.device.multiprocessors, 1));
  return plan;
}

}  // namespace lossops::cuda::few_soft_classes
