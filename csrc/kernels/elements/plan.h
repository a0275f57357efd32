// How elements of any layout are dealt out to threads. Host code without CUDA, and the arithmetic
// that kernels share with it (csrc/tests/test_element_plan.cpp).
//
// Elements are numbered along the dimensions of the plan, fastest first, and neighbouring threads
// take neighbouring numbers. Where element n lies follows from n by one multiplication a dimension:
//
//   n stride_0 + (n / size_0) gap_1 + (n / size_0 / size_1) gap_2 + ...
//   gap_d = stride_d - size_(d-1) stride_(d-1)
//
// which holds whether or not dimensions merge, for any strides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/operands.h"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// Dimensions of a plan, at the most: boxes add two to those of the operands, chunks one.
constexpr int kPlanDims = kMaxDims + 3;
// Elements of a box. Its sides are powers of two, of at most a block's threads.
constexpr int kBoxShift = 11;
constexpr int kBoxElements = 1 << kBoxShift;

// Four elements with neighbouring numbers, which a thread reads at once.
constexpr int kQuad = 4;
// How an operand has its quads.
enum class QuadKind : int8_t {
  kNone,    // has none
  kVector,  // all are aligned vectors
  kOne,     // all are one number
  kWords,   // of 2 bytes an element, anywhere: a quad may have the end of a row in it
};

// The dimensions of a plan. Those of a chunk come first: numbers in it fit 31 bits, and gaps 32.
struct Extents {
  int64_t sizes[kPlanDims] = {};
  Divisor divisors[kPlanDims];  // of sizes that fit 31 bits
  int ndim = 0;
  int chunk_ndim = 0;

  void add(int64_t size) { sizes[ndim++] = size; }
  void set_divisors() {
    for (int dim = 0; dim < ndim; ++dim) {
      if (0 < sizes[dim] && sizes[dim] <= kMaxDividend) {
        divisors[dim] = Divisor(static_cast<uint32_t>(sizes[dim]));
      }
    }
  }

  LOSSOPS_HOST_DEVICE int64_t quotient(int64_t n, int dim) const {
    if (n > kMaxDividend) {
      return n / sizes[dim];
    }
    return sizes[dim] > kMaxDividend ? 0 : divisors[dim].quotient(static_cast<uint32_t>(n));
  }

  // How far from its first element an operand has the one whose number along dimensions
  // [first, last) is n.
  LOSSOPS_HOST_DEVICE int64_t offset(const int64_t* strides, int64_t n, int first, int last) const {
    int64_t offset = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int dim = first; dim < last; ++dim) {
      const int64_t rest = quotient(n, dim);
      offset += (n - rest * sizes[dim]) * strides[dim];
      n = rest;
    }
    return offset;
  }
};

// An operand, as plans number its elements. Strides and gaps are in bytes.
struct PlanOperand {
  char* data = nullptr;  // null: absent
  int64_t strides[kPlanDims] = {};
  int32_t gaps[kPlanDims] = {};  // of the dimensions within a chunk; [0] is stride 0
  DType dtype = DType::kFloat32;
  int32_t bytes = 4;  // of an element
  // Within a chunk, element n lies at n stride_0 + (n / size_0) gap_1: the further gaps are 0.
  bool is_simple = false;
  QuadKind quads = QuadKind::kNone;
  bool is_turned = false;  // its rows lie along the other side of boxes

  // Sets the gap of a dimension. Returns whether it fits.
  bool set_gap(const Extents& extents, int dim) {
    const int64_t gap = strides[dim] - (dim > 0 ? extents.sizes[dim - 1] * strides[dim - 1] : 0);
    gaps[dim] = static_cast<int32_t>(gap);
    return -kMaxDividend <= gap && gap <= kMaxDividend;
  }
};

// The distance that `number` gaps make. number: of an element or a row of a chunk, so it has 31
// bits.
LOSSOPS_HOST_DEVICE int64_t times(uint32_t number, int32_t gap) {
  // fault: elementwise-offset
  return static_cast<int64_t>(static_cast<int32_t>(number)) * gap;
}

