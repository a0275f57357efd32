"""What only a GPU shows: streams, graphs, synchronisation, memory, more than one device."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from losses import (
    LOSS_IDS,
    LOSSES,
    VARIANT_IDS,
    VARIANTS,
    Loss,
    Result,
    Sample,
    Variant,
    evaluate,
)
from numerics import assert_within, layouts_of, same_bits, ulp
from torch import Tensor

import lossops

pytestmark = pytest.mark.cuda
per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)


def assert_same_result(a: Result, b: Result, what: str) -> None:
    assert same_bits(a.value, b.value), f"{what}: value"
    for name, gradient in a.gradients.items():
        assert same_bits(gradient, b.gradients[name]), f"{what}: gradient of {name}"


def keep_busy() -> torch.cuda.Event:
    """Queues some 0.2 s of work on the current stream; the event marks its end."""
    a = torch.ones(8192, 8192, device="cuda")
    out = torch.empty_like(a)
    for _ in range(8):
        torch.mm(a, a, out=out)
    end = torch.cuda.Event()
    end.record()
    return end


def samples(loss: Loss, variant: Variant) -> list[Sample]:
    found = []
    for reduction in loss.reductions:
        for shape, layout, dtype in (
            ((257, 130), "contiguous", torch.float32),
            ((5, 40_001), "contiguous", torch.bfloat16),
            ((33, 65), "reversed", torch.float16),
            ((4, 33, 19), "classes_last", torch.float32),
            ((9, 17), "gap_inner", torch.float32),
        ):
            sample = variant.sample(shape, device="cuda", dtype=dtype, reduction=reduction)
            found.append(
                sample.map(lambda t, name=layout: layouts_of(t).get(name, Tensor.contiguous)(t))
            )
    return found


@per_variant
def test_no_synchronisation(loss: Loss, variant: Variant) -> None:
    """torch sees none; and calls return while the work before them is still running."""
    for sample in samples(loss, variant):
        for call in (loss.function, loss.op):
            grad_output = torch.ones_like(sample.call(call))
            evaluate(call, sample, grad_output)
            torch.cuda.set_sync_debug_mode("error")
            evaluate(call, sample, grad_output)
            torch.cuda.set_sync_debug_mode("default")
    sample = samples(loss, variant)[0]
    evaluate(loss.function, sample)
    torch.cuda.synchronize()

    def waits() -> bool:
        end = keep_busy()
        evaluate(loss.function, sample)
        return end.query()

    # Other processes may hold up the host for as long: it is asked more than once.
    assert not all(waits() for _ in range(3)), "the call waited for the device"


@per_variant
def test_graph_capture_and_replay(loss: Loss, variant: Variant) -> None:
    """Forward and backward in one graph give the bits of eager, for new data too."""
    for i, sample in enumerate(samples(loss, variant)[::3]):
        for call in (loss.function, loss.op)[: 1 if i else 2]:
            grad_output = torch.ones_like(sample.call(call))
            static = sample.map(Tensor.clone)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                evaluate(call, static, grad_output)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = evaluate(call, static, grad_output)
            for scale in (1.0, 0.5):
                for name, tensor in sample.tensors.items():
                    fresh = tensor * scale if tensor.is_floating_point() else tensor
                    static.tensors[name].copy_(fresh)
                graph.replay()
                replayed = Result(
                    captured.value.clone(), {k: v.clone() for k, v in captured.gradients.items()}
                )
                graph.replay()
                assert_same_result(captured, replayed, f"{sample.name}, replayed again")
                expected = evaluate(call, static, grad_output)
                assert_same_result(replayed, expected, sample.name)


def test_graph_capture_while_targets_are_checked() -> None:
    """The check needs the host, so it is left out of a graph instead of breaking the capture."""
    x, t = torch.randn(8, 5, device="cuda"), torch.randint(0, 5, (8,), device="cuda")
    expected = lossops.cross_entropy(x, t)
    torch.cuda.synchronize()
    lossops.check_targets(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lossops.cross_entropy(x, t)
    graph.replay()
    assert same_bits(captured, expected)


@per_variant
def test_side_stream(loss: Loss, variant: Variant) -> None:
    """The kernels run on the current stream, after what is queued there."""
    sample = variant.sample((1537, 257), device="cuda", reduction=loss.reductions[-1])
    expected = evaluate(loss.function, sample)
    late = sample.map(torch.zeros_like)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_busy()
        for name, tensor in sample.tensors.items():
            late.tensors[name].copy_(tensor, non_blocking=True)
        result = evaluate(loss.function, late)
        # its own scratch and results, while the default stream allocates and writes
        op = evaluate(loss.op, late)
    for _ in range(10):
        torch.full((1 << 20,), float("nan"), device="cuda")
    torch.cuda.current_stream().wait_stream(stream)
    assert_same_result(result, expected, sample.name)
    assert_same_result(op, expected, f"{sample.name}, op")


Writer = Callable[[], Tensor]


def copied_late(tensor: Tensor) -> Writer:
    """Empties some 64 MB and copies them anew, the tensor last."""
    count = tensor.numel()
    large = torch.zeros(2**24 + count, dtype=tensor.dtype, device="cuda")
    source = large.clone()
    source[-count:] = tensor.flatten()
    other, stream = torch.zeros_like(large), torch.cuda.Stream()

    def write() -> Tensor:
        large.zero_()
        # Two streams that meet: the next kernel comes after both.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other.copy_(large)
        torch.cuda.current_stream().wait_stream(stream)
        large.copy_(source)
        return large[-count:].view(tensor.shape)

    return write


# Of the size of integers, which they can be stored as.
FLOATS = {torch.int64: torch.float64, torch.int32: torch.float32}


def stored_by_a_loss(tensor: Tensor) -> Writer:
    """Has a kernel store it that lets the next one start as soon as it has itself."""
    count = tensor.numel()
    dtype = FLOATS.get(tensor.dtype, tensor.dtype)
    source = torch.zeros(2**21 + count, dtype=dtype, device="cuda")
    source[-count:] = tensor.flatten().view(dtype)
    ones, zeros = torch.ones_like(source), torch.zeros_like(source)

    def write() -> Tensor:
        stale = torch.zeros_like(source)
        place = stale.data_ptr()
        del stale
        torch.cuda._sleep(500_000)  # launches wait in line, and none for the host
        stored = lossops.mse_loss(ones, zeros, weight=source, reduction="none")
        assert stored.data_ptr() == place, "zeros are where the tensor will be"
        return stored[-count:].view(tensor.dtype).view(tensor.shape)

    return write


def late_result(
    loss: Loss, sample: Sample, name: str, write: Writer, grad_output: Tensor
) -> Result:
    """With the tensor of that name, which may be grad_output, written right before it is read."""
    if name == "grad_output":
        return evaluate(loss.function, sample, write)
    return evaluate(loss.function, sample.with_tensors(**{name: write()}), grad_output)


@per_variant
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("late", [copied_late, stored_by_a_loss])
def test_waits_for_what_is_ahead(
    loss: Loss, variant: Variant, captured: bool, late: Callable[[Tensor], Writer]
) -> None:
    """Kernels that start before the one ahead has ended do not read what it has yet to write."""
    # Rows of each kernel that reads logits before it waits, of a mean and of so few that there is
    # no denominator to wait for.
    float_shapes = (
        *((3, 5), (300, 10), (4099, 10), (300, 100), (32, 1000), (2000, 1001)),
        *((2, 40_000), (2, 21, 32, 32)),
    )
    half_shapes = ((3000, 100), (2000, 3000), (600, 32_768))
    cases = (
        *((shape, torch.float32, "mean") for shape in float_shapes),
        *((shape, torch.bfloat16, "mean") for shape in half_shapes),
        *((shape, torch.float32, "sum") for shape in ((32, 1000), (4099, 10), (2, 21, 32, 32))),
    )
    for shape, dtype, reduction in cases:
        sample = variant.sample(shape, device="cuda", dtype=dtype, reduction=reduction)
        if late is stored_by_a_loss:
            # Of negative integers a kernel that stores floats would store the bits of NaN.
            sample = sample.map(lambda t: t if t.is_floating_point() else t.clamp(min=0))
        grad_output = torch.full_like(sample.call(loss.function), 0.5)
        expected = evaluate(loss.function, sample, grad_output)
        for name, tensor in (*sample.tensors.items(), ("grad_output", grad_output)):
            if late is stored_by_a_loss and tensor.dtype == torch.uint8:
                continue  # no loss is as small
            run = partial(late_result, loss, sample, name, late(tensor), grad_output)
            result = run()
            if captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = run()
                for _ in range(3):
                    graph.replay()
            torch.cuda.synchronize()
            assert_same_result(result, expected, f"{sample.name}, {name} late")


def settled_memory() -> int:
    """What is allocated once autograd's threads have let go of their last tensors."""
    gc.collect()
    found = [torch.cuda.memory_allocated()]
    while len(found) < 5 or len(set(found[-5:])) > 1:
        time.sleep(0.02)
        found.append(torch.cuda.memory_allocated())
    return found[-1]


