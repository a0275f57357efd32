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
    """Sets whether the forward pass computes the gradient too, if the loss can be differentiated.

    On by default: a training step then reads its inputs once and writes the gradient once. The
    gradient takes its memory from the forward pass on, instead of from the backward pass on. If the
    loss is never differentiated, the gradient was computed in vain; under `torch.no_grad()` it is
    not computed. LOSSOPS_KEEP_GRADIENTS=0 in the environment switches it off at import.

    Args:
        enabled: whether forward computes gradients from now on.

    Raises:
        TypeError: enabled is no bool.
    """
    global gradients_are_kept
    gradients_are_kept = _switch("keep_gradients", enabled)


def check_targets(enabled: bool) -> None:
    """Sets whether `cross_entropy` looks for class indices out of range on CUDA.

    Off by default: the loss and the gradient of such a row are then NaN. If on, each call waits for
    the device, and raises IndexError with the first such row and its value. On the CPU the error is
    always raised. LOSSOPS_CHECK_TARGETS=1 in the environment switches it on at import. Compiled
    code and `torch.ops.lossops.cross_entropy` never look, and never wait for the device.

    Args:
        enabled: whether to check from now on.

    Raises:
        TypeError: enabled is no bool.
    """
    global targets_are_checked
    targets_are_checked = _switch("check_targets", enabled)
