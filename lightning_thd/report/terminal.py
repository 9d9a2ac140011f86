"""Rows of cells -> a table: drawn by rich on a terminal that has it, aligned text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_thd._imports import installed


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table of text cells, for a terminal or a log.

    Attributes:
        columns: heads of the columns; "" where there is none.
        rows: cells, as many a row as there are columns.
        text: columns that hold words and stand to the left; numbers stand to the right.
        title: what stands above, or "".
        foot: what stands below, or "".
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    text: tuple[int, ...] = (0,)
    title: str = ""
    foot: str = ""

    def __str__(self) -> str:
        lines = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        body = [
            "  ".join(
                cell.ljust(width) if at in self.text else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in lines
        ]
        return "\n".join(part for part in (self.title, *body, self.foot) if part)


def show_table(table: Table) -> None:
    """Write a table to standard output: by rich where that is a terminal and rich is installed."""
    if not (sys.stdout.isatty() and installed("rich")):
        sys.stdout.write(f"{table}\n")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawn

    drawn = Drawn(
        title=escape(table.title) or None,
        caption=escape(table.foot) or None,
        title_justify="left",
        caption_justify="left",
        show_header=any(table.columns),
    )
    for at, head in enumerate(table.columns):
        drawn.add_column(escape(head), justify="left" if at in table.text else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    Console().print(drawn)
