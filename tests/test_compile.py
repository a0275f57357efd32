"""torch.compile without graph breaks, torch.export, static and dynamic shapes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo.compiled_autograd
from functorch.compile import make_boxed_func
from losses import (
    LOSS_IDS,
    LOSSES,
    VARIANT_IDS,
    VARIANTS,
    Loss,
    LossFunction,
    Result,
    Sample,
    Variant,
    evaluate,
)
from numerics import same_bits, ulp
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import lossops
from lossops._ops import inductor

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.*treespec.*LeafSpec"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
    pytest.mark.filterwarnings("ignore:Using a target size"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch.compiler.reset()


def compiled_call(call: LossFunction, sample: Sample, **settings: Any) -> LossFunction:
    """`call` of the sample's options, compiled as one graph."""
    names = [name for name in sample.tensors if name not in ("input", "target")]
    options = dict(sample.options)

    def program(input: Tensor, target: Tensor, *others: Tensor) -> Tensor:
        return call(input, target, **dict(zip(names, others, strict=True)), **options)

    compiled = torch.compile(program, fullgraph=True, **settings)

    def with_names(input: Tensor, target: Tensor, **given: Any) -> Tensor:
        return compiled(input, target, *(given[name] for name in names))

    return with_names


def assert_equal(found: Result, expected: Result, what: str) -> None:
    assert same_bits(found.value, expected.value), f"{what}: value"
    for name, gradient in expected.gradients.items():
        assert same_bits(found.gradients[name], gradient), f"{what}: gradient of {name}"


@pytest.mark.parametrize("reduction", ["none", "mean"])
@per_variant
def test_static_shapes(loss: Loss, variant: Variant, reduction: str, device: str) -> None:
    """One graph, forward and backward, with the bits of eager."""
    sample = variant.sample((6, 9), device=device, reduction=reduction)
    compiled = compiled_call(loss.function, sample, backend="aot_eager", dynamic=False)
    assert_equal(evaluate(compiled, sample), evaluate(loss.function, sample), sample.name)


@per_loss
def test_op_and_module(loss: Loss, device: str) -> None:
    for variant in (loss.variants[0], loss.variants[-1]):
        sample = variant.sample((6, 9), device=device)
        compiled = compiled_call(loss.op, sample, backend="aot_eager", dynamic=False)
        assert_equal(evaluate(compiled, sample), evaluate(loss.op, sample), sample.name)
    sample = loss.variants[0].sample((6, 9), device=device)
    module = torch.compile(loss.module(), fullgraph=True, backend="aot_eager")
    assert_equal(evaluate(module, sample), evaluate(loss.function, sample), "module")


