// Sums of exponentials over parts of a row, which may be relative to different logits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/rows/plain_rows.cuh"
#include "kernels/rows/row_terms.cuh"

namespace lossops::cuda::plane_rows {

// total = sum of exp(x_c - reference) over classes c of a row, without its class index. reference
// is the largest of these logits. The sum of a plain row (plain_rows.cuh) is not shifted: reference
// is then -0.0f, which marks it. A largest logit is never -0.0f (add_shifted() adds +0.0f).
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
  // inlined, for less machine code.
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
  // Not inlined, as ratio() is not.
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

}  // namespace lossops::cuda::plane_rows
