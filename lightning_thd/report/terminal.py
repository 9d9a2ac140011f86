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
        rows = list(self.rows)
        if any(self.columns):
            rows.insert(0, self.columns)
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = [self._line(row, widths) for row in rows]
        return "\n".join(line for line in (*lines, self.foot) if line)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        """Return the cells of a row, each filled up to the width of its column."""
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if i in self.text else cell.rjust(width))
        return "  ".join(cells).rstrip()


def show_table(table: Table) -> None:
    """Print a table as aligned text."""
    sys.stdout.write(f"{table}\n")
