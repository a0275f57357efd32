// The gradient of an operand that is broadcast. Each of its elements is a sum over the elements of
// the space that read it, its walk. From 1 to 256 threads of a block, called lanes, share a sum.
// Long or few sums are split: several blocks add up a part each, and a second kernel folds the
// parts in a fixed order. Of short and many sums, a block takes several groups in turn.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/elements/single_values.cuh"
#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

// The distance that `number` gaps make. number: of an element of a walk, or what is left of it, so
// it has 31 bits.
LOSSOPS_HOST_DEVICE int64_t times(uint32_t number, int32_t gap) {
  return static_cast<int64_t>(static_cast<int32_t>(number)) * gap;
}

// Where element n of a walk lies follows from n by one multiplication a dimension:
//
//   n stride_0 + (n / size_0) gap_1 + (n / size_0 / size_1) gap_2 + ...
//   gap_d = stride_d - size_(d-1) stride_(d-1)
struct SumOperand : PlanOperand {
  int32_t gaps[kPlanDims] = {};  // in bytes; [0] is stride 0

  // Sets the gap of a dimension. Returns whether it fits.
  bool set_gap(const Extents& extents, int dim) {
    const int64_t gap = strides[dim] - (dim > 0 ? extents.sizes[dim - 1] * strides[dim - 1] : 0);
    gaps[dim] = static_cast<int32_t>(gap);
    return -kMaxDividend <= gap && gap <= kMaxDividend;
  }
};

// Adds the gaps of dimensions from 2 on to offsets. rest: the rows of the chunk that the elements
// lie in; overwritten.
template <int kSteps>
LOSSOPS_HOST_DEVICE void add_further_gaps(const Extents& extents, int ndim, const int32_t* gaps,
                                          uint32_t (&rest)[kSteps], int64_t (&offsets)[kSteps]) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int dim = 1; dim + 1 < ndim; ++dim) {
    const Divisor divisor = extents.divisors[dim];
    const int32_t gap = gaps[dim + 1];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int step = 0; step < kSteps; ++step) {
      rest[step] = divisor.quotient(rest[step]);
      offsets[step] += times(rest[step], gap);
    }
  }
}

struct SumPlan {
  // The walked dimensions, which are summed over, come first; those that number the sums follow.
  Extents extents;
  int32_t num_walked = 0;
  bool has_gaps = false;  // numbers of a walk have 31 bits, and gaps 32
  SumOperand operands[kNumOperands];
  int64_t walk = 1;  // elements of a sum
  int64_t sums = 1;
  int32_t block_sums = 1;  // sums of a block
  int32_t lanes = 1;       // threads of a block that share a sum
  // Neighbouring threads take neighbouring elements of a sum; else neighbouring sums.
  bool walks_lead = false;
  int64_t splits = 1;  // parts of a sum, of which a block adds up one
  int64_t split_walk = 1;

  int64_t shares = 1;  // what a block does at a time: a part of some sums

  int64_t blocks() const { return std::min(shares, kMaxBlocks); }
  // More than any GPU holds at once. A choice, not measured.
  static constexpr int64_t kMaxBlocks = 4096;
};

// Makes a SumPlan for a gradient whose strides are 0 along the dimensions that are summed over.
class SumPlanner {
 public:
  // Dimensions [0, num_kept) of the space number the sums. steps: elements that a thread reads at
  // once.
  SumPlanner(const IterationSpace& space, const Operand* operands, int num_kept, int steps)
      : space_(space), operands_(operands) {
    const int64_t walked_bytes = add(num_kept, space.ndim);
    plan_.num_walked = plan_.extents.ndim;
    const int64_t kept_bytes = add(0, num_kept);
    plan_.walks_lead = walked_bytes >= kept_bytes;
    for (int dim = 0; dim < plan_.extents.ndim; ++dim) {
      (dim < plan_.num_walked ? plan_.walk : plan_.sums) *= plan_.extents.sizes[dim];
    }
    share(steps);
    Extents& extents = plan_.extents;
    bool has_gaps = plan_.walk + int64_t{kTileThreads} * steps <= kMaxDividend;
    for (SumOperand& own : plan_.operands) {
      for (int dim = 0; dim < plan_.num_walked; ++dim) {
        has_gaps = own.set_gap(extents, dim) && has_gaps;
      }
    }
    extents.set_divisors();
    plan_.has_gaps = has_gaps;
  }

  const SumPlan& plan() const { return plan_; }

