"""JSON and JSONL files -> chunks of records; what is long of them stays where it lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from lightning_thd.data.read.chunks import Chunk, Line, Place, Record
from lightning_thd.data.read.decode import Bad, parse_json
from lightning_thd.data.read.files import SourceFile
from lightning_thd.data.read.long import values
from lightning_thd.data.read.long.json_spans import Span, read_value, scan_array, scan_object
from lightning_thd.data.read.long.values import BOM, Long, end_of_line, long_entry, long_line

_CHUNK_ROWS = 1024
# Keys that a record has, and a file that wraps records has not.
_OF_RECORDS = ("text", "input_ids", "messages", "conversations", "conversation", "prompt", "instruction")


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
                at = end_of_line(file, at - 1, self.stop)
                file.seek(at)
            while at < self.stop and (line := file.readline(values.LONG_BYTES + 1)):
                if len(line) > values.LONG_BYTES and not line.endswith(b"\n"):
                    found, size = long_line(self.file.path, at)
                    yield Line(self.file.name, self.file.path, at), found
                    at += size
                    file.seek(at)
                    continue
                if line.strip():
                    parsed = parse_json(line.removeprefix(b"\xef\xbb\xbf"))
                    if not isinstance(parsed, dict | Bad):
                        parsed = Bad(f"a {type(parsed).__name__}, wanted one JSON object a line.")
                    yield Line(self.file.name, self.file.path, at), parsed
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


@dataclass(frozen=True, slots=True)
class JsonSpansChunk:
    """Entries of a large JSON file, each known by its bytes."""

    file: SourceFile
    first: int
    spans: tuple[Span, ...]

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Read the entries: objects or strings."""
        with self.file.path.open("rb") as opened:
            for i, span in enumerate(self.spans, self.first):
                if span.stop - span.start > values.LONG_BYTES:
                    found = long_entry(self.file.path, span)
                else:
                    found = read_value(opened, span)
                if not isinstance(found, str | dict | Long | Bad):
                    found = Bad(f"a {type(found).__name__}, not an object.")
                yield f"{self.file.name}, entry {i}", found


def _large_json(file: SourceFile) -> Iterator[Span]:
    """Find the entries of a JSON file: of an array, of one in a wrapper, or the file as the only one."""
    with file.path.open("rb") as opened:
        start = len(BOM) * (opened.read(len(BOM)) == BOM)
        opened.seek(start)
        sign = next((byte for byte in iter(lambda: opened.read(1), b"") if byte.strip()), b"")
        begin = opened.tell() - 1
        if sign == b"[":
            stop = yield from scan_array(opened, begin)
            _refuse_more(opened, stop)
            return
        spans, stop = scan_object(opened, begin, lines=True)
        _refuse_more(opened, stop)
        lists = [span for span in spans.values() if os.pread(opened.fileno(), 1, span.start) == b"["]
        if len(lists) != 1 or any(name in spans for name in _OF_RECORDS):
            yield Span(begin, stop)
            return
        yield from scan_array(opened, lists[0].start)


def _refuse_more(opened: BinaryIO, stop: int) -> None:
    opened.seek(stop)
    if any(block.strip() for block in iter(lambda: opened.read(1 << 20), b"")):
        raise ValueError("not JSON (more follows its value). Mend the file, or name it .jsonl.")


@lru_cache(maxsize=1)
def _json_entries(file: SourceFile) -> list[Any]:
    found = parse_json(file.path.read_bytes().removeprefix(BOM))
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


def cut_lines(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    """Cut a JSONL file into chunks of bytes, each of the lines that begin in it."""
    size = file.path.stat().st_size
    return [JsonlChunk(file, at, min(at + chunk_bytes, size)) for at in range(0, size, chunk_bytes)]


def cut_json(file: SourceFile, chunk_bytes: int) -> list[Chunk]:
    """Cut a JSON file into chunks of entries; one that holds an object a line, into chunks of lines."""
    with file.path.open("rb") as opened:
        head = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    first, _, rest = head.partition(b"\n")
    if head.startswith(b"{") and rest.strip() and isinstance(parse_json(first), dict):
        return cut_lines(file, chunk_bytes)  # one object a line, under another name
    if file.path.stat().st_size > values.LONG_BYTES:
        try:
            return list(_cut_spans(file, _large_json(file), chunk_bytes))
        except ValueError as err:
            raise ValueError(f"{file.name}: {err}") from err
    total = len(_json_entries(file))
    return [JsonChunk(file, at, min(at + _CHUNK_ROWS, total)) for at in range(0, total, _CHUNK_ROWS)]


def _cut_spans(file: SourceFile, spans: Iterable[Span], chunk_bytes: int) -> Iterator[Chunk]:
    """Group the entries of a large JSON file into chunks."""
    group: list[Span] = []
    first = 0
    for span in spans:
        if group and (span.stop - group[0].start > chunk_bytes or len(group) == _CHUNK_ROWS):
            yield JsonSpansChunk(file, first, tuple(group))
            first, group = first + len(group), []
        group.append(span)
    if group:
        yield JsonSpansChunk(file, first, tuple(group))
