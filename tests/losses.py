"""The table of losses. It drives every generic test: a new loss adds one row to `LOSSES`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lossops

Shape = tuple[int, ...]
LossFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Sample:
    """One call of a loss: its tensors by argument name, its other arguments, what has gradients."""

    name: str
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    differentiable: tuple[str, ...]

    def call(self, function: LossFunction) -> Tensor:
        """`function` of the sample, without torch's warning about sizes that differ."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using a target size")
            return function(
                self.tensors["input"],
                self.tensors["target"],
                **{k: v for k, v in self.tensors.items() if k not in ("input", "target")},
                **self.options,
            )

    def renamed(self, extra: str) -> Sample:
        return replace(self, name=f"{self.name} [{extra}]")

    def with_options(self, **options: Any) -> Sample:
        return replace(self, options={**self.options, **options})

    def with_tensors(self, **tensors: Tensor) -> Sample:
        return replace(self, tensors={**self.tensors, **tensors})

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """The sample with `change` applied to each of its tensors."""
        return replace(self, tensors={k: change(v) for k, v in self.tensors.items()})

    def double(self) -> Sample:
        """The sample with its floating-point tensors in float64."""
        return self.map(lambda t: t.double() if t.is_floating_point() else t)

    def leaves(self) -> Sample:
        """The sample over leaf tensors with the same memory and strides, requiring gradients."""
        return replace(
            self,
            tensors={
                k: v.detach().requires_grad_(k in self.differentiable)
                for k, v in self.tensors.items()
            },
        )


@dataclass(frozen=True)
class Result:
    """What a call returned, and the gradients of `(grad_output * value).sum()` by argument."""

    value: Tensor
    gradients: Mapping[str, Tensor]


def evaluate(
    function: LossFunction,
    sample: Sample,
    grad_output: Tensor | Callable[[], Tensor] | None = None,
) -> Result:
    """Value and gradients of `function` at `sample`.

    `grad_output` is 1 unless given, or what it returns when called between forward and backward.
    """
    sample = sample.leaves()
    value = sample.call(function)
    if not sample.differentiable:
        return Result(value.detach(), {})
    if grad_output is None:
        grad_output = torch.ones_like(value)
    elif callable(grad_output):
        grad_output = grad_output()
    wanted = [sample.tensors[name] for name in sample.differentiable]
    gradients = torch.autograd.grad(value, wanted, grad_output.to(value.dtype))
    return Result(value.detach(), dict(zip(sample.differentiable, gradients, strict=True)))


