"""Lengths that every rank reads -> a log on disk -> the index of all sequences, once the log is whole.

The log is appended to by one process and survives kills: a block that was torn is cut off, a row that comes
again after a resume says the same again, and rows that no block covers leave the index unfinished.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.data.store.arrays import Arrays, cached_folder, reopen, save_arrays
from lightning_thd.data.store.content import content_of
from lightning_thd.data.streams.ranks.wire import Wire
from lightning_thd.data.streams.schedule import IntArray, Table
from lightning_thd.data.streams.shards import Shard

_KIND, _VERSION = "stream", 1
# Rows of the index, 48 bytes in the log. A covering entry has the length -1: row to offset were read.
_ROW = np.dtype(
    [
        ("shard", "<i4"),
        ("length", "<i4"),
        ("row", "<i8"),
        ("offset", "<i8"),
        ("weight", "<f8"),
        ("sequences", "<f8"),
    ]
)
_BLOCK = np.dtype([("count", "<u4"), ("crc", "<u4")])
_COVERS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthIndex:
    """Shard, row, length and weight of every sequence of a stream, from which epochs are planned.

    Attributes:
        shard: ints ``[N]``, number of the shard.
        row: ints ``[N]``, number in the shard.
        length: ints ``[N]``, tokens.
        offset: ints ``[N]``, byte where the record begins, where the shard has such.
        weight: fp64 ``[N]``, of the loss tokens together.
        sequences: fp64 ``[N]``, weight among sequences.
    """

    shard: npt.NDArray[np.integer]
    row: npt.NDArray[np.integer]
    length: npt.NDArray[np.integer]
    offset: npt.NDArray[np.integer]
    weight: npt.NDArray[np.float64]
    sequences: npt.NDArray[np.float64]

    def arrays(self) -> Arrays:
        """Return the arrays by name, for saving."""
        return {name: getattr(self, name) for name in self.__slots__}


def index_key(
    shards: Sequence[Shard], policies: Mapping[str, Any], cache_dir: str | Path | None
) -> dict[str, Any]:
    """Return the cache key of a length index: the content of the shards and the sample policies."""
    return {**policies, "contents": [_content(shard, cache_dir) for shard in shards]}


def _content(shard: Shard, cache_dir: str | Path | None) -> str:
    if "://" in shard.name:
        fsspec = require("fsspec", feature=f"reading {shard.name}")
        system, path = fsspec.core.url_to_fs(shard.name)
        return str(system.ukey(path))
    if hasattr(shard, "content"):
        return f"{shard.name} {shard.content}"
    return content_of(Path(shard.name), cache_dir)


class LengthLog:
    """The lengths of a stream's sequences, logged on disk while it is read."""

    def __init__(self, key: Mapping[str, Any], cache_dir: str | Path | None) -> None:
        self._folder = cached_folder(_KIND, key, cache_dir)
        self._log = self._folder.with_name(f"{self._folder.name}.log")

    def open(self) -> LengthIndex | None:
        """Open the finished index; None where there is none yet."""
        found = reopen(self._folder, version=_VERSION)
        return None if found is None else LengthIndex(**found)

    def add(self, fresh: Table, before: IntArray, after: IntArray) -> None:
        """Append the lengths of sequences just read, of the rows between two cursors ``[K]``."""
        moved = np.flatnonzero(after > before)
        rows = np.zeros(len(fresh) + len(moved), _ROW)
        for name in _ROW.names or ():
            rows[name][: len(fresh)] = fresh[name]
        covers = rows[len(fresh) :]
        covers["shard"], covers["length"] = moved, _COVERS
        covers["row"], covers["offset"] = before[moved], after[moved]
        head = np.array([(len(rows), zlib.crc32(rows.tobytes()))], _BLOCK)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as file:
            file.write(head.tobytes() + rows.tobytes())

    def mend(self) -> None:
        """Cut off a block that a kill left incomplete, before more is appended."""
        if self._log.exists():
            _, size = self._read()
            if size < self._log.stat().st_size:
                os.truncate(self._log, size)

    def finish(self, cursors: IntArray) -> LengthIndex | None:
        """Write the index if the log covers every row up to the cursors ``[K]``; else return None."""
        if (found := self.open()) is not None or not self._log.exists():
            return found
        rows, _ = self._read()
        covers = rows[rows["length"] == _COVERS]
        for shard, end in enumerate(cursors.tolist()):
            of = covers[covers["shard"] == shard]
            if _covered(of["row"], of["offset"]) < end:
                return None
        rows = rows[rows["length"] != _COVERS]
        order = np.lexsort((rows["row"], rows["shard"]))
        rows = rows[order]
        last = np.ones(len(rows), bool)  # of those with the same shard and row, the one logged last
        last[:-1] = (rows["shard"][1:] != rows["shard"][:-1]) | (rows["row"][1:] != rows["row"][:-1])
        rows = rows[last]
        index = LengthIndex(**{name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()})
        save_arrays(self._folder, index.arrays(), version=_VERSION)
        self._log.unlink()
        return index

    def share(self, cursors: IntArray, wire: Wire) -> LengthIndex | None:
        """Write the index on the first rank and open it on all, at the end of a pass; a collective.

        Ranks that do not see the first one's files are sent the index.
        """
        index = self.finish(cursors) if wire.rank == 0 else None
        if not wire.objects(index is not None)[0]:
            if wire.rank == 0:
                rank_zero_info(
                    "The length index of the stream is not whole: a part was read by a job whose cache_dir "
                    "is not here. The next pass is streamed again, and completes it."
                )
            return None
        index = self.open() if index is None else index
        if all(wire.objects(index is not None)):
            return index
        arrays = wire.objects(index.arrays() if wire.rank == 0 and index is not None else None)[0]
        return LengthIndex(**arrays)

    def _read(self) -> tuple[Table, int]:
        """Return the complete blocks of the log, and how many bytes they take."""
        content, at = self._log.read_bytes(), 0
        found = [np.empty(0, _ROW)]
        while at + _BLOCK.itemsize <= len(content):
            head = np.frombuffer(content, _BLOCK, 1, at)[0]
            start, size = at + _BLOCK.itemsize, int(head["count"]) * _ROW.itemsize
            body = content[start : start + size]
            if len(body) < size or zlib.crc32(body) != head["crc"]:
                break
            found.append(np.frombuffer(body, _ROW))
            at = start + size
        return np.concatenate(found), at


def _covered(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> int:
    """Return the end of the gapless run of spans that begins at 0."""
    end = 0
    for k in np.argsort(starts, kind="stable").tolist():
        if starts[k] > end:
            break
        end = max(end, int(stops[k]))
    return end
