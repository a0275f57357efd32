// Which elements the tiles of a plan have. Arithmetic of kernels, and of their test on the host
// (csrc/tests/test_element_plan.cpp).
#pragma once

#include <cstdint>

#include "kernels/elements/plan.h"

namespace lossops::cuda {

// Where a tile lies: its rows have the numbers from first_row on, along dimensions from first_dim
// on.
struct TileRows {
  int64_t first_row;
  int32_t first_dim;
  int32_t rows;
  int64_t skipped;  // columns of the row before the tile
};

// A tile of consecutive units.
struct UnitsTile {
  int32_t first;  // the number of the first, counted from the start of its row
  int32_t units;
  int32_t last;  // the column where the last group of a row begins

  static LOSSOPS_HOST_DEVICE UnitsTile of(const ElementPlan& plan, int64_t tile, TileRows& rows) {
    const int64_t begin = plan.cuts_rows ? tile : tile * plan.tile_units;
    rows.first_row = plan.extents.quotient(begin, 0);
    rows.first_dim = 1;
    const int64_t rest = begin - rows.first_row * plan.extents.sizes[0];
    // Where rows are cut, columns count from where the tile begins, not from the start of the row.
    const int64_t skipped = plan.cuts_rows ? rest * plan.tile_units : 0;
    rows.skipped = skipped * plan.width;
    const int64_t left = plan.cuts_rows ? plan.row_units - skipped : plan.units - begin;
    const int64_t last = plan.columns - (skipped + plan.spread) * plan.width;
    UnitsTile own;
    own.first = plan.cuts_rows ? 0 : static_cast<int32_t>(rest);
    own.units = static_cast<int32_t>(left < plan.tile_units ? left : plan.tile_units);
    own.last = static_cast<int32_t>(last < kMaxDividend ? last : kMaxDividend);
    const auto end = static_cast<uint32_t>(own.first + own.units - 1);
    rows.rows = static_cast<int32_t>(plan.row_divisor.quotient(end)) + 1;
    return own;
  }
};

// A unit of a tile.
struct Unit {
  int32_t row;      // of the tile
  int32_t column;   // its first
  int32_t lacking;  // columns from there on that do not count, because another group has them

  // number: of the unit in the tile. After the last one, that one is taken again, and does not
  // count.
  static LOSSOPS_HOST_DEVICE Unit of(const ElementPlan& plan, const UnitsTile& tile, int number,
                                     int width) {
    const Divisor& divisor = plan.row_divisor;
    const int last = tile.units - 1;
    const auto taken = static_cast<uint32_t>(tile.first + (number < last ? number : last));
    const uint32_t row = divisor.quotient(taken);
    const auto of_row = static_cast<int>(taken - row * divisor.value);
    const int of_group = of_row & (plan.spread - 1);
    const int group = (of_row - of_group) * width;
    Unit unit;
    unit.row = static_cast<int32_t>(row);
    unit.column = (width > 1 && group > tile.last ? tile.last : group) + of_group;
    unit.lacking = number > last ? width * plan.spread : group - unit.column;
    return unit;
  }

  // Whether column i of the unit counts.
  LOSSOPS_HOST_DEVICE bool has(const ElementPlan& plan, int i) const {
    return i * plan.spread >= lacking;
  }
};

// A tile of boxes that follow each other along their rows.
struct BoxesTile {
  int32_t first[2];  // the first unit of columns, and of rows
  int32_t boxes;

  static LOSSOPS_HOST_DEVICE BoxesTile of(const ElementPlan& plan, int64_t tile, TileRows& rows) {
    const Extents& extents = plan.extents;
    const int64_t rest = extents.quotient(tile, 0);
    rows.first_row = extents.quotient(rest, 1);
    rows.first_dim = 2;
    rows.rows = 1;
    rows.skipped = 0;
    const int shift = plan.box_shifts[1];
    BoxesTile own;
    const auto first = static_cast<int32_t>(tile - rest * extents.sizes[0]);
    const auto second = static_cast<int32_t>(rest - rows.first_row * extents.sizes[1]);
    own.first[0] = first << plan.box_shifts[0];
    own.first[1] = second * (kBoxesOfTile << shift);
    const int left = ((plan.matrix_units[1] - own.first[1] - 1) >> shift) + 1;
    own.boxes = left < kBoxesOfTile ? left : kBoxesOfTile;
    return own;
  }

  // The first unit of rows of a box.
  LOSSOPS_HOST_DEVICE int first_row(const ElementPlan& plan, int box) const {
    return first[1] + (box << plan.box_shifts[1]);
  }
};

// Where a column (side 0) or a row (side 1) of a box lies in the matrix. number: the same as if the
// last unit did not begin earlier. It counts if the result is not before that unit: at least
// number / kQuad * kQuad.
LOSSOPS_HOST_DEVICE int place_in_matrix(const ElementPlan& plan, int side, int number) {
  const int begin = number / kQuad * kQuad;
  const int last = plan.matrix_last[side];
  return number - (begin < last ? 0 : begin - last);
}

}  // namespace lossops::cuda
