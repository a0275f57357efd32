#include "kernels/cross_entropy_float_rows.cuh"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cross_entropy_staged.cuh"
#include "kernels/device.cuh"
#include "kernels/launch.cuh"
#include "kernels/vectorized.cuh"
#include "kernels/warp_reduce.cuh"

namespace lossops::cuda {
namespace {

constexpr int kSize = kVectorSize<float>;
// Vectors of a row that a thread holds.
constexpr int kVectors = 8;
constexpr int kThreadLogits = kVectors * kSize;
constexpr int64_t kMaxClasses = 4096;
constexpr int kMaxThreads = kMaxClasses / kThreadLogits;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
// Of a multiprocessor: with 64 registers, or 72, where 64 spill. Measured on an H200: with 8 the
// steps of 262144x1000 take 9 % longer.
constexpr int min_blocks(bool gradient) { return gradient ? 7 : 8; }
// Of words without a gradient. Forward of 32768x1001 takes 15 % longer with 8, where registers
// spill, 6 % with 7, 3 % with 5.
constexpr int kMinWordBlocks = 6;
// Rows that a block takes one after the other, at most: a thread of a warp prepares and finishes
// each.
constexpr int kMaxRows = kWarpSize;
// A block has rows of so many bytes, and so many of them at most, unless there are few or very
// many. Measured on an H200, steps: of 4096 classes, 2 rows take 1 % longer than 1, 4 rows 4 %; of
// 1000, 4 rows 1 % longer than 2, 8 rows 3 %, and forward with 2 rows 5 % longer than with 8.
constexpr int64_t kForwardBytes = 64 << 10;
constexpr int64_t kForwardRows = 8;
constexpr int64_t kGradientBytes = 16 << 10;
constexpr int64_t kGradientRows = 2;
// With a gradient, of words that leave an eighth of the threads' room empty. Measured on an H200,
// steps: 262144x505 takes 20 % less with 8 rows than with 2, 65536x3201 7 % less with 2 than
// with 1.
constexpr int64_t kLooseBytes = 30 << 10;
// Blocks, unless there are so many rows that each has kMaxRows.
constexpr int64_t kMaxBlocks = 131072;

// A thread's share of a row of whole vectors: each warp has a part of it, whose vectors the lanes
// take in turn. What is not there is -inf.
template <bool kAligned>
struct VectorShare {
  static constexpr int kAccesses = kVectors;
  static constexpr int kWidth = kAligned ? kVectorBytes : sizeof(float);  // of an access
  static constexpr int kStride = kWarpSize * kSize;  // from one vector to the next
  int first;                                         // class of the thread's first logit
  int count;                                         // vectors, and more where there is room
  Vector<float> vectors[kVectors];

  __device__ __forceinline__ explicit VectorShare(int num_classes)
      : first(static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize * kThreadLogits +
              static_cast<int>(threadIdx.x) % kWarpSize * kSize),
        count((num_classes - first + kStride - 1) / kStride) {
#pragma unroll
    for (Vector<float>& vector : vectors) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        vector.set(i, -math::infinity<float>());
      }
    }
  }

  template <typename T>
  __device__ __forceinline__ T* vector_of(T* row, int u) const {
    return row + first + u * kStride;
  }

  __device__ __forceinline__ Vector<float> read(const float* row, int u) const {
    return load_vector_at(vector_of(row, u), kWidth);
  }
  __device__ __forceinline__ void write(float* row, int u, const Vector<float>& vector) const {
    store_vector_at(vector_of(row, u), kWidth, vector);
  }

  // Vector u of a row, if it is one of the first `wanted`. By name: the compiler would branch
  // around each of these.
  __device__ __forceinline__ void load(const float* row, int u, int wanted) {
    if constexpr (kAligned) {
      float (&to)[kSize] = vectors[u].values;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.lt.s32 wanted, %4, %5;\n"
          " @wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%6];\n}"
          : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
          : "r"(u), "r"(wanted), "l"(vector_of(row, u))
          : "memory");
    } else if (u < wanted) {
      vectors[u] = read(row, u);
    }
  }
  __device__ __forceinline__ void store(float* row, int u, int wanted,
                                        const Vector<float>& vector) const {
    if constexpr (kAligned) {
      const float (&from)[kSize] = vector.values;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.lt.s32 wanted, %4, %5;\n"
          " @wanted st.global.v4.f32 [%6], {%0, %1, %2, %3};\n}"
          :
          : "f"(from[0]), "f"(from[1]), "f"(from[2]), "f"(from[3]), "r"(u), "r"(wanted),
            "l"(vector_of(row, u))
          : "memory");
    } else if (u < wanted) {
      write(row, u, vector);
    }
  }

  // Of vector u, if it is there, and `least`.
  __device__ __forceinline__ float least_of_vector(int u, float least) const {
    return u < count ? ::fminf(least_of(vectors[u].values), least) : least;
  }

  __device__ __forceinline__ bool has(int index) const {
    const int distance = index - first;
    return distance >= 0 && distance < kVectors * kStride && distance % kStride < kSize;
  }
};

