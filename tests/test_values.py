"""Every loss against torch and float64: values, gradients, dtypes, shapes, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import check, truth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from losses import LOSS_IDS, LOSSES, VARIANT_IDS, VARIANTS, Loss, Sample, Variant, evaluate
from numerics import DTYPES, HALF_TYPES, assert_within, layouts_of, ulp
from torch import Tensor

# Around every vector width (1 to 16 elements), warp, block and tile size that a kernel may use,
# then several tiles.
SIZES = (
    *range(1, 10),
    *(n + d for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) for d in (-1, 0, 1)),
    *(8191, 8193, 12293, 16385, 65537),
)

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@per_dtype
@per_variant
def test_small_shapes(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    for shape in loss.small_shapes:
        for reduction in loss.reductions:
            check(loss, variant.sample(shape, device=device, dtype=dtype, reduction=reduction))


@per_variant
def test_op_and_module_are_the_function(loss: Loss, variant: Variant, device: str) -> None:
    for shape in loss.small_shapes:
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, reduction=reduction)
            ours = evaluate(loss.function, sample)
            op = evaluate(loss.op, sample)
            torch.testing.assert_close(op.value, ours.value, rtol=0, atol=0, equal_nan=True)
            assert op.gradients.keys() == ours.gradients.keys()
            for name, gradient in op.gradients.items():
                torch.testing.assert_close(
                    gradient, ours.gradients[name], rtol=0, atol=0, equal_nan=True
                )


@per_dtype
@per_variant
def test_sizes(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    reduced = loss.reductions[1:]
    for i, size in enumerate(SIZES):
        # Every size in the first two shapes; the others take turns.
        shapes = {0, 1, i % len(loss.size_to_shape)} if size < 10000 else {0}
        for reduction in ("none", reduced[i % len(reduced)]):
            for j in sorted(shapes):
                shape = loss.size_to_shape[j](size)
                check(loss, variant.sample(shape, device=device, dtype=dtype, reduction=reduction))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@per_variant
def test_large_sizes(loss: Loss, variant: Variant, dtype: torch.dtype) -> None:
    """More partial results than one block folds in one step; rows that no block holds at once."""
    shapes: tuple[tuple[int, ...], ...] = ((2**20 + 1,), (2**22 + 4097,), (3, 2**20 + 3))
    if not loss.elementwise:
        shapes = ((3, 2**18 + 1), (2**20 + 1, 5), (70_001, 33), (2, 7, 2**18 + 3))
    for shape in shapes:
        for reduction in ("none", "mean"):
            with torch.device("cuda"):  # the CPU would take long to draw so many numbers
                sample = variant.sample(shape, device="cuda", dtype=dtype, reduction=reduction)
                known = truth(loss, sample, device="cuda")
            check(loss, sample, known=known)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@per_variant
def test_layouts(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    """Each layout of the input with each layout of the target."""
    for shape in ((33, 19), (40, 67), (3, 9, 7), (2, 3, 5, 4)):
        sample = variant.sample(shape, device=device, dtype=dtype)
        x, t = sample.tensors["input"], sample.tensors["target"]
        known = {r: truth(loss, sample.with_options(reduction=r)) for r in loss.reductions}
        for i, (x_name, x_layout) in enumerate(layouts_of(x).items()):
            for j, (t_name, t_layout) in enumerate(layouts_of(t).items()):
                reduction = loss.reductions[(i + j) % len(loss.reductions)]
                changed = sample.with_tensors(input=x_layout(x), target=t_layout(t))
                if "weight" in sample.tensors:
                    weight = sample.tensors["weight"]
                    layouts = list(layouts_of(weight).values())
                    changed = changed.with_tensors(weight=layouts[j % len(layouts)](weight))
                changed = changed.renamed(f"input {x_name}, target {t_name}")
                for chosen in {"none", reduction}:
                    check(loss, changed.with_options(reduction=chosen), known=known[chosen])


BROADCASTS = (
    ((4, 5), (5,)),
    ((5,), (4, 5)),
    ((4, 1), (1, 5)),
    ((), (3, 4)),
    ((3, 4), ()),
    ((2, 1, 3), (4, 1)),
    ((1,), (1, 1)),
    ((0, 3), (1, 3)),
    ((1, 3), (0, 3)),
    ((257, 1), (1, 129)),
    ((1, 37), (300, 37)),
    ((300, 37), (300, 1)),
    ((2, 150, 37), (2, 1, 37)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("loss", "variant"),
    [pair for pair in VARIANTS if pair[0].elementwise],
    ids=[name for name, pair in zip(VARIANT_IDS, VARIANTS, strict=True) if pair[0].elementwise],
)
def test_broadcasting(loss: Loss, variant: Variant, dtype: torch.dtype, device: str) -> None:
    for input_shape, target_shape in BROADCASTS:
        for reduction in loss.reductions:
            sample = variant.sample(input_shape, device=device, dtype=dtype, reduction=reduction)
            other = variant.sample(target_shape, device=device, dtype=dtype)
            sample = sample.with_tensors(target=other.tensors["target"])
            check(loss, sample.renamed(f"target {target_shape}"))


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda loss: loss.name)
def test_broadcast_gradients_of_many_terms(loss: Loss, device: str) -> None:
    """Sums so long that they are put together from several."""
    variant = loss.variants[0]
    for shape, other in (((3,), (70001, 3)), ((1,), (200003,)), ((2, 1), (2, 70001))):
        for input_shape, target_shape in ((shape, other), (other, shape)):
            sample = variant.sample(input_shape, device=device, reduction="mean")
            target = variant.sample(target_shape, device=device).tensors["target"]
            check(loss, sample.with_tensors(target=target).renamed(f"target {target_shape}"))


@pytest.mark.cuda
@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda loss: loss.name)
def test_broadcast_gradients_of_small_blocks(loss: Loss) -> None:
    """Sums of rows whose columns leave warps of a block without work, by blocks with several."""
    variant = loss.variants[0]
    for shape, other in (
        ((70000, 140), (70000, 1)),
        ((1300, 65, 20), (1300, 65, 1)),
        ((70000, 140), (140,)),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            for reduction in ("none", "mean"):
                sample = variant.sample(shape, device="cuda", dtype=dtype, reduction=reduction)
                target = variant.sample(other, device="cuda", dtype=dtype).tensors["target"]
                check(loss, sample.with_tensors(target=target).renamed(f"target {other}"))


@per_variant
def test_expanded_views(loss: Loss, variant: Variant, device: str) -> None:
    """Arguments that are broadcast views, with stride 0 in some dimensions or in all."""

    def expanded(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
        shape = tensor.shape
        for dim in dims:
            if dim < tensor.dim():
                tensor = tensor.narrow(dim, 0, 1)
        return tensor.expand(shape)

    for shape in ((6, 5), (3, 5, 4)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, reduction=reduction)
            for dims in ((0,), (1,), (0, 1), (1, 2), (0, 1, 2)):
                for which in (("input",), ("target",), tuple(sample.tensors)):
                    views = {k: expanded(sample.tensors[k], dims) for k in which}
                    changed = sample.with_tensors(**views)
                    check(loss, changed.renamed(f"{which} expanded along {dims}"))


@per_variant
def test_many_dimensions(loss: Loss, variant: Variant, device: str) -> None:
    """More dimensions than a kernel may have room for, in orders that do not collapse."""
    shapes: tuple[tuple[int, ...], ...] = ((2,) * 12, (1,) * 40 + (3, 5), (3, 1, 2) * 7)
    for shape in shapes:
        for reduction in ("none", loss.reductions[-1]):
            sample = variant.sample(shape, device=device, reduction=reduction)
            even_odd = sample.map(_even_dimensions_first)
            check(loss, sample)
            check(loss, even_odd.renamed("even dimensions first in memory"))
            mixed = sample.with_tensors(target=even_odd.tensors["target"])
            check(loss, mixed.renamed("even dimensions of the target first in memory"))


def _even_dimensions_first(tensor: Tensor) -> Tensor:
    order = [*range(0, tensor.dim(), 2), *range(1, tensor.dim(), 2)]
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


@per_variant
def test_views_with_the_negative_bit(loss: Loss, variant: Variant, device: str) -> None:
    """The imaginary part of a conjugate is a view whose memory holds the opposite sign."""

    def negated(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        view = torch.complex(torch.zeros_like(tensor), -tensor).conj().imag
        assert view.is_neg()
        return view

    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, reduction=reduction)
        check(loss, sample.map(negated).renamed("negative bit"))


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_promotion(dtype: torch.dtype, target_dtype: torch.dtype, device: str) -> None:
    """Result of torch's dtype; each gradient of its argument's dtype."""
    for loss, variant in VARIANTS:
        sample = variant.sample((5, 7), device=device, dtype=dtype)
        if "target" not in variant.differentiable:
            continue
        target = sample.tensors["target"].to(target_dtype)
        for reduction in loss.reductions:
            changed = sample.with_tensors(target=target).with_options(reduction=reduction)
            check(loss, changed.renamed(f"target {target_dtype}"), not_worse_than_torch=True)
        if loss.elementwise:
            for zero_dim in ("input", "target"):  # 0-d tensors are promoted by other rules
                changed = sample.with_tensors(target=target)
                if "weight" in sample.tensors and zero_dim == "input":
                    continue  # weight has the input's shape
                scalar = changed.tensors[zero_dim].reshape(-1)[0].detach()
                changed = changed.with_tensors(**{zero_dim: scalar})
                changed = changed.renamed(f"target {target_dtype}, {zero_dim} 0-d")
                check(loss, changed, not_worse_than_torch=True)


def against_torch(loss: Loss, sample: Sample) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """By name of the result: ours, torch's and the float64 one."""
    ours = evaluate(loss.function, sample)
    torchs = evaluate(loss.reference, sample)
    exact = evaluate(loss.reference, sample.double())
    return {"value": (ours.value, torchs.value, exact.value)} | {
        name: (gradient, torchs.gradients[name], exact.gradients[name])
        for name, gradient in ours.gradients.items()
    }


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@per_variant
def test_half_types_against_float64(
    loss: Loss, variant: Variant, dtype: torch.dtype, device: str
) -> None:
    """Not worse than torch, or within one unit in the last place; 99.9 % correctly rounded.

    A result that is near 0 because terms cancel keeps the rounding of those terms in float32.
    """
    for shape in ((64, 300), (40, 3000), (20_000, 7)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
            results = against_torch(loss, sample)
            sizes = loss.magnitudes(sample.double(), torch.ones_like(results["value"][2]))
            for name, (mine, theirs, true) in results.items():
                allowed = torch.maximum((theirs.double() - true).abs(), ulp(true, dtype))
                allowed = torch.maximum(allowed, 4 * 2.0**-24 * sizes[name])
                # where torch overflowed, any finite value is better
                allowed = torch.nan_to_num(allowed, nan=torch.inf)
                assert_within(mine, true, allowed, f"{sample.name}: {name}")
            if reduction == "none" and results["value"][0].numel() > 10_000:
                mine, _, true = results["value"]
                right = (mine == true.to(dtype)).double().mean().item()
                assert right >= 0.999, f"{sample.name}: {right:.5f} correctly rounded"


@per_variant
def test_float32_is_no_worse_than_torch(loss: Loss, variant: Variant, device: str) -> None:
    """By the root mean square error of values and gradients, or within one rounding.

    Errors are relative to what is added up, since a result may be near 0 by cancellation.
    """
    for shape in ((64, 1000), (5000, 7)):
        sample = variant.sample(shape, device=device, reduction="none")
        results = against_torch(loss, sample)
        sizes = loss.magnitudes(sample.double(), torch.ones_like(results["value"][2]))
        for name, (mine, theirs, true) in results.items():
            if true.numel() < 1000:
                continue  # too few to judge by their mean
            rounding = 2.0**-24 * sizes[name].clamp(min=1e-30)
            ours = ((mine.double() - true) / rounding).square().mean().sqrt().item()
            torchs = ((theirs.double() - true) / rounding).square().mean().sqrt().item()
            assert ours <= max(1.05 * torchs, 1.0), (
                f"{sample.name}: {name} is off by {ours:.3f} roundings, torch's by {torchs:.3f}"
            )


@pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
def test_sum_of_many_terms(loss: Loss, device: str) -> None:
    """A float32 sum of terms of one sign is within 2 units in the last place of the exact one."""
    terms = 2**22 + 4097 if device == "cpu" else 2**26 + 4097
    with torch.device(device):
        tensors, total = loss.sum_problem(terms)
    for reduction, exact in (("sum", total), ("mean", total / terms)):
        result = Sample("sum", tensors, {"reduction": reduction}, ()).call(loss.function)
        assert_within(result, exact, 2 * ulp(exact, torch.float32), f"{loss.name} {reduction}")


@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda loss: loss.name)
def test_sum_of_equal_terms(loss: Loss, device: str) -> None:
    """Equal terms round the same way in every thread: within 2 units in the last place still."""
    for i in range(20):
        x = torch.full((2**16,), 1.0 + 0.0371 * i, device=device)
        t = torch.full_like(x, 0.25)
        sample = Sample("equal", {"input": x, "target": t}, {"reduction": "sum"}, ())
        term = sample.with_options(reduction="none").call(loss.function)[0].double()
        exact = term * 2**16
        tolerance = 2 * ulp(exact, torch.float32)
        if loss.name == "kl_div":
            # sums take a faster logarithm: 4 x 2^-24 x t x max(1, |log t|, |log p|) for each term
            tolerance += 2**16 * 4 * 2.0**-24 * 0.25 * max(1.4, float(x[0]))
        assert_within(sample.call(loss.function), exact, tolerance, f"{loss.name} {i}")


