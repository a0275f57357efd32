"""linear_cross_entropy with logits_dtype: float32 logits of products of half types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises
from numerics import HALF_TYPES, same_bits
from test_linear_cross_entropy import (
    CASES,
    OPERANDS,
    Call,
    Counter,
    assert_close,
    case,
    composed,
    make,
    rows_of_chunk,
)
from test_linear_cross_entropy_keywords import KEYWORDS, TARGETS
from test_linear_cross_entropy_keywords import Problem as KeywordProblem
from test_linear_cross_entropy_keywords import composed as composed_with_keywords
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lossops
from lossops._heads import chunks, passes, products
from lossops._heads.passes import Operands, Options

per_half = pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
per_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
WANTED = ("input", "linear_weight", "linear_bias")
FLOAT32 = {"logits_dtype": torch.float32}


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def kept(request: pytest.FixtureRequest) -> Iterator[bool]:
    lossops.keep_gradients(request.param)
    yield request.param
    lossops.keep_gradients(True)


def workspace_of(rows: int, call: Call) -> int:
    """max_workspace_bytes for chunks of so many rows of float32 logits."""
    weight = call.tensors["linear_weight"]
    return 4 * rows * chunks.padded_classes(weight[..., 0].numel(), weight.dtype)


def large(dtype: torch.dtype, device: str, rows: int = 200, **options: Any) -> Call:
    """Logits of some 200 that differ by about 1: half types round away most of the difference."""
    call = make(rows, 32, 65, bias=True, device=device, **options)
    call.tensors["input"][:, 0] = 200.0
    call.tensors["linear_weight"][:, 0] = 1.0
    return call.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm())


# ---------------------------------------------------------------- values and gradients


@per_half
@per_reduction
@pytest.mark.parametrize("name", CASES)
def test_against_float64(
    name: str, reduction: str, dtype: torch.dtype, kept: bool, device: str
) -> None:
    """Right with chunks of one row, of seven rows and of all; and no worse than without it."""
    call = case(name, dtype=dtype, device=device, reduction=reduction)
    shape = call.double().run(composed)["loss"].shape
    grad = torch.randn(shape).to(dtype).to(device)
    exact = call.double().run(composed, grad)
    narrow = call.run(lossops.linear_cross_entropy, grad)
    for rows in (1, 7, None):
        limit = None if rows is None else workspace_of(rows, call)
        found = call.run(lossops.linear_cross_entropy, grad, max_workspace_bytes=limit, **FLOAT32)
        assert_close(found, exact, f"{rows} rows:")
        for key, value in found.items():
            assert value.dtype == narrow[key].dtype == dtype, key
            if value.numel() == 0 or not exact[key].isfinite().all():
                continue
            # Roundings of a result may differ either way; those of logits may not add to them.
            floor = torch.finfo(dtype).eps / 2 * exact[key].norm() + 1e-7
            assert error(value, exact[key]) <= 1.1 * error(narrow[key], exact[key]) + floor, key


@per_half
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("keywords", KEYWORDS)
def test_keywords(keywords: str, targets: str, dtype: torch.dtype, kept: bool, device: str) -> None:
    for reduction in ("mean", "none"):
        problem = KeywordProblem(keywords, targets, device, dtype=dtype, reduction=reduction)
        if reduction == "none" and "num_items_in_batch" in problem.options:
            continue
        exact = problem.run(composed_with_keywords, double=True)
        narrow = problem.run(lossops.linear_cross_entropy)
        for limit in (None, 6 * workspace_of(3, problem.call)):
            found = problem.run(lossops.linear_cross_entropy, max_workspace_bytes=limit, **FLOAT32)
            assert found.keys() == exact.keys()
            for key, value in found.items():
                assert value.dtype == narrow[key].dtype, key
                if key in ("predicted_tokens", "token_accuracy"):
                    torch.testing.assert_close(value.double(), exact[key].double())
                    continue
                floor = torch.finfo(dtype).eps * exact[key].norm() + 1e-6
                assert error(value, exact[key]) <= 1.1 * error(narrow[key], exact[key]) + floor, key


@per_half
@per_reduction
def test_large_logits(dtype: torch.dtype, reduction: str, kept: bool, device: str) -> None:
    """The error is several times smaller, of the loss where its own dtype is float32."""
    call = large(dtype, device, reduction=reduction)
    exact = call.double().run(composed)

    def wide_loss(**arguments: Any) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return lossops.linear_cross_entropy(**arguments)

    for rows in (13, None):
        limit = None if rows is None else workspace_of(rows, call)
        narrow, found = (
            call.run(wide_loss, max_workspace_bytes=limit, **more) for more in ({}, FLOAT32)
        )
        assert found["loss"].dtype == torch.float32
        for name, value in found.items():
            assert 6 * error(value, exact[name]) <= error(narrow[name], exact[name]), name
        without = call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit, **FLOAT32)
        assert without["loss"].dtype == dtype
        for name in WANTED:
            assert same_bits(without[name], found[name]), name


def test_logits_beyond_float16(kept: bool, device: str) -> None:
    """Logits of 90000 are infinite in float16, and finite in float32."""
    call = make(20, 4, 9, dtype=torch.float16, device=device, bias=True)
    call.tensors["input"][:, 0] = 300
    call.tensors["linear_weight"][:, 0] = 300
    call.frozen = ("input",)  # its gradient is a difference of products with 300
    exact = call.double().run(composed)
    assert not call.run(lossops.linear_cross_entropy)["loss"].isfinite()
    assert_close(call.run(lossops.linear_cross_entropy, **FLOAT32), exact)


@per_reduction
@pytest.mark.parametrize("chunked", [False, True])
def test_as_autograd_of_float_logits(chunked: bool, reduction: str, device: str) -> None:
    """As autograd of `linear(...).float()`, with products that round their results alone."""
    call = large(torch.bfloat16, device, reduction=reduction)
    exact = call.double().run(composed)

    def of_float_logits(
        input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor, **options: Any
    ) -> Tensor:
        logits = F.linear(input.float(), linear_weight.float(), linear_bias.float())
        logits.register_hook(lambda grad: grad.bfloat16().float())
        return F.cross_entropy(logits, target, **options)

    expected = call.run(of_float_logits)
    limit = workspace_of(32, call) if chunked else None
    found = call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit, **FLOAT32)
    for name in WANTED:
        floor = torch.finfo(torch.bfloat16).eps / 64 * exact[name].norm()
        assert error(found[name], exact[name]) <= 1.25 * error(expected[name], exact[name]) + floor


@per_half
def test_class_weights_of_either_dtype(dtype: torch.dtype, kept: bool, device: str) -> None:
    call = make(dtype=dtype, device=device, weighted=True, reduction="none")
    found = call.run(lossops.linear_cross_entropy, **FLOAT32)
    call.tensors["weight"] = call.tensors["weight"].float()
    for name, value in call.run(lossops.linear_cross_entropy, **FLOAT32).items():
        assert same_bits(value, found[name]), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_TYPES], ids=str)
def test_the_operands_dtype_changes_nothing(dtype: torch.dtype, device: str) -> None:
    call = make(dtype=dtype, device=device, bias=True, label_smoothing=0.1)
    expected = call.run(lossops.linear_cross_entropy)
    for name, value in call.run(lossops.linear_cross_entropy, logits_dtype=dtype).items():
        assert same_bits(value, expected[name]), name


@per_half
def test_autocast(dtype: torch.dtype, kept: bool, device: str) -> None:
    """float32 masters: the logits of rounded factors, and gradients in float32."""
    call = make(64, 16, 65, device=device, bias=True, weighted=True)
    rounded = Call({k: x if k == "target" else x.to(dtype) for k, x in call.tensors.items()})
    rounded.tensors["weight"] = call.tensors["weight"]
    exact = rounded.double().run(composed)

    def loss(**arguments: Any) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return lossops.linear_cross_entropy(**arguments)

    narrow, found = call.run(loss), call.run(loss, **FLOAT32)
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert error(value, exact[name]) <= error(narrow[name], exact[name]), name
    assert error(found["loss"], exact["loss"]) <= 1e-6 * float(exact["loss"])


# ---------------------------------------------------------------- memory and products


class Allocated(TorchDispatchMode):
    """Finds the largest tensor in memory that no argument had."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("rows", [0, 1, 2, 63, 64, 127, 128, 1000])
