"""What is measured: shapes, data, and who computes the head."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lossops

MIB = 1 << 20

# Takes input (N, H), weight (C, H) and class indices (N,). Returns the mean loss.
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens, features and classes."""

    tokens: int
    features: int
    classes: int

    def __str__(self) -> str:
        return "x".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads 8192x4096x128256. Raises ValueError for other texts."""
        sizes = [int(size) for size in text.split("x") if re.fullmatch("[1-9][0-9]*", size)]
        if len(sizes) != 3 or len(sizes) != text.count("x") + 1:
            raise ValueError(f"{text}: TOKENSxFEATURESxCLASSES, as 8192x4096x128256")
        return cls(*sizes)


# Llama 3 8B, Gemma 2 2B, a vocabulary of 32000, Qwen.
CUDA_SHAPES = ("8192x4096x128256", "8192x2304x256000", "16384x2048x32000", "4096x2048x151936")
TOKEN_SHAPES = ("8192x2048x151936",)
CPU_SHAPES = ("2048x512x50257",)


# The modules of peers that are other packages.
_MODULES = {
    "liger": "liger_kernel.transformers.functional",
    "liger-sm90": "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
    "cce": "cut_cross_entropy",
    "quack": "quack.linear_cross_entropy",
    "trl": "trl.kernels",
}

# What the mean of the entropies is multiplied by where heads are of tokens.
ENTROPY_FACTOR = 0.1


class Problem:
    """The data of a shape, the same at every call: normal logits of variance 1.

    The loss is the mean of `-log_softmax(logits)[target]`, of tokens plus a multiple of the mean of
    the entropies.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, *, of_tokens: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.entropy_factor = ENTROPY_FACTOR if of_tokens else 0.0
        self.input = torch.randn(shape.tokens, shape.features, device=device).to(dtype)
        weight = torch.randn(shape.classes, shape.features, device=device)
        self.weight = weight.mul_(shape.features**-0.5).to(dtype)
        self.target = torch.randint(shape.classes, (shape.tokens,), device=device)

    def gradient_of_logits(self) -> Tensor:
        """What a step multiplies the weight and the input with."""
        logits = torch.mm(self.input, self.weight.t()).requires_grad_()
        if self.entropy_factor:
            values = lossops.selective_log_softmax_and_entropy(logits, self.target)
            loss = _loss_of_tokens(*values)
        else:
            loss = lossops.cross_entropy(logits, self.target)
        return torch.autograd.grad(loss, logits)[0]

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """The loss and the gradients of input and weight, in float64, by chunks of rows."""
        weight = self.weight.double()
        loss = torch.zeros((), dtype=torch.float64, device=weight.device)
        grad_input = torch.empty_like(self.input, dtype=torch.float64)
        grad_weight = torch.zeros_like(weight)
        rows = max(1, 1024 * MIB // (8 * self.shape.classes))
        for start in range(0, self.shape.tokens, rows):
            part = slice(start, start + rows)
            input, target = self.input[part].double(), self.target[part]
            logits = torch.mm(input, weight.t())
            log_softmax = logits.log_softmax(-1)
            loss -= log_softmax.gather(-1, target.unsqueeze(-1)).sum()
            grad = log_softmax.exp()
            if self.entropy_factor:
                entropy = -(grad * log_softmax).sum(-1, keepdim=True)
                loss += self.entropy_factor * entropy.sum()
                grad = grad * (1 - self.entropy_factor * (log_softmax + entropy))
            grad[torch.arange(len(target), device=grad.device), target] -= 1
            grad_input[part] = torch.mm(grad, weight)
            grad_weight.addmm_(grad.t(), input)
        tokens = self.shape.tokens
        return loss / tokens, grad_input.div_(tokens), grad_weight.div_(tokens)


def _loss_of_tokens(log_probs: Tensor, entropy: Tensor) -> Tensor:
    return ENTROPY_FACTOR * entropy.mean() - log_probs.mean()


def with_workspace(mib: int, *, of_tokens: bool) -> Head:
    """Our head with a workspace of so many MiB."""
    head: Callable[..., Tensor] = _tokens if of_tokens else lossops.linear_cross_entropy
    return functools.partial(head, max_workspace_bytes=mib * MIB)


def _tokens(input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    values = lossops.linear_selective_log_softmax(
        input, weight, target, return_entropy=True, **options
    )
    return _loss_of_tokens(*values)


def _tokens_narrow(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    workspace = narrow_workspace(weight)
    return _tokens(input, weight, target, accum_dtype=weight.dtype, max_workspace_bytes=workspace)


def _tokens_of_linear(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(input, weight)
    return _loss_of_tokens(*lossops.selective_log_softmax_and_entropy(logits, target))


def _tokens_eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_softmax = F.linear(input, weight).float().log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return _loss_of_tokens(log_softmax.gather(-1, target.unsqueeze(-1)), entropy)


def _trl(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module(_MODULES["trl"])
    logits = F.linear(input, weight)
    return _loss_of_tokens(*module.selective_log_softmax_and_entropy(logits, target))


def _narrow(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return lossops.linear_cross_entropy(
        input,
        weight,
        target,
        accum_dtype=weight.dtype,
        max_workspace_bytes=narrow_workspace(weight),
    )


def narrow_workspace(weight: Tensor) -> int:
    """Of "narrow": 512 MiB, or 256 MiB beside weights that are smaller than that."""
    return 512 * MIB if weight.nbytes >= 512 * MIB else 256 * MIB


def _in_place(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(input, weight)
    return lossops.cross_entropy(logits, target, inplace_backward=logits.requires_grad)


def _eager(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(input, weight), target)


@functools.cache
def _compiled() -> Head:
    return torch.compile(_eager, dynamic=False)


def _compile(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return _compiled()(input, weight, target)


def _chunked(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = F.linear_cross_entropy(input, weight, target)
    return loss


def _liger(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module(_MODULES["liger"])
    loss: Tensor = module.liger_fused_linear_cross_entropy(input, weight, target)
    return loss


def _liger_sm90(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module(_MODULES["liger-sm90"])
    loss: Tensor = module.liger_fused_linear_cross_entropy_sm90(input, weight, target)
    return loss


def _cce(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module(_MODULES["cce"])
    loss: Tensor = module.linear_cross_entropy(input, weight, target)
    return loss


def _quack(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    module = importlib.import_module(_MODULES["quack"])
    # Chunk rows that equal the features end in an error of quack 0.6.5.
    rows = 4096 if input.size(1) != 4096 else 2048
    loss: Tensor = module.chunked_linear_cross_entropy(input, weight, target, chunk_size=rows)
    return loss


HEADS: dict[str, Head] = {
    "ours": lossops.linear_cross_entropy,
    "narrow": _narrow,
    "linear+ours": _in_place,
    "eager": _eager,
    "compile": _compile,
    "chunked": _chunked,
    "liger": _liger,
    "liger-sm90": _liger_sm90,
    "cce": _cce,
    "quack": _quack,
}
# Heads that return log-probabilities and entropies of tokens: `--tokens`.
TOKEN_HEADS: dict[str, Head] = {
    "ours": _tokens,
    "narrow": _tokens_narrow,
    "linear+ours": _tokens_of_linear,
    "eager": _tokens_eager,
    "trl": _trl,
}
OURS = ("ours", "narrow")
TITLES = {
    "ours": "linear_cross_entropy",
    "narrow": "accum_dtype=bf16 and a workspace of 512 MiB (256 for small weights)",
    "linear+ours": "F.linear, then lossops.cross_entropy with inplace_backward",
    "eager": "F.linear, then F.cross_entropy",
    "compile": "the same by torch.compile",
    "chunked": "F.linear_cross_entropy of torch 2.13",
    "liger": "Liger-Kernel's fused linear cross entropy, default settings",
    "liger-sm90": "Liger-Kernel's CuTe kernels for Hopper",
    "cce": "Cut Cross-Entropy, default settings",
    "quack": "quack's chunked linear cross entropy",
}
TOKEN_TITLES = {
    "ours": "linear_selective_log_softmax with return_entropy",
    "linear+ours": "F.linear, then lossops.selective_log_softmax_and_entropy",
    "eager": "F.linear, then log_softmax in float32",
    "trl": "F.linear, then TRL's selective_log_softmax_and_entropy",
}
PEERS = tuple(who for who in (HEADS | TOKEN_HEADS) if who not in OURS)
# Left out unless asked for: they compile, or choose among kernels, for longer than the rest takes.
SLOW_TO_START = ("compile", "liger-sm90", "cce", "quack")


def why_absent(who: str) -> str | None:
    """Why a peer cannot run here, in one line; None where it can."""
    if who == "chunked" and not hasattr(F, "linear_cross_entropy"):
        return f"torch {torch.__version__} has no linear_cross_entropy"
    if who in _MODULES:
        try:
            importlib.import_module(_MODULES[who])
        except Exception as error:  # of any kind: packages for GPUs fail in their own ways
            return f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return None
