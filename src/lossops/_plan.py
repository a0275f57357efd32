"""Which CUDA kernel takes a call of cross entropy, and why: `python -m lossops.info --plan`.

The answer is that of the table which the library itself decides by. It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def plan(
    shape: Sequence[int],
    dtype: str,
    *,
    strides: Sequence[int] | None = None,
    gradient: bool = False,
    label_smoothing: float = 0.0,
    weights: bool = False,
    probabilities: bool = False,
    reduction: str = "mean",
    device: str = "",
) -> dict[str, Any]:
    """The decision for logits of `shape`, (C,), (N, C) or (N, C, d1, ...), as plain data.

    `dtype` is a key of `DTYPES` or torch's name. `gradient`: the forward pass shall leave a
    gradient, as it does for "mean" and "sum"; for "none" a backward pass shall. `device`: a name
    from `table_data()`, or "" for the current one. Targets are contiguous: int64 class indices, or
    probabilities of `dtype`. Raises ValueError for an unknown dtype, RuntimeError for arguments
    that cross entropy refuses and for an unknown device.
    """
    import torch

    from . import _extension

    _extension.load()
    name = DTYPES.get(dtype, dtype)
    if name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but is {dtype!r}")
    kind = getattr(torch, name)
    if strides is None:
        logits = torch.empty(shape, dtype=kind, device="meta")
    else:
        logits = torch.empty_strided(shape, strides, dtype=kind, device="meta")
    classes = 0 if logits.ndim == 1 else 1
    rows = [size for dim, size in enumerate(shape) if dim != classes]
    if probabilities:
        target = torch.empty(shape, dtype=kind, device="meta")
    else:
        target = torch.empty(rows, dtype=torch.int64, device="meta")
    weight = torch.empty(shape[classes], dtype=kind, device="meta") if weights else None
    decided: dict[str, Any] = json.loads(
        torch.ops.lossops.cross_entropy_plan(
            logits,
            target,
            weight,
            reduction=reduction,
            label_smoothing=label_smoothing,
            gradient=gradient,
            device=device,
        )
    )
    return decided


def table_data(device: str) -> dict[str, Any]:
    """The families in their order, the known devices, and the edges on one of these.

    The edges of a dtype are the numbers of classes at which contiguous rows change kernels, and
    those at which more threads or blocks share a row: the last of one and the first of the next.
    """
    import torch

    from . import _extension

    _extension.load()
    data: dict[str, Any] = json.loads(torch.ops.lossops.cross_entropy_plan_table(device))
    return data


def table() -> str:
    """The policy table as Markdown: the kernel table of docs/design.md."""
    lines = ["| kernel | rows | how | measured |", "|---|---|---|---|"]
    lines += [
        f"| {row['name']}: `{row['file']}` | {row['rows']} | {row['how']} | {row['why']} |"
        for row in table_data("h200")["families"]
    ]
    return "\n".join(lines)


def text(decided: dict[str, Any], device: str) -> str:
    """The decision for people."""
    limits = decided["device"]
    written = (
        "written with the loss; again, for another grad_output, by " + decided["backward"]
        if decided["writes_gradient"]
        else "not with the loss; a backward pass: " + decided["backward"]
    )
    lines = [
        (
            "device",
            f"{device or 'the current one'}: {limits['multiprocessors']} multiprocessors, "
            f"{limits['shared_bytes'] // 1024} KB of shared memory each, "
            f"{'with' if limits['hopper'] else 'without'} Hopper's kernels",
        ),
        ("kernel", f"{decided['name']}, csrc/kernels/{decided['file']}"),
        ("takes", decided["rows"]),
        ("how", decided["how"]),
        ("measured", decided["why"]),
        ("gradient", written),
    ]
    lines += [(name.replace("_", " "), str(n)) for name, n in decided["parameters"].items()]
    if decided["denominator_blocks"]:
        lines.append(("blocks before it", f"{decided['denominator_blocks']}, for the denominator"))
    lines += [(f"not {row['name']}", f"takes {row['rows']}") for row in decided["passed_over"]]
    width = max(len(name) for name, _ in lines) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --plan, its options and --plan-table."""
    group = parser.add_argument_group("which CUDA kernel takes a call of cross entropy")
    group.add_argument(
        "--plan",
        nargs=2,
        metavar=("SHAPE", "DTYPE"),
        help="of these logits: 8192x50257 bf16, 16x21x512x512 fp32",
    )
    group.add_argument("--strides", metavar="S,S", help="of the logits, in elements")
    group.add_argument("--grad", action="store_true", help="the logits need a gradient")
    group.add_argument("--smoothing", type=float, default=0.0, metavar="E")
    group.add_argument("--weights", action="store_true", help="class weights")
    group.add_argument("--probabilities", action="store_true", help="targets are probabilities")
    group.add_argument("--reduction", choices=["mean", "sum", "none"], default="mean")
    group.add_argument(
        "--device", help="h200, a100, ...; without it the current one, or an h200 if there is none"
    )
    group.add_argument("--plan-table", action="store_true", help="print the table, in Markdown")


def answer(arguments: argparse.Namespace) -> str:
    """What --plan or --plan-table prints. Raises ValueError and RuntimeError as plan() does."""
    if arguments.plan_table:
        return table()
    import torch

    device = arguments.device or ("" if torch.cuda.is_available() else "h200")
    shape, dtype = arguments.plan
    try:
        sizes = [int(size) for size in shape.split("x")]
        given = arguments.strides
        strides = None if given is None else [int(stride) for stride in given.split(",")]
    except ValueError:
        raise ValueError("SHAPE is written as 8192x50257, --strides as 50304,1") from None
    if any(abs(number) >= 2**63 for number in [*sizes, *(strides or [])]):
        raise ValueError("SHAPE and --strides have numbers below 2^63")
    decided = plan(
        sizes,
        dtype,
        strides=strides,
        gradient=arguments.grad,
        label_smoothing=arguments.smoothing,
        weights=arguments.weights,
        probabilities=arguments.probabilities,
        reduction=arguments.reduction,
        device=device,
    )
    return json.dumps(decided, indent=2) if arguments.json else text(decided, device)
