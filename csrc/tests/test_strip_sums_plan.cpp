// Sums of gradients in strips (kernels/elements/strip_plan.h), on the host: every sum gets its
// elements, and every part of a sum is written by one tile.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/elements/tiles.h"
#include "tests/check.h"
#include "tests/element_problems.h"
#include "tests/element_strips.h"

namespace lossops::cuda {
namespace {

struct Seen {
  int sums[4] = {};        // by SumOf
  int splits = 0;          // plans with sums in parts
  int summed_numbers = 0;  // plans whose tiles go through several indices of the summed rest
};

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

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  cuda::Seen seen;
  cuda::for_each_problem_in_steps([&](const cuda::Problem& problem, int at_once) {
    cuda::check_sums<1>(problem, at_once, seen);
    cuda::check_sums<cuda::kVectorSize<float>>(problem, at_once, seen);
    cuda::check_sums<cuda::kVectorSize<half_t>>(problem, at_once, seen);
  });
  for (int n = 0; n < 100; ++n) {
    const cuda::Problem problem = cuda::draw_far_sums();
    test::subject() = "far sums " + std::to_string(n);
    cuda::check_sums<1>(problem, 2, seen);
    cuda::check_sums<cuda::kVectorSize<float>>(problem, 2, seen);
  }
  test::subject() = "all problems";
  for (const cuda::SumOf sum : {cuda::SumOf::kColumn, cuda::SumOf::kWalk, cuda::SumOf::kRow}) {
    CHECK(seen.sums[static_cast<int>(sum)] > 10);
  }
  CHECK(seen.sums[static_cast<int>(cuda::SumOf::kNothing)] == 0);
  CHECK(seen.splits > 10);
  CHECK(seen.summed_numbers > 10);
  return test::exit_status();
}