// Of a row of other counts of classes, which vectors could not all access: the lanes take the
// classes in turn. Four of a thread's are its vector u.
struct WordShare {
  static constexpr int kAccesses = kThreadLogits;
  int first;  // class of the thread's first logit
  int count;  // logits, and more where there is room
  Vector<float> vectors[kVectors];

  struct Word {
    float values[1];
  };

  __device__ __forceinline__ explicit WordShare(int num_classes)
      : first(static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize * kThreadLogits +
              static_cast<int>(threadIdx.x) % kWarpSize),
        count((num_classes - first + kWarpSize - 1) / kWarpSize) {
#pragma unroll
    for (Vector<float>& vector : vectors) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        vector.set(i, -math::infinity<float>());
      }
    }
  }

  __device__ __forceinline__ Word read(const float* row, int u) const {
    return {row[first + u * kWarpSize]};
  }
  __device__ __forceinline__ void write(float* row, int u, const Word& word) const {
    row[first + u * kWarpSize] = word.values[0];
  }

  // As VectorShare's, of the first `wanted` logits.
  __device__ __forceinline__ void load(const float* row, int u, int wanted) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int word = u * kSize + i;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.lt.s32 wanted, %1, %2;\n"
          " @wanted ld.global.f32 %0, [%3];\n}"
          : "+f"(vectors[u].values[i])
          : "r"(word), "r"(wanted), "l"(row + first + word * kWarpSize)
          : "memory");
    }
  }
  __device__ __forceinline__ void store(float* row, int u, int wanted,
                                        const Vector<float>& vector) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int word = u * kSize + i;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.lt.s32 wanted, %1, %2;\n"
          " @wanted st.global.f32 [%3], %0;\n}"
          :
          : "f"(vector.values[i]), "r"(word), "r"(wanted), "l"(row + first + word * kWarpSize)
          : "memory");
    }
  }

  __device__ __forceinline__ float least_of_vector(int u, float least) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (u * kSize + i < count) {
        least = ::fminf(vectors[u].values[i], least);
      }
    }
    return least;
  }

  __device__ __forceinline__ bool has(int index) const {
    const int distance = index - first;
    return distance >= 0 && distance < kThreadLogits * kWarpSize && distance % kWarpSize == 0;
  }
};

// What the threads of a block know of its rows.
struct Rows {
  float4 parts[kMaxRows][kMaxWarps];  // the warps' OnlineSoftmax: max, ones, below
  int64_t logits[kMaxRows];           // offsets
  int64_t gradients[kMaxRows];
  int index[kMaxRows];  // checked_index()
  float weight[kMaxRows];
  float scaled[kMaxRows];  // the weight, times the mean's scale
};

// Of the warps' parts.
[[maybe_unused]] __device__ __forceinline__ OnlineSoftmax<float> softmax_of(
    const float4 (&parts)[kMaxWarps]) {
  OnlineSoftmax<float> softmax;
  float4 part[kMaxWarps];
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) {
    part[w] = parts[w];
    softmax.max = math::max_number(part[w].x, softmax.max);
  }
  const float shift = softmax_shift(softmax.max);
#pragma unroll
  for (int w = 0; w < kMaxWarps; ++w) {
    const bool has_max = part[w].x == softmax.max;
    const float factor = math::exp_in_sum<true>(part[w].x - shift);
    softmax.ones += has_max ? part[w].y : 0.0f;
    softmax.below = ::fmaf(has_max ? part[w].z : part[w].y + part[w].z, factor, softmax.below);
  }
  return softmax;
}

