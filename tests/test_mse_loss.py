"""mse_loss: what every call must return, case by case."""

from __future__ import annotations

import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises, check, words_of_dtype, words_of_shape
from losses import BY_NAME, LossFunction, Sample, evaluate
from numerics import DTYPES, HALF_TYPES, assert_same, assert_within, ulp
from torch import Tensor

import lossops

MSE = BY_NAME["mse_loss"]
OP = torch.ops.lossops.mse_loss
INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
COMPLEX = (torch.complex64, torch.complex128)
ANY_ERROR = (RuntimeError, ValueError, TypeError)

per_call = pytest.mark.parametrize("call", [lossops.mse_loss, OP], ids=["function", "op"])
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# A pair of sizes that differ makes mse_loss warn, as torch's does.
sizes_may_differ = pytest.mark.filterwarnings("ignore:Using a target size")


def sample_of(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
) -> Sample:
    """A sample of given tensors; the floating-point ones have gradients."""
    tensors = {"input": input, "target": target}
    if weight is not None:
        tensors["weight"] = weight
    differentiable = tuple(k for k, v in tensors.items() if v.is_floating_point())
    return Sample("mse_loss", tensors, {"reduction": reduction}, differentiable)


def test_signature() -> None:
    parameters = inspect.signature(lossops.mse_loss).parameters
    theirs = inspect.signature(F.mse_loss).parameters
    assert list(parameters) == list(theirs)  # in torch's order, by position too
    assert parameters.keys() >= {"reduction", "weight"}
    for name, parameter in parameters.items():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == theirs[name].default
    assert str(OP.default._schema) == (
        "lossops::mse_loss(Tensor input, Tensor target, *, "
        'str reduction="mean", Tensor? weight=None) -> Tensor'
    )


@pytest.mark.parametrize("name", ["size_average", "reduce"])
def test_deprecated_arguments_are_gone(name: str) -> None:
    """Deviation 8."""
    with pytest.raises(TypeError, match=name):
        lossops.mse_loss(torch.ones(2), torch.ones(2), **{name: True})


def test_warns_when_sizes_differ(device: str) -> None:
    x, t = torch.randn(4, 3, device=device), torch.randn(3, device=device)
    with pytest.warns(UserWarning, match=r"target size .*different to the input size") as caught:
        result = lossops.mse_loss(x, t)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    exact = F.mse_loss(x.double(), t.double().expand(4, 3))
    assert_within(result, exact, 4 * ulp(exact, torch.float32), "broadcast")


