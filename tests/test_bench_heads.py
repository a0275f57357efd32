"""The benchmark of heads: what it computes, what it finds wrong, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lossops._heads import chunks
from lossops.bench import cli
from lossops.bench.heads import measure, problems
from lossops.bench.heads.cli import render
from lossops.bench.heads.measure import PRODUCTS, Contender, Measured
from lossops.bench.heads.problems import HEADS, MIB, TOKEN_HEADS, Problem, Shape
from lossops.bench.meter import Meter

SMALL = Shape(24, 8, 33)
CPU = torch.device("cpu")


def problem(dtype: torch.dtype = torch.float32, of_tokens: bool = False) -> Problem:
    return Problem(SMALL, dtype, CPU, of_tokens=of_tokens)


@pytest.mark.parametrize("text", ["", "1x2", "1x2x3x4", "1x2xc", "0x1x2", "1 x2x3", "-1x2x3"])
def test_texts_that_are_no_shape(text: str) -> None:
    with pytest.raises(ValueError, match="TOKENSxFEATURESxCLASSES"):
        Shape.parse(text)


def test_shapes() -> None:
    assert str(Shape.parse("8192x4096x128256")) == "8192x4096x128256"
    for text in (*problems.CUDA_SHAPES, *problems.TOKEN_SHAPES, *problems.CPU_SHAPES):
        assert str(Shape.parse(text)) == text


def by_torch(data: Problem, logits: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, data.target)
    if data.entropy_factor:
        log_softmax = logits.log_softmax(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        loss = loss + data.entropy_factor * entropy.mean()
    return loss


@pytest.mark.parametrize("of_tokens", [False, True])
def test_exact_results(of_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By chunks of rows as by one; against torch in float64."""
    data = problem(of_tokens=of_tokens)
    whole = data.exact()
    monkeypatch.setattr(problems, "MIB", 1)  # 3 rows at a time
    input, weight = (x.double().requires_grad_() for x in (data.input, data.weight))
    loss = by_torch(data, F.linear(input, weight))
    expected = (loss.detach(), *torch.autograd.grad(loss, (input, weight)))
    for found in (whole, data.exact()):
        for got, value in zip(found, expected, strict=True):
            torch.testing.assert_close(got, value)


@pytest.mark.parametrize("of_tokens", [False, True])
def test_gradient_of_logits(of_tokens: bool) -> None:
    data = problem(of_tokens=of_tokens)
    logits = F.linear(data.input, data.weight).requires_grad_()
    (expected,) = torch.autograd.grad(by_torch(data, logits), logits)
    torch.testing.assert_close(data.gradient_of_logits(), expected)


def test_workspace_of_narrow_sums() -> None:
    """Less where the gradient of the weight is small."""
    limits = [512, 512, 256, 512]
    for text, limit in zip(problems.CUDA_SHAPES, limits, strict=True):
        shape = Shape.parse(text)
        weight = torch.empty(shape.classes, shape.features, dtype=torch.bfloat16, device="meta")
        assert problems.narrow_workspace(weight) == limit * MIB


@pytest.mark.parametrize(
    ("who", "of_tokens"),
    [(who, False) for who in ("ours", "narrow", "linear+ours", "eager", "chunked")]
    + [(who, True) for who in ("ours", "narrow", "linear+ours", "eager")],
)
def test_contenders_are_right(who: str, of_tokens: bool) -> None:
    if problems.why_absent(who):
        pytest.skip(str(problems.why_absent(who)))
    head = (TOKEN_HEADS if of_tokens else HEADS)[who]
    data = problem(torch.bfloat16, of_tokens)
    found = measure._check(head, data)
    errors = measure._errors(found, data.exact())
    assert set(errors) == {"loss", "input", "weight"}
    assert max(errors.values()) <= measure.LIMITS[torch.bfloat16]
    # Without its gradients a head has the same loss.
    with torch.no_grad():
        assert torch.equal(head(data.input, data.weight, data.target), found[0])