// A warp adds up its part of a row against the part's maximum; what the warps have is joined once a
// row. While a row is computed, the next one is on its way.
template <typename Share, bool kGradient>
__global__ void __launch_bounds__(kMaxThreads, std::is_same_v<Share, WordShare> && !kGradient
                                                   ? kMinWordBlocks
                                                   : min_blocks(kGradient))
    cross_entropy_float_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                    int rows_of_block, Denominator denominator, Partial* partials,
                                    Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  __shared__ Rows rows;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const auto* const input = static_cast<const float*>(args.input.data);
  auto* const grad_input = static_cast<float*>(args.grad_input.data);
  Share share(static_cast<int>(args.num_classes));
  const int64_t first_row = int64_t{blockIdx.x} * rows_of_block;
  const float* const first_logits = input + row_offset(args.rows, args.input, first_row);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    share.load(first_logits, u, share.count);
  }
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  const int count = static_cast<int>(min(int64_t{rows_of_block}, args.rows.numel - first_row));
  const int64_t row_of_lane = first_row + lane;
  float x_of_lane = 0;  // at its row's class index
  if ((kGradient || thread < kWarpSize) && lane < count) {
    const int64_t offset = row_offset(args.rows, args.input, row_of_lane);
    const int index = checked_index(
        args, load_class_index(args.target, row_offset(args.rows, args.target, row_of_lane)));
    if (index >= 0) {
      x_of_lane = input[offset + index];
    }
    if (thread < kWarpSize) {
      rows.logits[lane] = offset;
      if constexpr (kGradient) {
        rows.gradients[lane] = row_offset(args.rows, args.grad_input, row_of_lane);
      }
      rows.index[lane] = index;
      rows.weight[lane] = row_weight(args, index);
#pragma unroll
      for (int w = 1; w < kMaxWarps; ++w) {
        rows.parts[lane][w] = {-math::infinity<float>(), 0, 0, 0};
      }
    }
  }
  if (thread < kWarpSize) {
    unit.wait(args, denominator);
    if (kGradient && lane < count) {
      rows.scaled[lane] = unit.get() * rows.weight[lane];
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const int index = rows.index[n];
    const bool loads = n + 1 < count && rows.index[n + 1] >= 0;
    const float* const next = input + rows.logits[loads ? n + 1 : n];
    const int wanted = loads ? share.count : 0;
    float* const gradient = kGradient ? grad_input + rows.gradients[n] : nullptr;
    if (index < 0) {
      Vector<float> vector;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        vector.set(i, gradient_without_loss(index));
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if constexpr (kGradient) {
          share.store(gradient, u, share.count, vector);
        }
        share.load(next, u, wanted);
      }
      continue;
    }
    float max = -math::infinity<float>();
    float least = math::infinity<float>();
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      max = __uint_as_float(max_of_vector(share.vectors[u], __float_as_uint(max)));
      if constexpr (kGradient) {
        least = share.least_of_vector(u, least);
      }
    }
    OnlineSoftmax<float> softmax;
    softmax.max = warp_max(max);
    const RowTerms<true> terms(softmax.max);
    TermSum sum;
