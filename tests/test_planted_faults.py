"""The markers of planted faults in the sources, and their table in tools/, fit each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("fault_table", reason="no tools/ beside tests/: not a source tree")

from fault_markers import Fault, marks_of, planted, problems_of
from fault_table import FAULTS

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

FAULT = Fault("a fault", "place", "a + b", "a - b", "test_x.py")


def test_markers_fit_the_table() -> None:
    """Each fault has one marker in the sources and changes what that marks; none is left over."""
    problems = problems_of(FAULTS, ROOT)
    assert not problems, "\n\n".join(["", *problems])


def test_faults_name_tests_that_exist() -> None:
    names: dict[str, set[str]] = {}
    for path in TESTS.glob("test_*.py"):
        nodes = ast.parse(path.read_text()).body
        names[path.name] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for fault in FAULTS:
        assert fault.tests, f"{fault.name}: no tests"
        for test in fault.tests.split():
            file, _, name = test.partition("::")
            assert file in names, f"{fault.name}: there is no {file}"
            assert not name or name in names[file], f"{fault.name}: there is no {test}"


@pytest.mark.parametrize(
    ("name", "text", "marked"),
    [
        ("a.h", "x;\nc = a + b;  // fault: place\ny;", "c = a + b;  // fault: place"),
        ("a.h", "x;\n// fault: place\n// why\nc =\n    a + b;\ny;", "c =\n    a + b;"),
        ("a.h", "// fault: place\nif (f(1,\n      a + b)) {\ny;\n}", "if (f(1,\n      a + b)) {"),
        ("a.h", "// fault: place\nfor (i;\n     a + b; ++i) {", "for (i;\n     a + b; ++i) {"),
        (
            "a.h",
            "  // fault: place {\nc = a +\n b;\nd = a;\n// fault: place }\ny",
            "c = a +\n b;\nd = a;",
        ),
        ("a.py", "x = 1\nc = a + b  # fault: place\ny", "c = a + b  # fault: place"),
        ("a.py", "# fault: place\nif f(\n    a + b, [1]\n):\n    y", "if f(\n    a + b, [1]\n):"),
    ],
)
def test_what_a_marker_marks(name: str, text: str, marked: str) -> None:
    [mark], problems = marks_of(text, Path(name))
    assert problems == []
    assert mark.name == "place"
    lines = text.split("\n")
    assert "\n".join(lines[mark.first : mark.last]) == marked
    changed = re.sub(r"a \+\s+b", "a - b", marked, count=1)
    assert planted(text, mark, FAULT) == text.replace(marked, changed)
    everything = FAULT._replace(old="", new="nothing")
    assert planted(text, mark, everything) == text.replace(marked, "nothing")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no source has the marker 'place' of fault 'a fault'.*'a - b'; it stands nowhere"),
        ({"a.h": "x;\nc = a\n    + b;"}, "no source .* stands at csrc/a.h:2$"),
        ({"a.h": "c = a * b;  // fault: place"}, "csrc/a.h:1: .*'a \\+ b' occurs 0 times"),
        ({"a.h": "c = a + b * (a + b);  // fault: place"}, "csrc/a.h:1: .* occurs 2 times"),
        (
            {"a.h": "c = a + b;  // fault: place", "b.cu": "\nd = a + b;  // fault: place"},
            "csrc/b.cu:2: marker 'place' stands at csrc/a.h:1 too",
        ),
        (
            {"a.h": "c = a + b;  // fault: place\nd;  // fault: other"},
            "csrc/a.h:2: no fault .* names the marker 'other'",
        ),
        ({"a.h": "c = a + b;  // fault: place, why"}, "csrc/a.h:1: .* is no marker"),
        ({"a.h": "c = a + b;  //fault : place"}, "csrc/a.h:1: .* is no marker"),
        ({"a.h": "// fault: place {\nc = a + b;\n"}, "csrc/a.h:1: .* never closed"),
        ({"a.h": "c = a + b;\n// fault: place }\n"}, "csrc/a.h:2: .* was not opened"),
        ({"a.h": "c = a + b;  // fault: place {"}, "csrc/a.h:1: .* its own line"),
        ({"a.h": "c = a + b;\n// fault: place\n"}, "csrc/a.h:2: .* above no statement"),
    ],
)
def test_what_does_not_fit_is_named(files: dict[str, str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    for name, text in files.items():
        (tmp_path / "csrc" / name).write_text(text)
    problems = problems_of([FAULT], tmp_path)
    assert any(re.search(problem, found) for found in problems), problems


def test_fault_that_changes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("c = a + b  # fault: place\n")
    assert problems_of([FAULT], tmp_path) == []
    [problem] = problems_of([FAULT._replace(new=FAULT.old)], tmp_path)
    assert problem == "src/a.py:1: fault 'a fault' changes nothing"
    assert problems_of([FAULT, FAULT], tmp_path) == ["two faults are called 'a fault'"]
