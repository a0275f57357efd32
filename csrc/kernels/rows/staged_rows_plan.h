// Staged rows: how rows are cut into pieces, and how they are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::staged_rows {

constexpr int kMaxThreads = 512;
constexpr int kMaxBlockWarps = kMaxThreads / kWarpSize;
constexpr int kMaxCluster = 8;
constexpr int kMaxPieces = 64;
// Of a warp's piece of a row. Measured on an H200, step: 4 KB lose 2 % for 50257 classes of bf16
// and nothing for 32768; 10 KB lose 1 to 4 %.
constexpr int kPieceBytes = 8 << 10;
// Longer rows are for a cluster. Measured on an H200, step: one block for 98 KB reaches 0.90 of the
// floor, two 0.84.
constexpr int kMaxBlockShare = 104 << 10;
// Of a row in a cluster, for each of its blocks: 64 KB of 256 reach 0.82, 43 KB 0.74.
constexpr int kMaxClusterShare = 72 << 10;
// Warps of a block that leaves no gradient.
constexpr int kMaxForwardWarps = 8;
// What a block has of shared memory beside its pieces and their states, at most.
constexpr int kStaticSharedBytes = 2304;
constexpr int kProbabilitySharedBytes = 128;
// Pieces of a block and their states, at most.
constexpr int kMaxSharedBytes = 110 << 10;
// Rows without gradients whose pieces wait to be put together, a power of two: fewer of many
// pieces, whose states would take the place of a block.
constexpr int row_group(int pieces) { return pieces <= 32 ? 4 : 2; }
// Groups whose states are kept, a power of two. The warps meet in the middle of each group, and put
// the group before together there, a row each; then they may go on to the middle of the next.
constexpr int kStateGroups = 4;

// Tensors that are read: logits, and probabilities.
inline int streams_of(const RowProblem& problem) {
  return problem.args.target_is_probability ? 2 : 1;
}

// Rows of half types with class indices and smoothing are staged from here on. Measured on an H200,
// forward / step of bf16, staged and by soft_tiles: 1001 classes .36 / .47, .61 / .68; 1280 .53 /
// .66, .69 / .73; 2048 .57 / .75, .74 / .80; 2504 .61 / .72, .60 / .71; 3333 .59 / .76, .64 / .68.
// Probabilities stay: 1501 classes .61 / .71, .54 / .52.
constexpr int64_t kMinSmoothHalfBytes = 4097;

// Class indices, not with both smoothing and weights; or probabilities of the logits' dtype,
// without weights.
inline bool fits(const RowProblem& problem) {
  const CrossEntropyForwardArgs& args = problem.args;
  const bool supported =
      problem.indices || (args.weight == nullptr &&
                          (!args.target_is_probability || args.target.dtype == args.input.dtype));
  const bool is_smooth_half =
      problem.contiguous_half && args.label_smoothing > 0 && !args.target_is_probability;
  const int64_t least = is_smooth_half ? kMinSmoothHalfBytes : kMinStagedBytes;
  return problem.hopper && supported && problem.bytes >= least &&
         streams_of(problem) * problem.bytes <= int64_t{kMaxClusterShare} * kMaxCluster;
}

inline int rounded_up(int64_t a, int64_t b) { return static_cast<int>(ceil_div(a, b)); }

// Blocks that share a row with a gradient.
inline int cluster_of(const RowProblem& problem) {
  const int64_t bytes = streams_of(problem) * problem.bytes;
  const int cluster = bytes <= kMaxBlockShare ? 1 : rounded_up(bytes, kMaxClusterShare);
  // Fewer clusters of 5 are resident: 304 KB reach 0.74 with 5 and 0.78 with 6. Rows that may be
  // split are for blocks of 10 warps then, three of a multiprocessor: 0.88, with 14 warps 0.85.
  const bool may_split =
      problem.hopper_half && !problem.args.target_is_probability && problem.whole_vectors;
  return cluster == 5 ? (may_split ? 8 : 6) : cluster;
}

