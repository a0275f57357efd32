// Stand-ins for losses/instructions.h in the emulation of CUDA: exact, where a GPU approximates.
#pragma once

#include <cmath>

namespace lossops::math {

// 0 for what is subnormal.
inline float flushed(float x) { return ::fabsf(x) < 0x1p-126f ? ::copysignf(0.0f, x) : x; }
inline float ex2_approx(float x) { return ::exp2f(x); }
inline float ex2_approx_ftz(float x) { return flushed(::exp2f(x)); }
inline float rcp_approx_ftz(float x) { return flushed(1.0f / flushed(x)); }
inline float lg2_approx(float x) { return ::log2f(x); }
inline float lg2_approx_ftz(float x) { return ::log2f(flushed(x)); }

}  // namespace lossops::math