@pytest.mark.parametrize("classes", [1, 7, 64])
@per_half
def test_rounding_in_place(rows: int, classes: int, dtype: torch.dtype, device: str) -> None:
    """The factor has the bits of a conversion, and the memory of the logits."""
    call = make(rows, 3, classes, dtype=dtype, device=device)
    tensors = (call.tensors.get(name) for name in OPERANDS)
    problem = passes.Problem(Operands(*tensors), options_of(dtype), adds_up_weight=True)
    logits = problem.logits(slice(0, rows))
    logits.normal_()
    expected = logits.to(dtype)
    separate = logits.clone()
    with Allocated() as allocated:
        found = problem.factor(logits)
    assert found.dtype == dtype and found.data_ptr() == problem.buffer.data_ptr()
    assert same_bits(found, expected)
    assert allocated.largest <= max(classes, rows * classes // 64)
    assert same_bits(problem.factor(separate), expected)
    assert problem.factor(found) is found


def options_of(dtype: torch.dtype, *, limit: int | None = None, **row: Any) -> Options:
    made = lossops.heads._row_options(**{"reduction": "mean", **row})
    return Options(made, dtype, torch.float32, torch.float32, limit, None)


def test_workspace_counts_float32_logits() -> None:
    wide: dict[str, Any] = {"logits_dtype": torch.float32}
    assert rows_of_chunk(4096, 4096, 128256, **wide) == 4096  # as many tokens as the width
    assert rows_of_chunk(4097, 4096, 128256, **wide) < 4097
    assert rows_of_chunk(8192, 2304, 256000, **wide) == 1024  # as much memory as the weight
    # Without sums of the weight's gradient 2048 rows, or as many as 1 GiB holds.
    assert rows_of_chunk(8192, 4096, 128256, adds_up_weight=False, **wide) == 2048
    assert rows_of_chunk(8192, 2304, 256000, adds_up_weight=False, **wide) == 1024
    for classes in (33, 32000, 50257):
        row_bytes = 4 * chunks.padded_classes(classes, torch.bfloat16)
        for limit in (1, row_bytes, 3 * row_bytes, 200 * row_bytes, 2**30):
            chunk = rows_of_chunk(4096, 64, classes, max_workspace_bytes=limit, **wide)
            assert chunk == 1 or chunk * row_bytes <= limit


@pytest.mark.parametrize(
    ("kept", "count"),
    [((True,) * 3, 3), ((True, False, False), 2), ((False, True, False), 2), ((False,) * 3, 1)],
)
def test_products_and_memory_of_a_pass(kept: tuple[bool, ...], count: int, device: str) -> None:
    """As many products as without, and no tensor that is larger than a chunk's logits."""
    rows, features, classes = 4096, 4, 96
    call = make(rows, features, classes, dtype=torch.bfloat16, bias=True, device=device)
    operands = Operands(*(call.tensors.get(name) for name in OPERANDS))
    for num_chunks in (1, 4, 32):
        options = options_of(torch.bfloat16, limit=workspace_of(rows // num_chunks, call))
        with Counter() as counter:
            passes.forward(operands, options, kept, with_stats=any(kept))
        assert counter.products == count * num_chunks
        assert counter.largest <= max(rows * classes // num_chunks, rows * features)


@per_half
@pytest.mark.parametrize("shape", [(1, 5, 300), (300, 5, 1), (40, 50, 60), (0, 4, 3)], ids=str)
def test_products_by_blocks(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight in parts, into rows with gaps."""
    rows, inner, columns = shape
    monkeypatch.setattr(products, "_HAS_OUT_DTYPE", False)
    monkeypatch.setattr(products, "_PART_BYTES", 16 * inner)  # four rows
    a = torch.randn(rows, inner, device=device).to(dtype)
    weight = torch.randn(columns, inner, device=device).to(dtype)
    buffer = torch.full((rows, columns + 3), 7.0, device=device)
    with Counter() as counter:
        products.multiply_by_blocks(a, weight.t(), buffer[:, :columns])
    assert counter.largest <= 4 * inner
    expected = a.double() @ weight.double().t()
    torch.testing.assert_close(buffer[:, :columns].double(), expected, rtol=1e-5, atol=1e-5)
    assert (buffer[:, columns:] == 7).all()


# ---------------------------------------------------------------- arguments and errors

BFLOAT16 = {name: make(6, 5, 7).tensors[name].bfloat16() for name in WANTED[:2]}
WRONG: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "text": (TypeError, {"logits_dtype": "float32"}),
    "half logits of float32": (ValueError, {"logits_dtype": torch.bfloat16}),
    "float64 logits of float32": (ValueError, {"logits_dtype": torch.float64}),
    "the other half type": (ValueError, {**BFLOAT16, "logits_dtype": torch.float16}),
    "float64 logits of bfloat16": (ValueError, {**BFLOAT16, "logits_dtype": torch.float64}),
    "integers": (ValueError, {**BFLOAT16, "logits_dtype": torch.int32}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    kind, wrong = WRONG[name]
    arguments = {**make(6, 5, 7).tensors, **wrong}
    assert_raises(kind, lambda: lossops.linear_cross_entropy(**arguments), "logits_dtype")


def test_autocast_decides_the_products_dtype(device: str) -> None:
    call = make(6, 5, 7, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for allowed in (torch.bfloat16, torch.float32):
            lossops.linear_cross_entropy(**call.tensors, logits_dtype=allowed)
        with pytest.raises(ValueError, match="logits_dtype"):
            lossops.linear_cross_entropy(**call.tensors, logits_dtype=torch.float16)


def test_module(device: str) -> None:
    module = lossops.LinearCrossEntropyLoss(
        5, 7, dtype=torch.bfloat16, device=device, bias=True, **FLOAT32
    )
    x, target = torch.randn(6, 5, device=device).bfloat16(), torch.arange(6, device=device)
    expected = lossops.linear_cross_entropy(
        x, module.linear.weight, target, linear_bias=module.linear.bias, **FLOAT32
    )
    assert same_bits(module(x, target), expected)
    assert "logits_dtype=torch.float32" in repr(module)
    with pytest.raises(TypeError, match="logits_dtype"):
        lossops.LinearCrossEntropyLoss(5, 7, logits_dtype="float32")  # type: ignore[arg-type]


# ---------------------------------------------------------------- graphs


def leaves_of(call: Call) -> tuple[list[Tensor], dict[str, Any]]:
    """The leaves of a call, and its arguments with them and with chunks of some rows."""
    leaves = [call.tensors[name].detach().clone().requires_grad_() for name in WANTED]
    given = {**call.tensors, **dict(zip(WANTED, leaves, strict=True)), **call.options, **FLOAT32}
    return leaves, {**given, "max_workspace_bytes": workspace_of(32, call)}


@per_half
@per_reduction
def test_backward_passes(dtype: torch.dtype, reduction: str, device: str) -> None:
    """A second pass, activation checkpointing, and a frozen weight."""
    call = large(dtype, device, reduction=reduction)
    expected = call.run(lossops.linear_cross_entropy, **FLOAT32)
    leaves, arguments = leaves_of(call)
    exact = call.double().run(composed)

    def check(names: Any, found: Any) -> None:
        for name, value in zip(names, found, strict=True):
            bound = 1.1 * error(expected[name], exact[name])
            assert error(value, exact[name]) <= bound + 1e-3 * exact[name].norm(), name

    loss = lossops.linear_cross_entropy(**arguments)
    for _ in range(2):
        check(WANTED, torch.autograd.grad(loss.sum(), leaves, retain_graph=True))
    loss = checkpoint(
        lambda *tensors: lossops.linear_cross_entropy(
            **{**arguments, **dict(zip(WANTED, tensors, strict=True))}
        ),
        *leaves,
        use_reentrant=False,
    )
    check(WANTED, torch.autograd.grad(loss.sum(), leaves))
    for frozen in range(3):
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i != frozen)
        names = [name for i, name in enumerate(WANTED) if i != frozen]
        loss = lossops.linear_cross_entropy(**arguments)
        check(names, torch.autograd.grad(loss.sum(), [x for x in leaves if x.requires_grad]))


@per_half
@pytest.mark.parametrize("more", [{}, KEYWORDS["map"]], ids=["plain", "keywords"])
def test_other_derivatives(dtype: torch.dtype, more: dict[str, Any], device: str) -> None:
    """Second derivatives, forward mode and torch.func: by torch's functions, of float32 logits."""
    call = large(dtype, device, rows=24, reduction="sum")
    leaves, arguments = leaves_of(call)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    fixed = {"target": arguments["target"], "reduction": "sum", **more}
    eps = torch.finfo(dtype).eps

    def ours(*tensors: Tensor) -> Tensor:
        return lossops.linear_cross_entropy(
            **dict(zip(WANTED, tensors, strict=True)), **fixed, **FLOAT32
        )

    def exact(*tensors: Tensor) -> Tensor:
        return composed_with_keywords(**dict(zip(WANTED, tensors, strict=True)), **fixed)

    def second(head: Any, tensors: list[Tensor]) -> Any:
        (gradient,) = torch.autograd.grad(head(*tensors), tensors[1], create_graph=True)
        return torch.autograd.grad(1e-4 * gradient.double().square().sum(), tensors)

    def all_of(head: Any, tensors: list[Tensor]) -> list[Tensor]:
        detached = tuple(x.detach() for x in tensors)
        value, tangent = torch.func.jvp(head, detached, tuple(0.01 * x for x in detached))
        gradients = torch.func.grad(head, (0, 1, 2))(*detached)
        return [value, tangent, *gradients, *second(head, tensors)]

    for under_autocast in (False, True):
        with torch.autocast(device, dtype=dtype, enabled=under_autocast):
            found = all_of(ours, leaves)
        assert found[0].dtype == (torch.float32 if under_autocast else dtype)
        for value, expected in zip(found, all_of(exact, doubles), strict=True):
            # Rounded logits are off by tens of per cent.
            assert error(value, expected) <= 8 * eps * expected.norm() + 1e-6


@per_half
@per_reduction
@pytest.mark.parametrize("keywords", [None, "all"])
def test_compiled(dtype: torch.dtype, reduction: str, keywords: str | None, device: str) -> None:
    """The bits of eager code, in one graph."""
    call = large(dtype, device, reduction=reduction)
    if keywords is not None:
        call.options |= {"softcap": 300.0, "lse_square_scale": 1e-4, "return_z_loss": True}
    leaves, arguments = leaves_of(call)

    def step(*tensors: Tensor) -> Any:
        given = {**arguments, **dict(zip(WANTED, tensors, strict=True))}
        return lossops.linear_cross_entropy(**given)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for function in (step, compiled):
        found = function(*leaves)
        parts = [found] if keywords is None else [found.loss, found.z_loss]
        results = [*parts, *torch.autograd.grad(parts[0].sum(), leaves)]
        if function is step:
            expected = results
    for value, other in zip(results, expected, strict=True):
        assert same_bits(value, other)


def test_compiled_errors() -> None:
    call = make(6, 5, 7)
    compiled = torch.compile(
        lambda: lossops.linear_cross_entropy(**call.tensors, logits_dtype=torch.float16),
        backend="eager",
    )
    with pytest.raises(ValueError, match="logits_dtype"):
        compiled()


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@per_half
def test_operators(probabilities: bool, reduction: str, dtype: torch.dtype, device: str) -> None:
    call = make(
        9, 6, 11, dtype=dtype, device=device, bias=True, weighted=True, probabilities=probabilities
    )
    tensors = [call.tensors[name].requires_grad_(name in WANTED) for name in OPERANDS]
    options = (-100, reduction, 0.1, False, dtype, torch.float32, torch.float32, 200, None)
    kept = [reduction == "mean"] * 3
    forward = torch.ops.lossops.linear_cross_entropy_forward.default
    backward = torch.ops.lossops.linear_cross_entropy_backward.default
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(forward, (*tensors, *options, kept, True), test_utils=utils)
    grad = torch.ones((9,) if reduction == "none" else (), dtype=dtype, device=device)
    mask = [True, True, True, probabilities, probabilities]
    plain = [x.detach() for x in tensors]
    torch.library.opcheck(backward, (grad, *plain, None, *options, mask), test_utils=utils)
    keywords = (None, None, 1.5, 30.0, 0.7, 0.1, True, True, True, False, False)
    torch.library.opcheck(
        torch.ops.lossops.linear_cross_entropy_output_forward.default,
        (*tensors, *options, *keywords, kept),
        test_utils=utils,
    )


def test_export(device: str) -> None:
    module = lossops.LinearCrossEntropyLoss(6, 11, dtype=torch.bfloat16, device=device, **FLOAT32)
    example = torch.randn(4, 6, device=device).bfloat16(), torch.arange(4, device=device)
    program = torch.export.export(module, example)
    assert same_bits(program.module()(*example), module(*example))


# ---------------------------------------------------------------- CUDA
