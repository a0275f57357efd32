"""Each loss as a formula of torch's own functions, and the derivatives that torch computes from it.

A formula takes input, target, weight and, by name, the options that both the operators and torch
have. It has two uses. torch differentiates it where no kernel does: in forward mode, for
is_grads_batched=True, for second derivatives (`double_backward.py`) and under
torch.func.functionalize. And torch tells by it which type of error a wrong call has (`errors.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._privates import functorch_is_active, unwrap_if_dead
from .description import Loss, widened

# torch's own functions. `lossops.patch()` may put others in their place later (patching.py).
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss,
    "kl_div": F.kl_div,
    "cross_entropy": F.cross_entropy,
}


# ---------------------------------------------------------------- formulas


def mse_loss(input: Tensor, target: Tensor, weight: Tensor | None, *, reduction: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about broadcast shapes: forward has warned
        return LOSSES["mse_loss"](input, target, reduction=reduction, weight=weight)


def mse_loss_with_and_without_weight(
    input: Tensor, target: Tensor, weight: Tensor | None, *, reduction: str
) -> None:
    """Raises what torch raises for the operands, without the weight or with it."""
    for each in (None, weight):
        mse_loss(input, target, each, reduction=reduction)


def mse_loss_derivative(input: Tensor, target: Tensor) -> Tensor:
    return 2 * (input - target)


def kl_div(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    reduction: str,
    log_target: bool,
    log_input: bool,
) -> Tensor:
    log_probabilities = input if log_input else input.log()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about reduction="mean"
        return LOSSES["kl_div"](
            log_probabilities, target, reduction=reduction, log_target=log_target
        )


def kl_div_derivative(
    input: Tensor, target: Tensor, *, log_target: bool, log_input: bool
) -> Tensor:
    probability = target.exp() if log_target else target
    if log_input:
        return -probability
    zero = torch.where(input.isnan(), input, 0.0)
    return torch.where(probability == 0, zero, -probability / input)


def _without_invalid(input: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Rows with an index out of range become NaN, with index 0: torch would end the process."""
    class_dim = 0 if input.dim() == 1 else 1
    rows = input.shape[:class_dim] + input.shape[class_dim + 1 :]
    if input.dim() == 0 or (target.shape != rows and (target.shape, rows) != ((1,), ())):
        return input, target  # torch says so
    is_valid = (target >= 0) & (target < input.size(class_dim)) | (target == ignore_index)
    nothing = torch.where(is_valid, 0.0, torch.nan).to(input.dtype)
    return input + nothing.reshape(rows).unsqueeze(class_dim), target.where(is_valid, 0)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    if not target.is_floating_point():
        target = target.long()
        if target.is_cuda:
            input, target = _without_invalid(input, target, ignore_index)
    return LOSSES["cross_entropy"](
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


# ---------------------------------------------------------------- the loss, first derivatives


def _wide(tensors: Sequence[Tensor | None], float32_result: bool) -> list[Tensor | None]:
    """The operands as torch's losses get them under autocast: half types as float32."""
    # fault: wide
    return [x if x is None else x.to(widened(x.dtype, float32_result)) for x in tensors]


def call(loss: Loss, input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
    """torch's own loss, which torch can differentiate in every mode."""
    if not functorch_is_active():
        loss.ops.value(input, target, weight, *options)  # says what is wrong with the arguments
    operands = _wide((input, target, weight), options.float32_result)
    return loss.reference(*operands, **loss.ops.formula(options))


def loss_of_gradient(
    loss: Loss, grad_output: Tensor, operands: Sequence[Any], formula: dict[str, Any]
) -> Tensor:
    """The loss whose backward pass gets grad_output."""
    # If grad_output is float32 and the operands are half types, autocast was on.
    # fault: second-wide
    return loss.reference(*_wide(operands, grad_output.dtype == torch.float32), **formula)


def differentiable(tensor: Tensor | None, needed: bool) -> Any:
    """An alias of the tensor. The gradient with respect to it is a partial one."""
    if tensor is None:
        return None
    # The level of a torch.func.vjp may have ended before its pull-back is called.
    alias = unwrap_if_dead(tensor)
    alias = alias.view_as(alias)  # fault: second-alias
    return alias.requires_grad_() if needed and not alias.requires_grad else alias


def alive(tensors: Sequence[Tensor | None]) -> list[Any]:
    """The tensors without the wrappers of torch.func levels that have ended."""
    return [None if tensor is None else unwrap_if_dead(tensor) for tensor in tensors]


def replaced(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    result = list(values)
    for position, value in zip(positions, new, strict=True):
        result[position] = value
    return result


def gradients(
    loss: Loss,
    needed: Sequence[bool],
    grad_output: Tensor,
    operands: Sequence[Tensor | None],
    formula: dict[str, Any],
) -> tuple[Tensor, ...]:
    """The gradients of the operands that need one, by torch's own loss."""
    if functorch_is_active():
        return gradients_under_functorch(loss, needed, grad_output, operands, formula)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = list(map(differentiable, operands, needed))
        wanted = [x for x, needs in zip(aliases, needed, strict=True) if needs]
        value = loss_of_gradient(loss, grad_output, aliases, formula)
        # fault: batched-graph
        return torch.autograd.grad(value, wanted, grad_output, create_graph=create_graph)


def gradients_under_functorch(
    loss: Loss,
    needed: Sequence[bool],
    grad_output: Tensor,
    operands: Sequence[Tensor | None],
    formula: dict[str, Any],
) -> tuple[Tensor, ...]:
    """`gradients` by torch.func.vjp: torch.autograd.grad does not see the levels of torch.func."""
    tensors = alive(operands)
    wanted = [position for position, needs in enumerate(needed) if needs]

    def function(*values: Tensor) -> Tensor:
        now = replaced(tensors, wanted, values)
        return loss_of_gradient(loss, grad_output, now, formula)

    value, pull_back = torch.func.vjp(function, *(tensors[position] for position in wanted))
    found: tuple[Tensor, ...] = pull_back(grad_output.to(value.dtype))
    return found
