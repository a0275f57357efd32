"""Gradients of every loss beyond their values: grad_output, second derivatives, torch.func."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from checks import check, truth
from losses import (
    LOSS_IDS,
    LOSSES,
    VARIANT_IDS,
    VARIANTS,
    Loss,
    LossFunction,
    Sample,
    Variant,
    evaluate,
)
from numerics import assert_within, layouts_of, same_bits
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import lossops

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
per_call = pytest.mark.parametrize("through", ["function", "op"])
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
# float32 against float64
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# What torch says of its own mse_loss where grad_output has a tangent and input has none.
MSE_IN_FORWARD_MODE = "ZeroTensors are immutable"


def call_of(loss: Loss, through: str) -> LossFunction:
    return loss.function if through == "function" else loss.op


def leaves_of(sample: Sample) -> list[Tensor]:
    return [sample.tensors[name] for name in sample.differentiable]


def as_function_of_leaves(call: LossFunction, sample: Sample) -> Callable[..., Tensor]:
    """The call as a function of the differentiable arguments alone."""

    def function(*leaves: Tensor) -> Tensor:
        return sample.with_tensors(**dict(zip(sample.differentiable, leaves, strict=True))).call(
            call
        )

    return function


def attempt(action: Callable[[], Any]) -> Any:
    """What `action` returns, or the error that it raises."""
    try:
        return action()
    except (NotImplementedError, RuntimeError) as error:
        return error


# --- grad_output --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@per_variant
def test_grad_output_of_any_layout(
    loss: Loss, variant: Variant, dtype: torch.dtype, device: str
) -> None:
    """Stride 0 (from .sum()), narrowed (from cat), transposed, misaligned, with gaps."""
    for shape in ((33, 65), (3, 9, 7), (2, 3, 5, 4)):
        sample = variant.sample(shape, device=device, dtype=dtype, reduction="none")
        with torch.no_grad():
            value = sample.call(loss.reference)
        g = torch.randn(value.shape).to(value.dtype).to(device)
        known = truth(loss, sample, g)
        for name, layout in layouts_of(g).items():
            named = sample.renamed(f"grad_output {name}")
            check(loss, named, grad_output=layout(g), known=known)
        wide = torch.randn(*value.shape[:-1], value.shape[-1] + 2).to(value.dtype).to(device)
        check(loss, sample.renamed("grad_output narrowed"), grad_output=wide[..., 1:-1])
        for stride_0 in (g.flatten()[0].expand_as(g), g[:1].expand_as(g), g[..., :1].expand_as(g)):
            named = sample.renamed(f"grad_output of strides {stride_0.stride()}")
            check(loss, named, grad_output=stride_0)


@per_variant
def test_layout_of_grad_output_changes_no_bit(loss: Loss, variant: Variant, device: str) -> None:
    """Contiguous, stride 0, narrowed, transposed, misaligned, 0-d; also in float32 under autocast
    where the inputs are half. Compared with what the same numbers give when they are contiguous."""
    for dtype, autocast in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        for shape, reduction in (((33, 65), "none"), ((3, 9, 7), "none"), ((33, 65), "mean")):
            sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
            for call in (loss.function, loss.op):
                with torch.autocast(device, enabled=autocast):
                    leaves = sample.leaves()
                    value = leaves.call(call)
                assert value.dtype == (torch.float32 if autocast else dtype)
                g = torch.randn(value.shape).to(value)
                found = {name: (layout(g), g) for name, layout in layouts_of(g).items()}
                number = g.flatten()[:1]
                expanded = number.view((1,) * g.dim()).expand_as(g)
                found["stride 0"] = (expanded, expanded.contiguous())
                if g.dim():
                    wide = torch.randn(*g.shape[:-1], g.shape[-1] + 2).to(g)
                    found["narrowed"] = (wide[..., 1:-1], wide[..., 1:-1].contiguous())
                    rows = g[:1].expand_as(g)
                    found["stride 0 of rows"] = (rows, rows.contiguous())
                if g.dim() >= 2:
                    transposed = torch.randn(g.mT.shape).to(g).mT
                    found["transposed"] = (transposed, transposed.contiguous())
                for name, (grad_output, contiguous) in found.items():
                    gradients = [
                        torch.autograd.grad(value, leaves_of(leaves), cotangent, retain_graph=True)
                        for cotangent in (grad_output, contiguous)
                    ]
                    for actual, expected in zip(*gradients, strict=True):
                        what = f"{sample.name}, autocast {autocast}, grad_output {name}"
                        assert same_bits(actual, expected), what


@pytest.mark.parametrize("log_target", [False, True])
def test_layout_of_grad_output_changes_no_bit_beside_a_sum(log_target: bool, device: str) -> None:
    """The gradient of target in half types, where that of input is a sum of its copies."""
    x = torch.randn(1, 65, device=device).log_softmax(-1).bfloat16().requires_grad_()
    t = torch.randn(33, 65, device=device).log_softmax(-1)
    t = (t if log_target else t.exp()).bfloat16().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the shapes differ
        value = lossops.kl_div(x, t, reduction="none", log_target=log_target)
    g = torch.randn(value.shape, device=device).to(value)
    _, expected = torch.autograd.grad(value, (x, t), g, retain_graph=True)
    for name, layout in layouts_of(g).items():
        _, found = torch.autograd.grad(value, (x, t), layout(g), retain_graph=True)
        assert same_bits(found, expected), name


@per_variant
def test_grad_output_from_real_graphs(loss: Loss, variant: Variant, device: str) -> None:
    extra = torch.randn(5, device=device)
    graphs: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda v: v.sum(),
        "mean": lambda v: v.mean(),
        "cat": lambda v: torch.cat([extra.to(v), v.flatten(), extra.to(v)]).square().sum(),
        "transpose": lambda v: (v.mT * torch.arange(v.numel()).to(v).view(v.mT.shape)).sum(),
        "slice": lambda v: 2.5 * v[..., 1:].sum(),
        "index": lambda v: v.flatten()[0] - v.flatten()[-1],
        "expand": lambda v: (v.expand(3, *v.shape) * 0.5).sum(),
    }
    for name, graph in graphs.items():
        sample = variant.sample((3, 6, 5), device=device, reduction="none")
        results = []
        for call, tensors in ((loss.function, sample), (loss.reference, sample.double())):
            tensors = tensors.leaves()
            total = graph(tensors.call(call))
            results.append(torch.autograd.grad(total, leaves_of(tensors)))
        for argument, ours, exact in zip(sample.differentiable, *results, strict=True):
            bound = 2e-6 * exact.abs().max().clamp(min=1)
            assert_within(ours, exact, bound, f"{sample.name} {name}: gradient of {argument}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@per_variant
def test_scalar_grad_output(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    for reduction in loss.reductions[1:]:
        sample = variant.sample((17, 9), device=device, dtype=dtype, reduction=reduction)
        for scale in (2.5, -0.125, 0.0, 1.0 + 2**-9, float("nan")):
            grad_output = torch.tensor(scale, device=device, dtype=dtype)
            check(loss, sample.renamed(f"grad_output {scale}"), grad_output=grad_output)
            # a scalar inside a larger buffer
            part = torch.full((3,), scale, device=device, dtype=dtype)[1]
            check(loss, sample.renamed(f"grad_output {scale}"), grad_output=part)


# --- which gradients ----------------------------------------------------------------------------


@per_call
@per_variant
def test_each_subset_of_gradients(loss: Loss, variant: Variant, through: str, device: str) -> None:
    """The gradient of one argument has the same bits whichever others are asked for."""
    call = call_of(loss, through)
    for reduction in loss.reductions:
        sample = variant.sample((9, 17), device=device, reduction=reduction)
        everything = evaluate(call, sample)
        for count in range(len(variant.differentiable)):
            for names in itertools.combinations(variant.differentiable, count):
                part = Sample(sample.name, sample.tensors, sample.options, names)
                result = evaluate(call, part)
                assert same_bits(result.value, everything.value)
                for name in names:
                    assert same_bits(result.gradients[name], everything.gradients[name]), (
                        f"{sample.name}: gradient of {name} among {names}"
                    )


@per_loss
def test_no_graph_without_need(loss: Loss, device: str) -> None:
    for variant in loss.variants:
        sample = variant.sample((4, 5), device=device)
        expected = sample.call(loss.function)
        assert not expected.requires_grad
        leaves = sample.leaves()
        for call in (loss.function, loss.op):
            with torch.no_grad():
                value = leaves.call(call)
            assert not value.requires_grad
            assert same_bits(value, expected)
            with torch.inference_mode():
                value = leaves.call(call)
                assert value.is_inference()
            assert same_bits(value, expected)
            with torch.inference_mode():
                inside = sample.map(Tensor.clone)
                assert same_bits(inside.call(call), expected)
            with_grad = leaves.call(call)
            assert with_grad.requires_grad
            assert with_grad.grad_fn is not None
            assert same_bits(with_grad.detach(), expected)


@pytest.mark.parametrize(
    "loss", [loss for loss in LOSSES if loss.elementwise], ids=lambda loss: loss.name
)
def test_same_tensor_as_input_and_target(loss: Loss, device: str) -> None:
    x = torch.rand(7, 5, device=device) + 0.5
    for reduction in loss.reductions:
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        value = loss.function(ours, ours, reduction=reduction)
        exact = loss.reference(theirs, theirs, reduction=reduction)
        assert_within(value.detach(), exact.detach(), 1e-5, reduction)
        (gradient,) = torch.autograd.grad(value.sum(), ours)
        (expected,) = torch.autograd.grad(exact.sum(), theirs)
        assert_within(gradient, expected, 1e-5, f"{reduction} gradient")


@per_call
@per_variant
def test_inputs_and_results_keep_apart(
    loss: Loss, variant: Variant, through: str, device: str
) -> None:
    """Inputs are never modified; no result shares memory with an input or with another result."""
    for shape in ((4, 5), (1, 1), (3, 4, 2)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, reduction=reduction).leaves()
            before = {k: (v.detach().clone(), v._version) for k, v in sample.tensors.items()}
            value = sample.call(call_of(loss, through))
            grad_output = torch.ones_like(value)
            gradients = torch.autograd.grad(
                value, leaves_of(sample), grad_output, retain_graph=True
            )
            for name, (copy, version) in before.items():
                tensor = sample.tensors[name]
                assert same_bits(tensor, copy), f"{sample.name}: {name} was modified"
                assert tensor._version == version, f"{sample.name}: {name} was written to"
            assert bool((grad_output == 1).all())
            tensors = [*sample.tensors.values(), value, grad_output, *gradients]
            places = [t.untyped_storage().data_ptr() for t in tensors]
            assert len(set(places)) == len(places), f"{sample.name}: shared memory"


@per_call
@per_variant
def test_second_backward_gives_the_same_bits(
    loss: Loss, variant: Variant, through: str, device: str
) -> None:
    """Also after the first one's gradients were overwritten."""
    for reduction in loss.reductions:
        sample = variant.sample((33, 17), device=device, reduction=reduction).leaves()
        value = sample.call(call_of(loss, through))
        grad_output = torch.ones_like(value)
        runs = []
        for keep in (True, True, False):
            found = torch.autograd.grad(value, leaves_of(sample), grad_output, retain_graph=keep)
            runs.append([g.clone() for g in found])
            for gradient in found:
                gradient.fill_(float("nan"))
        for name, *gradients in zip(sample.differentiable, *runs, strict=True):
            for again in gradients[1:]:
                assert same_bits(again, gradients[0]), f"{sample.name}: gradient of {name}"
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(value, leaves_of(sample), grad_output)


