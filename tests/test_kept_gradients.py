"""Gradients that the forward pass leaves: the same bits as those of a backward pass, always."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from losses import LOSSES, VARIANT_IDS, VARIANTS, Loss, Sample, Variant
from numerics import DTYPES, layouts_of, same_bits
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import lossops
from lossops._ops import settings

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    lossops.keep_gradients(True)


INPUT = ("input",)
WANTED = (INPUT, ("target",), ("input", "target"))


def gradients_of(
    loss: Loss,
    sample: Sample,
    wanted: tuple[str, ...],
    grad_output: float = 1.0,
    *,
    kept: bool = True,
) -> tuple[Tensor, ...]:
    lossops.keep_gradients(kept)
    # of the same memory
    leaves = {name: sample.tensors[name].detach().requires_grad_() for name in wanted}
    value = sample.with_tensors(**leaves).call(loss.function)
    is_kept = getattr(value.grad_fn, "kept", None) is not None
    assert is_kept == (kept and keeps(loss, sample, wanted)), f"{sample.name} {wanted}"
    found = torch.autograd.grad(value, list(leaves.values()), torch.full_like(value, grad_output))
    assert getattr(value.grad_fn, "kept", None) is None
    with torch.no_grad():
        alone = sample.call(loss.function)
    assert same_bits(value, alone), f"{sample.name}: the loss depends on who wants a gradient"
    return found


def gradient_of_input(
    loss: Loss, sample: Sample, grad_output: float = 1.0, *, kept: bool = True
) -> Tensor:
    (gradient,) = gradients_of(loss, sample, INPUT, grad_output, kept=kept)
    return gradient


def keeps(loss: Loss, sample: Sample, wanted: tuple[str, ...] = INPUT) -> bool:
    """Whether this call is one whose forward pass computes the gradients."""
    if sample.options.get("reduction") == "none":
        return False
    if not loss.elementwise:
        return wanted == INPUT
    tensors = sample.tensors
    pair = tensors["input"], tensors["target"]
    if "weight" in tensors or pair[0].shape == pair[1].shape:
        return "weight" not in tensors
    if pair[0].is_cuda:  # gradients of broadcast operands too
        return all(tensor.numel() > 0 for tensor in pair)
    shape = torch.broadcast_shapes(pair[0].shape, pair[1].shape)
    return all(tensors[name].shape == shape for name in wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@per_variant
def test_same_bits(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    sizes = (1, 7, 33, 1000, 1025, 2049, 4100, 9001, 20_000, 60_001)
    for size in sizes:
        shape = loss.size_to_shape[0](size)
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
            for grad_output in (1.0, 0.0, -3.0, 1024.0):
                kept = gradient_of_input(loss, sample, grad_output)
                computed = gradient_of_input(loss, sample, grad_output, kept=False)
                assert same_bits(kept, computed), f"{sample.name}, grad_output {grad_output}"


@per_variant
def test_layouts(loss: Loss, variant: Variant, device: str) -> None:
    for shape in ((33, 19), (3, 9, 7), (2, 3, 5, 4), (3, 2050), (0, 3)):
        sample = variant.sample(shape, device=device, reduction="mean")
        for name, layout in layouts_of(sample.tensors["input"]).items():
            changed = sample.with_tensors(input=layout(sample.tensors["input"])).renamed(name)
            for grad_output in (1.0, 2.0):
                kept = gradient_of_input(loss, changed, grad_output)
                computed = gradient_of_input(loss, changed, grad_output, kept=False)
                assert same_bits(kept, computed), f"{changed.name}, grad_output {grad_output}"
                assert kept.stride() == computed.stride(), changed.name


SHAPES_OF_INPUT_AND_TARGET = (
    ((33, 19), (33, 19)),
    ((2, 3, 5, 4), (2, 3, 5, 4)),
    ((33, 19), (19,)),
    ((33, 19), (33, 1)),
    ((1, 19), (33, 19)),
    ((3, 1, 7), (3, 9, 7)),
    ((3, 9, 7), (3, 1, 7)),
    ((2050, 3), (3,)),
    ((3, 2050), (3, 1)),
    ((5, 1), (2, 5, 4100)),
    ((33, 1), (1, 19)),
    ((7,), (1, 7)),
    ((), (5,)),
    ((4, 4), ()),
    ((), ()),
    ((0, 3), (3,)),
    ((4, 1), (4, 0)),
)
ELEMENTWISE = [(x, variant) for x, variant in VARIANTS if x.elementwise]


def of_shapes(
    variant: Variant, input: tuple[int, ...], target: tuple[int, ...], **options: Any
) -> Sample:
    other = variant.sample(target, **options).tensors["target"]
    sample = variant.sample(input, **options).with_tensors(target=other)
    return sample.renamed(f"target {target}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("loss", "variant"), ELEMENTWISE, ids=[f"{x.name}-{v.name}" for x, v in ELEMENTWISE]
)
def test_same_bits_of_any_operands(
    loss: Loss, variant: Variant, dtype: torch.dtype, device: str
) -> None:
    """Gradients of input, target and both, of operands that are broadcast or not."""
    for shapes, reduction in itertools.product(SHAPES_OF_INPUT_AND_TARGET, loss.reductions[1:]):
        if variant.name == "weighted" and shapes[0] != shapes[1]:
            continue
        sample = of_shapes(variant, *shapes, device=device, dtype=dtype, reduction=reduction)
        mixed = sample.with_tensors(target=sample.tensors["target"].float()).renamed("mixed")
        turned = sample.map(lambda x: x.mT.contiguous().mT if x.dim() > 1 else x).renamed("turned")
        for call, wanted in itertools.product((sample, mixed, turned), WANTED):
            for grad_output in (1.0, -3.0):
                kept = gradients_of(loss, call, wanted, grad_output)
                computed = gradients_of(loss, call, wanted, grad_output, kept=False)
                for name, found, expected in zip(wanted, kept, computed, strict=True):
                    what = f"{call.name}, {name} of {wanted}, grad_output {grad_output}"
                    assert same_bits(found, expected), what
                    assert found.stride() == expected.stride(), what


@pytest.mark.parametrize("turns", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("name", ["input", "target"])
def test_loss_beside_a_view_of_shared_places(name: str, turns: bool, device: str) -> None:
    """Such a view and its gradient lie differently: the loss must not see which is there."""
    generator = torch.Generator().manual_seed(0)
    draws = range(20)  # a bit of a sum differs in one of 50
    sizes = itertools.product(draws, ((32, 64), (68, 130)), ((1, 1), (1, -1), (-1, 1), None))
    for _, shape, small in sizes:
        if small is None:  # windows
            view = torch.rand(sum(shape) - 1, generator=generator).to(device).unfold(0, shape[1], 1)
        else:
            own = [1 if size == 1 else whole for size, whole in zip(small, shape, strict=True)]
            view = torch.rand(own, generator=generator).to(device).expand(shape)
        # Losses of both signs: of their small sum, each order of additions has other last bits.
        other = torch.randn(shape, generator=generator).to(device)
        other = other.mT.contiguous().mT if turns else other
        for target, which in itertools.product((view, other), WANTED):
            if (target is view) != (name == "target"):
                continue
            tensors = {"input": other if target is view else view, "target": target}
            alone = lossops.kl_div(**tensors, reduction="sum", log_target=True)
            for key in which:
                tensors[key] = tensors[key].detach().requires_grad_()
            value = lossops.kl_div(**tensors, reduction="sum", log_target=True)
            assert same_bits(value, alone), f"{name} {small} of {shape}, gradients of {which}"


def test_ignored_rows_and_weights(device: str) -> None:
    """The mean's denominator is known before the gradient is written."""
    (loss,) = [x for x in LOSSES if not x.elementwise]
    for shape in ((50, 10), (300, 1500), (20, 9001), (7, 5, 3)):
        x = torch.randn(shape, device=device)
        t = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
        t[::3] = -100
        for weight in (None, torch.rand(shape[1], device=device)):
            for target in (t, torch.full_like(t, -100)):
                tensors = {"input": x, "target": target}
                if weight is not None:
                    tensors["weight"] = weight
                sample = Sample("ignored", tensors, {"reduction": "mean"}, ("input",))
                kept = gradient_of_input(loss, sample)
                assert same_bits(kept, gradient_of_input(loss, sample, kept=False))


