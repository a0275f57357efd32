"""The head as torch's own linear and cross entropy, which torch differentiates in every mode.

It makes all logits. It serves forward mode, torch.func, second derivatives and is_grads_batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._ops import by_torch
from .._ops.description import widened
from .._ops.losses import CROSS_ENTROPY
from .._privates import functorch_is_active
from .passes import Operands, Options

# Of this module, because a program may put another function in its place.
_linear = F.linear


def loss(operands: Operands, options: Options) -> Tensor:
    """The loss, by operations that torch can differentiate."""
    input, linear_weight, linear_bias, target, weight = operands
    dtype = options.compute_dtype
    classes = linear_weight.shape[:-1]
    matrix = linear_weight.to(dtype).reshape(-1, linear_weight.size(-1))
    bias = None if linear_bias is None else linear_bias.to(dtype).reshape(-1)
    logits = _linear(input.to(dtype), matrix, bias).reshape(-1, *classes)
    if options.row.float32_result:
        logits, target, weight = (
            x if x is None or not x.is_floating_point() else x.to(widened(x.dtype, True))
            for x in (logits, target, weight)
        )
    formula = CROSS_ENTROPY.loss.ops.formula(options.row)
    return CROSS_ENTROPY.loss.reference(logits, target, weight, **formula)


def gradients(
    operands: Operands, options: Options, needed: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """The gradients of the operands that need one, which can be differentiated again."""
    if functorch_is_active():
        raise NotImplementedError(
            "linear_cross_entropy: torch.func cannot transform the backward pass of a loss that "
            "was computed outside of the transform; call the loss inside of it"
        )
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases: list[Any] = list(map(by_torch.differentiable, operands, needed))
        wanted = [x for x, needs in zip(aliases, needed, strict=True) if needs]
        value = loss(Operands(*aliases), options)
        found = iter(torch.autograd.grad(value, wanted, grad, create_graph=create_graph))
    return [next(found) if needs else None for needs in needed]