#pragma unroll
    for (int u = 0; u < kVectors; u += 2) {
      float values[2 * kSize];
#pragma unroll
      for (int i = 0; i < 2 * kSize; ++i) {
        values[i] = terms(share.vectors[u + i / kSize].get(i % kSize));
      }
      sum.add(values, terms.unit);
      if constexpr (!kGradient) {
        share.load(next, u, wanted);
        share.load(next, u + 1, wanted);
      }
    }
    softmax.ones = static_cast<float>(__reduce_add_sync(kAllLanes, sum.ones));
    softmax.below = warp_sum(sum.below);
    if (lane == 0) {
      rows.parts[n][thread / kWarpSize] = {softmax.max, softmax.ones, softmax.below, 0};
    }
    if constexpr (kGradient) {
      if (blockDim.x > kWarpSize) {
        __syncthreads();
        softmax = softmax_of(rows.parts[n]);
      }
      const float x_at_index = __shfl_sync(kAllLanes, x_of_lane, n);
      const float scaled = rows.scaled[n];
      const auto row_softmax = RowSoftmax<float>::of(softmax.max, softmax.rest(), scaled, 1.0f);
      const LogitGradient<float, true> of_logit(row_softmax, scaled);
      const bool direct = of_logit.is_direct(least);
      const int direct_count = direct ? share.count : 0;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        Vector<float> vector = share.vectors[u];
        of_logit.replace_direct(vector.values);
        share.store(gradient, u, direct_count, vector);
        share.load(next, u, wanted);
      }
      if (!direct) {
        // Where one formula does not do for all of a thread's logits, they are read once more.
        const float* const logits = input + rows.logits[n];
#pragma unroll 1
        for (int u = 0; u < min(share.count, Share::kAccesses); ++u) {
          auto read = share.read(logits, u);
          of_logit.replace(read.values);
          share.write(gradient, u, read);
        }
      }
      if (share.has(index)) {
        // By the thread that wrote it before.
        gradient[index] = row_softmax.gradient_at_index(x_at_index);
      }
    }
  }
  __syncthreads();
  if (thread >= kWarpSize) {
    return;
  }
  Partial partial;
  if (thread < count) {
    const int index = rows.index[thread];
    const float weight = rows.weight[thread];
    OnlineSoftmax<float> softmax;
    float loss = gradient_without_loss(index);
    if (index >= 0) {
      softmax = softmax_of(rows.parts[thread]);
      loss = sparse_row_loss(softmax.max, softmax.rest(), x_of_lane, weight);
    }
    record_row(
        args, loss, weight, softmax.max, softmax.rest(), row_of_lane,
        [&](int64_t number) { return row_offset(args.rows, args.output, number); }, partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace

FloatRowPlan plan_float_rows(const CrossEntropyForwardArgs& args) {
  FloatRowPlan plan;
  const DeviceLimits limits = current_device_limits();
  if (!limits.hopper || args.input.dtype != DType::kFloat32 || args.dense() || args.acc_double ||
      args.input_class_stride != 1 || args.num_classes * int64_t{sizeof(float)} < kMinStagedBytes ||
      args.num_classes > kMaxClasses) {
    return plan;
  }
  plan.words = args.num_classes % kSize != 0;
  plan.threads =
      static_cast<int>(ceil_div(args.num_classes, kWarpSize * kThreadLogits)) * kWarpSize;
  const int64_t room = int64_t{plan.threads} * kThreadLogits;
  // Words of several warps that leave more of it empty are faster staged. Measured on an H200,
  // steps: 262144x1030 takes 49 % longer here, 65536x3201 as long.
  if (plan.words && plan.threads > kWarpSize && 32 * args.num_classes < 25 * room) {
    plan.threads = 0;
    return plan;
  }
  const bool loose = plan.words && 8 * args.num_classes < 7 * room;
  const bool gradient = args.grad_input.data != nullptr;
  plan.aligned = rows_are_aligned(args);
  const int64_t bytes = gradient ? (loose ? kLooseBytes : kGradientBytes) : kForwardBytes;
  const int64_t fit = bytes / (args.num_classes * int64_t{sizeof(float)});
  const int64_t resident =
      int64_t{limits.multiprocessors} * min_blocks(gradient) * (kMaxThreads / plan.threads);
  const int64_t rows = std::min(
      {fit, gradient && !loose ? kGradientRows : kForwardRows, args.rows.numel / resident});
  plan.rows = static_cast<int>(
      std::clamp<int64_t>(std::max(rows, ceil_div(args.rows.numel, kMaxBlocks)), 1, kMaxRows));
  plan.blocks = ceil_div(args.rows.numel, int64_t{plan.rows});
  return plan;
}

void launch_float_rows(const CrossEntropyForwardArgs& args, const FloatRowPlan& plan,
                       const Denominator& denominator, Partial* partials, const Finalize& finalize,
                       cudaStream_t stream) {
  const auto launch = [&](auto share, auto gradient) {
    launch_kernel(
        "cross_entropy_float_rows_kernel",
        cross_entropy_float_rows_kernel<typename decltype(share)::type, decltype(gradient)::value>,
        {plan.blocks, plan.threads, 0, 1, denominator.is_computed()}, stream, args, plan.rows,
        denominator, partials, finalize);
  };
  const auto launch_share = [&](auto share) {
    args.grad_input.data != nullptr ? launch(share, std::true_type{})
                                    : launch(share, std::false_type{});
  };
  if (plan.words) {
    launch_share(TypeTag<WordShare>{});
  } else if (plan.aligned) {
    launch_share(TypeTag<VectorShare<true>>{});
  } else {
    launch_share(TypeTag<VectorShare<false>>{});
  }
}

}  // namespace lossops::cuda
