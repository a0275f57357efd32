// How elements of strided operands are dealt out (kernels/elements/), on the host: every element
// counts once, whatever a thread has lies at its place in each operand, and every sum gets its
// elements, however rows are cut into units, strips, tiles and boxes.
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
namespace {

std::mt19937_64 generator(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

constexpr int64_t kResident = 2;

// An aligned address for operands that nobody reads.
char* const kData = reinterpret_cast<char*>(uintptr_t{1} << 40);

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

// Target is broadcast along two short dimensions that do not merge.
Problem draw_far_sums() {
  Problem problem;
  IterationSpace& space = problem.space;
  space.ndim = 4;
  space.numel = 1;
  const int first = static_cast<int>(draw(0, 1));
  for (int dim = 0; dim < space.ndim; ++dim) {
    space.sizes[dim] = dim % 2 == first ? draw(4, 7) : draw(24, 48);
    space.numel *= space.sizes[dim];
  }
  int64_t strides[kMaxDims];
  draw_strides(space, true, strides);
  problem.add(kOutput, DType::kFloat32, strides);
  problem.add(kInput, DType::kFloat32, strides);
  strides[first] = strides[first + 2] = 0;
  problem.add(kTarget, DType::kFloat32, strides);
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

template <typename Body>
void for_each_strip(const StripPlan& plan, const Body& body) {
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    bool is_last = false;
    for (int number = 0; !is_last; ++number) {
      const Strip strip = Strip::of_sums(plan, tile, number);
      body(strip, tile);
      is_last = strip.is_last;
      if (plan.summed == 1) {  // of all kernels that sum no gradient
        const Strip plain = Strip::of(plan, tile);
        CHECK(plain.column == strip.column && plain.walked == strip.walked);
        CHECK(plain.rest == strip.rest && plain.rest_left == strip.rest_left);
      }
    }
  }
}

// The bytes from an operand's first element to where a walk begins.
template <int kWidth>
int64_t begin_of(const StripPlan& plan, const Walk<kWidth>& walk, const Strip& strip,
                 const StripOperand& operand) {
  return walk.column(strip) * operand.strides[0] + walk.walked(strip) * operand.strides[1] +
         plan.extents.offset(operand.strides, walk.rest(strip), 2);
}

struct Seen {
  int boxes = 0;
  int narrow_boxes = 0;
  int walks[4] = {};  // plans of boxes by the dimension both orders walk along; 3: two
  int column_walks = 0;
  int sides = 0;           // plans with rows side by side along two dimensions
  int kinds[4] = {};       // by UnitKind, of strips
  int sums[4] = {};        // by SumOf
  int splits = 0;          // plans with sums in parts
  int parts = 0;           // units of vectors that are not aligned
  int joined_rows = 0;     // units beside the first of the next row
  int shared_shares = 0;   // units with columns that another unit has, too
  int summed_numbers = 0;  // plans whose tiles go through several indices of the summed rest
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

bool are_taken(const std::vector<int>& taken) {
  return std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; });
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

// Sums must not depend on whether a gradient is wanted: elements are numbered alike.
Problem with_gradients(const Problem& problem) {
  Problem other = problem;
  other.operands[kGradInput] = problem.operands[kInput];
  other.operands[kGradTarget] = problem.operands[kTarget];
  return other;
}

// Whether there are units of so many columns. Those that are spread take rows of any length.
template <int kWidth>
bool has_plan(const StripPlanner& planner) {
  return kWidth == 1 ||
         (spreads_units(kWidth) ? planner.has_near_columns() : planner.joins_columns());
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
  std::vector<int> taken(problem.space.numel);
  check_strips<kWidth>(problem, plan, at_once, taken, seen);
  CHECK(are_taken(taken));
}

// Elements belong to the same sum as others with the same place in the gradient, a tile has a part
// of its own of each sum, and no part is left out.
template <int kWidth>
void check_sums(const Problem& problem, int at_once, Seen& seen) {
  Problem with_sums = problem;
  const IterationSpace& space = problem.space;
  int64_t strides[kMaxDims];
  int64_t sums = 1;
  for (int dim = 0; dim < space.ndim; ++dim) {
    const bool is_kept = problem.operands[kTarget].strides[dim] != 0;
    strides[dim] = is_kept ? sums : 0;
    sums *= is_kept ? space.sizes[dim] : 1;
  }
  if (sums == space.numel) {
    return;
  }
  with_sums.add(kGradTarget, problem.operands[kTarget].dtype, strides);
  const Operand& gradient = with_sums.operands[kGradTarget];
  const Layout layout(space, with_sums.operands);
  StripPlanner planner(layout, with_sums.operands);
  if (draw(0, 1) == 0 || !planner.sums(gradient)) {
    planner = StripPlanner(layout, with_sums.operands, kGradTarget);
  }
  if (!has_plan<kWidth>(planner)) {
    return;
  }
  StripPlan& plan = planner.plan(kWidth, at_once, kResident, kGradTarget);
  CHECK(plan.sums == sums);
  plan.sum_into(kData, DType::kFloat32);
  ++seen.sums[static_cast<int>(plan.sum_of)];
  seen.splits += plan.splits > 1 ? 1 : 0;
  seen.summed_numbers += plan.tile_summed > 1 ? 1 : 0;
  std::vector<int64_t> sum_of_place(sums, -1);
  std::vector<int64_t> tile_of_part(plan.splits * sums, -1);
  for_each_strip(plan, [&](const Strip& strip, int64_t tile) {
    for (int thread = 0; thread < plan.block_threads(); ++thread) {
      const Walk<kWidth> walk(plan, strip, thread);
      for (int n = 0; n < plan.tile_turns * at_once; ++n) {
        const int turn = n / at_once * plan.walk_turn;
        const int step = n % at_once;
        for (int i = 0; i < kWidth; ++i) {
          if (turn >= Walk<kWidth>::end(plan, strip) ||
              (walk.counted(plan, turn, step) >> i & 1) == 0) {
            continue;
          }
          const auto offset = [&](const StripOperand& operand) {
            return begin_of(plan, walk, strip, operand) +
                   int64_t{walk.index(plan, turn, step)} * operand.walk_stride +
                   walk.offset(i) * operand.strides[0];
          };
          const int64_t element = offset(plan.operands[kOutput]) / plan.operands[kOutput].bytes;
          const int64_t place_of_sum =
              place(with_sums, gradient, element) / element_size(gradient.dtype);
          const int64_t part = (offset(plan.operands[kGradTarget]) + strip.split) / 4;
          CHECK(0 <= part && part < plan.splits * sums);
          int64_t& sum = sum_of_place[place_of_sum];
          CHECK(sum == -1 || sum == part % sums);
          sum = part % sums;
          CHECK(tile_of_part[part] == -1 || tile_of_part[part] == tile);
          tile_of_part[part] = tile;
        }
      }
    }
  });
  CHECK(std::count(tile_of_part.begin(), tile_of_part.end(), -1) == 0);
  std::sort(sum_of_place.begin(), sum_of_place.end());
  for (int64_t i = 0; i < sums; ++i) {
    CHECK(sum_of_place[i] == i);
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
  for (int n = 0; n < 500; ++n) {
    const cuda::Problem problem = cuda::draw_problem(n % 5 == 0 ? 4 : 3);
    const int at_once = 1 << cuda::draw(0, 2);
    test::subject() = "problem " + std::to_string(n) + ", " + std::to_string(at_once) + " at once";
    cuda::check_strips<1>(problem, at_once, seen);
    cuda::check_strips<cuda::kVectorSize<float>>(problem, at_once, seen);
    cuda::check_strips<cuda::kVectorSize<half_t>>(problem, at_once, seen);
    cuda::check_sums<1>(problem, at_once, seen);
    cuda::check_sums<cuda::kVectorSize<float>>(problem, at_once, seen);
    cuda::check_sums<cuda::kVectorSize<half_t>>(problem, at_once, seen);
    cuda::check_boxes(problem, seen);
  }
  for (int n = 0; n < 100; ++n) {
    const cuda::Problem problem = cuda::draw_far_sums();
    test::subject() = "far sums " + std::to_string(n);
    cuda::check_sums<1>(problem, 2, seen);
    cuda::check_sums<cuda::kVectorSize<float>>(problem, 2, seen);
  }
  for (int n = 0; n < 100; ++n) {
    test::subject() = "transposed " + std::to_string(n);
    cuda::check_boxes(cuda::draw_transposed(), seen);
  }
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
  test::subject() = "types of units";
  cuda::check_type(96, 96, true);
  cuda::check_type(93, 97, true);
  cuda::check_type(9, 16, true);
  cuda::check_type(7, 8, false);
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
  CHECK(seen.column_walks > 5);
  CHECK(seen.sides > 5);
  CHECK(seen.joined_rows > 100);
  CHECK(seen.parts > 100);
  CHECK(seen.shared_shares > 100);
  for (const int kind : seen.kinds) {
    CHECK(kind > 10);
  }
  for (const cuda::SumOf sum : {cuda::SumOf::kColumn, cuda::SumOf::kWalk, cuda::SumOf::kRow}) {
    CHECK(seen.sums[static_cast<int>(sum)] > 10);
  }
  CHECK(seen.sums[static_cast<int>(cuda::SumOf::kNothing)] == 0);
  CHECK(seen.splits > 10);
  CHECK(seen.summed_numbers > 10);
  return test::exit_status();
}
