"""Rows packed offline come back sequence by sequence, or pack by pack, in every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.data.pack import main, pack_file
from lightning_thd.data.read.prepacked import boundaries, holds_packs, open_packed
from lightning_thd.data.read.sources import Opener, open_source
from lightning_thd.data.store.index import build_index
from tests.tiny import sequences

FORMATS = ["lengths", "seq_lengths", "cu_seqlens", "cu_seqlens_padded", "position_ids"]


def pack_by_hand(
    samples: list[dict[str, Any]], form: str, *, multiple: int = 1, pad: int = 0
) -> dict[str, Any]:
    """One row, laid out with plain lists."""
    row: dict[str, Any] = {"input_ids": [], "labels": [], "position_ids": [], "attention_mask": []}
    real, padded = [0], [0]
    for sample in samples:
        ids = [int(x) for x in sample["input_ids"]]
        fill = -len(ids) % multiple
        row["input_ids"] += [*ids, *[9] * fill]
        row["labels"] += [*[int(x) for x in sample.get("labels", ids)], *[-100] * fill]
        row["position_ids"] += range(len(ids) + fill)
        row["attention_mask"] += [1] * (len(ids) + fill)
        real.append(real[-1] + len(ids))
        padded.append(len(row["input_ids"]))
    row["input_ids"] += [9] * pad
    row["labels"] += [-100] * pad
    row["position_ids"] += [0] * pad
    row["attention_mask"] += [0] * pad
    lengths = np.diff(real).tolist()
    keep = {"input_ids", "labels", *({"position_ids", "attention_mask"} if form == "position_ids" else ())}
    row = {name: value for name, value in row.items() if name in keep}
    if form in ("lengths", "seq_lengths"):
        row[form] = lengths
    if form.startswith("cu"):
        row["cu_seqlens"] = real
    if multiple > 1:
        row["cu_seqlens_padded"] = padded
    return row


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    form=st.sampled_from(FORMATS),
    multiple=st.sampled_from([1, 4]),
    pad=st.integers(0, 5),
    labels=st.booleans(),
)
def test_every_format_gives_the_sequences_back(
    lengths: list[int], form: str, multiple: int, pad: int, labels: bool
) -> None:
    rng = np.random.default_rng(sum(lengths))
    samples: list[dict[str, Any]] = [{"input_ids": rng.integers(0, 50, n)} for n in lengths]
    for sample in samples:
        keep = rng.random(len(sample["input_ids"])) < 0.5
        sample["labels"] = np.where(keep, sample["input_ids"], -100)
    multiple = 1 if form == "position_ids" else multiple
    rows = [
        pack_by_hand(part, form, multiple=multiple, pad=pad) for part in (samples[:3], samples[3:]) if part
    ]
    if not labels:
        for row in rows:
            del row["labels"]
    assert holds_packs(rows)
    found = open_packed(rows)
    assert len(found) == len(samples)
    for i, sample in enumerate(samples):
        assert found[i]["input_ids"].tolist() == sample["input_ids"].tolist()
        assert ("labels" in found[i]) == labels
        if labels:
            assert found[i]["labels"].tolist() == sample["labels"].tolist()
    assert found.row.tolist() == [int(i >= 3) for i in range(len(samples))]
    expected = [int((s["labels"][1:] != -100).sum()) if labels else len(s["labels"]) - 1 for s in samples]
    assert build_index(found).loss_tokens.tolist() == expected == found.loss_tokens.tolist()


def rows_of(samples: list[dict[str, Any]], each: int = 5) -> list[dict[str, Any]]:
    return [pack_by_hand(samples[i : i + each], "lengths") for i in range(0, len(samples), each)]


def batches_of(data: THDDataModule) -> list[THDBatch]:
    data.setup("fit")
    found = list(data.train_dataloader())
    assert all(isinstance(batch, THDBatch) for batch in found)
    return found  # type: ignore[return-value]


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
        ({"input_ids": [1, 2], "lengths": [2, 1]}, "Row 0 has 2 input_ids, but its lengths describe 3 slots"),
        ({"input_ids": [1, 2], "lengths": [3, -1]}, "shortest -1"),
        ({"input_ids": [1, 2], "lengths": [0.5]}, "lengths has shape .* float64"),
        ({"input_ids": [1, 2], "cu_seqlens": [1, 2]}, r"cu_seqlens is \[1, 2\]. Offsets begin with 0"),
        ({"input_ids": [1, 2], "cu_seqlens": [0, 2, 1]}, "never fall"),
        (
            {"input_ids": [1, 2, 3], "lengths": [2, 1], "cu_seqlens_padded": [0, 1, 3]},
            r"gives the slots \[1, 2\] to sequences of \[2, 1\]",
        ),
        ({"input_ids": [1, 2], "position_ids": [0]}, "2 input_ids but 1 position_ids"),
        (
            {"input_ids": [1, 2], "position_ids": [0, 1], "attention_mask": [0, 1]},
            "attention_mask is 0 before the end",
        ),
        ({"input_ids": [1, 2], "labels": [1], "lengths": [2]}, "2 input_ids but 1 labels"),
        ({"input_ids": [1, 2], "lengths": [2], "pixel_values": [[1.0]]}, "carries pixel_values, of which"),
    ],
)
def test_bad_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_packed([row])


class Counted(list[dict[str, Any]]):
    """Rows whose lengths are known, so that none is read before it is trained on."""

    @property
    def lengths(self) -> list[int]:
        return [len(row["input_ids"]) for row in self]


@pytest.mark.parametrize("kind", [list, Counted])
def test_a_row_of_several_sequences_behind_one_of_one(kind: type[list[dict[str, Any]]]) -> None:
    single, double = {"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(ValueError, match=r"Sequence 1 is bad: its position_ids start anew.*packed='off'"):
        batches_of(THDDataModule(kind([single, double]), capacity=16))
    with pytest.raises(ValueError, match=r"Row 1 carries none of lengths.* and row 0 does.*packed='off'"):
        batches_of(THDDataModule(kind([double, single]), capacity=16))
    [batch] = batches_of(THDDataModule(kind([single, double]), capacity=16, packed="off"))
    assert sorted(batch.position_ids.tolist()) == [0, 0, 0, 1, 1, 1, 2]


def test_rows_without_boundaries_are_refused_when_asked_for() -> None:
    with pytest.raises(ValueError, match=r"Rows have the keys \['input_ids'\], of which none tells"):
        Opener(packed="sequences").open([{"input_ids": [1]}])


def test_offsets_of_fixed_size_end_with_the_first_negative_entry() -> None:
    start, lengths = boundaries({"input_ids": [1, 2, 3, 4], "cu_seqlens": [0, 1, 3, 3, -1, -1]})
    assert (start.tolist(), lengths.tolist()) == ([0, 1], [1, 2])


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("form", "multiple"), [("lengths", 1), ("lengths", 4), ("cu_seqlens", 4), ("position_ids", 1)]
)
def test_written_packs_are_read_back(tmp_path: Path, suffix: str, form: Any, multiple: int) -> None:
    datasets = pytest.importorskip("datasets")
    samples, out = sequences(700, labels=True), tmp_path / f"packs{suffix}"
    counts = pack_file(samples, out, capacity=64, boundaries=form, multiple=multiple)
    assert counts["sequences"] == 700
    assert counts["real_tokens"] == sum(len(s["input_ids"]) for s in samples)
    rows = (
        datasets.Dataset.from_parquet(str(out))
        if suffix == ".parquet"
        else datasets.Dataset.from_file(str(out))
    )
    assert len(rows) == counts["packs"]
    assert all(len(row["input_ids"]) <= 64 for row in rows)
    back = open_source(out)
    found = sorted(
        (s["input_ids"].tolist(), s["labels"].tolist()) for s in (back[i] for i in range(len(back)))
    )
    assert found == sorted((s["input_ids"].tolist(), s["labels"].tolist()) for s in samples)
    kept = batches_of(THDDataModule(out, capacity=64, packed="packs"))
    assert len(kept) == counts["packs"]


def test_the_command_packs_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "d.jsonl"
    file.write_text('{"body": "abc"}\n{"body": "de"}\n{"body": "0123456789"}\n')
    args = [str(file), str(tmp_path / "o.parquet"), "--capacity", "7", "--text-key", "body"]
    main([*args, "--oversize", "drop"])
    printed = capsys.readouterr().out
    assert "2 sequences, 7 tokens in 1 packs of 7 slots, 100.0% full, dropped 1, tokens lost 11" in printed
    back = open_source(tmp_path / "o.parquet")
    assert sorted(back[i]["input_ids"].tolist() for i in range(2)) == [[*b"abc", 257], [*b"de", 257]]
    with pytest.raises(SystemExit):
        main(args)
    assert "Sequence 2 has 11 tokens but at most 7 fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "kwargs", "message"),
    [
        ("a.csv", {}, "written as .parquet or .arrow"),
        ("a.arrow", {"boundaries": "x"}, "boundaries='x': choose one of"),
        ("a.arrow", {"boundaries": "position_ids", "multiple": 4}, "cannot tell padding from tokens"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, out: str, kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_file(sequences(3), tmp_path / out, capacity=64, **kwargs)


@pytest.mark.parametrize("at", [0, 700])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pixel_values": np.ones((1, 2))}, "carries pixel_values: only tokens and labels can be packed"),
        ({"next_label": 7}, "carries next_label: only tokens"),
        ({"token_type_ids": [0, 1]}, "carries token_type_ids: only tokens"),
        ({"attention_mask": [1, 0]}, "has 2 input_ids and an attention_mask .* that is not all ones"),
        ({"position_ids": [5, 6]}, "carries position_ids: only tokens"),
    ],
)
def test_what_a_file_of_packs_has_no_room_for_is_refused(
    tmp_path: Path, at: int, more: dict[str, Any], message: str
) -> None:
    plain = {"input_ids": [3, 4], "token_type_ids": [0, 0], "attention_mask": [1, 1]}
    if "position_ids" in more:
        plain, at = {"input_ids": [3, 4]}, 700  # in the first row they would tell packs
    rows = [*[plain] * at, {**plain, **more}, *[plain] * 3]
    with pytest.raises(ValueError, match=rf"(Sequence|Sample) {at} {message}"):
        pack_file(rows, tmp_path / "o.arrow", capacity=64, window=100)
    weighted = [{"input_ids": [3, 4], "weights": 2.0}]
    with pytest.raises(ValueError, match="Sequence 0 carries weights: only tokens .* Pack while training"):
        pack_file(weighted, tmp_path / "o.arrow", capacity=64)
    assert not list(tmp_path.iterdir())


def test_labels_that_come_late_are_refused(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*[{"input_ids": [3, 4]}] * 1200, {"input_ids": [5, 6], "labels": [5, 9]}]
    with pytest.raises(ValueError, match="Sequence 1200 has labels of its own and the first 1000 have none"):
        pack_file(rows, tmp_path / "o.arrow", capacity=64, window=100)
