// Rows whose classes are not neighbours, such as the pixels of an (N, C, H, W) tensor: how their
// classes are dealt out, and how plane_rows.cu spreads rows over the device. plane_grid.cuh defines
// plane, group, lane, share and part.
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

// A block has more threads only if it is alone on its multiprocessor.
constexpr int kUsualThreads = 256;
constexpr int kMostThreads = 512;
constexpr int kMostLanes = 128;
// 128 bytes of a class at once: a line of memory. Steps with 16 lanes and with 8: fp32
// 4x600x256x256 .71 and .56 of the floor, 4x500x300x300 .64 and .52, bf16 8x600x256x256 .67 and
// .59, 4x400x512x512 .68 and .59. (H200, 2026-11)
constexpr int kLineLanes = 16;
// 64 bytes of a class at once: two sectors of memory.
constexpr int kLeastLanes = 8;
// Resident threads of a multiprocessor. Half types have four rows a thread, and spill with fewer
// registers: fp16 17x150x340x235 .71 / .57 of the floor, with 768 threads .54 / .51 (H100). Steps
// of fp32: 4x150x512x512 .77, with 512 threads .68. With kLeastLanes fp32 has 512, too:
// 4x900x256x256 .61, with 768 threads .55, 8x1024x128x128 .60 and .57. (H200, 2026-11)
constexpr int resident_threads(int64_t element_bytes, int lanes = kMostLanes) {
  return element_bytes == 4 && lanes > kLeastLanes ? 768 : 512;
}
// Classes of a share at most, unless a block has too few threads for so many shares. bf16
// 4x171x512x512 has 4 shares: .72 / .75 of the floor; 8 shares .57 / .70, 2 shares .60 / .67.
// (H100, 2026-11)
constexpr int kShareClasses = 48;
// Where a block has no room for the logits, plane_words.cu takes the row. Its shares double until
// each has at most twice as many classes, or there are kMostWordShares.
constexpr int kWordShareClasses = 128;
constexpr int kLeastWordShares = 16;
constexpr int kMostWordShares = 64;
// Logits of a block, while it has more than kLineLanes.
constexpr int64_t kBlockBytes = 48 << 10;
// What a block has of static shared memory, at most.
constexpr int kStaticBytes = 1024;
constexpr int kBlockOverhead = kReservedBytes + kStaticBytes;
// While blocks take at most this percentage of a multiprocessor's shared memory, 196 of an H200's
// 228 KB, L1 has 60 KB there or more; if they take more, it has 28. Fractions of the floor through
// L1 and without it: bf16 4x171x512x512, whose blocks take more, .59 / .64 and .63 / .72,
// 4x384x512x512 .62 / .63 and .71 / .74; 8x150x512x512, whose blocks take less, .69 / .75 and .65 /
// .75, 4x340x512x512 .73 / .74 and .68 / .73. fp32 8x150x512x512 .64 / .67 and .71 / .79,
// 8x1024x128x128 .44 and .61 in the step. (H200, 2026-11)
constexpr int kMuchSharedPercent = 86;
// Numbers of a row in shared memory: two class indices, its own and the next row's, and up to 7 of
// its gradient.
constexpr int kRowNumbers = 9;

// What a block may have of dynamic shared memory. device_bytes: of a multiprocessor; 0: not known.
constexpr int64_t most_shared_bytes(int64_t device_bytes) {
  constexpr int64_t kLeast = 64 << 10;  // sm_75 has it
  return std::max(device_bytes, kLeast) - kBlockOverhead;
}

// How the logits of a class are read.
enum class PlaneReads : int8_t {
  kPairs,    // two groups at a time, aligned to 16 bytes
  kGroups,   // a group at a time, aligned to 8 bytes
  kElements  // at any address
};

// How the classes of a row are dealt out to shares. The cut fixes the order of the sum, and so the
// bits of the loss. So it depends on nothing but the number of classes, the dtype and the device. A
// block of plane_rows.cu has a group of rows a lane, and a thread for each of its shares. More than
// 88 classes are left to it only where a share has at most kShareClasses. plane_words.cu sums such
// shares in the same order.
struct Cut {
  int lanes = kMostLanes;  // of a block of plane_rows.cu; a power of two, and so is shares
  int shares = 1;

  Cut(int64_t classes, int64_t element_bytes, int64_t device_shared_bytes)
      : classes_(classes), rows_of_group_(static_cast<int>(group_rows(element_bytes))) {
    // Up to kMaxColumnClasses have one share, as in side_by_side_rows.cu: the bits are the same.
    const bool may_share = classes > side_by_side::kMaxColumnClasses;
    const int64_t most_bytes = most_shared_bytes(device_shared_bytes);
    const int64_t most_of_two = (most_bytes + kBlockOverhead) / 2 - kBlockOverhead;
    const auto own_bytes = [this] { return bytes(PlaneReads::kPairs); };
    // Lanes are halved until two blocks fit a multiprocessor and, of at most kLineLanes, shares are
    // not too long. kLeastLanes always do.
    const auto has_room = [&] {
      return own_bytes() <= most_of_two &&
             (lanes > kLineLanes ? lanes * kGroupBytes * classes <= kBlockBytes
                                 : classes <= int64_t{shares} * kShareClasses);
    };
    deal_out(may_share);
    while (lanes > kLeastLanes && !has_room()) {
      lanes /= 2;
      deal_out(may_share);
    }
    if (may_share && 2 * threads() <= kMostThreads && own_bytes() > most_of_two) {
      // A block that is alone on its multiprocessor has twice the threads.
      shares *= 2;
    }
    fits_ = own_bytes() <= most_bytes;
    if (may_share && !fits_) {
      shares = kLeastWordShares;
      while (shares < kMostWordShares && classes > 2 * kWordShareClasses * shares) {
        shares *= 2;
      }
    }
  }

