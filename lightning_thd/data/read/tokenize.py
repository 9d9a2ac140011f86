"""Chunks of records x an encoder -> the pieces of a token store, in order, on several processes if asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd._imports import require
from lightning_thd.data.read.conversations import Kind, Records, kind_of
from lightning_thd.data.read.decode import Bad
from lightning_thd.data.read.encode import Encoder
from lightning_thd.data.read.records import Chunk
from lightning_thd.data.read.text import text_of
from lightning_thd.data.store.journal import Rows, Skipped
from lightning_thd.data.store.measure import OnError

Engine = Literal["local", "ray"]

_LOOK_AT = 1000  # records: with on_error="skip" the first of a known kind among them decides


class _Encoded(TorchDataset[Rows]):
    def __init__(self, chunks: Sequence[Chunk], encoder: Encoder) -> None:
        self._chunks, self._encoder = chunks, encoder

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, i: int) -> Rows:
        return self._encoder.encode(self._chunks[i].records())


def find_kind(chunks: Sequence[Chunk], *, records: Records, text_key: str, on_error: OnError) -> Kind:
    """Return the kind of a source's records, judged by the keys of the first.

    Raises:
        ValueError: for a source without records, and a first record of no known kind.
    """
    placed = chain.from_iterable(chunk.records() for chunk in chunks)
    first = None
    for place, record in islice(placed, _LOOK_AT if on_error == "skip" else 1):
        first = first or (place, record)
        if records != "auto":
            return records
        if not isinstance(record, Bad) and (found := kind_of(record, text_key)) is not None:
            return found
    if first is None:
        raise ValueError("The source has no record. Give at least one line, file or row.")
    place, record = first
    if isinstance(record, Bad):
        raise ValueError(f"{place}: {record.reason}")
    try:
        text_of(record, text_key)
    except ValueError as err:
        raise ValueError(f"{place}: {err}") from err
    return "text"


def tokenize(
    chunks: Sequence[Chunk],
    encoder: Encoder,
    *,
    num_workers: int = 0,
    progress: bool = False,
    engine: Engine = "local",
) -> Iterator[Rows]:
    """Encode chunk after chunk, in order, with only a few chunks in memory at a time.

    Raises:
        ValueError: for a record that cannot be encoded, unless the encoder skips those.
    """
    parts = _by_ray(chunks, encoder) if engine == "ray" else _by_processes(chunks, encoder, num_workers)
    yield from tqdm(parts, desc="Tokenising", unit="chunk", total=len(chunks), disable=not progress)


def _by_processes(chunks: Sequence[Chunk], encoder: Encoder, num_workers: int) -> Iterator[Rows]:
    loader = DataLoader(
        _Encoded(chunks, encoder),
        batch_size=None,
        num_workers=min(num_workers, len(chunks)),
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread if num_workers else None,
    )
    yield from loader


def _by_ray(chunks: Sequence[Chunk], encoder: Encoder) -> Iterator[Rows]:
    """Encode chunks, in order, on the Ray cluster that is connected, or on one started here."""
    data = require("ray.data", feature="engine='ray'")
    ray = require("ray", feature="engine='ray'")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    data.DataContext.get_current().execution_options.preserve_order = True
    data.DataContext.get_current().enable_progress_bars = False
    encoded = ray.put(_Encoded(chunks, encoder))

    def one(row: dict[str, Any]) -> dict[str, Any]:
        _one_thread(0)
        return {"id": row["id"], **_as_bytes(ray.get(encoded)[int(row["id"])])}

    for i, row in enumerate(data.range(len(chunks)).map(one).iter_rows()):
        assert int(row["id"]) == i, "Ray Data keeps the order it was asked to keep"
        yield _from_bytes(row)


def _as_bytes(rows: Rows) -> dict[str, Any]:
    """Convert rows to columns of bytes, which Arrow keeps unchanged."""
    labels = None if rows.labels is None else rows.labels.astype(np.int64).tobytes()
    return {
        "tokens": rows.tokens.tobytes(),
        "dtype": rows.tokens.dtype.str,
        "lengths": rows.lengths.astype(np.int64).tobytes(),
        "labels": labels or b"",
        "labelled": labels is not None,
        "skipped": json.dumps(rows.skipped),
    }


def _from_bytes(row: dict[str, Any]) -> Rows:
    return Rows(
        np.frombuffer(row["tokens"], row["dtype"]),
        np.frombuffer(row["lengths"], np.int64),
        np.frombuffer(row["labels"], np.int64) if row["labelled"] else None,
        tuple(Skipped(*entry) for entry in json.loads(row["skipped"])),
    )


def _as_it_is(rows: Any) -> Any:
    return rows


def _one_thread(worker: int) -> None:
    # Every process has a core of its own, and the threads of a forked tokenizer would not be there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
