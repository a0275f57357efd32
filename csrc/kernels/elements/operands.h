// The operands of an elementwise loss as its kernels number them, and what a launch does with them.
#pragma once

#include "launchers.h"

namespace lossops::cuda {

// Threads of a block, at most.
constexpr int kTileShift = 8;
constexpr int kTileThreads = 1 << kTileShift;

enum Which : int {
  kInput,
  kTarget,
  kWeight,
  kGradOutput,
  kOutput,
  kGradInput,
  kGradTarget,
  kGradWeight,
  kNumOperands
};

// Calls body(operand, own) with each operand that is there, and what a plan has of it.
template <typename Own, typename Body>
void for_each_operand(const Operand* operands, Own* owns, const Body& body) {
  for (int which = 0; which < kNumOperands; ++which) {
    if (operands[which].data != nullptr) {
      body(operands[which], owns[which]);
    }
  }
}

// What a launch does beside reading input and target; bits of a mask.
enum : unsigned {
  kSumsLosses = 1,      // adds the losses up
  kStoresLosses = 2,    // writes each loss to kOutput
  kHasWeights = 4,      // reads kWeight
  kHasGradOutputs = 8,  // reads kGradOutput, one number an element
  kWantsGradInput = 16,
  kWantsGradTarget = 32,
  kWantsGradWeight = 64,
  kIsBackward = 128,    // waits for the kernel ahead; may find its gradient computed
  kIgnoresInput = 256,  // does not read kInput, which no gradient takes
};

// Known when the kernel is compiled.
template <unsigned kBits_>
struct FixedWork {
  static constexpr unsigned kBits = kBits_;
  LOSSOPS_HOST_DEVICE static constexpr FixedWork all() { return {}; }
  LOSSOPS_HOST_DEVICE constexpr bool has(unsigned bit) const { return (kBits & bit) != 0; }
};

// Known at launch; only of kPossible, so that the kernel has code for no more.
template <unsigned kPossible>
struct AnyWork {
  static constexpr unsigned kBits = kPossible;
  unsigned bits;
  // Does all that is possible.
  LOSSOPS_HOST_DEVICE static constexpr AnyWork all() { return {kPossible}; }
  LOSSOPS_HOST_DEVICE constexpr bool has(unsigned bit) const {
    return (kPossible & bit) != 0 && (bits & bit) != 0;
  }
};

// The numbers of a launch that all elements share.
struct ElementScales {
  Reduction reduction = Reduction::kMean;
  // Gradients hold those for a grad_output of 1: nothing to do where it is 1.
  bool kept = false;
  // Backward of a reduction: one number; null: 1.
  const void* grad_output = nullptr;
  DType grad_output_dtype = DType::kFloat32;
  double denominator = 1;
  double weight_copies = 1;
  const double* mean_terms = nullptr;  // (2,): denominator, mean; backward of a weighted mean

  ElementScales() = default;
  explicit ElementScales(const ElementwiseArgs& args)
      : reduction(args.reduction),
        denominator(args.denominator),
        weight_copies(args.weight_copies) {}
  explicit ElementScales(const ElementwiseBackwardArgs& args)
      : ElementScales(static_cast<const ElementwiseArgs&>(args)) {
    kept = args.kept;
    grad_output = args.grad_output.data;
    grad_output_dtype = args.grad_output.dtype;
    mean_terms = args.mean_terms;
  }
};

}  // namespace lossops::cuda
