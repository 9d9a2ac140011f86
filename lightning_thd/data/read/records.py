"""Files or a dataset of text, ids, prompts or conversations -> records, in chunks that any process can read.

A record that cannot be read comes as ``Bad``, so that the caller may skip it and go on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd._imports import require
from lightning_thd.batch.keys import names as keys_of
from lightning_thd.data.read.files import KINDS, SourceFile, find_files
from lightning_thd.data.store.columns import map_arrow
from lightning_thd.data.store.index import MapDataset

CHUNK_BYTES = 1 << 22  # bytes of text in a chunk: about 4 s of a tokenizer at 1 MB/s
_CHUNK_ROWS = 1024
_BATCH_ROWS = 256  # rows of columns that are unpacked at a time
_BOM = b"\xef\xbb\xbf"
_NUMBERS = frozenset(
    keys_of("token", "type", "weight", "other_weight", "label", "mask")
)  # columns of a table
# Keys that a record has, and a JSON file that wraps records has not.
_SHORT = 40  # characters of a name or a version beside the records in a JSON file; more may be a document
_OF_RECORDS = ("text", "input_ids", "messages", "conversations", "conversation", "prompt", "instruction")


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read, and the reason."""

    reason: str


Record = str | dict[str, Any] | Bad


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


Placed = tuple[str | Line, Record]
# A part of a source, whose records one process reads: called, it yields them with their places.
Chunk = Callable[[], Iterator[Placed]]


