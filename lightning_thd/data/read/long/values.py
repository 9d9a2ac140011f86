"""Records too long to hold -> their values a piece at a time, from where they lie in their files."""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lightning_thd.data.read.decode import Bad, not_text, null_byte, parse_json
from lightning_thd.data.read.long.json_spans import Span, read_value, scan_object
from lightning_thd.data.store.columns import map_arrow, string_bytes

LONG_BYTES = 1 << 23  # a record with more is read in pieces
_BLOCK = 1 << 20  # bytes of a piece
_SHORT = 1 << 20  # bytes up to which a value of a long record is held
BOM = b"\xef\xbb\xbf"
_LONGEST_ESCAPE = 12  # bytes: two halves of a surrogate pair
# What of the bytes of a JSON string can be decoded alone: no escape is cut, nor a surrogate pair.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)


class Value(Protocol):
    """The interface of a value that is read in pieces."""

    @property
    def outline(self) -> Any:
        """Return an empty value of the same type, by which a record's kind is known."""
        ...

    def text(self) -> Iterator[str]:
        """Read the pieces of a string."""
        ...

    def numbers(self) -> Iterator[list[Any]]:
        """Read the pieces of a list of numbers."""
        ...

    def whole(self) -> Any:
        """Read the value at once."""
        ...


@dataclass(frozen=True, slots=True)
class Long:
    """A record that is read in pieces.

    Attributes:
        values: what is long of it, by its keys.
        short: its other keys.
        text: the record itself, where it is a string.
    """

    values: Mapping[str, Value] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    text: Value | None = None

    @property
    def outline(self) -> Any:
        """Return the record with empty values in the place of long ones."""
        if self.text is not None:
            return ""
        return {**self.short, **{name: value.outline for name, value in self.values.items()}}

    def whole(self) -> Any:
        """Read the record at once."""
        if self.text is not None:
            return self.text.whole()
        return {**self.short, **{name: value.whole() for name, value in self.values.items()}}


class _Text(ABC):
    """A string that is read in pieces."""

    outline = ""

    @abstractmethod
    def text(self) -> Iterator[str]:
        """Read the pieces of the string."""

    def numbers(self) -> Iterator[list[Any]]:
        raise ValueError("a string was found where a row of integers was wanted. Give a list of ids.")

    def whole(self) -> str:
        return "".join(self.text())


@dataclass(frozen=True)
class FileText(_Text):
    """A text file that is one document."""

    path: Path

    def text(self) -> Iterator[str]:
        """Decode the file's UTF-8, without its byte-order mark.

        Raises:
            ValueError: for other bytes, and for null bytes.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        read, signs = 0, 0
        for number, block in enumerate(_blocks(self.path, Span(0, self.path.stat().st_size))):
            piece = _decoded(decoder, block.removeprefix(BOM) if not number else block, read)
            if "\0" in piece:
                raise ValueError(null_byte(signs + piece.index("\0")))
            read, signs = read + len(block), signs + len(piece)
            yield piece
        _decoded(decoder, b"", read, final=True)


@dataclass(frozen=True)
class JsonText(_Text):
    """A string in a JSON file, with its quotes."""

    path: Path
    span: Span

    def text(self) -> Iterator[str]:
        """Decode the string's UTF-8 and its escapes.

        Raises:
            ValueError: for what is no JSON string.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        left, read = b"", 0
        for block in _blocks(self.path, Span(self.span.start + 1, self.span.stop - 1)):
            left += block
            found = _WHOLE.match(left)
            cut = found.end() if found is not None else 0
            if not cut and len(left) > _LONGEST_ESCAPE:
                cut = _LONGEST_ESCAPE // 2  # half a pair, or no escape: whoever decodes it says so
            yield _unescaped(_decoded(decoder, left[:cut], read))
            left, read = left[cut:], read + cut
        yield _unescaped(_decoded(decoder, left, read, final=True))


@dataclass(frozen=True)
class BufferText(_Text):
    """A string of a column of a mapped Arrow file."""

    path: Path
    part: int
    row: int
    column: str

    def text(self) -> Iterator[str]:
        """Decode the string, block by block, from where the file is mapped."""
        batch = map_arrow(self.path, str(self.path)).to_batches()[self.part]
        column = batch.column(batch.schema.get_field_index(self.column))
        yield from ArrayText(column, self.row).text()


@dataclass(frozen=True)
class ArrayText(_Text):
    """A string of an Arrow array in memory, as Parquet is read into."""

    array: Any
    row: int

    def text(self) -> Iterator[str]:
        """Decode the string, block by block."""
        view = string_bytes(self.array, self.row)
        decoder = codecs.getincrementaldecoder("utf-8")()
        for at in range(0, len(view), _BLOCK):
            yield _decoded(decoder, bytes(view[at : at + _BLOCK]), at)
        _decoded(decoder, b"", len(view), final=True)


