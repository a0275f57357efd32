// How a segment of half-type rows gets to the shared memory of plane_rows.cu, at any address: the
// vectors that contain it are copied as they lie, then each group moves to its slot.
#pragma once

#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/sizes.h"
#include "kernels/rows/plane_grid.cuh"
#include "kernels/rows/row_groups.cuh"

namespace lossops::cuda::plane_rows {

// Copies `count` classes of a share, for a segment whose rows all exist. from: its first row, of
// the first of these classes. slots: class k lies at group slots + k * grid.pitch of the dynamic
// shared memory, and has room for a vector more. Whole warps call these functions. They are not
// inlined, as many places call them; no pointer to shared memory is passed, as accesses by it would
// be generic.
template <typename scalar_t>
struct SegmentCopies {
  // Starts to copy the vectors that contain the segment, and up to 14 bytes on each side of it.
  static __device__ __attribute__((noinline)) void start(const CrossEntropyArgs& args,
                                                         const PlaneGrid& grid, int slots,
                                                         const scalar_t* from, int count) {
    LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
    auto* const shared = reinterpret_cast<GroupWords*>(dynamic);
    __syncwarp();  // all lanes have read what is overwritten
    const int64_t step = grid.share_step(args);
    const int lane = grid.lane_of_segment();
    const int half = grid.width / 2;
    const int second = lane >= half ? 1 : 0;
    const int v = lane - second * half;
    // Half of the lanes copy one class and the others the next.
    const scalar_t* of_class = from + second * step;
    CopyPlace<uint4> to(reinterpret_cast<uint4*>(shared + slots + second * grid.pitch) + v);
#pragma unroll 4
    for (int k = second; k < count; k += 2) {
      to.start_copy(vectors_of(of_class) + v);
      of_class += 2 * step;
      to += grid.pitch;  // vectors of two groups, so this is two classes
    }
    // Vector `half`, if the segment is not aligned: a lane a class.
#pragma unroll 1
    for (int k = lane; k < count; k += grid.width) {
      const scalar_t* const own_class = from + k * step;
      const uint4* const vectors = vectors_of(own_class);
      if (static_cast<const void*>(vectors) != own_class) {
        start_own_copy(reinterpret_cast<uint4*>(shared + slots + k * grid.pitch) + half,
                       vectors + half);
      }
    }
  }

  // Moves the groups to their slots, once all copies have arrived. sure: the least `count` of the
  // warp; that of this thread is `sure`, or one more.
  static __device__ __attribute__((noinline)) void settle(const CrossEntropyArgs& args,
                                                          const PlaneGrid& grid, int slots,
                                                          const scalar_t* from, int count,
                                                          int sure) {
    LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
    constexpr int kAtOnce = 4;
    const int pitch = grid.pitch;
    GroupWords* own = reinterpret_cast<GroupWords*>(dynamic) + slots + grid.lane_of_segment();
    auto phase = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from));
    const auto phase_step = static_cast<uint32_t>(grid.share_step(args) * sizeof(scalar_t));
    __syncwarp();
    int k = 0;
#pragma unroll 1
    for (; k + kAtOnce <= sure; k += kAtOnce) {
      GroupWords settled[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        settled[u] = group_at(own + u * pitch, phase % kVectorBytes);
        phase += phase_step;
      }
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        own[u * pitch] = settled[u];
      }
      own += kAtOnce * pitch;
    }
#pragma unroll 1
    for (; k <= sure; ++k) {
      GroupWords settled = {};
      if (k < count) {
        settled = group_at(own, phase % kVectorBytes);
      }
      phase += phase_step;
      __syncwarp();
      if (k < count) {
        *own = settled;
      }
      own += pitch;
    }
    __syncwarp();
  }

 private:
  // From the last boundary of 16 bytes on.
  static __device__ __forceinline__ const uint4* vectors_of(const scalar_t* place) {
    const auto boundary = ~static_cast<uintptr_t>(kVectorBytes - 1);
    return reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(place) & boundary);
  }
  // The group that begins at an even byte of a row.
  static __device__ __forceinline__ GroupWords group_at(const GroupWords* row, uint32_t byte) {
    const auto* const words =
        reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(row) + (byte & ~3u));
    const uint32_t read[] = {words[0], words[1], words[2]};
    const uint32_t shift = byte << 3;  // modulo 32
    return {__funnelshift_r(read[0], read[1], shift), __funnelshift_r(read[1], read[2], shift)};
  }
};

}  // namespace lossops::cuda::plane_rows
