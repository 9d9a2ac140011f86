"""Every kind of source gives the same sequences in the same order."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams import is_stream
from lightning_thd.data.streams.shards import open_shards
from tests.data.streams.jobs import run
from tests.data.support import Rows

ROWS = [[i % 50 for i in range(n)] for n in (3, 9, 4, 7, 2, 5, 8, 6, 3, 11)]
RECORDS = [{"input_ids": row} for row in ROWS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def columns(folder: Path, suffix: str) -> str:
    table, path = pa.table({"input_ids": ROWS}), folder / f"x.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path, row_group_size=3)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return str(path)


def generate() -> Iterator[Any]:
    yield from RECORDS


def hf() -> Any:
    return datasets.IterableDataset.from_generator(generate)


SOURCES: dict[str, Any] = {
    "jsonl": lambda folder: written(folder, "x.jsonl", LINES),
    "folder": lambda folder: str(Path(written(folder, "x.jsonl", LINES)).parent),
    "gz": lambda folder: written(folder, "x.jsonl.gz", gzip.compress(LINES)),
    "zst": lambda folder: written(folder, "x.jsonl.zst", zstandard.compress(LINES)),
    "fsspec": lambda folder: "file://" + written(folder, "x.jsonl", LINES),
    "fsspec glob": lambda folder: "file://" + written(folder, "x.jsonl", LINES).replace("x.", "*."),
    "parquet": lambda folder: columns(folder, "parquet"),
    "arrow": lambda folder: columns(folder, "arrow"),
    "torch": lambda folder: Rows(*RECORDS),
    "Hugging Face": lambda folder: hf(),
    "function": lambda folder: generate,
    "generator": lambda folder: generate(),
    "several": lambda folder: [
        written(folder, "x.jsonl", LINES[: LINES.index(b"\n") + 1]),
        Rows(*RECORDS[1:]),
    ],
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_source(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path)
    shards = open_shards(source, parts=1)
    for shard in shards:
        whole = list(shard.read(0)) if kind != "generator" else []
        for start in (0, 4, 20) if whole else ():
            assert list(map(str, shard.read(start))) == list(map(str, whole[start:]))
    seen, *_ = run(source, n=5, window=3)
    pairs = [pair for step in seen for pair in zip(step["ids"], step["tokens"], strict=True)]
    rows = {i: row for ids, tokens in pairs for i, row in zip(ids, tokens, strict=True)}
    assert [rows[i] for i in sorted(rows)] == ROWS


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind != "generator"])
def test_shards_reach_workers_that_are_spawned(tmp_path: Path, kind: str) -> None:
    for shard in open_shards(SOURCES[kind](tmp_path), parts=1):
        sent = pickle.loads(pickle.dumps(shard))
        for start in (0, 2):
            assert list(map(str, sent.read(start))) == list(map(str, shard.read(start)))


def test_data_modules_know_a_stream_by_itself(tmp_path: Path) -> None:
    for kind in ("torch", "Hugging Face", "function", "generator"):
        assert is_stream(SOURCES[kind](tmp_path))
        data = THDDataModule(SOURCES[kind](tmp_path), capacity=32, global_batch=Sequences(5))
        data.setup("fit")
        assert sum(len(batch) for step in data.train_steps() for batch in step.microbatches) == 10
    for other in (RECORDS, "x.jsonl", Path("x"), {"a": RECORDS}, datasets.Dataset.from_list(RECORDS)):
        assert not is_stream(other)


def test_text_and_conversations_are_encoded_on_the_way(tmp_path: Path) -> None:
    path = written(tmp_path, "x.jsonl", b'{"text": "hi"}\n{"prompt": "a", "completion": "b"}\n')
    seen, *_ = run(path, n=2)
    assert [row for batch in seen[0]["tokens"] for row in batch] == [[104, 105, 257], [97, 98, 257]]
    assert [row for batch in seen[0]["targets"] for row in batch] == [[105, 257, -100], [98, 257, -100]]


def test_extra_inputs_travel_and_names_do_not() -> None:
    record = {
        "input_ids": [1, 2, 3],
        "token_type_ids": [0, 1, 1],
        "weights": 0.5,
        "url": "x",
        "meta": {},
    }
    data = THDDataModule(lambda: iter([record] * 3), capacity=16, global_batch=Sequences(3))
    (step,) = list(data.train_steps())
    (batch,) = step.microbatches
    assert batch.extras["token_type_ids"].tolist() == [[0, 1, 1] * 3]
    assert set(batch.extras) == {"token_type_ids"}
    assert batch.weights is not None
    assert batch.loss_scale == pytest.approx(1 / (3 * 2 * 0.5))
