"""Elements further than 2^31 from the start of a tensor, in little memory."""

from __future__ import annotations

import pytest
import torch
from losses import VARIANT_IDS, VARIANTS, Loss, Sample, Variant, evaluate
from numerics import same_bits
from torch import Tensor


def spread_out(tensor: Tensor, buffer: Tensor) -> Tensor:
    """`tensor` in `buffer`, with strides so large that its last element is 2^31 away."""
    step = (buffer.numel() - 1) // sum(size - 1 for size in tensor.shape)
    # powers of 7, so that no two of few elements meet
    strides = [step - 7**i for i in range(tensor.dim())]
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


def halves_apart(tensor: Tensor, buffer: Tensor, dim: int) -> Tensor:
    """`tensor` in `buffer`, dense but for one dimension of 2, a step along which is 2^31."""
    strides = list(tensor.stride())
    strides[dim] = 2**31 + 64
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


def two_buffers(device: str) -> list[Tensor]:
    try:
        # Not written to, so on a CPU only the pages that hold an element come to exist.
        return [torch.empty(2**31 + 2**20, dtype=torch.float16, device=device) for _ in "ab"]
    except RuntimeError as error:  # out of memory is one
        pytest.skip(f"no 4 GiB of address space: {str(error)[:80]}")


def assert_result_is_that_of(sample: Sample, loss: Loss, far: dict[str, Tensor]) -> None:
    expected = evaluate(loss.function, sample)
    result = evaluate(loss.function, sample.with_tensors(**far))
    assert same_bits(result.value.contiguous(), expected.value), sample.name
    for name, gradient in expected.gradients.items():
        assert same_bits(result.gradients[name].contiguous(), gradient), sample.name


@pytest.mark.gpu_memory(10)
@pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
def test_strides_beyond_2_31(loss: Loss, variant: Variant, device: str) -> None:
    buffers = two_buffers(device)
    for shape in ((3, 4), (2, 3, 2)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=torch.float16, reduction=reduction)
            floating = [k for k, v in sample.tensors.items() if v.is_floating_point()]
            far = {
                name: spread_out(sample.tensors[name], buffer)
                for name, buffer in zip(floating, buffers, strict=False)
            }
            reach = max(
                sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
                for t in far.values()
            )
            assert reach > 2**31 - 2**20
            assert_result_is_that_of(sample, loss, far)


@pytest.mark.gpu_memory(10)
@pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
def test_one_stride_beyond_2_31(loss: Loss, variant: Variant, device: str) -> None:
    """Of rows and of classes: where a run of elements begins, not only where one of them is."""
    buffers = two_buffers(device)
    for shape, dim in (((2, 5), 0), ((5, 2), 1), ((2, 3, 4), 0), ((4, 2, 3), 1), ((4, 3, 2), 2)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=torch.float16, reduction=reduction)
            whole = [k for k, v in sample.tensors.items() if v.shape == shape]
            far = {
                name: halves_apart(sample.tensors[name], buffer, dim)
                for name, buffer in zip(whole, buffers, strict=False)
            }
            assert_result_is_that_of(sample, loss, far)
