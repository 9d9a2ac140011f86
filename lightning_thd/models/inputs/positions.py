"""position_ids alone, as transformers' flattening collator gives them -> the pack they describe."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_thd.models.pack import Pack
from lightning_thd.seqlens import cu_seqlens_from_lengths


def pack_from_positions(position_ids: Tensor | None) -> Pack | None:
    """Build a pack from positions that restart at 0, ``[B, T]`` or (M-RoPE) ``[3, B, T]``; reads the device.

    transformers' rule: a new sequence begins where a position is not its predecessor's plus one.

    Returns:
        The pack, or None where every row is one sequence. ``[[0, 1, 0, 1, 2]]`` is lengths 2 and 3.

    Raises:
        ValueError: when positions restart but do not say where exactly (M-RoPE, several rows).
    """
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    if torch.compiler.is_compiling():
        # Looking would break the graph, and a pack taken for one sequence would leak.
        torch._assert_async(
            (position_ids.diff(dim=-1) >= 0).all()
            if position_ids.ndim == 3
            else _counts_up(position_ids).all(),
            "positions restart inside a row, but a compiled model cannot see where: pass cu_seq_lens_q/k and "
            "max_length_q/k, as THDBatch.hf_kwargs() does.",
        )
        return None
    if position_ids.ndim == 3:
        _refuse_restarts(position_ids)
        return None
    continues = _counts_up(position_ids).tolist()
    if all(all(row) for row in continues):
        return None
    if len(continues) != 1:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} restart inside a row. Packs go one row at a "
            "time: lay all sequences end to end in one row, or pass rows that are one sequence each."
        )
    return _pack_from_row(continues[0], position_ids.device)


def refuse_plain_positions(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse images for a model with M-RoPE when the pack's positions count like text."""
    if kwargs.get("pixel_values") is None and kwargs.get("pixel_values_videos") is None:
        return
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim == 3:
        return
    owners = (model, getattr(model, "model", None))
    if any(hasattr(owner, "get_rope_index") for owner in owners):
        raise ValueError(
            f"{type(model).__name__} got images in a pack and position_ids {tuple(position_ids.shape)} that "
            "count like text. A model with M-RoPE needs position_ids [3, 1, T]: give every sample its own "
            "[3, n], model.model.get_rope_index(...) of that sample alone, and THDBatch.collate lays them "
            "end to end."
        )


def _counts_up(position_ids: Tensor) -> Tensor:
    return position_ids.diff(dim=-1) == 1


def _pack_from_row(continues: list[bool], device: torch.device) -> Pack:
    starts = [0, *(i + 1 for i, goes_on in enumerate(continues) if not goes_on), len(continues) + 1]
    lengths = [end - start for start, end in pairwise(starts)]
    offsets = cu_seqlens_from_lengths(lengths).to(device)
    return Pack(cu_seqlens_q=offsets, max_length_q=max(lengths), slots=len(continues) + 1, lengths=lengths)


def _refuse_restarts(position_ids: Tensor) -> None:
    if bool((position_ids[0].diff(dim=-1) < 0).any()):
        raise ValueError(
            f"M-RoPE position_ids of shape {tuple(position_ids.shape)} go back inside a row, so this is a "
            "pack, and its boundaries cannot be read off three rows of positions. Pass cu_seq_lens_q/k and "
            "max_length_q/k, as THDBatch.hf_kwargs() does."
        )
