"""The trainers of TRL with lossops' head: log-probabilities of tokens without logits.

    trainer = SFTTrainer(model, ...)
    add_fused_lm_head(trainer.model, outputs=("log_probs", "entropy", "is_top1"))
    trainer.train()

TRL's trainers give their model a fused head of TRL's own. This one takes its place.
"""

from __future__ import annotations

import functools
import types
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from ..heads import linear_cross_entropy, linear_selective_log_softmax
from ._deferred import DeferredLogits
from .transformers import _STATE, _unwrapped, as_float32, fuse_head

__all__ = ["FusedLMHead", "add_fused_lm_head"]

_OUTPUTS = ("log_probs", "entropy", "is_top1")


class FusedLMHead:
    """The handle of `add_fused_lm_head`. `remove()`, or the end of a `with` block, undoes it."""

    def __init__(self, model: Any, temperature: float, outputs: tuple[str, ...]) -> None:
        self._model = model
        before = vars(model).get("forward")
        self._before = before if _is_trls(before) else None
        if self._before is not None:
            del model.forward
        try:
            self._head = fuse_head(model)
        except Exception:
            self._restore_forward(model)
            raise
        forward = _forward(temperature, outputs, getattr(self._before, "__func__", None))
        forward = functools.wraps(type(model).forward)(forward)
        self._forward = types.MethodType(forward, model)
        model.forward = self._forward

    def remove(self) -> None:
        """Gives the model the forward that it had. A second call does nothing."""
        model, self._model = self._model, None
        if model is None:
            return
        # accelerate may have wrapped it since. What is wrapped does then what it did before.
        if vars(model).get("forward") == self._forward:
            del model.forward
            self._restore_forward(model)
        self._head.remove()

    def _restore_forward(self, model: Any) -> None:
        if self._before is not None:
            model.forward = self._before

    def __enter__(self) -> FusedLMHead:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def add_fused_lm_head(
    model: torch.nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> FusedLMHead:
    """Replaces the fused head of a TRL trainer's model by that of lossops.

    `model(..., labels=labels, fused_lm_head=True)` then returns TRL's `FusedCausalLMOutput` with
    values of each token. `linear_selective_log_softmax` computes them, or `linear_cross_entropy` if
    outputs has "is_top1". The scale and the softcap that the model applies are included. Calls
    without `fused_lm_head` behave as after `fuse_head`.

    Args:
        model: as of `fuse_head`. If a trainer of TRL's has it, its head is replaced; call this
            between making the trainer and training.
        temperature: divides the logits, as the trainer does: `args.temperature` of GRPO and RLOO.
        cast_lm_head_to_fp32: must be False.
        outputs: what the trainer reads, of "log_probs", "entropy", "is_top1". The first is always
            there. SFT reads all three, GRPO and RLOO the first two.

    Returns:
        A handle whose `remove()` undoes the change. It is also a context manager.

    Raises:
        NotImplementedError: another output, such as "mean_logits" of DPO and KTO, or
            cast_lm_head_to_fp32; or as `fuse_head`.
        RuntimeError: the head is fused already, or accelerate has prepared the model.
        TypeError: as `fuse_head`.
    """
    model = _unwrapped(model)
    if unknown := [name for name in outputs if name not in _OUTPUTS]:
        raise NotImplementedError(
            f"add_fused_lm_head: outputs may be {_OUTPUTS}, but has {', '.join(unknown)}"
        )
    if cast_lm_head_to_fp32:
        raise NotImplementedError("add_fused_lm_head: cast_lm_head_to_fp32 must be False")
    if hasattr(model, "_original_forward"):
        raise RuntimeError(
            "add_fused_lm_head: accelerate has prepared the model. Call this before training"
        )
    return FusedLMHead(model, temperature, outputs)


def _is_trls(forward: Any) -> bool:
    """Whether TRL's add_fused_lm_head made it."""
    made_in = getattr(getattr(forward, "__func__", None), "__globals__", {}).get("__name__")
    return bool(made_in == FusedCausalLMOutput.__module__)


def _forward(temperature: float, outputs: tuple[str, ...], before: Any) -> Any:
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        own = type(self).forward
        state = getattr(self, _STATE, None)
        if state is None and before is not None:  # removed
            return before(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        if state is None or not fused_lm_head:
            return own(self, *args, **kwargs)
        kwargs["use_cache"] = False
        shifted = kwargs.get("shift_labels")
        if shifted is not None and kwargs.get("labels") is None:
            kwargs["labels"] = shifted  # without labels, models call no loss function
        if getattr(self.config.get_text_config(), "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        found: dict[str, Tensor | None] = {}
        loss = functools.partial(_token_loss, found, temperature, outputs)
        setattr(self, _STATE, replace(state, loss=loss))
        try:
            output = own(self, *args, **kwargs)
        finally:
            setattr(self, _STATE, state)
        if not found:
            raise ValueError("add_fused_lm_head: fused_lm_head=True needs labels")
        return FusedCausalLMOutput(
            loss=output.loss, aux_loss=getattr(output, "aux_loss", None), **found
        )

    return forward


def _token_loss(
    found: dict[str, Tensor | None],
    temperature: float,
    outputs: tuple[str, ...],
    logits: DeferredLogits,
    labels: Tensor | None,
    *,
    num_items_in_batch: Tensor | float | None = None,
    shift_labels: Tensor | None = None,
    keywords: dict[str, Any],
    **_: Any,
) -> Tensor:
    """The loss of TRL's head. Puts the values of tokens, of the labels' shape, into found."""
    hidden, weight, bias = logits.operands
    if shift_labels is None:  # position i predicts label i + 1; the last one predicts none
        assert labels is not None
        hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
    target = shift_labels.to(hidden.device)
    mask = target != -100
    keywords = {**logits.map()._asdict(), **keywords, "temperature": temperature}
    entropy = is_top1 = None
    if "is_top1" in outputs:
        with as_float32(hidden, weight):
            rows = linear_cross_entropy(
                hidden,
                weight,
                target,
                linear_bias=bias,
                reduction="none",
                return_entropy="entropy" in outputs,
                return_predicted_tokens=True,
                **keywords,
            )
        log_probs, entropy = -rows.loss, rows.entropy
        is_top1 = (rows.predicted_tokens == target) & mask
    else:
        values = linear_selective_log_softmax(
            hidden,
            weight,
            target.clamp(min=0),
            linear_bias=bias,
            row_mask=mask,
            return_entropy="entropy" in outputs,
            **keywords,
        )
        log_probs, entropy = values if isinstance(values, tuple) else (values, None)
    found.update(log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=mask)
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return -log_probs.sum() / count
