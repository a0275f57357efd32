// Sums over one axis of a matrix that is computed as it is read:
//   result[o] = sum_r source(o, r),   o in [0, outputs), r in [0, reduced)
// In two stages over r, in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/launch.cuh"

namespace lossops::cuda {

constexpr int kColumnReduceThreads = 256;
constexpr int kColumnReduceMaxX = 32;
// Enough blocks to fill any GPU; each still sums at least this many terms a thread.
constexpr int64_t kColumnReduceBlocks = 4096;
constexpr int64_t kColumnReduceMinTerms = 16;

// Threads along x take neighbouring outputs, threads along y neighbouring terms. The sums of
// several splits are kept in partials, (splits, outputs); of one, null there, they go to the sink.
template <typename Source, typename Sink>
__global__ void __launch_bounds__(kColumnReduceThreads)
    column_reduce_kernel(const __grid_constant__ Source source, const __grid_constant__ Sink sink,
                         double* partials, int64_t outputs, int64_t reduced,
                         int64_t terms_per_split) {
  __shared__ double sums[kColumnReduceThreads];
  const int64_t output = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t begin = blockIdx.y * terms_per_split;
  const int64_t end = begin + terms_per_split < reduced ? begin + terms_per_split : reduced;
  double sum = 0;
  if (output < outputs) {
    for (int64_t r = begin + threadIdx.y; r < end; r += blockDim.y) {
      sum += source(output, r);
    }
  }
  const unsigned slot = threadIdx.y * blockDim.x + threadIdx.x;
  sums[slot] = sum;
  __syncthreads();
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y < half) {
      sums[slot] += sums[slot + half * blockDim.x];
    }
    __syncthreads();
  }
  if (threadIdx.y == 0 && output < outputs) {
    if (partials != nullptr) {
      partials[blockIdx.y * outputs + output] = sums[threadIdx.x];
    } else {
      sink(output, sums[threadIdx.x]);
    }
  }
}

// Such partials, as a source.
struct ColumnPartials {
  const double* data;
  int64_t outputs;

  __device__ __forceinline__ double operator()(int64_t output, int64_t split) const {
    return data[split * outputs + output];
  }
};

struct ColumnReducePlan {
  int threads_x;
  int threads_y;
  int64_t blocks_x;
  int64_t splits;
  int64_t terms_per_split;

  ColumnReducePlan(int64_t outputs, int64_t reduced) {
    // Of few terms, threads along x take what those along y would have nothing to do for.
    int x = 1;
    while (x < outputs && (x < kColumnReduceMaxX ||
                           (x < kColumnReduceThreads && kColumnReduceThreads / x > reduced))) {
      x *= 2;
    }
    threads_x = x;
    threads_y = kColumnReduceThreads / x;
    blocks_x = (outputs + x - 1) / x;
    const int64_t useful = reduced / (kColumnReduceMinTerms * threads_y);
    const int64_t wanted = kColumnReduceBlocks / std::max<int64_t>(blocks_x, 1);
    splits = std::max<int64_t>(1, std::min(useful, wanted));
    terms_per_split = (reduced + splits - 1) / splits;
  }

  int64_t scratch(int64_t outputs) const { return splits > 1 ? splits * outputs : 0; }
};

namespace detail {

template <typename Source, typename Sink>
void launch_column_reduce(const Source& source, const Sink& sink, const ColumnReducePlan& plan,
                          double* partials, int64_t outputs, int64_t terms, int64_t splits,
                          int64_t terms_per_split, cudaStream_t stream) {
  LaunchShape shape{plan.blocks_x, plan.threads_x};
  shape.blocks_y = splits;
  shape.threads_y = plan.threads_y;
  launch_kernel("column_reduce_kernel", column_reduce_kernel<Source, Sink>, shape, stream, source,
                sink, partials, outputs, terms, terms_per_split);
}

}  // namespace detail

// In one stage, for few terms. sink(output, sum) gets every result once.
template <typename Source, typename Sink>
void column_fold(const Source& source, const Sink& sink, int64_t outputs, int64_t terms,
                 cudaStream_t stream) {
  detail::launch_column_reduce(source, sink, ColumnReducePlan(outputs, terms), nullptr, outputs,
                               terms, 1, terms, stream);
}

// In two stages.
template <typename Source, typename Sink>
void column_reduce(const Source& source, const Sink& sink, int64_t outputs, int64_t reduced,
                   double* scratch, cudaStream_t stream) {
  if (outputs == 0) {
    return;
  }
  const ColumnReducePlan plan(outputs, reduced);
  if (plan.splits == 1) {
    column_fold(source, sink, outputs, reduced, stream);
    return;
  }
  detail::launch_column_reduce(source, sink, plan, scratch, outputs, reduced, plan.splits,
                               plan.terms_per_split, stream);
  column_fold(ColumnPartials{scratch, outputs}, sink, outputs, plan.splits, stream);
}

}  // namespace lossops::cuda
