// Rows of half types with probabilities: how they, a block each, are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/staged_rows_plan.h"

namespace lossops::cuda::probability_rows {

// Vectors of a row that a thread has: a warp's piece of the row has 4 KB.
constexpr int kVectors = 8;
// Of these, in registers; the others' logits are in shared memory, as all probabilities are.
// Measured on an H200, step of 8192x32768: 6 spill 28 bytes, and take 16 % longer.
constexpr int kNearVectors = 4;
constexpr int kPieceBytes = kVectors * kWarpSize * kVectorBytes;
constexpr int kNearBytes = kNearVectors * kWarpSize * kVectorBytes;
constexpr int kMaxRowWarps = 16;
constexpr int kMaxThreads = kMaxRowWarps * kWarpSize;
// Rows that a block takes one after the other, at most: a thread of a warp prepares and finishes
// each.
constexpr int kMaxRows = 16;
// Of a row that is cut in so many pieces.
constexpr int state_bytes(int pieces) {
  return kStateWords<RowKind::kProbability> * static_cast<int>(sizeof(uint32_t)) * pieces;
}
constexpr int kMaxSharedBytes =
    kMaxRowWarps * (2 * kPieceBytes - kNearBytes) + kMaxRows * state_bytes(kMaxRowWarps);
// Rows that a block takes one after the other: so many bytes of logits, and so many rows at most.
// Measured on an H200, bf16 8192x32768: with 4 rows the step takes 2 % less than with 2.
constexpr int kLargeBytes = 256 << 10;
constexpr int kLargeRows = 8;
// Blocks, unless there are so many rows that each has kMaxRows.
constexpr int64_t kMaxBlocks = 65536;

// Rows without a gradient from so many bytes on are for long_rows.cu. Measured on an H200: rows of
// 2 KB take 19 % longer there and of 4 KB 4 %, of 8 KB 3 % less, of 16 and 64 KB 7 to 8 %.
constexpr int64_t kLongBytes = 8 << 10;

// Whether logits and probabilities are fp16 or bf16, of contiguous classes in whole vectors that
// lie at addresses of vectors, without class weights, and a block has room for a row.
inline bool fits(const RowProblem& problem) {
  const CrossEntropyForwardArgs& args = problem.args;
  if (!problem.hopper_half || !args.target_is_probability || !staged_rows::fits(problem) ||
      !problem.whole_vectors || args.target_class_stride != 1 ||
      args.grad_input_class_stride != 1 || !problem.aligned() ||
      !rows_are_aligned(args, args.target)) {
    return false;
  }
  const Pieces pieces = staged_rows::pieces_of(problem);
  return pieces.count <= kMaxRowWarps && pieces.size * problem.element_bytes <= kPieceBytes;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.pieces = staged_rows::pieces_of(problem);
  const int pieces = plan.pieces.count;
  plan.threads = pieces * kWarpSize;
  const int bytes = plan.pieces.size * static_cast<int>(problem.element_bytes);
  const int copies = pieces * (bytes + std::max(0, bytes - kNearBytes));
  const int64_t resident =
      problem.device.multiprocessors * problem.device.resident_blocks(plan.threads, copies);
  const int64_t fit = kLargeBytes / problem.bytes;
  const int64_t large =
      rows_of_worker(std::min({fit, int64_t{kLargeRows}, problem.rows / (4 * resident)}),
                     problem.rows, kMaxRows, kMaxBlocks);
  plan.shares = RowShares::of(problem.rows, large, resident);
  plan.shared_bytes = copies + large * state_bytes(pieces);
  plan.blocks = plan.shares.workers();
  return plan;
}

}  // namespace lossops::cuda::probability_rows
