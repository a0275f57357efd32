"""However wrong the arguments: a Python exception or a result, never the end of the process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import LOSS_IDS, LOSSES, Loss, Sample, evaluate
from numerics import assert_within, same_bits
from torch import Tensor

TESTS = Path(__file__).resolve().parent
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)

SHAPES = ((), (0,), (1,), (3,), (4,), (4, 3), (3, 4), (1, 3), (0, 3), (4, 0), (2, 3, 4), (2, 3, 0))
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def random_tensor(source: random.Random, device: str, shape: Any = None) -> torch.Tensor:
    shape = shape if shape is not None else source.choice(SHAPES)
    dtype = source.choice(DTYPES) if source.random() < 0.4 else torch.float32
    tensor = (10 * torch.randn(shape)).to(dtype)
    if tensor.dim() and source.random() < 0.2:
        tensor = tensor[:1].expand(shape) if tensor.shape[0] else tensor
    if tensor.dim() > 1 and source.random() < 0.2:
        tensor = tensor.mT
    where = device if source.random() < 0.95 else source.choice(("cpu", "meta"))
    return tensor.to(where)


def random_argument(source: random.Random, argument: Any, device: str, shape: Any) -> Any:
    """Something that the schema allows, right or wrong."""
    kind = str(argument.type)
    if kind == "Tensor":
        return random_tensor(source, device, shape if source.random() < 0.6 else None)
    if kind == "Optional[Tensor]":
        return None if source.random() < 0.5 else random_tensor(source, device)
    if kind == "str":
        return source.choice(("none", "mean", "sum", "batchmean", "median", ""))
    if kind == "bool":
        return source.random() < 0.5
    if kind == "int":
        return source.choice((-100, 0, 1, 3, 2**31, -(2**63), 2**63 - 1))
    if kind == "float":
        return source.choice((0.0, 0.1, 1.0, -1.0, 2.0, float("nan"), float("inf")))
    if kind == "Optional[float]":
        return source.choice((None, None, 0.0, 30.0, -1.0, float("nan"), float("inf")))
    if kind == "List[bool]":
        return [source.random() < 0.7 for _ in range(source.choice((0, 1, 2, 2, 3, 3, 3, 4)))]
    raise NotImplementedError(kind)


def call_operators_wrongly(device: str, seed: int, count: int) -> tuple[int, int]:
    """Calls every operator `count` times; returns how many calls raised and how many returned."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    raised = returned = 0
    parts = ("", "_forward", "_backward", "_value", "_forward_gradient", "_backward_kept")
    names = [f"{loss.name}{part}" for loss in LOSSES for part in parts]
    parts = ("_forward_gradients", "_backward_kept_gradients")
    names += [f"{loss.name}{part}" for loss in LOSSES if loss.elementwise for part in parts]
    names += ["cross_entropy_backward_inplace", "cross_entropy_forward_inplace"]
    names += ["scale_kept", "token_values_backward_inplace"]
    operators = {name: getattr(torch.ops.lossops, name).default for name in names}
    calls = [(name, operator, operator) for name, operator in operators.items()]
    calls += [(f"lossops.{loss.name}", operators[loss.name], loss.function) for loss in LOSSES]
    for name, operator, function in calls:
        for _ in range(count):
            shape = source.choice(SHAPES) if source.random() < 0.8 else None
            arguments = {
                argument.name: random_argument(source, argument, device, shape)
                for argument in operator._schema.arguments
            }
            try:
                result = function(**arguments)
                for tensor in [result] if isinstance(result, torch.Tensor) else result or ():
                    if tensor.device.type != "meta":
                        tensor.sum().item() if tensor.numel() else None
                returned += 1
            except Exception as error:
                assert str(error), f"{name}: {type(error)} without a message"  # noqa: PT017
                if "CUDA error" in str(error):
                    raise
                raised += 1
    return raised, returned


@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_calls_of_the_operators(device: str, seed: int) -> None:
    """In a process of its own, so that its end would be a failure here."""
    program = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"import test_robustness\n"
        f"print(*test_robustness.call_operators_wrongly({device!r}, {seed}, 400))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_PERTURB_": "165"},
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout} {done.stderr[-2000:]}"
    raised, returned = map(int, done.stdout.split())
    assert raised > 500
    assert returned > 200


ANY_ERROR = (RuntimeError, ValueError, TypeError, IndexError)


