// Parallel loops whose results do not depend on the number of threads: work is cut into
// chunks by the problem's size alone, each chunk leaves one partial, and the partials
// are folded in order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launchers.h"

namespace lossops::cpu {

// Elements a thread should have before a second one pays; torch's grain size.
constexpr int64_t kChunk = 32768;

// Tasks that a reduction of few outputs is split into: enough for any machine's threads.
constexpr int64_t kMaxTasks = 256;

inline int64_t divide_up(int64_t numerator, int64_t denominator) {
  return (numerator + denominator - 1) / denominator;
}

inline int64_t num_chunks(const IterationSpace& space) { return divide_up(space.numel, kChunk); }

// body(task) for each task in [0, count).
template <typename Body>
void parallel_for_each(const Context& context, int64_t count, const Body& body) {
  if (count == 1) {
    return body(int64_t{0});
  }
  if (count > 0) {
    context.parallel_for(
        count, /*grain=*/1,
        [](void* data, int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            (*static_cast<const Body*>(data))(task);
          }
        },
        const_cast<Body*>(&body));
  }
}

// Sum of partials[0], partials[stride], ..., partials[(count - 1) * stride].
inline double fold_partials(const double* partials, int64_t count, int64_t stride) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += partials[i * stride];
  }
  return sum;
}

}  // namespace lossops::cpu
