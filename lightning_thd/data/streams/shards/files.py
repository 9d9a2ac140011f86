"""Paths and globs -> shards of files: JSON lines, and columns of Parquet or Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_thd._imports import require
from lightning_thd.data.read.files import KINDS, PACKED, suffix_of, unpacked
from lightning_thd.data.read.records import as_written, parse_line
from lightning_thd.data.streams.shards.base import Mark, Rows, Shard

_ROWS = 1024  # rows of a Parquet batch: some megabytes of tokens


@dataclass(frozen=True, slots=True)
class LineShard:
    """A JSONL file, perhaps compressed, on a disk or wherever fsspec reaches."""

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Parse the lines from row ``start`` on; blank lines are no rows."""
        row = 0
        suffix = Path(self.name.lower()).suffix
        with _open(self.name) as file:
            packed = suffix in PACKED
            for line in _lines(unpacked(file, self.name, suffix=suffix)) if packed else file:
                if line.strip():
                    if row >= start:
                        yield row, parse_line(line), None
                    row += 1


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A Parquet or Arrow file: one record a row."""

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Read batches of rows; those before ``start`` are skipped without conversion."""
        row = 0
        for batch in self._batches():
            if row + batch.num_rows > start:
                first = max(0, start - row)
                for i, record in enumerate(batch.slice(first).to_pylist()):
                    yield row + first + i, as_written(record), None
            row += batch.num_rows

    def _batches(self) -> Iterator[Any]:
        arrow = require("pyarrow", feature=f"reading {self.name}")
        with _open(self.name) as file:
            if self.name.endswith(".parquet"):
                parquet = require("pyarrow.parquet", feature=f"reading {self.name}")
                yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
                return
            try:
                reader = arrow.ipc.open_file(file)
            except arrow.ArrowInvalid:
                file.seek(0)
                yield from arrow.ipc.open_stream(file)
                return
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


def file_shard(name: str) -> Shard:
    """Make the shard of a file by its suffix."""
    size = Path(name).stat().st_size if "://" not in name else 1
    kind, packed = KINDS.get(suffix_of(name)), Path(name.lower()).suffix in PACKED
    if kind == "JSONL":
        return LineShard(name, size)
    if kind == "column" and not packed:
        return ColumnShard(name, size)
    raise ValueError(
        f"{name} cannot be streamed. Shards are .jsonl files, which may be compressed ({', '.join(PACKED)}), "
        ".parquet and .arrow files; pass datasets.load_dataset(..., streaming=True) for others, tars too."
    )


def _open(name: str) -> Any:
    if "://" in name:
        return require("fsspec", feature=f"reading {name}").open(name, "rb").open()
    return Path(name).open("rb")


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Split blocks of bytes into lines."""
    begun: list[bytes] = []  # the parts of a line that spans blocks
    for block in blocks:
        first, *others = block.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    yield b"".join(begun)
