"""Saves OpInfo's samples of linear_cross_entropy and torch's results of them for the tests.

    python tools/save_op_samples.py

writes tests/data/linear_cross_entropy_opinfo.pt.gz. It needs torch 2.13 and expecttest. The results
are computed in float64 on the CPU. The tests compare with them under any torch, and under 2.13 also
check that the file still has what torch draws.
"""

from __future__ import annotations

import gzip
import io
import sys
from collections import Counter

import torch
from suite import DTYPES, HALF_TYPES, op_samples
from torch import Tensor

# Room for each dtype; zeros at its end vanish when the file is compressed.
MOST_ELEMENTS = 2**16


class Pool:
    """Packs all tensors of a dtype into one and stores equal tensors once: each has a header."""

    def __init__(self) -> None:
        self.whole = {dtype: torch.zeros(MOST_ELEMENTS, dtype=dtype) for dtype in DTYPES}
        self.whole[torch.int64] = torch.zeros(MOST_ELEMENTS, dtype=torch.int64)
        self.used: Counter[torch.dtype] = Counter()
        self.known: dict[tuple[torch.dtype, torch.Size, bytes], Tensor] = {}

    def put(self, tensor: Tensor) -> Tensor:
        """The same values within the one tensor."""
        values = tensor.flatten().view(torch.uint8).numpy().tobytes()
        key = (tensor.dtype, tensor.shape, values)
        if key not in self.known:
            start = self.used[tensor.dtype]
            place = self.whole[tensor.dtype][start : start + tensor.numel()].view(tensor.shape)
            self.known[key] = place.copy_(tensor)
            self.used[tensor.dtype] += tensor.numel()
        return self.known[key]

    def put_all(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.put(tensor) for name, tensor in tensors.items()}


def main() -> None:
    if not torch.__version__.startswith(op_samples.SAVED_TORCH):
        sys.exit(f"needs torch {op_samples.SAVED_TORCH}*, but this is {torch.__version__}")
    pool = Pool()
    samples: dict[torch.dtype, list[dict[str, object]]] = {}
    for dtype in DTYPES:
        samples[dtype] = []
        for sample in op_samples.drawn("cpu", dtype):
            exact = op_samples.exact(sample)
            if dtype in HALF_TYPES:  # half the room, at 2^-13 of what float16 can tell apart
                exact = {name: value.float() for name, value in exact.items()}
            sample |= {"tensors": pool.put_all(sample["tensors"]), "exact": pool.put_all(exact)}
            samples[dtype].append(sample)
    errors = [
        error | {"tensors": pool.put_all(error["tensors"])}
        for error in op_samples.drawn_errors("cpu")
    ]
    buffer = io.BytesIO()
    torch.save({"samples": samples, "errors": errors}, buffer)
    op_samples.FILE.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    counts = ", ".join(f"{len(found)} in {dtype}" for dtype, found in samples.items())
    print(f"{op_samples.FILE}: {counts}, {len(errors)} errors")


if __name__ == "__main__":
    main()
