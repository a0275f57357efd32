"""cross_entropy: what every call must return, case by case."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises, check, words_of_dtype, words_of_shape
from losses import BY_NAME, LossFunction, Result, Sample, evaluate
from numerics import (
    DTYPES,
    HALF_TYPES,
    assert_same,
    assert_within,
    layouts_of,
    same_bits,
    ulp,
)
from torch import Tensor

import lossops

CE = BY_NAME["cross_entropy"]
OP = torch.ops.lossops.cross_entropy
INF, NAN = math.inf, math.nan
ANY_ERROR = (RuntimeError, ValueError, IndexError, TypeError)
INDEX_DTYPES = (torch.int64, torch.uint8, torch.int32)

per_call = pytest.mark.parametrize("call", [lossops.cross_entropy, OP], ids=["function", "op"])
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sample_of(
    input: Tensor, target: Tensor, weight: Tensor | None = None, **options: object
) -> Sample:
    """A sample of given tensors; probabilities and their weight have gradients."""
    tensors = {"input": input, "target": target}
    differentiable = ["input"]
    if weight is not None:
        tensors["weight"] = weight
    if target.is_floating_point():
        differentiable = [k for k, v in tensors.items() if v.is_floating_point()]
    return Sample("cross_entropy", tensors, options, tuple(differentiable))


def run(input: Tensor, target: Tensor, weight: Tensor | None = None, **options: object) -> Result:
    return evaluate(lossops.cross_entropy, sample_of(input, target, weight, **options))


def torchs(
    input: Tensor, target: Tensor, weight: Tensor | None = None, **options: object
) -> Result:
    return evaluate(CE.reference, sample_of(input, target, weight, **options))


def test_signature() -> None:
    parameters = inspect.signature(lossops.cross_entropy).parameters
    theirs = inspect.signature(F.cross_entropy).parameters
    own = len(theirs)
    # In torch's order, by position too; test_cross_entropy_keywords.py names the others.
    assert list(parameters)[: own + 1] == [*theirs, "inplace_backward"]
    for parameter in list(parameters.values())[own:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["inplace_backward"].default is False
    for name, parameter in theirs.items():
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameters[name].default == parameter.default
    assert str(OP.default._schema) == (
        "lossops::cross_entropy(Tensor input, Tensor target, Tensor? weight=None, *, "
        'int ignore_index=-100, str reduction="mean", float label_smoothing=0.) -> Tensor'
    )


@pytest.mark.parametrize("name", ["size_average", "reduce"])
def test_deprecated_arguments_are_gone(name: str) -> None:
    """Deviation 8."""
    with pytest.raises(TypeError, match=name):
        lossops.cross_entropy(torch.ones(1, 2), torch.tensor([0]), **{name: True})


# --- shapes and dtypes --------------------------------------------------------------------------

INDEX_SHAPES = (
    ((5,), ()),
    ((5,), (1,)),
    ((4, 5), (4,)),
    ((1, 5), (1,)),
    ((4, 1), (4,)),
    ((4, 5, 3), (4, 3)),
    ((2, 5, 3, 4), (2, 3, 4)),
    ((2, 5, 1, 1), (2, 1, 1)),
    ((2, 5, 3, 1, 2, 3), (2, 3, 1, 2, 3)),
)


@per_dtype
def test_index_shapes(dtype: torch.dtype, device: str) -> None:
    for input_shape, target_shape in INDEX_SHAPES:
        classes = input_shape[0] if len(input_shape) == 1 else input_shape[1]
        for reduction in CE.reductions:
            x = torch.randn(input_shape).to(dtype).to(device)
            t = torch.randint(0, classes, target_shape).to(device)
            w = torch.rand(classes).to(dtype).to(device) + 0.25
            check(CE, sample_of(x, t, reduction=reduction))
            check(CE, sample_of(x, t, w, reduction=reduction, ignore_index=0))
            check(CE, sample_of(x, t, w, reduction=reduction, label_smoothing=0.3))


@per_dtype
def test_probability_shapes(dtype: torch.dtype, device: str) -> None:
    for shape in ((5,), (4, 5), (1, 1), (4, 5, 3), (2, 5, 3, 4), (2, 5, 3, 1, 2)):
        for reduction in CE.reductions:
            x = torch.randn(shape).to(dtype).to(device)
            # not normalised: the definition does not ask for it
            t = torch.rand(shape).to(dtype).to(device)
            w = torch.rand(shape[0] if len(shape) == 1 else shape[1]).to(dtype).to(device) + 0.25
            check(CE, sample_of(x, t, reduction=reduction))
            check(CE, sample_of(x, t, w, reduction=reduction, label_smoothing=0.3))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@per_dtype
def test_index_dtypes_in_every_combination(
    dtype: torch.dtype, index_dtype: torch.dtype, device: str
) -> None:
    """Deviation 5: torch refuses int32 always, uint8 with both smoothing and weight."""
    for shape, rows in (((7,), ()), ((9, 7), (9,)), ((3, 7, 5), (3, 5)), ((2, 7, 3, 2), (2, 3, 2))):
        x = torch.randn(shape).to(dtype).to(device)
        t = torch.randint(0, 7, rows).to(device)
        w = torch.rand(7).to(dtype).to(device) + 0.25
        for weight in (None, w):
            for smoothing in (0.0, 0.25):
                for reduction in CE.reductions:
                    options = {"label_smoothing": smoothing, "reduction": reduction}
                    for ignore_index in (-100, 3):
                        options["ignore_index"] = ignore_index
                        narrow = run(x, t.to(index_dtype), weight, **options)
                        check(CE, sample_of(x, t.to(index_dtype), weight, **options))
                        wide = run(x, t, weight, **options)
                        assert same_bits(narrow.value, wide.value)
                        assert same_bits(narrow.gradients["input"], wide.gradients["input"])
                        op = OP(x, t.to(index_dtype), weight, **options)
                        assert same_bits(op, wide.value)


def test_uint8_indices_above_127(device: str) -> None:
    x = torch.randn(300, 256, device=device)
    t = torch.randint(0, 256, (300,), device=device)
    assert t.max() > 127
    check(CE, sample_of(x, t.to(torch.uint8), reduction="none"))


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.int64], ids=str)
@per_dtype
def test_probabilities_promote(
    dtype: torch.dtype, weight_dtype: torch.dtype, target_dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(6, 5).to(dtype).to(device)
    t = torch.rand(6, 5).to(target_dtype).to(device)
    w = (3 * torch.rand(5) + 1).to(weight_dtype).to(device)
    for reduction in CE.reductions:
        sample = sample_of(x, t, w, reduction=reduction, label_smoothing=0.1)
        check(CE, sample, not_worse_than_torch=True)


def test_weight_of_another_dtype_than_logits(device: str) -> None:
    x, t = torch.randn(4, 3, device=device), torch.tensor([0, 1, 2, 0], device=device)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        for smoothing in (0.0, 0.1):
            w = torch.ones(3, device=device).to(dtype)
            for call in (lossops.cross_entropy, OP):
                assert_raises(
                    RuntimeError,
                    lambda c=call, w=w, s=smoothing: c(x, t, w, label_smoothing=s),
                    "weight",
                    words_of_dtype(dtype),
                )


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64],
    ids=str,
)
def test_integer_and_complex_logits_are_refused(dtype: torch.dtype, device: str) -> None:
    x = torch.ones(4, 3, device=device).to(dtype)
    index, probability = torch.zeros(4, dtype=torch.int64), torch.rand(4, 3)
    for target in (index.to(device), probability.to(device)):
        call = lossops.cross_entropy
        assert_raises(NotImplementedError, lambda t=target, c=call: c(x, t), words_of_dtype(dtype))
        with pytest.raises(RuntimeError, match=words_of_dtype(dtype)):
            OP(x, target)


@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.int8, torch.bool, torch.float16, torch.float64, torch.complex64],
    ids=str,
)
def test_target_of_another_dtype(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(4, 3, device=device)
    t = torch.zeros(4, device=device).to(dtype)
    for call in (lossops.cross_entropy, OP):
        for options in ({}, {"label_smoothing": 0.1}):
            assert_raises(
                RuntimeError,
                lambda c=call, o=options: c(x, t, **o),
                "target",
                words_of_dtype(dtype),
            )


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_target_of_input_shape_must_be_floating_point(dtype: torch.dtype, device: str) -> None:
    for shape in ((3,), (4, 3), (2, 3, 4)):
        x = torch.randn(shape, device=device)
        t = torch.zeros(shape, device=device).to(dtype)
        for call in (lossops.cross_entropy, OP):
            assert_raises(
                RuntimeError, lambda c=call, x=x, t=t: c(x, t), "target", words_of_dtype(dtype)
            )


# function, input shape, target shape, exception of torch
WRONG_SHAPES = (
    ((3,), (2,), ValueError),
    ((3,), (1, 1), RuntimeError),
    ((1, 3), (), ValueError),
    ((2, 3), (1,), ValueError),
    ((2, 3), (3,), ValueError),
    ((2, 3), (2, 1), RuntimeError),
    ((2, 3), (2, 2), RuntimeError),
    ((2, 3, 4), (2,), RuntimeError),
    ((2, 3, 4), (2, 5), RuntimeError),
    ((2, 3, 4), (3, 4), ValueError),
    ((2, 3, 4, 4), (2, 4, 5), RuntimeError),
    ((2, 3, 4, 4), (2, 4), RuntimeError),
    ((2, 3, 4, 4), (3, 4, 4), ValueError),
    ((2, 3, 4, 4), (2, 4, 4, 1), RuntimeError),
)


@pytest.mark.parametrize(("input_shape", "target_shape", "kind"), WRONG_SHAPES, ids=str)
def test_shapes_that_do_not_match(
    input_shape: tuple[int, ...], target_shape: tuple[int, ...], kind: type[Exception], device: str
) -> None:
    x = torch.randn(input_shape, device=device)
    t = torch.zeros(target_shape, dtype=torch.int64, device=device)
    with pytest.raises(kind):
        F.cross_entropy(x.cpu(), t.cpu())
    words = (words_of_shape(*input_shape), words_of_shape(*target_shape))
    for weight in (None, torch.ones(3, device=device)):
        assert_raises(kind, lambda w=weight: lossops.cross_entropy(x, t, w), *words)
        assert_raises(ANY_ERROR, lambda w=weight: OP(x, t, w), *words)


@pytest.mark.parametrize(
    ("input_shape", "target_shape"),
    [((4, 3), (4, 2)), ((4, 3), (1, 3)), ((2, 3, 4), (2, 3, 5)), ((4, 3), (4,)), ((3,), ())],
    ids=str,
)
def test_probability_shapes_that_do_not_match(
    input_shape: tuple[int, ...], target_shape: tuple[int, ...], device: str
) -> None:
    """Probabilities are broadcast by no one."""
    x, t = torch.randn(input_shape, device=device), torch.rand(target_shape, device=device)
    for call in (lossops.cross_entropy, OP):
        assert_raises(ANY_ERROR, lambda c=call: c(x, t), "target")
    try:
        F.cross_entropy(x.cpu(), t.cpu())
    except ANY_ERROR as error:
        assert_raises(type(error), lambda: lossops.cross_entropy(x, t))


def test_zero_dimensional_input(device: str) -> None:
    x = torch.randn((), device=device)
    index = torch.tensor(0, device=device)
    assert_raises(RuntimeError, lambda: lossops.cross_entropy(x, index))
    assert_raises(ANY_ERROR, lambda: OP(x, index), "input|dimension")
    assert_raises(IndexError, lambda: lossops.cross_entropy(x, torch.rand((), device=device)))
    assert_raises(ANY_ERROR, lambda: OP(x, torch.rand((), device=device)), "input|dimension")


@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
def test_weight_of_wrong_length(probabilities: bool, device: str) -> None:
    for shape, rows in (((3,), ()), ((4, 3), (4,)), ((2, 3, 4), (2, 4)), ((2, 3, 2, 2), (2, 2, 2))):
        x = torch.randn(shape, device=device)
        t = torch.zeros(rows, dtype=torch.int64, device=device)
        if probabilities:
            t = torch.rand(shape, device=device)
        for weight_shape in ((4,), (2,), (1,), (0,), (), (1, 3), (3, 1)):
            w = torch.ones(weight_shape, device=device)
            for call in (lossops.cross_entropy, OP):
                for smoothing in (0.0, 0.1):
                    assert_raises(
                        RuntimeError,
                        lambda c=call, w=w, s=smoothing, x=x, t=t: c(x, t, w, label_smoothing=s),
                        "weight",
                        words_of_shape(*weight_shape) if weight_shape else r"\[\]|\(\)",
                    )


@per_call
@pytest.mark.parametrize("bad", ["batchmean", "Mean", ""])
def test_bad_reduction(call: LossFunction, bad: str, device: str) -> None:
    x, t = torch.ones(2, 3, device=device), torch.tensor([0, 1], device=device)
    kind = ValueError if call is lossops.cross_entropy else RuntimeError
    assert_raises(kind, lambda: call(x, t, reduction=bad), "reduction", bad, "none", "mean", "sum")


@pytest.mark.parametrize("bad", [None, 3])
def test_reduction_that_is_not_a_string(bad: object) -> None:
    x, t = torch.ones(2, 3), torch.tensor([0, 1])
    assert_raises(
        ValueError, lambda: lossops.cross_entropy(x, t, reduction=bad), "reduction", str(bad)
    )


@pytest.mark.parametrize("name", ["input", "target", "weight"])
@pytest.mark.parametrize("wrong", [[1, 0], 1.0, "text"], ids=["list", "float", "str"])
def test_argument_that_is_not_a_tensor(name: str, wrong: object) -> None:
    arguments = {"input": torch.ones(2, 3), "target": torch.tensor([0, 1]), name: wrong}
    assert_raises(TypeError, lambda: lossops.cross_entropy(**arguments), name)


@pytest.mark.parametrize("name", ["ignore_index", "label_smoothing"])
def test_option_of_another_type(name: str) -> None:
    x, t = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1])
    for value in ([0], {}, "0"):
        options: dict[str, object] = {name: value}
        with pytest.raises(TypeError, match=name):
            lossops.cross_entropy(x, t, **options)


# --- weights, smoothing, ignored rows -----------------------------------------------------------


@per_dtype
def test_smoothing_with_weight_and_ignored_rows(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([[1.0, 2, 3], [1, 1, 1]], dtype=dtype, device=device)
    w = torch.tensor([1.0, 2, 4], dtype=dtype, device=device)
    for target, expected in (([2, 0], 0.58818), ([2, -100], 0.42396)):
        for index_dtype in (torch.int64, torch.int32):
            t = torch.tensor(target, dtype=index_dtype, device=device)
            for call in (lossops.cross_entropy, OP):
                result = call(x, t, w, label_smoothing=0.1)
                bound = 5.1e-6 + 0.5 * ulp(result, dtype)  # the figures have five digits
                assert_within(result, torch.tensor(expected), bound, str(target))


def test_mean_divides_by_the_weights_of_rows_kept(device: str) -> None:
    x = torch.randn(5, 3, device=device)
    t = torch.tensor([0, 1, 2, 1, 0], device=device)
    w = torch.tensor([1.0, 2.0, 4.0], device=device)
    rows = F.cross_entropy(x.double(), t, reduction="none")
    for ignored, kept in ((-100, [0, 1, 2, 3, 4]), (1, [0, 2, 4])):
        share = w[t[kept]].double()
        exact = (rows[kept] * share).sum() / share.sum()
        result = lossops.cross_entropy(x, t, w, ignore_index=ignored)
        assert_within(result, exact, 4 * ulp(exact, torch.float32), f"ignoring {ignored}")
    # probabilities: by the number of rows
    p = torch.rand(5, 3, device=device)
    total = F.cross_entropy(x.double(), p.double(), w.double(), reduction="sum")
    result = lossops.cross_entropy(x, p, w)
    assert_within(result, total / 5, 8 * ulp(total / 5, torch.float32), "probabilities")


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@per_dtype
def test_all_rows_ignored(
    dtype: torch.dtype, weighted: bool, smoothing: float, device: str
) -> None:
    w = torch.rand(3).to(dtype).to(device) if weighted else None
    for shape, rows in (((3,), ()), ((4, 3), (4,)), ((2, 3, 5), (2, 5))):
        x = torch.randn(shape).to(dtype).to(device)
        t = torch.full(rows, -100, device=device)
        for reduction, expected in (
            ("none", torch.zeros(rows)),
            ("sum", torch.tensor(0.0)),
            ("mean", torch.tensor(NAN)),
        ):
            result = run(x, t, w, reduction=reduction, label_smoothing=smoothing)
            what = f"{shape} {reduction}"
            assert_same(result.value, expected.to(dtype), what)
            assert_same(result.gradients["input"], torch.zeros_like(x), f"{what} gradient")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@per_dtype
def test_weights_of_sum_zero(dtype: torch.dtype, smoothing: float, device: str) -> None:
    x = torch.randn(4, 3).to(dtype).to(device)
    t = torch.tensor([0, 1, 2, 0], device=device)
    w = torch.zeros(3, dtype=dtype, device=device)
    for reduction, expected in (("mean", NAN), ("sum", 0.0)):
        result = run(x, t, w, reduction=reduction, label_smoothing=smoothing)
        exact = torchs(x, t, w, reduction=reduction, label_smoothing=smoothing)
        assert_same(result.value, torch.tensor(expected).to(dtype), reduction)
        assert_same(result.gradients["input"], exact.gradients["input"], f"{reduction} gradient")
    # a weight of 0 in the rows that are kept is enough
    w = torch.tensor([0.0, 0, 1], dtype=dtype, device=device)
    assert lossops.cross_entropy(x[:2], t[:2], w).isnan()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@per_dtype
def test_weights_of_zero_where_smoothing_adds_others(
    dtype: torch.dtype, smoothing: float, device: str
) -> None:
    """The weights of the class indices are 0, and smoothing adds a loss of the other class."""
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=dtype, device=device)
    w = torch.tensor([0.0, 1.0], dtype=dtype, device=device)
    for indices in ([0, 0], [0, -100], [-100, -100]):
        t = torch.tensor(indices, device=device)
        for reduction in CE.reductions:
            result = run(x, t, w, reduction=reduction, label_smoothing=smoothing)
            theirs = torchs(x, t, w, reduction=reduction, label_smoothing=smoothing)
            what = f"{indices} {reduction}"
            torch.testing.assert_close(result.value, theirs.value, equal_nan=True, msg=what)
            torch.testing.assert_close(
                result.gradients["input"], theirs.gradients["input"], equal_nan=True, msg=what
            )
            assert result.value.isnan().any() == (reduction == "mean"), what


IGNORE_INDICES = (255, 3, 2**31, 2**31 - 1, 2**40, -1, -(2**31), -(2**63), 2**63 - 1)


@pytest.mark.parametrize("ignore_index", IGNORE_INDICES)
def test_ignore_index_out_of_class_range(ignore_index: int, device: str) -> None:
    for shape, rows in (((6, 3), (6,)), ((2, 3, 3), (2, 3))):
        x = torch.randn(shape, device=device)
        t = torch.randint(0, 3, rows)
        t.view(-1)[::2] = ignore_index
        t = t.to(device)
        for smoothing in (0.0, 0.1):
            for reduction in CE.reductions:
                check(
                    CE,
                    sample_of(
                        x,
                        t,
                        ignore_index=ignore_index,
                        reduction=reduction,
                        label_smoothing=smoothing,
                    ),
                )
        op = OP(x, t, ignore_index=ignore_index)
        assert same_bits(op, lossops.cross_entropy(x, t, ignore_index=ignore_index))


def test_ignore_index_is_not_cut_to_the_width_of_the_target(device: str) -> None:
    """256 is not 0 to a uint8 target, nor 2^32 to an int32 one."""
    x = torch.randn(4, 3, device=device)
    t = torch.tensor([0, 1, 2, 0], device=device)
    plain = run(x, t)
    for dtype, ignore_indices in (
        (torch.uint8, (256, -256, 2**32, 2**63 - 1, -(2**63))),
        (torch.int32, (2**32, -(2**32), 2**33 + 1)),
    ):
        for ignore_index in ignore_indices:
            result = run(x, t.to(dtype), ignore_index=ignore_index)
            assert same_bits(result.value, plain.value), f"{dtype} {ignore_index}"
            assert same_bits(result.gradients["input"], plain.gradients["input"])


@per_call
@pytest.mark.parametrize("wrong", [2**63, 1.0, "1"], ids=str)
def test_ignore_index_that_is_not_an_int64(call: LossFunction, wrong: object) -> None:
    x, t = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises((TypeError, ValueError, RuntimeError, OverflowError)):
        call(x, t, ignore_index=wrong)


@per_call
def test_ignore_index_with_probabilities(call: LossFunction, device: str) -> None:
    x, p = torch.randn(4, 3, device=device), torch.rand(4, 3, device=device)
    for ignore_index in (0, 1, 3, 255, 2**31, 2**63 - 1):
        assert_raises(
            RuntimeError, lambda i=ignore_index: call(x, p, ignore_index=i), "ignore_index"
        )
    plain = call(x, p)
    for ignore_index in (-1, -100, -(2**63)):
        assert same_bits(call(x, p, ignore_index=ignore_index), plain)


@pytest.mark.parametrize("value", [INF, NAN, -INF], ids=str)
@per_dtype
def test_ignored_row_has_gradient_zero(dtype: torch.dtype, value: float, device: str) -> None:
    """Deviation 3: torch's gradient is NaN where the ignored row's logits are NaN or infinite."""
    x = torch.randn(3, 5).to(dtype).to(device)
    x[1] = value
    x[1, 2] = 0.5
    t = torch.tensor([0, -100, 4], device=device)
    kept = torch.tensor([0, 2], device=device)
    for smoothing in (0.0, 0.1):
        for w in (None, torch.rand(5).to(dtype).to(device) + 0.5):
            for reduction in CE.reductions:
                options = {"reduction": reduction, "label_smoothing": smoothing}
                result = run(x, t, w, **options)
                exact = torchs(
                    x[kept].double(), t[kept], None if w is None else w.double(), **options
                )
                gradient = result.gradients["input"]
                assert_same(gradient[1], torch.zeros_like(gradient[1]), f"{options}")
                bound = ulp(exact.gradients["input"], dtype) + 1e-6
                assert_within(gradient[kept], exact.gradients["input"], bound, f"{options}")
                value_kept = result.value[kept] if reduction == "none" else result.value
                bound = ulp(exact.value, dtype) + 1e-6
                assert_within(value_kept, exact.value, bound, f"{options}")
    # the same when all of it is in one row
    single = run(x[1], torch.tensor(-100, device=device), reduction="sum")
    assert single.value.item() == 0
    assert_same(single.gradients["input"], torch.zeros_like(x[1]), "(C,)")


@per_call
@pytest.mark.parametrize("value", [1.1, 2, 1.0000001, INF], ids=str)
def test_label_smoothing_above_one(call: LossFunction, value: float, device: str) -> None:
    x, t = torch.randn(2, 3, device=device), torch.tensor([0, 1], device=device)
    for target in (t, torch.rand(2, 3, device=device)):
        assert_raises(
            RuntimeError, lambda t=target: call(x, t, label_smoothing=value), "label_smoothing"
        )


@pytest.mark.parametrize("value", [-0.1, -1e-30, -INF, NAN], ids=str)
def test_label_smoothing_below_zero_or_nan(value: float, device: str) -> None:
    """Deviation 4: torch takes these for 0."""
    x, t = torch.randn(2, 3, device=device), torch.tensor([0, 1], device=device)
    for target in (t, torch.rand(2, 3, device=device)):
        assert_raises(
            ValueError,
            lambda t=target: lossops.cross_entropy(x, t, label_smoothing=value),
            "label_smoothing",
        )
        assert_raises(
            ANY_ERROR, lambda t=target: OP(x, t, label_smoothing=value), "label_smoothing"
        )


@pytest.mark.parametrize("value", ["a", None], ids=str)
def test_label_smoothing_that_is_not_a_number(value: object) -> None:
    x, t = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="label_smoothing"):
        lossops.cross_entropy(x, t, label_smoothing=value)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ignore_index": 2**63}, ValueError, r"ignore_index .* 64-bit .* 9223372036854775808"),
        ({"ignore_index": -(2**63) - 1}, ValueError, "ignore_index"),
        ({"ignore_index": True}, TypeError, "ignore_index must be an integer, but is True"),
        ({"ignore_index": torch.tensor(1.5)}, TypeError, "ignore_index must be an integer"),
        ({"label_smoothing": torch.tensor([0.1, 0.2])}, TypeError, "label_smoothing"),
        ({"label_smoothing": 10**400}, TypeError, "label_smoothing"),
        ({"inplace_backward": 1}, TypeError, "inplace_backward must be a bool, but is 1"),
        ({"inplace_backward": np.zeros(3)}, TypeError, "inplace_backward"),
        ({"reduction": "me\0an"}, ValueError, r"reduction .* 'me\\x00an'"),
        ({"reduction": None}, ValueError, "reduction .* None"),
        ({"reduction": np.zeros(3)}, ValueError, "reduction .* array"),
    ],
    ids=str,
)
def test_options_out_of_range(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    with pytest.raises(error, match=message):
        lossops.cross_entropy(x, t, **options)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_targets_are_named(dtype: torch.dtype) -> None:
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]).to(dtype)
    for call in (lossops.cross_entropy, OP):
        with pytest.raises(RuntimeError, match=f"target .* {str(dtype).removeprefix('torch.')}"):
            call(x, t)


def test_label_smoothing_of_numpy() -> None:
    """It is a number; what is wrong beside it is what the error says."""
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    smoothing = np.float32(0.25)
    assert torch.equal(
        lossops.cross_entropy(x, t, label_smoothing=smoothing),  # type: ignore[arg-type]
        lossops.cross_entropy(x, t, label_smoothing=0.25),
    )
    with pytest.raises(ValueError, match="reduction must be one of"):
        lossops.cross_entropy(x, t, label_smoothing=smoothing, reduction="x")  # type: ignore[arg-type]


@per_dtype
def test_label_smoothing_of_zero_and_of_one(dtype: torch.dtype, device: str) -> None:
    x, t = torch.randn(6, 5).to(dtype).to(device), torch.randint(0, 5, (6,)).to(device)
    w = torch.rand(5).to(dtype).to(device) + 0.5
    for target in (t, torch.rand(6, 5).to(dtype).to(device)):
        for smoothing in (0, 0.0, -0.0, 1, 1.0, True):
            for weight in (None, w):
                check(CE, sample_of(x, target, weight, label_smoothing=smoothing))


def test_weight_that_requires_grad(device: str) -> None:
    x, t = torch.randn(4, 3, device=device), torch.tensor([0, 1, 2, 0], device=device)
    w = torch.rand(3, device=device).requires_grad_()
    for call in (lossops.cross_entropy, OP):
        for logits in (x, x.clone().requires_grad_()):
            for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
                assert_raises(
                    RuntimeError, lambda c=call, x=logits, o=options: c(x, t, w, **o), "weight"
                )
        with torch.no_grad():
            assert same_bits(call(x, t, w), call(x, t, w.detach()))
    # differentiated for probabilities
    p = torch.rand(4, 3, device=device)
    for call in (lossops.cross_entropy, OP):
        (gradient,) = torch.autograd.grad(call(x, p, w), w)
        w64 = w.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(F.cross_entropy(x.double(), p.double(), w64), w64)
        assert_within(gradient, exact, 1e-6, "gradient of weight")


# --- out-of-range targets -----------------------------------------------------------------------

OUT_OF_RANGE = (3, 4, -1, -99, 2**31, 2**32, 2**40, -(2**63), 2**63 - 1)


@pytest.mark.parametrize("bad", OUT_OF_RANGE)
def test_target_out_of_range_on_the_cpu(bad: int) -> None:
    for shape, target in (
        ((4, 3), torch.tensor([0, bad, 1, 7])),
        ((1, 3, 2, 2), torch.tensor([0, bad, 1, 7]).view(1, 2, 2)),
        ((3,), torch.tensor(bad)),
        ((3,), torch.tensor([bad])),
        ((3, 3), torch.tensor([[0, 5], [bad, 6], [7, 8]])[:, 0]),
        ((2, 3, 2), torch.tensor([[0, 1], [bad, 7]]).t()),
        ((3000, 3), torch.cat([torch.zeros(2998, dtype=torch.int64), torch.tensor([bad, 7])])),
    ):
        x = torch.randn(shape, requires_grad=True)
        for options in ({}, {"reduction": "none"}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
            if target.shape == (1,) and "label_smoothing" in options:
                continue
            for w in (None, torch.ones(3)):
                assert_raises(
                    IndexError,
                    lambda x=x, t=target, w=w, o=options: lossops.cross_entropy(x, t, w, **o),
                    rf"(?<!\d){bad}(?!\d)",
                )
                with pytest.raises((IndexError, RuntimeError), match=rf"(?<!\d){bad}(?!\d)"):
                    OP(x, target, w, **options)


@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.uint8, 3), (torch.uint8, 255), (torch.int32, -1), (torch.int32, 3)]
)
def test_narrow_target_out_of_range_on_the_cpu(dtype: torch.dtype, bad: int) -> None:
    x, t = torch.randn(3, 3), torch.tensor([0, bad, 1]).to(dtype)
    assert_raises(IndexError, lambda: lossops.cross_entropy(x, t), rf"(?<!\d){bad}(?!\d)")


def test_ignore_index_excuses_only_itself(device: str) -> None:
    x, t = torch.randn(3, 3, device=device), torch.tensor([0, 9, 1], device=device)
    assert lossops.cross_entropy(x, t, ignore_index=9).isfinite()
    if device == "cpu":
        assert_raises(IndexError, lambda: lossops.cross_entropy(x, t, ignore_index=8), "9")
    else:
        assert lossops.cross_entropy(x, t, ignore_index=8).isnan()


@pytest.mark.cuda
@pytest.mark.parametrize("bad", OUT_OF_RANGE)
@per_dtype
def test_target_out_of_range_on_cuda(dtype: torch.dtype, bad: int) -> None:
    """Deviation 6: that row is NaN, and its gradient; the others are right; the context lives."""
    for shape, rows in (((6, 3), (6,)), ((2, 3, 3), (2, 3))):
        x = torch.randn(shape).to(dtype)
        good = torch.randint(0, 3, rows)
        t = good.clone()
        t.view(-1)[4] = bad
        is_bad = t != good
        for options in ({}, {"label_smoothing": 0.1}):
            for w in (None, torch.rand(3).to(dtype) + 0.5):
                weight = None if w is None else w.cuda()
                for call in (lossops.cross_entropy, OP):
                    sample = sample_of(x.cuda(), t.cuda(), weight, reduction="none", **options)
                    ours = evaluate(call, sample)
                    exact = torchs(
                        x.double(),
                        good,
                        None if w is None else w.double(),
                        reduction="none",
                        **options,
                    )
                    expected = exact.value.masked_fill(is_bad, NAN)
                    bound = ulp(exact.value, dtype) + 1e-6
                    assert_within(ours.value, expected, bound, f"{bad} {options} value")
                    expected = exact.gradients["input"].masked_fill(is_bad.unsqueeze(1), NAN)
                    bound = ulp(exact.gradients["input"], dtype) + 1e-6
                    gradient = ours.gradients["input"]
                    assert_within(gradient, expected, bound, f"{bad} {options} gradient")

                    total = evaluate(call, sample.with_options(reduction="sum"))
                    assert total.value.isnan()
                    gradient = total.gradients["input"]
                    assert_within(gradient, expected, bound, f"{bad} {options} sum gradient")

                    mean = evaluate(call, sample.with_options(reduction="mean"))
                    assert mean.value.isnan()
                    row = mean.gradients["input"].movedim(1, -1)[is_bad.cuda()]
                    assert row.isnan().all()
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3.0


@pytest.mark.cuda
def test_derivatives_by_torch_of_target_out_of_range_on_cuda() -> None:
    """torch's own kernels would end the process: NaN in that row alone, as of the others."""
    for shape in ((6, 3), (2, 3, 3)):
        x = torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
        t = torch.randint(0, 3, (shape[0], *shape[2:]), device="cuda")
        t.view(-1)[1] = -100
        expected = torch.autograd.functional.hvp(
            lambda a: lossops.cross_entropy(a, t, reduction="sum"),  # noqa: B023
            x,
            torch.ones_like(x),
        )[1]
        t.view(-1)[4] = 7
        is_bad = (t == 7).unsqueeze(1).expand_as(x)
        first = torch.autograd.grad(
            lossops.cross_entropy(x, t, reduction="sum"), x, create_graph=True
        )[0]
        (second,) = torch.autograd.grad(first, x, torch.ones_like(x))
        assert second[is_bad].isnan().all()
        assert torch.allclose(second[~is_bad], expected[~is_bad])
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            loss = lossops.cross_entropy(dual, t, reduction="none")
            value, tangent = torch.autograd.forward_ad.unpack_dual(loss)
        assert torch.equal(value.isnan(), t == 7) and torch.equal(tangent.isnan(), t == 7)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3.0


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.uint8, 255), (torch.int32, -1), (torch.int64, 7)]
)
def test_check_targets_on_cuda(dtype: torch.dtype, bad: int) -> None:
    """Deviation 6: on request the first offending row and value are named, as on the CPU."""
    x = torch.randn(1000, 3, device="cuda", requires_grad=True)
    t = torch.randint(0, 3, (1000,))
    t[417] = bad
    t[900] = 11
    t = t.to(dtype).cuda()
    assert lossops.cross_entropy(x, t).isnan()
    lossops.check_targets(True)
    assert_raises(
        IndexError,
        lambda: lossops.cross_entropy(x, t),
        r"(?<!\d)417(?!\d)",
        rf"(?<!\d){bad}(?!\d)",
    )
    good = torch.zeros_like(t)
    (gradient,) = torch.autograd.grad(lossops.cross_entropy(x, good), x)
    assert gradient.isfinite().all()
    lossops.check_targets(False)
    assert lossops.cross_entropy(x, t).isnan()


