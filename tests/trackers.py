"""What trackers left on the disk, read back: TensorBoard's event files and W&B's offline runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Bytes of a .wandb file: its header, its blocks, and what is before every piece of a record.
_HEADER = 7
_BLOCK = 32 * 1024
_RECORD = 7
# Kinds of pieces that end a record.
_FULL = 1
_LAST = 4


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar below ``folder``, by key."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for key in events.Tags()["scalars"]:
            scalars.setdefault(key, []).extend((e.step, e.value) for e in events.Scalars(key))
    return scalars


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """Rows of history of the finished offline run below ``folder``, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_records(folder: Path, *, within_s: float = 60.0) -> list[Any]:
    """All records of the finished offline run below ``folder``."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.rglob("*.wandb")
    deadline = time.monotonic() + within_s
    while True:
        records = [wandb_internal_pb2.Record.FromString(data) for data in _records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        assert time.monotonic() < deadline, f"{file} has no record of its exit after {within_s} s"
        time.sleep(0.1)


def _records(content: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB; checksum, length and kind before every piece of a record.

    W&B may write its file after ``finish`` has returned, so the content may end anywhere, even in its header.
    """
    if len(content) < _HEADER:
        return
    assert content[:4] == b":W&B"

    start = _HEADER
    record = b""
    while start + _RECORD <= len(content):
        left_in_block = _BLOCK - start % _BLOCK
        if left_in_block < _RECORD:  # what is left of a block is filled with zeros
            start += left_in_block
            continue

        length = int.from_bytes(content[start + 4 : start + 6], "little")
        kind = content[start + 6]
        stop = start + _RECORD + length
        if stop > len(content):
            return
        record += content[start + _RECORD : stop]
        start = stop
        if kind in (_FULL, _LAST):
            yield record
            record = b""
