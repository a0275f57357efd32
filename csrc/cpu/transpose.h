// Transposes small matrices of elements, by vectors of 16 bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/simd.h"

namespace lossops::cpu {

// The side of the squares that are transposed, in elements.
template <typename scalar_t>
constexpr int kSquare = 16 / static_cast<int>(sizeof(scalar_t));

namespace detail {

// (a[0], b[0], a[1], b[1], ...), as many as fit.
template <typename Vector, int... lanes>
LOSSOPS_HOST_DEVICE Vector zip_low(Vector a, Vector b, std::integer_sequence<int, lanes...>) {
  constexpr int kSize = sizeof...(lanes);
  return __builtin_shufflevector(a, b, (lanes / 2 + lanes % 2 * kSize)...);
}
// The others.
template <typename Vector, int... lanes>
LOSSOPS_HOST_DEVICE Vector zip_high(Vector a, Vector b, std::integer_sequence<int, lanes...>) {
  constexpr int kSize = sizeof...(lanes);
  return __builtin_shufflevector(a, b, ((lanes + kSize) / 2 + lanes % 2 * kSize)...);
}

// One square. Strides: from a row to the next. Each step moves the rows of the lower half between
// those of the upper half, element by element; after log2(side) of them rows are columns.
template <typename scalar_t>
LOSSOPS_HOST_DEVICE void transpose_square(const scalar_t* from, int64_t from_stride, scalar_t* to,
                                          int64_t to_stride) {
  constexpr int kSide = kSquare<scalar_t>;
  using word_t = std::conditional_t<sizeof(scalar_t) == 2, uint16_t,
                                    std::conditional_t<sizeof(scalar_t) == 4, uint32_t, uint64_t>>;
  typedef word_t Row __attribute__((vector_size(16)));
  constexpr auto kLanes = std::make_integer_sequence<int, kSide>();
  Row rows[kSide];
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(&rows[i], from + i * from_stride, sizeof(Row));
  }
  for (int step = 1; step < kSide; step *= 2) {
    Row zipped[kSide];
    for (int i = 0; i < kSide / 2; ++i) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kSide / 2], kLanes);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kSide / 2], kLanes);
    }
    std::memcpy(rows, zipped, sizeof(rows));
  }
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(to + i * to_stride, &rows[i], sizeof(Row));
  }
}

}  // namespace detail

// to[j][i] = from[i][j]. rows, columns: of `from`. Strides: from a row to the next.
template <typename scalar_t>
LOSSOPS_HOST_DEVICE void transpose(const scalar_t* from, int64_t from_stride, int rows, int columns,
                                   scalar_t* to, int64_t to_stride) {
  constexpr int kSide = kSquare<scalar_t>;
  const int whole_rows = rows / kSide * kSide;
  const int whole_columns = columns / kSide * kSide;
  const auto move = [&](int i, int j) { to[j * to_stride + i] = from[i * from_stride + j]; };
  for (int j = 0; j < whole_columns; j += kSide) {
    for (int i = 0; i < whole_rows; i += kSide) {
      detail::transpose_square(from + i * from_stride + j, from_stride, to + j * to_stride + i,
                               to_stride);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = i < whole_rows ? whole_columns : 0; j < columns; ++j) {
      move(i, j);
    }
  }
}

}  // namespace lossops::cpu
