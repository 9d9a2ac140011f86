"""Errors about rows of ids name the file and the row, before the first step, whatever the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.streams import Stream
from tests.data.chats import make_tokenizer

VOCABULARY = 64
ROWS = [[1, 2, 3], [4, 5], [6, 7, 8], [9, 1], [2, 3]]
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "red"}]


def write_parquet(path: Path, columns: dict[str, Any]) -> str:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


def write_arrow(path: Path, columns: dict[str, Any]) -> str:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return str(path)


WRITERS = {".parquet": write_parquet, ".arrow": write_arrow}


def begin(source: Any, folder: Path, **options: Any) -> THDDataModule:
    """Set up and make the loader, as far as a Trainer comes before the first step."""
    options = {"capacity": 256, "global_batch": Packs(1), "vocab_size": VOCABULARY, **options}
    data = THDDataModule(source, cache_dir=folder / "cache", **options)
    data.setup("fit")
    data.train_dataloader()
    return data


def read(source: Any, folder: Path, **options: Any) -> list[list[int]]:
    loader = begin(source, folder, **options).train_dataloader()
    return [ids.tolist() for batch in loader for ids in batch.unpack(batch.input_ids)]


def third_of(columns: dict[str, Any], fault: dict[str, Any]) -> dict[str, Any]:
    """Return columns in whose row 3 the values of ``fault`` stand."""
    return {name: [*values[:3], fault.get(name, values[3]), *values[4:]] for name, values in columns.items()}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "id above the vocabulary": ({"input_ids": [9, 100]}, "has the token id 100, but the model's vocabulary"),
    "label above it": ({"labels": [9, 100]}, "has the label 100, but the model's vocabulary has 64"),
    "negative id": ({"input_ids": [9, -5]}, "has the token id -5"),
    "null in the ids": ({"input_ids": [9, None]}, "has a null under 'input_ids', at position 1 of 2"),
    "null in the labels": ({"labels": [None, 1]}, "has a null under 'labels', at position 0 of 2"),
    "label that is none": ({"labels": [9, -3]}, "has the label -3"),
    "labels of another length": ({"labels": [9]}, "has 2 input_ids but 1 labels"),
    "negative weight": ({"weights": [1.0, -2.0]}, "has the weight -2.0"),
    "no tokens": ({"input_ids": None, "labels": None}, "has no tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("suffix", WRITERS)
def test_a_row_of_columns_is_named_by_its_file(tmp_path: Path, suffix: str, fault: str) -> None:
    changed, words = FAULTS[fault]
    columns: dict[str, Any] = {"input_ids": ROWS}
    columns |= {"labels": ROWS} if "labels" in changed else {}
    columns |= {"weights": [[1.0] * len(row) for row in ROWS]} if "weights" in changed else {}
    WRITERS[suffix](tmp_path / f"a{suffix}", columns)
    WRITERS[suffix](tmp_path / f"b{suffix}", third_of(columns, changed))
    with pytest.raises(ValueError, match=rf"b\{suffix}, row 3 ") as caught:
        begin(f"{tmp_path}/*{suffix}", tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_of_another_type_are_named_by_their_file(tmp_path: Path, suffix: str) -> None:
    columns = {"input_ids": [[float(i) for i in row] for row in ROWS]}
    file = WRITERS[suffix](tmp_path / f"a{suffix}", columns)
    with pytest.raises(ValueError, match=rf"a\{suffix}, row 0: input_ids holds float64 values"):
        begin(file, tmp_path)


def test_in_a_mixture_rows_keep_their_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"input_ids": ROWS})
    write_parquet(tmp_path / "b.parquet", third_of({"input_ids": ROWS}, {"input_ids": [1, 99]}))
    listed = [{"input_ids": row} for row in ROWS]
    sources = {
        "list": (listed, 1.0),
        "a": (f"{tmp_path}/a.parquet", 1.0),
        "b": (f"{tmp_path}/b.parquet", 1.0),
    }
    with pytest.raises(ValueError, match=r"b\.parquet, row 3 of the train data has the token id 99"):
        begin(sources, tmp_path)
    listed[2] = {"input_ids": [1, 200]}
    with pytest.raises(ValueError, match="Sequence 2 of the train data has the token id 200"):
        begin(sources, tmp_path)


SOURCES = {
    "list": lambda rows, folder: rows,
    "dataset": lambda rows, folder: Dataset.from_list(rows),
    "jsonl": lambda rows, folder: write_jsonl(folder, rows),
}


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "a.jsonl")


@pytest.mark.parametrize("source", SOURCES)
def test_a_label_above_the_vocabulary_is_refused_before_the_first_step(tmp_path: Path, source: str) -> None:
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    rows[3] = {"input_ids": [9, 1], "labels": [-100, VOCABULARY]}
    made = SOURCES[source](rows, tmp_path)
    for _ in range(2):  # the second time from the cache
        place = "a.jsonl, line 4" if source == "jsonl" else "Sequence 3"
        with pytest.raises(ValueError, match=f"{place} of the train data has the label {VOCABULARY}, but"):
            begin(made, tmp_path)
    begin(made, tmp_path, vocab_size=VOCABULARY + 1)


@pytest.mark.parametrize("skip", [False, True])
def test_the_line_of_an_id_above_the_vocabulary_is_named(tmp_path: Path, skip: bool) -> None:
    """Lines that are blank or were left out count, and so do those of files before."""
    write_jsonl(tmp_path, [{"input_ids": row} for row in ROWS])
    lines = [json.dumps({"input_ids": row}) for row in ROWS]
    lines[1] = "not JSON" if skip else ""
    lines[3] = json.dumps({"input_ids": [9, 100]})
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    options = {"on_error": "skip"} if skip else {}
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ValueError, match=r"b\.jsonl, line 4 of the train data has the token id 100, but"):
            begin(f"{tmp_path}/*.jsonl", tmp_path, **options)


@pytest.mark.parametrize("source", [*SOURCES, "stream"])
def test_a_null_inside_a_list_of_ids_is_named(tmp_path: Path, source: str) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": row} for row in ROWS]
    rows[3] = {"input_ids": [9, 1, None, 4]}
    made = Stream(write_jsonl(tmp_path, rows)) if source == "stream" else SOURCES[source](rows, tmp_path)
    with pytest.raises(ValueError, match="has a null under 'input_ids', at position 2 of 4"):
        read(made, tmp_path)


CONTAINERS: dict[str, Any] = {
    **SOURCES,
    "parquet": lambda rows, folder: columns_of(rows, folder, ".parquet"),
    "arrow": lambda rows, folder: columns_of(rows, folder, ".arrow"),
    "stream of lines": lambda rows, folder: Stream(write_jsonl(folder, rows)),
    "stream of columns": lambda rows, folder: Stream(columns_of(rows, folder, ".parquet")),
    "generator": lambda rows, folder: lambda: iter([dict(row) for row in rows]),
}


def columns_of(rows: list[dict[str, Any]], folder: Path, suffix: str) -> str:
    ids = pa.array([row["input_ids"] for row in rows], pa.list_(pa.int64()))
    return WRITERS[suffix](
        folder / f"a{suffix}", {"input_ids": ids, "messages": [row.get("messages") for row in rows]}
    )


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
def test_null_ids_beside_messages_are_a_conversation(tmp_path: Path, container: str) -> None:
    tokenizer = make_tokenizer()
    [expected] = read([{"messages": TALK}], tmp_path / "plain", tokenizer=tokenizer, vocab_size=None)
    source = CONTAINERS[container]([{"input_ids": None, "messages": TALK}] * 2, tmp_path)
    assert read(source, tmp_path, tokenizer=tokenizer, vocab_size=None) == [expected, expected]


@pytest.mark.parametrize("container", ["jsonl", "stream of lines"])
def test_null_ids_alone_are_named(tmp_path: Path, container: str) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": row} for row in ROWS]
    rows[3] = {"input_ids": None}
    with pytest.raises(ValueError, match=r"a\.jsonl, (line 4: 'input_ids' is null|row 3: .* has no tokens)"):
        read(CONTAINERS[container](rows, tmp_path), tmp_path)