@per_loss
def test_gradients_accumulate(loss: Loss, device: str) -> None:
    for variant in loss.variants:
        sample = variant.sample((6, 9), device=device).leaves()
        expected = evaluate(loss.function, sample).gradients
        for _ in range(3):
            sample.call(loss.function).backward()
        for name, gradient in expected.items():
            assert same_bits(sample.tensors[name].grad, gradient + gradient + gradient)


@per_call
@per_loss
def test_input_overwritten_between_forward_and_backward(
    loss: Loss, through: str, device: str
) -> None:
    """It raises as torch does, or the gradient is that of the forward pass; it is never wrong."""
    for variant in loss.variants:
        for reduction in loss.reductions:
            for overwritten in ("input", "target"):
                sample = variant.sample((6, 9), device=device, reduction=reduction).leaves()
                expected = evaluate(loss.function, sample).gradients["input"]
                inner = sample.map(Tensor.clone)
                value = inner.call(call_of(loss, through))
                inner.tensors[overwritten].detach().zero_()
                outcome = attempt(
                    lambda value=value, x=sample.tensors["input"]: torch.autograd.grad(
                        value, x, torch.ones_like(value)
                    )
                )
                if isinstance(outcome, Exception):
                    assert "inplace operation" in str(outcome)
                else:
                    assert same_bits(outcome[0], expected), f"{sample.name}: {overwritten}"


