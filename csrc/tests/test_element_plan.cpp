// How elements of strided operands are dealt out (kernels/elements/), on the host: every element
// counts once, and whatever a thread has lies at its place in each operand, however rows are cut
// into chunks, units, tiles and boxes.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/elements/tiles.h"
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

Problem draw_problem(int most_dims) {
  Problem problem;
  IterationSpace& space = problem.space;
  space.ndim = static_cast<int>(draw(1, most_dims));
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
template <typename Plan, typename Offset>
void take(const Problem& problem, const Plan& plan, bool counts, std::vector<int>& taken,
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

// What kernels take for granted of a unit that begins at `address`. counts: all of it counts.
void check_kind(const ElementPlan& plan, const PlanOperand& operand, int side, int64_t address,
                bool counts) {
  const int64_t stride = operand.strides[side];
  if (operand.kind == UnitKind::kVector) {
    CHECK(stride == operand.bytes && plan.spread == 1);
    CHECK(!counts || (reinterpret_cast<int64_t>(kData) + address) % (plan.width * stride) == 0);
  }
  CHECK(operand.kind != UnitKind::kOne || stride == 0);
}

void check_units(const Problem& problem, const ElementPlan& plan, int at_once,
                 std::vector<int>& taken) {
  const Extents& extents = plan.extents;
  for (int64_t number = 0; number < plan.tiles; ++number) {
    TileRows rows;
    const UnitsTile tile = UnitsTile::of(plan, number, rows);
    CHECK(0 < tile.units && tile.units <= plan.tile_units && rows.rows <= plan.tile_rows);
    // Threads have units at once, also where some are behind the last one.
    for (int n = 0; n < ceil_div(tile.units, at_once) * at_once; ++n) {
      const Unit unit = Unit::of(plan, tile, n, plan.width);
      CHECK(0 <= unit.row && unit.row < rows.rows);
      CHECK(n < tile.units || !unit.has(plan, plan.width - 1));
      const auto offset = [&](const PlanOperand& operand) {
        return (rows.skipped + unit.column) * operand.strides[0] +
               extents.offset(operand.strides, rows.first_row + unit.row, rows.first_dim,
                              extents.ndim);
      };
      for (const Which which : {kInput, kTarget, kOutput}) {
        const PlanOperand& operand = plan.operands[which];
        check_kind(plan, operand, 0, offset(operand), unit.lacking <= 0);
      }
      for (int i = 0; i < plan.width; ++i) {
        take(problem, plan, unit.has(plan, i), taken, [&](const PlanOperand& operand) {
          return offset(operand) + i * plan.spread * operand.strides[0];
        });
      }
    }
  }
}

void check_boxes(const Problem& problem, const ElementPlan& plan, std::vector<int>& taken) {
  const Extents& extents = plan.extents;
  const int sides[2] = {kQuad << plan.box_shifts[0], kQuad << plan.box_shifts[1]};
  CHECK(sides[0] * sides[1] == kBoxElements);
  for (int64_t number = 0; number < plan.tiles; ++number) {
    TileRows rows;
    const BoxesTile tile = BoxesTile::of(plan, number, rows);
    CHECK(rows.rows == 1 && 0 < tile.boxes && tile.boxes <= kBoxesOfTile);
    for (int n = 0; n < tile.boxes * kBoxElements; ++n) {
      const int own[2] = {
          tile.first[0] * kQuad + n % sides[0],
          tile.first_row(plan, n / kBoxElements) * kQuad + n % kBoxElements / sides[0]};
      int placed[2];
      bool counts = true;
      for (int side = 0; side < 2; ++side) {
        placed[side] = place_in_matrix(plan, side, own[side]);
        counts = counts && placed[side] >= own[side] / kQuad * kQuad;
      }
      const auto offset = [&](const PlanOperand& operand) {
        return placed[0] * operand.strides[0] + placed[1] * operand.strides[1] +
               extents.offset(operand.strides, rows.first_row, rows.first_dim, extents.ndim);
      };
      take(problem, plan, counts, taken, offset);
      for (const Which which : {kInput, kTarget, kOutput}) {
        const PlanOperand& operand = plan.operands[which];
        const int side = operand.is_turned ? 1 : 0;
        if (own[side] % kQuad == 0) {
          check_kind(plan, operand, side, offset(operand), placed[side] == own[side]);
        }
      }
    }
  }
}

int64_t place_in_chunk(const MatrixPlan& plan, const MatrixOperand& operand, int64_t n) {
  const auto number = static_cast<uint32_t>(n);
  return times(number, operand.stride) + times(plan.columns.quotient(number), operand.gap);
}

// What kernels take for granted of the whole quads of a chunk.
void check_quads(const MatrixPlan& plan, const MatrixOperand& operand, int64_t first,
                 int64_t elements) {
  const auto row = static_cast<int64_t>(plan.columns.value);
  const int64_t bytes = element_size(operand.dtype);
  for (int64_t n = 0; n + kQuad <= elements; n += kQuad) {
    const int64_t own = place_in_chunk(plan, operand, n);
    const int64_t left = (n / row + 1) * row - n;
    for (int i = 0; i < kQuad; ++i) {
      const int64_t distance = place_in_chunk(plan, operand, n + i) - own;
      switch (operand.quads) {
        case QuadKind::kVector:
          CHECK(distance == i * bytes);
          CHECK((first + own) % (kQuad * bytes) == 0);
          break;
        case QuadKind::kOne:
          CHECK(distance == 0);
          break;
        case QuadKind::kWords:
          CHECK(bytes == 2);
          CHECK(distance == i * bytes + (i < left ? 0 : operand.gap));
          break;
        case QuadKind::kNone:
          CHECK(false);
      }
    }
  }
}

void check_matrix(const Problem& problem, int lead, int64_t most_elements, int (&kinds)[4]) {
  const MatrixPlan plan =
      MatrixPlanner(problem.space, problem.operands, lead, most_elements).plan();
  const Extents& extents = plan.chunk_extents;
  std::vector<int> taken(problem.space.numel);
  for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
    const bool is_last = chunk % extents.sizes[0] == extents.sizes[0] - 1;
    const int64_t elements = is_last ? plan.last_elements : plan.chunk_elements;
    const auto first = [&](const MatrixOperand& operand) {
      return extents.offset(operand.chunk_strides, chunk, 0, extents.ndim);
    };
    for (int64_t n = 0; n < elements; ++n) {
      take(problem, plan, true, taken, [&](const MatrixOperand& operand) {
        return first(operand) + place_in_chunk(plan, operand, n);
      });
    }
    for (const Which which : {kInput, kTarget, kOutput}) {
      const MatrixOperand& operand = plan.operands[which];
      if (plan.has_quads) {
        check_quads(plan, operand, first(operand), elements);
      }
    }
  }
  for (const Which which : {kInput, kTarget}) {
    ++kinds[static_cast<int>(plan.operands[which].quads)];
  }
  CHECK(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }));
}