@dataclass(frozen=True)
class JsonValue:
    """A list, or another value that is no string, in a JSON file."""

    path: Path
    span: Span
    outline: Any

    def text(self) -> Iterator[str]:
        """Raise, because it is no string."""
        raise ValueError("no string was found where text was wanted. Mend or remove the record.")

    def numbers(self) -> Iterator[list[Any]]:
        """Read the pieces of a list of numbers.

        Raises:
            ValueError: for another value, and for lists in the list.
        """
        if self.outline != []:
            raise ValueError("no list was found where a row of integers was wanted. Give a list of ids.")
        left, begun = b"", False
        for block in _blocks(self.path, Span(self.span.start + 1, self.span.stop - 1)):
            left += block
            piece, comma, rest = left.rpartition(b",")
            if comma:
                yield _parsed(piece)
                left, begun = rest, True
        if begun or left.strip():
            yield _parsed(left)

    def whole(self) -> Any:
        """Parse the value at once."""
        with self.path.open("rb") as file:
            found = read_value(file, self.span)
        if isinstance(found, Bad):
            raise ValueError(found.reason)
        return found


def long_line(path: Path, start: int) -> tuple[dict[str, Any] | Long | Bad, int]:
    """Find the values of a long line of a JSONL file.

    Args:
        path: of the file.
        start: byte at which the line begins.

    Returns:
        The record, or what is wrong with it, and the bytes of the line with its end.
    """
    with path.open("rb") as file:
        file.seek(start)
        begin = start + len(BOM) * (file.read(len(BOM)) == BOM)
        try:
            spans, at = scan_object(file, begin)
        except ValueError as err:
            return Bad(str(err)), end_of_line(file, start) - start
        end = end_of_line(file, at)
        file.seek(at)
        if file.read(min(end - at, _BLOCK)).strip() or end - at > _BLOCK:
            return Bad("not JSON (more follows the object in its line). Mend or remove it."), end - start
        return _of_spans(path, file, spans), end - start


def long_entry(path: Path, span: Span) -> Any:
    """Find the values of a long entry of a JSON file: an object, or a string; return Bad for another one."""
    with path.open("rb") as file:
        value = _value(path, file, span)
        if isinstance(value, JsonText):
            return Long(text=value)
        if value.outline != {}:
            return Bad("no object, nor a string. Mend or remove it.")
        try:
            return _of_spans(path, file, scan_object(file, span.start, lines=True)[0])
        except ValueError as err:
            return Bad(str(err))


def _of_spans(path: Path, file: BinaryIO, spans: Mapping[str, Span]) -> dict[str, Any] | Long | Bad:
    """Return the record whose values lie at some spans of a file, of which it holds the short ones."""
    short = {name: read_value(file, span) for name, span in spans.items() if _is_short(span)}
    for name, value in short.items():
        if isinstance(value, Bad):
            return Bad(f"{name!r} is {value.reason}")
    values = {name: _value(path, file, span) for name, span in spans.items() if name not in short}
    return Long(values, short) if values else short


def _is_short(span: Span) -> bool:
    return span.stop - span.start <= _SHORT


def _value(path: Path, file: BinaryIO, span: Span) -> JsonText | JsonValue:
    file.seek(span.start)
    sign = file.read(1)
    if sign == b'"':
        return JsonText(path, span)
    return JsonValue(path, span, {b"[": [], b"{": {}}.get(sign))


def end_of_line(file: BinaryIO, at: int, most: int | None = None) -> int:
    """Return the byte behind the line that ``at`` is in, or a byte behind ``most`` if it ends there."""
    file.seek(at)
    while (most is None or at < most) and (block := file.read(_BLOCK)):
        found = block.find(b"\n")
        if found >= 0:
            return at + found + 1
        at += len(block)
    return at


def _blocks(path: Path, span: Span) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(span.start)
        at = span.start
        while at < span.stop and (block := file.read(min(_BLOCK, span.stop - at))):
            at += len(block)
            yield block


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, at: int, *, final: bool = False) -> str:
    """Decode a block of UTF-8 that begins at byte ``at`` of its value."""
    waiting = decoder.getstate()[0]
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as err:
        raise ValueError(not_text(err, at - len(waiting))) from err


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except json.JSONDecodeError as err:
        raise ValueError(f"not JSON ({err.msg} in a string). Mend or remove it.") from err


def _parsed(piece: bytes) -> list[Any]:
    if any(sign in piece for sign in b'[{"'):
        raise ValueError("a list of something else than numbers was found. Give one row of integers.")
    found = parse_json(b"[" + piece + b"]") if piece.strip() else Bad("not JSON (a comma too many).")
    if isinstance(found, Bad):
        raise ValueError(found.reason)
    return list(found)
