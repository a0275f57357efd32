// What a thread of plane_rows.cu has: some classes of a group of rows, in shared memory. It sums
// them, and writes their gradients.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plane_copies.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/plane_segments.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda::plane_rows {

// A thread's part of a block's logits: the classes of its share, of the rows of its lane. It sums
// all of them but the class indices: the last class takes their place.
template <typename scalar_t>
class GroupShare {
 public:
  static constexpr int kRows = kGroupRows<scalar_t>;
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  using Words = GroupWords;

  const int share;
  int indices[kRows];

  __device__ __forceinline__ GroupShare(const PlaneGrid& grid, const CrossEntropyForwardArgs& args,
                                        void* stage)
      : share(grid.share_of_thread()),
        args_(args),
        grid_(grid),
        slot_(static_cast<int>(threadIdx.x) / grid.width * (grid.width + grid.padding) +
              grid.lane_of_segment()),
        stage_(static_cast<Words*>(stage) + slot_),
        places_of_range_(grid.places_of_range()),
        own_classes_((static_cast<int>(args.num_classes) - share + (1 << grid.share_bits) - 1) >>
                     grid.share_bits) {}

  // Starts to copy the classes of a range. All lanes of a warp.
  __device__ __forceinline__ void start(const PlanePlace& place, int first, int buffer) const {
    const scalar_t* const from = logits_of(place, first);
    const int count = place.rows == 0 ? 0 : count_of(first);
    if constexpr (kHasSegments) {
      if (copies_segment(place)) {
        SegmentCopies<scalar_t>::start(args_, grid_, slots(buffer),
                                       from - grid_.lane_of_segment() * kRows, count);
        return;
      }
    }
    ClassCopies<scalar_t>::start(args_, grid_, {own_of(buffer), from, count, place.rows});
  }
  // Moves what has been copied to its slots: once after each start(). All lanes of a warp.
  __device__ __forceinline__ void settle(const PlanePlace& place, int first, int buffer) const {
    if (grid_.reads == PlaneReads::kPairs) {
      __syncwarp();
    }
    if constexpr (kHasSegments) {
      if (copies_segment(place)) {
        SegmentCopies<scalar_t>::settle(args_, grid_, slots(buffer),
                                        logits_of(place, first) - grid_.lane_of_segment() * kRows,
                                        count_of(first), least_count_of(first));
      }
    }
  }

