"""Hidden states x head weight -> summed cross entropy, tile by tile.

T slots in a pack, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_thd.loss.logit_map import LogitMap

_TILE_TOKENS = 512


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    logit_map: LogitMap | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Sum the negative log-likelihood of the targets, fp32 ``[]``.

    Args:
        hidden: ``[T, H]``.
        weight: ``[V, H]``.
        targets: int64 ``[T]``.
        bias: ``[V]``.
        logit_map: what happens between the product and the softmax.
        ignore_index: targets that do not count.
    """
    logit_map = logit_map or LogitMap()

    def tile(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight, bias).float()
        if logit_map.valid_vocab_size is not None:
            logits = logits[:, : logit_map.valid_vocab_size]
        if logit_map.softcap is None:
            logits = logits * (logit_map.scale / logit_map.temperature)
        else:
            logits = torch.tanh(logits * (logit_map.scale / logit_map.softcap)) * logit_map.softcap
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")

    pieces = [
        checkpoint(tile, h, y, use_reentrant=False)
        for h, y in zip(hidden.split(_TILE_TOKENS), targets.split(_TILE_TOKENS), strict=True)
    ]
    return torch.stack(pieces).sum()