@pytest.mark.cuda
def test_check_targets_on_cuda_leaves_ignored_rows_alone() -> None:
    lossops.check_targets(True)
    x, t = torch.randn(2, 3, 2, device="cuda"), torch.tensor([[0, 255], [-9, 1]], device="cuda")
    assert_raises(IndexError, lambda: lossops.cross_entropy(x, t, ignore_index=255), r"-9(?!\d)")
    t[1, 0] = 2
    assert lossops.cross_entropy(x, t, ignore_index=255).isfinite()


def test_check_targets_on_the_cpu_changes_nothing() -> None:
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    before = lossops.cross_entropy(x, t)
    lossops.check_targets(True)
    assert same_bits(lossops.cross_entropy(x, t), before)
    assert_raises(IndexError, lambda: lossops.cross_entropy(x, t + 2), r"(?<!\d)3(?!\d)")


# --- degenerate sizes and special values --------------------------------------------------------


@per_dtype
def test_one_class(dtype: torch.dtype, device: str) -> None:
    for shape, rows in (((1,), ()), ((4, 1), (4,)), ((2, 1, 3), (2, 3))):
        x = torch.randn(shape).to(dtype).to(device)
        t = torch.zeros(rows, dtype=torch.int64, device=device)
        for target in (t, torch.ones_like(x)):
            for reduction in CE.reductions:
                for smoothing in (0.0, 0.1):
                    result = run(x, target, reduction=reduction, label_smoothing=smoothing)
                    assert_same(result.value, torch.zeros_like(result.value), reduction)
                    assert_same(result.gradients["input"], torch.zeros_like(x), reduction)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "computed"])
