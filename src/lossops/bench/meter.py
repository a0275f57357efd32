"""How time is taken."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Failed = Callable[[str, Exception], None]

# Clock cycles for which the device is kept busy while the host launches what is to be timed: some
# 0.4 ms, several times what a step takes the host.
LEAD = 750_000


class Progress:
    """A bar on stderr: redrawn in place on a terminal, else a line at every tenth."""

    def __init__(self, total: int) -> None:
        self.done, self.total, self.tenths = 0, total, -1
        self.terminal = sys.stderr.isatty()

    def advance(self, label: str) -> None:
        """Starts the next piece of work."""
        share = self.done / self.total
        self.done += 1
        if self.terminal:
            bar = ("#" * int(24 * share)).ljust(24, ".")
            print(f"\r[{bar}] {share:4.0%} {label[:60]}\033[K", end="", file=sys.stderr, flush=True)
        elif int(10 * share) > self.tenths:
            self.tenths = int(10 * share)
            print(f"{share:4.0%} {label}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Meter:
    """Times calls on one device, with cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.warm_ups, self.fewest, self.seconds = (5, 10, 0.4) if self.cuda else (2, 7, 1.2)
        # Seconds after which three samples are enough, however few those are: `medians`.
        self.most = math.inf
        # Many times any cache; ones, because fresh zeros can all be one page of memory.
        self.other_data = torch.ones(1 << 27 if self.cuda else 1 << 26, device=device)

    def medians(self, calls: dict[str, Call], failed: Failed) -> dict[str, float]:
        """Median milliseconds of each call.

        The calls take turns, so that a drift of the device hits all of them, and in both orders, so
        that what a call leaves behind does too.
        """
        calls = dict(calls)
        samples: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
        first = started = time.perf_counter()
        for turn in range(self.warm_ups + 100):
            now = time.perf_counter()
            if turn == self.warm_ups:
                started = now
            if turn >= self.warm_ups + self.fewest and now - started > self.seconds * len(calls):
                break
            if turn >= self.warm_ups + 3 and now - first > self.most:
                break
            for name, call in list(calls.items())[:: 1 if turn % 2 else -1]:
                try:
                    # By reading: lines left dirty would be written back in the call's time.
                    self.other_data.amax()
                    sample = self._sample(call)
                except Exception as error:  # of any kind: no peer may end the run
                    failed(name, error)
                    del calls[name]
                    continue
                if turn >= self.warm_ups:
                    samples[name].append(sample)
            self.synchronize()
        return {name: statistics.median(sample() for sample in samples[name]) for name in calls}

    def _sample(self, call: Call) -> Callable[[], float]:
        # What the call returns is freed after its time ends.
        if not self.cuda:
            before = time.perf_counter()
            result = call()
            elapsed = 1e3 * (time.perf_counter() - before)
            del result
            return lambda: elapsed
        # The device waits longer than the host needs to launch the call: the time between the
        # events is the device's, unless the call itself waits for the device.
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(LEAD)
        start.record()
        result = call()
        end.record()
        del result
        return lambda: float(start.elapsed_time(end))

    def small(self, calls: dict[str, Call]) -> dict[str, dict[str, float]]:
        """Microseconds of each call, of many in a row, with warm caches: {"wall": .., "gpu": ..}.

        "wall" is what a loop takes that does not wait for the device in between; "gpu" is what the
        device takes when all calls are there before it starts.
        """
        times: dict[str, dict[str, list[float]]] = {"wall": {}, "gpu": {}}
        for turn in range(3 + 15):
            for name, call in list(calls.items())[:: 1 if turn % 2 else -1]:
                found = {"wall": self._wall(call)} | (
                    {"gpu": self._queued(call)} if self.cuda else {}
                )
                for kind, microseconds in found.items():
                    if turn >= 3:
                        times[kind].setdefault(name, []).append(microseconds)
        return {
            name: {kind: statistics.median(of[name]) for kind, of in times.items() if name in of}
            for name in calls
        }

    def _wall(self, call: Call, count: int = 100) -> float:
        self.synchronize()
        before = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return 1e6 * (time.perf_counter() - before) / count

    def _queued(self, call: Call, count: int = 20) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(count * LEAD)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / count

    def launches(self, call: Call) -> int | None:
        """Kernels, copies and fills that `call` puts on the device; None where none are seen."""
        if not self.cuda:
            return None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.synchronize()
        cuda = torch.autograd.DeviceType.CUDA
        return sum(event.device_type == cuda for event in profile.events()) or None

    def peak_bytes(self, call: Call) -> int | None:
        """The most that `call` allocates at a time, result included."""
        if not self.cuda:
            return None
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        return int(torch.cuda.max_memory_allocated(self.device) - before)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def clean(self) -> None:
        """Gives unused memory back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def measure_overheads(meter: Meter) -> dict[str, float]:
    """Microseconds of a call that moves no data, by how many kernels it launches.

    On CUDA alone. The floor leaves them out; for a small input they are most of the time.
    """
    if not meter.cuda:
        return {}
    element = torch.zeros(1, device=meter.device)

    def launch(count: int) -> None:
        for _ in range(count):
            element.fill_(1.0)

    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(f"a launch of {name} kernels cannot be timed") from error

    calls: dict[str, Call] = {str(n): functools.partial(launch, n) for n in range(3)}
    return {name: 1e3 * ms for name, ms in meter.medians(calls, failed).items()}


def plain_calls(meter: Meter, bytes_read: int, bytes_moved: int) -> dict[str, dict[str, Call]]:
    """torch's own kernels for so many bytes: {"forward": that read them, "step": that copy them}.

    A copy reads and writes `bytes_moved` together.
    """

    def numbers(size: int) -> torch.Tensor:
        return torch.rand(max(size // 16, 1) * 4, device=meter.device)  # pairs of float64

    return {
        "forward": _readers(numbers(bytes_read)),
        "step": _copiers(numbers(bytes_moved // 2)),
    }


def _readers(source: torch.Tensor) -> dict[str, Call]:
    left, right = source.chunk(2)
    return {
        "sum": source.sum,
        "sum of float64": source.view(torch.float64).sum,
        "max": source.amax,
        "dot": lambda: torch.dot(left, right),
    }


def _copiers(source: torch.Tensor) -> dict[str, Call]:
    copy = torch.empty_like(source)
    return {
        "copy": lambda: copy.copy_(source),
        "negate": lambda: torch.neg(source, out=copy),
    }


def _medians_of_all(meter: Meter, calls: dict[str, Call]) -> dict[str, float]:
    def failed(name: str, error: Exception) -> None:
        raise RuntimeError(f"the bandwidth cannot be measured by {name}") from error

    return meter.medians(calls, failed)


def measure_bandwidths(meter: Meter) -> dict[str, dict[str, float]]:
    """GB/s of simple readers and copiers; a copy counts the bytes read and the bytes written.

    The fastest of each is the device's bandwidth.
    """
    size = 1 << 28
    if meter.cuda:
        memory = torch.cuda.get_device_properties(meter.device).total_memory
        size = min(1 << 32, 1 << int(math.log2(memory / 16)))
    source = torch.rand(size // 4, device=meter.device)
    rates = {}
    for kind, calls, moved in (
        ("read", _readers(source), size),
        ("copy", _copiers(source), 2 * size),
    ):
        medians = _medians_of_all(meter, calls)
        rates[kind] = {name: moved / ms / 1e6 for name, ms in medians.items()}
    return rates


def measure_plain(meter: Meter, bytes_read: int, bytes_moved: int) -> dict[str, float]:
    """Milliseconds of the fastest of the same readers and copiers for so many bytes.

    {"forward": of reading bytes_read, "step": of copying, reads and writes together bytes_moved}. A
    guide, not a bound: beside the floor they have launches, and a grid that starts and ends. On
    CUDA alone; {} where there is no memory for them.
    """
    if not meter.cuda:
        return {}

    meter.clean()
    try:
        return {
            doing: min(_medians_of_all(meter, calls).values())
            for doing, calls in plain_calls(meter, bytes_read, bytes_moved).items()
        }
    except RuntimeError:  # a run ends with it, and is worth more
        return {}
