#include "kernels/cross_entropy_columns.cuh"

#include <algorithm>
#include <cstdint>

#include "kernels/async_copy.cuh"
#include "kernels/block_reduce.cuh"
#include "kernels/check.cuh"
#include "kernels/dispatch.cuh"
#include "kernels/integers.h"
#include "kernels/row_words.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {
namespace {

// Measured on an H200, 21 classes: 64 threads are as fast, 32 lose 5 %.
constexpr int kMaxThreads = 128;
// A multiprocessor shall hold as many blocks. Half types have more rows a thread, and their states.
template <typename scalar_t>
constexpr int kMinBlocks = sizeof(scalar_t) == 2 ? 4 : 5;
// Several waves on any GPU. Measured on an H200: 660 to 16384 make no difference.
constexpr int64_t kMaxBlocks = 4096;
// What the threads of a block have in shared memory, at most.
constexpr int kMaxSharedBytes = 44 << 10;

template <typename scalar_t, bool kGradient>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks<scalar_t>)
    cross_entropy_forward_column_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                        Denominator denominator, Partial* partials,
                                        Finalize finalize) {
  constexpr int kRows = kVectorSize<scalar_t>;
  constexpr bool kExact = kExactExponentials<scalar_t>;
  using Terms = RowTerms<kExact>;
  extern __shared__ uint4 stage[];
  const Operand* const operands[4] = {&args.input, &args.target, &args.output, &args.grad_input};
  const int num_classes = static_cast<int>(args.num_classes);
  const int threads = static_cast<int>(blockDim.x);
  const float scale = kGradient ? unit_scale<float>(args, denominator) : 1.0f;
  // Class c of this thread's rows. No other thread reads it.
  auto* const own = reinterpret_cast<Vector<scalar_t>*>(stage) + threadIdx.x;
  Partial partial;
  for (int64_t row = (int64_t{blockIdx.x} * threads + threadIdx.x) * kRows; row < args.rows.numel;
       row += int64_t{gridDim.x} * threads * kRows) {
    int64_t offsets[4];
    row_offsets(args.rows, operands, row, offsets);
    const auto* logits = static_cast<const scalar_t*>(args.input.data) + offsets[0];
#pragma unroll 4
    for (int c = 0; c < num_classes; ++c) {
      start_own_copy(own + c * threads, logits);
      logits += args.input_class_stride;
    }
    int64_t targets[kRows];
    load_class_indices(args.target, offsets[1], args.target.strides[0], targets);
    int indices[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      indices[i] = checked_index(args, targets[i]);
    }
    wait_for_own_copies();
    Vector<scalar_t> maxima = own[0];
#pragma unroll 4
    for (int c = 1; c < num_classes; ++c) {
      maxima = max_of_vectors(own[c * threads], maxima);
    }
    Terms terms[kRows];
    TermSum sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Of NaN alone there is no maximum.
      terms[i] = Terms(math::max_number(to_acc<float>(maxima.get(i)), -math::infinity<float>()));
    }
    int c = 0;
    for (; c + kColumnUnroll <= num_classes; c += kColumnUnroll) {
      Vector<scalar_t> x[kColumnUnroll];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        x[u] = own[(c + u) * threads];
      }
      // One branch for all rows: those without the maximum's term here have nothing to count.
      float values[kRows][kColumnUnroll];
      float partial_sums[kRows];
      bool counts = false;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int u = 0; u < kColumnUnroll; ++u) {
          values[i][u] = terms[i](to_acc<float>(x[u].get(i)));
        }
        partial_sums[i] = pairwise_sum(values[i]);
        counts = counts || partial_sums[i] >= terms[i].unit;
      }
      if (counts) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          sums[i].ones += count_ones(values[i], terms[i].unit);
          partial_sums[i] = pairwise_sum(values[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sums[i].below += partial_sums[i];
      }
    }
    for (; c < num_classes; ++c) {
      const Vector<scalar_t> x = own[c * threads];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float values[1] = {terms[i](to_acc<float>(x.get(i)))};
        sums[i].add(values, terms[i].unit);
      }
    }
    LogitGradient<float, kExact> gradients[kRows];
    float at_index[kRows];
    const auto* const scalars = reinterpret_cast<const scalar_t*>(own);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int index = indices[i];
      const float weight = row_weight(args, index);
      OnlineSoftmax<float> softmax;
      float x_at_index = 0;
      if (index >= 0) {
        softmax.max = math::max_number(to_acc<float>(maxima.get(i)), -math::infinity<float>());
        softmax.ones = static_cast<float>(sums[i].ones);
        softmax.below = sums[i].below * terms[i].correction();
        x_at_index = to_acc<float>(scalars[index * threads * kRows + i]);
      }
      finish_indexed_row(args, index, weight, softmax, 0.0f, 0.0f, x_at_index, row + i,
                         offsets[2] + i * args.output.strides[0], partial);
      if constexpr (kGradient) {
        const auto of_row = RowSoftmax<float>::of(softmax.max, softmax.rest(), scale, weight);
        gradients[i] = LogitGradient<float, kExact>(of_row);
        at_index[i] = of_row.gradient_at_index(x_at_index);
      }
    }
    if constexpr (kGradient) {
      auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data) + offsets[3];
      scalar_t* results = grad_input;
