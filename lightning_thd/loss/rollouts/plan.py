"""Masks of padded rollouts and their pack -> which token every slot holds, and which one it predicts.

B rows of N slots, T slots in the pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd.batch import THDBatch
from lightning_thd.loss.checks import check_tensors


def check_masks(
    input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Check the masks and return attention and response mask as bool ``[B, N]``.

    Raises:
        ValueError: when the shapes differ, nothing is real, or a response token is masked out.
    """
    check_tensors(input_ids=input_ids, attention_mask=attention_mask)
    check_tensors(**{} if response_mask is None else {"response_mask": response_mask})
    given = (input_ids, attention_mask, response_mask)
    shapes = [list(x.shape) for x in given if x is not None]
    if input_ids.ndim != 2 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"from_padded() got shapes {shapes} for ids, attention mask and response mask, wanted one [B, N]."
        )
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids is {input_ids.dtype}, wanted integers. Pass the tokenizer's ids.")
    devices = {x.device for x in given if x is not None}
    if len(devices) > 1 or input_ids.is_meta:
        raise ValueError(
            f"from_padded() got tensors on {', '.join(sorted(map(str, devices)))}, wanted one device that "
            "holds values. Move them there."
        )
    mask = attention_mask.bool()
    response = mask if response_mask is None else response_mask.bool()
    if not bool(mask.any()):
        raise ValueError(f"from_padded() got an attention_mask {shapes[1]} without a real token.")
    if bool((response & ~mask).any()):
        row = int((response & ~mask).any(1).nonzero()[0])
        raise ValueError(
            f"response_mask marks tokens of row {row} that attention_mask hides, wanted a part of it. "
            "Multiply the two."
        )
    return mask, response


def index_plan(mask: Tensor, batch: THDBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Compute for every slot the token it holds, the one it predicts, and its row of the mask ``[B, N]``."""
    nowhere = mask.numel()
    tokens = mask.flatten().nonzero().squeeze(1)
    sequences = len(batch.lengths)
    lengths = torch.tensor(batch.lengths)
    padded = torch.tensor(batch.padded_lengths[:sequences])
    real_starts, slot_starts = lengths.cumsum(0) - lengths, padded.cumsum(0) - padded
    slots = torch.arange(len(tokens)) + torch.repeat_interleave(slot_starts - real_starts, lengths)
    held = torch.full((sum(batch.padded_lengths),), nowhere)
    held[slots] = tokens
    following = torch.cat([tokens[1:], tokens.new_full((1,), nowhere)])
    following[lengths.cumsum(0) - 1] = nowhere
    predicted = torch.full_like(held, nowhere)
    predicted[slots] = following
    slots_of = torch.tensor(batch.padded_lengths)
    rows = torch.tensor([*batch.sequence_ids, *[mask.shape[0]] * (len(slots_of) - sequences)])
    return held, predicted, torch.repeat_interleave(rows, slots_of)