// How probability, long, split and staged rows are cut: all alike, for the same bits.
inline Pieces pieces_of(const RowProblem& problem) {
  const int cluster = cluster_of(problem);
  // A half type's piece that is not aligned has elements of one more vector.
  const bool odd_halves = problem.hopper_half && !problem.whole_vectors;
  const int64_t piece_bytes = kPieceBytes - (odd_halves ? kVectorBytes : 0);
  const int warps = std::min(rounded_up(streams_of(problem) * problem.bytes, piece_bytes * cluster),
                             cluster > 1 ? kMaxPieces / cluster : kMaxBlockWarps);
  // An odd number of pieces leaves warps without work in the last turn of a forward pass.
  const bool odd = cluster == 1 && warps > kMaxForwardWarps && warps % 2 != 0;
  const int count = cluster * (warps + (odd ? 1 : 0));
  const int granules = rounded_up(problem.bytes, int64_t{count} * kVectorBytes);
  return {count, granules * kVectorBytes / static_cast<int>(problem.element_bytes)};
}

// Rows of a block, or of a cluster, where there are many. Measured on an H200, steps: 16384x50257
// of bf16 takes 852, 835 and 839 us with 2, 4 and 6, 32768x5003 of fp16 194, 188 and 190 with 2, 4
// and 8, 65536x2003 167 and 173 with 8 and 16, 65536x1003 124 and 122. Clusters of 8192x151937 take
// 1 % longer with 4 and 16 than with 8. Forward gains 2 to 6 % with 2 to 5, but whole rows that
// take several turns lose as much: their blocks have equal shares.
inline int64_t most_rows(const RowProblem& problem, const RowPlan& plan) {
  constexpr int64_t kGradientBytes = 32 << 10;
  constexpr int64_t kForwardBytes = 320 << 10;
  if (problem.gradient) {
    return plan.cluster > 1 ? 8 : std::clamp<int64_t>(kGradientBytes / problem.bytes, 4, 16);
  }
  const bool in_turns = plan.pieces.count * kWarpSize > plan.threads;
  return in_turns && problem.whole_vectors ? int64_t{1} << 40
                                           : std::max<int64_t>(2, kForwardBytes / problem.bytes);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.pieces = pieces_of(problem);
  const int pieces = plan.pieces.count;
  const int stream_bytes =
      plan.pieces.size * static_cast<int>(problem.element_bytes) + kVectorBytes;
  plan.piece_bytes =
      streams_of(problem) *
      (problem.gradient
           ? rounded_up(stream_bytes + kLineBytes - kVectorBytes, kLineBytes) * kLineBytes
           : stream_bytes);
  const int states = pieces > 1 ? kMaxStateWords * pieces * 4 : 0;
  if (problem.gradient) {
    plan.cluster = cluster_of(problem);
    plan.threads = pieces / plan.cluster * kWarpSize;
    plan.shared_bytes = plan.threads / kWarpSize * plan.piece_bytes + 2 * states;
  } else {
    // As many for each warp, as far as it goes.
    const int turns = rounded_up(pieces, kMaxForwardWarps);
    plan.threads = rounded_up(pieces, turns) * kWarpSize;
    plan.shared_bytes =
        plan.threads / kWarpSize * plan.piece_bytes + kStateGroups * row_group(pieces) * states;
  }
  const int static_bytes =
      kStaticSharedBytes + (problem.args.target_is_probability ? kProbabilitySharedBytes : 0);
  const int64_t resident = problem.device.multiprocessors *
                           problem.device.resident_blocks(
                               plan.threads, static_cast<int>(plan.shared_bytes) + static_bytes) /
                           plan.cluster;
  const int64_t even = ceil_div(problem.rows, resident);
  const int64_t large =
      std::min(even, std::max(most_rows(problem, plan), ceil_div(problem.rows, kMaxWorkers)));
  plan.shares = RowShares::of(problem.rows, large, large < even ? resident : 0);
  plan.blocks = plan.shares.workers() * plan.cluster;
  return plan;
}

}  // namespace lossops::cuda::staged_rows
