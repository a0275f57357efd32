"""Elements further than 2^31 from the start of a tensor, in little memory."""

from __future__ import annotations

import pytest
import torch
from losses import VARIANT_IDS, VARIANTS, Loss, Variant, evaluate
from numerics import same_bits
from torch import Tensor


def spread_out(tensor: Tensor, buffer: Tensor) -> Tensor:
    """`tensor` in `buffer`, with strides so large that its last element is 2^31 away."""
    step = (buffer.numel() - 1) // sum(size - 1 for size in tensor.shape)
    # powers of 7, so that no two of few elements meet
    strides = [step - 7**i for i in range(tensor.dim())]
    return buffer.as_strided(tensor.shape, strides).copy_(tensor)


@pytest.mark.gpu_memory(10)
@pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
def test_strides_beyond_2_31(loss: Loss, variant: Variant, device: str) -> None:
    try:
        # Not written to, so on a CPU only the pages that hold an element come to exist.
        buffers = [torch.empty(2**31 + 2**20, dtype=torch.float16, device=device) for _ in "ab"]
    except RuntimeError as error:  # out of memory is one
        pytest.skip(f"no 4 GiB of address space: {str(error)[:80]}")
    for shape in ((3, 4), (2, 3, 2)):
        for reduction in loss.reductions:
            sample = variant.sample(shape, device=device, dtype=torch.float16, reduction=reduction)
            expected = evaluate(loss.function, sample)
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
            result = evaluate(loss.function, sample.with_tensors(**far))
            assert same_bits(result.value.contiguous(), expected.value), sample.name
            for name, gradient in expected.gradients.items():
                assert same_bits(result.gradients[name].contiguous(), gradient), sample.name
