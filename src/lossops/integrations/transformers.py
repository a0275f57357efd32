"""Causal language models of transformers with lossops' head: hidden states to loss without logits.

    handle = fuse_head(model)   # before or after PEFT, DDP and FSDP2 wrap the model
    trainer.train()
    handle.remove()

A model that is called with labels computes its loss by `linear_cross_entropy`. Its `logits` are
still there: they are computed when something reads them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from .._heads import arguments
from ..heads import linear_cross_entropy
from ._deferred import Call, DeferredLogits, Operands, defer

__all__ = ["FusedHead", "fuse_head"]

_STATE = "_lossops_head"  # the attribute of a model whose head is fused
_HALF = (torch.float16, torch.bfloat16)


# The loss of (logits of a head, labels, or None, and labels already shifted, or None; the further
# arguments of ForCausalLMLoss; keywords of a head).
Loss = Callable[..., Tensor]


@dataclass
class _State:
    """What a fused model knows. A copy of the model has a copy."""

    labels_position: int | None  # of the argument `labels` in a call by position
    keywords: dict[str, Any]  # of linear_cross_entropy
    loss: Loss
    call: Call | None = None  # the call that runs


class FusedHead:
    """The handle of `fuse_head`. `remove()`, or the end of a `with` block, undoes it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: PreTrainedModel | None = model

    def remove(self) -> None:
        """Gives the model its own head and loss again. A second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        delattr(model, _STATE)
        # FSDP2 may have made a subclass of the class. Without a state, forward is the model's own.
        if type(model).__dict__.get("_lossops_fused"):
            model.__class__ = type(model).__bases__[0]

    def __enter__(self) -> FusedHead:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def fuse_head(
    model: torch.nn.Module,
    *,
    accum_dtype: torch.dtype = torch.float32,
    logits_dtype: torch.dtype | None = None,
    max_workspace_bytes: int | None = None,
) -> FusedHead:
    """Makes the head and the loss of a causal language model one `linear_cross_entropy`.

    A call of the model with `labels` then computes no logits, but the loss, and in training its
    gradients, chunk by chunk. The loss is that of transformers' `ForCausalLMLoss` within rounding:
    `num_items_in_batch`, `shift_labels` and `ignore_index` mean the same, and the loss of
    half-precision logits is float32. A scale and a softcap between the head and the loss are
    applied. Calls without labels, `generate` among them, are as before.

    The `logits` of an output have their shape and dtype, and no values. Whatever reads them
    computes them, with the gradient that they would have. They can be read until the weight of the
    head changes.

    Args:
        model: a `PreTrainedModel` with a head, which `get_output_embeddings` returns; or such a
            model inside PEFT's, DDP or another module that has it as `module`. It is changed in
            place: its class becomes a subclass with the same name.
        accum_dtype, logits_dtype, max_workspace_bytes: as of `linear_cross_entropy`.

    Returns:
        A handle whose `remove()` undoes the change. It is also a context manager.

    Raises:
        TypeError: no `PreTrainedModel` is there.
        NotImplementedError: the head is no plain `torch.nn.Linear` (an adapter as LoRA on it,
            quantisation, tensor parallelism), its forward is replaced, it has hooks, or its weight
            is DeepSpeed ZeRO-3's; or the loss is not `ForCausalLMLoss`. A call with labels raises
            it too if this holds by then, or if the model does more with its logits than a scale, a
            softcap and the loss, or calls no loss function. `fuse_head` alone raises it if the
            forward of the model is replaced.
        RuntimeError: the head is fused already.
    """
    model = _unwrapped(model)
    name = _class(model).__name__
    if getattr(model, _STATE, None) is not None:
        raise RuntimeError(f"fuse_head: the head of {name} is fused already")
    if "forward" in vars(model) and not _reaches_fused_forward(model.forward):
        raise NotImplementedError(
            f"fuse_head: the forward of this {name} is replaced, as accelerate's prepare and "
            "device_map, Liger and TRL's trainers do. Call fuse_head before prepare; for a TRL "
            "trainer's model, use lossops.integrations.trl"
        )
    head = _checked_head(model)
    _check_weight(name, head, is_gathered=False)
    _check_loss(name, model.loss_function)
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    position = parameters.index("labels") if "labels" in parameters else None
    keywords: dict[str, Any] = {
        "accum_dtype": accum_dtype,
        "max_workspace_bytes": max_workspace_bytes,
    }
    if logits_dtype is not None:
        arguments.check_logits_dtype(logits_dtype)
        keywords["logits_dtype"] = logits_dtype
    setattr(model, _STATE, _State(position, keywords, loss=causal_lm_loss))
    if not hasattr(type(model), "_lossops_fused"):  # FSDP2's class keeps it after remove()
        model.__class__ = _fused_class(type(model))
    return FusedHead(model)


def _reaches_fused_forward(forward: Any) -> bool:
    """Whether the forward of a model wraps that of a class which was fused then."""
    while forward is not None:
        if hasattr(forward, "_lossops_fused"):
            return True
        forward = getattr(forward, "__func__", None) or getattr(forward, "__wrapped__", None)
    return False


def _unwrapped(model: Any) -> PreTrainedModel:
    found = model
    while not isinstance(found, PreTrainedModel):
        if hasattr(found, "get_base_model"):  # PEFT's models
            found = found.get_base_model()
        elif isinstance(getattr(found, "module", None), torch.nn.Module):
            found = found.module
        else:
            raise TypeError(
                f"fuse_head: model must be a PreTrainedModel, but is {type(model).__name__}"
            )
    return found


# ---------------------------------------------------------------- the class of a fused model


_fused_classes: dict[type, type] = {}  # by the class that they are made of


def _fused_class(base: Any) -> type:
    """A subclass with the same name. A copy of a model, and FSDP2's class, keep what it does."""
    if base in _fused_classes:
        return _fused_classes[base]
    base_forward, base_loss = base.forward, base.loss_function

    @functools.wraps(base_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = getattr(self, _STATE, None)
        if state is None or not _has_labels(state, args, kwargs):
            return base_forward(self, *args, **kwargs)
        return _fused_call(base_forward, self, state, args, kwargs)

    forward._lossops_fused = True  # type: ignore[attr-defined]

    def loss_function(self: Any) -> Any:
        """The model's own loss function, or in a fused call the one that takes deferred logits."""
        own = base_loss.fget(self)
        state = getattr(self, _STATE, None)
        if state is None or state.call is None:
            return own
        return functools.partial(_checked_loss, state, own)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_lossops_fused": True,
        "forward": forward,
        "loss_function": property(loss_function, base_loss.fset),
    }
    made = types.new_class(base.__name__, (base,), {}, lambda body: body.update(namespace))
    return _fused_classes.setdefault(base, made)


