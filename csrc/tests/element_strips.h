// Strips of operands in any layout (kernels/elements/strip_plan.h), for the tests of their elements
// and of their sums.
#pragma once

#include <cstdint>

#include "kernels/elements/tiles.h"
#include "tests/check.h"
#include "tests/element_problems.h"

namespace lossops::cuda {

constexpr int64_t kResident = 2;

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

// Whether there are units of so many columns. Those that are spread take rows of any length.
template <int kWidth>
bool has_plan(const StripPlanner& planner) {
  return kWidth == 1 ||
         (spreads_units(kWidth) ? planner.has_near_columns() : planner.joins_columns());
}

}  // namespace lossops::cuda
