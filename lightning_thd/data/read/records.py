"""Files or a dataset of text, ids, prompts or conversations -> records, in chunks that any process can read.

A record that cannot be read comes as ``Bad``, so that whoever asks may skip it and go on.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_thd._imports import require
from lightning_thd.data.read.chunks import Chunk, Line, Place, Record
from lightning_thd.data.read.decode import Bad, decode, parse_json
from lightning_thd.data.read.files import COLUMNS, LINES, TABLES, SourceFile, find_files
from lightning_thd.data.read.json_files import cut_json, cut_lines
from lightning_thd.data.read.long import values
from lightning_thd.data.read.long.values import ArrayText, BufferText, FileText, Long
from lightning_thd.data.store.columns import map_arrow, string_sizes
from lightning_thd.data.store.measure import MapDataset

CHUNK_BYTES = 1 << 22  # of text in a chunk: some 4 s of a tokenizer at 1 MB/s
_CHUNK_ROWS = 1024
_BATCH_ROWS = 256  # of columns: what is unpacked at a time


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
        rows, torn = _rows(lines, self.separator)
        if torn is not None:
            before = "".join(lines[: len(rows) and rows[-1][1]]).encode(errors="surrogateescape")
            place = Line(self.file.name, self.file.path, self.start + len(before))
            raise ValueError(
                f"{place}: a quote begins a cell and another ends it before its end ({torn}), so it is not "
                "known where the row ends. Write quotes inside of quoted cells twice, or give .jsonl."
            )
        for row, line in rows:
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


def _rows(lines: list[str], separator: str) -> tuple[list[tuple[list[str], int]], str | None]:
    """Parse a table, and return its rows with the number of lines up to the end of each.

    The second value says what is wrong with the row after them: a quote in the midst of a quoted cell.
    """
    rows: list[tuple[list[str], int]] = []
    limit = csv.field_size_limit(2**31 - 1)  # of the process; documents are longer than its 128 KiB
    try:
        reader = csv.reader(lines, delimiter=separator, strict=True)
        rows.extend((row, reader.line_num) for row in reader)
    except csv.Error as err:
        return rows, str(err)
    finally:
        csv.field_size_limit(limit)
    return rows, None


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Text files, each one document."""

    files: tuple[SourceFile, ...]

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the files whole."""
        for file in self.files:
            long = file.path.stat().st_size > values.LONG_BYTES
            yield file.name, Long(text=FileText(file.path)) if long else decode(file.path.read_bytes())


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    file: SourceFile
    part: int
    first_row: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the rows as dicts; what is null is left out."""
        i = self.first_row
        for batch in read_part(self.file, self.part):
            large = batch.nbytes > values.LONG_BYTES
            for found in self._rows(batch, i) if large else batch.to_pylist():
                yield f"{self.file.name}, row {i}", without_nulls(found)
                i += 1

    def _rows(self, batch: Any, first: int) -> Iterator[dict[str, Any] | Long]:
        """Read rows one by one, leaving strings that are long where the file is mapped, or the batch lies."""
        pt = require("pyarrow", feature=f"reading {self.file.suffix} files").types
        mapped = self.file.suffix == ".arrow"
        texts = [f.name for f in batch.schema if pt.is_string(f.type) or pt.is_large_string(f.type)]
        sizes = {name: string_sizes(batch.column(name)) for name in texts}
        for at in range(batch.num_rows):
            long = [name for name in texts if sizes[name][at] > values.LONG_BYTES]
            others = batch.select([name for name in batch.schema.names if name not in long]).slice(at, 1)
            row: dict[str, Any] = others.to_pylist()[0] if others.num_columns else {}
            if not long:
                yield row
                continue
            place = self.file.path, self.part, first - self.first_row + at
            yield Long(
                {n: BufferText(*place, n) if mapped else ArrayText(batch.column(n), at) for n in long},
                without_nulls(row),
            )


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


def as_written(record: Any) -> Any:
    """Return a record of a stream, a conversation's messages and tools without the null keys of structs."""
    if not isinstance(record, dict) or "input_ids" in record:
        return record
    return {name: without_nulls(value) for name, value in record.items()}


def without_nulls(value: Any) -> Any:
    """Return a value without its null keys, which columns of structs add to records lacking them."""
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def read_part(file: SourceFile, part: int, names: list[str] | None = None) -> Iterator[Any]:
    """Read a row group of a Parquet file, or a record batch of an Arrow file, in batches of rows.

    Args:
        file: of columns.
        part: number of the row group or record batch.
        names: columns that are read; all by default.

    Returns:
        Arrow record batches of at most 256 rows.
    """
    if file.suffix == ".parquet":
        opened = require("pyarrow.parquet", feature="reading .parquet files").ParquetFile(file.path)
        yield from opened.iter_batches(batch_size=_BATCH_ROWS, row_groups=[part], columns=names)
        return
    batch = map_arrow(file.path, file.name).to_batches()[part]
    batch = batch if names is None else batch.select(names)
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        yield batch.slice(start, _BATCH_ROWS)


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
        return [batch.num_rows for batch in map_arrow(file.path, file.name).to_batches()]
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    pa = require("pyarrow", feature="reading .parquet files")
    try:
        metadata = pq.ParquetFile(file.path).metadata
    except (pa.ArrowInvalid, OSError) as err:
        raise ValueError(f"{file.name} is no Parquet file ({err}). Write it anew.") from err
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


_CUT: dict[str, Callable[[SourceFile, int], list[Chunk]]] = {
    **dict.fromkeys(LINES, cut_lines),
    **dict.fromkeys(TABLES, _cut_table),
    **dict.fromkeys(COLUMNS, _cut_columns),
    ".json": cut_json,
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
