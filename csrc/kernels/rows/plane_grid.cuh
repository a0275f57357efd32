// How plane_rows.cu, and partly soft_planes.cu, spreads rows over the threads of a block: the
// position of each group of rows, and the numbers of each row that the block keeps in shared
// memory.
//
//   plane     the rows along the first dimension of the target, such as the pixels of one image
//   position  the number of a row in its plane
//   group     neighbouring rows of a plane, 8 bytes of each class: 2 of fp32, 4 of half types
//   cluster   1, 2 or 4 blocks that share groups: each has some of the shares of all their lanes
//   lane      the number of a group in a cluster, 0 to lanes - 1: not the lane of a warp
//   own       of rows and lanes: those whose sums a block merges
//   segment   the groups of 32 neighbouring lanes, or of all lanes if they are fewer
//   share     the classes c of a group with c % shares == share; one thread has one lane and share
//   range     the classes that are copied at a time
//   buffer    a place for a range in shared memory
//   slot      the place of a group of one class in a buffer
//   part      a partial sum of a row, which a warp or a share leaves in shared memory
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/grid/device.cuh"
#include "kernels/primitives/cluster.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/row_groups.cuh"

namespace lossops::cuda::plane_rows {

// Without bulk copies there is no cluster: DeviceLimits::hopper.
constexpr bool kHasClusters = kMayCopyInBulk;

// Of any dtype: the logits of one class, of a group of rows.
using GroupWords = VectorOf<uint32_t, kGroupBytes / 4>;

// How the rows are dealt out, for the kernel.
struct PlaneGrid : PlaneGroups {
  int cluster;     // blocks
  int lanes;       // of a cluster
  int lane_bits;   // log2(lanes)
  int own_lanes;   // of a block; a power of two, as `lanes` is
  int own_bits;    // log2(own_lanes)
  int share_bits;  // log2(shares)
  int range;
  int buffers;
  int parts;
  int merging_bits;  // log2 of the threads that merge the parts of a row
  int width;         // lanes of a segment
  int padding;       // groups behind a segment in shared memory
  int pitch;         // groups from a share's class to its next one there
  PlaneReads reads;

  PlaneGrid(const CrossEntropyArgs& args, const Spread& spread)
      : PlaneGroups{static_cast<uint32_t>(spread.groups),
                    Divisor(static_cast<uint32_t>(spread.groups_of_plane)), positions_of(args)},
        cluster(spread.cluster),
        lanes(spread.lanes()),
        lane_bits(log2_of(lanes)),
        own_lanes(spread.cut.lanes),
        own_bits(log2_of(own_lanes)),
        share_bits(log2_of(spread.cut.shares)),
        range(spread.cut.range),
        buffers(spread.cut.buffers),
        parts(spread.cut.parts()),
        merging_bits(merging_bits_of(spread.cut,
                                     static_cast<int>(group_rows(element_size(args.input.dtype))))),
        width(spread.cut.segment(cluster)),
        padding(Cut::padding(spread.reads)),
        pitch(static_cast<int>(spread.cut.pitch(spread.reads, cluster))),
        reads(spread.reads) {}

  // The thread's number in its segment.
  __device__ __forceinline__ int lane_of_segment() const {
    return static_cast<int>(threadIdx.x) & (width - 1);
  }
  __device__ __forceinline__ int blocks_of_cluster() const { return kHasClusters ? cluster : 1; }
  __device__ __forceinline__ bool is_clustered() const { return blocks_of_cluster() > 1; }
  // The block's number in its cluster.
  __device__ __forceinline__ int rank() const {
    return static_cast<int>(blockIdx.x) & (blocks_of_cluster() - 1);
  }
  // The block that merges the sums of a lane.
  __device__ __forceinline__ int rank_of(int of_lane) const { return of_lane >> own_bits; }
  __device__ __forceinline__ int share_of_thread() const {
    return (static_cast<int>(threadIdx.x) >> lane_bits) * blocks_of_cluster() + rank();
  }
  // From a logit to that of the share's next class.
  __device__ __forceinline__ int64_t share_step(const CrossEntropyArgs& args) const {
    return args.input_class_stride << share_bits;
  }
  // The classes that a share has at most, of a range.
  __device__ __forceinline__ int places_of_range() const {
    return (range + (1 << share_bits) - 1) >> share_bits;
  }

