"""linear_cross_entropy with the further keywords of cross_entropy: against cross_entropy itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises
from numerics import DTYPES, same_bits
from test_linear_cross_entropy import Counter, make, workspace_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lossops
from lossops import CrossEntropyOutput
from lossops._heads import keyword_passes, passes, rows
from lossops._heads.passes import Operands
from lossops._ops.cross_entropy_by_rows import Keywords

per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WANTED = ("input", "linear_weight", "linear_bias")
RETURNS = {
    f"return_{name}": True
    for name in ("lse", "entropy", "z_loss", "token_accuracy", "predicted_tokens")
}
# "random" stands for a tensor of random numbers, one for each row.
KEYWORDS: dict[str, dict[str, Any]] = {
    "map": {"logit_scale": 1.5, "softcap": 3.0, "temperature": 0.7},
    "scale below 0": {"logit_scale": -2.0},
    "scale 0": {"logit_scale": 0.0, "softcap": 2.0},
    "z-loss": {"lse_square_scale": 0.1},
    "token weights": {"token_weight": "random"},
    "items": {"num_items_in_batch": 17},
    "returns": RETURNS,
    "predictions alone": {"return_predicted_tokens": True},
    "all": {
        "softcap": 4.0,
        "temperature": 0.8,
        "lse_square_scale": 0.05,
        "token_weight": "random",
        "num_items_in_batch": torch.tensor([9]),
        **RETURNS,
    },
}
TARGETS: dict[str, dict[str, Any]] = {
    "classes": {},
    "class weights": {"weighted": True},
    "smoothing": {"weighted": True, "label_smoothing": 0.1},
    "probabilities": {"probabilities": True, "weighted": True, "label_smoothing": 0.1},
    "images": {"classes": (5, 3), "weighted": True},
    "images and smoothing": {"classes": (5, 3), "label_smoothing": 0.1},
    "images of probabilities": {"classes": (5, 3), "probabilities": True},
}


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def composed(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    **options: Any,
) -> Any:
    """cross_entropy of the results of linear."""
    classes, features = linear_weight.shape[:-1], linear_weight.shape[-1]
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(-1, features), bias)
    logits = logits.reshape(*input.shape[:-1], *classes)
    if input.dim() > 2:
        logits = logits.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    ignored = -100 if ignore_index is None else ignore_index
    return lossops.cross_entropy(logits, target, ignore_index=ignored, **options)


class Problem:
    """Arguments, and results with the gradients of a random combination of what is returned."""

    def __init__(self, keywords: str, targets: str, device: str, **options: Any) -> None:
        given = {"rows": 13, "features": 6, "classes": 29, "bias": True, **TARGETS[targets]}
        call = make(**{**given, **options}, device=device)
        self.tensors, self.options = call.tensors, {**call.options, **KEYWORDS[keywords]}
        self.differentiable = call.differentiable()
        target, classes = self.tensors["target"], self.tensors["linear_weight"].shape[:-1]
        rows = (*self.tensors["input"].shape[:-1], *classes[1:])
        if not target.is_floating_point() and target.dim() > 0:
            target[2:3] = -100
        if self.options.get("token_weight") is not None:
            self.options["token_weight"] = torch.rand(rows, device=device)
        if target.is_floating_point():
            for name in ("return_token_accuracy", "return_predicted_tokens"):
                self.options.pop(name, None)
        self.call = call

    def run(self, function: Any, *, double: bool = False, **more: Any) -> dict[str, Tensor]:
        """Results by name, and the gradients: of the loss, and of the loss, lse and entropies."""
        tensors = {
            name: (x.double() if double and x.is_floating_point() else x)
            .detach()
            .requires_grad_(name in self.differentiable)
            for name, x in self.tensors.items()
        }
        leaves = [tensors[name] for name in self.differentiable]
        found = function(**tensors, **self.options, **more)
        output = found if isinstance(found, tuple) else CrossEntropyOutput(found)
        results = {name: x for name, x in output._asdict().items() if x is not None}
        generator = torch.Generator().manual_seed(1)
        total: Tensor | float = 0.0
        for name in ("loss", "lse", "entropy"):
            if name in results:
                value = results[name]
                factor = torch.rand(value.shape, generator=generator, dtype=torch.float64)
                total = total + (value.double() * factor.to(value.device)).sum()
                grads = torch.autograd.grad(total, leaves, retain_graph=True)  # type: ignore[arg-type]
                results |= {
                    f"{each}, {name}": grad
                    for each, grad in zip(self.differentiable, grads, strict=True)
                }
        return results


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == exact.keys()
    eps = torch.finfo(dtype).eps
    for name, value in found.items():
        expected = exact[name]
        assert value.shape == expected.shape, name
        if name in ("predicted_tokens", "token_accuracy"):
            if eps < 1e-6:  # else other logits may be the largest
                torch.testing.assert_close(value, expected, check_dtype=False)
            continue
        error = (value.double() - expected.double()).abs().max()
        allowed = 16 * eps * expected.abs().max() + 1e-7
        assert error <= allowed, f"{name}: off by {error:.2g}, allowed {allowed:.2g}"


@per_dtype
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("keywords", KEYWORDS)
def test_against_float64(keywords: str, targets: str, dtype: torch.dtype, device: str) -> None:
    """Chunks of some rows and one chunk, gradients kept and computed again."""
    for reduction in ("mean", "sum", "none"):
        problem = Problem(keywords, targets, device, dtype=dtype, reduction=reduction)
        if reduction == "none" and "num_items_in_batch" in problem.options:
            continue
        exact = problem.run(composed, double=True)
        for limit in (None, 6 * workspace_of(3, problem.call)):
            for kept in (True, False):
                lossops.keep_gradients(kept)
                try:
                    found = problem.run(lossops.linear_cross_entropy, max_workspace_bytes=limit)
                finally:
                    lossops.keep_gradients(True)
                assert_close(found, exact, dtype)
                of_cross_entropy = problem.run(composed)
                for name, value in found.items():
                    assert value.dtype == of_cross_entropy[name].dtype, name


@pytest.mark.parametrize("rows", [(), (3, 7), 0, 1], ids=str)
@pytest.mark.parametrize("targets", ["classes", "smoothing", "probabilities"])
def test_shapes_of_rows(rows: Any, targets: str, device: str) -> None:
    problem = Problem("all", targets, device, rows=rows, reduction="sum", dtype=torch.float64)
    expected = problem.run(composed)
    found = problem.run(lossops.linear_cross_entropy, max_workspace_bytes=400)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("keywords", KEYWORDS)
def test_all_rows_ignored(keywords: str, reduction: str, device: str) -> None:
    problem = Problem(keywords, "class weights", device, reduction=reduction)
    problem.tensors["target"].fill_(-100)
    expected = problem.run(composed)
    found = problem.run(lossops.linear_cross_entropy)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], equal_nan=True)
        if ", " in name:
            assert not value.any(), name


@pytest.mark.parametrize("targets", ["classes", "smoothing"])
@pytest.mark.parametrize("keywords", ["map", "z-loss", "token weights", "all"])
def test_ignored_rows_are_never_nan(keywords: str, targets: str, device: str) -> None:
    problem = Problem(keywords, targets, device)
    problem.tensors["input"][2] = torch.nan
    if keywords in ("token weights", "all"):
        problem.options["token_weight"][2] = torch.nan
    for name, value in problem.run(lossops.linear_cross_entropy).items():
        if name.startswith("linear_weight, "):
            continue  # a product with that row of the input
        assert value.isfinite().all(), name
        if name.startswith("input, "):
            assert not value[2].any()


# ---------------------------------------------------------------- products and memory


@pytest.mark.parametrize("keywords", ["map", "z-loss", "token weights", "items", "all"])
@pytest.mark.parametrize("targets", ["classes", "smoothing", "probabilities"])
def test_products_and_memory_of_a_pass(keywords: str, targets: str, device: str) -> None:
    """Three products for each chunk, and no tensor of all logits."""
    num_rows, classes = 1024, 96
    problem = Problem(
        keywords, targets, device, rows=num_rows, features=4, classes=classes, reduction="mean"
    )
    options = dict(problem.options)
    label_smoothing = options.pop("label_smoothing", 0.0)
    options.pop("reduction")
    given = Keywords(1.0, None, 1.0, 0.0, None, None, *[False] * 5)._replace(**options)
    num_items = given.num_items_in_batch
    if isinstance(num_items, int):
        given = given._replace(num_items_in_batch=torch.tensor(num_items))
    operands = Operands(*(problem.tensors.get(name) for name in Operands._fields))
    row = lossops.heads._row_options(reduction="mean", label_smoothing=label_smoothing)
    # So that chunks of 64 rows fit in with all that they need.
    tensors = rows.tensors_of_chunk(
        rows.Wanted(*given.map(), given.return_entropy, given.lse_square_scale != 0),
        is_composed=targets != "classes",
        itemsize=4,
    )
    limit = tensors * workspace_of(64, problem.call)
    made = passes.Options(row, torch.float32, torch.float32, torch.float32, limit, None)
    for kept, count in ((True, 3), (False, 1)):
        with Counter() as counter:
            keyword_passes.forward(operands, made, given, [kept] * 3)
        assert counter.products == count * num_rows // 64
        assert counter.largest <= 64 * classes
    with Counter() as counter:
        grad = torch.ones((), device=device)
        mask = [True, True, True, False, False]
        keyword_passes.backward(operands, made, given, mask, (grad, None, None))
    assert counter.products == 3 * num_rows // 64
    assert counter.largest <= 64 * classes


def test_what_is_computed_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept gradients serve the loss; lse and entropies compute again."""
    backward, calls = keyword_passes.backward, []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return backward(*arguments)

    monkeypatch.setattr(keyword_passes, "backward", counted)
    problem = Problem("returns", "classes", device)
    x = problem.tensors["input"].requires_grad_()
    arguments = {**problem.tensors, **problem.options}
    expected = torch.autograd.grad(composed(**arguments).loss, x)[0]

    found = lossops.linear_cross_entropy(**arguments)
    for run in range(3):
        (gradient,) = torch.autograd.grad(found.loss, x, retain_graph=True)
        assert len(calls) == run  # the first has the kept one
        torch.testing.assert_close(gradient, expected)
    calls.clear()
    found = lossops.linear_cross_entropy(**arguments)
    torch.autograd.grad(found.loss + found.lse.sum(), x)
    assert len(calls) == 1


