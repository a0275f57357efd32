// In the emulation of CUDA, in the place of kernels/primitives/dynamic_shared.cuh; see
// cuda_runtime.h.
#pragma once

#define LOSSOPS_DYNAMIC_SHARED(T, name) alignas(128) static T name[(64 << 10) / sizeof(T)]
