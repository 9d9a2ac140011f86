"""Targets of the next token -> targets of the tokens after it, for multi-token prediction on packs.

T slots. Module k of a multi-token model predicts the token k places after the next one, of the same sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_thd._checks import whole_number
from lightning_thd.batch import THDBatch
from lightning_thd.loss.checks import check_tensors
from lightning_thd.parallel.shard import THDShard, gather_pack
from lightning_thd.seqlens import seq_idx_from_cu_seqlens


def mtp_targets(targets: Tensor, cu_seqlens: Tensor, depth: int, *, ignore_index: int = -100) -> Tensor:
    """Shift targets left by ``depth`` inside every sequence.

    Args:
        targets: int64 ``[T]``, already the next token of the same sequence.
        cu_seqlens: int32 ``[S + 1]``, the sequences' offsets in memory; last entry T.
        depth: 0 for the targets themselves, 1 for the token after the next.
        ignore_index: fills the last ``depth`` slots of every sequence.

    Returns:
        int64 ``[T]``. ``([6, 7, -100, 9, -100], [0, 3, 5], 1)`` becomes ``[7, -100, -100, -100, -100]``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for a negative depth, or targets that are no row of integers.
    """
    check_tensors(targets=targets, cu_seqlens=cu_seqlens)
    depth = whole_number(depth, "depth", advice="0 is the next token, 1 the one after it.")
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets is {targets.dtype} {list(targets.shape)}, wanted int64 [T]. Pass batch.targets."
        )
    total = targets.shape[0]
    if depth == 0 or total == 0:
        return targets
    sequence = seq_idx_from_cu_seqlens(cu_seqlens, total).flatten()
    shifted = torch.full_like(targets, ignore_index)
    if depth < total:
        same = sequence[depth:] == sequence[:-depth]
        shifted[:-depth] = torch.where(same, targets[depth:], ignore_index)
    return shifted


def targets_after(batch: THDBatch, depth: int) -> Tensor:
    """Shift a batch's targets by ``depth``; those of a shard over the whole pack, by one collective."""
    if depth == 0 or not isinstance(batch, THDShard):
        return mtp_targets(batch.targets, batch.cu_seqlens_padded, depth)
    layout = batch.layout
    whole = mtp_targets(gather_pack(batch.targets, layout), layout.pack_offsets, depth)
    return whole.index_select(0, layout.own)