# ---------------------------------------------------------------- float16


@pytest.mark.parametrize("keywords", ["z-loss", "map", "token weights", "all"])
def test_float16_under_a_gradient_scaler(keywords: str, device: str) -> None:
    """Gradients of a mean over many rows, with a grad_output of 2^16: no worse than composed."""
    problem = Problem(
        keywords, "classes", device, rows=2048, features=16, classes=512, dtype=torch.float16
    )
    problem.tensors["input"] *= 0.25
    for name in (*RETURNS, "num_items_in_batch"):
        problem.options.pop(name, None)
    problem.options["reduction"] = "mean"

    def gradients(function: Any, double: bool = False) -> list[Tensor]:
        tensors = {
            name: (x.double() if double and x.is_floating_point() else x)
            .detach()
            .requires_grad_(name in WANTED)
            for name, x in problem.tensors.items()
        }
        loss = function(**tensors, **problem.options)
        grad = torch.full_like(loss, 2.0**10)
        return list(torch.autograd.grad(loss, [tensors[name] for name in WANTED], grad))

    exact = gradients(composed, double=True)
    theirs = gradients(composed)
    for limit in (None, 400_000):
        head = functools.partial(lossops.linear_cross_entropy, max_workspace_bytes=limit)
        ours = gradients(head)
        for mine, other, expected, name in zip(ours, theirs, exact, WANTED, strict=True):
            assert mine.isfinite().all()
            errors = [(each.double() - expected).norm() for each in (mine, other)]
            floor = torch.finfo(torch.float16).eps / 8 * expected.norm()
            assert errors[0] <= 1.1 * errors[1] + floor, name