def _has_labels(state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    position = state.labels_position
    return position is not None and len(args) > position and args[position] is not None


@torch.compiler.disable(reason="the head of lossops.integrations runs outside of compiled code")
def _fused_call(
    forward: Any, model: Any, state: _State, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The model's own forward, with a head that defers its logits."""
    head = _checked_head(model)
    call = Call(_class(model).__name__)

    def deferred(input: Tensor) -> Tensor:
        _check_weight(call.model, head, is_gathered=True)
        return defer(Operands(input, head.weight, head.bias), call)

    state.call = call
    head.forward = deferred  # so that hooks of FSDP2 run, which gather the weight
    try:
        output = forward(model, *args, **kwargs)
        if not call.has_loss and kwargs.get("labels") is not None:
            raise NotImplementedError(
                f"fuse_head: {call.model} does not fit. It calls no loss function with labels"
            )
        return output
    finally:
        del head.forward
        state.call = None
        call.runs = False


def _checked_loss(
    state: _State, own: Any, logits: Tensor, labels: Tensor | None, vocab_size: int, **more: Any
) -> Tensor:
    """What a model calls in place of its own loss function, with the same arguments."""
    assert state.call is not None
    name = state.call.model
    state.call.has_loss = True
    _check_loss(name, own)
    if not isinstance(logits, DeferredLogits):
        raise NotImplementedError(
            f"fuse_head: {name} does not fit. What reaches its loss function is not the logits of "
            "get_output_embeddings()"
        )
    weight = logits.operands.weight
    if vocab_size != weight.shape[0]:
        raise NotImplementedError(
            f"fuse_head: {name} does not fit. Its loss function is told of {vocab_size} classes, "
            f"and the head has {weight.shape[0]}"
        )
    if weight.untyped_storage().nbytes() == 0:
        raise NotImplementedError(
            f"fuse_head: the weight of {name}'s head is sharded again before the loss. Use "
            "fully_shard(..., reshard_after_forward=False) for the head"
        )
    return state.loss(logits, labels, **more, keywords=state.keywords)


def causal_lm_loss(
    logits: DeferredLogits,
    labels: Tensor | None,
    *,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    keywords: dict[str, Any],
    **_: Any,
) -> Tensor:
    """`ForCausalLMLoss` of deferred logits: its arguments, and its result within rounding."""
    hidden, weight, bias = logits.operands
    if shift_labels is None:  # position i predicts label i + 1
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    with as_float32(hidden, weight):
        loss: Tensor = linear_cross_entropy(
            hidden.flatten(0, -2),
            weight,
            shift_labels.to(hidden.device).reshape(-1),
            linear_bias=bias,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            num_items_in_batch=num_items_in_batch,
            **logits.map()._asdict(),
            **keywords,
        )
    return loss


def as_float32(hidden: Tensor, weight: Tensor) -> torch.autocast:
    """A context in which the loss of half-precision logits is float32, as after `logits.float()`.

    lossops returns a float32 loss under autocast. If autocast is off and hidden and weight have the
    same half type, this turns autocast on with that dtype, so no operand is cast. Otherwise
    autocast stays as it is.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device) or hidden.dtype not in _HALF:
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    else:
        dtype, enabled = hidden.dtype, weight.dtype is hidden.dtype
    return torch.autocast(device, dtype, enabled)


# ---------------------------------------------------------------- what does not fit


def _checked_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The head of the model.

    Raises:
        NotImplementedError: it is more than a plain linear layer.
    """
    head = model.get_output_embeddings()
    name = _class(model).__name__
    kind = _class(head)
    if hasattr(head, "base_layer") or hasattr(head, "modules_to_save"):
        problem = f"it has an adapter ({kind.__name__}), which the fused head would leave out"
    elif kind is not torch.nn.Linear:
        problem = f"it must be a torch.nn.Linear, but is {kind.__module__}.{kind.__qualname__}"
    elif "forward" in vars(head):
        problem = "its forward was replaced, as accelerate's device_map and offloading do"
    elif hooks := _hooks(head):
        problem = f"it has the hook {hooks[0]}, which may need the logits"
    else:
        return head
    raise NotImplementedError(f"fuse_head: the head of {name} does not fit: {problem}")


def _class(module: Any) -> type:
    """The class of the module, ahead of FSDP2, which derives its own from it."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if fsdp is not None and isinstance(module, fsdp):
        return type(module).__bases__[-1]
    return type(module)


def _hooks(head: torch.nn.Module) -> list[str]:
    """The names of the hooks on the module that are not torch.distributed's.

    FSDP2 gathers the weight in a hook ahead of forward. The head runs such hooks.
    """
    found = []
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        for hook in getattr(head, kind, {}).values():
            if not str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
                found.append(getattr(hook, "__qualname__", type(hook).__name__))
    return found


def _check_weight(name: str, head: torch.nn.Linear, *, is_gathered: bool) -> None:
    """Raises NotImplementedError for a weight that is not there as a plain tensor.

    Ahead of a call, the weight of a model in FSDP2 is a DTensor. Within one it is gathered.
    """
    weight = head.weight
    kind = type(weight).__name__
    if hasattr(weight, "ds_id"):
        problem = "is partitioned by DeepSpeed ZeRO-3, whose hooks the fused head does not run"
    elif is_gathered and next(head.parameters(recurse=False), None) is None:
        problem = "is no parameter: nn.DataParallel and FSDP1 are not supported, DDP and FSDP2 are"
    elif not weight.is_floating_point():
        problem = f"is quantised ({weight.dtype})"
    elif type(weight) not in (Tensor, torch.nn.Parameter) and (is_gathered or kind != "DTensor"):
        problem = f"is a {kind}, as in tensor parallelism and quantisation"
    else:
        return
    raise NotImplementedError(f"fuse_head: the weight of {name}'s head {problem}")


def _check_loss(name: str, function: Any) -> None:
    if function is not ForCausalLMLoss:
        raise NotImplementedError(
            f"fuse_head: the loss of {name} must be transformers' ForCausalLMLoss, but is "
            f"{getattr(function, '__name__', function)}"
        )
