"""linear_selective_log_softmax against functions of all logits, and in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_raises
from numerics import DTYPES, same_bits
from test_linear_cross_entropy import Counter
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lossops
from lossops._heads import token_passes
from lossops._heads.chunks import padded_classes

per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
NAMES = ("input", "linear_weight", "linear_bias")


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def composed(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    return_entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Any:
    """By torch alone, in the logits' dtype or float32."""
    z = F.linear(input, linear_weight, linear_bias)
    z = z if z.dtype == torch.float64 else z.float()
    mask = torch.ones(z.shape[:-1], device=z.device) if row_mask is None else row_mask
    single = None
    if mask.shape != z.shape[:-1]:
        single, mask = mask == 0, (mask != 0).any(-1)
    z = torch.where((mask == 0).unsqueeze(-1), 0.0, z) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_softmax = (z / temperature).log_softmax(-1)
    is_one = index.dim() == z.dim() - 1
    gathered = log_softmax.gather(-1, index.unsqueeze(-1) if is_one else index)
    gathered = gathered.masked_fill((mask == 0).unsqueeze(-1), 0.0)
    if single is not None:
        gathered = gathered.masked_fill(single, 0.0)
    log_probs = gathered.squeeze(-1) if is_one else gathered
    if not return_entropy:
        return log_probs
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_probs, entropy.masked_fill(mask == 0, 0.0)


class Problem:
    def __init__(
        self,
        device: str,
        dtype: torch.dtype = torch.float32,
        rows: tuple[int, ...] = (13,),
        indices: int | None = None,
        features: int = 6,
        classes: int = 29,
        bias: bool = True,
        masked: str = "",
        **options: Any,
    ) -> None:
        self.tensors = {
            "input": torch.randn(*rows, features).to(dtype).to(device),
            "linear_weight": (torch.randn(classes, features) / 2).to(dtype).to(device),
        }
        if bias:
            self.tensors["linear_bias"] = torch.randn(classes).to(dtype).to(device)
        shape = rows if indices is None else (*rows, indices)
        index = torch.randint(classes, shape, device=device)
        self.options = {"index": index, **options}
        if masked:
            mask_shape = shape if masked == "values" else rows
            self.options["row_mask"] = torch.randint(2, mask_shape, device=device)

    def workspace(self, rows: int) -> int:
        weight = self.tensors["linear_weight"]
        return rows * padded_classes(weight.size(0), weight.dtype) * weight.element_size()

    def leaves(self, double: bool = False) -> dict[str, Tensor]:
        return {
            name: (x.double() if double else x).detach().requires_grad_()
            for name, x in self.tensors.items()
        }

    def run(self, function: Any, *, double: bool = False, **more: Any) -> dict[str, Tensor]:
        """The values and the gradients of a random combination of them."""
        leaves = self.leaves(double)
        values = function(**leaves, **self.options, **more)
        values = values if isinstance(values, tuple) else (values,)
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=generator).to(x) for x in values]
        found = torch.autograd.grad(values, list(leaves.values()), grads)
        results = dict(zip(("log_probs", "entropy"), values, strict=False))
        return results | dict(zip(leaves, found, strict=True))


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert found.keys() == exact.keys()
    for name, value in found.items():
        expected = exact[name].double()
        assert value.shape == expected.shape, name
        if value.numel() > 0:
            error = (value.double() - expected).abs().max()
            allowed = 16 * torch.finfo(dtype).eps * expected.abs().max() + 1e-7
            assert error <= allowed, f"{name}: off by {error:.2g}, allowed {allowed:.2g}"


CASES: dict[str, dict[str, Any]] = {
    "plain": {"bias": False},
    "entropy": {"return_entropy": True},
    "map": {"return_entropy": True, "logit_scale": 1.5, "softcap": 3.0, "temperature": 0.7},
    "scale 0": {"return_entropy": True, "logit_scale": 0.0, "softcap": 3.0},
    "scale below 0": {"logit_scale": -1.0},
    "several indices": {"indices": 3, "return_entropy": True},
    "no index": {"indices": 0, "return_entropy": True},
    "as many indices as classes": {"indices": 29},
    "tokens": {"rows": (3, 5), "return_entropy": True},
    "one row": {"rows": (), "return_entropy": True},
    "one row, several indices": {"rows": (), "indices": 2},
    "no rows": {"rows": (0,), "return_entropy": True},
    "masked": {"masked": "rows", "return_entropy": True},
    "masked values": {"masked": "values", "indices": 3, "return_entropy": True},
    "one class": {"classes": 1},
}