@per_dtype
def test_gradient_of_one_class_is_exactly_zero(dtype: torch.dtype, kept: bool, device: str) -> None:
    """Also where rounding leaves a difference between Q softmax(x) and q."""
    lossops.keep_gradients(kept)
    try:
        for shape in ((1,), (4, 1), (2000, 1), (2, 1, 3), (3, 1, 40, 40)):
            x = (30 * torch.randn(shape)).to(dtype).to(device).requires_grad_()
            rows = shape[:-1] if len(shape) < 3 else shape[:1] + shape[2:]
            w = torch.rand(1).to(dtype).to(device) + 0.5
            for target in (
                torch.zeros(rows, dtype=torch.int64, device=device),
                torch.rand(shape).to(dtype).to(device),
            ):
                for reduction in CE.reductions:
                    for smoothing in (0.0, 0.1, 0.3, 1.0):
                        for weight in (None, w):
                            loss = lossops.cross_entropy(
                                x, target, weight, reduction=reduction, label_smoothing=smoothing
                            )
                            (grad,) = torch.autograd.grad(loss, x, torch.rand_like(loss) + 0.5)
                            what = f"{shape} {target.dtype} {reduction} {smoothing} {weight}"
                            assert not grad.any(), what
    finally:
        lossops.keep_gradients(True)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@per_dtype
