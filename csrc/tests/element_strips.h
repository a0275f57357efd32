// Strips of operands in any layout (kernels/elements/strip_plan.h), for the tests of their elements
// and of their sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "kernels/elements/tiles.h"
#include "tests/check.h"
#include "tests/element_problems.h"

namespace lossops::cuda {

constexpr int64_t kResident = 2;

// Calls body(problem, at_once) with problems, and how many steps a thread takes at once.
template <typename Body>
void for_each_problem_in_steps(const Body& body) {
  for_each_problem([&](const Problem& problem) {
    const int at_once = 1 << draw(0, 2);
    test::subject() += ", " + std::to_string(at_once) + " at once";
    body(problem, at_once);
  });
}

template <typename Body>
void for_each_strip(const StripPlan& plan, const Body& body) {
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    bool is_last = false;
    for (int number = 0; !is_last; ++number) {
      const Strip strip = Strip::of_sums(plan, tile, number);
      body(strip, tile);
      is_last = strip.is_last;
    }
  }
}

// Kernels that sum no gradient take the strips that those which sum one take.
inline void check_plain_strips(const StripPlan& plan) {
  CHECK(plan.tile_summed == 1);
  for (int64_t tile = 0; tile < plan.tiles; ++tile) {
    const Strip strip = Strip::of_sums(plan, tile, 0);
    const Strip plain = Strip::of(plan, tile);
    CHECK(strip.is_last);
    CHECK(plain.column == strip.column && plain.walked == strip.walked);
    CHECK(plain.columns_left == strip.columns_left && plain.walked_left == strip.walked_left);
    CHECK(plain.rest == strip.rest);
    CHECK(std::min(plain.rest_left, plan.side_kept) == std::min(strip.rest_left, plan.side_kept));
  }
}

// The bytes from an operand's first element to where a walk begins.
template <int kWidth>
int64_t begin_of(const StripPlan& plan, const Walk<kWidth>& walk, const Strip& strip,
                 const StripOperand& operand) {
  return walk.column(strip) * operand.strides[0] + walk.walked(strip) * operand.strides[1] +
         plan.extents.offset(operand.strides, walk.rest(strip), 2);
}

// Whether there are units of so many columns. Those that are spread take rows of any length.
template <int kWidth>
bool has_plan(const StripPlanner& planner) {
  return kWidth == 1 ||
         (spreads_units(kWidth) ? planner.has_near_columns() : planner.joins_columns());
}

}  // namespace lossops::cuda