class CountingBackend:
    """Runs graphs as they are, and counts how often one was compiled."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return module.forward


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@per_variant
def test_half_types(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    """With the bits of eager also where Inductor, once loaded, would fuse the gradient."""
    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, dtype=dtype, reduction=reduction)
        compiled = compiled_call(loss.function, sample, backend="aot_eager", dynamic=False)
        assert_equal(evaluate(compiled, sample), evaluate(loss.function, sample), sample.name)


@per_variant
def test_dynamic_shapes(loss: Loss, variant: Variant, device: str) -> None:
    """Other sizes do not compile again."""
    backend = CountingBackend()
    sample = variant.sample((6, 9), device=device)
    compiled = compiled_call(loss.function, sample, backend=backend, dynamic=True)
    for shape in ((6, 9), (11, 9), (5, 17), (64, 33)):
        sample = variant.sample(shape, device=device)
        assert_equal(evaluate(compiled, sample), evaluate(loss.function, sample), sample.name)
    assert backend.graphs == 1


@per_loss
def test_dynamic_shapes_through_autograd(loss: Loss, device: str) -> None:
    for variant in (loss.variants[0], loss.variants[-1]):
        for reduction in ("none", "mean"):
            sample = variant.sample((6, 9), device=device, reduction=reduction)
            compiled = compiled_call(loss.function, sample, backend="aot_eager", dynamic=True)
            for shape in ((6, 9), (11, 9), (5, 17)):
                sample = variant.sample(shape, device=device, reduction=reduction)
                found, expected = evaluate(compiled, sample), evaluate(loss.function, sample)
                assert_equal(found, expected, sample.name)


@per_loss
def test_inductor(loss: Loss, device: str) -> None:
    """The default backend, the loss between other operations that it fuses with each other."""
    variant = loss.variants[0]
    sample = variant.sample((64, 33), device=device).leaves()
    x, t = sample.tensors["input"], sample.tensors["target"]

    def step(x: Tensor, t: Tensor) -> Tensor:
        return 3 * loss.function(x * 0.5, t, **sample.options) + 1

    compiled = torch.compile(step, fullgraph=True)
    (expected,) = torch.autograd.grad(step(x, t), x)
    value = compiled(x, t)
    (gradient,) = torch.autograd.grad(value, x)
    torch.testing.assert_close(value, step(x, t), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("loss", "variant"),
    [pair for pair in VARIANTS if pair[0].name != "cross_entropy"],
    ids=[name for name in VARIANT_IDS if not name.startswith("cross_entropy")],
)
def test_inductor_fuses_gradients(loss: Loss, variant: Variant, device: str) -> None:
    """Of half types it computes those of input itself: no operator, and as exact as ours."""
    torch.compile(torch.sin)(torch.ones(3, device=device))  # a program that has no loss
    for reduction in loss.reductions:
        dtype = torch.bfloat16 if reduction == "sum" else torch.float16
        sample = variant.sample((64, 33), device=device, dtype=dtype, reduction=reduction)
        # As a scaler has it, or gradients of a mean would be subnormal.
        grad_output = torch.full_like(sample.call(loss.function), 1024)
        expected = evaluate(loss.function, sample, grad_output)
        exact = evaluate(loss.function, sample.double(), grad_output.double())
        with inductor_config.patch(force_disable_caches=True):
            compiled = compiled_call(loss.function, sample)
            found, programs = run_and_get_code(evaluate, compiled, sample, grad_output)
        is_called = any(f"torch.ops.lossops.{loss.name}_backward" in code for code in programs)
        is_fused = set(expected.gradients) == {"input"} and "weight" not in sample.tensors
        assert is_called != is_fused, sample.name
        for name, gradient in found.gradients.items():
            error = (gradient.double() - exact.gradients[name]).abs()
            of_ours = (expected.gradients[name].double() - exact.gradients[name]).abs()
            assert (error <= of_ours + ulp(gradient, dtype) / 16).all(), f"{sample.name}: {name}"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if loss.elementwise], ids=lambda x: x.name
)
def test_inductor_fuses_what_stands_ahead(loss: Loss, reduction: str, device: str) -> None:
    """A scale or a cast takes no tensor of its own: the loss is torch's formula then."""
    for dtype, ahead in (
        (torch.float16, lambda x: 0.5 * x),
        (torch.bfloat16, lambda x: x.float()),
        (torch.float32, lambda x: x.exp()),
    ):
        sample = loss.variants[0].sample((64, 33), device=device, reduction=reduction)
        x, t = (sample.tensors[name].detach().to(dtype) for name in ("input", "target"))

        def step(call: LossFunction, x: Tensor, t: Tensor) -> list[Tensor]:
            leaves = [x.detach().requires_grad_(), t.detach().requires_grad_()]
            value = call(*leaves)
            return [value, *torch.autograd.grad(value, leaves, torch.full_like(value, 64.0))]

        def program(x: Tensor, t: Tensor, ahead: Any = ahead, sample: Sample = sample) -> Tensor:
            return loss.function(ahead(x), t, **sample.options)

        with inductor_config.patch(force_disable_caches=True):
            compiled = torch.compile(program, fullgraph=True)
            found, programs = run_and_get_code(step, compiled, x, t)
        assert not any("torch.ops.lossops" in code for code in programs)
        exact = step(program, x.double(), t.double())
        tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        for ours, expected, like in zip(found, exact, step(program, x, t), strict=True):
            assert ours.dtype == like.dtype
            torch.testing.assert_close(
                ours.double(),
                expected,
                rtol=tolerance,
                atol=tolerance * expected.detach().abs().max().item(),
            )


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if loss.elementwise], ids=lambda x: x.name
)
def test_inductor_calls_operators_for_products(loss: Loss, device: str) -> None:
    """What is in memory anyway the operator reads faster."""
    weight = torch.randn(33, 16, device=device).bfloat16()
    hidden = torch.randn(4, 8, 16, device=device).bfloat16().requires_grad_()
    target = torch.rand(4, 8, 33, device=device).softmax(-1).bfloat16()
    bias = torch.randn(33, device=device).bfloat16().requires_grad_()

    def program(hidden: Tensor, bias: Tensor) -> Tensor:
        output = torch.nn.functional.linear(hidden, weight, bias)
        if loss.name == "kl_div":
            output = output.log_softmax(-1)
        return loss.function(output, target, reduction="sum")

    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(program, fullgraph=True)
        _, programs = run_and_get_code(lambda: compiled(hidden, bias).backward())
    assert f"torch.ops.lossops.{loss.name}_forward" in programs[0]


