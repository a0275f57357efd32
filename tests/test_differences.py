"""The single cases that docs/differences.md lists, and that they are still differences.

Its numbered ones have tests of their own: docs/reliability.md names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import lossops

INF, NAN = float("inf"), float("nan")


def outcome(call: Callable[[], Tensor]) -> Any:
    """What a call returns, or the type of its error."""
    try:
        return call()
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return type(error)


@pytest.mark.parametrize("number", [Fraction(1, 4), Decimal("0.25")], ids=["Fraction", "Decimal"])
def test_label_smoothing_of_other_numbers(number: object, device: str) -> None:
    x, t = torch.randn(4, 5, device=device), torch.randint(5, (4,), device=device)
    found = lossops.cross_entropy(x, t, label_smoothing=number)  # type: ignore[arg-type]
    assert torch.equal(found, lossops.cross_entropy(x, t, label_smoothing=0.25))
    assert outcome(lambda: F.cross_entropy(x, t, label_smoothing=number)) is TypeError  # type: ignore[arg-type]


def test_one_row_with_a_target_of_one_element_and_smoothing(device: str) -> None:
    x, t = torch.randn(5, device=device), torch.tensor([3], device=device)
    found = lossops.cross_entropy(x, t, label_smoothing=0.1)
    torch.testing.assert_close(found, F.cross_entropy(x[None], t, label_smoothing=0.1))
    assert isinstance(outcome(lambda: F.cross_entropy(x, t, label_smoothing=0.1)), type)


def test_bool_operand_with_weight(device: str) -> None:
    x, w = torch.randn(4, 5, device=device), torch.rand(4, 5, device=device)
    t = torch.rand(4, 5, device=device) > 0.5
    found = lossops.mse_loss(x, t, weight=w)
    torch.testing.assert_close(found, F.mse_loss(x, t.float(), weight=w))
    assert isinstance(outcome(lambda: F.mse_loss(x, t, weight=w)), type)


def test_class_weights_of_another_dtype_under_autocast(device: str) -> None:
    x = torch.randn(4, 5, device=device, dtype=torch.bfloat16)
    w, t = torch.rand(5, device=device), torch.randint(5, (4,), device=device)
    with torch.autocast(device, torch.bfloat16):
        found = lossops.cross_entropy(x, t, w.double())
        theirs = outcome(lambda: F.cross_entropy(x, t, w.double()))
    torch.testing.assert_close(found, F.cross_entropy(x.float(), t, w))
    assert theirs is RuntimeError


def test_complex_operand_with_weight(device: str) -> None:
    x, w = torch.randn(4, 5, device=device), torch.rand(4, 5, device=device)
    z = torch.randn(4, 5, device=device, dtype=torch.complex64)
    assert outcome(lambda: lossops.mse_loss(x, z, weight=w)) is NotImplementedError
    assert isinstance(outcome(lambda: F.mse_loss(x, z, weight=w)), Tensor)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5)], ids=str)
def test_class_weights_in_another_shape(shape: tuple[int, int], device: str) -> None:
    x, w = torch.randn(2, 5, 3, device=device), torch.rand(5, device=device)
    t = torch.randint(5, (2, 3), device=device)
    theirs = outcome(lambda: F.cross_entropy(x, t, w.view(shape)))
    torch.testing.assert_close(theirs, F.cross_entropy(x, t, w))
    for function, smoothing in (
        (lossops.cross_entropy, 0.0),
        (lossops.cross_entropy, 0.1),
        (F.cross_entropy, 0.1),
    ):
        options = {"weight": w.view(shape), "label_smoothing": smoothing}
        assert outcome(lambda f=function, o=options: f(x, t, **o)) is RuntimeError


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_logits_without_elements_next_to_probabilities(dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(0, 5, device=device, dtype=dtype)
    q = torch.zeros(0, 5, device=device)
    assert outcome(lambda: lossops.cross_entropy(x, q)) is RuntimeError
    assert isinstance(outcome(lambda: F.cross_entropy(x, q)), Tensor)


def test_ignored_rows_without_classes(device: str) -> None:
    x = torch.zeros(2, 0, device=device)
    t = torch.full((2,), -100, device=device)
    found = lossops.cross_entropy(x, t, reduction="sum", label_smoothing=0.1)
    assert found.item() == 0
    theirs = outcome(lambda: F.cross_entropy(x, t, reduction="sum", label_smoothing=0.1))
    assert isinstance(theirs, type) or theirs.isnan()


def test_infinite_target_of_kl_div(device: str) -> None:
    x, t = torch.tensor([2.0], device=device), torch.tensor([INF], device=device)
    t.requires_grad_()
    for call, is_expected in ((lossops.kl_div, Tensor.isposinf), (F.kl_div, Tensor.isnan)):
        loss = call(x, t, reduction="sum")
        (grad,) = torch.autograd.grad(loss, t)
        assert is_expected(loss) and is_expected(grad)


def test_infinite_probability_at_the_largest_logit(device: str) -> None:
    x = torch.tensor([[1.0, 2.0, 0.0]], device=device, requires_grad=True)
    p = torch.tensor([[0.5, INF, 0.5]], device=device)
    assert lossops.cross_entropy(x, p).isnan()
    assert F.cross_entropy(x, p).item() == INF
    assert F.cross_entropy(x, p.roll(-1, 1)).item() == INF
    found = lossops.cross_entropy(x, p.roll(-1, 1))
    # Which of the two on CUDA depends on the kernel.
    assert found.item() == INF or (device == "cuda" and found.isnan())
    for call, expected in (
        (lossops.cross_entropy, [[NAN, NAN, INF]]),
        (F.cross_entropy, [[NAN, INF, INF]]),
    ):
        loss = call(x, p.roll(-1, 1))
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad.nan_to_num(nan=7), torch.tensor(expected).nan_to_num(nan=7).to(x))


def test_smoothing_over_huge_logits(device: str) -> None:
    """The distances from the largest logit add up to more than float32 holds, the loss does not."""
    x = torch.tensor([[3e38, 0.0, 0.0]], device=device)
    t = torch.tensor([0], device=device)
    for smoothing in (0.1, 1.0):
        found = lossops.cross_entropy(x, t, label_smoothing=smoothing)
        exact = F.cross_entropy(x.double(), t, label_smoothing=smoothing)
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
        assert F.cross_entropy(x, t, label_smoothing=smoothing).item() == INF


def test_masked_class_index_with_all_of_the_target_smoothed(device: str) -> None:
    x = torch.tensor([[0.5, -INF, 1.0]], device=device)
    t = torch.tensor([1], device=device)
    assert lossops.cross_entropy(x, t, label_smoothing=1.0).item() == INF
    assert F.cross_entropy(x, t, label_smoothing=1.0).isnan()


def test_masked_logit_of_class_weight_zero_with_smoothing(device: str) -> None:
    x = torch.tensor([[0.5, -INF, 1.0]], device=device)
    t = torch.tensor([0], device=device)
    w = torch.tensor([1.0, 0.0, 2.0], device=device)
    found = lossops.cross_entropy(x, t, w, label_smoothing=0.1, reduction="sum")
    log_p = torch.log_softmax(x.double(), 1)[0]
    exact = -0.9 * log_p[0] - 0.1 / 3 * (log_p[0] + 2 * log_p[2])
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    assert F.cross_entropy(x, t, w, label_smoothing=0.1, reduction="sum").isnan()


def test_infinite_class_weights(device: str) -> None:
    """A row of a finite weight is as without the infinite one; a mean over both is NaN."""
    x = torch.randn(3, 4, device=device)
    t = torch.tensor([0, 1, 2], device=device)
    w = torch.tensor([1.0, INF, 2.0, 3.0], device=device)
    rows = lossops.cross_entropy(x, t, w, reduction="none")
    expected = F.cross_entropy(x, t, w, reduction="none")
    torch.testing.assert_close(rows, expected)
    assert rows[1].item() == INF
    assert lossops.cross_entropy(x, t, w).isnan() and F.cross_entropy(x, t, w).isnan()
    smooth = lossops.cross_entropy(x, t, w, reduction="none", label_smoothing=0.1)
    assert not smooth.isfinite().any()
    assert not F.cross_entropy(x, t, w, reduction="none", label_smoothing=0.1).isfinite().any()


def test_compiled_mse_loss_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    x, t = torch.randn(4, 5), torch.randn(5)
    compiled = torch.compile(lossops.mse_loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, t), lossops.mse_loss(x, t.expand(4, 5)))
    assert not [w for w in recwarn if "Using a target size" in str(w.message)]


def compilations(call: Callable[[float], Tensor], values: Sequence[float]) -> int:
    """How often torch.compile compiles a call of numbers, one after the other."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for value in values:
        torch.testing.assert_close(compiled(value), call(value))
    return counter.frame_count


def test_compiled_again_for_each_temperature() -> None:
    x, t = torch.randn(4, 5), torch.randint(5, (4,))
    temperatures = [0.5, 0.75, 1.5, 2.0]
    count = compilations(lambda n: lossops.cross_entropy(x, t, temperature=n), temperatures)
    assert count == len(temperatures)
    assert compilations(lambda n: lossops.cross_entropy(x / n, t), temperatures) <= 2
    indices = [1, 2, 3, 4]
    count = compilations(lambda n: lossops.cross_entropy(x, t, ignore_index=int(n)), indices)
    assert count == len(indices)
