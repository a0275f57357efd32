// Cross entropy of rows of fp32 that a few warps hold in their registers.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/class_index/float_rows_plan.h"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda {
namespace float_rows {
namespace {

// Up to these many blocks the kernel overlaps with what is ahead of it on the stream, whatever that
// is, and waits for it first.
constexpr unsigned kMaxOverlappingBlocks = 1024;

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

  __device__ __forceinline__ VectorShare(int part, int num_classes)
      : first(part * kWarpSize * kThreadLogits + static_cast<int>(threadIdx.x) % kWarpSize * kSize),
        count((num_classes - first + kStride - 1) / kStride) {
#pragma unroll
    for (Vector<float>& vector : vectors) {
      set_lowest(vector);
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

  // Of a row: the first so many vectors, if any are wanted.
  using Accesses = int;
  __device__ __forceinline__ Accesses accesses(bool wanted = true) const {
    return wanted ? count : 0;
  }

  // Vector u of a row, if it is one of `wanted`. By name: the compiler would branch around each of
  // these.
  __device__ __forceinline__ void load(const float* row, int u, Accesses wanted) {
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
  __device__ __forceinline__ void store(float* row, int u, Accesses wanted,
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

  // Of vector u, if it is one of `there`, and `least`.
  __device__ __forceinline__ float least_of_vector(int u, float least, Accesses there) const {
    return u < there ? ::fminf(least_of(vectors[u].values), least) : least;
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

  __device__ __forceinline__ WordShare(int part, int num_classes)
      : first(part * kWarpSize * kThreadLogits + static_cast<int>(threadIdx.x) % kWarpSize),
        count((num_classes - first + kWarpSize - 1) / kWarpSize) {
#pragma unroll
    for (Vector<float>& vector : vectors) {
      set_lowest(vector);
    }
  }

  __device__ __forceinline__ Word read(const float* row, int u) const {
    return {row[first + u * kWarpSize]};
  }
  __device__ __forceinline__ void write(float* row, int u, const Word& word) const {
    row[first + u * kWarpSize] = word.values[0];
  }

  // A bit for each of a row's words: a few instructions make predicates of all of them.
  using Accesses = unsigned;
  __device__ __forceinline__ Accesses accesses(bool wanted = true) const {
    Accesses bits = !wanted ? 0 : count >= kAccesses ? ~0u : (1u << max(count, 0)) - 1;
    // Else the compiler would test each bit once for all rows, and have no registers for that.
    asm volatile("" : "+r"(bits));
    return bits;
  }

  // As VectorShare's.
  __device__ __forceinline__ void load(const float* row, int u, Accesses wanted) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int word = u * kSize + i;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %1, 0;\n"
          " @wanted ld.global.f32 %0, [%2];\n}"
          : "+f"(vectors[u].values[i])
          : "r"(wanted & 1u << word), "l"(row + first + word * kWarpSize)
          : "memory");
    }
  }
  __device__ __forceinline__ void store(float* row, int u, Accesses wanted,
                                        const Vector<float>& vector) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int word = u * kSize + i;
      asm volatile(
          "{\n .reg .pred wanted;\n setp.ne.u32 wanted, %1, 0;\n"
          " @wanted st.global.f32 [%2], %0;\n}"
          :
          : "f"(vector.values[i]), "r"(wanted & 1u << word), "l"(row + first + word * kWarpSize)
          : "memory");
    }
  }

  __device__ __forceinline__ float least_of_vector(int u, float least, Accesses there) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      asm volatile(
          "{\n .reg .pred there;\n setp.ne.u32 there, %2, 0;\n @there min.f32 %0, %1, %0;\n}"
          : "+f"(least)
          : "f"(vectors[u].values[i]), "r"(there & 1u << (u * kSize + i)));
    }
    return least;
  }

  __device__ __forceinline__ bool has(int index) const {
    const int distance = index - first;
    return distance >= 0 && distance < kThreadLogits * kWarpSize && distance % kWarpSize == 0;
  }
};

// What the threads of a block know of one of its rows.
struct alignas(16) Row {
  int64_t logits;  // offsets
  int64_t gradient;
  int index;  // checked_index()
  float weight;
  float scaled;  // the weight, times the mean's scale
  // The OnlineSoftmax: of one warp, or once it is put together.
  float max;
  float ones;
  float below;

  __device__ __forceinline__ void set(const OnlineSoftmax<float>& softmax) {
    max = softmax.max;
    ones = softmax.ones;
    below = softmax.below;
  }
  __device__ __forceinline__ OnlineSoftmax<float> softmax() const { return {max, ones, below}; }
};

