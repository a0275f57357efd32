// How rows of logits are cut for the machine of row_pass.cuh, and who takes what. Host code without
// CUDA, and the arithmetic that kernels share with it (csrc/tests/test_row_cut.cpp).
//
// A row consists of vectors of 16 bytes, counted from its first element wherever that lies. A
// misaligned vector is read as two aligned ones. The first vector of a row and the last whole one
// might then reach beyond the row, and so does what is left of a vector behind them. These two or
// three are *outer* vectors, which are read element by element. All others are *inner* vectors.
//
//   row:      | outer | inner | inner | ... | inner | outer | outer, in part |
//   numbers:   inner     0       1            inner-1 inner+1  inner+2
//
// Vectors are numbered with the outer ones last. Some lanes of a warp take a few vectors each at a
// time: a *round*. The rounds of a row are dealt out to its *pieces* in turn, so that warps side by
// side read neighbours. Each piece is reduced to a state. The states of a row are then merged in a
// fixed order.
//
// A row's results depend on how it is cut. So a RowCut follows from the number of classes and the
// size of a logit alone, and a row has the same bits in any batch, at any address, with any
// strides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kernels/primitives/integers.h"
#include "kernels/primitives/sizes.h"
#include "launchers.h"
#include "scalar_types.h"

namespace lossops::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowVectorBytes = 16;
constexpr int kLineVectors = kLineBytes / kRowVectorBytes;
// Vectors of a round that a lane has. Kernels of much arithmetic have one.
constexpr int kRowVectors = 4;
// The fewest lanes that share a piece. With 8, 4 and 2, forward of padded fp16 363840x811 is at
// .54, .62 and .61 of the floor, of bf16 400000x701 at .47, .48 and .51, of fp32 207817x380 at .64,
// .68 and .68. (H200, 2026-11)
constexpr int kLeastLanes = 4;
// The most vectors of a row that are read element by element.
constexpr int kOuterVectors = 3;
// Rounds of a piece at the most, of kRowVectors: 20 KB for a warp, of half types 26. So a row of 2
// MB is 100 pieces or 80, and what a piece costs beside its elements is a small part: its maximum
// rises in three of 10 rounds, and in two of 4. Half types have less arithmetic, and gain where
// fewer pieces or lanes share a row: forward of bf16 200000x3000 is at .796 of the floor with 10
// rounds, at .840 with 13, and of fp32 400000x1501 at .874 and .859. (H200, 2026-11)
constexpr int piece_rounds(int64_t element_bytes) { return element_bytes == 2 ? 13 : 10; }
// The vectors of a row are numbered by 32 bits.
constexpr int64_t kMostVectors = (int64_t{1} << 31) - (int64_t{1} << 20);

// 2^this is the number of elements of a vector. element_bytes: 2, 4 or 8.
constexpr int vector_shift_of(int64_t element_bytes) {
  return element_bytes == 2 ? 3 : element_bytes == 4 ? 2 : 1;
}

// The least power of two that is not below count, at most 32. It depends on count alone, because
// the order of a sum, and with it the sum's bits, may follow from it.
inline int lanes_for(int64_t count) {
  int lanes = 1;
  while (lanes < count && lanes < 32) {
    lanes *= 2;
  }
  return lanes;
}

struct RowCut {
  int64_t num_classes = 0;
  int vectors = 0;  // of a row, the one in part too
  int inner = 0;
  int lanes = 32;  // of a warp that share a piece
  int pieces = 1;

  static RowCut of(int64_t num_classes, int64_t element_bytes) {
    const int shift = vector_shift_of(element_bytes);
    RowCut cut;
    cut.num_classes = num_classes;
    cut.vectors = static_cast<int>(ceil_div(num_classes, int64_t{1} << shift));
    cut.inner = static_cast<int>(std::max<int64_t>((num_classes >> shift) - 2, 0));
    // As few lanes as a piece allows: what a row costs beside its elements is less where several
    // rows share a warp.
    const int lane_vectors = kRowVectors * piece_rounds(element_bytes);
    cut.lanes = kLeastLanes;
    while (cut.lanes < 32 && cut.vectors > cut.lanes * lane_vectors) {
      cut.lanes *= 2;
    }
    const int most = cut.lanes * lane_vectors;
    cut.pieces = std::max(static_cast<int>(ceil_div(cut.vectors, most)), 1);
    return cut;
  }

  // Elements of the vector at a position, as far as the row has them.
  LOSSOPS_HOST_DEVICE int elements(int position, int size) const {
    const int64_t left = num_classes - int64_t{position} * size;
    return left < size ? static_cast<int>(left) : size;
  }

  // Where the vector of a number is in its row.
  LOSSOPS_HOST_DEVICE int position(int number) const {
    return number < inner ? number + 1 : number == inner ? 0 : number;
  }
};

