// Cross entropy of rows of half types that a few warps hold in their registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/class_index/half_rows_plan.h"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/unit_cells.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"

namespace lossops::cuda {
namespace half_rows {
namespace {

// A thread's share of a row: each warp has a part of it, whose vectors the lanes take in turn. If
// rows are not aligned, vectors are read and written by the words they lie in.
template <typename scalar_t, bool kAligned>
struct Share {
  static constexpr int kSize = kVectorSize<scalar_t>;
  using Cells = UnitCells<kSize>;
  static constexpr int kVectors = kThreadLogits / kSize;
  static constexpr int kStride = kWarpSize * kSize;  // from one vector to the next
  int num_classes;
  int first;        // class of the thread's first logit
  int count;        // vectors
  uint32_t absent;  // two logits that are not there
  Vector<scalar_t> vectors[kVectors];
  Cells read[kAligned ? 1 : kVectors];  // words that settle() makes vectors of

  __device__ __forceinline__ Share(int num_classes_, uint32_t absent_)
      : num_classes(num_classes_),
        first(static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize * kThreadLogits +
              static_cast<int>(threadIdx.x) % kWarpSize * kSize),
        count((num_classes - first + kStride - 1) / kStride),
        absent(absent_) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        vectors[u].set_word(i, absent);
      }
    }
  }

  // Vector u of a row, if `wanted`.
  __device__ __forceinline__ void load(const scalar_t* row, int u, bool wanted = true) {
    if (wanted && u < count) {
      row += first + u * kStride;
      if constexpr (kAligned) {
        vectors[u] = load_vector(row, 0);
      } else {
        read[u].load_words(reinterpret_cast<const char*>(row));
      }
    }
  }
  // Makes vectors of what was read of a row.
  __device__ __forceinline__ void settle(const scalar_t* row) {
    if constexpr (!kAligned) {
      const uint32_t shift = Cells::shift_of(reinterpret_cast<const char*>(row));
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        read[u].settle_words(shift);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          vectors[u].set_word(i, u < count ? read[u].cells[i] : absent);
        }
      }
    }
  }
  __device__ __forceinline__ void load(const scalar_t* row) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      load(row, u);
    }
  }

  // Vector u of a row's gradient. kSeldom: where rows are not aligned, element by element, for
  // little machine code. Without it, all lanes of a warp must call this.
  template <bool kSeldom = false>
  __device__ __forceinline__ void store(scalar_t* row, int u, const float (&values)[kSize]) const {
    row += first + u * kStride;
    if constexpr (!kAligned && kSeldom) {
      if (u < count) {
        Cells::template pack<scalar_t>(values).store_strided(reinterpret_cast<char*>(row),
                                                             sizeof(scalar_t));
      }
    } else if constexpr (!kAligned) {
      const Cells cells = Cells::template pack<scalar_t>(values);
      const uint32_t before = cells.cell_before();
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      const bool is_last = first + u * kStride + kSize >= num_classes;
      const bool has_next = !is_last && lane < kWarpSize - 1;  // fault: half-rows-words
      if (u < count) {
        cells.store_words(reinterpret_cast<char*>(row), before, lane > 0, has_next);
      }
    } else if (u < count) {
      const Vector<scalar_t> vector = pack<scalar_t>(values);
      // By name: the compiler would cut the store in four.
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(row), "r"(vector.word(0)), "r"(vector.word(1)), "r"(vector.word(2)),
                     "r"(vector.word(3))
                   : "memory");
    }
  }

  __device__ __forceinline__ bool has(int index) const {
    const int distance = index - first;
    return distance >= 0 && distance < kVectors * kStride && distance % kStride < kSize;
  }

  // Takes a logit that this thread has out of the row.
  __device__ __forceinline__ float take(int index) {
    const int vector = (index - first) / kStride;
    const int word = index % kSize / 2;
    const uint32_t others = index % 2 == 0 ? 0xffff0000u : 0xffffu;
    const uint32_t fill = absent & ~others;
    uint32_t taken = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u == vector) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t own = vectors[u].word(i);
          taken = i == word ? own : taken;
          vectors[u].set_word(i, i == word ? (own & others) | fill : own);
        }
      }
    }
    return word_element<scalar_t>(taken, index % 2);
  }
};

// What the threads of a block know of its rows.
struct Rows {
  float4 parts[kMaxRows];    // of the sum of each row's other exponentials: the warps'
  int64_t logits[kMaxRows];  // offsets
  int64_t gradients[kMaxRows];
  int index[kMaxRows];  // checked_index()
  float weight[kMaxRows];
  float scaled[kMaxRows];  // the weight, times the mean's scale
  float x_at_index[kMaxRows];
  float reference[kMaxRows];  // IndexRow's
  float rest[kMaxRows];
  float first_at_index;
  uint32_t left;  // a bit a row: those that are not plain, or whose gradients are not
};
static_assert(kMaxThreads / kWarpSize == 4, "Rows::parts");

// Of this warp.
[[maybe_unused]] __device__ __forceinline__ float& part_of(Rows& rows, int n) {
  return reinterpret_cast<float*>(rows.parts + n)[threadIdx.x / kWarpSize];
}

