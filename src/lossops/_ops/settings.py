"""The switches that a program, or its environment, sets for the whole process."""

from __future__ import annotations

import os


def _from_environment(name: str, default: bool) -> bool:
    value = os.environ.get(name)
    if value is None:
        return default
    return value.strip().lower() not in ("", "0", "false", "no", "off")


# Read by the modules of this package on every call.
gradients_are_kept = _from_environment("LOSSOPS_KEEP_GRADIENTS", True)
targets_are_checked = _from_environment("LOSSOPS_CHECK_TARGETS", False)


def _switch(function: str, enabled: object) -> bool:
    if not isinstance(enabled, bool):
        raise TypeError(f"{function}: enabled must be a bool, but is {enabled!r}")
    return enabled


def keep_gradients(enabled: bool) -> None:
    """Whether the forward pass of a loss that is to be differentiated computes the gradient too.

    On by default: a training step then reads its inputs once and writes the gradient once. The
    gradient takes its memory from the forward pass on, not from the backward pass, and a loss that
    is never differentiated has computed it in vain (`torch.no_grad()` spares it). The environment
    variable LOSSOPS_KEEP_GRADIENTS=0 switches it off at import.

    Args:
        enabled: compute gradients in forward from now on, or no longer.

    Raises:
        TypeError: enabled is no bool.
    """
    global gradients_are_kept
    gradients_are_kept = _switch("keep_gradients", enabled)


def check_targets(enabled: bool) -> None:
    """Whether `cross_entropy` looks for out-of-range class indices on CUDA.

    Off by default, because the answer must come back from the device: with it every call
    synchronises, and raises IndexError with the first offending row and value. Without it such a
    row's loss and gradient are NaN. On the CPU the error is always raised. The environment
    variable LOSSOPS_CHECK_TARGETS=1 switches it on at import. Compiled code and
    `torch.ops.lossops.cross_entropy` do not wait for the device and never look.

    Args:
        enabled: check from now on, or no longer.

    Raises:
        TypeError: enabled is no bool.
    """
    global targets_are_checked
    targets_are_checked = _switch("check_targets", enabled)
