"""Gradients that Inductor may compute itself, fused with what else it does to them.

Into an operator Inductor cannot look: where the gradient of a loss is used again at once, as a sum
of it is the gradient of a layer's bias, an operator costs one more pass over memory. What such a
gradient is in torch's own pointwise operations is offered to Inductor as a decomposition of the
operator; other backends of `torch.compile` do not fuse, and keep the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_offered: dict[Any, Callable[..., Any]] = {}


def offer(operator: Any, decomposition: Callable[..., Any]) -> None:
    """Decomposes `operator`, an overload, from the next program on that Inductor compiles.

    decomposition: takes the operator's arguments; returns its result, or NotImplemented.
    """
    _offered[operator] = decomposition


def register_offers() -> None:
    """Registers what was offered, if Inductor is there. Called while a program is traced."""
    inductor: Any = sys.modules.get("torch._inductor.decomposition")
    if inductor is None or not _offered:
        return
    table: Any = getattr(inductor, "decompositions", None)
    copied: Any = getattr(inductor, "fast_random_decomps", None)
    if isinstance(table, dict) and hasattr(copied, "cache_clear"):
        table.update(_offered)
        copied.cache_clear()  # a copy of the table that programs before this one used
    _offered.clear()
