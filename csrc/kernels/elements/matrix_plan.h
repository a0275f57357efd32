// How elements are dealt out where two dimensions, columns and rows, tell where they lie. Host code
// without CUDA; kernels read the plan by matrix_places.cuh.
//
// Elements are numbered row by row, and neighbouring threads take neighbouring numbers. Where
// element n lies follows from n by one multiplication a dimension:
//
//   n stride_0 + (n / columns) gap, gap = stride_1 - columns stride_0
//
// Numbers are below 2^31 and gaps fit 32 bits, so elements are cut into chunks: of whole rows, or
// each of a part of a row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/extents.h"
#include "kernels/elements/operands.h"
#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// How the quads of an operand lie in memory: four elements with neighbouring numbers each.
enum class QuadKind : int8_t {
  kNone,    // as none of these
  kVector,  // all are aligned vectors
  kOne,     // all are one number
  kWords,   // of 2 bytes an element, anywhere: a quad may have the end of a row in it
};

struct MatrixOperand {
  char* data = nullptr;  // null: absent
  int32_t stride = 0;    // of columns, in bytes
  int32_t gap = 0;       // in bytes
  int64_t chunk_strides[2] = {};
  DType dtype = DType::kFloat32;
  QuadKind quads = QuadKind::kNone;
};

struct MatrixPlan {
  MatrixOperand operands[kNumOperands];
  Divisor columns;  // of a row, or of the part of one that a chunk is
  Extents chunk_extents;
  int64_t chunks = 0;
  int64_t chunk_elements = 1;
  int64_t last_elements = 1;  // of the last chunk of a row, or of all
  int64_t chunk_tiles = 1;    // tiles of a chunk, by cut()
  bool has_quads = false;     // all operands have
  bool is_half = false;       // all operands are of half types

  LOSSOPS_HOST_DEVICE int64_t tiles() const { return chunks * chunk_tiles; }

  // tile_elements: elements of a tile of the kernel that takes the plan.
  void cut(int64_t tile_elements) { chunk_tiles = ceil_div(chunk_elements, tile_elements); }
};

// The distance that `number` gaps make. number: of an element or a row of a chunk, so it has 31
// bits.
LOSSOPS_HOST_DEVICE int64_t times(uint32_t number, int32_t gap) {
  // fault: elementwise-offset
  return static_cast<int64_t>(static_cast<int32_t>(number)) * gap;
}

// Makes a MatrixPlan for operands of at most two dimensions.
class MatrixPlanner {
 public:
  // lead: the dimension of the columns, whose strides have 31 bits in bytes. most_elements: of a
  // chunk.
  MatrixPlanner(const IterationSpace& space, const Operand* operands, int lead,
                int64_t most_elements = int64_t{1} << 30)
      : columns_(space.sizes[lead]),
        rows_(space.ndim > 1 ? space.sizes[1 - lead] : 1),
        operands_(operands) {
    plan_.is_half = true;
    bool fits = columns_ <= most_elements;
    for_each_operand(operands_, plan_.operands, [&](const Operand& operand, MatrixOperand& own) {
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.stride = static_cast<int32_t>(operand.strides[lead] * element_size(operand.dtype));
      const int64_t row_stride =
          rows_ > 1 ? operand.strides[1 - lead] * element_size(operand.dtype) : 0;
      own.chunk_strides[1] = row_stride;
      const int64_t gap = row_stride - columns_ * own.stride;
      own.gap = static_cast<int32_t>(gap);
      fits = fits && (rows_ == 1 || (-kMaxDividend <= gap && gap <= kMaxDividend));
      plan_.is_half = plan_.is_half && is_half_type(operand.dtype);
    });
    fits ? cut_rows(most_elements) : cut_columns(most_elements);
    plan_.chunk_extents.set_divisors();
    plan_.has_quads = true;
    for_each_operand(operands_, plan_.operands, [&](const Operand& operand, MatrixOperand& own) {
      const bool is_written = &operand - operands_ >= kOutput;
      own.quads = quads_of(own);
      plan_.has_quads = plan_.has_quads && own.quads != QuadKind::kNone &&
                        !(is_written && own.quads == QuadKind::kOne);
    });
    plan_.chunks = space.numel > 0 ? plan_.chunks : 0;
  }

