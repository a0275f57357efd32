"""Autocast: half-precision inputs are read as they are, and the result is float32.

torch casts the whole input first. The functions of lossops ask `is_on` and pass float32_result to
the operators. The public operators have kernels of their own under autocast's dispatch keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._privates import autocast_may_be_on as may_be_on
from .description import Loss, library

__all__ = ["is_on", "may_be_on", "register"]


def is_on(input: Tensor) -> bool:
    """Whether autocast is on for the device of input. Ask `may_be_on()` first: it is faster."""
    device_type = input.device.type
    return device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type)


def register(loss: Loss, kernel: Callable[..., Tensor]) -> None:
    """Makes kernel, which returns float32, the public operator under autocast."""
    for device in ("CPU", "CUDA"):
        library.impl(loss.name, kernel, f"Autocast{device}")
