// Rows side by side: how groups of them, a thread each, are spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::side_by_side {

// More classes are dealt out to several threads, by plane_rows.cu.
constexpr int kMaxColumnClasses = 88;
static_assert(kMaxColumnClasses <= kMaxIndexClasses, "class indices in bytes");

// Whether rows are smooth as these kernels take them. Those that do not lie side by side have the
// same sums in strided_rows.cuh.
LOSSOPS_HOST_DEVICE bool is_smoothed(const CrossEntropyArgs& args) {
  return is_smooth(args) && !args.acc_double && args.num_classes >= 2 &&
         args.num_classes <= kMaxColumnClasses;
}

// Measured on an H200, 21 classes: 64 threads take 1 to 2 % longer.
constexpr int kMaxThreads = 128;
// Resident blocks of a multiprocessor, at the least. Half types spill with 7, and with a gradient
// with 6: steps with 6 and 5, fp16 16x21x512x512 .81 and .85 of the floor, bf16 8x19x769x769 .55
// and .53. (H100, 2026-11) With smoothing they spill with 5: 21 classes are 3 % faster with 5, 80
// classes 7 % with 4. (H200, 2026-11)
constexpr int min_blocks(int64_t element_bytes, bool gradient, bool is_smooth) {
  if (element_bytes == 4) {
    return 7;
  }
  return is_smooth ? 4 : gradient ? 5 : 6;
}
// What a block copies, unless these are too few blocks or too many. Measured on an H200, 21
// classes: half of it takes 1 % longer for fp16, twice as much 2 %.
constexpr int64_t kBlockBytes = 40 << 10;
constexpr int64_t kFewBlocks = 4096;
constexpr int64_t kMaxBlocks = 8192;
// What the threads of a block have in shared memory, at most. More blocks of fewer threads leave
// less of it unused: 8x80x512x512 with 64 threads and with 32, fp32 .75 / .80 and .83 / .84 of the
// floor, bf16 .70 / .69 and .79 / .72. With fewer classes, 32 threads are slower where classes do
// not begin at lines of memory: the step of fp32 8x70x513x513 .67 with 64, .61 with 32. (H200,
// 2026-11)
constexpr int kMaxSharedBytes = 36 << 10;
// Where blocks would take more, a multiprocessor is asked for this percentage of the most shared
// memory that it can have. L1 has the rest; copies of 4 and 8 bytes go through it. Drivers round
// up, to 196 of 228 KB on an H200. 8x60x769x769 with 228, 196 and 164 KB: fp32 .70 / .60, .79 / .67
// and .77 / .66 of the floor, bf16 .60 / .57, .67 / .62 and .65 / .60. (2026-11) GPUs with 164 KB
// or less keep all of it.
constexpr int kSharedPercent = 85;
// What a thread has of a class, of its group of neighbouring rows. Measured on an H200: 16 of fp32
// leave room for half the threads, and the step takes 2 % longer.
constexpr int kGroupBytes = 8;
constexpr int64_t group_rows(int64_t element_bytes) { return kGroupBytes / element_bytes; }
static_assert(kMaxColumnClasses * kWarpSize * kGroupBytes <= kMaxSharedBytes, "a warp's classes");

// Rows of the first dimension: of a plane.
inline int64_t positions_of(const CrossEntropyArgs& args) {
  return args.rows.ndim == 0 ? 1 : args.rows.sizes[0];
}
inline int64_t groups_of_plane(const CrossEntropyArgs& args) {
  return ceil_div(positions_of(args), group_rows(element_size(args.input.dtype)));
}
// The groups of all rows. A thread has one group at a time.
inline int64_t groups_of(const CrossEntropyArgs& args) {
  return args.rows.numel == 0 ? 0 : groups_of_plane(args) * (args.rows.numel / positions_of(args));
}

