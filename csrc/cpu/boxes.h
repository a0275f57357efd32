// Cuts the space of operands that disagree on their fastest dimension into boxes, which the
// elementwise losses walk one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>

#include "launchers.h"
#include "scalar_types.h"

namespace lossops::cpu {

// The side of a square tile, in elements. It is two cache lines of fp32, so each line is used whole
// while it is in the cache.
constexpr int64_t kTile = 32;

// Looks for an operand whose fastest dimension is not dimension 0. Returns that dimension, or 0 if
// there is no such operand.
template <typename Args>
int other_fast_dim(const Args& args, std::initializer_list<Operand Args::*> operands) {
  constexpr int64_t kLine = 16;  // elements of a cache line
  int other = 0;
  for (const auto member : operands) {
    const Operand& operand = args.*member;
    for (int dim = 1; dim < args.space.ndim; ++dim) {
      if (operand.data != nullptr && std::abs(operand.strides[0]) >= kLine &&
          std::abs(operand.strides[dim]) == 1) {
        other = dim;
      }
    }
  }
  return other;
}

// Dimensions (0, ..., other, ...) become (0 and other within a tile, 0 and other from tile to tile,
// ...). Both sizes must be multiples of kTile.
template <typename Args>
void walk_in_tiles(Args& args, std::initializer_list<Operand Args::*> operands, int other) {
  IterationSpace& space = args.space;
  const auto reorder = [&](int64_t* values, int64_t inner_factor, int64_t outer_factor) {
    const int64_t first = values[0];
    const int64_t second = values[other];
    std::copy(values + other + 1, values + space.ndim, values + other);
    std::copy_backward(values + 1, values + space.ndim - 1, values + space.ndim + 2);
    const int64_t tiled[4] = {first * inner_factor, second * inner_factor, first * outer_factor,
                              second * outer_factor};
    std::copy_n(tiled, 4, values);
  };
  for (const auto member : operands) {
    reorder((args.*member).strides, 1, kTile);
  }
  for (const int dim : {0, other}) {
    space.sizes[dim] /= kTile;
  }
  reorder(space.sizes, 1, 1);
  space.sizes[0] = space.sizes[1] = kTile;
  space.ndim += 2;
}

// The part of a space with `size` coordinates of one dimension, from `begin` on.
template <typename Args>
Args part_of(Args args, std::initializer_list<Operand Args::*> operands, int dim, int64_t begin,
             int64_t size) {
  for (const auto member : operands) {
    Operand& operand = args.*member;
    if (operand.data != nullptr) {
      operand.data = static_cast<char*>(operand.data) +
                     begin * operand.strides[dim] * element_size(operand.dtype);
    }
  }
  args.space.numel = args.space.numel / args.space.sizes[dim] * size;
  args.space.sizes[dim] = size;
  return args;
}

// Boxes that a space is cut into, one after the other.
template <typename Args>
struct Boxes {
  Args boxes[3];
  int count = 0;

  void add(const Args& box) { boxes[count++] = box; }
  const Args* begin() const { return boxes; }
  const Args* end() const { return boxes + count; }
};

// Cuts an iteration space into at most three boxes. If operands disagree on the fastest dimension
// (a matrix and the transpose of another), the whole tiles of both dimensions are one box, and the
// rest of each dimension is one more. A space without a whole tile, or without room for two more
// dimensions, stays one box.
template <typename Args>
Boxes<Args> cut_into_boxes(const Args& args, std::initializer_list<Operand Args::*> operands) {
  Boxes<Args> boxes;
  const IterationSpace& space = args.space;
  const int other = other_fast_dim(args, operands);
  const auto whole_tiles = [&](int dim) { return space.sizes[dim] / kTile * kTile; };
  if (other == 0 || whole_tiles(0) == 0 || whole_tiles(other) == 0 || space.ndim + 2 > kMaxDims) {
    boxes.add(args);
    return boxes;
  }
  const auto add_rest = [&](const Args& from, int dim) {
    const int64_t whole = whole_tiles(dim);
    if (whole < space.sizes[dim]) {
      boxes.add(part_of(from, operands, dim, whole, space.sizes[dim] - whole));
    }
  };
  const Args columns = part_of(args, operands, 0, 0, whole_tiles(0));
  Args tiles = part_of(columns, operands, other, 0, whole_tiles(other));
  walk_in_tiles(tiles, operands, other);
  boxes.add(tiles);
  add_rest(columns, other);
  add_rest(args, 0);
  return boxes;
}

}  // namespace lossops::cpu