// Adds the gaps of dimensions from 2 on to offsets. rest: the rows of the chunk that the elements
// lie in; overwritten.
template <int kSteps>
LOSSOPS_HOST_DEVICE void add_further_gaps(const Extents& extents, const int32_t* gaps,
                                          uint32_t (&rest)[kSteps], int64_t (&offsets)[kSteps]) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int dim = 1; dim + 1 < extents.chunk_ndim; ++dim) {
    const Divisor divisor = extents.divisors[dim];
    const int32_t gap = gaps[dim + 1];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int step = 0; step < kSteps; ++step) {
      rest[step] = divisor.quotient(rest[step]);
      offsets[step] += times(rest[step], gap);
    }
  }
}

// Chooses the chunks of a plan whose sizes and strides are known. A chunk has as many of the first
// dimensions as numbers and gaps allow, and may have a part of the next one: that dimension is cut.
// Calls of_operands(body) to have body(operand) called.
// Returns the elements of the last chunk along the dimension that was cut; 0: none was.
template <typename OfOperands>
int64_t choose_chunks(Extents& extents, int64_t most_elements, const OfOperands& of_operands) {
  int64_t elements = 1;
  int64_t last_elements = 0;
  int dim = 0;
  for (; dim < extents.ndim; ++dim) {
    bool fits = true;
    of_operands([&](PlanOperand& operand) { fits = operand.set_gap(extents, dim) && fits; });
    if (!fits) {
      break;
    }
    // A piece is whole quads, so that vectors are aligned in every chunk.
    int64_t piece = std::max<int64_t>(most_elements / elements, 1);
    piece -= piece > kQuad ? piece % kQuad : 0;
    const int64_t size = extents.sizes[dim];
    if (piece < size) {
      // The dimension becomes two: a piece, and how many of those.
      for (int other = extents.ndim; other > dim + 1; --other) {
        extents.sizes[other] = extents.sizes[other - 1];
      }
      extents.sizes[dim] = piece;
      extents.sizes[dim + 1] = ceil_div(size, piece);
      ++extents.ndim;
      of_operands([&](PlanOperand& operand) {
        for (int other = extents.ndim - 1; other > dim; --other) {
          operand.strides[other] = operand.strides[other - 1];
        }
        operand.strides[dim + 1] *= piece;
      });
      last_elements = (size - (extents.sizes[dim + 1] - 1) * piece) * elements;
      ++dim;
      break;
    }
    elements *= size;
  }
  extents.chunk_ndim = dim;
  return last_elements;
}

struct ElementPlan {
  Extents extents;
  PlanOperand operands[kNumOperands];
  bool has_quads = false;  // four neighbours are read at once
  bool is_half = false;    // all operands are of half types
  int64_t chunk_elements = 1;
  int64_t last_elements = 0;  // of the last chunk along a dimension that was cut; 0: as others
  int64_t chunks = 1;
  int64_t chunk_tiles = 1;  // by cut()

  // Where operands disagree on which dimension is contiguous, a tile is a box of two dimensions.
  // Dimensions 0 and 1 are its sides, 2 and 3 count boxes along each, and a chunk is one box.
  bool has_boxes = false;
  int32_t box_shifts[2] = {};   // logarithms of the sides, to base 2
  int64_t box_extents[2] = {};  // sizes of the two dimensions; boxes may reach beyond them

  LOSSOPS_HOST_DEVICE int64_t tiles() const { return chunks * chunk_tiles; }

  // tile_elements: elements of a tile of the kernel that takes the plan.
  void cut(int64_t tile_elements) { chunk_tiles = ceil_div(chunk_elements, tile_elements); }
};

// Makes an ElementPlan.
class ElementPlanner {
 public:
  // operands: kNumOperands of them; null data: absent. may_pack: the plan may have boxes and quads,
  // and may say that all operands are of half types. chunk_elements: elements of a chunk, at the
  // most.
  ElementPlanner(const IterationSpace& space, const Operand* operands, bool may_pack,
                 int64_t chunk_elements = int64_t{1} << 30)
      : space_(space), operands_(operands) {
    if (space_.ndim == 0 || space_.numel == 0) {
      space_.ndim = 1;
      space_.sizes[0] = 1;
    }
    lead_ = leading_dim(-1);
    other_ = leading_dim(lead_);
    for_each_operand([&](const Operand& operand, PlanOperand& own) {
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.bytes = static_cast<int32_t>(element_size(operand.dtype));
    });
    plan_.has_boxes = may_pack && chooses_boxes();
    plan_.has_boxes ? cut_boxes() : cut_rows(chunk_elements);
    plan_.has_quads = may_pack && !plan_.has_boxes && finds_quads();
    plan_.is_half = may_pack && are_half();
    count();
  }

