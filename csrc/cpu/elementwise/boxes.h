// Cuts the space of operands that disagree on their fastest dimension into boxes, which the
// elementwise losses walk one after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "launchers.h"
#include "scalar_types.h"

namespace lossops::cpu {

// The side of a tile, in elements, but where a dimension ends. It is two cache lines of fp32, so
// each line is used whole while it is in the cache.
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
// ...). sides: of a tile, which divide both sizes.
template <typename Args>
void walk_in_tiles(Args& args, std::initializer_list<Operand Args::*> operands, int other,
                   const int64_t (&sides)[2]) {
  IterationSpace& space = args.space;
  const auto reorder = [&](int64_t* values, const int64_t (&of_tile)[2],
                           const int64_t (&of_tiles)[2]) {
    std::copy(values + other + 1, values + space.ndim, values + other);
    std::copy_backward(values + 1, values + space.ndim - 1, values + space.ndim + 2);
    std::copy_n(of_tile, 2, values);
    std::copy_n(of_tiles, 2, values + 2);
  };
  for (const auto member : operands) {
    int64_t* const strides = (args.*member).strides;
    const int64_t own[2] = {strides[0], strides[other]};
    reorder(strides, own, {own[0] * sides[0], own[1] * sides[1]});
  }
  reorder(space.sizes, sides, {space.sizes[0] / sides[0], space.sizes[other] / sides[1]});
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

constexpr int kMaxBoxes = 4;
// Boxes that a space is cut into, one after the other. Not on the stack, which may be small.
template <typename Args>
using Boxes = std::vector<Args>;

// Cuts an iteration space into boxes. If operands disagree on the fastest dimension (a
// matrix and the transpose of another), each is walked in tiles of both dimensions: whole ones, and
// those at the end of one dimension or both. A space without room for two more dimensions stays one
// box.
template <typename Args>
Boxes<Args> cut_into_boxes(const Args& args, std::initializer_list<Operand Args::*> operands) {
  Boxes<Args> boxes;
  const int other = other_fast_dim(args, operands);
  if (other == 0 || args.space.ndim + 2 > kMaxDims) {
    boxes.push_back(args);
    return boxes;
  }
  // Beside a short dimension tiles are longer along the other one.
  const auto side_beside = [&](int64_t size) {
    return size < kTile ? kTile * kTile / std::max<int64_t>(size, 1) / kTile * kTile : kTile;
  };
  // Calls body(part, side) for the whole tiles along a dimension, and for what is behind them.
  const auto for_each_part = [&](const Args& from, int dim, const auto& body) {
    const int64_t size = from.space.sizes[dim];
    const int64_t side = side_beside(args.space.sizes[dim == 0 ? other : 0]);
    const int64_t whole = size / side * side;
    if (whole > 0) {
      body(part_of(from, operands, dim, 0, whole), side);
    }
    if (whole < size) {
      body(part_of(from, operands, dim, whole, size - whole), size - whole);
    }
  };
  for_each_part(args, 0, [&](const Args& columns, int64_t width) {
    for_each_part(columns, other, [&](Args part, int64_t height) {
      walk_in_tiles(part, operands, other, {width, height});
      boxes.push_back(part);
    });
  });
  return boxes;
}

inline Boxes<ElementwiseForwardArgs> boxes_of(const ElementwiseForwardArgs& args) {
  using Args = ElementwiseForwardArgs;
  return cut_into_boxes<Args>(args, {&Args::input, &Args::target, &Args::weight, &Args::output,
                                     &Args::grad_input, &Args::grad_target});
}

inline Boxes<ElementwiseBackwardArgs> boxes_of(const ElementwiseBackwardArgs& args) {
  using Args = ElementwiseBackwardArgs;
  return cut_into_boxes<Args>(args, {&Args::input, &Args::target, &Args::weight, &Args::grad_output,
                                     &Args::grad_input, &Args::grad_target, &Args::grad_weight});
}

}  // namespace lossops::cpu
