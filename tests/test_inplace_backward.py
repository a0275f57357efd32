"""cross_entropy(inplace_backward=True): the same bits in the logits' memory, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losses import BY_NAME, Sample, Variant
from numerics import DTYPES, layouts_of, same_bits
from torch import Tensor

import lossops

LOSS = BY_NAME["cross_entropy"]
per_variant = pytest.mark.parametrize(
    "variant", LOSS.variants, ids=[variant.name for variant in LOSS.variants]
)


def step(sample: Sample, grad_output: float, *, inplace: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients; the logits are not a leaf."""
    sample = sample.leaves()
    leaf = sample.tensors["input"]
    logits = torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
    ).copy_(leaf)
    logits = logits.requires_grad_() if not inplace else Carried.apply(leaf, logits)
    before, version = logits.data_ptr(), logits._version
    called = sample.with_tensors(input=logits).with_options(inplace_backward=inplace)
    value = called.call(lossops.cross_entropy)
    wanted = [logits, *(sample.tensors[name] for name in sample.differentiable if name != "input")]
    gradients = torch.autograd.grad(value, wanted, torch.full_like(value, grad_output))
    if inplace and logits.numel() > 0:
        assert gradients[0].data_ptr() == before == logits.data_ptr(), sample.name
        assert same_bits(gradients[0], logits.detach()), sample.name
    if inplace:
        assert logits._version == version + 1
    return value.detach(), dict(zip(sample.differentiable, gradients, strict=True))


class Carried(torch.autograd.Function):
    """`logits`, with its own memory and strides, as computed from `leaf`."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def assert_same(sample: Sample, grad_output: float) -> None:
    value, gradients = step(sample, grad_output, inplace=False)
    found_value, found = step(sample, grad_output, inplace=True)
    what = f"{sample.name}, grad_output {grad_output}"
    assert same_bits(found_value, value), what
    for name, gradient in gradients.items():
        assert found[name].dtype == gradient.dtype, f"{what}: {name}"
        assert same_bits(found[name], gradient), f"{what}: {name}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@per_variant
def test_same_bits(variant: Variant, dtype: torch.dtype, device: str) -> None:
    """Ignored rows, weights, smoothing, probabilities, of every length of row."""
    shapes = [shape(size) for shape in LOSS.size_to_shape for size in (1, 33, 1000, 9001)]
    for shape in (*LOSS.small_shapes, *shapes, (3, 70_000), (40, 1025)):
        for reduction in LOSS.reductions:
            sample = variant.sample(shape, device=device, dtype=dtype, reduction=reduction)
            for grad_output in (1.0, -3.0):
                assert_same(sample, grad_output)


@per_variant
def test_layouts(variant: Variant, device: str) -> None:
    """Permuted and padded logits, as long as each element has its own place."""
    for shape in ((33, 19), (3, 9, 7), (2, 3, 5, 4), (3, 2050)):
        sample = variant.sample(shape, device=device, reduction="mean")
        for name, layout in layouts_of(sample.tensors["input"]).items():
            changed = sample.with_tensors(input=layout(sample.tensors["input"])).renamed(name)
            if 0 not in changed.tensors["input"].stride():
                assert_same(changed, 1.0)


def logits_of(
    device: str, shape: tuple[int, ...] = (6, 9), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf, logits computed from it, class indices."""
    leaf = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    return leaf, leaf * 2, target


def overwriting(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return lossops.cross_entropy(logits, target, inplace_backward=True, **options)


def test_linear_layer(device: str) -> None:
    """What lies below the logits gets the gradients that it gets without."""
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 11).to(device)
        data = torch.randn(4, 7, 5, device=device, requires_grad=True)
        target = torch.randint(11, (28,), device=device)
        loss = lossops.CrossEntropyLoss(label_smoothing=0.1, inplace_backward=inplace)
        loss(layer(data).view(-1, 11), target).backward()
        results.append([data.grad, *(parameter.grad for parameter in layer.parameters())])
    for found, expected in zip(*results, strict=True):
        assert found is not None and expected is not None
        assert same_bits(found, expected)


def test_transposed_sequence(device: str) -> None:
    """(batch, time, vocabulary).transpose(1, 2), read and overwritten in place."""
    leaf = torch.randn(3, 5, 1100, device=device, requires_grad=True)
    target = torch.randint(1100, (3, 5), device=device)
    (expected,) = torch.autograd.grad(
        lossops.cross_entropy((leaf * 1).transpose(1, 2), target), leaf
    )
    logits = leaf * 1
    overwriting(logits.transpose(1, 2), target).backward()
    assert leaf.grad is not None
    assert same_bits(leaf.grad, expected)
    assert same_bits(logits.detach(), expected)