def test_does_not_warn_when_sizes_agree(device: str) -> None:
    x = torch.randn(4, 3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lossops.mse_loss(x, x.clone(), weight=torch.ones_like(x))


@sizes_may_differ
@per_call
def test_shapes_that_do_not_broadcast(call: LossFunction, device: str) -> None:
    x, t = torch.ones(2, 3, device=device), torch.ones(4, device=device)
    assert_raises(RuntimeError, lambda: call(x, t), words_of_shape(2, 3), words_of_shape(4))


@pytest.mark.parametrize("dtype", [*INTEGERS, *COMPLEX], ids=str)
def test_integers_and_complex_are_refused(dtype: torch.dtype, device: str) -> None:
    x = torch.ones(3, device=device).to(dtype)
    word = words_of_dtype(dtype)
    for reduction in MSE.reductions:
        assert_raises(
            NotImplementedError, lambda r=reduction: lossops.mse_loss(x, x, reduction=r), word
        )
        with pytest.raises(RuntimeError, match=word):
            OP(x, x, reduction=reduction)


@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_beside_floating_point_is_refused(dtype: torch.dtype, device: str) -> None:
    x, z = torch.ones(3, device=device), torch.ones(3, device=device).to(dtype)
    for arguments in ((x, z), (z, x)):
        assert_raises(
            NotImplementedError, lambda a=arguments: lossops.mse_loss(*a), words_of_dtype(dtype)
        )


@pytest.mark.parametrize("other", INTEGERS, ids=str)
@per_dtype
def test_integer_beside_floating_point_is_promoted(
    dtype: torch.dtype, other: torch.dtype, device: str
) -> None:
    x = torch.randn(37).to(dtype).to(device)
    n = torch.randint(0, 2, (37,)).to(other).to(device)
    for reduction in MSE.reductions:
        check(MSE, sample_of(x, n, reduction=reduction))
        check(MSE, sample_of(n, x, reduction=reduction))


@per_call
@pytest.mark.parametrize("bad", ["batchmean", "Mean", ""])
def test_bad_reduction(call: LossFunction, bad: str, device: str) -> None:
    x = torch.ones(3, device=device)
    kind = ValueError if call is lossops.mse_loss else RuntimeError
    assert_raises(kind, lambda: call(x, x, reduction=bad), "reduction", bad, "none", "mean", "sum")


@pytest.mark.parametrize("bad", [None, 3])
def test_reduction_that_is_not_a_string(bad: object) -> None:
    x = torch.ones(3)
    assert_raises(ValueError, lambda: lossops.mse_loss(x, x, reduction=bad), "reduction", str(bad))


@pytest.mark.parametrize("name", ["input", "target", "weight"])
@pytest.mark.parametrize("wrong", [[1.0, 2.0], 1.0, "text"], ids=["list", "float", "str"])
def test_argument_that_is_not_a_tensor(name: str, wrong: object) -> None:
    arguments = {"input": torch.ones(2), "target": torch.ones(2), name: wrong}
    # torch's own raises AttributeError where it asks the argument for its size
    assert_raises((TypeError, AttributeError), lambda: lossops.mse_loss(**arguments), name)


@per_dtype
def test_weight_divides_mean_by_its_sum(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=dtype, device=device)
    t = torch.tensor([0.0, 0.0, 0.0], dtype=dtype, device=device)
    w = torch.tensor([1.0, 2.0, 5.0], dtype=dtype, device=device)
    for reduction, expected in (("none", [1.0, 8, 80]), ("sum", 89.0), ("mean", 11.125)):
        result = lossops.mse_loss(x, t, weight=w, reduction=reduction)
        exact = torch.tensor(expected, dtype=torch.float64)
        assert_within(result, exact, 0.5 * ulp(exact, dtype), reduction)


@per_dtype
def test_weight_of_sum_zero(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5).to(dtype).to(device)
    sample = sample_of(x, x + 1, torch.zeros_like(x))
    ours, torchs = evaluate(lossops.mse_loss, sample), evaluate(F.mse_loss, sample)
    assert ours.value.isnan()
    for name, gradient in torchs.gradients.items():
        assert_same(ours.gradients[name], gradient, f"gradient of {name}")


@sizes_may_differ
@per_call
def test_weight_of_another_size(call: LossFunction, device: str) -> None:
    x = torch.ones(2, 3, device=device)
    kind = ValueError if call is lossops.mse_loss else ANY_ERROR
    for shape in ((3,), (2, 1), (3, 2), (), (6,), (1, 2, 3)):
        w = torch.ones(shape, device=device)
        assert_raises(kind, lambda w=w: call(x, x, weight=w), "weight")
    # broadcasting with the target changes nothing: the size asked for is the input's
    t = torch.ones(4, 3, device=device)
    assert_raises(kind, lambda: call(t[:1], t, weight=t), "weight")


@sizes_may_differ
@per_dtype
def test_weight_is_broadcast_with_the_input(dtype: torch.dtype, device: str) -> None:
    """torch divides by the sum of the weights as given, not as broadcast."""
    for input_shape, target_shape in (((1, 3), (4, 3)), ((4, 1), (3,)), ((), (5,)), ((4, 3), (3,))):
        x = torch.randn(input_shape).to(dtype).to(device)
        t = torch.randn(target_shape).to(dtype).to(device)
        w = (torch.rand(input_shape) + 0.5).to(dtype).to(device)
        for reduction in MSE.reductions:
            check(MSE, sample_of(x, t, w, reduction), not_worse_than_torch=True)


@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.int64], ids=str)
@per_dtype
def test_weight_of_another_dtype(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> None:
    x, t = torch.randn(2, 41).to(dtype).to(device)
    w = (4 * torch.rand(41) + 1).to(weight_dtype).to(device)
    for reduction in MSE.reductions:
        check(MSE, sample_of(x, t, w, reduction), not_worse_than_torch=True)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
@per_dtype
def test_empty(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, dtype=dtype, device=device)
    for weight in (None, x):
        for reduction, expected in (
            ("none", torch.empty(shape)),
            ("sum", torch.tensor(0.0)),
            ("mean", torch.tensor(math.nan)),
        ):
            result = evaluate(lossops.mse_loss, sample_of(x, x, weight, reduction))
            assert_same(result.value, expected.to(dtype), reduction)
            for gradient in result.gradients.values():
                assert gradient.shape == shape
                assert gradient.dtype == dtype


@per_dtype
def test_special_values(dtype: torch.dtype, device: str) -> None:
    """NaN and infinities as torch has them, at every position of a vector."""
    special = torch.tensor([0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan])
    pairs = torch.cartesian_prod(special, special).repeat(30, 1).to(dtype).to(device)
    x, t = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    for reduction in ("none", "sum", "mean"):
        sample = sample_of(x, t, reduction=reduction)
        ours, torchs = evaluate(lossops.mse_loss, sample), evaluate(F.mse_loss, sample)
        assert_same(ours.value, torchs.value, reduction)
        if reduction == "none":
            for name, gradient in torchs.gradients.items():
                assert_same(ours.gradients[name], gradient, f"gradient of {name}")


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_half_types_are_rounded_to_even(dtype: torch.dtype, device: str) -> None:
    """Squares are exact in float32, so all that a result has lost is its own rounding."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()]
    expected = (x.float() * x.float()).to(dtype)
    for layout in (x, torch.stack((x, x), 1)[:, 0]):
        result = lossops.mse_loss(
            layout.to(device), torch.zeros_like(x).to(device), reduction="none"
        )
        assert_same(result.cpu(), expected, str(layout.stride()))


def test_half_precision_mean_does_not_overflow(device: str) -> None:
    """Deviation 1: torch rounds each square to float16, where 300 ** 2 is infinite."""
    x = torch.tensor([300.0, 0, 0, 0], dtype=torch.float16, device=device)
    nearest = torch.tensor(22500.0, dtype=torch.float16)
    for call in (lossops.mse_loss, OP):
        assert_same(call(x, torch.zeros_like(x)), nearest, "mean")
        assert call(x, torch.zeros_like(x), reduction="sum").item() == math.inf
        assert call(x, torch.zeros_like(x), reduction="none").tolist() == [math.inf, 0, 0, 0]
    sample = sample_of(x, torch.zeros_like(x))
    gradients = evaluate(lossops.mse_loss, sample).gradients
    assert gradients["input"].tolist() == [150.0, 0, 0, 0]
    assert gradients["target"].tolist() == [-150.0, 0, 0, 0]


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_half_precision_weighted_mean_does_not_overflow(dtype: torch.dtype, device: str) -> None:
    """Deviation 1, where the sum of the weights is beyond float16 too."""
    x = torch.full((70001,), 4.0, dtype=dtype, device=device)
    zero, w = torch.zeros_like(x), torch.full_like(x, 2.0)
    assert lossops.mse_loss(x, zero).item() == 16.0
    assert lossops.mse_loss(x, zero, weight=w).item() == 16.0
    ours = evaluate(lossops.mse_loss, sample_of(x, zero, w))
    exact = evaluate(F.mse_loss, sample_of(x, zero, w).double())
    assert_within(
        ours.gradients["input"], exact.gradients["input"], ulp(exact.gradients["input"], dtype), "x"
    )


@pytest.mark.cuda
def test_more_elements_than_an_int32_counts() -> None:
    """Broadcast views of one element: 2^31 + 5 terms, next to no memory."""
    three, one = torch.tensor([3.0, 1.0], device="cuda")
    x, t = three.expand(2**31 + 5), one.expand(2**31 + 5)
    exact = torch.tensor(4.0 * (2**31 + 5), dtype=torch.float64)
    assert_within(lossops.mse_loss(x, t, reduction="sum"), exact, 2 * ulp(exact, x.dtype), "sum")
    assert lossops.mse_loss(x, t).item() == 4.0


@per_call
@pytest.mark.cuda
def test_tensors_on_two_devices(call: LossFunction) -> None:
    x = torch.ones(3)
    for arguments in ((x, x.cuda()), (x.cuda(), x)):
        assert_raises(ANY_ERROR, lambda a=arguments: call(*a), "cpu", "cuda")
    with pytest.raises(ANY_ERROR, match="weight"):
        call(x.cuda(), x.cuda(), weight=x)