LOSSES_AND_WANTED = [
    (loss, wanted) for loss in LOSSES for wanted in (WANTED if loss.elementwise else (INPUT,))
]
per_wanted = pytest.mark.parametrize(
    ("loss", "wanted"), LOSSES_AND_WANTED, ids=lambda x: getattr(x, "name", None) or "-".join(x)
)


@pytest.mark.parametrize("through", ["function", "op"])
@per_wanted
def test_given_away_once(loss: Loss, wanted: tuple[str, ...], through: str, device: str) -> None:
    """What a caller does to a gradient does not reach the next one."""
    sample = loss.variants[0].sample((6, 9), device=device, reduction="sum")
    leaves = {name: sample.tensors[name].detach().clone().requires_grad_() for name in wanted}
    value = sample.with_tensors(**leaves).call(getattr(loss, through))
    assert value.grad_fn is not None and value.grad_fn.kept is not None
    inputs = list(leaves.values())
    first = torch.autograd.grad(value, inputs, retain_graph=True)
    expected = [x.clone() for x in first]
    for x in first:
        x.fill_(77)
    second = torch.autograd.grad(value, inputs, retain_graph=True)
    assert all(map(same_bits, second, expected))
    third = torch.autograd.grad(value, inputs, create_graph=True)
    assert all(x.grad_fn is not None for x in third)
    assert all(map(same_bits, third, expected))


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda x: x.name)
def test_one_of_two_gradients(loss: Loss, device: str) -> None:
    """autograd.grad asks for one, although both operands need theirs."""
    sample = loss.variants[0].sample((6, 9), device=device, reduction="mean")
    for grad_output in (1.0, 2.0):
        both = gradients_of(loss, sample, WANTED[2], grad_output)
        for name, expected in zip(WANTED[2], both, strict=True):
            leaves = {key: sample.tensors[key].detach().requires_grad_() for key in WANTED[2]}
            value = sample.with_tensors(**leaves).call(loss.function)
            (found,) = torch.autograd.grad(value, leaves[name], torch.full_like(value, grad_output))
            assert same_bits(found, expected)


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda x: x.name)
@pytest.mark.parametrize("wanted", WANTED, ids="-".join)
def test_hooks_and_any_operands(loss: Loss, wanted: tuple[str, ...], device: str) -> None:
    """Saved tensors that a hook copied, and those that changed behind a hook."""
    sample = loss.variants[0].sample((6, 9), device=device, reduction="mean")
    for change, grad_output in itertools.product((False, True), (1.0, 2.0)):
        expected = gradients_of(loss, sample, wanted, grad_output)
        leaves = {name: sample.tensors[name].clone().requires_grad_() for name in wanted}
        inner = sample.map(Tensor.clone)
        inner = inner.with_tensors(**{name: leaf * 1 for name, leaf in leaves.items()})
        unpack = (lambda x: x) if change else Tensor.clone
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            value = inner.call(loss.function)
        if change:
            inner.tensors["target"].detach().fill_(1)
        found = torch.autograd.grad(
            value, list(leaves.values()), torch.full_like(value, grad_output)
        )
        assert all(map(same_bits, found, expected))


