"""What the functions and modules say of a wrong call, and torch's order of arguments."""

from __future__ import annotations

import copy
import inspect
import itertools
from fractions import Fraction
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from losses import BY_NAME, LOSS_IDS, LOSSES, Loss
from numerics import same_bits

import lossops

per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
CROSS_ENTROPY = BY_NAME["cross_entropy"]


def message_of(call: Any, error: type[Exception]) -> str:
    with pytest.raises(error) as found:
        call()
    assert type(found.value) is error
    return str(found.value)


# --- single arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "0.1", b"0.1", [0.1], {}], ids=str)
def test_label_smoothing_says_what_it_was(value: Any) -> None:
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    for leaf in (x, x.clone().requires_grad_()):
        message = message_of(
            lambda x=leaf: lossops.cross_entropy(x, t, label_smoothing=value), TypeError
        )
        expected = f"cross_entropy: label_smoothing must be a number, but is {value!r}"
        assert message == expected


@per_loss
@pytest.mark.parametrize("name", ["input", "target"])
@pytest.mark.parametrize("value", [[1.0, 2.0], 3, None], ids=str)
def test_argument_that_is_no_tensor(loss: Loss, name: str, value: Any) -> None:
    tensors: dict[str, Any] = {**loss.variants[0].sample((4, 3)).tensors, name: value}
    message = message_of(lambda: loss.function(**tensors), TypeError)
    assert message == f"{loss.name}: {name} must be a Tensor, but is {type(value).__name__}"


@per_loss
@pytest.mark.parametrize("value", [None, b"mean", b"none", 0, "me\0an", "sun"], ids=repr)
def test_reduction_names_function_value_and_choices(loss: Loss, value: Any) -> None:
    """torch's exception, also where C++ would take bytes for text."""
    sample = loss.variants[0].sample((4, 3))
    tensors = sample.tensors
    for requires_grad in (False, True):
        x = tensors["input"].detach().requires_grad_(requires_grad)
        call = sample.with_tensors(input=x).with_options(reduction=value)
        message = message_of(lambda call=call: call.call(loss.function), ValueError)
        for words in (f"{loss.name}: reduction must be one of", "'none', 'mean', 'sum'"):
            assert words in message
        assert repr(value) in message
    message_of(
        lambda: loss.reference(tensors["input"], tensors["target"], reduction=value), ValueError
    )


@per_loss
def test_type_checkers_see_the_reductions(loss: Loss) -> None:
    for function in (loss.function, loss.module.__init__):
        hint = get_type_hints(function)["reduction"]
        assert hint == Literal[loss.reductions]
        assert set(get_args(hint)) == set(loss.reductions)


# --- classes in the last dimension ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [((2, 5, 7), "input.transpose(1, 2)"), ((2, 5, 6, 7), "input.movedim(-1, 1)")],
    ids=str,
)
def test_classes_in_the_last_dimension(shape: tuple[int, ...], remedy: str, device: str) -> None:
    x = torch.randn(shape, device=device)
    t = torch.randint(7, shape[:-1], device=device)
    for requires_grad in (False, True):
        x.requires_grad_(requires_grad)
        with pytest.raises(Exception) as theirs:  # noqa: PT011 (whatever it is)
            F.cross_entropy(x, t)
        message = message_of(lambda: lossops.cross_entropy(x, t), type(theirs.value))
        assert f"pass {remedy}" in message and str(shape) in message
    fixed = x.transpose(1, 2) if x.dim() == 3 else x.movedim(-1, 1)
    torch.testing.assert_close(lossops.cross_entropy(fixed, t), F.cross_entropy(fixed, t))


def test_other_shapes_have_no_hint() -> None:
    for shape, target in (((4, 3), (3,)), ((2, 5, 7), (2, 6)), ((2, 5, 7), (2, 7, 1))):
        x, t = torch.randn(shape), torch.zeros(target, dtype=torch.int64)
        with pytest.raises((ValueError, RuntimeError)) as found:
            lossops.cross_entropy(x, t)
        assert "pass input" not in str(found.value)


# --- arguments by position ------------------------------------------------------------------------

