from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd.stats import Blocks, Chunk, SeqStats, Window, combine, window_pairs

LENGTHS = st.lists(st.integers(0, 40), min_size=0, max_size=12)


def pairs_by_mask(lengths: list[int], window: Window | None) -> int:
    """Fill the mask of every sequence and count what is allowed."""
    allowed = 0
    for length in lengths:
        if isinstance(window, Blocks):
            keys = [(query + 1) // window.size for query in range(length)]
            allowed += sum(min(count, window.most or count) for count in keys)
            continue
        for query in range(length):
            for key in range(length):
                if isinstance(window, Chunk):
                    seen = key <= query and key // window.size == query // window.size
                else:
                    seen = key <= query and (window is None or query - key < window)
                allowed += seen
    return allowed


# Cases of the packed-FLOPs pull request and others: offsets, options, sum of lengths, sum of squares.
@pytest.mark.parametrize(
    ("offsets", "options", "tokens", "squares"),
    [
        (None, {"shape": (2, 512)}, 1024, 524288),
        ([0, 256, 512, 4096], {"shape": (1, 4096)}, 4096, 12976128),
        ([0, 1024, 4096, 8192, 8192, 8192, 8192], {"argmin": 4, "shape": (1, 8192)}, 8192, 27262976),
        ([0, 1024, 4096, 8192, 8192, 8192, 8192], {}, 8192, 27262976),
        ([0, 4096, 4096], {"cu_seqlens_unpadded": [0, 1000, 3500, 4096]}, 4096, 7605216),
        ([0], {"shape": (1, 256)}, 256, 65536),
        (list(range(0, 8193, 256)), {"shape": (1, 8192)}, 8192, 2097152),
        (None, {"shape": (1, 8192)}, 8192, 32 * 2097152),
        ([0, 0, 0], {"shape": (1, 64)}, 0, 0),  # an empty pack is not dense
        ([0, 3, 8], {"argmin": 0}, 8, 34),
        ([0, 3, 8, -1], {"argmin": torch.tensor([[3]])}, 8, 34),
        # rows start from 0 again, and one without offsets is dense
        ([[0, 3, 8], [0, 8, 8], [0, -1, -1]], {"shape": (3, 8)}, 24, 9 + 25 + 64 + 64),
        *[([0, 3, 8, *tail], {}, 8, 34) for tail in ([8, 8], [-1], [-1, -1], [0, 0], [8, -1, 0])],
        *[(make([0, 3, 8]), {}, 8, 34) for make in (tuple, np.array, torch.tensor)],
        # 46,341^2 is the first square above int32
        (torch.tensor([0, 46_341, 146_341], dtype=torch.int32), {}, 146_341, 46_341**2 + 100_000**2),
    ],
)
def test_offsets_are_read_as_pipelines_hand_them_out(
    offsets: Any, options: dict[str, Any], tokens: int, squares: int
) -> None:
    stats = SeqStats.from_cu_seqlens(offsets, **options)
    assert (stats.real_tokens, stats.sum_squares) == (tokens, squares)


def test_worked_cases() -> None:
    stats = SeqStats.from_cu_seqlens([0, 4, 12], cu_seqlens_unpadded=[0, 3, 8])
    assert (stats.real_tokens, stats.slots) == (8, 12)
    assert SeqStats.from_cu_seqlens([0, 3, 8], shape=(1, 16)).slots == 16
    assert SeqStats.from_cu_seqlens([0, 3, 8, 100], argmin=3).slots == 8
    assert window_pairs([3, 5], Chunk(2**40), ends=[1, 2]).tolist() == [6, 15]

    some = SeqStats.from_lengths(np.array([3, 5], np.int32), windows=(2,))
    assert some == SeqStats.from_cu_seqlens([0, 3, 8], windows=(2,))
    assert some + SeqStats.from_lengths([]) == SeqStats() + some == sum([some], start=SeqStats()) == some

    cross = SeqStats.from_lengths([3, 5], cross_lengths=[10, 0])
    assert (cross.cross_tokens, cross.cross_pairs) == (10, 30)

    grids = {"image_grid_thw": [[1, 4, 4], [1, 2, 8]], "video_grid_thw": torch.tensor([[2, 2, 2]])}
    stats = SeqStats.from_cu_seqlens(None, shape=(1, 64), **grids)
    # per frame: two frames of 4 patches, not one of 8
    assert (stats.vision_patches, stats.vision_squares) == (40, 16**2 + 16**2 + 2 * 4**2)

    image = SeqStats.from_lengths([8], image_grid_thw=[[1, 4, 4]], vision_windows=(4,))
    text = SeqStats.from_lengths([8], vision_windows=(4,))
    assert (text + image).vision_window_pairs == image.vision_window_pairs


@given(lengths=LENGTHS, window=st.integers(1, 50))
def test_window_pairs_equal_a_brute_force_mask(lengths: list[int], window: int) -> None:
    windows = (window, Chunk(window), Blocks(window), Blocks(window, 2))
    stats = SeqStats.from_lengths(lengths, windows=windows)
    assert dict(stats.window_pairs) == {each: pairs_by_mask(lengths, each) for each in windows}


@given(lengths=LENGTHS)
def test_counts_equal_plain_loops(lengths: list[int]) -> None:
    stats = SeqStats.from_lengths(lengths)
    assert stats.real_tokens == stats.slots == sum(lengths)
    assert stats.sequences == len([n for n in lengths if n])
    assert stats.sum_squares == sum(n * n for n in lengths)
    assert stats.loss_tokens == sum(max(n - 1, 0) for n in lengths)
    assert (stats.sum_squares + stats.real_tokens) // 2 == pairs_by_mask(lengths, None)


@given(here=LENGTHS, there=LENGTHS)
def test_batches_add_as_if_they_were_one(here: list[int], there: list[int]) -> None:
    windows = (3, Chunk(4))
    joined = SeqStats.from_lengths([*here, *there], windows=windows)
    added = SeqStats.from_lengths(here, windows=windows) + SeqStats.from_lengths(there, windows=windows)
    assert added == joined
    assert combine([SeqStats.from_lengths(here, windows=windows)] * 3) == SeqStats.from_lengths(
        here * 3, windows=windows
    )


@pytest.mark.parametrize(("rows", "columns", "edge"), [(5, 7, 2), (4, 4, 4), (3, 9, 8)])
def test_vision_windows_equal_a_brute_force_grid(rows: int, columns: int, edge: int) -> None:
    patches = [(row // edge, column // edge) for row in range(rows) for column in range(columns)]
    expected = 2 * sum(here == there for here in patches for there in patches)
    stats = SeqStats.from_lengths([8], image_grid_thw=[[2, rows, columns]], vision_windows=(edge,))
    assert dict(stats.vision_window_pairs) == {edge: expected}


# --- messages
def of_offsets(offsets: Any, **options: Any) -> Callable[[], SeqStats]:
    return lambda: SeqStats.from_cu_seqlens(offsets, **options)


def of_lengths(*lengths: int, **options: Any) -> Callable[[], SeqStats]:
    return lambda: SeqStats.from_lengths(lengths, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (of_offsets([0, 5, 3]), r"cu_seqlens \[0, 5, 3\] must start at 0 and never decrease"),
        (of_offsets([0, 5, -1, 8]), "never decrease"),
        (of_offsets([2, 5]), "must start at 0"),
        (of_offsets([[[0]]]), r"has shape \(1, 1, 1\). Pass \[S \+ 1\]"),
        (of_offsets([0.0, 3.0]), "holds float64 values; wanted whole numbers. Pass integers"),
        (of_offsets(None), "describes no sequence. Pass shape="),
        (of_offsets(None, shape=(2, 3, 4)), r"shape=\(2, 3, 4\); wanted two numbers, rows and row length"),
        (of_offsets([0, 3, 8], argmin=9), "argmin=9 is outside the 3 offsets"),
        (
            of_offsets([0, 3, 8], argmin=torch.tensor([1, 2])),
            r"argmin is a Tensor of torch.int64 \[2\]; wanted one number",
        ),
        (of_lengths(3, -1), r"lengths\[1\] is -1; wanted 0 or more. A sequence has zero or more tokens"),
        (of_lengths(2**32, 2**31), "squares may pass int64. Count parts of the data and add"),
        (of_lengths(3, slots=2), "slots=2 is less than the 3 real tokens"),
        (of_lengths(3, loss_tokens=4), "loss_tokens=4 is outside 0..3 slots"),
        (of_lengths(3, windows=(0,)), "A window=0; wanted 1 or more"),
        (of_lengths(3, cross_lengths=[1, 2]), r"cross_lengths \[1, 2\] does not fit the 1 sequences"),
        (of_lengths(3, prefix_lengths=[-1]), r"^prefix_lengths\[0\] is -1; wanted 0 or more"),
        (of_lengths(3, prefix_lengths=[4]), r"prefix_lengths \[4\] do not fit lengths \[3\]"),
        (of_lengths(3, image_grid_thw=[[1, 0, 4]]), "grid_thw holds 0. Frames, rows and columns"),
        (of_lengths(3, image_grid_thw=[[1, 2**20, 2**20]]), "grid_thw are so large that their squares may"),
        (of_lengths(3, image_grid_thw=[[1, 2]] * 3), r"grid_thw has shape \(3, 2\); wanted \[N, 3\]"),
        (lambda: Chunk(2**63), "Chunk.size=9223372036854775808; wanted at most .*the tokens of a chunk"),
        (lambda: window_pairs([3, 4], 2, ends=[1]), r"ends \[1\] decrease, or do not end at the 2 lengths"),
        (lambda: window_pairs([3, 4], 2, ends=[2, 1, 2]), r"ends \[2, 1, 2\] decrease, or do not end at the"),
        (lambda: of_lengths(3, windows=(4,))() + of_lengths(3)(), r"=\[\] to stats counted with \[4\]"),
    ],
)
def test_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