def test_one_class_without_a_softmax(dtype: torch.dtype, value: float, device: str) -> None:
    x = torch.tensor([[1.0], [value]], dtype=dtype, device=device)
    for target in (torch.zeros(2, dtype=torch.int64, device=device), torch.ones_like(x)):
        for reduction in CE.reductions:
            for smoothing in (0.0, 0.1):
                result = run(x, target, reduction=reduction, label_smoothing=smoothing)
                theirs = torchs(x, target, reduction=reduction, label_smoothing=smoothing)
                assert_same(result.value, theirs.value, reduction)
                assert_same(result.gradients["input"], theirs.gradients["input"], reduction)


def test_no_classes(device: str) -> None:
    x = torch.empty(4, 0, device=device)
    t = torch.zeros(4, dtype=torch.int64, device=device)
    for reduction in CE.reductions:
        if device == "cpu":
            assert_raises(
                IndexError, lambda r=reduction: lossops.cross_entropy(x, t, reduction=r), "0"
            )
        else:  # every target is out of range
            assert lossops.cross_entropy(x, t, reduction=reduction).isnan().all()
    ignored = torch.full_like(t, -100)
    for reduction, expected in (
        ("none", torch.zeros(4)),
        ("sum", torch.tensor(0.0)),
        ("mean", torch.tensor(NAN)),
    ):
        result = run(x, ignored, reduction=reduction)
        assert_same(result.value, expected, reduction)
        assert result.gradients["input"].shape == (4, 0)


