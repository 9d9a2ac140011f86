"""The same scalar loss from torch's linear_cross_entropy, liger-kernel and cut-cross-entropy.

Each runs if it computes the same function, and refuses a setting that it does not honour.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_thd._imports import require
from lightning_thd.loss.prepare import Prepared
from lightning_thd.loss.tiles.logits import Settings
from lightning_thd.loss.tiles.nll import Penalties

_IGNORE = -100

# What each library honours besides the plain loss.
_ABILITIES = {
    "torch": frozenset({"bias"}),  # label_smoothing makes it fall back to whole logits
    "liger": frozenset({"label_smoothing", "bias", "softcap", "z_loss"}),
    "cce": frozenset({"bias", "softcap"}),
}


# Options of cut-cross-entropy that sum gradients in fp32, not in bf16; older versions have only the last.
_WIDE_SUMS = ("accum_e_fp32", "accum_c_fp32", "use_kahan")


def run(backend: str, prepared: Prepared, weights: Tensor, penalties: Penalties, *, alike: bool) -> Tensor:
    """Compute the weighted sum of the cross entropy with another library, without reading the device.

    ``weights`` ``[R]`` hold one value for all rows that count, 0 for the rest; ``alike`` says that all tokens
    were given one weight.
    """
    if backend not in _ABILITIES:
        raise ValueError(f"backend is {backend!r}, wanted 'auto', {', '.join(map(repr, _ABILITIES))}.")
    missing = sorted(_asked(prepared, penalties, alike) - _ABILITIES[backend])
    if missing:
        raise ValueError(f"backend={backend!r} does not honour {', '.join(missing)}. backend='auto' does.")
    settings, targets = prepared.settings, prepared.targets
    hidden, weight, bias, *_ = prepared.operands
    if not targets.numel():
        return hidden.sum() * 0.0 + weight.sum() * 0.0
    if prepared.counts is not None:
        targets = torch.where(prepared.counts, targets, _IGNORE)
    total = _BACKENDS[backend](hidden, weight, bias, targets, settings, penalties)
    largest = weights.abs().argmax(0, keepdim=True)  # one that counts, found without reading the device
    return total.to(settings.accumulator) * weights.gather(0, largest).squeeze(0)


def _asked(prepared: Prepared, penalties: Penalties, alike: bool) -> set[str]:
    settings, (hidden, weight, bias, low_x, _) = prepared.settings, prepared.operands
    logit_map = settings.logit_map
    asked = {
        "bias": bias is not None,
        "low_rank": low_x is not None,
        "softcap": logit_map.softcap is not None,
        "temperature or logit_scale": logit_map.scale / logit_map.temperature != 1.0,
        "valid_vocab_size": settings.columns != weight.shape[0],
        "label_smoothing": penalties.label_smoothing > 0,
        "z_loss": penalties.z_loss > 0,
        "token_weights": not alike,
        "tp_group": settings.tp_group is not None,
        "autocast": settings.compute != hidden.dtype,
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
    function = require("cut_cross_entropy", feature="backend='cce'").linear_cross_entropy
    taken = inspect.signature(function).parameters
    if bias is not None and "bias" not in taken:
        raise ValueError(
            "backend='cce' came with a bias, which the installed cut-cross-entropy does not take "
            "(25.1.1 takes none). Use backend='auto'."
        )
    total: Tensor = function(
        hidden,
        weight,
        targets,
        **({} if bias is None else {"bias": bias}),
        **{name: True for name in _WIDE_SUMS if name in taken},
        ignore_index=_IGNORE,
        softcap=settings.logit_map.softcap,
        reduction="sum",
        filter_eps=None,  # its default drops small gradients: not equal
    )
    return total


_BACKENDS = {"torch": _torch, "liger": _liger, "cce": _cce}
