// What an elementwise loss says of itself beside its formula.
#pragma once

namespace lossops {

// In the order of the loss's schema.
struct LossParams {
  double values[4] = {0, 0, 0, 0};
};

// What torch.nn.functional's counterpart takes and how it promotes.
struct LossTraits {
  bool has_weight;      // a weight argument of input's shape
  bool takes_integers;  // one of input and target may be integral or bool
  bool has_batchmean;   // the reduction of that name
  bool expands_first;   // a 0-d operand promotes as if it were expanded already
  bool target_first;    // the result takes the layout of target, not of input, where they differ
  // A factor of the derivative with respect to target is computed at target's own size: over no
  // elements the sum is 0 times that factor, which may be NaN.
  bool target_has_factor;
};

// Their C++ types: bool, int64_t or double.
template <typename... Types>
struct ParamTypes {};

}  // namespace lossops
