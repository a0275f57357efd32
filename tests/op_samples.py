"""OpInfo's samples of linear_cross_entropy: those that this torch draws, and the saved ones.

torch draws them from 2.13 on. `tools/save_op_samples.py` saves those of 2.13 for all other torches.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FILE = Path(__file__).resolve().parent / "data" / "linear_cross_entropy_opinfo.pt.gz"
SAVED_TORCH = "2.13."
# For each dtype on a device.
COUNTS = {torch.float64: 329, torch.float32: 329, torch.float16: 371, torch.bfloat16: 371}
ERRORS = 6


def op_infos() -> list[Any]:
    """One for each variant: without chunks, with chunks, and with chunks for "none"."""
    from torch.testing._internal import common_methods_invocations as methods

    return [op for op in methods.op_db if op.name == "nn.functional.linear_cross_entropy"]


def arguments(given: Any) -> dict[str, Any]:
    """The arguments of one of OpInfo's calls: tensors, other options, and torch's `options`."""
    options = dict(given.kwargs)
    tensors = {"input": given.input, "linear_weight": given.args[0], "target": given.args[1]}
    for name in ("linear_bias", "weight"):
        if name in options:
            tensors[name] = options.pop(name)
    chunking = options.pop("options", None)
    return {
        "tensors": {name: x.detach() for name, x in tensors.items()},
        "options": options,
        "chunking": None if chunking is None else dataclasses.asdict(chunking),
    }


def drawn(device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The samples of all variants. On the CPU their values are the same each time."""
    for op in op_infos():
        for given in op.sample_inputs(device, dtype, requires_grad=True):
            yield {"variant": op.variant_test_name, **arguments(given)}


def drawn_errors(device: str) -> Iterator[dict[str, Any]]:
    """Calls that raise, which are the same for all variants."""
    for error in op_infos()[0].error_inputs(device):
        yield {"raises": error.error_type.__name__, **arguments(error.sample_input)}


def exact(sample: dict[str, Any]) -> dict[str, Tensor]:
    """The loss and the gradients of its sum by name, in float64, by torch's own function."""
    tensors = {
        name: (x.double() if x.is_floating_point() else x).detach()
        for name, x in sample["tensors"].items()
    }
    names = [name for name, x in tensors.items() if x.is_floating_point()]
    if "target" not in names and "weight" in names:
        names.remove("weight")  # has a gradient for probabilities only
    leaves = [tensors[name].requires_grad_() for name in names]
    loss = F.linear_cross_entropy(**tensors, **sample["options"])
    gradients = torch.autograd.grad(loss.sum(), leaves)
    return {"loss": loss.detach(), **dict(zip(names, gradients, strict=True))}


@cache
def saved() -> dict[str, Any]:
    """What the file holds: "samples" by dtype, each with its "exact" results, and "errors"."""
    found: dict[str, Any] = torch.load(
        io.BytesIO(gzip.decompress(FILE.read_bytes())), weights_only=True
    )
    return found
