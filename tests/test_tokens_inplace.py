"""token_values_backward_inplace: the gradient over the logits, as token_values_backward has it."""

from __future__ import annotations

import pytest
import torch
from checks import assert_raises
from numerics import DTYPES, same_bits
from torch import Tensor

FORWARD = torch.ops.lossops.token_values_forward.default
BACKWARD = torch.ops.lossops.token_values_backward.default
OVERWRITE = torch.ops.lossops.token_values_backward_inplace.default

MAPS = {"none": (1.0, 1.0, None), "scale": (0.7, -2.0, None), "softcap": (1.5, 1.0, 5.0)}


def check(
    x: Tensor,
    index: Tensor | None,
    mask: Tensor | None,
    map: tuple[float, float, float | None] = MAPS["none"],
    *,
    has_entropy: bool = True,
    padding: int = 0,
) -> None:
    """x: logits (..., V). padding: elements between rows of x, which stay as they are."""
    wide = torch.full((*x.shape[:-1], x.size(-1) + padding), 7.0, dtype=x.dtype, device=x.device)
    wide[..., : x.size(-1)] = x
    x = wide[..., : x.size(-1)]
    options = (*map, has_entropy, True)
    values = FORWARD(x, index, mask, *options, True)
    log_probs, entropy, lse, row_stats = values
    grads = (
        torch.randn_like(log_probs) if index is not None else None,
        torch.randn_like(entropy) if has_entropy else None,
        torch.randn_like(lse),
    )
    (expected,) = BACKWARD(*grads, x, index, mask, row_stats, *options, [True])
    version = x._version
    OVERWRITE(x, *grads, index, mask, row_stats, *options)
    assert x._version == version + 1
    assert same_bits(x, expected)
    assert (wide[..., x.size(-1) :] == 7).all()


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("classes", [1, 2, 40, 1000, 4100, 20001])
def test_classes(device: str, dtype: torch.dtype, classes: int, map: str) -> None:
    rows = 50 if classes < 5000 else 9
    x = 3 * torch.randn(rows, classes, device=device).to(dtype)
    index = torch.randint(classes, (rows, 1), device=device)
    mask = torch.rand(rows, device=device) > 0.2
    for padding in (0, 3, -classes % 8):
        check(x, index, mask, MAPS[map], padding=padding)
    check(x, index, None, MAPS[map], has_entropy=False)


@pytest.mark.parametrize("indices", [0, 2, 5, 70])
def test_indices(device: str, indices: int) -> None:
    """None, several that repeat, and more than a lane each; some are out of range on CUDA."""
    x = torch.randn(13, 6000, device=device)
    index = torch.randint(6000, (13, indices), device=device)
    if indices > 1:
        index[:, 1] = index[:, 0]
    if device == "cuda" and indices > 2:
        index[3, 2] = 6000
    check(x, index if indices else None, None)


@pytest.mark.parametrize("classes", [1, 5, 40, 700])
def test_indices_without_gradients(device: str, classes: int) -> None:
    """Several class indices of which no log-probability has a gradient."""
    rows = 3000
    x = torch.randn(rows, classes, device=device)
    index = torch.randint(classes, (rows, 16), device=device)
    options = (1.0, 1.0, None, True, True)
    _, entropy, lse, stats = FORWARD(x, index, None, *options, True)
    grads = (None, torch.randn_like(entropy), torch.randn_like(lse))
    (expected,) = BACKWARD(*grads, x, None, None, stats, *options, [True])
    (gradient,) = BACKWARD(*grads, x, index, None, stats, *options, [True])
    assert same_bits(gradient, expected)


def test_more_dimensions(device: str) -> None:
    """Classes in front of positions too, as heads of several dimensions have them."""
    x = torch.randn(4, 300, 6, device=device).movedim(1, -1)
    index = torch.randint(300, (4, 6, 2), device=device)
    values = FORWARD(x, index, None, 1.0, 1.0, None, False, False, True)
    grad = torch.randn_like(values[0])
    options = (1.0, 1.0, None, False, False)
    (expected,) = BACKWARD(grad, None, None, x, index, None, values[3], *options, [True])
    OVERWRITE(x, grad, None, None, index, None, values[3], *options)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_class(device: str, dtype: torch.dtype) -> None:
    """A row of one class, with any distance to a class that is not there, and at any address."""
    options = (1.0, 1.0, None, True, True)
    for shape, first in (((1, 301), 1), ((1, 301), 2), ((30, 2, 3, 5), 0)):
        x = torch.randn(shape, device=device).to(dtype)[:1, first:].movedim(0, -1)
        mask = torch.rand(x.shape[:-1], device=device) > 0.2
        values = FORWARD(x, None, mask, *options, True)
        grads = (None, torch.zeros_like(values[1]), torch.randn_like(values[2]))
        (expected,) = BACKWARD(*grads, x, None, mask, values[3], *options, [True])
        of_lse = torch.where(mask, grads[2], torch.zeros_like(grads[2]))
        torch.testing.assert_close(expected[..., 0], of_lse.to(dtype))
        OVERWRITE(x, *grads, None, mask, values[3], *options)
        assert same_bits(x, expected)


def test_wrong_stats(device: str) -> None:
    x = torch.randn(4, 6, device=device)
    stats = torch.randn(2, 4, device=device)
    call = lambda: OVERWRITE(x, *[None] * 5, stats, 1.0, 1.0, None, False, False)  # noqa: E731
    assert_raises(RuntimeError, call, "row_stats")
