"""Lengths <-> cu_seqlens <-> ids of every slot, without reading the device."""

from lightning_thd.seqlens.algebra import (
    check_cu_seqlens,
    cu_seqlens_from_lengths,
    cu_seqlens_from_position_ids,
    cu_seqlens_from_segment_ids,
    cu_seqlens_from_seq_idx,
    lengths_from_cu_seqlens,
    pad_cu_seqlens,
    position_ids_from_cu_seqlens,
    segment_ids_from_cu_seqlens,
    seq_idx_from_cu_seqlens,
)

__all__ = [
    "check_cu_seqlens",
    "cu_seqlens_from_lengths",
    "cu_seqlens_from_position_ids",
    "cu_seqlens_from_segment_ids",
    "cu_seqlens_from_seq_idx",
    "lengths_from_cu_seqlens",
    "pad_cu_seqlens",
    "position_ids_from_cu_seqlens",
    "segment_ids_from_cu_seqlens",
    "seq_idx_from_cu_seqlens",
]