  // log2 of the threads that merge the parts of a row: so many that each has at most
  // kPartsOfThread, if a warp and the block's threads are enough.
  static int merging_bits_of(const Cut& cut, int rows_of_group) {
    constexpr int kPartsOfThread = 4;
    int bits = 0;
    while (1 << bits < kWarpSize && kPartsOfThread << bits < cut.parts() &&
           rows_of_group << bits < cut.shares) {
      ++bits;
    }
    return bits;
  }

  static int log2_of(int power) {
    int bits = 0;
    while (1 << bits < power) {
      ++bits;
    }
    return bits;
  }
};

// Numbers in the shared memory of a block: kRowNumbers of each row of its cluster; behind them the
// parts of its own rows but part 0, two numbers each, (parts - 1, 2, own rows); in a cluster,
// behind those, the sums that threads hand over, (rows of a group, sum_numbers(), threads).
struct RowNumbers {
  // While rows are summed: OthersSum's reference and total of part 0, and the logit of the class
  // index. Afterwards the same places hold the numbers of an IndexGradient.
  static constexpr int kReference = 0;
  static constexpr int kTotal = 1;
  static constexpr int kLogit = 2;
  // Class indices of the rows that the block has, and of those that it has next, in turn.
  static constexpr int kIndex = kRowNumbers - 2;

  float* numbers;
  int rows;  // of the cluster
  int own_rows;
  int first_own;

  __device__ __forceinline__ float* of(int number) const { return numbers + number * rows; }
  // The numbers of a part, of the own rows. Part 0 is among the numbers of the rows.
  __device__ __forceinline__ float* of_part(int part, int number) const {
    return part == 0 ? of(number) + first_own
                     : of(kRowNumbers) + (2 * (part - 1) + number) * own_rows;
  }
  __device__ __forceinline__ float* of_sums(int parts) const { return of_part(parts, 0); }
  __device__ __forceinline__ int& index(int row, int turn) const {
    return reinterpret_cast<int*>(of(kIndex + turn))[row];
  }
  // The same places in the block of that rank.
  __device__ __forceinline__ RowNumbers at(int rank) const {
    return {at_rank(numbers, rank), rows, own_rows, first_own};
  }

  // Numbers of neighbouring rows.
  template <int kRows>
  static __device__ __forceinline__ void load(const float* from, float (&values)[kRows]) {
    const auto loaded = *reinterpret_cast<const VectorOf<float, kRows>*>(from);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      values[i] = loaded.values[i];
    }
  }
  template <int kRows>
  static __device__ __forceinline__ void store(float* to, const float (&values)[kRows]) {
    VectorOf<float, kRows> stored;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      stored.values[i] = values[i];
    }
    *reinterpret_cast<VectorOf<float, kRows>*>(to) = stored;
  }

  template <bool kExact>
  __device__ __forceinline__ void put(int row, const IndexGradient<kExact>& gradient) const {
    constexpr int kCount = sizeof(LogitNumbers<kExact>) / sizeof(float);
    static_assert(kCount + 1 <= kIndex, "of_logit, at_index");
    put_numbers(numbers + row, rows, gradient.of_logit);
    of(kCount)[row] = gradient.at_index;
  }
  // row: the first of a group. indices: theirs.
  template <bool kExact, int kRows>
  __device__ __forceinline__ void get(int row, const int (&indices)[kRows],
                                      IndexGradient<kExact> (&gradients)[kRows]) const {
    constexpr int kCount = sizeof(LogitNumbers<kExact>) / sizeof(float);
    float values[kCount + 1][kRows];
#pragma unroll
    for (int k = 0; k <= kCount; ++k) {
      load(of(k) + row, values[k]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float own[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        own[k] = values[k][i];
      }
      memcpy(&gradients[i].of_logit, own, sizeof(own));
      gradients[i].at_index = values[kCount][i];
      gradients[i].index = indices[i];
    }
  }
};

}  // namespace lossops::cuda::plane_rows
