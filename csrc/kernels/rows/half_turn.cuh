// A turn of plane_words.cu for half types: all classes of a share, of the two rows of a word. 16
// words are summed while the next 16 are on their way. The order of the sum is that of GroupShare
// (plane_share.cuh): eight terms at a time, as the sum of two fours.
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/row_terms.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/side_by_side_rows.cuh"

namespace lossops::cuda::plane_words {

using plane_rows::load_half;
using plane_rows::load_word;

// k is the number of a class in the turn: class first + (k << step_bits).
template <typename scalar_t>
class HalfTurn {
 public:
  static constexpr int kRows = 2;
  // A turn has all classes of its share, in one plain sum. Such a sum of 2004 equal terms, a share
  // of 128256 classes, is off by 3e-6 of it, which is nothing beside a result of half types. With
  // millions of classes the error is larger.
  static constexpr int kClasses = INT_MAX;
  static constexpr bool kLoadsAhead = false;
  using Sum = plane_rows::OthersSum<false>;
  using Place = plane_rows::WordPlace<const scalar_t>;

  // The classes to add: `count` from `first` on, 2^step_bits apart.
  __device__ __forceinline__ void load(const Place& logits, int first, int step_bits, int count) {
    from_ = logits.of_class(first);
    bytes_ = logits.class_bytes << step_bits;
    next_row_ = logits.next_row;
    has_words_ = logits.has_words();
    before_last_ = count - 1;
  }

  // Sums all classes but those at the rows' class indices. at[i]: the number of row i's class index
  // in the turn, or -1. The int is FloatTurn's `before`, and 0 here.
  __device__ __forceinline__ void add_to(Sum (&sums)[kRows], int, const int (&at)[kRows]) const {
    PlainOthers others{at, read_one(before_last_)};
    add_all(others);
    unsigned not_plain = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float total = others.sums[i].total();
      const float reach = ::fabsf(word_element<scalar_t>(others.reaches, i));
      sums[i] = {Sum::kPlain, total};
      not_plain |= reach <= kMaxPlainLogit && total >= 0.0f ? 0 : 1u << i;
    }
    if (not_plain != 0) {
      const TwoSums shifted = sum_shifted(*this, at[0], at[1]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if ((not_plain & 1u << i) != 0) {
          sums[i] = shifted.of_rows[i];
        }
      }
    }
  }

 private:
  static constexpr int kFour = kColumnUnroll;
  static constexpr int kPair = 2 * kFour;
  static constexpr int kWords = 2 * kPair;

  struct TwoSums {
    Sum of_rows[kRows];
  };

  // The sums of plain rows.
  struct PlainOthers {
    const int (&at)[kRows];
    uint32_t last;  // the word of the last class, whose logits take the place of the class indices'
    // The largest magnitudes. Their signs mean nothing, but reach_of_pairs() wants none at first.
    uint32_t reaches = without_signs(last);
    PlainSum sums[kRows];

    // Adds the words of kPair classes from k on.
    __device__ __forceinline__ void add_pair(int k, uint32_t* words) {
      take(k, words);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float first = sum_of(words, i, plain_term);
        sums[i].add(first + sum_of(words + kFour, i, plain_term));
      }
    }
    // Adds the words of `count` < kPair classes from k on, and then the last one.
    __device__ __forceinline__ void add_rest(int k, uint32_t* words, int count) {
      take(k, words);
      float rest[kRows] = {};
      const bool has_four = count >= kFour;
      if (has_four) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          rest[i] = sum_of(words, i, plain_term);
        }
      }
