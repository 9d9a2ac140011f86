"""Files or a dataset -> records, in chunks that any process can read.

A record is text, or a dict with text, ids, a prompt or a conversation. A record that cannot be read is
yielded as ``Bad``, so that reading can go on. A damaged Parquet, Arrow or JSON file raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_thd._imports import require
from lightning_thd.data.read.files import KINDS, SourceFile
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.store.tokens import TokenStore

CHUNK_BYTES = 1 << 22  # bytes of text in a chunk; a tokenizer at 1 MB/s takes about 4 s for it
CHUNK_ROWS = 1024
_BATCH_ROWS = 256  # rows of columns that are unpacked at a time
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read, and the reason."""

    reason: str


Record = str | dict[str, Any] | Bad


@dataclass(frozen=True, slots=True)
class Line:
    """The place of a line in a file; its line number is counted only when the place is printed."""

    name: str
    path: Path
    offset: int

    def __str__(self) -> str:
        return f"{self.name}, line {1 + newlines(self.path, 0, self.offset)}"


def newlines(path: Path, start: int, stop: int) -> int:
    """Count the newlines of a file between two bytes."""
    count = 0
    with path.open("rb") as file:
        file.seek(start)
        left = stop - start
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            count += block.count(b"\n")
            left -= len(block)
    return count


Placed = tuple[str | Line, Record]
# A part of a source that one process reads. Calling it yields the records with their places.
Chunk = Callable[[], Iterator[Placed]]


@dataclass(frozen=True, slots=True)
class RecordPlaces:
    """Names the record of a sequence in a store; each call reads the records again, up to that one."""

    chunks: Sequence[Chunk]
    store: TokenStore

    def __call__(self, i: int) -> str:
        """Return the place of a sequence, such as ``"a.jsonl, line 4"``."""
        skipped = {record.place for record in self.store.skipped_records}
        places = _written_out(place for chunk in self.chunks for place, _ in chunk())
        return next(islice((place for place in places if place not in skipped), i, None))


def _written_out(places: Iterable[str | Line]) -> Iterator[str]:
    """Yield places as text; the lines of a file are counted only once."""
    path = None
    number = 1
    offset = 0
    for place in places:
        if isinstance(place, str):
            yield place
            continue
        if place.path != path:
            path = place.path
            number = 1
            offset = 0
        number += newlines(path, offset, place.offset)
        offset = place.offset
        yield f"{place.name}, line {number}"


def parse_json(text: str | bytes) -> Any | Bad:
    """Parse JSON; return ``Bad`` for anything Python refuses, such as deep nesting or large numbers."""
    try:
        # json.loads would guess among UTF-8, 16 and 32 from bytes.
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_without_second_keys)
    except UnicodeDecodeError as err:
        return Bad(_not_text(err))
    except json.JSONDecodeError as err:
        return Bad(f"not JSON ({err.msg} at column {err.colno}). Fix or remove it.")
    except (RecursionError, ValueError) as err:
        return Bad(f"JSON that cannot be read ({err}). Remove it.")


def _without_second_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the keys and values of a JSON object as a dict; raise if a key is there twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):  # Python would keep the last value
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return fields


def decode(data: bytes) -> str | Bad:
    """Decode UTF-8, with or without a byte-order mark; return ``Bad`` for other bytes, and for null bytes."""
    try:
        text = data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as err:
        return Bad(_not_text(err))
    if "\0" in text:
        return Bad(f"has a null byte at {text.index(chr(0))}, so it is not text. Leave it out.")
    return text


def _not_text(err: UnicodeDecodeError) -> str:
    byte = err.object[err.start]
    return f"not UTF-8 (byte 0x{byte:02x} at {err.start}). Write it again in UTF-8, or leave it out."


def parse_line(line: bytes) -> dict[str, Any] | Bad:
    """Parse a line of JSONL, which must hold one object."""
    parsed = parse_json(line.removeprefix(_BOM))
    if isinstance(parsed, dict | Bad):
        return parsed
    return Bad(f"a {type(parsed).__name__}, wanted one JSON object per line.")


