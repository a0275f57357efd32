// The gradient of an operand that is broadcast, summed as threads walk along strips: a block's part
// of each sum, tile by tile. A thread adds up what it can in registers; then those that have parts
// of the same sums add these up in shared memory. Sums of which several tiles have parts are folded
// by another kernel.
#pragma once

#include <cstdint>

#include "kernels/elements/strip_tile.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/warp_reduce.cuh"

namespace lossops::cuda {

template <typename Tile>
class StripSums {
 public:
  using acc_t = typename Tile::acc_t;
  static constexpr bool kSums = true;
  static constexpr int kWidth = Tile::kWidth;
  static constexpr int kSteps = Tile::kSteps;
  static_assert(kRowsAtOnce % kSteps == 0);
  union Shared {
    // The values of rows. Padded, so that neighbouring rows are in other banks.
    acc_t values[kRowsAtOnce][kTileThreads + 4];
    // What threads have added up: of columns, two neighbours in a vector. Registers are short.
    double2 totals[(kWidth + 1) / 2][kTileThreads];
  };

  // Of one tile.
  __device__ __forceinline__ StripSums(const StripPlan& plan, Shared& shared)
      : plan_(plan), shared_(shared) {
    if (plan.sum_of == SumOf::kColumn) {
#pragma unroll
      for (auto& totals : shared.totals) {
        totals[thread()] = make_double2(0, 0);
      }
    }
  }

  // Other gradients are written. Plans may have none that is summed.
  __device__ __forceinline__ bool takes(Which gradient) const {
    return gradient == plan_.summed_gradient;
  }