@pytest.mark.parametrize("probabilities", [False, True], ids=["indices", "probabilities"])
@per_dtype
def test_no_rows(dtype: torch.dtype, probabilities: bool, device: str) -> None:
    for shape, rows in (((0, 3), (0,)), ((0, 3, 2), (0, 2)), ((2, 3, 0), (2, 0)), ((0, 0), (0,))):
        x = torch.empty(shape, dtype=dtype, device=device)
        t = torch.empty(rows, dtype=torch.int64, device=device)
        if probabilities:
            t = torch.empty_like(x)
        for w in (None, torch.rand(shape[1]).to(dtype).to(device)):
            for smoothing in (0.0, 0.1) if shape[1] else (0.0,):
                for reduction, expected in (
                    ("none", torch.empty(rows)),
                    ("sum", torch.tensor(0.0)),
                    ("mean", torch.tensor(NAN)),
                ):
                    result = run(x, t, w, reduction=reduction, label_smoothing=smoothing)
                    assert_same(result.value, expected.to(dtype), f"{shape} {reduction}")
                    assert result.gradients["input"].shape == shape


@pytest.mark.parametrize("classes", [2, 9, 88, 100, 290, 700])
@per_dtype
def test_planes(dtype: torch.dtype, classes: int, device: str) -> None:
    """Classes in front of neighbouring positions, an even and an odd number of them."""
    for shape in ((2, classes, 6, 6), (3, classes, 37)):
        x = 3 * torch.randn(shape, device=device, dtype=torch.float64)
        x = x.to(dtype)
        t = torch.randint(0, classes, (shape[0], *shape[2:]), device=device)
        t[0, 0] = -100
        t[:, 1] = x[:, :, 1].argmax(1)
        x[:, :, 2] += 40 * F.one_hot(t[:, 2].clamp(0), classes).movedim(-1, 1).to(dtype)
        w = torch.rand(classes, device=device).to(dtype)
        for weight in (None, w):
            for reduction in ("none", "mean", "sum"):
                sample = sample_of(x, t, weight, reduction=reduction)
                if weight is not None:
                    sample = Sample(sample.name, sample.tensors, sample.options, ("input",))
                whole = check(CE, sample)
                if reduction == "none":
                    alone = run(x[1:2], t[1:2], weight, reduction="none")
                    assert same_bits(alone.value, whole.value[1:2])