  int threads() const { return lanes * shares; }
  // The lanes of a segment, which copy neighbouring memory.
  int segment() const { return std::min(lanes, kWarpSize); }
  // The parts of a row. If the logits do not fit a block, each share is a part.
  int parts() const { return fits_ ? std::max(segment() * shares / kWarpSize, 1) : shares; }
  // log2 of the threads that merge the parts of a row: so many that each has at most
  // kPartsOfThread, if the block's threads are enough.
  int merging_bits() const {
    constexpr int kPartsOfThread = 4;
    int bits = 0;
    while (kPartsOfThread << bits < parts() && rows_of_group_ << bits < shares) {
      ++bits;
    }
    return bits;
  }
  // Groups from a share's class to its next one in shared memory.
  int64_t pitch(PlaneReads reads) const {
    // Of 8 lanes, 4 copy one class and 4 the next. The padding puts these in different banks.
    return threads() + (reads == PlaneReads::kPairs && lanes == kLeastLanes ? kLeastLanes : 0);
  }
  // The shared memory of a block.
  int64_t bytes(PlaneReads reads) const {
    return ceil_div(classes_, shares) * pitch(reads) * kGroupBytes +
           lanes * number_bytes() * (kRowNumbers + 2 * (parts() - 1));
  }
  // Whether a block has room for the logits of its rows.
  bool fits() const { return fits_; }

 private:
  int64_t classes_;
  int rows_of_group_;
  bool fits_ = true;  // until bytes() has said so

  // Finds the number of shares for `lanes`.
  void deal_out(bool may_share) {
    shares = 1;
    while (may_share && classes_ > int64_t{shares} * kShareClasses &&
           2 * shares * lanes <= kUsualThreads) {
      shares *= 2;
    }
    shares = std::max(shares, kWarpSize / lanes);
  }

  // The bytes of one number for each row of a group.
  int64_t number_bytes() const { return rows_of_group_ * int64_t{sizeof(float)}; }
};

// Strided classes of rows whose groups and classes have numbers of 31 bits: more would not fit any
// GPU's memory.
inline bool lies_in_planes(const CrossEntropyArgs& args) {
  return args.input_class_stride != 1 && args.rows.numel > 0 &&
         groups_of(args) <= kMaxDividend - kMostLanes && args.num_classes <= kMaxDividend / 2;
}

// Whether plane_rows.cu writes gradients too: not where two blocks would write to the same sector
// of memory. plane_gradients.cu writes those after the loss.
inline bool writes_gradient(const RowProblem& problem) {
  return side_by_side::lies_in_columns(problem.args, problem.args.grad_input,
                                       problem.args.grad_input_class_stride, kSectorBytes);
}

// How the logits get to shared memory, and what blocks there are. Only `cut` decides about bits.
struct Spread {
  Cut cut;
  PlaneReads reads;
  int64_t groups;
  int64_t shared_bytes;  // of a block
  int64_t blocks;
  bool bypasses_l1;  // copies of kPairs do not go through L1

  Spread(const CrossEntropyArgs& args, const DeviceLimits& device)
      : cut(args.num_classes, element_size(args.input.dtype), device.shared_bytes),
        groups(groups_of(args)) {
    const auto lie_in = [&](int64_t bytes) {
      return side_by_side::lies_in_columns(args, args.input, args.input_class_stride, bytes);
    };
    reads = lie_in(2 * kGroupBytes) ? PlaneReads::kPairs
            : lie_in(kGroupBytes)   ? PlaneReads::kGroups
                                    : PlaneReads::kElements;
    shared_bytes = cut.bytes(reads);
    // As many as the device runs at a time. Each takes `lanes` groups after the other.
    const int64_t resident = std::min<int64_t>(
        resident_threads(element_size(args.input.dtype), cut.lanes) / cut.threads(),
        device.resident_blocks(cut.threads(), static_cast<int>(shared_bytes) + kStaticBytes));
    blocks = std::clamp<int64_t>(ceil_div(groups, int64_t{cut.lanes}), 1,
                                 std::max<int64_t>(device.multiprocessors * resident, 1));
    // fp32 always bypasses L1; half types where blocks take more than kMuchSharedPercent.
    const int64_t taken = resident * (shared_bytes + kBlockOverhead);
    bypasses_l1 = element_size(args.input.dtype) == 4 ||
                  taken > device.shared_bytes / 100 * kMuchSharedPercent;
  }

  bool has_one_round() const { return blocks * cut.lanes >= groups; }
};

inline RowPlan plan(const RowProblem& problem) {
  const Spread spread(problem.args, problem.device);
  RowPlan plan;
  plan.threads = spread.cut.threads();
  plan.team = spread.cut.shares;
  plan.blocks = spread.blocks;
  plan.shared_bytes = spread.shared_bytes;
  return plan;
}

}  // namespace lossops::cuda::plane_rows
