// A block of rows and classes, class by class: element (c, j) at first[c * stride + j]. Rows then
// are the lanes of vectors, whatever the number of classes, and nothing is reduced across lanes.
#pragma once

#include "cpu/block.h"

namespace lossops::cpu {

constexpr int kColumns = 8192;  // elements of a block: 32 KiB of fp32

template <typename acc_t>
struct Columns {
  const acc_t* first;
  int64_t stride;
};

// What a walk class by class needs beside its operands.
template <typename acc_t>
struct ColumnBuffers {
  alignas(64) acc_t x[kColumns];
  alignas(64) acc_t p[kColumns];
  alignas(64) acc_t grad[kColumns];
  alignas(64) acc_t staging[kColumns];  // of load_columns() and store_columns()
};

// Where a block lies in an operand.
struct ColumnsAt {
  const BlockOffsets& rows;
  int64_t class_stride;
  int64_t first_class;
  int classes;
  int count;  // rows

  int64_t base() const { return rows.base + first_class * class_stride; }
  // Rows are runs of classes, at one distance from each other.
  bool rows_are_runs() const {
    return class_stride == 1 && classes > 1 && count <= rows.first_length;
  }
  bool rows_are_one_run() const { return rows.stride == classes; }

  BlockOffsets run(int64_t offset, int length) const {
    BlockOffsets result;
    result.base = base() + offset;
    result.stride = 1;
    result.first_length = result.length = length;
    return result;
  }
};

template <bool kInOrderOfFrom, typename T>
LOSSOPS_HOST_DEVICE void transpose_inline(const T* from, int64_t from_stride, int rows, int columns,
                                          T* to, int64_t to_stride) {
  const auto copy = [&](int first_row, int last_row, int first_column, int last_column)
                        LOSSOPS_ALWAYS_INLINE {
                          for (int r = first_row; r < last_row; ++r) {
                            for (int c = first_column; c < last_column; ++c) {
                              to[c * to_stride + r] = from[r * from_stride + c];
                            }
                          }
                        };
#if defined(__GNUC__) && !defined(__clang__)
  using index_t = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  typedef T vector_t __attribute__((vector_size(4 * sizeof(T))));
  typedef index_t mask_t __attribute__((vector_size(4 * sizeof(T))));
  constexpr mask_t kLow = {0, 4, 1, 5};
  constexpr mask_t kHigh = {2, 6, 3, 7};
  constexpr mask_t kFirst = {0, 1, 4, 5};
  constexpr mask_t kSecond = {2, 3, 6, 7};
  const auto turn = [&](int r, int c) LOSSOPS_ALWAYS_INLINE {
    const T* source = from + r * from_stride + c;
    T* target = to + c * to_stride + r;
    vector_t in[4];
    for (int i = 0; i < 4; ++i) {
      std::memcpy(&in[i], source + i * from_stride, sizeof(vector_t));
    }
    const vector_t low01 = __builtin_shuffle(in[0], in[1], kLow);
    const vector_t high01 = __builtin_shuffle(in[0], in[1], kHigh);
    const vector_t low23 = __builtin_shuffle(in[2], in[3], kLow);
    const vector_t high23 = __builtin_shuffle(in[2], in[3], kHigh);
    const vector_t out[4] = {
        __builtin_shuffle(low01, low23, kFirst), __builtin_shuffle(low01, low23, kSecond),
        __builtin_shuffle(high01, high23, kFirst), __builtin_shuffle(high01, high23, kSecond)};
    for (int i = 0; i < 4; ++i) {
      std::memcpy(target + i * to_stride, &out[i], sizeof(vector_t));
    }
  };
  const int even_rows = rows / 4 * 4;
  const int even_columns = columns / 4 * 4;
  if (kInOrderOfFrom) {
    for (int r = 0; r < even_rows; r += 4) {
      for (int c = 0; c < even_columns; c += 4) {
        turn(r, c);
      }
      copy(r, r + 4, even_columns, columns);
    }
    copy(even_rows, rows, 0, columns);
  } else {
    for (int c = 0; c < even_columns; c += 4) {
      for (int r = 0; r < even_rows; r += 4) {
        turn(r, c);
      }
      copy(even_rows, rows, c, c + 4);
    }
    copy(0, rows, even_columns, columns);
  }
#else
  copy(0, rows, 0, columns);
#endif
}

// to[c * to_stride + r] = from[r * from_stride + c], in squares of four; memory outside of the
// caches is walked in its own order, from or to. One copy serves all callers, and what is passed is
// copied to parameters: squares are stored as bytes, behind which the compiler would read it again.
template <bool kInOrderOfFrom, typename T>
__attribute__((noinline)) void transpose(const T* from, int64_t from_stride, int rows, int columns,
                                         T* to, int64_t to_stride) {
  with_widest_vectors<T>([&]() LOSSOPS_ALWAYS_INLINE {
    transpose_inline<kInOrderOfFrom>(from, from_stride, rows, columns, to, to_stride);
  });
}

// Asks for what the block behind this one will read of class c: its rows are a short run of memory
// per class, too short for the processor to foresee.
LOSSOPS_HOST_DEVICE void prefetch_next_rows(const Operand& operand, const ColumnsAt& at, int c) {
#if defined(__GNUC__)
  if (at.rows.stride == 1 && at.count <= at.rows.first_length) {
    constexpr int64_t kLine = 64;  // bytes
    const int64_t size = element_size(operand.dtype);
    const auto run = reinterpret_cast<uintptr_t>(operand.data) +
                     (at.base() + c * at.class_stride + at.count) * size;
    for (int64_t i = 0; i < at.count * size; i += kLine) {
      // Into the L2 cache: classes at a power of two from each other share few lines of an L1.
      __builtin_prefetch(reinterpret_cast<const void*>(run + i), 0, 2);
    }
  }
#endif
}

// Reads a block, its rows padded with zeros: in place where memory holds just that, else into
// buffer, by way of staging. Not inlined, as store_columns(): their copies were 26 KB of the wheel.
template <typename acc_t>
__attribute__((noinline)) Columns<acc_t> load_columns(const Operand& operand, const ColumnsAt& at,
                                                      acc_t* buffer, acc_t* staging) {
  const int width = padded(at.count);
  const bool same_type = operand.dtype == dtype_of<acc_t>::value;
  if (same_type && at.rows.stride == 1 && width == at.count && at.count <= at.rows.first_length) {
    for (int c = 0; c < at.classes; ++c) {
      prefetch_next_rows(operand, at, c);
    }
    return {static_cast<const acc_t*>(operand.data) + at.base(), at.class_stride};
  }
  if (at.rows_are_runs()) {
    const acc_t* from = static_cast<const acc_t*>(operand.data) + at.base();
    int64_t from_stride = at.rows.stride;
    // A straight copy first: memory outside of the caches is slow in squares.
    if (!same_type || at.rows_are_one_run()) {
      from = staging;
      from_stride = at.classes;
      if (at.rows_are_one_run()) {
        load_block(operand, at.run(0, at.count * at.classes), at.count * at.classes, staging);
      } else {
        acc_t row[kBlock];
        for (int j = 0; j < at.count; ++j) {
          load_block(operand, at.run(j * at.rows.stride, at.classes), at.classes, row);
          std::copy_n(row, at.classes, staging + j * at.classes);
        }
      }
    }
    transpose<true>(from, from_stride, at.count, at.classes, buffer, width);
    for (int c = 0; c < at.classes; ++c) {
      std::fill(buffer + c * width + at.count, buffer + (c + 1) * width, acc_t(0));
    }
    return {buffer, width};
  }
  for (int c = 0; c < at.classes; ++c) {
    load_block(operand, at.rows.shifted((at.first_class + c) * at.class_stride), at.count,
               buffer + c * width, acc_t(0));
    prefetch_next_rows(operand, at, c);
  }
  return {buffer, width};
}

// Writes a block whose columns are padded(count) apart, by way of staging.
template <typename acc_t>
__attribute__((noinline)) void store_columns(const Operand& operand, const ColumnsAt& at,
                                             const acc_t* values, acc_t* staging) {
  const int width = padded(at.count);
  if (!at.rows_are_runs()) {
    for (int c = 0; c < at.classes; ++c) {
      store_block(operand, at.rows.shifted((at.first_class + c) * at.class_stride), at.count,
                  values + c * width);
    }
    return;
  }
  if (operand.dtype == dtype_of<acc_t>::value) {
    transpose<false>(values, width, at.classes, at.count,
                     static_cast<acc_t*>(operand.data) + at.base(), at.rows.stride);
    return;
  }
  transpose<false>(values, width, at.classes, at.count, staging, at.classes);
  if (at.rows_are_one_run()) {
    store_block(operand, at.run(0, at.count * at.classes), at.count * at.classes, staging);
    return;
  }
  for (int j = 0; j < at.count; ++j) {
    store_block(operand, at.run(j * at.rows.stride, at.classes), at.classes,
                staging + j * at.classes);
  }
}

}  // namespace lossops::cpu