[[maybe_unused]] __device__ __forceinline__ float sum_of_parts(const Rows& rows, int n) {
  const float4 all = rows.parts[n];
  return (all.x + all.y) + (all.z + all.w);
}

// Relative to the logit at the class index.
[[maybe_unused]] __device__ __forceinline__ float others_of(const Rows& rows, int n,
                                                            float x_at_index) {
  return PlainTerms(x_at_index).corrected(sum_of_parts(rows, n), x_at_index);
}

// A row that is not plain, reduced by the block.
template <typename scalar_t, bool kAligned>
__device__ __forceinline__ IndexRow reduce_shifted(const Share<scalar_t, kAligned>& share,
                                                   Rows& rows, int n, float x_at_index) {
  constexpr int kSize = kVectorSize<scalar_t>;
  uint32_t largest = share.absent;
#pragma unroll
  for (const Vector<scalar_t>& vector : share.vectors) {
    largest = max_of_vector(vector, largest);
  }
  constexpr float kLowest = -HUGE_VALF;
  if (threadIdx.x == 0) {
    rows.parts[n] = {kLowest, kLowest, kLowest, kLowest};
  }
  __syncthreads();
  const float warp_largest = warp_max(max_of_elements<scalar_t>(largest));
  if (threadIdx.x % kWarpSize == 0) {
    part_of(rows, n) = warp_largest;
  }
  __syncthreads();
  const float4 maxima = rows.parts[n];
  const float max =
      math::max_number(math::max_number(maxima.x, maxima.y), math::max_number(maxima.z, maxima.w));
  const RowTerms<false> terms(max);
  float sum = 0;
#pragma unroll
  for (const Vector<scalar_t>& vector : share.vectors) {
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      values[i] = terms(to_acc<float>(vector.get(i)));
    }
    sum += pairwise_sum(values);
  }
  __syncthreads();  // all have read the maxima
  if (threadIdx.x == 0) {
    rows.parts[n] = {};
  }
  __syncthreads();
  sum = warp_sum(sum);
  if (threadIdx.x % kWarpSize == 0) {
    part_of(rows, n) = sum;
  }
  __syncthreads();
  return IndexRow::of(terms, max, sum_of_parts(rows, n), x_at_index);
}