#pragma unroll
      for (int u = 0; u < kFour - 1; ++u) {
        if (u < count % kFour) {
          const uint32_t word = has_four ? words[kFour + u] : words[u];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            rest[i] += plain_term(word_element<scalar_t>(word, i));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (at[i] < 0) {
          rest[i] += plain_term(word_element<scalar_t>(last, i));
        }
        sums[i].add(rest[i]);
      }
    }

   private:
    // Raises the reaches, and overwrites the logits at class indices by those of the last class.
    __device__ __forceinline__ void take(int k, uint32_t* words) {
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        reaches = reach_of_pairs<scalar_t>(words[u], reaches);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int place = at[i] - k;
        if (place >= 0 && place < kPair) {
          keep_apart();
#pragma unroll
          for (int u = 0; u < kPair; ++u) {
            words[u] = u == place ? with_element(words[u], last, i) : words[u];
          }
        }
      }
    }
  };

  __device__ __forceinline__ void add_all(PlainOthers& others) const {
    // The next words are read before these are summed. The first time there are none to sum.
    uint32_t next[kWords] = {};
    int k = -kWords;
#pragma unroll 1
    do {
      uint32_t words[kWords];
#pragma unroll
      for (int u = 0; u < kWords; ++u) {
        words[u] = next[u];
      }
      read(k + kWords, next);
      if (k >= 0) {
#pragma unroll
        for (int u = 0; u < kWords; u += kPair) {
          others.add_pair(k + u, words + u);
        }
      }
      k += kWords;
    } while (k + kWords <= before_last_);
    // Fewer than kWords are left.
    if ((before_last_ & kPair) != 0) {
      others.add_pair(k, next);
      k += kPair;
#pragma unroll
      for (int u = 0; u < kPair; ++u) {
        next[u] = next[u + kPair];
      }
    }
    others.add_rest(k, next, before_last_ % kPair);
  }

  template <typename Term>
  static __device__ __forceinline__ float sum_of(const uint32_t* words, int i, const Term& term) {
    return sum_of_four([&](int u) { return term(word_element<scalar_t>(words[u], i)); });
  }
  // A word with the element at i of another one.
  static __device__ __forceinline__ uint32_t with_element(uint32_t word, uint32_t from, int i) {
    return __byte_perm(word, from, i == 0 ? 0x3254 : 0x7610);
  }

  __device__ __forceinline__ uint32_t read_one(int k) const {
    const scalar_t* const from = Place::after(from_, k, bytes_);
    return has_words_ ? load_word(from) : load_half(from) | load_half(from + next_row_) << 16;
  }
  // The words of kWords classes from k on; 0 from the last class on.
  __device__ __forceinline__ void read(int k, uint32_t (&words)[kWords]) const {
    // The multiples of these bytes are computed here, not once before a loop: they would need more
    // registers than there are.
    const uint32_t bytes = unfolded(bytes_);
    const auto* const first = Place::after(from_, k, bytes);
    const auto* const next = first + next_row_;
    const int count = before_last_ - k;
    const auto read_all = [&](const auto& read_at) {
      if (count >= kWords) {
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          words[u] = read_at(u);
        }
      } else {
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          words[u] = u < count ? read_at(u) : 0;
        }
      }
    };
    if (has_words_) {
      read_all([&](int u) { return load_word(Place::after(first, u, bytes)); });
    } else {
      read_all([&](int u) {
        return load_half(Place::after(first, u, bytes)) | load_half(Place::after(next, u, bytes))
                                                              << 16;
      });
    }
  }

  // The sums of both rows relative to their largest logits. Rare, and slower than plain sums.
  static __device__ __attribute__((noinline)) TwoSums sum_shifted(const HalfTurn turn, int place,
                                                                  int next_at) {
    const int at[kRows] = {place, next_at};
    const int before_last = turn.before_last_;
    const uint32_t last = turn.read_one(before_last);
    const auto read = [&](int k) {
      uint32_t word = turn.read_one(k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        word = k == at[i] ? with_element(word, last, i) : word;
      }
      return word;
    };
    uint32_t largest = lowest_word<scalar_t>();
#pragma unroll 8
    for (int k = 0; k < before_last; ++k) {
      largest = max_of_words<scalar_t>(read(k), largest);
    }
    RowTerms<false> terms[kRows];
    TwoSums result;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float max = word_element<scalar_t>(largest, i);
      if (at[i] < 0) {
        max = math::max_number(word_element<scalar_t>(last, i), max);
      }
      max = math::max_number(max, -math::infinity<float>()) + 0.0f;  // never -0
      terms[i] = RowTerms<false>(max);
      result.of_rows[i].reference = max;
    }
    PlainSum sums[kRows];
    float rest[kRows] = {};
    int k = 0;
    const auto add_fours = [&](auto& words) {
      constexpr int kCount = sizeof(words) / sizeof(words[0]);
#pragma unroll
      for (uint32_t& word : words) {
        word = read(k++);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int u = 0; u < kCount; u += kFour) {
          rest[i] += sum_of(words + u, i, terms[i]);
        }
      }
    };
#pragma unroll 1
    while (k + kPair <= before_last) {
      uint32_t words[kPair];
      add_fours(words);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sums[i].add(rest[i]);
        rest[i] = 0;
      }
    }
    if (k + kFour <= before_last) {
      uint32_t words[kFour];
      add_fours(words);
    }
#pragma unroll 1
    for (; k <= before_last; ++k) {
      const uint32_t word = read(k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (k < before_last || at[i] < 0) {
          rest[i] += terms[i](word_element<scalar_t>(word, i));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i].add(rest[i]);
      result.of_rows[i].total = sums[i].total();
    }
    return result;
  }

  const scalar_t* from_;  // the first class of the turn
  uint32_t bytes_;        // from a class of the turn to the next
  int64_t next_row_;      // elements from the first row to the second
  bool has_words_;        // one access of 4 bytes reads a word, whose second half may be no row
  int before_last_;       // classes of the turn but the last one
};

}  // namespace lossops::cuda::plane_words