@per_variant
def test_no_memory_is_left_behind(loss: Loss, variant: Variant) -> None:
    sample = variant.sample((257, 130), device="cuda")
    evaluate(loss.function, sample)
    before = settled_memory()
    for call in (loss.function, loss.op):
        for _ in range(20):
            evaluate(call, sample)
    assert settled_memory() == before


@per_loss
def test_threads_with_streams_of_their_own(loss: Loss) -> None:
    found = [
        variant.sample((513, 257), device="cuda", reduction=loss.reductions[-1])
        for variant in loss.variants
    ]
    expected = [evaluate(loss.function, sample) for sample in found]
    torch.cuda.synchronize()

    def work(sample: Sample) -> Result:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                result = evaluate(loss.function, sample)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for sample, result, wanted in zip(found, pool.map(work, found), expected, strict=True):
                assert_same_result(result, wanted, sample.name)


@pytest.mark.gpus(2)
@per_loss
def test_device_of_the_input_is_used(loss: Loss) -> None:
    """Also where it is not the current one."""
    for variant in loss.variants:
        sample = variant.sample((257, 130), device="cuda:0")
        expected = evaluate(loss.function, sample)
        other = sample.map(lambda t: t.to("cuda:1"))
        assert torch.cuda.current_device() == 0
        for call in (loss.function, loss.op):
            result = evaluate(call, other)
            assert result.value.device == torch.device("cuda:1")
            assert same_bits(result.value.to("cuda:0"), expected.value)
            for name, gradient in result.gradients.items():
                assert same_bits(gradient.to("cuda:0"), expected.gradients[name])
        assert torch.cuda.current_device() == 0


