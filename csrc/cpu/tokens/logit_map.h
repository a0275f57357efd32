// The logit map, and its gradient, of blocks of logits.
//
// Only tokens.cpp includes this.
#pragma once

#include <cstdint>

#include "cpu/block.h"
#include "cpu/columns.h"
#include "losses/rows/tokens.h"

namespace lossops::cpu {
namespace {

// z of count logits: in place if the map changes nothing, else in z.
template <typename acc_t>
__attribute__((noinline)) const acc_t* map_block(const LogitMapParams& params, const acc_t* x,
                                                 int count, acc_t* z) {
  if (params.is_identity()) {
    return x;
  }
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    visit_logit_map<acc_t>(params, [&](const auto& map) LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < count; ++i) {
        z[i] = map.map(x[i]);
      }
    });
  });
  return z;
}

// Turns a gradient with respect to z into the one with respect to x.
template <typename acc_t>
__attribute__((noinline)) void unmap_gradient(const LogitMapParams& params, const acc_t* x,
                                              int count, acc_t* grad) {
  if (params.is_identity()) {
    return;
  }
  with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
    visit_logit_map<acc_t>(params, [&](const auto& map) LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < count; ++i) {
        grad[i] *= map.derivative(x[i]);
      }
    });
  });
}

template <typename acc_t>
acc_t map_one(const LogitMapParams& params, acc_t x) {
  visit_logit_map<acc_t>(params, [&](const auto& map) { x = map.map(x); });
  return x;
}

// The logits of a block of rows and classes, mapped, in buffers.p where they are not as in memory.
template <typename acc_t>
Columns<acc_t> map_columns(const LogitMapParams& params, const Columns<acc_t>& x, int classes,
                           int width, ColumnBuffers<acc_t>& buffers) {
  if (params.is_identity()) {
    return x;
  }
  for (int c = 0; c < classes; ++c) {
    map_block(params, x.first + c * x.stride, width, buffers.p + c * width);
  }
  return {buffers.p, width};
}

}  // namespace
}  // namespace lossops::cpu