@pytest.mark.parametrize("classes", [40, 150])
@per_dtype
def test_planes_do_not_depend_on_their_batch(dtype: torch.dtype, classes: int, device: str) -> None:
    x = torch.randn(classes, 70, device=device).to(dtype).t()
    images = torch.randn(3, classes, 12, 9, device=device).to(dtype)[:, :, 1:-1, 1:-1]
    for logits, rows in ((x, (70,)), (images, (3, 10, 7))):
        t = torch.randint(0, classes, rows, device=device)
        whole = run(logits, t, reduction="none")
        for part in (slice(0, 16), slice(1, 2)):
            alone = run(logits[part], t[part], reduction="none")
            assert same_bits(alone.value, whole.value[part])
            assert same_bits(alone.gradients["input"], whole.gradients["input"][part])


@pytest.mark.parametrize("reduction", ["mean", "none"])
@per_dtype
def test_gradient_of_padded_rows(dtype: torch.dtype, reduction: str, device: str) -> None:
    """With a reduction, gradients of long rows lie in vectors of 16 bytes as the logits do."""
    buffer = torch.randn(6, 2064, device=device).to(dtype)
    t = torch.arange(6, device=device)
    for classes in (500, 501, 999, 1042, 1096, 1281, 1301, 1501, 1531, 1537, 1600, 2057, 2064):
        x = buffer[:, :classes].detach().requires_grad_()
        torch.compiler.reset()
        compiled = torch.compile(lossops.cross_entropy, fullgraph=True, backend="aot_eager")
        expected = run(x.detach().contiguous(), t, reduction=reduction)
        for call in (lossops.cross_entropy, compiled):
            loss = call(x, t, reduction=reduction)
            (gradient,) = torch.autograd.grad(loss.sum(), x)
            vector = 16 // x.element_size()
            is_padded = reduction == "mean" and classes * x.element_size() > 2000
            padding = (2064 - classes) % vector if is_padded else 0
            assert gradient.stride() == (classes + padding, 1)
            assert same_bits(gradient, expected.gradients["input"])


