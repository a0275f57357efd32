// Integer arithmetic of launchers.
#pragma once

#include <cstdint>

namespace lossops::cuda {

// a / b, rounded up; both positive.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace lossops::cuda
