// How plane_rows.cu and plane_words.cu merge the parts of a row.
#pragma once

#include <cstdint>

#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plain_rows.cuh"

namespace lossops::cuda::plane_rows {

// The sum over all classes of a row but the one at its class index, in all threads of a team that
// merges them. part(n): part n, of which there are `parts`. All lanes of a warp call it.
template <bool kExact, typename Part>
__device__ __forceinline__ OthersSum<kExact> merge_parts(int parts, int member, int team,
                                                         const Part& part) {
  auto sum = OthersSum<kExact>::of_parts(parts, member, team, part);
  sum.add_lanes(team / 2, 1);
  return sum;
}

// The row, from the sum over all other classes and the logit at the class index. has_all_classes:
// one thread has summed them, so the sum of a plain row is relative to that logit, not to 0.
template <bool kExact>
__device__ __forceinline__ IndexRow index_row_of(const OthersSum<kExact>& others, float x_at_index,
                                                 bool has_all_classes) {
  OthersSum<kExact> shifted = others;
  if constexpr (!kExact) {
    const bool is_relative_to_0 = OthersSum<kExact>::is_plain(others.reference);
    const float total =
        is_relative_to_0 ? __fmul_rn(others.total, math::exp(-x_at_index)) : others.total;
    const bool is_relative_to_index = has_all_classes && others.reference == x_at_index;
    if ((is_relative_to_0 || is_relative_to_index) && IndexRow::may_be_plain(total, x_at_index)) {
      return IndexRow::plain(total, x_at_index);
    }
    shifted = others.near_largest();
  }
  const float largest = shifted.reference;
  return IndexRow::of(RowTerms<kExact>(largest), largest, shifted.rounded(), x_at_index);
}

}  // namespace lossops::cuda::plane_rows
