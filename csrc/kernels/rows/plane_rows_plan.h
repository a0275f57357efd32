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

// More threads than these have only blocks that are alone on their multiprocessor.
constexpr int kUsualThreads = 256;
constexpr int kMostThreads = 512;
// Resident threads of a multiprocessor. Half types have four rows a thread, and spill with fewer
// registers: 17x150x340x235 .71 / .57 of the floor, with 768 threads .54 / .51; fp32 8x367x13440
// .43 / .53 with 512, .51 / .60 with 768. (H100, 2026-11)
constexpr int resident_threads(int64_t element_bytes) { return element_bytes == 4 ? 768 : 512; }
constexpr int kMostLanes = 128;
// 64 bytes of a class at once: two sectors of memory.
constexpr int kLeastLanes = 8;
// 256 bytes of a class at once, by a cluster of blocks that have fewer lanes.
constexpr int kClusterLanes = 32;
// Classes of a share at most, unless a block has too few threads for so many shares. bf16
// 4x171x512x512 has 4 shares: .72 / .75 of the floor; 8 shares .57 / .70, 2 shares .60 / .67.
// (H100, 2026-11)
constexpr int kShareClasses = 48;
// Logits of a block, while it has more than kLeastLanes.
constexpr int64_t kBlockBytes = 48 << 10;
// What a block has of static shared memory, at most.
constexpr int kStaticBytes = 1024;
constexpr int kBlockOverhead = 1024 + kStaticBytes;  // the driver reserves 1024
// Groups behind a segment that is not aligned in shared memory: it has a vector more.
constexpr int kSegmentPadding = kVectorBytes / kGroupBytes;
// Segments are copied whole where at most one lane in so many is without work. A choice, not
// measured.
constexpr int kLanesPerIdle = 8;
// Numbers of a row in shared memory: two class indices, and those of its gradient.
constexpr int kRowNumbers = 9;
// Numbers of a sum: its reference, its total, and for fp32 what rounding took.
constexpr int sum_numbers(int64_t element_bytes) { return element_bytes == 4 ? 3 : 2; }

// What a block may have of dynamic shared memory. device_bytes: of a multiprocessor; 0: not known.
constexpr int64_t most_shared_bytes(int64_t device_bytes) {
  constexpr int64_t kLeast = 64 << 10;  // sm_75 has it
  return std::max(device_bytes, kLeast) - kBlockOverhead;
}

// How the logits of a class are read.
enum class PlaneReads : int8_t {
  kPairs,     // two groups at a time, aligned to 16 bytes
  kGroups,    // a group at a time, aligned to 8 bytes
  kSegments,  // half types at any address: plane_segments.cuh; the end of a plane by elements
  kElements   // by elements: fp32 at any address, strided rows, small planes
};

// How a block takes rows: a group of them a lane, whose classes are dealt out to shares, a thread
// each. By the classes, the dtype and the device alone, as all that decides about bits.
struct Cut {
  int lanes = kMostLanes;  // of a block; a power of two, and so is shares
  int shares = 1;
  int range = 0;    // classes that are copied at a time
  int buffers = 1;  // for ranges: one if all classes are one range