@pytest.mark.gpus(2)
@per_loss
def test_tensors_on_two_gpus(loss: Loss) -> None:
    sample = loss.variants[0].sample((4, 5), device="cuda:0")
    mixed = sample.with_tensors(target=sample.tensors["target"].to("cuda:1"))
    for call in (loss.function, loss.op):
        with pytest.raises(RuntimeError, match="cuda:1"):
            mixed.call(call)


@pytest.mark.gpus(2)
@per_loss
def test_a_thread_for_each_gpu(loss: Loss) -> None:
    """As DataParallel does it: each thread has a device of its own, for many calls at a time."""
    on_first = [variant.sample((513, 257), device="cuda:0") for variant in loss.variants]
    expected = [evaluate(loss.function, sample) for sample in on_first]

    def work(device: int) -> list[Result]:
        torch.cuda.set_device(device)
        samples_here = [sample.map(lambda t: t.to(f"cuda:{device}")) for sample in on_first]
        for _ in range(50):
            found = [evaluate(loss.function, sample) for sample in samples_here]
        return found

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(work, (0, 1)):
            for result, wanted, sample in zip(found, expected, on_first, strict=True):
                moved = {name: g.to("cuda:0") for name, g in result.gradients.items()}
                result = Result(result.value.to("cuda:0"), moved)
                assert_same_result(result, wanted, sample.name)


