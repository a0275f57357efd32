// Cross entropy of rows of half types with probability targets of the same type, whose logits a
// block holds in registers and whose probabilities it holds in shared memory.

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/probability_rows_plan.h"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_pieces.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda {
namespace probability_rows {
namespace {

// What the threads of a block know of its rows.
struct Rows {
  int64_t logits[kMaxRows];  // offsets
  int64_t probabilities[kMaxRows];
  int64_t gradients[kMaxRows];
  int64_t losses[kMaxRows];
  KeptState states[kMaxRows];
  float q_sums[kMaxRows];
  CopyBarrier arrived[kMaxRowWarps];
};

// A thread's share of a row: each warp has a piece of it, whose vectors the lanes take in turn.
template <typename scalar_t>
struct Share {
  static constexpr int kSize = kVectorSize<scalar_t>;
  static constexpr int kStride = kWarpSize * kSize;  // elements, from one vector to the next
  int count;                                         // vectors
  const scalar_t* probabilities;                     // of the first vector
  const scalar_t* far_logits;                        // of the first vector after the near ones
  Vector<scalar_t> near[kNearVectors];

  // Vector u of the logits of a row, of which this thread's are from `row` on.
  __device__ __forceinline__ void load(const scalar_t* row, int u) {
    if (u < count) {
      near[u] = load_vector(row + u * kStride, 0);
    }
  }
  __device__ __forceinline__ Vector<scalar_t> far(int u) const {
    return load_vector(far_logits, (u - kNearVectors) * kWarpSize);
  }
  __device__ __forceinline__ Vector<scalar_t> probabilities_of(int u) const {
    return load_vector(probabilities, u * kWarpSize);
  }

  __device__ __forceinline__ float max() const {
    uint32_t largest = lowest_word<scalar_t>();
#pragma unroll
    for (int u = kNearVectors; u < kVectors; ++u) {
      if (u < count) {
        largest = max_of_vector(far(u), largest);
      }
    }
#pragma unroll
    for (int u = 0; u < kNearVectors; ++u) {
      if (u < count) {
        largest = max_of_vector(near[u], largest);
      }
    }
    return max_of_elements<scalar_t>(largest);
  }
};

// Adds a thread's share as add_logits() does. Vectors that must be computed twice are left to the
// end: few lanes have any. Says which element of the share is the maximum; -1: none.
template <typename scalar_t, typename Terms>
__device__ __forceinline__ int add_share(TermSum& sum, const Terms& terms,
                                         const Share<scalar_t>& share, const Smoothing& smoothing) {
  constexpr int kSize = kVectorSize<scalar_t>;
  static_assert(kSize == kTermBatch, "vectors are batches");
  const auto coefficients_of = [&](int u, float (&q)[kSize]) {
    const Vector<scalar_t> p = share.probabilities_of(u);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      q[i] = smoothing(to_acc<float>(p.get(i)));
    }
  };
  constexpr uint32_t kMaximum = 1;
  constexpr uint32_t kInfinity = 2;
  uint32_t twice = 0;  // these two bits for each vector
  const auto add = [&](int u, const Vector<scalar_t>& vector) {
    float x[kSize];
    float q[kSize];
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = to_acc<float>(vector.get(i));
      values[i] = terms(x[i]);
    }
    float largest;
    const float total = sum_of_terms(values, largest);
    if (largest >= terms.unit) {
      twice |= kMaximum << 2 * u;
    } else {
      sum.below += total;
    }
    coefficients_of(u, q);
    sum.q_sum += pairwise_sum(q);
    const float distance = weighted_distance<false>(x, q, terms.shift);
    if (math::is_nan(distance)) {
      twice |= kInfinity << 2 * u;
    } else {
      sum.distance += distance;
    }
  };
#pragma unroll
  for (int u = 0; u < kNearVectors; ++u) {
    if (u < share.count) {
      add(u, share.near[u]);
    }
  }
#pragma unroll 1
  for (int u = kNearVectors; u < share.count; ++u) {
    add(u, share.far(u));
  }
  int maximum = -1;
#pragma unroll 1
  while (twice != 0) {
    const int at = (__ffs(static_cast<int>(twice)) - 1) / 2;
    const uint32_t what = twice >> 2 * at & 3;
    twice ^= what << 2 * at;
    Vector<scalar_t> vector;
    if (at >= kNearVectors) {
      vector = share.far(at);
    } else {
      vector = share.near[0];
#pragma unroll
      for (int u = 1; u < kNearVectors; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          vector.set_word(i, u == at ? share.near[u].word(i) : vector.word(i));
        }
      }
    }
    float x[kSize];
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] = to_acc<float>(vector.get(i));
      values[i] = terms(x[i]);
    }
    if ((what & kMaximum) != 0) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        maximum = values[i] == terms.unit ? at * Share<scalar_t>::kStride + i : maximum;
      }
      float largest;
      sum.ones += count_ones(values, terms.unit);
      sum.below_apart += sum_of_terms(values, largest);
    }
    if ((what & kInfinity) != 0) {
      float q[kSize];
      coefficients_of(at, q);
      sum.distance_apart += weighted_distance<true>(x, q, terms.shift);
    }
  }
  return maximum;
}