@per_dtype
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, dtype: torch.dtype, device: str) -> None:
    """Chunks of one row, of four rows, and one chunk."""
    problem = Problem(device, dtype, **CASES[name])
    exact = problem.run(composed, double=True)
    for rows in (1, 4, None):
        limit = None if rows is None else problem.workspace(rows)
        found = problem.run(lossops.linear_selective_log_softmax, max_workspace_bytes=limit)
        assert_close(found, exact, dtype)
        value_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for key, value in found.items():
            assert value.dtype == (dtype if key in NAMES else value_dtype), key


def test_the_same_as_of_logits(device: str) -> None:
    """One chunk has the bits of selective_log_softmax_and_entropy of the logits."""
    problem = Problem(device, return_entropy=True, temperature=0.5, classes=32)
    x, weight, bias = problem.tensors.values()
    logits = torch.addmm(bias, x, weight.t())
    index = problem.options["index"]
    expected = lossops.selective_log_softmax_and_entropy(logits, index, temperature=0.5)
    found = lossops.linear_selective_log_softmax(**problem.tensors, **problem.options)
    for value, other in zip(found, expected, strict=True):
        assert same_bits(value, other)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32], ids=str)
def test_dtypes_of_indices(dtype: torch.dtype, device: str) -> None:
    problem = Problem(device)
    expected = problem.run(lossops.linear_selective_log_softmax)
    problem.options["index"] = problem.options["index"].to(dtype)
    for name, value in problem.run(lossops.linear_selective_log_softmax).items():
        assert same_bits(value, expected[name])


def test_masked_rows_are_never_read(device: str) -> None:
    problem = Problem(device, return_entropy=True, masked="rows")
    is_masked = problem.options["row_mask"] == 0
    is_masked[0] = True
    problem.options["row_mask"] = ~is_masked
    problem.options["index"][is_masked] = 10**6
    problem.tensors["input"][is_masked] = torch.nan
    found = problem.run(lossops.linear_selective_log_softmax)
    for name in ("log_probs", "entropy", "input"):
        assert found[name].isfinite().all()
        assert not found[name][is_masked].any()


def test_products_and_memory(device: str) -> None:
    """One product in forward and three in backward, two with a frozen weight; never all logits."""
    rows, classes = 1024, 96
    problem = Problem(device, rows=(rows,), features=4, classes=classes, return_entropy=True)
    index = problem.options["index"].unsqueeze(-1)
    operands = token_passes.TokenOperands(*problem.tensors.values(), index, None)
    limit = problem.workspace(128)
    options = token_passes.TokenOptions(1.0, 1.0, None, True, torch.float32, torch.float32, limit)
    with Counter() as counter:
        found = token_passes.forward(operands, options, with_stats=True)
    assert counter.products == rows // 128
    assert counter.largest <= 128 * classes
    grads = torch.ones_like(found.log_probs), torch.ones_like(found.entropy)
    for needed, count in (([True] * 3, 3), ([True, False, False], 2), ([False, True, False], 2)):
        with Counter() as counter:
            gradients = token_passes.backward(operands, options, needed, grads, found.row_stats)
        assert [x is not None for x in gradients] == needed
        assert counter.products == count * rows // 128
        # Their gradient takes the place of a chunk's logits.
        assert counter.largest <= 128 * classes


def test_nothing_needs_a_gradient(device: str) -> None:
    problem = Problem(device, return_entropy=True)
    with torch.no_grad():
        found = lossops.linear_selective_log_softmax(**problem.leaves(), **problem.options)
    for value in found:
        assert value.grad_fn is None


def test_same_bits_on_every_run(device: str) -> None:
    for dtype in DTYPES:
        problem = Problem(device, dtype, rows=(300,), classes=257, return_entropy=True)
        first, second = (
            problem.run(
                lossops.linear_selective_log_softmax, max_workspace_bytes=problem.workspace(64)
            )
            for _ in range(2)
        )
        for name, value in first.items():
            assert same_bits(value, second[name]), f"{dtype} {name}"


# ---------------------------------------------------------------- graphs


def functions(device: str) -> tuple[Any, Any, tuple[Tensor, ...]]:
    """A scalar of both values by ours and composed, and its leaves."""
    problem = Problem(device, torch.float64, indices=2, return_entropy=True, softcap=4.0)

    def made(function: Any, **more: Any) -> Any:
        def total(*given: Tensor) -> Tensor:
            tensors = dict(zip(NAMES, given, strict=True))
            log_probs, entropy = function(**tensors, **problem.options, **more)
            return (log_probs.sin().sum(-1) * entropy).sum()

        return total

    ours = made(lossops.linear_selective_log_softmax, max_workspace_bytes=problem.workspace(5))
    return ours, made(composed), tuple(problem.leaves().values())


