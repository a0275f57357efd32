// How strided operands are cut into rows and units (kernels/elements/run_plan.h), on the host:
// every element is read from its place, once, nothing outside of an operand is read, and each sum
// of a gradient gets its elements.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/elements/run_plan.h"
#include "tests/check.h"

namespace lossops::cuda {
namespace {

std::mt19937_64 generator(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

// The memory of an operand, at any place within a vector. Element i is i, as far as its bits go.
struct Memory {
  std::vector<uint64_t> storage;
  size_t offset = 0;  // bytes
  int64_t count = 0;

  Memory() = default;
  Memory(int64_t bytes, int64_t first, int64_t count_)
      : storage(static_cast<size_t>((first + count_) * bytes / 8 + 4)), count(count_) {
    offset = (16 - address() % 16) % 16 + static_cast<size_t>(first * bytes);
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<uint64_t>(i);
      std::memcpy(data() + i * bytes, &value, static_cast<size_t>(bytes));
    }
  }
  uintptr_t address() { return reinterpret_cast<uintptr_t>(data()); }
  char* data() { return reinterpret_cast<char*>(storage.data()) + offset; }
};

struct Case {
  IterationSpace space;
  Operand operands[kNumOperands];
  std::vector<Memory> memory;  // by operand
  const Operand* summed = nullptr;

  // The offset into an operand, in elements, for a linear index of the space.
  int64_t element(int which, int64_t index) const {
    int64_t element = 0;
    for (int dim = 0; dim < space.ndim; ++dim) {
      element += index % space.sizes[dim] * operands[which].strides[dim];
      index /= space.sizes[dim];
    }
    return element;
  }
};

DType draw_dtype(bool all_half) {
  constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  return kTypes[draw(0, all_half ? 1 : 2)];
}

// sums: one gradient is added up, and there is no other result.
void draw_case(bool all_half, bool sums, Case& drawn) {
  IterationSpace& space = drawn.space;
  space.ndim = static_cast<int>(draw(1, 4));
  space.numel = 1;
  for (int dim = 0; dim < space.ndim; ++dim) {
    space.sizes[dim] = draw(2, dim > 0 ? 7 : draw(0, 9) == 0 ? 4000 : 90);
    space.numel *= space.sizes[dim];
  }
  drawn.memory.resize(kNumOperands);
  for (int which = 0; which < kNumOperands; ++which) {
    const bool is_result = which >= kOutput;
    const bool is_optional = which != kInput && which != kTarget;
    if ((is_optional && draw(0, 1) == 0) || (sums && (is_result || which == kWeight))) {
      continue;
    }
    Operand& operand = drawn.operands[which];
    operand.dtype = draw_dtype(all_half);
    int64_t stride = 1;
    int64_t last = 0;
    for (int dim = 0; dim < space.ndim; ++dim) {
      if (is_result || draw(0, 4) > 0) {
        operand.strides[dim] = stride;
        last += (space.sizes[dim] - 1) * stride;
        stride = stride * space.sizes[dim] + draw(0, 1) * draw(0, 9);
      }
    }
    drawn.memory[which] = Memory(element_size(operand.dtype), draw(0, 8), last + 1);
    operand.data = drawn.memory[which].data();
  }
  if (sums) {
    const int which = draw(0, 1) == 0 ? kGradInput : kGradTarget;
    Operand& operand = drawn.operands[which];
    operand.dtype = DType::kFloat64;
    int64_t stride = 1;
    for (int dim = 0; dim < space.ndim; ++dim) {
      if (draw(0, 1) == 0) {
        operand.strides[dim] = stride;
        stride *= space.sizes[dim];
      }
    }
    drawn.memory[which] = Memory(8, 0, stride);
    operand.data = drawn.memory[which].data();
    drawn.summed = &operand;
  }
}

// Where a team is, as RunTile finds it.
struct Row {
  uintptr_t places[kNumOperands];
  int phase;
  int length;

