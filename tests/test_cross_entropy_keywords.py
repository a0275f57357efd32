"""cross_entropy's further keywords: logit map, z-loss, token weights, values of rows.

The definition is `composed`, torch's functions in float64.
"""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises
from numerics import DTYPES, HALF_TYPES, layouts_of, same_bits
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lossops
from lossops._ops.tokens import TOKEN_VALUES

RETURNS = {
    "return_lse": True,
    "return_entropy": True,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
# Each keyword with a value other than its default. "draw": a token_weight is drawn.
KEYWORDS: dict[str, Any] = {
    "logit_scale": -1.7,
    "softcap": 2.5,
    "temperature": 0.6,
    "lse_square_scale": 0.03,
    "token_weight": "draw",
    "num_items_in_batch": 7,
    "return_lse": True,
    "return_entropy": True,
}
REDUCTIONS = ("none", "mean", "sum")


def composed(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    lse_square_scale: float = 0.0,
    token_weight: Tensor | None = None,
    num_items_in_batch: Any = None,
    **_: Any,
) -> dict[str, Tensor]:
    """Every field of CrossEntropyOutput, in the dtype of x."""
    class_dim = 0 if x.dim() == 1 else 1
    is_probability = target.is_floating_point()
    rows = x.shape[:class_dim] + x.shape[class_dim + 1 :]
    kept = torch.ones(rows, dtype=torch.bool) if is_probability else target != ignore_index
    kept = kept.to(x.device)
    z = logit_scale * torch.where(kept.unsqueeze(class_dim), x, 0.0)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    weight = None if weight is None else weight.to(x.dtype)
    target = target.to(x.dtype) if is_probability else target.long()
    losses = F.cross_entropy(
        z,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    lse = torch.logsumexp(z, class_dim).where(kept, 0.0)
    log_softmax = z.log_softmax(class_dim)
    entropy = -(log_softmax.exp() * log_softmax).sum(class_dim).where(kept, 0.0)
    share = kept.to(x.dtype)
    if weight is not None and not is_probability:
        share = weight[target.where(kept, 0)].where(kept, 0.0)
    factor = kept.to(x.dtype) if token_weight is None else token_weight.to(x.dtype).where(kept, 0.0)
    z_losses = lse_square_scale * lse**2

    def reduced(values: Tensor, shares: Tensor) -> Tensor:
        if reduction == "none":
            return values * factor
        total = (values * factor).sum()
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        return total if reduction == "sum" else total / (shares * factor).sum()

    z_loss = reduced(z_losses, kept.to(x.dtype))
    predicted = z.argmax(class_dim).masked_fill(~kept, -1)
    fields = {
        "loss": reduced(losses, share) + z_loss,
        "z_loss": z_loss,
        "lse": lse,
        "entropy": entropy,
        "predicted_tokens": predicted,
    }
    if not is_probability:
        right = ((predicted == target) & kept).to(x.dtype)
        none = reduction == "none"
        fields["token_accuracy"] = right if none else right.sum() / kept.sum()
    return fields


def draw(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    ignored: float = 0.3,
    weighted: bool = False,
    probability: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits, targets and class weights; classes are dimension 1."""
    generator = torch.Generator().manual_seed(sum(shape) + weighted)
    x = (torch.randn(shape, generator=generator) * 2).to(dtype)
    rows = shape[:1] + shape[2:]
    if probability:
        target = torch.randn(shape, generator=generator).softmax(1).to(dtype)
    else:
        target = torch.randint(0, shape[1], rows, generator=generator)
        target[torch.rand(rows, generator=generator) < ignored] = -100
    weight = (torch.rand(shape[1], generator=generator) + 0.1).to(dtype) if weighted else None
    return x.to(device), target.to(device), None if weight is None else weight.to(device)


def token_weight_of(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(x.shape[:1] + x.shape[2:], generator=generator) * 2).to(x.device)


def tolerances(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float64:
        return {"rtol": 1e-12, "atol": 1e-12}
    if dtype == torch.float32:
        return {"rtol": 4e-6, "atol": 2e-6}
    return {"rtol": torch.finfo(dtype).eps, "atol": 2e-6}


def check(x: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """Every field, and the gradient of all that are differentiable, as composed in float64.

    Returns the gradient.
    """
    if isinstance(options.get("token_weight"), str):
        options["token_weight"] = token_weight_of(x)
    leaf = x.detach().requires_grad_()
    exact_leaf = x.detach().double().requires_grad_()
    found = lossops.cross_entropy(leaf, target, weight, **options)
    exact = composed(exact_leaf, target, weight, **options)
    asked = any(options.get(key) for key in RETURNS)
    assert isinstance(found, lossops.CrossEntropyOutput) == asked
    fields = found._asdict() if isinstance(found, lossops.CrossEntropyOutput) else {"loss": found}
    roots, exact_roots, grads = [], [], []
    value_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    for name, value in fields.items():
        if name != "loss" and not options.get(f"return_{name}"):
            assert value is None
            continue
        if name == "predicted_tokens":
            assert value.dtype == torch.int64
            assert torch.equal(value, exact[name])
            continue
        expected_dtype = x.dtype if name in ("loss", "z_loss") else value_dtype
        assert value.dtype == (torch.float32 if name == "token_accuracy" else expected_dtype), name
        close = tolerances(value.dtype)
        torch.testing.assert_close(
            value.detach().double(), exact[name].detach(), equal_nan=True, **close, msg=name
        )
        assert value.requires_grad == (name in ("loss", "lse", "entropy")), name
        if value.requires_grad:
            grad = torch.linspace(0.5, 1.5, value.numel()).reshape(value.shape).to(value)
            roots.append(value)
            exact_roots.append(exact[name])
            grads.append(grad)
    (gradient,) = torch.autograd.grad(roots, leaf, grads)
    (expected,) = torch.autograd.grad(exact_roots, exact_leaf, [g.double() for g in grads])
    assert gradient.dtype == x.dtype
    close = tolerances(x.dtype)
    torch.testing.assert_close(gradient.double(), expected, **close)
    return gradient


@pytest.fixture
def backward_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the backward passes of values of rows."""
    calls: list[int] = []
    below = TOKEN_VALUES._gradients_below

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return below(*arguments)

    monkeypatch.setattr(TOKEN_VALUES, "_gradients_below", counted)
    return calls


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("key", KEYWORDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_keyword(dtype: torch.dtype, key: str, reduction: str, device: str) -> None:
    if key == "num_items_in_batch" and reduction == "none":
        pytest.skip("refused: test_wrong_arguments")
    for weighted in (False, True):
        for classes in (11, 700):  # rows as lanes of vectors, and rows one by one
            x, target, weight = draw(9, classes, dtype=dtype, device=device, weighted=weighted)
            check(x, target, weight, reduction=reduction, **{key: KEYWORDS[key]})
            check(x, target, weight, reduction=reduction, **RETURNS | {key: KEYWORDS[key]})


@pytest.mark.parametrize("pair", list(itertools.combinations(KEYWORDS, 2)), ids="-".join)
def test_pairs_of_keywords(pair: tuple[str, str], device: str) -> None:
    options = {key: KEYWORDS[key] for key in pair}
    for reduction in REDUCTIONS[1:] if "num_items_in_batch" in pair else REDUCTIONS:
        for weighted in (False, True):
            x, target, weight = draw(8, 13, device=device, weighted=weighted)
            check(x, target, weight, reduction=reduction, **options)


ALL = {key: value for key, value in KEYWORDS.items() if key != "num_items_in_batch"} | RETURNS


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 10, 7), (2, 5, 4, 3), (3, 600, 5)])
def test_images(shape: tuple[int, ...], reduction: str, device: str) -> None:
    x, target, weight = draw(*shape, device=device, weighted=True)
    gradient = check(x, target, weight, reduction=reduction, **ALL)
    assert gradient.stride() == x.stride()
    moved = x.movedim(1, -1).contiguous().movedim(-1, 1)
    assert check(moved, target, weight, reduction=reduction, **ALL).stride() == moved.stride()


def test_one_row(device: str) -> None:
    x, target, _ = draw(1, 6, device=device, ignored=0)
    for one in (target[0], target):  # (), (1,)
        found = lossops.cross_entropy(x[0], one, reduction="none", **ALL | {"token_weight": None})
        rows = lossops.cross_entropy(x, target, reduction="none", **ALL | {"token_weight": None})
        for value, expected in zip(found, rows, strict=True):
            assert torch.equal(value, expected[0]) and value.shape == ()
    weight = torch.tensor([0.25], device=device)
    found = lossops.cross_entropy(x[0], target, reduction="sum", token_weight=weight)
    assert torch.equal(
        found, lossops.cross_entropy(x, target, reduction="sum", token_weight=weight)
    )


def test_layouts_give_the_same_bits(device: str) -> None:
    x, target, weight = draw(6, 300, device=device, weighted=True)
    options = ALL | {"token_weight": token_weight_of(x)}

    def run(x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        found = lossops.cross_entropy(leaf, target, weight, **options)
        (gradient,) = torch.autograd.grad([found.loss, found.lse], leaf, [None, found.lse * 0 + 1])
        return [*found, gradient]

    expected = run(x)
    for name, layout in layouts_of(x).items():
        for one, other in zip(run(layout(x)), expected, strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_dtypes_of_class_indices(dtype: torch.dtype, device: str) -> None:
    x, target, _ = draw(7, 20, device=device, ignored=0)
    for ignore_index in (3, 255, 2**31, -(2**63), -100):
        at = target.clone()
        if torch.iinfo(dtype).min <= ignore_index <= torch.iinfo(dtype).max:
            at[::3] = ignore_index
        at = at.to(dtype)
        found = lossops.cross_entropy(x, at, ignore_index=ignore_index, temperature=0.5)
        expected = F.cross_entropy((x / 0.5).double(), at.long(), ignore_index=ignore_index)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_ignored_rows_are_zero_and_not_read(device: str) -> None:
    for classes, smoothing in itertools.product((10, 700), (0.0, 0.2)):
        x, target, weight = draw(12, classes, device=device, weighted=True)
        ignored = target == -100
        assert bool(ignored.any()) and not bool(ignored.all())
        token_weight = token_weight_of(x)
        options = ALL | {"label_smoothing": smoothing}
        clean = check(x, target, weight, **options | {"token_weight": token_weight})
        x[ignored] = torch.nan
        token_weight[ignored] = torch.inf
        gradient = check(x, target, weight, **options | {"token_weight": token_weight})
        assert torch.equal(gradient[ignored], torch.zeros_like(gradient[ignored]))
        assert torch.equal(gradient, clean)
        found = lossops.cross_entropy(
            x, target, weight, reduction="none", **options | {"token_weight": token_weight}
        )
        for name, value in found._asdict().items():
            expected = -1 if name == "predicted_tokens" else 0
            assert bool((value[ignored] == expected).all()), name


@pytest.mark.parametrize("probability", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoothing_and_probabilities(dtype: torch.dtype, probability: bool, device: str) -> None:
    keys = [key for key in ALL if key not in ("return_token_accuracy", "return_predicted_tokens")]
    options = {key: ALL[key] for key in keys} if probability else dict(ALL)
    for reduction, weighted, smoothing in itertools.product(REDUCTIONS, (False, True), (0.0, 0.1)):
        for shape in ((9, 12), (2, 6, 5)):
            x, target, weight = draw(
                *shape, dtype=dtype, device=device, weighted=weighted, probability=probability
            )
            if smoothing or probability:
                check(x, target, weight, reduction=reduction, label_smoothing=smoothing, **options)


def test_probabilities_and_their_weight_have_gradients(device: str) -> None:
    x, target, weight = draw(5, 7, device=device, weighted=True, probability=True)
    assert weight is not None
    results = []
    for function, wide in ((lossops.cross_entropy, False), (composed, True)):
        leaves = [t.double() if wide else t for t in (x, target, weight)]
        leaves = [t.detach().requires_grad_() for t in leaves]
        found = function(*leaves, temperature=0.5, lse_square_scale=0.1)
        loss = found["loss"] if isinstance(found, dict) else found
        results.append(torch.autograd.grad(loss, leaves))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


def test_semantics_of_smoothing_with_weights() -> None:
    """torch's values for label smoothing beside class weights and ignored rows."""
    x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    weight = torch.tensor([1.0, 2.0, 4.0])
    for target, expected in (([2, 0], 0.58818), ([2, -100], 0.42396)):
        found = lossops.cross_entropy(
            x, torch.tensor(target), weight, label_smoothing=0.1, token_weight=torch.ones(2)
        )
        assert abs(found.item() - expected) < 1e-5


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_at_confident_tokens(dtype: torch.dtype, z_loss: float, device: str) -> None:
    """At the true class the gradient is 1 - p, which a rounded p loses."""
    others = 50
    for p in (0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-5, 1 - 1e-6, 1 - 1e-7):
        x = torch.zeros(1, others + 1, dtype=torch.float64)
        x[0, 3] = math.log(p / (1 - p) * others)
        x = x.to(dtype).to(device)
        exact = x.double().requires_grad_()
        options = {"temperature": 1.0, "lse_square_scale": z_loss, "return_lse": True}
        leaf = x.clone().requires_grad_()
        target = torch.tensor([3], device=device)
        found = lossops.cross_entropy(leaf, target, reduction="sum", **options)
        (gradient,) = torch.autograd.grad(found.loss, leaf)
        expected = composed(exact, target, reduction="sum", **options)["loss"]
        (wanted,) = torch.autograd.grad(expected, exact)
        bound = 2e-6 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
        smallest = 2.0**-25 if dtype == torch.float16 else 0.0  # half a subnormal number
        torch.testing.assert_close(gradient.double(), wanted, rtol=bound, atol=smallest)


# ---------------------------------------------------------------- what others define


def test_z_loss_is_ligers() -> None:
    """Liger-Kernel: sum(weight * nll) / sum(weight) + sum(scale * lse ** 2) / rows kept.

    By hand: lse = log 4, log 2, and a row that is ignored; nll = log(4 / 3), log 2.
    """
    x = torch.tensor([[math.log(3), 0.0], [0.0, 0.0], [5.0, 1.0]])
    target, weight = torch.tensor([0, 1, -100]), torch.tensor([2.0, 3.0])
    z = (0.1 * math.log(4) ** 2, 0.1 * math.log(2) ** 2)
    nll = (2 * math.log(4 / 3), 3 * math.log(2))
    expected = {
        "mean": (sum(nll) / 5 + sum(z) / 2, sum(z) / 2),
        "sum": (sum(nll) + sum(z), sum(z)),
    }
    for reduction, (loss, z_loss) in expected.items():
        found = lossops.cross_entropy(
            x, target, weight, reduction=reduction, lse_square_scale=0.1, return_z_loss=True
        )
        assert abs(found.loss.item() - loss) < 1e-6
        assert abs(found.z_loss.item() - z_loss) < 1e-7
    rows = lossops.cross_entropy(
        x, target, weight, reduction="none", lse_square_scale=0.1, return_z_loss=True
    )
    torch.testing.assert_close(rows.z_loss, torch.tensor([*z, 0.0]))
    torch.testing.assert_close(rows.loss, torch.tensor([nll[0] + z[0], nll[1] + z[1], 0.0]))


def test_token_weights_by_hand() -> None:
    """Divisors: sum(token_weight * weight[target]) of the loss, sum(token_weight) of the z-loss."""
    x = torch.tensor([[math.log(3), 0.0], [0.0, 0.0], [5.0, 1.0]])
    target, weight = torch.tensor([0, 1, -100]), torch.tensor([2.0, 3.0])
    token_weight = torch.tensor([0.5, 4.0, 100.0])
    nll = 0.5 * 2 * math.log(4 / 3) + 4 * 3 * math.log(2)
    z = 0.1 * (0.5 * math.log(4) ** 2 + 4 * math.log(2) ** 2)
    found = lossops.cross_entropy(
        x, target, weight, lse_square_scale=0.1, token_weight=token_weight
    )
    assert abs(found.item() - (nll / 13 + z / 4.5)) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_num_items_is_transformers(reduction: str, device: str) -> None:
    """transformers: each micro-batch's sum over the tokens of all, which add up to their mean."""
    x, target, _ = draw(12, 9, device=device)
    count = int((target != -100).sum())
    expected = F.cross_entropy(x, target).item()
    for number in (
        count,
        float(count),
        torch.tensor(count),
        torch.tensor([count], dtype=torch.int32),
        torch.tensor(count, device=device),
        torch.tensor(float(count), dtype=torch.float16, device=device),
    ):
        parts = [
            lossops.cross_entropy(a, b, reduction=reduction, num_items_in_batch=number)
            for a, b in zip(x.split(5), target.split(5), strict=True)
        ]
        assert all(part.dtype == torch.float32 and part.device == x.device for part in parts)
        assert abs(sum(part.item() for part in parts) - expected) < 1e-6


# ---------------------------------------------------------------- what is returned


def test_one_backward_pass(device: str, backward_calls: list[int]) -> None:
    x, target, _ = draw(6, 40, device=device)
    x.requires_grad_()
    found = lossops.cross_entropy(x, target, **ALL | {"token_weight": token_weight_of(x)})
    assert found.lse.requires_grad and found.entropy.requires_grad
    torch.autograd.grad([found.loss, found.lse.sum(), found.entropy.sum()], x)
    assert len(backward_calls) == 1


def test_what_is_returned_changes_no_loss(device: str) -> None:
    x, target, weight = draw(9, 30, device=device, weighted=True)
    for reduction in REDUCTIONS:
        for scale in (0.0, 0.2):
            options = {"lse_square_scale": scale, "softcap": 9.0, "reduction": reduction}
            alone = lossops.cross_entropy(x, target, weight, **options)
            for count in range(1, len(RETURNS) + 1):
                asked = dict(list(RETURNS.items())[:count])
                found = lossops.cross_entropy(x, target, weight, **options, **asked)
                assert same_bits(found.loss, alone)
                given = {key.removeprefix("return_") for key in asked} | {"loss"}
                assert {k for k, v in found._asdict().items() if v is not None} == given


def test_z_loss_has_no_gradient(device: str) -> None:
    x, target, _ = draw(4, 9, device=device)
    found = lossops.cross_entropy(
        x.requires_grad_(), target, lse_square_scale=0.1, return_z_loss=True
    )
    assert found.loss.requires_grad and not found.z_loss.requires_grad
    for logits in (x, x.detach() * 1e38):  # squares of their lse overflow
        found = lossops.cross_entropy(logits, target, return_z_loss=True)
        assert found.z_loss.item() == 0


def test_predictions_are_of_the_mapped_logits(device: str) -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, -3.0], [2.0, 1.0, 0.0, 0.0]], device=device)
    target = torch.tensor([1, 0], device=device)

    def predicted(**options: Any) -> list[int]:
        found = lossops.cross_entropy(x, target, return_predicted_tokens=True, **options)
        return found.predicted_tokens.tolist()

    assert predicted() == [1, 0]
    assert predicted(logit_scale=-1.0) == [3, 2]
    assert predicted(logit_scale=0.0) == [0, 0]
    assert predicted(temperature=3.0) == [1, 0]
    # A softcap that all logits are far above makes them equal.
    assert predicted(softcap=1e-3) == [0, 0]
    both = lossops.cross_entropy(
        x, target, logit_scale=-1.0, return_predicted_tokens=True, return_token_accuracy=True
    )
    assert both.token_accuracy.item() == 0
    assert lossops.cross_entropy(x, target, return_token_accuracy=True).token_accuracy.item() == 1


def test_many_predictions_are_found_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lossops._ops import cross_entropy_by_rows

    monkeypatch.setattr(cross_entropy_by_rows, "_MAPPED_AT_ONCE", 64)
    for shape in ((23, 30), (5, 9, 4)):
        x, target, _ = draw(*shape, device=device)
        options = {"softcap": 2.0, "logit_scale": -1.0, **RETURNS}
        check(x, target, **options)


def test_explicit_defaults_are_the_function_without_keywords(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, target, _ = draw(5, 9, device=device)
    signature = inspect.signature(lossops.cross_entropy).parameters
    names = list(signature)
    further = names[names.index("logit_scale") :]
    assert all(signature[name].kind is inspect.Parameter.KEYWORD_ONLY for name in further)
    defaults = {name: signature[name].default for name in further}
    assert defaults == {
        "logit_scale": 1.0,
        "softcap": None,
        "temperature": 1.0,
        "lse_square_scale": 0.0,
        "token_weight": None,
        "num_items_in_batch": None,
        "return_lse": False,
        "return_entropy": False,
        "return_z_loss": False,
        "return_token_accuracy": False,
        "return_predicted_tokens": False,
    }

    def fail(*_: Any) -> Any:
        raise AssertionError("values of rows")

    monkeypatch.setattr(TOKEN_VALUES, "_values_below", fail)
    plain = lossops.cross_entropy(x, target)
    own = pickle.loads(pickle.dumps(defaults)) | {"temperature": 1, "lse_square_scale": 0}
    assert same_bits(lossops.cross_entropy(x, target, **own), plain)


def test_module(device: str) -> None:
    x, target, weight = draw(6, 9, device=device, weighted=True)
    token_weight = token_weight_of(x)
    options = {"softcap": 5.0, "temperature": 0.5, "lse_square_scale": 0.1, "logit_scale": 2.0}
    module = lossops.CrossEntropyLoss(weight, **options, return_lse=True).to(device)
    given = {"token_weight": token_weight, "num_items_in_batch": 3}
    expected = lossops.cross_entropy(x, target, weight, **options, **given, return_lse=True)
    found = module(x, target, **given)
    assert same_bits(found.loss, expected.loss) and same_bits(found.lse, expected.lse)
    module = lossops.CrossEntropyLoss(weight, **options, **given, return_lse=True).to(device)
    assert same_bits(module(x, target).loss, expected.loss)
    assert "token_weight" in module.state_dict()
    with pytest.raises(ValueError, match="temperature"):
        lossops.CrossEntropyLoss(temperature=0.0)(x, target)


# ---------------------------------------------------------------- corner cases


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_rows_ignored(smoothing: float, device: str) -> None:
    x, target, weight = draw(4, 6, device=device, weighted=True)
    target.fill_(-100)
    for reduction in REDUCTIONS:
        for given in (None, weight):
            leaf = x.clone().requires_grad_()
            found = lossops.cross_entropy(
                leaf,
                target,
                given,
                reduction=reduction,
                label_smoothing=smoothing,
                lse_square_scale=0.1,
                temperature=0.5,
                **RETURNS,
            )
            (gradient,) = torch.autograd.grad(found.loss.sum(), leaf)
            assert torch.equal(gradient, torch.zeros_like(gradient))
            if reduction == "mean":
                assert found.loss.isnan() and found.z_loss.isnan()
            else:
                assert torch.equal(found.loss, torch.zeros_like(found.loss))
            if reduction != "none":
                assert found.token_accuracy.isnan()
            assert torch.equal(found.lse, torch.zeros_like(found.lse))
            assert found.predicted_tokens.tolist() == [-1] * 4


def test_no_rows_and_no_classes(device: str) -> None:
    x, target = torch.empty(0, 5, device=device), torch.empty(0, dtype=torch.int64, device=device)
    for reduction, shape in (("none", (0,)), ("mean", ()), ("sum", ())):
        found = lossops.cross_entropy(x, target, reduction=reduction, softcap=2.0, **RETURNS)
        assert found.loss.shape == shape and found.predicted_tokens.shape == (0,)
    assert lossops.cross_entropy(x, target, softcap=2.0).isnan()
    assert lossops.cross_entropy(x, target, reduction="sum", softcap=2.0).item() == 0
    x, target = torch.empty(3, 0, device=device), torch.full((3,), -100, device=device)
    weight = torch.empty(0, device=device)
    for given in (None, weight):
        assert lossops.cross_entropy(x, target, given, softcap=2.0).isnan()
        found = lossops.cross_entropy(x, target, given, reduction="none", **RETURNS)
        assert found.loss.tolist() == [0, 0, 0] and found.predicted_tokens.tolist() == [-1] * 3
    probabilities = torch.empty(3, 0, device=device)
    for options in ({"temperature": 2.0}, {"return_lse": True}):
        found = lossops.cross_entropy(x, probabilities, **options)
        assert (found if isinstance(found, Tensor) else found.loss).isnan()
        found = lossops.cross_entropy(x, probabilities, reduction="sum", **options)
        assert (found if isinstance(found, Tensor) else found.loss) == 0


def test_weights_of_zero(device: str) -> None:
    x, target, _ = draw(4, 6, device=device, ignored=0)
    zero = torch.zeros(6, device=device)
    assert lossops.cross_entropy(x, target, zero, temperature=2.0).isnan()
    assert lossops.cross_entropy(x, target, zero, temperature=2.0, reduction="sum").item() == 0
    # Smoothed losses are not 0 where the weight of the class is.
    some = torch.ones(6, device=device).index_fill(0, target, 0.0)
    for options in ({"return_lse": True}, {"token_weight": torch.ones(4, device=device)}):
        found = lossops.cross_entropy(x, target, some, label_smoothing=0.1, **options)
        assert (found if isinstance(found, Tensor) else found.loss).isnan()
    nothing = torch.zeros(4, device=device)
    assert lossops.cross_entropy(x, target, token_weight=nothing).isnan()
    found = lossops.cross_entropy(x, target, token_weight=nothing, reduction="none")
    assert torch.equal(found, nothing)


def test_infinite_logits(device: str) -> None:
    x = torch.zeros(5, 4, device=device)
    x[0, 1] = -torch.inf  # not the target
    x[1, 0] = -torch.inf  # the target
    x[2] = -torch.inf
    x[3, 2] = torch.inf
    x[4, 2] = torch.nan
    target = torch.zeros(5, dtype=torch.int64, device=device)
    found = lossops.cross_entropy(x, target, reduction="none", return_lse=True, return_entropy=True)
    log3 = math.log(3)
    expected = torch.tensor([log3, math.inf, math.nan, math.nan, math.nan], device=device)
    torch.testing.assert_close(found.loss, expected, equal_nan=True)
    expected = torch.tensor([log3, log3, math.nan, math.nan, math.nan], device=device)
    torch.testing.assert_close(found.entropy, expected, equal_nan=True)
    expected = torch.tensor([log3, log3, -math.inf, math.nan, math.nan], device=device)
    torch.testing.assert_close(found.lse, expected, equal_nan=True)


def test_half_means_do_not_overflow(device: str) -> None:
    x = torch.zeros(70000, 4, dtype=torch.float16, device=device)
    target = torch.zeros(70000, dtype=torch.int64, device=device)
    found = lossops.cross_entropy(x, target, temperature=2.0, lse_square_scale=0.5)
    assert abs(found.item() - math.log(4) - 0.5 * math.log(4) ** 2) < 2e-3


# ---------------------------------------------------------------- errors


def test_wrong_arguments(device: str) -> None:
    x, target, _ = draw(4, 6, device=device)
    tokens = token_weight_of(x)
    probability = x.softmax(1)

    def refused(kind: type[Exception], word: str, at: Tensor = target, **options: Any) -> None:
        assert_raises(kind, lambda: lossops.cross_entropy(x, at, **options), word)

    for key in ("temperature", "softcap"):
        for wrong in (0, -1.0, math.inf, math.nan):
            refused(ValueError, key, **{key: wrong})
    for key in ("logit_scale", "lse_square_scale"):
        for wrong in (math.inf, math.nan):
            refused(ValueError, key, **{key: wrong})
    for key in ("temperature", "softcap", "logit_scale", "lse_square_scale", "num_items_in_batch"):
        refused(TypeError, key, **{key: "2"})
    for key in ("temperature", "logit_scale", "lse_square_scale"):
        refused(TypeError, key, **{key: tokens})
        refused(TypeError, key, **{key: None})
    for key in RETURNS:
        refused(TypeError, key, **{key: 1})
    refused(ValueError, "num_items_in_batch", num_items_in_batch=3, reduction="none")
    refused(ValueError, "num_items_in_batch", num_items_in_batch=tokens)
    refused(RuntimeError, "num_items_in_batch", num_items_in_batch=tokens[0].requires_grad_())
    refused(TypeError, "token_weight", token_weight=2.0)
    refused(RuntimeError, "token_weight", token_weight=tokens[:3])
    refused(RuntimeError, "token_weight", token_weight=tokens[0])
    refused(RuntimeError, "token_weight", token_weight=tokens.to(torch.complex64))
    refused(RuntimeError, "token_weight", token_weight=tokens.clone().requires_grad_())
    refused(ValueError, "return_token_accuracy", probability, return_token_accuracy=True)
    refused(ValueError, "return_predicted_tokens", probability, return_predicted_tokens=True)
    refused(ValueError, "inplace_backward", temperature=2.0, inplace_backward=True)
    refused(ValueError, "reduction", temperature=2.0, reduction="avg")
    refused(ValueError, "reduction", temperature=2.0, reduction=3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_errors_are_those_without_keywords(smoothing: float, device: str) -> None:
    """The exception's type, and what it says."""
    x, target, weight = draw(4, 6, device=device, weighted=True, ignored=0)
    assert weight is not None
    calls: list[tuple[Any, ...]] = [
        (x, target[:3]),
        (x, target.unsqueeze(1)),
        (x[0, 0], target[0]),
        (x.long(), target),
        (x.to(torch.complex64), target),
        (x, target.bool()),
        (x, target.expand(6, 4).t()),
        (x, target, weight[:5]),
        (x, target, weight.double()),
        (x, target, weight.clone().requires_grad_()),
        (x, target, 3),
        (x, 3),
        (None, target),
        (x.unsqueeze(0), x.unsqueeze(0).argmax(-1)),
        (x.to_sparse(), target),
        (x.to(torch.float8_e4m3fn), target),
        (x.to(torch.float8_e4m3fn), x.softmax(1)),
        (x.long(), x.softmax(1)),
        (x, x.softmax(1)[:, :5]),
        (x, x.softmax(1).to(torch.float8_e4m3fn)),
        (x, x.softmax(1), weight[:5]),
    ]
    if device == "cpu":
        calls.append((x, target.clone().fill_(6)))
        calls.append((x, target - 50))
    for arguments in calls:
        caught = []
        for options in ({}, {"softcap": 4.0}):
            with pytest.raises(Exception) as error:  # noqa: PT011 - any, but twice the same
                lossops.cross_entropy(*arguments, label_smoothing=smoothing, **options)
            caught.append(error)
        assert caught[0].type is caught[1].type, (caught[0].value, caught[1].value)
        words = str(caught[0].value).split("(")[0]
        assert str(caught[1].value).startswith(words), (caught[0].value, caught[1].value)
    probability = x.softmax(1)
    for options in ({"ignore_index": 2}, {"label_smoothing": 1.5}, {"label_smoothing": -0.5}):
        caught = []
        for further in ({}, {"softcap": 4.0}):
            with pytest.raises((RuntimeError, ValueError)) as error:
                lossops.cross_entropy(x, probability, **options, **further)
            caught.append(error)
        assert caught[0].type is caught[1].type


def test_class_index_out_of_range_on_cuda(device: str) -> None:
    if device == "cpu":
        pytest.skip("IndexError: test_errors_are_those_without_keywords")
    x, target, weight = draw(4, 6, device=device, weighted=True, ignored=0)
    target[1] = 6
    x.requires_grad_()
    found = lossops.cross_entropy(x, target, weight, reduction="none", softcap=3.0)
    assert found.isnan().tolist() == [False, True, False, False]
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.isnan().any(1).tolist() == [False, True, False, False]


# ---------------------------------------------------------------- around the call


def test_autocast(device: str) -> None:
    for dtype in HALF_TYPES:
        x, target, weight = draw(5, 30, dtype=dtype, device=device, weighted=True)
        options = {"softcap": 5.0, "lse_square_scale": 0.1, "return_lse": True}
        for smoothing in (0.0, 0.1):
            leaf = x.clone().requires_grad_()
            with torch.autocast(device, dtype=torch.bfloat16):
                found = lossops.cross_entropy(
                    leaf, target, weight, label_smoothing=smoothing, **options
                )
            assert found.loss.dtype == found.lse.dtype == torch.float32
            expected = composed(x.double(), target, weight, label_smoothing=smoothing, **options)[
                "loss"
            ]
            torch.testing.assert_close(found.loss.double(), expected, rtol=2e-6, atol=1e-6)
            (gradient,) = torch.autograd.grad(found.loss, leaf)
            assert gradient.dtype == dtype
        probability = x.float().softmax(1).to(dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            assert lossops.cross_entropy(x, probability, softcap=2.0).dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "dynamic"),
    [
        ("indices", False),
        ("indices", True),
        ("smoothing", False),
        ("probabilities", True),
        ("autocast", False),
    ],
)
def test_compile(case: str, dynamic: bool, device: str) -> None:
    options = {"softcap": 5.0, "temperature": 0.7, "lse_square_scale": 0.1}
    options |= {"return_lse": True, "return_entropy": True, "return_z_loss": True}
    if case != "probabilities":
        options |= {"return_token_accuracy": True, "return_predicted_tokens": True}
    if case == "smoothing":
        options["label_smoothing"] = 0.1

    def step(x: Tensor, target: Tensor, weight: Tensor, tokens: Tensor, count: Tensor) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=case == "autocast"):
            return lossops.cross_entropy(
                x * 2, target, weight, token_weight=tokens, num_items_in_batch=count, **options
            )

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    dtype = torch.bfloat16 if case == "autocast" else torch.float32
    for rows in (6, 8):
        x, target, weight = draw(
            rows, 90, dtype=dtype, device=device, weighted=True, probability=case == "probabilities"
        )
        results = []
        for call in (step, compiled):
            leaf = x.clone().requires_grad_()
            count = torch.tensor(5, device=device)
            found = call(leaf, target, weight, token_weight_of(x), count)
            roots = [found.loss, found.lse, found.entropy]
            gradient = torch.autograd.grad(roots, leaf, [torch.ones_like(r) for r in roots])
            results.append([*found, *gradient])
        for eager, other in zip(*results, strict=True):
            if eager is None:
                assert other is None
                continue
            assert eager.dtype == other.dtype
            torch.testing.assert_close(other, eager)


@pytest.mark.parametrize("kind", ["indices", "smoothing", "probabilities"])
def test_vmap_and_func_grad(kind: str, device: str) -> None:
    x, target, _ = draw(3, 9, 4, device=device, probability=kind == "probabilities")
    x = x.transpose(1, 2).contiguous()  # three calls of (4, 9)
    target = target.transpose(1, 2) if kind == "probabilities" else target
    options = {"softcap": 5.0, "lse_square_scale": 0.1, "temperature": 0.5}
    if kind == "smoothing":
        options["label_smoothing"] = 0.1

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return lossops.cross_entropy(x, target, reduction="sum", **options)

    expected = torch.stack([loss(a, b) for a, b in zip(x, target, strict=True)])
    torch.testing.assert_close(torch.vmap(loss)(x, target), expected)
    gradients = torch.vmap(torch.func.grad(loss))(x, target)
    for a, b, found in zip(x, target, gradients, strict=True):
        leaf = a.clone().requires_grad_()
        torch.testing.assert_close(found, torch.autograd.grad(loss(leaf, b), leaf)[0])
    x, target = x[0].double(), target[0].double() if kind == "probabilities" else target[0]
    expected = torch.autograd.functional.hessian(lambda x: loss(x, target), x)
    torch.testing.assert_close(torch.func.hessian(loss)(x, target), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_second_derivatives_and_forward_mode(smoothing: float, device: str) -> None:
    x, target, weight = draw(4, 5, dtype=torch.float64, device=device, weighted=True)
    options = {"softcap": 5.0, "lse_square_scale": 0.1, "label_smoothing": smoothing}

    def values(x: Tensor) -> tuple[Tensor, ...]:
        found = lossops.cross_entropy(
            x, target, weight, return_lse=True, return_entropy=True, **options
        )
        return found.loss, found.lse, found.entropy

    leaf = x.clone().requires_grad_()
    assert torch.autograd.gradcheck(values, leaf)
    assert torch.autograd.gradgradcheck(values, leaf)
    tangent = torch.randn_like(x)
    _, found = torch.func.jvp(values, (x,), (tangent,))

    def exact(x: Tensor) -> tuple[Tensor, ...]:
        fields = composed(x, target, weight, **options)
        return fields["loss"], fields["lse"], fields["entropy"]

    _, expected = torch.func.jvp(exact, (x,), (tangent,))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_nothing_is_read_by_the_host(device: str) -> None:
    x, target, weight = draw(4, 6, device=device, weighted=True)
    x.requires_grad_()
    options = ALL | {"token_weight": token_weight_of(x)}
    for smoothing in (0.0, 0.1):
        with _Recorder() as recorder:
            found = lossops.cross_entropy(
                x,
                target,
                weight,
                label_smoothing=smoothing,
                num_items_in_batch=torch.tensor(3, device=device),
                **options,
            )
            torch.autograd.grad([found.loss, found.lse.sum()], x)
        assert any("token_values_forward" in name for name in recorder.names)
        reads = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
        assert not [name for name in recorder.names if any(f".{r}." in name for r in reads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_bits_on_every_run(dtype: torch.dtype, device: str) -> None:
    """For any number of threads; there are more rows than torch gives to one thread."""
    x, target, weight = draw(70001, 3, dtype=dtype, device=device, weighted=True)
    token_weight = token_weight_of(x)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            leaf = x.clone().requires_grad_()
            found = lossops.cross_entropy(
                leaf,
                target,
                weight,
                lse_square_scale=0.1,
                token_weight=token_weight,
                return_token_accuracy=True,
            )
            (gradient,) = torch.autograd.grad(found.loss, leaf)
            results.append((found.loss.detach(), found.token_accuracy, gradient))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_recorded_graphs(device: str) -> None:
    """torch.jit.trace, make_fx, export and functionalize hold values of rows, not their formula."""
    x, target, _ = draw(6, 9, device=device)
    x.requires_grad_()

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return lossops.cross_entropy(x, target, softcap=3.0, lse_square_scale=0.1)

    expected = loss(x, target)
    (gradient,) = torch.autograd.grad(expected, x)
    traced = torch.jit.trace(loss, (x, target))
    for found in (traced(x, target), make_fx(loss)(x, target)(x, target)):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(traced(x, target), x)[0], gradient)
    torch.testing.assert_close(torch.func.functionalize(loss)(x, target), expected)

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return loss(x, target)

    exported = torch.export.export(Module(), (x.detach(), target))
    assert any("token_values_forward" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x.detach(), target), expected.detach())


def test_checkpointed(device: str) -> None:
    x, target, _ = draw(6, 9, device=device)
    x.requires_grad_()

    def loss(x: Tensor) -> Tensor:
        return lossops.cross_entropy(x * 1, target, softcap=3.0)

    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
    assert same_bits(found, expected)
    batched = torch.autograd.grad(
        lossops.cross_entropy(x, target, softcap=3.0, reduction="none"),
        x,
        torch.eye(6, device=device),
        is_grads_batched=True,
    )[0]
    torch.testing.assert_close(batched.sum(0) / (target != -100).sum(), expected)
