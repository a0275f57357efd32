"""Heads: a linear layer and a loss of its results as one function, without all logits."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from ._heads import arguments, autograd, operators, token_operators
from ._heads.passes import Operands, Options
from ._heads.token_passes import TokenOperands, TokenOptions
from ._ops import cross_entropy_by_rows, logit_map, settings
from ._ops.cross_entropy import raise_first_invalid
from ._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from ._ops.losses import CROSS_ENTROPY
from ._ops.tokens import renamed
from .functional import Reduction, _index, _number

__all__ = ["linear_cross_entropy", "linear_selective_log_softmax"]

_is_compiling = torch.compiler.is_compiling
_row_options = CROSS_ENTROPY.options


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: Reduction = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    options: Any = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    lse_square_scale: float = ...,
    token_weight: Tensor | None = ...,
    num_items_in_batch: float | Tensor | None = ...,
    return_lse: Literal[False] = ...,
    return_entropy: Literal[False] = ...,
    return_z_loss: Literal[False] = ...,
    return_token_accuracy: Literal[False] = ...,
    return_predicted_tokens: Literal[False] = ...,
    accum_dtype: torch.dtype = ...,
    logits_dtype: torch.dtype | None = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    weight: Tensor | None = ...,
    reduction: Reduction = ...,
    ignore_index: int | None = ...,
    label_smoothing: float = ...,
    options: Any = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    lse_square_scale: float = ...,
    token_weight: Tensor | None = ...,
    num_items_in_batch: float | Tensor | None = ...,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_z_loss: bool = ...,
    return_token_accuracy: bool = ...,
    return_predicted_tokens: bool = ...,
    accum_dtype: torch.dtype = ...,
    logits_dtype: torch.dtype | None = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor | CrossEntropyOutput: ...


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    lse_square_scale: float = 0.0,
    token_weight: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype | None = None,
    max_workspace_bytes: int | None = None,
) -> Tensor | CrossEntropyOutput:
    """Cross entropy of `linear(input, linear_weight, linear_bias)` and targets.

    As `torch.nn.functional.linear_cross_entropy` of torch 2.13. The logits are computed in chunks
    of rows, each in the memory of the chunk before. The forward pass of a mean or a sum computes
    the gradients too, chunk by chunk, and keeps them for the first backward pass.

    The tensors may be DTensors, all on one mesh. Each rank then computes the rows of its own tokens
    with the whole weight, and the results are DTensors: those of the tokens of all ranks.

    Args:
        input: hidden states of shape (H,) or (..., H). Those of ignored rows must be finite too:
            the gradient of linear_weight sums over all rows, and 0 times NaN is NaN.
        linear_weight: (C, H) for C classes, or (C, d1, ..., dK, H) with an input (N, H).
        target: class indices of shape (), (...) or (N, d1, ..., dK) and dtype int64, int32 or
            uint8; or class probabilities of shape (C,), (..., C) or (N, C, d1, ..., dK) in a
            floating dtype.
        linear_bias: of shape (C,) or (C, d1, ..., dK).
        weight: factor of each class, of shape (C,). With class indices, of the logits' dtype or the
            operands'.
        reduction: "none", "mean" or "sum", as of `cross_entropy`.
        ignore_index: rows with this class index have no loss and no gradient. None is -100. It is
            for class indices only.
        label_smoothing: share of the target that is spread evenly over all classes, in [0, 1].
        options: None or torch's `LinearCrossEntropyOptions`. An explicit `batch_chunk_size` limits
            the rows of a chunk, and `acc_dtype` stands for accum_dtype. The rest is chosen here.
        return_lse, return_entropy, return_z_loss, return_token_accuracy, return_predicted_tokens:
            as of `cross_entropy`.
        logit_scale, softcap, temperature, lse_square_scale, token_weight, num_items_in_batch:
            as of `cross_entropy`. token_weight has the target's shape, for probabilities without
            classes. With a map of the logits, a z-loss, lse or entropies beside label smoothing or
            probabilities, the workspace also holds the mapped logits and more, in float32.
        accum_dtype: dtype in which the gradient of linear_weight is added up if there are several
            chunks, float32 or the dtype of linear_weight. Sums have at least the precision of the
            products' dtype. float16 gradients of a mean or a sum are always added up in float32.
        logits_dtype: dtype of the logits. None: that of the products, which is the operands' or
            autocast's. float32, for products of a half type: the logits are not rounded to the
            half type. The gradient over them is, before the two products with it, as autograd of
            `linear(...).float()` has it. The loss and the gradients have the dtypes that they have
            with None. The logits take twice the memory.
        max_workspace_bytes: limit of the memory of a chunk's logits; a chunk has at least one row.
            None: all rows are one chunk while their logits take no more memory than a float32
            tensor of linear_weight's shape; beyond that, a chunk takes as much memory as the
            gradient of linear_weight, or 256 MiB (64 MiB on the CPU) if that is more. 512 MiB (64
            MiB) if linear_weight needs no gradient. Twice as much if the workspace holds more than
            logits.

    Returns:
        The loss: a scalar, or for "none" of the target's shape, without classes. Differentiable
        with respect to input, linear_weight and linear_bias, and for probabilities to target and
        weight. If a `return_*` is set, a `CrossEntropyOutput` as of `cross_entropy`. Its lse and
        entropy are differentiable: a backward pass through one of them computes the logits again.
        Of DTensors, scalars are replicated, and values of rows are placed as target.

    Raises:
        IndexError: a class index is out of range, on the CPU (on CUDA see `check_targets`).
        NotImplementedError: an operand is not floating point, or is a tensor of a subclass that
            wraps tensors, other than DTensor.
        ValueError: unknown reduction, batch sizes that differ, label_smoothing negative or NaN,
            accum_dtype neither float32 nor linear_weight's dtype, or other than that of options,
            logits_dtype neither the dtype of the products nor, for half types, float32, or
            max_workspace_bytes not positive; a keyword from logit_scale on is not as
            `cross_entropy` takes it.
        RuntimeError: shapes, dtypes or devices that do not fit, label_smoothing above 1,
            ignore_index with probabilities, or weight requires grad with indices; token_weight or
            num_items_in_batch requires grad; plain tensors beside DTensors (num_items_in_batch may
            be one), or DTensors on several meshes.
        TypeError: an argument is of another type.
    """
    if not _is_compiling():  # what it traces has these types, or a symbol of them
        label_smoothing = _number(label_smoothing)
        ignore_index = (
            None if ignore_index is None else _index(ignore_index, "linear_cross_entropy")
        )
    given = Operands(input, linear_weight, linear_bias, target, weight)
    keywords = Keywords(
        logit_scale,
        softcap,
        temperature,
        lse_square_scale,
        token_weight,
        num_items_in_batch,
        return_lse,
        return_entropy,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )
    others = arguments.CallOptions(
        reduction,
        ignore_index,
        label_smoothing,
        options,
        accum_dtype,
        logits_dtype,
        max_workspace_bytes,
    )
    if arguments.has_dtensor(*given, token_weight, num_items_in_batch):
        from ._heads import sharded

        return sharded.cross_entropy(_of_plain_tensors, given, keywords, others)
    return _of_plain_tensors(given, keywords, others)


def _of_plain_tensors(
    given: Operands, all_keywords: Keywords, others: arguments.CallOptions, *, is_wide: bool = False
) -> Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` of plain tensors. is_wide: the loss is float32, as under autocast."""
    input, linear_weight, linear_bias, target, weight = given
    reduction = others.reduction
    arguments.check_plain(given)
    keywords = arguments.keywords(all_keywords)
    arguments.check_logits_dtype(others.logits_dtype)
    accum_dtype, workspace, chunk_rows = arguments.sizes(
        others.options, others.accum_dtype, others.max_workspace_bytes
    )
    operands, shape, ignored = arguments.shaped(
        input, linear_weight, target, linear_bias, weight, others.ignore_index
    )
    compute_dtype, accum_dtype, is_autocast = arguments.dtypes(operands, accum_dtype)
    logits_dtype = arguments.logits_dtype(others.logits_dtype, compute_dtype)
    # What cross entropy's operators take. operators.ROW_OPTIONS has their types.
    row: dict[str, Any] = {
        "ignore_index": ignored,
        "reduction": reduction,
        "label_smoothing": others.label_smoothing,
        "float32_result": is_autocast or is_wide,
    }
    sizes = (compute_dtype, logits_dtype, accum_dtype, workspace, chunk_rows)
    if keywords is not None:
        keywords = arguments.by_rows(keywords, operands, shape)
    if _is_compiling():
        if keywords is not None:
            made = Options(CROSS_ENTROPY.loss.ops.Options(**row), *sizes)
            return _shaped(autograd.call_with_keywords(operands, made, keywords), shape, keywords)
        kept = autograd.kept_gradients(operands, reduction)
        with_stats = autograd.needs_checked(operands)
        loss: Tensor = operators.forward_op(*operands, *row.values(), *sizes, kept, with_stats)[0]
        return loss.reshape(shape) if reduction == "none" else loss
    try:
        made = Options(_row_options(**row), *sizes)
        is_checked = settings.targets_are_checked and not target.is_floating_point()
        if is_checked and target.is_cuda and not torch.cuda.is_current_stream_capturing():
            raise_first_invalid(
                "linear_cross_entropy", operands.target, linear_weight.shape[0], ignored
            )
        if keywords is not None:
            cross_entropy_by_rows.check(keywords, reduction, operands.target.is_floating_point())
            return _shaped(autograd.call_with_keywords(operands, made, keywords), shape, keywords)
        loss = autograd.call(operands, made)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        bare = Options(CROSS_ENTROPY.loss.ops.Options(**row), *sizes)
        raise arguments.as_torch_raises(error, operands, compute_dtype, bare) from None
    return loss.reshape(shape) if reduction == "none" else loss