// Of the parts of a row that `warps` warps have: max, ones, below.
template <int kRowWarps>
__device__ __forceinline__ OnlineSoftmax<float> softmax_of(const float4* parts, int warps) {
  OnlineSoftmax<float> softmax;
  float4 part[kRowWarps];
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    part[w] = w < warps ? parts[w] : float4{-math::infinity<float>(), 0, 0, 0};
    softmax.max = math::max_number(part[w].x, softmax.max);
  }
  const float shift = softmax_shift(softmax.max);
#pragma unroll
  for (int w = 0; w < kRowWarps; ++w) {
    const bool has_max = part[w].x == softmax.max;
    const float factor = math::exp_in_sum<true>(part[w].x - shift);
    softmax.ones += has_max ? part[w].y : 0.0f;
    softmax.below = ::fmaf(has_max ? part[w].z : part[w].y + part[w].z, factor, softmax.below);
  }
  return softmax;
}

// As __syncthreads(), of a team of several warps; there are two of them at most. By constants: the
// compiler would reserve all barriers for others.
[[maybe_unused]] __device__ __forceinline__ void sync_team(int team, int warps) {
  const int threads = warps * kWarpSize;
  if (team == 0) {
    asm volatile("bar.sync 1, %0;" : : "r"(threads) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" : : "r"(threads) : "memory");
  }
}

// Of a block, for `rows` of `warps` warps each.
constexpr int64_t shared_bytes(int64_t rows, int warps) {
  return rows * (sizeof(Row) + (warps > 1 ? warps * sizeof(float4) : 0));
}

// A block has `teams` of `warps` warps, which take its rows in turn, so that what it reads at a
// time lies in a line. A warp adds up its part of a row against the part's maximum; what the warps
// have is joined once a row. While a row is computed, the team's next one is on its way.
template <typename Share, bool kGradient, int kMaxThreads>
__global__ void __launch_bounds__(kMaxThreads, min_blocks(kMaxThreads))
    cross_entropy_float_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args, int warps,
                                    int teams, BlockShares shares, Denominator denominator,
                                    Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr int kRowWarps = kMaxThreads / kWarpSize;
  constexpr int kBatch = kTermBatch / kSize;  // vectors whose terms are added at a time
  extern __shared__ Row rows[];  // [shares.large], then their parts, where there are more than one
  auto* const parts = reinterpret_cast<float4*>(rows + shares.large);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const auto* const input = static_cast<const float*>(args.input.data);
  auto* const grad_input = static_cast<float*>(args.grad_input.data);
  // The same for all lanes, also to the compiler.
  const int warp = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
  const int team = warp / warps;
  const int part = warp % warps;
  Share share(part, static_cast<int>(args.num_classes));
  const int64_t first_row = shares.first(blockIdx.x);
  const int count =
      static_cast<int>(min(int64_t{shares.size(blockIdx.x)}, args.rows.numel - first_row));
  const float* const first_logits = input + row_offset(args.rows, args.input, first_row + team);
  const auto all = share.accesses(team < count);
  if (!denominator.is_left() && gridDim.x <= kMaxOverlappingBlocks) {
    wait_for_previous_kernel();
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    share.load(first_logits, u, all);
  }
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator);
  const int64_t row_of_lane = first_row + lane;
  const bool has_row = lane < count;
  if (thread < kWarpSize) {
    int64_t class_index = 0;
    if (has_row) {
      rows[lane].logits = row_offset(args.rows, args.input, row_of_lane);
      if constexpr (kGradient) {
        rows[lane].gradient = row_offset(args.rows, args.grad_input, row_of_lane);
      }
      class_index = load_class_index(args.target, row_offset(args.rows, args.target, row_of_lane));
    }
    unit.wait(args, denominator);
    if (has_row) {
      const int index = checked_index(args, class_index);
      const float weight = row_weight(args, index);
      rows[lane].index = index;
      rows[lane].weight = weight;
      if constexpr (kGradient) {
        rows[lane].scaled = unit.get() * weight;
      }
    }
  }
  __syncthreads();
  float x_of_lane = 0;  // at its row's class index; asked for here, so that no barrier waits for it
  if ((kGradient || thread < kWarpSize) && has_row && rows[lane].index >= 0) {
    x_of_lane = input[rows[lane].logits + rows[lane].index];
  }
  if (kGradient && grad_input == input) {
    __syncthreads();  // before another team writes the first row
  }
