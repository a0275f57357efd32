// Sums of exponentials over parts of a row, which may be relative to different logits.
#pragma once

#include <cstdint>

#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/row_terms.cuh"

namespace lossops::cuda::plane_rows {

// total = sum of exp(x_c - reference) over classes c of a row, without its class index. reference
// is the largest of these logits, or -infinity where there are none. Of half types it may also be
// kPlain, log(total), or the logit at the class index where one thread has all classes. kExact: for
// fp32 logits.
//
// of_parts(parts, member, team, part) is the sum of parts member, member + team, ... of a row;
// part(n) is part n, and member < parts. add_lanes(most, least) leaves in each lane the sum over
// all lanes whose numbers agree with its own outside the bits `least` to `most`. All lanes of a
// warp call it. If most < least, nothing changes.
template <bool kExact>
struct OthersSum;

// Each lane moves its sum to the largest reference of all, with one exponential. To merge two lanes
// at a time took two at each step: 8.5 of 38 instructions a logit where 64 threads share 1716
// classes, now some 1.5. (H100, 2026-11)
template <>
struct OthersSum<true> {
  float reference = -math::infinity<float>();
  float total = 0;
  float lost = 0;  // what rounding took from the total

  // What sums relative to `from` are to be multiplied by, to be relative to a larger `to`.
  static __device__ __forceinline__ float ratio(float from, float to) {
    return math::exp(from - to);
  }
  __device__ __forceinline__ float rounded() const { return total + lost; }

  template <typename Part>
  static __device__ __forceinline__ OthersSum of_parts(int parts, int member, int team,
                                                       const Part& part) {
    OthersSum sum;
#pragma unroll 1
    for (int n = member; n < parts; n += team) {
      sum.reference = math::max_number(part(n).reference, sum.reference);
    }
#pragma unroll 1
    for (int n = member; n < parts; n += team) {
      sum.add(part(n).moved_to(sum.reference));
    }
    return sum;
  }

  struct OfShares;
  // The sum of two turns of a share, as if they were shares.
  __device__ __forceinline__ OthersSum merged_with(const OthersSum& other) const;

  __device__ __forceinline__ void add_lanes(int most, int least) {
    float largest = reference;
    for (int offset = most; offset >= least; offset /= 2) {
      largest = math::max_number(__shfl_xor_sync(kAllLanes, largest, offset), largest);
    }
    *this = moved_to(largest);
    for (int offset = most; offset >= least; offset /= 2) {
      add({largest, __shfl_xor_sync(kAllLanes, total, offset),
           __shfl_xor_sync(kAllLanes, lost, offset)});
    }
  }

 private:
  // The same sum relative to `larger`, which is the reference or more. If the reference changes,
  // `lost` joins the total: it may be more than rounding takes from the product.
  __device__ __forceinline__ OthersSum moved_to(float larger) const {
    return reference < larger ? OthersSum{larger, __fmul_rn(rounded(), ratio(reference, larger))}
                              : OthersSum{larger, total, lost};
  }
  // `other` has the same reference. The bits are the same, whichever is added to the other.
  // lost_by_adding() adds to the total.
  __device__ __forceinline__ void add(const OthersSum& other) {
    lost += other.lost;
    lost += math::lost_by_adding(total, other.total);
  }
};

// Half types. The sum of a plain row (plain_rows.cuh) that threads share is relative to 0:
// reference is then -0.0f, which marks it. A largest logit is never -0.0f (add_shifted() adds
// +0.0f), and a sum relative to a logit of -0.0f at the class index is one relative to 0. Nearly
// all rows are plain, so three functions for the others are not inlined: else the kernel spills,
// and takes 3 to 9 % longer. (H100, 2026-11)
template <>
struct OthersSum<false> {
  static constexpr float kPlain = -0.0f;

  float reference = -math::infinity<float>();
  float total = 0;

  static __device__ __forceinline__ bool is_plain(float reference) {
    return __float_as_uint(reference) == 0x80000000u;
  }
  static __device__ __attribute__((noinline)) float ratio(float from, float to) {
    if (from == -math::infinity<float>()) {
      return 0;
    }
    const RowTerms<false> before(from);
    const RowTerms<false> after(to);
    return before.scale == after.scale ? math::exp2(after.offset - before.offset) : 0.0f;
  }
  __device__ __forceinline__ float rounded() const { return total; }

