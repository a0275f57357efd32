// What plans need to know of a device, and how they deal work out to it. Host code without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/primitives/integers.h"

namespace lossops::cuda {

// Shared memory that the driver reserves for each block.
constexpr int kReservedBytes = 1024;

struct DeviceLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;  // of a multiprocessor
  // Bulk copies, clusters, and shared memory for three rows of 64 KB: sm_90 and sm_100. Off where
  // LOSSOPS_DISABLE_HOPPER is set, to run what older devices run.
  bool hopper = false;
  // Kernels that start before the one ahead of them has ended, also in captured graphs.
  bool overlaps = false;

  // Blocks that fit a multiprocessor, whose threads have 64 registers. shared_bytes: of a block.
  int64_t resident_blocks(int threads, int block_shared_bytes) const {
    const int by_threads = 1024 / threads;
    const int by_memory = shared_bytes / (block_shared_bytes + kReservedBytes);
    return std::max(1, std::min({by_threads, by_memory, 32}));
  }
};

// Blocks of a grid-stride loop whose partials one block folds: several waves on any GPU.
constexpr int64_t kMaxLoopBlocks = 8192;
// Blocks of a grid without one.
constexpr int64_t kMaxGrid = 1 << 30;

// One block folds what this many leave, in microseconds.
constexpr int64_t kMaxWorkers = 16384;

// Workers for `items`, each with a fixed share: as many as fit at a time, or fewer where all then
// have the same to do; but more where each still has `fewest`. The device then starts them as
// others end, and the slowest multiprocessor is not the last.
inline int64_t workers_for(int64_t items, int64_t resident, int64_t fewest,
                           int64_t most = kMaxWorkers) {
  return std::max(even_share(items, resident), std::min(items / fewest, most));
}

// Rows that each worker takes one after the other, of `rows` in all: `wanted`, or so many more that
// there are no more than `most_workers`; but never more than `most`.
inline int64_t rows_of_worker(int64_t wanted, int64_t rows, int64_t most,
                              int64_t most_workers = kMaxWorkers) {
  return std::clamp<int64_t>(std::max(wanted, ceil_div(rows, most_workers)), 1, most);
}

}  // namespace lossops::cuda