# --- higher derivatives and functional transforms -----------------------------------------------


@per_call
@per_variant
def test_gradcheck(loss: Loss, variant: Variant, through: str, device: str) -> None:
    call = call_of(loss, through)
    for shape, reductions in (((3, 4), loss.reductions), ((2, 3, 2), loss.reductions[:1])):
        # The function and the op share their formulas: one reduction shows that the op has them.
        for reduction in reductions if through == "function" else reductions[-1:]:
            sample = variant.sample(shape, device=device, dtype=torch.float64, reduction=reduction)
            sample = sample.leaves()
            function = as_function_of_leaves(call, sample)
            assert torch.autograd.gradcheck(function, leaves_of(sample)), sample.name
            # torch's own kernels, which double backward ends in, may add up in any order on CUDA
            assert torch.autograd.gradgradcheck(
                function, leaves_of(sample), fast_mode=True, nondet_tol=1e-12
            )


@per_call
@per_variant
def test_second_derivatives(loss: Loss, variant: Variant, through: str, device: str) -> None:
    """A gradient penalty in float32, against torch in float64."""
    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, reduction=reduction)
        results = []
        for call, tensors in (
            (call_of(loss, through), sample),
            (loss.reference, sample.double()),
        ):
            tensors = tensors.leaves()
            value = tensors.call(call)
            first = torch.autograd.grad(value.sum(), leaves_of(tensors), create_graph=True)
            penalty = sum((g.square().sum() for g in first), value.sum())
            results.append(torch.autograd.grad(penalty, leaves_of(tensors)))
        for name, ours, exact in zip(sample.differentiable, *results, strict=True):
            assert ours.dtype == torch.float32
            bound = 1e-5 * exact.abs().clamp(min=exact.abs().max() * 0.1)
            assert_within(ours, exact, bound, f"{sample.name}: gradient of {name}")


