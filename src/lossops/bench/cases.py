"""What is measured: the losses with their data, the shapes, the peers, and the bytes at stake."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional

# Takes (input, target), the keyword `reduction` and a problem's options, named as torch does.
Loss = Callable[..., Tensor]
Shape = tuple[int, ...]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Name -> package that must be importable.
PEERS = {"eager": "torch", "compile": "torch", "liger": "liger_kernel", "quack": "quack"}
IGNORED = -100  # torch's default of ignore_index


@dataclasses.dataclass(frozen=True)
class Data:
    """The tensors of a problem; `options` go to every contender by keyword, tensors among them."""

    input: Tensor
    target: Tensor
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_class: bool = False  # target has a probability for each class, along dimension 1

    def to(self, dtype: torch.dtype) -> Data:
        """In a dtype; class indices stay what they are."""

        def cast(value: Any) -> Any:
            is_real = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if is_real else value

        options = {name: cast(value) for name, value in self.options.items()}
        return Data(cast(self.input), cast(self.target), options, self.by_class)

    def rows(self, part: slice) -> Data:
        """Some of the rows: a view."""
        return Data(self.input[part], self.target[part], self.options, self.by_class)

    def kept_rows(self) -> Tensor | None:
        """Which rows are not ignored, of the target's shape; None for targets that are no index."""
        if self.target.is_floating_point():
            return None
        return self.target != self.options.get("ignore_index", IGNORED)

    @property
    def bytes_read(self) -> int:
        """The least to be read: the logits of an ignored row are not."""
        tensors = [self.input, self.target, self.options.get("weight")]
        read = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        kept = self.kept_rows()
        if kept is not None:
            row = self.input.nbytes // kept.numel()
            read -= row * int(kept.numel() - kept.sum())
        return read

    @property
    def bytes_of_gradient(self) -> int:
        """The least to be written by a step: an ignored row's gradient is written too, as zeros."""
        return self.input.nbytes

    def divisor(self, reduction: str) -> float:
        """What torch divides the sum of the losses by."""
        if reduction == "batchmean":
            return self.input.size(0)
        kept, weight = self.kept_rows(), self.options.get("weight")
        if kept is None:
            return self.target.numel() / (self.input.size(1) if self.by_class else 1)
        if weight is None:
            return float(kept.sum())
        return float(weight.double()[self.target[kept]].sum())


def _spread(shape: Shape, low: float, high: float, device: torch.device) -> Tensor:
    """One factor a row. On data that is alike everywhere a kernel that reads wrong rows passes."""
    return torch.linspace(low, high, shape[0], device=device).view(-1, *[1] * (len(shape) - 1))


def _values(shape: Shape, device: torch.device) -> Data:
    input = torch.rand(shape, device=device).mul_(_spread(shape, 0.25, 0.75, device))
    return Data(input, torch.rand(shape, device=device))


def _distributions(shape: Shape, device: torch.device, logs: str = "") -> Data:
    input = torch.randn(shape, device=device).mul_(_spread(shape, 0.25, 0.75, device))
    input = input.log_softmax(-1) if "input" in logs else input.softmax(-1)
    target = torch.randn(shape, device=device).mul_(_spread(shape, 0.75, 0.25, device))
    return Data(input, target.log_softmax(-1) if "target" in logs else target.softmax(-1))


def _logits(shape: Shape, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).mul_(_spread(shape, 0.5, 2.0, device))


def _classes(shape: Shape, device: torch.device, **options: Any) -> Data:
    targets = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    return Data(_logits(shape, device), targets, options)


def _weighted(shape: Shape, device: torch.device) -> Data:
    return _classes(shape, device, weight=torch.linspace(0.5, 1.5, shape[1], device=device))


