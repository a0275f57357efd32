"""Files of numbers, as JSON. Every kind of run writes one; `--from` shows it again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch

from .._version import __version__

T = TypeVar("T")


def about(device: str) -> dict[str, Any]:
    """When, where and with what a run is made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "torch": str(torch.__version__),
        "lossops": __version__,
    }


def heading(about: dict[str, Any]) -> str:
    """The first line of what is printed."""
    return f"lossops {about['lossops']} on {about['device']}, torch {about['torch']}"


def save(path: str, fields: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(fields, file, indent=2)
        file.write("\n")


def load(path: str) -> dict[str, Any]:
    """The fields of a file. Raises OSError, or ValueError where it is something else."""
    with open(path) as file:
        found = json.load(file)
    if not isinstance(found, dict):
        raise ValueError("it was not written by lossops.bench")
    return found


@contextlib.contextmanager
def reading(fields: dict[str, Any]) -> Iterator[None]:
    """Fields that are missing, or other than expected, raise ValueError."""
    try:
        if missing := {"device", "torch", "lossops"} - fields.keys():
            raise KeyError(*missing)
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it was not written by lossops.bench: {error!r}") from error


def read(
    fields: dict[str, Any], key: str, one: Callable[[dict[str, Any]], T]
) -> tuple[dict[str, Any], list[T]]:
    """What a file says of its run, and what it has under `key`; ValueError for other files."""
    with reading(fields):
        found = [one(each) for each in fields[key]]
        if not found:
            raise KeyError(key)
        return {name: value for name, value in fields.items() if name != key}, found
