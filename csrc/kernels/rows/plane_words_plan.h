// Losses of more than 88 strided classes with class indices: how plane_words.cu spreads rows over
// the device.
//
//   word   what a thread reads of a class: a row of fp32, two neighbouring rows of half types
//   lane   the number of a word in a block. Where a grid shifts (plane_words.cu), a lane may have
//          the same word as the next one
//   team   the threads of a word: each sums some of the parts of its rows
//   turn   the classes of a share that a thread sums at a time: up to 48 of fp32, which it has in
//          registers, and all of half types
//   round  the words of all blocks at a time
// plane_grid.cuh defines share and part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/row_plan.h"

namespace lossops::cuda::plane_words {

using side_by_side::rows_of_word;
using side_by_side::words_of;

// A turn of fp32 has at most so many. A share that plane_rows.cu could take has no more, so it is
// one turn.
constexpr int kTurnClasses = plane_rows::kShareClasses;
// A block has more threads only if there are few words: plan().
constexpr int kUsualThreads = 128;
constexpr int kMostThreads = 512;
// Resident threads of a multiprocessor. Those of fp32 have 128 registers, of which a turn is 48.
// Those of half types have 96, of which 32 are words: the ones that are summed, and the next. With
// 768 threads and half of the words 4x116x601x601 reached .40 of the floor instead of .36 (before
// grids shifted), but 8x1203x160x160 .53 instead of .63, and 8x8192x4096 .64 instead of .79. (H200,
// 2026-11)
constexpr int resident_threads(int64_t element_bytes) { return element_bytes == 4 ? 512 : 640; }
constexpr int kMostLanes = 128;
constexpr int kLeastLanes = 8;
// Numbers of a row in shared memory, beside two a part: the logit at its class index, and the
// index.
constexpr int kRowNumbers = 2;
// A block has two sets of these numbers: some threads may already sum the rows of the next round
// while others still merge the parts of this one.
constexpr int kBuffers = 2;
// The numbers of a block take at most so many. A block has 48 KB of shared memory unless a setting
// gives it more.
constexpr int64_t kMostBytes = 46 << 10;
// plane_rows.cu sums rows of at most so many classes as fast or faster, where both can. Fractions
// of the floor by plane_words and by plane_rows: bf16 8x400x512x512 .62 and .62, 8x700x256x256 .63
// and .68, 8x760x256x256 .65 and .60; fp32 8x150x512x512 .65 and .71, 4x200x512x512 .58 and .63,
// 4x300x512x512 .71 and .70. (H200, 2026-11)
constexpr int64_t most_classes_of_plane_rows(int64_t element_bytes) {
  return element_bytes == 4 ? 256 : 720;
}

inline plane_rows::Cut cut_of(const CrossEntropyArgs& args, const DeviceLimits& device) {
  return {args.num_classes, element_size(args.input.dtype), device.shared_bytes};
}

// Whether a grid shifts: see plane_words.cu. The number of shares is a power of two and at least 2,
// so the classes of a share lie an even number of elements apart, and all begin in the same half of
// a word.
inline bool shifts(const CrossEntropyArgs& args) {
  return element_size(args.input.dtype) == 2 && args.input.strides[0] == 1 &&
         side_by_side::positions_of(args) % 2 != 0;
}

// How many planes lie before the last one in memory. Their last word, of one row, may be read
// whole, as its other half belongs to the tensor, too. None where a stride is 0: planes share
// memory there.
inline uint32_t planes_before_last(const CrossEntropyArgs& args) {
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    if (args.rows.sizes[dim] > 1 && args.input.strides[dim] == 0) {
      return 0;
    }
  }
  return static_cast<uint32_t>(args.rows.numel / side_by_side::positions_of(args) - 1);
}

// Whether plane_words.cu can sum these rows. The last condition is that of WordPlace::after(): the
// bytes from a class of a share to the next are a 32-bit number.
inline bool takes(const RowProblem& problem) {
  return problem.plain && problem.indices && problem.args.input_class_stride != 1 &&
         problem.classes > side_by_side::kMaxColumnClasses &&
         words_of(problem.args) <= kMaxDividend - kMostThreads &&
         problem.args.input_class_stride * problem.element_bytes *
                 cut_of(problem.args, problem.device).shares <=
             int64_t{0xffffffff};
}