  Cut(int64_t classes, int64_t element_bytes, int64_t device_shared_bytes)
      : row_bytes_(group_rows(element_bytes) * int64_t{sizeof(float)}),
        sum_bytes_(row_bytes_ * sum_numbers(element_bytes)) {
    // The order of sums of side_by_side_rows has one share.
    const bool may_share = classes > side_by_side::kMaxColumnClasses;
    const int64_t most = most_shared_bytes(device_shared_bytes);
    // What a lane has at most: its logits, and its rows' numbers and parts, of which there are at
    // most two for each kShareClasses classes.
    const int64_t most_parts = may_share ? 2 * ceil_div(classes, kShareClasses) : 0;
    const int64_t lane_bytes =
        padded(kGroupBytes * (classes + (may_share ? kMostThreads / kLeastLanes : 0))) +
        row_bytes_ * (kRowNumbers + 2 * most_parts);
    while (lanes > kLeastLanes &&
           (lanes * kGroupBytes * classes > kBlockBytes || lanes * lane_bytes > most)) {
      lanes /= 2;
    }
    while (may_share && classes > int64_t{shares} * kShareClasses &&
           2 * shares * lanes <= kUsualThreads) {
      shares *= 2;
    }
    if (lanes * shares < kWarpSize) {
      shares = kWarpSize / lanes;
    }
    range = static_cast<int>(classes);
    const int64_t most_of_two = (most + kBlockOverhead) / 2 - kBlockOverhead;
    if (may_share && 2 * threads() <= kMostThreads && most_bytes() > most_of_two) {
      // A block that is alone on its multiprocessor has twice the threads, if it still fits.
      shares *= 2;
      if (most_bytes() > most) {
        shares /= 2;
      }
    }
    if (shares > 1 && most_bytes() > most) {
      // Ranges that leave room for two blocks.
      buffers = 2;
      const int64_t room = most_of_two - numbers_bytes(most_cluster());
      const int64_t of_share = room / (buffers * pitch(widest()) * kGroupBytes);
      range = static_cast<int>(std::max<int64_t>(of_share, 1) * shares);
    }
  }

  int threads() const { return lanes * shares; }
  // Sums of a row that warps leave.
  int parts() const { return std::max(segment() * shares / kWarpSize, 1); }
  // The lanes of a segment. A block of a cluster has all of its lanes, and of their shares those s
  // with s % cluster == rank.
  int segment(int cluster = 1) const { return std::min(lanes * cluster, kWarpSize); }
  // Groups behind a segment in shared memory.
  static int padding(PlaneReads reads) {
    return reads == PlaneReads::kSegments ? kSegmentPadding : 0;
  }
  // Groups from a share's class to its next one in shared memory.
  int64_t pitch(PlaneReads reads, int cluster = 1) const {
    const int width = segment(cluster);
    // Half of so few lanes copy one class, and half the next: to other banks.
    const int shift = reads == PlaneReads::kPairs && width == kLeastLanes ? kLeastLanes : 0;
    return int64_t{threads()} / width * (width + padding(reads)) + shift;
  }
  // Blocks of a cluster, at most.
  int most_cluster() const { return std::max(kClusterLanes / lanes, 1); }
  // The shared memory of a block.
  int64_t bytes(PlaneReads reads, int cluster = 1) const {
    return stage_bytes(reads, cluster) + numbers_bytes(cluster);
  }

 private:
  int64_t row_bytes_;  // a number of each row of a group
  int64_t sum_bytes_;

  // The shared memory of the logits.
  int64_t stage_bytes(PlaneReads reads, int cluster) const {
    return buffers * ceil_div(range, shares) * pitch(reads, cluster) * kGroupBytes;
  }
  // The shared memory of the rows' numbers and parts, in a cluster also of the sums that threads
  // hand over.
  int64_t numbers_bytes(int cluster) const {
    return lanes * row_bytes_ * (cluster * kRowNumbers + 2 * (parts() - 1)) +
           (cluster > 1 ? threads() * sum_bytes_ : 0);
  }
  // The layout that takes the most shared memory for the logits.
  PlaneReads widest() const {
    return row_bytes_ > kGroupBytes ? PlaneReads::kSegments : PlaneReads::kPairs;
  }
  // The shared memory of a block in any layout and cluster, at most.
  int64_t most_bytes() const { return stage_bytes(widest(), 1) + numbers_bytes(most_cluster()); }
  // So many bytes with the padding that pitch() adds, at most.
  static int64_t padded(int64_t bytes) {
    return bytes * (kLeastLanes + kSegmentPadding) / kLeastLanes;
  }
};

