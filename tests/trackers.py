"""What trackers left on the disk, read back: TensorBoard's event files and W&B's offline runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _RECORD = 7, 32 * 1024, 7  # bytes: of a .wandb file, of its blocks, before every record
_FULL, _LAST = 1, 4  # kinds of records that end one


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar below ``folder``, by key."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for key in events.Tags()["scalars"]:
            found.setdefault(key, []).extend((e.step, e.value) for e in events.Scalars(key))
    return found


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
    """LevelDB's log format: blocks of 32 KiB; checksum, length and kind before every piece of a record."""
    assert content[:4] == b":W&B"
    at, parts = _HEADER, b""
    while at + _RECORD <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _RECORD:  # what is left of a block is filled with zeros
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + _RECORD : at + _RECORD + length]
        at += _RECORD + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