// Rows of which a launch takes as many as 31 bits count. They have one or two dimensions.
struct RowSlice {
  int64_t first_row = 0;
  int64_t sizes[2] = {1, 1};
  int64_t begin[kMaxDims] = {};  // coordinates of the first row

  int64_t rows() const { return sizes[0] * sizes[1]; }

  // An operand, from the slice's first row on.
  Operand operator()(const Operand& operand) const {
    Operand own = operand;
    int64_t offset = 0;
    for (int dim = 0; dim < kMaxDims; ++dim) {
      offset += begin[dim] * operand.strides[dim];
    }
    if (own.data != nullptr) {
      own.data = static_cast<char*>(own.data) + offset * element_size(own.dtype);
    }
    return own;
  }
};

// Calls body with slices of at most so many rows, which have every row once.
template <typename Body>
void for_each_slice(const IterationSpace& rows, int64_t most_rows, const Body& body) {
  if (rows.numel == 0) {
    return;
  }
  RowSlice slice;
  const int64_t size0 = rows.ndim > 0 ? rows.sizes[0] : 1;
  const int64_t size1 = rows.ndim > 1 ? rows.sizes[1] : 1;
  const int64_t most0 = std::min(size0, most_rows);
  const int64_t most1 =
      most0 == size0 ? std::min(size1, std::max<int64_t>(most_rows / size0, 1)) : 1;
  for (int64_t first = 0; first < rows.numel; first += size0 * size1) {
    int64_t outer = first / (size0 * size1);
    for (int dim = 2; dim < rows.ndim; ++dim) {
      slice.begin[dim] = outer % rows.sizes[dim];
      outer /= rows.sizes[dim];
    }
    for (slice.begin[1] = 0; slice.begin[1] < size1; slice.begin[1] += most1) {
      for (slice.begin[0] = 0; slice.begin[0] < size0; slice.begin[0] += most0) {
        slice.first_row = first + slice.begin[1] * size0 + slice.begin[0];
        slice.sizes[0] = std::min(most0, size0 - slice.begin[0]);
        slice.sizes[1] = std::min(most1, size1 - slice.begin[1]);
        body(slice);
      }
    }
  }
}

// Which row of a slice, and which of its shares, a group of lanes has.
struct RowGrid {
  int64_t first_row = 0;
  uint32_t groups = 0;
  Divisor shares;  // groups of a row
  Divisor size0;   // of the slice

  struct Place {
    int64_t row;  // of all
    int share;    // of the row
    uint32_t i0;  // coordinates in the slice
    uint32_t i1;

    LOSSOPS_HOST_DEVICE int64_t offset(const Operand& operand) const {
      return i0 * operand.strides[0] + i1 * operand.strides[1];
    }
  };

  RowGrid() = default;
  RowGrid(const RowSlice& slice, int shares_)
      : first_row(slice.first_row),
        groups(static_cast<uint32_t>(slice.rows() * shares_)),
        shares(static_cast<uint32_t>(shares_)),
        size0(static_cast<uint32_t>(slice.sizes[0])) {}

  // lanes: of a group.
  int64_t blocks(int lanes) const { return ceil_div(groups, kRowThreads / lanes); }

  // Numbers from `groups` on have the place of the last.
  LOSSOPS_HOST_DEVICE Place place(uint32_t group) const {
    const uint32_t own = group < groups ? group : groups - 1;
    const uint32_t row = shares.quotient(own);
    const uint32_t i1 = size0.quotient(row);
    return {first_row + row, static_cast<int>(own - row * shares.value), row - i1 * size0.value,
            i1};
  }
};

// How the gradients of a row are cut into parts, a warp each. A gradient depends on its own logit
// and on what is known of the row, so any cut will do: here vectors are aligned in the gradient,
// and all parts but the first begin at one of its lines.
struct RowParts {
  int64_t num_classes = 0;
  int vector_shift = 0;
  int vectors = 0;  // of a part; the first has fewer where the next begins at a line, the last has
                    // what is left
  int parts = 1;    // of a row

  // part_vectors: as few as pay for what a part costs beside its vectors, so that what the device
  // reads and writes at a time lies together. With 2048, 1024, 512 and 128, the step of tokens of
  // bf16 8192x151936 is at .578, .582, .591 and .624 of the floor. (H200, 2026-11)
  static RowParts of(int64_t num_classes, int64_t element_bytes, int part_vectors) {
    RowParts plan;
    plan.num_classes = num_classes;
    plan.vector_shift = vector_shift_of(element_bytes);
    plan.vectors = part_vectors;
    // A rest of about a third of a part or less goes to the last part.
    const int64_t counted = (num_classes >> plan.vector_shift) - part_vectors / 3;
    plan.parts = std::max(static_cast<int>(ceil_div(counted, part_vectors)), 1);
    return plan;
  }
};