def test_gradcheck(device: str) -> None:
    ours, _, leaves = functions(device)
    assert torch.autograd.gradcheck(
        ours, leaves, check_batched_grad=True, check_forward_ad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)


def test_torch_func(device: str) -> None:
    ours, theirs, leaves = functions(device)
    given = tuple(leaf.detach() for leaf in leaves)
    batch = torch.stack([given[0]] * 2)
    for transform in (
        lambda head: torch.func.grad(head, (0, 1, 2))(*given),
        lambda head: torch.func.jvp(head, given, given),
        lambda head: torch.func.vmap(head, (0, None, None))(batch, *given[1:]),
        lambda head: torch.func.vmap(torch.func.grad(head), (0, None, None))(batch, *given[1:]),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


@pytest.mark.parametrize("kind", ["hooks", "checkpoint", "retain", "one"])
def test_backward_passes(kind: str, device: str) -> None:
    ours, theirs, leaves = functions(device)
    expected = torch.autograd.grad(theirs(*leaves), leaves)
    if kind == "hooks":
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            value = ours(*leaves)
    elif kind == "checkpoint":
        value = checkpoint(ours, *leaves, use_reentrant=False)
    else:
        value = ours(*leaves)
    for run in range(2 if kind == "retain" else 1):
        retain = kind == "retain" and run == 0
        wanted = leaves[1:2] if kind == "one" else leaves
        found = torch.autograd.grad(value, wanted, retain_graph=retain)
        for each, other in zip(found, expected[1:2] if kind == "one" else expected, strict=True):
            torch.testing.assert_close(each, other)


def test_changed_operands(device: str) -> None:
    ours, _, leaves = functions(device)
    x = leaves[0] * 1
    value = ours(x, *leaves[1:])
    x.detach().zero_()
    with pytest.raises(RuntimeError, match="linear_selective_log_softmax: an argument"):
        torch.autograd.grad(value, leaves)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", ["plain", "map", "several indices", "masked values", "tokens"])
def test_compiled(case: str, backend: str, device: str) -> None:
    problem = Problem(device, **CASES[case])
    graph = torch.compile(lossops.linear_selective_log_softmax, backend=backend, fullgraph=True)
    limit = problem.workspace(5)
    found = problem.run(graph, max_workspace_bytes=limit)
    expected = problem.run(lossops.linear_selective_log_softmax, max_workspace_bytes=limit)
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name])


def test_compiled_with_symbolic_sizes(device: str) -> None:
    def loss(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        return lossops.linear_selective_log_softmax(x.tanh(), weight, index).sum()

    graph = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    weight = torch.randn(11, 6, device=device, requires_grad=True)
    for rows in ((4, 3), (5, 7)):
        x = torch.randn(*rows, 6, device=device, requires_grad=True)
        index = torch.randint(11, rows, device=device)
        found = torch.autograd.grad(graph(x, weight, index), (x, weight))
        expected = torch.autograd.grad(composed(x.tanh(), weight, index).sum(), (x, weight))
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each, other)


@pytest.mark.parametrize("has_entropy", [False, True])
def test_operators(has_entropy: bool, device: str) -> None:
    problem = Problem(device, indices=2, masked="rows")
    options = (0.7, 1.5, 3.0, has_entropy, torch.float32, torch.float32, problem.workspace(4))
    index, mask = problem.options["index"], problem.options["row_mask"]
    torch.library.opcheck(
        torch.ops.lossops.linear_token_values_forward.default,
        (*problem.leaves().values(), index, mask, *options, True),
    )
    tensors = (*problem.tensors.values(), index, mask)
    values = torch.ops.lossops.linear_token_values_forward(*tensors, *options, True)
    grads = torch.ones_like(values[0]), torch.ones_like(values[1]) if has_entropy else None
    torch.library.opcheck(
        torch.ops.lossops.linear_token_values_backward.default,
        (*grads, *tensors, values[2], *options, [True] * 3),
    )


def test_second_derivative_of_a_graph_is_refused(device: str) -> None:
    problem = Problem(device)
    options = (1.0, 1.0, None, False, torch.float32, torch.float32, None)
    index = problem.options["index"].unsqueeze(-1)
    tensors = (*problem.leaves().values(), index, None)
    log_probs, _, stats = torch.ops.lossops.linear_token_values_forward(*tensors, *options, True)
    (gradient,) = torch.ops.lossops.linear_token_values_backward(
        torch.ones_like(log_probs), None, *tensors, stats, *options, [True, False, False]
    )
    with pytest.raises(NotImplementedError, match="linear_selective_log_softmax"):
        gradient.sum().backward()