def test_float16_z_loss_of_large_logits(device: str) -> None:
    """The gradient of a z-loss is large where lse is; it must not overflow before it is scaled."""
    problem = Problem("z-loss", "classes", device, dtype=torch.float16, classes=8)
    problem.tensors["linear_weight"] *= 100
    problem.options["lse_square_scale"] = 1.0
    exact = problem.run(composed, double=True)
    found = problem.run(lossops.linear_cross_entropy)
    for name in ("input, loss", "linear_weight, loss"):
        expected = exact[name]
        error = (found[name].double() - expected).norm() / expected.norm()
        assert error <= 0.01, name


# ---------------------------------------------------------------- graphs


def of_problem(device: str, **options: Any) -> tuple[Any, Any, list[Tensor]]:
    """The function and its counterpart, of the leaves."""
    options = {"dtype": torch.float64, "reduction": "mean", **options}
    problem = Problem("all", "class weights", device, **options)
    del problem.options["return_token_accuracy"], problem.options["return_predicted_tokens"]
    leaves = [problem.tensors[name].clone().requires_grad_() for name in WANTED]

    def made(function: Any, **more: Any) -> Any:
        def values(*given: Tensor) -> Tensor:
            tensors = {**problem.tensors, **dict(zip(WANTED, given, strict=True))}
            found = function(**tensors, **problem.options, **more)
            assert not found.z_loss.requires_grad
            return found.loss + (found.lse * found.entropy.cos()).sum()

        return values

    limit = 4 * workspace_of(5, problem.call)
    return made(lossops.linear_cross_entropy, max_workspace_bytes=limit), made(composed), leaves


