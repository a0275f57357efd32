"""Calls of losses of rows: cross entropy, and the functions of tokens where lossops has them."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Collection
from typing import ClassVar

import torch
from torch import Tensor

import lossops

from ..cases import DTYPES, IGNORED
from .spec import MIB, Bounds, Spec, log_uniform

# The function of lossops behind each loss; what this lossops does not have is not drawn.
FUNCTIONS = {
    "ce": "cross_entropy",
    "logp": "selective_log_softmax",
    "entropy": "entropy_from_logits",
    "logp-entropy": "selective_log_softmax_and_entropy",
}
FAMILIES = {
    "contiguous": "contiguous rows, reduced to one number",
    "none": "contiguous rows, a loss for each",
    "padded": "rows of a stride beyond the classes, or that begin at any element",
    "images": "classes in dimension 1, one to three dimensions behind them",
    "soft": "label smoothing, probabilities as targets",
    "tokens": "log-probabilities and entropies of tokens",
    "soft-images": "images with label smoothing or probabilities",
}
# Of logits, about: shapes are rounded.
MIB_OF_LOGITS = (64.0, 2048.0)
# More classes in front of pixels do not occur.
MOST_CLASSES_OF_IMAGES = 4096
STATISTIC_BYTES = 4  # a float32
SECTOR_BYTES = 32  # the least that is read of a GPU's memory


@dataclasses.dataclass(frozen=True)
class RowDraw(Spec):
    """One call. Logits are (N, C), or (N, C, d1, ...) for images; all rows count as N below."""

    kind: ClassVar[str] = "rows"
    choices: ClassVar[dict[str, Collection[str]]] = {
        "family": FAMILIES,
        "dtype": DTYPES,
        "loss": FUNCTIONS,
        "reduction": ("mean", "sum", "none"),
    }

    shape: tuple[int, ...]
    dtype: str
    loss: str = "ce"
    reduction: str = "mean"
    pad: int = 0  # elements between two rows
    offset: int = 0  # elements in front of the first row
    smoothing: float = 0.0
    weight: bool = False  # of classes
    ignored: float = 0.0  # share of the rows; of tokens, share that the mask leaves out
    probabilities: bool = False
    indices: int = 1  # of each row; several are for "logp" alone
    # What is added to one logit of each row, in three of four at the right class. With
    # probabilities, half of it to what the target is the softmax of.
    confident: float = 0.0
    data: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) < 2:
            raise ValueError(f"shape={self.shape}: logits are (N, C) or (N, C, d1, ...)")
        if self.pad < 0 or self.offset < 0 or self.indices < 1:
            raise ValueError("pad and offset are 0 or more, indices 1 or more")
        if self.pad and len(self.shape) > 2:
            raise ValueError("pad is for logits of shape (N, C)")
        if self.probabilities and self.ignored:
            raise ValueError("probabilities have no ignored rows")
        if self.is_tokens and (self.weight or self.smoothing or self.probabilities):
            raise ValueError(f"weight, smoothing and probabilities are for ce, not {self.loss}")
        if self.is_tokens and (self.reduction != "none" or len(self.shape) > 2):
            raise ValueError(f"{self.loss} takes reduction=none and a shape (N, C)")
        if self.indices > 1 and self.loss != "logp":
            raise ValueError("indices are for logp")

    @property
    def is_tokens(self) -> bool:
        return self.loss != "ce"

    @property
    def classes(self) -> int:
        return self.shape[1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // self.classes

    @property
    def nbytes(self) -> int:
        """Of the logits, without the padding."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def group(self) -> str:
        """Where percentiles count it: a loss for each row moves more, so it stands apart."""
        apart = self.reduction == "none" and self.family not in ("none", "tokens")
        return f"{self.kind}/{self.family}" + ", none" * apart


def families() -> list[str]:
    """What can be drawn of this lossops."""
    there = [loss for loss in FUNCTIONS if loss != "ce" and has(loss)]
    return [family for family in FAMILIES if family != "tokens" or there]


def has(loss: str) -> bool:
    """Whether this lossops has the function."""
    return hasattr(lossops, FUNCTIONS[loss])


