// How elements of strided operands are numbered (kernels/elements/plan.h), on the host: every
// element is taken once, and found at its place in each operand, however dimensions are cut into
// chunks and boxes.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/elements/plan.h"
#include "tests/check.h"

namespace lossops::cuda {
namespace {

std::mt19937_64 generator(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// An aligned address for operands that nobody reads.
char* const kData = reinterpret_cast<char*>(uintptr_t{1} << 40);

struct Problem {
  IterationSpace space;
  Operand operands[kNumOperands];
  // The strides of kOutput must be dense: take() finds the number of an element from its place.
  void add(Which which, DType dtype, const int64_t* strides) {
    operands[which].data = kData;
    operands[which].dtype = dtype;
    std::copy(strides, strides + space.ndim, operands[which].strides);
  }
};

// Strides of dimensions in a random order, some padded, some broadcast.
void draw_strides(const IterationSpace& space, bool is_plain, int64_t* strides) {
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

Problem draw_problem() {
  Problem problem;
  IterationSpace& space = problem.space;
  space.ndim = static_cast<int>(draw(1, 3));
  space.numel = 1;
  const int long_dim = static_cast<int>(draw(0, space.ndim));  // space.ndim: there is none
  for (int dim = 0; dim < space.ndim; ++dim) {
    space.sizes[dim] = dim == long_dim   ? draw(20, 140)
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
  return problem;
}

// The distance of element i of the space from an operand's first, in bytes.
int64_t place(const Problem& problem, const Operand& operand, int64_t i) {
  int64_t offset = 0;
  for (int dim = 0; dim < problem.space.ndim; ++dim) {
    offset += i % problem.space.sizes[dim] * operand.strides[dim];
    i /= problem.space.sizes[dim];
  }
  return offset * element_size(operand.dtype);
}

// Takes the element that lies at offset(operand) in each operand. Finds its number from kOutput.
template <typename Offset>
void take(const Problem& problem, const ElementPlan& plan, std::vector<int>& taken,
          const Offset& offset) {
  const PlanOperand& dense = plan.operands[kOutput];
  const int64_t i = offset(dense) / dense.bytes;
  CHECK(0 <= i && i < problem.space.numel);
  if (i < 0 || i >= problem.space.numel) {
    return;
  }
  ++taken[i];
  for (const Which which : {kInput, kTarget}) {
    CHECK(offset(plan.operands[which]) == place(problem, problem.operands[which], i));
  }
}

// The distance of element n of a chunk from the chunk's first, in bytes.
int64_t place_in_chunk(const Extents& extents, const PlanOperand& operand, int64_t n) {
  const auto number = static_cast<uint32_t>(n);
  uint32_t rows[1] = {extents.divisors[0].quotient(number)};
  const int64_t simple = times(number, operand.gaps[0]) + times(rows[0], operand.gaps[1]);
  int64_t offsets[1] = {simple};
  add_further_gaps(extents, operand.gaps, rows, offsets);
  CHECK(!operand.is_simple || offsets[0] == simple);
  return offsets[0];
}

// What kernels take for granted of the whole quads of a chunk.
void check_quads(const ElementPlan& plan, int64_t chunk, int64_t elements) {
  const Extents& extents = plan.extents;
  const int64_t row = extents.sizes[0];
  for (const Which which : {kInput, kTarget, kOutput}) {
    const PlanOperand& operand = plan.operands[which];
    const int64_t first = extents.offset(operand.strides, chunk, extents.chunk_ndim, extents.ndim);
    for (int64_t n = 0; n + kQuad <= elements; n += kQuad) {
      const int64_t own = place_in_chunk(extents, operand, n);
      for (int i = 0; i < kQuad; ++i) {
        const int64_t distance = place_in_chunk(extents, operand, n + i) - own;
        switch (operand.quads) {
          case QuadKind::kVector:
            CHECK(distance == i * operand.bytes);
            CHECK((first + own) % (kQuad * operand.bytes) == 0);
            break;
          case QuadKind::kOne:
            CHECK(distance == 0);
            break;
          case QuadKind::kWords: {
            const int64_t left = (n / row + 1) * row - n;
            CHECK(operand.is_simple && operand.bytes == 2);
            CHECK(distance == i * operand.bytes + (i < left ? 0 : operand.gaps[1]));
            break;
          }
          case QuadKind::kNone:
            CHECK(false);
        }
      }
    }
  }
}

void check_rows(const Problem& problem, const ElementPlan& plan, std::vector<int>& taken) {
  const Extents& extents = plan.extents;
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const int64_t pieces = plan.last_elements != 0 ? extents.sizes[extents.chunk_ndim] : 1;
    const bool is_last = plan.last_elements != 0 && chunk % pieces == pieces - 1;
    const int64_t elements = is_last ? plan.last_elements : plan.chunk_elements;
    for (int64_t n = 0; n < elements; ++n) {
      take(problem, plan, taken, [&](const PlanOperand& operand) {
        return extents.offset(operand.strides, chunk, extents.chunk_ndim, extents.ndim) +
               place_in_chunk(extents, operand, n);
      });
    }
    if (plan.has_quads) {
      check_quads(plan, chunk, elements);
    }
  }
}

void check_boxes(const Problem& problem, const ElementPlan& plan, std::vector<int>& taken) {
  const Extents& extents = plan.extents;
  for (int64_t box = 0; box < plan.chunks; ++box) {
    const int64_t first[2] = {box % extents.sizes[2] * extents.sizes[0],
                              box / extents.sizes[2] % extents.sizes[3] * extents.sizes[1]};
    for (int64_t n = 0; n < extents.sizes[0] * extents.sizes[1]; ++n) {
      const int64_t own[2] = {n % extents.sizes[0], n / extents.sizes[0]};
      if (first[0] + own[0] < plan.box_extents[0] && first[1] + own[1] < plan.box_extents[1]) {
        take(problem, plan, taken, [&](const PlanOperand& operand) {
          return extents.offset(operand.strides, box, 2, extents.ndim) +
                 own[0] * operand.strides[0] + own[1] * operand.strides[1];
        });
      }
    }
  }
}

struct Seen {
  int boxes = 0;
  int kinds[4] = {};  // by QuadKind
};

void check(const Problem& problem, int64_t chunk_elements, Seen& seen) {
  const ElementPlan plan =
      ElementPlanner(problem.space, problem.operands, true, chunk_elements).plan();
  seen.boxes += plan.has_boxes ? 1 : 0;
  if (plan.has_quads) {
    for (const Which which : {kInput, kTarget}) {
      ++seen.kinds[static_cast<int>(plan.operands[which].quads)];
    }
  }
  // Sums must not depend on whether a gradient is wanted: elements are numbered alike.
  Problem with_gradient = problem;
  with_gradient.operands[kGradInput] = problem.operands[kInput];
  const ElementPlan other =
      ElementPlanner(problem.space, with_gradient.operands, true, chunk_elements).plan();
  CHECK(other.has_boxes == plan.has_boxes);
  CHECK(std::equal(plan.operands[kInput].strides, plan.operands[kInput].strides + kPlanDims,
                   other.operands[kInput].strides));

  std::vector<int> taken(problem.space.numel);
  plan.has_boxes ? check_boxes(problem, plan, taken) : check_rows(problem, plan, taken);
  CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  cuda::Seen seen;
  for (int n = 0; n < 500; ++n) {
    const cuda::Problem problem = cuda::draw_problem();
    for (const int64_t chunk_elements : {int64_t{1} << 30, cuda::draw(1, 100), int64_t{1}}) {
      test::subject() =
          "problem " + std::to_string(n) + ", chunks of " + std::to_string(chunk_elements);
      cuda::check(problem, chunk_elements, seen);
    }
  }
  test::subject() = "all problems";
  CHECK(seen.boxes > 10);
  CHECK(seen.kinds[static_cast<int>(cuda::QuadKind::kVector)] > 10);
  CHECK(seen.kinds[static_cast<int>(cuda::QuadKind::kOne)] > 10);
  CHECK(seen.kinds[static_cast<int>(cuda::QuadKind::kWords)] > 10);
  return test::exit_status();
}
