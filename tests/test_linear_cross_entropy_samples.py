"""linear_cross_entropy on OpInfo's samples: where torch draws them, and those that 2.13 drew."""

from __future__ import annotations

import builtins
from typing import Any

import op_samples
import pytest
import torch
from checks import assert_raises
from numerics import DTYPES
from test_linear_cross_entropy import Call, composed, needs_torchs, workspace_of
from torch import Tensor

import lossops

per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
IS_SAVED_TORCH = torch.__version__.startswith(op_samples.SAVED_TORCH)
needs_saved_torch = pytest.mark.skipif(not IS_SAVED_TORCH, reason="needs torch 2.13")


@pytest.fixture
def needs_expecttest() -> None:
    pytest.importorskip("expecttest", reason="torch's samples need expecttest")


def call_of(sample: dict[str, Any], device: str) -> Call:
    tensors = {name: x.clone().to(device) for name, x in sample["tensors"].items()}
    return Call(tensors, sample["options"])


def check(call: Call, exact: dict[str, Tensor], **chunking: Any) -> None:
    """The loss and the gradients differ from `exact` by a few roundings more than torch's do.

    Torch's own error counts up to 32 eps of the largest element. On the CPU it is at most 15 eps.
    """
    found, theirs = call.run(lossops.linear_cross_entropy, **chunking), call.run(composed)
    assert found.keys() == theirs.keys() == exact.keys()
    for name, value in found.items():
        assert value.dtype == theirs[name].dtype, name
        assert value.device == theirs[name].device, name
        assert value.shape == theirs[name].shape == exact[name].shape, name
        expected = exact[name].double().to(value.device)
        error, of_torch = ((each[name].double() - expected).abs().max() for each in (found, theirs))
        eps = torch.finfo(value.dtype).eps
        unit = eps * expected.abs().max()
        allowed = of_torch.clamp(max=32 * unit) + 8 * unit + 1e-7 * (eps > 1e-4)
        assert error <= allowed, f"{name} of {call}: {error:.2g}, torch {of_torch:.2g}"


def check_error(error: dict[str, Any], device: str) -> None:
    call = call_of(error, device)
    kind = getattr(builtins, error["raises"])
    if call.tensors["input"].dim() == 3:
        kind = ValueError  # lossops takes (..., H): here the target does not fit
    assert_raises(kind, lambda: lossops.linear_cross_entropy(**call.tensors, **call.options))


@needs_torchs
@pytest.mark.usefixtures("needs_expecttest")
@per_dtype
def test_drawn_samples(dtype: torch.dtype, device: str) -> None:
    count = 0
    for sample in op_samples.drawn(device, dtype):
        call = call_of(sample, device)
        chunking = sample["chunking"]
        options = None if chunking is None else torch.nn.LinearCrossEntropyOptions(**chunking)
        check(call, call.double().run(composed), options=options)
        count += 1
    assert count == op_samples.COUNTS[dtype] if IS_SAVED_TORCH else count > 0


@needs_torchs
@pytest.mark.usefixtures("needs_expecttest")
def test_drawn_errors(device: str) -> None:
    errors = list(op_samples.drawn_errors(device))
    for error in errors:
        check_error(error, device)
    assert len(errors) == op_samples.ERRORS if IS_SAVED_TORCH else errors


@per_dtype
def test_saved_samples(dtype: torch.dtype, device: str) -> None:
    """Against what torch 2.13 computed on the CPU in float64; with chunks of the same rows."""
    samples = op_samples.saved()["samples"][dtype]
    assert len(samples) == op_samples.COUNTS[dtype]
    for sample in samples:
        call = call_of(sample, device)
        chunking = sample["chunking"] or {}
        options: dict[str, Any] = {}
        if chunking.get("batch_chunk_size"):
            options["max_workspace_bytes"] = workspace_of(chunking["batch_chunk_size"], call)
        if chunking.get("acc_dtype"):
            options["accum_dtype"] = chunking["acc_dtype"]
        check(call, sample["exact"], **options)


def test_saved_errors(device: str) -> None:
    errors = op_samples.saved()["errors"]
    assert len(errors) == op_samples.ERRORS
    for error in errors:
        check_error(error, device)


def assert_same_arguments(saved: dict[str, Any], drawn: dict[str, Any]) -> None:
    for name, value in drawn.items():
        if name != "tensors":
            assert saved[name] == value, name
    assert saved["tensors"].keys() == drawn["tensors"].keys()
    for name, tensor in drawn["tensors"].items():
        assert saved["tensors"][name].dtype == tensor.dtype, name
        assert torch.equal(saved["tensors"][name], tensor), name


@needs_saved_torch
@pytest.mark.usefixtures("needs_expecttest")
@per_dtype
def test_saved_samples_are_torchs(dtype: torch.dtype) -> None:
    """The file holds what torch 2.13 draws. If this fails, run tools/save_op_samples.py."""
    samples = op_samples.saved()["samples"][dtype]
    for saved, drawn in zip(samples, op_samples.drawn("cpu", dtype), strict=True):
        assert_same_arguments(saved, drawn)
        exact = {name: x.to(saved["exact"][name]) for name, x in op_samples.exact(drawn).items()}
        torch.testing.assert_close(saved["exact"], exact)


@needs_saved_torch
@pytest.mark.usefixtures("needs_expecttest")
def test_saved_errors_are_torchs() -> None:
    errors = op_samples.saved()["errors"]
    for saved, drawn in zip(errors, op_samples.drawn_errors("cpu"), strict=True):
        assert_same_arguments(saved, drawn)
