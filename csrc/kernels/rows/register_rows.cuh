// Cross entropy of fp32 rows with class indices that a block has in its registers, on devices
// without Hopper's kernels.
//
// Only cross_entropy.cu includes this: machine code of several translation units packs worse, by 20
// KB for each architecture.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_sum.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/team_rows_plan.h"
#include "launchers.h"

namespace lossops::cuda {

// Blocks of kMaxRowThreads that shall fit a multiprocessor. All loads of a row are in flight at
// once. With 4, kernels with a gradient spill: on an H200, steps of 2048 and 4096 classes were then
// at .65 and .68 of the floor, with 3 they are at .72 and .76.
constexpr int min_register_blocks(bool gradient) { return gradient ? 3 : 4; }

// A thread's share of a row of contiguous classes that a block holds whole. The threads take
// vectors in turn, the last of which may be a part of one. What is not there is -inf.
struct RegisterRow {
  static constexpr int kSize = kVectorSize<float>;
  Vector<float> vectors[kRegisterVectors];

  __device__ __forceinline__ RegisterRow(const float* row, int num_classes) {
    const int width = access_width(row);
    const int whole = num_classes / kSize;
    const int part = num_classes % kSize;
    Vector<float> nothing;
    set_lowest(nothing);
    if (width == kVectorBytes) {
      load<kVectorBytes>(row, whole, nothing);
    } else if (width == 8) {
      load<8>(row, whole, nothing);
    } else {
      load<4>(row, whole, nothing);
    }
    if (part > 0 && whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      Vector<float> last = nothing;
#pragma unroll
      for (int i = 0; i < kSize - 1; ++i) {
        if (i < part) {
          last.set(i, row[whole * kSize + i]);
        }
      }
#pragma unroll
      for (int u = 0; u < kRegisterVectors; ++u) {
        if (vector(u) == whole) {
          vectors[u] = last;
        }
      }
    }
  }

  // The largest of this thread's logits.
  __device__ __forceinline__ float largest() const {
    uint32_t max = lowest_word<float>();
#pragma unroll
    for (const Vector<float>& vector : vectors) {
      max = max_of_vector(vector, max);
    }
    return __uint_as_float(max);
  }

  // Writes the row's gradient.
  template <typename Gradient>
  __device__ __forceinline__ void write_gradient(const Gradient& gradient, const float* row,
                                                 float* grad_input, int num_classes) {
    const int width = access_width(grad_input);
    const int whole = num_classes / kSize;
    const int part = whole * kSize;
    if (part < num_classes &&
        whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      for (int c = part; c < num_classes; ++c) {
        grad_input[c] = gradient.of_logit(row[c], c);
      }
    }
    // Where one formula does not do for all of a thread's logits, they are read once more: the code
    // of both for each vector would be too long for the instruction cache.
    if (!gradient.logit_gradient.is_direct(least(whole))) {
      const int row_width = access_width(row);
#pragma unroll 1
      for (int v = static_cast<int>(threadIdx.x); v < whole; v += static_cast<int>(blockDim.x)) {
        const Vector<float> x = load_vector_at(row + v * kSize, row_width);
        store_vector_at(grad_input + v * kSize, width, gradient_of(gradient, x, v * kSize));
      }
      return;
    }
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      if (vector(u) < whole) {
        store_vector_at(vector_of(grad_input, u), width,
                        gradient_of<true>(gradient, vectors[u], vector(u) * kSize));
      }
    }
  }

 private:
  static __device__ __forceinline__ int vector(int u) {
    return static_cast<int>(threadIdx.x + u * blockDim.x);
  }
  // Unsigned: an address in one instruction.
  template <typename T>
  static __device__ __forceinline__ T* vector_of(T* row, int u) {
    return row + threadIdx.x * kSize + u * blockDim.x * kSize;
  }

  // The least of the logits in whole vectors.
  __device__ __forceinline__ float least(int whole) const {
    float result = math::infinity<float>();
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      if (vector(u) < whole) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          result = ::fminf(vectors[u].get(i), result);
        }
      }
    }
    return result;
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const float* row, int whole, const Vector<float>& nothing) {
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      vectors[u] = vector(u) < whole ? load_vector_at(vector_of(row, u), kWidth) : nothing;
    }
  }
};

// Rows short enough for the registers of a block: all of a row is in flight at once, and its
// maximum is known before the first exponential. One row a block at a time.
template <bool kGradient>
__global__ void __launch_bounds__(kMaxRowThreads, min_register_blocks(kGradient))
    cross_entropy_forward_register_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                          Denominator denominator, Partial* partials,
                                          Finalize finalize) {
  constexpr int kSize = kVectorSize<float>;
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  const bool first = threadIdx.x == 0;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  Partial partial;
  for (int64_t row = blockIdx.x; row < args.rows.numel; row += gridDim.x) {
    int64_t offsets[4];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const float*>(args.input.data) + offsets[0];
    RegisterRow loaded(logits, static_cast<int>(args.num_classes));
    if (row == blockIdx.x) {
      unit.wait(args, denominator);
    }
    const RowTarget<float> target(args, offsets[1]);
    const float x_at_index = first && target.has_loss() ? logits[target.index] : 0.0f;
    OnlineSoftmax<float> state;
    state.max = loaded.largest();
    const float shift = softmax_shift(state.max);
#pragma unroll
    for (int u = 0; u < kRegisterVectors; ++u) {
      OnlineSoftmax<float> local = same_max(state);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        local.template add_below_max<true>(loaded.vectors[u].get(i), shift);
      }
      state.add(local);
    }
    state = block_reduce(state);
    if (first) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
    if constexpr (kGradient) {
      const auto summary = share_summary(summarize(state, x_at_index));
      const RowGradient<float, false, true> gradient(args, target, summary, unit.get());
      auto* const grad_input = static_cast<float*>(args.grad_input.data) + offsets[3];
      if (target.has_loss()) {
        loaded.write_gradient(gradient, logits, grad_input, static_cast<int>(args.num_classes));
      } else {
        const auto value = gradient.without_loss();
        for (int c = static_cast<int>(threadIdx.x); c < args.num_classes; c += blockDim.x) {
          grad_input[c] = value;
        }
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid<true>(partial, partials, finalize);
  }
}

inline void launch_register_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                                 const Denominator& denominator, const GradOutput&,
                                 Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
    launch_kernel("cross_entropy_forward_register_kernel",
                  cross_entropy_forward_register_kernel<decltype(gradient)::value>,
                  {plan.blocks, plan.threads, 0, 1, denominator.is_left()}, stream, args,
                  denominator, partials, finalize);
  });
}

}  // namespace lossops::cuda
