// How tiles, short rows that a warp takes together, lie in shared memory. Host code without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/primitives/sizes.h"
#include "launchers.h"

namespace lossops::cuda {

// The most accesses of a warp that meet in one bank, when its teams read their rows' first words.
inline int bank_conflict(int pitch_words, int team) {
  int used[32] = {};
  int worst = 1;
  for (int lane = 0; lane < 32; ++lane) {
    const int bank = (lane / team * pitch_words + lane % team) % 32;
    worst = std::max(worst, ++used[bank]);
  }
  return worst;
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
    const int bytes = pitch * element_bytes;
    if (bytes % kVectorBytes == 0 && is_vector_aligned(operand.data)) {
      const int words = bytes / 4;
      constexpr int kMore = kVectorBytes / 4;
      padding = bank_conflict(words + kMore, team) < bank_conflict(words, team) ? 1 : 0;
      pitch += padding * kVectorBytes / element_bytes;
    }
  }

  // Bytes of a tile. Its first and its last granule may belong to it in part, and a word beyond its
  // last row may be read.
  int bytes(int rows, int64_t num_classes, int element_bytes) const {
    const int elements = (rows - 1) * pitch + static_cast<int>(num_classes);
    return (elements * element_bytes / kVectorBytes + 3) * kVectorBytes;
  }
};

}  // namespace lossops::cuda
