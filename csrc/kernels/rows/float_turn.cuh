// A turn of plane_words.cu for fp32: up to 48 classes of a share, of one row, in registers, and the
// sum of their exponentials, in the order in which GroupShare (plane_share.cuh) sums a share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/side_by_side_rows.cuh"

namespace lossops::cuda::plane_words {

using plane_rows::load_word;
using plane_rows::OthersSum;
using plane_rows::WordPlace;

class FloatTurn {
 public:
  static constexpr int kRows = 1;
  static constexpr bool kLoadsAhead = true;
  static constexpr int kClasses = kTurnClasses;
  using Sum = OthersSum<true>;

  // Loads `count` classes from `first` on, 2^step_bits apart.
  __device__ __forceinline__ void load(const WordPlace<const float>& logits, int first,
                                       int step_bits, int count) {
    const auto before_last = static_cast<unsigned>(count - 1);
    pairs_ = static_cast<int>(before_last / kPair);
    has_four_ = (before_last & kFour) != 0;
    singles_ = static_cast<int>(before_last % kFour);
    const float* const from = logits.of_class(first);
    const uint32_t bytes = logits.class_bytes << step_bits;
    load_all([&](int k) {
      return __uint_as_float(load_word(WordPlace<const float>::after(from, k, bytes)));
    });
  }

  // Adds all classes but that at the row's class index. before: classes of the share before the
  // turn. at[0]: the number of the class index in the share, or -1.
  __device__ __forceinline__ void add_to(Sum (&sums)[kRows], int before, const int (&at)[kRows]) {
    const int count = pairs_ * kPair + (has_four_ ? kFour : 0) + singles_ + 1;
    const int place = at[0] - before < count ? at[0] - before : -1;
    take_index_out(place);
    const bool has_index = place >= 0;
    float largest = has_index ? -math::infinity<float>() : last_;
    for_each([&](float x) { largest = math::max_number(x, largest); });
    const float max = math::max_number(largest, -math::infinity<float>()) + 0.0f;  // never -0
    const RowTerms<true> terms(max);
    // Terms that are exactly 1 are counted apart, as GroupShare does.
    float ones = 0;
    ExactSum sum;
    add_terms(sum, has_index, [&](float x) {
      const float one = x - terms.shift == 0.0f ? 1.0f : 0.0f;
      ones += one;
      return terms(x) - one;
    });
    sum.add(ones);
    const Sum of_turn = {max, sum.sum, sum.lost};
    sums[0] = before == 0 ? of_turn : sums[0].merged_with(of_turn);  // fault: plane-words-turns
  }

 private:
  static constexpr int kFour = kColumnUnroll;
  static constexpr int kPair = 2 * kFour;
  static constexpr int kPairs = (kTurnClasses - kPair) / kPair;

  // Calls body() with the number of the first logit of each pair of fours that the turn has, as an
  // integral_constant.
  template <int kFirst = 0, typename Body>
  __device__ __forceinline__ void for_each_pair(const Body& body) const {
    if constexpr (kFirst < kPairs) {
      if (kFirst < pairs_) {
        body(std::integral_constant<int, kFirst * kPair>{});
        for_each_pair<kFirst + 1>(body);
      }
    }
  }
  template <typename Load>
  __device__ __forceinline__ void load_all(const Load& load) {
    for_each_pair([&](auto first) {
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        of_pairs_[decltype(first)::value + u] = load(decltype(first)::value + u);
      }
    });
    int k = pairs_ * kPair;
    if (has_four_) {
#pragma unroll
      for (int u = 0; u < kFour; ++u) {
        four_[u] = load(k + u);
      }
      k += kFour;
    }
#pragma unroll
    for (int u = 0; u < kFour - 1; ++u) {
      if (u < singles_) {
        single_[u] = load(k + u);
      }
    }
    last_ = load(k + singles_);
  }
  // Calls see() with all logits but the last one.
  template <typename See>
  __device__ __forceinline__ void for_each(const See& see) const {
    for_each_pair([&](auto first) {
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        see(of_pairs_[decltype(first)::value + u]);
      }
    });
    if (has_four_) {
#pragma unroll
      for (const float x : four_) {
        see(x);
      }
    }
#pragma unroll
    for (int u = 0; u < kFour - 1; ++u) {
      if (u < singles_) {
        see(single_[u]);
      }
    }
  }

  // Overwrites the logit at the class index by that of the last class. It may also write
  // logits that the turn has not loaded, which nobody reads.
  __device__ __forceinline__ void take_index_out(int place) {
    if (place >= 0) {
      keep_apart();
      const auto take = [&](float& x, bool is) { x = is ? last_ : x; };
#pragma unroll
      for (int u = 0; u < kPairs * kPair; ++u) {
        take(of_pairs_[u], place == u);
      }
      place -= pairs_ * kPair;
      if (has_four_) {
#pragma unroll
        for (int u = 0; u < kFour; ++u) {
          take(four_[u], place == u);
        }
        place -= kFour;
      }
#pragma unroll
      for (int u = 0; u < kFour - 1; ++u) {
        take(single_[u], place == u);
      }
    }
  }

  // Adds term(x) over all classes but that at the class index.
  template <typename Term>
  __device__ __forceinline__ void add_terms(ExactSum& sum, bool has_index, const Term& term) const {
    const auto sum_of = [&](const float* x) {
      return sum_of_four([&](int u) { return term(x[u]); });
    };
    for_each_pair([&](auto first) {
      constexpr int kFirst = decltype(first)::value;
      const float a = sum_of(of_pairs_ + kFirst);
      sum.add(a + sum_of(of_pairs_ + kFirst + kFour));
    });
    float rest = has_four_ ? sum_of(four_) : 0.0f;
#pragma unroll
    for (int u = 0; u < kFour - 1; ++u) {
      if (u < singles_) {
        rest += term(single_[u]);
      }
    }
    if (!has_index) {
      rest += term(last_);
    }
    sum.add(rest);
  }

  // The logits of the turn: pairs of fours, then a four, then up to 3 single ones, then the last.
  int pairs_;
  bool has_four_;
  int singles_;
  float of_pairs_[kPairs * kPair];
  float four_[kFour];
  float single_[kFour - 1];
  float last_;
};

}  // namespace lossops::cuda::plane_words
