// What plane_rows.cu and plane_words.cu make of the parts of a row.
#pragma once

#include <cstdint>

#include "kernels/rows/others_sum.cuh"
#include "kernels/rows/plain_rows.cuh"

namespace lossops::cuda::plane_rows {

// The sum of all classes of a row but its index, in all threads of a team. part(n): part n, of
// which there are `parts`. All lanes of a warp call it.
template <bool kExact, typename Part>
__device__ __forceinline__ OthersSum<kExact> merge_parts(int parts, int member, int team,
                                                         const Part& part) {
  auto sum = OthersSum<kExact>::of_parts(parts, member, team, part);
  sum.add_lanes(team / 2, 1);
  return sum;
}

// The row that these others and its class index make.
template <bool kExact>
__device__ __forceinline__ IndexRow row_of(const OthersSum<kExact>& others, float x_at_index) {
  OthersSum<kExact> shifted = others;
  if constexpr (!kExact) {
    if (OthersSum<kExact>::is_plain(others.reference) &&
        IndexRow::may_be_plain(::fabsf(x_at_index), others.total)) {
      return IndexRow::plain(others.total);
    }
    shifted = others.near_largest();
  }
  const float largest = shifted.reference;
  return IndexRow::of(RowTerms<kExact>(largest), largest, shifted.rounded(), x_at_index);
}

}  // namespace lossops::cuda::plane_rows
