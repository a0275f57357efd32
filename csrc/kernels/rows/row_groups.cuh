// RowGroup: the logits of one class for neighbouring rows, 8 bytes that a thread loads at once.
// sum_group, weigh_distances: sums over the classes of a group in a fixed order, so that a row's
// bits do not depend on its address. Used by side_by_side_rows.cu and plane_rows.cu.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/side_by_side_rows.cuh"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda {

template <typename scalar_t>
constexpr int kGroupRows = static_cast<int>(side_by_side::group_rows(sizeof(scalar_t)));

// The logits of one class, of a group of rows.
template <typename scalar_t>
struct alignas(kGroupRows<scalar_t> * sizeof(scalar_t)) RowGroup {
  static constexpr int kRows = kGroupRows<scalar_t>;
  static constexpr int kWords = kRows / kWordElements<scalar_t>;
  uint32_t words[kWords];

  __device__ __forceinline__ float get(int row) const {
    constexpr int kPerWord = kWordElements<scalar_t>;
    return word_element<scalar_t>(words[row / kPerWord], row % kPerWord);
  }

  __device__ __forceinline__ void raise_to(const RowGroup& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = max_of_words<scalar_t>(other.words[i], words[i]);
    }
  }

  // The larger magnitudes; their signs mean nothing.
  __device__ __forceinline__ void reach_to(const RowGroup& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = reach_of_pairs<scalar_t>(other.words[i], words[i]);
    }
  }

  static __device__ __forceinline__ RowGroup of(const float (&values)[kRows]) {
    RowGroup result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      result.words[i] = pack_word<scalar_t>(values + i * kWordElements<scalar_t>);
    }
    return result;
  }
};

// What is stored at once, aligned to its size.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) VectorOf {
  T values[kCount];
};

// What a thread has summed of a row's terms.
template <bool kExact>
using GroupSum = std::conditional_t<kExact, ExactSum, PlainSum>;

// Adds term(i, x) over `count` classes to sums[i], where x is the logit of row i. Class c of the
// group is own[c * pitch]. see(group) is called once for each class, for instance to find the
// largest magnitude. add_last(sums) may add further terms to the remainder of the classes.
// see_row(i, logits) gets the same logits of row i, four classes at a time and then one by one.
struct SeeNoRow {
  template <int kCount>
  __device__ __forceinline__ void operator()(int, const float (&)[kCount]) const {}
};
template <bool kExact, typename scalar_t, typename Term, typename See, typename Last,
          typename SeeRow = SeeNoRow>
__device__ __forceinline__ void sum_group(const RowGroup<scalar_t>* own, int pitch, int count,
                                          GroupSum<kExact> (&sums)[RowGroup<scalar_t>::kRows],
                                          Term&& term, See&& see, Last&& add_last,
                                          SeeRow&& see_row = {}) {
  using Group = RowGroup<scalar_t>;
  constexpr int kRows = Group::kRows;
  float last[kRows] = {};
  const auto add_classes = [&](int c, auto& of_rows) {
    Group x[kColumnUnroll];
#pragma unroll
    for (int u = 0; u < kColumnUnroll; ++u) {
      x[u] = own[(c + u) * pitch];
      see(x[u]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      of_rows[i] += sum_of_four([&](int u) { return term(i, x[u].get(i)); });
      float logits[kColumnUnroll];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        logits[u] = x[u].get(i);
      }
      see_row(i, logits);
    }
  };
  int c = 0;
#pragma unroll 1
  for (; c + 2 * kColumnUnroll <= count; c += 2 * kColumnUnroll) {
    float both[kRows] = {};
    add_classes(c, both);
    add_classes(c + kColumnUnroll, both);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i].add(both[i]);
    }
  }
  if (c + kColumnUnroll <= count) {
    add_classes(c, last);
    c += kColumnUnroll;
  }
#pragma unroll 1
  for (; c < count; ++c) {
    const Group x = own[c * pitch];
    see(x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      last[i] += term(i, x.get(i));
      const float logits[1] = {x.get(i)};
      see_row(i, logits);
    }
  }
  add_last(last);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sums[i].add(last[i]);
  }
}

// The sum of terms.exponent(x) over kCount logits.
template <int kCount>
__device__ __forceinline__ float sum_of_exponents(const PlainTerms& terms,
                                                  const float (&x)[kCount]) {
  float exponents[kCount];
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    exponents[u] = terms.exponent(x[u]);
  }
  return pairwise_sum(exponents);
}

// The sums of q (max - x) of a group's rows with smoothing, in the order of smoothed_distance().
// own, count: the classes but the index.
template <typename scalar_t>
__device__ __forceinline__ void weigh_distances(const SmoothedIndex& smooth,
                                                const RowGroup<scalar_t>* own, int count,
                                                const IndexRow (&reduced)[kGroupRows<scalar_t>],
                                                const float (&x_at_index)[kGroupRows<scalar_t>],
                                                float (&distances)[kGroupRows<scalar_t>]) {
  constexpr int kRows = kGroupRows<scalar_t>;
#pragma unroll 1
  for (int c = 0; c < count; c += kColumnUnroll) {
    RowGroup<scalar_t> x[kColumnUnroll];
#pragma unroll
    for (int u = 0; u < kColumnUnroll; ++u) {
      x[u] = own[min(c + u, count - 1) * kWarpSize];
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      distances[i] += sum_of_four([&](int u) {
        return c + u < count ? smooth.of_other(reduced[i].reference - x[u].get(i)) : 0.0f;
      });
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    distances[i] = smooth.with_any_index(distances[i], reduced[i].reference, x_at_index[i]);
  }
}

}  // namespace lossops::cuda
