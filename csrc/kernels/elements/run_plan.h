// How elements of strided operands are cut into rows and units, for elementwise_runs_kernel. Host
// code without CUDA; csrc/tests/test_element_runs.cpp runs the arithmetic that the kernel shares.
//
// A row is a stretch of one dimension, the lead, along which every operand has stride 1 or 0. A
// unit is kWidth neighbours of a row, aligned by the row's place in a grid: the first and the last
// unit of a row may hold fewer of its elements. The grid is that of the first result, so that its
// whole units are stored at once; without a result it is that of a dense one. A row's units, and so
// the order of sums, depend neither on the alignment of the operands that are read nor on the
// device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/operands.h"
#include "kernels/elements/tile_plan.h"
#include "kernels/integers.h"

namespace lossops::cuda {

// Units of a lane whose loads are on their way at once: those that 64 or 80 registers hold, where
// each operand takes two vectors a unit.
struct RunSteps {
  static constexpr int kOfHalves = 1;  // units of 8 elements
  static constexpr int kOfFloats = 2;  // units of 4
  static constexpr int kWithWeights = 1;
  static constexpr int kWithSums = 1;
};

// An operand, as rows read or write it. Strides are in bytes, of the dimensions of rows.
struct RunOperand {
  char* data = nullptr;     // null: absent
  uintptr_t end = 0;        // after its last element
  uintptr_t whole_end = 0;  // after its last whole aligned vector of a unit's length
  int64_t strides[kMaxDims] = {};
  DType dtype = DType::kFloat32;
  bool is_run = false;      // has stride 1 along the lead; else one number a row
  bool is_aligned = false;  // its rows begin where the grid's do, so that units of it are aligned
};

struct RunPlan {
  RunOperand operands[kNumOperands];
  // How many rows lie along each dimension, fastest first.
  Divisor sizes[kMaxDims];
  int32_t phases[kMaxDims] = {};  // elements that a row begins later in the grid, along a dimension
  int32_t phase = 0;              // where the first row begins in the grid
  int32_t ndim = 0;
  int64_t length = 0;   // elements of the lead
  int32_t segment = 0;  // elements of a row, but for what is left of the lead for its last one
  bool has_segments = false;  // the first dimension of rows counts those of the lead
  uint32_t rows = 0;
  int32_t team_bits = 0;  // 2^team_bits lanes share a row
  int32_t width = 4;      // elements of a unit: 8 for half types alone, without weights and sums

  // Where a gradient is added up: rows of which the sums are the same are a walk. Their dimensions
  // come first, and each of `splits` teams has a share of a walk. A lead that is kept is taken in
  // chunks: a team's lanes keep to their units of it from row to row.
  bool keeps_lead = false;
  int64_t lead_stride = 0;  // from the sum of an element of the lead to that of the next one
  uint32_t walk = 1;        // rows
  uint32_t groups = 1;      // walks
  Divisor chunks;
  Divisor splits;

  // What teams take one by one; without a sum the rows.
  LOSSOPS_HOST_DEVICE uint32_t parts() const { return groups * chunks.value * splits.value; }
  LOSSOPS_HOST_DEVICE int team() const { return 1 << team_bits; }
  // Teams of a block.
  LOSSOPS_HOST_DEVICE uint32_t teams() const {
    return static_cast<uint32_t>(kTileThreads >> team_bits);
  }
};

LOSSOPS_HOST_DEVICE uint32_t quotient_of(uint32_t n, const Divisor& divisor) {
#if defined(__CUDA_ARCH__)
  return divisor.quotient(n);
#else
  return n / divisor.value;
#endif
}

// A part of a walk: rows [first, last) of a group, of which the team takes a chunk.
struct WalkPart {
  uint32_t chunk;
  uint32_t split;
  uint32_t first;
  uint32_t last;

  LOSSOPS_HOST_DEVICE WalkPart(const RunPlan& plan, uint32_t part) {
    const uint32_t quotient = quotient_of(part, plan.chunks);
    chunk = part - quotient * plan.chunks.value;
    const uint32_t group = quotient_of(quotient, plan.splits);
    split = quotient - group * plan.splits.value;
    const uint32_t rows = (plan.walk + plan.splits.value - 1) / plan.splits.value;
    const uint32_t begin = split * rows < plan.walk ? split * rows : plan.walk;
    const uint32_t end = begin + rows < plan.walk ? begin + rows : plan.walk;
    first = group * plan.walk + begin;
    last = group * plan.walk + end;
  }
};

// Splits the number of a row: what it is along the plan's dimension d; the rest stays in `row`.
LOSSOPS_HOST_DEVICE uint32_t take_row_coordinate(const RunPlan& plan, int d, uint32_t& row) {
  if (d + 1 == plan.ndim) {
    return row;  // the slowest dimension takes what is left, undivided
  }
  const uint32_t quotient = quotient_of(row, plan.sizes[d]);
  const uint32_t coordinate = row - quotient * plan.sizes[d].value;
  row = quotient;
  return coordinate;
}

// The rows, or parts of walks, of a block: [first, last).
struct RowRange {
  uint32_t first;
  uint32_t last;