def draw(source: random.Random, family: str, bounds: Bounds) -> RowDraw:
    """The next call of a family. It depends on `source` and `bounds` alone, not on the device."""
    dtype = source.choice(list(DTYPES))
    least, most = bounds.mib or MIB_OF_LOGITS
    elements = log_uniform(source, least * MIB, most * MIB) / DTYPES[dtype].itemsize
    fewest, most_classes = bounds.classes
    is_image = family in ("images", "soft-images")
    if is_image:
        most_classes = max(fewest, min(most_classes, MOST_CLASSES_OF_IMAGES))
    classes = _classes(source, fewest, most_classes)
    rows = max(1, round(elements / classes))
    if source.random() < 0.5:
        rows = _rounded(rows)
    draw_options = functools.partial(
        RowDraw,
        family=family,
        shape=_image(source, rows, classes) if is_image else (rows, classes),
        dtype=dtype,
        weight=source.random() < 0.15 and family != "tokens",
        ignored=source.choice([0.1, 0.3, 0.7]) if source.random() < 0.15 else 0.0,
        data=source.randrange(1 << 31),
    )
    found = _OPTIONS[family](source, draw_options, classes)
    # Trained models have confident rows. Drawn from `data`, not from `source`, so that a seed still
    # gives the same shapes.
    confident = random.Random(found.data).choice([0.0, 0.0, 14.0])
    return dataclasses.replace(found, confident=confident)


Partial = Callable[..., RowDraw]


