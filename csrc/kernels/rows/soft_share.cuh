// What a thread of soft_planes.cu does with its share of the classes of a word's rows: sums, and
// gradients.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_reader.cuh"
#include "kernels/rows/row_sum.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/soft_planes_plan.h"
#include "launchers.h"

namespace lossops::cuda::soft_planes {

using plane_rows::PlaneGroups;
using plane_rows::PlanePlace;
using plane_rows::WordPlace;

// How the rows are dealt out, for the kernel.
struct SoftGrid : PlaneGroups {
  int lane_bits;      // log2(lanes)
  int share_bits;     // log2(shares)
  int team_bits;      // log2 of the lanes of a warp that merge the sums of a row
  bool reads_words;   // logits are aligned to words
  bool writes_words;  // and so are gradients
  bool has_indices;   // else probabilities
  bool is_rare;       // probabilities or weights of another dtype, or weights that are strided
  bool reads_probability_words;
  Smoothing smoothing;
};

// What a row's gradients need.
template <bool kExact>
struct SoftRow {
  LogitGradient<float, kExact> gradient;
  float scale;
  float q_sum;
  float at_index;  // of smooth rows: the gradient at the class index
};

// The words of kChunk neighbouring classes from first_class on. Places behind the last class repeat
// it.
template <typename scalar_t>
__device__ __forceinline__ void load_words(const WordPlace<const scalar_t>& place, int first_class,
                                           int last_class, uint32_t (&words)[kChunk]) {
  if (place.has_words()) {
    keep_apart();
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      words[u] =
          *reinterpret_cast<const uint32_t*>(place.of_class(min(first_class + u, last_class)));
    }
  } else {
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      const scalar_t* const from = place.of_class(min(first_class + u, last_class));
      words[u] = word_of(from[0], 0) | word_of(from[place.next_row], 1);
    }
  }
}

template <typename scalar_t>
__device__ __forceinline__ void store_words(const WordPlace<scalar_t>& place, int first_class,
                                            int last_class, const uint32_t (&words)[kChunk]) {
  if (place.has_words()) {
    keep_apart();
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      if (first_class + u <= last_class) {
        *reinterpret_cast<uint32_t*>(place.of_class(first_class + u)) = words[u];
      }
    }
  } else {
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      if (first_class + u <= last_class) {
        scalar_t* const to = place.of_class(first_class + u);
        if (place.next_row != 0) {
          to[place.next_row] = element_of<scalar_t>(words[u], 1);
        }
        to[0] = element_of<scalar_t>(words[u], 0);
      }
    }
  }
}

// The coefficients of `count` neighbouring classes of a row, of any dtypes. Not inlined, as it is
// long and rare. offset: of the row's target.
static __device__ __attribute__((noinline)) void load_rare_coefficients(
    const CrossEntropyArgs& args, const Smoothing& smoothing, int index, int64_t offset,
    int first_class, int count, float* q) {
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    const int c = first_class + u;
    const float p = args.target_is_probability
                        ? load_operand<float>(args.target, offset + c * args.target_class_stride)
                        : (c == index ? 1.0f : 0.0f);
    q[u] = class_weight<float>(args, c) * smoothing(p);
  }
}

// A thread's share of the rows of a word. kIsSmooth: rows with class indices and smoothing, without
// class weights, all have one coefficient, but for what the class index has more.
template <typename scalar_t, bool kIsSmooth>
class SoftShare {
 public:
  using State = DenseOnlineSoftmax<float>;
  static constexpr int kRows = rows_of_word(sizeof(scalar_t));
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  using Row = SoftRow<kExact>;
  using Sum = std::conditional_t<kExact, RowSum<State>, ShortRowSum<State>>;

  __device__ __forceinline__ SoftShare(const CrossEntropyForwardArgs& args, const SoftGrid& grid,
                                       const RowType<scalar_t>& type, const PlanePlace& place,
                                       int share)
      : args_(args),
        grid_(grid),
        type_(type),
        place_(place),
        last_(place.rows == 0 ? -1 : static_cast<int>(args.num_classes) - 1),
        first_(share * kChunk),
        logits_(WordPlace<const scalar_t>::of(place, args.input, args.input_class_stride,
                                              grid.reads_words)),
        smooth_(grid.smoothing) {
    if (!kIsSmooth) {
      probabilities_ = WordPlace<const scalar_t>::of(place, args.target, args.target_class_stride,
                                                     grid.reads_probability_words);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      indices_[i] = 0;
      if (grid.has_indices && i < place.rows) {
        indices_[i] = checked_index(args, load_class_index(args.target, target_of(i)));
      }
    }
  }