def test_export(device: str) -> None:
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 11, device=device)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return lossops.linear_selective_log_softmax(
                x, self.linear.weight, index, linear_bias=self.linear.bias
            )

    module = Head()
    batch = torch.export.Dim("batch")
    example = (torch.randn(4, 6, device=device), torch.randint(11, (4,), device=device))
    program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
    for rows in (2, 33):
        given = torch.randn(rows, 6, device=device), torch.randint(11, (rows,), device=device)
        assert same_bits(program.module()(*given), module(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    """float32 masters: values and gradients are float32."""
    problem = Problem(device, rows=(64,), features=16, return_entropy=True)
    exact = problem.run(composed, double=True)

    def under(**given: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return lossops.linear_selective_log_softmax(**given)

    for name, value in problem.run(under, max_workspace_bytes=problem.workspace(8)).items():
        assert value.dtype == torch.float32
        error = (value.double() - exact[name]).norm()
        assert error <= 4 * torch.finfo(dtype).eps * exact[name].norm(), name


# ---------------------------------------------------------------- arguments

WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "index none": (TypeError, "index", {"index": None}),
    "index float": (RuntimeError, "index", {"index": torch.randn(6)}),
    "index shape": (RuntimeError, "index", {"index": torch.zeros(5, dtype=torch.long)}),
    "index range": (IndexError, "index 7 at row 5", {"index": torch.arange(2, 8)}),
    "index below 0": (IndexError, "index -1 at row 0", {"index": torch.arange(-1, 5)}),
    "input 0-d": (RuntimeError, "input", {"input": torch.randn(())}),
    "input int": (NotImplementedError, "input", {"input": torch.ones(6, 5, dtype=torch.long)}),
    "input sparse": (NotImplementedError, "input", {"input": torch.randn(6, 5).to_sparse()}),
    "features": (RuntimeError, "linear_weight", {"input": torch.randn(6, 4)}),
    "weight 3-d": (RuntimeError, "linear_weight", {"linear_weight": torch.randn(7, 2, 5)}),
    "weight dtype": (RuntimeError, "linear_weight", {"linear_weight": torch.randn(7, 5).half()}),
    "bias": (RuntimeError, "linear_bias", {"linear_bias": torch.randn(6)}),
    "mask": (RuntimeError, "row_mask", {"row_mask": torch.ones(5)}),
    "mask type": (TypeError, "row_mask", {"row_mask": [1] * 6}),
    "temperature": (ValueError, "temperature", {"temperature": -1.0}),
    "softcap": (TypeError, "softcap", {"softcap": "a"}),
    "return_entropy": (TypeError, "return_entropy", {"return_entropy": 1}),
    "workspace": (ValueError, "max_workspace_bytes", {"max_workspace_bytes": 0}),
    "accum_dtype": (ValueError, "accum_dtype", {"accum_dtype": torch.float64}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    kind, words, wrong = WRONG[name]
    given = {
        "input": torch.randn(6, 5),
        "linear_weight": torch.randn(7, 5, requires_grad=True),
        "index": torch.arange(6),
        "max_workspace_bytes": 128,
    }
    assert_raises(
        kind,
        lambda: lossops.linear_selective_log_softmax(**{**given, **wrong}),
        "linear_selective_log_softmax: ",
        words,
    )


@pytest.mark.cuda
def test_index_out_of_range_on_cuda() -> None:
    problem = Problem("cuda")
    problem.options["index"][5] = 29
    log_probs = lossops.linear_selective_log_softmax(**problem.leaves(), **problem.options)
    assert log_probs.isnan().nonzero().flatten().tolist() == [5]


def test_no_classes(device: str) -> None:
    """Only masked rows can have no classes: any index is out of range."""
    input = torch.randn(3, 4, device=device, requires_grad=True)
    weight = torch.randn(0, 4, device=device)
    index, mask = torch.zeros(3, dtype=torch.long, device=device), torch.zeros(3, device=device)
    values = lossops.linear_selective_log_softmax(input, weight, index, row_mask=mask)
    assert values.tolist() == [0, 0, 0]
    assert torch.autograd.grad(values.sum(), input)[0].count_nonzero() == 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_never_waits_and_can_be_captured(dtype: torch.dtype) -> None:
    problem = Problem("cuda", dtype, rows=(64,), classes=129, return_entropy=True, masked="rows")
    leaves = problem.leaves()

    def step() -> tuple[Tensor, ...]:
        values = lossops.linear_selective_log_softmax(
            **leaves, **problem.options, max_workspace_bytes=problem.workspace(16)
        )
        grads = [torch.ones_like(x) for x in values]
        return torch.autograd.grad(values, list(leaves.values()), grads)

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
