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
      : share(static_cast<int>(threadIdx.x) >> grid.lane_bits),
        args_(args),
        grid_(grid),
        stage_(static_cast<Words*>(stage) + threadIdx.x),
        own_classes_((static_cast<int>(args.num_classes) - share + (1 << grid.share_bits) - 1) >>
                     grid.share_bits) {}

  // Starts to copy its classes. All lanes of a warp.
  __device__ __forceinline__ void start(const PlanePlace& place) const {
    const scalar_t* const from = static_cast<const scalar_t*>(args_.input.data) +
                                 place.offset(args_.input) + share * args_.input_class_stride;
    ClassCopies<scalar_t>::start(args_, grid_,
                                 {stage_, from, place.rows == 0 ? 0 : own_classes_, place.rows});
  }

  // Once the copies have arrived: other lanes of the warp may have copied the thread's classes.
  __device__ __forceinline__ void settle() const {
    if (grid_.reads == PlaneReads::kPairs) {
      __syncwarp();
    }
  }

  // Goes over to other rows: `rows` that exist, of these class indices.
  __device__ __forceinline__ void take(int rows, const int* class_indices) {
    rows_ = rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums_[i] = {};
      references_[i] = 0;
      indices[i] = class_indices[i];
    }
    reaches_ = {};
  }

  // Puts the last class to the place of a class index. logits: gets the logit of the class index,
  // of each row that has it in this share.
  template <typename element_t>
  __device__ __forceinline__ void take_indices_out(TypeTag<element_t>, float* logits) {
    auto* const elements = reinterpret_cast<scalar_t*>(stage_);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (is_own_index(i)) {
        scalar_t& logit = elements[place_of_index(i) * grid_.pitch * kRows + i];
        const float x = to_acc<float>(bits_as<element_t>(logit));
        logits[i] = x;
        if constexpr (!kExact) {
          references_[i] = grid_.share_bits == 0 ? x : 0.0f;
          RowGroup<element_t> alone = {};
          alone.words[i / 2] = uint32_t{bits_as<uint16_t>(logit)} << (16 * (i % 2));
          reinterpret_cast<RowGroup<element_t>*>(&reaches_)->reach_to(alone);
        }
        logit = elements[(own_classes_ - 1) * grid_.pitch * kRows + i];
      }
    }
  }

  // Adds its classes to the sums of plain rows.
  template <typename element_t>
  __device__ __forceinline__ void add_plain(TypeTag<element_t>) {
    auto* const reaches = reinterpret_cast<RowGroup<element_t>*>(&reaches_);
    const Part<element_t> part(*this);
    PlainTerms terms[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      terms[i] = PlainTerms(references_[i]);
    }
    sum_group<kExact, element_t>(
        part.own, grid_.pitch, part.count, sums_, [&](int i, float x) { return terms[i](x); },
        [&](const auto& x) { reaches->reach_to(x); },
        [&](auto& added) {
          if (part.has_last) {
            reaches->reach_to(part.own[part.count * part.pitch]);
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              added[i] += has_index(i) ? 0.0f : terms[i](part.last(i));
            }
          }
        });
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sums_[i] = {terms[i].corrected(sums_[i].total(), references_[i])};
    }
  }
  // Returns the rows that are not plain, a bit each: sum_shifted() sums them again.
  template <typename element_t>
  __device__ __forceinline__ int find_plain(TypeTag<element_t>) {
    const auto& reaches = reinterpret_cast<const RowGroup<element_t>&>(reaches_);
    int shifted = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float total = sums_[i].total();
      bool is_plain = rows_ == 0;
      if (grid_.share_bits == 0) {
        is_plain = is_plain || IndexRow::may_be_plain(total, references_[i]);
      } else {
        // A share may have no other class.
        is_plain = is_plain || (::fabsf(reaches.get(i)) <= kMaxPlainLogit && total >= 0.0f);
        references_[i] = OthersSum<kExact>::kPlain;
      }
      shifted |= is_plain ? 0 : 1 << i;
    }
    return shifted;
  }
  // Calls body(), which adds all classes once more, to sums that are not plain; those of rows that
  // are plain stay.
  template <typename Body>
  __device__ __forceinline__ void sum_shifted(int shifted, const Body& body) {
    float plain[kRows];
    float plain_references[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      plain[i] = sums_[i].total();
      plain_references[i] = references_[i];
      sums_[i] = {};
      references_[i] = -math::infinity<float>();
    }
    body();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if ((shifted >> i & 1) == 0) {
        sums_[i] = {plain[i]};
        references_[i] = plain_references[i];
      }
    }
  }

  // Adds its classes to the sums relative to the largest logit.
  template <typename element_t>
  __device__ __forceinline__ void add_shifted(TypeTag<element_t>) {
    const Part<element_t> part(*this);
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
      references_[i] = max + 0.0f;  // never -0
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

  // Merges the sums of the same group that lanes of a warp have. All lanes call it.
  __device__ __forceinline__ void get_sums(float (&references)[kRows],
                                           float (&totals)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      OthersSum<kExact> sum = {references_[i], sums_[i].sum};
      if constexpr (kExact) {
        sum.lost = sums_[i].lost;
      }
      sum.add_lanes(kWarpSize / 2, grid_.lanes);
      references[i] = sum.reference;
      totals[i] = sum.rounded();
    }
  }

  // Writes the gradients of its classes. to: class 0 of the rows.
  template <typename element_t>
  __device__ __forceinline__ void write_gradients(TypeTag<element_t>,
                                                  const IndexGradient<kExact> (&gradients)[kRows],
                                                  scalar_t* to) const {
    using Group = RowGroup<element_t>;
    const auto* const own = reinterpret_cast<const Group*>(stage_);
    const int own_classes = rows_ == 0 ? 0 : own_classes_;
    bool usual = true;
    unsigned zeros = 0;  // a bit for each row whose gradients are 0, but for the class index's
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      zeros |= gradients[i].is_zero() ? 1u << i : 0;
      usual = usual && (indices[i] >= 0 || (zeros & 1u << i) != 0);
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
        usual = usual && (least[i] > gradients[i].of_logit.lowest || (zeros & 1u << i) != 0);
      }
    }
    scalar_t* const of_share = to + share * args_.grad_input_class_stride;
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
        if (zeros != 0) {
          keep_apart();
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            x[i] = (zeros & 1u << i) != 0 ? 0.0f : x[i];  // fault: plane-rows-zeros
          }
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
      if (is_own_index(i)) {
        scalar_t* const at_index = of_share + place_of_index(i) * step + i;
        *at_index = bits_as<scalar_t>(from_acc<element_t>(gradients[i].at_index));
      }
    }
  }

 private:
  // What is summed: `count` classes, and the last one, of rows whose class index is not here.
  template <typename element_t>
  struct Part {
    const RowGroup<element_t>* own;
    int pitch;
    bool has_last;
    int count;

    __device__ __forceinline__ explicit Part(const GroupShare& share)
        : own(reinterpret_cast<const RowGroup<element_t>*>(share.stage_)),
          pitch(share.grid_.pitch),
          has_last(share.rows_ > 0) {
      count = has_last ? share.own_classes_ - 1 : 0;
    }
    __device__ __forceinline__ float last(int i) const { return own[count * pitch].get(i); }
  };

  __device__ __forceinline__ bool has_index(int i) const {
    return grid_.share_bits == 0 || is_own_index(i);
  }
  __device__ __forceinline__ bool is_own_index(int i) const {
    return indices[i] >= 0 && (indices[i] & ((1 << grid_.share_bits) - 1)) == share;
  }
  // The place of a row's class index among this thread's classes.
  __device__ __forceinline__ int place_of_index(int i) const {
    return indices[i] >> grid_.share_bits;
  }

  const CrossEntropyForwardArgs& args_;
  const PlaneGrid& grid_;
  Words* const stage_;  // class k of the share: stage_[k * grid_.pitch]
  const int own_classes_;

  int rows_ = 0;  // that exist
  GroupSum<kExact> sums_[kRows];
  // What they are relative to. Of plain rows it is the logit at the class index where the thread
  // has all classes, and 0 elsewhere.
  float references_[kRows];
  Words reaches_;  // the largest magnitudes of logits: of plain rows
};

}  // namespace lossops::cuda::plane_rows
