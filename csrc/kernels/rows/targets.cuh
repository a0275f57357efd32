// What is asked of targets before any logit is read: what the mean divides by, class indices that
// are checked, and the first one that is out of range.
//
// Only cross_entropy.cu includes this: machine code of several translation units packs worse, by 20
// KB for each architecture.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_plan.h"
#include "kernels/rows/scales.cuh"
#include "launchers.h"

namespace lossops::cuda {

// Targets that a thread has in flight. One at a time took 100 us for 4 million rows.
constexpr int kDenominatorUnroll = 8;

static __global__ void __launch_bounds__(kDenominatorThreads)
    cross_entropy_denominator_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                     bool targets_in_line, double* partials) {
  const Operand* const operands[1] = {&args.target};
  const int64_t threads = int64_t{gridDim.x} * kDenominatorThreads;
  int64_t row = int64_t{blockIdx.x} * kDenominatorThreads + threadIdx.x;
  wait_for_previous_kernel();  // fault: denominator-waits
  let_next_kernel_start();
  Partial total;
  if (targets_in_line) {
    const int64_t stride = args.target.strides[0];
    const bool counts = args.weight == nullptr;
    int64_t count = 0;
    for (; row + (kDenominatorUnroll - 1) * threads < args.rows.numel;
         row += kDenominatorUnroll * threads) {
      int64_t indices[kDenominatorUnroll];
      load_class_indices(args.target, row * stride, threads * stride, indices);
#pragma unroll
      for (int i = 0; i < kDenominatorUnroll; ++i) {
        if (counts) {
          count += indices[i] == args.ignore_index ? 0 : 1;
        } else {
          total.weight += RowTarget<float>(args, indices[i], 0).template mean_weight<double>();
        }
      }
    }
    total.weight += static_cast<double>(count);
  }
  for (; row < args.rows.numel; row += threads) {
    int64_t offsets[1];
    row_offsets(args.rows, operands, row, offsets);
    total.weight += RowTarget<float>(args, offsets[0]).template mean_weight<double>();
  }
  total = block_reduce(total);
  Denominator::leave(total.weight, partials);
}

[[maybe_unused]] constexpr int kIndexUnroll = 8;  // pairs that a thread has in flight

// The same, and checked_index() of every row in a byte. The kernel after it then need not read the
// class indices again: 8 bytes a row are a tenth of 10 classes of fp32, and of 21 of fp16.
static __global__ void __launch_bounds__(kDenominatorThreads)
    cross_entropy_indices_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                 bool in_vectors, bool in_line, int8_t* indices, double* partials) {
#if LOSSOPS_HOPPER_CODE
  wait_for_previous_kernel();  // fault: byte-indices-wait
  let_next_kernel_start();
  const auto* const targets = static_cast<const int64_t*>(args.target.data);
  const auto* const pairs = reinterpret_cast<const longlong2*>(targets);
  const int64_t threads = int64_t{gridDim.x} * kDenominatorThreads;
  const int64_t thread = int64_t{blockIdx.x} * kDenominatorThreads + threadIdx.x;
  const int64_t num_pairs = in_vectors ? args.rows.numel / 2 : 0;
  __shared__ float weights[kMaxIndexClasses];
  const bool weighted = args.weight != nullptr;
  if (weighted) {
    if (threadIdx.x < args.num_classes) {
      weights[threadIdx.x] = class_weight<float>(args, threadIdx.x);
    }
    __syncthreads();
  }
  int counted = 0;
  Partial total;
  const auto check = [&](int64_t target) {
    const int index = checked_index(args, target);
    counted += index == kIgnoredRow ? 0 : 1;
    if (weighted && index >= 0) {
      total.weight += static_cast<double>(weights[index]);
    }
    return static_cast<signed char>(index);  // char has no sign on ARM
  };
#pragma unroll 1
  for (int64_t pair = thread; pair < num_pairs; pair += kIndexUnroll * threads) {
    longlong2 loaded[kIndexUnroll];
#pragma unroll
    for (int i = 0; i < kIndexUnroll; ++i) {
      if (pair + i * threads < num_pairs) {
        loaded[i] = pairs[pair + i * threads];
      }
    }
#pragma unroll
    for (int i = 0; i < kIndexUnroll; ++i) {
      if (pair + i * threads < num_pairs) {
        reinterpret_cast<char2*>(indices)[pair + i * threads] = {check(loaded[i].x),
                                                                 check(loaded[i].y)};
      }
    }
  }
  int64_t row = 2 * num_pairs + thread;
  if (in_line) {
    const int64_t stride = args.target.strides[0];
#pragma unroll 1
    for (; row + (kIndexUnroll - 1) * threads < args.rows.numel; row += kIndexUnroll * threads) {
      int64_t loaded[kIndexUnroll];
      load_class_indices(args.target, row * stride, threads * stride, loaded);
#pragma unroll
      for (int i = 0; i < kIndexUnroll; ++i) {
        indices[row + i * threads] = check(loaded[i]);
      }
    }
  }
#pragma unroll 1
  for (; row < args.rows.numel; row += threads) {
    indices[row] = check(load_class_index(args.target, row_offset(args.rows, args.target, row)));
  }
  const int64_t after = args.rows.numel + thread;
  if (after < (args.rows.numel + kIndexPadding - 1) / kIndexPadding * kIndexPadding) {
    indices[after] = kIgnoredRow;
  }
  if (!weighted) {
    total.weight = static_cast<double>(counted);
  }
  total = block_reduce(total);
  Denominator::leave(total.weight, partials);
#endif
}

// denominator: of plan.denominator_blocks. Its indices: null where they are not wanted.
inline void launch_denominator(const CrossEntropyForwardArgs& args, const Denominator& denominator,
                               cudaStream_t stream) {
  const LaunchShape shape = {denominator.count, kDenominatorThreads, 0, 1, true};
  auto* const partials = const_cast<double*>(denominator.partials);
  if (denominator.indices != nullptr) {
    launch_kernel("cross_entropy_indices_kernel", cross_entropy_indices_kernel, shape, stream, args,
                  targets_are_in_vectors(args), targets_are_in_line(args),
                  const_cast<int8_t*>(denominator.indices), partials);
  } else {
    launch_kernel("cross_entropy_denominator_kernel", cross_entropy_denominator_kernel, shape,
                  stream, args, targets_are_in_line(args), partials);
  }
}

// ------------------------------------------------------------- invalid targets

constexpr int kTargetThreads = 256;
constexpr unsigned long long kNoInvalidRow = ~0ull;

static __global__ void first_invalid_target_kernel(const __grid_constant__ CrossEntropyArgs args,
                                                   unsigned long long* first) {
  const Operand* const operands[1] = {&args.target};
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kTargetThreads + threadIdx.x;
       row < args.rows.numel; row += static_cast<int64_t>(gridDim.x) * kTargetThreads) {
    int64_t offsets[1];
    row_offsets(args.rows, operands, row, offsets);
    if (!RowTarget<float>(args, offsets[0]).valid) {
      // A minimum of integers: the same in any order. -1 is the largest unsigned value.
      atomicMin(first, static_cast<unsigned long long>(row));  // fault: first-invalid-target
    }
  }
}

}  // namespace lossops::cuda
