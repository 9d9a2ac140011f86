"""Sources of every kind: the same sequences in the same order, also from a state, and read once."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch.distributed as dist
from pyarrow import parquet
from torch.utils.data import IterableDataset, get_worker_info

from lightning_thd import Sequences, THDDataModule
from lightning_thd.data.streams.shards import is_stream, open_shards
from lightning_thd.packing.mixtures import Mixing
from tests.data.streams.jobs import caught, counted, run
from tests.data.support import Rows
from tests.ranks import run_ranks

ROWS = [[i % 50 for i in range(n)] for n in (3, 9, 4, 7, 2, 5, 8, 6, 3, 11)]
RECORDS = [{"input_ids": row} for row in ROWS]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def columns(folder: Path, suffix: str) -> str:
    table = pa.table({"input_ids": ROWS})
    path = folder / f"x.{suffix}"
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
    "zst": lambda folder: written(folder, "x.jsonl.zst", pytest.importorskip("zstandard").compress(LINES)),
    "fsspec": lambda folder: "file://" + written(folder, "x.jsonl", LINES),
    "fsspec glob": lambda folder: "file://" + written(folder, "x.jsonl", LINES).replace("x.", "*."),
    "parquet": lambda folder: columns(folder, "parquet"),
    "arrow": lambda folder: columns(folder, "arrow"),
    "torch": lambda folder: Rows(*RECORDS),
    "Hugging Face": lambda folder: hf(),
    "function": lambda folder: generate,
    "generator": lambda folder: generate(),
    "several": lambda folder: [written(folder, "x.jsonl", LINES.splitlines()[0]), Rows(*RECORDS[1:])],
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


def test_data_modules_know_a_stream_by_itself(tmp_path: Path) -> None:
    for kind in ("torch", "Hugging Face", "function", "generator"):
        assert is_stream(SOURCES[kind](tmp_path))
        data = THDDataModule(SOURCES[kind](tmp_path), capacity=32, global_batch=Sequences(5))
        data.setup("fit")
        assert sum(len(batch) for step in data.train_steps() for batch in step.microbatches) == 10
    for other in (RECORDS, "x.jsonl", Path("x"), {"a": RECORDS}, datasets.Dataset.from_list(RECORDS)):
        assert not is_stream(other)


def test_text_and_conversations_are_encoded_on_the_way(tmp_path: Path) -> None:
    for line, tokens, targets in (
        (b'{"text": "hi"}\n', [104, 105, 257], [105, 257, -100]),
        (b'{"prompt": "a", "completion": "b"}\n', [97, 98, 257], [98, 257, -100]),
    ):
        path = written(tmp_path, "x.jsonl", line * 2)
        seen, *_ = run(path, n=2)
        assert [row for batch in seen[0]["tokens"] for row in batch] == [tokens] * 2
        assert [row for batch in seen[0]["targets"] for row in batch] == [targets] * 2


def test_extra_inputs_travel_and_names_do_not() -> None:
    record = {"input_ids": [1, 2, 3], "token_type_ids": [0, 1, 1], "weights": 0.5, "url": "x", "meta": {}}
    data = THDDataModule(lambda: iter([record] * 3), capacity=16, global_batch=Sequences(3))
    (step,) = list(data.train_steps())
    (batch,) = step.microbatches
    assert batch.extras["token_type_ids"].tolist() == [[0, 1, 1] * 3]
    assert set(batch.extras) == {"token_type_ids"}
    assert batch.weights is not None
    assert batch.loss_scale == pytest.approx(1 / (3 * 2 * 0.5))


def wait_for_readers() -> None:
    """Wait until the readers of loaders that are gone have noticed it."""
    gc.collect()  # of other tests of this process too
    for thread in threading.enumerate():
        if thread.name == "thd-stream":
            thread.join(10.0)
            assert not thread.is_alive()


class Continuing(IterableDataset):
    """Goes on where it was left, in another order in each pass; the last record's state begins the next."""

    made = 0

    def __init__(self, size: int = 300) -> None:
        self._size = size
        self._number = 0
        self._at = 0

    def _records(self, at: int) -> Iterator[tuple[int, Any]]:
        order = np.random.default_rng(self._number).permutation(self._size)
        for now, i in enumerate(order[at:].tolist(), at + 1):
            type(self).made += 1
            yield now, {"input_ids": [self._number, *[i] * (i % 7 + 1)]}

    def __iter__(self) -> Iterator[Any]:
        for place, record in self._records(self._at):
            self._at = place % self._size
            ended = place == self._size
            self._number += ended
            yield record

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]
        self._number = state["number"]


