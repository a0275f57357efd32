"""How many rows of logits are computed at a time."""

from __future__ import annotations

import torch

# The least default workspace in bytes. On CUDA, products over a vocabulary of 128256 classes in a
# half type still have 1024 rows. The CPU is as fast with less: float32 2048x512x50257 takes 4.1 s
# with 128 MiB, 4.4 s with 256 MiB. (2 threads, 2026-11)
_LEAST_WORKSPACE = {"cuda": 256 << 20, "cpu": 64 << 20}
# The same where there are no sums of the weight's gradient, whose memory is then free. Forward of
# bf16, of the product alone: 8192x4096x128256 .927 with 256 MiB and .949 with 512, 8192x2304x256000
# .888 and .918. (H200, 2026-11)
_LEAST_WITHOUT_SUMS = {"cuda": 512 << 20, "cpu": 64 << 20}
# Rows that a chunk should have without sums of the weight's gradient. The workspace may grow to
# twice _LEAST_WITHOUT_SUMS for them: with fewer rows and few features, a product has fewer tiles
# than the device has multiprocessors. Step of bf16 8192x2304x256000 with a frozen weight, as a
# fraction of the products alone: .848 with 1024 rows, .924 with 2048. (H200, 2026-11)
_ROWS_WITHOUT_SUMS = {"cuda": 2048}
# Chunks have a multiple of so many rows where they can: whole tiles of matrix products. 1408 rows,
# 5.5 tiles, are slower than 768: forward of bf16 4096x2048x151936 .850 and .862. (H200, 2026-11)
_TILE_ROWS = (256, 128)
# Rows of the logits' buffer are whole vectors of so many bytes. Rows that start elsewhere, as those
# of an odd number of classes, make matrix products several times slower.
VECTOR_BYTES = 16


def padded_classes(classes: int, dtype: torch.dtype) -> int:
    """The row stride of the logits' buffer. dtype: of the factors; float32 logits may be rounded to
    it in their own memory, whose rows then have the same stride."""
    vector = VECTOR_BYTES // dtype.itemsize
    return -(-classes // vector) * vector


def rows_of_chunk(
    *,
    rows: int,
    features: int,
    classes: int,
    dtype: torch.dtype,
    device_type: str,
    adds_up_weight: bool,
    max_workspace_bytes: int | None,
    batch_chunk_size: int | None,
    tensors: int = 1,
    logits_dtype: torch.dtype | None = None,
) -> int:
    """The rows of a chunk of logits.

    max_workspace_bytes limits the chunk's logits. By default all rows are one chunk while their
    logits take no more memory than float32 sums of the weight's gradient would: a single chunk
    needs no sums. Beyond that, a chunk takes as much memory as the gradient of the weight, because
    the conversion of its sums needs that memory anyway; and twice as much if there is another
    tensor as large as its logits.

    Args:
        rows, features, classes: the sizes of the products.
        dtype, device_type: of the factors of the products.
        adds_up_weight: whether the weight's gradient is wanted.
        max_workspace_bytes, batch_chunk_size: what the caller asked for.
        tensors: how many tensors as large as the chunk's logits there are at a time. The
            workspace is all of them.
        logits_dtype: of the logits. None: dtype.
    """
    rows = max(1, rows)
    logit_bytes = tensors * (logits_dtype or dtype).itemsize
    row_bytes = max(1, padded_classes(classes, dtype) * logit_bytes)
    most = rows
    if max_workspace_bytes is not None:
        most = max_workspace_bytes // row_bytes
    elif batch_chunk_size is None:
        weight_bytes = classes * features * dtype.itemsize if adds_up_weight else 0
        if rows * logit_bytes > (4 * features if adds_up_weight else 0):
            if adds_up_weight:
                workspace = max(_LEAST_WORKSPACE.get(device_type, 0), weight_bytes)
            else:
                least = _LEAST_WITHOUT_SUMS.get(device_type, 0)
                wanted = _ROWS_WITHOUT_SUMS.get(device_type, 0) * row_bytes
                workspace = max(least, min(2 * least, wanted))
            # Twice that for the gradient over the logits: with half as many rows, the sums of the
            # weight's gradient would be read and written twice as often.
            most = workspace * min(tensors, 2) // row_bytes
    if batch_chunk_size is not None:
        most = min(most, batch_chunk_size)
        return max(1, min(most, rows))
    return in_whole_tiles(rows, max(1, most))


def in_whole_tiles(rows: int, most: int) -> int:
    """How many of the rows are taken at a time: at most `most`, in whole tiles of products."""
    if most >= rows:
        return rows
    for tile in _TILE_ROWS:
        if most >= tile:
            # As many tiles in each chunk, so that the last one is not small.
            tiles = -(-rows // tile)
            chunks = -(-tiles // (most // tile))
            return -(-tiles // chunks) * tile
    return most
