"""What is measured: a linear layer, something ahead of the loss, the loss."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lossops

from ..heads.problems import Shape

# What is done to the results of the layer before they go to the loss.
AHEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "float": lambda x: x.float(),  # as transformers does
    "bias": lambda x: x,  # the bias of the layer
    "scale": lambda x: x * 0.5,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step."""

    loss: str  # ce, mse, kl
    ahead: str  # of AHEAD
    shape: Shape

    @property
    def name(self) -> str:
        return f"{self.loss}-{self.ahead}-{self.shape}"


def _cases(loss: str, aheads: Sequence[str], shapes: Sequence[str]) -> tuple[Case, ...]:
    return tuple(Case(loss, ahead, Shape.parse(shape)) for shape in shapes for ahead in aheads)


# GPT-2, a vocabulary of 32000, Llama 3 8B, Qwen with an odd vocabulary.
_HEADS = ("8192x768x50257", "4096x2048x32000", "4096x4096x128256", "4096x2048x151937")
CUDA_CASES = (
    *_cases("ce", ("plain", "float"), _HEADS),
    *_cases("ce", ("bias", "scale"), ("4096x2048x32000",)),
    *_cases("mse", ("bias", "float", "scale"), ("16384x1024x8192",)),
    *_cases("kl", ("bias", "float", "scale"), ("4096x2048x32000",)),
)
CPU_CASES = (
    *_cases("ce", ("plain", "float"), ("512x128x8193",)),
    *_cases("mse", ("bias", "float", "scale"), ("512x128x1024",)),
    *_cases("kl", ("bias", "float", "scale"), ("256x128x2048",)),
)
# What runs if no case is named.
DEFAULT = "ce-plain-*", "ce-float-*"


def _kl_div(loss: Callable[..., Tensor], logits: Tensor, target: Tensor) -> Tensor:
    return loss(logits.log_softmax(-1), target, reduction="batchmean")


def _cross_entropy(loss: Callable[..., Tensor], logits: Tensor, target: Tensor) -> Tensor:
    return loss(logits.view(-1, logits.size(-1)), target)


def _mse_loss(loss: Callable[..., Tensor], output: Tensor, target: Tensor) -> Tensor:
    # As diffusers does. torch's own loss has no backward pass for two dtypes in all versions.
    return loss(output, target.to(output.dtype))


# Loss -> how it is called, the name of its function.
_LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "ce": (_cross_entropy, "cross_entropy"),
    "mse": (_mse_loss, "mse_loss"),
    "kl": (_kl_div, "kl_div"),
}

# Who -> what it is. "torch" is what the others are compared with.
TITLES = {
    "torch": "torch's loss in the compiled step",
    "ours": "lossops' loss in it",
    "patch": "torch's loss in it under lossops.patched()",
    "eager": "torch's loss, nothing compiled",
}
PEERS = ("torch", "patch", "eager")


class Problem:
    """The data of a case, the same at every call: hidden states of four texts, bf16."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case = case
        tokens, features, classes = dataclasses.astuple(case.shape)
        texts = 4 if tokens % 4 == 0 else 1
        hidden = torch.randn(texts, tokens // texts, features, device=device)
        weight = torch.randn(classes, features, device=device).mul_(features**-0.5)
        # The operands that have a gradient.
        self.operands = {"input": hidden.bfloat16(), "weight": weight.bfloat16()}
        if case.ahead == "bias":
            self.operands["bias"] = torch.randn(classes, device=device).bfloat16()
        if case.loss == "ce":
            self.target = torch.randint(classes, (tokens,), device=device)
        else:
            self.target = torch.randn(*hidden.shape[:2], classes, device=device).bfloat16()
            if case.loss == "kl":
                self.target = self.target.softmax(-1)

    def function(self, who: str) -> Callable[..., Tensor]:
        """Takes the operands and the target, and returns the loss. Nothing is compiled yet."""
        call, name = _LOSSES[self.case.loss]
        ahead = AHEAD[self.case.ahead]

        def function(target: Tensor, input: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
            # Under patched() the name leads to lossops.
            loss = getattr(lossops if who == "ours" else F, name)
            return call(loss, ahead(F.linear(input, weight, *bias)), target)

        return function

    def step(self, who: str) -> Callable[[], dict[str, Tensor]]:
        """Forward and backward pass: the loss, and the gradients by the operands' names."""
        leaves = {name: x.detach().requires_grad_() for name, x in self.operands.items()}
        function = self.function(who)
        if who != "eager":
            function = torch.compile(function, fullgraph=True, dynamic=False)
        call = functools.partial(_step, function, self.target, leaves)
        return lossops.patched()(call) if who == "patch" else call

    def exact(self) -> dict[str, Tensor]:
        """What `step` returns, in float64."""
        leaves = {name: x.double().requires_grad_() for name, x in self.operands.items()}
        target = self.target
        if target.is_floating_point():
            target = target.double()
        call, name = _LOSSES[self.case.loss]
        # .float() would round.
        ahead = AHEAD["plain" if self.case.ahead == "float" else self.case.ahead]

        def function(target: Tensor, *operands: Tensor) -> Tensor:
            return call(getattr(F, name), ahead(F.linear(*operands)), target)

        return _step(function, target, leaves)


def _step(function: Callable[..., Any], target: Tensor, leaves: dict[str, Tensor]) -> Any:
    loss = function(target, *leaves.values())
    loss.backward()
    found = {"loss": loss.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
    for leaf in leaves.values():
        leaf.grad = None
    return found