@per_call
@pytest.mark.parametrize("target", ["input itself", "a function of input"])
@per_loss
def test_second_derivatives_where_target_depends_on_input(
    loss: Loss, target: str, through: str, device: str
) -> None:
    """Each derivative is a partial one: the graph adds them up, and it alone."""
    x = torch.rand(4, 5, device=device, dtype=torch.float64) + 0.5
    for reduction in loss.reductions:
        results = []
        for call in (call_of(loss, through), loss.reference):
            leaf = x.clone().requires_grad_()
            other = leaf if target == "input itself" else leaf.sqrt()
            value = call(leaf, other, reduction=reduction)
            (first,) = torch.autograd.grad(value.sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum() + first.sum(), leaf)
            results.append(second)
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@per_loss
def test_second_derivative_from_half_precision(loss: Loss, device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        sample = loss.variants[0].sample((4, 5), device=device, dtype=dtype).leaves()
        value = sample.call(loss.function)
        (first,) = torch.autograd.grad(value, sample.tensors["input"], create_graph=True)
        # kl_div is linear in its input, so torch has no second derivative either
        exact = sample.double().leaves()
        true = exact.call(loss.reference)
        (true_first,) = torch.autograd.grad(true, exact.tensors["input"], create_graph=True)
        assert first.requires_grad == true_first.requires_grad
        if not true_first.requires_grad:
            continue
        (second,) = torch.autograd.grad(
            first.square().sum(), sample.tensors["input"], allow_unused=True
        )
        (expected,) = torch.autograd.grad(
            true_first.square().sum(), exact.tensors["input"], allow_unused=True
        )
        if expected is None or not expected.any():
            assert second is None or not second.any()
            continue
        assert second.dtype == dtype
        assert_within(second, expected, 0.05 * expected.abs().max(), f"{loss.name} {dtype}")


def with_tangent(call: LossFunction, sample: Sample, name: str) -> tuple[Tensor, Tensor | None]:
    """The loss, and its derivative along ones in the place of one argument."""
    primal = sample.tensors[name]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal, torch.ones_like(primal))
        value = sample.with_tensors(**{name: dual}).call(call)
        unpacked = forward_ad.unpack_dual(value)
    return unpacked.primal, unpacked.tangent


@per_call
@per_variant
def test_forward_mode(loss: Loss, variant: Variant, through: str, device: str) -> None:
    """By torch's formulas."""
    call = call_of(loss, through)
    for reduction in loss.reductions:
        sample = variant.sample((4, 5), device=device, dtype=torch.float64, reduction=reduction)
        for name in variant.differentiable:
            found = with_tangent(call, sample, name)
            assert found[1] is not None, f"{sample.name}: the tangent of {name} was lost"
            torch.testing.assert_close(found, with_tangent(loss.reference, sample, name))


@per_call
@per_variant
def test_forward_mode_under_autocast(
    loss: Loss, variant: Variant, through: str, device: str
) -> None:
    """In float32, as the loss without a tangent."""
    call = call_of(loss, through)
    for reduction in loss.reductions:
        sample = variant.sample((4, 5), device=device, dtype=torch.bfloat16, reduction=reduction)
        for name in variant.differentiable:
            with torch.autocast(device, torch.bfloat16):
                value, tangent = with_tangent(call, sample, name)
            assert value.dtype == torch.float32
            assert tangent is not None
            expected = with_tangent(loss.reference, sample.double(), name)
            torch.testing.assert_close((value.double(), tangent.double()), expected, **CLOSE)


@per_call
@per_loss
def test_func_jvp(loss: Loss, through: str, device: str) -> None:
    sample = loss.variants[0].sample((4, 5), device=device, dtype=torch.float64)
    leaves = tuple(leaves_of(sample))
    tangents = tuple(torch.ones_like(leaf) for leaf in leaves)
    found, expected = (
        torch.func.jvp(as_function_of_leaves(call, sample), leaves, tangents)
        for call in (call_of(loss, through), loss.reference)
    )
    torch.testing.assert_close(found, expected)


