"""Datasets around, or made of, Hugging Face ones that trained on other samples than they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_thd import THDDataModule
from tests.data.support import read

datasets = pytest.importorskip("datasets")

ROWS: list[dict[str, Any]] = [{"input_ids": [1, 2, 3], "text": "ab"}, {"input_ids": [4, 5], "text": "c"}]


class Wrapper:
    """Adds to the ids or the text of a dataset, and hands every other attribute on to it."""

    def __init__(self, dataset: Any, add: int) -> None:
        self._inner, self._add = dataset, add

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there yet, while it is unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, i: int) -> dict[str, Any]:
        row = self._inner[i]
        if "input_ids" in row:
            return {"input_ids": [token + self._add for token in row["input_ids"]]}
        return {"text": row["text"] + "x" * self._add}


class Subclass(datasets.Dataset):  # type: ignore[misc]
    """A Hugging Face dataset with samples of its own."""

    def __getitem__(self, key: Any) -> Any:
        row = super().__getitem__(key)
        return {"input_ids": [token + 5 for token in row["input_ids"]]}


def test_a_wrapper_that_hands_attributes_on_decides_its_samples() -> None:
    table = datasets.Dataset.from_list(ROWS).select_columns("input_ids")
    assert read(Wrapper(table, 5)) == [[6, 7, 8], [9, 10]]
    assert read(table) == [[1, 2, 3], [4, 5]]


def test_the_fingerprint_inside_of_a_wrapper_is_not_its_own() -> None:
    table = datasets.Dataset.from_list(ROWS).select_columns("text")
    ended = [[*b"abx", 257], [*b"cx", 257]]
    assert read(Wrapper(table, 1)) == ended
    assert read(Wrapper(table, 0)) == [[*b"ab", 257], [*b"c", 257]]


def test_a_subclass_decides_its_samples() -> None:
    table = datasets.Dataset.from_list(ROWS).select_columns("input_ids")
    assert read(Subclass(table.data)) == [[6, 7, 8], [9, 10]]


@pytest.mark.parametrize("kind", ["int8", "bool"])
@pytest.mark.parametrize("as_list", [False, True])
def test_padded_rows_are_found_when_the_data_is_prepared(kind: str, as_list: bool) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]},
        {"input_ids": [4, 5, 0], "attention_mask": [1, 1, 0]},
        {"input_ids": [6], "attention_mask": [1]},
    ]
    table = datasets.Dataset.from_list(rows).cast_column(
        "attention_mask", datasets.Sequence(datasets.Value(kind))
    )
    source = list(table) if as_list else table.select([2, 1, 0])
    with pytest.raises(ValueError, match=r"(Row|Sequence) 1 has 3 input_ids and an attention_mask of shape"):
        THDDataModule(source, capacity=16).setup("fit")
    with pytest.warns(UserWarning, match="1 bad rows are left out"):
        assert read(source, on_error="skip") == [[1, 2, 3], [6]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        *((mask, "Row 1 has 2 input_ids and an attention_mask") for mask in ([1], [1, None], None)),
        ([[1], [1, 1]], "attention_mask is no row of ones .* Leave it out"),
    ],
)
def test_masks_that_are_none_of_their_row(mask: Any, message: str) -> None:
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [3, 4], "attention_mask": mask}]
    ragged = "no row" in message
    source = [rows[1]] if ragged else datasets.Dataset.from_list(rows)
    with pytest.raises(ValueError, match=message):
        THDDataModule(source, capacity=16).setup("fit")


def _stream(rows: int = 10, shards: int = 3) -> Any:
    """Return a stream of several shards, of ids that tell the row."""
    made = datasets.Dataset.from_dict({"input_ids": [[i + 1] * 2 for i in range(rows)]})
    return made.to_iterable_dataset(num_shards=shards)


ACROSS = {
    "skip": lambda: _stream().skip(4),
    "take": lambda: _stream().take(8),
    "interleave": lambda: datasets.interleave_datasets([_stream(10), _stream(4)]),
    "filter by row": lambda: _stream().filter(lambda row, i: i % 4 != 0, with_indices=True),
    "batches": lambda: _stream().map(
        lambda rows: {"input_ids": [np.concatenate(rows["input_ids"]).tolist()]},
        batched=True,
        batch_size=4,
        drop_last_batch=True,
    ),
}


@pytest.mark.parametrize("case", list(ACROSS))
def test_steps_that_look_at_several_shards(case: str) -> None:
    wanted = sorted(row["input_ids"] for row in ACROSS[case]())
    with pytest.warns(UserWarning, match=r"counts rows over all its \d+ shards.* One process reads it"):
        assert read(ACROSS[case](), empty="drop") == wanted


@pytest.mark.parametrize("shards", [1, 3])
def test_shards_that_can_be_read_apart_are(shards: int) -> None:
    source = _stream(shards=shards).filter(lambda row: row["input_ids"][0] > 3).shuffle(seed=1, buffer_size=4)
    if shards == 1:
        source = source.skip(2).take(4)
    wanted = sorted(row["input_ids"] for row in source)
    assert read(source) == wanted


def _shifted(count: int = 3, length: int = 9) -> list[dict[str, list[int]]]:
    """Rows as loops of one's own have them: of n + 1 tokens the first n, and the last n as labels."""
    tokens = np.random.default_rng(0).integers(0, 50, (count, length + 1)).tolist()
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["list", "hf", "stream", "parquet"])
def test_labels_that_are_shifted_already_are_refused(tmp_path: Path, kind: str, masked: bool) -> None:
    rows = _shifted(length=24)
    if masked:
        rows = [{**row, "labels": [-100] * 5 + row["labels"][5:]} for row in rows]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    source = {
        "list": rows,
        "hf": table.with_format("torch"),
        "stream": table.to_iterable_dataset(),
        "parquet": tmp_path / "a.parquet",
    }[kind]
    with pytest.raises(ValueError, match="the labels are the next tokens, as if they were shifted already"):
        read(source, oversize="truncate")


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [7] * 20, "labels": [7] * 20}],  # both ways
        [{"input_ids": [1, 2, 3], "labels": [2, 3, 9]}],  # too few to tell
        [{"input_ids": list(range(20)), "labels": [-100] * 19 + [19]}],
        [{"input_ids": [i], "labels": [i + 1]} for i in range(20)],
    ],
)
def test_labels_that_are_not_shifted_are_taken(rows: Any) -> None:
    assert read(rows, oversize="own_pack") == sorted(row["input_ids"] for row in rows)


def test_labels_past_the_vocabulary_are_refused() -> None:
    labels = np.array([-100, 2, -100, 400])
    rows = [{"input_ids": np.array([1, 2, 3, 4], np.uint16), "labels": labels}]
    with pytest.raises(ValueError, match="has the token id or label 400, but the model's vocabulary has"):
        read(rows, vocab_size=100)
