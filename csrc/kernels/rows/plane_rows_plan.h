// Rows whose classes lie in planes, such as the pixels of an (N, C, H, W) tensor: how they are
// spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda::plane_rows {

// Classes that a thread has in flight, of each of its rows.
constexpr int kChunk = 8;
constexpr int kWarpThreads = 32;
constexpr int kFewestThreads = 128;
constexpr int kMostThreads = 1024;
// What the threads of a multiprocessor have read before they write gradients shall fit the L2
// cache: they read it once more. A choice: half of an H200's 50 MB by 1024 threads each.
constexpr int64_t kThreadBytes = 192;

// Neighbouring rows of a thread: those of a word.
constexpr int64_t rows_of_thread(int64_t element_bytes) { return 4 / element_bytes; }

// Warps that share a row: by its classes alone, as all that decides about bits.
constexpr int warps_of_row(int64_t classes) {
  int warps = 1;
  while (warps * kWarpThreads < kMostThreads && classes * 4 > warps * kThreadBytes) {
    warps *= 2;
  }
  return warps;
}

// Rows of the first dimension.
inline int64_t positions_of(const CrossEntropyArgs& args) {
  return args.rows.ndim == 0 ? 1 : args.rows.sizes[0];
}
inline int64_t groups_of_plane(const CrossEntropyArgs& args) {
  return ceil_div(positions_of(args), rows_of_thread(element_size(args.input.dtype)));
}
inline int64_t groups_of(const CrossEntropyArgs& args) {
  return args.rows.numel == 0 ? 0 : groups_of_plane(args) * (args.rows.numel / positions_of(args));
}

// Decided by the classes, not by the rows: a row's bits shall not depend on the rows beside it.
// More rows than 32 bits count would not fit any GPU's memory.
inline bool lies_in_planes(const CrossEntropyArgs& args) {
  return args.input_class_stride != 1 && args.rows.numel > 0 &&
         groups_of(args) <= kMaxDividend - kMostThreads && args.num_classes <= kMaxDividend / 2;
}

// Whether words hold whole groups of rows of an operand.
inline bool has_words(const CrossEntropyArgs& args, const Operand& operand, int64_t class_stride) {
  const int64_t group = rows_of_thread(element_size(operand.dtype));
  bool whole = reinterpret_cast<uintptr_t>(operand.data) % 4 == 0 && args.rows.ndim > 0 &&
               positions_of(args) % group == 0 && operand.strides[0] == 1 &&
               class_stride % group == 0;
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    whole = whole && operand.strides[dim] % group == 0;
  }
  return whole;
}

// A backward pass of its own.
inline bool takes_gradients(const CrossEntropyBackwardArgs& args) {
  return !args.dense() && !args.acc_double && !args.kept && args.row_stats != nullptr &&
         args.input.dtype != DType::kFloat64 && lies_in_planes(args) &&
         args.grad_input.data != nullptr && args.grad_input.data != args.input.data;
}

inline int threads_of(int64_t classes) {
  return std::max(warps_of_row(classes) * kWarpThreads, kFewestThreads);
}

inline int64_t blocks_of(const CrossEntropyArgs& args, int64_t most) {
  const int64_t groups = threads_of(args.num_classes) / warps_of_row(args.num_classes);
  return std::clamp<int64_t>(ceil_div(groups_of(args), groups), 1, most);
}

inline RowPlan plan(const RowProblem& problem) {
  RowPlan plan;
  plan.threads = threads_of(problem.classes);
  plan.team = warps_of_row(problem.classes) * kWarpThreads;
  plan.blocks = blocks_of(problem.args, kMaxLoopBlocks);
  // The sums of teams, three numbers a row.
  const int64_t rows = plan.threads * rows_of_thread(problem.element_bytes);
  plan.shared_bytes = plan.team > kWarpThreads ? rows * 3 * int64_t{sizeof(float)} : 0;
  return plan;
}

}  // namespace lossops::cuda::plane_rows
