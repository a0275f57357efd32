"""Who else computes rows, and which calls a peer does not take.

A peer that takes a call fails or runs; that it fails is noted, and ends nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lossops

from .. import cases
from . import exact
from .exact import Outputs
from .rows import FUNCTIONS, RowDraw, Rows

# Name -> package that must be importable.
PEERS = cases.PEERS | {"trl": "trl.kernels"}
# They write the gradient over the logits, or may: they get logits of their own.
WRITES_LOGITS = ("liger",)

Call = Callable[[Tensor], Outputs]


def why_absent(who: str) -> str | None:
    """Why a peer's package cannot be imported, in one line; None where it can."""
    try:
        importlib.import_module(PEERS[who])
    except Exception as error:  # of any kind: packages for GPUs fail in their own ways
        return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None


def why_not(who: str, draw: RowDraw) -> str | None:
    """Why a peer does not take a call, in a few words; None where it does."""
    if who in ("ours", "eager", "compile"):
        return None
    if who == "trl":
        if not draw.is_tokens:
            return "has no cross entropy"
        return "takes one index a row" if draw.indices > 1 else None
    if draw.is_tokens:
        return f"has no {FUNCTIONS[draw.loss]}"
    if draw.probabilities:
        return "takes class indices"
    return _why_not_quack(draw) if who == "quack" else None


def _why_not_quack(draw: RowDraw) -> str | None:
    if draw.classes % 8:
        return "takes multiples of 8 classes"
    if draw.pad or draw.offset:
        return "takes contiguous, aligned rows"
    if draw.smoothing:
        return "has no label smoothing"
    if draw.weight and draw.ignored:
        return "reads the weight of class -100 for an ignored row"
    return None


def call(who: str, draw: RowDraw, rows: Rows) -> Call:
    """How `who` computes the call, as a function of the logits alone."""
    if who == "ours":
        return functools.partial(_ours, draw, rows)
    if who in ("eager", "compile"):

        def by_torch(logits: Tensor) -> Outputs:
            return exact.outputs(draw, logits, rows)

        return torch.compile(by_torch, dynamic=False) if who == "compile" else by_torch
    if who == "trl":
        return functools.partial(_trl, draw, rows)
    return functools.partial(_package, who, draw, rows)


def _ours(draw: RowDraw, rows: Rows, logits: Tensor) -> Outputs:
    function = getattr(lossops, FUNCTIONS[draw.loss])
    if not draw.is_tokens:
        return (function(logits, rows.target, **_options(draw, rows)),)
    if draw.loss == "entropy":
        return (function(logits),)
    found = function(logits, rows.target, row_mask=rows.kept)
    return found if isinstance(found, tuple) else (found,)


def _options(draw: RowDraw, rows: Rows) -> dict[str, Any]:
    options: dict[str, Any] = {"reduction": draw.reduction}
    if rows.weight is not None:
        options["weight"] = rows.weight
    if draw.smoothing:
        options["label_smoothing"] = draw.smoothing
    return options


def _package(who: str, draw: RowDraw, rows: Rows, logits: Tensor) -> Outputs:
    """Liger-Kernel and quack take (N, C): a copy for images, as their users have to make it."""
    loss = cases.PACKAGE_CE[who](logits, rows.target, **_options(draw, rows))
    return (loss.view(rows.target.shape) if draw.reduction == "none" else loss,)


def _trl(draw: RowDraw, rows: Rows, logits: Tensor) -> Outputs:
    function = importlib.import_module(PEERS["trl"]).selective_log_softmax_and_entropy
    # Its one function computes both; an output that nobody reads has no gradient to compute.
    log_probabilities, entropies = function(logits, rows.target, row_mask=rows.kept)
    return {
        "logp": (log_probabilities,),
        "entropy": (entropies,),
        "logp-entropy": (log_probabilities, entropies),
    }[draw.loss]