  const ElementPlan& plan() const { return plan_; }

 private:
  template <typename Body>
  void for_each_operand(const Body& body) {
    for (int which = 0; which < kNumOperands; ++which) {
      if (operands_[which].data != nullptr) {
        body(operands_[which], plan_.operands[which]);
      }
    }
  }

  // The dimension along which most bytes that are read are neighbours; of several such dimensions,
  // the longest. Operands that are written do not count, so a plan is the same with a gradient and
  // without one.
  // lead: -1 counts all operands. Else only operands count whose rows do not lie along dimension
  // `lead`, and the result is `lead` if there are none.
  int leading_dim(int lead) {
    int found = std::max(lead, 0);
    int64_t most = 0;
    for (int dim = 0; dim < space_.ndim; ++dim) {
      int64_t bytes = 0;
      for (int which = kInput; which <= kGradOutput; ++which) {
        const Operand& operand = operands_[which];
        if (operand.data != nullptr && operand.strides[dim] == 1 &&
            (lead < 0 || is_turned(operand, lead))) {
          // Caches hold most of a broadcast operand, so its bytes count a 16th. A choice, not
          // measured.
          constexpr int64_t kMore = 16;
          bytes += element_size(operand.dtype) * (is_broadcast(operand) ? 1 : kMore);
        }
      }
      const bool is_longer = bytes == most && space_.sizes[dim] > space_.sizes[found];
      if (bytes > 0 && space_.sizes[dim] > 1 && (bytes > most || is_longer)) {
        most = bytes;
        found = dim;
      }
    }
    return found;
  }

  bool is_broadcast(const Operand& operand) const {
    return std::any_of(operand.strides, operand.strides + space_.ndim,
                       [](int64_t stride) { return stride == 0; });
  }
  static bool is_turned(const Operand& operand, int lead) {
    return operand.strides[lead] != 0 && operand.strides[lead] != 1;
  }

  // Chooses the sides of boxes that the two dimensions fill best. Returns whether they fill at
  // least half of the boxes. Rows are faster for matrices that fill less: these are so small that
  // the cache holds what a warp reads across the rows (docs/experiments/elementwise.md).
  bool chooses_boxes() {
    if (other_ == lead_) {
      return false;
    }
    const auto padded = [&](int dim, int shift) {
      return (((space_.sizes[dim] - 1) >> shift) + 1) << shift;
    };
    int64_t least = 0;
    // Of sides that are filled alike, the first are chosen: those nearest to a square.
    for (const int shift : {5, 6, 4, 7, 3, 8}) {
      const int64_t elements = padded(lead_, shift) * padded(other_, kBoxShift - shift);
      if (least == 0 || elements < least) {
        least = elements;
        plan_.box_shifts[0] = shift;
        plan_.box_shifts[1] = kBoxShift - shift;
      }
    }
    return 2 * space_.sizes[lead_] * space_.sizes[other_] >= least;
  }

  bool are_half() {
    bool are = true;
    for_each_operand(
        [&](const Operand& operand, PlanOperand&) { are = are && is_half_type(operand.dtype); });
    return are;
  }

