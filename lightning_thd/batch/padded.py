"""A padded batch and its mask -> the fields of a ``THDBatch``. See ``THDBatch.from_padded``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_thd._checks import described, int_tensor
from lightning_thd.batch.collate import cumulative, mean_scale
from lightning_thd.batch.samples import IGNORE_INDEX
from lightning_thd.seqlens import position_ids_from_cu_seqlens
from lightning_thd.stats import SeqStats


def padded_fields(input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
    """Build the fields of ``THDBatch.from_padded``; the arguments are described there."""
    input_ids = int_tensor(input_ids, "input_ids")
    labels = None if labels is None else int_tensor(labels, "labels")
    attention_mask = _tensor(attention_mask)
    given = [t for t in (input_ids, attention_mask, labels) if t is not None]
    shapes = [tuple(t.shape) for t in given]
    if input_ids.ndim != 2 or len(set(shapes)) != 1:
        raise ValueError(
            f"from_padded() got shapes {shapes} for input_ids, attention_mask and labels. "
            "All must be the same [B, N]."
        )
    devices = [str(t.device) for t in given]
    if len(set(devices)) != 1 or devices[0] == "meta":
        raise ValueError(
            f"from_padded() got tensors on {', '.join(devices)}, wanted all on one device that holds values. "
            "Move them there."
        )
    mask = attention_mask.bool()
    lengths = _checked_lengths(input_ids, attention_mask, mask, labels)
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


def _tensor(attention_mask: Any) -> Tensor:
    if isinstance(attention_mask, Tensor):
        return attention_mask
    try:
        return torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(
            f"attention_mask is {described(attention_mask)}; wanted a tensor [B, N] of 0 and 1."
        ) from err


def _checked_lengths(
    input_ids: Tensor, attention_mask: Tensor, mask: Tensor, labels: Tensor | None
) -> list[int]:
    """Return the length of every row, after checking mask, ids and labels; one device read."""
    source = input_ids if labels is None else labels
    faults = [
        ((attention_mask != 0) & (attention_mask != 1)).any(),
        ((input_ids < 0) & mask).any(),
        ((source < 0) & (source != IGNORE_INDEX) & mask).any(),
    ]
    *lengths, masked, ids, targets = torch.cat([mask.sum(1), torch.stack(faults).long()]).tolist()
    if masked:
        raise ValueError(
            "from_padded() got an attention_mask with values other than 0 and 1. Pass 1 where a token is "
            "real, else 0: a mask that is added to scores, or numbers sequences, means something else."
        )
    if ids or targets:
        found = "ids below 0" if ids else "labels below 0 that are not -100"
        raise ValueError(
            f"from_padded() got {found} where the mask is 1. Labels are ids, or -100 where ignored."
        )
    return list(lengths)