#pragma unroll 1
  for (int n = team; n < count; n += teams) {
    Row& row = rows[n];
    const int index = row.index;
    const bool loads = n + teams < count && rows[n + teams].index >= 0;  // fault: float-rows-load
    const float* const next = input + rows[loads ? n + teams : n].logits;
    const auto wanted = share.accesses(loads);
    float* const gradient = kGradient ? grad_input + row.gradient : nullptr;
    if (index < 0) {
      const auto there = share.accesses();
      Vector<float> vector;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        vector.set(i, gradient_without_loss(index));
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if constexpr (kGradient) {
          share.store(gradient, u, there, vector);
        }
        share.load(next, u, wanted);
      }
      continue;
    }
    float maxima[kVectors / kBatch];
    float least = math::infinity<float>();
    const auto there = share.accesses();
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      float& max = maxima[u / kBatch];
      const float before = u % kBatch == 0 ? -math::infinity<float>() : max;
      max = __uint_as_float(max_of_vector(share.vectors[u], __float_as_uint(before)));
      if constexpr (kGradient) {
        least = share.least_of_vector(u, least, there);
      }
    }
    OnlineSoftmax<float> softmax;
    softmax.max = warp_max(math::max_number(math::max_number(maxima[0], maxima[1]),
                                            math::max_number(maxima[2], maxima[3])));
    const float near_maximum = softmax.max - kNearMaximum;
    const RowTerms<true> terms(softmax.max);
    TermSum sum;
#pragma unroll
    for (int u = 0; u < kVectors; u += kBatch) {
      float values[kBatch * kSize];
#pragma unroll
      for (int i = 0; i < kBatch * kSize; ++i) {
        values[i] = terms(share.vectors[u + i / kSize].get(i % kSize));
      }
      sum.may_have_ones = maxima[u / kBatch] >= near_maximum;
      sum.add(values, terms.unit);
      if constexpr (!kGradient) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          share.load(next, u + i, wanted);
        }
      }
    }
    softmax.ones = static_cast<float>(__reduce_add_sync(kAllLanes, sum.ones));
    softmax.below = warp_sum(sum.below);
    if (warps > 1) {
      if (lane == 0) {
        parts[n * warps + part] = {softmax.max, softmax.ones, softmax.below, 0};
      }
      if constexpr (kGradient) {
        sync_team(team, warps);
        softmax = softmax_of<kRowWarps>(parts + n * warps, warps);
      }
    }
    if (lane == 0 && (warps == 1 || (kGradient && part == 0))) {
      row.set(softmax);
    }
    if constexpr (kGradient) {
      const float x_at_index = __shfl_sync(kAllLanes, x_of_lane, n);
      const float scaled = row.scaled;
      const auto row_softmax = RowSoftmax<float>::of(softmax.max, softmax.rest(), scaled, 1.0f);
      const LogitGradient<float, true> of_logit(row_softmax, scaled);
      const bool direct = of_logit.is_direct(least);
      const auto written = share.accesses(direct);
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        Vector<float> vector = share.vectors[u];
        of_logit.replace_direct(vector.values);
        share.store(gradient, u, written, vector);
        share.load(next, u, wanted);
      }
      if (!direct) {
        // Where one formula does not do for all of a thread's logits, they are read once more.
        const float* const logits = input + row.logits;
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
    const Row& row = rows[thread];
    const int index = row.index;
    const float weight = row.weight;
    OnlineSoftmax<float> softmax;
    float loss = gradient_without_loss(index);
    if (index >= 0) {
      softmax = kGradient || warps == 1 ? row.softmax()
                                        : softmax_of<kRowWarps>(parts + thread * warps, warps);
      loss = sparse_row_loss(softmax.max, softmax.rest(), x_of_lane, weight);
    }
    record_row(
        args, loss, weight, softmax.max, softmax.rest(), row_of_lane,
        [&](int64_t number) { return row_offset(args.rows, args.output, number); }, partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize, shares.large);
  }
#endif
}

}  // namespace
}  // namespace float_rows

void launch_float_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput&, Partial* partials,
                       const Finalize& finalize, cudaStream_t stream) {
  using namespace float_rows;
  const int warps = plan.team / kWarpSize;
  const int teams = plan.threads / plan.team;
  const auto launch = [&](auto share, auto threads) {
    visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
      launch_kernel(
          "cross_entropy_float_rows_kernel",
          cross_entropy_float_rows_kernel<typename decltype(share)::type, decltype(gradient)::value,
                                          decltype(threads)::value>,
          {plan.blocks, plan.threads, shared_bytes(plan.block_shares.large, warps), 1,
           denominator.is_left() || plan.blocks <= kMaxOverlappingBlocks},
          stream, args, warps, teams, plan.block_shares, denominator, partials, finalize);
    });
  };
  constexpr std::integral_constant<int, kThreads> narrow;
  if (plan.words) {
    launch(TypeTag<WordShare>{}, narrow);
    return;
  }
  visit_bool(plan.aligned, [&](auto aligned) {
    const TypeTag<VectorShare<decltype(aligned)::value>> share;
    if (plan.threads > kThreads) {
      launch(share, std::integral_constant<int, kWideThreads>{});
    } else {
      launch(share, narrow);
    }
  });
}

}  // namespace lossops::cuda