@pytest.mark.parametrize("of_tokens", [False, True])
def test_workspaces(of_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    rows_of_chunk = chunks.rows_of_chunk

    def watched(**options: Any) -> int:
        taken.append(options["max_workspace_bytes"])
        return rows_of_chunk(**options)

    monkeypatch.setattr(chunks, "rows_of_chunk", watched)
    head = problems.with_workspace(3, of_tokens=of_tokens)
    measure._check(head, problem(of_tokens=of_tokens))
    assert set(taken) == {3 * MIB}


@pytest.mark.parametrize(("doing", "count"), measure.PASSES.items())
def test_products(doing: str, count: int) -> None:
    """As many results as gradients are wanted, of their shapes."""
    data = problem()
    grad = data.gradient_of_logits()
    found = measure._products(data, grad, count)
    if doing == "forward":
        assert [tuple(x.shape) for x in found] == [(24, 33)]
        return
    _, *expected = measure._call(HEADS["eager"], data, doing)()
    for got, gradient in zip(found, filter(torch.is_tensor, expected), strict=True):
        torch.testing.assert_close(got, gradient)


def test_a_pass_leaves_no_gradient() -> None:
    data = problem()
    call = measure._call(HEADS["ours"], data, "step")
    for _ in range(2):
        loss, *gradients = call()
        assert not loss.requires_grad
        for got, expected in zip(gradients, data.exact()[1:], strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6)
    assert measure._call(HEADS["ours"], data, "frozen")()[2] is None


@pytest.mark.usefixtures("quick_meters")
def test_wrong_and_failing_heads() -> None:
    """A wrong result fails; an error of a peer is noted, and ends nothing."""

    def wrong(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(input, weight), target) * 1.001

    def failing(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    heads = {"ours": wrong, "eager": failing}
    found = measure.run(SMALL, torch.float32, heads, ["forward"], Meter(CPU))
    assert not found.passed("ours")
    assert found.heads["ours"].ms["forward"] > 0
    assert found.heads["eager"].notes == {"check": "RuntimeError: no such kernel"}
    assert not found.heads["eager"].ms
    shown = render(found)
    assert "ours: WRONG" in shown
    assert "eager, check: RuntimeError: no such kernel" in shown


def test_what_has_passed() -> None:
    """Results without a NaN, within the limit, all of them timed; compiled steps too."""
    found = Contender()
    assert not found.passed(1.0)
    found.errors = {"loss": 0.0}
    assert found.passed(1.0)
    found.notes = {"step": "OutOfMemoryError: "}
    assert not found.passed(1.0)
    for error in (2.0, float("nan")):
        assert not Contender(errors={"loss": 0.0, "input": error}).passed(1.0)


def test_fractions_and_table() -> None:
    found = Measured(
        "8x4x2",
        "bfloat16",
        0.02,
        {
            PRODUCTS: Contender(ms={"step": 9.0}),
            "ours": Contender(
                ms={"step": 10.0},
                peak_bytes={"step": 5 * MIB},
                errors={"loss": 1e-3, "input": 2e-3, "weight": 3e-3},
                breakdown={"products": 9.0, "loss": 1.0},
                kernels=[("gemm", 3, 9.0)],
            ),
            "liger": Contender(notes={"step": "OutOfMemoryError: "}),
        },
    )
    assert found.fraction("ours", "step") == pytest.approx(0.9)
    assert found.fraction("liger", "step") is None
    assert found.fraction("ours", "forward") is None
    lines = render(found).splitlines()
    ours = next(line for line in lines if line.startswith("ours "))
    assert ours.split() == ["ours", "10.00", "0.900", "5", "2.0e-03", "3.0e-03"]
    assert "liger, step: OutOfMemoryError: " in lines
    assert "ours, a step in ms: products 9.00, loss 1.00" in lines


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("aten::addmm", "products"),
        ("void lossops::cuda::register_rows_kernel<__nv_bfloat16>", "loss"),
        ("lossops::cross_entropy_backward_inplace", "loss"),
        ("void at::native::unrolled_elementwise_kernel<at::native::bfloat16_copy>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1>", "others"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert measure.kind_of(kernel) == kind


@pytest.mark.usefixtures("quick_meters")
@pytest.mark.parametrize("of_tokens", [False, True])
def test_command_line(of_tokens: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "heads.json"
    arguments = ["--heads", "24x8x33", "--device", "cpu", "--breakdown", "--output", str(file)]
    arguments += ["--workspaces", "1", *(["--tokens"] if of_tokens else [])]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "24x8x33 float32" in shown
    assert "All checks passed." in shown
    saved: dict[str, Any] = json.loads(file.read_text())
    (head,) = saved["heads"]
    assert set(head["heads"]) == {"products", "ours", "eager", "ours 1"}
    assert saved["of_tokens"] == of_tokens
    for who in ("ours", "eager"):
        assert set(head["heads"][who]["ms"]) == set(measure.PASSES)
        for doing, fraction in head["fractions"][who].items():
            floor, took = (head["heads"][name]["ms"][doing] for name in ("products", who))
            assert fraction == pytest.approx(floor / took)
        assert head["heads"][who]["breakdown"]["products"] > 0
    assert head["heads"]["ours"]["breakdown"]["loss"] > 0