struct Seen {
  int boxes = 0;
  int kinds[3] = {};  // by UnitKind
  int quads[4] = {};  // by QuadKind
  int spreads = 0;    // plans whose units have columns apart
};

void check(const Problem& problem, int width, int at_once, Seen& seen) {
  const bool may_pack = width > 1;
  ElementPlanner planner(problem.space, problem.operands, may_pack);
  const bool has_boxes = planner.has_boxes();
  if (has_boxes ? width != kQuad : width > 1 && !planner.has_quads()) {
    return;
  }
  const ElementPlan plan = planner.plan(width, at_once);
  CHECK(may_pack || !has_boxes);
  seen.boxes += has_boxes ? 1 : 0;
  seen.spreads += plan.spread > 1 ? 1 : 0;
  for (const Which which : {kInput, kTarget}) {
    ++seen.kinds[static_cast<int>(plan.operands[which].kind)];
  }
  // Sums must not depend on whether a gradient is wanted: elements are numbered alike.
  Problem with_gradient = problem;
  with_gradient.operands[kGradInput] = problem.operands[kInput];
  ElementPlanner other_planner(problem.space, with_gradient.operands, may_pack);
  const ElementPlan other = other_planner.plan(width, at_once);
  CHECK(other_planner.has_boxes() == has_boxes);
  CHECK(other.tile_units == plan.tile_units && other.tiles == plan.tiles &&
        other.spread == plan.spread);
  CHECK(std::equal(plan.operands[kInput].strides, plan.operands[kInput].strides + kPlanDims,
                   other.operands[kInput].strides));

  std::vector<int> taken(problem.space.numel);
  has_boxes ? check_boxes(problem, plan, taken) : check_units(problem, plan, at_once, taken);
  CHECK(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }));
}

