// Cross entropy of rows of class indices that a block has in its registers, on devices without
// Hopper's kernels.
//
// Only cross_entropy.cu includes this: machine code of several translation units packs worse, by 20
// KB for each architecture.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/any_half.cuh"
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
// once.
constexpr int kMinRegisterBlocks = 4;

// A thread's share of a row of contiguous classes that a block holds whole. The threads take
// vectors in turn, the last of which may be a part of one. What is not there is -inf.
template <typename scalar_t, int kVectors>
struct RegisterRow {
  static constexpr int kSize = kVectorSize<scalar_t>;
  Vector<scalar_t> vectors[kVectors];

  // dtype: of an AnyHalf.
  __device__ __forceinline__ RegisterRow(const scalar_t* row, int num_classes, DType dtype) {
    const int width = access_width(row);
    const int whole = num_classes / kSize;
    const int part = num_classes % kSize;
    Vector<scalar_t> nothing;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      nothing.set(i, from_acc_of<scalar_t>(-math::infinity<acc_type_t<scalar_t>>(), dtype));
    }
    if (width == kVectorBytes) {
      load<kVectorBytes>(row, whole, nothing);
    } else if (width == 8) {
      load<8>(row, whole, nothing);
    } else if (width == 4) {
      load<4>(row, whole, nothing);
    } else {
      load<2>(row, whole, nothing);
    }
    if (part > 0 && whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      Vector<scalar_t> last = nothing;
#pragma unroll
      for (int i = 0; i < kSize - 1; ++i) {
        if (i < part) {
          last.set(i, row[whole * kSize + i]);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (vector(u) == whole) {
          vectors[u] = last;
        }
      }
    }
  }

  // The largest of this thread's logits.
  __device__ __forceinline__ float largest(DType dtype) const {
    float max;
    visit_type_of<scalar_t>(dtype, [&](auto type) {
      using own_t = typename decltype(type)::type;
      uint32_t maxima = lowest_word<own_t>();
#pragma unroll
      for (const Vector<scalar_t>& vector : vectors) {
#pragma unroll
        for (int i = 0; i < kVectorBytes / 4; ++i) {
          maxima = max_of_words<own_t>(vector.word(i), maxima);
        }
      }
      max = max_of_elements<own_t>(maxima);
    });
    return max;
  }

  // Writes the row's gradient.
  template <typename Gradient>
  __device__ __forceinline__ void write_gradient(const Gradient& gradient, const scalar_t* row,
                                                 scalar_t* grad_input, int num_classes) {
    const int width = access_width(grad_input);
    const int whole = num_classes / kSize;
    const int part = whole * kSize;
    if (part < num_classes &&
        whole % static_cast<int>(blockDim.x) == static_cast<int>(threadIdx.x)) {
      const DType dtype = gradient.args.input.dtype;
      for (int c = part; c < num_classes; ++c) {
        const auto x = to_acc_of<acc_type_t<scalar_t>>(row[c], dtype);
        grad_input[c] = from_acc_of<scalar_t>(gradient.of_logit(x, c), dtype);
      }
    }
    if constexpr (sizeof(scalar_t) == 4) {
      // Where one formula does not do for all of a thread's logits, they are read once more: the
      // code of both for each vector would be too long for the instruction cache.
      if (!gradient.logit_gradient.is_direct(least(whole))) {
        const int row_width = access_width(row);
#pragma unroll 1
        for (int v = static_cast<int>(threadIdx.x); v < whole; v += static_cast<int>(blockDim.x)) {
          const Vector<scalar_t> x = load_vector_at(row + v * kSize, row_width);
          store_vector_at(grad_input + v * kSize, width, gradient_of(gradient, x, v * kSize));
        }
        return;
      }
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (vector(u) < whole) {
        forget_conversions(vectors[u]);
        store_vector_at(
            vector_of(grad_input, u), width,
            gradient_of<sizeof(scalar_t) == 4>(gradient, vectors[u], vector(u) * kSize));
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
    for (int u = 0; u < kVectors; ++u) {
      if (vector(u) < whole) {
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = to_acc<float>(vectors[u].get(i));
        }
        result = ::fminf(least_of(values), result);
      }
    }
    return result;
  }

  template <int kWidth>
  __device__ __forceinline__ void load(const scalar_t* row, int whole,
                                       const Vector<scalar_t>& nothing) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      vectors[u] = vector(u) < whole ? load_vector_at(vector_of(row, u), kWidth) : nothing;
    }
  }
};

// Rows short enough for the registers of a block: all of a row is in flight at once, and its
// maximum is known before the first exponential. One row a block at a time.
template <typename scalar_t, bool kGradient>
__global__ void __launch_bounds__(kMaxRowThreads, kMinRegisterBlocks)
    cross_entropy_forward_register_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                          Denominator denominator, Partial* partials,
                                          Finalize finalize) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  constexpr int kVectors = kRegisterVectors<scalar_t>;
  const DType dtype = args.input.dtype;
  const bool first = threadIdx.x == 0;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<acc_t>, NoScale> unit(args, denominator);
  Partial partial;
  for (int64_t row = blockIdx.x; row < args.rows.numel; row += gridDim.x) {
    int64_t offsets[4];
    row_offsets(args.rows, operands, row, offsets);
    const auto* const logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
    RegisterRow<scalar_t, kVectors> loaded(logits, static_cast<int>(args.num_classes), dtype);
    if (row == blockIdx.x) {
      unit.wait(args, denominator);
    }
    const RowTarget<acc_t> target(args, offsets[1]);
    acc_t x_at_index = 0;
    if (first && target.has_loss()) {
      x_at_index = to_acc_of<acc_t>(logits[target.index], dtype);
    }
    OnlineSoftmax<acc_t> state;
    state.max = loaded.largest(dtype);
    const acc_t shift = softmax_shift(state.max);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      OnlineSoftmax<acc_t> local = same_max(state);
      forget_conversions(loaded.vectors[u]);
      acc_t x[kSize];
      unpack_of(loaded.vectors[u], dtype, x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        local.template add_below_max<kExactExponentials<scalar_t>>(x[i], shift);
      }
      state.add(local);
    }
    state = block_reduce(state);
    if (first) {
      finish_row(args, target, state, x_at_index, row, offsets[2], partial);
    }
    if constexpr (kGradient) {
      const auto summary = share_summary(summarize(state, x_at_index));
      const RowGradient<acc_t, false, kExactExponentials<scalar_t>> gradient(args, target, summary,
                                                                             unit.get());
      auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data) + offsets[3];
      if (target.has_loss()) {
        loaded.write_gradient(gradient, logits, grad_input, static_cast<int>(args.num_classes));
      } else {
        const auto value = from_acc_of<scalar_t>(gradient.without_loss(), dtype);
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
  visit_float_or_any_half(args.input.dtype, [&](auto type) {
    visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
      launch_kernel("cross_entropy_forward_register_kernel",
                    cross_entropy_forward_register_kernel<typename decltype(type)::type,
                                                          decltype(gradient)::value>,
                    {plan.blocks, plan.threads, 0, 1, denominator.is_left()}, stream, args,
                    denominator, partials, finalize);
    });
  });
}

}  // namespace lossops::cuda
