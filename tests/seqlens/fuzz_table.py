"""Public functions of seqlens, segments and alignment, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_thd import seqlens
from lightning_thd.alignment import Alignment
from lightning_thd.segments import seqlens_offsets
from tests.fuzz import Entry


def _form(rng: random.Random, values: list[int]) -> Any:
    """Give integers as a list, an array or a tensor."""
    forms = [list, tuple, np.array, lambda x: torch.tensor(x, dtype=torch.int32)]
    return rng.choice(forms)(values)


def _lengths(rng: random.Random) -> list[int]:
    return [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]


def _offsets(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def _cu(rng: random.Random) -> dict[str, Any]:
    return {"cu_seqlens": _form(rng, _offsets(_lengths(rng)))}


def _cu_total(rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    return {"cu_seqlens": _form(rng, _offsets(lengths)), "total": sum(lengths)}


def _padded(rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    slots = [n + rng.randint(0, 2) for n in lengths]
    return {
        "cu_seqlens": _form(rng, _offsets(lengths)),
        "total": sum(slots),
        "cu_seqlens_padded": _form(rng, _offsets(slots)),
    }


def _slots(key: str, first: int, rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    values = [i + first for i, n in enumerate(lengths) for _ in range(n)]
    if key == "position_ids":
        values = [p for n in lengths for p in range(n)]
    return {key: _form(rng, values), "num_sequences": len(lengths) + rng.randint(0, 2)}


def _stretch(rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    return {
        "cu_seqlens": _form(rng, _offsets(lengths)),
        "num_sequences": len(lengths) + 3,
        "total": sum(lengths) + rng.randint(0, 6),
        "max_seqlen": rng.choice([None, 8]),
        "lengths": rng.choice([None, lengths]),
    }


def _segments(rng: random.Random) -> dict[str, Any]:
    length = rng.randint(1, 8)
    ids = [rng.randint(0, 3) for _ in range(length)]
    pos = list(range(length))
    return {
        "ids_q": rng.choice([ids, np.array(ids), torch.tensor(ids)]),
        "ids_kv": torch.tensor(ids),
        "pos_q": rng.choice([pos, np.array(pos), torch.tensor(pos)]),
        "pos_kv": torch.tensor(pos),
        "mask": rng.choice(["causal", "causal_bottom_right", "padding"]),
        "max_segments": 3,
    }


def _layout(rng: random.Random) -> dict[str, Any]:
    return {
        "cp": rng.choice([1, 2, 4]),
        "tp": rng.choice([1, 2]),
        "sequence_parallel": rng.random() < 0.5,
        "recipe": rng.choice([None, "mxfp8", "tensorwise"]),
        "layout": rng.choice(["dual_chunk", "contiguous"]),
    }


def _multiples(rng: random.Random) -> dict[str, Any]:
    multiple = rng.choice([1, 2, 8])
    return {"sequence_multiple": multiple, "total_multiple": multiple * rng.randint(1, 4)}


ALIGN = Alignment(sequence_multiple=8, total_multiple=32)

TABLE = {
    "cu_seqlens_from_lengths": Entry(
        seqlens.cu_seqlens_from_lengths,
        lambda rng: {"lengths": _form(rng, _lengths(rng))},
        lambda given, cu: np.testing.assert_array_equal(np.diff(cu), np.asarray(given["lengths"])),
    ),
    "lengths_from_cu_seqlens": Entry(seqlens.lengths_from_cu_seqlens, _cu),
    "position_ids_from_cu_seqlens": Entry(seqlens.position_ids_from_cu_seqlens, _cu_total),
    "seq_idx_from_cu_seqlens": Entry(seqlens.seq_idx_from_cu_seqlens, _cu_total),
    "segment_ids_from_cu_seqlens": Entry(seqlens.segment_ids_from_cu_seqlens, _padded),
    "cu_seqlens_from_seq_idx": Entry(seqlens.cu_seqlens_from_seq_idx, lambda rng: _slots("seq_idx", 0, rng)),
    "cu_seqlens_from_segment_ids": Entry(
        seqlens.cu_seqlens_from_segment_ids, lambda rng: _slots("segment_ids", 1, rng)
    ),
    "cu_seqlens_from_position_ids": Entry(
        seqlens.cu_seqlens_from_position_ids, lambda rng: _slots("position_ids", 0, rng)
    ),
    "pad_cu_seqlens": Entry(seqlens.pad_cu_seqlens, _stretch),
    "check_cu_seqlens": Entry(seqlens.check_cu_seqlens, _cu_total),
    "seqlens_offsets": Entry(seqlens_offsets, _segments),
    "Alignment": Entry(Alignment, _multiples),
    "Alignment.for_": Entry(Alignment.for_, _layout),
    "Alignment.padded_length": Entry(ALIGN.padded_length, lambda rng: {"length": rng.randint(0, 50)}),
    "Alignment.padded_lengths": Entry(
        ALIGN.padded_lengths, lambda rng: {"lengths": _form(rng, _lengths(rng))}
    ),
    "Alignment.padded_total": Entry(ALIGN.padded_total, lambda rng: {"total": rng.randint(0, 50)}),
    "Alignment.check": Entry(
        ALIGN.check, lambda rng: {"slots": 32 * rng.randint(0, 3), "padded_lengths": _form(rng, [8, 16])}
    ),
}