# --- operands that are changed in place before the backward pass ---------------------------------


def changed(
    loss: Loss,
    sample: Sample,
    name: str,
    through: str = "function",
    wanted: tuple[str, ...] = INPUT,
) -> tuple[Any, list[Tensor]]:
    """The loss of intermediate tensors, of which `name` was overwritten since; and its leaves."""
    inner = sample.map(Tensor.clone)
    leaves = {key: inner.tensors[key].clone().requires_grad_() for key in wanted}
    inner = inner.with_tensors(**{key: leaf * 1 for key, leaf in leaves.items()})
    value = inner.call(getattr(loss, through))
    inner.tensors[name].detach().fill_(1)
    return value, list(leaves.values())


@pytest.mark.parametrize("through", ["function", "op"])
@pytest.mark.parametrize("name", ["input", "target"])
@per_wanted
def test_changed_operand_and_a_kept_gradient(
    loss: Loss, wanted: tuple[str, ...], name: str, through: str, device: str
) -> None:
    """The gradients of the forward pass, times grad_output; float16 has lost what is small."""
    for dtype in DTYPES:
        sample = loss.variants[0].sample((33, 9), device=device, dtype=dtype, reduction="mean")
        before = gradients_of(loss, sample, wanted)
        for grad_output in (1.0, 0.0, -3.0, 1000.0):
            value, leaves = changed(loss, sample, name, through, wanted)
            g = torch.full_like(value, grad_output)
            known = grad_output == 1 and device == "cpu"
            if dtype == torch.float16 and not known:
                with pytest.raises(RuntimeError, match=r"float16, in which small .* a copy"):
                    torch.autograd.grad(value, leaves, g)
                continue
            for found, unscaled in zip(torch.autograd.grad(value, leaves, g), before, strict=True):
                assert found.dtype == dtype
                assert same_bits(found, unscaled * grad_output), f"{sample.name}, {grad_output}"


