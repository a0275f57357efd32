// Operands in any layout, drawn at random, and where plans put their elements (kernels/elements/),
// for the tests of these plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/elements/tiles.h"
#include "tests/check.h"

namespace lossops::cuda {

inline std::mt19937_64 generator(1);

inline int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// An aligned address for operands that nobody reads.
inline char* const kData = reinterpret_cast<char*>(uintptr_t{1} << 40);

struct Problem {
  IterationSpace space;
  Operand operands[kNumOperands];

  Problem() = default;
  explicit Problem(std::initializer_list<int64_t> sizes) {
    space.numel = 1;
    for (const int64_t size : sizes) {
      space.sizes[space.ndim++] = size;
      space.numel *= size;
    }
  }
  // The strides of kOutput must be dense: take() finds the number of an element from its place.
  void add(Which which, DType dtype, const int64_t* strides) {
    operands[which].data = kData;
    operands[which].dtype = dtype;
    std::copy(strides, strides + space.ndim, operands[which].strides);
  }
  // Lets an operand begin so many elements later.
  void shift(Which which, int64_t elements) {
    operands[which].data = kData + elements * element_size(operands[which].dtype);
  }
};

// Strides of dimensions in a random order, some padded, some broadcast.
inline void draw_strides(const IterationSpace& space, bool is_plain, int64_t* strides) {
  std::vector<int> order(space.ndim);
  std::iota(order.begin(), order.end(), 0);
  if (!is_plain && draw(0, 1) == 0) {
    std::shuffle(order.begin(), order.end(), generator);
  }
  int64_t next = 1;
  for (const int dim : order) {
    const bool is_broadcast = !is_plain && draw(0, 3) == 0;
    strides[dim] = is_broadcast ? 0 : next;
    next *= is_broadcast ? 1 : space.sizes[dim] + (is_plain ? 0 : draw(0, 4) * draw(0, 1));
  }
}

inline Problem draw_problem(int most_dims) {
  Problem problem;
  IterationSpace& space = problem.space;
  space.ndim = static_cast<int>(draw(1, most_dims));
  space.numel = 1;
  const int long_dim = static_cast<int>(draw(0, space.ndim));  // space.ndim: there is none
  // Threads walk within few long rows.
  const int64_t longest = most_dims < 4 && draw(0, 9) == 0 ? 6000 : 140;
  for (int dim = 0; dim < space.ndim; ++dim) {
    space.sizes[dim] = dim == long_dim   ? draw(20, longest)
                       : draw(0, 2) == 0 ? draw(20, 70)
                                         : draw(2, 12);
    space.numel *= space.sizes[dim];
  }
  int64_t strides[kMaxDims];
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16};
  const bool are_half = draw(0, 1) == 0;
  draw_strides(space, true, strides);
  problem.add(kOutput, dtypes[are_half ? 1 : draw(0, 1)], strides);
  for (const Which which : {kInput, kTarget}) {
    draw_strides(space, draw(0, 3) == 0, strides);
    problem.add(which, dtypes[are_half ? 1 : draw(0, 1)], strides);
  }
  if (draw(0, 1) == 0) {
    for (const Which which : {kInput, kTarget, kOutput}) {
      problem.shift(which, draw(0, 7));
    }
  }
  return problem;
}

// Calls body(problem) with problems of three dimensions, and some of four.
template <typename Body>
void for_each_problem(const Body& body) {
  for (int n = 0; n < 500; ++n) {
    const Problem problem = draw_problem(n % 5 == 0 ? 4 : 3);
    test::subject() = "problem " + std::to_string(n);
    body(problem);
  }
}

// The distance of element i of the space from an operand's first, in bytes.
inline int64_t place(const Problem& problem, const Operand& operand, int64_t i) {
  int64_t offset = 0;
  for (int dim = 0; dim < problem.space.ndim; ++dim) {
    offset += i % problem.space.sizes[dim] * operand.strides[dim];
    i /= problem.space.sizes[dim];
  }
  return offset * element_size(operand.dtype);
}

// Takes the element that lies at offset(operand) in each operand. Finds its number from kOutput.
template <typename Plan, typename Offset>
inline void take(const Problem& problem, const Plan& plan, bool counts, std::vector<int>& taken,
                 const Offset& offset) {
  const int64_t i = offset(plan.operands[kOutput]) / element_size(problem.operands[kOutput].dtype);
  CHECK(0 <= i && i < problem.space.numel);
  if (i < 0 || i >= problem.space.numel) {
    return;
  }
  taken[i] += counts ? 1 : 0;
  for (const Which which : {kInput, kTarget}) {
    CHECK(offset(plan.operands[which]) == place(problem, problem.operands[which], i));
  }
}

inline bool are_taken(const std::vector<int>& taken) {
  return std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; });
}

// Sums must not depend on whether a gradient is wanted: elements are numbered alike.
inline Problem with_gradients(const Problem& problem) {
  Problem other = problem;
  other.operands[kGradInput] = problem.operands[kInput];
  other.operands[kGradTarget] = problem.operands[kTarget];
  return other;
}

}  // namespace lossops::cuda