def test_gradcheck(device: str) -> None:
    ours, _, leaves = of_problem(device)
    assert torch.autograd.gradcheck(
        ours, leaves, check_batched_grad=True, check_forward_ad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_torch_func(smoothing: float, device: str) -> None:
    ours, theirs, leaves = of_problem(device, label_smoothing=smoothing)
    given = tuple(leaf.detach() for leaf in leaves)
    for transform in (
        lambda head: torch.func.grad(head, (0, 1, 2))(*given),
        lambda head: torch.func.jvp(head, given, given),
        lambda head: torch.func.vmap(head, (0, None, None))(
            torch.stack([given[0]] * 2), *given[1:]
        ),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("kind", ["hooks", "checkpoint"])
def test_saved_tensor_hooks(kind: str, device: str) -> None:
    ours, theirs, leaves = of_problem(device)
    if kind == "hooks":
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            value = ours(*leaves)
    else:
        value = checkpoint(ours, *leaves, use_reentrant=False)
    expected = torch.autograd.grad(theirs(*leaves), leaves)
    for found, other in zip(torch.autograd.grad(value, leaves), expected, strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("keywords", KEYWORDS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(keywords: str, backend: str, device: str) -> None:
    for reduction in ("mean", "none"):
        problem = Problem(keywords, "class weights", device, reduction=reduction)
        if reduction == "none" and "num_items_in_batch" in problem.options:
            continue
        graph = torch.compile(lossops.linear_cross_entropy, backend=backend, fullgraph=True)
        limit = 4 * workspace_of(5, problem.call)
        found = problem.run(graph, max_workspace_bytes=limit)
        expected = problem.run(lossops.linear_cross_entropy, max_workspace_bytes=limit)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("targets", ["classes", "probabilities", "images and smoothing"])
def test_operators(targets: str, device: str) -> None:
    problem = Problem("token weights", targets, device)
    tensors = [problem.tensors.get(name) for name in Operands._fields]
    for name, x in zip(Operands._fields, tensors, strict=True):
        if x is not None:
            x.requires_grad_(name in WANTED)
    smoothing = problem.options.get("label_smoothing", 0.0)
    dtypes = (torch.float32, torch.float32, torch.float32)
    options = (-100, "mean", smoothing, False, *dtypes, 2000, None)
    returns = (True, True, True, targets != "probabilities", targets != "probabilities")
    weights = (problem.options["token_weight"], torch.tensor(9.0))
    if targets == "probabilities":
        returns = (True, True, True, False, False)
    more = (*weights, 1.5, 3.0, 0.7, 0.1, *returns)
    torch.library.opcheck(
        torch.ops.lossops.linear_cross_entropy_output_forward.default,
        (*tensors, *options, *more, [True] * 3),
    )
    rows = problem.options["token_weight"]
    detached = [None if x is None else x.detach() for x in tensors]
    grads = (torch.ones((), device=device), rows.clone(), None)
    torch.library.opcheck(
        torch.ops.lossops.linear_cross_entropy_output_backward.default,
        (*grads, *detached, *options, *more, [True, True, True, False, False]),
    )


def test_same_bits_on_every_run(device: str) -> None:
    for targets in ("classes", "probabilities"):
        problem = Problem("all", targets, device, rows=300, dtype=torch.bfloat16)
        first, second = (
            problem.run(lossops.linear_cross_entropy, max_workspace_bytes=50_000) for _ in range(2)
        )
        for name, value in first.items():
            assert same_bits(value, second[name]), name


@pytest.mark.parametrize("keywords", ["map", "token weights", "returns"])
@pytest.mark.parametrize("targets", ["class weights", "smoothing"])
def test_autocast(keywords: str, targets: str, device: str) -> None:
    """float32 masters: results and gradients are float32, near to those without autocast."""
    problem = Problem(keywords, targets, device)
    for name in ("return_token_accuracy", "return_predicted_tokens"):
        problem.options.pop(name, None)

    def under(**given: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return lossops.linear_cross_entropy(**given)

    exact = problem.run(composed, double=True)
    for name, value in problem.run(under).items():
        assert value.dtype == torch.float32
        error = (value.double() - exact[name]).norm()
        assert error <= 0.03 * exact[name].norm(), name


# ---------------------------------------------------------------- arguments


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "temperature 0": (ValueError, "temperature", {"temperature": 0.0}),
    "temperature bool": (TypeError, "temperature", {"temperature": True}),
    "temperature of 400 digits": (ValueError, "temperature", {"temperature": 10**400}),
    "items on meta": (
        RuntimeError,
        "num_items_in_batch",
        {"num_items_in_batch": torch.ones((), device="meta")},
    ),
    "sparse items": (
        ValueError,
        "num_items_in_batch",
        {"num_items_in_batch": torch.ones(1).to_sparse()},
    ),
    "softcap text": (TypeError, "softcap", {"softcap": "3"}),
    "scale inf": (ValueError, "logit_scale", {"logit_scale": float("inf")}),
    "z-loss NaN": (ValueError, "lse_square_scale", {"lse_square_scale": float("nan")}),
    "weights' shape": (RuntimeError, "token_weight", {"token_weight": torch.ones(5)}),
    "weights' gradient": (
        RuntimeError,
        "token_weight",
        {"token_weight": torch.ones(6, requires_grad=True)},
    ),
    "weights' type": (TypeError, "token_weight", {"token_weight": [1.0] * 6}),
    "items of none": (
        ValueError,
        "num_items_in_batch",
        {"num_items_in_batch": 3, "reduction": "none"},
    ),
    "several items": (ValueError, "num_items_in_batch", {"num_items_in_batch": torch.ones(2)}),
    "return": (TypeError, "return_lse", {"return_lse": 1}),
    "reduction": (ValueError, "reduction", {"reduction": "batchmean", "softcap": 1.0}),
    "target range": (IndexError, "target 7 at row 5", {"target": torch.arange(2, 8)}),
    "accuracy of probabilities": (
        ValueError,
        "return_token_accuracy",
        {"target": torch.rand(6, 7), "return_token_accuracy": True},
    ),
    "weight dtype": (RuntimeError, "weight", {"weight": torch.ones(7).double(), "softcap": 1.0}),
    "weight gradient": (
        RuntimeError,
        "weight",
        {"weight": torch.ones(7, requires_grad=True), "softcap": 1.0},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    kind, words, wrong = WRONG[name]
    given = {
        "input": torch.randn(6, 5),
        "linear_weight": torch.randn(7, 5, requires_grad=True),
        "target": torch.arange(6),
        "lse_square_scale": 0.1,
        "max_workspace_bytes": 64,
    }
    assert_raises(
        kind,
        lambda: lossops.linear_cross_entropy(**{**given, **wrong}),
        "linear_cross_entropy: ",
        words,
    )


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}], ids=["plain", "keywords"])
@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("weight requires grad",), {"weight": torch.ones(7, requires_grad=True)}),
        (("weight", "shape"), {"weight": torch.ones(6)}),
        (("label_smoothing",), {"label_smoothing": 1.5}),
    ],
    ids=["weight's gradient", "weight's shape", "smoothing"],
)
def test_wrong_arguments_of_compiled_calls(
    words: tuple[str, ...], wrong: dict[str, Any], more: dict[str, Any]
) -> None:
    """While a call is traced, and at the latest when it runs. The error names the function."""
    torch._dynamo.reset()
    compiled = torch.compile(lossops.linear_cross_entropy, backend="aot_eager")
    input, weight = torch.randn(6, 5), torch.randn(7, 5, requires_grad=True)
    call = lambda: compiled(input, weight, torch.arange(6), **wrong, **more)  # noqa: E731
    assert_raises(RuntimeError, call, "linear_cross_entropy: ", *words)