  LOSSOPS_HOST_DEVICE RowRange(uint32_t rows, uint32_t teams, uint32_t block, uint32_t blocks) {
    const uint32_t batches = (rows + teams - 1) / teams;  // a row for each team
    const uint32_t own = (batches + blocks - 1) / blocks * teams;
    first = block * own;
    last = first + own < rows ? first + own : rows;
  }
};

// The sum that the first element of a row belongs to. gradient: the operand that is added up.
LOSSOPS_HOST_DEVICE int64_t sum_number(const RunPlan& plan, Which gradient, uint32_t row) {
  int64_t number = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int d = 0; d < plan.ndim; ++d) {
    number += take_row_coordinate(plan, d, row) * plan.operands[gradient].strides[d];
  }
  return number;
}

// A unit of a row. Its elements [first, last) are the row's, and the row's element `index` is the
// unit's element 0: it is negative where the unit begins before the row.
template <int kWidth>
struct RunUnit {
  int index;
  int first;
  int last;
  bool is_whole;

  LOSSOPS_HOST_DEVICE RunUnit(int index_, int length) : index(index_) {
    const int left = length - index;
    first = index < 0 ? -index : 0;
    last = left < kWidth ? left : kWidth;
    is_whole = index >= 0 && left >= kWidth;
  }
  LOSSOPS_HOST_DEVICE bool has(int i) const { return i >= first && i < last; }
};

// Where a unit of an operand lies in memory: from element `shift` of one aligned vector on, and in
// the next one. A vector is to be read only where it has an element of the row.
template <int kWidth, int kBytes>
struct UnitPlace {
  static constexpr int kVectorBytes = kWidth * kBytes;

  uintptr_t vector;
  int shift;

  // address: of the unit's element 0, which need not be there.
  LOSSOPS_HOST_DEVICE explicit UnitPlace(uintptr_t address) {
    vector = address - address % kVectorBytes;
    shift = static_cast<int>(address % kVectorBytes) / kBytes;
  }
  LOSSOPS_HOST_DEVICE bool wants_first(const RunUnit<kWidth>& unit) const {
    const int behind = kWidth - shift;  // elements of the unit in the first vector
    return unit.first < (unit.last < behind ? unit.last : behind);
  }
  LOSSOPS_HOST_DEVICE bool wants_second(const RunUnit<kWidth>& unit) const {
    const int behind = kWidth - shift;
    return (unit.first > behind ? unit.first : behind) < unit.last;
  }
};

// The 64 bits of two words, shifted right.
LOSSOPS_HOST_DEVICE uint32_t shift_words(uint32_t low, uint32_t high, int bits) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
#endif
}

// Of two neighbouring vectors, those kWords words that begin with element `shift` of the first;
// they come first in `words`.
template <int kWords, int kBytes>
LOSSOPS_HOST_DEVICE void shift_vectors(uint32_t (&words)[2 * kWords], int shift) {
  constexpr int kHalves = kBytes == 2 ? 1 : 0;
  const int whole = shift >> kHalves;
  if constexpr (kWords == 4) {
    // One word more than kWords for what is left of the shift.
#pragma unroll
    for (int i = 0; i < kWords + 1 + kHalves; ++i) {
      words[i] = (whole & 2) != 0 ? words[i + 2] : words[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWords + kHalves; ++i) {
    words[i] = (whole & 1) != 0 ? words[i + 1] : words[i];
  }
  if constexpr (kBytes == 2) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = shift_words(words[i], words[i + 1], (shift & 1) * 16);
    }
  }
}

// Makes a RunPlan, where the operands have one.
class RunPlanner {
 public:
  // operands: kNumOperands of them; null data: absent. summed: the gradient that is added up, whose
  // strides count sums; null: there is none.
  RunPlanner(const IterationSpace& space, const Operand* operands, bool is_double,
             const Operand* summed = nullptr)
      : space_(space), operands_(operands), summed_(summed) {
    if (is_double || space.numel == 0 || space.ndim == 0 ||
        (summed != nullptr && operands[kWeight].data != nullptr)) {
      return;
    }
    lead_ = leading_dim(space, operands, summed);
    if (!check_operands()) {
      return;
    }
    cut();
    if (!has_plan_) {
      return;
    }
    place_grid();
    if (plan_.keeps_lead) {
      choose_chunks();
    } else {
      choose_team();
    }
    place_operands();
    if (summed_ != nullptr) {
      split_walks();
    }
  }