// The state of a piece from the sums of its lanes, each of which adds up one of four, with
// warp_sum()'s bits.
[[maybe_unused]] __device__ __forceinline__ void publish(uint32_t* words, int pieces, float max,
                                                         const TermSum& sum, float correction,
                                                         int lane) {
  const float distance = sum.all_distance();
  const float below = sum.all_below();
  const bool high = (lane & 16) != 0;
  const auto ones = static_cast<float>(sum.ones);
  const auto swap = [](float kept, float sent, int offset) {
    return kept + __shfl_xor_sync(kAllLanes, sent, offset);
  };
  const float a = swap(high ? distance : ones, high ? ones : distance, 16);
  const float b = swap(high ? sum.q_sum : below, high ? below : sum.q_sum, 16);
  const bool odd = (lane & 8) != 0;
  float total = swap(odd ? b : a, odd ? a : b, 8);
  for (int offset = 4; offset > 0; offset /= 2) {
    total = swap(total, total, offset);
  }
  if (lane % 8 == 0) {
    words[(1 + lane / 8) * pieces] = __float_as_uint(lane == 8 ? total * correction : total);
  }
  if (lane == 0) {
    words[0] = __float_as_uint(max);
  }
}

// The warps of a row meet once with a gradient, to put its softmax together, and without one only
// after all of the block's rows. Of the next row, each warp loads what it has room for.
template <typename scalar_t>
__global__ void __launch_bounds__(kMaxThreads, 2)
    cross_entropy_probability_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                          Pieces pieces, RowShares shares, Smoothing smoothing,
                                          Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr RowKind kKind = RowKind::kProbability;
  constexpr int kSize = kVectorSize<scalar_t>;
  extern __shared__ uint4 dynamic[];
  __shared__ Rows rows;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  const auto* const target = static_cast<const scalar_t*>(args.target.data);
  auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data);
  using RowShare = Share<scalar_t>;
  constexpr int kBytes = sizeof(scalar_t);
  constexpr int kNear = kNearBytes / kBytes;  // elements
  const int num_classes = static_cast<int>(args.num_classes);
  const int far_size = max(0, pieces.size - kNear);
  // [pieces.count][pieces.size], [pieces.count][far_size],
  // [rows of the block][kStateWords<kKind>][pieces.count]
  auto* const probabilities = reinterpret_cast<scalar_t*>(dynamic) + warp * pieces.size;
  auto* const far_logits =
      reinterpret_cast<scalar_t*>(dynamic) + pieces.count * pieces.size + warp * far_size;
  auto* const states = reinterpret_cast<uint32_t*>(reinterpret_cast<scalar_t*>(dynamic) +
                                                   pieces.count * (pieces.size + far_size));
  const auto states_of = [&](int n) { return states + n * kStateWords<kKind> * pieces.count; };
  CopyBarrier& arrived = rows.arrived[warp];
  const int64_t first_row = shares.first(blockIdx.x);
  const int count = shares.count(blockIdx.x, args.rows.numel);
  const int64_t stride = shares.stride(blockIdx.x);
  const int begin = warp * pieces.size;
  const int size = max(0, min(pieces.size, num_classes - begin));
  const int near = min(size, kNear);
  const int far = size - near;
  // By one thread: copies of the warp's piece of a row with these offsets.
  const auto start_far = [&](int64_t of_logits, int64_t of_probabilities) {
    arrived.expect((size + far) * kBytes);
    arrived.copy(far_logits, input + of_logits + begin + kNear, far * kBytes);
    arrived.copy(probabilities + kNear, target + of_probabilities + begin + kNear, far * kBytes);
  };
  const auto start_near = [&](int64_t of_probabilities) {
    arrived.copy(probabilities, target + of_probabilities + begin, near * kBytes);
  };
  RowShare share;
  share.probabilities = probabilities + lane * kSize;
  share.far_logits = far_logits + lane * kSize;
  share.count = max(0, (size / kSize - lane + kWarpSize - 1) / kWarpSize);
  const int first = begin + lane * kSize;
  {
    const Operand* const operands[] = {&args.input, &args.target, &args.grad_input, &args.output};
    int64_t offsets[4];
    row_offsets(args.rows, operands, first_row + min(lane, count - 1) * stride, offsets);
    const int64_t of_logits = __shfl_sync(kAllLanes, offsets[0], 0);
#pragma unroll
    for (int u = 0; u < kNearVectors; ++u) {
      share.load(input + of_logits + first, u);
    }
    if (lane == 0) {
      arrived.init();
      start_far(of_logits, offsets[1]);
      start_near(offsets[1]);
    }
    if (thread < count) {
      rows.logits[thread] = offsets[0];
      rows.probabilities[thread] = offsets[1];
      rows.gradients[thread] = offsets[2];
      rows.losses[thread] = offsets[3];
    }
  }
  let_next_kernel_start();
  __syncthreads();
  // Asked here: a kernel of its own for rows without a gradient is 7 KB of code for each dtype.
  const bool gradient_wanted = args.grad_input.data != nullptr;
  const float scale = gradient_wanted ? UnitScaleOfRows<float>(args, {}).get() : 0.0f;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const bool loads = n + 1 < count;
    arrived.wait(n % 2);
    const float piece_max = warp_max(share.max());
    TermSum sum;
    const RowTerms<false> terms(piece_max);
    const int maximum = add_share(sum, terms, share, smoothing);
    publish(states_of(n) + warp, pieces.count, piece_max, sum, terms.correction(), lane);
    if (gradient_wanted) {
      __syncthreads();
      const PieceState state =
          combine_pieces<kKind, true, false>(states_of(n), pieces, num_classes, lane);
      const float q_sum = state.q_sum;
      const auto softmax = RowSoftmax<float>::of(state.max, state.rest(), scale, q_sum);
      const LogitGradient<float, false> of_logit(softmax, scale * q_sum);
      // Only the maximum may outweigh all others: its gradient is written once more.
      const int at = softmax.one_may_outweigh() && piece_max == state.max ? maximum : -1;
      float of_maximum = 0;
      if (at >= 0) {
        of_maximum = of_logit.dense(state.max, scale, q_sum,
                                    smoothing(to_acc<float>(share.probabilities[at])));
      }
      scalar_t* const gradient = grad_input + rows.gradients[n] + first;
      const auto write = [&](int u, const Vector<scalar_t>& vector) {
        const Vector<scalar_t> p = share.probabilities_of(u);
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = of_logit.template dense<false>(to_acc<float>(vector.get(i)), scale, q_sum,
                                                     smoothing(to_acc<float>(p.get(i))));
        }
        store_vector(gradient + u * RowShare::kStride, 0, pack<scalar_t>(values));
      };