  // checked_index(); 0 of rows with probabilities, which all have a loss.
  __device__ __forceinline__ int index(int i) const { return indices_[i]; }
  // Of row i, of which index(i) is not negative.
  __device__ __forceinline__ float logit_at_index(int i) const {
    const scalar_t logit = logits_.of_class(indices_[i])[i > 0 ? logits_.next_row : 0];
    return type_.visit([&](auto like) { return to_acc<float>(bits_as<decltype(like)>(logit)); });
  }

  __device__ __forceinline__ int first_class() const { return first_; }
  __device__ __forceinline__ int last_class() const { return last_; }

  // The rows' sums over a stretch of this share, all of it where sums keep what rounding takes; of
  // smooth rows without what the class index has more. Returns where the share goes on.
  __device__ __forceinline__ int sum(int first, Sum (&sums)[kRows]) const {
    const int end = kExact ? last_ : first + ((kShareChunks * kChunk) << grid_.share_bits) - 1;
    return for_each_chunk(first, min(end, last_), [&](int c) {
      Chunk chunk(*this, c);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float (&x)[kChunk] = chunk.logits[i];
        float max = x[0];
#pragma unroll
        for (int u = 1; u < kChunk; ++u) {
          max = math::max_number(x[u], max);
        }
        sums[i].template raise_max<kExact>(max);
        const float shift = softmax_shift(sums[i].sums.max);
        State local;
        float q[kChunk];
        chunk.get_coefficients(i, q);
        const int absent = kChunk - 1 - (last_ - c);
        if (absent > 0) {
          // They become the maximum, without a coefficient: each adds a term of 1 to what begins
          // at so much less.
          keep_apart();
          local.ones = static_cast<float>(-absent);  // fault: soft-planes-absent
          local.q_sum = kIsSmooth ? local.ones * smooth_.other : 0.0f;
#pragma unroll
          for (int u = 1; u < kChunk; ++u) {
            x[u] = u < kChunk - absent ? x[u] : shift;
            q[u] = u < kChunk - absent ? q[u] : 0.0f;
          }
        }
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          if constexpr (kIsSmooth) {
            local.OnlineSoftmax<float>::template add_below_max<kExact>(x[u], shift);
            // The coefficient is not 0.
            local.dot = ::fmaf(smooth_.other, shift - x[u], local.dot);
          } else {
            local.template add_below_max<kExact>(x[u], shift, q[u]);
          }
        }
        if (kIsSmooth) {
          local.q_sum += kChunk * smooth_.other;
        }
        sums[i].add(local);
      }
    });
  }

  // row_of(i): what the gradients of row i need.
  template <typename RowOf>
  __device__ __forceinline__ void write_gradients(const RowOf& row_of) const {
    const auto to = WordPlace<scalar_t>::of(place_, args_.grad_input, args_.grad_input_class_stride,
                                            grid_.writes_words);
    for_each_chunk(first_, last_, [&](int c) {
      Chunk chunk(*this, c);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const Row row = row_of(i);
        float (&x)[kChunk] = chunk.logits[i];
        float q[kChunk];
        chunk.get_coefficients(i, q);
        const auto& softmax = row.gradient.softmax;
        bool outweighs[kChunk] = {};
        float others = 0;
        if (softmax.one_may_outweigh()) {
          // That can only be the largest.
          keep_apart();
          const float e = row.gradient.exponential(softmax.max);
          others = softmax.all_but(e);
#pragma unroll
          for (int u = 0; u < kChunk; ++u) {
            outweighs[u] = x[u] == softmax.max && e > others;  // fault: soft-planes-outweighs
          }
        }
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          const float rest = softmax.outweighing_gradient(others, row.scale, row.q_sum, q[u]);
          x[u] = row.gradient.template dense<false>(x[u], row.scale, row.q_sum, q[u]);
          x[u] = outweighs[u] ? rest : x[u];
        }
        if (indices_[i] < 0) {
          keep_apart();
#pragma unroll
          for (float& value : x) {
            value = gradient_without_loss(indices_[i]);
          }
        }
      }
      uint32_t words[kChunk];
      type_.visit([&](auto like) {
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          float values[kRows];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            values[i] = chunk.logits[i][u];
          }
          words[u] = pack_word<decltype(like)>(values);
        }
      });
      store_words(to, c, last_, words);
      if constexpr (kIsSmooth) {
        // Overwrites what the same thread has just written.
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (static_cast<unsigned>(indices_[i] - c) < kChunk && i < place_.rows) {
            const scalar_t value = type_.visit([&](auto like) {
              return bits_as<scalar_t>(from_acc<decltype(like)>(row_of(i).at_index));
            });
            to.of_class(indices_[i])[i > 0 ? to.next_row : 0] = value;  // fault: soft-planes-at
          }
        }
      }
    });
  }

 private:
  // kChunk neighbouring classes. Places behind the last class repeat it.
  struct Chunk {
    const SoftShare& share;
    int first_class;
    float logits[kRows][kChunk];
    uint32_t probabilities[kChunk];

    __device__ __forceinline__ Chunk(const SoftShare& share_, int first_class_)
        : share(share_), first_class(first_class_) {
      uint32_t words[kChunk];
      load_words(share.logits_, first_class, share.last_, words);
      if (!kIsSmooth && !share.grid_.has_indices && !share.grid_.is_rare) {
        load_words(share.probabilities_, first_class, share.last_, probabilities);
      }
      unpack(words, logits);
    }

    __device__ __forceinline__ void unpack(const uint32_t (&words)[kChunk],
                                           float (&values)[kRows][kChunk]) const {
      share.type_.visit([&](auto like) {
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            values[i][u] = word_element<decltype(like)>(words[u], i);
          }
        }
      });
    }

    __device__ __forceinline__ void get_coefficients(int i, float (&q)[kChunk]) const {
      const SoftGrid& grid = share.grid_;
      if constexpr (kIsSmooth) {
#pragma unroll
        for (float& value : q) {
          value = share.smooth_.other;
        }
        return;
      }
      if (grid.is_rare) {
        keep_apart();
        float loaded[kChunk] = {};
        load_rare_coefficients(share.args_, grid.smoothing, share.indices_[i], share.target_of(i),
                               first_class, min(share.last_ + 1 - first_class, kChunk), loaded);
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          q[u] = loaded[u];
        }
        return;
      }
      if (grid.has_indices) {
        keep_apart();
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          q[u] =
              first_class + u == share.indices_[i] ? share.smooth_.at_index : share.smooth_.other;
        }
      } else {
        const Smoothing smoothing = grid.smoothing;
        share.type_.visit([&](auto like) {
#pragma unroll
          for (int u = 0; u < kChunk; ++u) {
            q[u] = smoothing(word_element<decltype(like)>(probabilities[u], i));
          }
        });
      }
      if (share.args_.weight != nullptr) {
        keep_apart();
        const auto* const weights = static_cast<const scalar_t*>(share.args_.weight);
        share.type_.visit([&](auto like) {
#pragma unroll
          for (int u = 0; u < kChunk; ++u) {
            q[u] *=
                to_acc<float>(bits_as<decltype(like)>(weights[min(first_class + u, share.last_)]));
          }
        });
      }
    }
  };

  // The offset of a row's target; of a row that is not there, the first one's.
  __device__ __forceinline__ int64_t target_of(int i) const {
    return place_.offset(args_.target) + (i < place_.rows ? i : 0) * args_.target.strides[0];
  }

  // Calls body(first_class) for this share's chunks from `first` to `last`. Returns where the next
  // one would begin.
  template <typename Body>
  __device__ __forceinline__ int for_each_chunk(int first, int last, const Body& body) const {
    int c = first;
#pragma unroll 1
    for (; c <= last; c += kChunk << grid_.share_bits) {
      body(c);
    }
    return c;
  }

  const CrossEntropyForwardArgs& args_;
  const SoftGrid& grid_;
  const RowType<scalar_t> type_;
  const PlanePlace place_;
  const int last_;   // class; -1 if there are no rows
  const int first_;  // class of the share
  const WordPlace<const scalar_t> logits_;
  WordPlace<const scalar_t> probabilities_;  // if they have the type of the logits
  const SmoothedIndex smooth_;
  int indices_[kRows];
};

}  // namespace lossops::cuda::soft_planes
