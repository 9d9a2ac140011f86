"""Messages about lengths, windows and image grids that no other test of the room meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_thd.stats import Chunk, SeqStats, window_pairs

CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "window past what can be counted": (
        lambda: SeqStats.from_lengths([4], windows=(2**62 + 1,)),
        r"A window=4611686018427387905; wanted at most 4611686018427387904",
    ),
    "chunk past what can be counted": (
        lambda: Chunk(2**63),
        r"Chunk.size=9223372036854775808; wanted at most .*It is the tokens of a chunk",
    ),
    "windows that are one number": (
        lambda: SeqStats.from_lengths([4], windows=2),  # type: ignore[arg-type]
        r"windows is a int, 2; wanted a tuple of windows, FlopsModel.windows",
    ),
    "lengths in rows": (
        lambda: SeqStats.from_lengths([[1, 2], [3, 4]]),  # type: ignore[list-item]
        r"lengths has shape \(2, 2\); wanted one row of integers. Pass integers",
    ),
    "lengths past int64": (
        lambda: SeqStats.from_lengths(np.array([2**63 + 1], np.uint64)),
        r"lengths holds 9223372036854775809, past int64 \(9223372036854775807\). Pass integers",
    ),
    "lengths without values": (
        lambda: SeqStats.from_lengths(torch.ones(3, dtype=torch.int64, device="meta")),
        "lengths is on the meta device, which holds no values. Pass integers",
    ),
    "lengths whose squares are too large": (
        lambda: SeqStats.from_lengths([2**32, 2**31]),
        "lengths are so large that their squares may pass int64.*count parts of the data and add",
    ),
    "images whose squares are too large": (
        lambda: SeqStats.from_lengths([4], image_grid_thw=[[1, 2**20, 2**20]]),
        "grid_thw are so large that their squares may pass int64",
    ),
    "images of two numbers": (
        lambda: SeqStats.from_lengths([4], image_grid_thw=[[1, 2], [3, 4], [5, 6]]),
        r"grid_thw has shape \(3, 2\); wanted \[N, 3\]: frames, rows and columns",
    ),
    "a row of images that is not whole": (
        lambda: SeqStats.from_lengths([4], video_grid_thw=[1, 2, 2, 1]),  # type: ignore[list-item]
        r"grid_thw has shape \(4,\); wanted \[N, 3\]",
    ),
    "pairs of a length below zero": (
        lambda: window_pairs([3, -1], 2, ends=[2]),
        "lengths holds -1. A sequence has zero or more tokens: pass real lengths",
    ),
    "runs that do not end with the lengths": (
        lambda: window_pairs([3, 4], 2, ends=[1]),
        r"ends \[1\] do not cut 2 lengths into runs.*Pass \[len\(lengths\)\] for one run",
    ),
    "runs that go back": (
        lambda: window_pairs([3, 4], 2, ends=[2, 1, 2]),
        r"ends \[2, 1, 2\] do not cut 2 lengths into runs; wanted numbers that never decrease",
    ),
    "a shape of three numbers": (
        lambda: SeqStats.from_cu_seqlens(None, shape=(2, 3, 4)),  # type: ignore[arg-type]
        r"shape=\(2, 3, 4\); wanted two numbers, rows and row length",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