 private:
  // Adds dimensions [first, last), the one along which most bytes are neighbours first. Returns how
  // many bytes these are.
  int64_t add(int first, int last) {
    int lead = first;
    int64_t most = 0;
    for (int dim = first; dim < last; ++dim) {
      int64_t bytes = 0;
      for (int which = kInput; which <= kGradOutput; ++which) {
        const Operand& operand = operands_[which];
        bytes +=
            operand.data != nullptr && operand.strides[dim] == 1 ? element_size(operand.dtype) : 0;
      }
      if (bytes > most && space_.sizes[dim] > 1) {
        most = bytes;
        lead = dim;
      }
    }
    for (int n = first; n < last; ++n) {
      const int dim = n == first ? lead : n <= lead ? n - 1 : n;
      for (int which = 0; which < kNumOperands; ++which) {
        const Operand& operand = operands_[which];
        if (operand.data == nullptr) {
          continue;
        }
        SumOperand& own = plan_.operands[which];
        own.data = static_cast<char*>(operand.data);
        own.dtype = operand.dtype;
        own.bytes = static_cast<int32_t>(element_size(operand.dtype));
        own.strides[plan_.extents.ndim] = operand.strides[dim] * own.bytes;
      }
      plan_.extents.add(space_.sizes[dim]);
    }
    return most;
  }

  void share(int steps) {
    // Where as many blocks are left, a sum gets a warp at the most, or one thread: no barrier.
    // Measured on an H200: a step of MSE of fp16, 601044x571, 2.19 instead of 5.65 ms. The number
    // is a choice.
    constexpr int64_t kManyBlocks = 1024;
    constexpr int kWarps = kTileThreads / kWarpSize;
    if (plan_.walks_lead) {
      const int most = plan_.sums >= kWarps * kManyBlocks ? kWarpSize : kTileThreads;
      while (plan_.lanes < most && int64_t{plan_.lanes} * steps < plan_.walk) {
        plan_.lanes *= 2;
      }
      plan_.block_sums = kTileThreads / plan_.lanes;
    } else {
      // At most 64 sums a block, of half types 128 bytes, a cache line; 256 where kManyBlocks are
      // left. All blocks but the last have equally many. A choice, not measured.
      const int64_t most = plan_.sums >= kTileThreads * kManyBlocks ? kTileThreads : 64;
      const int64_t groups = std::max<int64_t>(ceil_div(plan_.sums, most), 1);
      plan_.block_sums = static_cast<int32_t>(std::max<int64_t>(ceil_div(plan_.sums, groups), 1));
      plan_.lanes = kTileThreads / plan_.block_sums;
    }
    // Sums are split until every block has a share, or until a thread has only so many tiles to
    // read. A choice, not measured.
    constexpr int64_t kFewestReads = 4;
    const int64_t groups = ceil_div(plan_.sums, plan_.block_sums);
    const int64_t at_once = int64_t{plan_.lanes} * steps;
    const int64_t most = std::max<int64_t>(plan_.walk / (at_once * kFewestReads), 1);
    const int64_t splits =
        std::clamp<int64_t>(SumPlan::kMaxBlocks / std::max<int64_t>(groups, 1), 1, most);
    plan_.split_walk = ceil_div(std::max<int64_t>(plan_.walk, 1), splits);
    plan_.splits = ceil_div(std::max<int64_t>(plan_.walk, 1), plan_.split_walk);
    plan_.shares = groups * plan_.splits;
  }

  const IterationSpace& space_;
  const Operand* const operands_;
  SumPlan plan_;
};

