from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_thd.segments import MaskFamily, seqlens_offsets
from tests.device_reads import RefuseDeviceReads

FAMILIES: tuple[MaskFamily, ...] = ("causal", "causal_bottom_right", "padding")
Rows = list[list[int]]


def run_lengths(ids: list[int]) -> list[int]:
    return [n for n in (len(list(run)) for _, run in groupby(ids)) for _ in range(n)]


def dense_mask(
    ids_q: list[int], ids_kv: list[int], pos_q: list[int], pos_kv: list[int], mask: str
) -> np.ndarray:
    """The [Tq, Tkv] mask of one row, straight from its definition."""
    iq, ik, pq, pk = (np.asarray(x) for x in (ids_q, ids_kv, pos_q, pos_kv))
    same = (iq[:, None] == ik[None, :]) & (iq[:, None] != 0)
    if mask == "causal":
        return same & (pq[:, None] >= pk[None, :])
    if mask == "causal_bottom_right":
        left_q = np.asarray(run_lengths(ids_q)) - pq
        left_kv = np.asarray(run_lengths(ids_kv)) - pk
        return same & (left_q[:, None] <= left_kv[None, :])
    return same


def describe(ids: list[int], seen: np.ndarray, max_segments: int) -> tuple[list[int], list[int], list[int]]:
    row = [i if s else 0 for i, s in zip(ids, seen.tolist(), strict=True)]
    lengths = [row.count(m) for m in range(1, max_segments + 1)]
    firsts = [row.index(m) if m in row else -1 for m in range(1, max_segments + 1)]
    runs = [t for t, i in enumerate(row) if i and (t == 0 or row[t - 1] != i)][: max_segments + 1]
    return lengths, runs + [-1] * (max_segments + 1 - len(runs)), firsts


def brute_force(
    ids_q: Rows, ids_kv: Rows, pos_q: Rows, pos_kv: Rows, mask: str, max_segments: int
) -> tuple[list[Rows], int]:
    """Every field of SegmentLayout as lists of rows, and how many slots the mask dropped."""
    fields: list[Rows] = [[] for _ in range(6)]
    dropped = 0
    for iq, ik, pq, pk in zip(ids_q, ids_kv, pos_q, pos_kv, strict=True):
        dense = dense_mask(iq, ik, pq, pk, mask)
        q = describe(iq, dense.any(1), max_segments)
        kv = describe(ik, dense.any(0), max_segments)
        dropped += sum(1 for i in iq if i) + sum(1 for i in ik if i) - sum(q[0]) - sum(kv[0])
        for field, values in zip(fields, (q[0], kv[0], q[1], kv[1], q[2], kv[2]), strict=True):
            field.append(values)
    return fields, dropped


def random_row(
    rng: np.random.Generator, total: int, max_segments: int, *, skip: float
) -> tuple[list[int], list[int]]:
    """Segments of random length with padding between, ids in any order, some of them absent."""
    ids: list[int] = []
    pos: list[int] = []
    order = list(range(1, max_segments + 1))
    if rng.random() < 0.2:
        rng.shuffle(order)

    for i in order:
        if rng.random() < skip:
            continue
        length = int(rng.integers(1, 9))
        gap = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0
        first = int(rng.integers(0, 5)) if rng.random() < 0.2 else 0  # a segment that starts in its middle
        ids += [i] * length + [0] * gap
        pos += list(range(first, first + length + gap))

    ids = ids[:total]
    pos = pos[:total]
    return ids + [0] * (total - len(ids)), pos + list(range(total - len(pos)))


