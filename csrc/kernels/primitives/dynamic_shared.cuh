// The shared memory of a block whose size a launch says (LaunchShape::shared_bytes).
#pragma once

// Declares `name`, an array of T. The emulation of CUDA (csrc/tests/emulation) has another.
#define LOSSOPS_DYNAMIC_SHARED(T, name) extern __shared__ T name[]