  // Whether values that do not count must be 0: those of columns that count in no row go to totals
  // that nobody stores.
  __device__ __forceinline__ bool needs_zeros(const Tile& tile) const {
    return plan_.sum_of != SumOf::kColumn || !tile.has_rows();
  }
  // Adds the values of a turn, times scale.
  __device__ __forceinline__ void add(const acc_t (&values)[kSteps * kWidth], acc_t scale) {
    if (plan_.sum_of == SumOf::kColumn) {
      const auto sum = [&](int i) {
        acc_t column[kSteps];
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          column[step] = values[step * kWidth + i];
        }
        return static_cast<double>(scale * pairwise_sum(column));
      };
#pragma unroll
      for (int i = 0; i < kWidth; i += 2) {
        double2& totals = shared_.totals[i / 2][thread()];
        totals = make_double2(totals.x + sum(i), i + 1 < kWidth ? totals.y + sum(i + 1) : 0);
      }
    } else if (plan_.sum_of == SumOf::kWalk) {
      total_ += static_cast<double>(scale * pairwise_sum(values));
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        acc_t row[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          row[i] = values[step * kWidth + i];
        }
        shared_.values[rows_ + step][thread()] = scale * pairwise_sum(row);
      }
    }
  }

  // All threads must call it after a turn.
  __device__ __forceinline__ void end_turn(const Strip& strip, const Walk<kWidth>& walk, int turn) {
    if (plan_.summed_gradient == kNumOperands) {
      return;
    }
    const bool is_last = turn + plan_.walk_turn >= Walk<kWidth>::end(plan_, strip);
    if (plan_.sum_of == SumOf::kRow) {
      rows_ += kSteps;
      if (rows_ == kRowsAtOnce || is_last) {
        finish_rows(strip, turn);
      }
    } else if (is_last && strip.is_last) {
      plan_.sum_of == SumOf::kColumn ? finish_columns(strip, walk) : finish_walk(strip, walk);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ __forceinline__ int side() const {
    return static_cast<int>(plan_.strip_units.quotient(threadIdx.x));
  }

  __device__ __forceinline__ double& total(int i, int thread) const {
    double2& totals = shared_.totals[i / 2][thread];
    return i % 2 == 0 ? totals.x : totals.y;
  }

  __device__ __forceinline__ void finish_columns(const Strip& strip, const Walk<kWidth>& walk) {
    const auto sides = static_cast<int>(plan_.side_walked.value);
    bool has_sums = true;
    if (sides > 1) {
      has_sums = fold(kWidth, side() % sides, sides, static_cast<int>(plan_.strip_units.value));
    }
    const unsigned counted = walk.counted(plan_, 0, 0);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (has_sums && (counted >> i & 1) != 0) {
        store(strip, thread(), walk.offset(i) * gradient().strides[0], total(i, thread()));
      }
    }
    if (sides > 1) {
      __syncthreads();  // before the next tile's totals
    }
  }

  __device__ __forceinline__ void finish_walk(const Strip& strip, const Walk<kWidth>& walk) {
    total(0, thread()) = total_;
    const auto sharers = static_cast<int>(plan_.strip_units.value * plan_.side_walked.value);
    if (fold(1, thread() % sharers, sharers, 1) && walk.has_any(plan_)) {
      store(strip, thread(), 0, total(0, thread()));
    }
    __syncthreads();  // before the next tile's totals
  }

  // The sums of rows up to those of a turn. A few neighbouring threads add up the values of a row.
  // The first of them writes the sum to the address that the row's first thread has in the table.
  __device__ __forceinline__ void finish_rows(const Strip& strip, int turn) {
    const auto units = static_cast<int>(plan_.strip_units.value);
    const auto side_walked = static_cast<int>(plan_.side_walked.value);
    const int sides = side_walked * plan_.side_kept;
    // unfolded(): else the compiler computes what follows from this before the turns, and spills.
    const int lane_bits = unfolded(plan_.row_lane_bits);
    const int lanes = 1 << lane_bits;
    const int lane = thread() & (lanes - 1);
    const int first = turn - (rows_ / kSteps - 1) * plan_.walk_turn;
    const int kept = strip.rest_left < plan_.side_kept ? strip.rest_left : plan_.side_kept;
    __syncthreads();
#pragma unroll 1
    for (int begin = 0; begin < kRowsAtOnce * sides; begin += threads() >> lane_bits) {
      const int number = begin + (thread() >> lane_bits);
      const int side = number / kRowsAtOnce;
      const int row = number - side * kRowsAtOnce;
      const auto own_kept =
          static_cast<int>(plan_.side_walked.quotient(static_cast<uint32_t>(side)));
      const int index = first + row / kSteps * plan_.walk_turn + row % kSteps;
      const int walked = index * side_walked + side - own_kept * side_walked;
      const bool is_there = row < rows_ && own_kept < kept && walked < strip.walked_left;
      double sum = 0;
#pragma unroll 4
      for (int unit = lane; is_there && unit < units; unit += lanes) {
        sum += static_cast<double>(shared_.values[row][side * units + unit]);
      }
      sum = warp_sum(sum, lanes);
      if (is_there && lane == 0) {
        store(strip, side * units, int64_t{index} * gradient().walk_stride, sum);
      }
    }
    rows_ = 0;
    __syncthreads();  // before the next turn's values
  }

  // Adds up `count` totals of each of `sharers` threads that are `distance` apart, in a fixed
  // order. place: this thread's number among them. Returns whether it has the sums.
  __device__ __forceinline__ bool fold(int count, int place, int sharers, int distance) {
    const int own = thread();
    while (sharers > 1) {
      __syncthreads();
      const int half = (sharers + 1) / 2;
      if (place + half < sharers && own + half * distance < threads()) {
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
          total(n, own) += total(n, own + half * distance);
        }
      }
      sharers = half;
    }
    return place == 0;
  }

  // offset: in bytes, from where the walk of `thread` begins.
  __device__ __forceinline__ void store(const Strip& strip, int thread, int64_t offset,
                                        double sum) const {
    store_as<double>(ThreadBegins::get(gradient().slot, thread) + strip.split + offset,
                     gradient().dtype, 0, sum);
  }

  __device__ __forceinline__ const StripOperand& gradient() const {
    return plan_.operands[plan_.summed_gradient];
  }

  const StripPlan& plan_;
  Shared& shared_;
  int rows_ = 0;      // values of rows in shared memory
  double total_ = 0;  // over all columns
};

}  // namespace lossops::cuda
