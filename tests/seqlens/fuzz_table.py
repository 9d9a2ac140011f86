"""Public functions of seqlens, segments, alignment and stats, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_thd import seqlens
from lightning_thd.alignment import Alignment
from lightning_thd.segments import seqlens_offsets
from lightning_thd.stats import Blocks, Chunk, SeqStats, combine, window_pairs
from tests.fuzz import Entry


def _form(rng: random.Random, values: list[int]) -> Any:
    """Give integers as a list, an array or a tensor."""
    forms = [list, tuple, np.array, lambda x: torch.tensor(x, dtype=torch.int32)]
    return rng.choice(forms)(values)


def _packed(rng: random.Random, *names: str) -> dict[str, Any]:
    """Draw the lengths of a pack; give its offsets, its total and what else is named."""
    lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
    made = {
        "lengths": _form(rng, lengths),
        "cu_seqlens": _form(rng, [0, *np.cumsum(lengths).tolist()]),
        "total": sum(lengths),
        "position_ids": _form(rng, [position for n in lengths for position in range(n)]),
        "num_sequences": len(lengths) + rng.randint(1, 3),
        "max_seqlen": rng.choice([None, 8]),
    }
    return {name: made[name] for name in names}


def _segments(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randint(0, 3) for _ in range(rng.randint(1, 8))]
    pos = list(range(len(ids)))
    return {
        "ids_q": _form(rng, ids),
        "ids_kv": torch.tensor(ids),
        "pos_q": _form(rng, pos),
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


def _counted(rng: random.Random) -> dict[str, Any]:
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
    return {
        "lengths": _form(rng, lengths),
        "windows": rng.choice([(), (4,), (Chunk(4), 2), (Blocks(2, 3),)]),
        "slots": rng.choice([None, sum(lengths) + 3]),
        "loss_tokens": rng.choice([None, 0]),
        "cross_lengths": rng.choice([None, [2] * len(lengths)]),
        "image_grid_thw": rng.choice([None, [[1, 4, 4]], torch.tensor([[1, 2, 2]])]),
        "video_grid_thw": rng.choice([None, np.array([[2, 4, 4]])]),
        "vision_windows": rng.choice([(), (2,)]),
    }


def _tails(rng: random.Random) -> dict[str, Any]:
    return {
        "cu_seqlens": rng.choice([[0, 3, 8, 8, -1], torch.tensor([0, 3, 8]), [[0, 3, 8], [0, 8, 8]]]),
        "cu_seqlens_unpadded": None,
        "argmin": rng.choice([None, 3]),
        "shape": rng.choice([None, (2, 8)]),
        "windows": rng.choice([(), (4,)]),
    }


def _runs(rng: random.Random) -> dict[str, Any]:
    return {"lengths": [5, 2, 3], "window": rng.choice([2, Chunk(2), Blocks(2)]), "ends": [1, 3]}


ALIGN = Alignment(sequence_multiple=8, total_multiple=32)
PACKED = {
    seqlens.cu_seqlens_from_lengths: ("lengths",),
    seqlens.lengths_from_cu_seqlens: ("cu_seqlens",),
    seqlens.position_ids_from_cu_seqlens: ("cu_seqlens", "total"),
    seqlens.seq_idx_from_cu_seqlens: ("cu_seqlens", "total"),
    seqlens.cu_seqlens_from_position_ids: ("position_ids", "num_sequences"),
    seqlens.pad_cu_seqlens: ("cu_seqlens", "num_sequences", "total", "max_seqlen", "lengths"),
    seqlens.check_cu_seqlens: ("cu_seqlens", "total"),
}
TABLE = {
    **{f.__name__: Entry(f, lambda rng, names=names: _packed(rng, *names)) for f, names in PACKED.items()},
    "seqlens_offsets": Entry(seqlens_offsets, _segments),
    "Alignment": Entry(
        Alignment, lambda rng: {"sequence_multiple": 2, "total_multiple": 2 * rng.randint(1, 4)}
    ),
    "Alignment.for_": Entry(Alignment.for_, _layout),
    "Alignment.padded_length": Entry(ALIGN.padded_length, lambda rng: {"length": rng.randint(0, 50)}),
    "Alignment.padded_lengths": Entry(ALIGN.padded_lengths, lambda rng: _packed(rng, "lengths")),
    "Alignment.padded_total": Entry(ALIGN.padded_total, lambda rng: {"total": rng.randint(0, 50)}),
    "Alignment.check": Entry(ALIGN.check, lambda rng: {"slots": 32 * rng.randint(0, 3)}),
    "SeqStats.from_lengths": Entry(SeqStats.from_lengths, _counted),
    "SeqStats.from_cu_seqlens": Entry(SeqStats.from_cu_seqlens, _tails),
    "window_pairs": Entry(window_pairs, _runs),
    "combine": Entry(
        combine, lambda rng: {"stats": [SeqStats(), SeqStats.from_lengths([rng.randint(0, 9)])]}
    ),
    "Chunk": Entry(Chunk, lambda rng: {"size": rng.randint(1, 9)}),
    "Blocks": Entry(Blocks, lambda rng: {"size": rng.randint(1, 9), "most": rng.choice([None, 2])}),
}