class Resumable(Continuing):
    """Begins its next pass in each iteration, and has a state only after its first record."""

    def __init__(self, size: int = 300) -> None:
        self._size = size
        self._number = -1
        self._loaded = 0

    def __iter__(self) -> Iterator[Any]:
        first = self._loaded
        self._number = self._number + (not self._loaded)
        self._loaded = 0
        for place, record in self._records(first):
            self._at = place
            yield record

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state["at"]
        self._number = state["number"]


@pytest.mark.parametrize("kind", [Resumable, Continuing])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_a_source_with_a_state_goes_on_without_what_it_gave(kind: Any, workers: int) -> None:
    assert is_stream(kind())
    kwargs: dict[str, Any] = {"n": 20, "window": 30, "num_workers": workers}
    whole, *_ = run(kind(), epochs=2, **kwargs)
    assert counted([(whole, None)]) == dict.fromkeys(range(300), 2)
    for cut in (1, 11, 18) if workers else (11, 16):
        first, state = run(kind(), steps=cut, epochs=2, **kwargs)
        wait_for_readers()
        kind.made = 0
        rest, *_ = run(kind(), state=state, steps=1, **kwargs)
        assert first + rest == whole[: cut + 1]
        if not workers:
            assert kind.made < 160  # not those before the last state, and each that was pending twice


@pytest.mark.parametrize("dry", ["restart", "rest", "stop"])
@pytest.mark.parametrize("kind", [Resumable, Continuing])
def test_each_pass_keeps_its_order_whatever_its_cut(kind: Any, dry: Any) -> None:
    for sizes, n in (((2,), 1), ((20,), 4), ((9, 70), 11)):
        kwargs: dict[str, Any] = {"n": n, "window": 8, "mixing": Mixing(dry=dry), "epochs": 99}
        old, *new = ({f"{k}": (kind(size), 2 + k) for k, size in enumerate(sizes)} for _ in range(9))
        whole, *_ = run(old, steps=9, **kwargs)
        for cut in range(1, 9):
            wait_for_readers()
            first, state = run(old, steps=cut, **kwargs)
            wait_for_readers()
            assert first + run((old, new[cut - 1])[cut % 2], state=state, steps=9 - cut, **kwargs)[0] == whole


def records() -> Iterator[dict[str, Any]]:
    return ({"input_ids": np.full(i % 7 + 2, i % 50)} for i in range(300))


@pytest.mark.filterwarnings("ignore:The stream cannot save its position")
def test_a_function_is_read_again_and_an_iterator_is_not() -> None:
    kwargs: dict[str, Any] = {"n": 20, "window": 30}
    whole, state = run(records, steps=7, **kwargs)
    assert len(run(records, state=state, steps=2, **kwargs)[0]) == 2
    assert run(records, epochs=2, **kwargs)[0][:7] == whole
    generator = records()
    mapped = map(dict, records())
    for made in (lambda: generator, lambda: map(dict, records()), lambda: lambda: mapped):
        with pytest.raises(ValueError, match="can be read only once.*a new one.$"):  # not a record to skip
            run(made(), epochs=2, on_error="skip", **kwargs)


class OfWorker(IterableDataset):
    """Splits itself by worker, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, 20, every):
            yield {"input_ids": [i, i + 1]}


@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_datasets_that_split_themselves_by_worker_give_all(tmp_path: Path) -> None:
    seen, *_ = run([OfWorker(), OfWorker()], n=10, num_workers=2)
    rows = sorted(row[0] for step in seen for batch in step["tokens"] for row in batch)
    assert rows == sorted([*range(20), *range(20)])


class AsksTorch(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": [i, 2]} for i in range(dist.get_rank(), 20, dist.get_world_size()))


def asks_nothing() -> Iterator[Any]:
    yield from ({"input_ids": [1, 2]} for _ in range(20))


def split_job() -> list[str]:
    rank = dist.get_rank()
    once = asks_nothing()
    sources = (AsksTorch(), lambda: iter([{"input_ids": [rank, 2]}] * 20), asks_nothing, lambda: once)
    return [caught(source, n=4) for source in sources]


def test_a_source_that_splits_itself_by_rank_is_refused() -> None:
    for messages in run_ranks(split_job, 2, timeout_s=60):
        assert "AsksTorch has other first records on rank 1 than on rank 0, so it splits" in messages[0]
        assert "make(part, parts)" in messages[0]
        assert "has other first records on rank 1" in messages[1]
        assert messages[2] == "5 steps"
        assert "can be read only once" in messages[3]  # compared between ranks, it is read
