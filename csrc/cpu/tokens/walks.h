// How rows of tokens are cut and walked through.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cpu/columns.h"
#include "cpu/rows.h"
#include "launchers.h"
#include "strided.h"

namespace lossops::cpu {
namespace {

// The most classes of a row that is one of the lanes of vectors.
constexpr int64_t kShortRow = 256;
// Classes of a piece. A piece is the least that a thread takes of a long row.
constexpr int64_t kPiece = 32768;
// Rows that are read together where the classes of a row lie far apart, but rows are neighbours.
constexpr int kTileRows = kVector;

bool is_short(const TokenArgs& args) { return args.num_classes <= kShortRow; }
bool is_far(const TokenArgs& args) { return std::abs(args.input_class_stride) > kNear; }
int64_t num_pieces(const TokenArgs& args) {
  return std::max<int64_t>(divide_up(args.num_classes, kPiece), 1);
}

// Rows of a block of all classes, or of as many as fit, one class after the other.
int column_rows(const TokenArgs& args) {
  const int64_t fitting = kColumns / std::max<int64_t>(args.num_classes, 1) / kVector * kVector;
  return static_cast<int>(std::clamp<int64_t>(fitting, kVector, kBlock));
}

// Whether a row counts, by row_mask.
bool counts(const TokenArgs& args, int64_t mask_offset) {
  return args.row_mask.data == nullptr || load_operand<double>(args.row_mask, mask_offset) != 0;
}

}  // namespace
}  // namespace lossops::cpu
