"""The CUDA kernels of cross entropy: which takes which rows, and each at the edges of its range."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checks import check
from losses import BY_NAME, Result, Sample, evaluate
from numerics import assert_within, same_bits, ulp
from test_policy import INDICES
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import lossops
from lossops import _plan

pytestmark = pytest.mark.cuda
CE = BY_NAME["cross_entropy"]
HALF = torch.bfloat16
HOPPER_IS_OFF = os.environ.get("LOSSOPS_DISABLE_HOPPER", "0") not in ("", "0")


def problem(
    rows: int, classes: int, dtype: torch.dtype, *, spread: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Logits on the GPU, class indices of which some are ignored."""
    target = torch.randint(0, classes, (rows,))
    target[torch.rand(rows) < 0.2] = -100
    return (spread * torch.randn(rows, classes)).to(dtype).cuda(), target.cuda()


def sample(input: Tensor, target: Tensor, **options: object) -> Sample:
    return Sample("cross_entropy", {"input": input, "target": target}, options, ("input",))


def run(input: Tensor, target: Tensor, **options: object) -> Result:
    return evaluate(lossops.cross_entropy, sample(input, target, **options))


def kernels_of(call: Callable[[], object]) -> list[str]:
    """The kernels of lossops that a call launches."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    names = [event.key for event in recorded.key_averages() for _ in range(event.count)]
    return [name for name in names if "lossops" in name]


# The part of a kernel's name that no other family has.
KERNELS = {
    "side_by_side_rows": "forward_column_kernel",
    "plane_rows": "plane_rows_kernel",
    "plane_words": "plane_words_kernel",
    "few_soft_classes": "few_soft_classes_kernel",
    "soft_planes": "soft_planes_kernel",
    "few_classes": "forward_few_kernel",
    "float_tiles": "forward_float_tile_kernel",
    "tiles": "forward_tile_kernel",
    "half_rows": "half_rows_kernel",
    "float_rows": "float_rows_kernel",
    "register_rows": "forward_register_kernel",
    "probability_rows": "probability_rows_kernel",
    "long_rows": "long_rows_kernel",
    "split_rows": "split_rows_kernel",
    "staged_rows": "staged_kernel",
    "soft_tiles": "forward_soft_kernel",
    "team_rows": "cross_entropy_forward_kernel",
    "two_pass_rows": "two_pass_losses_kernel",
    "strided_rows": "forward_strided_kernel",
}


def check_kernel(x: Tensor, target: Tensor) -> None:
    """The kernel that is launched is the one that the policy names.

    A loss of few rows takes at most two kernels, that of two_pass_rows three.
    """
    for leaf in (x, x.clone().requires_grad_()):
        decided = json.loads(
            torch.ops.lossops.cross_entropy_plan(x, target, gradient=leaf.requires_grad)
        )
        names = kernels_of(lambda leaf=leaf: lossops.cross_entropy(leaf, target))
        assert any(KERNELS[decided["name"]] in name for name in names), (decided, names)
        if decided["writes_gradient"] == leaf.requires_grad:
            assert len(names) <= (3 if decided["name"] == "two_pass_rows" else 2), names


# Where the policy goes from one kernel to the next, and where more threads or blocks share a row.
POLICY_EDGES = _plan.table_data("a100" if HOPPER_IS_OFF else "h200")["edges"]
# Within a kernel's range: words, vectors, the end of a tile; odd vocabularies.
OTHER_CLASSES = {
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    31,
    32,
    33,
    57,
    64,
    100,
    112,
    113,
    144,
    161,
    200,
    225,
    256,
    321,
    448,
    896,
}
OTHER_CLASSES |= {1000, 2050, 3000, 8191, 40001, 50257, 100000, 151937}
EDGES = {
    torch.float32: sorted({*POLICY_EDGES["float32"], *OTHER_CLASSES}),
    HALF: sorted({*POLICY_EDGES["bfloat16"], *OTHER_CLASSES}),
}


@pytest.mark.parametrize(
    ("dtype", "classes"),
    [
        pytest.param(dtype, count, id=f"{str(dtype)[6:]}-{count}")
        for dtype, classes in EDGES.items()
        for count in classes
    ],
)
def test_edges(dtype: torch.dtype, classes: int) -> None:
    """Against torch and float64: losses, sums, gradients; smoothed too; rows of several tiles."""
    rows = max(3, min(131, 200_000 // classes))
    x, t = problem(rows, classes, dtype)
    for options in ({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "sum"}):
        check(CE, sample(x, t, **options))
    check(CE, sample(x, t, label_smoothing=0.1))
    p = torch.softmax(torch.randn(rows, classes), 1).to(dtype).cuda()
    for options in ({"reduction": "none"}, {"reduction": "mean"}, {"label_smoothing": 0.1}):
        check(CE, sample(x, p, **options))


@pytest.mark.parametrize("classes", [2, 10, 37, 100, 501, 1000, 1001, 4097, 50257])
def test_confident_rows(classes: int) -> None:
    """What is beside the maximum is the loss: its terms keep their bits."""
    rows = 64
    x = torch.randn(rows, classes, dtype=torch.float64)
    t = torch.randint(0, classes, (rows,))
    x[torch.arange(rows), t] = 4 + 16 * torch.rand(rows, dtype=torch.float64)
    x = x.float().cuda()
    for leaf in (x, x.t().contiguous().t()):
        loss = run(leaf, t.cuda(), reduction="none").value
        expected = torch.nn.functional.cross_entropy(leaf.double(), t.cuda(), reduction="none")
        assert ((loss - expected).abs() <= 32 * 2**-24 * expected).all()


@pytest.mark.parametrize("classes", [1000, 1025, 3001, 5001, 12000, 50257])
def test_exact_sums_of_confident_rows(classes: int) -> None:
    """Where the loss or a gradient is what lies beside the maximum, exponents are not rounded.

    One large distance, or probabilities of a large sum, must not hide it.
    """
    below = torch.arange(14, 31)
    rows = len(below)
    x = -below.view(-1, 1).repeat(1, classes).double()
    at = torch.randint(1, classes, (rows,))
    x[torch.arange(rows), at] = 0
    is_max = torch.nn.functional.one_hot(at, classes).double()
    far = x.clone()
    far[:, 0] = -1e4
    tiny = is_max.clone()
    tiny[:, 0] = 2**-17  # sums of these are exact
    for logits, p in (
        (x, is_max),
        (far, tiny),
        (x, 2**13 * is_max + 2**-7 * (1 - is_max)),
        (x, 2**27 * is_max),
    ):
        logits, p = logits.float().double(), p.float().double()
        q_sum = p.sum(1)
        rest = logits.exp().masked_fill(is_max.bool(), 0).sum(1)
        loss = q_sum * torch.log1p(rest) - (p * logits).sum(1)
        others = q_sum - (p * is_max).sum(1)
        gradient = (others - (q_sum - others) * rest) / (1 + rest)
        ours = run(logits.float().cuda(), p.float().cuda(), reduction="none")
        assert_within(ours.value.cpu(), loss, 4 * ulp(loss, torch.float32), "loss")
        found = ours.gradients["input"].cpu()[is_max.bool()]
        allowed = 4 * ulp(others + (q_sum - others) * rest, torch.float32)
        assert_within(found, gradient, allowed, "gradient")
    smooth = run(x.float().cuda(), at.cuda(), reduction="none", label_smoothing=1e-7)
    rest = x.exp().masked_fill(is_max.bool(), 0).sum(1)
    loss = torch.log1p(rest) - 1e-7 / classes * x.sum(1)
    assert_within(smooth.value.cpu(), loss, 4 * ulp(loss, torch.float32), "smoothed loss")


@pytest.mark.parametrize("classes", [33, 100, 373, 1000, 1500])
def test_smoothed_rows_that_are_sure_of_another_class(classes: int) -> None:
    """Their gradients are within 4 units in the last place of 1: 9 where what is left beside the
    largest logit is summed together with its term."""
    rows = 1000
    numbers = torch.arange(rows)
    x = torch.randn(rows, classes)
    t = torch.randint(classes, (rows,))
    x[numbers, (t + 1) % classes] += torch.linspace(5, 60, rows)
    x, t = x.cuda(), t.cuda()
    for smoothing in (0.1, 0.9):
        options = {"reduction": "sum", "label_smoothing": smoothing}
        leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        lossops.cross_entropy(leaf, t, **options).backward()
        torch.nn.functional.cross_entropy(exact, t, **options).backward()
        assert (leaf.grad - exact.grad).abs().max() <= 4 * 2**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("classes", [2501, 5121, 9001, 30522])
def test_zeros_of_ignored_rows(classes: int, dtype: torch.dtype) -> None:
    """At any address, and nothing beside them. Class indices out of range give NaN."""
    rows = 37
    t = torch.randint(classes, (rows,), device="cuda")
    t[::3] = -100
    t[4] = classes
    for offset in (0, 1, 3):
        storage = torch.randn(rows * classes + offset + 1, dtype=dtype, device="cuda")
        x = storage[offset : offset + rows * classes].view(rows, classes).requires_grad_()
        loss = lossops.cross_entropy(x, t, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x)
        assert (gradient[::3] == 0).all() and gradient[4].isnan().all()
        others = torch.ones(rows, dtype=torch.bool, device="cuda")
        others[::3] = others[4] = False
        assert gradient[others].isfinite().all() and (gradient[others] != 0).any(1).all()


@pytest.mark.parametrize("classes", [2, 3, 31, 100, 501, 1000, 1025, 2049, 4097, 9001, 40001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_confident_soft_rows(dtype: torch.dtype, classes: int) -> None:
    """The class that outweighs all others has 1 - softmax to the last places, wherever it is.

    At the class index or not, at either end of the row, of rows in vectors and not. Two classes of
    row 4 share the maximum. All logits of row 9 are -inf: its gradients are NaN, and no others.
    """
    rows = 24
    numbers = torch.arange(rows)
    largest = torch.tensor([0, classes - 1, classes // 2, classes // 3]).repeat(rows // 4)
    x = -torch.randint(0, 3, (rows, classes)).double()
    x[numbers, largest] = torch.linspace(2, 14, rows, dtype=torch.float64).round()
    x[4, 1] = x[4, 0]
    x[9] = -math.inf
    x = x.to(dtype).cuda()
    indices = torch.where(numbers % 3 == 0, largest, (largest + 1) % classes).cuda()
    one_hot = torch.zeros(rows, classes, dtype=dtype)
    one_hot[numbers, largest] = 1
    compared = numbers != 9
    unit = torch.finfo(dtype).eps
    for target, smoothing in ((indices, 0.1), (indices, 1e-4), (one_hot.cuda(), 0.0)):
        options = {"reduction": "sum", "label_smoothing": smoothing}
        leaf = x.double().requires_grad_()
        exact_target = target if target is indices else target.double()
        torch.nn.functional.cross_entropy(leaf, exact_target, **options).backward()
        assert leaf.grad is not None
        expected = leaf.grad[compared]
        ours = run(x, target, **options).gradients["input"]
        assert ours[9].isnan().all()
        # A smoothed coefficient is rounded by up to 2^-25. Four times that is allowed.
        allowed = 8 * unit * expected.abs() + (2**-23 if smoothing else 0)
        allowed += torch.finfo(dtype).smallest_normal
        assert ((ours[compared].double() - expected).abs() <= allowed).all(), smoothing
        for offset in (0, 1, 3):
            padded = torch.zeros(rows, classes + 5, dtype=dtype, device="cuda")
            moved = padded[:, offset : offset + classes].copy_(x)
            again = run(moved, target, **options).gradients["input"]
            assert same_bits(again, ours)


@pytest.mark.parametrize("classes", [2, 3, 31, 100, 501, 1000, 1025, 2049, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_confident_rows_without_a_loss(dtype: torch.dtype, classes: int) -> None:
    """Ignored rows have gradients of 0, rows with an index out of range NaN, also confident ones.

    In gradients that forward keeps, and in others.
    """
    x = torch.zeros(8, classes, dtype=dtype, device="cuda")
    x[:, -1] = 12
    t = torch.tensor([0, -100, classes + 7, classes - 1], device="cuda").repeat(2)
    weight = torch.linspace(0.5, 1.5, classes, device="cuda").to(dtype)
    for tensors in ({}, {"weight": weight}):
        for reduction in ("sum", "none"):
            options = {"reduction": reduction, "label_smoothing": 0.1, **tensors}
            gradient = run(x, t, **options).gradients["input"]
            assert not gradient[[1, 5]].any()
            assert gradient[[2, 6]].isnan().all()
            assert gradient[[0, 3, 4, 7]].isfinite().all()
    pixels = x.t()[None, :, :, None].contiguous()
    gradient = run(pixels, t[None, :, None], label_smoothing=0.1, reduction="sum")
    gradient = gradient.gradients["input"][0, :, :, 0]
    assert not gradient[:, [1, 5]].any() and gradient[:, [2, 6]].isnan().all()


@pytest.mark.parametrize("classes", [2, 16, 100, 999])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_target_gradients_of_confident_rows(dtype: torch.dtype, classes: int) -> None:
    """At the largest logit it is log1p() of what lies beside that, however large the loss is."""
    gaps = torch.arange(2.0, 21, dtype=torch.float64)
    x = torch.zeros(len(gaps), classes, dtype=torch.float64)
    x[:, 1] = gaps
    p = torch.full((len(gaps), classes), 0.5 / (classes - 1))
    p[:, 1] = 0.5
    target = p.cuda().requires_grad_()
    lossops.cross_entropy(x.to(dtype).cuda(), target, reduction="sum").backward()
    assert target.grad is not None
    exact = torch.log1p((classes - 1) * (-gaps).exp())
    error = (target.grad[:, 1].cpu().double() - exact).abs()
    assert (error <= 2**-18 * exact).all()


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_smoothed_gradients_of_extreme_scale(
    dtype: torch.dtype, image: bool, reduction: str
) -> None:
    """Relative to a logit far below the others, a sum is too large to divide a small scale by."""
    x = torch.zeros(4, 16)
    x[:, 3] = torch.tensor([-10.0, -15.0, -24.5, 20.0])
    x = x.to(dtype).cuda()
    t = torch.full((4,), 3, device="cuda")
    for scale in (1e-34, 1e-20, 1e20):
        exact = x.double().requires_grad_()
        options = {"reduction": reduction, "label_smoothing": 0.1}
        expected = torch.nn.functional.cross_entropy(exact, t, **options)
        given = torch.full_like(expected, scale).to(dtype)
        expected.backward(given.double())
        leaf = x.t()[None, :, :, None].contiguous() if image else x.clone()
        leaf.requires_grad_()
        loss = lossops.cross_entropy(leaf, t[None, :, None] if image else t, **options)
        loss.backward(given.view(loss.shape))
        found = leaf.grad[0, :, :, 0].t() if image else leaf.grad
        close = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact.grad, rtol=close, atol=1e-38)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_smoothing_that_is_nothing(dtype: torch.dtype) -> None:
    """A coefficient that is 0 in fp32, beside a logit of -inf."""
    x = torch.zeros(2, 9, 4, 4, dtype=dtype, device="cuda")
    x[:, 2] = -math.inf
    t = torch.ones(2, 4, 4, dtype=torch.int64, device="cuda")
    for logits, target in ((x, t), (x[:, :, 0, 0].contiguous(), t[:, 0, 0])):
        if dtype == torch.float32 and logits is x:
            continue  # strided rows of fp32 multiply the two
        loss = lossops.cross_entropy(logits, target, label_smoothing=1e-46)
        assert loss.item() == pytest.approx(math.log(8), rel=1e-2)


@pytest.mark.parametrize("classes", [3, 30, 100, 501, 1000, 2049, 4097, 9001, 40001])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_two_largest_logits(dtype: torch.dtype, classes: int) -> None:
    """Two classes that share the largest logit, and have p = 0.5 each, have the same gradient.

    Exactly it is 0. What rounding leaves is less than 2^-22, which half types can represent. A
    kernel computes exp2(x log2(e) + offset) with a rounded offset, so the term of the largest logit
    is not always 1, and one class must not seem to outweigh the other.
    """
    digits = round(-math.log2(torch.finfo(dtype).eps)) + 1
    largest = (torch.arange(2 ** (digits - 1), 2**digits) * 2.0 ** (4 - digits)).to(dtype)
    rows = len(largest)
    x = (largest.double() - 60).to(dtype)[:, None].repeat(1, classes)
    p = torch.zeros(rows, classes, dtype=dtype)
    numbers = torch.arange(rows)
    first, second = numbers % (classes - 1), classes - 1
    for place in (first, second):
        x[numbers, place], p[numbers, place] = largest, 0.5
    ours = run(x.cuda(), p.cuda(), reduction="sum").gradients["input"].cpu()
    assert same_bits(ours[numbers, first], ours[numbers, second])
    assert (ours.double().abs() < 2**-22).all()


@pytest.mark.parametrize("classes", [2, 10, 37, 100, 504, 1000, 1001, 4096, 4097, 32768, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_large_logits(dtype: torch.dtype, classes: int) -> None:
    """Their exponents, rounded, would leave the range of fp32."""
    for scale in (3e4, 1e9, 3e9, 1e12, 1e30, 1e38):
        x, t = problem(70, classes, dtype)
        x = (x.float().clamp(-3, 3) * scale).to(dtype)
        x[3:6] = -scale  # all alike, as what a mask leaves
        x[6] = torch.finfo(dtype).min
        x[7] = torch.finfo(dtype).max
        for logits in (x, x.t().contiguous().t()):
            result = run(logits, t, reduction="none")
            leaf = logits.double().requires_grad_()
            expected = torch.nn.functional.cross_entropy(leaf, t, reduction="none")
            expected.sum().backward()
            wide = expected.detach().to(dtype)
            assert torch.allclose(result.value, wide, rtol=1e-2, atol=1e-6), scale
            gradient = result.gradients["input"].double()
            assert torch.allclose(gradient, leaf.grad, rtol=1e-2, atol=1e-6), scale


@pytest.mark.parametrize("classes", [3, 5, 10, 14, 21, 22, 23, 44, 45, 88, 89, 200, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_images(dtype: torch.dtype, classes: int) -> None:
    """Rows side by side, in whole vectors and not."""
    for height, width in ((8, 16), (5, 7), (4, 6), (13, 13)):
        x = (2 * torch.randn(3, classes, height, width)).to(dtype).cuda()
        t = torch.randint(0, classes, (3, height, width)).cuda()
        t[0, 0] = -100
        for options in ({"reduction": "none"}, {"reduction": "mean"}, {"label_smoothing": 0.1}):
            check(CE, sample(x, t, **options))


@pytest.mark.parametrize("classes", [2, 5, 21, 24, 88, 100, 200, 300, 1600, 3000, 7000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_images_wherever_they_lie(dtype: torch.dtype, classes: int) -> None:
    """The same bits in groups of rows and row by row, for rows of all kinds side by side.

    Groups are for `plane_rows` where the classes fit shared memory, shifted ones for `plane_words`.
    """
    for spread, width in ((1.0, 44), (25.0, 43), (120.0, 44), (1.0, 43), (1.0, 64), (25.0, 64)):
        x = (spread * torch.randn(2, classes, 25, width)).to(dtype).cuda()
        x[0, :, 0, 0] = float("nan")
        x[0, classes // 2, 0, 1] = float("inf")
        x[0, 0, 0, 2] = -float("inf")
        x[0, :, 0, 3] = -float("inf")
        x[0, :, 1] = 31.0
        t = torch.randint(0, classes, (2, 25, width)).cuda()
        t[torch.rand(t.shape) < 0.1] = -100
        t[0, 0, :2] = -100
        t[1, 0, 0] = classes
        shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape)
        shifted.copy_(x)
        weight = torch.rand(classes).to(dtype).cuda() + 0.5
        for options in ({}, {"weight": weight}, {"label_smoothing": 0.1}):
            for reduction in ("none", "sum"):
                groups, rows = (
                    run(logits, t, reduction=reduction, **options) for logits in (x, shifted)
                )
                if reduction == "none":
                    assert same_bits(groups.value.nan_to_num(), rows.value.nan_to_num())
                gradients = [result.gradients["input"].nan_to_num() for result in (groups, rows)]
                assert same_bits(gradients[0], gradients[1]), (spread, reduction)


@pytest.mark.parametrize(
    "classes", [89, 97, 150, 300, 700, 1500, 1537, 1566, 1700, 2900, 3073, 3100, 6145, 9000]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_losses_of_planes(dtype: torch.dtype, classes: int) -> None:
    """The same bits by the kernels for a gradient and for none, also where shares have as many
    turns as others or one more; and few rows, and half types at odd positions."""
    for positions in (1, 8, 49, 336):
        x = (3 * torch.randn(2, classes, positions)).to(dtype).cuda()
        x[0, :, positions // 2] += 40  # not plain
        t = torch.randint(0, classes, (2, positions)).cuda()
        check(CE, sample(x, t, reduction="none"))
        losses = lossops.cross_entropy(x, t, reduction="none")
        leaf = x.clone().requires_grad_()
        for at in {0, positions // 2, positions - 1}:
            one = torch.full_like(t, -100)
            one[1, at] = t[1, at]
            step = lossops.cross_entropy(leaf, one, reduction="sum")
            assert same_bits(step.detach(), losses[1, at])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_planes_of_many_rows(dtype: torch.dtype) -> None:
    """Blocks that take rows more than once: a row has the bits that it has in a small image."""
    for side in (600, 601):
        x = (3 * torch.randn(1, 100, side, side, device="cuda")).to(dtype)
        t = torch.randint(0, 100, (1, side, side), device="cuda")
        losses = lossops.cross_entropy(x, t, reduction="none")
        for rows in (slice(0, 3), slice(side // 2, side // 2 + 2), slice(side - 3, side)):
            part = lossops.cross_entropy(
                x[:, :, rows].contiguous(), t[:, rows].contiguous(), reduction="none"
            )
            assert same_bits(part, losses[:, rows])
        expected = torch.nn.functional.cross_entropy(x.float(), t)
        assert torch.allclose(lossops.cross_entropy(x, t).float(), expected, rtol=4e-3)
        total = lossops.cross_entropy(x, t, reduction="sum").float()
        assert torch.allclose(total, losses.float().sum(), rtol=4e-3)


@pytest.mark.parametrize("classes", [89, 512, 513, 1700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_gradients_of_planes(dtype: torch.dtype, classes: int) -> None:
    """Strips of a whole plane, of a part of one, of several; rows beside unusual ones; crops.

    Each row has the bits that it has in an image by itself.
    """
    for images, positions in ((2, (601,)), (2, (640,)), (40, (3, 5)), (5, (12, 12))):
        x = (3 * torch.randn(images, classes, *positions)).to(dtype).cuda()
        t = torch.randint(0, classes, (images, *positions)).cuda()
        t[1, ..., ::3] = -100
        t[0, ..., 0] = 0
        t[0, ..., -1] = classes - 1
        check(CE, sample(x, t, reduction="none"))
        usual = run(x, t, reduction="none").gradients["input"]
        for n in range(2):
            alone = run(x[n : n + 1], t[n : n + 1], reduction="none").gradients["input"]
            assert same_bits(alone, usual[n : n + 1])
        crop = torch.zeros(images, classes, *(size + 3 for size in positions)).to(x)
        crop = crop[(..., *(slice(1, size + 1) for size in positions))].copy_(x)
        assert same_bits(run(crop, t, reduction="none").gradients["input"], usual)
        apart = torch.empty(*x.shape, 2).to(x)[..., 0].copy_(x)
        assert same_bits(run(apart, t, reduction="none").gradients["input"], usual)
        given = (torch.rand(t.shape) < 0.5).to(x)  # as a mask of losses
        leaf = x.clone().requires_grad_()
        lossops.cross_entropy(leaf, t, reduction="none").backward(given)
        assert torch.equal(leaf.grad, usual * given[:, None])
        unusual = x.clone()
        unusual[1, 0, ..., 1] = float("nan")
        unusual[1, -1, ..., 4] = 3e4
        beside = run(unusual, t, reduction="none").gradients["input"]
        for at in {*range(positions[-1])} - {1, 4}:
            assert same_bits(beside[..., at], usual[..., at]), at
        assert t[1, ..., 1].lt(0).logical_or(beside[1, ..., 1].isnan().all(0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_kernel_of_plane_gradients(dtype: torch.dtype) -> None:
    """Of losses without a reduction; of others where blocks would share 32 bytes of memory."""
    for side, reduction, kernels in (
        (8, "none", {"plane_rows_kernel", "plane_gradients_kernel"}),
        (7, "mean", {"plane_words_kernel", "plane_gradients_kernel"}),
        (8, "mean", {"plane_rows_kernel"}),
    ):
        x = torch.randn(2, 100, side, side, dtype=dtype, device="cuda", requires_grad=True)
        t = torch.randint(0, 100, (2, side, side), device="cuda")

        def step(x: Tensor = x, t: Tensor = t, reduction: str = reduction) -> None:
            lossops.cross_entropy(x, t, reduction=reduction).sum().backward()

        names = kernels_of(step)
        found = {
            kernel
            for kernel in ("plane_rows_kernel", "plane_words_kernel", "plane_gradients_kernel")
            if any(kernel in name for name in names)
        }
        assert found == kernels, (side, reduction, names)


@pytest.mark.parametrize("classes", [1, 2, 5, 21, 88, 89, 161])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_smoothed_images(dtype: torch.dtype, classes: int) -> None:
    """Beside torch in float64, with rows that have infinite logits and a grad_output for each."""
    rtol = 1e-5 if dtype == torch.float32 else 1e-2
    for spread, width in ((1.0, 44), (25.0, 43), (120.0, 44)):
        x = (spread * torch.randn(2, classes, 7, width)).to(dtype).cuda()
        t = torch.randint(0, classes, (2, 7, width)).cuda()
        t[torch.rand(t.shape) < 0.1] = -100
        t[0, 0, :4] = torch.arange(4).clamp(max=classes - 1)
        x[0, 0, 0, 0] = -float("inf")  # at the class index
        x[0, 0, 0, 1] = -float("inf")  # elsewhere
        x[0, :, 0, 2] = -float("inf")
        x[0, -1, 0, 3] = float("nan")
        exact = x.double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(
            exact, t, label_smoothing=0.1, reduction="none"
        )
        given = torch.rand_like(expected) + 0.5
        leaf = x.detach().requires_grad_()
        loss = lossops.cross_entropy(leaf, t, label_smoothing=0.1, reduction="none")
        assert torch.allclose(loss.double(), expected, rtol=rtol, atol=1e-6, equal_nan=True)
        loss.backward(given.to(dtype))
        expected.backward(given.to(dtype).double())
        close = torch.allclose(leaf.grad.double(), exact.grad, rtol=rtol, atol=1e-6, equal_nan=True)
        assert close, (spread, width)
        assert classes > 1 or not leaf.grad[1].any()


# One class in the last chunk of 8, all of them, and one of the next; one and several shares.
SOFT_CLASSES = [2, 3, 7, 8, 9, 21, 89, 160, 161, 512, 700, 2600]


@pytest.mark.parametrize("classes", SOFT_CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_soft_images(dtype: torch.dtype, classes: int) -> None:
    """Smoothing and probabilities, with class weights, and probabilities of another dtype."""
    other = torch.float32 if dtype != torch.float32 else HALF
    weight = {"weight": (torch.rand(classes) + 0.5).to(dtype).cuda()}
    # 3280 rows are more than a block counts for the mean.
    for height, width in ((4, 16), (5, 7), (40, 41))[: 3 if classes <= 161 else 2]:
        x = (2 * torch.randn(2, classes, height, width)).to(dtype).cuda()
        t = torch.randint(0, classes, (2, height, width)).cuda()
        t[0, 0] = -100
        p = torch.randn(2, classes, height, width).softmax(1).cuda()
        for target, smoothing, tensors in (
            (t, 0.1, {}),
            (t, 0.1, weight),
            (p.to(dtype), 0.0, {}),
            (p.to(dtype), 0.1, weight),
            (p.to(other), 0.1, {}),
        ):
            for reduction in ("none", "mean", "sum"):
                options = {"reduction": reduction, "label_smoothing": smoothing}
                check(CE, sample(x, target, **options).with_tensors(**tensors))


@pytest.mark.parametrize("classes", SOFT_CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_confident_soft_images(dtype: torch.dtype, classes: int) -> None:
    """One class outweighs all others, or is as likely as another one."""
    x = torch.randn(2, classes, 6, 11, dtype=torch.float64)
    t = torch.randint(0, classes, (2, 6, 11))
    x.scatter_(1, t[:, None], 4 + 12 * torch.rand(2, 1, 6, 11, dtype=torch.float64))
    x[0, :2, 0] = 20
    x = x.to(dtype).cuda()
    p = torch.randn(2, classes, 6, 11).mul(3).softmax(1).to(dtype).cuda()
    for options in ({"target": t.cuda(), "label_smoothing": 0.01}, {"target": p}):
        for reduction in ("none", "sum"):
            check(CE, sample(x, reduction=reduction, **options))


@pytest.mark.parametrize("classes", [65536, 200000])
def test_soft_images_of_many_classes(classes: int) -> None:
    """Equal terms would round the same way every time."""
    x = torch.full((1, classes, 2, 3), -3.0, device="cuda")
    x[:, 0] = 0
    t = torch.full((1, 2, 3), classes - 1, device="cuda")
    p = torch.full_like(x, 1 / classes)
    for target, smoothing in ((t, 0.1), (p, 0.0)):
        check(CE, sample(x, target, reduction="none", label_smoothing=smoothing))


@pytest.mark.parametrize("classes", [2, 8, 21, 161, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_soft_images_wherever_they_lie(dtype: torch.dtype, classes: int) -> None:
    """The same bits at an odd address, with gaps between rows, and for an image by itself."""
    x = (3 * torch.randn(3, classes, 5, 6)).to(dtype).cuda()
    t = torch.randint(0, classes, (3, 5, 6)).cuda()
    p = torch.randn(3, classes, 5, 6).softmax(1).to(dtype).cuda()
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    apart = torch.zeros(3, classes, 5, 13, dtype=dtype, device="cuda")[..., ::2][..., :6].copy_(x)
    for target, smoothing in ((t, 0.1), (p, 0.0), (p, 0.1)):
        options = {"reduction": "none", "label_smoothing": smoothing}
        expected = run(x, target, **options)
        for logits in (shifted, apart):
            found = run(logits, target, **options)
            assert same_bits(found.value, expected.value)
            assert same_bits(found.gradients["input"], expected.gradients["input"])
        alone = run(x[1:2], target[1:2], **options)
        assert same_bits(alone.value, expected.value[1:2])
        assert same_bits(alone.gradients["input"], expected.gradients["input"][1:2])
        # Half types: each row the other one of its word.
        cut = target[..., 1:] if target is p else target[:, :, 1:]
        moved = run(x[..., 1:], cut, **options)
        assert same_bits(moved.value, expected.value[..., 1:])
        assert same_bits(moved.gradients["input"], expected.gradients["input"][..., 1:])
        # A gradient of the target needs what forward leaves of each row.
        if target is p:
            both = [x.clone().requires_grad_(), p.clone().requires_grad_()]
            lossops.cross_entropy(both[0], both[1], **options).sum().backward()
            assert same_bits(both[0].grad, expected.gradients["input"])


@pytest.mark.parametrize("below", [0.0, 18.0, 26.0])
@pytest.mark.parametrize("classes", [2, 7, 21, 88])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_smoothed_rows_do_not_depend_on_where_they_lie(
    dtype: torch.dtype, classes: int, below: float
) -> None:
    """Side by side, too few for that, apart from each other; reduced and not.

    Also with logits at the class index far below the others.
    """
    t = torch.randint(0, classes, (2, 6, 20)).cuda()
    x = 3 * torch.randn(2, classes, 6, 20).cuda()
    x = x.scatter_add(1, t[:, None], torch.full_like(x[:, :1], -below)).to(dtype)

    def losses_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        result = run(logits, targets, label_smoothing=0.1, reduction="none")
        return result.value, result.gradients["input"]

    loss, gradient = losses_and_gradient(x, t)
    apart = torch.empty(*x.shape, 2, dtype=dtype, device="cuda")[..., 0].copy_(x)
    own_loss, own_gradient = losses_and_gradient(apart, t)
    assert same_bits(own_loss, loss) and same_bits(own_gradient, gradient)
    own_loss, own_gradient = losses_and_gradient(x[:1, :, :1, 3:4], t[:1, :1, 3:4])
    assert same_bits(own_loss, loss[:1, :1, 3:4])
    assert same_bits(own_gradient, gradient[:1, :, :1, 3:4])

    def gradient_of(reduction: str) -> Tensor:
        leaf = x.detach().requires_grad_()
        lossops.cross_entropy(leaf, t, label_smoothing=0.1, reduction=reduction).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert same_bits(gradient_of("none"), gradient_of("sum"))


def logits_of_reach(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows whose logits reach up to 32 from 0, a bit further, and much further; and how far."""
    beyond = torch.nextafter(torch.tensor(32.0, dtype=dtype), torch.tensor(64.0, dtype=dtype))
    reach = torch.tensor([0.5, 4.0, 31.0, 32.0, beyond.item(), 33.0, 60.0, 500.0])
    reach = reach.repeat(rows // 8 + 1)[:rows]
    x = torch.randn(rows, classes)
    x = (x * (0.99 * reach / x.abs().amax(1))[:, None]).to(dtype)
    x[torch.arange(rows), torch.randint(0, classes, (rows,))] = (
        reach * (2 * torch.randint(0, 2, (rows,)) - 1)
    ).to(dtype)
    return x.cuda(), reach.cuda()


@pytest.mark.parametrize("classes", [2, 3, 5, 8, 10, 13, 15, 16, 21, 88, 100, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_rows_with_and_without_a_shift(dtype: torch.dtype, classes: int) -> None:
    """Small logits need no maximum. Rows of both kinds side by side, in each layout."""
    rows = 72
    x, reach = logits_of_reach(rows, classes, dtype)
    t = torch.randint(0, classes, (rows,), device="cuda")
    t[::9] = x[::9].argmax(1)
    leaf = x.double().requires_grad_()
    # log(1 + others / exp(x_t)): float64 keeps what is small beside 1, too
    others = leaf.scatter(1, t[:, None], -float("inf")).logsumexp(1)
    exact = torch.nn.functional.softplus(others - leaf.gather(1, t[:, None])[:, 0])
    exact.sum().backward()
    assert leaf.grad is not None
    relative = 2.0**-24 * (8 + 2 * reach.double())
    half = 0.0 if dtype == torch.float32 else 0.51
    underflow = torch.finfo(torch.float32).tiny
    for what, logits, targets in (
        ("rows", x, t),
        ("strided", x.t().contiguous().t(), t),
        ("images", x.view(3, 24, classes).transpose(1, 2).contiguous(), t.view(3, 24)),
        ("odd images", x.view(24, 3, classes).transpose(1, 2).contiguous(), t.view(24, 3)),
    ):
        leaf_of = logits.detach().requires_grad_()
        loss = lossops.cross_entropy(leaf_of, targets, reduction="none")
        loss.sum().backward()
        gradient = leaf_of.grad if what in ("rows", "strided") else leaf_of.grad.transpose(1, 2)
        gradient = gradient.reshape(rows, classes)
        bound = relative * exact.detach().abs() + half * ulp(exact.detach(), dtype) + underflow
        assert_within(loss.detach().reshape(rows), exact.detach(), bound, f"{what}: losses")
        bound = relative[:, None] * leaf.grad.abs() + (half + 1) * ulp(leaf.grad, dtype) + underflow
        assert_within(gradient, leaf.grad, bound, f"{what}: gradients")
        kept = logits.detach().requires_grad_()
        lossops.cross_entropy(kept, targets, reduction="sum").backward()
        assert same_bits(kept.grad, leaf_of.grad), f"{what}: kept"
    whole = run(x, t, reduction="none")
    for row in range(0, rows, 5):
        alone = run(x[row : row + 1], t[row : row + 1], reduction="none")
        assert same_bits(alone.value, whole.value[row : row + 1]), f"row {row}"


@pytest.mark.parametrize("classes", [2, 15, 33, 88, 130, 401, 1001, 1024, 1301, 1501, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_rows_far_from_their_class_index(dtype: torch.dtype, classes: int) -> None:
    """Sums relative to the logit at the class index: in range and out of it, near 0 and far off."""
    distance = torch.tensor([0.0, 3.0, 20.0, 27.0, 28.0, 30.0, 41.0, 42.0, 60.0, 90.0, 300.0])
    distance = torch.cat([distance, -distance])
    place = torch.tensor([0.0, -100.0, 12496.0, 16384.0, -17000.0, 30000.0])
    place, distance = place.repeat_interleave(len(distance)), distance.repeat(len(place))
    rows = torch.arange(len(place))
    t = torch.randint(0, classes, (len(rows),))
    x = place[:, None] + torch.rand(len(rows), classes) - 0.5
    if classes > 3:
        x[4::5, 1::3] = -torch.inf
    x[rows, t] = place + distance
    x, t = x.to(dtype).cuda(), t.cuda()
    leaf = x.double().requires_grad_()
    others = leaf.scatter(1, t[:, None], -torch.inf).logsumexp(1)
    exact = torch.nn.functional.softplus(others - leaf.gather(1, t[:, None])[:, 0])
    exact.sum().backward()
    assert leaf.grad is not None
    for what, logits, targets in (
        ("rows", x, t),
        ("padded", torch.nn.functional.pad(x, (0, 3))[:, :classes], t),
        ("strided", x.t().contiguous().t(), t),
        ("images", x.view(6, 22, classes).transpose(1, 2).contiguous(), t.view(6, 22)),
    ):
        leaf_of = logits.detach().requires_grad_()
        loss = lossops.cross_entropy(leaf_of, targets, reduction="none")
        (gradient,) = torch.autograd.grad(loss.sum(), leaf_of)
        flat = gradient.transpose(1, 2).reshape(x.shape) if what == "images" else gradient
        for found, wanted in ((loss.detach().reshape(t.shape), exact.detach()), (flat, leaf.grad)):
            bound = 2.0**-18 * wanted.abs() + 0.51 * ulp(wanted, dtype) + 2.0**-116
            assert_within(found, wanted, bound, what)
        kept = logits.detach().requires_grad_()
        lossops.cross_entropy(kept, targets, reduction="sum").backward()
        assert kept.grad is not None and same_bits(kept.grad, gradient), f"{what}: kept"


@pytest.mark.parametrize("classes", [21, 85, 88, 100, 500])
def test_gradients_of_few_classes(classes: int) -> None:
    """Within 4 units in the last place, for equal logits and for those that spread."""
    for x in (
        torch.full((64, classes), -6.23),
        torch.full((64, classes), 4.88),
        torch.full((64, classes), 31.0),
        torch.randn(64, classes),
        4 * torch.randn(64, classes),
        20 + torch.randn(64, classes),
    ):
        t = torch.randint(0, classes, (64,))
        leaf = x.double().requires_grad_()
        torch.nn.functional.cross_entropy(leaf, t, reduction="sum").backward()
        assert leaf.grad is not None
        image = x.view(4, 16, classes).transpose(1, 2).contiguous().cuda()
        for logits, targets in ((x.cuda(), t), (image, t.view(4, 16))):
            gradient = run(logits, targets.cuda(), reduction="sum").gradients["input"]
            if logits is image:
                gradient = gradient.transpose(1, 2).reshape(64, classes)
            # On an H200 the teams of older devices left one element of 32000 at 4.2.
            units = 4.5 if HOPPER_IS_OFF and classes > 128 else 4.0
            assert_within(gradient, leaf.grad, units * ulp(leaf.grad, torch.float32), "gradient")


def test_losses_of_half_logits_in_float32() -> None:
    """Under autocast the result has all bits of float32: no worse than torch's."""
    rows = [torch.tensor(row) for row in ([-31.75, -31.75], [-19.75, -22.5], [23.0] * 10)]
    rows += list(28 + torch.randn(50, 10))
    for row in rows:
        x = row.half()[None].cuda()
        t = torch.zeros(1, dtype=torch.int64, device="cuda")
        with torch.autocast("cuda"):
            ours = lossops.cross_entropy(x, t, reduction="none")
            theirs = torch.nn.functional.cross_entropy(x, t, reduction="none")
        exact = torch.nn.functional.cross_entropy(x.double(), t, reduction="none")
        assert ours.dtype == torch.float32
        bound = torch.maximum((theirs.double() - exact).abs(), 3 * ulp(exact, torch.float32))
        assert ((ours.double() - exact).abs() <= bound).all(), (row, ours, theirs, exact)


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 5.0), (torch.float16, 8.0)], ids=str)
@pytest.mark.parametrize("classes", [64, 88, 128, 253, 1000])
def test_smoothed_losses_of_equal_terms(classes: int, dtype: torch.dtype, units: float) -> None:
    """Equal terms of a sum are rounded the same way each time."""
    t = torch.ones(4, dtype=torch.int64, device="cuda")
    cases = [(-6.25, 0.0, 1e-3)]
    if dtype != torch.float32:  # distances that are added up one by one would be off by 23 units
        cases.append((27.625, 37.5, 0.1))
    for others, at_index, smoothing in cases:
        x = torch.full((4, classes), others, dtype=dtype, device="cuda")
        x[:, 1] = at_index
        options = {"label_smoothing": smoothing, "reduction": "none"}
        exact = torch.nn.functional.cross_entropy(x.double(), t, **options)
        bound = units * ulp(exact, torch.float32)
        image = x.t()[None, :, :, None].contiguous()
        with torch.autocast("cuda"):
            loss = lossops.cross_entropy(x, t, **options)
            of_image = lossops.cross_entropy(image, t[None, :, None], **options).flatten()
        assert loss.dtype == torch.float32
        assert_within(loss, exact, bound, f"{classes} classes")
        if dtype != torch.float32 and classes <= 88:
            assert_within(of_image, exact, bound, f"{classes} classes of an image")


@pytest.mark.parametrize("classes", [2, 21, 100, 501, 1000, 1999, 2048])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_soft_losses_from_small_to_large(dtype: torch.dtype, classes: int) -> None:
    """Losses of confident rows and of others, with contiguous classes and as images.

    The loss decides which formula a row takes. Under autocast it is fp32, so that its rounding is
    visible.
    """
    rows = 256
    numbers = torch.arange(rows)
    t = numbers % classes
    x = torch.randn(rows, classes, dtype=torch.float64)
    x[numbers, t] += torch.linspace(-4, 18, rows, dtype=torch.float64)
    x = (x + torch.tensor([0.0, 30.0, -30.0, 400.0])[numbers % 4, None]).to(dtype).cuda()
    p = torch.randn(rows, classes, dtype=torch.float64)
    p[numbers, t] += torch.linspace(0, 16, rows, dtype=torch.float64)[torch.randperm(rows)]
    p = p.softmax(1).to(dtype).cuda()
    for target, smoothing in ((t.cuda(), 0.1), (t.cuda(), 1e-3), (p, 0.0), (p, 0.1)):
        options = {"reduction": "none", "label_smoothing": smoothing}
        wide = target if target.dtype == torch.int64 else target.double()
        exact = torch.nn.functional.cross_entropy(x.double(), wide, **options)
        with torch.autocast("cuda"):
            ours = lossops.cross_entropy(x, target, **options)
            image = x.t()[None, :, :, None].contiguous()
            across = target if target.dim() == 1 else target.t().contiguous()
            across = across[None, ..., None]
            as_image = lossops.cross_entropy(image, across, **options)
        assert ours.dtype == torch.float32
        # A smoothed loss of 2^-5 or more may come from a sum that includes a term of 1. So it may
        # also be off by four roundings of 1, of 2^-24 each.
        coarse = (exact >= 2**-5) & (target.dtype == torch.int64)
        allowed = 16 * ulp(exact, torch.float32) + torch.where(coarse, 2**-22, 0.0)
        assert_within(ours, exact, allowed, f"rows, {smoothing}")
        assert_within(as_image.flatten(), exact, allowed, f"images, {smoothing}")


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_gradients_of_extreme_scale(dtype: torch.dtype) -> None:
    """A factor of the row may leave the range of fp32 where no gradient does."""
    for value, scale in ((31.0, 1e-30), (31.0, 1e-24), (-31.0, 1e26), (-31.0, 1e-30), (31.0, 1e30)):
        x = torch.full((4, 100), value, dtype=dtype, device="cuda")
        t = torch.tensor([0, 50, 99, 3], device="cuda")
        p = torch.full((100,), scale, dtype=dtype, device="cuda")
        exact = torch.full((4, 100), 0.01, device="cuda", dtype=torch.float64)
        exact[torch.arange(4), t] -= 1
        exact *= p[0].double()
        leaf = x.clone().requires_grad_()
        loss = lossops.cross_entropy(leaf, t, reduction="none")
        loss.backward(torch.full_like(loss, p[0].item()))
        weighted = run(x, t, weight=p, reduction="sum").gradients["input"]
        for gradient in (leaf.grad, weighted):
            torch.testing.assert_close(
                gradient.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=1e-38
            )


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 8, 10, 13, 15, 16, 21, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_special_logits_at_each_place(dtype: torch.dtype, classes: int) -> None:
    """NaN, infinities, the largest numbers: at the class index, beside it, first and last."""
    largest = torch.finfo(dtype).max
    specials = (float("nan"), float("inf"), -float("inf"), largest, -largest)
    for at in {0, classes - 1, classes // 2}:
        for index in {0, classes - 1, classes // 2}:
            x = torch.randn(len(specials) + 2, classes).to(dtype)
            for row, special in enumerate(specials):
                x[row, at] = special
            x[len(specials)] = -float("inf")
            t = torch.full((len(x),), index)
            leaf = x.double().requires_grad_()
            exact = torch.nn.functional.cross_entropy(leaf, t, reduction="none")
            exact.sum().backward()
            rows, columns = x.cuda(), x.t().contiguous().t().cuda()
            image = x.t().repeat(1, 4)[None].contiguous().cuda()
            for logits, targets in ((rows, t), (columns, t), (image, t.repeat(4)[None])):
                result = run(logits, targets.cuda(), reduction="none")
                value, gradient = result.value, result.gradients["input"]
                if logits is image:
                    value, gradient = value[0, : len(x)], gradient[0, :, : len(x)].t()
                torch.testing.assert_close(
                    value.cpu().double(),
                    exact.detach().to(dtype).double(),
                    rtol=1e-2,
                    atol=1e-6,
                    equal_nan=True,
                )
                assert (gradient.isnan().cpu() == leaf.grad.isnan()).all(), (at, index)
                finite = ~leaf.grad.isnan()
                torch.testing.assert_close(
                    gradient.cpu().double()[finite], leaf.grad[finite], rtol=1e-2, atol=1e-6
                )


@pytest.mark.parametrize("classes", [3, 5, 10, 14, 100, 1001, 1024, 4096, 20001, 32768, 131072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_rows_of_many_special_logits(dtype: torch.dtype, classes: int) -> None:
    """Rows of NaN alone, of NaN and infinities in turn: their gradients are NaN, all of them."""
    nan, inf = float("nan"), float("inf")
    x = torch.randn(8, classes).to(dtype)
    x[0] = nan
    x[1, ::2], x[1, 1::2] = nan, inf
    x[2, ::2], x[2, 1::2] = -inf, nan
    x[3] = inf
    x[4] = -inf
    x[5, 1:] = nan
    t = torch.zeros(8, dtype=torch.int64)
    image = x.t().contiguous()[None]  # neighbours hold NaN and infinity
    logits = [(x.cuda(), t.cuda())]
    if classes <= 100:
        logits.append((image.cuda(), t[None].cuda()))
    for input, target in logits:
        for factor in (1.0, 0.5):  # what forward left; computed anew
            leaf = input.clone().requires_grad_()
            (factor * lossops.cross_entropy(leaf, target, reduction="sum")).backward()
            gradient = leaf.grad if leaf.dim() == 2 else leaf.grad[0].t()
            assert gradient[:6].isnan().all(), factor
            assert gradient[6:].isfinite().all(), factor


@pytest.mark.parametrize("classes", [1008, 2048, 3000, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_rows_of_logits_far_and_near(dtype: torch.dtype, classes: int) -> None:
    """Exponentials without a shift and with one, in turn, and logits that a mask has left."""
    rows = 300
    x, t = problem(rows, classes, dtype, spread=3.0)
    # The last is too far for every exponential, and -40 for their sum.
    distances = torch.tensor([0.0, 20.0, -20.0, 50.0, -40.0, 36.0, -100.0], device="cuda")
    x = (x.float() + distances[torch.arange(rows, device="cuda") % 7, None]).to(dtype)
    at = torch.arange(0, rows, 5, device="cuda")
    x[at, t[at].clamp(min=0)] += 12
    lowest = torch.finfo(dtype).min
    for masked, value in ((slice(0, 0), 0.0), (slice(8, 500), -torch.inf), (slice(3, 9), lowest)):
        x[::3, masked] = value
        t[::3] = 700
        logits = torch.zeros(rows, classes + 3, dtype=dtype, device="cuda")[:, 2 : classes + 2]
        logits.copy_(x)
        for options in ({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "sum"}):
            check(CE, sample(x, t, **options))
            whole, other = run(x, t, **options), run(logits, t, **options)
            assert same_bits(other.value, whole.value)
            assert same_bits(other.gradients["input"], whole.gradients["input"])
        loss = run(x, t, reduction="none").value
        with torch.autocast("cuda", dtype):
            exact = lossops.cross_entropy(x, t, reduction="none")
        expected = torch.nn.functional.cross_entropy(x.double(), t, reduction="none")
        assert exact.dtype == torch.float32
        assert ((exact - expected).abs() <= 8 * 2**-24 * expected).all()
        assert same_bits(exact.to(dtype), loss)


@pytest.mark.parametrize(
    "classes", [504, 505, 1000, 1001, 1028, 1601, 2047, 2048, 3000, 3201, 4095, 4096, 4100, 8192]
)
def test_float_rows_of_logits_far_and_near(classes: int) -> None:
    """Gradients by one formula and by the other, logits that a mask has left, rows without loss."""
    rows = 300
    x, t = problem(rows, classes, torch.float32, spread=3.0)
    # The last two are too far from 0 for gradients by one product.
    distances = torch.tensor([0.0, 20.0, -20.0, 300.0, -900.0, 2500.0, -1e6], device="cuda")
    x += distances[torch.arange(rows, device="cuda") % 7, None]
    at = torch.arange(0, rows, 5, device="cuda")
    x[at, t[at].clamp(min=0)] += 12
    x[at + 1, t[at].clamp(min=0)] += 40
    weight = torch.rand(classes, device="cuda") + 0.5
    lowest = torch.finfo(torch.float32).min
    for masked, value in (
        (slice(0, 0), 0.0),
        (slice(8, 500), -torch.inf),
        (slice(3, 9), lowest),
        (slice(0, classes), 0.25),
    ):
        x[::3, masked] = value
        t[::3] = 501
        t[7::11] = -100
        logits = torch.zeros(rows, classes + 3, device="cuda")[:, 2 : classes + 2]
        logits.copy_(x)
        for options in ({"reduction": "none"}, {"reduction": "mean"}, {"reduction": "sum"}):
            whole, other = run(x, t, **options), run(logits, t, **options)
            assert same_bits(other.value, whole.value)
            assert same_bits(other.gradients["input"], whole.gradients["input"])
        for weights in (None, weight):
            ours, exact = x.clone().requires_grad_(), x.double().requires_grad_()
            loss = lossops.cross_entropy(ours, t, weights, reduction="none")
            # log(1 + others / exp(x_t)): float64 keeps what is small beside 1, too
            index = t.clamp(min=0)[:, None]
            others = exact.scatter(1, index, -torch.inf).logsumexp(1)
            expected = torch.nn.functional.softplus(others - exact.gather(1, index)[:, 0])
            kept = (t >= 0) if weights is None else (t >= 0) * weights.double()[index[:, 0]]
            expected = expected * kept
            loss.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-6, atol=1e-13)
        gradients = []
        for factor in (1.0, 0.5):  # what forward left; computed anew
            leaf = x.clone().requires_grad_()
            (factor * lossops.cross_entropy(leaf, t, reduction="sum")).backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad / factor)
        normal = gradients[0].abs() > 2.0**-100
        assert same_bits(gradients[0][normal], gradients[1][normal])


@pytest.mark.parametrize(
    "classes", [504, 505, 1000, 1001, 1500, 2001, 3000, 3071, 4096, 5000, 8192]
)
@pytest.mark.parametrize("rows", [1, 3, 700, 9001])
def test_float_rows_of_a_block(classes: int, rows: int) -> None:
    """Rows of a block, one after the other, some of them without a loss, are as alone."""
    x, t = problem(rows, classes, torch.float32)
    t[2::5] = -100
    t[3::1000] = classes
    whole = run(x, t, reduction="none")
    for row in (0, rows // 2, rows - 1):
        part = slice(row, row + 1)
        alone = run(x[part].clone(), t[part], reduction="none")
        assert same_bits(alone.value, whole.value[part])
        assert same_bits(alone.gradients["input"], whole.gradients["input"][part])
    expected = torch.nn.functional.cross_entropy(
        x.double(), torch.where(t == classes, -100, t), reduction="none"
    )
    expected[t == classes] = torch.nan
    torch.testing.assert_close(whole.value.double(), expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("classes", [1008, 1504, 2048, 3000, 4096])
@pytest.mark.parametrize("rows", [3, 9001])
@pytest.mark.parametrize("gap", [0, 3, 4])  # aligned; every other row in mid-word; all
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_half_rows_of_a_block(dtype: torch.dtype, gap: int, rows: int, classes: int) -> None:
    """The same for rows of half types in registers, with a gradient and without one."""
    x, t = problem(rows, classes, dtype)
    t[2::5] = -100
    if gap > 0:
        x = torch.zeros(rows, classes + gap, dtype=dtype, device="cuda")[:, 1 : classes + 1].copy_(
            x
        )
    losses = run(x, t, reduction="none").value
    gradient = run(x, t, reduction="sum").gradients["input"]
    for row in (0, 1, rows // 2, rows - 1):
        part = slice(row, row + 1)
        assert same_bits(run(x[part].clone(), t[part], reduction="none").value, losses[part])
        alone = run(x[part].clone(), t[part], reduction="sum").gradients["input"]
        assert same_bits(alone, gradient[part])
    leaf = x.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, t, reduction="none")
    expected.sum().backward()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=eps, atol=0)
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=eps, atol=2.0**-24)


@pytest.mark.parametrize(
    ("classes", "rows"),
    [
        (28680, 9),
        (32768, 1200),
        (50257, 700),
        (65544, 600),
        (100000, 3),
        (131072, 540),
        (151937, 450),
        (262144, 270),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_long_rows_of_a_block(dtype: torch.dtype, classes: int, rows: int) -> None:
    """Rows of a block or a cluster, one after the other, some of them without a loss."""
    x, t = problem(rows, classes, dtype)
    t[2::5] = -100
    t[0] = 7
    x[0] += 50
    kept = x.clone().requires_grad_()
    loss = lossops.cross_entropy(kept, t)
    assert same_bits(loss.detach(), lossops.cross_entropy(x, t))
    losses = torch.cat(
        [
            torch.nn.functional.cross_entropy(part.double(), target, reduction="none")
            for part, target in zip(x.split(64), t.split(64), strict=True)
        ]
    )
    expected = losses.sum() / (t >= 0).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)
    t[1] = classes
    gradients = []
    for factor in (1.0, 0.5):  # what forward left; computed anew
        leaf = x.clone().requires_grad_()
        (factor * lossops.cross_entropy(leaf, t, reduction="sum")).backward()
        assert leaf.grad is not None
        assert leaf.grad[1].isnan().all()
        assert (leaf.grad[t == -100] == 0).all()
        gradients.append((leaf.grad / factor)[t != classes])
    normal = gradients[0].abs() > 4 * torch.finfo(dtype).tiny
    assert normal.sum() > 40 * (t >= 0).sum()
    assert same_bits(gradients[0][normal], gradients[1][normal])


@pytest.mark.gpu_memory(8)
@pytest.mark.parametrize("classes", [80001, 80000])
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_long_rows_mostly_ignored(dtype: torch.dtype, classes: int) -> None:
    """Clusters of blocks, few of whose rows have a loss: those rows are as alone."""
    rows = 2500
    x = torch.randn(rows, classes, device="cuda", dtype=dtype)
    t = torch.randint(0, classes, (rows,), device="cuda")
    t[torch.rand(rows, device="cuda") < 0.97] = -100
    whole = run(x, t, reduction="sum")
    kept = t >= 0
    few = run(x[kept], t[kept], reduction="sum")
    gradient = whole.gradients["input"]
    assert same_bits(gradient[kept], few.gradients["input"])
    assert (gradient[~kept] == 0).all()
    torch.testing.assert_close(whole.value, few.value)


@pytest.mark.parametrize("classes", [1008, 4096])
def test_gradients_of_small_and_large_weights(classes: int) -> None:
    """Factors that leave the range of fp32 where their products with exponentials do not."""
    x, t = problem(70, classes, HALF)
    x[::2] += 20
    x[5] += 60
    ones = torch.ones(classes, dtype=HALF, device="cuda")
    expected = run(x, t, weight=ones, reduction="sum").gradients["input"].double()
    for scale in (2.0**-70, 2.0**70):
        for reduction in ("sum", "none"):
            gradient = run(x, t, weight=scale * ones, reduction=reduction).gradients["input"]
            torch.testing.assert_close(
                gradient.double() / scale, expected, rtol=1e-2, atol=1e-38 / scale
            )


@pytest.mark.parametrize("classes", [8, 64, 1000, 1024, 4096])
def test_gradients_of_equal_logits(classes: int) -> None:
    """A layer of zeros: 1 / C, rounded once."""
    leaf = torch.zeros(5, classes, device="cuda", requires_grad=True)
    target = torch.zeros(5, dtype=torch.int64, device="cuda")
    lossops.cross_entropy(leaf, target, reduction="sum").backward()
    assert leaf.grad is not None
    assert (leaf.grad[:, 1:] == 1 / classes).all()


@pytest.mark.parametrize(
    "classes",
    [2, 7, 10, 12, 15, 21, 88, 200, 1000, 1001, 1008, 3000, 4097, 32768, 50257, 131072, 151937],
)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_bits_do_not_depend_on_where_rows_lie(dtype: torch.dtype, classes: int) -> None:
    """Rows alone, with gaps between them, misaligned; with a gradient and without one."""
    x, t = problem(9, classes, dtype)
    t[:] = t.clamp(min=0)
    whole = run(x, t, reduction="none")
    gaps = torch.zeros(9, classes + 3, dtype=dtype, device="cuda")
    gaps[:, 1 : classes + 1] = x
    for what, same in (("gaps", gaps[:, 1 : classes + 1]), ("alone", x)):
        for part in (slice(0, 9), slice(4, 5), slice(1, 8)):
            if what == "gaps" or part != slice(0, 9):
                other = run(same[part], t[part], reduction="none")
                assert same_bits(other.value, whole.value[part]), f"{what}, rows {part}"
                assert same_bits(other.gradients["input"], whole.gradients["input"][part]), what
    p = torch.softmax(torch.randn(9, classes), 1).to(dtype).cuda()
    whole = run(x, p, reduction="none")
    strided = torch.zeros(9, 2 * classes + 1, dtype=dtype, device="cuda")[:, ::2][:, :classes]
    for logits, target in (
        (gaps[:, 1 : classes + 1], p),
        (x, strided.copy_(p)),
        (x, gaps.clone()[:, 1 : classes + 1].copy_(p)),
    ):
        other = run(logits, target, reduction="none")
        assert same_bits(other.value, whole.value)
        assert same_bits(other.gradients["input"], whole.gradients["input"])
    for reduction in ("mean", "sum"):
        leaf = x.clone().requires_grad_()
        assert same_bits(
            lossops.cross_entropy(leaf, p, reduction=reduction).detach(),
            lossops.cross_entropy(x, p, reduction=reduction),
        )
        whole = run(x, p, reduction=reduction)
        for target in (strided, gaps.clone()[:, 1 : classes + 1].copy_(p)):
            other = run(x, target, reduction=reduction)
            assert same_bits(other.value, whole.value)
            assert same_bits(other.gradients["input"], whole.gradients["input"])
        kept = lossops.cross_entropy(leaf, t, reduction=reduction)
        assert same_bits(kept.detach(), lossops.cross_entropy(x, t, reduction=reduction))


# Rows beyond those of one block: a kernel for each number of classes takes them where they lie one
# after the other, and another where they do not.
@pytest.mark.parametrize("classes", range(2, 16))
def test_many_rows_of_few_classes(classes: int) -> None:
    rows = 5003
    wide = 3 * torch.randn(rows, classes + 3)
    wide[::7] *= 40
    wide[5::401, 0] = float("nan")
    wide[6::401, classes - 1] = float("inf")
    wide[7::401, :classes] = -float("inf")
    wide[8::401, 1] = -float("inf")
    wide = wide.cuda()
    target = torch.randint(0, classes, (rows,))
    target[torch.rand(rows) < 0.2] = -100
    ordinary = target.cuda()
    target[9::401] = classes
    target[10::401] = -1
    target[11::401] = 2**32
    special = target.cuda()
    gaps = wide[:, 1 : classes + 1]
    shifted = torch.empty(rows * classes + 1, device="cuda")[1:].view(rows, classes)
    weight = torch.rand(classes, device="cuda") + 0.5
    clean = 3 * torch.randn(rows, classes + 3, device="cuda")
    for t in (ordinary, special):
        for options in (
            {"reduction": "mean"},
            {"reduction": "sum"},
            {"reduction": "mean", "weight": weight},
            {"reduction": "sum", "weight": weight},
            {"reduction": "mean", "ignore_index": 1},
            {"reduction": "none"},
            {"reduction": "none", "weight": weight},
        ):
            for source in (gaps, clean[:, 1 : classes + 1]):
                whole = run(source.contiguous(), t, **options)
                for other in (source, shifted.copy_(source)):
                    part = run(other, t, **options)
                    assert same_bits(part.value, whole.value), (classes, options)
                    assert same_bits(part.gradients["input"], whole.gradients["input"]), options
                no_gradient = lossops.cross_entropy(source.contiguous(), t, **options)
                assert same_bits(no_gradient, whole.value), (classes, options)
    x = gaps.contiguous().requires_grad_()
    scale = torch.tensor(2.0**-3, device="cuda")
    for t in (ordinary, ordinary.int().long()):
        for other in (t, torch.stack((t, t), 1)[:, 0]):
            loss = lossops.cross_entropy(x, other)
            (kept,) = torch.autograd.grad(loss, x, retain_graph=True)
            (again,) = torch.autograd.grad(loss, x, retain_graph=True)
            assert same_bits(again, kept), classes
            (scaled,) = torch.autograd.grad(lossops.cross_entropy(x, other), x, scale)
            (twice,) = torch.autograd.grad(loss, x, scale)
            assert same_bits(scaled, twice), classes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_bits_do_not_depend_on_how_many_pixels(dtype: torch.dtype) -> None:
    """8 in a line are whole vectors, 7 are not: two kernels."""
    for classes in (2, 21, 88, 120):
        x = (2 * torch.randn(2, classes, 8)).to(dtype).cuda()
        t = torch.randint(0, classes, (2, 8)).cuda()
        whole = run(x, t, reduction="none")
        part = run(x[:, :, :7].contiguous(), t[:, :7], reduction="none")
        assert same_bits(part.value, whole.value[:, :7]), classes
        assert same_bits(part.gradients["input"], whole.gradients["input"][:, :, :7]), classes


# Every way of reading rows from shared memory: words, pairs and vectors; of 4 to 125 vectors, in
# all orders that a lane may take them in; by 1, 2 and 4 lanes a row.
TILED_CLASSES = (
    *(1, 16, 17, 18, 20, 24, 31, 32, 33, 40, 48, 63, 64, 72, 80, 100, 104, 112, 127, 128),
    *(129, 130, 132, 136, 144, 160, 192, 200, 208, 255, 256, 257, 258, 260, 264, 272, 288, 384),
    *(399, 466, 496, 499, 500),
)


@pytest.mark.parametrize("classes", TILED_CLASSES)
def test_bits_do_not_depend_on_the_place_in_a_tile(classes: int) -> None:
    """Nor on what else is in it, where it lies, and whether rows follow one another."""
    rows = 77
    x = (3 * torch.randn(1, classes)).expand(rows, classes).contiguous().cuda()
    x[40:] += torch.randn(rows - 40, 1, device="cuda")
    t = torch.full((rows,), classes // 3, device="cuda")
    t[60:] = torch.randint(0, classes, (rows - 60,), device="cuda")
    t[70] = -100

    def losses_and_gradients(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        result = run(logits, targets, reduction="none")
        return result.value, result.gradients["input"]

    losses, gradients = losses_and_gradients(x, t)
    assert same_bits(losses[:40], losses[:1].expand(40))
    assert same_bits(gradients[:40], gradients[:1].expand(40, classes))
    wide = torch.zeros(rows, classes + 3, device="cuda")
    wide[:, 2 : classes + 2] = x
    shifted = torch.zeros(rows * classes + 1, device="cuda")
    shifted[1:] = x.flatten()
    for logits, first in (
        (wide[:, 2 : classes + 2], 0),
        (shifted[1:].view(rows, classes), 0),
        (x[3:], 3),
    ):
        other_losses, other_gradients = losses_and_gradients(logits, t[first:])
        assert same_bits(other_losses, losses[first:])
        assert same_bits(other_gradients, gradients[first:])


@pytest.mark.parametrize("classes", TILED_CLASSES)
@pytest.mark.parametrize("spread", [1.0, 8.0, 40.0])
def test_tiles(classes: int, spread: float) -> None:
    for rows in (1, 31, 300):
        x, t = problem(rows, classes, torch.float32, spread=spread)
        t[rows // 2] = classes - 1
        leaf = x.double().requires_grad_()
        exact = torch.nn.functional.cross_entropy(leaf, t, reduction="none")
        exact.sum().backward()
        assert leaf.grad is not None
        for reduction in ("none", "sum"):
            result = run(x, t, reduction=reduction)
            expected = exact if reduction == "none" else exact.sum()
            # In float64, too, what a confident row leaves is a difference of numbers near 1.
            torch.testing.assert_close(result.value.double(), expected, rtol=1e-6, atol=1e-12)
            gradient = result.gradients["input"].double()
            torch.testing.assert_close(gradient, leaf.grad, rtol=7 * 2**-23, atol=1e-14)


@pytest.mark.parametrize("classes", [16, 17])
def test_warps_of_several_tiles(classes: int) -> None:
    rows = (16384 * 4 + 3) * 32 + 5
    x = torch.randn(rows, classes, device="cuda")
    t = torch.randint(0, classes, (rows,), device="cuda")
    result = run(x, t, reduction="sum")
    ours, theirs = result.gradients["input"], torch.softmax(x, 1)
    theirs[torch.arange(rows, device="cuda"), t] -= 1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    expected = torch.nn.functional.cross_entropy(x, t, reduction="none").double().sum()
    torch.testing.assert_close(result.value.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("shape", "dtype"), [case[:2] for case in INDICES], ids=str)
def test_kernels(shape: tuple[int, ...], dtype: str) -> None:
    """That the tests above reach every kernel."""
    x = torch.randn(shape, device="cuda").to(getattr(torch, _plan.DTYPES[dtype]))
    check_kernel(x, torch.randint(0, shape[1], (shape[0], *shape[2:]), device="cuda"))


@pytest.mark.parametrize("classes", [6144, 32768, 50257, 128256, 151937, 262144])
def test_kernels_of_long_rows(classes: int) -> None:
    for dtype in (torch.float16, HALF):
        x = torch.randn(5, classes, device="cuda").to(dtype)
        check_kernel(x, torch.randint(0, classes, (5,), device="cuda"))


@pytest.mark.parametrize(
    "classes", [6144, 6145, 8192, 8193, 12289, 32000, 32767, 32768, 50257, 50264, 128256, 151937]
)
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_long_rows_without_a_gradient(dtype: torch.dtype, classes: int) -> None:
    """Rows of a block, some of them without a loss or with infinities, are as with a gradient."""
    rows = max(30, 20_000_000 // classes)
    x, t = problem(rows, classes, dtype)
    t[1::7] = classes
    x[2::9, ::3] = -torch.inf
    x[3::9, : classes // 2] = -torch.inf
    x[4::9] *= 1000
    x[5::18, 5] = torch.nan
    x[6::18, 7] = torch.inf
    x[7::18] = -torch.inf
    x[8::9] = 1.5
    # Rows that start within a vector.
    gaps = torch.zeros(rows, classes + 3, dtype=dtype, device="cuda")[:, 1 : classes + 1]
    gaps.copy_(x)
    weight = torch.rand(classes, device="cuda").to(dtype)
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.1}):
        losses = lossops.cross_entropy(x, t, reduction="none", **options)
        assert same_bits(lossops.cross_entropy(gaps, t, reduction="none", **options), losses)
        expected = torch.nn.functional.cross_entropy(
            x.double(),
            torch.where(t == classes, -100, t),
            reduction="none",
            **{**options, "weight": weight.double()} if "weight" in options else options,
        )
        expected[t == classes] = torch.nan
        rounded = expected.to(dtype).double()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(losses.double(), rounded, rtol=eps, atol=0, equal_nan=True)
        for row in range(0, rows, max(1, rows // 40)):
            part = slice(row, row + 1)
            leaf = x[part].clone().requires_grad_()
            with_gradient = lossops.cross_entropy(leaf, t[part], reduction="sum", **options)
            assert same_bits(with_gradient.detach(), losses[row]), row
            alone = lossops.cross_entropy(gaps[part], t[part], reduction="none", **options)
            assert same_bits(alone[0], losses[row]), row


@pytest.mark.parametrize("classes", [1008, 4088, 4096, 4100, 32768, 32776])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_kernel_of_probabilities(classes: int, dtype: torch.dtype) -> None:
    x = torch.randn(64, classes, device="cuda").to(dtype)
    check_kernel(x, torch.softmax(torch.randn(64, classes, device="cuda"), 1).to(dtype))


@pytest.mark.parametrize("classes", [1008, 2056, 4104, 20000, 32768])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_bits_of_unusual_probabilities(dtype: torch.dtype, classes: int) -> None:
    """Infinities and NaN, confident rows, rows far from 0: as rows with gaps, which another kernel
    takes; the gradient that forward leaves, too."""

    def same(a: Tensor, b: Tensor) -> bool:
        """Any NaN is equal to any other."""
        nans = a.isnan()
        return torch.equal(nans, b.isnan()) and same_bits(a[~nans], b[~nans])

    infinity, nan = float("inf"), float("nan")
    x, p = 2 * torch.randn(18, classes), torch.softmax(2 * torch.randn(18, classes), 1)
    x[1, 5 : classes // 2], p[1, 5 : classes // 2] = -infinity, 0
    x[2, -7:], p[2, -7:] = -infinity, 0
    x[3, 3] = -infinity
    x[4, -1] = infinity
    x[5, classes // 3] = nan
    x[6] = -infinity
    x[7] = 0
    x[8, classes // 2] = 30
    for row, index, logit in ((9, 0, 60), (10, -1, 15)):
        x[row, index], p[row], p[row, index] = logit, 0, 1
    x[11] += 500
    x[12, :], x[12, 9] = -60000, 60000
    p[13] = 0
    p[14, 7] = nan
    x[15, 11:13] = 12
    p[16, 4] = infinity
    x[17], p[17] = torch.finfo(dtype).min, 0
    x[17, 3], p[17, 3] = 1, 1
    x, p = x.to(dtype).cuda(), p.to(dtype).cuda()
    gaps = torch.zeros(2, 18, classes + 3, dtype=dtype, device="cuda")[:, :, 1 : classes + 1]
    gaps[0], gaps[1] = x, p
    for smoothing in (0.0, 0.1):
        whole = run(x, p, reduction="none", label_smoothing=smoothing)
        kept = run(x, p, reduction="sum", label_smoothing=smoothing)
        assert same(kept.gradients["input"], whole.gradients["input"])
        for logits, target in ((gaps[0], p), (x, gaps[1]), (gaps[0], gaps[1])):
            for reduction, expected in (("none", whole), ("sum", kept)):
                other = run(logits, target, reduction=reduction, label_smoothing=smoothing)
                assert same(other.value, expected.value), reduction
                assert same(other.gradients["input"], expected.gradients["input"]), reduction


@pytest.mark.parametrize("classes", [401, 500, 701, 1000, 1281, 1601, 2561, 2598, 3001, 4999])
@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
def test_dense_rows_at_odd_addresses(dtype: torch.dtype, classes: int) -> None:
    """Dense rows that begin anywhere: losses and gradients have the bits of aligned ones.

    The gradient of such logits is a tensor of its own, which begins elsewhere in a line.
    """
    x, target = problem(37, classes, dtype)
    for reduction in ("mean", "sum", "none"):
        expected = run(x, target, reduction=reduction)
        for offset in (1, 2, 5):
            memory = torch.zeros(x.numel() + offset, dtype=dtype, device="cuda")
            moved = memory[offset:].view_as(x).copy_(x)
            again = run(moved, target, reduction=reduction)
            assert same_bits(again.value, expected.value), (reduction, offset)
            assert same_bits(again.gradients["input"], expected.gradients["input"]), offset


@pytest.mark.parametrize("classes", [2, 33, 65, 300, 1001, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF], ids=str)
def test_rows_far_apart(dtype: torch.dtype, classes: int) -> None:
    """Rows with gaps longer than they are have the bits of rows without them."""
    x, target = problem(101, classes, dtype)
    for reduction in ("mean", "none"):
        expected = run(x, target, reduction=reduction)
        for stride in (2 * classes // 8 * 8 + 64, 2 * classes // 8 * 8 + 65):
            for offset in (0, 3, 8):
                memory = torch.full((101, stride), torch.nan, dtype=dtype, device="cuda")
                apart = memory[:, offset : offset + classes].copy_(x)
                again = run(apart, target, reduction=reduction)
                assert same_bits(again.value, expected.value), (reduction, stride, offset)
                gradient = again.gradients["input"]
                assert same_bits(gradient, expected.gradients["input"]), (stride, offset)


def check_program(program: str) -> None:
    """A process of its own, where no kernel has been launched yet."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# The first launches of each kernel, with as much dynamic shared memory as needs no permission if
# one forgets what is static: classes without a gradient and with one, a block a row and a cluster.
FIRST_LAUNCHES = """
import torch, lossops
for dtype, probabilities, *counts in (
    (torch.float32, False, 11500, 12000, 36000), (torch.float32, True, 5700, 5900, 18000),
    (torch.bfloat16, False, 23000, 23800, 72000), (torch.float16, True, 11500, 11900, 36000),
    (torch.float16, False, 44001, 24001, 72001), (torch.bfloat16, True, 22001, 12001, 36001),
):
    for classes, gradient in zip(counts, (False, True, True)):
        x = torch.randn(40, classes, device="cuda").to(dtype).requires_grad_(gradient)
        t = torch.zeros(40, dtype=torch.int64, device="cuda")
        if probabilities:
            t = torch.softmax(torch.randn_like(x), 1).detach()
        loss = lossops.cross_entropy(x, t)
        expected = torch.nn.functional.cross_entropy(x.double(), t.double() if probabilities else t)
        assert abs(loss.item() / expected.item() - 1) < 1e-2, (dtype, classes)
        if gradient:
            loss.backward()
"""


def test_first_launches() -> None:
    check_program(FIRST_LAUNCHES)


# Rows whose blocks have about 48 KB of dynamic shared memory, from little to much: a launch with
# more gives its kernel the permission that later ones need.
LAUNCHES_BY_SHARED_MEMORY = """
import json, torch, lossops
from itertools import product
ROWS = 2000
launches = []
for dtype, kind, gradient in product(
    (torch.float32, torch.bfloat16), ("indices", "smooth", "probabilities"), (False, True)
):
    widest = torch.empty(ROWS, 4200, dtype=dtype, device="cuda")
    t = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    for classes in (*range(2, 1100), *range(1100, 4200, 7)):
        x = widest.view(-1)[: ROWS * classes].view(ROWS, classes)
        plan = json.loads(torch.ops.lossops.cross_entropy_plan(
            x, x if kind == "probabilities" else t, gradient=gradient,
            label_smoothing=0.1 if kind == "smooth" else 0.0,
        ))
        size = plan["parameters"].get("shared_bytes_of_block", 0)
        if 46 << 10 <= size <= 48 << 10:
            launches.append((size, dtype, kind, gradient, classes))
assert len(launches) > 50, len(launches)
for size, dtype, kind, gradient, classes in sorted(launches, key=lambda launch: launch[0]):
    for own in (dtype,) if dtype == torch.float32 else (torch.bfloat16, torch.float16):
        x = torch.zeros(ROWS, classes, dtype=own, device="cuda", requires_grad=gradient)
        t = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        if kind == "probabilities":
            t = torch.nn.functional.one_hot(t, classes).to(own)
        loss = lossops.cross_entropy(x, t, label_smoothing=0.1 if kind == "smooth" else 0.0)
        if gradient:
            loss.backward()
        wanted = torch.tensor(float(classes)).log()
        assert abs(loss.item() / wanted - 1) < 1e-2, (own, kind, classes)
"""


def test_launches_by_shared_memory() -> None:
    check_program(LAUNCHES_BY_SHARED_MEMORY)


@pytest.mark.skipif(HOPPER_IS_OFF, reason="this is the run that the test starts")
def test_without_hopper() -> None:
    """All of these, and what cross entropy promises, by the kernels of older devices."""
    files = [Path(__file__).name, "test_cross_entropy.py", "test_kept_gradients.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "cuda", *files],
        cwd=Path(__file__).parent,
        env=os.environ
        | {"LOSSOPS_DISABLE_HOPPER": "1", "LOSSOPS_GPU_REPORT": "", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
