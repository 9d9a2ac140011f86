"""Rows of cells -> a table of aligned text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text cells; columns listed in ``text`` are aligned left, other columns right."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    text: tuple[int, ...] = (0,)
    foot: str = ""

    def __str__(self) -> str:
        lines = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(
                cell.ljust(size) if i in self.text else cell.rjust(size)
                for i, (cell, size) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        ]
        return "\n".join(part for part in (*body, self.foot) if part)


def show_table(table: Table) -> None:
    """Print a table as aligned text."""
    sys.stdout.write(f"{table}\n")
