// How tiles, short rows that a warp takes together, lie in shared memory. Host code without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device_limits.h"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"
#include "launchers.h"

namespace lossops::cuda {

// The most accesses of a warp that meet in one bank, when its teams read the first words of rows
// that lie pitch_bytes apart.
inline int bank_conflict(int pitch_bytes, int team) {
  int used[32] = {};
  int worst = 1;
  for (int lane = 0; lane < 32; ++lane) {
    const int bank = (lane / team * pitch_bytes / 4 + lane % team) % 32;
    worst = std::max(worst, ++used[bank]);
  }
  return worst;
}

// Granules of 16 bytes to add between rows of row_bytes in shared memory, so that fewer accesses
// meet in a bank: 1 or 0. Only rows of whole granules then still begin at one place of a granule.
inline int padding_of(int row_bytes, int team) {
  return row_bytes % kVectorBytes == 0 &&
         bank_conflict(row_bytes + kVectorBytes, team) < bank_conflict(row_bytes, team);
}

// What a team costs for a row of so many bytes, in instructions: for each lane of the team of_row,
// and for each word of the lane of_word and 4 times the accesses that meet in a bank, which are 1
// without a conflict.
inline double team_cost(int row_bytes, int team, double of_word, double of_row) {
  const int words = (row_bytes + 3) / 4;
  const int pitch = row_bytes + padding_of(row_bytes, team) * kVectorBytes;
  return team * ((words + team - 1) / team * (of_word + 4.0 * bank_conflict(pitch, team)) + of_row);
}

// Blocks of `threads` whose warps take `tiles` in turn, each warp at least `fewest` of them.
// shared_bytes: of a block.
inline int64_t blocks_of_tiles(int64_t tiles, const DeviceLimits& device, int threads,
                               int shared_bytes, int64_t fewest) {
  const int64_t warps = threads / kWarpSize;
  const int64_t resident =
      device.multiprocessors * device.resident_blocks(threads, shared_bytes) * warps;
  return ceil_div(workers_for(tiles, resident, fewest, kMaxWorkers * warps), warps);
}

// Elements from the start of a row to the next. For a single row: the number of classes.
inline int64_t row_stride(const CrossEntropyArgs& args, const Operand& operand) {
  return args.rows.ndim == 1 ? operand.strides[0] : args.num_classes;
}

// Whether rows of contiguous classes are copied as one run, together with the gaps between them. A
// gap may have one sector or half a row, whichever is more: memory reads whole sectors anyway.
inline bool copied_as_run(const CrossEntropyArgs& args, const Operand& operand) {
  const int64_t element_bytes = element_size(operand.dtype);
  const int64_t gap = (row_stride(args, operand) - args.num_classes) * element_bytes;
  return args.rows.ndim <= 1 && gap >= 0 &&
         gap <= std::max(int64_t{kSectorBytes}, args.num_classes * element_bytes / 2);
}

// How the rows of an operand lie in a tile.
struct TileLayout {
  bool in_run = false;  // copied by granules of 16 bytes, as in global memory; else by elements
  int64_t stride = 0;   // elements from a row to the next in global memory
  int pitch = 0;        // the same in shared memory
  int padding = 0;      // granules added between the rows of a run in shared memory

  TileLayout() = default;
  // element_bytes: in shared memory. Elements that have other sizes in global memory are copied one
  // by one.
  TileLayout(const CrossEntropyArgs& args, const Operand& operand, int64_t class_stride,
             int element_bytes, int team)
      : in_run(class_stride == 1 && element_size(operand.dtype) == element_bytes &&
               copied_as_run(args, operand)),
        stride(row_stride(args, operand)) {
    if (!in_run) {
      // An odd number of words: few lanes meet in a bank.
      const int words = (static_cast<int>(args.num_classes) * element_bytes + 3) / 4;
      pitch = (words | 1) * 4 / element_bytes;
      return;
    }
    pitch = static_cast<int>(stride);
    padding = is_vector_aligned(operand.data) ? padding_of(pitch * element_bytes, team) : 0;
    pitch += padding * kVectorBytes / element_bytes;
  }

  // Bytes of a tile. Its first and its last granule may belong to it in part, and a word beyond its
  // last row may be read.
  int bytes(int rows, int64_t num_classes, int element_bytes) const {
    const int elements = (rows - 1) * pitch + static_cast<int>(num_classes);
    return (elements * element_bytes / kVectorBytes + 3) * kVectorBytes;
  }
};

}  // namespace lossops::cuda