def test_changed_logits_as_programs_do(device: str) -> None:
    """A temperature for a metric; a mask: with or without autograd, and torch's results."""
    changes: dict[str, Any] = {
        "div_": lambda x: x.div_(2),
        "no_grad": lambda x: torch.no_grad()(x.div_)(2),
        "detached": lambda x: x.detach().div_(2),
        "masked": lambda x: x.masked_fill_(torch.ones_like(x, dtype=torch.bool), -torch.inf),
        "view": lambda x: x.view(-1)[3:9].mul_(5),
    }
    t = torch.randint(9, (6,), device=device)
    for name, change in changes.items():
        for scale in (1.0, 128.0):
            gradients = []
            for call in (lossops.cross_entropy, torch.nn.functional.cross_entropy):
                leaf = torch.linspace(-2, 2, 54, device=device).view(6, 9).requires_grad_()
                logits = leaf * 3
                value = call(logits, t) * scale
                change(logits)
                value.backward()
                gradients.append(leaf.grad)
            assert gradients[0] is not None and gradients[1] is not None
            torch.testing.assert_close(*gradients, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "part", [lambda x: x.chunk(2)[1], lambda x: x[3:], lambda x: x.unbind()[4][None]]
)
def test_changed_tensor_that_logits_are_a_part_of(part: Any, device: str) -> None:
    """torch has another error for the outputs of chunk and the like."""
    t = torch.randint(9, (6,), device=device)
    gradients = []
    for call in (lossops.cross_entropy, torch.nn.functional.cross_entropy):
        leaf = torch.linspace(-2, 2, 54, device=device).view(6, 9).requires_grad_()
        whole = leaf * 3
        logits = part(whole)
        value = call(logits, t[: len(logits)])
        with torch.no_grad():
            whole.div_(2)
        value.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    whole = (leaf * 3).detach().requires_grad_() * 1
    value = lossops.cross_entropy(part(whole), t[: len(logits)], reduction="none").sum()
    with torch.no_grad():
        whole.div_(2)
    with pytest.raises(RuntimeError, match="no gradient was kept"):
        value.backward()


def test_changed_logits_under_autocast(device: str) -> None:
    """bfloat16 logits have float32's range: a scaler's grad_output finds every number."""
    leaf = torch.randn(6, 9, device=device, dtype=torch.bfloat16, requires_grad=True)
    t = torch.randint(9, (6,), device=device)
    with torch.autocast(device, torch.bfloat16):
        value = lossops.cross_entropy(leaf, t)
    with torch.no_grad():
        leaf.add_(1)  # as an optimiser does
    (found,) = torch.autograd.grad(value, leaf, torch.full_like(value, 65536.0))
    x = (leaf.detach() - 1).double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x, t), x)
    torch.testing.assert_close(found.double() / 65536, exact, rtol=2**-5, atol=1e-3)


