"""Rows of cells -> a table of aligned text."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text cells; ``text`` lists the columns aligned left; the others are aligned right."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    text: tuple[int, ...] = (0,)
    title: str = ""
    foot: str = ""

    def __str__(self) -> str:
        return self.within(None)

    def within(self, width: int | None) -> str:
        """Write the table as aligned text, its widest column of words wrapped to fit ``width`` characters."""
        lines = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        over = sum(widths) + 2 * (len(widths) - 1) - (width or 0)
        if width is not None and over > 0 and self.text:
            widest = max(self.text, key=lambda at: widths[at])
            widths[widest] = min(widths[widest], max(16, widths[widest] - over))
            lines = [part for row in lines for part in _wrapped(row, widest, widths[widest])]
        body = [
            "  ".join(
                cell.ljust(size) if at in self.text else cell.rjust(size)
                for at, (cell, size) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        ]
        around = [part if width is None else _filled(part, width) for part in (self.title, self.foot)]
        return "\n".join(part for part in (around[0], *body, around[1]) if part)


def _wrapped(row: Sequence[str], at: int, width: int) -> list[list[str]]:
    """Wrap one cell between words; return the lines as rows whose other cells are blank after the first."""
    parts = textwrap.wrap(row[at], width, break_long_words=False, break_on_hyphens=False) or [""]
    blank = [""] * len(row)
    rows = [list(row if i == 0 else blank) for i in range(len(parts))]
    for cells, part in zip(rows, parts, strict=True):
        cells[at] = part
    return rows


def _filled(text: str, width: int) -> str:
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def show_table(table: Table) -> None:
    """Print a table as aligned text, as wide as the terminal."""
    sys.stdout.write(f"{table.within(shutil.get_terminal_size().columns)}\n")
