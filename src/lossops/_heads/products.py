"""Matrix products into memory that exists already, in the dtype of that memory.

A product of half types may be wanted in float32: as a sum over chunks, as logits without rounding,
or for float16, whose range is small. CUDA has kernels for that. Elsewhere parts of the factors are
converted first.

Of half types, cuBLAS is several times slower where a dimension along which a matrix lies in memory
is not whole vectors of 16 bytes, as 50257 classes. Such a product is taken as two: of the whole
vectors, and of the few elements that are left. Milliseconds of bf16 products, H200:

    4096x1024x50257    logits 4.5 to .65, with a bias 5.0 to 1.9, gradient of input 3.3 to .68
    2048x4096x128257   logits 23 to 3.1, with a bias 24 to 6.2, gradient of input 17 to 3.0
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import chunks

# Bytes of a converted part. It is small beside a chunk of logits, and large enough for a product.
_PART_BYTES = 16 << 20

# The most bytes of the float32 rows of a product that is rounded later, and the least
# multiplications of such a product: smaller ones gain less than two more kernels cost.
_WIDE_BYTES = 64 << 20
_LEAST_MULTIPLICATIONS = 1 << 32
# Shorter dimensions are left as they are. Microseconds of one product and of two, H200: logits of
# 2048x1024x1001 59 and 18, 256x256x1001 12 and 8; 8192x4096x101 98 and 88, its gradient of input 95
# and 110; 65536x4096x11 567 and 649.
_LEAST_LENGTH = 512

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
    if matrix.device.type == "cpu" and stride > columns and matrix.numel() > 0:
        numel = matrix.untyped_storage().nbytes() // matrix.element_size()
        ends = rows if offset + rows * stride <= numel else rows - 1
        matrix.as_strided((ends, stride - columns), (stride, 1), offset + columns).zero_()
    return matrix


class _Product(NamedTuple):
    """out = a @ b, or out += a @ b."""

    a: Tensor
    b: Tensor
    out: Tensor
    adds: bool


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b."""
    product = _Product(a, b, out, adds=False)
    if out.element_size() == 2 and _is_large(product) and _odd_dimension(product) == "inner":
        _through_float32(a, b, out)
        return
    for part in _in_whole_vectors(product):
        _take(part)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    for part in _in_whole_vectors(_Product(a, b, out, adds=True)):
        _take(part)


def multiply_and_add(bias: Tensor, a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = bias + a @ b, all of one dtype. bias: a number for each column."""
    product = _Product(a, b, out, adds=False)
    if _is_large(product) and _odd_dimension(product) is not None:
        _through_float32(a, b, out, bias)
    else:
        torch.addmm(bias, a, b, out=out)


def _through_float32(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = a @ b, or bias + a @ b, rounded once to the half type of out; some rows at a time.

    cuBLAS rounds a product to a half type before it adds it to a matrix.
    """
    rows, columns = out.shape
    padded = chunks.padded_classes(columns, a.dtype)
    most = _WIDE_BYTES // max(1, torch.float32.itemsize * padded)
    # Parts begin at whole vectors of a transposed `a`, too.
    most = max(1, _whole(most, a) or most)
    part = chunks.in_whole_tiles(max(1, rows), most)
    wide = out.new_empty((part, padded), dtype=torch.float32)
    for start in range(0, rows, part):
        piece = out[start : start + part]
        found = wide[: piece.size(0), :columns]
        multiply(a[start : start + part], b, found)
        if bias is None:
            piece.copy_(found)
        else:
            torch.add(found, bias, out=piece)


def _odd_dimension(product: _Product) -> Literal["columns", "inner", "rows"] | None:
    """The dimension that is not whole vectors, and makes the product slow, if there is one."""
    a, b, out, _ = product
    if not _needs_vectors(a):
        return None
    strides = [max(matrix.stride()) for matrix in (a, b, out)]
    if any(stride != _whole(stride, a) for stride in strides):
        return None

    def is_odd(length: int) -> bool:
        return length >= _LEAST_LENGTH and length != _whole(length, a)

    # Only dimensions along which a matrix lies in memory matter, as the columns of out.
    if is_odd(out.size(1)):
        return "columns"
    if is_odd(a.size(1)) and (a.stride(1) == 1 or b.stride(0) == 1):
        return "inner"
    return "rows" if is_odd(a.size(0)) and a.stride(0) == 1 else None


def _whole(length: int, factor: Tensor) -> int:
    """As much of the length as is whole vectors."""
    vector = chunks.VECTOR_BYTES // factor.element_size()
    return length // vector * vector


def _is_large(product: _Product) -> bool:
    return product.a.numel() * product.out.size(1) >= _LEAST_MULTIPLICATIONS


def _needs_vectors(factor: Tensor) -> bool:
    return factor.is_cuda and factor.element_size() == 2 and _HAS_OUT_DTYPE


def _in_whole_vectors(product: _Product) -> Iterator[_Product]:
    """The same as one product or two, in their order."""
    a, b, out, adds = product
    dimension = _odd_dimension(product)
    if dimension == "columns":
        whole = _whole(out.size(1), a)
        yield _Product(a, b[:, :whole], out[:, :whole], adds)
        yield _Product(a, b[:, whole:], out[:, whole:], adds)
    elif dimension == "rows":
        whole = _whole(out.size(0), a)
        yield _Product(a[:whole], b, out[:whole], adds)
        yield _Product(a[whole:], b, out[whole:], adds)
    elif dimension == "inner" and out.element_size() > 2:
        whole = _whole(a.size(1), a)
        yield _Product(a[:, whole:], b[whole:], out, adds)
        yield _Product(a[:, :whole], b[:whole], out, adds=True)
    else:
        yield product


def _take(product: _Product) -> None:
    a, b, out, adds = product
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if adds else torch.mm(a, b, out=out)
    elif a.is_cuda and _HAS_OUT_DTYPE:
        if adds:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        _by_parts(a, b, out, add=adds)


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
