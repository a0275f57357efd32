"""The operators: what torch.library checks, fused passes, memory read in place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from losses import (
    LOSS_IDS,
    LOSSES,
    VARIANT_IDS,
    VARIANTS,
    Loss,
    Sample,
    Variant,
    evaluate,
)
from numerics import layouts_of, same_bits, significant_strides
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)


def forward_arguments(loss: Loss, sample: Sample) -> dict[str, Any]:
    """The arguments of the loss's *_forward operator for `sample`, by name."""
    given: dict[str, Any] = {**sample.tensors, **sample.options}
    arguments = {}
    for argument in loss.forward_op._schema.arguments:
        if argument.name == "float32_result":
            arguments[argument.name] = False
        elif argument.name == "weight":
            arguments[argument.name] = given.get("weight")
        else:
            defaults = {a.name: a.default_value for a in loss.op._schema.arguments}
            arguments[argument.name] = given.get(argument.name, defaults[argument.name])
    return arguments


def opcheck_samples(loss: Loss, device: str) -> Iterator[Sample]:
    """All small samples in float32, and one of each variant in other dtypes and layouts."""
    yield from loss.samples(device=device)
    for variant in loss.variants:
        for dtype in (torch.float64, torch.bfloat16):
            yield variant.sample((4, 5), device=device, dtype=dtype)
        for layout in ("reversed", "gap_inner"):
            sample = variant.sample((4, 5), device=device, reduction="none")
            yield sample.map(lambda t, name=layout: layouts_of(t).get(name, Tensor.contiguous)(t))


@per_loss
def test_opcheck(loss: Loss, device: str) -> None:
    """Schema, autograd registration, fake kernels; for some samples AOT dispatch as well.

    AOT dispatch takes most of the time, and what it depends on is the variant.
    """
    traced = set()
    for sample in opcheck_samples(loss, device):
        # loss.samples() yields every variant with every reduction
        key = (sample.name.split()[0], sample.options.get("reduction"))
        utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
        # AOT dispatch compares with NaN unequal to itself, as where every row is ignored
        if key not in traced and not sample.call(loss.function).isnan().any():
            traced.add(key)
            utils.append("test_aot_dispatch_dynamic")
        leaves = sample.leaves()
        others = {k: v for k, v in leaves.tensors.items() if k not in ("input", "target")}
        operands = (leaves.tensors["input"], leaves.tensors["target"])
        torch.library.opcheck(loss.op, operands, {**others, **leaves.options}, test_utils=utils)
        arguments = tuple(forward_arguments(loss, leaves).values())
        torch.library.opcheck(loss.forward_op, arguments, test_utils=utils)


@per_variant
def test_meta_tensors(loss: Loss, variant: Variant) -> None:
    """The fake kernel gives dtype, shape and strides of the real one, for every layout."""
    for shape in ((33, 19), (2, 3, 5, 4)):
        sample = variant.sample(shape, reduction="none")
        for x_name, x_layout in layouts_of(sample.tensors["input"]).items():
            for t_name, t_layout in layouts_of(sample.tensors["target"]).items():
                for reduction in ("none", loss.reductions[-1]):
                    changed = sample.with_tensors(
                        input=x_layout(sample.tensors["input"]),
                        target=t_layout(sample.tensors["target"]),
                    ).with_options(reduction=reduction)
                    real = changed.call(loss.op)
                    fake = changed.map(
                        lambda t: torch.empty_strided(
                            t.shape, t.stride(), dtype=t.dtype, device="meta"
                        )
                    ).call(loss.op)
                    what = f"{changed.name} input {x_name}, target {t_name}"
                    assert fake.device.type == "meta", what
                    assert fake.dtype == real.dtype, what
                    assert fake.shape == real.shape, what
                    assert significant_strides(fake) == significant_strides(real), what


@per_variant
def test_function_and_op_are_equal(loss: Loss, variant: Variant, device: str) -> None:
    """Bit for bit, gradients included: the two ways through autograd share their formulas."""
    for dtype in (torch.float32, torch.bfloat16):
        for reduction in loss.reductions:
            sample = variant.sample((33, 129), device=device, dtype=dtype, reduction=reduction)
            ours, op = evaluate(loss.function, sample), evaluate(loss.op, sample)
            assert same_bits(ours.value, op.value), sample.name
            for name, gradient in ours.gradients.items():
                assert same_bits(gradient, op.gradients[name]), f"{sample.name}: {name}"


# Operators that move no data.
VIEWS = re.compile(
    r"aten::(empty|empty_like|empty_strided|expand|view|alias|detach|as_strided|reshape|"
    r"_reshape_alias|squeeze|unsqueeze|permute|transpose|select|slice|narrow|view_as|"
    r"broadcast_tensors|resolve_conj|resolve_neg)$"
)


def computed_by_torch(sample: Sample, loss: Loss) -> set[str]:
    """The names of torch's own operators in a forward and backward pass that read or write data."""
    sample = sample.leaves()
    with torch.no_grad():
        grad_output = torch.ones_like(sample.call(loss.function))
    wanted = [sample.tensors[name] for name in sample.differentiable]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.autograd.grad(sample.call(loss.function), wanted, grad_output)
    names = {event.name for event in recorded.events() if event.name.startswith("aten::")}
    assert any("lossops" in event.name for event in recorded.events())
    if sample.tensors["input"].is_cpu:
        names -= {"aten::item", "aten::_local_scalar_dense"}  # whether grad_output is 1
    return {name for name in names if not VIEWS.match(name)}


