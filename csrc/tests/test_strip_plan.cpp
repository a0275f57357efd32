// How elements of strided operands are dealt out in strips (kernels/elements/strip_plan.h), on the
// host: every element counts once, and whatever a thread has lies at its place in each operand.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "kernels/elements/tiles.h"
#include "tests/check.h"
#include "tests/element_problems.h"
#include "tests/element_strips.h"

namespace lossops::cuda {
namespace {

struct Seen {
  int column_walks = 0;
  int summed = 0;         // plans whose tiles may have parts of a gradient's sums
  int sides = 0;          // plans with rows side by side along two dimensions
  int kinds[4] = {};      // by UnitKind
  int parts = 0;          // units of vectors that are not aligned
  int joined_rows = 0;    // units beside the first of the next row
  int shared_shares = 0;  // units with columns that another unit has, too
};

// What kernels take for granted of an operand's unit that begins at `address`. is_aligned: it is
// not the last of a row that is not whole units.
void check_traits(const StripPlan& plan, Which which, bool is_aligned, int64_t address,
                  Seen& seen) {
  const StripOperand& operand = plan.operands[which];
  const int64_t stride = operand.strides[0];
  const UnitTraits& traits = is_aligned ? plan.traits : plan.part_traits;
  CHECK(traits.is_half(which) == is_half_type(operand.dtype));
  CHECK(traits.moves(which) == (operand.walk_stride != 0));
  CHECK(plan.width == 1 || operand.column_stride == stride);
  if (spreads_units(plan.width)) {
    return;  // there are no others
  }
  const bool is_part = operand.kind == UnitKind::kVector && !is_aligned;
  CHECK(traits.kind(which) == (is_part ? UnitKind::kStrided : operand.kind));
  seen.parts += is_part ? 1 : 0;
  // Words are stored by all lanes of a warp together.
  CHECK((traits.kind(which) == UnitKind::kWords) == (operand.kind == UnitKind::kWords));
  switch (operand.kind) {
    case UnitKind::kVector:
      CHECK(stride == operand.bytes);
      CHECK(is_part || address % (plan.width * stride) == 0);
      break;
    case UnitKind::kOne:
      CHECK(stride == 0);
      break;
    case UnitKind::kWords:
      CHECK(stride == operand.bytes && stride <= 4);
      break;
    case UnitKind::kStrided:
      break;
  }
}

// at_once: steps that a thread takes together, also where some are behind its last one.
template <int kWidth>
void check_strips(const Problem& problem, const StripPlan& plan, int at_once,
                  std::vector<int>& taken, Seen& seen) {
  CHECK(plan.used_threads() <= plan.block_threads() && plan.block_threads() <= kTileThreads);
  CHECK(plan.block_threads() % kWarpSize == 0);
  CHECK(plan.block_threads() - plan.used_threads() < kWarpSize);
  for_each_strip(plan, [&](const Strip& strip, int64_t /*tile*/) {
    const int end = Walk<kWidth>::end(plan, strip);
    CHECK(end > 0);
    for (int thread = 0; thread < plan.block_threads(); ++thread) {
      const Walk<kWidth> walk(plan, strip, thread);
      for (int n = 0; n < plan.tile_turns * at_once; ++n) {
        const int turn = n / at_once * plan.walk_turn;
        const int step = n % at_once;
        const bool goes_on = turn < end;
        const auto has = [&](int i) { return (walk.counted(plan, turn, step) >> i & 1) != 0; };
        int counted = 0;
        for (int i = 0; i < kWidth; ++i) {
          counted += has(i) ? 1 : 0;
        }
        CHECK(goes_on || counted == 0);
        // A walk along columns may end with units that are whole, but taken to be shared.
        const bool is_sure = !Walk<kWidth>::kSpreads || !plan.walks_columns;
        CHECK(!walk.has_all(plan, turn, step) || counted == kWidth);
        CHECK(!is_sure || walk.has_all(plan, turn, step) == (counted == kWidth));
        CHECK(counted == 0 || walk.has_any(plan));
        if (!goes_on) {
          continue;
        }
        seen.shared_shares += kWidth > 1 && Walk<kWidth>::kSpreads && counted % kWidth != 0 ? 1 : 0;
        const auto offset = [&](const StripOperand& operand) {
          return begin_of(plan, walk, strip, operand) +
                 int64_t{walk.index(plan, turn, step)} * operand.walk_stride;
        };
        for (const Which which : {kInput, kTarget, kOutput}) {
          check_traits(
              plan, which, walk.is_aligned(plan, turn, at_once - 1),
              reinterpret_cast<int64_t>(plan.operands[which].data) + offset(plan.operands[which]),
              seen);
        }
        for (int i = 0; i < kWidth; ++i) {
          take(problem, plan, has(i), taken, [&](const StripOperand& operand) {
            return offset(operand) + walk.offset(i) * operand.strides[0];
          });
        }
        if (Walk<kWidth>::kSpreads) {
          continue;
        }
        // Lanes that exchange words have neighbours in their warp, and these know it.
        if (walk.joins_previous(plan, turn, step)) {
          CHECK(thread % kWarpSize != 0);
          CHECK(Walk<kWidth>(plan, strip, thread - 1).joins_next(plan, turn, step));
        }
        if (walk.joins_next(plan, turn, step)) {
          CHECK((thread + 1) % kWarpSize != 0);
          const Walk<kWidth> next(plan, strip, thread + 1);
          CHECK(next.joins_previous(plan, turn, step));
          seen.joined_rows += next.walked(strip) != walk.walked(strip) ? 1 : 0;
          const StripOperand& output = plan.operands[kOutput];
          CHECK(begin_of(plan, next, strip, output) +
                    int64_t{next.index(plan, turn, step)} * output.walk_stride ==
                offset(output) + kWidth * output.strides[0]);
        }
      }
    }
  });
}

template <int kWidth>
void check_strips(const Problem& problem, int at_once, Seen& seen) {
  const Layout layout(problem.space, problem.operands);
  StripPlanner planner(layout, problem.operands);
  if (!has_plan<kWidth>(planner)) {
    return;
  }
  const StripPlan& plan = planner.plan(kWidth, at_once, kResident);
  seen.column_walks += plan.walks_columns ? 1 : 0;
  seen.sides += plan.side_walked.value > 1 && plan.side_kept > 1 ? 1 : 0;
  for (const Which which : {kInput, kTarget}) {
    ++seen.kinds[static_cast<int>(plan.operands[which].kind)];
  }
  const Problem other = with_gradients(problem);
  StripPlanner other_planner(layout, other.operands);
  const StripPlan& other_plan = other_planner.plan(kWidth, at_once, kResident);
  CHECK(other_planner.unit_type() == planner.unit_type());
  CHECK(other_plan.tiles == plan.tiles && other_plan.walk_turn == plan.walk_turn &&
        other_plan.used_threads() == plan.used_threads() &&
        other_plan.walks_columns == plan.walks_columns);
  CHECK(std::equal(plan.operands[kInput].strides, plan.operands[kInput].strides + kPlanDims,
                   other_plan.operands[kInput].strides));
  check_plain_strips(plan);
  seen.summed += plan.summed > 1 ? 1 : 0;
  std::vector<int> taken(problem.space.numel);
  check_strips<kWidth>(problem, plan, at_once, taken, seen);
  CHECK(are_taken(taken));
}

// Rows, and distances, of more than 2^31 elements.
void check_long(int64_t columns, int64_t rows, int64_t row_stride, int64_t column_stride = 1) {
  Problem problem{columns, rows};
  const int64_t strides[] = {column_stride, row_stride};
  for (const Which which : {kInput, kTarget, kOutput}) {
    problem.add(which, DType::kFloat32, strides);
  }
  const Layout layout(problem.space, problem.operands);
  StripPlanner planner(layout, problem.operands);
  constexpr int kAtOnce = 8;
  const StripPlan& plan = planner.plan(1, kAtOnce, kResident);
  const StripOperand& output = plan.operands[kOutput];
  int64_t last = 0;
  for (const int64_t tile : {int64_t{0}, plan.tiles / 2, plan.tiles - 1}) {
    const Strip strip = Strip::of(plan, tile);
    for (int thread = 0; thread < kTileThreads; ++thread) {
      const Walk<1> walk(plan, strip, thread);
      for (int n = 0; n < plan.tile_turns * kAtOnce; ++n) {
        const int index = walk.index(plan, n / kAtOnce * plan.walk_turn, n % kAtOnce);
        const int64_t element =
            (begin_of(plan, walk, strip, output) + int64_t{index} * output.walk_stride) /
            output.bytes;
        CHECK(0 <= element && element / row_stride < rows);
        CHECK(element % row_stride / column_stride < columns);
        CHECK(element % row_stride % column_stride == 0);
        last = std::max(last, element);
      }
    }
  }
  CHECK(last == (rows - 1) * row_stride + (columns - 1) * column_stride);
}

// Rows that are padded along each dimension: those side by side in a block are neighbours, and
// threads have work most of the time.
void check_sides(std::initializer_list<int64_t> sizes) {
  Problem problem(sizes);
  const IterationSpace& space = problem.space;
  int64_t strides[kMaxDims] = {1};
  for (int dim = 1; dim < space.ndim; ++dim) {
    strides[dim] = strides[dim - 1] * (space.sizes[dim - 1] + 1);
  }
  for (const Which which : {kInput, kTarget}) {
    problem.add(which, DType::kFloat16, strides);
  }
  const Layout layout(space, problem.operands);
  constexpr int kWidth = kVectorSize<half_t>;
  constexpr int kAtOnce = 2;
  StripPlanner planner(layout, problem.operands);
  const StripPlan& plan = planner.plan(kWidth, kAtOnce, kResident);
  const Strip strip = Strip::of(plan, 0);
  const int64_t units = space.numel / plan.columns * ceil_div(plan.columns, int64_t{kWidth});
  const int64_t taken = plan.tiles * plan.block_threads() * plan.tile_turns * kAtOnce;
  CHECK(10 * units >= 7 * taken);
  const auto row = [&](int side) {
    const Walk<kWidth> walk(plan, strip, side * static_cast<int>(plan.strip_units.value));
    return begin_of(plan, walk, strip, plan.operands[kInput]);
  };
  CHECK(plan.used_threads() >= 2 * static_cast<int>(plan.strip_units.value));
  CHECK(row(1) - row(0) == strides[1] * element_size(DType::kFloat16));
}

// Rows side by side of which fewer are near than there is room for.
void check_far_sides() {
  Problem problem{8, 200, 2};
  const int64_t strides[] = {1, 6000000, 1300000000};
  for (const Which which : {kInput, kTarget}) {
    problem.add(which, DType::kFloat32, strides);
  }
  const Layout layout(problem.space, problem.operands);
  StripPlanner planner(layout, problem.operands);
  const StripPlan& plan = planner.plan(kVectorSize<float>, 2, kResident);
  CHECK(!plan.walks_columns && plan.used_threads() > 2 * kWarpSize);
  CHECK(plan.operands[kInput].walk_stride == plan.side_walked.value * strides[1] * 4);
}

// Target is broadcast along the second dimension and along the fourth: more than a tile has of what
// is kept between them.
void check_parts(std::initializer_list<int64_t> sizes, DType dtype, int width) {
  Problem problem(sizes);
  const IterationSpace& space = problem.space;
  int64_t strides[kMaxDims] = {1};
  for (int dim = 1; dim < space.ndim; ++dim) {
    strides[dim] = strides[dim - 1] * space.sizes[dim - 1];
  }
  problem.add(kInput, dtype, strides);
  problem.add(kOutput, dtype, strides);
  strides[1] = strides[3] = 0;
  problem.add(kTarget, dtype, strides);
  const Layout layout(space, problem.operands);
  constexpr int64_t kBlocks = 528;
  StripPlanner planner(layout, problem.operands);
  const StripPlan& plan = planner.plan(width, 2, kBlocks);
  CHECK(plan.summed > 1);
  check_plain_strips(plan);
}

// Units of bfloat16, of rows in a stride of elements: whether they are neighbours.
void check_type(int64_t columns, int64_t stride, bool joins) {
  Problem problem{columns, 1000};
  const int64_t strides[] = {1, stride};
  for (const Which which : {kInput, kTarget, kGradOutput, kGradInput}) {
    problem.add(which, DType::kBFloat16, strides);
  }
  const Layout layout(problem.space, problem.operands);
  const StripPlanner planner(layout, problem.operands);
  CHECK(planner.unit_type() == (joins ? DType::kBFloat16 : DType::kFloat32));
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  cuda::Seen seen;
  cuda::for_each_problem_in_steps([&](const cuda::Problem& problem, int at_once) {
    cuda::check_strips<1>(problem, at_once, seen);
    cuda::check_strips<cuda::kVectorSize<float>>(problem, at_once, seen);
    cuda::check_strips<cuda::kVectorSize<half_t>>(problem, at_once, seen);
  });
  test::subject() = "long rows";
  cuda::check_long((int64_t{1} << 31) + 1, 3, (int64_t{1} << 31) + 8);
  test::subject() = "rows far apart";
  cuda::check_long(100, 3, int64_t{1} << 31);
  test::subject() = "columns far apart";
  cuda::check_long(3, 1, int64_t{1} << 32, int64_t{1} << 30);
  cuda::check_long(300, 2, int64_t{1} << 39, int64_t{1} << 30);
  test::subject() = "many rows";
  cuda::check_long(2, (int64_t{1} << 31) + 1, 3);
  test::subject() = "rows side by side";
  cuda::check_sides({29, 528, 49, 161});
  cuda::check_sides({29, 34, 32, 33});
  cuda::check_sides({29, 5000});
  cuda::check_sides({37, 52, 710});
  cuda::check_sides({43, 44, 629});
  cuda::check_far_sides();
  test::subject() = "parts of sums";
  for (const int64_t kept : {1000, 600, 997}) {
    for (const int64_t columns : {9, 16, 36, 300}) {
      cuda::check_parts({columns, 40, kept, 37}, DType::kFloat32, cuda::kVectorSize<float>);
      cuda::check_parts({columns, 100, kept, 9}, DType::kBFloat16, cuda::kVectorSize<half_t>);
    }
  }
  test::subject() = "types of units";
  cuda::check_type(96, 96, true);
  cuda::check_type(93, 97, true);
  cuda::check_type(9, 16, true);
  cuda::check_type(7, 8, false);
  test::subject() = "all problems";
  CHECK(seen.column_walks > 5);
  CHECK(seen.summed > 5);
  CHECK(seen.sides > 5);
  CHECK(seen.joined_rows > 100);
  CHECK(seen.parts > 100);
  CHECK(seen.shared_shares > 100);
  for (const int kind : seen.kinds) {
    CHECK(kind > 10);
  }
  return test::exit_status();
}