def test_loss_scaling_in_half_precision(device: str) -> None:
    leaf = torch.zeros(4096, 33, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64, device=device)
    (32768 * overwriting(leaf * 1, target).float()).backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float16
    exact = 32768 / 4096 / 33
    assert (leaf.grad[:, 1:].double() / exact - 1).abs().max().item() < 2**-10


def test_autocast(device: str) -> None:
    """Half-precision logits keep their dtype, and the loss is float32."""
    leaf, _, target = logits_of(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = leaf @ torch.eye(9, device=device)
        assert logits.dtype == torch.bfloat16
        value = overwriting(logits, target)
    assert value.dtype == torch.float32
    pointer = logits.data_ptr()
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.dtype == torch.bfloat16
    assert gradient.data_ptr() == pointer


def test_without_a_gradient_nothing_is_written(device: str) -> None:
    leaf, logits, target = logits_of(device)
    expected = logits.detach().clone()
    with torch.no_grad():
        overwriting(logits, target)
    overwriting(logits.detach(), target)
    overwriting(logits, target)  # no backward pass
    probabilities = torch.softmax(torch.randn_like(leaf), 1).requires_grad_()
    overwriting(logits.detach(), probabilities).backward()
    assert probabilities.grad is not None
    assert same_bits(logits.detach(), expected)


# --- what cannot work is an error -----------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.square().sum(),
        lambda x: torch.nn.functional.mse_loss(x.view(-1), torch.zeros_like(x).view(-1)),
        lambda x: lossops.mse_loss(x, torch.zeros_like(x)),
        lambda x: lossops.cross_entropy(x, torch.zeros_like(x[:, 0], dtype=torch.long)),
        lambda x: overwriting(x, torch.zeros_like(x[:, 0], dtype=torch.long)),
    ],
    ids=["square", "view", "mse_loss", "cross_entropy", "inplace"],
)
def test_other_use_of_the_logits(other: Callable[[Tensor], Tensor], device: str) -> None:
    """An error about the tensor's version, or the right gradient; never a wrong one."""
    leaf, logits, target = logits_of(device)
    reference = leaf.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(other(reference * 2), reference)
    first, second = overwriting(logits, target), other(logits)
    is_kept = getattr(second.grad_fn, "kept", None) is not None
    first.backward(retain_graph=True)
    if is_kept:  # it was computed while the logits were there
        (found,) = torch.autograd.grad(second, leaf)
        assert same_bits(found, expected)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()

    (lossops.cross_entropy(reference * 2, target) + other(reference * 2)).backward()
    for swapped in (False, True):
        leaf.grad = None
        logits = leaf * 2
        parts = [lambda x: overwriting(x, target), other]
        values = [part(logits) for part in (reversed(parts) if swapped else parts)]
        try:
            (values[0] + values[1]).backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert leaf.grad is not None and reference.grad is not None
            torch.testing.assert_close(leaf.grad, reference.grad)


def test_other_use_that_needs_no_logits(device: str) -> None:
    leaf, logits, target = logits_of(device)
    reference = leaf.detach().clone().requires_grad_()
    (lossops.cross_entropy(reference * 2, target) + (reference * 2).exp().sum()).backward()
    (overwriting(logits, target) + logits.exp().sum()).backward()
    assert leaf.grad is not None and reference.grad is not None
    torch.testing.assert_close(leaf.grad, reference.grad)


PARTS: tuple[tuple[str, Callable[[Tensor], list[Tensor]]], ...] = (
    ("chunk", lambda x: list(x.chunk(2))),
    ("split", lambda x: list(x.split(3))),
    ("slices", lambda x: [x[:3], x[3:]]),
    ("unbind", lambda x: list(x.view(2, 3, 9).unbind())),
)


@pytest.mark.parametrize(("name", "parts"), PARTS, ids=[name for name, _ in PARTS])
def test_parts_of_one_tensor(
    name: str, parts: Callable[[Tensor], list[Tensor]], device: str
) -> None:
    """They share a version: the second loss cannot know that its part was left alone."""
    leaf, logits, target = logits_of(device)
    losses = [overwriting(x, t) for x, t in zip(parts(logits), target.chunk(2), strict=True)]
    with pytest.raises(RuntimeError, match=r"inplace_backward=True .*compute each part's logits"):
        sum(losses).backward()  # type: ignore[union-attr]
    assert leaf.grad is None
    # One of the parts alone is overwritten, and the remedy works.
    _, logits, target = logits_of(device)
    part = parts(logits)[1]
    overwriting(part, target[3:]).backward()
    (expected,) = torch.autograd.grad(
        lossops.cross_entropy(found := (leaf.detach()[:3] * 2).requires_grad_(), target[:3]), found
    )
    separate = leaf.detach().requires_grad_()
    total = sum(
        overwriting(x * 2, t) for x, t in zip(separate.chunk(2), target.chunk(2), strict=True)
    )
    total.backward()  # type: ignore[union-attr]
    assert separate.grad is not None
    assert same_bits(separate.grad[:3], expected * 2)


