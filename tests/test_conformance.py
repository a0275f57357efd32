"""PyTorch's own samples of these losses: OpInfo's and ModuleInfo's, against float64.

They are torch's internals, so they are counted for the torch that `make test` pins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from checks import check
from losses import BY_NAME, LossFunction, Sample
from torch import Tensor

import lossops

pytest.importorskip("expecttest", reason="torch's samples need expecttest")

from torch.testing._internal import common_methods_invocations as methods
from torch.testing._internal import common_modules as modules

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# For a dtype on a device.
COUNTED_TORCH = "2.13."
OP_SAMPLES = {"cross_entropy": 21, "kl_div": 16, "mse_loss": 6}
MODULE_SAMPLES = {"cross_entropy": 105, "kl_div": 10, "mse_loss": 8}
MODULE_ERRORS = {"cross_entropy": 7}


def assert_all(count: int, expected: int) -> None:
    if torch.__version__.startswith(COUNTED_TORCH):
        assert count == expected
    else:
        assert count > 0


# The values between those of a strided tensor: a loss that reads one is NaN, or raises.
POISON = float("nan")
NO_CLASS = 10**6


@cache
def op_info(loss: str) -> Any:
    return next(op for op in methods.op_db if op.name == f"nn.functional.{loss}")


@cache
def module_info(loss: str) -> Any:
    return next(m for m in modules.module_db if m.module_cls is BY_NAME[loss].torch_module)


def sample_of(name: str, tensors: dict[str, Tensor], options: dict[str, Any]) -> Sample:
    """Gradients for the input and, where it is not of class indices, for the target."""
    tensors = {k: v.detach() for k, v in tensors.items() if v is not None}
    differentiable = ("input", "target") if tensors["target"].is_floating_point() else ("input",)
    return Sample(name, tensors, options, differentiable)


def op_samples(loss: str, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    for i, given in enumerate(op_info(loss).sample_inputs(device, dtype, requires_grad=True)):
        options = dict(given.kwargs)
        tensors = {"input": given.input, "target": given.args[0]}
        if "weight" in options:
            tensors["weight"] = options.pop("weight")
        yield sample_of(f"{loss} OpInfo {i} {dtype} {device} {options}", tensors, options)


def module_samples(loss: str, device: str, dtype: torch.dtype) -> Iterator[Sample]:
    info = module_info(loss)
    for given in info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=True, training=True
    ):
        assert not given.constructor_input.args, "the constructor's arguments have no names"
        options = dict(given.constructor_input.kwargs)
        x, target = given.forward_input.args
        tensors = {"input": x, "target": target}
        if "weight" in options:
            tensors["weight"] = options.pop("weight")
        if options.get("log_target", False):
            # The logarithm of a 0 that was drawn: a listed deviation, with a test of its own.
            tensors["target"] = target.detach().clamp(min=torch.finfo(dtype).min)
        yield sample_of(f"{loss} ModuleInfo {given.desc} {dtype} {device}", tensors, options)


def module_call(loss: str) -> LossFunction:
    """The module as a function, which takes the constructor's arguments too."""

    def call(input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return BY_NAME[loss].module(**options)(input, target)

    return call


def poisoned(tensor: Tensor) -> Tensor:
    """The same values, each beside one that must not be read."""
    poison = POISON if tensor.is_floating_point() else NO_CLASS
    gaps = tensor.new_full((*tensor.shape, 2), poison)
    gaps[..., 0] = tensor
    return gaps[..., 0]


def divergence_samples(device: str, dtype: torch.dtype) -> Iterator[Sample]:
    """Those of KLDivLoss between distributions: what torch draws has NaN among its logarithms."""
    for sample in module_samples("kl_div", device, dtype):
        draws = [torch.randn(t.shape, device=device) for t in sample.tensors.values()]
        x, target = (t.log_softmax(-1) if t.dim() else -t.abs() for t in draws)
        if not sample.options.get("log_target", False):
            target = target.exp()
        yield sample.with_tensors(input=x.to(dtype), target=target.to(dtype))


def contiguous(tensor: Tensor) -> Tensor:
    return tensor


Layout = Callable[[Tensor], Tensor]
per_layout = pytest.mark.parametrize("layout", [contiguous, poisoned])


def laid(samples: Iterator[Sample], layout: Layout) -> list[Sample]:
    return [sample.map(layout).renamed(layout.__name__) for sample in samples]


@per_layout
@per_dtype
@pytest.mark.parametrize("loss", OP_SAMPLES)
def test_op_samples(loss: str, dtype: torch.dtype, layout: Layout, device: str) -> None:
    samples = laid(op_samples(loss, device, dtype), layout)
    assert_all(len(samples), OP_SAMPLES[loss])
    for sample in samples:
        check(BY_NAME[loss], sample, not_worse_than_torch=True)


@per_layout
@per_dtype
@pytest.mark.parametrize("loss", MODULE_SAMPLES)
def test_module_samples(loss: str, dtype: torch.dtype, layout: Layout, device: str) -> None:
    samples = laid(module_samples(loss, device, dtype), layout)
    assert_all(len(samples), MODULE_SAMPLES[loss])
    for sample in samples:
        check(BY_NAME[loss], sample, function=module_call(loss), not_worse_than_torch=True)


@per_layout
@per_dtype
def test_divergences(dtype: torch.dtype, layout: Layout, device: str) -> None:
    for sample in laid(divergence_samples(device, dtype), layout):
        result = check(BY_NAME["kl_div"], sample, function=module_call("kl_div"))
        assert result.value.isfinite().all()


@per_dtype
def test_module_errors(dtype: torch.dtype, device: str) -> None:
    """What torch's module refuses, ours does, with an error of the same type."""
    info = module_info("cross_entropy")
    if info.module_error_inputs_func is None and not torch.__version__.startswith(COUNTED_TORCH):
        pytest.skip("this torch has no such samples")
    count = 0
    for error in info.module_error_inputs_func(
        info, device=device, dtype=dtype, requires_grad=False, training=True
    ):
        given = error.module_error_input
        module = lossops.CrossEntropyLoss(
            *given.constructor_input.args, **given.constructor_input.kwargs
        )
        with pytest.raises(error.error_type):
            module(*given.forward_input.args, **given.forward_input.kwargs)
        count += 1
    assert_all(count, MODULE_ERRORS["cross_entropy"])
