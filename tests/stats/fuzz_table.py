"""Public functions of stats, for ``tests.fuzz``."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_thd.stats import Blocks, Chunk, SeqStats, combine, window_pairs
from tests.fuzz import Entry


def _lengths(rng: random.Random) -> dict[str, Any]:
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


def _offsets(rng: random.Random) -> dict[str, Any]:
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


TABLE = {
    "SeqStats.from_lengths": Entry(SeqStats.from_lengths, _lengths, _add),
    "SeqStats.from_cu_seqlens": Entry(SeqStats.from_cu_seqlens, _offsets),
    "SeqStats.merged_patches": Entry(
        SeqStats(vision_patches=8).merged_patches, lambda rng: {"merge_size": rng.randint(1, 2)}
    ),
    "window_pairs": Entry(window_pairs, _runs),
    "combine": Entry(
        combine, lambda rng: {"stats": [SeqStats(), SeqStats.from_lengths([rng.randint(0, 9)])]}
    ),
    "Chunk": Entry(Chunk, lambda rng: {"size": rng.randint(1, 9)}),
    "Blocks": Entry(Blocks, lambda rng: {"size": rng.randint(1, 9), "most": rng.choice([None, 2])}),
}
