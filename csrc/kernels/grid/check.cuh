// Launch checks.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace lossops::cuda {

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("lossops: launch of ") + kernel +
                             " failed: " + cudaGetErrorString(error));
  }
}

}  // namespace lossops::cuda
