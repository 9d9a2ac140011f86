"""What ranks tell each other of what they read: whole, and 8 bytes a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_thd.data.streams.ranks.message import Layout, decode, encode, header_type, in_runs, widened
from lightning_thd.data.streams.ranks.wire import Wire
from lightning_thd.data.streams.samples import META
from tests.data.streams.jobs import run, write_shards
from tests.ranks import run_ranks

ROWS = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 40), st.integers(0, 1), st.integers(0, 2), st.integers(1, 99)
    ),
    max_size=30,
    unique_by=lambda row: row[:3],
)


def table_of(rows: list[tuple[int, ...]], *, weighted: bool, extra: bool) -> Any:
    table = np.zeros(len(rows), META)
    for name, k in (("shard", 0), ("row", 1), ("round", 2), ("keys", 3), ("length", 4)):
        table[name] = [row[k] for row in rows]
    table["weight"] = table["length"] // 2 + 0.25 * weighted
    table["sequences"] = table["weight"] > 0
    table["extra"] = table["row"] * 4 * extra
    return table[in_runs(table)]


@given(st.lists(ROWS, min_size=1, max_size=3), st.booleans(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_tables_come_back_whole(of_ranks: list[Any], weighted: bool, extra: bool) -> None:
    # Only the last rank has what is rare: the others learn it, and all send it.
    last = len(of_ranks) - 1
    tables = [
        table_of(rows, weighted=weighted and k == last, extra=extra and k == last)
        for k, rows in enumerate(of_ranks)
    ]
    most, layout, kind = max(map(len, tables)), Layout(), header_type(2)
    for _ in range(2):
        headers = [np.zeros(1, kind) for _ in tables]
        messages = [encode(t, h, layout, most) for t, h in zip(tables, headers, strict=True)]
        assert {len(message) for message in messages} == {kind.itemsize + layout.nbytes(most)}
        wider = widened(layout, np.concatenate(headers))
        if wider is None:
            break
        layout = wider
    assert widened(layout, np.concatenate(headers)) is None
    for table, message, header in zip(tables, messages, headers, strict=True):
        assert (decode(message, header[0], layout, most) == table).all()


def sizes_of(folder: str, window: int, steps: int) -> list[int]:
    sizes: list[int] = []
    gather = Wire.gather

    def counted(self: Wire, message: Any) -> Any:
        sizes.append(message.nbytes)
        return gather(self, message)

    Wire.gather = counted  # type: ignore[method-assign]
    run(f"{folder}/*.jsonl", n=8, window=window, steps=steps)
    return sizes


def test_a_turn_takes_eight_bytes_a_sequence_and_one_run(tmp_path: Path) -> None:
    write_shards(tmp_path, [400, 400], labels=True)
    for sizes in run_ranks(sizes_of, 2, str(tmp_path), 100, 10, timeout_s=60):
        header = header_type(1).itemsize
        assert header == 72
        # 100 sequences a rank to begin with, then what a step used; each turn one run of 24 bytes.
        assert sizes[0] == header + 24 + 8 * 100
        assert all((size - header - 24) % 8 == 0 and size <= header + 24 + 8 * 8 for size in sizes[1:])
        assert sum((size - header - 24) // 8 for size in sizes[1:]) <= 8 * len(sizes[1:])