  // Whether all operands have quads; says of each how.
  bool finds_quads() {
    bool found = true;
    for_each_operand([&](const Operand& operand, PlanOperand& own) {
      const bool is_written = &operand - operands_ >= kOutput;
      own.quads = quads_of(operand, own);
      found = found && own.quads != QuadKind::kNone && !(is_written && own.quads == QuadKind::kOne);
    });
    return found;
  }
  QuadKind quads_of(const Operand& operand, const PlanOperand& own) const {
    const Extents& extents = plan_.extents;
    const bool is_half = is_half_type(operand.dtype);
    if ((!is_half && operand.dtype != DType::kFloat32) || is_turned(operand, lead_) ||
        extents.chunk_ndim == 0) {
      return QuadKind::kNone;
    }
    const int64_t row = extents.sizes[0];
    const bool is_one = own.strides[0] == 0;
    // Elements of a row from which on unaligned half types are read by words. A quad in which a row
    // ends is slow: of rows of 64 that is at most one in 16. A choice, not measured.
    constexpr int64_t kLeastRow = 64;
    const bool has_words = is_half && own.is_simple && !is_one && row >= kLeastRow;
    const QuadKind anywhere = has_words ? QuadKind::kWords : QuadKind::kNone;
    // Where rows of a chunk follow each other without gaps, it does not matter where they end.
    const bool has_gaps = !own.is_simple || (extents.chunk_ndim > 1 && own.gaps[1] != 0);
    if (row % kQuad != 0 && has_gaps) {
      return anywhere;
    }
    if (is_one) {
      return QuadKind::kOne;
    }
    const int64_t bytes = kQuad * own.bytes;
    bool is_aligned = reinterpret_cast<uintptr_t>(own.data) % bytes == 0;
    for (int dim = has_gaps ? 1 : extents.chunk_ndim; dim < extents.ndim; ++dim) {
      is_aligned = is_aligned && own.strides[dim] % bytes == 0;
    }
    return is_aligned ? QuadKind::kVector : anywhere;
  }

  // Adds a dimension to the plan: `size` elements of dimension `dim` of the space, `factor` of its
  // strides apart.
  void add(int64_t size, int dim, int64_t factor) {
    for_each_operand([&](const Operand& operand, PlanOperand& own) {
      own.strides[plan_.extents.ndim] = operand.strides[dim] * factor * own.bytes;
    });
    plan_.extents.add(size);
  }

  template <typename Skips>
  void add_others(const Skips& skips) {
    for (int dim = 0; dim < space_.ndim; ++dim) {
      if (!skips(dim)) {
        add(space_.sizes[dim], dim, 1);
      }
    }
  }

  void cut_rows(int64_t chunk_elements) {
    add(space_.sizes[lead_], lead_, 1);
    add_others([&](int dim) { return dim == lead_; });
    plan_.last_elements = choose_chunks(plan_.extents, chunk_elements, [&](const auto& body) {
      for_each_operand([&](const Operand&, PlanOperand& own) { body(own); });
    });
    for_each_operand([&](const Operand&, PlanOperand& own) {
      own.is_simple = true;
      for (int dim = 2; dim < plan_.extents.chunk_ndim; ++dim) {
        own.is_simple = own.is_simple && own.gaps[dim] == 0;
      }
    });
  }

  void cut_boxes() {
    const int64_t sides[2] = {int64_t{1} << plan_.box_shifts[0], int64_t{1} << plan_.box_shifts[1]};
    const int dims[2] = {lead_, other_};
    for (const bool counts : {false, true}) {
      for (int i = 0; i < 2; ++i) {
        const int64_t size = space_.sizes[dims[i]];
        add(counts ? ceil_div(size, sides[i]) : sides[i], dims[i], counts ? sides[i] : 1);
        plan_.box_extents[i] = size;
      }
    }
    add_others([&](int dim) { return dim == lead_ || dim == other_; });
    plan_.extents.chunk_ndim = 2;
    for_each_operand([&](const Operand& operand, PlanOperand& own) {
      own.is_turned = operand.strides[other_] == 1 && is_turned(operand, lead_);
    });
  }

  void count() {
    Extents& extents = plan_.extents;
    extents.set_divisors();
    for (int dim = 0; dim < extents.ndim; ++dim) {
      (dim < extents.chunk_ndim ? plan_.chunk_elements : plan_.chunks) *= extents.sizes[dim];
    }
    plan_.chunks = space_.numel > 0 ? plan_.chunks : 0;
  }

  IterationSpace space_;
  const Operand* const operands_;
  int lead_ = 0;   // the dimension of the space along which rows lie
  int other_ = 0;  // the dimension along which rows of turned operands lie; lead_: there are none
  ElementPlan plan_;
};

}  // namespace lossops::cuda
