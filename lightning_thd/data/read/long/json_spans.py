"""A JSON object or array in a file -> where each of its values lies, without holding any."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any, BinaryIO, NamedTuple

from lightning_thd.data.read.decode import Bad, parse_json

_BLOCK = 1 << 20  # bytes that are looked at at a time
_LONGEST_KEY = 1 << 16  # bytes
_STRING = re.compile(rb'["\\\n]')
_NESTED = re.compile(rb'["\[\]{}\n]'), re.compile(rb'["\[\]{}]')  # in one line, in any number of lines
_SCALAR = re.compile(rb"[,\]}\s]")
_BLANKS = (b" ", b"\t", b"\r"), (b" ", b"\t", b"\r", b"\n")


class Span(NamedTuple):
    """The bytes ``start`` up to ``stop`` of a file."""

    start: int
    stop: int


def scan_object(file: BinaryIO, start: int, *, lines: bool = False) -> tuple[dict[str, Span], int]:
    """Find the values of the JSON object that begins at byte ``start``.

    Values are found by their brackets and quotes; whether they are JSON shows when they are parsed.

    Args:
        file: opened for reading bytes.
        start: of the object.
        lines: it may take several lines; else it must end in its line.

    Returns:
        The span of the value of each key, the last of equal keys, and the byte behind the object.
        ``b'{"a": [1, 2]}'`` gives ``({"a": Span(6, 12)}, 13)``.

    Raises:
        ValueError: for what is no object, and one that does not end, or not in its line.
    """
    cursor = _Cursor(file, start, lines)
    cursor.skip_blanks()
    cursor.expect(b"{")
    cursor.skip_blanks()
    found: dict[str, Span] = {}
    if cursor.peek() == b"}":
        cursor.skip()
        return found, cursor.at
    while True:
        cursor.skip_blanks()
        begin = cursor.at
        _skip_string(cursor)
        key = read_value(file, Span(begin, min(cursor.at, begin + _LONGEST_KEY)))
        if not isinstance(key, str):
            raise ValueError("not JSON (a key that is no string). Mend or remove it.")
        cursor.skip_blanks()
        cursor.expect(b":")
        cursor.skip_blanks()
        begin = cursor.at
        _skip_value(cursor)
        found[key] = Span(begin, cursor.at)
        cursor.skip_blanks()
        if cursor.peek() == b"}":
            cursor.skip()
            return found, cursor.at
        cursor.expect(b",")


def scan_array(file: BinaryIO, start: int) -> Generator[Span, None, int]:
    """Find the entries of the JSON array that begins at byte ``start``, in any number of lines.

    Returns:
        An iterator over their spans, whose own value is the byte behind the array.

    Raises:
        ValueError: for what is no array, or does not end.
    """
    cursor = _Cursor(file, start, lines=True)
    cursor.skip_blanks()
    cursor.expect(b"[")
    cursor.skip_blanks()
    if cursor.peek() == b"]":
        return cursor.at + 1
    while True:
        cursor.skip_blanks()
        begin = cursor.at
        _skip_value(cursor)
        yield Span(begin, cursor.at)
        cursor.skip_blanks()
        if cursor.peek() == b"]":
            return cursor.at + 1
        cursor.expect(b",")


def read_value(file: BinaryIO, span: Span) -> Any | Bad:
    """Parse the JSON value at a span of a file, without moving the file's position."""
    return parse_json(os.pread(file.fileno(), span.stop - span.start, span.start))


class _Cursor:
    """A position in a file, which moves on block by block."""

    def __init__(self, file: BinaryIO, at: int, lines: bool) -> None:
        self.nested, self._blanks = _NESTED[lines], _BLANKS[lines]
        self._file, self._base, self._block, self._next = file, at, b"", 0
        file.seek(at)

    @property
    def at(self) -> int:
        return self._base + self._next

    def peek(self) -> bytes:
        """Return the next byte; empty at the end of the file."""
        while self._next >= len(self._block):
            self._base, self._next = self._base + len(self._block), self._next - len(self._block)
            self._block = self._file.read(_BLOCK)
            if not self._block:
                return b""
        return self._block[self._next : self._next + 1]

    def skip(self, count: int = 1) -> None:
        self._next += count

    def skip_blanks(self) -> None:
        while self.peek() in self._blanks:
            self.skip()

    def expect(self, sign: bytes) -> None:
        """Pass over a sign, or raise if another one comes."""
        found = self.peek()
        if found != sign:
            raise ValueError(_misplaced(found, sign))
        self.skip()

    def move_to(self, pattern: re.Pattern[bytes]) -> bytes:
        """Move to the next match of a pattern of one byte and return it; empty at the end of the file."""
        while self.peek():
            found = pattern.search(self._block, self._next)
            if found is not None:
                self._next = found.start()
                return found.group()
            self._next = len(self._block)
        return b""


def _misplaced(found: bytes, wanted: bytes) -> str:
    came = {b"": "the end of the file", b"\n": "the end of the line"}.get(found, repr(found)[1:])
    return f"not JSON ({came} in the place of {repr(wanted)[1:]}). Mend or remove it."


def _skip_string(cursor: _Cursor) -> None:
    cursor.expect(b'"')
    while (sign := cursor.move_to(_STRING)) == b"\\":
        cursor.skip(2)
    if sign != b'"':
        raise ValueError(_misplaced(sign, b'"'))
    cursor.skip()


def _skip_value(cursor: _Cursor) -> None:
    sign = cursor.peek()
    if sign == b'"':
        _skip_string(cursor)
        return
    if sign not in (b"[", b"{"):
        if _SCALAR.match(sign or b","):
            raise ValueError(_misplaced(sign, b'"'))
        cursor.move_to(_SCALAR)
        return
    depth = 0
    while True:
        sign = cursor.move_to(cursor.nested)
        if sign == b'"':
            _skip_string(cursor)
            continue
        if sign in (b"", b"\n"):
            raise ValueError(_misplaced(sign, b"]"))
        cursor.skip()
        depth += 1 if sign in (b"[", b"{") else -1
        if not depth:
            return