  Row(const RunPlan& plan, uint32_t row) : phase(plan.phase) {
    for (int which = 0; which < kNumOperands; ++which) {
      places[which] = reinterpret_cast<uintptr_t>(plan.operands[which].data);
    }
    int64_t left = plan.length;
    for (int d = 0; d < plan.ndim; ++d) {
      const uint32_t coordinate = take_row_coordinate(plan, d, row);
      for (int which = 0; which < kNumOperands; ++which) {
        places[which] += coordinate * static_cast<uint64_t>(plan.operands[which].strides[d]);
      }
      phase += static_cast<int>(coordinate) * plan.phases[d];
      left -= d == 0 && plan.has_segments ? int64_t{coordinate} * plan.segment : 0;
    }
    length = static_cast<int>(std::min<int64_t>(left, plan.segment));
  }
};

// Checks the units of a lane, and counts what they take.
template <int kWidth>
struct Units {
  const Case& drawn;
  const RunPlan& plan;
  // By operand and element: how often it was taken.
  std::vector<std::vector<int64_t>> taken;
  int64_t count = 0;
  int64_t cut = 0;  // vectors that reach beyond the end of an operand

  Units(const Case& drawn_, const RunPlan& plan_)
      : drawn(drawn_), plan(plan_), taken(kNumOperands) {
    for (int which = 0; which < kNumOperands; ++which) {
      taken[which].assign(static_cast<size_t>(drawn.memory[which].count), 0);
    }
  }

  // The unit as a lane reads it: in aligned vectors.
  template <int kBytes>
  void read(const RunOperand& operand, uintptr_t row, const RunUnit<kWidth>& unit, int length) {
    constexpr int kWords = kWidth * kBytes / 4;
    constexpr uintptr_t kVector = kWidth * kBytes;
    const UnitPlace<kWidth, kBytes> place(row +
                                          static_cast<uint64_t>(int64_t{unit.index} * kBytes));
    const uintptr_t row_end = row + static_cast<uint64_t>(length) * kBytes;
    uint32_t words[2 * kWords] = {};
    const auto read_vector = [&](uintptr_t which, bool wanted) {
      const uintptr_t vector = place.vector + which * kVector;
      CHECK(vector % kVector == 0);
      if (wanted) {
        CHECK(vector + kVector > row && vector < row_end);
        const size_t bytes = std::min<size_t>(operand.end - vector, kVector);
        CHECK((bytes == kVector) == (vector < operand.whole_end));
        CHECK(bytes == kVector || row_end > operand.whole_end);
        cut += bytes < kVector ? 1 : 0;
        std::memcpy(words + which * kWords, reinterpret_cast<const void*>(vector), bytes);
      }
    };
    read_vector(0, place.wants_first(unit));
    if (operand.is_aligned) {
      CHECK(place.shift == 0);
    } else {
      read_vector(1, place.wants_second(unit));
      shift_vectors<kWords, kBytes>(words, place.shift);
    }
    const auto first = (row - reinterpret_cast<uintptr_t>(operand.data)) / kBytes;
    for (int i = unit.first; i < unit.last; ++i) {
      uint32_t value = 0;
      std::memcpy(&value, reinterpret_cast<const char*>(words) + i * kBytes, kBytes);
      const auto element = static_cast<uint32_t>(first + static_cast<uint64_t>(unit.index + i));
      CHECK(value == (kBytes == 4 ? element : element & 0xffffu));
    }
  }

  void take(const Row& row, int index) {
    const RunUnit<kWidth> unit(index, row.length);
    CHECK(unit.first < unit.last);
    CHECK(unit.is_whole == (unit.last - unit.first == kWidth));
    count += unit.last - unit.first;
    for (int which = 0; which < kNumOperands; ++which) {
      const RunOperand& operand = plan.operands[which];
      if (operand.data == nullptr) {
        continue;
      }
      const auto bytes = static_cast<uint64_t>(element_size(operand.dtype));
      const uint64_t first =
          (row.places[which] - reinterpret_cast<uintptr_t>(operand.data)) / bytes;
      if (which < kOutput && operand.is_run) {
        if (bytes == 2) {
          read<2>(operand, row.places[which], unit, row.length);
        } else if constexpr (kWidth == 4) {
          read<4>(operand, row.places[which], unit, row.length);
        }
      } else if (operand.is_aligned && unit.is_whole) {
        CHECK((row.places[which] + static_cast<uint64_t>(index) * bytes) % (kWidth * bytes) == 0);
      }
      for (int i = unit.first; i < unit.last; ++i) {
        ++taken[which][first + (operand.is_run ? static_cast<uint64_t>(index + i) : 0)];
      }
    }
  }