def _by_checkpoint(call: Any) -> None:
    torch.utils.checkpoint.checkpoint(call, use_reentrant=False).backward()


def _by_hooks(call: Any) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        loss = call()
    loss.backward()


def _by_save_on_cpu(call: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = call()
    loss.backward()


@pytest.mark.parametrize("run", [_by_checkpoint, _by_hooks, _by_save_on_cpu])
def test_changed_logits_under_hooks(run: Any, device: str) -> None:
    """torch does not look whether a tensor that went through hooks has changed."""
    scale = torch.tensor(1.5, device=device)  # on a GPU nobody looks at it
    target = torch.tensor([1, 0, 2], device=device)

    def gradient_of(function: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        leaf = torch.linspace(-3, 2, 12, device=device).reshape(3, 4).to(dtype).requires_grad_()

        def call() -> Tensor:
            logits = leaf * 2
            loss = function(logits, target, **options)
            with torch.no_grad():
                logits.div_(3)
            return loss.sum() * scale * scale

        run(call)
        assert leaf.grad is not None
        return leaf.grad

    found = gradient_of(lossops.cross_entropy, torch.float32)
    expected = gradient_of(torch.nn.functional.cross_entropy, torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    if run is not _by_save_on_cpu or device == "cpu":  # which hands out a copy from before
        with pytest.raises(RuntimeError, match="was modified by an inplace operation"):
            gradient_of(lossops.cross_entropy, torch.float32, reduction="none")


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_changed_operand_without_a_kept_gradient(loss: Loss, device: str) -> None:
    """An error that says what to do, whoever asks for what was not kept."""
    what_to_do = r"modified by an inplace operation.*no gradient was kept.*Modify a copy"
    none = loss.variants[0].sample((6, 9), device=device, reduction="none")
    value, (leaf,) = changed(loss, none, "input")
    with pytest.raises(RuntimeError, match=what_to_do):
        value.sum().backward()
    reduced = loss.variants[0].sample((6, 9), device=device, reduction="sum")
    value, (leaf,) = changed(loss, reduced, "input")
    with pytest.raises(RuntimeError, match=what_to_do):
        torch.autograd.grad(value, leaf, create_graph=True)
    value, (leaf,) = changed(loss, reduced, "input")
    batch = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match=what_to_do):
        torch.autograd.grad(value, leaf, batch, is_grads_batched=True)
    value, (leaf,) = changed(loss, reduced, "input")
    torch.autograd.grad(value, leaf, retain_graph=True)
    with pytest.raises(RuntimeError, match=what_to_do):  # the first pass has what was kept
        torch.autograd.grad(value, leaf)
    lossops.keep_gradients(False)
    value, (leaf,) = changed(loss, reduced, "input")
    with pytest.raises(RuntimeError, match=f"{loss.name}: .*{what_to_do}"):
        value.backward()


def test_unpacking_errors_are_left_alone(device: str) -> None:
    """What a hook of saved tensors raises is no changed operand."""

    def unpack(x: Tensor) -> Tensor:
        raise RuntimeError("the file is gone")

    x = torch.randn(6, 9, device=device, requires_grad=True)
    t = torch.randint(9, (6,), device=device)
    for reduction in ("mean", "none"):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            value = lossops.cross_entropy(x, t, reduction=reduction)
        with pytest.raises(RuntimeError, match=r"^the file is gone$"):
            value.sum().backward()


@per_variant
def test_operator_keeps_what_the_function_does(loss: Loss, variant: Variant, device: str) -> None:
    """Outside of what records operators; on the CPU nothing where both operands are broadcast."""
    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, reduction=reduction)
        x = sample.tensors["input"].detach().requires_grad_()
        sample = sample.with_tensors(input=x)
        kept = getattr(sample.call(loss.op).grad_fn, "kept", None)
        assert (kept is not None) == keeps(loss, sample), sample.name
        with FlopCounterMode(display=False):
            recorded = sample.call(loss.op)
        assert getattr(recorded.grad_fn, "kept", None) is None
        assert same_bits(recorded, sample.call(loss.op))
    if loss.elementwise:
        x = torch.rand(1, 9, device=device, requires_grad=True)
        value = loss.op(x, torch.rand(6, 1, device=device, requires_grad=True))
        assert (getattr(value.grad_fn, "kept", None) is not None) == x.is_cuda


def test_accumulates_and_scales(device: str) -> None:
    """Gradients of two losses of one input, one of them scaled."""
    x = torch.randn(40, 1200, device=device, requires_grad=True)
    t = torch.randint(1200, (40,), device=device)
    (lossops.cross_entropy(x, t) + 3 * lossops.mse_loss(x, torch.zeros_like(x))).backward()
    assert x.grad is not None
    y = x.detach().double().requires_grad_()
    functional = torch.nn.functional
    (functional.cross_entropy(y, t) + 3 * functional.mse_loss(y, torch.zeros_like(y))).backward()
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-9)