# What stands after input and target, and what is meant.
POSITIONAL: dict[str, tuple[tuple[tuple[Any, ...], dict[str, Any]], ...]] = {
    "mse_loss": (
        ((None,), {}),
        ((None, None), {}),
        ((None, None, "sum"), {"reduction": "sum"}),
        ((None, None, "mean", torch.full((6, 5), 2.0)), {"weight": torch.full((6, 5), 2.0)}),
    ),
    "kl_div": (
        ((None, None), {}),
        ((None, None, "batchmean"), {"reduction": "batchmean"}),
        ((None, None, "sum", True), {"reduction": "sum", "log_target": True}),
    ),
    "cross_entropy": (
        ((None, None), {}),
        ((None, None, 0), {"ignore_index": 0}),
        ((None, None, -100, None), {}),
        ((None, None, 0, None, "sum"), {"ignore_index": 0, "reduction": "sum"}),
        ((torch.ones(5), None, 0, None, "sum", 0.25),
         {"weight": torch.ones(5), "ignore_index": 0, "reduction": "sum", "label_smoothing": 0.25}),
    ),
}  # fmt: skip


@per_loss
def test_positions_are_torchs(loss: Loss, device: str) -> None:
    x = torch.randn(6, 5, device=device)
    t: torch.Tensor = torch.rand(6, 5, device=device)
    if not loss.elementwise:
        t = torch.randint(5, (6,), device=device)

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    for by_position, by_name in POSITIONAL[loss.name]:
        positional = [there(value) for value in by_position]
        named = {name: there(value) for name, value in by_name.items()}
        found = loss.function(x, t, *positional)
        assert same_bits(found, loss.function(x, t, **named))
        torch.testing.assert_close(found, getattr(F, loss.name)(x, t, *positional))


@per_loss
def test_positions_of_modules_are_torchs(loss: Loss) -> None:
    names = list(inspect.signature(loss.torch_module.__init__).parameters)[1:]
    values = {"ignore_index": 3, "reduction": "sum", "label_smoothing": 0.25, "log_target": True}
    positional = [values.get(name) for name in names]
    ours, theirs = loss.module(*positional), loss.torch_module(*positional)
    assert repr(ours) == repr(theirs)
    for name in names:
        if name in values:
            assert getattr(ours, name) == getattr(theirs, name) == values[name]
    if loss is CROSS_ENTROPY:
        assert loss.module(None, None, -100).ignore_index == -100


@per_loss
@pytest.mark.parametrize("value", [True, False, 0, "sum"], ids=repr)
def test_deprecated_positions_say_how_to_write_it(loss: Loss, value: Any) -> None:
    sample = loss.variants[0].sample((4, 3))
    x, t = sample.tensors["input"], sample.tensors["target"]
    for name, call in itertools.product(
        ("size_average", "reduce"),
        (lambda **given: loss.function(x, t, **given), loss.module),
    ):
        message = message_of(lambda call=call, name=name: call(**{name: value}), TypeError)
        assert f"{name} must be None, but is {value!r}" in message
        if isinstance(value, int) and not isinstance(value, bool):
            remedy = f"ignore_index={value}" if loss is CROSS_ENTROPY else "by its name"
        else:
            if_false = "sum" if name == "size_average" else "none"
            meant = {True: "mean", False: if_false}.get(value, value)
            remedy = f"write reduction={meant!r}"
        assert remedy in message
    before = () if loss.elementwise else (None,)
    message = message_of(lambda: loss.function(x, t, *before, value), TypeError)
    assert "size_average must be None" in message


@pytest.mark.parametrize(
    "value", [np.array(0.25), np.float32(0.25), torch.tensor(0.25), Fraction(1, 4)], ids=repr
)
def test_label_smoothing_of_any_number(value: Any, device: str) -> None:
    """Also one that may be changed between two calls."""
    x, t = torch.randn(4, 5, device=device), torch.randint(5, (4,), device=device)
    value = copy.deepcopy(value)
    found = lossops.cross_entropy(x, t, label_smoothing=value)
    assert same_bits(found, lossops.cross_entropy(x, t, label_smoothing=0.25))
    if isinstance(value, (np.ndarray, torch.Tensor)):
        value += 0.25
        found = lossops.cross_entropy(x, t, label_smoothing=value)  # type: ignore[arg-type]
        assert same_bits(found, lossops.cross_entropy(x, t, label_smoothing=0.5))
