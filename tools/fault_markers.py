"""Markers in the sources: the places where planted faults go in, so that code can move.

A marker is the comment `// fault: NAME`, in Python `# fault: NAME`, the last thing on its line:

    return grad / count;  // fault: mean-divisor     marks this line
    // fault: mean-divisor                           alone: marks the statement below
    // fault: mean-divisor {                         marks the lines up to the one with }

A name stands for one place. Several faults of tools/fault_table.py may name the same marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("csrc", "src")
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".py")
LONGEST_STATEMENT = 16  # lines; a longer one is a mistake of the rules below

# Whatever begins as a marker has to be one, so that a slip of the pen is found.
_MARKER = re.compile(r"(?://|#)\s*fault\b\s*:.*")
_WELL_FORMED = re.compile(r"(?://|#) fault: ([a-z0-9-]+)( [{}])?")


class Fault(NamedTuple):
    name: str
    marker: str
    old: (
        str  # occurs once in what the marker marks, a blank being any white space; empty: all of it
    )
    new: str
    tests: str  # arguments of pytest, from tests/

    @property
    def cuda(self) -> bool:
        """Changes what kernels on a GPU return, and nothing else."""
        return self.name.startswith("cuda:")


class Mark(NamedTuple):
    """What a marker marks: lines [first, last) of a file, counted from 0."""

    name: str
    path: Path  # from the root of the sources
    line: int  # of the marker, counted from 1
    first: int
    last: int

    @property
    def place(self) -> str:
        return f"{self.path.as_posix()}:{self.line}"

    @property
    def compiled(self) -> bool:
        return self.path.parts[0] == "csrc"


def _code(line: str, python: bool) -> str:
    """A line without the comment at its end."""
    return re.sub(r"#.*" if python else r"//.*", "", line).strip()


def _end_of_statement(lines: list[str], first: int, python: bool) -> int:
    """The line behind the statement, or the head of a compound one, that begins at `first`."""
    depth = 0
    for i in range(first, min(first + LONGEST_STATEMENT, len(lines))):
        code = _code(lines[i], python)
        depth += sum(code.count(c) for c in "([") - sum(code.count(c) for c in ")]")
        if depth <= 0 and (python or code.endswith((";", "{", "}"))):
            return i + 1
    return first


def marks_of(text: str, path: Path) -> tuple[list[Mark], list[str]]:
    """The marks in a file, and what is wrong with its markers."""
    marks, problems = [], []
    opened: dict[str, int] = {}
    lines = text.split("\n")
    python = path.suffix == ".py"
    for i, line in enumerate(lines):
        place = f"{path.as_posix()}:{i + 1}"
        found = _MARKER.search(line)
        if found is None:
            continue
        parts = _WELL_FORMED.fullmatch(found[0])
        if parts is None:
            problems.append(f"{place}: {found[0]!r} is no marker: `fault: name` ends its line")
            continue
        name, brace = parts[1], (parts[2] or "").strip()
        alone = not line[: found.start()].strip()
        if brace and not alone:
            problems.append(f"{place}: marker {name!r} with a brace has to stand on its own line")
        elif brace == "{":
            opened[name] = i
        elif brace == "}":
            if name in opened:
                first = opened.pop(name)
                marks.append(Mark(name, path, first + 1, first + 1, i))
            else:
                problems.append(f"{place}: marker {name!r} closes what was not opened")
        elif not alone:
            marks.append(Mark(name, path, i + 1, i, i + 1))
        else:
            first = i + 1
            while first < len(lines) and not _code(lines[first], python):
                first += 1  # other comments
            last = _end_of_statement(lines, first, python)
            if last == first:
                problems.append(f"{place}: marker {name!r} stands above no statement that ends")
            marks.append(Mark(name, path, i + 1, first, last))
    for name, first in opened.items():
        problems.append(f"{path.as_posix()}:{first + 1}: marker {name!r} is opened, never closed")
    return marks, problems


def _sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def marks_in(root: Path) -> tuple[dict[str, Mark], list[str]]:
    """The marks by name in the sources under `root`, and what is wrong with their markers."""
    marks: dict[str, Mark] = {}
    problems = []
    for path in _sources(root):
        found, wrong = marks_of(path.read_text(), path.relative_to(root))
        problems += wrong
        for mark in found:
            if mark.name in marks:
                problems.append(
                    f"{mark.place}: marker {mark.name!r} stands at {marks[mark.name].place} "
                    "too: one of the two has to go, or be called otherwise"
                )
            marks.setdefault(mark.name, mark)
    return marks, problems


def _pattern(old: str) -> str:
    """Whatever the formatter does to a line, a blank is a blank."""
    return r"\s+".join(map(re.escape, old.split(" ")))


def _missing(fault: Fault, root: Path) -> str:
    """What to do where no source has the marker of a fault."""
    found = [
        f"at {path.relative_to(root).as_posix()}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in _sources(root)
        for text in [path.read_text()]
        for match in re.finditer(_pattern(fault.old), text)
    ]
    text = (
        f"no source has the marker {fault.marker!r} of fault {fault.name!r}: put the comment "
        f"`fault: {fault.marker}` where "
    )
    if not fault.old:
        return f"{text}lines are to be replaced, with {{ above them and }} below"
    text += f"{fault.old!r} is to become {fault.new!r}; it stands "
    return text + (", ".join(found[:8]) or "nowhere") + (" and elsewhere" if found[8:] else "")


def planted(text: str, mark: Mark, fault: Fault) -> str:
    """The text of a file with the fault in it. A ValueError says why it does not fit."""
    lines = text.split("\n")
    marked = "\n".join(lines[mark.first : mark.last])
    where = f"{mark.place}: fault {fault.name!r}"
    old = _pattern(fault.old) if fault.old else r"(?s:\A.*\Z)"
    changed, count = re.subn(old, lambda _: fault.new, marked)
    if count != 1:
        raise ValueError(
            f"{where}: {fault.old!r} occurs {count} times in what {mark.name!r} marks:\n{marked}"
        )
    if changed == marked:
        raise ValueError(f"{where} changes nothing")
    return "\n".join([*lines[: mark.first], changed, *lines[mark.last :]])


def problems_of(faults: list[Fault], root: Path) -> list[str]:
    """Where the table and the markers in the sources under `root` do not fit, and what to do."""
    marks, problems = marks_in(root)
    for fault in faults:
        if fault.marker not in marks:
            problems.append(_missing(fault, root))
            continue
        mark = marks[fault.marker]
        try:
            planted((root / mark.path).read_text(), mark, fault)
        except ValueError as error:
            problems.append(str(error))
    used = {fault.marker for fault in faults}
    problems += [
        f"{mark.place}: no fault of tools/fault_table.py names the marker {name!r}"
        for name, mark in marks.items()
        if name not in used
    ]
    names = [fault.name for fault in faults]
    problems += [f"two faults are called {name!r}" for name in {*names} if names.count(name) > 1]
    return problems