@dataclass(frozen=True)
class Variant:
    """One way to use a loss: how its tensors are made from a shape, and its options."""

    name: str
    make: Callable[[Shape, torch.dtype], dict[str, Tensor]]
    differentiable: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def sample(
        self,
        shape: Shape,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Sample:
        """A sample whose `input` has `shape`. Data is drawn on the CPU: alike on all devices."""
        tensors = {k: v.to(device) for k, v in self.make(shape, dtype).items()}
        merged = {**self.options, **options}
        settings = " ".join(f"{k}={v}" for k, v in merged.items())
        name = f"{self.name} {tuple(shape)} {dtype} {device} {settings}"
        return Sample(name, tensors, merged, self.differentiable)


@dataclass(frozen=True)
class Loss:
    """A row of the table.

    `reference` takes `function`'s arguments and is made of torch.nn.functional; given float64
    tensors it is the truth. `magnitudes` takes a float64 sample and |grad_output| and returns,
    under "value" and the differentiable arguments' names, the size of the numbers that are added
    up to make each result: rounding errors are judged as multiples of it, since a result may
    itself be near 0 by cancellation. `tolerance` is how many float32 (or float64) roundings of
    that size a result may be away from the truth, on top of its rounding to its own dtype.
    """

    name: str
    function: LossFunction
    module: type[torch.nn.Module]
    torch_module: type[torch.nn.Module]
    reference: LossFunction
    reductions: tuple[str, ...]
    variants: tuple[Variant, ...]
    small_shapes: tuple[Shape, ...]
    size_to_shape: tuple[Callable[[int], Shape], ...]
    magnitudes: Callable[[Sample, Tensor], dict[str, Tensor]]
    tolerance: float
    elementwise: bool
    # Given a number of terms: tensors whose terms float32 holds exactly, and their exact sum.
    sum_problem: Callable[[int], tuple[dict[str, Tensor], Tensor]]

    @property
    def op(self) -> Any:
        return getattr(torch.ops.lossops, self.name).default

    @property
    def forward_op(self) -> Any:
        return getattr(torch.ops.lossops, f"{self.name}_forward").default

    def samples(
        self, *, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Iterator[Sample]:
        """Each variant with each reduction and each small shape."""
        for variant in self.variants:
            for reduction in self.reductions:
                for shape in self.small_shapes:
                    yield variant.sample(shape, device=device, dtype=dtype, reduction=reduction)

    def variant(self, name: str) -> Variant:
        return next(v for v in self.variants if v.name == name)


def sum_to(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the dimensions along which `shape` was broadcast."""
    return tensor.sum_to_size(shape) if tensor.shape != shape else tensor


# --- mse_loss -----------------------------------------------------------------------------------


def _mse_tensors(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"input": torch.randn(shape).to(dtype), "target": torch.randn(shape).to(dtype)}


def _mse_weighted(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return {**_mse_tensors(shape, dtype), "weight": (torch.rand(shape) + 0.25).to(dtype)}


def mse_loss_reference(
    input: Tensor, target: Tensor, *, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """torch's mse_loss of promoted arguments: torch 2.10's backward refuses mixed ones."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    if dtype.is_floating_point:
        input, target = input.to(dtype), target.to(dtype)
    return F.mse_loss(input, target, reduction=reduction, weight=weight)


def _mse_magnitudes(sample: Sample, grad_output: Tensor) -> dict[str, Tensor]:
    x, t = torch.broadcast_tensors(
        sample.tensors["input"].double(), sample.tensors["target"].double()
    )
    given = sample.tensors.get("weight")
    weight = torch.ones_like(x) if given is None else given.expand_as(x)
    squares = (x - t).square()
    reduction = sample.options.get("reduction", "mean")
    value, factor, share = _reduce(
        weight * squares, reduction, grad_output, x.numel() if given is None else given.sum()
    )
    slope = factor * 2 * weight * (x - t).abs()
    found = {
        "value": value,
        "input": sum_to(slope, sample.tensors["input"].shape),
        "target": sum_to(slope, sample.tensors["target"].shape),
    }
    if given is not None:
        # d mean / d weight = ((x - t)^2 - mean) / sum(weight)
        extra = value if share else torch.zeros_like(value)
        found["weight"] = sum_to(factor * (squares + extra), given.shape)
    return found


def _reduce(
    terms: Tensor, reduction: str, grad_output: Tensor, divisor: float | Tensor
) -> tuple[Tensor, Tensor, bool]:
    """Reduced `terms`, |d result / d term| times |grad_output|, and whether a mean was taken."""
    grad_output = grad_output.abs().double()
    if reduction == "none":
        return terms, grad_output, False
    if reduction == "sum":
        return terms.sum(), grad_output.expand_as(terms), False
    return terms.sum() / divisor, (grad_output / divisor).expand_as(terms), True


# --- kl_div -------------------------------------------------------------------------------------


def _log_probabilities(shape: Shape) -> Tensor:
    scores = 2 * torch.randn(shape)
    return F.log_softmax(scores, -1) if shape else -scores.abs()


def _kl_tensors(
    log_input: bool, log_target: bool
) -> Callable[[Shape, torch.dtype], dict[str, Tensor]]:
    def make(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        x, t = _log_probabilities(shape), _log_probabilities(shape)
        if not log_input:
            # Kept off zero: rounding to float16 would otherwise divide by zero.
            x = x.exp().clamp(min=2.0**-14)
        return {"input": x.to(dtype), "target": (t if log_target else t.exp()).to(dtype)}

    return make


def kl_div_reference(
    input: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    log_target: bool = False,
    log_input: bool = True,
) -> Tensor:
    """torch's kl_div, of the logarithm of `input` where `log_input` is false."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
        return F.kl_div(
            input if log_input else input.log(), target, reduction=reduction, log_target=log_target
        )


def _kl_magnitudes(sample: Sample, grad_output: Tensor) -> dict[str, Tensor]:
    x, t = torch.broadcast_tensors(sample.tensors["input"], sample.tensors["target"])
    log_target = sample.options.get("log_target", False)
    log_input = sample.options.get("log_input", True)
    log_t, t = (t, t.exp()) if log_target else (t.log(), t)
    log_x = x if log_input else x.log()
    log_t = log_t.nan_to_num(neginf=0.0).abs()
    log_x = log_x.abs()
    size = torch.maximum(log_t, log_x).clamp(min=1)
    slope = log_t + log_x + 1
    reduction = sample.options.get("reduction", "mean")
    batch = sample.tensors["input"].shape[:1].numel()
    divisor = batch if reduction == "batchmean" else x.numel()
    value, factor, _ = _reduce(t * size, reduction, grad_output, divisor)
    return {
        "value": value,
        "input": sum_to(factor * (t if log_input else t / x), sample.tensors["input"].shape),
        "target": sum_to(
            factor * (t * slope if log_target else slope), sample.tensors["target"].shape
        ),
    }


# --- cross_entropy ------------------------------------------------------------------------------


def _ce_tensors(
    *,
    probabilities: bool = False,
    weighted: bool = False,
    ignored: bool = False,
    index_dtype: torch.dtype = torch.int64,
) -> Callable[[Shape, torch.dtype], dict[str, Tensor]]:
    def make(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
        class_dim = 0 if len(shape) == 1 else 1
        classes = shape[class_dim]
        tensors = {"input": (3 * torch.randn(shape)).to(dtype)}
        if probabilities:
            tensors["target"] = F.softmax(torch.randn(shape), class_dim).to(dtype)
        else:
            rows = shape[:class_dim] + shape[class_dim + 1 :]
            largest = min(classes, torch.iinfo(index_dtype).max + 1)
            target = torch.randint(0, largest, rows)
            if ignored:
                kept = torch.rand(rows) >= 0.3
                kept.view(-1)[:1] = True  # with no row kept, there is no derivative of a mean
                target = torch.where(kept, target, IGNORED)
            tensors["target"] = target.to(index_dtype)
        if weighted:
            tensors["weight"] = (torch.rand(classes) + 0.25).to(dtype)
        return tensors

    return make


IGNORED = 255


def cross_entropy_reference(
    input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> Tensor:
    """torch's cross_entropy, by way of what it takes with every other argument.

    That is int64 indices, and for (C,) logits an index of shape (): its backward refuses (1,).
    """
    if not target.is_floating_point():
        target = target.long()
        if input.dim() == 1 and target.shape == (1,):
            target = target[0]
        ignored = options.get("ignore_index", -100)
        if not -(2**31) <= ignored < 2**31:
            # torch's CUDA kernel asserts, for good, where the index does not fit 32 bits
            target = torch.where(target == ignored, -100, target)
            options["ignore_index"] = -100
    return F.cross_entropy(input, target, weight, **options)


def _ce_magnitudes(sample: Sample, grad_output: Tensor) -> dict[str, Tensor]:
    x, target = sample.tensors["input"], sample.tensors["target"]
    smoothing = sample.options.get("label_smoothing", 0.0)
    class_dim = 0 if x.dim() == 1 else 1
    classes = x.shape[class_dim]
    given = sample.tensors.get("weight")
    weight = x.new_ones(classes) if given is None else given
    # (C,) to (1, C, 1, ...), to line up with `input`
    weight = weight.view(-1, *[1] * (x.dim() - class_dim - 1))
    if target.is_floating_point():
        kept = torch.ones_like(target.sum(class_dim, keepdim=True), dtype=torch.bool)
        labels, divisor = target, torch.tensor(float(kept.numel()))
    else:
        index = target.long().reshape(x.sum(class_dim).shape)
        kept = (index != sample.options.get("ignore_index", -100)).unsqueeze(class_dim)
        index = torch.where(kept.squeeze(class_dim), index, 0)
        labels = F.one_hot(index, classes).movedim(-1, class_dim).double()
        divisor = (labels * weight * kept).sum()
        # weights of both signs cancel
        divisor = divisor.square() / (labels * weight.abs() * kept).sum()
    weight = weight.abs()
    labels = (labels.abs() * (1 - smoothing) + smoothing / classes) * kept
    size = x.abs() + torch.logsumexp(x, class_dim, keepdim=True).abs() + 1
    rows = (labels * weight * size).sum(class_dim)
    reduction = sample.options.get("reduction", "mean")
    value, factor, _ = _reduce(rows, reduction, grad_output.double(), divisor.to(x.device))
    factor = factor.unsqueeze(class_dim)
    total = (labels * weight).sum(class_dim, keepdim=True)
    softmax = F.softmax(x, class_dim)
    other_dims = [d for d in range(x.dim()) if d != class_dim]
    by_class = factor * labels * size
    return {
        "value": value,
        "input": factor * (total * softmax * size + labels * weight),
        "target": factor * weight * size,
        "weight": by_class.sum(other_dims) if other_dims else by_class,
    }


def _mse_sum(terms: int) -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randint(1, 2**11, (terms,)).float()
    return {"input": x, "target": torch.zeros_like(x)}, x.double().square().sum()


def _kl_sum(terms: int) -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randint(1, 2**11, (terms,)).float()
    return {"input": -x, "target": torch.ones_like(x)}, x.double().sum()


def _ce_sum(terms: int) -> tuple[dict[str, Tensor], Tensor]:
    x, t = torch.zeros(terms, 2), torch.zeros(terms, dtype=torch.int64)
    row = lossops.cross_entropy(x[:1], t[:1], reduction="sum")  # log 2, rounded
    return {"input": x, "target": t}, row.double() * terms


def _rows_of(size: int) -> Shape:
    return (3, size)


def _columns_of(size: int) -> Shape:
    return (size, 5)


def _pixels_of(size: int) -> Shape:
    return (2, 3, size)


def _vector_of(size: int) -> Shape:
    return (size,)


_MSE_BOTH = ("input", "target")
_KL_BOTH = ("input", "target")

LOSSES: tuple[Loss, ...] = (
    Loss(
        name="mse_loss",
        function=lossops.mse_loss,
        module=lossops.MSELoss,
        torch_module=torch.nn.MSELoss,
        reference=mse_loss_reference,
        reductions=("none", "mean", "sum"),
        variants=(
            Variant("plain", _mse_tensors, _MSE_BOTH),
            Variant("weighted", _mse_weighted, (*_MSE_BOTH, "weight")),
        ),
        small_shapes=((3, 5), (7,), (), (0, 3), (2, 3, 4, 2)),
        size_to_shape=(_vector_of, _rows_of),
        magnitudes=_mse_magnitudes,
        # 3 roundings in a term (the difference counts twice), the sum, and its division
        tolerance=6,
        elementwise=True,
        sum_problem=_mse_sum,
    ),
    Loss(
        name="kl_div",
        function=lossops.kl_div,
        module=lossops.KLDivLoss,
        torch_module=torch.nn.KLDivLoss,
        reference=kl_div_reference,
        reductions=("none", "mean", "sum", "batchmean"),
        variants=(
            Variant("plain", _kl_tensors(True, False), _KL_BOTH),
            Variant("log_target", _kl_tensors(True, True), _KL_BOTH, {"log_target": True}),
            Variant("fused_log", _kl_tensors(False, False), _KL_BOTH, {"log_input": False}),
            Variant(
                "fused_log_log_target",
                _kl_tensors(False, True),
                _KL_BOTH,
                {"log_input": False, "log_target": True},
            ),
        ),
        small_shapes=((3, 5), (7,), (), (0, 3), (2, 3, 4, 2)),
        size_to_shape=(_vector_of, _rows_of),
        magnitudes=_kl_magnitudes,
        # 4 in a term by contract, the sum, and its division
        tolerance=6,
        elementwise=True,
        sum_problem=_kl_sum,
    ),
    Loss(
        name="cross_entropy",
        function=lossops.cross_entropy,
        module=lossops.CrossEntropyLoss,
        torch_module=torch.nn.CrossEntropyLoss,
        reference=cross_entropy_reference,
        reductions=("none", "mean", "sum"),
        variants=(
            Variant("indices", _ce_tensors(), ("input",)),
            Variant("smoothed", _ce_tensors(), ("input",), {"label_smoothing": 0.1}),
            Variant("weighted", _ce_tensors(weighted=True), ("input",)),
            Variant(
                "all_options",
                _ce_tensors(weighted=True, ignored=True),
                ("input",),
                {"label_smoothing": 0.2, "ignore_index": IGNORED},
            ),
            Variant("ignored", _ce_tensors(ignored=True), ("input",), {"ignore_index": IGNORED}),
            Variant(
                "uint8",
                _ce_tensors(ignored=True, weighted=True, index_dtype=torch.uint8),
                ("input",),
                {"label_smoothing": 0.1, "ignore_index": IGNORED},
            ),
            Variant("int32", _ce_tensors(index_dtype=torch.int32), ("input",)),
            Variant("probabilities", _ce_tensors(probabilities=True), ("input", "target")),
            Variant(
                "probabilities_all_options",
                _ce_tensors(probabilities=True, weighted=True),
                ("input", "target", "weight"),
                {"label_smoothing": 0.1},
            ),
        ),
        small_shapes=((4, 5), (7,), (0, 3), (2, 3, 4), (2, 5, 2, 3), (3, 1)),
        size_to_shape=(_rows_of, _columns_of, _pixels_of, _vector_of),
        magnitudes=_ce_magnitudes,
        # maximum, exponentials, their sum, logarithm, difference, weights, rows, division
        tolerance=8,
        elementwise=False,
        sum_problem=_ce_sum,
    ),
)

BY_NAME = {loss.name: loss for loss in LOSSES}
VARIANTS = tuple((loss, variant) for loss in LOSSES for variant in loss.variants)
VARIANT_IDS = tuple(f"{loss.name}-{variant.name}" for loss, variant in VARIANTS)
LOSS_IDS = tuple(loss.name for loss in LOSSES)