// Each exponential is computed once, relative to the logit at the class index, and kept for the
// gradient. While a row is computed, the next one is on its way. Rows that are not plain, and whose
// gradients are not, are read again in the end.
template <typename scalar_t, bool kAligned, bool kGradient>
__global__ void __launch_bounds__(kMaxThreads, min_blocks(kGradient, kAligned))
    cross_entropy_half_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                   int rows_of_block, Denominator denominator, Partial* partials,
                                   Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  using RowShare = Share<scalar_t, kAligned>;
  constexpr int kSize = RowShare::kSize;
  constexpr int kVectors = RowShare::kVectors;
  __shared__ Rows rows;
  const int thread = static_cast<int>(threadIdx.x);
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data);
  RowShare share(static_cast<int>(args.num_classes), lowest_word<scalar_t>());
  const int64_t first_row = int64_t{blockIdx.x} * rows_of_block;
  share.load(input + row_offset(args.rows, args.input, first_row));
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  const int count = static_cast<int>(min(int64_t{rows_of_block}, args.rows.numel - first_row));
  const int64_t row_of_thread = first_row + thread;
  if (thread < kWarpSize) {
    if (thread < count) {
      rows.logits[thread] = row_offset(args.rows, args.input, row_of_thread);
      if constexpr (kGradient) {
        rows.gradients[thread] = row_offset(args.rows, args.grad_input, row_of_thread);
      }
      const int index = checked_index(
          args, load_class_index(args.target, row_offset(args.rows, args.target, row_of_thread)));
      rows.index[thread] = index;
      rows.weight[thread] = row_weight(args, index);
      rows.parts[thread] = {};
    }
    unit.wait(args, denominator);
    if (kGradient && thread < count) {
      rows.scaled[thread] = unit.get() * rows.weight[thread];
    }
  }
  __syncthreads();
  // The logit at the class index of the next row is read as its vectors are, by every thread; that
  // of the first row by one, for all.
  share.settle(input + rows.logits[0]);
  if (share.has(rows.index[0])) {
    rows.first_at_index = share.take(rows.index[0]);
  }
  __syncthreads();
  float next_at_index = rows.first_at_index;
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const int index = rows.index[n];
    const int next_index = n + 1 < count ? rows.index[n + 1] : -1;  // fault: half-rows-load
    const bool loads = next_index >= 0;
    const scalar_t* const next = input + rows.logits[loads ? n + 1 : n];
    const float x_at_index = next_at_index;
    if (loads) {
      next_at_index = to_acc<float>(next[next_index]);
    }
    scalar_t* const gradient = kGradient ? grad_input + rows.gradients[n] : nullptr;
    if (index < 0) {
      const float value = gradient_without_loss(index);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if constexpr (kGradient) {
          float values[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            values[i] = value;
          }
          share.store(gradient, u, values);
        }
        share.load(next, u, loads);
      }
      continue;
    }
    if (n > 0) {
      share.settle(input + rows.logits[n]);
    }
    const bool has_index = share.has(index);
    if (has_index) {
      share.take(index);
      rows.x_at_index[n] = x_at_index;
    }
    const PlainTerms terms(x_at_index);
    float powers[kGradient ? kThreadLogits : kSize];
    float sum = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      float values[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[i] = terms(to_acc<float>(share.vectors[u].get(i)));
        powers[kGradient ? u * kSize + i : i] = values[i];
      }
      sum += pairwise_sum(values);
      share.load(next, u, loads);
    }
    sum = warp_sum(sum);
    if (thread % kWarpSize == 0) {
      part_of(rows, n) = sum;
    }
    if constexpr (kGradient) {
      __syncthreads();
      const float others = others_of(rows, n, x_at_index);
      const float scaled = rows.scaled[n];
      const bool writes = IndexRow::may_be_plain(others, x_at_index) && gradient_is_plain(scaled);
      // IndexRow::finish()'s, and LogitGradient's
      const float factor = math::divide_by_one_plus(scaled, others);
      const float factor_of_terms = factor * terms.correction(x_at_index);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = factor_of_terms * powers[u * kSize + i];
        }
        if (writes) {
          share.store(gradient, u, values);
        }
      }
      if constexpr (!kAligned) {
        __syncwarp();  // a neighbouring lane may have written the word of gradient[index]
      }
      if (writes && has_index) {
        gradient[index] = from_acc<scalar_t>(-factor * others);
      }
    }
  }
  __syncthreads();
  if (thread < kWarpSize) {
    bool again = false;
    if (thread < count) {
      IndexRow row;
      if (rows.index[thread] >= 0) {
        const float x_at_index = rows.x_at_index[thread];
        row = IndexRow::plain(others_of(rows, thread, x_at_index), x_at_index);
        again = !IndexRow::may_be_plain(-row.rest, row.reference) ||
                (kGradient && !gradient_is_plain(rows.scaled[thread]));
      }
      rows.reference[thread] = row.reference;
      rows.rest[thread] = row.rest;
    }
    const uint32_t left = __ballot_sync(kAllLanes, again);
    if (thread == 0) {
      rows.left = left;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t left = rows.left; left != 0; left &= left - 1) {
    const int n = __ffs(static_cast<int>(left)) - 1;
    const int index = rows.index[n];
    const float x_at_index = rows.x_at_index[n];
    RowShare again(static_cast<int>(args.num_classes), lowest_word<scalar_t>());
    again.load(input + rows.logits[n]);
    again.settle(input + rows.logits[n]);
    const bool has_index = again.has(index);
    if (has_index) {
      again.take(index);
    }
    IndexRow row = {rows.reference[n], rows.rest[n]};
    if (!IndexRow::may_be_plain(-row.rest, x_at_index)) {
      row = reduce_shifted(again, rows, n, x_at_index);
      if (thread == 0) {
        rows.reference[n] = row.reference;
        rows.rest[n] = row.rest;
      }
    }
    if constexpr (kGradient) {
      const float scaled = rows.scaled[n];
      const auto finished = row.finish<true>(x_at_index, scaled, 1.0f);
      const LogitGradient<float, false> of_logit(finished.softmax, scaled);
      scalar_t* const gradient = grad_input + rows.gradients[n];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          values[i] = to_acc<float>(again.vectors[u].get(i));
        }
        of_logit.replace(values);
        again.template store<true>(gradient, u, values);
      }
      if (has_index) {
        gradient[index] = from_acc<scalar_t>(finished.gradient_at_index);
      }
    }
  }
  if (thread >= kWarpSize) {
    return;
  }
  __syncwarp();
  Partial partial;
  if (thread < count) {
    const float weight = rows.weight[thread];
    const IndexRow row{rows.reference[thread], rows.rest[thread]};
    const float loss = rows.index[thread] >= 0
                           ? row.finish<true>(rows.x_at_index[thread], 1.0f, weight).loss
                           : gradient_without_loss(rows.index[thread]);
    record_row(
        args, loss, weight, row, row_of_thread,
        [&](int64_t number) { return row_offset(args.rows, args.output, number); }, partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace
}  // namespace half_rows

void launch_half_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                      const Denominator& denominator, const GradOutput&, Partial* partials,
                      const Finalize& finalize, cudaStream_t stream) {
  using namespace half_rows;
  visit_half_type(args.input.dtype, [&](auto type) {
    visit_bool(plan.aligned, [&](auto aligned) {
      visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
        launch_kernel(
            "cross_entropy_half_rows_kernel",
            cross_entropy_half_rows_kernel<typename decltype(type)::type, decltype(aligned)::value,
                                           decltype(gradient)::value>,
            {plan.blocks, plan.threads, 0, 1, denominator.is_left()}, stream, args, plan.rows,
            denominator, partials, finalize);
      });
    });
  });
}

}  // namespace lossops::cuda
