"""kl_div: what every call must return, case by case."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises, check, words_of_dtype, words_of_shape
from losses import BY_NAME, LossFunction, Sample, evaluate, kl_div_reference
from numerics import DTYPES, HALF_TYPES, assert_same, assert_within, ulp
from torch import Tensor

import lossops

KL = BY_NAME["kl_div"]
OP = torch.ops.lossops.kl_div
INF, NAN = math.inf, math.nan
NOT_FLOATING = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)

per_call = pytest.mark.parametrize("call", [lossops.kl_div, OP], ids=["function", "op"])
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")


def sample_of(input: Tensor, target: Tensor, **options: object) -> Sample:
    return Sample("kl_div", {"input": input, "target": target}, options, ("input", "target"))


def test_signature() -> None:
    parameters = inspect.signature(lossops.kl_div).parameters
    theirs = inspect.signature(F.kl_div).parameters
    assert list(parameters) == [*theirs, "log_input"]  # in torch's order, by position too
    assert parameters["log_input"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["log_input"].default is True
    for name, parameter in theirs.items():
        assert parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameters[name].default == parameter.default
    assert str(OP.default._schema) == (
        'lossops::kl_div(Tensor input, Tensor target, *, str reduction="mean", '
        "bool log_target=False, bool log_input=True) -> Tensor"
    )


@pytest.mark.parametrize("name", ["size_average", "reduce"])
def test_deprecated_arguments_are_gone(name: str) -> None:
    """Deviation 8."""
    with pytest.raises(TypeError, match=name):
        lossops.kl_div(torch.ones(2), torch.ones(2), **{name: True})


@per_dtype
def test_reductions(dtype: torch.dtype, device: str) -> None:
    x = torch.full((2, 4), -1.0, dtype=dtype, device=device)
    t = torch.ones_like(x)  # each term is 1 * (log 1 + 1) = 1
    for reduction, expected in (("sum", 8.0), ("mean", 1.0), ("batchmean", 4.0)):
        assert lossops.kl_div(x, t, reduction=reduction).item() == expected
    assert lossops.kl_div(x, t).item() == 1.0
    assert lossops.kl_div(x, t, reduction="none").tolist() == [[1.0] * 4] * 2


def test_batchmean_divides_by_the_size_before_broadcasting(device: str) -> None:
    for input_shape, target_shape, divisor in (
        ((2, 3), (2, 3), 2),
        ((3,), (2, 3), 3),  # input.size(0), whatever it stands for
        ((1, 3), (2, 3), 1),
        ((2, 1), (3,), 2),
        ((), (), 1),
        ((), (4,), 1),
        ((4,), (), 4),
    ):
        # log(t) - x is positive everywhere: of a sum that cancels, the relative error is larger.
        x = -torch.rand(input_shape, device=device) - 2.5
        t = torch.rand(target_shape, device=device) + 0.1
        for call in (lossops.kl_div, OP, F.kl_div):
            total = call(x.double(), t.double(), reduction="sum")
            result = call(x, t, reduction="batchmean")
            assert_within(
                result,
                total / divisor,
                4 * ulp(total / divisor, torch.float32),
                f"{input_shape} {target_shape}",
            )
        check(KL, sample_of(x, t, reduction="batchmean"))


OPEN = 12345.0  # where the contract leaves a result open


def exact_table(log_input: bool, log_target: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Inputs, targets and, by name, what torch returns for them in float64, deviation 2 applied."""
    inputs = [-1.0, -0.25, 0.0, -INF, INF, NAN]
    if not log_input:
        inputs = [0.5, 1.0, 0.0, -0.0, -1.0, INF, NAN]
    targets = (
        [-0.5, 0.0, -2.0, -INF, NAN] if log_target else [0.0, -0.0, 0.5, 1.0, -0.5, -0.75, NAN]
    )
    pairs = torch.cartesian_prod(
        torch.tensor(inputs, dtype=torch.float64), torch.tensor(targets, dtype=torch.float64)
    )
    x, t = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    options = {"reduction": "none", "log_input": log_input, "log_target": log_target}
    result = evaluate(kl_div_reference, sample_of(x, t, **options))
    expected = {"value": result.value, **result.gradients}

    no_weight = t == -INF if log_target else t == 0
    log_x = x if log_input else x.log()
    contributes_0 = no_weight & ~log_x.isnan() & (log_x != INF)
    expected["value"][contributes_0] = 0
    expected["input"][contributes_0] = 0
    expected["value"][no_weight & (log_x == INF)] = OPEN
    expected["input"][no_weight & ~contributes_0] = OPEN
    if log_target:
        expected["target"][contributes_0] = 0
        expected["target"][no_weight & ~contributes_0] = OPEN
    return x, t, expected


