// A row of a tile of soft_tiles.cu: what a team of lanes reduces it to, and its gradients.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/plain_dense_sum.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda::soft_tiles {

// Gives each class of a row its coefficient: a class index or a probability, smoothed, times the
// class weight.
template <typename scalar_t>
struct Coefficients {
  static constexpr int kPerWord = kWordElements<scalar_t>;

  Smoothing smoothing;
  bool has_weights;
  const float* weights;  // in shared memory
  bool has_index;        // the target is a class index
  int index;
  RowWords<scalar_t> probabilities;
  bool has_floats;  // probabilities are in `floats`, not in `probabilities`
  const float* floats;
  bool lies_apart;  // a row's logits and probabilities may begin at different halves of a word
  int first = 0;    // words count from this class

  // The coefficients of words that count from the logits' first whole word, which begins at class 0
  // or 1.
  __device__ __forceinline__ Coefficients at_words(int first_class) const {
    Coefficients result = *this;
    result.first = first_class;
    result.probabilities = probabilities.after(first_class, lies_apart);
    return result;
  }

  // The coefficients of the words k, k + distance, ...
  template <int kCount>
  __device__ __forceinline__ void load(int k, int distance, float (&q)[kCount]) const {
    constexpr int kWords = kCount / kPerWord;
    if (has_index) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] = c == index ? 1.0f : 0.0f; });
    } else if (has_floats) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] = floats[c]; });
    } else {
      uint32_t words[kWords];
      probabilities.load(k, distance, words);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        q[n] = word_element<scalar_t>(words[n / kPerWord], n % kPerWord);
      }
    }
    if (smoothing.smoothing != 0.0f) {
      keep_apart();
#pragma unroll
      for (float& value : q) {
        value = smoothing(value);
      }
    }
    if (has_weights) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] *= weights[c]; });
    }
  }
  // The coefficient of class c.
  __device__ __forceinline__ float of(int c) const {
    const float p = has_index    ? (c == index ? 1.0f : 0.0f)
                    : has_floats ? floats[c]
                                 : to_acc<float>(probabilities[c]);
    return has_weights ? smoothing(p) * weights[c] : smoothing(p);
  }

 private:
  template <int kCount, typename Body>
  __device__ __forceinline__ void for_each(int k, int distance, const Body& body) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      body(n, first + (k + n / kPerWord * distance) * kPerWord + n % kPerWord);
    }
  }
};

// kKind: of cross_entropy_forward_soft_kernel. Lane `member` of a team has the words member, member
// + team, ...
template <typename scalar_t, RowKind kKind>
class TileRow {
 public:
  __device__ __forceinline__ TileRow(const RowWords<scalar_t>& words,
                                     const Coefficients<scalar_t>& coefficients,
                                     const SmoothedIndex& smooth, int num_classes, int team,
                                     int member)
      : own_(words),
        coefficients_(coefficients),
        smooth_(smooth),
        num_classes_(num_classes),
        team_(team),
        member_(member),
        index_(coefficients.index),
        x_at_index_(kIsSmooth && index_ >= 0 ? to_acc<float>(own_[index_]) : 0.0f),
        has_last_(num_classes % kPerWord != 0 && num_classes / kPerWord % team == member) {}

  // All lanes of a warp must call this.
  __device__ __forceinline__ DenseOnlineSoftmax<float> reduce() const {
    DenseRow row;
    float max = 0;
    if constexpr (!kIsSmooth) {
      max = largest_logit(num_classes_);
    }
    if constexpr (!kExact) {
      row = reduce_relative_to(kIsSmooth ? x_at_index_ : max);
    } else if constexpr (kIsSmooth) {
      if (team_ >= kLeastTeam) {
        row = reduce_others();
      }
    }
    if (__any_sync(kAllLanes, !row.is_plain)) {
      if constexpr (kIsSmooth) {
        max = largest_logit(num_classes_);
      }
      const DenseOnlineSoftmax<float> state = reduce_below_max(max);
      row.state = row.is_plain ? row.state : state;
    }
    return row.state;
  }