  MatrixPlan& plan() { return plan_; }

 private:
  // Chunks of whole rows.
  void cut_rows(int64_t most_elements) {
    const int64_t rows = whole_quads(most_elements / columns_, rows_);
    plan_.columns = Divisor(static_cast<uint32_t>(columns_));
    plan_.chunks = ceil_div(rows_, rows);
    plan_.chunk_elements = rows * columns_;
    plan_.last_elements = (rows_ - (plan_.chunks - 1) * rows) * columns_;
    plan_.chunk_extents.add(plan_.chunks);
    for_each_operand(operands_, plan_.operands,
                     [&](const Operand& /*operand*/, MatrixOperand& own) {
                       own.chunk_strides[0] = rows * own.chunk_strides[1];
                       own.gap = rows > 1 ? own.gap : 0;
                     });
  }

  // Chunks of a part of a row.
  void cut_columns(int64_t most_elements) {
    const int64_t columns = whole_quads(most_elements, columns_);
    const int64_t parts = ceil_div(columns_, columns);
    plan_.columns = Divisor(static_cast<uint32_t>(columns));
    plan_.chunks = parts * rows_;
    plan_.chunk_elements = columns;
    plan_.last_elements = columns_ - (parts - 1) * columns;
    plan_.chunk_extents.add(parts);
    plan_.chunk_extents.add(rows_);
    for_each_operand(operands_, plan_.operands,
                     [&](const Operand& /*operand*/, MatrixOperand& own) {
                       own.chunk_strides[0] = columns * own.stride;
                       own.gap = 0;
                     });
  }

  // At most `most` of `all`: all of them, or a multiple of a quad, so that vectors are aligned in
  // every chunk.
  static int64_t whole_quads(int64_t most, int64_t all) {
    const int64_t some = std::max<int64_t>(most, 1);
    return some >= all ? all : some - (some > kQuad ? some % kQuad : 0);
  }

  QuadKind quads_of(const MatrixOperand& own) const {
    const bool is_half = is_half_type(own.dtype);
    const bool is_one = own.stride == 0;
    if ((!is_half && own.dtype != DType::kFloat32) ||
        (!is_one && own.stride != element_size(own.dtype))) {
      return QuadKind::kNone;
    }
    // Elements of a row from which on unaligned half types are read by words. A quad in which a row
    // ends is slow: of rows of 64 that is at most one in 16. A choice, not measured.
    constexpr uint32_t kLeastRow = 64;
    const uint32_t row = plan_.columns.value;
    const bool has_words = is_half && !is_one && row >= kLeastRow;
    const QuadKind anywhere = has_words ? QuadKind::kWords : QuadKind::kNone;
    // Where rows of a chunk follow each other without gaps, it does not matter where they end.
    if (row % kQuad != 0 && own.gap != 0) {
      return anywhere;
    }
    if (is_one) {
      return QuadKind::kOne;
    }
    const int64_t bytes = int64_t{kQuad} * element_size(own.dtype);
    bool is_aligned = reinterpret_cast<uintptr_t>(own.data) % bytes == 0 &&
                      (own.gap == 0 || own.gap % bytes == 0);
    for (int dim = 0; dim < plan_.chunk_extents.ndim; ++dim) {
      is_aligned = is_aligned &&
                   (plan_.chunk_extents.sizes[dim] == 1 || own.chunk_strides[dim] % bytes == 0);
    }
    return is_aligned ? QuadKind::kVector : anywhere;
  }

  const int64_t columns_;
  const int64_t rows_;
  const Operand* const operands_;
  MatrixPlan plan_;
};

}  // namespace lossops::cuda
