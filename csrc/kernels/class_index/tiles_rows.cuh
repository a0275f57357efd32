// A tile of half types in shared memory: how its rows lie, how they are read there, how rows that
// are not one run are copied to it, and their gradients back.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/primitives/integers.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/row_walk.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda::tiles {

// How a warp cuts the rows. A step of a tile is a row for each of its teams.
struct TileShape {
  int team;                // lanes that share a row
  int rows_of_step;        // teams of a warp
  int steps;               // of a tile
  int padding;             // granules between rows in shared memory, against bank conflicts
  int bytes;               // of a warp's buffer
  int pitch;               // elements from a row to the next in shared memory
  int stride;              // the same in global memory, unless rows are copied word by word
  bool in_bulk;            // copies are bulk copies
  bool by_rows;            // each row is copied by itself, in granules; else all as one run
  bool by_words;           // rows are copied word by word, each to the start of a word
  bool in_vectors;         // rows start at granules in shared memory
  bool gradient_in_run;    // gradients are contiguous rows, placed in vectors as the logits are
  bool gradient_in_rows;   // otherwise, for teams of 4 and more: each row lies in vectors as its
                           // logits do
  bool gradient_in_quads;  // otherwise: gradients are contiguous rows, at any address
  // Of gradients in the run: 2^20 over a row's granules, rounded up; divides a granule's number.
  uint32_t rows_of_2_20;
  Divisor classes;
  Divisor pairs;     // of a row's classes; the last may be half of one
  Divisor granules;  // of 16 bytes that hold a row; the first and the last may hold more
  int rows_at_once;  // that the lanes cover in a step of a copy by lanes
  int copy_stride;   // elements from a lane's granule of a step to that of the next one
  int copy_pitch;    // the same in shared memory

  __device__ __forceinline__ int padded(int granule) const {
    return padding == 0 ? granule
                        : granule + static_cast<int>(granule * rows_of_2_20 >> 20) * padding;
  }
};

// Words that are an aligned vector in shared memory.
template <int kCount>
using WordVector = std::conditional_t<kCount == 4, uint4, uint2>;
template <int kCount>
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&words)[kCount]) {
  static_assert(kCount == 2 || kCount == 4);
  const auto vector = *reinterpret_cast<const WordVector<kCount>*>(from);
  memcpy(words, &vector, sizeof(vector));
}
template <int kCount>
__device__ __forceinline__ void store_words(uint32_t* to, const uint32_t (&words)[kCount]) {
  WordVector<kCount> vector;
  memcpy(&vector, words, sizeof(vector));
  *reinterpret_cast<WordVector<kCount>*>(to) = vector;
}

// Copies rows to shared memory word by word, a row each `pitch` elements, which are whole words.
// Two elements at a time, by the words that they lie in.
template <typename scalar_t>
__device__ __forceinline__ void load_rows(const CrossEntropyForwardArgs& args, const Divisor& pairs,
                                          scalar_t* elements, int pitch, int64_t first_row,
                                          int rows) {
  const int num_classes = static_cast<int>(args.num_classes);
  const auto* const logits = static_cast<const scalar_t*>(args.input.data);
  for_classes<2, 2>(args.rows, args.input, 1, pairs, first_row, rows,
                    [&](int r, int c, int64_t offset) {
                      const scalar_t* const from = logits + offset;
                      auto* const to = reinterpret_cast<uint32_t*>(elements + r * pitch + c);
                      if (c + 1 < num_classes) {
                        UnalignedWords<scalar_t, 1> pair;
                        pair.load(from);
                        *to = pair.word(0);
                      } else {
                        *to = from->bits;
                      }
                    });
}

}  // namespace lossops::cuda::tiles