@pytest.mark.parametrize("log_target", [False, True], ids=["target", "log_target"])
@pytest.mark.parametrize("log_input", [True, False], ids=["log_input", "input"])
@per_dtype
def test_special_values(dtype: torch.dtype, log_input: bool, log_target: bool, device: str) -> None:
    """Zeros of either sign, negative targets, infinities, NaN: values and both gradients."""
    x, t, expected = exact_table(log_input, log_target)
    repeats = 40  # so that each pair meets each lane of a vector, and the scalar tail
    sample = sample_of(
        x.repeat(repeats).to(dtype).to(device),
        t.repeat(repeats).to(dtype).to(device),
        reduction="none",
        log_input=log_input,
        log_target=log_target,
    )
    result = evaluate(lossops.kl_div, sample)
    for name, actual in {"value": result.value, **result.gradients}.items():
        exact = expected[name].repeat(repeats)
        judged = exact != OPEN
        where = [f"({a}, {b})" for a, b in zip(x.tolist(), t.tolist(), strict=True)]
        for i, pair in enumerate(where):
            if not bool(judged[i]):
                continue
            mine, true = actual[i :: len(where)], exact[i :: len(where)]
            size = true.abs().clamp(min=1).nan_to_num()
            assert_within(
                mine,
                true,
                0.5 * ulp(true.nan_to_num(), dtype) + 8 * 2.0**-24 * size,
                f"{name} at (input, target) = {pair}",
            )


@pytest.mark.parametrize("log_target", [False, True], ids=["target", "log_target"])
@pytest.mark.parametrize("log_input", [True, False], ids=["log_input", "input"])
@per_dtype
def test_special_values_in_means(
    dtype: torch.dtype, log_input: bool, log_target: bool, device: str
) -> None:
    """The mean of one pair many times is its term: in whole vectors and in the rest."""
    x, t, _ = exact_table(log_input, log_target)
    # Weights that are subnormal in bfloat16 weigh an infinity, and a zero does not.
    absent = -INF if log_input else 0.0
    tiny = (-1.0, -90.0, -1e4) if log_target else (0.5, 1e-39, 2.0**-24)
    x = torch.cat([x, torch.tensor([absent, absent, -1.0 if log_input else 1e-39])]).to(dtype)
    t = torch.cat([t, torch.tensor(tiny)]).to(dtype)
    options = {"log_target": log_target, "log_input": log_input}
    terms = lossops.kl_div(x.to(device), t.to(device), reduction="none", **options)
    for i, term in enumerate(terms):
        pair = [operand[i].expand(4099).contiguous().to(device) for operand in (x, t)]
        mean = lossops.kl_div(*pair, reduction="mean", **options)
        bound = ulp(term.nan_to_num(), dtype) + 4 * 2.0**-22 * term.abs().clamp(min=1).nan_to_num()
        assert_within(mean, term, bound, f"({x[i].item()}, {t[i].item()})")


@per_dtype
def test_target_zero(dtype: torch.dtype, device: str) -> None:
    for zero in (0.0, -0.0):
        x = torch.tensor([-1.0, -2.0], dtype=dtype, device=device)
        t = torch.tensor([zero, 1.0], dtype=dtype, device=device)
        result = evaluate(lossops.kl_div, sample_of(x, t, reduction="sum"))
        assert result.value.item() == 2.0
        assert result.gradients["input"].tolist() == [0.0, -1.0]
        assert result.gradients["target"][0].isnan()
        assert result.gradients["target"][1].item() == 3.0


