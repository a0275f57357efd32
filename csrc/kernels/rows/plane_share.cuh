// What a thread of plane_rows.cu has: some classes of a group of rows, in shared memory. It copies
// them, sums them, and writes their gradients.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda::plane_rows {

// Classes that a thread copies at a time.
constexpr int kCopied = 4;

// total = sum of exp(x_c - reference) over classes c of a row, without its class index. reference
// is the largest of these logits. The sum of a plain row (plain_rows.cuh) is not shifted: reference
// is then -0.0f, which marks it. A largest logit is never -0.0f (add_range adds +0.0f).
template <bool kExact>
struct OthersSum {
  struct Nothing {};
  static constexpr float kPlain = -0.0f;

  float reference = -math::infinity<float>();
  float total = 0;
  // What rounding took from the total.
  std::conditional_t<kExact, float, Nothing> lost = {};

  static __device__ __forceinline__ bool is_plain(float reference) {
    return __float_as_uint(reference) == 0x80000000u;
  }

  // What sums relative to `from` are to be multiplied by, to be relative to a larger `to`. Not
  // inlined: it is rare.
  static __device__ __attribute__((noinline)) float ratio(float from, float to) {
    if (from == -math::infinity<float>()) {
      return 0;
    }
    if constexpr (kExact) {
      return math::exp(from - to);
    } else {
      const RowTerms<false> before(from);
      const RowTerms<false> after(to);
      return before.scale == after.scale ? math::exp2(after.offset - before.offset) : 0.0f;
    }
  }
  // The same relative to a number that is as large as the largest logit, or a little larger: beside
  // a sum of other reference, 0 may be so far above all logits that 1 would hide them.
  __device__ __forceinline__ OthersSum near_largest() const {
    return kExact || !is_plain(reference) ? *this : relative_to_log(total);
  }
  // The total relative to `larger`. *this is what near_largest() returns.
  __device__ __forceinline__ float relative_to(float larger) const {
    return reference < larger ? total * ratio(reference, larger) : total;
  }
  __device__ __forceinline__ OthersSum moved_to(float larger) const {
    // What the total of the smaller one has lost is less than a rounding of the sum.
    return {larger, relative_to(larger), reference < larger ? decltype(lost)() : lost};
  }
  __device__ __forceinline__ float rounded() const {
    if constexpr (kExact) {
      return total + lost;
    } else {
      return total;
    }
  }

  // What the lane has whose number is this one's, but for the bits of `offset`.
  __device__ __forceinline__ OthersSum of_neighbour(int offset) const {
    OthersSum found{__shfl_xor_sync(kAllLanes, reference, offset),
                    __shfl_xor_sync(kAllLanes, total, offset)};
    if constexpr (kExact) {
      found.lost = __shfl_xor_sync(kAllLanes, lost, offset);
    }
    return found;
  }

  __device__ __forceinline__ void add(const OthersSum& other) {
    if (__float_as_uint(reference) == __float_as_uint(other.reference)) {
      add_total(other);
      return;
    }
    *this = merged(near_largest(), other.near_largest());
  }

 private:
  // The same bits, whichever is added to the other.
  __device__ __forceinline__ void add_total(const OthersSum& other) {
    if constexpr (kExact) {
      lost += other.lost;
      lost += math::lost_by_adding(total, other.total);
    } else {
      total += other.total;
    }
  }
  // Not inlined, as ratio().
  static __device__ __attribute__((noinline)) OthersSum merged(const OthersSum& a,
                                                               const OthersSum& b) {
    const float larger = math::max_number(a.reference, b.reference);
    OthersSum sum = a.moved_to(larger);
    sum.add_total(b.moved_to(larger));
    return sum;
  }
  static __device__ __attribute__((noinline)) OthersSum relative_to_log(float total) {
    if (total == 0.0f) {
      return {};
    }
    const float largest = math::log(total);
    return {largest, RowTerms<false>(largest).unit};
  }
};

