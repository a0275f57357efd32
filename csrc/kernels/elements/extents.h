// Dimensions of plans.
#pragma once

#include <cstdint>

#include "kernels/primitives/integers.h"
#include "launchers.h"

namespace lossops::cuda {

// Dimensions of a plan, at the most.
constexpr int kPlanDims = kMaxDims + 1;

// The dimensions of a plan.
struct Extents {
  int64_t sizes[kPlanDims] = {};
  Divisor divisors[kPlanDims];  // of sizes that fit 31 bits
  int ndim = 0;

  void add(int64_t size) { sizes[ndim++] = size; }
  void set_divisors() {
    for (int dim = 0; dim < ndim; ++dim) {
      if (0 < sizes[dim] && sizes[dim] <= kMaxDividend) {
        divisors[dim] = Divisor(static_cast<uint32_t>(sizes[dim]));
      }
    }
  }

  LOSSOPS_HOST_DEVICE int64_t quotient(int64_t n, int dim) const {
    if (n > kMaxDividend) {
      return n / sizes[dim];
    }
    return sizes[dim] > kMaxDividend ? 0 : divisors[dim].quotient(static_cast<uint32_t>(n));
  }

  // Calls body(dim, index) with the place of number n along each of dimensions [first, ndim).
  template <typename Body>
  LOSSOPS_HOST_DEVICE void for_each_index(int64_t n, int first, const Body& body) const {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int dim = first; dim < ndim; ++dim) {
      const int64_t rest = dim + 1 < ndim ? quotient(n, dim) : 0;
      body(dim, n - rest * sizes[dim]);
      n = rest;
    }
  }

  // How far from its first element an operand has the one whose number along these dimensions is n.
  LOSSOPS_HOST_DEVICE int64_t offset(const int64_t* strides, int64_t n, int first) const {
    int64_t offset = 0;
    for_each_index(n, first, [&](int dim, int64_t index) { offset += index * strides[dim]; });
    return offset;
  }
};

}  // namespace lossops::cuda