def _shaped(
    output: CrossEntropyOutput, shape: torch.Size, keywords: Keywords
) -> Tensor | CrossEntropyOutput:
    """What a call returns: values of rows in the rows' shape."""
    each = (x if x is None or x.dim() == 0 else x.reshape(shape) for x in output)
    found = CrossEntropyOutput(*each)
    return found if keywords.returns_more() else found.loss


@overload
def linear_selective_log_softmax(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    temperature: float = ...,
    row_mask: Tensor | None = ...,
    return_entropy: Literal[False] = ...,
    logit_scale: float = ...,
    softcap: float | None = ...,
    accum_dtype: torch.dtype = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor: ...


@overload
def linear_selective_log_softmax(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    *,
    linear_bias: Tensor | None = ...,
    temperature: float = ...,
    row_mask: Tensor | None = ...,
    return_entropy: bool,
    logit_scale: float = ...,
    softcap: float | None = ...,
    accum_dtype: torch.dtype = ...,
    max_workspace_bytes: int | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def linear_selective_log_softmax(
    input: Tensor,
    linear_weight: Tensor,
    index: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    return_entropy: bool = False,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    accum_dtype: torch.dtype = torch.float32,
    max_workspace_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`selective_log_softmax` of `linear(input, linear_weight, linear_bias)`.

    The logits are computed in chunks of rows, and again in the backward pass: a step has four
    matrix products. The tensors may be DTensors, as those of `linear_cross_entropy`.

    Args:
        input: hidden states of shape (..., H).
        linear_weight: (C, H) for C classes.
        index: shape (...), or (..., K) for K classes a row; int64, int32 or uint8, in [0, C).
        linear_bias: of shape (C,).
        temperature, logit_scale, softcap: map the logits, as of `selective_log_softmax`.
        row_mask: shape (...), any real dtype. The values and the gradients of a row with 0 are
            exactly 0, and its logits do not count. With K classes a row it may also have index's
            shape: it then masks single values.
        return_entropy: whether the entropies are returned too. One backward pass computes the
            gradient of both.
        accum_dtype, max_workspace_bytes: as of `linear_cross_entropy`.

    Returns:
        The log-probabilities, of index's shape; float64 for float64 logits, else float32. With
        return_entropy also the entropies in nats, of shape (...). Differentiable with respect to
        input, linear_weight and linear_bias. Of DTensors, both are placed as index.

    Raises:
        IndexError: an index is out of range, on the CPU. On CUDA the value and the row's gradient
            are NaN.
        NotImplementedError: an operand is not floating point, or is a tensor of a subclass that
            wraps tensors, other than DTensor.
        RuntimeError: shapes, dtypes or devices that do not fit; plain tensors beside DTensors, or
            DTensors on several meshes.
        TypeError: an argument is of another type.
        ValueError: temperature, softcap, logit_scale, accum_dtype or max_workspace_bytes is not as
            above.
    """
    given = TokenOperands(input, linear_weight, linear_bias, index, row_mask)
    others = (temperature, logit_scale, softcap, return_entropy, accum_dtype, max_workspace_bytes)
    if arguments.has_dtensor(*given):
        from ._heads import sharded

        return sharded.selective_log_softmax(_log_softmax_of_plain_tensors, given, others)
    return _log_softmax_of_plain_tensors(given, *others)


def _log_softmax_of_plain_tensors(
    given: TokenOperands,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    return_entropy: bool,
    accum_dtype: torch.dtype,
    max_workspace_bytes: int | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`linear_selective_log_softmax` of plain tensors."""
    name = "linear_selective_log_softmax"
    arguments.check_plain(given, name)
    if type(return_entropy) is not bool:
        raise TypeError(f"{name}: return_entropy must be a bool, but is {return_entropy!r}")
    checked_map = logit_map.checked(name, temperature, logit_scale, softcap)
    accum_dtype, workspace, _ = arguments.sizes(None, accum_dtype, max_workspace_bytes, name)
    operands, mask = arguments.of_tokens(given)
    compute_dtype, accum_dtype, _ = arguments.dtypes(operands, accum_dtype, name)
    options = TokenOptions(*checked_map, return_entropy, compute_dtype, accum_dtype, workspace)
    try:
        log_probs, entropy = token_operators.call(operands, options)
    except (IndexError, RuntimeError) as error:
        raise renamed(name, error) from None
    log_probs = log_probs.reshape(given.index.shape)
    if mask is not None:
        log_probs = log_probs.masked_fill(mask, 0.0)
    return (log_probs, entropy.reshape(given.input.shape[:-1])) if return_entropy else log_probs
