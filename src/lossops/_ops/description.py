"""What the other modules must know of a loss: its operators, their arguments, its formulas.

The arguments follow from the schemas that csrc/ defines. A loss has these operators. Only lossops
itself calls those after name_backward:

    name                  the loss: what programs call and what graphs hold
    name_forward          the loss, and terms that its backward pass needs
    name_backward         the gradients whose output_mask is set
    name_value            the loss alone
    name_forward_gradient the loss, the gradient of input for a grad_output of 1 (a kept gradient),
                          and what is needed to compute it again
    name_backward_kept    turns that gradient into the one for another grad_output, in place
    name_backward_inplace writes the gradient over input (cross entropy alone has it)
    name_forward_inplace  the sum of the losses of some rows; writes its gradient, divided by
                          the denominator of a mean, over input (likewise)

Elementwise losses have two more:

    name_forward_gradients       as name_forward_gradient, the gradients whose output_mask is set
    name_backward_kept_gradients as name_backward_kept, the gradients that are given
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import _extension, _privates

_extension.load()

# What this package adds to the operators of csrc/.
library = torch.library.Library("lossops", "IMPL")

# Computes the loss by differentiable functions of torch, from input, target, weight, and the
# options by name.
Reference: TypeAlias = Callable[..., Tensor]
# Computes the derivative of an element's loss with respect to input by torch's pointwise functions,
# from input, target, and the parameters by name.
Derivative: TypeAlias = Callable[..., Tensor]
# A typed tuple of the arguments of an operator, with the names that its schema gives.
Arguments: TypeAlias = Any

OPERANDS = ("input", "target", "weight")
HALF_DTYPES = (torch.float16, torch.bfloat16)


def widened(dtype: torch.dtype, float32_result: bool) -> torch.dtype:
    """The dtype of a result: float32 for half types if float32_result is set, as under autocast."""
    return torch.float32 if float32_result and dtype in HALF_DTYPES else dtype


def _overload(name: str) -> Any:
    return getattr(torch.ops.lossops, name).default


def _typed_tuple(name: str, arguments: dict[str, Any]) -> Any:
    return collections.namedtuple(name, list(arguments), defaults=list(arguments.values()))


class Operators:
    """The operators of one loss, and typed tuples of their arguments made from their schemas."""

    def __init__(self, name: str) -> None:
        self.public = _overload(name)
        self.forward = _overload(f"{name}_forward")
        self.backward = _overload(f"{name}_backward")
        self.value = _privates.without_autograd(library, f"{name}_value")
        self.forward_gradient = _privates.without_autograd(library, f"{name}_forward_gradient")
        self.backward_kept = _privates.without_autograd(library, f"{name}_backward_kept")
        self.forward_gradients: Callable[..., Any] | None = None
        self.backward_kept_gradients: Callable[..., Any] | None = None

        public, _ = _privates.schema_of(self.public)
        forward, (_, *terms) = _privates.schema_of(self.forward)
        value, _ = _privates.schema_of(_overload(f"{name}_value"))
        backward, _ = _privates.schema_of(self.backward)
        kept, _ = _privates.schema_of(_overload(f"{name}_backward_kept"))
        _, (_, _, *saved) = _privates.schema_of(_overload(f"{name}_forward_gradient"))

        # *_forward, *_value and *_forward_gradient take the operands and then the options.
        options = {key: default for key, default in value.items() if key not in OPERANDS}
        assert tuple(value) == tuple(forward) == (*OPERANDS, *options)
        # *_backward_kept takes the same, and between target and weight what *_forward_gradient
        # returned beside the loss and the gradient.
        assert tuple(kept) == (
            "grad_input", "grad_output", "input", "target", *saved, "weight", *options
        )  # fmt: skip
        assert tuple(backward)[:4] == ("grad_output", *OPERANDS)
        if hasattr(torch.ops.lossops, f"{name}_forward_gradients"):
            self._add_gradients(name, tuple(value))

        # The names of what *_forward returns beside the loss.
        self.terms = terms
        self.public_options = [key for key in public if key not in ("input", "target")]
        # The options of a call: reduction and the like, and float32_result.
        # `short` has those of them that are passed to an operator (calling.make_options).
        fields = _typed_tuple(f"{name}_options", options)
        self.Options: Any = type(fields.__name__, (fields,), {"short": ()})
        self.defaults = self.Options()
        # All arguments of *_forward, with the defaults of *_value.
        self.Forward: Any = _typed_tuple(f"{name}_forward_arguments", value)
        # All arguments of *_backward.
        self.Backward: Any = _typed_tuple(f"{name}_backward_arguments", backward)
        # The arguments of *_backward_kept after the two gradients: what KeepingFunction saves, and
        # the options.
        given = {key: default for key, default in kept.items() if not key.startswith("grad_")}
        self.Kept: Any = _typed_tuple(f"{name}_kept_arguments", given)
        # The options of the reference and of *_backward, which do not have float32_result.
        self.formula_options = [key for key in options if key != "float32_result"]
        together = ("grad_output", *OPERANDS, *terms, *options, "output_mask")
        self._order = [together.index(key) for key in backward]

    def _add_gradients(self, name: str, arguments: tuple[str, ...]) -> None:
        """The operators of more gradients than that of input. arguments: of *_value."""
        forward, backward = f"{name}_forward_gradients", f"{name}_backward_kept_gradients"
        taken, (_, *gradients) = _privates.schema_of(_overload(forward))
        kept, _ = _privates.schema_of(_overload(backward))
        assert gradients == ["grad_input", "grad_target"]
        assert tuple(taken) == (*arguments, "output_mask")
        assert tuple(kept) == (*gradients, "grad_output", *arguments)
        self.forward_gradients = _privates.without_autograd(library, forward)
        self.backward_kept_gradients = _privates.without_autograd(library, backward)

    def backward_arguments(
        self,
        grad_output: Tensor,
        operands: Sequence[Tensor | None],
        terms: Sequence[Tensor | None],
        options: Arguments,
        output_mask: Sequence[bool],
    ) -> tuple[Any, ...]:
        """The arguments of *_backward, in the order of its schema. `Backward(*result)` names them.

        terms: what *_forward returned beside the loss.
        """
        together = (grad_output, *operands, *terms, *options, output_mask)
        return tuple([together[position] for position in self._order])

    def options(self, arguments: Arguments) -> Arguments:
        """The `Options` among the arguments, a `Forward` or a `Kept`."""
        return self.Options(*[getattr(arguments, key) for key in self.Options._fields])

    def formula(self, arguments: Arguments) -> dict[str, Any]:
        """The options of a formula by name, from any of the typed tuples."""
        return {key: getattr(arguments, key) for key in self.formula_options}


@dataclass(eq=False)
class Loss:
    """The description of a loss. `losses.py` has the table of them."""

    name: str
    # torch's own loss.
    reference: Reference
    # What *_forward returns, without data, from its arguments. It raises what the kernel raises.
    fake_forward: Callable[[str, Arguments], tuple[Tensor, ...]]
    # What *_forward_gradient returns beside the loss and the gradient, without data, from the
    # results of fake_forward.
    fake_saved: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
    # The gradient of input of a reduction, without data.
    fake_gradient: Callable[[Tensor], Tensor]
    # Whether forward can compute the gradients that are needed, from input, target, weight, options
    # and whether target or weight needs one.
    can_keep: Callable[[Tensor, Tensor, Tensor | None, Arguments, bool], bool]
    # What *_forward returns beside the loss, from what KeepingFunction saved (`Operators.Kept`).
    restored_terms: Callable[[Operators, Arguments], Sequence[Tensor | None]]
    # Raises if target or weight requires a gradient that the loss does not have.
    check_differentiable: Callable[[Tensor, Tensor | None], None] | None = None
    # The derivative in pointwise functions, which Inductor fuses with what follows.
    derivative: Derivative | None = None

    def __post_init__(self) -> None:
        self.ops = Operators(self.name)
