"""What graphs for Inductor hold instead of an operator, where Inductor's own code is better.

Inductor cannot look into an operator: what goes in and what comes out are tensors in memory. Its
own code takes a cast, a scale or a padding into the same pass, and writes over what nothing else
reads. So four things are not left to operators alone:

    a cast ahead of logits      the operator reads the half type, and returns float32
    something else ahead        torch's operations, where the operand would not be in memory else
    cast logits in padded rows  torch's operations
    the gradient of logits      torch's operations, with the statistics of the forward pass

Other compilers get the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._privates import base_of
from .description import HALF_DTYPES, Loss, widened

_FLOATS = (torch.float32, *HALF_DTYPES)
# What autograd calls a cast.
_CAST = "ToCopyBackward0"
# And views, and operations whose results Inductor has in memory whatever follows.
_VIEWS = (
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
)
_PRODUCTS = (
    "AddmmBackward0",
    "BaddbmmBackward0",
    "BmmBackward0",
    "ConvolutionBackward0",
    "MmBackward0",
)
_LOG_SOFTMAX = "LogSoftmaxBackward0"
# Terms of the sum in _in_memory(). They must be more than 8: Inductor writes a shorter sum out as
# additions (unroll_reductions_threshold).
_TERMS = 32


def call(loss: Loss, input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
    """The loss, as a graph for Inductor should hold it."""
    if loss.derivative is not None:
        if _has_formula(input, target, weight, options):
            return _by_formula(loss, input, target, options)
        return _by_operator(loss, input, target, weight, options)
    before_cast = _before_cast(input)
    # Where the logits are padded, one of the two casts would be left, as a copy.
    if before_cast is None:
        is_in_memory = _is_in_memory(input.grad_fn)
    else:
        is_in_memory = not _may_be_padded(input)
    if not is_in_memory and _is_of_rows(input, target, options):
        return _by_rows(input, target, weight, options)
    if before_cast is None:
        return _by_operator(loss, input, target, weight, options)
    options = options._replace(float32_result=True)
    if before_cast.shape == input.shape or target.shape != input.shape[:1]:
        return _by_operator(loss, before_cast.view(input.shape), target, weight, options)
    # Without .view(-1, classes): Inductor copies what it passes on as a view of a view.
    target = target.reshape(before_cast.shape[:-1])
    found = _by_operator(loss, before_cast.movedim(-1, 1), target, weight, options)
    return found.flatten() if options.reduction == "none" else found


def gradients(loss: Loss, arguments: tuple[Any, ...]) -> list[Tensor] | None:
    """What *_backward returns, by torch's operations; None where the operator is called.

    It is rounded as the kernels round it.
    """
    given = loss.ops.Backward(*arguments)
    gradient: Tensor | None = None
    if list(given.output_mask) == [True, False, False]:
        if loss.derivative is not None:
            gradient = _gradient_of_elements(loss, given)
        elif _is_of_rows(given.input, given.target, given):
            gradient = _gradient_of_logits(given)
    return None if gradient is None else [gradient]


def _is_in_memory(node: Any) -> bool:
    """Whether Inductor writes what a node of autograd computes to memory, whatever follows.

    The operator then is the faster one.
    """
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or not node.next_functions:  # an input of the graph
        return True
    return node.name() in _PRODUCTS


def _by_operator(
    loss: Loss, input: Tensor, target: Tensor, weight: Tensor | None, options: Any
) -> Tensor:
    found: Tensor = loss.ops.forward(input, target, weight, *options)[0]
    return found


# ---------------------------------------------------------------- elementwise losses


def _has_formula(input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> bool:
    return (
        weight is None
        and input.shape == target.shape
        and input.dtype in _FLOATS
        and target.dtype in _FLOATS
        # torch's derivative of input.log() is NaN at 0, also where target is 0.
        and getattr(options, "log_input", True)
        and not (_is_in_memory(input.grad_fn) or _is_kept(input))
    )


def _is_kept(tensor: Tensor) -> bool:
    """Whether tensor is a log_softmax that is kept for its backward pass.

    In float32 Inductor would rather compute it again from half-type logits.
    """
    node = tensor.grad_fn
    return node is not None and node.name() == _LOG_SOFTMAX and tensor.dtype in HALF_DTYPES


def _by_formula(loss: Loss, input: Tensor, target: Tensor, options: Any) -> Tensor:
    operands = (x.float() if x.dtype in HALF_DTYPES else x for x in (input, target))
    value = loss.reference(*operands, None, **loss.ops.formula(options))
    expected = loss.fake_forward(loss.name, loss.ops.Forward(input, target, None, *options))[0]
    return value.to(expected.dtype)


def _gradient_of_elements(loss: Loss, given: Any) -> Tensor | None:
    """Where the loss is an operator's.

    The derivative of half types is float32, larger than the operands, so torch.compile leaves all
    of it to the backward pass. That of float32 operands would be computed in a pass of its own
    beside the forward pass, and kept.
    """
    if (
        given.input.dtype not in HALF_DTYPES
        or given.target.dtype not in HALF_DTYPES
        or given.input.shape != given.target.shape
        or given.weight is not None
    ):
        return None
    assert loss.derivative is not None
    parameters = loss.ops.formula(given)
    reduction = parameters.pop("reduction")
    scale = given.grad_output.float()
    if reduction == "mean":
        scale = scale / given.input.numel()
    elif reduction == "batchmean" and given.input.dim() > 0:
        scale = scale / given.input.size(0)
    derivative = loss.derivative(given.input.float(), given.target.float(), **parameters)
    return (derivative * scale).to(given.input.dtype)


# ---------------------------------------------------------------- a cast ahead of the logits


def _before_cast(tensor: Tensor) -> Tensor | None:
    """The half-type values that were cast to float32 to give tensor, or what it is a view of.

    None where autograd shows no such cast of something in memory, and for other views than
    .view(-1, classes).
    """
    # A change in place counts up the version of a tensor and of its views.
    cast = base_of(tensor)
    node = cast.grad_fn
    if node is None or node.name() != _CAST or tensor.dtype != torch.float32:
        return None
    if cast._version > 0:  # fault: cast-version
        return None
    is_flattened = (
        tensor.dim() == 2
        and cast.dim() > 2
        and cast.size(-1) == tensor.size(-1)
        and cast.is_contiguous()
        and tensor.is_contiguous()
        and cast.numel() == tensor.numel()
    )
    if not (tensor is cast or is_flattened) or not _is_in_memory(node.next_functions[0][0]):
        return None
    # A gradient has the dtype of what it belongs to. Nothing uses this one, so no graph keeps it.
    source = GradientEdge(*node.next_functions[0])
    (gradient,) = torch.autograd.grad(cast, source, torch.empty_like(cast), retain_graph=True)
    # Right behind the cast, so that Inductor leaves out both.
    return cast.to(gradient.dtype) if gradient.dtype in HALF_DTYPES else None


def _may_be_padded(logits: Tensor) -> bool:
    """Whether Inductor may pad the matrix product that the logits are. On the CPU it does not."""
    return logits.is_cuda and logits.size(-1) % 8 != 0


def _may_have_plain_rows(logits: Tensor) -> bool:
    """Whether a kernel may have written row_stats of plain rows (plain_rows.cuh)."""
    return logits.is_cuda and logits.dtype in HALF_DTYPES


# ---------------------------------------------------------------- rows of logits


def _is_of_rows(input: Tensor, target: Tensor, options: Any) -> bool:
    """Whether the loss is of logits (N, C, ...) and class indices (N, ...), without smoothing."""
    return (
        input.dim() >= 2
        and input.dtype in _FLOATS
        and not target.is_floating_point()
        and target.shape == input.shape[:1] + input.shape[2:]
        and options.label_smoothing == 0
    )


def _classes_last(logits: Tensor) -> Tensor:
    """Logits (N, C, ...) as (N, ..., C). For (N, C) with no view, which Inductor would heed."""
    return logits if logits.dim() == 2 else logits.movedim(1, -1)


class _Rows:
    """The class indices of rows, of shape (..., 1), beside logits (..., C)."""

    def __init__(self, target: Tensor, num_classes: int, ignore_index: int) -> None:
        target = target.to(torch.int64).unsqueeze(-1)
        self.is_ignored = target == ignore_index
        self.is_class = (target >= 0) & (target < num_classes)
        self.index = target.where(self.is_class, 0)
        # In 32 bits, which take half the instructions of a comparison.
        classes = torch.arange(num_classes, dtype=torch.int32, device=target.device)
        self.is_index = classes == self.index.to(torch.int32)

    def of_valid(self, values: Tensor) -> Tensor:
        """The values (..., 1); 0 in ignored rows, NaN where the class index is out of range."""
        return torch.where(self.is_ignored, 0.0, values.where(self.is_class, torch.nan))

    def gradient(
        self, logits: Tensor, row_max: Tensor, rest: Tensor, grad: Tensor, factor: Tensor
    ) -> Tensor:
        """grad * factor * (softmax - one_hot) in float32. rest: the sum of exp(x - max) less 1.

        What a row is multiplied by is summed over its classes, of which all but one add 0. Inductor
        then makes one kernel that has a row at a time, and reads what belongs to a row once. Its
        kernel of torch's loss has such a sum too. A kernel of elements would divide by the number
        of classes to find its row.

        `grad` is no part of the sum. Inductor keeps what reads five tensors in one place, and makes
        both operands of the next products from that. Else it writes them here, beside each other,
        one of them transposed.
        """
        factor = self.of_valid(factor / (rest + 1))
        factor = torch.where(self.is_index, factor, 0.0).sum(-1, keepdim=True)
        exponential = (logits.float() - row_max).exp()
        # First 1 and then rest: if the class is right and certain, exponential is 1, and rest is
        # tiny. Exponential is used once, because Inductor on the CPU stores what is used twice.
        one = torch.where(self.is_index, 1.0, 0.0)
        rest_of_one = torch.where(self.is_index, rest, 0.0)  # fault: rest-of-one
        gradient = (exponential - one - rest_of_one) * factor * grad
        return torch.where(self.is_ignored, 0.0, gradient)


def _in_memory(values: Tensor) -> Tensor:
    """Returns values (..., 1) in a form that Inductor stores in memory.

    Otherwise Inductor computes them again for each logit. If a gradient has more than 30
    operations, it also stores some in a float32 tensor as large as the logits. The form is a sum of
    many terms, because Inductor does not compute a sum again.
    """
    is_first = torch.arange(_TERMS, device=values.device) == 0
    return torch.where(is_first, values, 0.0).sum(-1, keepdim=True)


def _gradient_of_logits(given: Any) -> Tensor:
    """The gradient of cross entropy, from row_stats: max and rest of each row."""
    rows = _Rows(given.target, given.input.size(1), given.ignore_index)
    row_max, rest = (stats.view(given.target.shape).unsqueeze(-1) for stats in given.row_stats)
    if _may_have_plain_rows(given.input):
        # Plain rows (plain_rows.cuh) are relative to the logit at the class index, which stands in
        # the place of the maximum, and their rest is negated.
        is_plain = (rest < 0) & (row_max.abs() < torch.inf)  # fault: rest-of-plain-rows
        rest = _in_memory(torch.where(is_plain, -rest, rest))
    grad = given.grad_output.float()
    if given.reduction == "none":
        grad = grad.unsqueeze(-1)
    factor = torch.ones_like(rest)
    if given.reduction == "mean":
        factor = factor / given.mean_terms[0].float()
    if given.weight is not None:
        factor = factor * given.weight.float()[rows.index]
    gradient = rows.gradient(_classes_last(given.input), row_max, rest, grad, factor)
    # Rounded before the classes are moved back: else it is laid out in the order after it.
    gradient = gradient.to(given.input.dtype)
    return gradient if gradient.dim() == 2 else gradient.movedim(-1, 1)


class _LossOfRows(torch.autograd.Function):
    """Losses (...) of float32 logits (..., C) by torch's operations."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        rows = _Rows(target, logits.size(-1), ignore_index)
        at_index = torch.where(rows.is_index, logits, 0.0).sum(-1, keepdim=True)
        # The sum of the others by themselves: beside the 1 of a certain class, a tiny one is lost.
        others = torch.where(rows.is_index, -torch.inf, logits)
        others_max = others.amax(-1, keepdim=True)
        others_sum = (others - others_max).exp().sum(-1, keepdim=True)
        row_max = others_max.maximum(at_index)
        is_alone = others_max == -torch.inf
        others_sum = torch.where(is_alone, 0.0, others_sum * (others_max - row_max).exp())
        rest = others_sum + ((at_index - row_max).exp() - 1)
        ctx.save_for_backward(logits, target, row_max, rest)
        ctx.ignore_index = ignore_index
        return rows.of_valid(rest.log1p() + (row_max - at_index)).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, target, row_max, rest = ctx.saved_tensors
        rows = _Rows(target, logits.size(-1), ctx.ignore_index)
        gradient = rows.gradient(logits, row_max, rest, grad.unsqueeze(-1), torch.ones_like(rest))
        return gradient, None, None


def _by_rows(input: Tensor, target: Tensor, weight: Tensor | None, options: Any) -> Tensor:
    logits = _classes_last(input).float()
    losses: Tensor = _LossOfRows.apply(logits, target, options.ignore_index)
    rows = _Rows(target, input.size(1), options.ignore_index)
    weights = (~rows.is_ignored).float().squeeze(-1)
    if weight is not None:
        of_index = weight.float()[rows.index.squeeze(-1)]
        losses = losses * of_index
        weights = torch.where(rows.is_class.squeeze(-1), weights * of_index, 0.0)
    if options.reduction == "sum":
        losses = losses.sum()
    elif options.reduction == "mean":
        losses = losses.sum() / weights.sum()
    return losses.to(widened(input.dtype, options.float32_result))
