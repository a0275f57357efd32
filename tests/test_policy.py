"""Which CUDA kernel takes a call of cross entropy. Without a GPU: the decision is host code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lossops import _plan

ROOT = Path(__file__).resolve().parent.parent


def name_of(*arguments: Any, **options: Any) -> str:
    return str(_plan.plan(*arguments, **options)["name"])


# logits, dtype; then on an H200 without a gradient, with one; on an A100
INDICES = [
    ((64, 1), "fp32", "float_tiles", "float_tiles", "float_tiles"),
    ((64, 2), "fp32", "few_classes", "few_classes", "float_tiles"),
    ((64, 15), "fp32", "few_classes", "few_classes", "float_tiles"),
    ((64, 16), "fp32", "float_tiles", "float_tiles", "float_tiles"),
    ((64, 500), "fp32", "float_tiles", "float_tiles", "float_tiles"),
    ((64, 501), "fp32", "float_tiles", "float_tiles", "float_tiles"),
    ((64, 700), "fp32", "float_tiles", "float_tiles", "float_tiles"),
    ((64, 701), "fp32", "float_rows", "float_rows", "float_tiles"),
    ((64, 1024), "fp32", "float_rows", "float_rows", "float_tiles"),
    ((64, 1025), "fp32", "staged_rows", "staged_rows", "register_rows"),
    ((64, 4095), "fp32", "float_rows", "float_rows", "register_rows"),
    ((64, 4096), "fp32", "float_rows", "float_rows", "register_rows"),
    ((64, 4097), "fp32", "staged_rows", "staged_rows", "register_rows"),
    ((64, 4100), "fp32", "float_rows", "float_rows", "register_rows"),
    ((64, 8192), "fp32", "float_rows", "float_rows", "register_rows"),
    ((64, 8196), "fp32", "staged_rows", "staged_rows", "team_rows"),
    ((64, 8193), "fp32", "staged_rows", "staged_rows", "two_pass_rows"),
    ((64, 151936), "fp32", "staged_rows", "staged_rows", "two_pass_rows"),
    ((64, 393216), "fp32", "staged_rows", "staged_rows", "two_pass_rows"),
    ((64, 393217), "fp32", "two_pass_rows", "two_pass_rows", "two_pass_rows"),
    ((64, 1), "bf16", "tiles", "tiles", "tiles"),
    ((64, 1000), "fp16", "tiles", "tiles", "tiles"),
    ((64, 1001), "fp16", "tiles", "tiles", "tiles"),
    ((64, 1279), "bf16", "tiles", "tiles", "tiles"),
    ((64, 1281), "fp16", "tiles", "tiles", "tiles"),
    ((64, 1280), "bf16", "tiles", "tiles", "tiles"),
    ((64, 1408), "bf16", "half_rows", "half_rows", "tiles"),
    ((64, 5001), "bf16", "tiles", "tiles", "tiles"),
    ((64, 5120), "fp16", "tiles", "tiles", "tiles"),
    ((64, 5121), "fp16", "staged_rows", "staged_rows", "tiles"),
    ((64, 1008), "bf16", "half_rows", "half_rows", "tiles"),
    ((64, 4096), "fp16", "half_rows", "half_rows", "tiles"),
    ((64, 4100), "fp16", "tiles", "tiles", "tiles"),
    ((64, 8000), "bf16", "long_rows", "staged_rows", "tiles"),
    ((64, 8001), "bf16", "long_rows", "staged_rows", "two_pass_rows"),
    ((5, 6144), "bf16", "long_rows", "staged_rows", "tiles"),
    ((5, 26624), "bf16", "long_rows", "staged_rows", "team_rows"),
    ((5, 32768), "bf16", "long_rows", "split_rows", "two_pass_rows"),
    ((5, 50257), "fp16", "long_rows", "staged_rows", "two_pass_rows"),
    ((5, 262144), "fp16", "long_rows", "split_rows", "two_pass_rows"),
    ((5, 409600), "bf16", "long_rows", "split_rows", "two_pass_rows"),
    ((5, 409608), "bf16", "two_pass_rows", "two_pass_rows", "two_pass_rows"),
    ((2, 21, 8, 8), "fp32", "side_by_side_rows", "side_by_side_rows", "side_by_side_rows"),
    ((2, 21, 8, 8), "fp16", "side_by_side_rows", "side_by_side_rows", "side_by_side_rows"),
    ((2, 21, 7, 7), "fp16", "side_by_side_rows", "side_by_side_rows", "side_by_side_rows"),
    ((2, 21, 7, 7), "fp32", "side_by_side_rows", "side_by_side_rows", "side_by_side_rows"),
    ((2, 21, 3), "fp16", "plane_rows", "plane_rows", "plane_rows"),
    ((2, 89, 8, 8), "fp16", "plane_rows", "plane_rows", "plane_rows"),
    ((2, 256, 8, 8), "fp32", "plane_rows", "plane_rows", "plane_rows"),
    ((2, 257, 8, 8), "fp32", "plane_words", "plane_rows", "plane_words"),
    ((2, 89, 7, 7), "fp16", "plane_words", "plane_words", "plane_words"),
    ((2, 720, 8, 8), "bf16", "plane_rows", "plane_rows", "plane_rows"),
    ((2, 721, 8, 8), "bf16", "plane_words", "plane_rows", "plane_words"),
    ((2, 4000, 8, 8), "bf16", "plane_words", "plane_words", "plane_words"),
    ((64, 1000), "fp64", "team_rows", "team_rows", "team_rows"),
]


@pytest.mark.parametrize(("shape", "dtype", "without", "with_gradient", "older"), INDICES, ids=str)
def test_class_indices(
    shape: tuple[int, ...], dtype: str, without: str, with_gradient: str, older: str
) -> None:
    assert name_of(shape, dtype, device="h200") == without
    assert name_of(shape, dtype, gradient=True, device="h200") == with_gradient
    assert name_of(shape, dtype, device="a100") == older


@pytest.mark.parametrize(
    ("classes", "dtype", "without", "with_gradient"),
    [
        (1, "fp32", "strided_rows", "strided_rows"),
        (2, "fp32", "soft_tiles", "soft_tiles"),
        (500, "fp32", "soft_tiles", "soft_tiles"),
        (1000, "fp16", "soft_tiles", "soft_tiles"),
        (4096, "fp32", "staged_rows", "staged_rows"),
        (1008, "bf16", "probability_rows", "probability_rows"),
        (4088, "fp16", "probability_rows", "probability_rows"),
        (4096, "bf16", "long_rows", "probability_rows"),
        (32768, "fp16", "long_rows", "probability_rows"),
        (4100, "bf16", "staged_rows", "staged_rows"),
        (32776, "bf16", "staged_rows", "staged_rows"),
    ],
)
def test_probabilities(classes: int, dtype: str, without: str, with_gradient: str) -> None:
    for gradient, name in ((False, without), (True, with_gradient)):
        assert name == name_of(
            (64, classes), dtype, probabilities=True, gradient=gradient, device="h200"
        )


def test_smoothing_of_short_rows() -> None:
    for classes, dtype in ((2, "bf16"), (100, "fp32"), (1000, "fp16")):
        plan = _plan.plan(
            (64, classes), dtype, label_smoothing=0.1, reduction="none", device="h200"
        )
        assert (plan["name"], plan["backward"]) == ("soft_tiles", "soft_tiles")
    for dtype, most in (("fp32", 1024), ("bf16", 2048)):
        for classes, name in ((most, "soft_tiles"), (most + 1, "staged_rows")):
            assert name == name_of(
                (64, classes), dtype, label_smoothing=0.1, gradient=True, device="h200"
            )
    # Longer rows, where no kernel of Hopper's takes them.
    for options in ({"weights": True, "device": "h200"}, {"device": "a100"}):
        for classes, name in ((2048, "soft_tiles"), (2049, "team_rows")):
            plan = _plan.plan((64, classes), "fp32", label_smoothing=0.1, **options)
            assert plan["name"] == name


def test_strided_classes_with_several_coefficients() -> None:
    image = (2, 100, 8, 8)
    for dtype, smooth, weighted, probabilities in (
        ("fp32", "soft_planes", "strided_rows", "strided_rows"),
        ("bf16", "soft_planes", "soft_planes", "soft_planes"),
        ("fp64", "strided_rows", "strided_rows", "strided_rows"),
    ):
        options = {"label_smoothing": 0.1, "device": "a100"}
        assert name_of(image, dtype, **options) == smooth
        assert name_of(image, dtype, weights=True, **options) == weighted
        assert name_of(image, dtype, probabilities=True, device="a100") == probabilities
    for dtype in ("fp32", "bf16"):
        few = name_of((2, 88, 8, 8), dtype, label_smoothing=0.1, device="h200")
        assert few == "side_by_side_rows"


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_few_classes_with_several_coefficients(gpu: str) -> None:
    for classes, name in ((2, "few_soft_classes"), (8, "few_soft_classes"), (9, "strided_rows")):
        image = (2, classes, 8, 8)
        weighted = {"label_smoothing": 0.1, "weights": True, "device": gpu}
        assert name_of(image, "fp32", probabilities=True, device=gpu) == name
        assert name_of(image, "fp32", **weighted) == name
        of_half = "soft_planes" if classes > 8 else "few_soft_classes"
        assert name_of(image, "bf16", probabilities=True, device=gpu) == of_half
        assert name_of(image, "bf16", **weighted) == of_half
    for classes, name in ((4, "soft_tiles"), (5, "few_soft_classes"), (9, "soft_tiles")):
        assert name_of((64, classes), "fp32", probabilities=True, device=gpu) == name
        assert name_of((64, classes), "fp16", probabilities=True, device=gpu) == "soft_tiles"
        assert name_of((64, classes), "fp32", label_smoothing=0.1, device=gpu) == "soft_tiles"


def test_gradients_of_no_classes_and_of_many_planes() -> None:
    for shape in ((2, 0, 8, 8), (2**31 + 500, 2, 2)):
        plan = _plan.plan(shape, "fp16", gradient=True, device="h200")
        assert plan["backward"] == "strided_rows"


def test_gradients_of_planes() -> None:
    """Written with the loss where no two blocks share 32 bytes of memory; else after it."""
    for shape, dtype, name, written in (
        ((2, 100, 8, 8), "fp32", "plane_rows", True),
        ((2, 100, 7, 7), "fp32", "plane_words", False),
        ((2, 100, 4, 4), "fp16", "plane_rows", True),
        ((2, 100, 4, 6), "bf16", "plane_rows", False),
        ((2, 100, 7, 7), "bf16", "plane_words", False),
    ):
        for device in ("h200", "a100"):
            plan = _plan.plan(shape, dtype, gradient=True, device=device)
            assert (plan["name"], plan["writes_gradient"]) == (name, written)
            none = _plan.plan(shape, dtype, gradient=True, reduction="none", device=device)
            assert not none["writes_gradient"]
            assert none["backward"] == "plane_gradients"
            assert written or plan["backward"] == "plane_gradients"


def test_other_options() -> None:
    shape = (8192, 32768)
    # Smoothing is for staged rows; with class weights for team rows; these alone change nothing.
    smooth = _plan.plan(shape, "bf16", label_smoothing=0.1, gradient=True, device="h200")
    assert smooth["name"] == "staged_rows"
    both = _plan.plan(shape, "bf16", label_smoothing=0.1, weights=True, device="h200")
    assert both["name"] == "team_rows"
    assert name_of(shape, "bf16", weights=True, gradient=True, device="h200") == "split_rows"
    # Rows of a padded stride: aligned ones are split, others are not. Their gradient is padded too.
    assert name_of(shape, "bf16", strides=(32832, 1), gradient=True, device="h200") == "split_rows"
    odd = _plan.plan((64, 50257), "bf16", strides=(50304, 1), gradient=True, device="h200")
    assert odd["name"] == "staged_rows"
    assert odd["writes_gradient"]
    assert odd["backward"] == "team_rows"
    # Without a reduction the gradient has a pass of its own.
    none = _plan.plan(shape, "bf16", reduction="none", gradient=True, device="h200")
    assert none["name"] == "long_rows"
    assert not none["writes_gradient"]
    assert none["backward"] == "index_gradients"
    # Rows of at most 4 KB have a backward kernel of their own, wherever they lie.
    for dtype, longest in (("bf16", 2048), ("fp32", 1024)):
        for classes in (2, 10, 100, 1001, longest, longest + 8):
            for stride in (classes, classes + 1, classes + 8):
                options = {"reduction": "none", "strides": (stride, 1), "gradient": True}
                short = _plan.plan((64, classes), dtype, **options, device="h200")
                assert (short["backward"] == "short_gradients") == (classes <= longest)


def test_parameters_follow_the_device() -> None:
    blocks = {
        device: _plan.plan((8192, 50257), "bf16", device=device)["parameters"]["blocks"]
        for device in ("h200", "b200")
    }
    assert blocks["h200"] != blocks["b200"]


def test_tensors_may_have_data() -> None:
    """The alignment of the logits counts."""
    target = torch.zeros(64, dtype=torch.int64)
    memory = torch.zeros(64 * 32768 + 8, dtype=torch.bfloat16)
    # Aligned; and a gradient, which is aligned, that does not lie as its logits do.
    for first, expected in ((0, ("split_rows", True)), (1, ("staged_rows", False))):
        logits = memory[first : first + 64 * 32768].view(64, 32768)
        decided = json.loads(
            torch.ops.lossops.cross_entropy_plan(logits, target, gradient=True, device="h200")
        )
        assert (decided["name"], decided["writes_gradient"]) == expected


def test_the_page_has_the_table() -> None:
    page = ROOT / "docs" / "design.md"
    if not page.is_file():
        pytest.skip("needs the source tree")
    assert _plan.table() in page.read_text(), (
        "docs/design.md: put in what `python -m lossops.info --plan-table` prints"
    )


def test_edges() -> None:
    edges = _plan.table_data("h200")["edges"]
    assert {15, 16, 500, 501, 4096, 4097, 393216, 393217} <= set(edges["float32"])
    assert {1000, 1008, 4096, 4104, 32768, 32776, 294912, 294920} <= set(edges["bfloat16"])
    for dtype, counts in edges.items():
        name = "fp32" if dtype == "float32" else "bf16"
        assert counts == sorted(set(counts))
        assert name_of((131, counts[-1]), name, device="h200") == "two_pass_rows"


def info(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lossops.info", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_info() -> None:
    done = info("--plan", "8192x50257", "bf16", "--grad", "--device", "h200")
    assert done.returncode == 0, done.stderr
    for words in ("staged_rows", "rows/staged_rows.cu", "132 multiprocessors", "not split_rows"):
        assert words in done.stdout, done.stdout
    done = info(
        *("--plan", "8192x50257", "bf16", "--strides", "50304,1", "--device", "a100", "--json")
    )
    assert json.loads(done.stdout)["name"] == "two_pass_rows", done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("8x5", "fp8"), "dtype must be one of"),
        (("8by5", "fp32"), "SHAPE is written as"),
        (("8x5", "fp32", "--strides="), "SHAPE is written as"),
        (("8x5", "fp32", "--device", "x"), "device must be one of h200"),
        (("8x5", "fp32", "--smoothing", "2"), "label_smoothing must be between 0 and 1"),
        ((f"{10**20}x5", "fp32"), "numbers below 2^63"),
    ],
)
def test_info_says_what_is_wrong(arguments: tuple[str, ...], words: str) -> None:
    done = info("--plan", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