// A plane in whole segments, of which the last has lanes without work.
struct Segments {
  int64_t groups;   // of a plane, and of those lanes
  bool are_usable;  // few lanes are without work, and groups have numbers of 31 bits

  Segments(const CrossEntropyArgs& args, int width) {
    const int64_t with_work = groups_of_plane(args);
    groups = round_up(with_work, width);
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

// Whether the kernel writes gradients too: not where two blocks would write to the same sector of
// memory. plane_gradients.cu writes those after the loss: step of fp16 51x727x2249 by clusters of
// blocks .24 of the floor, after the loss .33; bf16 4x116x601x601 .43 both; fp32 5x883x78643 .48,
// .50; 64x300x9001 .52, .51. (H100, 2026-11)
inline bool writes_gradient(const RowProblem& problem) {
  return side_by_side::lies_in_columns(problem.args, problem.args.grad_input,
                                       problem.args.grad_input_class_stride, kSectorBytes);
}

// How the logits get to shared memory, and what blocks there are. No bits of a row depend on it.
struct Spread {
  Cut cut;
  PlaneReads reads = PlaneReads::kElements;
  int cluster = 1;  // blocks of one
  int64_t groups_of_plane;
  int64_t groups;        // of all planes
  int64_t shared_bytes;  // of a block
  int64_t blocks;

  Spread(const CrossEntropyArgs& args, const DeviceLimits& device)
      : cut(args.num_classes, element_size(args.input.dtype), device.shared_bytes) {
    const auto& input = args.input;
    const auto lie_in = [&](int64_t bytes) {
      return side_by_side::lies_in_columns(args, input, args.input_class_stride, bytes);
    };
    reads = lie_in(2 * kGroupBytes) ? PlaneReads::kPairs
            : lie_in(kGroupBytes)   ? PlaneReads::kGroups
                                    : PlaneReads::kElements;
    const bool may_cluster = device.hopper && device.cluster_multiprocessors > 0 && cut.buffers > 1;
    cluster = may_cluster ? cut.most_cluster() : 1;
    groups_of_plane = plane_rows::groups_of_plane(args);
    if (reads == PlaneReads::kElements && is_half_type(input.dtype) && input.strides[0] == 1) {
      for (int smaller = cluster; smaller > 0; smaller /= 2) {
        const Segments segments(args, cut.segment(smaller));
        if (segments.are_usable) {
          reads = PlaneReads::kSegments;
          cluster = smaller;
          groups_of_plane = segments.groups;
          break;
        }
      }
    }
    groups = args.rows.numel == 0 ? 0 : args.rows.numel / positions_of(args) * groups_of_plane;
    shared_bytes = cut.bytes(reads, cluster);
    // As many as the device runs at a time: each takes rows one after the other, and copies the
    // next while it computes.
    const int64_t resident = std::min<int64_t>(
        resident_threads(element_size(input.dtype)) / cut.threads(),
        device.resident_blocks(cut.threads(), static_cast<int>(shared_bytes) + kStaticBytes));
    const int64_t multiprocessors =
        cluster > 1 ? device.cluster_multiprocessors : device.multiprocessors;
    blocks =
        cluster * std::clamp<int64_t>(ceil_div(groups, lanes()), 1,
                                      std::max<int64_t>(multiprocessors * resident / cluster, 1));
  }

  int lanes() const { return cut.lanes * cluster; }
  bool has_one_turn() const { return blocks / cluster * lanes() >= groups; }
};

inline RowPlan plan(const RowProblem& problem) {
  const auto& args = problem.args;
  const Spread spread(args, problem.device);
  RowPlan plan;
  plan.threads = spread.cut.threads();
  plan.team = spread.cut.shares;
  plan.cluster = spread.cluster;
  plan.blocks = spread.blocks;
  plan.shared_bytes = spread.shared_bytes;
  return plan;
}

}  // namespace lossops::cuda::plane_rows
