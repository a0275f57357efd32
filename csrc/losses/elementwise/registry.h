// The elementwise losses, one row each. Ops, launchers and kernels are generated
// from this table, for both backends.
//
// ROW(op name, loss struct)
#pragma once

#include "losses/elementwise/kl_div.h"
#include "losses/elementwise/mse.h"

#define LOSSOPS_ELEMENTWISE_LOSSES(ROW) \
  ROW(mse_loss, MseLoss)                \
  ROW(kl_div, KlDivLoss)

namespace lossops {

enum class ElementwiseLoss {
#define LOSSOPS_ROW(name, Loss) name,
  LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
};

// The op's name.
inline const char* name_of(ElementwiseLoss loss) {
  switch (loss) {
#define LOSSOPS_ROW(name, Loss) \
  case ElementwiseLoss::name:   \
    return #name;
    LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  }
  return "";
}

inline LossTraits traits_of(ElementwiseLoss loss) {
  switch (loss) {
#define LOSSOPS_ROW(name, Loss) \
  case ElementwiseLoss::name:   \
    return Loss::kTraits;
    LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  }
  return {};
}

// Calls body with the term of a loss: run-time values become types here.
template <typename Body>
LOSSOPS_HOST_DEVICE void visit_elementwise_loss(ElementwiseLoss loss, const LossParams& params,
                                                Body&& body) {
  switch (loss) {
#define LOSSOPS_ROW(name, Loss) \
  case ElementwiseLoss::name:   \
    return Loss::visit(params, static_cast<Body&&>(body));
    LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  }
}

// Whether the gradient of input depends on input.
inline bool input_gradient_takes_input(ElementwiseLoss loss, const LossParams& params) {
  bool takes = true;
  visit_elementwise_loss(loss, params,
                         [&](auto term) { takes = decltype(term)::kInputGradientTakesInput; });
  return takes;
}

// Calls body with a loss of the table, as a type.
template <typename Body>
void visit_loss_type(ElementwiseLoss loss, Body&& body) {
  switch (loss) {
#define LOSSOPS_ROW(name, Loss) \
  case ElementwiseLoss::name:   \
    return body(Loss{});
    LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  }
}

}  // namespace lossops
