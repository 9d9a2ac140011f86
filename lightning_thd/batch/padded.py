"""A padded batch and its mask -> the fields of a ``THDBatch``. See ``THDBatch.from_padded``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd.batch.collate import cumulative, mean_scale
from lightning_thd.batch.samples import IGNORE_INDEX
from lightning_thd.seqlens import position_ids_from_cu_seqlens
from lightning_thd.stats import SeqStats


def padded_fields(input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None) -> dict[str, Any]:
    """Build the fields of ``THDBatch.from_padded``; the arguments are described there."""
    shapes = [tuple(t.shape) for t in (input_ids, attention_mask, labels) if t is not None]
    if input_ids.ndim != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"from_padded() got shapes {shapes} for input_ids, attention_mask and labels. "
            "All must be the same [B, N]."
        )
    mask = attention_mask.bool()
    lengths: list[int] = mask.sum(1).tolist()
    slots = sum(lengths)
    if slots == 0:
        raise ValueError(
            f"from_padded() got an attention_mask of shape {shapes[1]} without a real token. "
            "Pass 1 where a token is real."
        )
    cu_seqlens = cumulative(lengths).to(input_ids.device)
    ids = input_ids[mask].long()
    source = ids if labels is None else labels[mask].long()
    targets = torch.cat([source[1:], source.new_full((1,), IGNORE_INDEX)])
    # The slot before every boundary ends a sequence; rows of length 0 name a neighbour's end once more.
    targets[cu_seqlens[1:].long() - 1] = IGNORE_INDEX
    counted = torch.cat([targets.new_zeros(1), (targets != IGNORE_INDEX).cumsum(0)])
    own: list[int] = counted[cu_seqlens.long()].diff().tolist()
    loss_tokens = sum(own)
    return {
        "input_ids": ids,
        "targets": targets,
        "position_ids": position_ids_from_cu_seqlens(cu_seqlens, slots),
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens,
        "lengths": lengths,
        "padded_lengths": lengths,
        "stats": SeqStats.from_lengths(lengths, slots=slots, loss_tokens=loss_tokens),
        "sequence_ids": range(len(lengths)),
        "loss_scale": mean_scale(loss_tokens),
        "sequence_scale": mean_scale(sum(n > 0 for n in own)),
        "sequence_shares": [mean_scale(n) for n in own],
    }
