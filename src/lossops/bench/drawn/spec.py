"""A drawn call as text, and text as a call: `rows/padded shape=4096x50257 dtype=bf16 pad=47`."""

from __future__ import annotations

import dataclasses
import math
import random
import typing
from collections.abc import Callable, Collection
from typing import Any, ClassVar, TypeVar

MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What sizes are drawn from. `mib` None: the kind's own."""

    mib: tuple[float, float] | None = None  # of the logits, or of the largest operand
    classes: tuple[int, int] = (2, 262144)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The base of drawn calls. `data` seeds the values of the tensors."""

    kind: ClassVar[str]
    # Field -> what it may be.
    choices: ClassVar[dict[str, Collection[str]]]

    family: str

    def __str__(self) -> str:
        """The call as text; fields that have their default value are left out."""
        parts = [f"{self.kind}/{self.family}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "family" and value != field.default:
                parts.append(f"{field.name}={_written(value)}")
        return " ".join(parts)


AnySpec = TypeVar("AnySpec", bound=Spec)


def parse(text: str, of: type[AnySpec]) -> AnySpec:
    """The call that `text` describes. Raises ValueError, and names what is wrong."""
    name, *parts = text.split()
    kind, _, family = name.partition("/")
    if kind != of.kind:
        raise ValueError(f"{name}: a call of {of.kind} begins with {of.kind}/")
    types = typing.get_type_hints(of)
    fields: dict[str, Any] = {"family": family}
    known = {field.name for field in dataclasses.fields(of)}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise ValueError(f"{part}: there are {', '.join(sorted(known - {'family'}))}")
        try:
            fields[key] = _READERS[types[key]](value)
        except ValueError as error:
            raise ValueError(f"{part}: {error}") from error
    missing = {
        field.name
        for field in dataclasses.fields(of)
        if field.default is dataclasses.MISSING and field.name not in fields
    }
    if missing:
        raise ValueError(f"{text}: {', '.join(sorted(missing))} must be given")
    for key, allowed in of.choices.items():
        values = fields.get(key, ())
        for value in (values,) if isinstance(values, str) else values:
            if value not in allowed:
                raise ValueError(f"{key} {value}: there are {', '.join(allowed)}")
    return of(**fields)


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ("x" if isinstance(value[0], int) else "+").join(map(str, value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _truth(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("yes or no")
    return text == "yes"


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in text.split("x"))
    if min(sizes) < 1:
        raise ValueError("sizes are 1 or more")
    return sizes


def _pair(text: str) -> tuple[str, str]:
    first, plus, second = text.partition("+")
    if not plus:
        raise ValueError("two, as in fp32+fp16")
    return first, second


_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: _truth,
    tuple[int, ...]: _sizes,
    tuple[str, str]: _pair,
}


def log_uniform(source: random.Random, least: float, most: float) -> float:
    """A number between the two, its logarithm uniform."""
    return math.exp(source.uniform(math.log(least), math.log(most)))
