"""Random calls of every loss, most of them wrong: none may crash, and every error is of use.

    python tests/random_calls.py FIRST_SEED COUNT cpu|cuda

Each call has a seed of its own, which repeats it alone. A finding is an internal assert, an error
of an unexpected type, a message that does not name an argument of the call, or one that cannot be
decoded: a line of JSON each, and a last one with how many calls did what. The seed on the error
stream is the call that runs, so that a crash can be told by it. `test_random_calls.py` starts this
program for a few calls, `tools/fuzz_calls.py` for millions.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import lossops

ALLOWED = ("ValueError", "RuntimeError", "TypeError", "IndexError", "NotImplementedError")
LOSSES = ("mse_loss", "kl_div", "cross_entropy")
NUMPY: tuple[Any, ...] = (
    *(
        np.float64(0.1),
        np.float32(0.5),
        np.float16(-1),
        np.int64(-100),
        np.int8(1),
        np.uint64(2**63),
    ),
    *(np.bool_(True), np.str_("sum"), np.zeros(3), np.array(0.1)),
)
NONSENSE: tuple[Any, ...] = (
    *(None, 0, 1.5, -1, "mean", "", b"x", [], (), {}, object(), True, 2**63, 2**70),
    *NUMPY,
)


# Keywords of cross_entropy alone.
FURTHER: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1.0, -2.0, 0.0, float("inf")),
    "softcap": (None, 3.0, 0.0, float("nan")),
    "temperature": (1.0, 0.5, 0.5, -1.0),
    "lse_square_scale": (0.0, 0.1, 0.1, float("nan")),
    "num_items_in_batch": (None, 3, 0, torch.tensor(2), torch.ones(2)),
    "return_lse": (True, False),
    "return_entropy": (True, False),
    "return_z_loss": (True, False),
    "return_token_accuracy": (True, False),
    "return_predicted_tokens": (True, False),
}


@functools.cache
def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def shape_of(draw: random.Random) -> tuple[int, ...]:
    sizes = (0, 1, 1, 2, 3, 3, 5, 8, 17)
    return tuple(draw.choice(sizes) for _ in range(draw.choice((0, 1, 1, 2, 2, 2, 3, 4, 5))))


def tensor_of(draw: random.Random, device: str, shape: tuple[int, ...]) -> Any:
    floats = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
    others = (torch.int64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
    odd = (torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16)
    dtype = draw.choice(floats * 4 + others * 2 + odd)
    if dtype.is_floating_point:
        tensor = torch.randn(shape).to(dtype)
        if draw.random() < 0.1 and tensor.numel():
            special = draw.choice((float("nan"), float("inf"), -float("inf"), 1e38, 0.0))
            tensor.view(-1)[draw.randrange(tensor.numel())] = special
    elif dtype.is_complex:
        tensor = torch.randn(shape, dtype=dtype)
    else:
        tensor = torch.randint(0, 3, shape).to(dtype)
        if draw.random() < 0.2 and tensor.numel() and dtype is not torch.bool:
            tensor.view(-1)[0] = draw.choice((-100, -1, 100, 3))
    where = draw.random()
    if where < 0.02:
        return torch.empty(shape, dtype=dtype, device="meta")
    if where < 0.04:
        return torch.randn(3, 3).to_sparse()
    tensor = tensor.to("cpu" if where < 0.08 else device)
    layout = draw.random()
    if layout < 0.15 and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif layout < 0.25 and tensor.dim():
        tensor = tensor[..., :1].expand(shape) if shape[-1] else tensor
    elif layout < 0.3 and tensor.dim():
        tensor = torch.stack((tensor, tensor), -1)[..., 0]
    if draw.random() < 0.3 and (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.detach().requires_grad_()
    return tensor


def related(draw: random.Random, shape: tuple[int, ...], classes: bool) -> tuple[int, ...]:
    """Mostly a shape that fits."""
    chance = draw.random()
    if classes and chance < 0.5:
        return shape[:1] + shape[2:] if len(shape) > 1 else ()
    if chance < 0.8:
        return shape
    if chance < 0.9 and shape:
        return tuple(1 if draw.random() < 0.3 else size for size in shape)
    return shape_of(draw)


def arguments(
    draw: random.Random, device: str, function: Callable[..., Any]
) -> tuple[list[Any], dict[str, Any]]:
    shape = shape_of(draw)
    classes = function.__name__ == "cross_entropy"

    def or_nonsense(value: Any, chance: float = 0.03) -> Any:
        return draw.choice(NONSENSE) if draw.random() < chance else value

    positional = [
        or_nonsense(tensor_of(draw, device, shape)),
        or_nonsense(tensor_of(draw, device, related(draw, shape, classes))),
    ]
    named: dict[str, Any] = {}
    if draw.random() < 0.6:
        named["reduction"] = or_nonsense(
            draw.choice(("none", "mean", "sum", "batchmean", "max", "Mean")), 0.1
        )
    if draw.random() < 0.3:
        size = (shape[1:2] or shape[:1]) if classes else related(draw, shape, False)
        named["weight"] = or_nonsense(tensor_of(draw, device, tuple(size)), 0.1)
    for name, values in (
        ("log_target", (True, False)),
        ("log_input", (True, False)),
        ("ignore_index", (-100, 0, 1, 255, 2**40, -(2**63))),
        ("label_smoothing", (0.0, 0.1, 1.0, -0.1, 1.5, float("nan"))),
        ("inplace_backward", (True, False)),
    ):
        fits = name in names_of(function)
        if draw.random() < (0.25 if fits else 0.01):
            named[name] = or_nonsense(draw.choice(values), 0.1)
    if draw.random() < (0.3 if classes else 0.01):
        for name in draw.sample(sorted(FURTHER), draw.choice((1, 1, 2, 3))):
            named[name] = or_nonsense(draw.choice(FURTHER[name]), 0.1)
        if draw.random() < 0.2:
            named["token_weight"] = or_nonsense(tensor_of(draw, device, related(draw, shape, True)))
    if draw.random() < 0.02:
        positional.pop()
    if draw.random() < 0.02:
        named[draw.choice(("size_average", "reduce", "Input", "dim"))] = True
    return positional, named


def finding(function: Callable[..., Any], error: BaseException) -> str | None:
    """What is wrong with an error of a call of a loss, or of its operator, if anything.

    Python's own words for a call that does not fit the signature name the function, and torch's for
    a layout that an operator has no kernel for name that one.
    """
    kind = type(error).__name__
    if not any(base.__name__ in ALLOWED for base in type(error).__mro__):
        return f"raised {kind}"
    try:
        message = str(error)
        message.encode()
    except (UnicodeError, ValueError):
        return "message cannot be decoded"
    if not message.strip():
        return "no message"
    if "INTERNAL ASSERT" in message or "Please report a bug" in message:
        return "internal assert"
    if not any(re.search(rf"\b{name}\b", message) for name in names_of(function)) and not (
        (isinstance(error, TypeError) and f"{function.__name__}()" in message)
        or (isinstance(error, NotImplementedError) and f"lossops::{function.__name__}" in message)
    ):
        return "names no argument"
    return None


def one_call(seed: int, device: str) -> tuple[str, str | None, str]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loss = draw.choice(LOSSES)
    function: Callable[..., Any] = getattr(lossops, loss)
    positional, named = arguments(draw, device, function)
    # An operator takes what its schema says, and tells of all else itself.
    called = getattr(torch.ops.lossops, loss) if draw.random() < 0.2 else function
    try:
        value = called(*positional, **named)
    except Exception as error:  # any error is looked at
        return "error", finding(function, error), f"{loss}: {type(error).__name__}: {error}"
    value = value.loss if isinstance(value, lossops.CrossEntropyOutput) else value
    try:
        if value.requires_grad and value.device.type != "meta":
            value.backward(torch.ones_like(value))
    except Exception as error:
        return (
            "backward error",
            finding(function, error),
            f"{loss}: {type(error).__name__}: {error}",
        )
    return "value", None, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=int, help="seed of the first call")
    parser.add_argument("count", type=int)
    parser.add_argument("device", choices=("cpu", "cuda"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tally: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.count):
        # A crash leaves the number of the call that did it.
        sys.stderr.write(f"\r{seed}")
        outcome, wrong, message = one_call(seed, options.device)
        tally[outcome] += 1
        if wrong:
            print(json.dumps({"seed": seed, "wrong": wrong, "message": message[:500]}), flush=True)
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"tally": tally}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
