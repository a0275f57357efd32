// Staged rows: how rows are cut into pieces, and how they are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/launch_shape.h"
#include "kernels/rows/row_plan.h"

namespace lossops::cuda::staged_rows {

constexpr int kMaxThreads = 512;
constexpr int kMaxBlockWarps = kMaxThreads / kWarpSize;
constexpr int kMaxCluster = 16;
// The blocks of a cluster run on the multiprocessors of one group of the GPU (a GPC): so many, or a
// few more.
constexpr int kGpcMultiprocessors = 16;
// Of a warp's piece of a row. Measured on an H200, step: 4 KB lose 2 % for 50257 classes of bf16
// and nothing for 32768; 10 KB lose 1 to 4 %.
constexpr int kPieceBytes = 8 << 10;
// The same of fp32 in a cluster. Measured on an H200, step of 128256 classes by 6 blocks: .82 of
// the floor with 8 KB, .87 with 10.
constexpr int kFloatClusterPieceBytes = 10 << 10;
// Longer rows are for a cluster. Measured on an H200, step: one block for 98 KB reaches 0.90 of the
// floor, two 0.84.
constexpr int kMaxBlockShare = 104 << 10;
// The most that a block of a cluster has of a row, so that two such blocks fit a multiprocessor.
constexpr int kMaxClusterShare = 100 << 10;
// Such a block has at least so many warps, unless even those of the smallest cluster have fewer.
constexpr int kLeastClusterWarps = 7;
// The most that it has of a row that split_rows takes. Measured on an H200, step: rows of 256 KB
// reach 0.82 of the floor with shares of 64 KB, 0.74 with 43.
constexpr int kSplitShare = 72 << 10;
constexpr int kMaxSplitBytes = kPortableCluster * kSplitShare;
// The longest rows of fp32 and of half types, with probabilities both together.
constexpr int64_t kMaxFloatBytes = int64_t{kMaxCluster} * (96 << 10);
constexpr int64_t kMaxHalfBytes = int64_t{kPortableCluster} * kMaxClusterShare;
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

// Rows with class indices and smoothing are staged from here on. Measured on an H200, forward /
// step, staged and by soft_tiles: bf16 1001 classes .36 / .47, .61 / .68; 2048 .57 / .75, .74 /
// .80; 3333 .59 / .76, .64 / .68; fp32 549 classes .54 / .65, .65 / .71; 1000 .78 / .72, .75 / .78;
// 1500 .79 / .78, .71 / .75. Probabilities are staged from kMinStagedBytes on: bf16 1501 classes
// .61 / .71, .54 / .52.
constexpr int64_t kMinSmoothBytes = 4097;

// Class indices, not with both smoothing and weights; or probabilities of the logits' dtype,
// without weights.
inline bool fits(const RowProblem& problem) {
  const CrossEntropyForwardArgs& args = problem.args;
  const bool supported =
      problem.indices || (args.weight == nullptr &&
                          (!args.target_is_probability || args.target.dtype == args.input.dtype));
  const int64_t least = is_smooth(args) ? kMinSmoothBytes : kMinStagedBytes;
  return problem.hopper && supported && problem.bytes >= least &&
         streams_of(problem) * problem.bytes <=
             (problem.contiguous_half ? kMaxHalfBytes : kMaxFloatBytes);
}

inline int rounded_up(int64_t a, int64_t b) { return static_cast<int>(ceil_div(a, b)); }

// How a row is cut for a cluster of so many blocks.
inline Pieces cut_for(const RowProblem& problem, int cluster) {
  const bool is_float_cluster = cluster > 1 && problem.hopper_fp32;
  // A half type's piece that is not aligned has elements of one more vector.
  const bool odd_halves = problem.hopper_half && !problem.whole_vectors;
  const int64_t piece_bytes =
      is_float_cluster ? kFloatClusterPieceBytes : kPieceBytes - (odd_halves ? kVectorBytes : 0);
  const int warps = std::min(rounded_up(streams_of(problem) * problem.bytes, piece_bytes * cluster),
                             kMaxBlockWarps);
  // An odd number of pieces leaves warps without work in the last turn of a forward pass.
  const bool odd = cluster == 1 && warps > kMaxForwardWarps && warps % 2 != 0;
  const int count = cluster * (warps + (odd ? 1 : 0));
  const auto size_in = [&](int unit_bytes) {
    const int units = rounded_up(problem.bytes, int64_t{count} * unit_bytes);
    return units * unit_bytes / static_cast<int>(problem.element_bytes);
  };
  // Pieces of whole lines, so that no two warps write to one; unless the last piece of many then
  // had no class.
  const int size_in_lines = size_in(kLineBytes);
  const bool is_none_empty = int64_t{count - 1} * size_in_lines < problem.classes;
  return {count, is_float_cluster && is_none_empty ? size_in_lines : size_in(kVectorBytes)};
}

// Shared memory of a piece.
inline int piece_bytes_of(const RowProblem& problem, const Pieces& pieces, bool gradient) {
  const int bytes = pieces.size * static_cast<int>(problem.element_bytes) + kVectorBytes;
  const int lines = rounded_up(bytes + kLineBytes - kVectorBytes, kLineBytes);
  return streams_of(problem) * (gradient ? lines * kLineBytes : bytes);
}

// Shared memory of the states of a row's pieces.
inline int state_bytes_of(const Pieces& pieces) {
  return pieces.count > 1 ? kMaxStateWords * pieces.count * static_cast<int>(sizeof(uint32_t)) : 0;
}

// Shared memory of a block that leaves gradients: its pieces, and the states of two rows.
inline int gradient_bytes_of(const RowProblem& problem, const Pieces& pieces, int cluster) {
  return pieces.count / cluster * piece_bytes_of(problem, pieces, true) +
         2 * state_bytes_of(pieces);
}

// Static shared memory of a block, at most.
inline int static_bytes_of(const RowProblem& problem) {
  return kStaticSharedBytes + (problem.args.target_is_probability ? kProbabilitySharedBytes : 0);
}

// Blocks that share a row with a gradient.
inline int cluster_of(const RowProblem& problem) {
  const int64_t bytes = streams_of(problem) * problem.bytes;
  if (bytes <= kMaxBlockShare) {
    return 1;
  }
  // Rows of half types in whole vectors have the cut that split_rows wants: instead of 5 blocks of
  // 14 warps, 8 of 10, of which three fit a multiprocessor. Measured on an H200, step of 304 KB by
  // split_rows: .88 of the floor, with 5 .85.
  const bool is_cut_for_split_rows =
      problem.hopper_half && !problem.args.target_is_probability && problem.whole_vectors;
  if (is_cut_for_split_rows && bytes <= kMaxSplitBytes) {
    const int cluster = rounded_up(bytes, kSplitShare);
    return cluster == 5 ? 8 : cluster;
  }
  // The smallest possible cluster, or one whose blocks have kLeastClusterWarps: that of which a GPC
  // holds the most rows at a time, and of several that hold as many, the largest. More than 8
  // blocks only where 8 are too few. Measured on an H200, steps of fp32: 128256 classes by 7 blocks
  // of 8 warps, of which a GPC holds 4 rows, .81 of the floor; by 6 of 9, which holds 5, .87; by 8
  // of 7, which holds 6, .89. 100000 classes by 5 blocks of 10, which holds 6, .80; by 6 of 7,
  // which holds 8, .88.
  const int least = rounded_up(bytes, kMaxClusterShare);
  const int most = least > kPortableCluster ? kMaxCluster : kPortableCluster;
  int best = least;
  int64_t best_rows = 0;
  for (int cluster = least; cluster <= most; ++cluster) {
    const Pieces pieces = cut_for(problem, cluster);
    const int warps = pieces.count / cluster;
    const int64_t blocks = problem.device.resident_blocks(
        warps * kWarpSize, gradient_bytes_of(problem, pieces, cluster) + static_bytes_of(problem));
    const int64_t rows = kGpcMultiprocessors * blocks / cluster;
    if (rows >= best_rows && (warps >= kLeastClusterWarps || cluster == least)) {
      best_rows = rows;
      best = cluster;
    }
  }
  return best;
}

// How probability, long, split and staged rows are cut: all alike, for the same bits.
inline Pieces pieces_of(const RowProblem& problem) { return cut_for(problem, cluster_of(problem)); }

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
  plan.piece_bytes = piece_bytes_of(problem, plan.pieces, problem.gradient);
  if (problem.gradient) {
    plan.cluster = cluster_of(problem);
    plan.threads = pieces / plan.cluster * kWarpSize;
    plan.shared_bytes = gradient_bytes_of(problem, plan.pieces, plan.cluster);
  } else {
    // As many for each warp, as far as it goes.
    const int turns = rounded_up(pieces, kMaxForwardWarps);
    plan.threads = rounded_up(pieces, turns) * kWarpSize;
    plan.shared_bytes = plan.threads / kWarpSize * plan.piece_bytes +
                        kStateGroups * row_group(pieces) * state_bytes_of(plan.pieces);
  }
  const int64_t resident =
      problem.device.multiprocessors *
      problem.device.resident_blocks(
          plan.threads, static_cast<int>(plan.shared_bytes) + static_bytes_of(problem)) /
      plan.cluster;
  const int64_t even = ceil_div(problem.rows, resident);
  const int64_t large =
      std::min(even, std::max(most_rows(problem, plan), ceil_div(problem.rows, kMaxWorkers)));
  plan.shares = RowShares::of(problem.rows, large, large < even ? resident : 0);
  plan.blocks = plan.shares.workers() * plan.cluster;
  return plan;
}

}  // namespace lossops::cuda::staged_rows