// Whether plane_rows.cu takes these rows instead. It does if all of this holds:
//   - It is faster: with a gradient that it can write, and not in place; without one, up to
//     most_classes_of_plane_rows().
//   - The logits lie in whole groups, and fit a block.
//   - A share has at most kTurnClasses: then a turn of fp32 has them all, and bits are the same.
inline bool leaves_to_plane_rows(const RowProblem& problem) {
  const auto& args = problem.args;
  const auto cut = cut_of(args, problem.device);
  const bool is_worth_it =
      problem.gradient
          ? plane_rows::writes_gradient(problem) && args.grad_input.data != args.input.data
          : problem.classes <= most_classes_of_plane_rows(problem.element_bytes);
  return is_worth_it && cut.fits() &&
         ceil_div(problem.classes, int64_t{cut.shares}) <= kTurnClasses &&
         side_by_side::lies_in_columns(args, args.input, args.input_class_stride);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  const auto cut = cut_of(problem.args, problem.device);
  const int parts = cut.parts();
  const int rows = rows_of_word(problem.element_bytes);
  const int64_t words = words_of(problem.args);
  const int64_t multiprocessors = std::max(problem.device.multiprocessors, 1);
  const auto bytes = [&](int lanes) {
    return int64_t{sizeof(float)} * kBuffers * lanes * rows * (2 * parts + kRowNumbers);
  };
  const auto lanes_of = [](int team) {
    return std::clamp(kUsualThreads / team, kLeastLanes, kMostLanes);
  };
  // How many blocks of so many threads the registers have room for.
  const int resident = resident_threads(problem.element_bytes);
  const auto blocks_at_once = [&](int threads) { return multiprocessors * (resident / threads); };
  const bool is_shifting = shifts(problem.args);
  const auto words_of_block = [&](int lanes) {
    return lanes - (is_shifting ? ceil_div(lanes, kWarpSize) : 0);
  };
  const auto threads_at_once = [&](int team) {
    const int threads = lanes_of(team) * team;
    return blocks_at_once(threads) * threads;
  };
  // Threads for all words, including lanes that finish no word.
  const auto threads_of = [&](int team) {
    const int lanes = lanes_of(team);
    return ceil_div(words * lanes, int64_t{words_of_block(lanes)}) * team;
  };
  // The fraction of the threads of all resident blocks that have work, on average over all rounds.
  const auto use_of = [&](int team) {
    const int64_t at_once = threads_at_once(team);
    const int64_t threads = threads_of(team);
    return static_cast<double>(threads) / static_cast<double>(ceil_div(threads, at_once) * at_once);
  };
  // The numbers of all resident blocks must fit.
  const int64_t most_bytes = std::min(
      kMostBytes,
      (plane_rows::most_shared_bytes(problem.device.shared_bytes) + plane_rows::kBlockOverhead) /
              (resident / kUsualThreads) -
          plane_rows::kBlockOverhead);
  // The smallest team whose numbers have room and that keeps enough threads at work; else the one
  // with room that keeps most at work; else the last. More than kUsualThreads only in one round.
  constexpr double kEnough = 0.85;
  bool has_room = false;
  for (int team = 1; team <= parts; team *= 2) {
    const int most_threads =
        threads_of(team) <= threads_at_once(team) ? kMostThreads : kUsualThreads;
    if (lanes_of(team) * team > most_threads || (has_room && use_of(plan.team) >= kEnough)) {
      break;
    }
    if (!has_room || use_of(team) > use_of(plan.team)) {
      plan.team = team;
      has_room = bytes(lanes_of(team)) <= most_bytes;
    }
  }
  int lanes = lanes_of(plan.team);
  // Fewer words a block, where that gives work to more multiprocessors. Blocks keep two warps, and
  // whole warps merge parts: merge_parts() shuffles.
  const auto has_whole_warps = [&](int of_lanes) {
    return of_lanes * plan.team >= 2 * kWarpSize &&
           (cut.merging_bits() == 0 || of_lanes * rows << cut.merging_bits() >= kWarpSize);
  };
  while (lanes > kLeastLanes && has_whole_warps(lanes / 2) &&
         ceil_div(words, int64_t{words_of_block(lanes)}) < 2 * multiprocessors) {
    lanes /= 2;
  }
  plan.threads = lanes * plan.team;
  plan.shared_bytes = bytes(lanes);
  const int64_t with_room =
      multiprocessors *
      problem.device.resident_blocks(
          plan.threads, static_cast<int>(plan.shared_bytes) + plane_rows::kStaticBytes);
  plan.blocks =
      std::clamp<int64_t>(ceil_div(words, int64_t{words_of_block(lanes)}), 1,
                          std::max<int64_t>(std::min(blocks_at_once(plan.threads), with_room), 1));
  return plan;
}

}  // namespace lossops::cuda::plane_words
