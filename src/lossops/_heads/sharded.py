"""Heads of DTensors: each rank calls the function of plain tensors with tokens of its own.

`heads.py` imports this module at the first call with a DTensor. Along a dimension of the mesh the
tokens are either dealt out to the ranks, or all ranks have the same tokens and compute the same.
The weight is whole on each rank. Its gradient is a sum over the ranks that tokens are dealt to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._ops import cross_entropy_by_rows as by_rows
from .._ops.cross_entropy import CLASS_INDICES
from .._ops.cross_entropy_by_rows import CrossEntropyOutput, Keywords
from .._ops.description import HALF_DTYPES
from . import arguments
from .arguments import CallOptions
from .passes import Operands
from .token_passes import NAME as TOKENS_NAME
from .token_passes import TokenOperands

_NAME = "linear_cross_entropy"
_Given = TypeVar("_Given", Operands, TokenOperands)
# The arguments with values for each token. The others are whole on each rank.
_OF_TOKENS = ("input", "target", "index", "row_mask", "token_weight")
# The fields of the output that "mean" and "sum" make scalars.
_SCALARS = ("loss", "z_loss", "token_accuracy")


class _Deal:
    """How the tokens are dealt out, and what brings tensors to a rank's call and back."""

    def __init__(self, input: Any, linear_weight: Any) -> None:
        self.mesh, self.token_dims = input.device_mesh, input.dim() - 1
        self.token_placements = _token_placements(input, linear_weight)
        self.replicated = (Replicate(),) * self.mesh.ndim
        self.is_dealt = self.token_placements != self.replicated
        # The placements of a sum over all tokens while each rank has the sum over its own.
        self.sum_placements = tuple(
            x if x == Replicate() else Partial() for x in self.token_placements
        )

    def local(self, name: str, tensor: Any) -> Any:
        """This rank's part of an argument. What is no DTensor stays as it is."""
        if not isinstance(tensor, DTensor):
            return tensor
        of_tokens = name in _OF_TOKENS
        placed = tensor.redistribute(
            placements=self.token_placements if of_tokens else self.replicated
        )
        # fault: sharded-gradient
        found = placed.to_local(
            grad_placements=self.token_placements if of_tokens else self.sum_placements
        )
        # After redistribute(async_op=True), `found` may still be on its way. clone() waits for it.
        return found.clone() if hasattr(type(found), "__tensor_flatten__") else found

    def operands(self, given: _Given) -> _Given:
        return given._replace(**{name: self.local(name, x) for name, x in given._asdict().items()})

    def total(self, part: Tensor) -> Any:
        """The sum over the ranks' tokens, whole on each rank."""
        found = DTensor.from_local(part, self.mesh, self.sum_placements, run_check=False)
        return found.redistribute(placements=self.replicated)

    def rows(self, part: Tensor, shape: torch.Size, like: Any) -> Any:
        """The values of all rows, placed as `like` in the dimensions that both have.

        Args:
            part: the values of this rank's tokens.
            shape: of the values of all tokens.
            like: the target or the index.
        """
        stride = torch.empty(shape, device="meta").stride()
        found = DTensor.from_local(
            part, self.mesh, self.token_placements, run_check=False, shape=shape, stride=stride
        )
        dims = len(shape) if like.shape == shape else self.token_dims
        return found.redistribute(
            placements=[
                x if type(x) is Shard and x.dim < dims else Replicate() for x in like.placements
            ]
        )


def _token_placements(input: Any, linear_weight: Any) -> tuple[Any, ...]:
    """The placements of the tokens, each Shard or Replicate.

    Tokens that are dealt out stay where they are. Others are dealt out along a dimension of the
    mesh where the weight is sharded, because its ranks then share the work; and where input has to
    move in any case. They are split along the dimension of which a rank has most.
    """
    mesh, dims = input.device_mesh, input.dim() - 1
    found: list[Any] = [
        x if type(x) is Shard and x.dim < dims else Replicate() for x in input.placements
    ]
    lengths = [float(length) for length in input.shape[:dims]]
    for i, placement in enumerate(found):
        if isinstance(placement, Shard):
            lengths[placement.dim] /= mesh.size(i)
    both = zip(input.placements, linear_weight.placements, strict=True)
    for i, (of_input, of_weight) in enumerate(both):
        stays = found[i] == of_input
        if lengths and not (stays and (isinstance(found[i], Shard) or of_weight == Replicate())):
            dim = lengths.index(max(lengths))
            found[i] = Shard(dim)
            lengths[dim] /= mesh.size(i)
    return tuple(found)


