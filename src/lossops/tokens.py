"""What reinforcement learning and metrics read off logits: log-probabilities of tokens, entropies.

The functions have the names, arguments and order of those in TRL (`trl.trainer.utils`). Each reads
the logits once, and its backward pass reads them once more. Logits may have any strides. The values
of half-precision logits are float32, also under autocast. The same row gives the same bits in any
batch, in any layout and on every run.

The keywords `logit_scale`, `softcap` and `temperature` map the logits first, in this order:
`z = logit_scale * x`, `z = softcap * tanh(z / softcap)`, `z = z / temperature`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._ops import logit_map
from ._ops import tokens as ops

__all__ = ["entropy_from_logits", "selective_log_softmax", "selective_log_softmax_and_entropy"]

_is_compiling = torch.compiler.is_compiling


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Log-probabilities of chosen classes: `log_softmax(z, -1).gather(-1, index)`.

    Args:
        logits: shape (..., V), a floating dtype.
        index: shape (...), or (..., K) for K classes a row; int64, int32 or uint8, in [0, V).
            The gradients of repeated indices add up.
        temperature: divides the logits; positive and finite.
        row_mask: shape (...), any real dtype. The values and the gradients of a row with 0 are
            exactly 0, and neither its logits (which may be NaN) nor its indices count. With K
            classes a row it may also have index's shape: it then masks single values.
        logit_scale: multiplies the logits; finite.
        softcap: bounds the logits; positive and finite.

    Returns:
        The log-probabilities, of index's shape; float64 for float64 logits, else float32.
        Differentiable with respect to logits.

    Raises:
        IndexError: an index is out of range, on the CPU. On CUDA the value and the row's gradient
            are NaN.
        NotImplementedError: logits are not floating point, or a tensor is sparse or nested.
        RuntimeError: shapes, dtypes or devices that do not go together.
        TypeError: an argument that must be a tensor or a number and is not.
        ValueError: temperature, logit_scale or softcap is not as above.
    """
    if _is_compiling():
        found: Tensor = torch.ops.lossops.selective_log_softmax(
            logits, index, temperature, row_mask, logit_scale=logit_scale, softcap=softcap
        )
        return found
    name = "selective_log_softmax"
    _check_tensors(name, logits=logits, index=index, row_mask=row_mask)
    temperature, logit_scale, softcap = logit_map.checked(name, temperature, logit_scale, softcap)
    return ops.selective_log_softmax(
        logits, index, temperature, row_mask, logit_scale=logit_scale, softcap=softcap
    )


def entropy_from_logits(
    logits: Tensor,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Shannon entropy of the softmax of each row, in nats: `-(p * log(p)).sum(-1)`.

    A class of probability 0, as of a logit of -inf, contributes 0 to the value and to the gradient.

    Args:
        logits: shape (..., V), a floating dtype.
        chunk_size: has no effect: nothing of the size of the logits is allocated.
        temperature, logit_scale, softcap: as for `selective_log_softmax`.

    Returns:
        The entropies, of shape (...); float64 for float64 logits, else float32. Differentiable with
        respect to logits.

    Raises:
        NotImplementedError, TypeError, ValueError: as `selective_log_softmax`.
        RuntimeError: logits are 0-d.
    """
    if _is_compiling():
        found: Tensor = torch.ops.lossops.entropy_from_logits(
            logits, temperature=temperature, logit_scale=logit_scale, softcap=softcap
        )
        return found
    name = "entropy_from_logits"
    _check_tensors(name, logits=logits)
    temperature, logit_scale, softcap = logit_map.checked(name, temperature, logit_scale, softcap)
    return ops.entropy_from_logits(
        logits, temperature=temperature, logit_scale=logit_scale, softcap=softcap
    )


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_log_softmax` and `entropy_from_logits` in one pass over the logits.

    One backward pass computes the gradient of both.

    Args:
        logits, index, temperature, row_mask, logit_scale, softcap: as for `selective_log_softmax`.
            The entropy of a row with a row_mask of 0 is 0.
        entropy_requires_grad: whether the entropies have a gradient.

    Returns:
        The log-probabilities, of index's shape, and the entropies, of shape (...).

    Raises:
        IndexError, NotImplementedError, RuntimeError, TypeError, ValueError: as
            `selective_log_softmax`.
    """
    if _is_compiling():
        found: tuple[Tensor, Tensor] = torch.ops.lossops.selective_log_softmax_and_entropy(
            logits,
            index,
            entropy_requires_grad,
            temperature,
            row_mask,
            logit_scale=logit_scale,
            softcap=softcap,
        )
        return found
    name = "selective_log_softmax_and_entropy"
    _check_tensors(name, logits=logits, index=index, row_mask=row_mask)
    temperature, logit_scale, softcap = logit_map.checked(name, temperature, logit_scale, softcap)
    return ops.selective_log_softmax_and_entropy(
        logits,
        index,
        entropy_requires_grad,
        temperature,
        row_mask,
        logit_scale=logit_scale,
        softcap=softcap,
    )


def _check_tensors(name: str, **tensors: Any) -> None:
    """Raises for what no kernel takes: no tensors, nested, quantized and sparse ones."""
    for key, tensor in tensors.items():
        if key == "row_mask" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {key} must be a Tensor, but is {type(tensor).__name__}")
        if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise NotImplementedError(
                f"{name}: {key} must be a plain, dense tensor, but is "
                f"{'quantized' if tensor.is_quantized else kind}"
            )
    logits = tensors["logits"]
    if not logits.is_floating_point():
        raise NotImplementedError(
            f"{name}: logits must be floating point, but are {logits.dtype}".replace("torch.", "")
        )