@st.composite
def cases(draw: st.DrawFn, loss: Loss) -> dict[str, Any]:
    if loss.elementwise:
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
        inner = draw(st.sampled_from((None, 1, 3, 16, 33, 130)))
        if shape and inner is not None:
            shape = (*shape[:-1], inner)
    else:
        classes = draw(st.sampled_from((1, 2, 3, 5, 8, 17, 33, 130)))
        batch = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        shape = (*batch[:1], classes, *batch[1:])
    return {
        "shape": shape,
        "variant": draw(st.sampled_from(loss.variants)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "reduction": draw(st.sampled_from(loss.reductions)),
        "layouts": draw(st.tuples(*[st.integers(0, 20)] * 3)),
        "scale": draw(st.sampled_from((1.0, -2.5, 0.125))),
    }


@pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
def test_random_cases(loss: Loss, device: str) -> None:
    @settings(
        max_examples=150,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(loss))
    def run(case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        sample = case["variant"].sample(
            case["shape"], device=device, dtype=case["dtype"], reduction=case["reduction"]
        )
        changed = {}
        for choice, (name, tensor) in zip(case["layouts"], sample.tensors.items(), strict=False):
            layouts = list(layouts_of(tensor).values())
            changed[name] = layouts[choice % len(layouts)](tensor)
        sample = sample.with_tensors(**changed)
        as_torch = sample.call(loss.reference)
        check(loss, sample, grad_output=torch.full_like(as_torch, case["scale"]))

    run()
