"""Rows packed offline come back sequence by sequence, or pack by pack, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.read.prepacked import holds_packs, open_packed
from lightning_thd.data.store.index import build_index
from tests.data.support import batches_of, open_source
from tests.tiny import sequences

FORMATS = ["lengths", "seq_lengths", "cu_seqlens", "position_ids"]


def pack_by_hand(samples: list[dict[str, Any]], form: str, *, pad: int = 0) -> dict[str, Any]:
    """One row, laid out with plain lists."""
    ids = [int(x) for sample in samples for x in sample["input_ids"]]
    labels = [int(x) for sample in samples for x in sample.get("labels", sample["input_ids"])]
    lengths = [len(sample["input_ids"]) for sample in samples]
    row: dict[str, Any] = {"input_ids": [*ids, *[9] * pad], "labels": [*labels, *[-100] * pad]}
    if form == "position_ids":
        row["position_ids"] = [*(position for n in lengths for position in range(n)), *[0] * pad]
        row["attention_mask"] = [*[1] * len(ids), *[0] * pad]
    else:
        row[form] = [0, *np.cumsum(lengths).tolist()] if form == "cu_seqlens" else lengths
    return row


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    form=st.sampled_from(FORMATS),
    pad=st.integers(0, 5),
    labels=st.booleans(),
)
def test_every_format_gives_the_sequences_back(lengths: list[int], form: str, pad: int, labels: bool) -> None:
    rng = np.random.default_rng(sum(lengths))
    samples: list[dict[str, Any]] = [{"input_ids": rng.integers(0, 50, n)} for n in lengths]

    for sample in samples:
        keep = rng.random(len(sample["input_ids"])) < 0.5
        sample["labels"] = np.where(keep, sample["input_ids"], -100)

    rows = [pack_by_hand(part, form, pad=pad) for part in (samples[:3], samples[3:]) if part]
    if not labels:
        for row in rows:
            row |= {"labels": None, "label": None}

    assert holds_packs(rows)
    unpacked = open_packed(rows)
    assert len(unpacked) == len(samples)
    for i, sample in enumerate(samples):
        assert unpacked[i]["input_ids"].tolist() == sample["input_ids"].tolist()
        assert ("labels" in unpacked[i]) == labels
        if labels:
            assert unpacked[i]["labels"].tolist() == sample["labels"].tolist()
    assert unpacked.row.tolist() == [int(i >= 3) for i in range(len(samples))]

    expected = [int((s["labels"][1:] != -100).sum()) if labels else len(s["labels"]) - 1 for s in samples]
    assert build_index(unpacked).loss_tokens.tolist() == expected == unpacked.loss_tokens.tolist()


def rows_of(samples: list[dict[str, Any]], each: int = 5) -> list[dict[str, Any]]:
    return [pack_by_hand(samples[i : i + each], "lengths") for i in range(0, len(samples), each)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sequences_are_planned_anew_and_packs_are_kept(num_workers: int) -> None:
    samples = sequences(40, labels=True)
    rows = rows_of(samples)
    anew = batches_of(THDDataModule(rows, capacity=120, num_workers=num_workers))
    assert sorted(i for batch in anew for i in batch.sequence_ids) == list(range(40))
    assert len(anew) < len(rows)
    for batch in anew:
        for i, ids in zip(batch.sequence_ids, batch.unpack(batch.input_ids), strict=True):
            assert ids.tolist() == samples[i]["input_ids"].tolist()
    kept = batches_of(THDDataModule(rows, capacity=200, packed="packs", num_workers=num_workers))
    assert [sorted(batch.sequence_ids) for batch in kept] == [list(range(i, i + 5)) for i in range(0, 40, 5)]


def test_packs_need_packs_and_room() -> None:
    rows = rows_of(sequences(40))
    for keys in ({"input_ids"}, {"lengths"}):
        with pytest.raises(ValueError, match=rf"keys \['{min(keys)}'\]; wanted input_ids and one of lengths"):
            holds_packs([{key: rows[0][key] for key in keys}], sure=True)
    with pytest.raises(ValueError, match="A schedule cannot serve"):
        batches_of(THDDataModule(rows, capacity=200, packed="packs", global_batch=Sequences(4)))
    with pytest.raises(ValueError, match=r"Microbatch \d+ of the schedule takes \d+ slots"):
        batches_of(THDDataModule(rows, capacity=30, packed="packs"))


def test_custom_positions_can_be_kept() -> None:
    rows = [{"input_ids": [1, 2, 3], "position_ids": [5, 6, 7]}]
    with pytest.raises(ValueError, match="position_ids do not count up from 0.*packed='off'"):
        batches_of(THDDataModule(rows, capacity=8))
    [batch] = batches_of(THDDataModule(rows, capacity=8, packed="off"))
    assert batch.position_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"lengths": [2, 1]}, r"Row 0 has 2 input_ids, but its lengths describe sequences of \[2, 1\]"),
        ({"lengths": [0.5]}, "Row 0: lengths holds float64 values"),
        ({"cu_seqlens": [1, 2]}, r"cu_seqlens begins with 1"),
        ({"cu_seqlens": [0, 2, 1]}, r"cu_seqlens describe sequences of \[2, -1\]"),
        ({"lengths": [2], "cu_seqlens_padded": [0, 2]}, "carries cu_seqlens_padded, which cannot be divided"),
        (
            {"lengths": [2], "position_ids": [0, 1]},
            "has lengths and position_ids of lengths, .*; wanted exactly one. Keep one",
        ),
        ({"lengths": [1], "attention_mask": [1, 1]}, "must be 1 in the 1 slots that lengths covers"),
        ({"position_ids": [0]}, "2 input_ids but 1 position_ids"),
        ({"labels": 1, "lengths": [2]}, r"2 input_ids, but labels of shape \(\)"),
        ({"lengths": [2], "pixel_values": [[1.0]]}, "carries pixel_values, which cannot be divided"),
    ],
)
def test_bad_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_packed([{"input_ids": [1, 2], **row}])


class Counted(list[dict[str, Any]]):
    """Rows whose lengths are known, so that none is read before it is trained on."""

    @property
    def lengths(self) -> list[int]:
        return [len(row["input_ids"]) for row in self]


@pytest.mark.parametrize("kind", [list, Counted])
def test_a_row_of_several_sequences_behind_one_of_one(kind: type[list[dict[str, Any]]]) -> None:
    single = {"input_ids": [1, 2, 3]}
    double = {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(ValueError, match=r"Sequence 1 is bad: its position_ids begin again.*packed='off'"):
        batches_of(THDDataModule(kind([single, double]), capacity=16))
    with pytest.raises(ValueError, match=r"Row 1 has none of lengths, .*; wanted exactly one.*packed='off'"):
        batches_of(THDDataModule(kind([double, single]), capacity=16))
    [batch] = batches_of(THDDataModule(kind([single, double]), capacity=16, packed="off"))
    assert sorted(batch.position_ids.tolist()) == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("form", FORMATS)
def test_files_of_packs_are_read_back(tmp_path: Path, form: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    samples = sequences(70, labels=True)
    rows = [pack_by_hand(samples[i : i + 5], form, pad=3) for i in range(0, 70, 5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "packs.parquet")
    back = open_source(tmp_path / "packs.parquet")
    read = [(s["input_ids"].tolist(), s["labels"].tolist()) for s in (back[i] for i in range(len(back)))]
    assert read == [(s["input_ids"].tolist(), s["labels"].tolist()) for s in samples]


def test_two_threads_may_read_at_once() -> None:
    packs = open_packed([{"input_ids": ids, "lengths": [2]} for ids in ([1, 2], [3, 4])])
    packs.lengths = lengths = MagicMock()
    lengths.__getitem__.side_effect = lambda i: 2 if i else (packs[1], 2)[1]  # a thread reads row 1 meanwhile
    assert packs[0]["input_ids"].tolist() == [1, 2]


def test_padding_that_positions_make_sequences_is_left_out() -> None:
    def found(positions: list[int], **more: Any) -> list[int]:
        return open_packed([{"input_ids": IDS, "position_ids": positions, **more}]).lengths.tolist()

    IDS = [5, 6, 7, 8, 9, *[0] * 8]
    assert found([0, 1, 2, 0, 1, *[0] * 8]) == [3, 2]
    counted = [0, 1, 2, 0, 1, *range(8)]
    assert found(counted, labels=[*IDS[:5], *[-100] * 8]) == [3, 2, 8]  # of which nothing is learned
    assert found(counted, attention_mask=[1] * 13) == [3, 2, 8]
    with pytest.raises(ValueError, match="Row 0 ends with a sequence of 8 times the id 0"):
        found(counted)
    assert found([0, 1, 2, 0, 1, 0, 1, *[0] * 6]) == [3, 2, 2]
