// The op that scales kept gradients, with the arguments of its schema in bindings.cpp.
#pragma once

#include "bindings/tensors.h"

namespace lossops::bindings {

// Multiplies a contiguous tensor by a factor of one element; nothing to do where that is 1.
void scale_kept(Tensor gradient, Tensor factor);

}  // namespace lossops::bindings