# --- what a call cannot have --------------------------------------------------------------------


def unused_cache(total: int) -> list[Tensor]:
    """What the allocator has cached beside tensors of other tests, as tensors: none is left."""
    taken = []
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for exponent in range(30, 8, -1):
            while True:
                try:
                    taken.append(torch.empty(1 << exponent, dtype=torch.uint8, device="cuda"))
                except torch.cuda.OutOfMemoryError:
                    break
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return taken


@per_variant
def test_out_of_memory(loss: Loss, variant: Variant) -> None:
    """torch's error, nothing left behind, and the next call is right."""
    sample = variant.sample((4096, 1024), device="cuda", reduction="none")
    expected = evaluate(loss.function, sample)
    wanted = [expected.value.cpu(), *(g.cpu() for g in expected.gradients.values())]
    del expected
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    fillers = unused_cache(total)
    before = settled_memory()
    errors = 0
    for spare in (0, 2**12, 2**16, 2**22, 2**24 + 2**20, 2**25):
        # Of torch's own process: other tests have the rest of the device.
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare) / total)
        try:
            for call in (loss.function, loss.op):
                try:
                    evaluate(call, sample)
                except torch.cuda.OutOfMemoryError:
                    errors += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert settled_memory() == before
        torch.cuda.empty_cache()
    del fillers
    assert errors >= 4, "this test was to run out of memory"
    result = evaluate(loss.function, sample)
    for actual, tensor in zip((result.value, *result.gradients.values()), wanted, strict=True):
        assert same_bits(actual.cpu(), tensor)


FORKED = """
import os, sys, torch, lossops
x, t = torch.rand(8, 5, device="cuda", requires_grad=True), torch.rand(8, 5, device="cuda")
labels = torch.randint(5, (8,), device="cuda")
torch.cuda.synchronize()
if sys.argv[1] == "used":
    lossops.mse_loss(x, t).backward()
    torch.cuda.synchronize()
calls = (
    lambda: lossops.mse_loss(x, t),
    lambda: lossops.kl_div(x.detach(), t),
    lambda: lossops.cross_entropy(x, labels),
    lambda: torch.ops.lossops.cross_entropy(x.detach(), labels),
)
child = os.fork()
if child == 0:
    for call in calls:
        try:
            call()
            print("no error")
        except RuntimeError as error:
            print(str(error).splitlines()[0])
    print(lossops.mse_loss(torch.ones(3), torch.zeros(3)).item())
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
for call in calls:
    assert call().isfinite().all()
"""


@pytest.mark.parametrize("before", ["used", "not used"])
def test_forked_process(before: str) -> None:
    """A clear error in the child, which goes on with the CPU; nothing happens to the parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, before], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    *errors, on_cpu = done.stdout.splitlines()
    assert on_cpu == "1.0"
    assert len(errors) == 4
    for error in errors:
        assert "forked" in error and "spawn" in error and "input is on cuda:0" in error, error


def test_process_forked_before_cuda() -> None:
    """CUDA is usable in the child of a process that has only imported lossops."""
    program = """
