// How elements of transposed operands are dealt out in boxes (kernels/elements/box_plan.h), on the
// host: every element counts once, and whatever a thread has lies at its place in each operand.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/elements/tiles.h"
#include "tests/check.h"
#include "tests/element_problems.h"

namespace lossops::cuda {
namespace {

struct Seen {
  int boxes = 0;
  int narrow_boxes = 0;
  int walks[4] = {};  // plans of boxes by the dimension both orders walk along; 3: two
};

// Target is transposed.
Problem draw_transposed() {
  Problem problem;
  IterationSpace& space = problem.space;
  space.ndim = 3;
  const int short_dim = static_cast<int>(draw(0, 2));  // 2: there is none
  for (int dim = 0; dim < 2; ++dim) {
    space.sizes[dim] = dim == short_dim ? draw(4, 12) : draw(20, 520);
  }
  space.sizes[2] = draw(1, 2);
  space.numel = space.sizes[0] * space.sizes[1] * space.sizes[2];
  int64_t strides[kMaxDims];
  draw_strides(space, true, strides);
  problem.add(kOutput, DType::kFloat32, strides);
  problem.add(kInput, DType::kFloat32, strides);
  strides[0] = space.sizes[1] + draw(0, 1);
  strides[1] = 1;
  strides[2] = strides[0] * space.sizes[0];
  problem.add(kTarget, DType::kBFloat16, strides);
  return problem;
}

// In both orders, threads and steps have each element of a box, and count each once that the box
// does not repeat. Elements are where a thread's steps go, and have cells of their own.
void check_order(const BoxPlan& plan, const Box& box, int near) {
  const BoxOrder& order = plan.orders[near];
  CHECK(order.threads <= kTileThreads);
  std::vector<int> taken(int64_t{plan.sizes[0]} * plan.sizes[1] * plan.sizes[2]);
  std::vector<int> counted(taken.size());
  std::vector<int64_t> cells(kBoxCells, -1);
  for (int thread = 0; thread < kTileThreads; ++thread) {
    const BoxPlace place(plan, near, thread);
    const unsigned counts = place.counted() & place.unrepeated(box.repeated);
    CHECK(counts >> kBoxSteps == 0);
    for (int step = 0; step < kBoxSteps; ++step) {
      const int cell = place.cell(plan) + step * order.step_cells;
      CHECK(0 <= cell && cell < kBoxCells);
      // From the cell, as its number is made of those of the place.
      int rest = cell;
      int at[kBoxDims];
      for (const int dim : {2, plan.cells[0] == 1 ? 1 : 0, plan.cells[0] == 1 ? 0 : 1}) {
        at[dim] = rest / plan.cells[dim];
        rest -= at[dim] * plan.cells[dim];
        CHECK(at[dim] < plan.sizes[dim]);
      }
      const int64_t n = (int64_t{at[2]} * plan.sizes[1] + at[1]) * plan.sizes[0] + at[0];
      CHECK(cells[cell] == -1 || cells[cell] == n);
      cells[cell] = n;
      ++taken[n];
      counted[n] += static_cast<int>(counts >> step & 1);
      const bool repeats =
          at[0] < box.repeated[0] || at[1] < box.repeated[1] || at[2] < box.repeated[2];
      CHECK(!repeats || (counts >> step & 1) == 0);
      for (const Which which : {kInput, kTarget, kOutput}) {
        const BoxOperand& operand = plan.operands[which];
        CHECK(operand.is_transposed != (near == 1) ||
              place.offset(operand) + step * operand.step_stride == at[0] * operand.strides[0] +
                                                                        at[1] * operand.strides[1] +
                                                                        at[2] * operand.strides[2]);
      }
    }
  }
  for (int64_t n = 0; n < static_cast<int64_t>(taken.size()); ++n) {
    const int64_t column = n % plan.sizes[0];
    const int64_t row = n / plan.sizes[0] % plan.sizes[1];
    const int64_t matrix = n / plan.sizes[0] / plan.sizes[1];
    const bool repeats =
        column < box.repeated[0] || row < box.repeated[1] || matrix < box.repeated[2];
    CHECK(taken[n] > 0);
    CHECK(counted[n] == (repeats ? 0 : 1));
  }
}

void check_boxes(const Problem& problem, const BoxPlan& plan, std::vector<int>& taken) {
  CHECK(plan.tiles == ceil_div(plan.boxes, kBoxesOfTile));
  for (int64_t number = 0; number < plan.boxes; ++number) {
    const Box box = Box::of(plan, number);
    for (int matrix = box.repeated[2]; matrix < plan.sizes[2]; ++matrix) {
      for (int row = box.repeated[1]; row < plan.sizes[1]; ++row) {
        for (int column = box.repeated[0]; column < plan.sizes[0]; ++column) {
          take(problem, plan, true, taken, [&](const BoxOperand& operand) {
            return box.offset(plan, operand) + column * operand.strides[0] +
                   row * operand.strides[1] + matrix * operand.strides[2];
          });
        }
      }
    }
    for (const int near : {0, 1}) {
      check_order(plan, box, near);
    }
  }
}

void check_boxes(const Problem& problem, Seen& seen) {
  Problem reduced = problem;  // without losses
  reduced.operands[kOutput] = Operand();
  for (const Problem& own : {problem, reduced}) {
    const Layout layout(own.space, own.operands);
    BoxPlanner planner(layout, own.operands);
    const Problem other = with_gradients(own);
    BoxPlanner other_planner(layout, other.operands);
    CHECK(other_planner.has_boxes() == planner.has_boxes());
    if (planner.has_boxes()) {
      const BoxPlan& plan = planner.plan();
      const BoxPlan& other_plan = other_planner.plan();
      CHECK(std::equal(plan.sizes, plan.sizes + kBoxDims, other_plan.sizes));
      CHECK(plan.orders[0].walked == other_plan.orders[0].walked);
    }
  }
  const Layout layout(problem.space, problem.operands);
  BoxPlanner planner(layout, problem.operands);
  if (!planner.has_boxes()) {
    return;
  }
  ++seen.boxes;
  const BoxPlan& plan = planner.plan();
  seen.narrow_boxes += std::min(plan.sizes[0], plan.sizes[1]) < kBoxSteps ? 1 : 0;
  ++seen.walks[plan.orders[0].walked == plan.orders[1].walked ? plan.orders[0].walked : 3];
  std::vector<int> taken(problem.space.numel);
  check_boxes(problem, plan, taken);
  CHECK(are_taken(taken));
}

// Calls body with the plan of boxes for an input of rows, its losses, and a transposed target.
template <typename Body>
void with_boxes(Problem problem, DType dtype, int64_t row_stride, const Body& body) {
  const int64_t columns = problem.space.sizes[0];
  const int64_t rows = problem.space.sizes[1];
  const int64_t straight[] = {1, row_stride, rows * row_stride};
  const int64_t transposed[] = {rows, 1, columns * rows};
  problem.add(kInput, dtype, straight);
  problem.add(kTarget, dtype, transposed);
  problem.add(kOutput, dtype, straight);
  const Layout layout(problem.space, problem.operands);
  BoxPlanner planner(layout, problem.operands);
  CHECK(planner.has_boxes());
  if (planner.has_boxes()) {
    body(planner.plan());
  }
}

// Boxes have most of the elements that their threads' steps could have.
void check_filled(int64_t columns, int64_t rows, int64_t matrices = 1) {
  with_boxes(Problem{columns, rows, matrices}, DType::kFloat16, columns, [](const BoxPlan& plan) {
    CHECK(std::max(plan.cells[0], plan.cells[1]) % 2 == 1);
    const int64_t elements = int64_t{plan.sizes[0]} * plan.sizes[1] * plan.sizes[2];
    CHECK(10 * elements >= 7 * kBoxElements);
  });
}

// Sides, and distances, of nearly 2^31 elements and more: steps stay within 31 bits, and the last
// box ends where the operands do.
void check_far_boxes(int64_t columns, int64_t rows, int64_t row_stride) {
  with_boxes(Problem{columns, rows}, DType::kFloat32, row_stride, [](const BoxPlan& plan) {
    for (const Which which : {kInput, kTarget}) {
      const BoxOperand& operand = plan.operands[which];
      CHECK(operand.step_stride == static_cast<int32_t>(operand.step_stride));
      const Box box = Box::of(plan, plan.boxes - 1);
      int64_t offset = 0;
      for (int dim = 0; dim < kBoxDims; ++dim) {
        CHECK(box.begin[dim] + plan.sizes[dim] == plan.space_sizes[dim]);
        offset += (plan.space_sizes[dim] - plan.sizes[dim]) * operand.strides[dim];
      }
      CHECK(box.offset(plan, operand) == offset);
    }
  });
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  cuda::Seen seen;
  cuda::for_each_problem([&](const cuda::Problem& problem) { cuda::check_boxes(problem, seen); });
  for (int n = 0; n < 100; ++n) {
    test::subject() = "transposed " + std::to_string(n);
    cuda::check_boxes(cuda::draw_transposed(), seen);
  }
  test::subject() = "far boxes";
  cuda::check_far_boxes(2147483647, 2, 2147483647);
  cuda::check_far_boxes(300, 2147483647, 300);
  cuda::check_far_boxes(300, 40, int64_t{1} << 29);
  test::subject() = "filled boxes";
  cuda::check_filled(1542, 87855);
  cuda::check_filled(99, 445566);
  cuda::check_filled(4096, 4096);
  cuda::check_filled(370, 9, 24108);
  cuda::check_filled(10, 46946498);
  cuda::check_filled(20, 25, 535488);
  cuda::check_filled(36, 2074, 4920);
  cuda::check_filled(3, 2, 100000);
  test::subject() = "all problems";
  CHECK(seen.boxes > 50);
  CHECK(seen.narrow_boxes > 5);
  for (const int walks : seen.walks) {
    CHECK(walks > 5);
  }
  return test::exit_status();
}
