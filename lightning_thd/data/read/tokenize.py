"""Chunks of records x an encoder -> the pieces of a token store, in order, on several processes if asked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain, count, groupby, islice, zip_longest
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd._imports import require
from lightning_thd.data.read.chunks import Chunk, Place
from lightning_thd.data.read.conversations import Kind, Records, kind_of
from lightning_thd.data.read.decode import Bad
from lightning_thd.data.read.encode import (
    Encoder,
    Ids,
    as_ids,
    check_labels,
    in_range,
    refuse_unread,
    unequal,
)
from lightning_thd.data.read.long.values import LONG_BYTES, Long
from lightning_thd.data.read.long_text import NoJoint
from lightning_thd.data.read.text import text_of
from lightning_thd.data.store.journal import Rows, Skipped
from lightning_thd.data.store.measure import OnError

Engine = Literal["local", "ray"]

_LOOK_AT = 1000  # records: with on_error="skip" the first of a known kind among them decides


# The rows of a chunk; in the place of a record that is read in pieces, its number among those of the chunk.
_Work = list[Rows | int]


class _Encoded(TorchDataset[_Work]):
    def __init__(self, chunks: Sequence[Chunk], encoder: Encoder) -> None:
        self._chunks, self._encoder = chunks, encoder

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, i: int) -> _Work:
        found: _Work = []
        long = count(0)
        for is_long, run in groupby(self._chunks[i].records(), lambda placed: isinstance(placed[1], Long)):
            if is_long:
                found += [next(long) for _ in run]
            else:
                found.append(self._encoder.encode(run))
        return found


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
        record = record.outline if isinstance(record, Long) else record
        if not isinstance(record, Bad) and (found := kind_of(record, text_key)) is not None:
            return found
    if first is None:
        raise ValueError("The source has no record. Give at least one line, file or row.")
    place, record = first
    record = record.outline if isinstance(record, Long) else record
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
    shown = tqdm(parts, desc="Tokenising", unit="chunk", total=len(chunks), disable=not progress)
    for chunk, work in zip(chunks, shown, strict=True):
        yield from _in_order(chunk, work, encoder)


def _in_order(chunk: Chunk, work: _Work, encoder: Encoder) -> Iterator[Rows]:
    """Yield the rows of a chunk, encoding its long records here, piece by piece."""
    long = (placed for placed in chunk.records() if isinstance(placed[1], Long))
    for one in work:
        if isinstance(one, Rows):
            yield one._replace(more=True)
            continue
        place, record = next(long)
        assert isinstance(record, Long)
        yield from encode_long_record(encoder, place, record)
    yield Rows(np.empty(0, np.int64), np.empty(0, np.int64))


def encode_long_record(encoder: Encoder, place: Place, record: Long) -> Iterator[Rows]:
    """Encode a record that is read in pieces, with memory that does not grow with it where that is possible.

    Args:
        encoder: of its kind.
        place: of the record.
        record: of ids, or of text under a tokenizer that can be given pieces; others are read whole.

    Returns:
        Its rows, each with ``more``; one that was begun and cannot be read is taken back.

    Raises:
        ValueError: as ``Encoder.encode``.
    """
    pieces = _long_pieces(encoder, record)
    if pieces is None:
        yield encoder.encode([(place, record)])._replace(more=True)
        return
    skipped: list[Skipped] = []
    empty = np.empty(0, np.int64)
    try:
        for ids, labels in pieces:
            yield Rows(ids, np.array([len(ids)]), labels, goes_on=True, more=True)
        yield Rows(empty, np.zeros(1, np.int64), more=True)
    except NoJoint:
        rows = encoder.encode([(place, record)])
        yield rows._replace(undo=True, more=True)
    except Exception as err:  # of whatever the record or the tokenizer holds
        encoder.leave_out(place, err, skipped)
        yield Rows(empty, empty, None, tuple(skipped), undo=True, more=True)


def _long_pieces(encoder: Encoder, record: Long) -> Iterator[tuple[Ids, Ids | None]] | None:
    """Begin to encode a long record in pieces; None where it has to be encoded whole."""
    if encoder.kind == "ids" and "input_ids" in record.outline:
        return _long_ids(record)
    if encoder.kind != "text":
        return None
    value = record.text or record.values.get(encoder.text_key)
    if value is None:
        return None
    if not encoder.cuts:
        rank_zero_info(
            f"A document of more than {LONG_BYTES >> 20} MiB is tokenised at once, which takes memory in its "
            "length: only UTF-8 bytes, and fast tokenizers of words or byte pairs, give the same ids in "
            "pieces."
        )
        return None
    return ((ids, None) for ids in encoder.pieces(value.text))


def _long_ids(record: Long) -> Iterator[tuple[Ids, Ids | None]]:
    """Read the ids and labels of a long record, piece by piece."""
    refuse_unread({name: value for name, value in record.outline.items() if name != "attention_mask"})
    for mask in _numbers(record, "attention_mask"):
        refuse_unread({"attention_mask": mask})
    of_ids = (in_range(as_ids(piece, "input_ids")) for piece in _numbers(record, "input_ids"))
    if "labels" not in record.outline:
        yield from ((ids, None) for ids in of_ids)
        return
    of_labels = (check_labels(as_ids(piece, "labels")) for piece in _numbers(record, "labels"))
    totals = [sum(len(as_ids(piece)) for piece in _numbers(record, name)) for name in ("input_ids", "labels")]
    if totals[0] != totals[1]:
        raise ValueError(unequal(*totals))
    ids = labels = np.empty(0, np.int64)
    for more in zip_longest(of_ids, of_labels, fillvalue=ids):
        ids, labels = np.concatenate([ids, more[0]]), np.concatenate([labels, more[1]])
        ready = min(len(ids), len(labels))
        yield ids[:ready], labels[:ready]
        ids, labels = ids[ready:], labels[ready:]


def _numbers(record: Long, name: str) -> Iterator[Any]:
    """Read the list under a key in pieces, or at once where it is short; nothing where there is none."""
    if name in record.values:
        yield from record.values[name].numbers()
    elif name in record.short:
        yield record.short[name]


def _by_processes(chunks: Sequence[Chunk], encoder: Encoder, num_workers: int) -> Iterator[_Work]:
    loader = DataLoader(
        _Encoded(chunks, encoder),
        batch_size=None,
        num_workers=min(num_workers, len(chunks)),
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread if num_workers else None,
        # A generator of its own: the weights of a model built later do not depend on what the cache held.
        generator=torch.Generator(),
    )
    yield from loader


def _by_ray(chunks: Sequence[Chunk], encoder: Encoder) -> Iterator[_Work]:
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
        work = ray.get(encoded)[int(row["id"])]
        return {"id": row["id"], "work": [_as_bytes(part) for part in work]}

    for i, row in enumerate(data.range(len(chunks)).map(one).iter_rows()):
        assert int(row["id"]) == i, "Ray Data keeps the order it was asked to keep"
        yield [_from_bytes(part) for part in row["work"]]


def _as_bytes(part: Rows | int) -> dict[str, Any]:
    """Convert rows, or the number of a long record, to columns of bytes, which Arrow keeps unchanged."""
    rows = part if isinstance(part, Rows) else Rows(np.empty(0, np.int64), np.empty(0, np.int64))
    labels = None if rows.labels is None else rows.labels.astype(np.int64).tobytes()
    return {
        "tokens": rows.tokens.tobytes(),
        "dtype": rows.tokens.dtype.str,
        "lengths": rows.lengths.astype(np.int64).tobytes(),
        "labels": labels or b"",
        "labelled": labels is not None,
        "skipped": json.dumps(rows.skipped),
        "long": part if isinstance(part, int) else -1,
    }


def _from_bytes(row: dict[str, Any]) -> Rows | int:
    if row["long"] >= 0:
        return int(row["long"])
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