def test_loss_scaling_in_half_precision(device: str) -> None:
    """A gradient too small for float16 is not lost where grad_output makes it large."""
    x = torch.zeros(4096, 33, dtype=torch.float16, device=device, requires_grad=True)
    t = torch.zeros(4096, dtype=torch.int64, device=device)
    (32768 * lossops.cross_entropy(x, t).float()).backward()
    exact = 32768 / 4096 / 33
    assert x.grad is not None
    assert (x.grad[:, 1:].double() / exact - 1).abs().max().item() < 2**-10


FEW_CLASSES = (
    ((4099, 10), "fp32"),
    ((300, 10), "fp32"),
    ((1, 10), "fp32"),
    ((2051, 100), "fp32"),
    ((2051, 10), "half"),
    ((1030, 33), "half"),
    ((2, 21, 32, 36), "fp32"),
    ((2, 21, 32, 36), "half"),
    ((3, 5, 7, 11), "half"),
    ((3, 100, 8, 8), "fp32"),
)


@pytest.mark.parametrize(("shape", "kind"), FEW_CLASSES, ids=str)
def test_computed_again(shape: tuple[int, ...], kind: str, device: str) -> None:
    """Few classes: kernels that leave a gradient and no statistics of its rows."""
    (loss,) = [x for x in LOSSES if not x.elementwise]
    for dtype in (torch.float32,) if kind == "fp32" else (torch.float16, torch.bfloat16):
        for scale in (1, 20):
            x = (scale * torch.randn(shape, device=device)).to(dtype)
            x[0] += 50
            t = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
            t[::3] = -100
            weights = (None, torch.rand(shape[1], device=device).to(dtype))
            for weight, reduction in itertools.product(weights, ("mean", "sum")):
                tensors = {"input": x, "target": t}
                if weight is not None:
                    tensors["weight"] = weight
                sample = Sample("few", tensors, {"reduction": reduction}, ("input",))
                for grad_output in (1.0, 0.5, -3.0, 1024.0, 2.0**-40, 0.0, math.inf):
                    kept = gradient_of_input(loss, sample, grad_output)
                    computed = gradient_of_input(loss, sample, grad_output, kept=False)
                    what = f"{dtype} times {scale}, {reduction}, grad_output {grad_output}"
                    assert same_bits(kept, computed), what
                leaf = x.detach().requires_grad_()
                lossops.keep_gradients(True)
                value = sample.with_tensors(input=leaf).call(loss.function)
                once = torch.autograd.grad(value, leaf, retain_graph=True)[0].clone()
                again = torch.autograd.grad(value, leaf, retain_graph=True)[0]
                assert same_bits(once, again), "retain_graph"