  // Goes over to other rows: `rows` that exist, of these class indices.
  __device__ __forceinline__ void take(int rows, const int* class_indices) {
    rows_ = rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums_[i] = {};
      references_[i] = -math::infinity<float>();
      indices[i] = class_indices[i];
    }
    reaches_ = {};
  }

  // Puts the last class to the place of a class index, where it is in the range. from: class 0 of
  // the rows. logits: gets the logit of the class index, of each row.
  template <typename element_t>
  __device__ __forceinline__ void take_indices_out(TypeTag<element_t>, int first, int buffer,
                                                   const scalar_t* from, float* logits) {
    auto* const elements = reinterpret_cast<scalar_t*>(own_of(buffer));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int place = place_of_index(i, first);
      if (place >= 0) {
        scalar_t& logit = elements[place * grid_.pitch * kRows + i];
        const float x = to_acc<float>(bits_as<element_t>(logit));
        logits[i] = x;
        if constexpr (!kExact) {
          RowGroup<element_t> alone = {};
          alone.words[i / 2] = uint32_t{bits_as<uint16_t>(logit)} << (16 * (i % 2));
          reinterpret_cast<RowGroup<element_t>*>(&reaches_)->reach_to(alone);
        }
        const int last = own_classes_ - 1;
        logit =
            grid_.buffers > 1
                ? from[((int64_t{last} << grid_.share_bits) + share) * args_.input_class_stride +
                       i * args_.input.strides[0]]
                : elements[last * grid_.pitch * kRows + i];
      }
    }
  }

  // Adds a range to the sums of plain rows.
  template <typename element_t>
  __device__ __forceinline__ void add_plain(TypeTag<element_t>, int first, int buffer) {
    auto* const reaches = reinterpret_cast<RowGroup<element_t>*>(&reaches_);
    const Part<element_t> part(*this, first, buffer);
    sum_group<kExact, element_t>(
        part.own, grid_.pitch, part.count, sums_, [](int, float x) { return plain_exp(x); },
        [&](const auto& x) { reaches->reach_to(x); },
        [&](auto& added) {
          if (part.has_last) {
            reaches->reach_to(part.own[part.count * part.pitch]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              added[i] += has_index(i) ? 0.0f : plain_exp(part.last(i));
            }
          }
        });
  }
  // Marks all sums as plain. Returns the rows of which that is wrong, a bit each: sum_shifted()
  // sums them again.
  template <typename element_t>
  __device__ __forceinline__ int mark_plain(TypeTag<element_t>) {
    const auto& reaches = reinterpret_cast<const RowGroup<element_t>&>(reaches_);
    int shifted = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float total = sums_[i].total();
      const float reach = ::fabsf(reaches.get(i));
      references_[i] = OthersSum<kExact>::kPlain;
      // One of several shares may have no other class.
      const bool is_plain = reach <= kMaxPlainLogit &&
                            (total > 0.0f || (grid_.share_bits > 0 && total == 0.0f) || rows_ == 0);
      shifted |= is_plain ? 0 : 1 << i;
    }
    return shifted;
  }
  // Calls body(), which adds all classes once more, to sums that are not plain; those of rows that
  // are plain stay.
  template <typename Body>
  __device__ __forceinline__ void sum_shifted(int shifted, const Body& body) {
    float plain[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      plain[i] = sums_[i].total();
      sums_[i] = {};
      references_[i] = -math::infinity<float>();
    }
    body();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if ((shifted >> i & 1) == 0) {
        sums_[i] = {plain[i]};
        references_[i] = OthersSum<kExact>::kPlain;
      }
    }
  }

  // Adds a range to the sums relative to the largest logit so far.
  template <typename element_t>
  __device__ __forceinline__ void add_shifted(TypeTag<element_t>, int first, int buffer) {
    const Part<element_t> part(*this, first, buffer);
    RowGroup<element_t> largest;
#pragma unroll
    for (uint32_t& word : largest.words) {
      word = lowest_word<element_t>();
    }
    const RowGroup<element_t>* own = part.own;
#pragma unroll 4
    for (int k = 0; k < part.count; ++k) {
      largest.raise_to(*own);
      own += grid_.pitch;
    }
    RowTerms<kExact> terms[kRows];
    float last[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float max = largest.get(i);
      if (part.has_last && !has_index(i)) {
        last[i] = part.last(i);
        max = math::max_number(last[i], max);
      }
      max = math::max_number(max, -math::infinity<float>());
      raise(i, max + 0.0f);  // never -0
      terms[i] = RowTerms<kExact>(references_[i]);
    }
    // Terms that are exactly 1 are counted apart: beside a 1, every sum of smaller ones would be
    // rounded as it is. Not where one thread has all classes, which has the order, and the bits, of
    // side_by_side_rows.
    const float distance_of_one = grid_.share_bits > 0 ? 0.0f : math::quiet_nan<float>();
    float ones[kRows] = {};
    const auto term = [&](int i, float x) {
      const float value = terms[i](x);
      if constexpr (kExact) {
        const float one = x - terms[i].shift == distance_of_one ? 1.0f : 0.0f;
        ones[i] += one;
        return value - one;
      } else {
        return value;
      }
    };
    sum_group<kExact, element_t>(
        part.own, grid_.pitch, part.count, sums_, term, [](const auto&) {},
        [&](auto& added) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (part.has_last && !has_index(i)) {
              added[i] += term(i, last[i]);
            }
          }
        });
    if constexpr (kExact) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        sums_[i].add(ones[i]);
      }
    }
  }

  // Exchanges sums with the other blocks of a cluster; then merges those of the same group that
  // lanes of a warp have. All threads of a cluster call it.
  __device__ __forceinline__ void get_sums(const RowNumbers& numbers, float (&references)[kRows],
                                           float (&totals)[kRows]) {
    OthersSum<kExact> sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i] = {references_[i], sums_[i].sum};
      if constexpr (kExact) {
        sums[i].lost = sums_[i].lost;
      }
    }
    if (grid_.is_clustered()) {
      exchange(numbers.of_sums(grid_.parts), sums);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums[i].add_lanes(kWarpSize / 2, grid_.own_lanes);
      references[i] = sums[i].reference;
      totals[i] = sums[i].rounded();
    }
  }

  // Writes the gradients of a range, whose logits are in shared memory. to: class 0 of the rows.
  template <typename element_t>
  __device__ __forceinline__ void write_range(TypeTag<element_t>, int first, int buffer,
                                              const IndexGradient<kExact> (&gradients)[kRows],
                                              scalar_t* to) const {
    using Group = RowGroup<element_t>;
    const auto* const own = reinterpret_cast<const Group*>(own_of(buffer));
    const int own_classes = rows_ == 0 ? 0 : count_of(first);
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
      const Group* logits = own;
#pragma unroll 4
      for (int k = 0; k < own_classes; ++k) {
        const Group x = *logits;
        logits += grid_.pitch;
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
    scalar_t* const of_share = to + (first + share) * args_.grad_input_class_stride;
    const int64_t step = args_.grad_input_class_stride << grid_.share_bits;
    // replace(values): logits by gradients.
    const auto write = [&](auto unroll, auto&& replace) {
      constexpr int kUnroll = decltype(unroll)::value;
      const Group* logits = own;
      scalar_t* group = of_share;
#pragma unroll kUnroll
      for (int k = 0; k < own_classes; ++k) {
        const Group x = *logits;
        float values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          values[i] = x.get(i);
        }
        replace(values);
        *reinterpret_cast<Group*>(group) = Group::of(values);
        logits += grid_.pitch;
        group += step;
      }
    };
    if (usual) {
      write(std::integral_constant<int, 2>(), [&](auto& x) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          x[i] = gradients[i].of_logit.usual(x[i]);
        }
      });
    } else {
      write(std::integral_constant<int, 1>(), [&](auto& x) {
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
      const int k = place_of_index(i, first);
      if (k >= 0) {
        scalar_t* const at_index = of_share + k * step + i * args_.grad_input.strides[0];
        *at_index = bits_as<scalar_t>(from_acc<element_t>(gradients[i].at_index));
      }
    }
  }

 private:
  // Hands sums over to the block that merges them: afterwards a thread has those that it would have
  // if its block had all shares of its own lanes. of_sums: (kRows, sum_numbers(), threads) in every
  // block.
  __device__ __forceinline__ void exchange(float* of_sums, OthersSum<kExact> (&sums)[kRows]) const {
    constexpr int kNumbers = sum_numbers(sizeof(scalar_t));
    const int threads = static_cast<int>(blockDim.x);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = grid_.lane_of_segment();
    float* const to = at_rank(of_sums, grid_.rank_of(lane)) + thread - lane +
                      grid_.rank() * grid_.own_lanes + (lane & (grid_.own_lanes - 1));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float* const of_row = to + i * kNumbers * threads;
      of_row[0] = sums[i].reference;
      of_row[threads] = sums[i].total;
      if constexpr (kExact) {
        of_row[2 * threads] = sums[i].lost;
      }
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float* const of_row = of_sums + i * kNumbers * threads + thread;
      sums[i].reference = of_row[0];
      sums[i].total = of_row[threads];
      if constexpr (kExact) {
        sums[i].lost = of_row[2 * threads];
      }
    }
  }

  static constexpr bool kHasSegments = sizeof(scalar_t) == 2;

  // What is summed of a range: `count` classes, and the last one of all where it is in the range.
  template <typename element_t>
  struct Part {
    const RowGroup<element_t>* own;
    int pitch;
    int count;
    bool has_last;

    __device__ __forceinline__ Part(const GroupShare& share, int first, int buffer)
        : own(reinterpret_cast<const RowGroup<element_t>*>(share.own_of(buffer))),
          pitch(share.grid_.pitch) {
      const int places = share.rows_ == 0 ? 0 : share.count_of(first);
      has_last = places > 0 && (first >> share.grid_.share_bits) + places == share.own_classes_;
      count = places - (has_last ? 1 : 0);
    }
    __device__ __forceinline__ float last(int i) const { return own[count * pitch].get(i); }
  };

  __device__ __forceinline__ Words* own_of(int buffer) const {
    return stage_ + buffer * places_of_range_ * grid_.pitch;
  }
  // The classes of a range that each thread has at least: one has at most one more.
  __device__ __forceinline__ int least_count_of(int first) const {
    const int left = (static_cast<int>(args_.num_classes) - first) >> grid_.share_bits;
    return left < places_of_range_ ? left : places_of_range_;
  }
  // The classes of a range that are this thread's.
  __device__ __forceinline__ int count_of(int first) const {
    const int left = own_classes_ - (first >> grid_.share_bits);
    return left < places_of_range_ ? left : places_of_range_;
  }
  __device__ __forceinline__ bool has_index(int i) const {
    return grid_.share_bits == 0 || is_own_index(i);
  }
  __device__ __forceinline__ bool is_own_index(int i) const {
    return indices[i] >= 0 && (indices[i] & ((1 << grid_.share_bits) - 1)) == share;
  }
  // The place of a row's class index among this thread's classes of a range, or -1.
  __device__ __forceinline__ int place_of_index(int i, int first) const {
    const int place = (indices[i] - first) >> grid_.share_bits;
    return is_own_index(i) && place >= 0 && place < places_of_range_ ? place : -1;
  }
  __device__ __forceinline__ void raise(int i, float largest) {
    if (largest > references_[i]) {
      // Without a reference the sum is 0 or NaN, and stays so.
      if (references_[i] > -math::infinity<float>()) {
        keep_apart();
        const float ratio = OthersSum<kExact>::ratio(references_[i], largest);
        const float sum = __fmul_rn(sums_[i].sum, ratio);
        if constexpr (kExact) {
          // What rounding takes is kept: it may happen once for every range.
          sums_[i].lost = sums_[i].lost * ratio + ::fmaf(sums_[i].sum, ratio, -sum);
        }
        sums_[i].sum = sum;
      }
      references_[i] = largest;
    }
  }
  // The rows' logits of the share's first class of a range.
  __device__ __forceinline__ const scalar_t* logits_of(const PlanePlace& place, int first) const {
    return static_cast<const scalar_t*>(args_.input.data) + place.offset(args_.input) +
           (first + share) * args_.input_class_stride;
  }
  // Whether vectors copy the segment: all of its rows exist, and a vector more of its plane behind
  // them. (Before them, other bytes of the same 16 may be read.) The same in all lanes of a warp.
  __device__ __forceinline__ bool copies_segment(const PlanePlace& place) const {
    const int64_t left = grid_.positions - place.position + grid_.lane_of_segment() * kRows;
    return grid_.reads == PlaneReads::kSegments && place.is_there &&
           left >= grid_.width * kRows + kVectorSize<scalar_t>;
  }
  // The first slot of the segment.
  __device__ __forceinline__ int slots(int buffer) const {
    return slot_ - grid_.lane_of_segment() + buffer * places_of_range_ * grid_.pitch;
  }

  const CrossEntropyForwardArgs& args_;
  const PlaneGrid& grid_;
  const int slot_;      // of the group, of a share's first class
  Words* const stage_;  // class k of the share, in the first buffer: stage_[k * grid_.pitch]
  const int places_of_range_;
  const int own_classes_;

  int rows_ = 0;  // that exist
  GroupSum<kExact> sums_[kRows];
  float references_[kRows];  // what they are relative to
  Words reaches_;            // the largest magnitudes of logits: of plain rows
};

}  // namespace lossops::cuda::plane_rows
