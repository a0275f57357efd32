"""linear_cross_entropy in graphs: backward passes, hooks, transforms, autocast, compilers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import same_bits
from test_linear_cross_entropy import Call, composed, make, workspace_of
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import lossops
from lossops._heads import passes

per_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
WANTED = ("input", "linear_weight", "linear_bias")


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Passes:
    """Counts the forward and the backward passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"forward": 0, "backward": 0}
        for name in self.counts:
            monkeypatch.setattr(passes, name, self._counted(name, getattr(passes, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return function(*args, **kwargs)

        return counted

    def taken(self) -> tuple[int, int]:
        found = self.counts["forward"], self.counts["backward"]
        self.counts.update(forward=0, backward=0)
        return found


def problem(
    device: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Call, list[Tensor], dict[str, Any]]:
    """A call, its leaves, and its arguments with these leaves and with chunks of five rows."""
    call = make(13, 6, 11, dtype=dtype, device=device, bias=True, **options)
    leaves = [call.tensors[name].clone().requires_grad_() for name in WANTED]
    arguments = {**call.tensors, **dict(zip(WANTED, leaves, strict=True)), **call.options}
    arguments["max_workspace_bytes"] = workspace_of(5, call)
    return call, leaves, arguments


def assert_gradients(found: Any, expected: Any) -> None:
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other.to(each.dtype))


def expected_of(call: Call, grad: Tensor | None = None) -> list[Tensor]:
    found = call.run(composed, grad)
    return [found[name] for name in WANTED]


# ---------------------------------------------------------------- backward passes


@per_reduction
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_retain_graph(
    reduction: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first backward pass of a reduced loss takes the kept gradients, others compute again."""
    call, leaves, arguments = problem(device, dtype, reduction=reduction)
    counter = Passes(monkeypatch)
    loss = lossops.linear_cross_entropy(**arguments)
    assert counter.taken() == (1, 0)
    for run, factor in enumerate((0.5, 1.0, 2.0)):
        grad = torch.full_like(loss, factor)
        found = torch.autograd.grad(loss, leaves, grad, retain_graph=True)
        assert counter.taken() == (0, 1 if run or reduction == "none" else 0)
        exact = expected_of(call.double(), grad)
        for each, other in zip(found, exact, strict=True):
            error = (each.double() - other).abs().max() / other.abs().max()
            assert error <= 4 * torch.finfo(dtype).eps
        for each in found:
            each.zero_()  # theirs to change


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_accumulates_and_scales(reduction: str, device: str) -> None:
    call, leaves, arguments = problem(device, reduction=reduction)
    expected = expected_of(call)
    for factor in (1, 3):
        (lossops.linear_cross_entropy(**arguments).sum() * factor).backward()
    for leaf, each in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, each * 4)


@per_reduction
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_some_gradients(reduction: str, wanted: tuple[int, ...], device: str) -> None:
    """Of leaves that need no gradient, and of leaves that the backward pass is not asked for."""
    call, leaves, arguments = problem(device, reduction=reduction)
    expected = [expected_of(call)[i] for i in wanted]
    loss = lossops.linear_cross_entropy(**arguments)
    found = torch.autograd.grad(loss, [leaves[i] for i in wanted], torch.ones_like(loss))
    assert_gradients(found, expected)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    loss = lossops.linear_cross_entropy(**arguments)
    assert_gradients(
        torch.autograd.grad(loss, [leaves[i] for i in wanted], torch.ones_like(loss)), expected
    )


def test_nothing_needs_a_gradient(device: str) -> None:
    call, _, arguments = problem(device)
    expected = lossops.linear_cross_entropy(**arguments).detach()
    with torch.no_grad():
        loss = lossops.linear_cross_entropy(**arguments)
    assert loss.grad_fn is None
    assert same_bits(loss, expected)
    arguments.update(call.tensors)
    loss = lossops.linear_cross_entropy(**arguments)
    assert not loss.requires_grad
    assert same_bits(loss, expected)


def test_tied_weight(device: str) -> None:
    """A weight that is an embedding too, and a weight that is the input."""
    tokens = torch.randint(11, (13,), device=device)
    target = torch.randint(11, (13,), device=device)
    weight = torch.randn(11, 6, device=device, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(head(F.embedding(tokens, weight), weight, target), weight)[0]
        for head in (lossops.linear_cross_entropy, composed)
    )
    torch.testing.assert_close(found, expected)
    found, expected = (
        torch.autograd.grad(head(weight, weight, target[:11]), weight)[0]
        for head in (lossops.linear_cross_entropy, composed)
    )
    torch.testing.assert_close(found, expected)


def test_changed_operands(device: str) -> None:
    """The kept gradient answers; what has to be computed again raises and says what to do."""
    call, leaves, arguments = problem(device)
    arguments["input"] = leaves[0] * 1
    loss = lossops.linear_cross_entropy(**arguments)
    arguments["input"].detach().zero_()
    assert_gradients(torch.autograd.grad(loss, leaves, retain_graph=True), expected_of(call))
    with pytest.raises(RuntimeError, match="linear_cross_entropy: an argument of the loss"):
        torch.autograd.grad(loss, leaves)


def test_kept_gradients_die_with_the_loss(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cycle of references, which would hold them until Python looks for cycles."""
    forward, kept = passes.forward, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        kept.append(weakref.ref(found.kept.gradients[1]))
        return found

    monkeypatch.setattr(passes, "forward", watched)
    _, _, arguments = problem(device)
    gc.disable()
    try:
        loss = lossops.linear_cross_entropy(**arguments)
        assert kept[0]() is not None
        del loss
        assert kept[0]() is None
    finally:
        gc.enable()


def test_settings(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Passes(monkeypatch)
    lossops.keep_gradients(False)
    try:
        call, leaves, arguments = problem(device)
        found = torch.autograd.grad(lossops.linear_cross_entropy(**arguments), leaves)
    finally:
        lossops.keep_gradients(True)
    assert counter.taken() == (1, 1)
    assert_gradients(found, expected_of(call))


@per_reduction
@pytest.mark.parametrize("kind", ["hooks", "save_on_cpu", "checkpoint", "reentrant"])
def test_saved_tensor_hooks(kind: str, reduction: str, device: str) -> None:
    call, leaves, arguments = problem(device, reduction=reduction)

    def head(*tensors: Tensor) -> Tensor:
        given = dict(zip(WANTED, tensors, strict=True))
        return lossops.linear_cross_entropy(**{**arguments, **given})

    if kind == "hooks":
        with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            loss = head(*leaves)
    elif kind == "save_on_cpu":
        with save_on_cpu():
            loss = head(*leaves)
    else:
        loss = checkpoint(head, *leaves, use_reentrant=kind == "reentrant")
    loss.sum().backward()
    assert_gradients([leaf.grad for leaf in leaves], expected_of(call))


def test_nothing_is_kept_under_hooks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Passes(monkeypatch)
    _, leaves, arguments = problem(device)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        loss = lossops.linear_cross_entropy(**arguments)
    torch.autograd.grad(loss, leaves)
    assert counter.taken() == (1, 1)


# ---------------------------------------------------------------- other derivatives


@per_reduction
@pytest.mark.parametrize("probabilities", [False, True])
def test_gradcheck(reduction: str, probabilities: bool, device: str) -> None:
    """First and second derivatives, forward mode, batched gradients; of the target too."""
    call, _, arguments = problem(
        device, reduction=reduction, probabilities=probabilities, weighted=True
    )
    names = call.differentiable()
    assert len(names) == (5 if probabilities else 3)
    leaves = [call.tensors[name].clone().requires_grad_() for name in names]

    def head(*tensors: Tensor) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        return lossops.linear_cross_entropy(**{**arguments, **given})

    assert torch.autograd.gradcheck(
        head, leaves, check_batched_grad=True, check_forward_ad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(head, leaves, fast_mode=True)


def test_create_graph(device: str) -> None:
    """A penalty on the gradient, beside the loss itself."""
    _, leaves, arguments = problem(device)
    results = []
    for head in (lossops.linear_cross_entropy, composed):
        given = dict(arguments)
        if head is composed:
            del given["max_workspace_bytes"]
        loss = head(**given)
        (gradient,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        results.append(torch.autograd.grad(loss + gradient.square().sum(), leaves))
    assert_gradients(*results)


@per_reduction
def test_torch_func(reduction: str, device: str) -> None:
    _, leaves, arguments = problem(device, reduction=reduction)
    limit = arguments.pop("max_workspace_bytes")
    x, weight = (leaf.detach() for leaf in leaves[:2])

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        given = {**arguments, "input": x, "linear_weight": weight, "max_workspace_bytes": limit}
        return lossops.linear_cross_entropy(**given).sum()

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        return composed(**{**arguments, "input": x, "linear_weight": weight}).sum()

    batch = torch.stack([x, 2 * x])
    for transform in (
        lambda head: torch.func.grad(head, (0, 1))(x, weight),
        lambda head: torch.func.jvp(head, (x, weight), (x, weight)),
        lambda head: torch.func.vmap(head, (0, None))(batch, weight),
        lambda head: torch.func.vmap(torch.func.grad(head), (0, None))(batch, weight),
        lambda head: torch.func.hessian(head)(x, weight),
        lambda head: torch.func.functionalize(head)(x, weight),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


def test_jit_trace(device: str) -> None:
    _, leaves, arguments = problem(device)
    x, weight = (leaf.detach() for leaf in leaves[:2])
    target = arguments["target"]
    traced = torch.jit.trace(lossops.linear_cross_entropy, (x, weight, target))
    torch.testing.assert_close(traced(2 * x, weight, target), composed(2 * x, weight, target))


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, chunked: bool, device: str) -> None:
    """float32 masters: gradients are float32, and nearer to float64 than torch's."""
    call = make(64, 16, 65, device=device, bias=True, weighted=True)
    exact = call.double().run(composed)
    limit = workspace_of(8, call) if chunked else None

    def under(function: Any, **more: Any) -> dict[str, Tensor]:
        def loss(**arguments: Any) -> Tensor:
            with torch.autocast(device, dtype=dtype):
                return function(**arguments, **more)

        return call.run(loss)

    ours = under(lossops.linear_cross_entropy, max_workspace_bytes=limit)
    theirs = under(composed)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype == torch.float32
        errors = [(each[name].double() - exact[name]).norm() for each in (ours, theirs)]
        floor = torch.finfo(dtype).eps / 16 * exact[name].norm()
        assert errors[0] <= 1.1 * errors[1] + floor, name
    assert not torch.equal(ours["linear_weight"], ours["linear_weight"].to(dtype).float()), (
        "the gradient of a float32 weight was rounded to the dtype of the products"
    )


def test_autocast_of_other_dtypes(device: str) -> None:
    """A mixture goes together under autocast alone; float64 is left as it is."""
    call = make(device=device)
    mixed = {**call.tensors, "input": call.tensors["input"].bfloat16()}
    with pytest.raises(RuntimeError, match="linear_weight must have input's dtype"):
        lossops.linear_cross_entropy(**mixed)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = lossops.linear_cross_entropy(**mixed)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, composed(**mixed), atol=1e-2, rtol=0)
        exact = lossops.linear_cross_entropy(**call.double().tensors)
    torch.testing.assert_close(exact, composed(**call.double().tensors))


# ---------------------------------------------------------------- compilers


@per_reduction
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compiled(backend: str, reduction: str, dtype: torch.dtype, device: str) -> None:
    call = make(13, 6, 11, dtype=dtype, device=device, bias=True, reduction=reduction)
    limit = workspace_of(5, call)
    graph = torch.compile(lossops.linear_cross_entropy, backend=backend, fullgraph=True)
    found = call.run(graph, max_workspace_bytes=limit)
    for name, value in call.run(lossops.linear_cross_entropy, max_workspace_bytes=limit).items():
        torch.testing.assert_close(found[name], value)
    with torch.no_grad():
        loss = graph(**call.tensors, **call.options, max_workspace_bytes=limit)
    assert same_bits(loss, found["loss"])


def test_compiled_as_a_part(device: str) -> None:
    """Symbolic sizes, tokens, probabilities with gradients, autocast."""

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return lossops.linear_cross_entropy(x.tanh(), weight, target, label_smoothing=0.1)

    def reference(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return composed(x.tanh(), weight, target, label_smoothing=0.1)

    graph = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    weight = torch.randn(11, 6, device=device, requires_grad=True)
    for shape in ((4, 3), (5, 7), (2, 2)):
        x = torch.randn(*shape, 6, device=device, requires_grad=True)
        target = torch.randint(11, shape, device=device)
        for _ in range(2):
            value = graph(x, weight, target)
            expected = torch.autograd.grad(reference(x, weight, target), (x, weight))
            assert_gradients(torch.autograd.grad(value, (x, weight)), expected)
            target = torch.randn(*shape, 11, device=device).softmax(-1).requires_grad_()
    x = torch.randn(4, 6, device=device)
    target = torch.randint(11, (4,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert same_bits(graph(x, weight, target), loss(x, weight, target))


def test_operators(device: str) -> None:
    for probabilities in (False, True):
        call = make(9, 6, 11, device=device, bias=True, weighted=True, probabilities=probabilities)
        tensors = [call.tensors[name].requires_grad_(name in WANTED) for name in WANTED]
        tensors += [call.tensors["target"], call.tensors["weight"]]
        options = (-100, "mean", 0.1, False, torch.float32, torch.float32, torch.float32, 200, None)
        kept = [True, True, True]
        torch.library.opcheck(
            torch.ops.lossops.linear_cross_entropy_forward.default, (*tensors, *options, kept, True)
        )
        mask = [True, True, True, probabilities, probabilities]
        torch.library.opcheck(
            torch.ops.lossops.linear_cross_entropy_backward.default,
            (torch.ones((), device=device), *[x.detach() for x in tensors], None, *options, mask),
        )


def test_second_derivative_of_a_graph_is_refused(device: str) -> None:
    _, leaves, arguments = problem(device, reduction="none")
    operator = torch.ops.lossops.linear_cross_entropy_backward.default
    grad = torch.ones(13, dtype=torch.float64, device=device)
    options = (-100, "none", 0.0, False, torch.float64, torch.float64, torch.float64, None, None)
    target = arguments["target"]
    mask = [True, False, False, False, False]
    (gradient,) = operator(grad, *leaves, target, None, None, *options, mask)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy"):
        gradient.sum().backward()


def test_make_fx(device: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    call, leaves, arguments = problem(device)

    def step(*tensors: Tensor) -> Any:
        given = {**arguments, **dict(zip(WANTED, tensors, strict=True))}
        return torch.autograd.grad(lossops.linear_cross_entropy(**given), tensors)

    graph = make_fx(step)(*leaves)
    assert "linear_cross_entropy_forward" in graph.code
    assert_gradients(graph(*leaves), expected_of(call))


def test_export(device: str) -> None:
    module = lossops.LinearCrossEntropyLoss(6, 11, bias=True, device=device)
    batch = torch.export.Dim("batch")
    example = (torch.randn(4, 6, device=device), torch.randint(11, (4,), device=device))
    program = torch.export.export(module, example, dynamic_shapes=({0: batch}, {0: batch}))
    loaded = program.module()
    for rows in (2, 4, 33):
        given = torch.randn(rows, 6, device=device), torch.randint(11, (rows,), device=device)
        assert same_bits(loaded(*given), module(*given))


# ---------------------------------------------------------------- CUDA


@pytest.mark.cuda
@per_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_never_waits_and_can_be_captured(reduction: str, dtype: torch.dtype) -> None:
    call = make(
        64, 32, 129, dtype=dtype, device="cuda", bias=True, weighted=True, reduction=reduction
    )
    leaves = [call.tensors[name].requires_grad_() for name in WANTED]
    limit = workspace_of(16, call)

    def step() -> tuple[Tensor, ...]:
        loss = lossops.linear_cross_entropy(
            **call.tensors, **call.options, max_workspace_bytes=limit
        )
        return torch.autograd.grad(loss, leaves, torch.ones_like(loss))

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


@pytest.mark.cuda
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory_on_cuda(frozen: bool, logits_dtype: torch.dtype | None) -> None:
    """One step takes the gradients, the sums, and the workspace; without a weight's gradient, dX
    and the workspace. A 64th of float32 logits is in the half type too."""
    rows, features, classes = 4096, 256, 32001
    call = make(rows, features, classes, dtype=torch.bfloat16, device="cuda")
    x = call.tensors["input"].requires_grad_()
    weight = call.tensors["linear_weight"].requires_grad_(not frozen)
    workspace = 32 << 20
    wanted = [x] if frozen else [x, weight]

    def step() -> None:
        loss = lossops.linear_cross_entropy(
            x,
            weight,
            call.tensors["target"],
            max_workspace_bytes=workspace,
            logits_dtype=logits_dtype,
        )
        torch.autograd.grad(loss, wanted)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * rows * features + (0 if frozen else 4 * classes * features)
    converted = 0 if frozen else 2 * classes * features
    in_half_type = 0 if logits_dtype is None else workspace // 128
    assert peak <= gradients + max(workspace + in_half_type, converted) + (4 << 20)
