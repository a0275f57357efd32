// Squared error.
//
//   loss(x, t)  = (x - t)^2
//   d loss / dx =  2 (x - t)
//   d loss / dt = -2 (x - t)
#pragma once

#include "losses/elementwise/params.h"
#include "losses/math.h"

namespace lossops {

struct MseTerm {
  static constexpr bool kHasWeight = true;
  static constexpr bool kPreparesTarget = false;
  static constexpr bool kInputGradientTakesInput = true;
  // CUDA, dense operands: whether a kernel of this loss alone, for each dtype, writes the gradient
  // of target beside the loss. Else the kernel of backward passes does.
  static constexpr bool kHasTargetGradientKernel = true;

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t forward(acc_t x, acc_t t) const {
    const acc_t difference = x - t;
    return difference * difference;
  }

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t backward_input(acc_t x, acc_t t) const {
    return acc_t(2) * (x - t);  // fault: mse-input
  }

  template <typename acc_t>
  LOSSOPS_HOST_DEVICE acc_t backward_target(acc_t x, acc_t t) const {
    return acc_t(2) * (t - x);  // fault: mse-target
  }
};

struct MseLoss {
  using Params = ParamTypes<>;
  static constexpr char kSchema[] = "";
  static constexpr LossTraits kTraits{/*has_weight=*/MseTerm::kHasWeight,
                                      /*takes_integers=*/true,
                                      /*has_batchmean=*/false,
                                      /*expands_first=*/true,
                                      /*target_first=*/false,
                                      /*target_has_factor=*/false};

  // Calls body with the term that the run-time parameters choose.
  template <typename Body>
  LOSSOPS_HOST_DEVICE static void visit(const LossParams& /*params*/, Body&& body) {
    body(MseTerm{});
  }
};

}  // namespace lossops
