// How classes get to the shared memory of plane_rows.cu.
#pragma once

#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda::plane_rows {

// Classes to copy for a thread: `count` of them, of a group with so many rows. Another lane of its
// warp may copy them.
template <typename scalar_t>
struct ClassCopies {
  GroupWords* to;  // class k: to[k * grid.pitch]
  const scalar_t* from;
  int count;
  int rows;  // that exist

  // Starts them. Not inlined: many places call it, each once for many classes. All lanes of a warp.
  static __device__ __attribute__((noinline)) void start(const CrossEntropyArgs& args,
                                                         const PlaneGrid& grid, ClassCopies what) {
    const int pitch = grid.pitch;
    const int64_t step = grid.share_step(args);
    if (grid.reads == PlaneReads::kPairs) {
      // Vectors of 16 bytes, two groups each: half of the lanes copy one class and the others the
      // next, for all lanes. So neighbouring lanes copy neighbouring vectors.
      __syncwarp();  // all lanes have read what is overwritten
      const int width = grid.width;
      const int own = grid.lane_of_segment();
      const int odd = own >= width / 2 ? 1 : 0;
      const int pair = 2 * own - odd * width;  // its first group, among those of the lanes
      const auto address = reinterpret_cast<uint64_t>(what.from);
      const auto* const from = reinterpret_cast<const scalar_t*>(
          __shfl_sync(kAllLanes, static_cast<unsigned long long>(address), pair, width));
      const int count = __shfl_sync(kAllLanes, what.count, pair, width);
      auto* const to = reinterpret_cast<uint4*>(what.to + pair - own + odd * pitch);
      const int own_count = (count + 1 - odd) / 2;
      if (grid.bypasses_l1) {
        copy_units<CopyCaches::kL2>(to, pitch, from + odd * step, 2 * step, own_count);
      } else {
        copy_units<CopyCaches::kL1AndL2>(to, pitch, from + odd * step, 2 * step, own_count);
      }
    } else if (grid.reads == PlaneReads::kGroups) {
      copy_units<CopyCaches::kL1AndL2>(what.to, pitch, what.from, step, what.count);
    } else {
      copy_elements(what, pitch, step, args.input.strides[0]);
    }
  }

 private:
  static constexpr int kRows = kGroupRows<scalar_t>;
  static constexpr int kPerWord = kWordElements<scalar_t>;
  static constexpr int kAtOnce = 4;  // classes

  // pitch: units from a class to the next.
  template <CopyCaches kCaches, typename Unit>
  static __device__ __forceinline__ void copy_units(Unit* to, int pitch, const scalar_t* from,
                                                    int64_t step, int count) {
    CopyPlace<Unit, kCaches> place(to);
#pragma unroll 4
    for (int k = 0; k < count; ++k) {
      place.start_copy(from);
      from += step;
      place += pitch;
    }
  }
  static __device__ __forceinline__ void copy_elements(const ClassCopies& what, int pitch,
                                                       int64_t step, int64_t row_stride) {
    const scalar_t* from = what.from;
    GroupWords* to = what.to;
    if constexpr (kPerWord == 1) {
#pragma unroll 1
      for (int k = 0; k < what.count; ++k) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          start_own_copy(to->values + i, from + (i < what.rows ? i * row_stride : 0));
        }
        from += step;
        to += pitch;
      }
      return;
    }
    int64_t offsets[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      offsets[i] = i < what.rows ? i * row_stride : 0;
    }
#pragma unroll 1
    for (int k = 0; k < what.count; k += kAtOnce) {
      GroupWords gathered[kAtOnce] = {};
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (k + u < what.count) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            gathered[u].values[i / kPerWord] |= word_of(from[u * step + offsets[i]], i % kPerWord);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (k + u < what.count) {
          to[u * pitch] = gathered[u];
        }
      }
      from += kAtOnce * step;
      to += kAtOnce * pitch;
    }
  }
};

}  // namespace lossops::cuda::plane_rows