  bool has_plan() const { return has_plan_; }
  const RunPlan& plan() const { return plan_; }

 private:
  // Elements of a segment. Long ones spread the cost of a row; many keep a small GPU busy.
  static constexpr int64_t kMostOfSegment = 8192;
  static constexpr int64_t kFewestOfSegment = 1024;

  static bool is_float(DType dtype) { return dtype == DType::kFloat32 || is_half_type(dtype); }

  template <typename Body>
  void for_each_operand(const Body& body) const {
    for (int which = 0; which < kNumOperands; ++which) {
      if (operands_[which].data != nullptr && operands_ + which != summed_) {
        body(which, operands_[which]);
      }
    }
  }

  bool check_operands() const {
    bool all = true;
    for_each_operand([&](int which, const Operand& operand) {
      const int64_t stride = operand.strides[lead_];
      const bool is_result = which >= kOutput;
      all = all && is_float(operand.dtype) && (stride == 1 || (stride == 0 && !is_result));
    });
    return all;
  }

  // The dimensions of rows.
  void cut() {
    plan_.length = space_.sizes[lead_];
    const int64_t segment = std::clamp<int64_t>(space_.numel / (kTileThreads * 128) / 8 * 8,
                                                kFewestOfSegment, kMostOfSegment);
    plan_.segment = static_cast<int32_t>(std::min<int64_t>(plan_.length, INT32_MAX / 2));
    plan_.lead_stride = summed_ != nullptr ? summed_->strides[lead_] : 0;
    plan_.keeps_lead = plan_.lead_stride != 0;
    int64_t rows = 1;
    if (plan_.keeps_lead) {
      if (plan_.length > plan_.segment) {
        return;
      }
    } else if (plan_.length > segment + segment / 2) {
      plan_.segment = static_cast<int32_t>(segment);
      dims_[plan_.ndim++] = lead_;
      rows = ceil_div(plan_.length, segment);
      plan_.sizes[0] = Divisor(static_cast<uint32_t>(std::min(rows, kMaxDividend)));
      plan_.has_segments = true;
    }
    const auto add = [&](bool walked) {
      for (int dim = 0; dim < space_.ndim && rows <= kMaxDividend; ++dim) {
        if (dim != lead_ && (summed_ != nullptr && summed_->strides[dim] == 0) == walked) {
          dims_[plan_.ndim] = dim;
          plan_.sizes[plan_.ndim++] =
              Divisor(static_cast<uint32_t>(std::min(space_.sizes[dim], kMaxDividend)));
          rows *= space_.sizes[dim];
        }
      }
    };
    add(true);
    plan_.walk = summed_ != nullptr ? static_cast<uint32_t>(std::min(rows, kMaxDividend)) : 1;
    add(false);
    has_plan_ = rows <= kMaxDividend;
    plan_.rows = static_cast<uint32_t>(std::min(rows, kMaxDividend));
    plan_.groups = plan_.rows / plan_.walk;
  }

  // Elements from row to row along dimension d.
  int64_t stride_of(const Operand& operand, int d) const {
    const int64_t stride = operand.strides[dims_[d]];
    return plan_.has_segments && d == 0 ? stride * plan_.segment : stride;
  }

  void place_grid() {
    plan_.width = operands_[kWeight].data == nullptr && summed_ == nullptr ? 8 : 4;
    const Operand* result = nullptr;
    for_each_operand([&](int which, const Operand& operand) {
      plan_.width = is_half_type(operand.dtype) ? plan_.width : 4;
      result = result == nullptr && which >= kOutput ? &operand : result;
    });
    steps_ = operands_[kWeight].data != nullptr ? RunSteps::kWithWeights
             : summed_ != nullptr               ? RunSteps::kWithSums
             : plan_.width == 8                 ? RunSteps::kOfHalves
                                                : RunSteps::kOfFloats;
    if (summed_ != nullptr) {
      return;  // all rows begin in the grid alike
    }
    Operand dense;
    int64_t stride = 1;
    dense.strides[lead_] = stride;
    stride *= space_.sizes[lead_];
    for (int dim = 0; dim < space_.ndim; ++dim) {
      if (dim != lead_) {
        dense.strides[dim] = stride;
        stride *= space_.sizes[dim];
      }
    }
    grid_ = result != nullptr ? *result : dense;
    for (int d = 0; d < plan_.ndim; ++d) {
      plan_.phases[d] = static_cast<int32_t>(stride_of(grid_, d) & (plan_.width - 1));
    }
    plan_.phase = phase_of(grid_);
  }