@per_dtype
def test_target_negative(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([-1.0, -2.0], dtype=dtype, device=device)
    t = torch.tensor([-0.5, 1.0], dtype=dtype, device=device)
    result = evaluate(lossops.kl_div, sample_of(x, t, reduction="none"))
    assert result.value[0].isnan()
    assert result.value[1].item() == 2.0
    assert result.gradients["input"].tolist() == [0.5, -1.0]
    assert lossops.kl_div(x, t, reduction="sum").isnan()


@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
@per_dtype
def test_weight_zero_times_infinity(dtype: torch.dtype, reduction: str, device: str) -> None:
    """Deviation 2: a masked vocabulary has input -inf where the target is 0; torch gives NaN."""
    kept = {"sum": 1.0, "mean": 0.25, "batchmean": 0.5}[reduction] * 4
    for log_target, absent, present in ((False, 0.0, 1.0), (True, -INF, 0.0)):
        for log_input, masked, other in ((True, -INF, -2.0), (False, 0.0, 1.0)):
            x = torch.tensor([[masked, other], [other, masked]], dtype=dtype, device=device)
            t = torch.tensor([[absent, present], [present, absent]], dtype=dtype, device=device)
            options = {"reduction": reduction, "log_target": log_target, "log_input": log_input}
            result = evaluate(lossops.kl_div, sample_of(x, t, **options))
            total = kept if log_input else 0.0  # 1 * (0 + 2) twice, or 1 * (0 - log 1)
            assert result.value.item() == total, f"{options}"
            gradient = result.gradients["input"]
            assert gradient[0, 0].item() == 0.0, f"{options}: {gradient}"
            assert gradient[0, 1].item() < 0.0, f"{options}: {gradient}"


@per_dtype
def test_input_minus_infinity_where_the_target_is_positive(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([-INF, -1.0], dtype=dtype, device=device)
    t = torch.tensor([0.5, 1.0], dtype=dtype, device=device)
    assert lossops.kl_div(x, t, reduction="none").tolist() == [INF, 1.0]
    for reduction in ("sum", "mean", "batchmean"):
        assert lossops.kl_div(x, t, reduction=reduction).item() == INF
    assert lossops.kl_div(x.exp(), t, reduction="sum", log_input=False).item() == INF
    assert lossops.kl_div(x, t.log(), reduction="sum", log_target=True).item() == INF


@pytest.mark.parametrize("log_target", [False, True], ids=["target", "log_target"])
@per_dtype
def test_nan_is_kept(dtype: torch.dtype, log_target: bool, device: str) -> None:
    """Also where the target is 0, and wherever in a large tensor it is."""
    for position in (0, 1, 517, 4099, 5000):
        for where in ("input", "target"):
            x = torch.full((5001,), -1.0, dtype=dtype, device=device)
            t = torch.zeros_like(x)
            (x if where == "input" else t)[position] = NAN
            for reduction in ("sum", "mean", "batchmean"):
                result = lossops.kl_div(x, t, reduction=reduction, log_target=log_target)
                assert result.isnan(), f"{where} NaN at {position}, {reduction}"


@pytest.mark.parametrize("dtype", NOT_FLOATING, ids=str)
def test_integers_and_complex_are_refused(dtype: torch.dtype, device: str) -> None:
    x, n = torch.rand(3, device=device), torch.ones(3, device=device).to(dtype)
    for call in (lossops.kl_div, OP):
        for arguments, name in (((n, n), "input|target"), ((x, n), "target"), ((n, x), "input")):
            for reduction in KL.reductions:
                assert_raises(
                    RuntimeError,
                    lambda c=call, a=arguments, r=reduction: c(*a, reduction=r),
                    rf"\b({name})\b",
                    words_of_dtype(dtype),
                )


@per_call
def test_shapes_that_do_not_broadcast(call: LossFunction, device: str) -> None:
    x, t = torch.ones(2, 3, device=device), torch.ones(4, device=device)
    assert_raises(RuntimeError, lambda: call(x, t), words_of_shape(2, 3), words_of_shape(4))


@per_call
@pytest.mark.parametrize("bad", ["batch_mean", "Mean", ""])
def test_bad_reduction(call: LossFunction, bad: str, device: str) -> None:
    x = torch.ones(3, device=device)
    kind = ValueError if call is lossops.kl_div else RuntimeError
    assert_raises(
        kind,
        lambda: call(x, x, reduction=bad),
        "reduction",
        bad,
        "none",
        r"\bmean",
        "sum",
        "batchmean",
    )


@pytest.mark.parametrize("bad", [None, 3])
def test_reduction_that_is_not_a_string(bad: object) -> None:
    x = torch.ones(3)
    assert_raises(ValueError, lambda: lossops.kl_div(x, x, reduction=bad), "reduction", str(bad))


@pytest.mark.parametrize("name", ["input", "target"])
@pytest.mark.parametrize("wrong", [[1.0, 2.0], 1.0, None], ids=["list", "float", "None"])
def test_argument_that_is_not_a_tensor(name: str, wrong: object) -> None:
    arguments = {"input": torch.ones(2), "target": torch.ones(2), name: wrong}
    assert_raises(TypeError, lambda: lossops.kl_div(**arguments), name)


@pytest.mark.parametrize("log_input", [True, False], ids=["log_input", "input"])
@pytest.mark.parametrize("log_target", [False, True], ids=["target", "log_target"])
@per_dtype
def test_empty(dtype: torch.dtype, log_target: bool, log_input: bool, device: str) -> None:
    for shape, batchmean in (((0,), NAN), ((0, 3), NAN), ((3, 0), 0.0)):
        x = torch.empty(shape, dtype=dtype, device=device)
        for reduction, expected in (
            ("none", torch.empty(shape)),
            ("sum", torch.tensor(0.0)),
            ("mean", torch.tensor(NAN)),
            ("batchmean", torch.tensor(batchmean)),
        ):
            options = {"reduction": reduction, "log_target": log_target, "log_input": log_input}
            result = evaluate(lossops.kl_div, sample_of(x, x, **options))
            assert_same(result.value, expected.to(dtype), f"{shape} {reduction}")
            for gradient in result.gradients.values():
                assert gradient.shape == shape


@pytest.mark.parametrize("log_input", [True, False], ids=["log_input", "input"])
@pytest.mark.parametrize("log_target", [False, True], ids=["target", "log_target"])
@per_dtype
def test_operand_broadcast_to_no_elements(
    dtype: torch.dtype, log_target: bool, log_input: bool, device: str
) -> None:
    """A factor of torch's derivative is computed before the target is broadcast: 0 times NaN."""
    values = torch.tensor([0.5, 1.0, -0.0, 0.0, INF, NAN] + [-INF] * log_target)
    t = values[:, None].to(dtype).to(device)
    x = torch.ones(len(t), 0, dtype=dtype, device=device)
    for target in (t, t.expand(-1, 1)[None], t[:0, :0].sum()):
        for reduction in ("none", "sum", "mean", "batchmean"):
            options = {"reduction": reduction, "log_target": log_target}
            given = sample_of(x, target, log_input=log_input, **options)
            result = evaluate(lossops.kl_div, given)
            theirs = evaluate(F.kl_div, sample_of(x, target, **options))
            assert_same(result.value, theirs.value, reduction)
            assert_same(result.gradients["target"], theirs.gradients["target"], reduction)
    one = torch.ones(1, 1, dtype=dtype, device=device)
    result = evaluate(lossops.kl_div, sample_of(one, x, log_input=log_input, reduction="sum"))
    assert_same(result.gradients["input"], torch.zeros_like(one), "input")


@pytest.mark.parametrize(
    ("dtype", "target_dtype", "expected"),
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_promotion(
    dtype: torch.dtype, target_dtype: torch.dtype, expected: torch.dtype, device: str
) -> None:
    x = -torch.rand(3, 5).to(dtype).to(device)
    t = torch.rand(3, 5).to(target_dtype).to(device)
    for arguments in ((x, t), (-t, -x)):
        result = evaluate(lossops.kl_div, sample_of(*arguments))
        assert result.value.dtype == expected
        assert result.gradients["input"].dtype == arguments[0].dtype
        assert result.gradients["target"].dtype == arguments[1].dtype


@per_dtype
def test_probabilities_are_the_logarithm_fused(dtype: torch.dtype, device: str) -> None:
    """kl_div(p, t, log_input=False) is F.kl_div(p.log(), t), also by its gradient for p."""
    p = torch.softmax(torch.randn(16, 257), -1).to(dtype).clamp(min=2.0**-14).to(device)
    t = torch.softmax(torch.randn(16, 257), -1).to(dtype).to(device)
    for reduction in KL.reductions:
        for log_target in (False, True):
            target = t.double().log().to(dtype) if log_target else t
            options = {"reduction": reduction, "log_target": log_target}
            sample = sample_of(p, target, **options)

            def composed(p: Tensor, t: Tensor, **options: object) -> Tensor:
                return F.kl_div(p.log(), t, **options)

            exact = evaluate(composed, sample.double())
            ours = check(KL, sample.with_options(log_input=False))
            assert_within(
                ours.value.double().sum(), exact.value.sum(), exact.value.abs().sum() * 0.01, "sum"
            )


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "padded": lambda x: F.pad(x, (0, 3))[..., :-3],
}


@per_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("log_input", [True, False])
@pytest.mark.parametrize("log_target", [True, False])
def test_gradient_of_input_alone(
    dtype: torch.dtype, layout: str, log_input: bool, log_target: bool, device: str
) -> None:
    """The gradient of input is the same number as beside that of target, which takes input."""
    p, t = (torch.softmax(torch.randn(3, 71, 45), -1).clamp(min=2.0**-14) for _ in range(2))
    input = LAYOUTS[layout]((p.log() if log_input else p).to(dtype).to(device))
    for target_dtype in {dtype, torch.float32}:
        target = (t.log() if log_target else t).to(target_dtype).to(device)
        for reduction in ("none", "sum"):
            sample = sample_of(
                input, target, reduction=reduction, log_input=log_input, log_target=log_target
            )
            check(KL, sample)
            leaf = input.detach().requires_grad_()
            loss = lossops.kl_div(leaf, target, **sample.options)
            grad_output = torch.full_like(loss, 0.5)
            (alone,) = torch.autograd.grad(loss, leaf, grad_output, retain_graph=True)
            leaves = (leaf, target.detach().requires_grad_())
            loss = lossops.kl_div(*leaves, **sample.options)
            beside, _ = torch.autograd.grad(loss, leaves, grad_output)
            assert_same(alone, beside, f"{reduction}, {target_dtype}")


@per_dtype
@pytest.mark.parametrize("log_target", [True, False])
def test_target_that_rows_share(dtype: torch.dtype, log_target: bool, device: str) -> None:
    """Losses are those of copies of the target, though what they take of it is computed once."""
    for columns in (5, 45, 202, 2600):
        p = torch.softmax(torch.randn(64, 20, columns), -1).to(dtype).clamp(min=2.0**-14)
        t = torch.softmax(torch.randn(columns), -1).to(dtype).clamp(min=2.0**-14)
        x, t = p.log().to(device), (t.log() if log_target else t).to(device)
        for target in (t, t.expand(20, columns).contiguous()):
            shared = lossops.kl_div(x, target, reduction="none", log_target=log_target)
            copies = target.expand_as(x).contiguous()
            apart = lossops.kl_div(x, copies, reduction="none", log_target=log_target)
            assert_same(shared, apart, f"{columns} columns, {tuple(target.shape)}")


@per_dtype
def test_term_accuracy(dtype: torch.dtype, device: str) -> None:
    """A term is off by at most 4 x 2^-24 x t x max(1, |log t|, |log p|), equal to it or not."""
    half = dtype in HALF_TYPES
    p = torch.rand(200_000).clamp(min=1e-4).to(dtype)
    near = torch.linspace(-4e-3, 4e-3, p.numel())
    for target in (torch.rand(p.numel()), p * (1 + near), p, p * 0.5, p**2):
        t = target.to(dtype).clamp(min=1e-4)
        for log_input in (True, False):
            for log_target in (True, False):
                x64, t64 = p.double(), t.double()
                x = (p.log() if log_input else p).to(dtype)
                y = (t.log() if log_target else t).to(dtype)
                log_p = x.double() if log_input else x64.log()
                log_t = y.double() if log_target else t64.log()
                weight = log_t.exp() if log_target else t64
                exact = weight * (log_t - log_p)
                size = torch.maximum(log_t.abs(), log_p.abs()).clamp(min=1)
                bound = 4 * 2.0**-24 * weight * size
                if half:
                    bound = bound + 0.5 * ulp(exact, dtype)
                result = lossops.kl_div(
                    x.to(device),
                    y.to(device),
                    reduction="none",
                    log_target=log_target,
                    log_input=log_input,
                )
                assert_within(result, exact, bound, f"{log_input=} {log_target=}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_quotients_beyond_the_range_of_the_dtype(dtype: torch.dtype, device: str) -> None:
    """Probabilities need not add up to 1: from the smallest subnormal to the largest number."""
    info = torch.finfo(dtype)
    below = torch.tensor([info.tiny * info.eps, info.tiny / 2, info.tiny, 1e-4, 0.3], device=device)
    around_1 = torch.tensor([0.6, 0.9, 1.0, 1.1, 1.9, 4.0], device=device)
    numbers = torch.cat([below, around_1, 0.99 / below[1:]]).double().clamp(max=info.max)
    # A thread takes numbers of all sizes at once.
    p, t = torch.cartesian_prod(numbers, numbers).to(dtype).repeat(40, 1).unbind(-1)
    sample = sample_of(p, t, reduction="none", log_input=False)
    result = evaluate(lossops.kl_div, sample)
    log_p, log_t = p.double().log(), t.double().log()
    size = torch.maximum(log_p.abs(), log_t.abs()).clamp(min=1)
    for name, actual, exact, allowed in (
        ("value", result.value, t.double() * (log_t - log_p), 4 * t.double() * size),
        ("gradient of target", result.gradients["target"], log_t - log_p + 1, 8 * size),
    ):
        exact = exact.clamp(-info.max, info.max)
        bound = 2.0**-24 * allowed + ulp(exact, dtype)
        assert_within(actual.double().clamp(-info.max, info.max), exact, bound, name)


@pytest.mark.parametrize("log_input", [True, False], ids=["log_input", "input"])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_losses_of_half_types_near_the_teacher(
    dtype: torch.dtype, log_input: bool, device: str
) -> None:
    """Where the logarithms nearly cancel."""
    logits = torch.randn(400, 500, device=device)
    teacher = torch.softmax(logits, -1).to(dtype)
    student = torch.log_softmax(logits + 0.1 * torch.randn(400, 500, device=device), -1)
    student = (student if log_input else student.exp()).to(dtype)
    losses = lossops.kl_div(student, teacher, reduction="none", log_input=log_input)
    t, p = teacher.double(), student.double()
    exact = t * (t.log() - (p if log_input else p.log()))
    right = (losses == exact.to(dtype)).double().mean().item()
    # The CPU rounds log(t) before it takes log(p) from it.
    least = 0.998 if log_input and device == "cpu" else 0.9991 if log_input else 0.9998
    assert right >= least, f"{right:.5f} correctly rounded"


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_losses_of_half_types_of_a_confident_teacher(dtype: torch.dtype, device: str) -> None:
    """The logarithm of what is nearly 1 is small."""
    logits = 5 * torch.randn(20_000, 10, device=device)
    teacher = torch.softmax(logits, -1).to(dtype)
    student = torch.log_softmax(logits + torch.randn(20_000, 10, device=device), -1).to(dtype)
    losses = lossops.kl_div(student, teacher, reduction="none")
    t = teacher.double()
    exact = torch.where(t > 0, t * (t.log() - student.double()), 0.0)
    right = (losses == exact.to(dtype)).double().mean().item()
    assert right >= 0.9985, f"{right:.5f} correctly rounded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_as_the_distributions_converge(dtype: torch.dtype, device: str) -> None:
    """Where log(target) - input cancels, the gradient keeps the accuracy of its terms."""
    logits = torch.randn(8, 512)
    target = torch.softmax(logits + 1e-2 * torch.randn(8, 512), -1).to(dtype).to(device)
    x = torch.log_softmax(logits, -1).to(dtype).to(device)
    ours = evaluate(lossops.kl_div, sample_of(x, target, reduction="batchmean"))
    exact = evaluate(F.kl_div, sample_of(x.double(), target.double(), reduction="batchmean"))
    for name, true in exact.gradients.items():
        size = true.abs() if name == "input" else torch.full_like(true, 1.0)
        bound = 0.51 * ulp(true, dtype) + 8 * 2.0**-24 * size
        assert_within(ours.gradients[name], true, bound, name)


def test_half_precision_batchmean_does_not_overflow(device: str) -> None:
    """Deviation 1: the sum of (1000, 200) ones is infinite in float16, their batchmean is 200."""
    t = torch.ones(1000, 200, dtype=torch.float16, device=device)
    for call in (lossops.kl_div, OP):
        assert call(-t, t, reduction="batchmean").item() == 200.0
        assert call(-t, t, reduction="mean").item() == 1.0
        assert call(-t, t, reduction="sum").item() == INF
    gradients = evaluate(lossops.kl_div, sample_of(-t, t, reduction="batchmean")).gradients
    exact = evaluate(F.kl_div, sample_of(-t, t, reduction="batchmean").double()).gradients
    for name, true in exact.items():
        assert_within(gradients[name], true, 0.5 * ulp(true, torch.float16), name)


@per_call
@pytest.mark.cuda
def test_tensors_on_two_devices(call: LossFunction) -> None:
    x = torch.rand(3)
    cpu, cuda = "is on cpu", "is on cuda:0"
    for input, target, words in (
        (x, x.cuda(), f"target {cuda} but input {cpu}"),
        (x.cuda(), x, f"target {cpu} but input {cuda}"),
    ):
        assert_raises((RuntimeError, ValueError), lambda a=input, b=target: call(a, b), words)


@pytest.mark.parametrize("name", ["log_target", "log_input"])
@pytest.mark.parametrize("wrong", [None, 1, "no"], ids=str)
def test_options_that_are_not_bools(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=f"log_target and log_input must be bools.*{wrong!r}"):
        lossops.kl_div(torch.ones(3), torch.ones(3), **{name: wrong})  # type: ignore[arg-type]
