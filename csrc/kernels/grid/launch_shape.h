// What a launch asks for beside its arguments.
#pragma once

#include <cstdint>

namespace lossops::cuda {

// Blocks of the largest cluster that every device with clusters launches. Kernels must ask for
// more.
constexpr int kPortableCluster = 8;

struct LaunchShape {
  int64_t blocks = 1;
  int threads = 1;
  int64_t shared_bytes = 0;
  int cluster = 1;       // blocks of one
  bool overlap = false;  // the kernel calls wait_for_previous_kernel()
  // Along a second dimension.
  int64_t blocks_y = 1;
  int threads_y = 1;
};

}  // namespace lossops::cuda