def _jsonl(file: SourceFile, start: int, stop: int) -> Iterator[Placed]:
    """Read the lines of a JSONL file that begin at bytes ``start`` to ``stop``, except blank lines."""
    with file.path.open("rb") as opened:
        offset = start
        if start > 0:  # a line that begins before this chunk belongs to an earlier chunk
            opened.seek(start - 1)  # if this byte ends a line, the next one begins in this chunk
            offset += len(opened.readline()) - 1
        while offset < stop and (line := opened.readline()):
            if line.strip():
                yield Line(file.name, file.path, offset), parse_line(line)
            offset += len(line)


def _json(file: SourceFile, start: int, stop: int) -> Iterator[Placed]:
    """Read entries ``start`` to ``stop`` of a JSON file: objects or strings of its array, or one object."""
    for i, entry in enumerate(_json_entries(file)[start:stop], start):
        is_record = isinstance(entry, str | dict)
        record = entry if is_record else Bad(f"a {type(entry).__name__}, not an object.")
        yield f"{file.name}, entry {i}", record


def _documents(files: list[SourceFile]) -> Iterator[Placed]:
    """Read each file of text as one record."""
    for file in files:
        yield file.name, decode(file.path.read_bytes())


def _column_rows(file: SourceFile, part: int, first_row: int) -> Iterator[Placed]:
    """Read a row group of Parquet, or a record batch of Arrow, as dicts without null values."""
    rows = (row for batch in read_part(file, part) for row in batch.to_pylist())
    try:
        for i, row in enumerate(rows, first_row):
            yield f"{file.name}, row {i}", without_nulls(row)
    except Exception as err:  # pyarrow raises many types of errors
        raise ValueError(f"{file.name} is damaged from row {first_row} on ({err}). Write it again.") from err


def _dataset_rows(dataset: MapDataset, start: int, stop: int) -> Iterator[Placed]:
    """Read rows ``start`` to ``stop`` of a dataset."""
    # In a list, as in JSONL, a null is a value. Columns add nulls, also to rows taken from them.
    is_in_memory = isinstance(dataset, list | tuple)
    for i in range(start, stop):
        try:
            row: Any = dataset[i]
        except Exception as err:  # any error of the user's dataset
            yield f"row {i}", Bad(f"the dataset raised {type(err).__name__}: {err}")
            continue
        yield f"row {i}", row if is_in_memory else as_written(row, getattr(dataset, "features", None))


def as_written(record: Any, features: Any = None) -> Any:
    """Apply ``without_nulls`` to a record of a dataset or stream; leave records of ids as they are."""
    if not isinstance(record, dict) or record.get("input_ids") is not None:
        return record
    cleaned = without_nulls(record, features)
    # Null ids beside nothing else are an empty sequence, and no record without ids.
    return {**cleaned, "input_ids": None} if "input_ids" in record else cleaned