def _check(name: str, tensors: dict[str, Any]) -> None:
    """Raises RuntimeError, as torch does, unless all tensors are DTensors on one mesh."""
    first, mesh = next((k, x.device_mesh) for k, x in tensors.items() if isinstance(x, DTensor))
    for key, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            raise RuntimeError(
                f"{name}: {key} is a plain tensor, but {first} is a DTensor; make all tensors "
                "DTensors on one mesh (distribute_tensor), or plain. Under FSDP2 the weight is "
                "plain in the forward of its module: call the head there"
            )
        if tensor.device_mesh != mesh:
            raise RuntimeError(
                f"{name}: all DTensors must be on one mesh, but {first} is on {mesh} and {key} is "
                f"on {tensor.device_mesh}"
            )


def _described(tensor: Any) -> Any:
    """A tensor without memory, of the shape and dtype of the whole tensor."""
    return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def cross_entropy(
    call: Callable[..., Any], given: Operands, keywords: Keywords, others: CallOptions
) -> Any:
    """`linear_cross_entropy` of DTensors. call: that of plain tensors.

    Raises RuntimeError unless all tensors are DTensors on one mesh, and what `call` raises.
    """
    token_weight, num_items = keywords.token_weight, keywords.num_items_in_batch
    arguments.keywords(keywords)
    tensors = arguments.tensors(given)
    if token_weight is not None:
        tensors["token_weight"] = token_weight
    if isinstance(num_items, DTensor):  # a plain tensor is whole on each rank
        tensors["num_items_in_batch"] = num_items
    _check(_NAME, tensors)
    # What does not fit raises on all ranks, before some of them wait for the others.
    input, linear_weight, linear_bias, target, weight = map(_described, given)
    described, shape, ignored = arguments.shaped(
        input, linear_weight, target, linear_bias, weight, others.ignore_index
    )
    no_number = keywords._replace(token_weight=_described(token_weight), num_items_in_batch=None)
    arguments.by_rows(no_number, described, shape)

    deal = _Deal(given.input, given.linear_weight)
    operands = deal.operands(given)
    keywords = keywords._replace(
        token_weight=deal.local("token_weight", token_weight),
        num_items_in_batch=deal.local("num_items_in_batch", num_items),
    )
    is_reduced = others.reduction != "none"
    if is_reduced and deal.is_dealt:
        found, dtype = _of_part(call, deal, operands, keywords, others, ignored)
    else:
        found = _output(call(operands, keywords, others))
        dtype = found.loss.dtype

    def placed(field: str, value: Tensor | None) -> Any:
        if value is None:
            return None
        if is_reduced and field in _SCALARS:
            return deal.total(value).to(torch.float32 if field == "token_accuracy" else dtype)
        return deal.rows(value, shape, given.target)

    output = CrossEntropyOutput(*(placed(*item) for item in found._asdict().items()))
    return output if keywords.returns_more() else output.loss


def _output(found: Any) -> CrossEntropyOutput:
    return found if isinstance(found, CrossEntropyOutput) else CrossEntropyOutput(found)


