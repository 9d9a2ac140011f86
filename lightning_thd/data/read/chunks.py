"""The parts of a source that one process reads at a time, and the records and places that they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lightning_thd.data.read.decode import Bad
from lightning_thd.data.read.long.values import Long

Record = str | dict[str, Any] | Long | Bad


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
