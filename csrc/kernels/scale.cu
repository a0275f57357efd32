// Kept gradients times grad_output, in place: dense tensors times one number on the device.

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/vectorized.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

constexpr int kScaleThreads = 512;
// Vectors that a thread has in flight.
constexpr int kScaleUnroll = 4;

// Mostly the factor is 1, and there is nothing to do. So there are no more blocks than run at a
// time.
template <typename scalar_t>
__global__ void __launch_bounds__(kScaleThreads) scale_kernel(const ScaleArgs args) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const acc_t factor = load_as<acc_t>(args.factor, args.factor_dtype, 0);
  if (factor == acc_t(1)) {
    return;
  }
  auto* const data = static_cast<scalar_t*>(args.data);
  const int64_t threads = int64_t{gridDim.x} * kScaleThreads;
  const int64_t thread = int64_t{blockIdx.x} * kScaleThreads + threadIdx.x;
  const auto scaled = [&](scalar_t x) { return from_acc<scalar_t>(to_acc<acc_t>(x) * factor); };
  const int64_t vectors = is_vector_aligned(data) ? args.numel / kSize : 0;
  for (int64_t first = thread; first < vectors; first += kScaleUnroll * threads) {
    Vector<scalar_t> loaded[kScaleUnroll];
#pragma unroll
    for (int u = 0; u < kScaleUnroll; ++u) {
      if (first + u * threads < vectors) {
        loaded[u] = load_vector(data, first + u * threads);
      }
    }
#pragma unroll
    for (int u = 0; u < kScaleUnroll; ++u) {
      if (first + u * threads < vectors) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          loaded[u].set(i, scaled(loaded[u].get(i)));
        }
        store_vector(data, first + u * threads, loaded[u]);
      }
    }
  }
  for (int64_t i = vectors * kSize + thread; i < args.numel; i += threads) {
    data[i] = scaled(data[i]);
  }
}

}  // namespace

void launch_scale(const ScaleArgs& args, Context context) {
  if (args.numel == 0) {
    return;
  }
  visit_floating(args.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    const int64_t blocks =
        std::min(ceil_div(args.numel, int64_t{kVectorSize<scalar_t>} * kScaleThreads),
                 most_blocks_of_kept(kScaleThreads));
    launch_kernel("scale_kernel", scale_kernel<scalar_t>, {blocks, kScaleThreads},
                  static_cast<cudaStream_t>(context), args);
  });
}

}  // namespace lossops::cuda
