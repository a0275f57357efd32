// Rows that no other kernel takes: a team of threads a row, a row in the registers of a block, or a
// thread a row. For the backward pass too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda {

constexpr int kStridedThreads = 256;
// Threads of a block whose rows share it.
constexpr int kTeamThreads = 256;
// A row of more bytes than this is worth a block of its own. In forward, shorter rows of fp64 take
// a thread each.
constexpr int64_t kWarpRowBytes = 4096;
// Threads of a block with one row: few enough that each has several vectors in flight.
constexpr int kMaxRowThreads = 256;
// Rows of so few classes take a thread each in backward passes, as strided rows do: what a team
// shares costs more than the classes. With more, a team writes the gradient in better order.
constexpr int64_t kFewClassesBackward = 32;

// Vectors of a row for each thread that shares it, unless the row is too long for that. What a warp
// does once for its rows, the reduction and the target, then counts for more of them. With one
// vector a thread, bf16 174333x380 with smoothing reached .09 / .12 of the floor (H200, 2026-11).
constexpr int kVectorsPerThread = 8;
// Threads that share a row, at least: they read 64 bytes of it at once.
constexpr int kLeastTeam = 4;
// Vectors of a row that a thread holds in registers. The same with and without a gradient, for the
// same bits.
constexpr int kRegisterVectors = 8;

// What the row kernels take: contiguous classes, computed in the type of the logits.
inline bool rows_are_contiguous(const CrossEntropyArgs& args, int64_t few_classes) {
  return args.input_class_stride == 1 && args.num_classes <= kMaxRowClasses &&
         args.num_classes > few_classes && args.acc_double == (args.input.dtype == DType::kFloat64);
}

// Threads that share a row: up to a warp, or a block.
inline int team_size(const CrossEntropyArgs& args) {
  const int64_t bytes = args.num_classes * element_size(args.input.dtype);
  const bool in_warp = bytes <= kWarpRowBytes;
  const int most = in_warp ? kWarpSize : kMaxRowThreads;
  int team = in_warp ? kLeastTeam : kWarpSize;
  while (team < most && team * kVectorBytes * kVectorsPerThread < bytes) {
    team *= 2;
  }
  return team;
}

inline int block_size(int team) { return team > kWarpSize ? team : kTeamThreads; }

inline int64_t team_row_blocks(const CrossEntropyArgs& args, int team,
                               int64_t max_blocks = kMaxLoopBlocks) {
  return std::clamp<int64_t>(ceil_div(args.rows.numel, block_size(team) / team), 1, max_blocks);
}

inline int64_t strided_blocks(const CrossEntropyArgs& args, int64_t max_blocks = kMaxLoopBlocks) {
  return std::clamp<int64_t>(ceil_div(args.rows.numel, kStridedThreads), 1, max_blocks);
}

namespace register_rows {

// Whether a block can hold a row in its registers.
inline bool fits(const RowProblem& problem) {
  constexpr int64_t kMost = int64_t{kMaxRowThreads} * kRegisterVectors * kVectorBytes;
  return problem.contiguous_fp32 && problem.indices && problem.bytes <= kMost;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kWarpSize;
  while (int64_t{plan.threads} * kRegisterVectors * kVectorBytes < problem.bytes) {
    plan.threads *= 2;
  }
  plan.team = plan.threads;
  plan.blocks = std::clamp<int64_t>(problem.rows, 1, kMaxLoopBlocks);
  return plan;
}

}  // namespace register_rows

namespace team_rows {

// Of shorter rows, three are too few bytes on their way.
constexpr int64_t kLeastKeptBytes = 32 << 10;

// Whether three rows of whole vectors fit the shared memory of a multiprocessor, where team_rows
// keeps them until their gradients are written. Its steps are then faster than those of
// two_pass_rows, though its forward is not; both take the same rows, for the same bits. Measured on
// an H200 without Hopper's kernels, bf16, forward / step, by team_rows and by two_pass_rows: 12000
// classes .49 / .59, .81 / .60; 16384 .61 / .71, .80 / .60; 32768 .72 / .71, .85 / .62; 40000, of
// which two fit, .70 / .56, .86 / .62; 32767, no whole vectors, .50 / .39, .84 / .61.
inline bool three_rows_fit(const RowProblem& problem) {
  return problem.whole_vectors && problem.bytes >= kLeastKeptBytes &&
         problem.bytes < problem.device.shared_bytes &&
         problem.device.resident_blocks(kMaxRowThreads, static_cast<int>(problem.bytes)) >= 3;
}

// fp32 and half-type rows of fewer bytes have other kernels: tiles of three kinds, register_rows,
// or one of Hopper's.
inline bool fits(const RowProblem& problem) {
  return rows_are_contiguous(problem.args, 0) && problem.bytes > kWarpRowBytes;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.team = team_size(problem.args);
  plan.threads = block_size(plan.team);
  plan.blocks = team_row_blocks(problem.args, plan.team);
  return plan;
}

}  // namespace team_rows

namespace strided_rows {

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kStridedThreads;
  plan.blocks = strided_blocks(problem.args);
  return plan;
}

}  // namespace strided_rows
}  // namespace lossops::cuda