def _contiguous(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    return draw(reduction=source.choice(["mean", "mean", "sum"]))


def _none(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    return draw(reduction="none")


def _padded(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    layout = source.choice(["aligned", "odd", "shifted"])
    pad, offset = 0, source.choice([0, source.randint(1, 7)])
    if layout == "aligned":
        # At most as much padding as there are classes.
        units = [unit for unit in (8, 16, 32, 64, 128) if -classes % unit <= classes]
        unit = source.choice(units or [1])
        pad = -classes % unit or min(unit, classes)
    elif layout == "odd":
        pad = source.randint(1, max(1, min(classes, 64)) // 2 + 1)
        pad += (classes + pad) % 2 == 0
    else:
        offset = source.randint(1, 7)
    reduction = source.choice(["mean", "mean", "sum", "none"])
    return draw(pad=pad, offset=offset, reduction=reduction)


def _images(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    return draw(reduction=source.choice(["mean", "mean", "sum", "none"]))


def _soft(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    reduction = source.choice(["mean", "mean", "sum", "none"])
    smoothing = source.choice([0.05, 0.1, 0.2])
    if source.random() < 0.5:
        return draw(reduction=reduction, smoothing=smoothing)
    smoothing = smoothing if source.random() < 1 / 3 else 0.0
    return draw(reduction=reduction, smoothing=smoothing, probabilities=True, ignored=0.0)


def _tokens(source: random.Random, draw: Partial, classes: int) -> RowDraw:
    losses = [loss for loss in FUNCTIONS if loss != "ce" and has(loss)]
    loss = source.choice(losses)
    several = loss == "logp" and source.random() < 1 / 3
    pad = source.choice([0, 0, 0, min(-classes % 64, classes)])
    options = {} if loss != "entropy" else {"ignored": 0.0}  # it takes no mask
    return draw(loss=loss, reduction="none", pad=pad, indices=20 if several else 1, **options)


_OPTIONS = {
    "contiguous": _contiguous,
    "none": _none,
    "padded": _padded,
    "images": _images,
    "soft": _soft,
    "tokens": _tokens,
    "soft-images": _soft,
}


def _classes(source: random.Random, least: int, most: int) -> int:
    """As many as are drawn, or the nearest round, odd or prime number of them."""
    count = round(log_uniform(source, least, most))
    how = source.choice(["any", "round", "odd", "prime"])
    if how == "round":
        decimal = 10 ** max(0, len(str(count)) - 2)
        count = source.choice([_rounded(count), round(count / decimal) * decimal])
    elif how == "odd":
        count |= 1
    elif how == "prime":
        count = next(
            n for n in range(count, 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1))
        )
    return min(max(count, least), most)


def _rounded(count: int) -> int:
    """To three binary digits: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..."""
    unit = 1 << max(0, count.bit_length() - 3)
    return round(count / unit) * unit


def _image(source: random.Random, rows: int, classes: int) -> tuple[int, ...]:
    """(N, C, d1, ...) of about as many rows, with one to three dimensions of alike sizes."""
    batch = min(rows, round(log_uniform(source, 1, 64)))
    ndim = source.randint(1, 3)
    side = max(1, round((rows / batch) ** (1 / ndim)))
    inner = [max(1, round(side * source.uniform(0.75, 1.25))) for _ in range(ndim - 1)]
    return (batch, classes, *inner, max(1, round(rows / batch / math.prod(inner))))


@dataclasses.dataclass
class Rows:
    """The tensors of a call."""

    logits: Tensor  # (N, C) or (N, C, d1, ...)
    # Class indices of shape (N, ...), or of (N, K) for tokens; or probabilities as the logits.
    target: Tensor
    weight: Tensor | None  # (C,)
    kept: Tensor | None  # (N, ...), bool; None: all

    @property
    def kept_rows(self) -> int:
        everything = self.logits.numel() // self.logits.size(1)
        return everything if self.kept is None else int(self.kept.sum())

    @property
    def read_rows(self) -> int:
        """Kept rows, and those in a sector with one, as if planes began where sectors do."""
        if self.kept is None:
            return self.kept_rows
        is_image = self.logits.ndim > 2
        stride = 1 if is_image else self.logits.stride(0)  # from a row to the next
        of_sector = max(1, SECTOR_BYTES // (stride * self.logits.element_size()))
        planes = self.kept.flatten(1) if is_image else self.kept.view(1, -1)
        whole = planes.size(1) // of_sector
        end = planes.size(1) - whole * of_sector
        in_whole = planes[:, : whole * of_sector].unflatten(1, (whole, of_sector)).any(2).sum()
        in_end = planes[:, whole * of_sector :].any(1).sum()
        return int(in_whole * of_sector + in_end * end)


def tensors(draw: RowDraw, device: torch.device) -> Rows:
    """The call's tensors, the same on a device each time."""
    torch.manual_seed(draw.data)
    dtype, shape = DTYPES[draw.dtype], draw.shape
    stride = draw.classes + draw.pad
    count = shape[0] * stride if len(shape) == 2 else math.prod(shape)
    storage = torch.empty(draw.offset + count, dtype=dtype, device=device).normal_()
    body = storage[draw.offset :]
    logits = body.view(-1, stride)[:, : draw.classes] if len(shape) == 2 else body.view(shape)
    # One factor a row. On data that is alike everywhere a kernel that reads wrong rows passes.
    factor = torch.linspace(0.5, 2.0, shape[0], device=device).to(dtype)
    logits.mul_(factor.view(-1, *[1] * (len(shape) - 1)))

    of_rows = (shape[0], *shape[2:])
    kept = torch.rand(of_rows, device=device) >= draw.ignored if draw.ignored else None
    if kept is not None:
        kept.view(-1)[0] = True  # the mean of no row is NaN
    several = (draw.indices,) if draw.indices > 1 else ()
    index = torch.randint(draw.classes, (*of_rows, *several), device=device)
    right = (index[:, 0] if several else index).unsqueeze(1)
    if draw.probabilities:
        scores = torch.empty(shape, dtype=dtype, device=device).normal_()
        target = _add_at(scores, right, draw.confident / 2).softmax(1)
    else:
        target = index
    # A fourth of the rows is sure of the next class, not of the right one.
    is_wrong = torch.rand(right.shape, device=device) < 0.25
    _add_at(logits, (right + is_wrong) % draw.classes, draw.confident)
    if kept is not None and not draw.is_tokens:
        target.masked_fill_(~kept, IGNORED)
    steps = torch.linspace(0.5, 1.5, draw.classes, device=device).to(dtype)
    return Rows(logits, target, steps if draw.weight else None, kept)


def _add_at(logits: Tensor, classes: Tensor, by: float) -> Tensor:
    """Adds `by` to the logit at the class of each row, in place."""
    if by:
        added = torch.full(classes.shape, by, dtype=logits.dtype, device=logits.device)
        logits.scatter_add_(1, classes, added)
    return logits


def moved_bytes(draw: RowDraw, read_rows: int) -> dict[str, int]:
    """The least that must move: {"read", "written"} of a forward pass, and {"step"}.

    What has a value for each class counts once: logits of `read_rows` rows are read, and so are
    probabilities; a gradient is written for every row. So a step that reads its logits twice,
    as one must whose `grad_output` is known late, reaches 2/3.
    What has a value for each row counts whenever it must move. Forward reads class indices (and
    masks) and writes losses. If each row has a loss of its own, backward reads indices and masks
    again, and `grad_output`, and forward leaves it float32 statistics: one for each row, two for
    an entropy.
    """
    size = DTYPES[draw.dtype].itemsize
    of_gradient = draw.rows * draw.classes * size
    by_class = read_rows * draw.classes * size + (of_gradient if draw.probabilities else 0)
    by_class += draw.classes * size if draw.weight else 0
    of_rows = 0 if draw.probabilities or draw.loss == "entropy" else 8 * draw.rows * draw.indices
    of_rows += draw.rows if draw.is_tokens and draw.ignored else 0
    read = by_class + of_rows
    if draw.reduction != "none":
        return {"read": read, "written": 0, "step": read + of_gradient}
    # Tokens have float32 values, losses the dtype of the logits.
    outputs = 2 if draw.loss == "logp-entropy" else draw.indices
    written = draw.rows * outputs * (4 if draw.is_tokens else size)
    statistics = draw.rows * STATISTIC_BYTES * (2 if "entropy" in draw.loss else 1)
    step = read + of_rows + 2 * written + 2 * statistics + of_gradient
    return {"read": read, "written": written, "step": step}