GRAPH_OPERATORS = [line.partition("(")[0] for line in torch.ops.lossops.schemas().splitlines()]


def test_operators_take_any_layout() -> None:
    """What the compiler knows of them; it copies the operands of other operators."""
    assert "cross_entropy_forward" in GRAPH_OPERATORS and "mse_loss_backward" in GRAPH_OPERATORS
    for name in GRAPH_OPERATORS:
        assert torch.Tag.flexible_layout in getattr(torch.ops.lossops, name).default.tags, name


def kernels_of(program: str) -> list[str]:
    """The lines of a compiled program that call a kernel of the compiler's own."""
    lines = program.partition("def call(")[2].partition("def get_args")[0].splitlines()
    return [line.strip() for line in lines if re.search(r"cpp_fused\w*\(|triton_\w*\.run\(", line)]


def test_inductor_does_not_copy_padded_logits(device: str) -> None:
    """What it computes itself it lays out in padded rows; the operators read those."""
    x, t = torch.randn(16, 1033, device=device), torch.randint(1033, (16,), device=device)

    def program(x: Tensor, t: Tensor) -> Tensor:
        return lossops.cross_entropy(x * 0.5, t)

    settings = {"force_disable_caches": True, "disable_padding_cpu": False}
    with torch.no_grad(), inductor_config.patch(settings):
        found, (code,) = run_and_get_code(torch.compile(program, fullgraph=True), x, t)
    torch.testing.assert_close(found, program(x, t))
    (padded,) = re.findall(r"empty_strided_\w+\(\(16, 1033\), \((\d+), 1\)", code)
    assert int(padded) > 1033
    assert len(kernels_of(code)) == 1


class Head(NamedTuple):
    """A linear layer and its loss: one step, compiled by Inductor, and in float64."""

    programs: list[str]
    found: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]


