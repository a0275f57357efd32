// Losses of more than 88 strided classes with class indices: how plane_words.cu spreads rows over
// the device.
//
//   word   what a thread reads of a class: a row of fp32, two neighbouring rows of half types
//   lane   the number of a word in a block
//   team   the threads of a word: each sums some of the parts of its rows
//   turn   classes of a share that a thread sums at a time: of fp32 as many as it has in registers,
//   of
//          half types all
// plane_grid.cuh defines share and part.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/row_plan.h"

namespace lossops::cuda::plane_words {

using side_by_side::rows_of_word;
using side_by_side::words_of;

// As many as plane_rows.cu gives a share, so that most shares of fp32 are one turn.
constexpr int kTurnClasses = plane_rows::kShareClasses;
// A block has more threads only if there are few words: plan().
constexpr int kUsualThreads = 128;
constexpr int kMostThreads = 512;
// Resident threads of a multiprocessor. fp32 has a turn in 48 of a thread's 128 registers. Half
// types have 96, of which 32 are words: those that are summed, and the next ones. With 768 threads
// and half the words 4x116x601x601 took .40 of the floor instead of .36, but 8x1203x160x160 .53
// instead of .63 and 8x8192x4096 .64 instead of .79. (H200, 2026-11)
constexpr int resident_threads(int64_t element_bytes) { return element_bytes == 4 ? 512 : 640; }
constexpr int kMostLanes = 128;
constexpr int kLeastLanes = 8;
// Numbers of a row in shared memory, beside two a part: the logit at its class index, and the
// index.
constexpr int kRowNumbers = 2;
// A block has two sets of these numbers: some threads may already sum the next rows while others
// merge the parts of the last ones.
constexpr int kBuffers = 2;
constexpr int64_t kMostBytes = 46 << 10;
// plane_rows.cu sums half types of at most so many classes as fast or faster, where both can: bf16
// 8x384x256x256 .55 of the floor here, .64 there; 8x768x256x256 .61, .56. (H200, 2026-11)
constexpr int64_t kMostHalfClasses = 512;

inline plane_rows::Cut cut_of(const CrossEntropyArgs& args, const DeviceLimits& device) {
  return {args.num_classes, element_size(args.input.dtype), device.shared_bytes};
}

// From a class of a share to its next one there are 32 bits of bytes at most: WordPlace::after().
inline bool takes(const RowProblem& problem) {
  return problem.plain && problem.indices && problem.args.input_class_stride != 1 &&
         problem.classes > side_by_side::kMaxColumnClasses &&
         words_of(problem.args) <= kMaxDividend - kMostThreads &&
         problem.args.input_class_stride * problem.element_bytes *
                 cut_of(problem.args, problem.device).shares <=
             int64_t{0xffffffff};
}

// Whether plane_rows.cu takes these rows instead. It must be worth it: plane_rows.cu writes the
// gradient too, not in place; or there is none, and the rows are of half types, to
// kMostHalfClasses. Their logits must lie in whole groups, and a block must have room for them. And
// a share must be one turn here, because plane_rows.cu sums it at once: the bits are the same then.
inline bool leaves_to_plane_rows(const RowProblem& problem) {
  const auto& args = problem.args;
  const auto cut = cut_of(args, problem.device);
  const bool is_worth_it =
      problem.gradient
          ? plane_rows::writes_gradient(problem) && args.grad_input.data != args.input.data
          : problem.element_bytes == 2 && problem.classes <= kMostHalfClasses;
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
  const int64_t at_once = multiprocessors * resident_threads(problem.element_bytes);
  const auto bytes = [&](int lanes) {
    return int64_t{sizeof(float)} * kBuffers * lanes * rows * (2 * parts + kRowNumbers);
  };
  const auto lanes_of = [](int team) {
    return std::clamp(kUsualThreads / team, kLeastLanes, kMostLanes);
  };
  // The share of the threads with work, on average over all rounds.
  const auto use_of = [&](int team) {
    const int64_t threads = words * team;
    return static_cast<double>(threads) / static_cast<double>(ceil_div(threads, at_once) * at_once);
  };
  // The smallest team that leaves few threads idle or, if there is none, the fewest.
  constexpr double kEnough = 0.85;
  bool has_room = false;
  for (int team = 1; team <= parts; team *= 2) {
    const int most_threads = words * team <= at_once ? kMostThreads : kUsualThreads;
    if (lanes_of(team) * team > most_threads || (has_room && use_of(plan.team) >= kEnough)) {
      break;
    }
    if (!has_room || use_of(team) > use_of(plan.team)) {
      plan.team = team;
      has_room = bytes(lanes_of(team)) <= kMostBytes;
    }
  }
  int lanes = lanes_of(plan.team);
  // Fewer words a block, where that gives work to more multiprocessors. Whole warps merge parts.
  const auto has_whole_warps = [&](int of_lanes) {
    return of_lanes * plan.team >= 2 * kWarpSize &&
           (cut.merging_bits() == 0 || of_lanes * rows << cut.merging_bits() >= kWarpSize);
  };
  while (lanes > kLeastLanes && has_whole_warps(lanes / 2) &&
         ceil_div(words, int64_t{lanes}) < 2 * multiprocessors) {
    lanes /= 2;
  }
  plan.threads = lanes * plan.team;
  plan.shared_bytes = bytes(lanes);
  plan.blocks = std::clamp<int64_t>(ceil_div(words, int64_t{lanes}), 1, at_once / plan.threads);
  return plan;
}

}  // namespace lossops::cuda::plane_words