ROWS = (
    (-INF, 1.0, 2.0),
    (1.0, -INF, 2.0),
    (-INF, -INF, 2.0),
    (-INF, -INF, -INF),
    (INF, 1.0, 2.0),
    (1.0, INF, 2.0),
    (INF, INF, INF),
    (-INF, INF, 0.0),
    (NAN, 1.0, 2.0),
    (1.0, NAN, 2.0),
)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("repeats", [1, 700], ids=["3_classes", "2100_classes"])
@per_dtype
def test_rows_with_infinities(
    dtype: torch.dtype, repeats: int, smoothing: float, device: str
) -> None:
    """-inf off the target is fine, on it the loss is inf; all -inf, +inf or NaN make NaN."""
    x = torch.tensor(ROWS)
    if repeats > 1:
        # the same classes spread among many, for kernels that work on pieces of a row
        wide = torch.full((len(ROWS), 3 * repeats), 0.25)
        wide[x.isinf().all(1) & (x[:, 0] < 0)] = -INF
        for source, place in enumerate((5, 3 * repeats // 2, 3 * repeats - 2)):
            wide[:, place] = x[:, source]
        x, places = wide, (5, 3 * repeats // 2, 3 * repeats - 2)
    else:
        places = (0, 1, 2)
    x = x.to(dtype)
    for target in places:
        t = torch.full((len(ROWS),), target)
        options = {"reduction": "none", "label_smoothing": smoothing}
        result = run(x.to(device), t.to(device), **options)
        exact = torchs(x.double(), t, **options)
        for name, mine, true in (
            ("value", result.value, exact.value),
            ("gradient", result.gradients["input"], exact.gradients["input"]),
        ):
            bound = 0.51 * ulp(true.nan_to_num(), dtype) + 32 * 2.0**-24
            assert_within(mine, true, bound, f"target {target}: {name}")
        for reduction in ("sum", "mean"):
            total = run(x.to(device), t.to(device), reduction=reduction, label_smoothing=smoothing)
            assert total.value.isnan()


@pytest.mark.parametrize("classes", [3, 10, 100, 504, 1001, 4096, 20001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_masked_logits(dtype: torch.dtype, classes: int, device: str) -> None:
    """Masked by the lowest number of the dtype, some or all of a row, as models do."""
    lowest = torch.finfo(dtype).min
    x = torch.randn(8, classes).to(dtype)
    x[:, 1::2] = lowest
    x[3] = lowest
    x[4] = (torch.rand(classes, dtype=torch.float64) * (lowest / 4)).to(dtype)
    t = torch.zeros(8, dtype=torch.int64)
    p = torch.zeros(8, classes, dtype=dtype)
    p[:, 0] = 1
    for name, layout in layouts_of(x.to(device)).items():
        for target, options in ((t, {}), (p, {}), (t, {"label_smoothing": 0.1})):
            result = run(layout(x.to(device)), target.to(device), reduction="none", **options)
            exact = torchs(x.double(), target.to(exact_type(target)), reduction="none", **options)
            # a sum of distances of this size may overflow, as torch's does
            single = torchs(x.float(), target.to(exact_type(target, torch.float32)), **options)
            for mine, true in (
                (result.value, exact.value),
                (result.gradients["input"], exact.gradients["input"]),
            ):
                true = true.to(dtype)  # beyond its range, infinite
                close = torch.isclose(mine.cpu(), true, rtol=1e-2, atol=1e-5)
                if mine is result.value and single.value.isinf():
                    close |= mine.cpu().isinf()
                assert close.all(), name


@pytest.mark.parametrize("classes", [5, 100, 700, 1501, 9001])
@per_dtype
def test_rows_that_begin_with_masked_classes(dtype: torch.dtype, classes: int, device: str) -> None:
    """By -inf: for most of a row there is no maximum, and then there is one."""
    x = torch.randn(6, classes).to(dtype)
    first = torch.tensor([classes - 1, classes - 2, classes // 2, classes * 3 // 4, 1, 0])
    x[torch.arange(classes) < first[:, None]] = -INF
    t = torch.randint(2**40, (6,)) % (classes - first) + first
    p = torch.zeros(6, classes, dtype=dtype)
    p[torch.arange(6), t] = 1
    exact = torchs(x.double(), t, reduction="none")
    for name, layout in layouts_of(x.to(device)).items():
        for target in (t, p):
            result = run(layout(x.to(device)), target.to(device), reduction="none")
            for mine, true in (
                (result.value, exact.value),
                (result.gradients["input"], exact.gradients["input"]),
            ):
                bound = 0.51 * ulp(true, dtype) + 32 * 2.0**-24
                assert_within(mine, true, bound, name)


def exact_type(target: Tensor, dtype: torch.dtype = torch.float64) -> torch.dtype:
    return dtype if target.is_floating_point() else target.dtype


def test_rows_with_infinities_by_definition(device: str) -> None:
    """The same in figures that do not come from torch."""
    x = torch.tensor([[0.0, 0.0, -INF]], device=device)
    off, on = torch.tensor([0], device=device), torch.tensor([2], device=device)
    result = run(x, off)
    assert_within(result.value, torch.tensor(math.log(2.0)), 1e-7, "off the target")
    assert result.gradients["input"].tolist() == [[-0.5, 0.5, 0.0]]
    result = run(x, on)
    assert result.value.item() == INF
    assert result.gradients["input"].tolist() == [[0.5, 0.5, -1.0]]


@per_dtype
def test_probability_zero_times_infinity(dtype: torch.dtype, device: str) -> None:
    """Deviation 2: a masked class of probability 0 contributes 0; torch gives NaN."""
    x = torch.tensor([[0.0, -INF, 0.0], [-INF, 1.0, -INF]], dtype=dtype, device=device)
    p = torch.tensor([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]], dtype=dtype, device=device)
    w = torch.tensor([2.0, 3.0, 2.0], dtype=dtype, device=device)
    for weight, factor in ((None, (1.0, 1.0)), (w, (2.0, 3.0))):
        for reduction, expected in (
            ("none", torch.tensor([factor[0] * math.log(2), 0.0], dtype=torch.float64)),
            ("sum", torch.tensor(factor[0] * math.log(2), dtype=torch.float64)),
            ("mean", torch.tensor(factor[0] * math.log(2) / 2, dtype=torch.float64)),
        ):
            result = run(x, p, weight, reduction=reduction)
            bound = 0.5 * ulp(expected, dtype) + 4 * 2.0**-24
            assert_within(result.value, expected, bound, reduction)
            assert_same(
                result.gradients["input"], torch.zeros_like(x), f"{reduction}: softmax - p is 0"
            )
            assert same_bits(OP(x, p, weight, reduction=reduction), result.value)
    # where the probability is not 0 it is infinite
    assert lossops.cross_entropy(x, p.flip(1).roll(1, 1), reduction="sum").item() == INF


@pytest.mark.parametrize("scale", [1.0, 60.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_logits(dtype: torch.dtype, scale: float, device: str) -> None:
    """No overflow of exponentials, in any order of magnitudes within the row."""
    base = torch.randn(7, 3001)
    for x in (
        base * scale,
        base.sort(dim=1).values * scale,
        base.sort(dim=1).values.flip(1) * scale,
    ):
        sample = sample_of(x.to(dtype).to(device), torch.randint(0, 3001, (7,)).to(device))
        for reduction in CE.reductions:
            check(CE, sample.with_options(reduction=reduction))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
def test_gradient_accuracy(dtype: torch.dtype, device: str) -> None:
    """Within 4 units in the last place, and on the whole no further than torch's."""
    for classes in (10, 1000, 50257):
        for spread in (4.0, 20.0):
            x = (spread * torch.rand(8, classes)).to(dtype).to(device)
            t = torch.randint(0, classes, (8,)).to(device)
            ours = run(x, t, reduction="sum").gradients["input"]
            theirs = torchs(x, t, reduction="sum").gradients["input"].double()
            exact = torchs(x.double(), t, reduction="sum").gradients["input"]
            spacing = ulp(exact, dtype)
            what = f"{classes} classes, spread {spread}"
            assert_within(ours, exact, 4 * spacing, what)
            mine = ((ours.double() - exact) / spacing).square().mean().sqrt()
            assert mine <= (1.05 * ((theirs - exact) / spacing).square().mean().sqrt()).clamp(
                min=0.5
            ), what


@pytest.mark.parametrize("classes", [2, 3, 10, 21, 100])
def test_gradient_at_the_class_index(classes: int, device: str) -> None:
    """1 - softmax within 4 units, also of logits whose differences float32 cannot hold.

    In a confident row it is all of a gradient. Rounded differences would put it off by 30 units.
    """
    rows = 200_000 // classes
    for shift in (0.0, 40.0):
        x = (8 * torch.randn(rows, classes) + shift).to(device)
        t = torch.randint(0, classes, (rows,)).to(device)
        at_index = F.one_hot(t, classes).bool()
        others = torch.softmax(x.double(), 1).masked_fill(at_index, 0).sum(1)
        for layout in layouts_of(x).values():
            ours = -run(layout(x), t, reduction="sum").gradients["input"][at_index]
            seen = others > 1e-30
            assert_within(
                ours[seen], others[seen], 4 * ulp(others[seen], torch.float32), "gradient"
            )


@pytest.mark.parametrize("classes", [2, 7, 40, 1000, 9001])
def test_confident_rows(classes: int, device: str) -> None:
    """Rows whose target outweighs all else: the loss, and 1 - softmax, to the last places.

    In float32, 1 + exp(-20) is 1: a sum that holds both would make loss and gradient 0, as torch's
    does. The spread of the others is small, so that rounding x - max costs nothing.
    """
    t = torch.randint(0, classes, (40,))
    x = -torch.randint(0, 3, (40, classes)).float()
    x[torch.arange(40), t] = torch.linspace(0, 60, 40).round()
    x, t = x.to(device), t.to(device)
    for layout in layouts_of(x).values():
        for target in (t, F.one_hot(t, classes).float()):
            ours = run(layout(x), target, reduction="none")
            rest = (x.double() - x.double().amax(1, keepdim=True)).exp()
            rest[torch.arange(40), t] = 0
            rest = rest.sum(1)
            rows = x[torch.arange(40), t] > 5  # the target's logit is the maximum of these
            exact = torch.log1p(rest)[rows]
            assert_within(ours.value[rows], exact, 4 * ulp(exact, torch.float32), "loss")
            at_target = ours.gradients["input"][torch.arange(40), t][rows]
            exact = -(rest / (1 + rest))[rows]
            assert_within(at_target, exact, 4 * ulp(exact, torch.float32), "gradient")


def test_no_classes_of_probabilities(device: str) -> None:
    for reduction in CE.reductions:
        x = torch.zeros(4, 0, device=device)
        mine, theirs = run(x, x, reduction=reduction), torchs(x, x, reduction=reduction)
        assert_same(mine.value, theirs.value, reduction)


# --- the other deviations -----------------------------------------------------------------------


def test_half_precision_mean_does_not_overflow(device: str) -> None:
    """Deviation 1: the sum over 70,000 rows is infinite in float16, their mean is not."""
    x = torch.zeros(70_000, 3, dtype=torch.float16, device=device)
    t = torch.zeros(70_000, dtype=torch.int64, device=device)
    w = torch.full((3,), 2.0, dtype=torch.float16, device=device)
    exact = torch.tensor(math.log(3.0), dtype=torch.float64)
    for call in (lossops.cross_entropy, OP):
        for weight in (None, w):
            for smoothing in (0.0, 0.1):
                for target in (t, F.one_hot(t, 3).half()):
                    result = call(x, target, weight, label_smoothing=smoothing)
                    scale = 2 if weight is not None and target.is_floating_point() else 1
                    bound = 0.5 * ulp(scale * exact, torch.float16) + 1e-6
                    assert_within(result, scale * exact, bound, f"{smoothing=}")
                    total = call(x, target, weight, label_smoothing=smoothing, reduction="sum")
                    assert total.item() == INF
    gradient = run(x, t).gradients["input"]
    true = torchs(x.double(), t).gradients["input"]
    assert_within(gradient, true, 0.5 * ulp(true, torch.float16) + 1e-10, "gradient")


def test_spatial_loss_is_deterministic(device: str) -> None:
    """Deviation 7: torch's raises under use_deterministic_algorithms for these on CUDA."""
    torch.use_deterministic_algorithms(True)
    for shape in ((3, 19, 33, 17), (2, 7, 129), (2, 3, 5, 4, 3)):
        x = torch.randn(shape, device=device)
        t = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=device)
        w = torch.rand(shape[1], device=device)
        for reduction in CE.reductions:
            for options in ({}, {"label_smoothing": 0.1}):
                first = run(x, t, w, reduction=reduction, **options)
                for _ in range(3):
                    again = run(x, t, w, reduction=reduction, **options)
                    assert same_bits(first.value, again.value)
                    assert same_bits(first.gradients["input"], again.gradients["input"])


def test_row_does_not_depend_on_its_batch(device: str) -> None:
    """Bit-equal whether a row is computed alone or with others, wherever they lie in memory."""
    for classes in (3, 37, 1000, 4097, 20001):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(5, classes).to(dtype).to(device)
            t = torch.randint(0, classes, (5,)).to(device)
            for target in (t, torch.softmax(x.float(), 1).roll(3, 1).to(dtype)):
                for name, layout in layouts_of(x).items():
                    y = layout(x)
                    batch = run(y, target, reduction="none")
                    for i in range(5):
                        alone = run(y[i : i + 1], target[i : i + 1], reduction="none")
                        what = f"{classes} classes, {dtype}, {name}, row {i}"
                        assert same_bits(alone.value, batch.value[i : i + 1]), what
                        assert same_bits(
                            alone.gradients["input"], batch.gradients["input"][i : i + 1]
                        ), what


@per_call
@pytest.mark.cuda
def test_tensors_on_two_devices(call: LossFunction) -> None:
    x, t, w = torch.randn(2, 3), torch.tensor([0, 1]), torch.ones(3)
    cpu, cuda = "is on cpu", "is on cuda:0"
    assert_raises(ANY_ERROR, lambda: call(x.cuda(), t), f"target {cpu} but input {cuda}")
    assert_raises(ANY_ERROR, lambda: call(x, t.cuda()), f"target {cuda} but input {cpu}")
    assert_raises(ANY_ERROR, lambda: call(x.cuda(), t.cuda(), w), f"weight {cpu} but input {cuda}")


@pytest.mark.parametrize("classes", [3, 100, 256, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_rows_do_not_depend_on_dimensions(
    dtype: torch.dtype, classes: int, device: str
) -> None:
    """Rows of two dimensions that do not merge have the gradients of the same rows in one."""
    buffer = (8 * torch.randn(2, 4, classes, device=device)).to(dtype)
    target = torch.randint(classes, (2, 3), device=device)
    target[0, 1] = -100
    grad_output = torch.rand(2, 3, device=device).to(dtype)
    found = []
    for x in (buffer[:, :3].transpose(1, 2), buffer[:, :3].reshape(6, classes)):
        x = x.detach().requires_grad_()
        t, given = (v if x.dim() == 3 else v.flatten() for v in (target, grad_output))
        loss = lossops.cross_entropy(x, t, reduction="none")
        found.append(torch.autograd.grad(loss, x, given)[0])
    assert same_bits(found[0].transpose(1, 2).reshape(6, classes), found[1])


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("classes", [256, 1024, 2056, 20_016])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradients_do_not_depend_on_alignment(
    dtype: torch.dtype, classes: int, reduction: str, device: str
) -> None:
    """The same logits and statistics give equal gradients wherever rows and gradients lie."""
    rows = 5
    logits = 8 * torch.randn(rows, classes, device=device).to(dtype)
    logits[3, 7] = -torch.inf
    target = torch.randint(classes - 8, (rows,), device=device)
    target[1] = -100
    weight = torch.rand(classes, device=device).to(dtype) + 0.5
    options = (-100, reduction, 0.0)
    loss, *terms = torch.ops.lossops.cross_entropy_forward(logits, target, weight, *options, False)
    grad_output = torch.rand_like(loss)

    def gradient(logits: Tensor) -> Tensor:
        mask = [True, False, False]
        found: Tensor = torch.ops.lossops.cross_entropy_backward(
            grad_output, logits, target, weight[: logits.size(1)], *terms, *options, mask
        )[0]
        return found

    expected = gradient(logits)
    assert same_bits(expected[1], torch.zeros_like(expected[1]))
    for pad, offset in ((1, 0), (3, 2), (0, 1), (8, 5), (6, 0), (0, 7)):
        pitch = classes + pad
        elsewhere = torch.empty(rows * pitch + offset, dtype=dtype, device=device)
        elsewhere = elsewhere[offset:].view(rows, pitch)[:, :classes].copy_(logits)
        assert same_bits(gradient(elsewhere), expected), (pad, offset)
    # With the same statistics, the gradients of fewer classes are the first of them. They are
    # contiguous, so an odd number of classes puts rows of gradients anywhere.
    for fewer in (classes - 1, classes - 5, classes - 6):
        for some in (logits[:, :fewer], logits[:, :fewer].contiguous()):
            assert same_bits(gradient(some), expected[:, :fewer]), fewer