  // Overwrites the logits. All lanes of a warp must call this. exists: false of a row behind the
  // last one.
  __device__ __forceinline__ void write_gradients(const DenseOnlineSoftmax<float>& state,
                                                  float scale, bool exists) const {
    const float q_sum = state.q_sum;
    const auto softmax = dense_softmax<kExact>(state.max, state.rest(), scale, q_sum);
    const LogitGradient<float, kExact> gradient(softmax, scale * q_sum);
    const auto replace = [&](auto may_outweigh, float x, float q) {
      return gradient.template dense<decltype(may_outweigh)::value>(x, scale, q_sum,
                                                                    kIsSmooth ? smooth_.other : q);
    };
    // Where a class outweighs all others, its gradient may be a small difference. It has the logit
    // state.max: in a plain smooth row, where another logit may be larger, others are less than 1
    // only beside the class index. The gradient at the class index of a smooth row is written last
    // anyway.
    const bool may_outweigh =
        index_ >= 0 && softmax.one_may_outweigh() && !(kIsSmooth && x_at_index_ == state.max);
    const int largest = may_outweigh ? find(state.max) : -1;
    __syncwarp();  // logits that other lanes write have been read
    if (exists && index_ < 0) {
#pragma unroll 1
      for (int c = member_; c < num_classes_; c += team_) {
        own_[c] = from_acc<scalar_t>(gradient_without_loss(index_));
      }
    } else if (exists) {
      // Elements before the first whole word, and behind the last one, share a word with another
      // row. So they are written by themselves.
      const int before = own_.before_words();
      const int words = (num_classes_ - before) / kPerWord;
      const RowWords<scalar_t> own = own_.at_words();
      const Coefficients<scalar_t> coefficients = coefficients_.at_words(before);
      for_each_word(kBatch, words, [&](int k, auto count) {
        constexpr int kWords = decltype(count)::value;
        uint32_t loaded[kWords];
        own.load(k, team_, loaded);
        float q[kWords * kPerWord] = {};
        if constexpr (!kIsSmooth) {
          coefficients.load(k, team_, q);
        }
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          float x[kPerWord];
#pragma unroll
          for (int i = 0; i < kPerWord; ++i) {
            x[i] = replace(std::false_type{}, word_element<scalar_t>(loaded[u], i),
                           q[u * kPerWord + i]);
          }
          loaded[u] = pack_word<scalar_t>(x);
        }
        own.store(k, team_, loaded);
      });
      // These elements, in a loop for one copy of the formula.
      if (kPerWord > 1 && member_ == 0) {
        int c = before > 0 ? 0 : last();
#pragma unroll 1
        for (int left = num_classes_ - words * kPerWord; left > 0; --left) {
          own_[c] = from_acc<scalar_t>(replace(std::false_type{}, to_acc<float>(own_[c]),
                                               kIsSmooth ? 0.0f : coefficients_.of(c)));
          c = last();
        }
      }
    }
    __syncwarp();  // another lane may have written an element that is overwritten now
    if (largest >= 0) {
      own_[largest] = from_acc<scalar_t>(
          replace(std::true_type{}, state.max, kIsSmooth ? 0.0f : coefficients_.of(largest)));
    }
    if constexpr (kIsSmooth) {
      if (index_ >= 0 && member_ == 0) {
        own_[index_] =
            from_acc<scalar_t>(gradient.dense(x_at_index_, scale, q_sum, smooth_.at_index));
      }
    }
  }

 private:
  static constexpr int kPerWord = kWordElements<scalar_t>;
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  static constexpr bool kIsSmooth = kKind == RowKind::kSmooth;
  static constexpr std::integral_constant<int, kTermBatch / kPerWord> kBatch = {};
  // Of rows of fp32 that are summed by reduce_others(). By it, forward / step of 188 classes (4
  // lanes) .67 / .74 to .73 / .77, of 64 (2 lanes) .64 / .70 to .61 / .67. (H200, 2026-12)
  static constexpr int kLeastTeam = 4;
  static constexpr float kLargeTerm = PlainDenseSum<kIsSmooth>::kLarge;
  static constexpr float kConfident = PlainDenseSum<kIsSmooth>::kConfident;

  __device__ __forceinline__ int last() const { return num_classes_ - 1; }

  // Calls body(k, count) for this lane's words k, k + team, ... of `words`: `count` of them, which
  // is `batch`, or 1 at the end.
  template <typename Batch, typename Body>
  __device__ __forceinline__ void for_each_word(Batch batch, int words, const Body& body) const {
    constexpr int kCount = Batch::value;
    int k = member_;
#pragma unroll 1
    for (; k + (kCount - 1) * team_ < words; k += kCount * team_) {
      body(k, batch);
    }
#pragma unroll 1
    for (; k < words; k += team_) {
      body(k, std::integral_constant<int, 1>{});
    }
  }

  // Calls body(k, x, q) with this lane's logits and coefficients, several at a time. k: the first
  // word of the batch; -1 for the element behind the whole words. Smooth rows have no q.
  template <typename Body>
  __device__ __forceinline__ void for_each_batch(const Body& body) const {
    for_each_word(kBatch, num_classes_ / kPerWord, [&](int k, auto count) {
      constexpr int kWords = decltype(count)::value;
      uint32_t loaded[kWords];
      own_.load(k, team_, loaded);
      float x[kWords * kPerWord];
      float q[kWords * kPerWord] = {};
#pragma unroll
      for (int n = 0; n < kWords * kPerWord; ++n) {
        x[n] = word_element<scalar_t>(loaded[n / kPerWord], n % kPerWord);
      }
      if constexpr (!kIsSmooth) {
        coefficients_.load(k, team_, q);
      }
      body(k, x, q);
    });
    if (has_last_) {
      const float x[1] = {to_acc<float>(own_[last()])};
      const float q[1] = {kIsSmooth ? 0.0f : coefficients_.of(last())};
      body(-1, x, q);
    }
  }

  __device__ __forceinline__ DenseRow reduce_relative_to(float reference) const {
    using Sum = PlainDenseSum<kIsSmooth>;
    Sum sum(reference);
    for_each_batch([&](int k, const auto& x, const auto& q) { sum.add(k, x, q); });
    const auto rest_of = [&](int k, const PlainTerms& terms) {
      return rest_of_batch(k, num_classes_ / kPerWord, terms);
    };
    DenseRow row = sum.finish(team_, rest_of, smooth_, num_classes_);
    row.is_plain = row.is_plain || index_ < 0;  // without a loss, the sums do not matter
    return row;
  }

  // The sum of the terms that are not large, of this lane's batch that begins at word k of `words`.
  template <typename Terms>
  __device__ __forceinline__ float rest_of_batch(int k, int words, const Terms& terms) const {
    const bool is_whole = k + (kBatch - 1) * team_ < words;
    float rest = 0;
#pragma unroll 1
    for (const int end = is_whole ? k + kBatch * team_ : k + 1; k < end; k += team_) {
      uint32_t loaded[1];
      own_.load(k, team_, loaded);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const float power = terms(word_element<scalar_t>(loaded[0], i));
        rest += power < kLargeTerm ? power : 0.0f;
      }
    }
    return rest;
  }

  // fp32: sums the other classes first, relative to the largest of them, while the last class takes
  // the place of the class index. The class index joins them at the end.
  __device__ __forceinline__ DenseRow reduce_others() const {
    const auto put_at_index = [&](float x) {
      __syncwarp();
      if (index_ >= 0 && member_ == 0) {
        own_[index_] = x;
      }
      __syncwarp();
    };
    put_at_index(own_[last()]);
    const float max = largest_logit(last());
    const RowTerms<true> terms(max);
    float large = 0;     // the sum of the batches that have a large term
    int large_at = -1;   // the last such batch
    float small = 0;     // the sum of the others
    float distance = 0;  // the sum of max - x
    for_each_word(kBatch, last(), [&](int k, auto count) {
      constexpr int kCount = decltype(count)::value;
      uint32_t loaded[kCount];
      own_.load(k, team_, loaded);
      float distances[kCount];
      float powers[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const float difference = word_element<float>(loaded[n], 0) - max;
        distances[n] = -difference;
        powers[n] = math::exp_of_finite_in_sum(difference);
      }
      const float sum = pairwise_sum(powers);
      if (sum >= kLargeTerm) {
        large += sum;
        large_at = k;
      } else {
        small += sum;
      }
      distance += pairwise_sum(distances);
    });
    const float others = warp_sum(large + small, team_);
    distance = warp_sum(distance, team_);
    IndexRow reduced = IndexRow::of(terms, max, others, x_at_index_);
    // A logit that outweighs all others, but is not that of the class index: what is left beside it
    // is summed by itself.
    const bool is_confident = x_at_index_ < max && reduced.rest < kConfident;
    if (__any_sync(kAllLanes, is_confident)) {
      small += is_confident && large_at >= 0 ? rest_of_batch(large_at, last(), terms) : 0.0f;
      small = warp_sum(small, team_);
      reduced.rest = is_confident ? small + terms(x_at_index_) : reduced.rest;
    }
    put_at_index(x_at_index_);
    DenseRow row;
    row.state.max = reduced.reference;
    row.state.ones = 1;
    row.state.below = reduced.rest;
    row.state.q_sum = SmoothedIndex::kSum;
    // The reference is the logit at the class index, if that is the largest of all.
    distance = ::fmaf(static_cast<float>(last()), reduced.reference - max, distance);
    distance += reduced.reference - x_at_index_;
    row.state.dot = smooth_.weighted(distance, reduced.reference, x_at_index_);
    // False of NaN, which infinities become.
    const bool is_finite = (reduced.rest >= 0) & (::fabsf(row.state.dot) < math::infinity<float>());
    row.is_plain = is_finite || index_ < 0;  // without a loss, the sums do not matter
    return row;
  }

  // The largest of the first `count` logits.
  __device__ __forceinline__ float largest_logit(int count) const {
    uint32_t maxima = lowest_word<scalar_t>();
    for_each_word(kBatch, count / kPerWord, [&](int k, auto count) {
      uint32_t loaded[decltype(count)::value];
      own_.load(k, team_, loaded);
#pragma unroll
      for (const uint32_t word : loaded) {
        maxima = max_of_words<scalar_t>(word, maxima);
      }
    });
    float max = max_of_elements<scalar_t>(maxima);
    if (has_last_) {
      max = math::max_number(to_acc<float>(own_[last()]), max);
    }
    return team_ > 1 ? warp_max(max, team_) : max;
  }

  __device__ __forceinline__ DenseOnlineSoftmax<float> reduce_below_max(float max) const {
    DenseOnlineSoftmax<float> state;
    state.max = max;
    const RowTerms<kExact> terms(state.max);
    TermSum sum;
    for_each_batch([&](int, const auto& x, const auto& q) {
      add_logits<kKind, true>(sum, terms, x, q, GivenCoefficients());
    });
    float below = sum.all_below();
    state.dot = sum.all_distance();
    state.q_sum = kIsSmooth ? SmoothedIndex::kSum : sum.q_sum;
    if (team_ > 1) {
      below = warp_sum(below, team_);
      sum.ones = warp_sum(sum.ones, team_);
      state.dot = warp_sum(state.dot, team_);
      state.q_sum = kIsSmooth ? state.q_sum : warp_sum(state.q_sum, team_);
    }
    // The same with a gradient and without one: not part of an FMA.
    state.below = __fmul_rn(below, terms.correction());
    state.ones = static_cast<float>(sum.ones);
    if constexpr (kIsSmooth) {
      // The sum may be infinite where it is not times a coefficient.
      const bool again = !(state.dot < math::infinity<float>());
      state.dot = smooth_.weighted(state.dot, state.max, x_at_index_);
      if (__any_sync(kAllLanes, again)) {
        float others = 0;
#pragma unroll 1
        for (int c = member_; c < num_classes_; c += team_) {
          others += smooth_.other * (terms.shift - to_acc<float>(own_[c]));
        }
        others = smooth_.with_index(warp_sum(others, team_), state.max, x_at_index_);
        state.dot = again ? others : state.dot;
      }
    }
    return state;
  }

  // An element of this lane that is `value`, -1 if there is none.
  __device__ __forceinline__ int find(float value) const {
    int found = has_last_ && to_acc<float>(own_[last()]) == value ? last() : -1;
#pragma unroll 1
    for (int k = member_; k < num_classes_ / kPerWord; k += team_) {
      uint32_t loaded[1];
      own_.load(k, team_, loaded);
#pragma unroll
      for (int i = 0; i < kPerWord; ++i) {
        const bool is_value = word_element<scalar_t>(loaded[0], i) == value;
        found = is_value ? k * kPerWord + i : found;  // fault: soft-largest
      }
    }
    return found;
  }

  const RowWords<scalar_t> own_;
  const Coefficients<scalar_t> coefficients_;
  const SmoothedIndex smooth_;
  const int num_classes_;
  const int team_;
  const int member_;
  const int index_;         // the class index; of rows without one 0, negative without a loss
  const float x_at_index_;  // of smooth rows
  const bool has_last_;     // whether this lane has the last element, which is no whole word
};

}  // namespace lossops::cuda::soft_tiles