def test_no_limit_is_too_large(device: str) -> None:
    call = make(device=device)
    expected = call.run(lossops.linear_cross_entropy)
    found = call.run(lossops.linear_cross_entropy, max_workspace_bytes=10**400)
    assert all(same_bits(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("scaled", [False, True])
def test_float16_z_loss_beside_ignored_nan(device: str, scaled: bool) -> None:
    """What float16 gradients are multiplied by does not depend on ignored rows."""
    input = torch.randn(8, 5, device=device).half()
    weight = torch.randn(7, 5, device=device).half()
    target = torch.randint(7, (8,), device=device)
    target[2] = -100
    factor = 2.0**10 if scaled else 1.0

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = lossops.linear_cross_entropy(x, weight, target, lse_square_scale=1e-3)
        (loss.float() * factor).backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(input)
    input[2] = float("nan")
    found = gradient(input)
    assert (found[2] == 0).all()
    assert same_bits(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_of_items_is_a_divisor(
    device: str, dtype: torch.dtype, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it takes the passes of a mean, which read a chunk's logits once."""

    def refused(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("values of rows were computed")

    monkeypatch.setattr(keyword_passes, "_Call", refused)
    call = make(dtype=dtype, device=device)
    expected = call.run(lossops.linear_cross_entropy, reduction="sum")
    number = torch.tensor(64)  # a power of two, so that rounding is the same
    for items in (64, 64.0, number, number.to(device, torch.float32).reshape(1)):
        found = call.run(
            lossops.linear_cross_entropy, reduction=reduction, num_items_in_batch=items
        )
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value / 64)


def test_defaults_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its defaults each keyword leaves the call to the passes without keywords."""

    def refused(*arguments: Any) -> Any:
        raise AssertionError("the passes of keywords were called")

    call = make(device=device)
    expected = call.run(lossops.linear_cross_entropy)
    monkeypatch.setattr(keyword_passes, "forward", refused)
    defaults = {"logit_scale": 1, "softcap": None, "temperature": 1.0, "lse_square_scale": 0}
    returns = dict.fromkeys(RETURNS, False)
    found = call.run(
        lossops.linear_cross_entropy,
        token_weight=None,
        num_items_in_batch=None,
        **defaults,
        **returns,
    )
    for name, value in found.items():
        assert same_bits(value, expected[name])


def test_module(device: str) -> None:
    """Every keyword arrives. token_weight and num_items_in_batch come with a call, or before."""
    problem = Problem("all", "classes", device, bias=False)
    x, weight, target = (problem.tensors[k] for k in ("input", "linear_weight", "target"))
    options = dict(problem.options)
    module = lossops.LinearCrossEntropyLoss(6, 29, device=device, **options)
    given = {key: options.pop(key) for key in ("token_weight", "num_items_in_batch")}
    other = lossops.LinearCrossEntropyLoss(6, 29, device=device, **options)
    expected = composed(x, weight, target, **options, **given)
    for made, more in ((module, {}), (other, given)):
        with torch.no_grad():
            made.linear.weight.copy_(weight)
        for value, each in zip(made(x, target, **more), expected, strict=True):
            torch.testing.assert_close(value, each)
    assert set(module.state_dict()) == {"linear.weight", "token_weight"}


@pytest.mark.cuda
@pytest.mark.parametrize("keywords", KEYWORDS)
def test_never_waits_and_can_be_captured(keywords: str) -> None:
    problem = Problem(keywords, "class weights", "cuda", dtype=torch.bfloat16)
    leaves = [problem.tensors[name].requires_grad_() for name in WANTED]
    if isinstance(problem.options.get("num_items_in_batch"), Tensor):
        items = problem.options["num_items_in_batch"]
        problem.options["num_items_in_batch"] = items.to("cuda")

    def step() -> tuple[Tensor, ...]:
        found = lossops.linear_cross_entropy(
            **problem.tensors, **problem.options, max_workspace_bytes=2000
        )
        output = found if isinstance(found, tuple) else CrossEntropyOutput(found)
        values = [x for x in (output.loss, output.lse, output.entropy) if x is not None]
        return torch.autograd.grad(values, leaves, [torch.ones_like(x) for x in values])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    torch.cuda.synchronize()
    for each, other in zip(found, expected, strict=True):
        assert same_bits(each, other)


def test_only_target_has_a_gradient(device: str) -> None:
    x, linear_weight = torch.randn(5, 4, device=device), torch.randn(3, 4, device=device)
    target = torch.rand(5, 3, device=device, requires_grad=True)
    found = lossops.linear_cross_entropy(
        x, linear_weight, target, return_lse=True, return_entropy=True
    )
    assert not found.lse.requires_grad and not found.entropy.requires_grad
    value = found.loss + found.lse.sum() + found.entropy.sum()
    expected = torch.nn.functional.cross_entropy(x @ linear_weight.t(), target)
    expected = torch.autograd.grad(expected, target)
    for options in ({"create_graph": True}, {}):
        gradient = torch.autograd.grad(value, target, retain_graph=True, **options)
        torch.testing.assert_close(gradient, expected)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = lossops.linear_cross_entropy(
            x, linear_weight, target, return_lse=True, return_entropy=True
        )
        return found.loss, found.lse, found.entropy

    loss, lse, entropy = compiled(target)
    assert not lse.requires_grad and not entropy.requires_grad
    torch.testing.assert_close(torch.autograd.grad(loss, target), expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("asked", [{}, {"return_entropy": True}], ids=str)
def test_no_rows_with_a_z_loss(reduction: str, asked: dict[str, bool], device: str) -> None:
    empty = torch.zeros(0, 3, dtype=torch.half, device=device, requires_grad=True)
    weight = torch.ones(5, 3, dtype=torch.half, device=device, requires_grad=True)
    target = torch.zeros(0, dtype=torch.long, device=device)
    options = {"reduction": reduction, "lse_square_scale": 0.1, **asked}
    found = lossops.linear_cross_entropy(empty, weight, target, **options)
    loss = found if isinstance(found, Tensor) else found.loss
    assert loss.shape == ((0,) if reduction == "none" else ())
    assert loss.isnan() if reduction == "mean" else loss.sum() == 0
    loss.sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 3)
    assert weight.grad is not None and weight.grad.count_nonzero() == 0


def test_no_rows_of_half_types_and_no_features(device: str) -> None:
    empty = torch.zeros(0, 3, dtype=torch.half, device=device, requires_grad=True)
    weight = torch.ones(5, 3, dtype=torch.half, device=device)
    target = torch.zeros(0, dtype=torch.long, device=device)
    options = {"softcap": 2.0, "label_smoothing": 0.1, "reduction": "sum"}
    loss = lossops.linear_cross_entropy(empty, weight, target, **options)
    loss.backward()
    assert loss == 0
    assert empty.grad is not None and empty.grad.shape == (0, 3)
    no_features = torch.zeros(6, 0, device=device)
    target = torch.arange(6, device=device)
    loss = lossops.linear_cross_entropy(no_features, torch.zeros(11, 0, device=device), target)
    torch.testing.assert_close(loss, torch.tensor(11.0, device=device).log())