def parse_json(text: str | bytes) -> Any | Bad:
    """Parse JSON; return ``Bad`` for anything Python refuses, such as too deep or too large numbers."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except UnicodeDecodeError as err:
        return Bad(_not_text(err))
    except json.JSONDecodeError as err:
        return Bad(f"not JSON ({err.msg} at column {err.colno}). Mend or remove it.")
    except (RecursionError, ValueError) as err:
        return Bad(f"JSON that cannot be read ({err}). Remove it.")


def decode(data: bytes) -> str | Bad:
    """Decode UTF-8, with or without a byte-order mark; return ``Bad`` for other bytes."""
    try:
        text = data.removeprefix(_BOM).decode()
    except UnicodeDecodeError as err:
        return Bad(_not_text(err))
    if "\0" in text:
        return Bad(f"holds a null byte at {text.index(chr(0))}, so it is no text. Leave it out.")
    return text


def _not_text(err: UnicodeDecodeError) -> str:
    byte = err.object[err.start]
    return f"not UTF-8 (byte 0x{byte:02x} at {err.start}). Write it again in UTF-8, or leave it out."


def parse_line(line: bytes) -> dict[str, Any] | Bad:
    """Parse a line of JSONL, which must hold one object."""
    parsed = parse_json(line.removeprefix(_BOM))
    if isinstance(parsed, dict | Bad):
        return parsed
    return Bad(f"a {type(parsed).__name__}, wanted one JSON object a line.")


def _jsonl(file: SourceFile, start: int, stop: int) -> Iterator[Placed]:
    """Read the lines of a JSONL file that begin at byte ``start`` up to ``stop``, skipping blank ones."""
    with file.path.open("rb") as opened:
        at = start
        if at:  # a line that begins before the chunk belongs to the one before
            opened.seek(at - 1)
            at += len(opened.readline()) - 1
        while at < stop and (line := opened.readline()):
            if line.strip():
                yield Line(file.name, file.path, at), parse_line(line)
            at += len(line)


def _json(file: SourceFile, start: int, stop: int, text_key: str) -> Iterator[Placed]:
    """Read entries ``start`` to ``stop`` of a JSON file that is one array: objects or strings."""
    for i, entry in enumerate(_json_entries(file, text_key)[start:stop], start):
        known = isinstance(entry, str | dict)
        yield f"{file.name}, entry {i}", entry if known else Bad(f"a {type(entry).__name__}, not an object.")


def _rows_of_table(file: SourceFile, text_key: str) -> Iterator[Placed]:
    """Read a table as dicts of the column names in its first line; cells are strings, but for numbers."""
    name, separator = file.name, "\t" if file.suffix == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)  # documents are longer than the module's 128 KiB
    # Bytes that are no UTF-8 stay recognisable, so that only their row is bad.
    with file.path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as opened:
        reader, line = csv.reader(opened, delimiter=separator, strict=True), 1
        try:
            names = next(reader, [])
            if not names or len(set(names)) != len(names):
                raise ValueError(
                    f"{name}: its first line {separator.join(names)[:80]!r} gives no column names, each "
                    "once. Put one there."
                )
            if isinstance(bad := decode("".join(names).encode(errors="surrogateescape")), Bad):
                raise ValueError(f"{name}, line 1: {bad.reason}")
            line = reader.line_num + 1
            for row in reader:
                if row:
                    yield f"{name}, line {line}", _cells(names, row, text_key)
                line = reader.line_num + 1
        except csv.Error as err:
            raise ValueError(
                f"{name}, line {line}: a quote begins a cell and it is not known where the row ends "
                f"({err}). Write quotes inside of quoted cells twice and close them, or give .jsonl."
            ) from err


def _cells(names: list[str], row: list[str], text_key: str) -> dict[str, Any] | Bad:
    if isinstance(bad := decode("".join(row).encode(errors="surrogateescape")), Bad):
        return bad
    if len(row) != len(names):
        return Bad(f"{len(row)} cells, but {len(names)} columns {names}.")
    numbers = _NUMBERS - {text_key}
    return {name: _value(cell) if name in numbers else cell for name, cell in zip(names, row, strict=True)}


def _value(cell: str) -> Any:
    """Read a cell of numbers, such as ``1`` or ``[1, 0]``; one of text stays as it is."""
    found = parse_json(cell)
    return found if isinstance(found, int | float | list) else cell


def _documents(files: list[SourceFile]) -> Iterator[Placed]:
    """Read text files, each one document."""
    for file in files:
        yield file.name, decode(file.path.read_bytes())


def _column_rows(file: SourceFile, part: int, first_row: int) -> Iterator[Placed]:
    """Read a row group of Parquet, or a record batch of Arrow, as dicts; what is null is left out."""
    rows = (row for batch in read_part(file, part) for row in batch.to_pylist())
    for i, row in enumerate(rows, first_row):
        yield f"{file.name}, row {i}", without_nulls(row)


def _dataset_rows(dataset: MapDataset, start: int, stop: int) -> Iterator[Placed]:
    """Read rows ``start`` to ``stop`` of a dataset."""
    for i in range(start, stop):
        try:
            row: Any = dataset[i]
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
    """Read a part of a file of columns in Arrow batches of at most 256 rows; all columns, or those named."""
    if file.suffix == ".parquet":
        opened = require("pyarrow.parquet", feature="reading .parquet files").ParquetFile(file.path)
        yield from opened.iter_batches(batch_size=_BATCH_ROWS, row_groups=[part], columns=names)
        return
    batch = map_arrow(file.path, file.name).to_batches()[part]
    batch = batch if names is None else batch.select(names)
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        yield batch.slice(start, _BATCH_ROWS)


def part_sizes(file: SourceFile) -> list[int]:
    """Count the rows of every row group of a Parquet file or record batch of an Arrow file."""
    if file.suffix != ".parquet":
        return [batch.num_rows for batch in map_arrow(file.path, file.name).to_batches()]
    pq = require("pyarrow.parquet", feature="reading .parquet files")
    pa = require("pyarrow", feature="reading .parquet files")
    try:
        metadata = pq.ParquetFile(file.path).metadata
    except (pa.ArrowInvalid, OSError) as err:
        raise ValueError(f"{file.name} is no Parquet file ({err}). Write it again.") from err
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


@lru_cache(maxsize=1)  # all chunks of a file parse it once
def _json_entries(file: SourceFile, text_key: str) -> list[Any]:
    """Return the entries of an array, of the array in a wrapper, or the file as the only entry."""
    found = parse_json(file.path.read_bytes().removeprefix(_BOM))
    if isinstance(found, Bad):
        raise ValueError(f"{file.name}: {found.reason}")
    values = found if isinstance(found, dict) else {}
    lists = [name for name, value in values.items() if isinstance(value, list) and value]
    if not lists or text_key in found or any(name in found for name in _OF_RECORDS):
        return found if isinstance(found, list) else [found]
    if len(found) == len(lists) == 1:
        return list(found[lists[0]])
    # as {"version": "1.1", "data": [...]}, but not as {"body": "a document", "authors": [...]}
    others = [name for name, value in found.items() if isinstance(value, str) and len(value) > _SHORT]
    if len(lists) != 1 or others or not all(isinstance(entry, dict) for entry in found[lists[0]]):
        raise ValueError(
            f"{file.name} is one object with {', '.join(found)}, and it is not known what of it are the "
            f"documents: {text_key!r} is not among them. Name the key of its text by text_key=, or give a "
            "list of the records."
        )
    rank_zero_info(f"{file.name}: its records are the {len(found[lists[0]]):,} entries of {lists[0]!r}.")
    return list(found[lists[0]])


def file_chunks(
    source: str | Path | list[SourceFile],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    cache_dir: str | Path | None = None,
    text_key: str = "text",
) -> list[Chunk]:
    """Cut files into chunks of records, of ``chunk_bytes`` unless one record or file has more."""
    files = source if isinstance(source, list) else find_files(source, cache_dir=cache_dir)
    chunks: list[Chunk] = []
    texts: list[SourceFile] = []
    for file in files:
        kind = KINDS.get(file.suffix, "text")
        if kind == "text":
            _refuse_unnamed_records(file)
            texts.append(file)
        elif kind == "JSONL" or (kind == "JSON" and holds_lines(file)):
            size = file.path.stat().st_size
            spans = ((at, min(at + chunk_bytes, size)) for at in range(0, size, chunk_bytes))
            chunks += [partial(_jsonl, file, *span) for span in spans]
        elif kind == "JSON":
            total = len(_json_entries(file, text_key))
            spans = ((at, min(at + _CHUNK_ROWS, total)) for at in range(0, total, _CHUNK_ROWS))
            chunks += [partial(_json, file, *span, text_key) for span in spans]
        elif kind == "table":
            chunks.append(partial(_rows_of_table, file, text_key))
        else:
            first = 0
            for part, size in enumerate(part_sizes(file)):
                chunks.append(partial(_column_rows, file, part, first))
                first += size
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


def holds_lines(file: SourceFile) -> bool:
    """Return whether a .json file holds an object a line."""
    with file.path.open("rb") as opened:
        head = opened.read(1 << 16).lstrip(_BOM + b" \t\r\n")
    first, _, rest = head.partition(b"\n")
    return head.startswith(b"{") and bool(rest.strip()) and isinstance(parse_json(first), dict)


def _grouped(files: list[SourceFile], chunk_bytes: int) -> Iterator[Chunk]:
    group: list[SourceFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.path.stat().st_size
        if size >= chunk_bytes or file is files[-1]:
            yield partial(_documents, group)
            group, size = [], 0


def row_chunks(dataset: MapDataset, *, chunk_rows: int = _CHUNK_ROWS) -> list[Chunk]:
    """Cut a dataset into chunks of rows."""
    total = len(dataset)
    starts = range(0, total, chunk_rows)
    return [partial(_dataset_rows, dataset, at, min(at + chunk_rows, total)) for at in starts]