def _ignored(shape: Shape, device: torch.device) -> Data:
    data = _classes(shape, device)
    # Exactly 30 %, wherever they fall: a random mask would make the floor a matter of luck.
    count = data.target.numel()
    data.target.view(-1)[torch.randperm(count, device=device)[: 3 * count // 10]] = IGNORED
    return data


def _probabilities(shape: Shape, device: torch.device) -> Data:
    target = torch.randn(shape, device=device).mul_(_spread(shape, 2.0, 0.5, device)).softmax(1)
    return Data(_logits(shape, device), target, by_class=True)


def _transposed(shape: Shape, device: torch.device) -> Data:
    """Logits of shape (B, T, V), seen as (B, V, T)."""
    batch, length, num_classes = shape
    targets = torch.randint(num_classes, (batch, length), device=device)
    return Data(_logits(shape, device).transpose(1, 2), targets)


def _package(module: str, name: str, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    return getattr(importlib.import_module(module), name)(input, target, **options)


def _log_first(loss: Loss, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    return loss(torch.log(input), target, **options)


def _by_rows(loss: Loss, input: Tensor, target: Tensor, **options: Any) -> Tensor:
    """For packages that know (N, C) alone; a copy where the classes are not innermost already."""
    if input.dim() > 2:
        input, target = input.movedim(1, -1).flatten(0, -2), target.flatten()
    return loss(input, target, **options)


_liger = functools.partial(_package, "liger_kernel.transformers.functional")
_liger_kl = functools.partial(_liger, "liger_kl_div")
_liger_ce = functools.partial(_by_rows, functools.partial(_liger, "liger_cross_entropy"))
_quack = functools.partial(_package, "quack.cross_entropy")
_quack_ce = functools.partial(_by_rows, functools.partial(_quack, "cross_entropy"))
PACKAGE_CE: dict[str, Loss] = {"liger": _liger_ce, "quack": _quack_ce}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A loss with its arguments: its data, and how we and the others compute it."""

    title: str
    reduction: str
    inputs: Callable[[Shape, torch.device], Data]
    ours: Loss
    torch: Loss
    packages: dict[str, Loss] = dataclasses.field(default_factory=dict)

    def contender(self, who: str) -> Loss | None:
        """How `who` computes the reduced loss of (input, target); None where it has none."""
        known = {"ours": self.ours, "eager": self.torch, "compile": self.torch}
        loss, reduction = (known | self.packages).get(who), self.reduction
        if loss is None:
            return None

        def reduced(input: Tensor, target: Tensor, **options: Any) -> Tensor:
            return loss(input, target, reduction=reduction, **options)

        return torch.compile(reduced, dynamic=False) if who == "compile" else reduced


def _cross_entropy(
    title: str, inputs: Callable[[Shape, torch.device], Data], packages: str
) -> Problem:
    theirs = {who: PACKAGE_CE[who] for who in packages.split()}
    return Problem(title, "mean", inputs, functional.cross_entropy, F.cross_entropy, theirs)


# quack has no label smoothing, and neither of the two has probabilities as targets.
PROBLEMS = {
    "mse": Problem("MSE", "mean", _values, functional.mse_loss, F.mse_loss),
    "kl-probs": Problem(
        "KL, probabilities",
        "batchmean",
        _distributions,
        functools.partial(functional.kl_div, log_input=False),
        functools.partial(_log_first, F.kl_div),
        {"liger": functools.partial(_log_first, _liger_kl)},
    ),
    "kl-log": Problem(
        "KL, log input",
        "batchmean",
        functools.partial(_distributions, logs="input"),
        functional.kl_div,
        F.kl_div,
        {"liger": _liger_kl},
    ),
    "kl-log-target": Problem(
        "KL, log both",
        "batchmean",
        functools.partial(_distributions, logs="input target"),
        functools.partial(functional.kl_div, log_target=True),
        functools.partial(F.kl_div, log_target=True),
        {"liger": functools.partial(_liger_kl, log_target=True)},
    ),
    "ce": _cross_entropy("Cross entropy", _classes, "liger quack"),
    "ce-weight": _cross_entropy("CE, class weights", _weighted, "liger quack"),
    "ce-ignore": _cross_entropy("CE, 30 % ignored", _ignored, "liger quack"),
    "ce-smooth": _cross_entropy(
        "CE, smoothing 0.1", functools.partial(_classes, label_smoothing=0.1), "liger"
    ),
    "ce-probs": _cross_entropy("CE, probabilities", _probabilities, ""),
    "ce-transposed": _cross_entropy("CE, transposed", _transposed, "liger quack"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem at a size; the CPU gets a smaller one, still beyond its caches."""

    problem: str
    dtype: str
    cuda_shape: Shape
    cpu_shape: Shape | None = (4096, 4096)  # None: not on the CPU
    quick: bool = False  # one of the three reference problems
    extra: bool = False  # runs only where --cases names it
    section: str = "cases"

    def shape(self, device: torch.device) -> Shape:
        shape = self.cuda_shape if device.type == "cuda" else self.cpu_shape
        assert shape is not None
        return shape

    def name(self, device: torch.device) -> str:
        prefix = "" if self.section == "cases" else f"{self.section}-"
        return f"{prefix}{self.problem}-{self.dtype}-{'x'.join(map(str, self.shape(device)))}"

    def data(self, device: torch.device) -> Data:
        """The same at every call."""
        torch.manual_seed(0)
        return PROBLEMS[self.problem].inputs(self.shape(device), device).to(DTYPES[self.dtype])


CASES = (
    Case("mse", "fp32", (32768, 32768), quick=True),
    Case("mse", "fp16", (32768, 32768)),
    Case("mse", "bf16", (32768, 32768)),
    Case("kl-probs", "fp32", (16384, 16384), quick=True),
    Case("kl-probs", "fp16", (16384, 16384)),
    Case("kl-probs", "bf16", (16384, 16384)),
    Case("kl-log", "fp32", (16384, 16384)),
    Case("kl-log", "fp16", (16384, 16384)),
    Case("kl-log", "bf16", (16384, 16384)),
    Case("kl-log-target", "fp32", (16384, 16384)),
    Case("kl-log-target", "fp16", (16384, 16384)),
    Case("kl-log-target", "bf16", (16384, 16384)),
    Case("ce", "fp32", (32768, 4096), (8192, 4096), quick=True),
    Case("ce", "fp16", (32768, 4096), (8192, 4096)),
    Case("ce", "bf16", (16384, 32768), (1024, 32768)),
    Case("ce", "bf16", (8192, 131072), (256, 131072)),
    Case("ce", "bf16", (4096, 262144), (128, 262144)),
    # vocabularies whose rows are not aligned
    Case("ce", "bf16", (16384, 50257), (512, 50257)),
    Case("ce", "bf16", (8192, 151937), (256, 151937)),
    Case("ce", "fp32", (32768, 1001), (16384, 1001)),
    # few classes
    Case("ce", "fp32", (4194304, 10), (1048576, 10)),
    Case("ce", "fp32", (1048576, 100), (131072, 100)),
    Case("ce", "fp32", (262144, 1000), (16384, 1000)),
    # images
    Case("ce", "fp32", (16, 21, 512, 512), (2, 21, 512, 512)),
    Case("ce", "fp16", (16, 21, 512, 512), (2, 21, 512, 512)),
    # arguments; rows of 16 KB and of 64 KB each
    Case("ce-weight", "bf16", (16384, 32768), (512, 32768)),
    Case("ce-weight", "fp32", (32768, 4096), (4096, 4096), extra=True),
    Case("ce-ignore", "bf16", (16384, 32768), (512, 32768)),
    Case("ce-ignore", "fp32", (32768, 4096), (4096, 4096), extra=True),
    Case("ce-smooth", "bf16", (16384, 32768), (512, 32768)),
    Case("ce-smooth", "fp32", (32768, 4096), (4096, 4096), extra=True),
    Case("ce-probs", "bf16", (8192, 32768), (512, 32768)),
    Case("ce-probs", "fp32", (32768, 4096), (4096, 4096), extra=True),
    Case("ce-transposed", "bf16", (8, 2048, 32768), (2, 256, 32768)),
    Case("ce-transposed", "fp32", (8, 4096, 4096), (2, 2048, 4096), extra=True),
)

# Time by size, from 2^16 to 2^28 elements: what the picture draws.
SIZES = tuple(
    Case(problem, dtype, shape, shape if elements < 1 << 26 else None, section="size")
    for problem, dtype, columns in (
        ("mse", "fp32", 4096),
        ("kl-probs", "fp32", 4096),
        ("ce", "bf16", 32768),
    )
    for elements in (1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28)
    for shape in ((elements // columns, columns),)
)

# Where the host is slower than the device.
SMALL = tuple(
    Case(problem, "fp32", shape, shape, section="small")
    for problem in ("mse", "kl-log", "ce")
    for shape in ((32, 1000), (256, 4096))
)

# A linear layer of (batch, features) to the last size, the loss, and SGD.
COMPILED = (
    Case("mse", "bf16", (16384, 512, 16384), (512, 64, 1024), section="compiled"),
    Case("kl-log", "bf16", (4096, 2048, 32000), (256, 64, 2048), section="compiled"),
    Case("ce", "bf16", (4096, 2048, 32000), (256, 64, 2048), section="compiled"),
)

ALL = (*CASES, *SIZES, *SMALL, *COMPILED)
