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

constexpr int kMostThreads = 256;
// Resident threads of a multiprocessor. Half types have four rows a thread, and spill with fewer
// registers: 17x150x340x235 .71 / .57 of the floor, with 768 threads .54 / .51; fp32 8x367x13440
// .43 / .53 with 512, .51 / .60 with 768. (H100, 2026-11)
constexpr int resident_threads(int64_t element_bytes) { return element_bytes == 4 ? 768 : 512; }
constexpr int kMostLanes = 128;
// 64 bytes of a class at once: two sectors of memory.
constexpr int kLeastLanes = 8;
// Classes of a share, unless a block has too few threads for so many shares.
constexpr int kShareClasses = 40;
// Logits of a block, while it has more than kLeastLanes.
constexpr int64_t kBlockBytes = 48 << 10;
// What a block has of static shared memory, at most.
constexpr int kStaticBytes = 1024;
// Groups behind a segment in shared memory: one that is not aligned has a vector more.
constexpr int kSegmentPadding = kVectorBytes / kGroupBytes;
// Segments are copied whole where at most one lane in so many is without work. A choice, not
// measured.
constexpr int kLanesPerIdle = 8;
// Numbers of a row in shared memory: two class indices, and those of its gradient.
constexpr int kRowNumbers = 9;

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
  int parts = 1;      // sums of a row that warps leave
  int range = 0;      // classes that are copied at a time
  int buffers = 1;    // for ranges: one if all classes are one range
  int64_t bytes = 0;  // of shared memory

  Cut() = default;
  Cut(int64_t classes, int64_t element_bytes, int64_t device_shared_bytes) {
    // The order of sums of side_by_side_rows has one share.
    const bool may_share = classes > side_by_side::kMaxColumnClasses;
    const int64_t most = most_shared_bytes(device_shared_bytes);
    // lane_bytes are what a lane has at most: its logits, and its rows' numbers and parts, of which
    // there is about one for each kShareClasses classes.
    const int64_t row_bytes = group_rows(element_bytes) * int64_t{sizeof(float)};
    const int64_t most_parts = may_share ? 2 * ceil_div(classes, kShareClasses) : 0;
    const int64_t lane_bytes =
        padded(kGroupBytes * (classes + (may_share ? kMostThreads / kLeastLanes : 0))) +
        row_bytes * (kRowNumbers + 2 * most_parts);
    while (lanes > kLeastLanes &&
           (lanes * kGroupBytes * classes > kBlockBytes || lanes * lane_bytes > most)) {
      lanes /= 2;
    }
    while (may_share && classes > int64_t{shares} * kShareClasses &&
           2 * shares * lanes <= kMostThreads) {
      shares *= 2;
    }
    if (lanes * shares < kWarpSize) {
      shares = kWarpSize / lanes;
    }
    parts = std::max(std::min(lanes, kWarpSize) * shares / kWarpSize, 1);
    const int64_t numbers = lanes * row_bytes * (kRowNumbers + 2 * (parts - 1));
    const int64_t room = most - numbers;
    const auto bytes_of = [&](int64_t of_range) {
      return ceil_div(of_range, shares) * pitch() * kGroupBytes;
    };
    range = static_cast<int>(classes);
    if (shares > 1 && bytes_of(classes) > room) {
      // For two blocks a multiprocessor.
      buffers = 2;
      const int64_t of_share = room / (2 * buffers) / (pitch() * kGroupBytes);
      range = static_cast<int>(std::max<int64_t>(of_share, 1) * shares);
    }
    bytes = buffers * bytes_of(range) + numbers;
  }

  int threads() const { return lanes * shares; }
  int segment() const { return std::min(lanes, kWarpSize); }
  // Groups from a share's class to its next one in shared memory.
  int64_t pitch() const { return int64_t{threads()} / segment() * (segment() + kSegmentPadding); }

 private:
  // The largest that pitch() makes of so many bytes.
  static int64_t padded(int64_t bytes) {
    return bytes * (kLeastLanes + kSegmentPadding) / kLeastLanes;
  }
};

// A plane in whole segments, of which the last has lanes without work.
struct Segments {
  int64_t groups;   // of a plane, and of those lanes
  bool are_usable;  // few lanes are without work, and groups have numbers of 31 bits

  Segments(const CrossEntropyArgs& args, const Cut& cut) {
    const int64_t with_work = groups_of_plane(args);
    groups = ceil_div(with_work, cut.segment()) * cut.segment();
    are_usable = args.rows.ndim > 0 && groups - with_work <= with_work / kLanesPerIdle &&
                 args.rows.numel / positions_of(args) * groups <= kMaxDividend - kMostLanes;
  }
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

// As many as the device runs at a time: each takes rows one after the other, and copies the next
// while it computes.
inline int64_t blocks_of(const CrossEntropyArgs& args, const Cut& cut, const DeviceLimits& device) {
  const int block_bytes = static_cast<int>(cut.bytes) + kStaticBytes;
  const int64_t resident =
      std::min<int64_t>(resident_threads(element_size(args.input.dtype)) / cut.threads(),
                        device.resident_blocks(cut.threads(), block_bytes));
  return std::clamp<int64_t>(ceil_div(groups_of(args), cut.lanes), 1,
                             std::max<int64_t>(device.multiprocessors * resident, 1));
}

inline RowPlan plan(const RowProblem& problem) {
  const Cut cut(problem.classes, problem.element_bytes, problem.device.shared_bytes);
  RowPlan plan;
  plan.threads = cut.threads();
  plan.team = cut.shares;
  plan.blocks = blocks_of(problem.args, cut, problem.device);
  plan.shared_bytes = cut.bytes;
  return plan;
}

}  // namespace lossops::cuda::plane_rows