@pytest.mark.parametrize("target_dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_class_indices_of_many_rows(target_dtype: torch.dtype, device: str) -> None:
    """A kernel of their own checks them first, and counts them for the mean."""
    (loss,) = [x for x in LOSSES if not x.elementwise]
    for shape, dtype in itertools.product(
        ((3000, 10), (3001, 3), (2, 21, 32, 36), (3, 88, 20, 20), (5, 2, 11, 20)),
        (torch.float32, torch.bfloat16),
    ):
        x = torch.randn(shape, device=device).to(dtype)
        plain = torch.randint(shape[1], (shape[0], *shape[2:]), device=device).to(target_dtype)
        plain.flatten()[::7] = 200  # ignored
        flat = torch.cat([plain.flatten()[:1], plain.flatten()])
        targets = {
            "plain": plain,
            "misaligned": flat[1:].view(plain.shape),
            "transposed": plain.transpose(0, -1).contiguous().transpose(0, -1),
            "spread": torch.stack([plain, plain], dim=-1)[..., 0],
        }
        for name, t in targets.items():
            for weight in (None, torch.rand(shape[1], device=device).to(dtype)):
                tensors = {"input": x, "target": t}
                if weight is not None:
                    tensors["weight"] = weight
                options = {"reduction": "mean", "ignore_index": 200}
                sample = Sample(f"{name} {shape}", tensors, options, ("input",))
                kept = gradient_of_input(loss, sample)
                assert same_bits(kept, gradient_of_input(loss, sample, kept=False)), sample.name
                x64 = x.double().requires_grad_()
                value = torch.nn.functional.cross_entropy(
                    x64, plain.long(), None if weight is None else weight.double(), ignore_index=200
                )
                (exact,) = torch.autograd.grad(value, x64)
                unit = 2.0**-23 if dtype == torch.float32 else 2.0**-8
                error = (kept.double() - exact).abs() / exact.abs().clamp(min=1e-12)
                assert error.max().item() <= 8 * unit, sample.name


@pytest.mark.parametrize("shape", [(300, 10), (300, 100), (2, 6, 8, 8)], ids=str)
def test_wider_class_weights(shape: tuple[int, ...], device: str) -> None:
    """Autocast lets float64 weights meet float32 logits, whose rows are then float64's."""
    x = torch.randn(shape, device=device, requires_grad=True)
    t = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    weight = torch.rand(shape[1], device=device, dtype=torch.float64)
    y = x.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(y, t, weight).backward()
    assert y.grad is not None
    for kept in (True, False):
        lossops.keep_gradients(kept)
        with torch.autocast(device):
            value = lossops.cross_entropy(x, t, weight)
        (gradient,) = torch.autograd.grad(value, x, torch.full_like(value, 0.5))
        torch.testing.assert_close(gradient.double(), y.grad / 2, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
def test_hooks_that_change_the_layout(layout: str, device: str) -> None:
    """What a saved-tensor hook hands out need not lie as what it took."""

    def unpack(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.dim() < 2:
            return x
        if layout == "contiguous":
            return x.contiguous()
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    for shape in ((4, 600, 10), (2, 8, 16, 20)):
        x = torch.randn(shape, device=device)
        x = x.transpose(1, -1) if layout == "contiguous" else x
        t = torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]), device=device)
        expected = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        (0.5 * lossops.cross_entropy(expected, t)).backward()
        leaf = x.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            value = 0.5 * lossops.cross_entropy(leaf, t)
        value.backward()
        assert leaf.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(leaf.grad, expected.grad, rtol=1e-6, atol=0)


def saved_bytes(call: Any) -> int:
    """What a loss leaves for its backward pass, beside its operands and its gradient."""
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            sizes.append(x.nbytes)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    (size,) = sizes
    return size


def test_saved_sizes() -> None:
    """On the CPU: two numbers of a mean, two or three of each row, and scratch memory."""
    for shape, smoothing, numbers in (((3000, 10), 0.0, 2), ((3000, 10), 0.1, 3)):
        x = torch.randn(shape, requires_grad=True)
        t = torch.randint(shape[1], shape[:1])
        size = saved_bytes(
            lambda x=x, t=t, smoothing=smoothing: lossops.cross_entropy(
                x, t, label_smoothing=smoothing
            )
        )
        least = 16 + 4 * numbers * shape[0]
        assert least <= size <= least + 8 * 2049, size