// The largest of the lanes of a warp that share a group.
__device__ __forceinline__ float largest_of_shares(float value, int lanes) {
  for (int offset = kWarpSize / 2; offset >= lanes; offset /= 2) {
    value = math::max_number(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// A thread's part of a block's logits: the classes of its share, of the rows of its lane.
template <typename scalar_t>
class GroupShare {
 public:
  static constexpr int kRows = kGroupRows<scalar_t>;
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  // Of any half type.
  using Words = VectorOf<uint32_t, kGroupBytes / 4>;

  int share;
  int rows;  // that exist
  int indices[kRows];

  __device__ __forceinline__ GroupShare(const PlaneGrid& grid, const PlanePlace& place,
                                        const CrossEntropyArgs& args, void* stage)
      : share(static_cast<int>(threadIdx.x) >> grid.lane_bits),
        rows(place.rows),
        grid_(grid),
        own_(static_cast<Words*>(stage) + threadIdx.x),
        pitch_(static_cast<int>(blockDim.x)),
        num_classes_(static_cast<int>(args.num_classes)) {}

  // The classes of the range from `first` on that are this thread's.
  __device__ __forceinline__ int count(int first) const {
    const int left = num_classes_ - first;
    const int of_range = left < grid_.range ? left : grid_.range;
    return rows == 0 ? 0 : (of_range - share + (1 << grid_.share_bits) - 1) >> grid_.share_bits;
  }

  // Starts to copy them. from: class 0 of the rows.
  __device__ __forceinline__ void start(const scalar_t* from, int64_t class_stride,
                                        int64_t row_stride, int first) const {
    copy_classes(own_, pitch_, from + (first + share) * class_stride,
                 class_stride << grid_.share_bits, count(first), grid_.whole, rows, row_stride);
  }

  // The place of a row's class index among this thread's classes, or -1.
  __device__ __forceinline__ int place_of_index(int i, int first) const {
    const int c = indices[i] - first;
    const bool is_own = indices[i] >= first && c < grid_.range &&
                        (c & ((1 << grid_.share_bits) - 1)) == share && i < rows;
    return is_own ? c >> grid_.share_bits : -1;
  }

  // Adds the classes of a range to the rows' sums, all but the class index, of which `logits` gets
  // the logit. The last class takes its place.
  template <typename element_t>
  __device__ __forceinline__ void add_range(TypeTag<element_t>, int first, float* logits,
                                            OthersSum<kExact> (&sums)[kRows]) const {
    using Group = RowGroup<element_t>;
    auto* const own = reinterpret_cast<Group*>(own_);
    const int others = count(first) - 1;
    bool has_index[kRows];
    float reach[kRows];
    float last[kRows] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int place = place_of_index(i, first);
      // sum_group leaves out this thread's last class, which takes the place of the class index.
      // If the class index is another share's, the last class is added as one more term. With one
      // share the class index is always here.
      has_index[i] = place >= 0 || grid_.share_bits == 0 || others < 0;
      reach[i] = 0;
      if (others >= 0) {
        auto* const elements = reinterpret_cast<element_t*>(own_) + i;
        element_t& last_logit = elements[others * pitch_ * kRows];
        last[i] = to_acc<float>(last_logit);
        if (place >= 0) {
          element_t& logit = elements[place * pitch_ * kRows];
          const float x = to_acc<float>(logit);
          logits[i] = x;
          logit = last_logit;
          reach[i] = ::fabsf(x);
        } else if (grid_.share_bits > 0) {
          reach[i] = ::fabsf(last[i]);
        }
      }
    }
    const auto add = [&](auto& totals, auto&& term, auto&& see) {
      sum_group<kExact, element_t>(own, pitch_, others, totals, term, see, [&](auto& added) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          added[i] += has_index[i] ? 0.0f : term(i, last[i]);
        }
      });
    };
    float totals[kRows];
    float ones[kRows] = {};
    float references[kRows];
    int shifted = (1 << kRows) - 1;  // rows whose sums are relative to their largest, a bit each
    if constexpr (!kExact) {
      Group reaches = {};
      add(
          totals, [](int, float x) { return plain_exp(x); },
          [&](const Group& x) { reaches.reach_to(x); });
      shifted = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float reach_of_row = math::max_number(::fabsf(reaches.get(i)), reach[i]);
        // No other class may be this thread's, if others are.
        const bool is_plain = reach_of_row <= kMaxPlainLogit &&
                              (totals[i] > 0.0f || (grid_.share_bits > 0 && totals[i] == 0.0f));
        shifted |= is_plain ? 0 : 1 << i;
        references[i] = OthersSum<kExact>::kPlain;
      }
      for (int offset = kWarpSize / 2; offset >= grid_.lanes; offset /= 2) {
        shifted |= __shfl_xor_sync(kAllLanes, shifted, offset);
      }
    }
    // The lanes that share a group branch alike, but not all of a warp's.
    if (kExact || __any_sync(kAllLanes, shifted != 0)) {
      Group largest;
#pragma unroll
      for (uint32_t& word : largest.words) {
        word = lowest_word<element_t>();
      }
#pragma unroll 4
      for (int k = 0; k < others; ++k) {
        largest.raise_to(own[k * pitch_]);
      }
      RowTerms<kExact> terms[kRows];
      float maxima[kRows];
      // Terms that are exactly 1 are counted apart: beside a 1 every sum of smaller ones would be
      // rounded as it is. One share has the order of side_by_side_rows, and no count.
      float counted[kRows];  // the logits of such terms; NaN: none
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float max = largest.get(i);
        max = math::max_number(has_index[i] ? max : math::max_number(last[i], max),
                               -math::infinity<float>());
        maxima[i] = largest_of_shares(max, grid_.lanes) + 0.0f;  // never -0
        terms[i] = RowTerms<kExact>(maxima[i]);
        counted[i] = grid_.share_bits > 0 && ::fabsf(maxima[i]) < math::infinity<float>()
                         ? maxima[i]
                         : math::quiet_nan<float>();
      }
      float of_shifted[kRows];
      add(
          of_shifted,
          [&](int i, float x) {
            if constexpr (kExact) {
              const bool is_one = x == counted[i];
              ones[i] += is_one ? 1.0f : 0.0f;
              return is_one ? 0.0f : terms[i](x);
            } else {
              return terms[i](x);
            }
          },
          [](const Group&) {});
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (kExact || (shifted >> i & 1) != 0) {
          totals[i] = of_shifted[i];
          references[i] = maxima[i];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      OthersSum<kExact> of_range{references[i], totals[i]};
      if constexpr (kExact) {
        of_range.add({references[i], ones[i]});
      }
      if (first == 0) {
        sums[i] = of_range;
      } else {
        sums[i].add(of_range);
      }
    }
  }

  // Writes the gradients of a range, whose logits are in shared memory. to: class 0 of the rows.
  template <typename element_t>
  __device__ __forceinline__ void write_range(TypeTag<element_t>, int first,
                                              const IndexGradient<kExact> (&gradients)[kRows],
                                              scalar_t* to, int64_t class_stride,
                                              int64_t row_stride) const {
    using Group = RowGroup<element_t>;
    const auto* const own = reinterpret_cast<const Group*>(own_);
    const int own_classes = count(first);
    bool usual = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      usual = usual && indices[i] >= 0;
    }
    if constexpr (kExact) {
      float least[kRows];
#pragma unroll
      for (float& value : least) {
        value = math::infinity<float>();
      }
#pragma unroll 4
      for (int k = 0; k < own_classes; ++k) {
        const Group x = own[k * pitch_];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          least[i] = ::fminf(x.get(i), least[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        usual = usual && least[i] > gradients[i].of_logit.lowest;
      }
    }
    scalar_t* const of_share = to + (first + share) * class_stride;
    const int64_t step = class_stride << grid_.share_bits;
    const auto write = [&](auto&& replace) {
      scalar_t* place = of_share;
#pragma unroll 2
      for (int k = 0; k < own_classes; ++k) {
        const Group x = own[k * pitch_];
        float values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          values[i] = x.get(i);
        }
        replace(values);
        const Group results = Group::of(values);
        if (grid_.whole) {
          *reinterpret_cast<Group*>(place) = results;
        } else {
          scatter(results, place, row_stride);
        }
        place += step;
      }
    };
    if (usual) {
      write([&](auto& x) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          x[i] = gradients[i].of_logit.usual(x[i]);
        }
      });
    } else {
      write([&](auto& x) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float value[1] = {x[i]};
          gradients[i].replace(value);
          x[i] = value[0];
        }
      });
    }
    // Overwrites what the same thread wrote above at the class index, so no barrier is needed.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int place = place_of_index(i, first);
      if (place >= 0) {
        auto* const at_index = of_share + place * step + i * row_stride;
        *at_index = bits_as<scalar_t>(from_acc<element_t>(gradients[i].at_index));
      }
    }
  }

 private:
  static constexpr int kPerWord = kWordElements<scalar_t>;

  static __device__ __forceinline__ void put_element(Words& words, int i, scalar_t element) {
    if constexpr (kPerWord == 1) {
      words.values[i] = bits_as<uint32_t>(element);
    } else {
      words.values[i / 2] |= uint32_t{bits_as<uint16_t>(element)} << (16 * (i % 2));
    }
  }
  static __device__ __forceinline__ void copy_classes(Words* to, int pitch, const scalar_t* from,
                                                      int64_t step, int count, bool whole, int rows,
                                                      int64_t row_stride) {
    if (whole) {
      int k = 0;
#pragma unroll 1
      for (; k + kCopied <= count; k += kCopied) {
#pragma unroll
        for (int u = 0; u < kCopied; ++u) {
          start_own_copy(to + u * pitch, from);
          from += step;
        }
        to += kCopied * pitch;
      }
#pragma unroll 1
      for (; k < count; ++k) {
        start_own_copy(to, from);
        from += step;
        to += pitch;
      }
      return;
    }
    int64_t offsets[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offsets[i] = i < rows ? i * row_stride : 0;
    }
#pragma unroll 1
    for (int k = 0; k < count; k += kCopied) {
      Words gathered[kCopied] = {};
#pragma unroll
      for (int u = 0; u < kCopied; ++u) {
        if (k + u < count) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            put_element(gathered[u], i, from[u * step + offsets[i]]);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kCopied; ++u) {
        if (k + u < count) {
          to[u * pitch] = gathered[u];
        }
      }
      from += kCopied * step;
      to += kCopied * pitch;
    }
  }

  template <typename element_t>
  __device__ __forceinline__ void scatter(const RowGroup<element_t>& results, scalar_t* to,
                                          int64_t row_stride) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i < rows) {
        if constexpr (kPerWord == 1) {
          to[i * row_stride] = __uint_as_float(results.words[i]);
        } else {
          to[i * row_stride] =
              bits_as<scalar_t>(static_cast<uint16_t>(results.words[i / 2] >> (16 * (i % 2))));
        }
      }
    }
  }

  const PlaneGrid& grid_;
  Words* const own_;  // class k of the share: own_[k * pitch_]
  const int pitch_;
  const int num_classes_;
};

}  // namespace lossops::cuda::plane_rows