@per_variant
def test_forward_and_backward_are_fused(loss: Loss, variant: Variant, device: str) -> None:
    """No arithmetic and no copy by torch around the kernels, whatever the layout.

    Contiguous and dense permuted inputs are read in place: (batch, time, vocab).transpose(1, 2) of
    logits too.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for reduction in loss.reductions:
            for shape, layout in (
                ((33, 19), "contiguous"),
                ((33, 19), "misaligned"),
                ((33, 19), "reversed"),
                ((4, 33, 19), "classes_last"),
            ):
                sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
                sample = sample.map(
                    lambda t, name=layout: layouts_of(t).get(name, Tensor.contiguous)(t)
                )
                found = computed_by_torch(sample, loss)
                assert not found, f"{sample.name} {layout}: torch ran {sorted(found)}"


@pytest.mark.cuda
@per_variant
def test_memory_of_a_step(loss: Loss, variant: Variant) -> None:
    """A small part of the input, and the gradients, which may come with the forward pass."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape, layout in (((4096, 4096), "contiguous"), ((4, 4096, 1024), "classes_last")):
            sample = variant.sample(shape, device="cuda", dtype=dtype, reduction="mean")
            sample = sample.map(
                lambda t, name=layout: layouts_of(t).get(name, Tensor.contiguous)(t)
            ).leaves()
            sample.call(loss.function)  # whatever a first call allocates for good
            size = sample.tensors["input"].nbytes
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            value = sample.call(loss.function)
            forward = torch.cuda.max_memory_allocated() - before
            kept = sum(
                g.nbytes for g in getattr(value.grad_fn, "kept", None) or () if g is not None
            )
            assert forward < kept + size / 4, f"{sample.name} {layout}: forward allocates {forward}"
            gradients = torch.autograd.grad(
                value, [sample.tensors[name] for name in sample.differentiable]
            )
            expected = sum(g.nbytes for g in gradients)
            step = torch.cuda.max_memory_allocated() - before
            assert step < expected + size / 4, f"{sample.name} {layout}: a step allocates {step}"


ANY_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.complex64),
)


@pytest.mark.parametrize("second", ["target", "weight"])
@per_loss
def test_fake_kernels_take_the_dtypes_of_real_ones(loss: Loss, second: str) -> None:
    """What fakes.py says of dtypes beside the traits and checks in C++."""

    def result(dtypes: tuple[torch.dtype, torch.dtype], device: str, *, indices: bool) -> Any:
        tensors = {"input": torch.ones(4, 3), "target": torch.ones(4, 3)}
        if indices:
            tensors["target"] = torch.ones(4, dtype=torch.int64)
        if second == "weight":
            tensors["weight"] = torch.ones((4, 3) if loss.elementwise else (3,))
        for name, dtype in zip(("input", second), dtypes, strict=True):
            tensors[name] = tensors[name].to(dtype)
        try:
            return loss.op(**{name: tensor.to(device) for name, tensor in tensors.items()}).dtype
        except RuntimeError:
            return None

    if second == "weight" and loss.name == "kl_div":
        pytest.skip("kl_div has no weight")
    for indices in (False,) if loss.elementwise else (False, True):
        for dtypes in itertools.product(ANY_DTYPES, repeat=2):
            real = result(dtypes, "cpu", indices=indices)
            fake = result(dtypes, "meta", indices=indices)
            # Class indices of a wrong shape, and weights of another dtype, show when code runs.
            is_late = not loss.elementwise and indices == (second == "weight") and real is None
            assert fake == real or is_late, (indices, *dtypes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint16], ids=str)
@per_loss
def test_fake_kernels_name_a_wrong_dtype(loss: Loss, dtype: torch.dtype) -> None:
    """Compiled code says it when it is traced, as eager code does when it runs."""
    sample = loss.variants[0].sample((4, 5)).map(lambda t: t.to("meta"))
    for name, tensor in sample.tensors.items():
        with pytest.raises(RuntimeError, match=f"{name} must be .* {str(dtype)[6:]}"):
            sample.with_tensors(**{name: tensor.to(dtype)}).call(loss.op)


@per_loss
def test_float8_is_told_which_dtypes_are_taken(loss: Loss, device: str) -> None:
    given = loss.variants[0].sample((4, 5))
    for where in (device, "meta"):
        sample = given.map(lambda t, where=where: t.to(where))
        wrong = sample.with_tensors(input=sample.tensors["input"].to(torch.float8_e4m3fn))
        words = "input must be float64, float32, float16.* bfloat16.* but is float8_e4m3fn"
        with pytest.raises(RuntimeError, match=words):
            wrong.call(loss.op)


@per_loss
def test_fake_kernels_say_which_argument_is_where(loss: Loss) -> None:
    sample = loss.variants[0].sample((4, 5))
    wrong = sample.with_tensors(input=sample.tensors["input"].to("meta"))
    with pytest.raises(RuntimeError, match="target is on cpu but input is on meta"):
        wrong.call(loss.op)
