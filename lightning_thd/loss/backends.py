"""The same scalar loss from torch's linear_cross_entropy, liger-kernel and cut-cross-entropy.

Each runs where it computes the same function, and refuses, naming the setting, where it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd._imports import require
from lightning_thd.loss.prepare import Settings
from lightning_thd.loss.tiles.nll import Penalties

_IGNORE = -100
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

# What each can do besides the plain loss.
_ABILITIES = {
    "torch": frozenset({"bias"}),  # label_smoothing makes it fall back to whole logits
    "liger": frozenset({"label_smoothing", "bias", "softcap", "z_loss"}),
    "cce": frozenset({"bias", "softcap"}),
}


def run(
    backend: str,
    operands: Operands,
    targets: Tensor,
    weights: Tensor,
    settings: Settings,
    penalties: Penalties,
) -> Tensor:
    """Compute ``sum(weights * loss)`` with another library.

    Args:
        backend: "torch", "liger" or "cce".
        operands: hidden ``[R, H]``, weight, bias, and the two parts of a LoRA.
        targets: int64 ``[R]``.
        weights: ``[R]``; one value for all rows that count, 0 for the rest.
        settings: of the call.
        penalties: label smoothing and z-loss.

    Raises:
        ValueError: for an unknown backend, or one that cannot honour a setting.
        ModuleNotFoundError: when its package is absent.
    """
    if backend not in _ABILITIES:
        raise ValueError(f"backend is {backend!r}, wanted 'auto', {', '.join(map(repr, _ABILITIES))}.")
    asked = _asked(operands, weights, settings, penalties)
    missing = sorted(asked - _ABILITIES[backend])
    if missing:
        raise ValueError(f"backend={backend!r} does not honour {', '.join(missing)}. backend='auto' does.")
    factor = weights.amax() if weights.numel() else weights.sum()
    counted = torch.where(weights != 0, targets, _IGNORE)
    hidden, weight, bias, *_ = operands
    if not counted.numel():
        return hidden.sum() * 0.0 + weight.sum() * 0.0
    total = _BACKENDS[backend](hidden, weight, bias, counted, settings, penalties)
    return total.to(settings.accumulator) * factor


def _asked(operands: Operands, weights: Tensor, settings: Settings, penalties: Penalties) -> set[str]:
    logit_map = settings.logit_map
    uniform = weights[weights != 0]
    asked = {
        "bias": operands[2] is not None,
        "low_rank": operands[3] is not None,
        "softcap": logit_map.softcap is not None,
        "temperature or logit_scale": logit_map.scale / logit_map.temperature != 1.0,
        "valid_vocab_size": settings.columns != operands[1].shape[0],
        "label_smoothing": penalties.label_smoothing > 0,
        "z_loss": penalties.z_loss > 0,
        "token_weights": bool((uniform != uniform[:1]).any()),
        "tp_group": settings.tp_group is not None,
        "autocast": settings.compute != operands[0].dtype,
    }
    return {name for name, wanted in asked.items() if wanted}


def _torch(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, _: Settings, __: Penalties
) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise ValueError(
            f"backend='torch' needs torch >= 2.13 for F.linear_cross_entropy, this is {torch.__version__}. "
            "Use backend='auto'."
        )
    total: Tensor = F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        linear_bias=bias,
        reduction="sum",
        ignore_index=_IGNORE,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return total


def _liger(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: Settings,
    penalties: Penalties,
) -> Tensor:
    module = require("liger_kernel.transformers.fused_linear_cross_entropy", feature="backend='liger'")
    loss = module.LigerFusedLinearCrossEntropyLoss(
        ignore_index=_IGNORE,
        lse_square_scale=penalties.z_loss,
        label_smoothing=penalties.label_smoothing,
        reduction="sum",
        softcap=settings.logit_map.softcap,
        accum_dtype=torch.float32,
    )
    total: Tensor = loss(weight, hidden, targets, bias)
    return total


def _cce(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: Settings, _: Penalties
) -> Tensor:
    module = require("cut_cross_entropy", feature="backend='cce'")
    total: Tensor = module.linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        ignore_index=_IGNORE,
        softcap=settings.logit_map.softcap,
        reduction="sum",
        filter_eps=None,  # its default drops small gradients: not equal
    )
    return total


_BACKENDS = {"torch": _torch, "liger": _liger, "cce": _cce}