def beyond_inputs(x: Tensor, call: Any) -> int:
    """Peak memory of a step of call(x), without what was there before and the gradient."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(x).backward()
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - x.nbytes
    x.grad = None
    return beyond


@pytest.mark.cuda
def test_memory_of_a_step() -> None:
    """One gradient, and at most 16 MiB, beyond the inputs."""
    for name, shape in (("mse_loss", (4096, 8192)), ("cross_entropy", (4096, 8192))):
        x = torch.randn(shape, device="cuda", requires_grad=True)
        t: Any = torch.randn(shape, device="cuda")
        if name == "cross_entropy":
            t = torch.randint(shape[1], shape[:1], device="cuda")
        beyond = beyond_inputs(x, lambda x, t=t, name=name: getattr(lossops, name)(x, t))
        assert beyond <= 2**24, f"{name}: {beyond / 2**20:.0f} MiB"


@pytest.mark.cuda
@pytest.mark.skipif(
    os.environ.get("LOSSOPS_DISABLE_HOPPER", "0") not in ("", "0")
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="the kernels of older devices",
)
def test_memory_of_few_classes() -> None:
    """Of millions of rows, which have no statistics beside a gradient."""
    half, single = torch.float16, torch.float32
    for shape, dtype, bytes_of_row in (
        ((2**22, 10), single, 1),  # a class index
        ((2**22, 10), half, 0),
        ((2**21, 100), half, 0),
        ((16, 21, 512, 512), single, 1),
        ((16, 21, 512, 512), half, 1),
    ):
        x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
        t = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")
        for reduction, grad_output in itertools.product(("mean", "sum"), (1, 0.5)):
            beyond = beyond_inputs(
                x,
                lambda x, t=t, reduction=reduction, grad_output=grad_output: (
                    lossops.cross_entropy(x, t, reduction=reduction) * grad_output
                ),
            )
            # Partial sums of blocks, and numbers of which the allocator takes 512 bytes each.
            assert beyond <= bytes_of_row * t.numel() + 2**19, f"{shape} {dtype}: {beyond} bytes"


@pytest.mark.parametrize("shapes", [((3,), (4, 3)), ((4, 3), (4, 1)), ((40, 1), (1, 300))])
def test_kept_gradients_of_broadcast_operands(
    shapes: tuple[tuple[int, ...], ...], device: str
) -> None:
    """The operators compute them on any device, and scale them from the operands."""
    input, target = (torch.rand(shape, device=device) for shape in shapes)
    for name in ("mse_loss", "kl_div"):
        forward = getattr(torch.ops.lossops, f"{name}_forward_gradients")
        scale = getattr(torch.ops.lossops, f"{name}_backward_kept_gradients")
        leaves = [x.clone().requires_grad_() for x in (input, target)]
        lossops.keep_gradients(False)
        expected = torch.autograd.grad(getattr(lossops, name)(*leaves), leaves)
        loss, *kept = forward(input, target, output_mask=[True, True])
        assert same_bits(loss, getattr(lossops, name)(input, target))
        for got, want in zip(kept, expected, strict=True):
            assert same_bits(got, want), name
        scale(*kept, torch.full((), -3.0, device=device), input, target)
        for got, want in zip(kept, expected, strict=True):
            assert torch.allclose(got, -3 * want, rtol=1e-5), name


def test_switch() -> None:
    lossops.keep_gradients(False)
    assert not settings.gradients_are_kept
    x = torch.randn(3, requires_grad=True)
    assert not hasattr(lossops.mse_loss(x, torch.zeros(3)).grad_fn, "kept")


@pytest.mark.parametrize("switch", [lossops.keep_gradients, lossops.check_targets])
def test_switches_take_bools(switch: Any) -> None:
    for wrong in ("no", 0, None, 1.0):
        with pytest.raises(TypeError, match=f"{switch.__name__}: enabled must be a bool"):
            switch(wrong)
    assert settings.gradients_are_kept and not settings.targets_are_checked
