"""Autocast: half-precision inputs are read as they are, and the result is float32.

torch casts the whole input first. The functions ask `is_on` and pass float32_result; the public
operators have kernels of their own under autocast's dispatch keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._privates import autocast_may_be_on as may_be_on
from .description import Loss, library

__all__ = ["is_on", "may_be_on", "register"]


def is_on(input: Tensor) -> bool:
    """Whether autocast is on for the device of input; ask `may_be_on()` first, which is faster."""
    device_type = input.device.type
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def register(loss: Loss, kernel: Callable[..., Tensor]) -> None:
    """kernel: the public operator with a float32 result."""
    for device in ("CPU", "CUDA"):
        library.impl(loss.name, kernel, f"Autocast{device}")
