// How long rows are cut, and what is kept of each piece. Host code and kernels.
#pragma once

#include <cstdint>

namespace lossops::cuda {

// What is added up beside the exponentials of a row's logits.
enum class RowKind : int8_t {
  kIndex,        // nothing
  kSmooth,       // label smoothing, no class weights: the logits' distances from the maximum
  kProbability,  // probability targets, no class weights: coefficients, and their distances
};

// Of the state of a piece, or of a row.
template <RowKind kKind>
constexpr int kStateWords = kKind == RowKind::kProbability ? 5
                            : kKind == RowKind::kSmooth    ? 4
                                                           : 3;

constexpr int kMaxStateWords = kStateWords<RowKind::kProbability>;

// How a row is cut: the same with a gradient and without one, for the same bits.
struct Pieces {
  int count = 0;
  int size = 0;  // elements, a multiple of those of a granule
};

}  // namespace lossops::cuda
