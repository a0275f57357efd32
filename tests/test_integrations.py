"""The notes in docs/integrations.md: their code, as it stands there, against torch's own losses."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import run_two_ranks
from torch import Tensor

import lossops

NOTES = Path(__file__).resolve().parents[1] / "docs" / "integrations.md"

# The sections with code, and the packages that they need.
SECTIONS: dict[str, tuple[str, ...]] = {
    "PyTorch Lightning": ("lightning",),
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "The head of a transformers model": ("transformers", "accelerate"),
    "TRL": ("transformers", "trl", "datasets"),
    "torch.compile": (),
    "torch.export": (),
    "DDP and FSDP": (),
    "Half-precision logits": (),
    "Code that you do not edit": (),
}
PROCESSES = "DDP and FSDP"
TRAINERS = tuple(title for title, packages in SECTIONS.items() if packages)


def sections() -> dict[str, str]:
    """The Python code of each section that has some."""
    if not NOTES.is_file():
        pytest.skip("no docs/integrations.md beside tests/: not a source tree")
    found = {}
    for section in re.split(r"^## ", NOTES.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        if code := re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL):
            found[title] = "\n".join(code)
    return found


def code_of(title: str) -> str:
    for package in SECTIONS[title]:
        pytest.importorskip(package, reason=f"the notes on {title} need {package}")
    if title in TRAINERS and torch.cuda.device_count() > 1:
        pytest.skip("the trainer would spread over all GPUs")
    return sections()[title]


def test_every_section_is_tested() -> None:
    assert list(sections()) == list(SECTIONS)


def torch_as_lossops() -> dict[str, types.ModuleType]:
    """What `import lossops` gives to the runs that are compared with, by the modules' names."""
    module = types.ModuleType("lossops")
    module.cross_entropy = F.cross_entropy
    module.CrossEntropyLoss = torch.nn.CrossEntropyLoss
    module.patch = module.unpatch = lambda: None
    module.patch_report = lambda: {"cross_entropy": "torch's"}
    found = {"lossops": module}
    for package, function in (("transformers", "fuse_head"), ("trl", "add_fused_lm_head")):
        module = found[f"lossops.integrations.{package}"] = types.ModuleType(package)
        setattr(module, function, mock.MagicMock())  # leaves the model as it is
    return found


def run(code: str) -> dict[str, Any]:
    """The names in a module with this code. It is a real one, for torch.compile looks it up."""
    module = sys.modules["notes"] = types.ModuleType("notes")
    exec(compile(code, NOTES.name, "exec"), vars(module))
    return vars(module)


def run_with_torch(code: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With torch's losses under the name of lossops, and uncompiled."""
    with monkeypatch.context() as patch:
        for name, module in torch_as_lossops().items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(torch, "compile", lambda **options: lambda function: function)
        return run(code)


def run_recorded(code: str) -> tuple[dict[str, Any], set[str]]:
    """Also the names of the operators that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        names = run(code)
    return names, {event.key for event in profile.key_averages()}


def assert_same_training(found: dict[str, Any], expected: dict[str, Any]) -> None:
    losses = torch.tensor([float(loss) for loss in found["losses"]])
    assert len(losses) > 0
    torch.testing.assert_close(
        losses, torch.tensor([float(loss) for loss in expected["losses"]]), rtol=1e-5, atol=1e-6
    )
    if "model" in expected:
        weights, wanted = found["model"].state_dict(), expected["model"].state_dict()
        assert weights.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(weights[name], wanted[name], rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The notes write files where they run, and what they patch is undone if they fail."""
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("notes", None)
    lossops.unpatch()


@pytest.mark.parametrize("title", [title for title in SECTIONS if title != PROCESSES])
def test_notes(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of(title)
    expected = run_with_torch(code, monkeypatch)
    found, operators = run_recorded(code)
    # The chunks of a head with a softcap, as Gemma's, are rows of token values.
    names = ("lossops::cross_entropy", "lossops::token_values")
    assert any(name.startswith(names) for name in operators), sorted(operators)
    assert_same_training(found, expected)


def test_hugging_face_loss_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With accumulated batches of different lengths, against the model's own loss."""
    code = code_of("Hugging Face Trainer")
    argument = "    compute_loss_func=compute_loss,\n"
    assert code.count(argument) == 1
    own, operators = run_recorded(code.replace(argument, ""))
    assert not any(name.startswith("lossops::") for name in operators)
    assert_same_training(run(code), own)


def test_hugging_face_loss_without_a_number_of_items() -> None:
    compute_loss: Callable[..., Tensor] = run(code_of("Hugging Face Trainer"))["compute_loss"]
    logits, labels = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    labels[1, 4:] = -100
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    found = compute_loss(types.SimpleNamespace(logits=logits), labels)
    torch.testing.assert_close(found, expected)


def test_half_precision_logits_keep_their_gradients_dtype() -> None:
    names = run(code_of("Half-precision logits"))
    assert names["loss"].dtype is torch.float32
    assert names["logits"].grad.dtype is torch.bfloat16
    exact = names["logits"].detach().double().requires_grad_()
    reference = F.cross_entropy(exact, names["labels"], reduction="sum")
    reference.backward()
    torch.testing.assert_close(names["loss"].double(), reference.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(names["logits"].grad.double(), exact.grad, rtol=2**-8, atol=1e-7)


# Each rank trains as the notes do, and on its own by torch's loss over the batches of all ranks.
COMPARISON = """
import runpy
import torch
import torch.distributed as dist

destroy_process_group = dist.destroy_process_group
dist.destroy_process_group = lambda: None  # there is only one
notes = runpy.run_path("train.py", run_name="__main__")
rank, world_size = dist.get_rank(), dist.get_world_size()
assert world_size == 2

def batches(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(world_size, 16, 32, generator=generator)
    labels = torch.randint(10, (world_size, 16), generator=generator)
    labels[1, :13] = -100
    return inputs, labels

def weights(model):
    found = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    return {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in found.items()}

results = {}
for kind in ("ddp", "fsdp", "neither"):
    if kind == "neither":
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
    else:
        model = notes["make_model"](kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            inputs, labels = batches(step)
            if kind == "neither":
                loss = torch.nn.functional.cross_entropy(
                    model(inputs.flatten(0, 1)), labels.flatten()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss = notes["train_step"](model, optimizer, inputs[rank], labels[rank])
            losses.append(loss.detach())
    ours = any(event.key.startswith("lossops::") for event in profile.key_averages())
    assert ours == (kind != "neither"), kind
    results[kind] = weights(model) | {"losses": torch.stack(losses)}
expected = results.pop("neither")
for found in results.values():
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)
destroy_process_group()
print(f"rank {rank}: the same", flush=True)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_notes_on_several_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(code_of(PROCESSES))
    (tmp_path / "compare.py").write_text(COMPARISON)
    printed = run_two_ranks(tmp_path / "compare.py", timeout=120)
    for rank in (0, 1):
        assert f"rank {rank}: the same" in printed, printed
    losses = {kind: re.search(rf"^{kind} ([\d.]+)$", printed, re.M) for kind in ("ddp", "fsdp")}
    assert losses["ddp"] and losses["fsdp"], printed
    assert float(losses["ddp"][1]) == pytest.approx(float(losses["fsdp"][1]), rel=1e-6)