  // Whether all was taken as often as the space has it.
  void check() {
    CHECK(count == drawn.space.numel);
    for (int which = 0; which < kNumOperands; ++which) {
      if (plan.operands[which].data == nullptr) {
        continue;
      }
      for (int64_t i = 0; i < drawn.space.numel; ++i) {
        --taken[which][static_cast<size_t>(drawn.element(which, i))];
      }
      CHECK(
          std::all_of(taken[which].begin(), taken[which].end(), [](int64_t n) { return n == 0; }));
    }
  }
};

// As elementwise_runs_kernel.
template <int kWidth>
int64_t walk_rows(const Case& drawn, const RunPlan& plan) {
  Units<kWidth> units(drawn, plan);
  const auto blocks = static_cast<uint32_t>(draw(1, 5));
  for (uint32_t block = 0; block < blocks; ++block) {
    const RowRange range(plan.rows, plan.teams(), block, blocks);
    for (uint32_t number = range.first; number < range.last; ++number) {
      const Row row(plan, number);
      for (int lane = 0; lane < plan.team(); ++lane) {
        for (int index = lane * kWidth - (row.phase & (kWidth - 1)); index < row.length;
             index += kWidth << plan.team_bits) {
          units.take(row, index);
        }
      }
    }
  }
  units.check();
  return units.cut;
}

// As elementwise_run_sums_kernel, of ones.
template <int kWidth>
int64_t walk_sums(const Case& drawn, const RunPlan& plan) {
  const auto gradient = static_cast<Which>(drawn.summed - drawn.operands);
  const int64_t outputs = drawn.memory[gradient].count;
  std::vector<int64_t> partials(static_cast<size_t>(plan.splits.value * outputs), -1);
  Units<kWidth> units(drawn, plan);
  for (uint32_t number = 0; number < plan.parts(); ++number) {
    const WalkPart part(plan, number);
    CHECK(part.first < part.last);
    int64_t* const sums =
        partials.data() + part.split * outputs + sum_number(plan, gradient, part.first);
    const int distance = kWidth << plan.team_bits;
    const int start = static_cast<int>(part.chunk) * RunSteps::kWithSums * distance;
    for (int lane = 0; lane < plan.team(); ++lane) {
      for (uint32_t r = part.first; r < part.last; ++r) {
        const Row row(plan, r);
        CHECK(row.phase == 0);
        int index = start + lane * kWidth;
        for (int turn = 0; index < row.length; ++turn, index += distance) {
          if (plan.keeps_lead && turn == RunSteps::kWithSums) {
            break;
          }
          units.take(row, index);
          const RunUnit<kWidth> unit(index, row.length);
          for (int i = unit.first; i < unit.last; ++i) {
            int64_t& sum = sums[plan.keeps_lead ? (index + i) * plan.lead_stride : 0];
            sum = std::max<int64_t>(sum, 0) + 1;
          }
        }
      }
    }
  }
  units.check();
  // No partial is left out; each sum is of all its elements.
  CHECK(std::all_of(partials.begin(), partials.end(), [](int64_t n) { return n >= 0; }));
  for (int64_t output = 0; output < outputs; ++output) {
    int64_t sum = 0;
    for (uint32_t split = 0; split < plan.splits.value; ++split) {
      sum += partials[static_cast<size_t>(split * outputs + output)];
    }
    CHECK(sum == drawn.space.numel / outputs);
  }
  return units.cut;
}

void test_drawn_layouts(bool sums) {
  int plans = 0;
  int64_t cut = 0;
  for (int round = 0; round < 800; ++round) {
    Case drawn;
    draw_case(round % 2 == 0, sums, drawn);
    test::subject() = (sums ? "sums, round " : "round ") + std::to_string(round);
    const RunPlanner planner(drawn.space, drawn.operands, false, drawn.summed);
    if (!planner.has_plan()) {
      continue;
    }
    ++plans;
    const RunPlan& plan = planner.plan();
    if (sums) {
      cut += plan.width == 8 ? walk_sums<8>(drawn, plan) : walk_sums<4>(drawn, plan);
    } else {
      cut += plan.width == 8 ? walk_rows<8>(drawn, plan) : walk_rows<4>(drawn, plan);
    }
  }
  test::subject() = "";
  CHECK(plans > 300);
  CHECK(cut > 1000);
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  lossops::cuda::test_drawn_layouts(false);
  lossops::cuda::test_drawn_layouts(true);
  return lossops::test::exit_status();
}