#pragma unroll 1
      for (int u = kNearVectors; u < share.count; ++u) {
        write(u, share.far(u));
      }
      __syncwarp();
      if (lane == 0 && loads) {
        start_far(rows.logits[n + 1], rows.probabilities[n + 1]);
      }
#pragma unroll
      for (int u = 0; u < kNearVectors; ++u) {
        if (u < share.count) {
          write(u, share.near[u]);
        }
        if (loads) {
          share.load(input + rows.logits[n + 1] + first, u);
        }
      }
      if (at >= 0) {
        gradient[at] = from_acc<scalar_t>(of_maximum);
      }
      __syncwarp();
    } else {
      __syncwarp();
      if (loads) {
        if (lane == 0) {
          start_far(rows.logits[n + 1], rows.probabilities[n + 1]);
        }
#pragma unroll
        for (int u = 0; u < kNearVectors; ++u) {
          share.load(input + rows.logits[n + 1] + first, u);
        }
      }
    }
    if (lane == 0 && loads) {
      start_near(rows.probabilities[n + 1]);
    }
  }
  __syncthreads();
  for (int n = warp; n < count; n += pieces.count) {
    const PieceState state = combine_pieces<kKind, true>(states_of(n), pieces, num_classes, lane);
    if (lane == 0) {
      rows.states[n] = KeptState::of(state);
      rows.q_sums[n] = state.q_sum;  // fault: probability-sums
    }
  }
  __syncthreads();
  if (warp > 0) {
    return;
  }
  Partial partial;
  if (lane < count) {
    finish_kept_row<kKind>(args, 0, 1.0f, rows.states[lane], rows.q_sums[lane], 0.0f,
                           first_row + lane * stride, rows.losses[lane], partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace
}  // namespace probability_rows

void launch_probability_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                             const Denominator&, const GradOutput&, Partial* partials,
                             const Finalize& finalize, cudaStream_t stream) {
  using namespace probability_rows;
  visit_half_type(args.input.dtype, [&](auto type) {
    const auto kernel = cross_entropy_probability_rows_kernel<typename decltype(type)::type>;
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
    launch_kernel("cross_entropy_probability_rows_kernel", kernel,
                  {plan.blocks, plan.threads, plan.shared_bytes}, stream, args, plan.pieces,
                  plan.shares, smoothing_of(args), partials, finalize);
  });
}

}  // namespace lossops::cuda
