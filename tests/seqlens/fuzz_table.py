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


def _lengths(rng: random.Random) -> list[int]:
    return [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]


def _offsets(lengths: list[int]) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def _cu(rng: random.Random) -> dict[str, Any]:
    return {"cu_seqlens": _form(rng, _offsets(_lengths(rng)))}


def _cu_total(rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    return {"cu_seqlens": _form(rng, _offsets(lengths)), "total": sum(lengths)}


def _positions(rng: random.Random) -> dict[str, Any]:
    lengths = _lengths(rng)
    positions = [position for n in lengths for position in range(n)]
    return {"position_ids": _form(rng, positions), "num_sequences": len(lengths) + rng.randint(0, 2)}


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


def _counted(rng: random.Random) -> dict[str, Any]:
    lengths = [rng.randint(0, 9) for _ in range(rng.randint(1, 5))]
    return {
        "lengths": rng.choice([list, np.array, torch.tensor])(lengths),
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
    return {
        "lengths": [5, 2, 3],
        "window": rng.choice([2, Chunk(2), Blocks(2)]),
        "ends": rng.choice([[1, 3], [3]]),
    }


def _add(given: dict[str, Any], found: SeqStats) -> None:
    assert found.real_tokens == sum(int(n) for n in given["lengths"])
    assert found.sum_squares == sum(int(n) ** 2 for n in given["lengths"])


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
    "cu_seqlens_from_position_ids": Entry(seqlens.cu_seqlens_from_position_ids, _positions),
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
    "SeqStats.from_lengths": Entry(SeqStats.from_lengths, _counted, _add),
    "SeqStats.from_cu_seqlens": Entry(SeqStats.from_cu_seqlens, _tails),
    "window_pairs": Entry(window_pairs, _runs),
    "combine": Entry(
        combine, lambda rng: {"stats": [SeqStats(), SeqStats.from_lengths([rng.randint(0, 9)])]}
    ),
    "Chunk": Entry(Chunk, lambda rng: {"size": rng.randint(1, 9)}),
    "Blocks": Entry(Blocks, lambda rng: {"size": rng.randint(1, 9), "most": rng.choice([None, 2])}),
}
