// Strided classes with smoothing or probabilities: how rows are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda::soft_planes {

// A thread has a word of each class.
using side_by_side::rows_of_word;
using side_by_side::words_of;

// Classes that a thread has in registers at a time.
constexpr int kChunk = 8;
// Chunks of a share, or more where there are kMostShares shares. Forward with 6, 12 and 20: bf16
// 8x150x512x512 with smoothing .64, .75 and .76 of the floor, 4x150x512x512 with probabilities .53,
// .59 and .65. (H100, 2026-11)
constexpr int kShareChunks = 20;
constexpr int kMostShares = 16;
constexpr int kMostThreads = 256;
constexpr int kMostLanes = 128;
constexpr int kLeastLanes = 8;
// Resident blocks of kMostThreads. Rows that are not smooth spill twice as much with 4 as with 3:
// probabilities of fp16 11x69x36x42x39 .28 / .21 and .51 / .34. (H100, 2026-11)
constexpr int min_blocks(bool is_smooth) { return is_smooth ? 4 : 3; }
// Strides of classes have 32 bits, in bytes, for addresses of one instruction.
constexpr int64_t kMostStride = 0x7fffffff / 4;
// Numbers of a row in shared memory: of a share's sums, and of all that its gradient needs.
constexpr int kSumNumbers = 5;
constexpr int kRowNumbers = 15;

// log2 of the threads that merge the sums of a row: they leave no lane of a warp without a row.
inline int team_bits(int shares, int64_t element_bytes) {
  int bits = 0;
  while (rows_of_word(element_bytes) << (bits + 1) <= shares) {
    ++bits;
  }
  return bits;
}

// fp32 with probabilities or class weights takes a thread a row. Here few classes were slower
// (8x21x512x512 .72 / .47 to .61 / .55, 11x5x812x822 "none" .53 / .40 to .37 / .24) and only many
// faster (16x1019x2704 .53 / .35 to .69 / .46), for 0.1 MB of the wheel. (H100, 2026-11)
inline bool fits(const RowProblem& problem) {
  const auto& args = problem.args;
  return problem.plain && !problem.indices && problem.classes >= 2 &&
         args.input_class_stride != 1 && !side_by_side::is_smoothed(args) &&
         (is_smooth(args) || problem.element_bytes == 2) &&
         std::max(args.input_class_stride, args.target_class_stride) <= kMostStride &&
         words_of(args) <= kMaxDividend - kMostLanes;
}
inline bool writes_gradient(const RowProblem& problem) {
  return problem.args.grad_input_class_stride <= kMostStride;
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  // Threads that share a row, by its classes alone: they decide about its bits.
  const int64_t chunks = ceil_div(problem.classes, int64_t{kChunk});
  plan.team = 1;
  while (plan.team < kMostShares && chunks > int64_t{plan.team} * kShareChunks) {
    plan.team *= 2;
  }
  const int64_t words = words_of(problem.args);
  int lanes = std::min(kMostThreads / plan.team, kMostLanes);
  while (lanes > kLeastLanes && lanes * plan.team > kWarpSize &&
         ceil_div(words, int64_t{lanes}) < problem.device.multiprocessors) {
    lanes /= 2;
  }
  plan.threads = lanes * plan.team;
  const int rows = rows_of_word(problem.element_bytes);
  plan.shared_bytes =
      int64_t{sizeof(float)} * rows * (plan.threads * kSumNumbers + lanes * kRowNumbers);
  const int64_t resident = min_blocks(is_smooth(problem.args)) * kMostThreads / plan.threads;
  plan.blocks = std::clamp<int64_t>(ceil_div(words, int64_t{lanes}), 1,
                                    resident * std::max(problem.device.multiprocessors, 1));
  return plan;
}

}  // namespace lossops::cuda::soft_planes