  int32_t phase_of(const Operand& operand) const {
    return static_cast<int32_t>(reinterpret_cast<uintptr_t>(operand.data) /
                                static_cast<uintptr_t>(element_size(operand.dtype)) %
                                static_cast<uintptr_t>(plan_.width));
  }

  // As many lanes as make the work of a row cheapest, by the number of instructions: a row costs
  // some 100 of each lane, a unit some 20 and 10 an element.
  void choose_team() {
    bool has_phase = plan_.length % plan_.width != 0;
    for (int d = 0; d < plan_.ndim; ++d) {
      has_phase = has_phase || plan_.phases[d] != 0;
    }
    const int64_t length = std::min<int64_t>(plan_.segment, plan_.length);
    const int64_t units = ceil_div(length + (has_phase ? plan_.width / 2 : 0), plan_.width);
    double least = 0;
    for (int bits = 5; bits >= 0; --bits) {
      const int64_t lanes = int64_t{1} << bits;
      const int64_t turns = ceil_div(units, lanes * steps_);
      // Lanes in many rows touch many lines of memory at once.
      const double scatter = bits >= 3 ? 1.0 : bits == 2 ? 1.1 : bits == 1 ? 1.25 : 1.6;
      const double cost = scatter * static_cast<double>(lanes) *
                          static_cast<double>(turns * steps_ * (20 + 10 * plan_.width) + 100);
      if (bits == 5 || cost < 0.95 * least) {
        least = cost;
        plan_.team_bits = bits;
      }
    }
  }

  void choose_chunks() {
    const int64_t units = ceil_div(plan_.length, plan_.width);
    while (plan_.team_bits < 5 && plan_.team() * steps_ < units) {
      ++plan_.team_bits;
    }
    plan_.chunks = Divisor(static_cast<uint32_t>(ceil_div(units, plan_.team() * steps_)));
  }

  // So many that any GPU is busy, but each with rows enough to be worth the sums that it leaves.
  void split_walks() {
    constexpr int64_t kParts = 16384;
    constexpr int64_t kRows = 64;
    constexpr int64_t kFewParts = 4096;
    constexpr int64_t kFewRows = 8;
    const int64_t parts = int64_t{plan_.groups} * plan_.chunks.value;
    const int64_t walk = plan_.walk;
    const int64_t most = std::max(std::min(kParts / parts, walk / kRows),
                                  std::min(kFewParts / parts, walk / kFewRows));
    const int64_t splits = std::max<int64_t>(most, 1);
    plan_.splits = Divisor(static_cast<uint32_t>(ceil_div(walk, ceil_div(walk, splits))));
    has_plan_ = parts * plan_.splits.value <= kMaxDividend;
  }

  void place_operands() {
    for_each_operand([&](int which, const Operand& operand) {
      RunOperand& own = plan_.operands[which];
      const int64_t bytes = element_size(operand.dtype);
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.is_run = operand.strides[lead_] == 1;
      own.is_aligned = own.is_run && phase_of(operand) == plan_.phase;
      int64_t last = 0;  // element
      for (int dim = 0; dim < space_.ndim; ++dim) {
        last += (space_.sizes[dim] - 1) * operand.strides[dim];
      }
      own.end = reinterpret_cast<uintptr_t>(own.data + (last + 1) * bytes);
      own.whole_end = own.end - own.end % static_cast<uintptr_t>(plan_.width * bytes);
      for (int d = 0; d < plan_.ndim; ++d) {
        const int64_t stride = stride_of(operand, d);
        own.strides[d] = stride * bytes;
        own.is_aligned = own.is_aligned && ((stride - plan_.phases[d]) & (plan_.width - 1)) == 0;
      }
    });
    if (summed_ != nullptr) {
      RunOperand& own = plan_.operands[summed_ - operands_];
      for (int d = 0; d < plan_.ndim; ++d) {
        own.strides[d] = stride_of(*summed_, d);
      }
    }
  }

  const IterationSpace& space_;
  const Operand* const operands_;
  const Operand* const summed_;
  int lead_ = 0;
  int steps_ = 1;
  int dims_[kMaxDims] = {};  // of the space, by dimension of rows
  bool has_plan_ = false;
  Operand grid_;
  RunPlan plan_;
};

}  // namespace lossops::cuda
