"""The losses: a description of each, and its registration with torch.

`lossops.functional` calls the losses of this module.
"""

from __future__ import annotations

import torch

from . import (
    autograd,
    by_torch,
    calling,
    double_backward,
    elementwise,
    fakes,
    overwriting,
    transforms,
)
from . import (
    cross_entropy as rows,
)
from .description import Derivative, Loss, Reference


class RegisteredLoss:
    """A loss that torch knows, and the ways to call it."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        # Makes the options of a call, given by name.
        self.options = calling.make_options(loss)
        self.of_reduction = {
            reduction: self.options(reduction=reduction)
            for reduction in ("none", "mean", "sum", "batchmean")
        }
        self.derivatives = autograd.Differentiable(loss)
        self.call = calling.make_call(self.derivatives)
        double_backward.register(loss)
        fakes.register(loss)
        transforms.register(self.derivatives)
        calling.register(loss, self.call, self.options)


def _elementwise(
    name: str, reference: Reference, derivative: Derivative, traits: elementwise.Traits
) -> RegisteredLoss:
    """A row of csrc/losses/elementwise/registry.h."""
    return RegisteredLoss(
        Loss(
            name,
            reference=reference,
            derivative=derivative,
            fake_forward=traits.fake_forward,
            fake_saved=elementwise.fake_saved,
            fake_gradient=torch.empty_like,
            can_keep=elementwise.can_keep,
            restored_terms=elementwise.restored_terms,
        )
    )


MSE_LOSS = _elementwise(
    "mse_loss",
    by_torch.mse_loss,
    by_torch.mse_loss_derivative,
    elementwise.Traits(takes_integers=True),
)
KL_DIV = _elementwise(
    "kl_div",
    by_torch.kl_div,
    by_torch.kl_div_derivative,
    elementwise.Traits(expands_first=False, target_first=True),
)
CROSS_ENTROPY = RegisteredLoss(
    Loss(
        "cross_entropy",
        reference=by_torch.cross_entropy,
        fake_forward=rows.fake_forward,
        fake_saved=rows.fake_saved,
        fake_gradient=rows.fake_gradient,
        can_keep=rows.can_keep,
        restored_terms=rows.restored_terms,
        check_differentiable=rows.check_differentiable,
    )
)
cross_entropy_overwriting = overwriting.make_call(CROSS_ENTROPY.derivatives, CROSS_ENTROPY.call)
