// A thread's share of a row's sum as it grows, logit by logit: of rows of which nothing is known,
// and whose maximum rises on the way.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rows/cross_entropy_row.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

template <typename acc_t, bool kDense>
using RowState = std::conditional_t<kDense, DenseOnlineSoftmax<acc_t>, OnlineSoftmax<acc_t>>;

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(OnlineSoftmax<acc_t>& state, acc_t x, acc_t shift,
                                              acc_t /*q*/) {
  state.template add_below_max<kExact>(x, shift);
}

template <bool kExact, typename acc_t>
__device__ __forceinline__ void add_below_max(DenseOnlineSoftmax<acc_t>& state, acc_t x,
                                              acc_t shift, acc_t q) {
  state.template add_below_max<kExact>(x, shift, q);
}

// The coefficients of a state that needs some.
template <typename State, int kCount, typename acc_t>
__device__ __forceinline__ void load_coefficients_for(const RowTarget<acc_t>& target,
                                                      int64_t first_class, acc_t (&q)[kCount],
                                                      int count = kCount) {
  if constexpr (std::is_same_v<State, DenseOnlineSoftmax<acc_t>>) {
    load_coefficients(target, first_class, q, count);
  }
}

// An empty state to sum a few terms in, before they join a sum of many: that keeps the rounding of
// long rows small.
template <typename State>
__device__ __forceinline__ State same_max(const State& state) {
  State local;
  local.max = state.max;
  return local;
}

// A thread's share of a row as it grows, and what rounding took from its sums.
template <typename State>
struct RowSum {
  State sums;
  State lost;

  // kExact: false for logits that forgive what a quick exponential loses.
  template <bool kExact = true, typename acc_t>
  __device__ __forceinline__ void raise_max(acc_t max) {
    lost.max = sums.max;  // as it is, but the compiler does not see it
    sums.template raise_max<kExact>(max);
    lost.template raise_max<kExact>(max);
  }

  __device__ __forceinline__ void add(const State& local) { sums.add(local, lost); }

  __device__ __forceinline__ State total() const {
    State result = sums;
    result.add(lost);
    return result;
  }
};

// A RowSum without what rounding took: half types have so few bits that short sums may lose it.
template <typename State>
struct ShortRowSum {
  State sums;

  template <bool kExact = true, typename acc_t>
  __device__ __forceinline__ void raise_max(acc_t max) {
    sums.template raise_max<kExact>(max);
  }
  __device__ __forceinline__ void add(const State& local) { sums.add(local); }
  __device__ __forceinline__ State total() const { return sums; }
};

// Folds kCount logits into a row, with one rescaling for all of them. Their classes are
// first_class, first_class + 1, ...; there are only `count` of them, and the rest is -inf.
template <bool kExact, int kCount, typename State, typename acc_t>
__device__ __forceinline__ void fold(RowSum<State>& row, const acc_t (&x)[kCount],
                                     const RowTarget<acc_t>& target, int64_t first_class,
                                     int count = kCount) {
  acc_t max = x[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    max = math::max_number(x[i], max);
  }
  row.raise_max(max);
  const acc_t shift = softmax_shift(row.sums.max);
  State local = same_max(row.sums);
  acc_t q[kCount];
  load_coefficients_for<State>(target, first_class, q, count);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    add_below_max<kExact>(local, x[i], shift, q[i]);
  }
  row.add(local);
}

}  // namespace lossops::cuda