def of_head(
    function: Callable[[Tensor, Tensor], Tensor],
    operands: tuple[Tensor, Tensor, Tensor],
    grad_output: float = 1.0,
) -> Head:
    """function takes what the layer computes, and the target."""

    def step(call: Callable[..., Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        hidden, weight, target = operands
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = call(*leaves, target)
        grads = torch.autograd.grad(loss, leaves, torch.full_like(loss, grad_output))
        return loss.detach(), *grads

    def head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return function(torch.nn.functional.linear(hidden, weight), target)

    hidden, weight, target = operands
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(head, fullgraph=True, dynamic=False)
        found, programs = run_and_get_code(step, compiled, *operands)
    return Head(programs, found, step(head, hidden.double(), weight.double(), target))


def assert_near(head: Head) -> None:
    """As exact as products of bfloat16 allow."""
    for found, exact in zip(head.found, head.exact, strict=True):
        assert (found.double() - exact).norm() <= 0.01 * exact.norm()


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x.view(-1, x.size(-1)),
    "cast": lambda x: x.float().view(-1, x.size(-1)),
    "2-d cast": lambda x: x.view(-1, x.size(-1)).float(),
}


@pytest.fixture(params=["operator", "rows"])
def by_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether Inductor computes forward of cast logits, as on a GPU for odd vocabularies."""
    is_by_rows: bool = request.param == "rows"
    monkeypatch.setattr(inductor, "_may_be_padded", lambda _: is_by_rows)
    return is_by_rows


def logits_of(head: Head, classes: int) -> list[str]:
    """The lines that allocate tensors of the size of the logits, or of their gradient."""
    return [
        line
        for program in head.programs
        for line in program.partition("def call(")[2].splitlines()
        if "= empty_strided" in line and str(classes) in line and f"({classes}, 16)" not in line
    ]


@pytest.mark.parametrize("ahead", HEADS)
def test_inductor_takes_heads_in_place(
    ahead: str, by_rows: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits in float32, and one tensor of their size: the gradient is written over them."""
    # As on a GPU: there Inductor does not keep an exponential because it is used twice.
    monkeypatch.setattr(inductor, "_may_have_plain_rows", lambda _: True)
    monkeypatch.setattr("torch._inductor.ir.is_cpu", lambda _: False, raising=False)

    def head_of(classes: int, loss: Callable[..., Tensor]) -> Head:
        torch.manual_seed(0)
        hidden = torch.randn(2, 24, 16, device=device).bfloat16()
        weight = torch.randn(classes, 16, device=device).bfloat16()
        target = torch.randint(classes, (48,), device=device)
        target[::5] = -100
        return of_head(lambda x, t: loss(HEADS[ahead](x), t), (hidden, weight, target))

    head = head_of(256, lossops.cross_entropy)
    assert_near(head)
    assert head.found[0].dtype == (torch.bfloat16 if ahead == "plain" else torch.float32)
    forward, backward = head.programs
    is_operator = ahead == "plain" or not by_rows
    assert ("lossops.cross_entropy_forward" in forward) == is_operator
    assert "lossops" not in backward
    of_logits = logits_of(head, 256)
    assert len(of_logits) == 1 and "torch.bfloat16" in of_logits[0], of_logits
    # Inductor pads gradients of an odd size on a GPU, and copies them then: those of any loss.
    with inductor_config.patch(disable_padding_cpu=False):
        odd, of_torch = (
            head_of(257, loss)
            for loss in (lossops.cross_entropy, torch.nn.functional.cross_entropy)
        )
    of_logits = logits_of(odd, 257)
    assert all("torch.bfloat16" in line for line in of_logits), of_logits
    assert len(of_logits) <= len(logits_of(of_torch, 257)), (of_logits, of_torch.programs)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none"}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_cast_logits(
    options: dict[str, Any], weighted: bool, by_rows: bool, device: str
) -> None:
    """Ignored rows, class weights, logits that are infinite, one class that is nearly certain."""
    torch.manual_seed(0)
    x = torch.randn(12, 33, device=device)
    t = torch.randint(33, (12,), device=device)
    x[0, 5], t[0] = 17.0, 5  # p = 1 - 1e-6
    x[1, 5], t[1] = 17.0, 6
    x[2, 3] = -torch.inf
    x[3], t[3] = torch.nan, -100
    x[4] = -torch.inf
    x[4, 7], t[4] = 3.0, 7
    t[5] = -100
    half = x.bfloat16()
    weight = torch.rand(33, device=device) if weighted else None
    grad_output = torch.rand(12 if options.get("reduction") == "none" else (), device=device)

    def loss(half: Tensor, t: Tensor) -> Tensor:
        return lossops.cross_entropy(half.float(), t, weight, **options)

    found, exact = [], []
    with inductor_config.patch(force_disable_caches=True):
        compiled = torch.compile(loss, fullgraph=True)
        for call, results in ((compiled, found), (loss, exact)):
            leaf = half.detach().requires_grad_()
            value = call(leaf, t)
            results += [value, *torch.autograd.grad(value, leaf, grad_output)]
    torch.testing.assert_close(found[0], exact[0], rtol=2e-6, atol=1e-9)
    torch.testing.assert_close(found[1], exact[1], rtol=2**-7, atol=1e-12)