@per_variant
def test_tangent_of_grad_output(loss: Loss, variant: Variant, device: str) -> None:
    """A gradient is linear in grad_output; its tangent must not be lost on the way."""
    for reduction, create_graph in itertools.product(loss.reductions, (False, True)):
        sample = variant.sample((4, 5), device=device, dtype=torch.float64, reduction=reduction)
        expected = evaluate(loss.function, sample).gradients
        leaves = sample.leaves()
        for name in variant.differentiable:
            value = leaves.call(loss.function)
            with forward_ad.dual_level():
                one = torch.ones_like(value)
                dual = forward_ad.make_dual(one, 2 * one)
                gradient = attempt(
                    lambda: torch.autograd.grad(
                        value,  # noqa: B023
                        leaves.tensors[name],  # noqa: B023
                        dual,  # noqa: B023
                        create_graph=create_graph,  # noqa: B023
                    )[0]
                )
                if isinstance(gradient, Exception):
                    assert (loss.name, variant.name, reduction) == ("mse_loss", "plain", "mean")
                    assert MSE_IN_FORWARD_MODE in str(gradient)
                    continue
                primal, tangent = forward_ad.unpack_dual(gradient)
            torch.testing.assert_close(primal, expected[name])
            assert tangent is not None, f"{sample.name}: the tangent of grad_output was lost"
            torch.testing.assert_close(tangent, 2 * expected[name])


@per_variant
def test_batched_gradients(loss: Loss, variant: Variant, device: str) -> None:
    """is_grads_batched=True: as one call for each grad_output."""
    for reduction in loss.reductions:
        sample = variant.sample((4, 5), device=device, dtype=torch.float64, reduction=reduction)
        leaves = sample.leaves()
        value = leaves.call(loss.function)
        batch = torch.randn(3, *value.shape, dtype=value.dtype).to(device)
        for create_graph in (True, False):
            found = torch.autograd.grad(
                value,
                leaves_of(leaves),
                batch,
                is_grads_batched=True,
                create_graph=create_graph,
            )
            for n, grad_output in enumerate(batch):
                expected = evaluate(loss.function, sample, grad_output).gradients
                for name, gradients in zip(variant.differentiable, found, strict=True):
                    torch.testing.assert_close(gradients[n], expected[name])
            if create_graph:
                value = leaves.call(loss.function)
                true = leaves.call(loss.reference)
                firsts = torch.autograd.grad(
                    true, leaves_of(leaves), batch, is_grads_batched=True, create_graph=True
                )
                if not any(first.requires_grad for first in firsts):
                    continue
                second, expected_second = (
                    torch.autograd.grad(
                        sum(g.square().sum() for g in gradients),
                        leaves_of(leaves),
                        allow_unused=True,
                        materialize_grads=True,
                    )
                    for gradients in (found, firsts)
                )
                torch.testing.assert_close(second, expected_second)


def test_batched_gradients_of_one_tensor_in_two_places(device: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64, device=device).softmax(1).requires_grad_()
    value = lossops.kl_div(x, x, reduction="none", log_input=False) + lossops.mse_loss(x, x * x)
    batch = torch.randn(3, 4, 5, dtype=torch.float64).to(device)
    found = torch.autograd.grad(value, x, batch, is_grads_batched=True, retain_graph=True)[0]
    for gradient, grad_output in zip(found, batch, strict=True):
        (expected,) = torch.autograd.grad(value, x, grad_output, retain_graph=True)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_loss
def test_vmap_of_a_backward_pass(loss: Loss, device: str) -> None:
    """By torch.func.vmap of torch.autograd.grad, where a gradient may be kept."""
    for reduction in loss.reductions:
        sample = loss.variants[0].sample(
            (4, 5), device=device, dtype=torch.float64, reduction=reduction
        )
        x = sample.tensors["input"].detach().requires_grad_()
        value = sample.map(Tensor.detach).with_tensors(input=x).call(loss.function)
        batch = torch.randn(3, *value.shape, dtype=value.dtype).to(device)

        def gradient(grad_output: Tensor) -> Tensor:
            return torch.autograd.grad(value, x, grad_output, retain_graph=True)[0]  # noqa: B023

        found = torch.func.vmap(gradient)(batch)
        for n, grad_output in enumerate(batch):
            torch.testing.assert_close(found[n], gradient(grad_output))


@per_loss
def test_dual_level_alone_changes_nothing(loss: Loss, device: str) -> None:
    """Nor one of another thread: levels are the process's."""
    sample = loss.variants[0].sample((4, 5), device=device)
    expected = evaluate(loss.function, sample)
    with forward_ad.dual_level(), ThreadPoolExecutor(1) as pool:
        for found in (
            evaluate(loss.function, sample),
            pool.submit(evaluate, loss.function, sample).result(),
        ):
            assert same_bits(found.value, expected.value)
            for name, gradient in found.gradients.items():
                assert same_bits(gradient, expected.gradients[name])


def test_dual_level_alone_keeps_ignored_rows_at_zero(device: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [math.nan, 1.0, 1.0]], device=device, requires_grad=True)
    target = torch.tensor([0, -100], device=device)
    loss = lossops.cross_entropy(x, target)
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient[1], torch.zeros(3, device=device))