// A word of a class: a row of fp32, or two neighbouring rows of half types.
constexpr int kWordBytes = 4;
constexpr int rows_of_word(int64_t element_bytes) {
  return kWordBytes / static_cast<int>(element_bytes);
}
inline int64_t words_of_plane(const CrossEntropyArgs& args) {
  return ceil_div(positions_of(args), int64_t{rows_of_word(element_size(args.input.dtype))});
}
inline int64_t words_of(const CrossEntropyArgs& args) {
  return args.rows.numel / positions_of(args) * words_of_plane(args);
}

// Whether rows have one dimension or two, and numbers of 31 bits, also in whole groups.
inline bool has_counted_planes(const CrossEntropyArgs& args) {
  const int64_t rows_of_group = group_rows(element_size(args.input.dtype));
  return args.rows.ndim <= 2 && groups_of(args) <= kMaxDividend / rows_of_group;
}

// Whether rows of logits, or of their gradient, lie side by side, in whole groups of a thread: of
// `bytes` bytes a class.
inline bool lies_in_columns(const CrossEntropyArgs& args, const Operand& operand,
                            int64_t class_stride, int64_t bytes = kGroupBytes) {
  const int64_t group = bytes / element_size(operand.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(operand.data) % static_cast<uint64_t>(bytes) == 0 &&
                 args.rows.ndim >= 1 && args.rows.sizes[0] % group == 0 &&
                 operand.strides[0] == 1 && class_stride % group == 0;
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    aligned = aligned && operand.strides[dim] % group == 0;
  }
  return aligned;
}

// The same in whole words.
inline bool lies_in_words(const CrossEntropyArgs& args, const Operand& operand,
                          int64_t class_stride) {
  return lies_in_columns(args, operand, class_stride, kWordBytes);
}

// The same in groups at any address, of which the last of a plane may share rows with the one
// before it.
inline bool lies_side_by_side(const CrossEntropyArgs& args, const Operand& operand,
                              int64_t class_stride) {
  return lies_in_columns(args, operand, class_stride) ||
         (has_counted_planes(args) && args.rows.ndim >= 1 && operand.strides[0] == 1 &&
          args.rows.sizes[0] >= group_rows(element_size(operand.dtype)));
}

// Whether groups of the logits, and of their gradient if there is one, are aligned.
inline bool are_aligned(const CrossEntropyForwardArgs& args) {
  return lies_in_columns(args, args.input, args.input_class_stride) &&
         (args.grad_input.data == nullptr ||
          lies_in_columns(args, args.grad_input, args.grad_input_class_stride));
}

// Shared memory of a block. Half types that are not aligned have another word for each class of a
// warp: see WarpWords.
inline int64_t bytes_of_block(const CrossEntropyForwardArgs& args, int threads) {
  const bool by_words = element_size(args.input.dtype) == 2 && !are_aligned(args);
  return threads * args.num_classes * kGroupBytes +
         (by_words ? threads / kWarpSize * args.num_classes * kWordBytes : 0);
}

// Whether the blocks for which a multiprocessor has registers would take more than kSharedPercent.
inline bool leaves_memory_to_l1(const CrossEntropyForwardArgs& args, const DeviceLimits& device,
                                int threads) {
  const int blocks = min_blocks(element_size(args.input.dtype), args.grad_input.data != nullptr,
                                args.label_smoothing > 0) *
                     kMaxThreads / threads;
  return blocks * (bytes_of_block(args, threads) + kReservedBytes) >
         device.shared_bytes / 100 * kSharedPercent;
}

// The launch asks for the shared memory that its own arguments need: it may have no gradient where
// the plan has one.
inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = kMaxThreads;
  while (plan.threads * problem.classes * kGroupBytes > kMaxSharedBytes) {
    plan.threads /= 2;
  }
  plan.shared_bytes = bytes_of_block(problem.args, plan.threads);
  const int64_t group_bytes = plan.threads * problem.classes * kGroupBytes;
  const int64_t steps = ceil_div(groups_of(problem.args), plan.threads);
  plan.blocks = std::clamp(ceil_div(steps, ceil_div(kBlockBytes, group_bytes)),
                           std::clamp<int64_t>(steps, 1, kFewBlocks), kMaxBlocks);
  return plan;
}

}  // namespace lossops::cuda::side_by_side