def other_values(x: Tensor) -> Tensor:
    cast = x.float()
    with torch.no_grad():
        cast.mul_(1.0009765625)  # what bfloat16 does not hold
    return cast


def values_of_a_view(x: Tensor) -> Tensor:
    cast = x.view(3, -1, x.size(-1)).float()
    with torch.no_grad():
        cast[0].mul_(1.0009765625)
    return cast.view(-1, x.size(-1))


CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "changed in place": other_values,
    "view changed in place": values_of_a_view,
    "part": lambda x: x.float()[:, 1:],
    "transposed": lambda x: x.float().t(),
    "twice": lambda x: x.float().double().float(),
    "scaled": lambda x: x.float() * 1.0009765625,
    "of float64": lambda x: x.double().float(),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_is_no_cast_of_half_logits(name: str, device: str) -> None:
    """Nothing is rounded to the half type that the values had before."""
    torch.manual_seed(0)
    x = torch.randn(33, 33, device=device).bfloat16().requires_grad_()
    t = torch.randint(32, (33,), device=device)

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return lossops.cross_entropy(CASTS[name](x), t, reduction="sum")

    with inductor_config.patch(force_disable_caches=True):
        found = torch.compile(loss, fullgraph=True)(x, t)
    torch.testing.assert_close(found, loss(x, t), rtol=2e-6, atol=0)
    torch.testing.assert_close(
        *(torch.autograd.grad(value, x)[0] for value in (found, loss(x, t))), rtol=2**-7, atol=1e-6
    )


def test_other_compilers_get_operators(device: str) -> None:
    """Also where Inductor is loaded."""
    torch.compile(torch.sin)(torch.ones(3, device=device))
    graphs: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module.print_readable(print_output=False))
        return make_boxed_func(module.forward)

    x = torch.randn(8, 33, device=device).bfloat16().requires_grad_()
    t = torch.randint(33, (8,), device=device)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    step = torch.compile(lambda x, t: lossops.cross_entropy(x.float(), t), backend=backend)
    step(x, t).backward()
    forward, backward = graphs
    assert "lossops.cross_entropy_forward" in forward
    assert "lossops.cross_entropy_backward" in backward


FIRST_PROGRAM = """
import torch
import lossops

for call, shape in ((lossops.mse_loss, (8, 8)), (lossops.kl_div, ())):
    x = torch.full(shape, -0.5, dtype=torch.float16, requires_grad=True)
    t = torch.full(shape, 0.5, dtype=torch.float16)
    options = {} if call is lossops.mse_loss else {"reduction": "batchmean"}
    compiled = torch.compile(lambda x, t: call(x, t, **options), fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x, t), x)
    (expected,) = torch.autograd.grad(call(x, t, **options), x)
    assert torch.equal(found, expected), (found, expected)
"""


def test_first_program_of_a_process() -> None:
    """Inductor is loaded while the loss is traced; and batchmean of no batch."""
    subprocess.run([sys.executable, "-c", FIRST_PROGRAM], check=True, timeout=300)