@per_call
@per_loss
def test_forward_mode_refuses_what_the_loss_refuses(loss: Loss, through: str, device: str) -> None:
    sample = loss.variants[0].sample((4, 5), device=device)
    call = call_of(loss, through)
    wrong = [sample.with_options(reduction="average"), sample.with_tensors(target=torch.ones(3, 7))]
    if loss.name == "cross_entropy":
        wrong.append(sample.with_options(label_smoothing=-0.5))
        wrong.append(sample.with_tensors(target=sample.tensors["target"].to(torch.int16)))
    for bad in wrong:
        with pytest.raises(Exception) as plain:  # noqa: PT011 (whatever it is)
            bad.call(call)
        with pytest.raises(type(plain.value)) as forward:
            with_tangent(call, bad, "input")
        assert str(forward.value) == str(plain.value)


@per_variant
def test_second_derivatives_under_autocast(loss: Loss, variant: Variant, device: str) -> None:
    """With the scale of a GradScaler, which float16 does not hold."""
    # Gradients of probabilities are logarithms, and would not fit float16 themselves.
    scale = 16384.0 if "target" in variant.differentiable else 65536.0
    sample = variant.sample((4, 5), device=device, dtype=torch.float16, reduction="mean")
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for results, call, current in (
        (found, loss.function, sample.leaves()),
        (expected, loss.reference, sample.double().leaves()),
    ):
        leaves = leaves_of(current)
        with torch.autocast(device, torch.float16, enabled=call is loss.function):
            value = current.call(call)
        batch = torch.tensor([scale, 1.0], dtype=value.dtype, device=device)
        first = torch.autograd.grad(value, leaves, batch[0], create_graph=True)
        batched = torch.autograd.grad(
            value, leaves, batch, is_grads_batched=True, retain_graph=True
        )
        results += [gradients[0] for gradients in batched]
        if any(g.requires_grad for g in first):
            penalty = scale * sum((g.double() / scale).square().sum() for g in first)
            results += torch.autograd.grad(
                penalty, leaves, allow_unused=True, materialize_grads=True
            )
    compared = []
    for actual, exact in zip(found, expected, strict=True):
        largest = torch.finfo(torch.float16).max
        bound = 0.02 * exact.abs().clamp(max=largest).max() + 1e-3
        where = f"{loss.name} {variant.name}"
        is_finite = exact.abs() < largest
        compared.append(bool(is_finite.any()))
        assert_within(
            actual.double().where(is_finite, 0.0),
            exact.where(is_finite, 0.0),
            bound.expand_as(exact),
            where,
        )
    # Of a few draws, one result of some has no number that float16 holds.
    assert compared.count(False) <= 1


@per_loss
def test_traced_losses_keep_their_gradients(loss: Loss, device: str) -> None:
    """torch.jit.trace and make_fx record the operator that has a formula."""
    sample = loss.variants[0].sample((4, 5), device=device, dtype=torch.float64)
    x = sample.tensors["input"].detach()
    others = sample.map(Tensor.detach)
    expected = evaluate(loss.function, sample)

    def function(x: Tensor) -> Tensor:
        return others.with_tensors(input=x).call(loss.function)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated, and not thread-safe
        graphs = [torch.jit.trace(function, (x,)), make_fx(function)(x)]
    for graph in graphs:
        leaf = x.clone().requires_grad_()
        value = graph(leaf)
        assert same_bits(value.detach(), expected.value)
        (gradient,) = torch.autograd.grad(value, leaf)
        assert same_bits(gradient, expected.gradients["input"])


@per_variant
def test_func_grad_vjp_and_jacrev(loss: Loss, variant: Variant, device: str) -> None:
    for reduction in loss.reductions[1:]:
        sample = variant.sample((6, 5), device=device, reduction=reduction)
        function = as_function_of_leaves(loss.function, sample)
        positions = tuple(range(len(variant.differentiable)))
        gradients, value = torch.func.grad_and_value(function, argnums=positions)(
            *leaves_of(sample)
        )
        expected = evaluate(loss.function, sample)
        assert same_bits(value, expected.value)
        _, pull_back = torch.func.vjp(function, *leaves_of(sample))
        pulled = pull_back(torch.ones_like(value))
        jacobians = torch.func.jacrev(function, argnums=positions)(*leaves_of(sample))
        for found in (gradients, pulled, jacobians):
            for name, gradient in zip(variant.differentiable, found, strict=True):
                assert same_bits(gradient, expected.gradients[name]), f"{sample.name}: {name}"


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_loss
def test_jacrev_of_many_values(loss: Loss, device: str) -> None:
    for variant in loss.variants:
        sample = variant.sample((4, 5), device=device, dtype=torch.float64, reduction="none")
        positions = tuple(range(len(variant.differentiable)))
        found, expected = (
            torch.func.jacrev(as_function_of_leaves(call, sample), argnums=positions)(
                *leaves_of(sample)
            )
            for call in (loss.function, loss.reference)
        )
        for actual, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, exact)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_variant
