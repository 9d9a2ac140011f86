"""Files or a dataset of text, prompts or conversations -> records, in chunks that any process can read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_thd.data.store.index import MapDataset

Record = str | dict[str, Any]

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".html", ".xml", ".csv", ".log", ".tex")
_LINES = (".jsonl", ".ndjson")
_NO_TEXT = (".json", ".gz", ".zst", ".bz2", ".xz", ".zip", ".npy", ".npz", ".bin", ".pt", ".safetensors")
CHUNK_BYTES = 1 << 22  # of text in a chunk: some 4 s of a tokenizer at 1 MB/s
_CHUNK_ROWS = 1024


class Place(Protocol):
    """Where a record stands, as text for a message."""

    def __str__(self) -> str: ...


class Chunk(Protocol):
    """A part of a source."""

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the records and where each stands."""
        ...


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file; its number is counted when it is asked for."""

    path: Path
    offset: int

    def __str__(self) -> str:
        number, left = 1, self.offset
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
        return f"{self.path}, line {number}"


@dataclass(frozen=True, slots=True)
class JsonlChunk:
    """The lines of a JSONL file that begin at byte ``start`` up to ``stop``."""

    path: Path
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the objects; blank lines are none.

        Raises:
            ValueError: for a line that is no JSON object.
        """
        with self.path.open("rb") as file:
            at = self.start
            if at:  # a line that begins before the chunk belongs to the one before
                file.seek(at - 1)
                at += len(file.readline()) - 1
            while at < self.stop and (line := file.readline()):
                if line.strip():
                    yield Line(self.path, at), self._parse(line, at)
                at += len(line)

    def _parse(self, line: bytes, offset: int) -> dict[str, Any]:
        try:
            record = json.loads(line.decode(errors="replace").removeprefix("\ufeff"))
        except json.JSONDecodeError as err:
            raise ValueError(
                f"{Line(self.path, offset)}: not JSON ({err.msg} at column {err.colno}). "
                "Give one JSON object a line, or remove the line."
            ) from err
        if not isinstance(record, dict):
            raise ValueError(
                f"{Line(self.path, offset)}: a {type(record).__name__}, wanted one JSON object a line."
            )
        return record


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Text files, each one document."""

    paths: tuple[Path, ...]

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the files whole."""
        for path in self.paths:
            yield path, path.read_text(encoding="utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Rows ``start`` to ``stop`` of a dataset."""

    dataset: MapDataset
    start: int
    stop: int

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the rows."""
        for i in range(self.start, self.stop):
            yield f"sequence {i}", self.dataset[i]


def file_chunks(path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """Cut a ``.jsonl`` file, a text file or a folder of text files.

    Args:
        path: ``*.jsonl`` holds one JSON object a line; any other file is one document; a folder gives one
            document for every file below it with a text suffix, or the lines of all its ``.jsonl`` files, in
            sorted order.
        chunk_bytes: most bytes of a chunk, unless one line or file has more.

    Raises:
        ValueError: for a path that does not exist or a folder without text files.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES)
        lines = sorted(file for file in path.rglob("*") if file.suffix in _LINES)
        if lines and not files:
            return [chunk for file in lines for chunk in file_chunks(file, chunk_bytes=chunk_bytes)]
        if lines:
            raise ValueError(
                f"{path} holds {len(lines)} JSONL and {len(files)} text files, for example {lines[0].name} "
                f"and {files[0].name}. Put the ones that are data into a folder of their own."
            )
        if not files:
            raise ValueError(
                f"No text files below {path}. Wanted suffixes: {', '.join((*_LINES, *TEXT_SUFFIXES))}."
            )
        return list(_grouped(files, chunk_bytes))
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a .jsonl file, a text file or a folder of text files.")
    if path.suffix in _NO_TEXT:
        raise ValueError(
            f"{path}: a {path.suffix} file is no text. Give .jsonl with one JSON object a line, .parquet or "
            ".arrow with a column 'input_ids', a text file, or a dataset that you have opened."
        )
    if path.suffix not in _LINES:
        return [FileChunk((path,))]
    size = path.stat().st_size
    return [JsonlChunk(path, at, min(at + chunk_bytes, size)) for at in range(0, size, chunk_bytes)]


def _grouped(files: list[Path], chunk_bytes: int) -> Iterator[Chunk]:
    group: list[Path] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.stat().st_size
        if size >= chunk_bytes:
            yield FileChunk(tuple(group))
            group, size = [], 0
    if group:
        yield FileChunk(tuple(group))


def row_chunks(dataset: MapDataset, *, chunk_rows: int = _CHUNK_ROWS) -> list[Chunk]:
    """Cut a dataset."""
    total = len(dataset)
    return [RowChunk(dataset, at, min(at + chunk_rows, total)) for at in range(0, total, chunk_rows)]
