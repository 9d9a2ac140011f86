"""The lengths in packs, or the work of ranks -> pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_thd.report.look import CYCLE, Theme, dress, legend, look_of, new_figure

_BAR = 0.72  # the height of a bar, if rows are 1 apart
_LIGHTER = 0.55  # the opacity of a sequence with a prefix that another sequence stores


def draw_packs(
    packs: Sequence[Sequence[int]],
    capacity: int,
    *,
    held: Sequence[Sequence[int]] | None = None,
    theme: Theme = "light",
    width: float = 8.0,
) -> Any:
    """Draw each pack as a horizontal bar of sequences in six colours, with the padding at the bar's end.

    Args:
        packs: the lengths of each pack's sequences.
        capacity: the slots of a pack.
        held: for each sequence, the number of its first tokens that an earlier sequence of the pack stores.
            Only the tokens after them are drawn, in a lighter tone of the earlier sequence's colour.
        theme: ``light`` or ``dark``.
        width: width of the picture, in inches; the height of the bars is proportional to it.
    """
    if held is None:
        held = [[0] * len(pack) for pack in packs]
    stored = [
        [length - shared for length, shared in zip(pack, held_of_pack, strict=True)]
        for pack, held_of_pack in zip(packs, held, strict=True)
    ]
    if capacity < 1:
        raise ValueError(f"capacity={capacity}; wanted the slots of a pack, 1 or more.")
    longest = max((sum(pack) for pack in stored), default=0)
    if longest > capacity:
        raise ValueError(
            f"A pack holds {longest} tokens but capacity={capacity}. Pass the capacity it was made for."
        )

    figure = new_figure(width, 0.8 + 0.34 * width / 8 * max(2, len(packs)), theme)
    axes = figure.add_subplot()
    for row, (lengths, held_of_pack) in enumerate(zip(stored, held, strict=True)):
        axes.barh(row, capacity, height=_BAR, color=look_of(theme).padding)
        _draw_sequences(axes, row, lengths, held_of_pack, theme)

    title = _title_of_packs(packs, capacity, used=sum(map(sum, stored)), shared=sum(map(sum, held)))
    dress(axes, theme, title=title, x="slot", y="pack", grid=False)
    axes.set_yticks(range(len(packs)))
    axes.set_ylim(max(len(packs), 1) - 0.5, -0.5)  # the first pack is at the top
    axes.set_xlim(0, capacity)
    return figure


def _draw_sequences(axes: Any, row: int, lengths: Sequence[int], held: Sequence[int], theme: Theme) -> None:
    """Draw the sequences of a pack; those that share a prefix have the colour of the first of them."""
    start = 0
    colour = -1  # index of the colour
    for length, shared in zip(lengths, held, strict=True):
        if not shared:
            colour += 1
        axes.barh(
            row,
            length,
            left=start,
            height=_BAR,
            color=CYCLE[colour % len(CYCLE)],
            alpha=_LIGHTER if shared else None,
            edgecolor=look_of(theme).paper,
            linewidth=0.6,
        )
        start += length


def _title_of_packs(packs: Sequence[Sequence[int]], capacity: int, *, used: int, shared: int) -> str:
    """Return the numbers of packs and sequences, and the shares of used slots and of shared tokens."""
    filled = used / (capacity * len(packs)) if packs else 0.0
    title = f"{len(packs)} packs, {sum(map(len, packs)):,} sequences, {filled:.1%} filled"
    if shared:
        title += f", {shared / (used + shared):.1%} shared"
    return title


def draw_work(before: Sequence[float], after: Sequence[float], *, theme: Theme = "light") -> Any:
    """Draw the work of each rank in a step, in any unit, before and after balancing."""
    if len(before) != len(after) or not len(after):
        raise ValueError(
            f"draw_work() got {len(before)} ranks before and {len(after)} after; wanted the same ranks twice."
        )

    figure = new_figure(8, 3.0, theme)
    axes = figure.add_subplot()
    ranks = np.arange(len(after))
    unit = _mean(after)
    series = ((-0.2, before, CYCLE[1], "as it comes"), (0.2, after, CYCLE[0], "planned"))
    for offset, values, colour, name in series:
        label = f"{name}: {max(values) / _mean(values):.2f} x mean"
        axes.bar(ranks + offset, np.asarray(values) / unit, 0.4, color=colour, label=label)
    axes.axhline(1.0, color=look_of(theme).quiet, linewidth=1, linestyle="--")
    dress(axes, theme, title="work of each rank", x="rank", y="work / mean")
    legend(axes, theme, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
    return figure


def _mean(values: Sequence[float]) -> float:
    """Return the mean to divide by, 1 in place of 0."""
    return sum(values) / len(values) or 1.0