@per_loss
def test_training_loop_in_one_graph(loss: Loss, device: str) -> None:
    """A model and its loss, backward included, under autocast."""
    torch.manual_seed(0)
    sample = loss.variants[0].sample((16, 8), device=device)
    model = torch.nn.Linear(4, 8).to(device)
    data = torch.randn(16, 4, device=device)
    target = sample.tensors["target"]

    def step(data: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss.function(model(data), target, **sample.options)

    gradients = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        value = function(data, target)
        assert value.dtype == torch.float32
        gradients.append(torch.autograd.grad(value, list(model.parameters())))
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-2, atol=1e-4)


def run_backward(value: Tensor, x: Tensor, compiler: Callable[..., Any] | None) -> Tensor:
    """The gradient of the leaf x, by compiled autograd if there is a compiler."""
    x.grad = None
    if compiler is None:
        value.backward()
    else:
        with torch._dynamo.compiled_autograd._enable(compiler):
            value.backward()
    assert x.grad is not None
    return x.grad


@per_loss
def test_compiled_autograd(loss: Loss) -> None:
    """The backward pass of an eager forward pass, in one graph."""
    options: list[dict[str, Any]] = [{}, {"reduction": "none"}]
    if not loss.elementwise:
        options.append({"inplace_backward": True})
    for option in options:
        sample = loss.variants[0].sample((6, 9)).with_options(**option)
        x = sample.tensors["input"].requires_grad_()
        gradients = []
        for backend in (None, torch.compile(backend="eager", fullgraph=True)):
            value = sample.with_tensors(input=x * 1).call(loss.function).sum()
            gradients.append(run_backward(value, x, backend))
        assert same_bits(gradients[0], gradients[1]), sample.name


@pytest.mark.parametrize(
    "function",
    [
        lambda x, index: lossops.selective_log_softmax(x, index),
        lambda x, index: lossops.entropy_from_logits(x),
        lambda x, index: lossops.cross_entropy(x, index, softcap=2.0, reduction="none"),
    ],
    ids=["selective_log_softmax", "entropy_from_logits", "cross_entropy"],
)
@pytest.mark.parametrize("order", [1, 2])
def test_compiled_autograd_of_row_values(order: int, function: Callable[..., Tensor]) -> None:
    x = torch.randn(6, 9, requires_grad=True)
    index = torch.randint(0, 9, (6,))
    gradients = []
    for backend in (None, torch.compile(backend="eager")):
        value = function(x * 1, index).square().sum()
        if order == 2:
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            value = gradient.square().sum()
        gradients.append(run_backward(value, x, backend))
    torch.testing.assert_close(*gradients)


class AllLosses(torch.nn.Module):
    def forward(self, *operands: tuple[Tensor, Tensor]) -> list[Tensor]:
        return [
            loss.function(*pair, **loss.variants[0].options)
            for loss, pair in zip(LOSSES, operands, strict=True)
        ]


@per_loss
def test_export(loss: Loss) -> None:
    sample = loss.variants[0].sample((6, 9))

    class Program(torch.nn.Module):
        def forward(self, input: Tensor, target: Tensor) -> Tensor:
            return loss.function(input, target, **sample.options)

    operands = (sample.tensors["input"], sample.tensors["target"])
    exported = torch.export.export(Program(), operands)
    assert same_bits(exported.module()(*operands), sample.call(loss.function))
    names = {str(node.target) for node in exported.graph.nodes}
    assert any("lossops" in name for name in names), names


@pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="this torch ends the process when it loads such a program"
)
def test_aot_inductor(tmp_path: Path) -> None:
    """A program compiled ahead of time, saved, and loaded again."""
    program = AllLosses()
    samples = [loss.variants[0].sample((6, 9)) for loss in LOSSES]
    operands = tuple((s.tensors["input"], s.tensors["target"]) for s in samples)
    exported = torch.export.export(program, operands)
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "losses.pt2")
    )
    found = torch._inductor.aoti_load_package(package)(*operands)
    for actual, expected, loss in zip(found, program(*operands), LOSSES, strict=True):
        assert same_bits(actual, expected), loss.name
