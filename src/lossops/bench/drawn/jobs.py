"""What is to be checked and timed of a drawn call: its tensors, contenders, check and floor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..meter import Call, Meter
from ..run import LIMITS
from . import elements, exact, peers, rows
from .elements import ElementDraw
from .exact import Outputs
from .rows import RowDraw

Draw = ElementDraw | RowDraw


@dataclasses.dataclass
class Job:
    """A drawn call on a device."""

    draw: Draw
    calls: dict[str, Callable[..., Outputs]]  # by contender, of its operands
    operands: dict[str, tuple[Tensor, ...]]  # by contender; those that require gradients have one
    grad_outputs: Outputs | None  # None: ones
    error: Callable[[], float]  # ours against float64
    limit: float
    moved: dict[str, int]
    floor_ms: dict[str, float]  # by pass
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)  # contender -> why

    def forward(self, who: str) -> Outputs:
        # Liger-Kernel computes the gradient of what requires one, under no_grad() too.
        with torch.no_grad():
            return self.calls[who](*(operand.detach() for operand in self.operands[who]))

    def step(self, who: str) -> Outputs:
        operands = self.operands[who]
        wanted = [operand for operand in operands if operand.requires_grad]
        return torch.autograd.grad(self.calls[who](*operands), wanted, self.grad_outputs)

    def passes(self) -> dict[str, dict[str, Call]]:
        """By pass and contender."""
        return {
            doing: {who: functools.partial(call, who) for who in self.calls}
            for doing, call in (("forward", self.forward), ("step", self.step))
        }


def job(draw: Draw, whos: Sequence[str], meter: Meter, bandwidth: dict[str, float]) -> Job:
    """Makes the tensors of a call, for us and for the peers `whos`."""
    if isinstance(draw, RowDraw):
        return _job_of_rows(draw, whos, meter.device, bandwidth)
    return _job_of_elements(draw, whos, meter.device, bandwidth)


def _job_of_elements(
    draw: ElementDraw, whos: Sequence[str], device: torch.device, bandwidth: dict[str, float]
) -> Job:
    ours, by_torch, *_ = elements.LOSSES[draw.loss]
    input, target = elements.operands(draw, device)
    leaves = tuple(
        tensor.detach().requires_grad_(draw.gradients in (name, "both"))
        for name, tensor in (("input", input), ("target", target))
    )

    def function(who: str) -> Callable[..., Outputs]:
        loss = ours if who == "ours" else by_torch

        def call(input: Tensor, target: Tensor) -> Outputs:
            return (loss(input, target, reduction=draw.reduction),)

        return torch.compile(call, dynamic=False) if who == "compile" else call

    taken = [who for who in whos if who in ("eager", "compile")]
    calls = {who: function(who) for who in ("ours", *taken)}
    with torch.no_grad():
        (value,) = calls["ours"](input, target)
    losses = (torch.rand_like(value),) if draw.reduction == "none" else None
    moved = elements.moved_bytes(draw, input, target, value)
    # Losses are as many bytes as an operand, so forward is a copy.
    forward = bandwidth["copy" if losses else "read"]
    floor = {
        "forward": (moved["read"] + moved["written"]) / forward / 1e6,
        "step": moved["step"] / bandwidth["copy"] / 1e6,
    }

    def error() -> float:
        grad_output = None if losses is None else losses[0]
        return elements.error(draw, value, found.step("ours"), leaves, grad_output, by_torch)

    found = Job(
        draw,
        calls,
        dict.fromkeys(calls, leaves),
        losses,
        error,
        # The half types' spacing, and for a sum of their gradients what rounding adds.
        limit=2 * max(LIMITS[dtype] for dtype in draw.dtypes),
        moved=moved,
        floor_ms=floor,
        skipped={
            who: "elementwise calls have torch's peers alone" for who in whos if who not in taken
        },
    )
    return found


def _job_of_rows(
    draw: RowDraw, whos: Sequence[str], device: torch.device, bandwidth: dict[str, float]
) -> Job:
    data = rows.tensors(draw, device)
    reasons = {who: peers.why_not(who, draw) for who in whos}
    calls = {
        who: peers.call(who, draw, data)
        for who in ("ours", *(who for who in whos if reasons[who] is None))
    }
    leaf = data.logits.detach().requires_grad_()
    operands = {
        who: (_laid_like(data.logits).requires_grad_(),) if who in peers.WRITES_LOGITS else (leaf,)
        for who in calls
    }
    with torch.no_grad():
        values = calls["ours"](data.logits)
    by_row = draw.reduction == "none"
    grad_outputs = tuple(torch.rand_like(value) for value in values) if by_row else None
    moved = rows.moved_bytes(draw, data.read_rows)
    floor = {
        "forward": (moved["read"] / bandwidth["read"] + moved["written"] / bandwidth["copy"]) / 1e6,
        "step": moved["step"] / bandwidth["copy"] / 1e6,
    }

    def error() -> float:
        gradients = [(found.step("ours")[0], 1.0)]
        if draw.reduction == "mean":
            # Again with a `grad_output` that is not 1: the gradient of a mean can vanish in a
            # half type.
            scale = 2.0 ** min(15, max(1, int(math.log2(data.kept_rows + 1))))
            (loss,) = calls["ours"](leaf)
            (scaled,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, scale))
            gradients.append((scaled, scale))
        return exact.error(draw, data, values, gradients, grad_outputs)

    found = Job(
        draw,
        calls,
        operands,
        grad_outputs,
        error,
        limit=2 * LIMITS[draw.dtype],
        moved=moved,
        floor_ms=floor,
        skipped={who: reason for who, reason in reasons.items() if reason is not None},
    )
    return found


def _laid_like(tensor: Tensor) -> Tensor:
    """A copy in a storage of its own, with the strides and the offset of `tensor`."""
    whole: Any = torch.empty(
        tensor.untyped_storage().nbytes() // tensor.itemsize,
        dtype=tensor.dtype,
        device=tensor.device,
    )
    view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view.copy_(tensor)
