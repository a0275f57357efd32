// A turn of plane_words.cu: up to 48 classes of a share in registers, of a word's rows, and the
// sums of their exponentials, in the order in which GroupShare (plane_share.cuh) sums a share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda::plane_words {

using plane_rows::OthersSum;
using plane_rows::WordPlace;

template <typename scalar_t>
class WordTurn {
 public:
  static constexpr int kRows = rows_of_word(sizeof(scalar_t));
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  using Sum = OthersSum<kExact>;

  // Loads `count` classes from `first` on, 2^step_bits apart.
  __device__ __forceinline__ void load(const WordPlace<const scalar_t>& logits, int first,
                                       int step_bits, int count) {
    const auto before_last = static_cast<unsigned>(count - 1);
    pairs_ = static_cast<int>(before_last / kPair);
    has_four_ = (before_last & kFour) != 0;
    singles_ = static_cast<int>(before_last % kFour);
    const scalar_t* const from = logits.of_class(first);
    const uint32_t bytes = logits.class_bytes << step_bits;
    const auto class_after = [&](const scalar_t* of_row, int k) {
      return WordPlace<const scalar_t>::after(of_row, k, bytes);
    };
    if (logits.has_words()) {
      load_all([&](int k) { return load_global(class_after(from, k)); });
    } else {
      const scalar_t* const next = from + logits.next_row;
      load_all([&](int k) {
        return word_of(*class_after(from, k), 0) | word_of(*class_after(next, k), 1);
      });
    }
  }

  // Sums all classes but those at the rows' class indices. places[i]: where that of row i is among
  // the classes of the turn, or -1.
  __device__ __forceinline__ void sum(const int (&places)[kRows], Sum (&sums)[kRows]) {
    if constexpr (kExact) {
      take_indices_out(places);
      sums[0] = shifted(0, places[0] >= 0);
    } else {
      uint32_t reaches = last_ & 0x7fff7fffu;
      for_each([&](uint32_t word) { reaches = reach_of_pairs<scalar_t>(word, reaches); });
      take_indices_out(places);
      PlainSum plain[kRows];
      add_terms(0, plain[0], places[0] >= 0, plain_exp);
      add_terms(1, plain[1], places[1] >= 0, plain_exp);
      unsigned unusual = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float total = plain[i].total();
        const float reach = ::fabsf(word_element<scalar_t>(reaches, i));
        sums[i] = {Sum::kPlain, total};
        unusual |= reach <= kMaxPlainLogit && total >= 0.0f ? 0 : 1u << i;
      }
      if (unusual != 0) {
#pragma unroll 1
        for (int i = 0; i < kRows; ++i) {
          if ((unusual & 1u << i) != 0) {
            const Sum own = shifted(i, (i == 0 ? places[0] : places[1]) >= 0);
            (i == 0 ? sums[0] : sums[1]) = own;
          }
        }
      }
    }
  }

 private:
  static constexpr int kFour = kColumnUnroll;
  static constexpr int kPair = 2 * kFour;
  static constexpr int kPairs = (kTurnClasses - kPair) / kPair;

  // The compiler does not know that these addresses are global.
  static __device__ __forceinline__ uint32_t load_global(const void* from) {
#if __CUDA_ARCH__ >= 800
    uint32_t word;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(__cvta_generic_to_global(from)));
    return word;
#else
    return *static_cast<const uint32_t*>(from);
#endif
  }

  // Calls body() with the number of the first word of each pair of fours that the turn has, as an
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
  // Calls see() with all words but the last one.
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
      for (const uint32_t word : four_) {
        see(word);
      }
    }
#pragma unroll
    for (int u = 0; u < kFour - 1; ++u) {
      if (u < singles_) {
        see(single_[u]);
      }
    }
  }

  // Overwrites the logit at a row's class index by that of the last class. It may also write words
  // that the turn has not loaded, which nobody reads.
  __device__ __forceinline__ void take_indices_out(const int (&places)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (places[i] >= 0) {
        keep_apart();
        const auto take = [&](uint32_t& word, bool is) {
          if (is) {
            word = with_element(word, last_, i);
          }
        };
#pragma unroll
        for (int u = 0; u < kPairs * kPair; ++u) {
          take(of_pairs_[u], places[i] == u);
        }
        int place = places[i] - pairs_ * kPair;
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
  }
  static __device__ __forceinline__ uint32_t with_element(uint32_t word, uint32_t from, int i) {
    if constexpr (kRows == 1) {
      return from;
    } else {
      return i == 0 ? __byte_perm(word, from, 0x3254) : __byte_perm(word, from, 0x7610);
    }
  }

  // Adds term(x) of row i over all classes but that at its class index.
  template <typename RowSum, typename Term>
  __device__ __forceinline__ void add_terms(int i, RowSum& sum, bool has_index,
                                            const Term& term) const {
    const auto sum_of_four = [&](const uint32_t* words) {
      float values[kFour];
#pragma unroll
      for (int u = 0; u < kFour; ++u) {
        values[u] = term(word_element<scalar_t>(words[u], i));
      }
      return pairwise_sum(values);
    };
    for_each_pair([&](auto first) {
      constexpr int kFirst = decltype(first)::value;
      const float a = sum_of_four(of_pairs_ + kFirst);
      sum.add(a + sum_of_four(of_pairs_ + kFirst + kFour));
    });
    float last = has_four_ ? sum_of_four(four_) : 0.0f;
#pragma unroll
    for (int u = 0; u < kFour - 1; ++u) {
      if (u < singles_) {
        last += term(word_element<scalar_t>(single_[u], i));
      }
    }
    if (!has_index) {
      last += term(word_element<scalar_t>(last_, i));
    }
    sum.add(last);
  }

  // The sum of row i relative to its largest logit.
  __device__ __forceinline__ Sum shifted(int i, bool has_index) const {
    uint32_t largest = lowest_word<scalar_t>();
    for_each([&](uint32_t word) { largest = max_of_words<scalar_t>(word, largest); });
    float max = word_element<scalar_t>(largest, i);
    if (!has_index) {
      max = math::max_number(word_element<scalar_t>(last_, i), max);
    }
    max = math::max_number(max, -math::infinity<float>()) + 0.0f;  // never -0
    const RowTerms<kExact> terms(max);
    if constexpr (kExact) {
      // Terms that are exactly 1 are counted apart, as GroupShare does.
      float ones = 0;
      ExactSum sum;
      add_terms(i, sum, has_index, [&](float x) {
        const float one = x - terms.shift == 0.0f ? 1.0f : 0.0f;
        ones += one;
        return terms(x) - one;
      });
      sum.add(ones);
      return {max, sum.sum, sum.lost};
    } else {
      PlainSum sum;
      add_terms(i, sum, has_index, terms);
      return {max, sum.total()};
    }
  }

  // The words of the turn: pairs of fours, then a four, then up to 3 single ones, then the last.
  int pairs_;
  bool has_four_;
  int singles_;
  uint32_t of_pairs_[kPairs * kPair];
  uint32_t four_[kFour];
  uint32_t single_[kFour - 1];
  uint32_t last_;
};

}  // namespace lossops::cuda::plane_words