#pragma unroll 2
      for (int k = 0; k < num_classes; ++k) {
        const Vector<scalar_t> x = own[k * threads];
        float values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          values[i] = indices[i] >= 0 ? gradients[i](to_acc<float>(x.get(i)))
                                      : gradient_without_loss(indices[i]);
        }
        store_vector(results, 0, pack<scalar_t>(values));
        results += args.grad_input_class_stride;
      }
      // The class indices once more.
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (indices[i] >= 0) {
          grad_input[indices[i] * args.grad_input_class_stride + i] =
              from_acc<scalar_t>(at_index[i]);
        }
      }
    }
  }
  if (args.reduction != Reduction::kNone) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace

bool lies_in_columns(const CrossEntropyArgs& args, const Operand& operand, int64_t class_stride) {
  const int64_t vector = kVectorBytes / element_size(operand.dtype);
  bool aligned = reinterpret_cast<uintptr_t>(operand.data) % kVectorBytes == 0 &&
                 args.rows.ndim >= 1 && args.rows.sizes[0] % vector == 0 &&
                 operand.strides[0] == 1 && class_stride % vector == 0;
  for (int dim = 1; dim < args.rows.ndim; ++dim) {
    aligned = aligned && operand.strides[dim] % vector == 0;
  }
  return aligned;
}

ColumnPlan plan_columns(const CrossEntropyForwardArgs& args) {
  ColumnPlan plan;
  if (args.dense() || args.acc_double || args.input_class_stride == 1 ||
      args.num_classes > kMaxColumnClasses ||
      !lies_in_columns(args, args.input, args.input_class_stride)) {
    return plan;
  }
  static_assert(kMaxColumnClasses * kWarpSize * kVectorBytes <= kMaxSharedBytes,
                "a warp's classes");
  int threads = kMaxThreads;
  while (threads * args.num_classes * kVectorBytes > kMaxSharedBytes) {
    threads /= 2;
  }
  const int64_t vector = kVectorBytes / element_size(args.input.dtype);
  plan.threads = threads;
  plan.blocks = std::clamp<int64_t>(ceil_div(args.rows.numel / vector, threads), 1, kMaxBlocks);
  return plan;
}

void launch_columns(const CrossEntropyForwardArgs& args, const ColumnPlan& plan,
                    const Denominator& denominator, Partial* partials, const Finalize& finalize,
                    cudaStream_t stream) {
  visit_floating(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if constexpr (sizeof(scalar_t) <= 4) {
      const size_t shared = static_cast<size_t>(plan.threads * args.num_classes * kVectorBytes);
      const auto launch = [&](auto kernel) {
        kernel<<<static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.threads), shared,
                 stream>>>(args, denominator, partials, finalize);
        check_launch("cross_entropy_forward_column_kernel");
      };
      args.grad_input.data != nullptr
          ? launch(cross_entropy_forward_column_kernel<scalar_t, true>)
          : launch(cross_entropy_forward_column_kernel<scalar_t, false>);
    }
  });
}

}  // namespace lossops::cuda
