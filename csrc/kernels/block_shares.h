// Which items of a grid, rows or tiles, each block has.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/integers.h"
#include "losses/math.h"

namespace lossops::cuda {

// Blocks start in order. Those in front have `large` items each, which share what a block does
// once; those that start last have `small`, so that all multiprocessors end at about the same time.
struct BlockShares {
  int64_t large_blocks = 0;
  int large = 1;
  int small = 1;

  // late: how many items the last blocks have together; they are rounded so that the blocks in
  // front are whole.
  static BlockShares of(int64_t count, int large, int small, int64_t late) {
    return {std::max<int64_t>(0, count - late) / large, large, small};
  }
  int64_t blocks(int64_t count) const {
    return large_blocks + ceil_div(count - large_blocks * large, int64_t{small});
  }
  LOSSOPS_HOST_DEVICE int64_t first(int64_t block) const {
    const int64_t late = block - large_blocks;
    return late < 0 ? block * large : large_blocks * large + late * small;
  }
  // The last one may have fewer.
  LOSSOPS_HOST_DEVICE int size(int64_t block) const { return block < large_blocks ? large : small; }
};

}  // namespace lossops::cuda
