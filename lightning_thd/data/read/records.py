"""Files or a dataset of text, ids, prompts or conversations -> records, in chunks that any process can read.

A record that cannot be read comes as ``Bad``, so that whoever asks may skip it and go on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from lightning_thd._imports import require
from lightning_thd.data.read.decode import Bad, decode, parse_json
from lightning_thd.data.read.files import COLUMNS, LINES, TABLES, SourceFile, find_files
from lightning_thd.data.store.measure import MapDataset

CHUNK_BYTES = 1 << 22  # of text in a chunk: some 4 s of a tokenizer at 1 MB/s
_CHUNK_ROWS = 1024
# Keys that a record has, and a file that wraps records has not.
_OF_RECORDS = ("text", "input_ids", "messages", "conversations", "conversation", "prompt", "instruction")


Record = str | dict[str, Any] | Bad


class Place(Protocol):
    """The place of a record in its source, printed for messages."""

    def __str__(self) -> str: ...


class Chunk(Protocol):
    """A part of a source, whose records one process reads."""

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the records and where each stands."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file as a place; its number is counted only when it is printed."""

    name: str
    path: Path
    offset: int

    def __str__(self) -> str:
        number, left = 1, self.offset
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
        return f"{self.name}, line {number}"


@dataclass(frozen=True, slots=True)
class JsonlChunk:
    """The lines of a JSONL file that begin at byte ``start`` up to ``stop``."""

    file: SourceFile
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the objects of the lines, skipping blank ones."""
        with self.file.path.open("rb") as file:
            at = self.start
            if at:  # a line that begins before the chunk belongs to the one before
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < self.stop and (line := file.readline()):
                if line.strip():
                    found = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
                    if not isinstance(found, dict | Bad):
                        found = Bad(f"a {type(found).__name__}, wanted one JSON object a line.")
                    yield Line(self.file.name, self.file.path, at), found
                at += len(line)


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """Entries ``start`` to ``stop`` of a JSON file that is one array."""

    file: SourceFile
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the entries: objects or strings."""
        for i, entry in enumerate(_json_entries(self.file)[self.start : self.stop], self.start):
            found = (
                entry if isinstance(entry, str | dict) else Bad(f"a {type(entry).__name__}, not an object.")
            )
            yield f"{self.file.name}, entry {i}", found


@lru_cache(maxsize=1)
def _json_entries(file: SourceFile) -> list[Any]:
    found = parse_json(file.path.read_bytes())
    if isinstance(found, dict):
        found = _wrapped(found) or [found]
    if isinstance(found, Bad):
        raise ValueError(f"{file.name}: {found.reason}")
    return found if isinstance(found, list) else [found]


def _wrapped(found: dict[str, Any]) -> list[Any] | None:
    """Return the list in ``{"version": 1, "data": [...]}``; None for a record whose lists are its own."""
    lists = [value for value in found.values() if isinstance(value, list)]
    if len(lists) != 1 or any(name in found for name in _OF_RECORDS):
        return None
    objects = all(isinstance(entry, dict) for entry in lists[0])
    return lists[0] if objects or len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class TableChunk:
    """The rows of a table of separated values that begin at byte ``start`` up to ``stop``."""

    file: SourceFile
    names: tuple[str, ...]
    separator: str
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the rows as dicts of the column names."""
        with self.file.path.open("rb") as file:
            file.seek(self.start)
            # What is no UTF-8 stays recognisable, so that the row it is in can be told.
            text = file.read(self.stop - self.start).decode(errors="surrogateescape")
        lines = list(io.StringIO(text, newline=""))  # ends of lines alone, no other separators of Unicode
        offset, done = self.start, 0
        for row, line in _rows(lines, self.separator):
            place = Line(self.file.name, self.file.path, offset)
            read = "".join(lines[done:line]).encode(errors="surrogateescape")
            offset += len(read)
            done = line
            if not row:
                continue
            if isinstance(as_text := decode(read), Bad):
                yield place, as_text
            elif len(row) != len(self.names):
                yield place, Bad(f"{len(row)} cells, but {len(self.names)} columns {list(self.names)}.")
            else:
                yield place, dict(zip(self.names, row, strict=True))


def _rows(lines: list[str], separator: str) -> list[tuple[list[str], int]]:
    """Parse a table, and return its rows with the number of lines up to the end of each."""
    limit = csv.field_size_limit(2**31 - 1)  # of the process; documents are longer than its 128 KiB
    try:
        reader = csv.reader(lines, delimiter=separator)
        return [(row, reader.line_num) for row in reader]
    finally:
        csv.field_size_limit(limit)


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Text files, each one document."""

    files: tuple[SourceFile, ...]

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the files whole."""
        for file in self.files:
            yield file.name, decode(file.path.read_bytes())


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    file: SourceFile
    part: int
    first_row: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the rows as dicts; what is null is left out."""
        for i, row in enumerate(read_part(self.file, self.part).to_pylist(), self.first_row):
            yield f"{self.file.name}, row {i}", without_nulls(row)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows ``start`` to ``stop`` of a dataset as a chunk."""

    dataset: MapDataset
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the rows."""
        for i in range(self.start, self.stop):
            try:
                row: Any = self.dataset[i]
            except Exception as err:  # whatever the user's dataset raises
                yield f"row {i}", Bad(f"the dataset raised {type(err).__name__}: {err}")
                continue
            yield f"row {i}", without_nulls(row) if isinstance(row, dict) else row


