// Rows cut into pieces, each reduced by a warp against its own maximum, and put together by any
// warp of the row: one meeting a row. Terms are then never far below what they are reduced against.
#pragma once

#include <cstdint>

#include "kernels/primitives/cluster.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "losses/rows/cross_entropy.h"

namespace lossops::cuda {

// A piece of fp32 is summed again, exactly, if its other exponentials, and what smoothing adds to
// the loss, are less than this together: a rounded exponent, 2^-24 of each unit of it, would be
// seen in the loss. With probabilities it would also be seen in the gradient of the largest logit,
// which may be all of that sum however large the loss is.
constexpr float kConfident = 0x1p-4f;

// What is known of a piece, or of a row.
struct PieceState : OnlineSoftmax<float> {
  float distance = 0;  // TermSum's
  float q_sum = 0;

  template <RowKind kKind>
  __device__ __forceinline__ void publish(uint32_t* words, int pieces) const {
    const float values[] = {max, ones, below, distance, q_sum};
#pragma unroll
    for (int i = 0; i < kStateWords<kKind>; ++i) {
      words[i * pieces] = __float_as_uint(values[i]);
    }
  }
  // To another block of the cluster, whose barrier waits for the states of all pieces.
  template <RowKind kKind>
  __device__ __forceinline__ void send(uint32_t* words, int pieces, CopyBarrier* barrier,
                                       int rank) const {
    const float values[] = {max, ones, below, distance, q_sum};
#pragma unroll
    for (int i = 0; i < kStateWords<kKind>; ++i) {
      store_at_rank(words + i * pieces, __float_as_uint(values[i]), barrier, rank);
    }
  }
};

// The state of a row that waits in shared memory for its loss; q_sum apart, where there is one.
struct alignas(16) KeptState {
  float max;
  float ones;
  float below;
  float distance;

  static __device__ __forceinline__ KeptState of(const PieceState& state) {
    return {state.max, state.ones, state.below, state.distance};
  }
};

// finish_indexed_row() of it.
template <RowKind kKind>
__device__ __forceinline__ void finish_kept_row(const CrossEntropyForwardArgs& args, int index,
                                                float weight, const KeptState& kept, float q_sum,
                                                float x_at_index, int64_t row,
                                                int64_t output_offset, Partial& partial) {
  OnlineSoftmax<float> softmax;
  softmax.max = kept.max;
  softmax.ones = kept.ones;
  softmax.below = kept.below;
  finish_indexed_row<kKind>(
      args, SmoothedIndex(args), index, weight, softmax, kept.distance, q_sum, x_at_index, row,
      [&](int64_t) { return output_offset; }, partial);
}

// The state of a piece whose maximum is known. add_terms(sum, terms) adds this lane's terms;
// own_max: the largest of their logits, or more. distance_weight: what smoothing multiplies the
// distances by in the loss, or 0.
template <typename scalar_t, RowKind kKind, typename AddTerms>
__device__ __forceinline__ PieceState reduce_below(float max, float own_max, AddTerms&& add_terms,
                                                   float distance_weight = 0) {
  PieceState state;
  state.max = max;
  TermSum sum;
  const auto add = [&](const auto& terms) {
    sum.may_have_ones = own_max >= max - kNearMaximum;
    add_terms(sum, terms);
    state.below = warp_sum(sum.all_below()) * terms.correction();
    state.ones = static_cast<float>(warp_sum(sum.ones));
  };
  add(RowTerms<false>(max));
  if constexpr (kKind != RowKind::kIndex) {
    state.distance = warp_sum(sum.all_distance());
  }
  // By name, so that forward and the gradient's kernel decide alike.
  const float in_loss = __fmaf_rn(distance_weight, state.distance, state.rest());
  if (kExactExponentials<scalar_t> && in_loss < kConfident &&  // fault: staged-exact
      max > -math::infinity<float>()) {
    sum = {};
    add(RowTerms<true>(max));
  }
  if constexpr (kKind == RowKind::kProbability) {
    state.q_sum = warp_sum(sum.q_sum);
  }
  return state;
}

// The warps of a row meet. Each gives the state of its piece, and can read those of all pieces
// then. cluster: how many blocks the warps are spread over. If it is 1, `met` is not used.
template <RowKind kKind>
__device__ __forceinline__ void meet_with(const PieceState& own, uint32_t* states, int piece,
                                          int pieces, int cluster, CopyBarrier& met,
                                          uint32_t parity, int lane) {
  if (cluster > 1) {
    // To each block by a lane.
    if (lane < cluster) {
      own.template send<kKind>(states + piece, pieces, &met, lane);
    }
    met.template wait<true>(parity);
  } else {
    if (lane == 0) {
      own.template publish<kKind>(states + piece, pieces);
    }
    __syncthreads();
  }
}

// The states of a row's pieces, put together by a warp: in every lane. kFew: no more pieces than
// lanes. kDistance: the distance is wanted.
template <RowKind kKind, bool kFew = false, bool kDistance = true>
__device__ __forceinline__ PieceState combine_pieces(const uint32_t* states, const Pieces& cut,
                                                     int num_classes, int lane) {
  const int pieces = cut.count;
  const auto for_each_piece = [&](auto&& body) {
    if constexpr (kFew) {
      if (lane < pieces) {
        body(lane);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < pieces; i += kWarpSize) {
        body(i);
      }
    }
  };
  float max = -math::infinity<float>();
  for_each_piece([&](int i) { max = math::max_number(__uint_as_float(states[i]), max); });
  PieceState total;
  total.max = warp_max(max);
  const float shift = softmax_shift(total.max);
  for_each_piece([&](int i) {
    const float piece_max = __uint_as_float(states[i]);
    const float ones = __uint_as_float(states[pieces + i]);
    const float below = __uint_as_float(states[2 * pieces + i]);
    if (piece_max == total.max) {
      total.ones += ones;
      total.below += below;
    } else {
      total.below += (ones + below) * math::exp(piece_max - shift);
    }
  });
  total.ones = warp_sum(total.ones);
  total.below = warp_sum(total.below);
  if constexpr (kKind != RowKind::kIndex) {
    for_each_piece([&](int i) {
      float q_sum = static_cast<float>(min(cut.size, num_classes - i * cut.size));
      if constexpr (kKind == RowKind::kProbability) {
        q_sum = __uint_as_float(states[4 * pieces + i]);
        total.q_sum += q_sum;
      }
      // From the maximum of the piece to that of the row.
      const float moved = shift - softmax_shift(__uint_as_float(states[i]));
      total.distance +=
          __uint_as_float(states[3 * pieces + i]) +
          (q_sum == 0.0f || moved == 0.0f ? 0.0f : q_sum * moved);  // of infinities, too
    });
    if constexpr (kDistance) {
      total.distance = warp_sum(total.distance);
    }
    total.q_sum = warp_sum(total.q_sum);
  }
  return total;
}

}  // namespace lossops::cuda