def _of_part(
    call: Callable[..., Any],
    deal: _Deal,
    operands: Operands,
    keywords: Keywords,
    others: CallOptions,
    ignored: int,
) -> tuple[CrossEntropyOutput, torch.dtype]:
    """What this rank's tokens add to the scalars of a mean or a sum; the dtype of the loss."""
    target, weight = operands.target, operands.weight
    has_classes = target.dtype in CLASS_INDICES  # not probabilities
    compute, _, is_autocast = arguments.dtypes(operands, torch.float32)
    dtype = compute
    if not has_classes:
        for tensor in (target, weight):
            dtype = dtype if tensor is None else torch.promote_types(dtype, tensor.dtype)
    # A loss of a half type is computed in float32 and rounded once, after the sum over ranks. A
    # float32 loss would accept float32 class weights that a half-type loss refuses. Such weights
    # keep the half-type call, so that it raises the usual error.
    fits = weight is None or not has_classes or weight.dtype in (compute, others.logits_dtype)
    is_wide = dtype in HALF_DTYPES and not is_autocast and fits

    is_mean, num_items = others.reduction == "mean", keywords.num_items_in_batch
    predicts, is_rated = keywords.return_predicted_tokens, keywords.return_token_accuracy
    if is_mean or is_rated:
        kept, sums = _counted(operands, keywords, ignored, deal.token_dims)
        # fault: sharded-divisor
        loss_divisor, z_loss_divisor, count = deal.total(sums).to_local().unbind()
    if is_mean and num_items is None:
        num_items = loss_divisor
        if has_classes and weight is not None and keywords.lse_square_scale != 0:
            # The losses and the z-losses have different divisors, because class weights count only
            # for the losses. The call has one divisor: that of the z-losses. So the class weights
            # are multiplied by the quotient of the two, in float32 or wider.
            num_items = z_loss_divisor
            quotient = z_loss_divisor / loss_divisor  # fault: sharded-z-loss
            wide = torch.float32 if is_wide or is_autocast else weight.dtype
            weight = (weight.double() * quotient).to(torch.promote_types(weight.dtype, wide))
    wanted = keywords._replace(
        num_items_in_batch=num_items,
        return_token_accuracy=False,
        return_predicted_tokens=predicts or is_rated,
    )
    others = others._replace(reduction="sum" if is_mean else others.reduction)
    found = _output(call(operands._replace(weight=weight), wanted, others, is_wide=is_wide))
    if is_rated:
        is_right = (found.predicted_tokens == target) & kept
        found = found._replace(token_accuracy=is_right.sum(dtype=torch.float64) / count)
    if not predicts:
        found = found._replace(predicted_tokens=None)
    return found, dtype if is_wide else found.loss.dtype


def _counted(
    operands: Operands, keywords: Keywords, ignored: int, token_dims: int
) -> tuple[Tensor, Tensor]:
    """Which rows are not ignored; and three sums over this rank's tokens, in float64.

    The sums: what rows add to the divisor of a mean's losses and of its z-losses, and their number.
    """
    target = operands.target
    if target.dtype in CLASS_INDICES:
        kept = by_rows.kept_rows(target, ignored)
        share = by_rows.shares(target, kept, operands.weight, torch.float64)
    else:
        shape = (*target.shape[:token_dims], *target.shape[token_dims + 1 :])
        kept = share = target.new_ones((), dtype=torch.bool).expand(shape)
    nothing = target.new_empty(0, dtype=torch.float64)
    rows = by_rows.Rows(nothing, share, kept, nothing, nothing)
    total = by_rows.Reduction(rows, keywords._replace(num_items_in_batch=None), "sum")
    sums = (total(share, share), total(kept, kept), kept.sum(dtype=torch.float64))
    return kept, torch.stack(sums)


def selective_log_softmax(
    call: Callable[..., Any], given: TokenOperands, others: tuple[Any, ...]
) -> Any:
    """`linear_selective_log_softmax` of DTensors. call: that of plain tensors.

    Raises RuntimeError unless all tensors are DTensors on one mesh, and what `call` raises.
    """
    _check(TOKENS_NAME, arguments.tensors(given, TOKENS_NAME))
    arguments.of_tokens(TokenOperands(*map(_described, given)))
    deal, index = _Deal(given.input, given.linear_weight), given.index
    result = call(deal.operands(given), *others)
    found = result if isinstance(result, tuple) else (result,)
    shapes = index.shape, given.input.shape[:-1]
    placed = [deal.rows(x, shape, index) for x, shape in zip(found, shapes, strict=False)]
    return tuple(placed) if len(placed) > 1 else placed[0]