// No launch asks for more shared memory than kernels get unasked: 48 KB, of which some is static.
void check_tables() {
  constexpr int kMostOperands = 7;  // a backward pass with weights
  for (int64_t columns = 2; columns < 400; ++columns) {
    for (const int width : {1, kQuad}) {
      Problem problem;
      problem.space.ndim = 3;
      problem.space.sizes[0] = columns;
      problem.space.sizes[1] = 1 << 10;
      problem.space.sizes[2] = 1 << 10;
      problem.space.numel = columns << 20;
      const int64_t strides[] = {1, columns + 1, (columns + 2) << 10};
      for (int which = 0; which < kMostOperands; ++which) {
        problem.add(static_cast<Which>(which), DType::kFloat32, strides);
      }
      ElementPlanner planner(problem.space, problem.operands, width > 1);
      if (width == 1 || planner.has_quads()) {
        CHECK(planner.plan(width, 2 * kTileThreads).table_bytes() <= 46 << 10);
      }
    }
  }
}

// Rows whose tiles do not cross their ends: one element more than 2^31.
void check_long_rows() {
  Problem problem;
  problem.space.ndim = 2;
  problem.space.sizes[0] = (int64_t{1} << 31) + 1;
  problem.space.sizes[1] = 3;
  problem.space.numel = problem.space.sizes[0] * 3;
  const int64_t strides[] = {1, problem.space.sizes[0] + 7};
  for (const Which which : {kInput, kTarget, kOutput}) {
    problem.add(which, DType::kFloat32, strides);
  }
  ElementPlanner planner(problem.space, problem.operands, true);
  const ElementPlan plan = planner.plan(kQuad, 512);
  CHECK(plan.cuts_rows && plan.tiles % 3 == 0);
  int64_t counted = 0;
  for (int64_t number = 0; number < plan.tiles; number += number % 1000 == 0 ? 1 : 999) {
    TileRows rows;
    const UnitsTile tile = UnitsTile::of(plan, number, rows);
    CHECK(rows.rows == 1 && rows.first_row == number / (plan.tiles / 3));
    const Unit last = Unit::of(plan, tile, tile.units - 1, kQuad);
    CHECK(rows.skipped + last.column + (kQuad - 1) * plan.spread < problem.space.sizes[0]);
    ++counted;
  }
  CHECK(counted > 1000);
  // The last tile of a row ends with its last column.
  for (int64_t row = 1; row <= 3; ++row) {
    TileRows rows;
    const UnitsTile tile = UnitsTile::of(plan, plan.tiles / 3 * row - 1, rows);
    const Unit last = Unit::of(plan, tile, tile.units - 1, kQuad);
    CHECK(rows.skipped + last.column + (kQuad - 1) * plan.spread + 1 == problem.space.sizes[0]);
    CHECK(last.has(plan, kQuad - 1) && !last.has(plan, 0));
  }
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  cuda::Seen seen;
  for (int n = 0; n < 500; ++n) {
    const cuda::Problem problem = cuda::draw_problem(3);
    for (const int width : {1, cuda::kQuad}) {
      const int at_once = cuda::draw(0, 1) == 0 ? 256 : 32;
      test::subject() = "problem " + std::to_string(n) + ", units of " + std::to_string(width) +
                        ", " + std::to_string(at_once) + " at once";
      cuda::check(problem, width, at_once, seen);
    }
  }
  for (int n = 0; n < 500; ++n) {
    cuda::Problem problem = cuda::draw_problem(2);
    for (const int64_t most : {int64_t{1} << 30, cuda::draw(1, 100), int64_t{1}}) {
      test::subject() = "matrix " + std::to_string(n) + ", chunks of " + std::to_string(most);
      const auto lead = static_cast<int>(cuda::draw(0, problem.space.ndim - 1));
      cuda::check_matrix(problem, lead, most, seen.quads);
    }
  }
  test::subject() = "tables";
  cuda::check_tables();
  test::subject() = "long rows";
  cuda::check_long_rows();
  test::subject() = "all problems";
  CHECK(seen.boxes > 5);
  CHECK(seen.spreads > 10);
  for (const int kind : seen.kinds) {
    CHECK(kind > 10);
  }
  for (const int kind : seen.quads) {
    CHECK(kind > 10);
  }
  return test::exit_status();
}