def without_nulls(value: Any) -> Any:
    """Return a value without its null keys, which columns of structs add to records lacking them."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def read_part(file: SourceFile, part: int) -> Any:
    """Read a row group or a record batch as an Arrow table."""
    pa = require("pyarrow", feature=f"reading {file.suffix} files")
    if file.suffix == ".parquet":
        return (
            require("pyarrow.parquet", feature="reading .parquet files")
            .ParquetFile(file.path)
            .read_row_group(part)
        )
    return pa.Table.from_batches([open_arrow(file).to_batches()[part]])


def open_arrow(file: SourceFile) -> Any:
    """Map an Arrow file, of the stream or the file format, into memory as a table."""
    pa = require("pyarrow", feature="reading .arrow files")
    try:
        source = pa.memory_map(str(file.path))
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(pa.memory_map(str(file.path))).read_all()
    except pa.ArrowInvalid as err:
        raise ValueError(f"{file.name} is no Arrow file ({err}). Write it anew.") from err


def file_chunks(
    source: str | Path | list[SourceFile],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    cache_dir: str | Path | None = None,
) -> list[Chunk]:
    """Cut files into chunks of records, of ``chunk_bytes`` unless one record or file has more.

    Raises:
        ValueError: for what does not exist or holds no records.
    """
    files = source if isinstance(source, list) else find_files(source, cache_dir=cache_dir)
    chunks: list[Chunk] = []
    texts: list[SourceFile] = []
    for file in files:
        cut = _CUT.get(file.suffix)
        if cut is None:
            _refuse_unnamed_records(file)
            texts.append(file)
        else:
            chunks += cut(file, chunk_bytes)
    if texts and chunks:
        raise ValueError(
            f"{texts[0].name} is one document of text, and the other files hold records. Give files of "
            "one kind."
        )
    return chunks or list(_grouped(texts, chunk_bytes))


def _refuse_unnamed_records(file: SourceFile) -> None:
    """Refuse a text file that holds JSON objects, as it would become one document."""
    if file.suffix:
        return
    with file.path.open("rb") as opened:
        line = opened.readline(1 << 20)
    if line.startswith(b"{") and isinstance(parse_json(line), dict):
        raise ValueError(
            f"{file.name} holds JSON objects, a line each. Name it .jsonl, or .txt for one document."
        )


def _cut_lines(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    size = file.path.stat().st_size
    return [JsonlChunk(file, at, min(at + chunk_bytes, size)) for at in range(0, size, chunk_bytes)]


def _cut_json(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    with file.path.open("rb") as opened:
        head = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    first, _, rest = head.partition(b"\n")
    if head.startswith(b"{") and rest.strip() and isinstance(parse_json(first), dict):
        return _cut_lines(file, chunk_bytes)  # one object a line, under another name
    total = len(_json_entries(file))
    return [JsonChunk(file, at, min(at + _CHUNK_ROWS, total)) for at in range(0, total, _CHUNK_ROWS)]


def _cut_table(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    """Cut a table into chunks at line ends outside quotes, since a quoted cell may hold line breaks."""
    separator = "\t" if file.suffix == ".tsv" else ","
    edges, quotes, at = [0], 0, 0
    head: list[bytes] = []
    with file.path.open("rb") as opened:
        for line in opened:
            quotes += line.count(b'"')
            at += len(line)
            if len(edges) == 1:
                head.append(line)
            if quotes % 2 == 0 and (len(edges) == 1 or at - edges[-1] >= chunk_bytes):
                edges.append(at)
    if quotes % 2:
        raise ValueError(f"{file.name}: a quote is opened and never closed. Mend the file.")
    if edges[-1] != at:
        edges.append(at)
    text = decode(b"".join(head))
    if isinstance(text, Bad):
        raise ValueError(f"{file.name}, line 1: {text.reason}")
    names = tuple(next(csv.reader(io.StringIO(text, newline=""), delimiter=separator), []))
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"{file.name}: its first line {text[:80]!r} gives no column names, each once. Put one there."
        )
    return [TableChunk(file, names, separator, a, b) for a, b in pairwise(edges[1:])]


def _cut_columns(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    sizes = part_sizes(file)
    first, chunks = 0, list[Chunk]()
    for part, size in enumerate(sizes):
        chunks.append(ColumnChunk(file, part, first))
        first += size
    return chunks


def part_sizes(file: SourceFile) -> list[int]:
    """Count the rows of every row group of a Parquet file or record batch of an Arrow file."""
    if file.suffix == ".arrow":
        return [batch.num_rows for batch in open_arrow(file).to_batches()]
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    pa = require("pyarrow", feature="reading .parquet files")
    try:
        metadata = pq.ParquetFile(file.path).metadata
    except (pa.ArrowInvalid, OSError) as err:
        raise ValueError(f"{file.name} is no Parquet file ({err}). Write it anew.") from err
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


_CUT: dict[str, Callable[[SourceFile, int], list[Chunk]]] = {
    **dict.fromkeys(LINES, _cut_lines),
    **dict.fromkeys(TABLES, _cut_table),
    **dict.fromkeys(COLUMNS, _cut_columns),
    ".json": _cut_json,
}


def _grouped(files: list[SourceFile], chunk_bytes: int) -> Iterator[Chunk]:
    group: list[SourceFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.path.stat().st_size
        if size >= chunk_bytes:
            yield FileChunk(tuple(group))
            group, size = [], 0
    if group:
        yield FileChunk(tuple(group))


def row_chunks(dataset: MapDataset, *, chunk_rows: int = _CHUNK_ROWS) -> list[Chunk]:
    """Cut a dataset into chunks of rows."""
    total = len(dataset)
    return [RowChunk(dataset, at, min(at + chunk_rows, total)) for at in range(0, total, chunk_rows)]