// A part: its inner vectors, and its singles, which are written one by one.
struct RowPart {
  int64_t first_class = 0;  // of inner vector 0
  int size = 1;             // elements of a vector
  int inner = 0;            // inner vectors of the row
  int begin = 0;            // those of the part
  int end = 0;
  int64_t singles = 0;  // of the part
  int64_t lead = 0;     // so many of them are the row's first classes
  int64_t behind = 0;   // from the number of another single to its class

  // are_neighbours: the classes, in logits and gradients; else all are singles. address: of the
  // row's first gradient, or the lower half of it.
  static LOSSOPS_HOST_DEVICE RowPart of(const RowParts& plan, int number, bool are_neighbours,
                                        uint32_t address) {
    RowPart part;
    part.size = 1 << plan.vector_shift;
    const int64_t first = int64_t{number} * plan.vectors;
    const bool is_last = number + 1 == plan.parts;
    if (!are_neighbours) {
      part.behind = first * part.size;
      part.singles = is_last ? plan.num_classes - part.behind : int64_t{plan.vectors} * part.size;
      return part;
    }
    // Bytes and elements before the first aligned vector, which inner vector 0 follows.
    const uint32_t bytes = (0u - address) % kRowVectorBytes;
    const int head = static_cast<int>(bytes * static_cast<uint32_t>(part.size) / kRowVectorBytes);
    // Vectors from the beginning of a line to inner vector 0.
    const auto line_offset =
        static_cast<int>((address + bytes) / kRowVectorBytes + 1) % kLineVectors;
    const int64_t inner = ((plan.num_classes - head) >> plan.vector_shift) - 2;
    part.first_class = head + part.size;
    part.inner = inner > 0 ? static_cast<int>(inner) : 0;
    const int64_t begin = first > line_offset ? first - line_offset : 0;
    const int64_t end = is_last ? part.inner : first + plan.vectors - line_offset;
    part.begin = static_cast<int>(begin < part.inner ? begin : part.inner);
    part.end = static_cast<int>(end < part.inner ? end : part.inner);
    part.lead = part.first_class;
    part.behind = int64_t{part.inner} * part.size;
    part.singles = number == 0 ? plan.num_classes - part.behind : 0;
    return part;
  }

  LOSSOPS_HOST_DEVICE int64_t class_of_single(int64_t i) const { return i < lead ? i : behind + i; }

  LOSSOPS_HOST_DEVICE bool has(int64_t c) const {
    const int64_t in_vectors = c - first_class - int64_t{begin} * size;
    const bool is_in_vectors = 0 <= in_vectors && in_vectors < int64_t{end - begin} * size;
    const bool is_single = c < lead ? c < singles : behind <= c - lead && c - behind < singles;
    return is_in_vectors || is_single;
  }
};

// How short rows are dealt out: a block copies rows to shared memory, and gives each some lanes of
// a warp, which take its elements in turn. The lanes of a row, and what each takes, follow from the
// number of classes and the size of a logit alone, like a RowCut, for the same bits in any batch
// and layout. How rows are copied also follows from how they lie.
struct ShortRows {
  // A row has a lane for each so many bytes. What a row costs beside its elements is multiplied by
  // its lanes.
  static constexpr int kLaneBytes = 128;
  static constexpr int kBlockBytes = kRowThreads * kLaneBytes;
  // The rows of a block, the gap behind each, and a vector more for a run that begins within one.
  static constexpr int kSharedBytes = kBlockBytes + kRowThreads * kRowVectorBytes + kRowVectorBytes;
  // The most rows that a thread takes one after the other, where a row has one lane. So the fixed
  // cost of a block is a small part: forward of tokens of bf16 41943040x4 .23 to .25 of the floor,
  // of fp16 100000000x2 .11 to .14. (H200, 2026-11)
  static constexpr int kMostTurns = 8;
  static constexpr int kVectorWords = kRowVectorBytes / 4;

  // How the rows lie in global memory.
  struct Layout {
    int64_t row_stride = 0;    // elements from a row to the next of a run; 0: rows are no run
    bool are_aligned = false;  // each begins at a vector
    bool are_apart = false;    // classes are not neighbours
  };

  Divisor classes;
  Divisor vectors;  // of 16 bytes in a row, the last of which may be partial
  int num_classes = 0;
  int run_stride = 0;       // elements from a row to the next of a run; 0: each row is copied alone
  int pitch = 0;            // elements from a row to the next in shared memory
  int gap_vectors = 0;      // between rows in shared memory
  int lanes = 1;            // of a row
  int turn_rows = 0;        // rows that the threads of a block have at a time
  int rows = 0;             // of a block
  bool in_vectors = false;  // rows are whole vectors
  bool is_aligned = false;  // rows are whole vectors, and begin at one in shared memory
  bool has_phases = false;  // rows begin within a vector in shared memory as in global memory