def test_torch_func_of_gradients(loss: Loss, variant: Variant, device: str) -> None:
    """jacrev of a gradient, a third derivative, per-sample gradients differentiated: as torch's."""
    func = torch.func
    for reduction in ("mean", "none"):
        sample = variant.sample((3, 4), device=device, dtype=torch.float64, reduction=reduction)
        x = sample.tensors["input"]

        def derivatives(call: LossFunction) -> list[Tensor]:
            def f(a: Tensor) -> Tensor:
                return sample.with_tensors(input=a).call(call).square().sum()  # noqa: B023

            def g(a: Tensor) -> Tensor:
                return func.grad(f)(a).sin().sum()

            mapped = func.vmap(func.grad(lambda a: f(a)))
            stack = torch.stack([x, x * 0.5])  # noqa: B023
            leaf = stack.clone().requires_grad_()
            (through,) = torch.autograd.grad(mapped(leaf).square().sum(), leaf)
            return [
                func.jacrev(func.grad(f))(x),  # noqa: B023
                func.jacrev(func.jacrev(f))(x),  # noqa: B023
                func.grad(lambda a: func.grad(g)(a).square().sum())(x),  # noqa: B023
                func.grad(lambda a: mapped(a).square().sum())(stack),
                through,
            ]

        for actual, expected in zip(
            derivatives(loss.function), derivatives(loss.reference), strict=True
        ):
            torch.testing.assert_close(actual, expected, msg=lambda m: f"{sample.name}: {m}")  # noqa: B023


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_variant
def test_forward_mode_in_torch_func(loss: Loss, variant: Variant, device: str) -> None:
    """hessian, jacfwd, jvp of a gradient and of a gradient's pull-back: as torch's."""
    func = torch.func
    for reduction in ("mean", "none"):
        sample = variant.sample((3, 4), device=device, dtype=torch.float64, reduction=reduction)
        x = sample.tensors["input"]

        def derivatives(call: LossFunction) -> list[Any]:
            def f(a: Tensor) -> Tensor:
                return sample.with_tensors(input=a).call(call).square().sum()  # noqa: B023

            _, pull_back = func.vjp(lambda a: f(a).sin(), x)  # noqa: B023
            one = torch.ones((), dtype=torch.float64, device=device)
            calls: tuple[Callable[[], Any], ...] = (
                lambda: func.hessian(f)(x),  # noqa: B023
                lambda: func.jacfwd(f)(x),  # noqa: B023
                lambda: func.jacrev(func.jacfwd(f))(x),  # noqa: B023
                lambda: func.jacfwd(func.jacfwd(f))(x),  # noqa: B023
                lambda: func.jvp(func.grad(f), (x,), (x,)),  # noqa: B023
                lambda: func.vmap(func.hessian(f))(torch.stack([x, x * 0.5])),  # noqa: B023
                lambda: func.jvp(pull_back, (one,), (one,)),
            )
            return [attempt(call) for call in calls]

        def pulled(call: LossFunction) -> list[Any]:
            """Pull-backs that are called when the level of their vjp is gone."""

            def f(a: Tensor) -> Tensor:
                return sample.with_tensors(input=a).call(call).sin().sum()  # noqa: B023

            _, of_gradient = func.vjp(func.grad(f), x)  # noqa: B023
            value, of_value = func.vjp(f, x)  # noqa: B023
            one = torch.ones_like(value)
            found = [attempt(lambda: func.jvp(of_gradient, (x,), (x,)))]  # noqa: B023
            with forward_ad.dual_level():
                found.append(attempt(lambda: of_value(one)))
                found.append(attempt(lambda: of_gradient(x)))  # noqa: B023
            return found

        for actual, expected in zip(
            derivatives(loss.function) + pulled(loss.function),
            derivatives(loss.reference) + pulled(loss.reference),
            strict=True,
        ):
            if isinstance(expected, Exception):
                assert MSE_IN_FORWARD_MODE in str(expected)
                continue
            torch.testing.assert_close(actual, expected, msg=lambda m: f"{sample.name}: {m}")  # noqa: B023


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_variant
def test_functionalize(loss: Loss, variant: Variant, device: str) -> None:
    """Alone, with other transforms in any order, and in a graph: as torch's losses."""
    func = torch.func
    for reduction in ("mean", "none"):
        sample = variant.sample((3, 4), device=device, dtype=torch.float64, reduction=reduction)
        x = sample.tensors["input"].detach()
        others = sample.map(Tensor.detach)

        def results(call: LossFunction, *, is_op: bool) -> list[Tensor]:
            def f(a: Tensor) -> Tensor:
                return others.with_tensors(input=a.clone().mul_(2)).call(call).sum()  # noqa: B023

            leaf = x.clone().requires_grad_()  # noqa: B023
            value = func.functionalize(f)(leaf)
            found = [
                func.functionalize(f)(x),  # noqa: B023
                make_fx(func.functionalize(f))(x)(x),  # noqa: B023
                func.functionalize(func.vmap(f))(x[None]),  # noqa: B023
                value.detach(),
                *torch.autograd.grad(value, leaf),
            ]
            if not is_op:  # torch.func.grad straight through an operator is an error of torch's
                found.append(func.functionalize(func.grad(f))(x))  # noqa: B023
                found.append(func.grad(func.functionalize(f))(x))  # noqa: B023
            return found

        expected = results(loss.reference, is_op=False)
        for call, is_op in ((loss.function, False), (loss.op, True)):
            for found, exact in zip(results(call, is_op=is_op), expected, strict=is_op is False):
                torch.testing.assert_close(found, exact, msg=lambda m: f"{sample.name}: {m}")  # noqa: B023