import os, sys, torch, lossops
child = os.fork()
if child == 0:
    x = torch.ones(8, device="cuda", requires_grad=True)
    lossops.mse_loss(x, torch.zeros(8, device="cuda")).backward()
    os._exit(0 if x.grad.tolist() == [0.25] * 8 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()


# --- more than 2^31 elements --------------------------------------------------------------------


MANY = 2**31 + 4099


@pytest.mark.gpu_memory(40)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mse_loss_of_more_than_2_31_elements(dtype: torch.dtype) -> None:
    x = torch.randn(MANY, dtype=dtype, device="cuda")
    t = torch.randn(MANY, dtype=dtype, device="cuda")
    sample = Sample("large", {"input": x, "target": t}, {"reduction": "none"}, ("input", "target"))
    result = evaluate(lossops.mse_loss, sample)
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for start in range(0, MANY, 2**27):
        part = slice(start, start + 2**27)
        difference = x[part].float() - t[part].float()
        assert torch.equal(result.value[part], difference.square().to(dtype))
        assert torch.equal(result.gradients["input"][part], (2 * difference).to(dtype))
        assert torch.equal(result.gradients["target"][part], (-2 * difference).to(dtype))
        total += difference.double().square().sum()
    del result
    mean = lossops.mse_loss(x, t)
    assert_within(mean, total / MANY, 0.51 * ulp(total / MANY, dtype), "mean")


@pytest.mark.gpu_memory(50)
def test_kl_div_of_more_than_2_31_elements() -> None:
    p = torch.rand(MANY, dtype=torch.bfloat16, device="cuda") + 0.25
    t = torch.rand(MANY, dtype=torch.bfloat16, device="cuda") + 0.25
    options = {"reduction": "none", "log_input": False}
    both = ("input", "target")
    result = evaluate(lossops.kl_div, Sample("large", {"input": p, "target": t}, options, both))
    for start in (0, 2**30, 2**31 - 2**20, MANY - 2**20):
        part = slice(start, min(start + 2**21, MANY))
        sample = Sample("part", {"input": p[part], "target": t[part]}, options, both)
        expected = evaluate(lossops.kl_div, sample.map(Tensor.clone))
        assert same_bits(result.value[part], expected.value)
        for name, gradient in expected.gradients.items():
            assert same_bits(result.gradients[name][part], gradient)


@pytest.mark.gpu_memory(60)
@pytest.mark.parametrize(
    "shape",
    [(65_552, 32_768), (2, 33_000, 32_800), (2**26 + 3, 33)],
    ids=["long_rows", "spatial", "many_rows"],
)
def test_cross_entropy_of_more_than_2_31_elements(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    rows = (shape[0], *shape[2:])
    t = torch.randint(0, shape[1], rows, device="cuda")
    sample = Sample("large", {"input": x, "target": t}, {"reduction": "none"}, ("input",))
    result = evaluate(lossops.cross_entropy, sample)
    pieces: list[Callable[[Tensor], Tensor]]
    if len(shape) == 2:
        count = max(1, 2**22 // shape[1])
        starts = (0, shape[0] // 2, shape[0] - count)
        pieces = [lambda a, s=s: a[s : s + count] for s in starts]
    else:
        pieces = [lambda a, s=s: a[1:, ..., s : s + 100] for s in (0, shape[2] - 100)]
    for piece in pieces:
        part = sample.map(piece)
        exact = evaluate(torch.nn.functional.cross_entropy, part.double())
        bound = 0.51 * ulp(exact.value, torch.bfloat16) + 1e-5
        assert_within(piece(result.value), exact.value, bound, "value")
        true = exact.gradients["input"]
        bound = 0.51 * ulp(true, torch.bfloat16) + 1e-6
        assert_within(piece(result.gradients["input"]), true, bound, "gradient")


@pytest.mark.gpu_memory(60)
def test_cross_entropy_of_more_than_2_31_rows() -> None:
    rows = 2**31 + 2
    x = torch.zeros(rows, 2, dtype=torch.float16, device="cuda")
    x[-1, 0] = 1.0
    t = torch.zeros(rows, dtype=torch.uint8, device="cuda")
    exact = torch.tensor(2.0).log().double()
    mean = lossops.cross_entropy(x, t)
    assert_within(mean, exact, 0.51 * ulp(exact, torch.float16), "mean")
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(lossops.cross_entropy(x, t, reduction="sum"), x)
    assert gradient[-2].tolist() == [-0.5, 0.5]
    last = torch.softmax(torch.tensor([1.0, 0.0]), 0)[1]
    assert_within(gradient[-1, 1], last.double(), ulp(last, torch.float16), "last row")
    del gradient