  // A short row has at most 4 KB: kLaneBytes for each lane of a warp.
  static bool are_short(int64_t num_classes, int64_t element_bytes) {
    return 0 < num_classes && num_classes * element_bytes <= 32 * kLaneBytes;
  }

  ShortRows() = default;
  ShortRows(int64_t num_classes_, int64_t element_bytes, const Layout& layout,
            int most_turns = kMostTurns)
      : classes(static_cast<uint32_t>(num_classes_)), num_classes(static_cast<int>(num_classes_)) {
    const int64_t bytes = num_classes_ * element_bytes;
    while (lanes * kLaneBytes < bytes) {
      lanes *= 2;
    }
    turn_rows = kRowThreads / lanes;
    const auto count = static_cast<int>(ceil_div(bytes, int64_t{kRowVectorBytes}));
    vectors = Divisor(static_cast<uint32_t>(count));
    in_vectors = bytes % kRowVectorBytes == 0;
    is_aligned = in_vectors && (layout.are_aligned || layout.are_apart);
    const bool is_dense = is_aligned && layout.row_stride == num_classes;
    if (is_dense || (!is_aligned && fits_as_run(layout.row_stride * element_bytes))) {
      run_stride = static_cast<int>(layout.row_stride);
    }
    if (run_stride > 0 && !is_dense) {
      pitch = run_stride;
    } else {
      has_phases = !layout.are_aligned && !layout.are_apart;
      const int all = count + (has_phases ? 1 : 0);
      gap_vectors = gap_of(all);
      pitch = static_cast<int>((all + gap_vectors) * kRowVectorBytes / element_bytes);
    }
    rows = turn_rows;
    if (lanes == 1) {
      rows *= static_cast<int>(
          std::clamp<int64_t>(kLaneBytes / (pitch * element_bytes), 1, most_turns));
    }
  }

  // Where a vector of the block's rows lies in shared memory.
  LOSSOPS_HOST_DEVICE int shared_vector(int vector) const {
    return gap_vectors == 0
               ? vector
               : vector + gap_vectors *
                              static_cast<int>(vectors.quotient(static_cast<uint32_t>(vector)));
  }

  int64_t blocks(int64_t of_rows) const { return ceil_div(of_rows, rows); }

 private:
  // Vectors to add to a row of so many, for lanes that read from different banks. Eight lanes read
  // whole vectors at a time: the distance of rows is an odd multiple of their lanes, in vectors.
  // All lanes of a warp read words at a time: it is an odd multiple of their lanes, in words, where
  // that is a vector or more.
  int gap_of(int count) const {
    if (lanes == 32 || (in_vectors && lanes >= 8)) {
      return 0;
    }
    const int unit = in_vectors ? lanes : std::max(lanes / kVectorWords, 1);
    return (3 * unit - count % (2 * unit)) % (2 * unit);
  }
  // Whether rows so many bytes apart may lie in shared memory as they do in global memory: there is
  // room, and fewer than four rows of a warp begin in the same bank.
  bool fits_as_run(int64_t stride_bytes) const {
    const int64_t banks =  // of starts
        stride_bytes % 4 != 0 ? 32 : 32 / std::gcd(stride_bytes / 4, int64_t{32});
    return 0 < stride_bytes && turn_rows * stride_bytes + kRowVectorBytes <= kSharedBytes &&
           4 * banks > 32 / lanes;
  }
};

// Whether the rows of a slice follow one another in memory: they are a *run* of elements.
inline bool is_run(const RowSlice& slice, const Operand& operand, int64_t class_stride,
                   int64_t num_classes) {
  bool follow = class_stride == 1 || num_classes == 1;
  int64_t stride = num_classes;
  for (int dim = 0; dim < 2; ++dim) {
    follow = follow && (slice.sizes[dim] == 1 || operand.strides[dim] == stride);
    stride *= slice.sizes[dim];
  }
  return follow;
}

// Whether each row of a slice begins at a vector.
inline bool begin_at_vectors(const RowSlice& slice, const Operand& operand) {
  bool do_all = reinterpret_cast<uintptr_t>(operand.data) % kRowVectorBytes == 0;
  for (int dim = 0; dim < 2; ++dim) {
    do_all = do_all && (slice.sizes[dim] == 1 ||
                        operand.strides[dim] * element_size(operand.dtype) % kRowVectorBytes == 0);
  }
  return do_all;
}

}  // namespace lossops::cuda