// A thread's elements of its sum, with the members that process.cuh asks of tiles.
template <typename acc_t_, int kSteps_>
class SumTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kWidth = 1;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = false;
  using Values = SingleValues<SumTile>;
  friend Values;

  __device__ __forceinline__ SumTile(const SumPlan& plan, int64_t share) : plan_(plan) {
    int64_t group = share;
    int64_t split = 0;
    if (plan.splits > 1) {
      group = share / plan.splits;
      split = share - group * plan.splits;
    }
    const auto thread = static_cast<int>(threadIdx.x);
    const int lanes = plan.lanes;
    const int sums = plan.block_sums;
    lane_ = plan.walks_lead ? thread % lanes : thread / sums;
    const int own = plan.walks_lead ? thread / lanes : thread - lane_ * sums;
    sum_ = group * sums + own;
    end_ = (split + 1) * plan.split_walk;
    end_ = end_ < plan.walk ? end_ : plan.walk;
    next_ = split * plan.split_walk + lane_;
    slot_ = plan.walks_lead ? thread : own * lanes + lane_;
    split_ = split;
    has_sum_ = lane_ < lanes && sum_ < plan.sums;
    if (!has_sum_) {
      end_ = sum_ = 0;
    }
#pragma unroll
    for (int which = kInput; which <= kGradOutput; ++which) {
      const PlanOperand& operand = plan.operands[which];
      own_[which] =
          operand.data == nullptr
              ? 0
              : plan.extents.offset(operand.strides, sum_, plan.num_walked, plan.extents.ndim);
    }
  }

  // Moves to the next elements. Returns whether any thread of the block has some.
  __device__ __forceinline__ bool move_on() {
    first_ = next_;
    next_ += int64_t{kSteps} * plan_.lanes;
    const int64_t most = int64_t{kSteps} * kTileThreads;
    // A thread without a sum ends at 0, which may be further behind than an int can say.
    const int64_t left = end_ - first_;
    left_ = left > 0 ? static_cast<int>(left < most ? left : most) : 0;
    // Lane 0 of the first sum is there in every block.
    return first_ - lane_ < end_of_split();
  }

  __device__ __forceinline__ static constexpr bool has_subnormals() { return true; }
  __device__ __forceinline__ bool is_half() const {
    return is_half_type(plan_.operands[kInput].dtype);
  }
  __device__ __forceinline__ const SumOperand& operand(Which which) const {
    return plan_.operands[which];
  }
  __device__ __forceinline__ bool has(int step) const { return step * plan_.lanes < left_; }
  __device__ __forceinline__ bool has_all() const { return has(kSteps - 1); }

  // Adds up what the lanes have of each sum. buffer: (kTileThreads,). partials: (splits, sums) of
  // sums that are split; others are elements of the gradient.
  __device__ __forceinline__ void finish(double sum, Which which, double* buffer,
                                         double* partials) const {
    sum = total_of_lanes(sum, buffer);
    if (!has_sum_ || lane_ != 0) {
      return;
    }
    if (plan_.splits > 1) {
      partials[split_ * plan_.sums + sum_] = sum;
      return;
    }
    const PlanOperand& gradient = plan_.operands[which];
    const int64_t offset =
        plan_.extents.offset(gradient.strides, sum_, plan_.num_walked, plan_.extents.ndim);
    store_as<double>(gradient.data + offset, gradient.dtype, 0, sum);
  }

 private:
  // Valid in lane 0.
  __device__ __forceinline__ double total_of_lanes(double sum, double* buffer) const {
    const bool in_warp = plan_.walks_lead && plan_.lanes <= kWarpSize;
    if (in_warp || plan_.lanes == 1) {
      return warp_sum(sum, plan_.lanes);
    }
    if (lane_ < plan_.lanes) {
      buffer[slot_] = sum;
    }
    __syncthreads();
    for (int count = plan_.lanes; count > 1;) {
      const int half = (count + 1) / 2;
      if (lane_ + half < count) {
        buffer[slot_] += buffer[slot_ + half];
      }
      __syncthreads();
      count = half;
    }
    // Lane 0 alone reads its slot from here on, and writes it next.
    return buffer[slot_];
  }

  __device__ __forceinline__ int64_t end_of_split() const {
    const int64_t end = (split_ + 1) * plan_.split_walk;
    return end < plan_.walk ? end : plan_.walk;
  }
  __device__ __forceinline__ int64_t number(int step) const {
    return first_ + step * static_cast<int64_t>(plan_.lanes);
  }

  template <int kBytes, typename Body>
  __device__ __forceinline__ void for_each_element(Which which, Body&& body) const {
    const SumOperand& operand = plan_.operands[which];
    const Extents& extents = plan_.extents;
    const int walked = plan_.num_walked;
    char* const data = operand.data + own_[which];
    int64_t offsets[kSteps];
    if (plan_.has_gaps && walked == 1) {  // sums along one dimension, as most are
      char* const first = unfolded(data + times(static_cast<uint32_t>(first_), operand.gaps[0]));
      __builtin_assume(__isGlobal(first));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (has(step)) {
          body(step, first + times(static_cast<uint32_t>(step * plan_.lanes), operand.gaps[0]));
        }
      }
      return;
    }
    if (plan_.has_gaps) {
      uint32_t rest[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto own = static_cast<uint32_t>(number(step));
        rest[step] = extents.divisors[0].quotient(own);
        offsets[step] = times(own, operand.gaps[0]) + times(rest[step], operand.gaps[1]);
      }
      add_further_gaps(extents, walked, operand.gaps, rest, offsets);
    } else {  // it is large, and this is slow
      int64_t far[kSteps];
#pragma unroll 1
      for (int step = 0; step < kSteps; ++step) {
        far[step] = extents.offset(operand.strides, number(step), 0, walked);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        offsets[step] = far[step];
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (has(step)) {
        body(step, data + offsets[step]);
      }
    }
  }

  const SumPlan& plan_;
  int lane_;
  int slot_;  // the thread's place in the buffer, where the lanes of a sum are neighbours
  bool has_sum_;
  int64_t sum_;
  int64_t split_;
  int64_t end_;                   // the thread's elements end before this number
  int64_t own_[kGradOutput + 1];  // offsets of the sum's first element, by operand
  int64_t next_;                  // the thread's first element in the next tile
  int64_t first_ = 0;
  int left_ = 0;  // from there to the end of the thread's elements; of more than a tile, a tile
};

}  // namespace lossops::cuda