  // The same relative to a number that is as large as the largest logit, or a little larger. A
  // plain sum is relative to 0, which may be so far above all logits that beside a sum of another
  // reference its terms would be lost.
  __device__ __forceinline__ OthersSum near_largest() const {
    return is_plain(reference) ? relative_to_log(total) : *this;
  }

  template <typename Part>
  static __device__ __forceinline__ OthersSum of_parts(int parts, int member, int team,
                                                       const Part& part) {
    OthersSum sum = part(member);
#pragma unroll 1
    for (int n = member + team; n < parts; n += team) {
      sum.add(part(n));
    }
    return sum;
  }

  struct OfShares;
  __device__ __forceinline__ void add_lanes(int most, int least) {
    for (int offset = most; offset >= least; offset /= 2) {
      add({__shfl_xor_sync(kAllLanes, reference, offset),
           __shfl_xor_sync(kAllLanes, total, offset)});
    }
  }

 private:
  __device__ __forceinline__ void add(const OthersSum& other) {
    if (__float_as_uint(reference) == __float_as_uint(other.reference)) {
      total += other.total;
      return;
    }
    *this = merged(near_largest(), other.near_largest());
  }
  // The total relative to `larger`. *this is what near_largest() returns.
  __device__ __forceinline__ float relative_to(float larger) const {
    return reference < larger ? total * ratio(reference, larger) : total;
  }
  static __device__ __attribute__((noinline)) OthersSum merged(const OthersSum& a,
                                                               const OthersSum& b) {
    const float larger = math::max_number(a.reference, b.reference);
    return {larger, a.relative_to(larger) + b.relative_to(larger)};
  }
  static __device__ __attribute__((noinline)) OthersSum relative_to_log(float total) {
    if (total == 0.0f) {
      return {};
    }
    const float largest = math::log(total);
    return {largest, RowTerms<false>(largest).unit};
  }
};

// One thread adds the 1, 2 or 4 shares of a part, and gets the bits of add_lanes(). It calls
// take(n, sum) with the sum of share(n, count) for n = 0 to count - 1, and then sum(count).
// add_lanes() first adds shares two apart: half types take 0, 2, 1, 3, and keep two sums. fp32
// keeps all four, because their largest reference comes first; absent ones have none.
struct OthersSum<true>::OfShares {
  OthersSum sums[4];

  static __device__ __forceinline__ int share(int n, int) { return n; }
  __device__ __forceinline__ void take(int n, const OthersSum& sum) {
    if (n == 0) {
      sums[0] = sum;
      return;
    }
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      sums[i] = i == n ? sum : sums[i];
    }
  }
  __device__ __forceinline__ OthersSum sum(int count) const {
    if (count == 1) {
      return sums[0];
    }
    float largest = sums[0].reference;
#pragma unroll
    for (int n = 1; n < 4; ++n) {
      largest = math::max_number(sums[n].reference, largest);
    }
    OthersSum even = sums[0].moved_to(largest);
    OthersSum odd = sums[1].moved_to(largest);
    if (count > 2) {
      even.add(sums[2].moved_to(largest));
      odd.add(sums[3].moved_to(largest));
    }
    even.add(odd);
    return even;
  }
};

__device__ __forceinline__ OthersSum<true> OthersSum<true>::merged_with(
    const OthersSum& other) const {
  return OfShares{{*this, other}}.sum(2);
}

struct OthersSum<false>::OfShares {
  OthersSum total;
  OthersSum second_pair;

  static __device__ __forceinline__ int share(int n, int count) {
    return count == 4 ? (n & 1) << 1 | n >> 1 : n;
  }
  __device__ __forceinline__ void take(int n, const OthersSum& sum) {
    if (n == 0) {
      total = sum;
    } else if (n == 1) {
      total.add(sum);
    } else if (n == 2) {
      second_pair = sum;
    } else {
      second_pair.add(sum);
      total.add(second_pair);
    }
  }
  __device__ __forceinline__ OthersSum sum(int) const { return total; }
};

}  // namespace lossops::cuda::plane_rows
