"""Fused loss functions for PyTorch: kl_div, cross_entropy and mse_loss, on CUDA and on the CPU."""

from . import _extension
from ._version import __version__ as __version__

if not _extension.reporting():  # python -m lossops.info runs also where the library does not load
    _extension.load()

    from ._ops.settings import check_targets, keep_gradients
    from .functional import CrossEntropyOutput, cross_entropy, kl_div, mse_loss
    from .heads import linear_cross_entropy, linear_selective_log_softmax
    from .nn import CrossEntropyLoss, KLDivLoss, LinearCrossEntropyLoss, MSELoss
    from .patching import patch, patch_report, patched, unpatch
    from .tokens import (
        entropy_from_logits,
        selective_log_softmax,
        selective_log_softmax_and_entropy,
    )

    __all__ = [
        "CrossEntropyLoss",
        "CrossEntropyOutput",
        "KLDivLoss",
        "LinearCrossEntropyLoss",
        "MSELoss",
        "check_targets",
        "cross_entropy",
        "entropy_from_logits",
        "keep_gradients",
        "kl_div",
        "linear_cross_entropy",
        "linear_selective_log_softmax",
        "mse_loss",
        "patch",
        "patch_report",
        "patched",
        "selective_log_softmax",
        "selective_log_softmax_and_entropy",
        "unpatch",
    ]