def without_nulls(value: Any, feature: Any = None) -> Any:
    """Drop keys whose value is None, which columns of structs add; the type ``Json`` of datasets does not.

    Args:
        value: a value of a row.
        feature: the type of the value in ``Dataset.features``, if it is known.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        features = feature if isinstance(feature, dict) else {}
        return {name: without_nulls(x, features.get(name)) for name, x in value.items() if x is not None}
    if isinstance(value, list):
        of_entries = getattr(feature, "feature", None)
        return [without_nulls(entry, of_entries) for entry in value]
    return value


def read_part(file: SourceFile, part: int) -> Iterator[Any]:
    """Read a row group of Parquet, or a record batch of Arrow, in batches of at most 256 rows."""
    if file.suffix == ".parquet":
        yield from open_parquet(file).iter_batches(batch_size=_BATCH_ROWS, row_groups=[part])
        return
    batch = map_arrow(file).to_batches()[part]
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        yield batch.slice(start, _BATCH_ROWS)


def part_sizes(file: SourceFile) -> list[int]:
    """Count the rows of every row group of a Parquet file, or of every record batch of an Arrow file."""
    if file.suffix != ".parquet":
        return [batch.num_rows for batch in map_arrow(file).to_batches()]
    metadata = open_parquet(file).metadata
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def map_arrow(file: SourceFile) -> Any:
    """Map an Arrow file, in the stream or the file format, into memory as a table."""
    pa = require("pyarrow", feature="reading .arrow files")
    try:
        try:
            return pa.ipc.open_file(pa.memory_map(str(file.path))).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_stream(pa.memory_map(str(file.path))).read_all()
    except pa.ArrowInvalid as err:
        raise ValueError(f"{file.name} is not an Arrow file ({err}). Write it again.") from err


def open_parquet(file: SourceFile) -> Any:
    """Open a Parquet file, without reading its rows."""
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    pa = require("pyarrow", feature="reading .parquet files")
    try:
        return pq.ParquetFile(file.path)
    except (pa.ArrowInvalid, OSError) as err:
        raise ValueError(f"{file.name} is not a Parquet file ({err}). Write it again.") from err


@lru_cache(maxsize=1)  # each chunk of a file calls this, but the file is parsed once
def _json_entries(file: SourceFile) -> list[Any]:
    """Return the entries of a file that is a JSON array; any other file is one entry."""
    content = parse_json(file.path.read_bytes().removeprefix(_BOM))
    if isinstance(content, Bad):
        raise ValueError(f"{file.name}: {content.reason}")
    return content if isinstance(content, list) else [content]


def file_chunks(files: list[SourceFile], *, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut files into chunks of whole records; chunks of lines or texts have about ``chunk_bytes``.

    Raises:
        ValueError: a file is a table, or damaged, or of another kind than its name says, or documents of
            text are beside files of records.
    """
    chunks: list[Chunk] = []
    documents: list[SourceFile] = []
    for file in files:
        kind = KINDS.get(file.suffix, "text")
        if kind == "text":
            if file.suffix not in KINDS and holds_lines(file):  # as text, all lines would be one document
                raise ValueError(f"{file.name} holds a JSON object per line. Name it .jsonl, or .txt.")
            documents.append(file)
        elif kind == "JSONL" or (kind == "JSON" and holds_lines(file)):
            size = file.path.stat().st_size
            starts = range(0, size, chunk_bytes)
            chunks += [partial(_jsonl, file, start, min(start + chunk_bytes, size)) for start in starts]
        elif kind == "JSON":
            starts = range(0, len(_json_entries(file)), CHUNK_ROWS)
            chunks += [partial(_json, file, start, start + CHUNK_ROWS) for start in starts]
        elif kind == "table":
            raise ValueError(
                f"{file.name} is a table. Tables are not read beside other files, with processor= or by "
                "read_documents(). Give .jsonl."
            )
        else:
            first_row = 0
            for part, rows in enumerate(part_sizes(file)):
                chunks.append(partial(_column_rows, file, part, first_row))
                first_row += rows

    if documents and chunks:
        raise ValueError(f"{documents[0].name} is one document of text, but other files hold records.")
    return chunks or list(_grouped(documents, chunk_bytes))


def holds_lines(file: SourceFile) -> bool:
    """Return whether the first non-blank line of a file is a JSON object (of up to 1 MiB)."""
    with file.path.open("rb") as opened:
        lines = iter(partial(opened.readline, 1 << 20), b"")
        first = next((line for line in lines if line.strip()), b"")
    return isinstance(parse_line(first), dict)


def _grouped(files: list[SourceFile], chunk_bytes: int) -> Iterator[Chunk]:
    """Group documents into chunks of about ``chunk_bytes``."""
    group: list[SourceFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.path.stat().st_size
        if size >= chunk_bytes or file is files[-1]:
            yield partial(_documents, group)
            group = []
            size = 0


def row_chunks(dataset: MapDataset, *, chunk_rows: int = CHUNK_ROWS) -> list[Chunk]:
    """Cut a dataset into chunks of rows."""
    total = len(dataset)
    return [
        partial(_dataset_rows, dataset, start, min(start + chunk_rows, total))
        for start in range(0, total, chunk_rows)
    ]
