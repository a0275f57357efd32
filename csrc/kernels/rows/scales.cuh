// What the gradients of all rows are multiplied by: grad_output, over what the mean divides by.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_plan.h"
#include "launchers.h"

namespace lossops::cuda {

// What the mean divides by, where it is known before any row is done. partials: sums that blocks of
// an earlier kernel have left. Null: each block adds up the weights of all rows, which are few; or
// rows have probabilities, and each counts 1.
struct Denominator {
  const double* partials = nullptr;  // one, or kMaxDenominatorBlocks: those of no block are 0
  int count = 0;                     // blocks
  const int8_t* indices = nullptr;  // checked_index() of every row, where the same kernel left them
  bool is_given = false;            // by the caller: no kernel of this call leaves it

  __host__ __device__ bool is_computed() const { return partials != nullptr; }
  // Whether the kernel before this one, of the same call, leaves it. A kernel may then overlap with
  // that one: there are logits to read by the time it lets this one start.
  __host__ __device__ bool is_left() const { return is_computed() && !is_given; }

  // By the blocks of the kernel that computes it; total: of a block, in its first thread.
  static __device__ __forceinline__ void leave(double total, double* partials) {
    if (threadIdx.x == 0) {
      partials[blockIdx.x] = total;
    } else if (blockIdx.x == 0 && gridDim.x > 1 && threadIdx.x >= gridDim.x &&
               threadIdx.x < kMaxDenominatorBlocks) {
      partials[threadIdx.x] = 0;
    }
  }

  // What a lane has of the sum. kInLoop: by a loop over what there is, for fewer registers.
  template <bool kInLoop = false>
  __device__ __forceinline__ double of_lane() const {
    constexpr int kPairs = kMaxDenominatorBlocks / (2 * kWarpSize);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    if constexpr (kInLoop) {
      double total = 0;
      for (int i = lane; i < count; i += kWarpSize) {
        total += partials[i];
      }
      return total;
    }
    if (count == 1) {
      return lane == 0 ? *partials : 0.0;
    }
    const auto* const of_lanes = reinterpret_cast<const double2*>(partials) + lane;
    double2 pairs[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = of_lanes[i * kWarpSize];
    }
    double total = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      total += pairs[i].x + pairs[i].y;
    }
    return total;
  }
};

// The grad_output of a backward pass by a kernel of forward. There is none in forward.
struct GradOutput {
  Operand operand;
  // Whether it has an element for each row ("none"). If not, it is one element, and forward has
  // kept a gradient for a grad_output of 1.
  bool is_per_row = false;

  __host__ __device__ bool exists() const { return operand.data != nullptr; }

  // Blocks to launch of a kernel that has `blocks` of them in forward, of so many threads: where
  // a gradient is kept, mostly there is nothing to do.
  int64_t limit_blocks(int64_t blocks, int threads) const {
    return exists() && !is_per_row ? std::min(blocks, most_blocks_of_kept(threads)) : blocks;
  }

  // Waits for the kernel before this one, and says whether the kept gradient is right because
  // grad_output is 1. Writes grad_output to value. False if there is one for each row, and no
  // value.
  __device__ __forceinline__ bool is_one(float& value) const {
    if (!exists()) {
      return false;
    }
    wait_for_previous_kernel();
    if (is_per_row) {
      return false;
    }
    value = load_grad_output<float>(operand, 0);
    return value == 1;
  }

  // The factor of a row's gradient: the row's grad_output, or common_scale. Rows of one dimension.
  __device__ __forceinline__ float scale_of_row(int64_t row, float common_scale) const {
    return is_per_row ? load_grad_output<float>(operand, row * operand.strides[0]) : common_scale;
  }
};

// Whether a kernel that takes these calls wait_for_previous_kernel().
inline bool waits_for_previous_kernel(const Denominator& denominator,
                                      const GradOutput& grad_output) {
  return denominator.is_left() || grad_output.exists();
}

// grad_output, divided by what the mean divides by; of sums grad_output itself: row_scale(). All
// threads of a block must construct it; those of the warps that use it must wait(), when their
// first loads are on the way: it may take long. kInLoop: Denominator::of_lane()'s.
template <typename acc_t, bool kInLoop = false>
class UnitScale {
 public:
  __device__ __forceinline__ UnitScale(const CrossEntropyForwardArgs& args,
                                       const Denominator& denominator, acc_t grad_output = 1)
      : grad_output_(grad_output) {
    if (args.reduction != Reduction::kMean || denominator.is_computed() ||
        args.grad_input.data == nullptr) {
      return;
    }
    if (args.target_is_probability) {
      set(args, static_cast<double>(args.rows.numel));  // each counts 1
      return;
    }
    __shared__ double shared;
    Partial partial;
#pragma unroll 1
    for (int64_t row = threadIdx.x; row < args.rows.numel; row += blockDim.x) {
      const Operand* const operands[1] = {&args.target};
      int64_t offsets[1];
      row_offsets(args.rows, operands, row, offsets);
      partial.weight += RowTarget<float>(args, offsets[0]).template mean_weight<double>();
    }
    partial = block_reduce<true>(partial);
    if (threadIdx.x == 0) {
      shared = partial.weight;
    }
    __syncthreads();
    set(args, shared);
  }

  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs& args,
                                       const Denominator& denominator) {
    if (!denominator.is_computed()) {
      return;
    }
    wait_for_previous_kernel();
    set(args, warp_sum<true>(denominator.template of_lane<kInLoop>()));
  }

  __device__ __forceinline__ acc_t get() const { return scale_; }

 private:
  __device__ __forceinline__ void set(const CrossEntropyForwardArgs& args, double total) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      args.mean_terms[0] = total;
    }
    scale_ = grad_output_ / static_cast<acc_t>(total);
  }

  acc_t grad_output_;
  acc_t scale_ = grad_output_;
};

// UnitScale of kernels that take probability targets alone, of which each row counts 1.
template <typename acc_t>
class UnitScaleOfRows {
 public:
  __device__ __forceinline__ UnitScaleOfRows(const CrossEntropyForwardArgs& args,
                                             const Denominator& /*denominator*/) {
    if (args.reduction == Reduction::kMean) {
      const auto total = static_cast<double>(args.rows.numel);
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        args.mean_terms[0] = total;
      }
      scale_ = acc_t(1) / static_cast<acc_t>(total);
    }
  }
  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs&, const Denominator&) {}
  __device__ __forceinline__ acc_t get() const { return scale_; }

 private:
  acc_t scale_ = 1;
};

// Of kernels without gradients.
struct NoScale {
  __device__ __forceinline__ NoScale(const CrossEntropyForwardArgs&, const Denominator&,
                                     float = 1) {}
  __device__ __forceinline__ void wait(const CrossEntropyForwardArgs&, const Denominator&) {}
  __device__ __forceinline__ float get() const { return 1; }
};

}  // namespace lossops::cuda
