// The functor of rows for row_states_kernel that reduces them to softmax and entropy.
#pragma once

#include "kernels/primitives/thread_reduce.cuh"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

template <typename acc_t>
struct EntropyRow {
  using State = EntropySoftmax<acc_t>;
  bool wants_products;  // else distances are anything

  struct Sums {
    acc_t powers = 0;    // of p = exp(z - max)
    acc_t products = 0;  // of p (z - max) / unit

    template <bool kProducts, typename Batch>
    __device__ __forceinline__ void add(const Batch& batch) {
      powers += pairwise_sum(batch.powers);
      if constexpr (kProducts) {
        acc_t product = batch.powers[0] * batch.differences[0];
#pragma unroll
        for (int i = 1; i < Batch::kSize; ++i) {
          product += batch.powers[i] * batch.differences[i];
        }
        products += product;
      }
    }

    // With z - max too large by t = excess unit, exp(-t) = 1 + less gives it back.
    __device__ __forceinline__ void move_to(State& state, acc_t unit, acc_t excess) const {
      const acc_t t = -excess * unit;
      const acc_t less = t + t * t * (acc_t(0.5) + t * acc_t(1.0 / 6));
      const acc_t distance = (excess * powers - products) * unit;
      state.below += powers + powers * less;
      state.distance += distance + distance * less;
    }
  };
};

}  // namespace lossops::cuda