@per_variant
def test_second_derivatives_have_no_graph_of_their_own(
    loss: Loss, variant: Variant, device: str
) -> None:
    """Without create_graph, as torch's: else a loop of such products keeps all its graphs."""
    for reduction in loss.reductions:
        for call in (loss.function, loss.op):
            sample = variant.sample((4, 5), device=device, reduction=reduction).leaves()
            leaves = leaves_of(sample)
            first = torch.autograd.grad(sample.call(call).sum(), leaves, create_graph=True)
            total = sum(g.square().sum() for g in first)
            for create_graph in (True, False):
                second = torch.autograd.grad(
                    total, leaves, create_graph=create_graph, retain_graph=True
                )
                if not create_graph:
                    assert not any(g.requires_grad for g in second)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_loss
def test_vmap(loss: Loss, device: str) -> None:
    """vmap of a loss, and of its gradient, equals one call for each sample."""
    for variant in loss.variants:
        if "weight" in variant.make((3, 5), torch.float32):
            continue  # one for all samples, which would be another test
        for reduction in loss.reductions:
            samples = [variant.sample((3, 5), device=device, reduction=reduction) for _ in range(4)]
            x = torch.stack([s.tensors["input"] for s in samples])
            t = torch.stack([s.tensors["target"] for s in samples])
            options: dict[str, Any] = dict(samples[0].options)

            def call(x: Tensor, t: Tensor) -> Tensor:
                return loss.function(x, t, **options)  # noqa: B023

            none = torch.func.vmap(call)(x[:0], t[:0])
            assert none.shape == (0, *call(x[0], t[0]).shape) and none.dtype == x.dtype
            if reduction != "none":
                assert torch.func.vmap(torch.func.grad(call))(x[:0], t[:0]).shape == (0, 3, 5)

            expected = torch.stack([s.call(loss.function) for s in samples])
            found = torch.func.vmap(call)(x, t)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            last = torch.func.vmap(call, in_dims=(1, -1))(x.movedim(0, 1), t.movedim(0, -1))
            assert same_bits(last, found)
            if reduction == "none":
                continue
            found = torch.func.vmap(torch.func.grad(call))(x, t)
            expected = torch.stack([evaluate(loss.function, s).gradients["input"] for s in samples])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@per_loss
def test_vmap_under_autograd(loss: Loss, device: str) -> None:
    """Gradients pass through vmap, whether autograd or torch.func asks for them."""
    variant = loss.variants[0]
    samples = [variant.sample((3, 5), device=device, reduction="sum") for _ in range(4)]
    x = torch.stack([s.tensors["input"] for s in samples]).detach()
    t = torch.stack([s.tensors["target"] for s in samples]).detach()
    options: dict[str, Any] = dict(samples[0].options)

    def total(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda a, b: loss.function(a, b, **options))(x, t).sum()

    expected = torch.stack([evaluate(loss.function, s).gradients["input"] for s in samples])
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.func.grad(total)(x), expected, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert not total(leaf).requires_grad


# --- hooks on the graph -------------------------------------------------------------------------


@per_loss
def test_saved_tensor_hooks_and_checkpointing(loss: Loss, device: str) -> None:
    for variant in loss.variants:
        sample = variant.sample((6, 9), device=device)
        expected = evaluate(loss.function, sample)
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
            hooked = evaluate(loss.function, sample)
        leaves = sample.leaves()
        function = as_function_of_leaves(loss.function, leaves)
        value = torch.utils.checkpoint.checkpoint(function, *leaves_of(leaves), use_reentrant=False)
        checkpointed = torch.autograd.grad(value, leaves_of(leaves))
        for i, name in enumerate(variant.differentiable):
            assert same_bits(hooked.gradients[name], expected.gradients[name])
            assert same_bits(checkpointed[i], expected.gradients[name])