def test_loss_that_read_the_logits_before(device: str) -> None:
    """A z-loss and the loss: backward passes run in the reverse order of the calls.

    So the one that overwrites is called first. After another, torch refuses; with a reduction that
    leaves a gradient, lossops' own losses have theirs already.
    """

    def z_loss(x: Tensor) -> Tensor:
        return x.logsumexp(1).square().mean()

    leaf, logits, target = logits_of(device)
    reference = leaf.detach().requires_grad_()
    (z_loss(reference * 2) + lossops.cross_entropy(reference * 2, target)).backward()
    first = overwriting(logits, target)
    (z_loss(logits) + first).backward()
    assert leaf.grad is not None and reference.grad is not None
    torch.testing.assert_close(leaf.grad, reference.grad)
    _, logits, target = logits_of(device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (z_loss(logits) + overwriting(logits, target)).backward()
    leaf, logits, target = logits_of(device)
    reference = leaf.detach().requires_grad_()
    zeros = torch.zeros_like(leaf)
    both = lossops.mse_loss(reference * 2, zeros) + lossops.cross_entropy(reference * 2, target)
    both.backward()
    (lossops.mse_loss(logits, zeros) + overwriting(logits, target)).backward()
    assert leaf.grad is not None and reference.grad is not None
    torch.testing.assert_close(leaf.grad, reference.grad)


def test_layer_that_saved_the_logits(device: str) -> None:
    leaf = torch.randn(6, 9, device=device, requires_grad=True)
    target = torch.randint(9, (6,), device=device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwriting(leaf.tanh(), target).backward()
    assert leaf.grad is None


@pytest.mark.parametrize("reduction", LOSS.reductions)
def test_second_backward(reduction: str, device: str) -> None:
    _, logits, target = logits_of(device)
    value = overwriting(logits, target, reduction=reduction).sum()
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward"):
        value.backward()
    _, logits, target = logits_of(device)
    value = overwriting(logits, target, reduction=reduction).sum()
    expected = logits.detach().clone()
    with pytest.raises(RuntimeError, match="inplace_backward"):
        value.backward(create_graph=True)
    assert same_bits(logits.detach(), expected)


def test_changed_logits(device: str) -> None:
    _, logits, target = logits_of(device)
    value = overwriting(logits, target)
    with torch.no_grad():
        logits.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_leaf(device: str) -> None:
    """Its values are its owner's, and .grad would be the same memory."""
    leaf, _, target = logits_of(device)
    for logits in (leaf, torch.nn.Parameter(leaf), leaf.view(6, 9), leaf[:], leaf.t().t()):
        with pytest.raises(ValueError, match=r"input.*leaf"):
            overwriting(logits, target)


def test_overlapping_logits(device: str) -> None:
    leaf = torch.randn(20, device=device, requires_grad=True)
    target = torch.randint(5, (6,), device=device)
    base = leaf * 1
    for logits in (
        base[:5].expand(6, 5),
        base[:6, None].expand(6, 5),
        base.as_strided((6, 5), (2, 1)),
        base.unfold(0, 5, 1)[:6],
    ):
        with pytest.raises(ValueError, match="input"):
            overwriting(logits, target)
        lossops.cross_entropy(logits, target).backward(retain_graph=True)


def test_shared_memory(device: str) -> None:
    _, logits, _ = logits_of(device)
    for target in (logits.detach(), logits.detach().t()[:6, :6].t(), logits):
        with pytest.raises(ValueError, match=r"input.*target"):
            overwriting(logits, target)
    target = torch.randint(9, (6,), device=device)
    with pytest.raises(ValueError, match=r"input.*weight"):
        overwriting(logits, target, weight=logits.detach()[0])
    value = overwriting(logits, target, reduction="none")
    with pytest.raises(ValueError, match=r"input.*grad_output"):
        value.backward(logits.detach()[:, 0])


def test_transforms(device: str) -> None:
    leaf, _, target = logits_of(device)

    def function(x: Tensor) -> Tensor:
        return overwriting(x * 1, target)

    for transformed in (torch.func.grad(function), torch.func.jacrev(function)):
        with pytest.raises(RuntimeError, match="inplace_backward"):
            transformed(leaf)
    with pytest.raises(RuntimeError, match="inplace_backward"):
        torch.func.vmap(function)(torch.stack([leaf, leaf]))
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(function, (leaf,), (leaf,))
    value = function(leaf)
    grad_outputs = torch.ones(2, device=device)
    with pytest.raises(RuntimeError, match="inplace_backward"):
        torch.autograd.grad(value, leaf, grad_outputs, is_grads_batched=True)
    value = function(leaf)
    with torch.autograd.forward_ad.dual_level():
        one = torch.ones_like(value)
        dual = torch.autograd.forward_ad.make_dual(one, one)
        with pytest.raises(NotImplementedError, match="inplace_backward"):
            torch.autograd.grad(value, leaf, dual)


def test_saved_tensor_hooks(device: str) -> None:
    """Nothing is overwritten there, and the gradient is right."""
    leaf, logits, target = logits_of(device)
    (expected,) = torch.autograd.grad(lossops.cross_entropy(leaf * 2, target), leaf)
    with torch.autograd.graph.save_on_cpu():
        value = overwriting(logits, target)
    value.backward()
    assert leaf.grad is not None
    assert same_bits(leaf.grad, expected)
    found = torch.utils.checkpoint.checkpoint(
        lambda x: overwriting(x * 2, target), leaf, use_reentrant=False
    )
    leaf.grad = None
    found.backward()
    assert same_bits(leaf.grad, expected)


def test_other_readers_under_hooks(device: str) -> None:
    """torch would not notice there that logits are overwritten, so they are not."""
    leaf, _, target = logits_of(device)

    def function(x: Tensor, loss: Any) -> Tensor:
        logits = x * 2
        value: Tensor = logits.logsumexp(-1).pow(2).mean() + loss(logits, target)
        return value

    gradients = []
    for loss in (overwriting, lossops.cross_entropy):
        leaf.grad = None
        torch.utils.checkpoint.checkpoint(function, leaf, loss, use_reentrant=False).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_operator_counts_versions(device: str) -> None:
    _, logits, target = logits_of(device)
    logits = logits.detach()
    value, row_stats, mean_terms = torch.ops.lossops.cross_entropy_forward(
        logits, target, None, -100, "mean", 0.0, False
    )
    version = logits._version
    torch.ops.lossops.cross_entropy_backward_inplace(
        logits, torch.ones_like(value), target, None, row_stats, mean_terms, -100, "mean", 0.0
    )
    assert logits._version == version + 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(device: str) -> None:
    """The gradient has memory of its own there, and the logits keep theirs."""
    torch.compiler.reset()
    leaf, _, target = logits_of(device)
    kept = []

    def function(x: Tensor) -> Tensor:
        logits = x * 2
        kept.append(logits)
        return overwriting(logits, target)

    (expected,) = torch.autograd.grad(lossops.cross_entropy(leaf * 2, target), leaf)
    value = torch.compile(function, backend="aot_eager", fullgraph=True)(leaf)
    (found,) = torch.autograd.grad(value, leaf)
    assert same_bits(found, expected)
    assert same_bits(kept[-1].detach(), leaf.detach() * 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_logits_of_a_compiled_model(device: str) -> None:
    torch.compiler.reset()
    target = torch.randint(9, (6,), device=device)
    leaf = torch.randn(6, 9, device=device, requires_grad=True)
    double = torch.compile(lambda x: x * 2, backend="aot_eager")
    overwriting(double(leaf), target).backward()
    (expected,) = torch.autograd.grad(lossops.cross_entropy(leaf * 2, target), leaf)
    assert leaf.grad is not None
    assert same_bits(leaf.grad, expected)
    saves_its_result = torch.compile(lambda x: x.tanh(), backend="aot_eager")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwriting(saves_its_result(leaf), target).backward()


@pytest.mark.cuda
def test_memory_of_a_step() -> None:
    """No second tensor of the logits' size."""
    leaf = torch.randn(4096, 8192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(8192, (4096,), device="cuda")
    for reduction in ("mean", "none"):
        logits = leaf * 2
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = overwriting(logits, target, reduction=reduction)
        grad_output = torch.ones_like(value)
        (gradient,) = torch.autograd.grad(value, logits, grad_output)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= 2**20
        assert gradient.data_ptr() == logits.data_ptr()
