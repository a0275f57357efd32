"""Matrix products into memory that exists already, in the dtype of that memory.

A product of half types may be wanted in float32: as a sum over chunks, as logits without rounding,
or for float16, whose range is small. CUDA has kernels for that. Elsewhere parts of the factors are
converted first.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of a converted part. It is small beside a chunk of logits, and large enough for a product.
_PART_BYTES = 16 << 20

# torch.mm and torch.addmm with `out_dtype`, which CUDA alone has.
_HAS_OUT_DTYPE = all(
    "dtype_out" in overloads.overloads() for overloads in (torch.ops.aten.mm, torch.ops.aten.addmm)
)


def with_clear_gaps(matrix: Tensor) -> Tensor:
    """Writes 0 between the rows of a matrix on the CPU, and returns it.

    Products of bfloat16 with AMX (torch 2.13) read what lies behind a row and multiply it by 0,
    which is NaN of an infinity or a NaN.
    """
    rows, columns = matrix.shape
    stride, offset = matrix.stride(0), matrix.storage_offset()
    if matrix.device.type == "cpu" and stride > columns and rows > 0:
        numel = matrix.untyped_storage().nbytes() // matrix.element_size()
        ends = rows if offset + rows * stride <= numel else rows - 1
        matrix.as_strided((ends, stride - columns), (stride, 1), offset + columns).zero_()
    return matrix


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and _HAS_OUT_DTYPE:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _by_parts(a, b, out, add=False)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif a.is_cuda and _HAS_OUT_DTYPE:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        _by_parts(a, b, out, add=True)


def multiply_by_blocks(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b of factors whose common dimension is short, as of logits. No factor is converted
    as a whole."""
    if out.dtype == a.dtype or (a.is_cuda and _HAS_OUT_DTYPE):
        multiply(a, b, out)
        return
    rows, inner = a.shape
    part = max(1, _PART_BYTES // (max(1, inner) * out.element_size()))
    for row in range(0, rows, part):
        of_a = a[row : row + part].to(out.dtype)
        of_out = out[row : row + part]
        for column in range(0, b.size(1), part):
            piece = slice(column, column + part)
            torch.mm(of_a, b[:, piece].to(out.dtype), out=of_out[:, piece])


def _by_parts(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """The product of factors converted to out's dtype: parts of the longer dimension of `a`."""
    rows, inner = a.shape
    part = max(1, _PART_BYTES // (max(1, min(rows, inner)) * out.element_size()))
    if rows >= inner:
        b = b.to(out.dtype)
        for start in range(0, rows, part):
            piece = slice(start, start + part)
            (add_product if add else multiply)(a[piece].to(out.dtype), b, out[piece])
        return
    for start in range(0, inner, part):
        piece = slice(start, start + part)
        converted = a[:, piece].to(out.dtype), b[piece].to(out.dtype)
        (add_product if add or start > 0 else multiply)(*converted, out)
