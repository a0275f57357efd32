"""Heads of DTensors, against the same call of plain tensors with the data of all ranks.

This file is also the program that two ranks run: `main` and what stands above it.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_two_ranks
from torch import Tensor

import lossops

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def dtensor_module() -> Any:
    """Imports torch.distributed.tensor. Only the ranks need it, not pytest."""
    import torch.distributed.tensor as module

    return module


def generator(seed: int) -> torch.Generator:
    """A generator of the device of new tensors."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


class Comparisons:
    """Calls of DTensors and of plain tensors, and which of them differ."""

    def __init__(self) -> None:
        self.dt = dtensor_module()
        self.size = dist.get_world_size()
        self.meshes = {
            shape: dist.init_device_mesh(torch.get_default_device().type, shape)
            for shape in ((self.size,), (self.size, 1), (1, self.size))
        }
        self.count = 0
        self.failures: list[str] = []

    def distributed(self, tensor: Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
        """A DTensor. Partial: each rank has its share of the sum."""
        parts = [i for i, placement in enumerate(placements) if placement.is_partial()]
        whole = [self.dt.Replicate() if i in parts else x for i, x in enumerate(placements)]
        found = self.dt.distribute_tensor(tensor.detach().clone(), mesh, whole)
        if parts:
            share = found.to_local() / math.prod(mesh.size(i) for i in parts)
            found = self.dt.DTensor.from_local(
                share, mesh, placements, shape=tensor.shape, stride=tensor.stride()
            )
        return found.detach().requires_grad_(tensor.requires_grad)

    def compare(
        self,
        name: str,
        call: Callable[..., Any],
        tensors: dict[str, Tensor],
        mesh: Any,
        placements: dict[str, Sequence[Any]],
        *,
        tolerance: float = 1e-11,
        backward_passes: int = 1,
        expected_placements: Sequence[Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Compares values and gradients. Returns the DTensors that the call returned."""
        whole = {
            key: x.detach().clone().requires_grad_(x.requires_grad) for key, x in tensors.items()
        }
        parts = {key: self.distributed(x, mesh, placements[key]) for key, x in tensors.items()}
        values = {}
        for kind, given in (("whole", whole), ("parts", parts)):
            found = call(**given, **options)
            found = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
            values[kind] = found
            differentiable = [x for x in found if x.requires_grad]
            for i in range(backward_passes):
                # Rows count with different factors.
                total: Any = 0
                for x in differentiable:
                    factors = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view(x.shape)
                    if kind == "parts":
                        factors = self.dt.distribute_tensor(
                            factors, mesh, [self.dt.Replicate()] * mesh.ndim
                        )
                    total = total + (x if x.dim() == 0 else (x * factors).sum())
                if differentiable:
                    total.backward(retain_graph=i + 1 < backward_passes)
        pairs = {
            f"result {i}": pair
            for i, pair in enumerate(zip(values["whole"], values["parts"], strict=True))
        }
        for key, tensor in whole.items():
            of_part = parts[key].grad
            if (tensor.grad is None) != (of_part is None):
                self.failures.append(f"{name}: gradient of {key}: {tensor.grad} and {of_part}")
            elif of_part is not None:
                pairs[f"gradient of {key}"] = tensor.grad, of_part
        for key, (expected, found) in pairs.items():
            try:
                torch.testing.assert_close(
                    found.full_tensor(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
                )
            except AssertionError as error:
                self.failures.append(f"{name}: {key}: {error}")
        for key, x in enumerate(values["parts"]):
            wanted = [self.dt.Replicate()] * mesh.ndim if x.dim() == 0 else expected_placements
            if wanted is not None and list(x.placements) != list(wanted):
                self.failures.append(f"{name}: result {key} is placed as {x.placements}")
        self.count += 1
        return values["parts"]


def sample(
    *shape: int, classes: int = 33, dtype: torch.dtype = torch.float64, bias: bool = True
) -> dict[str, Tensor]:
    """Operands of a head. More rows are ignored at the end than at the beginning."""
    source = generator(sum(shape) + classes)
    *rows, features = shape
    target = torch.randint(classes, rows, generator=source)
    flat = target.view(-1)
    flat[flat.numel() * 2 // 3 :: 2] = -100
    found = {
        "input": torch.randn(shape, generator=source, dtype=torch.float64),
        "linear_weight": torch.randn(classes, features, generator=source, dtype=torch.float64),
    }
    if bias:
        found["linear_bias"] = torch.randn(classes, generator=source, dtype=torch.float64)
    found = {key: x.to(dtype).requires_grad_() for key, x in found.items()}
    return {**found, "target": target}


def grid(run: Comparisons) -> None:
    """Placements of input and weight on meshes of one and two dimensions, with every reduction."""
    shard, replicate, partial = run.dt.Shard, run.dt.Replicate(), run.dt.Partial()
    for (shape, mesh), rows in itertools.product(run.meshes.items(), ((7,), (3, 5))):
        where = shape.index(run.size)

        def on_mesh(
            placement: Any, other: Any = replicate, where: int = where, ndim: int = len(shape)
        ) -> list[Any]:
            return [placement if i == where else other for i in range(ndim)]

        tensors = sample(*rows, 6)
        of_input = [shard(i) for i in range(len(rows) + 1)] + [replicate, partial]
        of_weight = [shard(0), shard(1), replicate]
        for i, (first, second) in enumerate(itertools.product(of_input, of_weight)):
            other = shard(0) if i % 2 else replicate  # of a dimension of the mesh of one rank
            is_rows = first.is_shard() and first.dim < len(rows)
            of_target = on_mesh(first if is_rows else replicate)
            placements = {
                "input": on_mesh(first, other),
                "linear_weight": on_mesh(second, other),
                "linear_bias": on_mesh(shard(0) if second == shard(0) else replicate),
                "target": of_target,
            }
            for reduction in ("mean", "sum", "none"):
                run.compare(
                    f"{shape} {rows} {first} {second} {reduction}",
                    lossops.linear_cross_entropy,
                    tensors,
                    mesh,
                    placements,
                    expected_placements=of_target,
                    reduction=reduction,
                )
        # A target that is not where the input is.
        for first, third in ((shard(0), replicate), (replicate, shard(0))):
            placements = {
                "input": on_mesh(first),
                "linear_weight": on_mesh(shard(0)),
                "linear_bias": on_mesh(replicate),
                "target": on_mesh(third),
            }
            for reduction in ("mean", "none"):
                run.compare(
                    f"{shape} {rows} {first}, target {third} {reduction}",
                    lossops.linear_cross_entropy,
                    tensors,
                    mesh,
                    placements,
                    expected_placements=on_mesh(third),
                    reduction=reduction,
                )


ALL_RETURNED = {
    f"return_{key}": True
    for key in ("lse", "entropy", "z_loss", "token_accuracy", "predicted_tokens")
}


def keyword_cases() -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Names, operands, and keywords of calls, beside reductions."""
    base = sample(7, 6)
    rows = base["target"].shape
    source = generator(1)
    class_weight = torch.rand(33, generator=source, dtype=torch.float64)
    token_weight = torch.rand(rows, generator=source, dtype=torch.float64)
    weighted = {**base, "weight": class_weight}
    yield "no bias", sample(7, 6, bias=False), {}
    yield "class weights", weighted, {}
    yield "smoothing", base, {"label_smoothing": 0.2}
    yield "class weights, smoothing", weighted, {"label_smoothing": 0.2}
    yield "token weights", {**base, "token_weight": token_weight}, {}
    both = {**weighted, "token_weight": token_weight}
    yield "both weights", both, {"label_smoothing": 0.1}
    yield "a map", both, {"logit_scale": 0.9, "softcap": 3.0, "temperature": 0.7}
    yield "a z-loss", base, {"lse_square_scale": 0.1, **ALL_RETURNED}
    yield "a z-loss, weights", both, {"lse_square_scale": 0.1, **ALL_RETURNED}
    yield "a z-loss, weights, smoothing", both, {"lse_square_scale": 0.1, "label_smoothing": 0.2}
    yield "all returned", both, ALL_RETURNED
    yield "accuracy", base, {"return_token_accuracy": True}
    yield "predictions", base, {"return_predicted_tokens": True}
    for first, last in ((0, 4), (4, 7), (0, 7)):  # a rank's tokens, or all
        target = base["target"].clamp_min(0).clone()
        target[first:last] = -100
        for more in ({}, ALL_RETURNED):
            yield f"ignored {first} to {last} {len(more)}", {**base, "target": target}, more
    yield (
        "another ignored class",
        {**base, "target": base["target"].clamp_min(0)},
        {"ignore_index": int(base["target"][0])},
    )
    yield "int32", {**base, "target": base["target"].int()}, {}
    yield "one token", sample(1, 6), ALL_RETURNED
    yield "workspace", base, {"max_workspace_bytes": 600}
    probabilities = torch.rand(7, 33, generator=source, dtype=torch.float64).requires_grad_()
    soft = {**base, "target": probabilities}
    yield "probabilities", soft, {"label_smoothing": 0.1}
    yield "probabilities, weights", {**soft, "weight": class_weight.clone().requires_grad_()}, {}
    yield (
        "probabilities, all weights",
        {**soft, "weight": class_weight, "token_weight": token_weight},
        {"lse_square_scale": 0.1, "return_lse": True, "return_z_loss": True},
    )
    deep = {**base, "linear_weight": torch.randn(4, 3, 6, dtype=torch.float64, generator=source)}
    deep["linear_weight"].requires_grad_()
    deep["linear_bias"] = torch.randn(4, 3, dtype=torch.float64, generator=source)
    deep["linear_bias"].requires_grad_()
    deep["target"] = torch.randint(4, (7, 3), generator=source)
    deep["target"][5:, 1] = -100
    yield "K dimensions", deep, {"return_lse": True}
    deep_soft = torch.rand(7, 4, 3, generator=source, dtype=torch.float64, requires_grad=True)
    yield "K dimensions, probabilities", {**deep, "target": deep_soft}, {}
    for frozen in ("input", "linear_weight", "linear_bias"):
        yield f"frozen {frozen}", {**base, frozen: base[frozen].detach()}, {}
    yield "nothing to learn", {key: x.detach() for key, x in base.items()}, {}


def keywords(run: Comparisons) -> None:
    """Every keyword, with the tokens dealt out by the input and by the weight."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    for name, tensors, options in keyword_cases():
        for of_input, of_weight in ((shard(0), replicate), (replicate, shard(0))):
            placements = {
                "input": [of_input],
                "linear_weight": [of_weight],
                "linear_bias": [of_weight],
                "target": [of_input],
                "weight": [of_weight],
                "token_weight": [shard(0)],
            }
            for reduction in ("mean", "sum", "none"):
                run.compare(
                    f"{name} {of_input} {reduction}",
                    lossops.linear_cross_entropy,
                    tensors,
                    mesh,
                    placements,
                    reduction=reduction,
                    **options,
                )


def numbers(run: Comparisons) -> None:
    """num_items_in_batch of each kind."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    placements = {"input": [shard(0)], "linear_weight": [shard(0)], "linear_bias": [shard(0)]}
    placements["target"] = [shard(0)]
    tensor = torch.tensor(11)
    tensors = sample(7, 6)

    def by_dtensor(input: Any, **others: Any) -> Any:
        number: Any = tensor
        if isinstance(input, run.dt.DTensor):
            number = run.dt.DTensor.from_local(
                torch.tensor(11.0 if dist.get_rank() == 0 else 0.0), mesh, [run.dt.Partial()]
            )
        return lossops.linear_cross_entropy(input, num_items_in_batch=number, **others)

    for reduction in ("mean", "sum"):
        for number in (11, 11.5, tensor, tensor.reshape(1)):
            for more in ({}, {"lse_square_scale": 0.1, "return_z_loss": True}):
                run.compare(
                    f"num_items_in_batch {number} {reduction}",
                    lossops.linear_cross_entropy,
                    tensors,
                    mesh,
                    placements,
                    reduction=reduction,
                    num_items_in_batch=number,
                    **more,
                )
        run.compare("a DTensor", by_dtensor, tensors, mesh, placements, reduction=reduction)
    # One row has no tokens to deal out.
    row = {**sample(6, bias=False), "target": torch.tensor([3])}
    placements = {"input": [replicate], "linear_weight": [shard(0)], "target": [replicate]}
    for reduction in ("mean", "sum", "none"):
        run.compare(
            f"one row {reduction}",
            lossops.linear_cross_entropy,
            row,
            mesh,
            placements,
            reduction=reduction,
            **ALL_RETURNED,
        )


def log_softmax(run: Comparisons) -> None:
    """linear_selective_log_softmax, with one class and with several for each row."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    for rows, several in itertools.product(((7,), (3, 5)), (False, True)):
        given = sample(*rows, 6)
        source = generator(2)
        size = (*rows, 4) if several else rows
        given["index"] = torch.randint(33, size, generator=source)
        del given["target"]
        mask = torch.rand(rows, generator=source) > 0.4
        values_mask = torch.rand(size, generator=source) > 0.4
        for i, (of_input, of_weight) in enumerate(
            itertools.product(
                [shard(i) for i in range(len(rows) + 1)] + [replicate, run.dt.Partial()],
                (shard(0), shard(1), replicate),
            )
        ):
            stays = of_input.is_shard() and of_input.dim < len(rows)
            of_index = [of_input if stays else replicate]
            placements = {"input": [of_input], "linear_weight": [of_weight], "index": of_index}
            placements |= {"linear_bias": [replicate], "row_mask": [(shard(0), replicate)[i % 2]]}
            for entropy, masked in ((i % 3 == 0, None), (i % 2 == 0, (mask, values_mask)[i % 2])):
                tensors = given if masked is None else {**given, "row_mask": masked}
                run.compare(
                    f"log_softmax {rows} {several} {of_input} {of_weight} {entropy}",
                    lossops.linear_selective_log_softmax,
                    tensors,
                    mesh,
                    placements,
                    expected_placements=of_index,
                    return_entropy=entropy,
                    temperature=0.7,
                )


def dtypes(run: Comparisons) -> None:
    """Other dtypes than float64, autocast, and backward passes that do not keep gradients."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    weight = torch.linspace(0.5, 1.5, 33)

    def autocast(**given: Any) -> Any:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return lossops.linear_cross_entropy(**given)

    def without_kept(**given: Any) -> Any:
        lossops.keep_gradients(False)
        try:
            return lossops.linear_cross_entropy(**given)
        finally:
            lossops.keep_gradients(True)

    float32, bfloat16, float16 = torch.float32, torch.bfloat16, torch.float16
    for call, dtype, weight_dtype, tolerance, options in (
        (lossops.linear_cross_entropy, float32, float32, 1e-5, {}),
        (lossops.linear_cross_entropy, bfloat16, bfloat16, 2e-2, {}),
        (lossops.linear_cross_entropy, float16, float16, 2e-3, {}),
        (lossops.linear_cross_entropy, bfloat16, float32, 2e-2, {"logits_dtype": float32}),
        (autocast, float32, float32, 2e-2, {}),
        (without_kept, float32, float32, 1e-5, {}),
    ):
        tensors = sample(7, 6, dtype=dtype)
        weighted = {**tensors, "weight": weight.to(weight_dtype)}
        for of_input, of_weight in ((shard(0), shard(0)), (replicate, shard(1))):
            placements = {"input": [of_input], "linear_weight": [of_weight], "target": [of_input]}
            placements |= {"linear_bias": [replicate], "weight": [replicate]}
            for given, reduction, more in (
                (tensors, "mean", {}),
                (tensors, "sum", {}),
                (tensors, "none", {}),
                (weighted, "mean", {}),
                (weighted, "mean", {"lse_square_scale": 0.1, "return_lse": True}),
            ):
                run.compare(
                    f"{call.__name__} {dtype} {of_input} {reduction} {sorted(more)}",
                    call,
                    given,
                    mesh,
                    placements,
                    tolerance=tolerance,
                    backward_passes=2,
                    reduction=reduction,
                    **options,
                    **more,
                )
    # Ranks add up numbers that are not rounded yet.
    tensors = {
        "input": torch.ones(512, 1, dtype=bfloat16),
        "linear_weight": torch.zeros(3, 1, dtype=bfloat16),
        "target": torch.zeros(512, dtype=torch.int64),
    }
    placements = {key: [shard(0)] for key in tensors}
    tensors["target"][257:] = -100
    call = lossops.linear_cross_entropy
    for reduction in ("mean", "sum"):
        run.compare("rounded", call, tensors, mesh, placements, tolerance=0, reduction=reduction)


def autograd(run: Comparisons) -> None:
    """Second derivatives, tensors on their way, and which gradients are computed."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    tensors = sample(7, 6)
    placements = {"input": [shard(0)], "linear_weight": [shard(0)], "target": [shard(0)]}
    placements["linear_bias"] = [shard(0)]

    def second(input: Any, linear_weight: Any, **others: Any) -> Any:
        loss = lossops.linear_cross_entropy(input, linear_weight, **others)
        found = torch.autograd.grad(loss, (input, linear_weight), create_graph=True)
        total = sum(x.square().sum() for x in found)
        is_part = isinstance(total, run.dt.DTensor)
        return total.redistribute(placements=[replicate]) if is_part else total

    if torch.__version__ >= (2, 13):  # redistribute of 2.10 cannot be differentiated twice
        run.compare("second derivatives", second, tensors, mesh, placements)

    def later(input: Any, **others: Any) -> Any:
        if isinstance(input, run.dt.DTensor):
            input = input.redistribute(placements=[replicate], async_op=True)
        return lossops.linear_cross_entropy(input, **others)

    for weight in (shard(0), replicate):
        run.compare("on its way", later, tensors, mesh, {**placements, "linear_weight": [weight]})

    from lossops._heads import passes

    computed: list[list[bool]] = []
    whole = passes.forward

    def forward(operands: Any, options: Any, kept: Any, **others: Any) -> Any:
        computed.append(list(kept))
        return whole(operands, options, kept, **others)

    passes.forward = forward
    try:
        for frozen in ("input", "linear_weight", "linear_bias"):
            given = {**tensors, frozen: tensors[frozen].detach()}
            run.compare(f"frozen {frozen}", lossops.linear_cross_entropy, given, mesh, placements)
            wanted = [frozen != key for key in ("input", "linear_weight", "linear_bias")]
            if any(kept != wanted for kept in computed) or len(computed) != 2:
                run.failures.append(f"frozen {frozen}: {computed}")
            computed.clear()
    finally:
        passes.forward = whole
    with torch.no_grad():
        run.compare("no_grad", lossops.linear_cross_entropy, tensors, mesh, placements)


def refusals(run: Comparisons) -> None:
    """Errors by name, on all ranks."""
    dt = run.dt
    shard, replicate = dt.Shard, dt.Replicate()
    mesh, other_mesh = run.meshes[(run.size,)], run.meshes[(run.size, 1)]
    whole = sample(7, 6)
    names = ("input", "linear_weight", "linear_bias", "target")
    parts = {key: run.distributed(whole[key], mesh, [shard(0)]) for key in names}
    ones, twos = torch.ones(7), torch.ones(2)

    def fails(error: type[Exception], words: Sequence[str], **given: Any) -> None:
        try:
            lossops.linear_cross_entropy(**{**parts, **given})
        except Exception as found:
            if type(found) is not error or not all(word in str(found) for word in words):
                run.failures.append(f"{words}: {found!r}")
        else:
            run.failures.append(f"{words}: no error")
        run.count += 1

    def on_mesh(tensor: Tensor, mesh: Any = mesh) -> Any:
        return run.distributed(tensor, mesh, [replicate] * mesh.ndim)

    for key in names[1:]:
        fails(RuntimeError, [f"{key} is a plain tensor", "input is a DTensor"], **{key: whole[key]})
        moved = on_mesh(whole[key], other_mesh)
        fails(RuntimeError, ["one mesh", f"{key} is on"], **{key: moved})
    fails(
        RuntimeError, ["input is a plain", "linear_weight is a DT", "FSDP2"], input=whole["input"]
    )
    fails(RuntimeError, ["token_weight is a plain tensor"], token_weight=ones)
    fails(RuntimeError, ["weight is a plain tensor"], weight=torch.ones(33))
    number = on_mesh(torch.tensor(3))
    fails(
        RuntimeError, ["input is a plain", "num_items_in_batch"], **whole, num_items_in_batch=number
    )
    fails(ValueError, ["num_items_in_batch"], num_items_in_batch=on_mesh(twos))
    fails(ValueError, ["num_items_in_batch"], num_items_in_batch=number, reduction="none")
    fails(RuntimeError, ["token_weight must have"], token_weight=on_mesh(torch.ones(8)))
    fails(RuntimeError, ["token_weight requires"], token_weight=on_mesh(ones).requires_grad_())
    fails(ValueError, ["reduction"], reduction="average")
    fails(ValueError, ["softcap"], softcap=-1.0)
    fails(TypeError, ["target"], target=[1])
    fails(ValueError, ["target"], target=on_mesh(torch.zeros(8, dtype=torch.int64)))
    fails(RuntimeError, ["target"], target=on_mesh(torch.ones(7, dtype=torch.bool)))
    fails(RuntimeError, ["weight"], weight=on_mesh(torch.ones(33).double().requires_grad_()))
    narrow = on_mesh(torch.ones(33))
    fails(RuntimeError, ["weight"], weight=narrow)
    fails(RuntimeError, ["weight"], weight=narrow, lse_square_scale=0.1)
    halves = {key: on_mesh(whole[key].detach().bfloat16()) for key in names[:3]}
    fails(RuntimeError, ["weight"], **halves, weight=narrow)
    log_softmax = lossops.linear_selective_log_softmax
    bare = {key: x for key, x in parts.items() if key != "target"}
    for key, tensors, words in (
        ("index", {"index": torch.zeros(7, dtype=torch.int64)}, "index is a plain tensor"),
        ("index", {"index": on_mesh(torch.zeros(8, dtype=torch.int64))}, "index must have"),
    ):
        try:
            log_softmax(**bare, **tensors)
        except RuntimeError as found:
            if words not in str(found):
                run.failures.append(f"{key}: {found!r}")
        else:
            run.failures.append(f"{key}: no error")
        run.count += 1


def modules(run: Comparisons) -> None:
    """LinearCrossEntropyLoss by distribute_module, parallelize_module and fully_shard; tied."""
    dt = run.dt
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shard, replicate = dt.Shard, dt.Replicate()
    mesh = run.meshes[(run.size,)]

    def check(name: str, found: Any, expected: Any) -> None:
        run.count += 1
        try:
            torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-5, atol=1e-5)
        except AssertionError as error:
            run.failures.append(f"{name}: {error}")

    def head(**options: Any) -> Any:
        torch.manual_seed(0)
        return lossops.LinearCrossEntropyLoss(6, 33, bias=True, **options)

    torch.manual_seed(1)
    x, target = torch.randn(7, 6), torch.randint(33, (7,))
    target[5:] = -100
    weight = torch.linspace(0.5, 1.5, 33)

    def shard_classes(name: str, module: Any, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            part = dt.distribute_tensor(parameter.detach(), mesh, [shard(0)])
            module.register_parameter(key, torch.nn.Parameter(part))

    expected = head(weight=weight)
    expected(x, target).backward()
    for name, make in (
        ("distribute_module", lambda: dt.distribute_module(head(weight=weight), mesh)),
        ("sharded", lambda: dt.distribute_module(head(weight=weight), mesh, shard_classes)),
    ):
        for placement in (shard(0), replicate):
            module = make()
            given = (dt.distribute_tensor(tensor, mesh, [placement]) for tensor in (x, target))
            loss = module(*given)
            loss.backward()
            check(name, loss, expected(x, target).detach())
            check(name, module.linear.weight.grad, expected.linear.weight.grad)
            check(name, module.linear.bias.grad, expected.linear.bias.grad)
    for dims in ((), (2,)):
        torch.manual_seed(0)
        plain = lossops.LinearCrossEntropyLoss(6, 4, out_features=dims, bias=True)
        module = lossops.LinearCrossEntropyLoss(6, 4, out_features=dims, bias=True)
        module.load_state_dict(plain.state_dict())
        labels = torch.randint(4, (7, *dims))
        plain(x, labels).backward()
        parallelize_module(module, mesh, {"linear": ColwiseParallel()})
        loss = module(*(dt.distribute_tensor(tensor, mesh, [replicate]) for tensor in (x, labels)))
        loss.backward()
        check(f"parallelize_module {dims}", loss, plain(x, labels).detach())
        check(f"parallelize_module {dims}", module.linear.weight.grad, plain.linear.weight.grad)
        check(f"parallelize_module {dims}", module.linear.bias.grad, plain.linear.bias.grad)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = torch.nn.Embedding(33, 6)
            self.layer = torch.nn.Linear(6, 6)
            self.loss = lossops.LinearCrossEntropyLoss(6, 33)
            self.loss.linear.weight = self.embedding.weight

        def forward(self, tokens: Any, labels: Any) -> Any:
            return self.loss(self.layer(self.embedding(tokens)), labels)

    tokens = torch.randint(33, (run.size * 4, 5))
    labels = tokens.roll(-1, 1)
    plain = Model()
    plain(tokens, labels).backward()
    # FSDP2: each rank has tokens of its own, and plain tensors inside of forward.
    model = fully_shard(Model(), mesh=mesh)
    part = slice(dist.get_rank() * 4, dist.get_rank() * 4 + 4)
    loss = model(tokens[part], labels[part])
    loss.backward()
    mean = dt.DTensor.from_local(loss.detach() / run.size, mesh, [dt.Partial()])
    check("fully_shard", mean, plain(tokens, labels).detach())
    for (key, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        check(f"fully_shard {key}", found.grad, wanted.grad)
    # Tensor parallel: the embedding's rows are sharded, and its result is a sum over the ranks.
    model = Model()
    plan = {
        "embedding": RowwiseParallel(input_layouts=replicate),
        "layer": ColwiseParallel(output_layouts=replicate, use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    model.loss.linear.weight = model.embedding.weight
    loss = model(tokens, dt.distribute_tensor(labels, mesh, [replicate]))
    loss.backward()
    check("tied", loss, plain(tokens, labels).detach())
    for (key, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        check(f"tied {key}", found.grad, wanted.grad)
    # The embedding's sum goes to the head as it is.
    tied = run.distributed(plain.embedding.weight, mesh, [shard(0)])
    ids, marks = (dt.distribute_tensor(tensor, mesh, [replicate]) for tensor in (tokens, labels))
    lossops.linear_cross_entropy(F.embedding(ids, tied), tied, marks).backward()
    whole = plain.embedding.weight.detach().clone().requires_grad_()
    lossops.linear_cross_entropy(F.embedding(tokens, whole), whole, labels).backward()
    check("tied, a sum", tied.grad, whole.grad)


def compiled(run: Comparisons) -> None:
    """Graphs without breaks."""
    shard, replicate = run.dt.Shard, run.dt.Replicate()
    mesh = run.meshes[(run.size,)]
    tensors = {**sample(7, 6), "weight": torch.linspace(0.5, 1.5, 33, dtype=torch.float64)}
    for of_input, function, more in (
        (shard(0), lossops.linear_cross_entropy, {"lse_square_scale": 0.1, **ALL_RETURNED}),
        (replicate, lossops.linear_cross_entropy, {}),
        (replicate, lossops.linear_selective_log_softmax, {"return_entropy": True}),
    ):
        given = dict(tensors)
        if function is lossops.linear_selective_log_softmax:
            del given["weight"]
            given["index"] = given.pop("target").clamp_min(0)
        placements = {key: [of_input] for key in ("input", "target", "index")}
        placements |= {
            "linear_weight": [shard(0)],
            "linear_bias": [shard(0)],
            "weight": [replicate],
        }
        graph = torch.compile(function, fullgraph=True, backend="aot_eager")

        def call(input: Any, function: Any = function, graph: Any = graph, **others: Any) -> Any:
            chosen = graph if isinstance(input, run.dt.DTensor) else function
            return chosen(input, **others)

        run.compare(f"compiled {of_input} {more}", call, given, mesh, placements, **more)


PARTS = (grid, keywords, numbers, log_softmax, dtypes, autograd, refusals, modules, compiled)


def main() -> None:
    if torch.cuda.is_available():
        torch.set_default_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(torch.get_default_device())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run = Comparisons()
    for part in PARTS:
        before = run.count
        part(run)
        if dist.get_rank() == 0:
            print(f"{part.__name__}: {run.count - before} comparisons", flush=True)
    dist.destroy_process_group()
    if run.failures:
        sys.exit("\n".join([f"{len(run.failures)} failures", *run.failures[:20]]))


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("gpus", [False, pytest.param(True, marks=TWO_GPUS)], ids=["cpu", "gpus"])
def test_two_processes(gpus: bool) -> None:
    """Values and gradients of all parts. No rank waits for another one that fails."""
    printed = run_two_ranks(Path(__file__), timeout=240, gpus=gpus)
    for part in PARTS:
        assert f"{part.__name__}: " in printed


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_selective_log_softmax"])
def test_plain_tensors_import_no_dtensor(name: str) -> None:
    program = (
        "import sys, torch, lossops; "
        f"lossops.{name}(torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.int64)); "
        "assert 'torch.distributed.tensor' not in sys.modules, 'imported'"
    )
    package = str(Path(lossops.__file__).resolve().parents[1])
    paths = filter(None, [package, os.environ.get("PYTHONPATH")])
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


if __name__ == "__main__":
    main()
