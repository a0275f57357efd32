// Gradients of strided classes with class indices: how they are cut into tiles.
//
//   strip  neighbouring rows of one plane, up to 480 bytes in each class; or all rows of several
//          planes, if they are small
//   tile   classes of a strip
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/rows/row_plan.h"
#include "kernels/rows/side_by_side_rows_plan.h"

namespace lossops::cuda::plane_gradients {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
// Resident blocks of a multiprocessor: 80 registers a thread.
constexpr int kResidentBlocks = 3;
// Classes of a tile at most. Each tile computes the numbers of its rows anew.
constexpr int kTileClasses = 512;

struct Strips {
  int64_t positions;    // of a plane
  int64_t planes;       // of all rows
  int length;           // positions of a strip
  int64_t of_plane;     // strips
  int planes_of_strip;  // more than one only if a plane is one strip
  int64_t count;

  explicit Strips(const CrossEntropyArgs& args)
      : positions(side_by_side::positions_of(args)), planes(args.rows.numel / positions) {
    const int64_t vector = kVectorBytes / element_size(args.input.dtype);
    // Where a strip is not aligned, its first vector and its last also have rows of neighbouring
    // strips. Where all are, its length is a multiple of a sector of memory, 32 bytes.
    of_plane = ceil_div(positions, (kWarpSize - 2) * vector);
    const int64_t unit = positions % (2 * vector) == 0 ? 2 * vector : 2;
    length =
        static_cast<int>(of_plane == 1 ? positions : round_up(ceil_div(positions, of_plane), unit));
    const int64_t vectors = ceil_div(positions + vector - 1, vector);
    planes_of_strip = of_plane > 1 ? 1 : static_cast<int>(std::min(planes, kWarpSize / vectors));
    count = of_plane * ceil_div(planes, int64_t{planes_of_strip});
  }
};

inline int tile_classes(int64_t classes) {
  return static_cast<int>(round_up(even_share(classes, kTileClasses), kWarps));
}

inline bool takes(const CrossEntropyBackwardArgs& args) {
  if (args.dense() || args.acc_double || args.input.dtype == DType::kFloat64 ||
      args.input_class_stride == 1 || args.rows.numel == 0 || args.rows.ndim == 0 ||
      args.num_classes == 0 || args.num_classes > kMaxRowClasses ||
      args.grad_input.data == nullptr || args.grad_input.data == args.input.data ||
      args.grad_input.strides[0] != 1 || args.grad_target.data != nullptr) {
    return false;
  }
  const Strips strips(args);
  const int64_t tiles = ceil_div(args.num_classes, tile_classes(args.num_classes));
  return strips.planes <= kMaxDividend && strips.count * tiles <= kMaxDividend;
}

}  // namespace lossops::cuda::plane_gradients
