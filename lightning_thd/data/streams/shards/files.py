"""Paths and globs -> shards of files: JSON lines, columns of Arrow, WebDataset tars."""

from __future__ import annotations

import glob
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_thd._imports import require
from lightning_thd.data.read.files import Unpacking
from lightning_thd.data.read.records import as_written
from lightning_thd.data.streams.shards.base import Bad, Mark, Rows, Shard

_LINES = (".jsonl", ".ndjson")
_PACKED = (".gz", ".zst")
_COLUMNS = (".parquet", ".arrow")
_ROWS = 1024  # rows of a parquet batch: some megabytes of tokens


@dataclass(frozen=True, slots=True)
class LineShard:
    """A JSONL file, ``.gz`` and ``.zst`` included, on a disk or wherever fsspec reaches."""

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Parse the lines from row ``start`` on; blank lines are no rows."""
        row = 0
        with _open(self.name) as file:
            for line in file:
                if line.strip():
                    if row >= start:
                        yield row, _parse(line), None
                    row += 1


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """A parquet or arrow file: one record a row."""

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
        with _open(self.name) as file:
            if self.name.endswith(".parquet"):
                require("pyarrow", feature=f"reading {self.name}")
                from pyarrow import parquet

                yield from parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
                return
            arrow = require("pyarrow", feature=f"reading {self.name}")
            try:
                reader = arrow.ipc.open_file(file)
            except arrow.ArrowInvalid:
                file.seek(0)
                yield from arrow.ipc.open_stream(file)
                return
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)


@dataclass(frozen=True, slots=True)
class TarShard:
    """A WebDataset tar: files that share a name up to its first dot are one record.

    ``x.json`` is merged into the record, ``x.txt`` becomes ``text``, and ``x.KEY.npy`` becomes ``KEY``.
    """

    name: str
    size: int

    def read(self, start: int, mark: Mark | None = None) -> Rows:
        """Read the members one after another; a record ends where the name changes."""
        with _open(self.name) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
            row, key = 0, None
            record: Any = {}
            for member in tar:
                if not member.isfile():
                    continue
                stem, _, kind = member.name.partition(".")
                if key is not None and stem != key:
                    if row >= start:
                        yield row, record, None
                    row, record = row + 1, {}
                key = stem
                content = tar.extractfile(member)
                if row >= start and content is not None:
                    record = _merged(record, kind, content.read())
            if key is not None and row >= start:
                yield row, record, None


def file_shard(name: str) -> Shard:
    """Make the shard of a file by its suffix.

    Raises:
        ValueError: for a file of another kind.
    """
    size = Path(name).stat().st_size if "://" not in name else 1
    plain = name.removesuffix(".gz").removesuffix(".zst")
    if plain.endswith(_LINES):
        return LineShard(name, size)
    if name.endswith(_COLUMNS):
        return ColumnShard(name, size)
    if plain.endswith(".tar") or name.endswith(".tgz"):
        return TarShard(name, size)
    raise ValueError(
        f"{name} cannot be streamed. Shards are .jsonl[.gz|.zst], .parquet, .arrow and .tar files."
    )


def expanded(path: str) -> list[str]:
    """List the files of a path, a folder or a glob, in order.

    Raises:
        ValueError: where there is none.
    """
    if "://" in path:
        fsspec = require("fsspec", feature=f"reading {path}")
        if not any(c in path for c in "*?["):
            return [path]
        system, inside = fsspec.core.url_to_fs(path)
        names = sorted(system.unstrip_protocol(name) for name in system.glob(inside))
    else:
        names = sorted(glob.glob(path, recursive=True)) if any(c in path for c in "*?[") else [path]
        if names == [path] and Path(path).is_dir():
            names = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
        names = [name for name in names if Path(name).is_file()]
    if not names:
        raise ValueError(f"No file is found for {path!r}. Pass paths or globs of files that exist.")
    return names


def _open(name: str) -> Any:
    file = _as_it_is(name)
    if not name.endswith(_PACKED) or name.endswith(".tar.gz"):  # tarfile unpacks it
        return file
    return io.BufferedReader(Unpacking(file, Path(name).suffix))


def _as_it_is(name: str) -> Any:
    if "://" in name:
        return require("fsspec", feature=f"reading {name}").open(name, "rb").open()
    return Path(name).open("rb")


def _parse(line: bytes) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as err:
        return Bad(f"not JSON ({err})")
    return record if isinstance(record, dict) else Bad(f"a {type(record).__name__}, wanted a JSON object")


def _merged(record: Any, kind: str, content: bytes) -> Any:
    """Return a tar's record with one more of its files added."""
    if isinstance(record, Bad):
        return record
    if kind == "json":
        found = _parse(content)
        return found if isinstance(found, Bad) else {**record, **found}
    if kind in ("txt", "text"):
        return {**record, "text": content.decode(errors="replace")}
    if kind.endswith("npy"):
        key = kind.removesuffix("npy").rstrip(".") or "input_ids"
        try:
            return {**record, key: np.load(io.BytesIO(content), allow_pickle=False)}
        except ValueError as err:
            return Bad(f"{kind} is no array ({err})")
    return record  # other files belong to other readers
