"""linear_cross_entropy: values and gradients against float64, chunks, memory, arguments, errors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises
from numerics import DTYPES, HALF_TYPES, assert_within, same_bits, ulp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lossops
from lossops._heads import chunks, passes, products

HAS_TORCHS = hasattr(F, "linear_cross_entropy")
needs_torchs = pytest.mark.skipif(not HAS_TORCHS, reason="this torch has no linear_cross_entropy")
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
per_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
OPERANDS = ("input", "linear_weight", "linear_bias", "target", "weight")


def composed(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    **options: Any,
) -> Tensor:
    """linear and cross_entropy of torch, for every shape that linear_cross_entropy takes."""
    classes, features = linear_weight.shape[:-1], linear_weight.shape[-1]
    batch = input.shape[:-1]
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = F.linear(input, linear_weight.reshape(-1, features), bias).reshape(*batch, *classes)
    if len(batch) > 1:
        logits = logits.movedim(-1, 1)
        target = target.movedim(-1, 1) if target.is_floating_point() else target
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, weight, ignore_index=ignored, **options)


@dataclass
class Call:
    """The arguments of a call by name, and which of them have gradients."""

    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def differentiable(self) -> list[str]:
        is_probability = self.tensors["target"].is_floating_point()
        fixed = () if is_probability else ("target", "weight")
        return [
            name for name in OPERANDS if name in self.tensors and name not in fixed + self.frozen
        ]

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        return Call({k: change(v) for k, v in self.tensors.items()}, self.options, self.frozen)

    def double(self) -> Call:
        return self.map(lambda x: x.double() if x.is_floating_point() else x)

    def run(
        self, function: Callable[..., Tensor], grad: Tensor | None = None, **more: Any
    ) -> dict[str, Tensor]:
        """The loss and the gradients of `(grad * loss).sum()`, by name; grad is 1 unless given."""
        names = self.differentiable()
        tensors = {k: v.detach().requires_grad_(k in names) for k, v in self.tensors.items()}
        loss = function(**tensors, **self.options, **more)
        grad = torch.ones_like(loss) if grad is None else grad.to(loss)
        found = torch.autograd.grad(loss, [tensors[name] for name in names], grad)
        return {"loss": loss.detach(), **dict(zip(names, found, strict=True))}


def make(
    rows: int | tuple[int, ...] = 37,
    features: int = 16,
    classes: int | tuple[int, ...] = 29,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    scale: float = 1.0,
    bias: bool = False,
    weighted: bool = False,
    probabilities: bool = False,
    **options: Any,
) -> Call:
    rows = (rows,) if isinstance(rows, int) else rows
    classes = (classes,) if isinstance(classes, int) else classes
    tensors = {
        "input": torch.randn(*rows, features),
        "linear_weight": torch.randn(*classes, features) * scale / features**0.5,
    }
    if bias:
        tensors["linear_bias"] = torch.randn(classes)
    if probabilities:
        tensors["target"] = torch.randn(*rows, *classes).softmax(len(rows))
    else:
        tensors["target"] = torch.randint(classes[0], (*rows, *classes[1:]))
    if weighted:
        tensors["weight"] = torch.rand(classes[0]) + 0.5
    return Call(
        {
            name: (x.to(dtype) if x.is_floating_point() else x).to(device)
            for name, x in tensors.items()
        },
        options,
    )


def workspace_of(rows: int, call: Call) -> int:
    """max_workspace_bytes for chunks of so many rows."""
    weight = call.tensors["linear_weight"]
    width = chunks.padded_classes(weight[..., 0].numel(), weight.dtype)
    return rows * width * weight.element_size()


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], what: str = "") -> None:
    """Within a few roundings of the dtype, of the largest element; NaN at the same places."""
    assert found.keys() == exact.keys()
    for name, value in found.items():
        expected = exact[name].double()
        assert value.shape == expected.shape, f"{what} {name}: shape {tuple(value.shape)}"
        assert torch.equal(value.isnan(), expected.isnan()), f"{what} {name}: NaN"
        if value.numel() == 0:
            continue
        largest = expected.nan_to_num().abs().amax()
        error = (value.double() - expected).nan_to_num().abs().amax()
        tolerance = 16 * torch.finfo(value.dtype).eps * largest + 1e-7 * (value.dtype in HALF_TYPES)
        assert error <= tolerance, f"{what} {name}: off by {error:.2g}, allowed {tolerance:.2g}"


# ---------------------------------------------------------------- values and gradients

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "weights": {"weighted": True},
    "smoothing": {"label_smoothing": 0.2, "bias": True},
    "weights and smoothing": {"weighted": True, "label_smoothing": 0.1},
    "probabilities": {"probabilities": True, "bias": True},
    "weighted probabilities": {"probabilities": True, "weighted": True, "label_smoothing": 0.1},
    "images": {"classes": (5, 3, 2), "bias": True, "weighted": True},
    "images of probabilities": {"classes": (5, 3, 2), "probabilities": True},
    "one row": {"rows": ()},
    "one row of probabilities": {"rows": (), "probabilities": True},
    "tokens": {"rows": (3, 7), "bias": True},
    "tokens of probabilities": {"rows": (3, 7), "probabilities": True},
    "one class": {"classes": 1},
    "no rows": {"rows": 0, "bias": True},
    "ignored": {"ignore_index": 3, "weighted": True},
    "ignored and smoothing": {"ignore_index": -7, "label_smoothing": 0.1},
}


def case(name: str, **more: Any) -> Call:
    call = make(**{**CASES[name], **more})
    if name.startswith("ignored"):
        call.tensors["target"][::3] = call.options["ignore_index"]
    return call


@per_dtype
@per_reduction
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, reduction: str, dtype: torch.dtype, device: str) -> None:
    """Chunks of one row, of seven rows, and one chunk; gradients kept, and computed in backward."""
    call = case(name, dtype=dtype, device=device, reduction=reduction)
    shape = call.double().run(composed)["loss"].shape
    grad = torch.randn(shape).to(dtype).to(device)
    exact = call.double().run(composed, grad)
    for rows in (1, 7, None):
        limit = None if rows is None else workspace_of(rows, call)
        for kept in (True, False):
            lossops.keep_gradients(kept)
            try:
                found = call.run(lossops.linear_cross_entropy, grad, max_workspace_bytes=limit)
            finally:
                lossops.keep_gradients(True)
            assert found["loss"].dtype == dtype
            for operand in call.differentiable():
                assert found[operand].dtype == dtype
            assert_close(found, exact, f"{rows} rows, kept {kept}:")


@per_dtype
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_rows_ignored(reduction: str, dtype: torch.dtype, device: str) -> None:
    call = make(dtype=dtype, device=device, bias=True, reduction=reduction)
    call.tensors["target"].fill_(-100)
    found = call.run(lossops.linear_cross_entropy, max_workspace_bytes=workspace_of(9, call))
    loss = found.pop("loss")
    assert loss.isnan() if reduction == "mean" else loss == 0
    for name, gradient in found.items():
        assert not gradient.any(), name


def test_ignored_rows_are_never_nan(device: str) -> None:
    call = make(device=device)
    call.tensors["target"][4] = -100
    call.tensors["input"][4] = torch.nan
    found = call.run(lossops.linear_cross_entropy, max_workspace_bytes=workspace_of(5, call))
    assert found["loss"].isfinite()
    assert not found["input"][4].any()


def logits_kind(kind: str, dtype: torch.dtype, device: str) -> Call:
    """Problems of random, confident and near-uniform logits."""
    call = make(96, 64, 517, bias=True, scale={"uniform": 1e-3}.get(kind, 1.0), device=device)
    if kind == "confident":
        x, weight, target = (call.tensors[k] for k in ("input", "linear_weight", "target"))
        x.copy_(18 * F.normalize(weight[target], dim=-1) + 0.1 * x)
    return call.map(lambda x: x.to(dtype) if x.is_floating_point() else x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["random", "confident", "uniform"])
def test_no_worse_than_torch(kind: str, dtype: torch.dtype, device: str) -> None:
    """The errors of each gradient, in the Euclidean norm, beside those of eager torch."""
    call = logits_kind(kind, dtype, device)
    exact = call.double().run(composed)
    theirs = call.run(composed)
    for rows in (1, 32, None):
        # A logit of a product in another order may round to its other neighbour. The norm then
        # differs by a few per cent either way. The library picks a float32 product by the number of
        # rows: that of one row, and on CUDA that of a few, adds up in longer chains.
        in_chains = rows == 1 or (rows is not None and device == "cuda")
        slack = 1.1 if dtype in HALF_TYPES else 2.0 if in_chains else 1.2
        limit = None if rows is None else workspace_of(rows, call)
        ours = call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit)
        for name in ("input", "linear_weight", "linear_bias"):
            errors = [(each[name].double() - exact[name]).norm() for each in (ours, theirs)]
            floor = torch.finfo(dtype).eps / 8 * exact[name].norm()
            assert errors[0] <= slack * errors[1] + floor, f"{rows} rows, {name}: {errors}"


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_sums_of_the_weight_gradient(dtype: torch.dtype, device: str) -> None:
    """float32 sums over many chunks are as good as one product; sums in bfloat16 are not."""
    call = make(1024, 8, 33, dtype=dtype, device=device)
    exact = call.double().run(composed)["linear_weight"]

    def error(**options: Any) -> float:
        found = call.run(lossops.linear_cross_entropy, **options)["linear_weight"]
        return float((found.double() - exact).norm() / exact.norm())

    limit = workspace_of(1, call)
    single, several = error(), error(max_workspace_bytes=limit)
    assert several <= 1.1 * single
    narrow = error(max_workspace_bytes=limit, accum_dtype=dtype)
    if dtype == torch.bfloat16:
        assert narrow > 2 * several
    else:  # of a mean or a sum always float32
        assert narrow == several


@pytest.mark.parametrize("classes", [1, 7, 8, 9, 130, 50257 // 64])
@per_dtype
def test_vocabularies(classes: int, dtype: torch.dtype, device: str) -> None:
    """Rows of the buffer are padded. What lies behind a row must not be read."""
    call = make(19, 8, classes, dtype=dtype, device=device)
    exact = call.double().run(composed)
    limit = workspace_of(4, call)
    assert_close(call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit), exact)


def test_layouts(device: str) -> None:
    """Transposed, strided and expanded operands, and a target with gaps."""
    call = make(12, 6, 10, bias=True, device=device)
    expected = call.run(lossops.linear_cross_entropy)
    gaps = torch.full((12, 2), 10**6, device=device)
    gaps[:, 0] = call.tensors["target"]
    changed = Call({**call.tensors, "target": gaps[:, 0]})
    changed.tensors["input"] = call.tensors["input"].t().contiguous().t()
    changed.tensors["linear_weight"] = call.tensors["linear_weight"].repeat(1, 2)[:, :6]
    changed.tensors["linear_bias"] = call.tensors["linear_bias"].repeat_interleave(2)[::2]
    found = changed.run(lossops.linear_cross_entropy)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    row = call.tensors["input"][:1]
    expanded = Call({**call.tensors, "input": row.expand(12, 6)})
    assert_close(expanded.run(lossops.linear_cross_entropy), expanded.double().run(composed))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_dtypes_of_class_indices(dtype: torch.dtype, device: str) -> None:
    call = make(bias=True, weighted=True, label_smoothing=0.1, device=device)
    expected = call.run(lossops.linear_cross_entropy)
    narrow = Call({**call.tensors, "target": call.tensors["target"].to(dtype)}, call.options)
    for name, value in narrow.run(lossops.linear_cross_entropy).items():
        assert same_bits(value, expected[name])


def test_same_bits_on_every_run(device: str) -> None:
    for dtype in DTYPES:
        call = make(300, 32, 257, dtype=dtype, device=device, bias=True, label_smoothing=0.1)
        limit = workspace_of(64, call)
        first, second = (
            call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit) for _ in range(2)
        )
        for name, value in first.items():
            assert same_bits(value, second[name]), f"{dtype} {name}"


def test_without_a_float32_product_of_half_types(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.mm with out_dtype is looked for at import; the way beside it has the same results."""
    monkeypatch.setattr(products, "_HAS_OUT_DTYPE", False)
    monkeypatch.setattr(products, "_PART_BYTES", 64)
    for dtype in HALF_TYPES:
        call = make(dtype=dtype, device=device)
        exact = call.double().run(composed)
        limit = workspace_of(5, call)
        assert_close(call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit), exact)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("classes", [7, 64, 67])
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_products_in_whole_vectors(
    dtype: torch.dtype, classes: int, bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an odd number of classes, products may be two, and some rows of them float32."""
    monkeypatch.setattr(products, "_needs_vectors", lambda factor: True)
    monkeypatch.setattr(products, "_LEAST_LENGTH", 8)
    monkeypatch.setattr(products, "_LEAST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(products, "_WIDE_BYTES", 1000)
    call = make(19, 16, classes, dtype=dtype, device=device, bias=bias)
    exact = call.double().run(composed)
    for limit in (None, workspace_of(4, call)):
        found = call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit)
        assert_close(found, exact)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_products_are_rounded_once(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parts of a product, or a product and its bias, nearly cancel."""
    monkeypatch.setattr(products, "_needs_vectors", lambda factor: factor.dtype == dtype)
    monkeypatch.setattr(products, "_LEAST_LENGTH", 8)
    monkeypatch.setattr(products, "_LEAST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(products, "_WIDE_BYTES", 5000)
    taken = []
    take = products._take

    def record(product: Any) -> None:
        if product.a.dtype == dtype:
            taken.append((tuple(product.out.shape), product.a.size(1)))
        take(product)

    monkeypatch.setattr(products, "_take", record)
    a = torch.randn(37, 72, device=device).to(dtype)[:, :67]
    b = torch.randn(67, 64, device=device).to(dtype)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    out = torch.empty(37, 64, dtype=dtype, device=device)
    products.multiply(a, b, out)
    assert taken[:2] == [((16, 64), 3), ((16, 64), 64)]
    assert_within(out, exact, 0.5 * ulp(exact, dtype) + 2.0**-20 * size, "two parts")

    taken.clear()
    columns = torch.randn(67, 64, device=device).to(dtype)
    bias = -(a[0, :64].double() @ columns.double().t()).to(dtype)
    logits = torch.empty(37, 72, dtype=dtype, device=device)[:, :67]
    products.multiply_and_add(bias, a[:, :64], columns.t(), logits)
    assert taken[:2] == [((16, 64), 64), ((16, 3), 64)]
    product = a[:, :64].double() @ columns.double().t()
    exact = product + bias.double()
    bound = 0.5 * ulp(exact, dtype) + 2.0**-20 * (product.abs() + size.max())
    assert_within(logits, exact, bound, "bias")


@pytest.mark.parametrize(
    ("dtype", "features", "classes", "gains"),
    [
        (torch.bfloat16, 64, 50257, True),
        (torch.float16, 64, 513, True),
        (torch.float32, 64, 50257, False),
        (torch.bfloat16, 63, 50257, False),  # rows that begin anywhere
        (torch.bfloat16, 64, 101, False),  # little to win
    ],
)
def test_products_that_are_worth_two(
    dtype: torch.dtype, features: int, classes: int, gains: bool, device: str
) -> None:
    """Those of half types on CUDA. Of odd numbers only that of classes counts."""
    split = products._in_whole_vectors
    input = torch.empty(511, features, dtype=dtype, device=device)
    weight = torch.empty(classes, features, dtype=dtype, device=device)
    logits = torch.empty(511, classes // 8 * 8 + 8, dtype=dtype, device=device)[:, :classes]
    of_logits = [*split(products._Product(input, weight.t(), logits, False))]
    grad_input = torch.empty_like(input, dtype=torch.float32)
    of_input = [*split(products._Product(logits, weight, grad_input, False))]
    of_weight = [*split(products._Product(logits.t(), input, weight, False))]
    found = [
        [product.out.size(1) for product in of_logits],
        [product.a.size(1) for product in of_input],
        [product.out.size(0) for product in of_weight],
    ]
    if gains and device.startswith("cuda"):
        assert found == [[classes - 1, 1], [1, classes - 1], [classes - 1, 1]]
        assert [product.adds for product in of_input] == [False, True]
    else:
        assert found == [[classes]] * 3


# ---------------------------------------------------------------- chunks and memory


def rows_of_chunk(rows: int, features: int, classes: int, **options: Any) -> int:
    given: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device_type": "cuda",
        "adds_up_weight": True,
        "max_workspace_bytes": None,
        "batch_chunk_size": None,
    }
    return chunks.rows_of_chunk(
        rows=rows, features=features, classes=classes, **{**given, **options}
    )


def test_default_chunks() -> None:
    assert rows_of_chunk(8192, 4096, 128256) == 8192  # tokens are twice the width
    assert rows_of_chunk(8193, 4096, 128256) < 8193
    assert rows_of_chunk(8192, 2304, 256000) == 2048  # as much memory as the weight, in equal parts
    assert rows_of_chunk(16384, 2048, 32000) == 4096  # 256 MiB
    assert rows_of_chunk(8192, 4096, 128256, adds_up_weight=False) == 2048
    assert rows_of_chunk(100, 4096, 128256, adds_up_weight=False) == 100
    assert rows_of_chunk(8192, 2304, 256000, adds_up_weight=False) == 2048  # 1000 MiB
    assert rows_of_chunk(8192, 2304, 600000, adds_up_weight=False) == 768  # 1 GiB
    assert rows_of_chunk(65536, 2304, 600000, adds_up_weight=False, device_type="cpu") < 128
    # The gradient over the logits beside them: all rows up to half as many, then twice the memory.
    assert rows_of_chunk(4096, 4096, 128256, tensors=2) == 4096
    assert rows_of_chunk(8192, 4096, 128256, tensors=2) == 4096
    assert rows_of_chunk(8192, 2304, 256000, tensors=2) == 2048
    assert rows_of_chunk(8192, 2304, 256000, tensors=11) < 512
    assert rows_of_chunk(0, 4, 4) == 1


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_no_classes(shape: tuple[int, ...], rows: int, device: str) -> None:
    input = torch.randn(rows, 4, device=device, requires_grad=True)
    weight = torch.randn(shape, device=device, requires_grad=True)
    target = torch.full((rows, *shape[1:-1]), -100, device=device)
    for reduction in ("mean", "sum"):
        for options in ({}, {"softcap": 2.0}):
            loss = lossops.linear_cross_entropy(
                input, weight, target, reduction=reduction, **options
            )
            assert loss.isnan() if reduction == "mean" else loss == 0
            gradients = torch.autograd.grad(loss, (input, weight))
            assert gradients[0].count_nonzero() == 0 and gradients[1].shape == shape


@pytest.mark.parametrize("rows", [1, 5, 127, 128, 1000, 4096])
@pytest.mark.parametrize("classes", [1, 33, 32000, 50257])
def test_workspace_is_a_limit(rows: int, classes: int) -> None:
    row_bytes = chunks.padded_classes(classes, torch.bfloat16) * 2
    for limit in (1, row_bytes, 3 * row_bytes, 200 * row_bytes, 2**30):
        chunk = rows_of_chunk(rows, 64, classes, max_workspace_bytes=limit)
        assert 1 <= chunk <= rows
        assert chunk == 1 or chunk * row_bytes <= limit
        if chunk < rows:
            assert chunk < 128 or chunk % (256 if limit >= 256 * row_bytes else 128) == 0
            before = (rows - 1) // chunk  # chunks before the last one, which is about as large
            assert chunk < 128 or rows - before * chunk > chunk - 256 * (before + 1)
        few = rows_of_chunk(rows, 64, classes, max_workspace_bytes=limit, batch_chunk_size=7)
        assert few == min(7, rows, max(1, limit // row_bytes))


class Counter(TorchDispatchMode):
    """Counts the matrix products, and finds the largest tensor that was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm")
        if isinstance(result, Tensor) and "out" not in (kwargs or {}) and not func.is_view:
            self.largest = max(self.largest, result.numel())
        return result


def options_of(dtype: torch.dtype = torch.float32, **options: Any) -> passes.Options:
    row = lossops.heads._row_options(reduction=options.pop("reduction", "mean"))
    return passes.Options(row, dtype, dtype, torch.float32, options.get("limit"), None)


@pytest.mark.parametrize(
    ("kept", "count"),
    [
        ((True, True, True), 3),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 1),
        ((False, False, False), 1),
    ],
)
def test_products_and_memory_of_a_pass(kept: tuple[bool, ...], count: int, device: str) -> None:
    """Frozen operands cost no product and no memory, and all logits never exist."""
    rows, features, classes = 4096, 4, 96
    call = make(rows, features, classes, bias=True, device=device)
    operands = passes.Operands(*(call.tensors.get(name) for name in OPERANDS))
    for num_chunks in (1, 4, 32):
        limit = workspace_of(rows // num_chunks, call)
        with Counter() as counter:
            passes.forward(operands, options_of(limit=limit), kept, with_stats=any(kept))
        assert counter.products == count * num_chunks
        assert counter.largest <= max(rows * classes // num_chunks, rows * features)


def test_backward_without_kept_gradients(device: str) -> None:
    """Of "none": a product for the logits in forward; three in backward, one less if frozen."""
    call = make(256, 4, 96, device=device)
    operands = passes.Operands(*(call.tensors.get(name) for name in OPERANDS))
    options = options_of(reduction="none", limit=workspace_of(128, call))
    found = passes.forward(operands, options, [False] * 3, with_stats=True)
    grad = torch.ones_like(found.loss)
    for needed, count in (([True, True], 3), ([True, False], 2), ([False, True], 2)):
        with Counter() as counter:
            passes.backward(operands, options, [*needed] + [False] * 3, grad, found.row_stats)
        assert counter.products == 2 * count
        assert counter.largest <= 128 * 96


@pytest.mark.parametrize("classes", [29, (5, 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_of_forward_and_backward_may_differ(
    reduction: str,
    classes: int | tuple[int, ...],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default workspace is larger where the weight's gradient is wanted: in backward alone."""
    call = make(53, 6, classes, device=device, reduction=reduction, label_smoothing=0.1)
    taken: list[int] = []
    rows_of_chunk = chunks.rows_of_chunk

    def watched(**options: Any) -> int:
        taken.append(rows_of_chunk(**options))
        return taken[-1]

    monkeypatch.setattr(chunks, "rows_of_chunk", watched)
    for least in ("_LEAST_WORKSPACE", "_LEAST_WITHOUT_SUMS"):
        monkeypatch.setattr(chunks, least, {device: workspace_of(4, call)})
    monkeypatch.setattr(chunks, "_ROWS_WITHOUT_SUMS", {})
    lossops.keep_gradients(False)
    try:
        found = call.run(lossops.linear_cross_entropy)
    finally:
        lossops.keep_gradients(True)
    assert len(taken) == 2 and taken[0] == 4 and taken[1] > 4
    assert_close(found, call.double().run(composed))


# ---------------------------------------------------------------- float16 under a gradient scaler


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("chunked", [False, True])
def test_float16_under_a_gradient_scaler(rows: int, chunked: bool, device: str) -> None:
    """Small gradients are no worse than torch's with a grad_output of 2^16, and none is 0 that
    is not 0 there."""
    call = make(rows, 16, 4096, scale=2.0, dtype=torch.float16, device=device)
    call.tensors["input"] *= 0.25
    grad = torch.full((), 2.0**16, device=device)

    def scaled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # As autocast has it: the loss is float32, so that 2^16 is a number of its dtype.
        def loss(**arguments: Any) -> Tensor:
            with torch.autocast(device, dtype=torch.float16):
                return function(**arguments)

        return loss

    exact = call.double().run(composed, grad)
    limit = workspace_of(rows // 4, call) if chunked else None
    ours = call.run(scaled(lossops.linear_cross_entropy), grad, max_workspace_bytes=limit)
    theirs = call.run(scaled(composed), grad)
    for name in ("input", "linear_weight"):
        assert ours[name].isfinite().all()
        lost = (ours[name] == 0) & (theirs[name] != 0) & (exact[name].abs() > 2**-24)
        assert not lost.any(), f"{name}: {int(lost.sum())} numbers were lost"
        errors = [(each[name].double() - exact[name]).norm() for each in (ours, theirs)]
        assert errors[0] <= 1.1 * errors[1], name


def test_float16_weights_that_are_large(device: str) -> None:
    """Class weights and unnormalised probabilities beyond float16 / 2^15 do not overflow."""
    call = make(33, 8, 20, dtype=torch.float16, device=device, weighted=True)
    call.tensors["weight"] *= 1000
    assert_close(call.run(lossops.linear_cross_entropy), call.double().run(composed))
    call = make(33, 8, 20, dtype=torch.float16, device=device, probabilities=True)
    call.tensors["target"] *= 500
    call.frozen = ("target",)
    grad = torch.tensor(2.0**-8)
    exact = call.double().run(composed, grad)
    assert_close(call.run(lossops.linear_cross_entropy, grad), exact)


# ---------------------------------------------------------------- arguments and errors


def test_options(device: str) -> None:
    if not HAS_TORCHS:
        with pytest.raises(TypeError, match="options"):
            lossops.linear_cross_entropy(**make().tensors, options=object())
        return
    make_options = torch.nn.LinearCrossEntropyOptions
    call = make(40, dtype=torch.bfloat16, device=device)
    limit = workspace_of(3, call)
    by_rows = call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit)
    found = call.run(lossops.linear_cross_entropy, options=make_options(batch_chunk_size=3))
    for name, value in found.items():
        assert same_bits(value, by_rows[name])
    narrow = make_options(batch_chunk_size=3, acc_dtype=torch.bfloat16)
    found = call.run(lossops.linear_cross_entropy, options=narrow)
    expected = call.run(
        lossops.linear_cross_entropy, max_workspace_bytes=limit, accum_dtype=torch.bfloat16
    )
    assert same_bits(found["linear_weight"], expected["linear_weight"])
    assert not same_bits(found["linear_weight"], by_rows["linear_weight"])
    wide = make_options(acc_dtype=torch.float32)
    assert_raises(
        ValueError,
        lambda: lossops.linear_cross_entropy(
            **call.tensors, options=wide, accum_dtype=torch.bfloat16
        ),
        "accum_dtype",
        "acc_dtype",
    )


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "workspace 0": (ValueError, "max_workspace_bytes", {"max_workspace_bytes": 0}),
    "workspace True": (TypeError, "max_workspace_bytes", {"max_workspace_bytes": True}),
    "workspace 1.5": (TypeError, "max_workspace_bytes", {"max_workspace_bytes": 1.5}),
    "accum_dtype float64": (ValueError, "accum_dtype", {"accum_dtype": torch.float64}),
    "accum_dtype text": (TypeError, "accum_dtype", {"accum_dtype": "float32"}),
    "options": (TypeError, "options", {"options": {}}),
    "reduction": (ValueError, "reduction", {"reduction": "batchmean"}),
    "smoothing below 0": (ValueError, "label_smoothing", {"label_smoothing": -0.1}),
    "smoothing above 1": (RuntimeError, "label_smoothing", {"label_smoothing": 1.1}),
    "smoothing text": (TypeError, "label_smoothing", {"label_smoothing": "a"}),
    "ignore_index": (TypeError, "ignore_index", {"ignore_index": 1.5}),
    "input 0-d": (RuntimeError, "input", {"input": torch.randn(())}),
    "input none": (TypeError, "input", {"input": None}),
    "input int": (NotImplementedError, "input", {"input": torch.ones(6, 5, dtype=torch.long)}),
    "input sparse": (NotImplementedError, "input", {"input": torch.randn(6, 5).to_sparse()}),
    "features": (RuntimeError, "last dim", {"input": torch.randn(6, 4)}),
    "weight dtype": (RuntimeError, "linear_weight", {"linear_weight": torch.randn(7, 5).half()}),
    "weight 1-d": (RuntimeError, "linear_weight", {"linear_weight": torch.randn(5)}),
    "bias shape": (RuntimeError, "linear_bias", {"linear_bias": torch.randn(6)}),
    "target length": (ValueError, "target", {"target": torch.zeros(5, dtype=torch.long)}),
    "target dtype": (RuntimeError, "target", {"target": torch.zeros(6)}),
    "target range": (IndexError, "target 7 at row 5", {"target": torch.arange(2, 8)}),
    "class weights": (RuntimeError, "weight", {"weight": torch.ones(6)}),
    "class weights' dtype": (RuntimeError, "weight", {"weight": torch.ones(7).double()}),
    "class weights' gradient": (
        RuntimeError,
        "weight",
        {"weight": torch.ones(7, requires_grad=True)},
    ),
    "ignored probabilities": (
        RuntimeError,
        "ignore_index",
        {"target": torch.randn(6, 7).softmax(-1), "ignore_index": -100},
    ),
    "images of one row": (
        RuntimeError,
        "linear_weight",
        {"input": torch.randn(5), "linear_weight": torch.randn(7, 2, 5)},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    kind, words, wrong = WRONG[name]
    given = {
        "input": torch.randn(6, 5),
        "linear_weight": torch.randn(7, 5, requires_grad=True),
        "target": torch.arange(6),
    }
    arguments = {"max_workspace_bytes": 64, **given, **wrong}
    assert_raises(kind, lambda: lossops.linear_cross_entropy(**arguments), words)


@needs_torchs
@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, _, wrong) in WRONG.items()
        # The arguments of lossops alone, what torch accepts, and a documented difference.
        if not {"max_workspace_bytes", "accum_dtype", "options"} & wrong.keys()
        and name not in ("smoothing below 0", "ignore_index", "input none", "input int")
        and name not in ("input sparse", "class weights' gradient", "target dtype")
    ],
)
def test_torch_raises_the_same(name: str) -> None:
    kind, _, wrong = WRONG[name]
    given = {
        "input": torch.randn(6, 5),
        "linear_weight": torch.randn(7, 5, requires_grad=True),
        "target": torch.arange(6),
    }
    assert_raises(kind, lambda: F.linear_cross_entropy(**{**given, **wrong}))


def test_wrappers_are_refused_by_name() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor")
    x = torch.randn(6, 5)
    weight = torch.randn(7, 5)
    wrapped = two.TwoTensor(weight, weight.clone())
    assert_raises(
        NotImplementedError,
        lambda: lossops.linear_cross_entropy(x, wrapped, torch.arange(6)),
        "linear_weight",
        "TwoTensor",
    )


@pytest.mark.cuda
def test_class_index_out_of_range_on_cuda() -> None:
    x, weight = torch.randn(6, 5, device="cuda"), torch.randn(7, 5, device="cuda")
    target = torch.arange(2, 8, device="cuda")
    losses = lossops.linear_cross_entropy(x, weight, target, reduction="none")
    assert losses.isnan().tolist() == [False] * 5 + [True]
    lossops.check_targets(True)
    with pytest.raises(IndexError, match="target 7 at row 5"):
        lossops.linear_cross_entropy(x, weight, target)


# ---------------------------------------------------------------- the module, patch()


@pytest.mark.parametrize("out_features", [(), (3, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_module(out_features: tuple[int, ...], bias: bool, device: str) -> None:
    arguments: dict[str, Any] = {"out_features": out_features, "bias": bias, "reduction": "sum"}
    weight = torch.rand(7, device=device) + 0.5
    module = lossops.LinearCrossEntropyLoss(
        5, 7, device=device, weight=weight, label_smoothing=0.1, max_workspace_bytes=64, **arguments
    )
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = torch.randint(7, (6, *out_features), device=device)
    classes = (7, *out_features)
    expected = composed(
        x,
        module.linear.weight.reshape(*classes, 5),
        target,
        linear_bias=module.linear.bias.reshape(classes) if bias else None,
        weight=weight,
        reduction="sum",
        label_smoothing=0.1,
    )
    loss = module(x, target)
    torch.testing.assert_close(loss, expected)
    parameters = [x, *module.parameters()]
    assert len(parameters) == 2 + bias
    for ours, theirs in zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert "in_features=5" in repr(module)
    if HAS_TORCHS:
        theirs_module = torch.nn.LinearCrossEntropyLoss(5, 7, weight=weight, **arguments)
        assert isinstance(module, torch.nn.LinearCrossEntropyLoss)
        assert theirs_module.state_dict().keys() == module.state_dict().keys()


def test_module_without_torchs() -> None:
    """The base class that stands in where torch has none has the same state and arguments."""
    base = lossops.nn._LinearCrossEntropyLoss
    made = base(5, 7, out_features=(2,), bias=True, weight=torch.ones(7))
    assert made.linear.weight.shape == (14, 5)
    assert set(made.state_dict()) == {"weight", "linear.weight", "linear.bias"}
    for wrong in ({"weight": torch.ones(6)}, {"label_smoothing": 1.5}):
        with pytest.raises(RuntimeError):
            base(5, 7, **wrong)
        with pytest.raises(RuntimeError):
            lossops.LinearCrossEntropyLoss(5, 7, **wrong)


OLDER = """
import torch
import torch.nn.functional as F

for holder, name in (
    (F, "linear_cross_entropy"),
    (torch.nn, "LinearCrossEntropyLoss"),
    (torch.nn, "LinearCrossEntropyOptions"),
):
    if hasattr(holder, name):
        delattr(holder, name)

import lossops

module = lossops.LinearCrossEntropyLoss(5, 7, bias=True, label_smoothing=0.1)
x, target = torch.randn(6, 5, requires_grad=True), torch.arange(6)
with lossops.patched():
    loss = module(x, target)
assert "linear_cross_entropy" not in lossops.patch_report()
expected = F.cross_entropy(module.linear(x), target, label_smoothing=0.1)
torch.testing.assert_close(loss, expected)
leaves = [x, *module.parameters()]
torch.testing.assert_close(
    torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
)
"""


def test_before_torch_2_13() -> None:
    """Where torch has neither the function nor the module nor the options."""
    done = subprocess.run(
        [sys.executable, "-c", OLDER], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_torchs
def test_patch(device: str) -> None:
    call = make(33, 8, 65, device=device, label_smoothing=0.1)
    expected = call.run(lossops.linear_cross_entropy)
    original = F.linear_cross_entropy
    module = torch.nn.LinearCrossEntropyLoss(8, 65, device=device)

    def count() -> tuple[int, int]:
        report = lossops.patch_report()["linear_cross_entropy"]
        return report["lossops"], sum(report["torch"].values())

    ours, theirs = count()
    with lossops.patched():
        found = call.run(lambda **arguments: F.linear_cross_entropy(**arguments))
        module(call.tensors["input"], call.tensors["target"]).backward()
        assert count() == (ours + 2, theirs)
        with pytest.raises(TypeError):  # linear_bias by position: torch refuses it
            F.linear_cross_entropy(*call.tensors.values(), None)
        assert count() == (ours + 2, theirs)
        with torch.no_grad():
            torch.func.vmap(
                lambda x: F.linear_cross_entropy(
                    x, call.tensors["linear_weight"], call.tensors["target"]
                )
            )(call.tensors["input"][None])
        assert count() == (ours + 2, theirs + 1)
    assert F.linear_cross_entropy is original
    for name, value in expected.items():
        assert same_bits(found[name], value)


def test_no_warning(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for reduction in ("mean", "none"):
            call = make(dtype=torch.bfloat16, device=device, bias=True, reduction=reduction)
            call.run(lossops.linear_cross_entropy, max_workspace_bytes=workspace_of(5, call))


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def kept(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether gradients are kept."""
    lossops.keep_gradients(request.param)
    yield request.param
    lossops.keep_gradients(True)


@pytest.mark.usefixtures("kept")
def test_float16_with_probabilities_of_float64(device: str) -> None:
    x = torch.randn(4, 8, device=device).half().requires_grad_()
    linear_weight = torch.randn(5, 8, device=device).half().requires_grad_()
    target = torch.rand(4, 5, dtype=torch.float64, device=device).softmax(-1)
    loss = lossops.linear_cross_entropy(x, linear_weight, target)
    gradients = torch.autograd.grad(loss, (x, linear_weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, linear_weight)]
    exact = F.cross_entropy(F.linear(*wide), target)
    assert loss.dtype == torch.float64
    assert_within(loss, exact.detach(), 2e-3, "loss")
    for found, right in zip(gradients, torch.autograd.grad(exact, wide), strict=True):
        assert_within(found, right, 4e-3 * right.abs().max(), "gradient")


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=str)
def test_weights_of_zero_and_smoothing(options: dict[str, Any], device: str) -> None:
    x = torch.tensor([[0.5, -0.3, 1.0]], device=device, requires_grad=True)
    target = torch.tensor([1], device=device)
    weight = torch.tensor([1.0, 0.0, 2.0], device=device)
    identity = torch.eye(3, device=device)
    found = lossops.linear_cross_entropy(
        x, identity, target, weight=weight, label_smoothing=0.1, **options
    )
    assert (found if isinstance(found, Tensor) else found.loss).isnan()


def test_numbers_beside_another_default_device() -> None:
    x, target = torch.randn(4, 3), torch.randint(5, (4,))
    linear_weight = torch.randn(5, 3)
    right = lossops.linear_cross_entropy(x, linear_weight, target, num_items_in_batch=4)
    with torch.device("meta"):
        found = lossops.linear_cross_entropy(x, linear_weight, target, num_items_in_batch=4)
    assert torch.equal(found, right)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_wrong_ignore_index(options: dict[str, Any], device: str) -> None:
    x = torch.randn(4, 5, device=device, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64, device=device)
    linear_weight = torch.ones(3, 5, device=device)
    for value, error in ((2**64, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^linear_cross_entropy: ignore_index"):
            lossops.linear_cross_entropy(x, linear_weight, target, ignore_index=value, **options)
        with pytest.raises(error, match=r"^cross_entropy: ignore_index"):
            lossops.cross_entropy(x, target, ignore_index=value, **options)
