"""The logit map: how `logit_scale`, `softcap` and `temperature` change logits before their softmax.

`z = logit_scale * x`, then `z = softcap * tanh(z / softcap)`, then `z = z / temperature`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def mapped(x: Tensor, temperature: float, logit_scale: float, softcap: float | None) -> Tensor:
    """The mapped logits by torch, in the dtype of x. x itself if the map changes nothing."""
    if logit_scale != 1:
        x = logit_scale * x
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if temperature != 1:
        x = x / temperature
    return x


def derivative(
    z: Tensor, temperature: float, logit_scale: float, softcap: float | None
) -> Tensor | float:
    """The derivative of the map, from mapped logits."""
    slope = logit_scale / temperature
    if softcap is None:
        return slope
    return (1 - (z * (temperature / softcap)).square()) * slope


def without_zero(
    logits: Tensor, temperature: float, logit_scale: float, softcap: float | None
) -> tuple[Tensor, float, float, float | None]:
    """Logits and options whose logit_scale is not 0, which no kernel takes."""
    if logit_scale == 0:
        return logits * 0, temperature, 1.0, softcap
    return logits, temperature, logit_scale, softcap


def checked(
    name: str, temperature: Any, logit_scale: Any, softcap: Any
) -> tuple[float, float, float | None]:
    """temperature, logit_scale and softcap as floats. Raises TypeError and ValueError."""
    temperature = number(name, "temperature", temperature)
    logit_scale = finite(name, "logit_scale", logit_scale)
    if not 0 < temperature < math.inf:
        raise ValueError(f"{name}: temperature must be positive and finite, but is {temperature}")
    if softcap is not None:
        softcap = number(name, "softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"{name}: softcap must be positive and finite, but is {softcap}")
    return temperature, logit_scale, softcap


def finite(name: str, key: str, value: Any) -> float:
    """`number`, and a ValueError for infinities and NaN."""
    value = number(name, key, value)
    if not -math.inf < value < math.inf:  # as compiled code can ask it of a symbolic float
        raise ValueError(f"{name}: {key} must be finite, but is {value}")
    return float(value)


def number(name: str, key: str, value: Any) -> float:
    """The value as a float, infinite where no float is as large. Raises TypeError for what is no
    number, for bools and for tensors."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_other = hasattr(type(value), "__float__") and not isinstance(value, (bool, Tensor))
    try:
        if is_plain or is_other:  # a Tensor may be on CUDA
            return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception:
        pass
    raise TypeError(f"{name}: {key} must be a number, but is {value!r}")