def shard(rng: np.random.Generator, total: int, layout: str) -> list[int]:
    """The slots that one random rank of two or four holds."""
    cp = int(rng.choice([2, 4]))
    r = int(rng.integers(cp))
    if layout == "striped":
        return list(range(r, total, cp))
    if layout == "contiguous":
        return list(range(r * total // cp, (r + 1) * total // cp))
    chunk = total // (2 * cp)
    return [c * chunk + k for c in (r, 2 * cp - 1 - r) for k in range(chunk)]


def random_side(
    rng: np.random.Generator, rows: list[tuple[list[int], list[int]]], layout: str
) -> tuple[Rows, Rows]:
    kept = shard(rng, len(rows[0][0]), layout) if layout != "whole" else list(range(len(rows[0][0])))
    return [[ids[t] for t in kept] for ids, _ in rows], [[pos[t] for t in kept] for _, pos in rows]


def random_pack(rng: np.random.Generator) -> tuple[Rows, Rows, Rows, Rows, int, str]:
    batch = int(rng.integers(1, 4))
    max_segments = int(rng.integers(1, 8))
    kind = str(rng.choice(["self", "ring", "cross"]))
    layout = str(rng.choice(["whole", "striped", "contiguous", "dual_chunk"]))
    total = 8 * int(rng.integers(1, 7))
    rows = [random_row(rng, total, max_segments, skip=0.15) for _ in range(batch)]
    ids_q, pos_q = random_side(rng, rows, layout)
    if kind == "self":
        return ids_q, ids_q, pos_q, pos_q, max_segments, f"{kind}/{layout}"
    if kind == "cross":
        total = 8 * int(rng.integers(1, 9))
        rows = [random_row(rng, total, max_segments, skip=0.3) for _ in range(batch)]
    ids_kv, pos_kv = random_side(rng, rows, layout)  # of another rank, or of the other side
    return ids_q, ids_kv, pos_q, pos_kv, max_segments, f"{kind}/{layout}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mask", FAMILIES)
def test_equals_the_dense_mask(mask: MaskFamily, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([FAMILIES.index(mask), dtype.itemsize])
    packs = 150
    seen: dict[str, int] = {}
    dropped_slots = 0

    for _ in range(packs):
        ids_q, ids_kv, pos_q, pos_kv, max_segments, kind = random_pack(rng)
        expected, dropped = brute_force(ids_q, ids_kv, pos_q, pos_kv, mask, max_segments)
        q = torch.tensor(ids_q, dtype=dtype)
        pq = torch.tensor(pos_q, dtype=dtype)
        kv = torch.tensor(ids_kv, dtype=dtype)
        pkv = torch.tensor(pos_kv, dtype=dtype)
        ours = seqlens_offsets(q, kv, pq, pkv, mask=mask, max_segments=max_segments)
        assert [x.tolist() for x in ours] == expected, (kind, ids_q, ids_kv, pos_q, pos_kv)
        if kind.startswith("self"):  # the shorter way, taken for the very same tensors
            short = seqlens_offsets(q, q, pq, pq, mask=mask, max_segments=max_segments)
            assert [x.tolist() for x in short] == expected
        assert all(x.dtype == torch.int32 for x in ours)
        seen[kind] = seen.get(kind, 0) + 1
        dropped_slots += dropped

    assert len(seen) == 12
    assert min(seen.values()) >= packs // 30
    assert dropped_slots > packs  # a mask that drops nothing would prove nothing


def _ids(digits: str) -> Tensor:
    return torch.tensor([int(d) for d in digits], dtype=torch.int32)


def _counts(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])


GOLDEN = [
    # q, kv, pos q, pos kv, M, {mask: (q lengths, kv lengths, q offsets, kv offsets)}
    (
        *(_ids("11122033"), _ids("11122033"), _counts(3, 2, 1, 2), _counts(3, 2, 1, 2), 4),
        dict.fromkeys(FAMILIES, ([3, 2, 2, 0], [3, 2, 2, 0], [0, 3, 6, -1, -1], [0, 3, 6, -1, -1])),
    ),
    (
        *(_ids("11102222"), _ids("1111002222222222"), _counts(4, 4), _counts(6, 10), 3),
        {
            "causal": ([3, 4, 0], [3, 4, 0], [0, 4, -1, -1], [0, 6, -1, -1]),
            "causal_bottom_right": ([3, 4, 0], [4, 10, 0], [0, 4, -1, -1], [0, 6, -1, -1]),
            "padding": ([3, 4, 0], [4, 10, 0], [0, 4, -1, -1], [0, 6, -1, -1]),
        },
    ),
    (
        *(_ids("11112220"), _ids("112033"), _counts(4, 4), _counts(2, 2, 2), 4),
        {
            "causal": ([4, 3, 0, 0], [2, 1, 0, 0], [0, 4, -1, -1, -1], [0, 2, -1, -1, -1]),
            "causal_bottom_right": ([2, 1, 0, 0], [2, 1, 0, 0], [2, 6, -1, -1, -1], [0, 2, -1, -1, -1]),
            "padding": ([4, 3, 0, 0], [2, 1, 0, 0], [0, 4, -1, -1, -1], [0, 2, -1, -1, -1]),
        },
    ),
]


@pytest.mark.parametrize("mask", FAMILIES)
@pytest.mark.parametrize("case", GOLDEN)
def test_worked_cases(case: tuple[Tensor, Tensor, Tensor, Tensor, int, dict], mask: MaskFamily) -> None:
    # Computed once with Transformer Engine's own functions.
    ids_q, ids_kv, pos_q, pos_kv, max_segments, expected = case
    ours = seqlens_offsets(ids_q, ids_kv, pos_q, pos_kv, mask=mask, max_segments=max_segments)
    assert tuple(x.tolist() for x in ours[:4]) == expected[mask]


def test_starts_are_aligned_with_the_id_and_offsets_are_not() -> None:
    def described(digits: str, max_segments: int) -> list[list[int]]:
        ids = _ids(digits)
        layout = seqlens_offsets(ids, ids, None, None, mask="padding", max_segments=max_segments)
        return [layout.q_lengths.tolist(), layout.q_offsets.tolist(), layout.q_starts.tolist()]

    assert described("0330011", 4) == [[2, 0, 2, 0], [1, 5, -1, -1, -1], [5, -1, 1, -1]]
    assert described("1020102", 2) == [[2, 2], [0, 2, 4], [0, 2]]  # the first runs of an id in many
    assert described("", 1) == described("000", 1) == [[0], [-1, -1], [-1]]


def _inputs(total: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = (torch.arange(total, dtype=torch.int32) // 16 + 1) % 4
    pos = torch.arange(total, dtype=torch.int32) % 16
    return ids, ids.clone(), pos, pos.clone()


@pytest.mark.parametrize("mask", FAMILIES)
def test_runs_on_any_strides_and_rows_without_reading_the_device(mask: MaskFamily) -> None:
    expected = seqlens_offsets(*_inputs(), mask=mask, max_segments=4)
    for form in (
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.stack([x, x.flip(0)], dim=-1).T[:1].long(),
        lambda x: x.expand(2, 3, 64)[1, 2:],
    ):
        with RefuseDeviceReads():
            layout = seqlens_offsets(*map(form, _inputs()), mask=mask, max_segments=4)
        for field, actual, wanted in zip(expected._fields, layout, expected, strict=True):
            assert torch.equal(actual.reshape(-1), wanted), field
    layout = seqlens_offsets(*(x.to("meta") for x in _inputs()), mask=mask, max_segments=4)
    assert [x.shape for x in layout] == [x.shape for x in expected]


def test_compiles_without_a_break() -> None:
    options = {"mask": "causal_bottom_right", "max_segments": 4}
    compiled = torch.compile(seqlens_offsets, fullgraph=True, backend="aot_eager")
    for total in (64, 96):
        inputs = _inputs(total)
        expected = seqlens_offsets(*inputs, **options)
        actual = compiled(*inputs, **options)
        torch.testing.assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)


IDS, KV, POS, POS_KV = _inputs()
TWO = (IDS.expand(2, 64), KV, POS.expand(2, 64), POS_KV)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            (IDS, KV, POS, POS_KV),
            {"mask": "top_left"},
            "mask='top_left'; wanted one of causal, causal_bottom_right, padding",
        ),
        ((IDS, KV, POS, POS_KV), {"max_segments": 0}, "max_segments=0; wanted 1 or more"),
        ((IDS, KV, POS, POS_KV), {"max_segments": 2}, "ids_q holds ids from 0 to 3, but .*max_segments=3"),
        ((IDS.float(), KV, POS, POS_KV), {}, "ids_q is torch.float32; wanted an integer dtype"),
        ((IDS[0], KV, POS[0], POS_KV), {}, r"ids_q is a scalar; wanted \[..., T\]"),
        ((IDS, KV, None, POS_KV), {}, "mask='causal' needs pos_q, but it is None. Pass the positions"),
        ((IDS, KV, POS, POS_KV[1:]), {}, r"pos_kv is torch.int32 \[63\] on cpu; wanted int32 or int64 \[64"),
        ((IDS, KV, POS.to("meta"), POS_KV), {}, r"pos_q is torch.int32 \[64\] on meta; .* on cpu, as ids_q"),
        ((IDS, KV - 1, POS, POS_KV), {}, "ids_kv holds ids from -1 to 2"),
        (TWO, {}, r"ids_q is \[2, 64\] on cpu and ids_kv \[64\] on cpu; wanted the same"),
    ],
)
def test_is_refused(given: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seqlens_offsets(*given, **{"mask": "causal", "max_segments": 4, **options})
