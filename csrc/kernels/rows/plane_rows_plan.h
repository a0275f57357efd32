// Rows whose classes lie in planes, such as the pixels of an (N, C, H, W) tensor: how they are
// spread over the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda::plane_rows {

using side_by_side::group_rows;
using side_by_side::groups_of;
using side_by_side::groups_of_plane;
using side_by_side::kGroupBytes;
using side_by_side::positions_of;

constexpr int kMostThreads = 512;
constexpr int kMostLanes = 128;
// 64 bytes of a class at once: two sectors of memory.
constexpr int kLeastLanes = 8;
// Classes of a share, unless a block has too few threads for so many shares. Measured on an H200,
// 8x150x512x512 of bf16: .52 / .57, with 24 classes .46 / .52, with 128 .44 / .47.
constexpr int kShareClasses = 40;
// Logits of a block, while it has more than kLeastLanes: four fit a multiprocessor. A choice.
constexpr int64_t kBlockBytes = 48 << 10;
// What a block has of static shared memory, at most.
constexpr int kStaticBytes = 2048;
// Numbers of a row in shared memory: a class index, and those of its gradient.
constexpr int kRowNumbers = 8;

// What a block may have of dynamic shared memory. device_bytes: of a multiprocessor; 0: not known.
constexpr int64_t most_shared_bytes(int64_t device_bytes) {
  constexpr int64_t kReserved = 1024;   // of each block, by the driver
  constexpr int64_t kLeast = 64 << 10;  // sm_75 has it
  return std::max(device_bytes, kLeast) - kReserved - kStaticBytes;
}

// How a block takes rows: a group of them a lane, whose classes are dealt out to shares, a thread
// each. By the classes and the device alone, as all that decides about bits.
struct Cut {
  int lanes = kMostLanes;  // a power of two, and so is shares
  int shares = 1;
  int range = 0;      // classes in shared memory at a time: all, if they fit or have one share
  int parts = 1;      // sums of a row that warps leave
  int64_t bytes = 0;  // of shared memory

  Cut() = default;
  Cut(int64_t classes, int64_t element_bytes, int64_t device_shared_bytes) {
    // The order of sums of side_by_side_rows has one share.
    const int most_shares =
        classes <= side_by_side::kMaxColumnClasses ? 1 : kMostThreads / kLeastLanes;
    while (shares < most_shares && classes > int64_t{shares} * kShareClasses) {
      shares *= 2;
    }
    int64_t numbers = 0;
    int64_t most = 0;  // of logits
    for (;; lanes /= 2) {
      parts = lanes < kWarpSize ? std::max(lanes * shares / kWarpSize, 1) : shares;
      const int64_t rows = lanes * group_rows(element_bytes);
      numbers = rows * (kRowNumbers + 2 * (parts - 1)) * int64_t{sizeof(float)};
      most = most_shared_bytes(device_shared_bytes) - numbers;
      if (lanes == kLeastLanes || (lanes * shares <= kMostThreads &&
                                   lanes * kGroupBytes * classes <= std::min(kBlockBytes, most))) {
        break;
      }
    }
    const auto classes_in = [&](int64_t of_bytes) {
      return std::max<int64_t>(of_bytes / (lanes * kGroupBytes) / shares * shares, shares);
    };
    int64_t of_range = classes;
    if (classes > classes_in(most)) {
      const int64_t ranges = ceil_div(classes, classes_in(most / 2));
      of_range = ceil_div(ceil_div(classes, ranges), shares) * shares;
    }
    range = static_cast<int>(of_range);
    bytes = logit_bytes() + numbers;
  }

  int threads() const { return lanes * shares; }
  // Each thread has as many places as the first.
  int64_t logit_bytes() const { return ceil_div(range, shares) * threads() * int64_t{kGroupBytes}; }
};

// Decided by the classes, not by the rows: a row's bits shall not depend on the rows beside it.
// More rows than 32 bits count would not fit any GPU's memory.
inline bool lies_in_planes(const CrossEntropyArgs& args) {
  return args.input_class_stride != 1 && args.rows.numel > 0 &&
         groups_of(args) <= kMaxDividend - kMostLanes && args.num_classes <= kMaxDividend / 2;
}

// A backward pass of its own.
inline bool takes_gradients(const CrossEntropyBackwardArgs& args) {
  return !args.dense() && !args.acc_double && !args.kept && args.row_stats != nullptr &&
         args.input.dtype != DType::kFloat64 && lies_in_planes(args) &&
         args.grad_input.data != nullptr && args.grad_input.data != args.input.data;
}

inline int64_t blocks_of(const CrossEntropyArgs& args, const Cut& cut, int64_t most) {
  return std::clamp<int64_t>(ceil_div(groups_of(args), cut.lanes), 1, most);
}

inline RowPlan plan(const RowProblem& problem) {
  const Cut cut(problem.classes, problem.element_bytes, problem.device.shared_bytes);
  RowPlan plan;
  plan.threads = cut.threads();
  plan.team = cut.shares;
  plan.blocks = blocks_of(problem.args, cut, kMaxLoopBlocks);
  plan.shared_bytes = cut.bytes;
  return plan;
}

}  // namespace lossops::cuda::plane_rows