@pytest.mark.filterwarnings("ignore")
@per_loss
def test_tensors_of_other_kinds(loss: Loss) -> None:
    """Sparse, quantised, narrow floating and unsigned ones are refused, or read rightly."""
    dense = loss.variants[0].sample((4, 5))
    x = dense.tensors["input"]
    kinds: dict[str, Tensor] = {
        "sparse": x.to_sparse(),
        "csr": x.to_sparse_csr(),
        "float8": x.to(torch.float8_e4m3fn),
        "uint16": x.abs().to(torch.uint16),
        "complex32": x.to(torch.complex32),
        "quantised": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([x, x], layout=torch.jagged),
    }
    for kind, tensor in kinds.items():
        for name in dense.tensors:
            if name == "target" and not dense.tensors[name].is_floating_point():
                continue
            for call in (loss.function, loss.op):
                try:
                    result = dense.with_tensors(**{name: tensor}).call(call)
                except ANY_ERROR as error:
                    assert str(error), kind  # noqa: PT017
                    continue
                expected = dense.with_tensors(**{name: tensor.to_dense().double()})
                assert_within(result, expected.call(loss.reference), 0.1, f"{kind} {name}")


@pytest.mark.filterwarnings("ignore")
@per_loss
def test_nested_and_quantised_tensors_are_named(loss: Loss) -> None:
    sample = loss.variants[0].sample((4, 5))
    x = sample.tensors["input"]
    nested = torch.nested.nested_tensor([x, x])  # whose layout is that of a plain tensor
    for kind, tensor in (
        ("nested", nested),
        ("quantized", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    ):
        with pytest.raises(NotImplementedError, match=f"input .* {kind}"):
            sample.with_tensors(input=tensor).call(loss.function)


@per_loss
def test_subclass_of_tensor(loss: Loss) -> None:
    class Named(Tensor):
        pass

    sample = loss.variants[0].sample((4, 5))
    expected = sample.call(loss.function)
    changed = sample.with_tensors(input=sample.tensors["input"].as_subclass(Named))
    for call in (loss.function, loss.op):
        assert same_bits(changed.call(call).as_subclass(Tensor), expected)
    parameter = torch.nn.Parameter(sample.tensors["input"].clone())
    value = sample.with_tensors(input=parameter).call(loss.function)
    assert same_bits(value.detach(), expected)
    value.sum().backward()
    assert same_bits(parameter.grad, evaluate(loss.function, sample).gradients["input"])


def backward_arguments(loss: Loss, sample: Sample) -> dict[str, Any]:
    """Right arguments for the loss's *_backward operator, by name."""
    operator = getattr(torch.ops.lossops, f"{loss.name}_backward").default
    defaults = {a.name: a.default_value for a in loss.op._schema.arguments if a.has_default_value()}
    given: dict[str, Any] = {**defaults, **sample.tensors, **sample.options}
    given |= {"weight": given.get("weight"), "float32_result": False}
    forward = {
        argument.name: given[argument.name] for argument in loss.forward_op._schema.arguments
    }
    results = loss.forward_op(**forward)
    names = [result.name for result in loss.forward_op._schema.returns]
    given |= dict(zip(names, results, strict=True))
    given["grad_output"] = torch.ones_like(results[0])
    given["output_mask"] = [True, False, False]
    return {argument.name: given.get(argument.name) for argument in operator._schema.arguments}


@per_loss
def test_saved_tensors_of_wrong_size_are_refused(loss: Loss, device: str) -> None:
    """The backward operators are public: they must not read beyond what they are given."""
    operator = getattr(torch.ops.lossops, f"{loss.name}_backward").default
    for variant in loss.variants:
        for reduction in ("none", "mean"):
            sample = variant.sample((64, 300), device=device, reduction=reduction)
            good = backward_arguments(loss, sample)
            (gradient,) = operator(**good)
            expected = evaluate(loss.function, sample).gradients["input"]
            assert same_bits(gradient, expected), sample.name
            wrong: list[dict[str, Any]] = [
                {"target": good["target"][:3]},
                {"input": good["input"][:5]},
                {"output_mask": [True]},
                {"output_mask": []},
                {"grad_output": torch.ones(5, device=device)},
                {"grad_output": torch.ones(64, 300, 2, device=device)},
            ]
            for name, value in good.items():
                if name in ("grad_output", "input", "target") or not isinstance(value, Tensor):
                    continue
                if value.numel():
                    flat = value.flatten()
                    wrong += [{name: flat[:0]}, {name: flat[: flat.numel() // 2]}]
                    wrong += [] if name == "weight" else [{name: None}, {name: value.half()}]
            for change in wrong:
                try:
                    operator(**{**good, **change})
                except ANY_ERROR:
                    continue
                shapes = {k: getattr(v, "shape", v) for k, v in change.items()}
                pytest.fail(f"{sample.name}: took {shapes}")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", [x for x in LOSSES if x.elementwise], ids=lambda loss: loss.name)
def test_more_elements_than_can_be_counted(loss: Loss, device: str) -> None:
    column = torch.zeros(1, device=device).expand(2**32).unsqueeze(1)
    row = torch.zeros(1, device=device).expand(2**32)
    for function in (loss.function, loss.op):
        with pytest.raises(RuntimeError, match=r"4294967296, 1.*more than 2\^63 elements"):
            function(column, row, reduction="sum")


OUT_OF_MEMORY = """
import resource
import torch, lossops

x, t = torch.rand(2**22, 4), torch.rand(2**22, 4)
labels = torch.randint(4, (2**22,))
leaf = x.clone().requires_grad_()
calls = {
    "mse_loss": lambda: lossops.mse_loss(x, t, reduction="none"),
    "kl_div": lambda: lossops.kl_div(x, t, reduction="none"),
    "cross_entropy": lambda: lossops.cross_entropy(leaf, labels),
    "operator": lambda: torch.ops.lossops.mse_loss(x, t, reduction="none"),
}
expected = {name: call().detach().clone() for name, call in calls.items()}
pages = int(open("/proc/self/statm").read().split()[0])
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**24, most))
for name, call in calls.items():
    try:
        call()
        print(name, "no error")
    except RuntimeError as error:
        print(name, "allocate" in str(error))
    except MemoryError:  # the first error took what was left, and the message finds no room
        print(name, True)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for name, call in calls.items():
    assert torch.equal(call(), expected[name]), name
"""


def test_out_of_memory_on_the_cpu() -> None:
    """torch's error, and the next call is right."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        word
        for name in ("mse_loss", "kl_div", "cross_entropy", "operator")
        for word in (name, "True")
    ]


SMALL_STACK = """
import threading
import torch, lossops

torch.set_num_threads(1)

def work():
    for dtype in (torch.float32, torch.float64, torch.float16):
        for shape in ((500, 10), (50, 1000), (2, 21, 30, 30)):
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            rows = (shape[0], *shape[2:])
            t = torch.randint(0, shape[1], rows)
            lossops.cross_entropy(x, t, label_smoothing=0.1).backward()
            p = torch.rand(shape, dtype=dtype, requires_grad=True)
            weight = torch.rand(shape[1], dtype=dtype, requires_grad=True)
            lossops.cross_entropy(x, p, weight).backward()
            lossops.kl_div(x, p).backward()
            lossops.mse_loss(x[:, ::2], p[:, ::2]).backward()
            lossops.kl_div(x, p.transpose(0, 1).contiguous().transpose(0, 1)).backward()
            lossops.mse_loss(x, p[:1].expand(shape)).backward()
    print("done")

threading.stack_size(104 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def test_threads_with_small_stacks() -> None:
    """A stack of 128 KiB is enough. Other processors, Pythons and torches take up to 24 more."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SMALL_STACK],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "done\n", (done.returncode, done.stderr[-2000:])


MANY_INDICES = """
import resource
import torch, lossops

torch.set_num_threads(1)

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

def step(rows):
    lossops.selective_log_softmax(logits[:rows], index[:rows]).sum().backward()

logits, index = torch.randn(256, 8, requires_grad=True), torch.randint(8, (256, 20_000))
step(2)
before = megabytes()
step(256)
print(megabytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_threads_keep() -> None:
    """What a backward pass needs of 5 million indices, 160 MB, is given back."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_INDICES], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 90, done.stdout


@per_loss
def test_operators_without_a_tensor(loss: Loss) -> None:
    x = torch.randn(4, 3)
    for arguments, name in (((x, None), "target"), ((None, x), "input")):
        with pytest.raises(TypeError, match=f"{loss.name}: {name} must be a Tensor, but is None"):
            loss.op(*arguments)


@per_loss
def test_errors_of_hooks_are_left_alone(loss: Loss) -> None:
    """What somebody's hook raises comes out as it is."""

    class DiskFullError(RuntimeError):
        def __init__(self, code: int, message: str) -> None:
            super().__init__(message)
            self.code = code

    raised = DiskFullError(7, "disk full")

    def pack(_: Tensor) -> Tensor:
        raise raised

    sample = loss.variants[0].sample((4, 3), reduction="none").leaves()
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, pytest.raises(DiskFullError) as found:
        sample.call(loss.function)
    assert found.value is raised
