"""Every kernel once, on small shapes: for compute-sanitizer, under which the suite takes hours.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tools/small_shapes.py

and the same with racecheck, initcheck, and synccheck --num-cuda-barriers 4096.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import lossops

LONGER = (999, 1000, 1001, 2049, 4096)


def step(loss: Callable[..., Tensor], x: Tensor, *args: Tensor, **options: Any) -> None:
    """Forward and backward; of a reduction also with a gradient that is not what forward left."""
    for factor in (1.0, 2.0):
        leaf = x.detach().requires_grad_()
        value = loss(leaf, *args, **options)
        (factor * value.sum()).backward()


def main() -> None:
    torch.manual_seed(0)

    def indices(classes: int, *shape: int) -> Tensor:
        return torch.randint(classes, shape, device="cuda")

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        for classes in (*(1, 2, 3, 10, 16, 21, 24, 32, 33, 64, 100, 127, 144, 288, 500), *LONGER):
            for rows in (3, 70, 1100):
                target = indices(classes, rows)
                target[0] = -100
                target[1] = classes + 5  # out of range
                for reduction in ("mean", "sum", "none"):
                    step(lossops.cross_entropy, normal(rows, classes), target, reduction=reduction)
                weights = {"weight": normal(classes).abs()}
                step(lossops.cross_entropy, normal(rows, classes), target, **weights)
                wide = normal(rows, classes + 3)[:, 2:-1]  # misaligned, with gaps
                step(lossops.cross_entropy, wide, target)
        # Several blocks, and clusters, of several rows each; whole vectors and not.
        for classes in (6001, 8192, 20000, 32768, 50257, 65536, 131072, 131073, 262144):
            target = indices(classes, 7)
            target[0] = -100
            target[1] = classes + 5
            for smoothing in (0.0, 0.1):
                step(lossops.cross_entropy, normal(7, classes), target, label_smoothing=smoothing)
        # (3, 21, 5, 3): an odd number of logits, the last of which is half of a word.
        # (3, 21, 13, 13), (2, 21, 1031): warps whose rows are neighbours at odd addresses, or not.
        planes = ((2, 21, 8, 16), (2, 7, 5, 3), (3, 21, 5, 3), (1028, 21, 4))
        for shape in (*planes, (3, 21, 13, 13), (2, 21, 1031)):
            target = indices(shape[1], shape[0], *shape[2:])
            for reduction in ("mean", "none"):
                step(lossops.cross_entropy, normal(*shape), target, reduction=reduction)
        # So many blocks that a cluster folds what they leave.
        step(lossops.cross_entropy, normal(70_000, 600), indices(600, 70_000))
        for classes in (100, 1024, 3000, 3001, 32768):
            step(lossops.cross_entropy, normal(5, classes), normal(5, classes).abs())
        step(lossops.cross_entropy, normal(4, 3000), indices(3000, 4), normal(3000).abs())
        for loss in (lossops.mse_loss, lossops.kl_div):
            for reduction in ("mean", "sum", "none"):
                x, target = normal(33, 1001).abs(), normal(33, 1001).abs()
                step(loss, x, target, reduction=reduction)
                step(loss, x.t(), target.t(), reduction=reduction)
                # Rows at any address, of many columns and of few; target a row or a column, and
                # input.
                step(loss, normal(34, 1003).abs()[1:, 1:-1], target, reduction=reduction)
                step(loss, normal(90, 14).abs()[:, 1:], normal(90, 15).abs()[:, :-2])
                for shape in ((33, 1), (1, 1001)):
                    step(loss, x, normal(*shape).abs(), reduction=reduction)
                    step(loss, normal(*shape).abs(), target, reduction=reduction)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
