"""The lengths in packs, or the work of ranks -> pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_thd.report.look import CYCLE, Theme, dress, legend, look_of, new_figure

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
    held = [[0] * len(pack) for pack in packs] if held is None else held
    stored = [[n - m for n, m in zip(*pack, strict=True)] for pack in zip(packs, held, strict=True)]
    if capacity < 1:
        raise ValueError(f"capacity={capacity}; wanted the slots of a pack, 1 or more.")
    if (longest := max((sum(pack) for pack in stored), default=0)) > capacity:
        raise ValueError(
            f"A pack holds {longest} tokens but capacity={capacity}. Pass the capacity it was made for."
        )
    look = look_of(theme)
    figure = new_figure(width, 0.8 + 0.34 * width / 8 * max(2, len(packs)), theme)
    axes = figure.add_subplot()
    for row, (lengths, before) in enumerate(zip(stored, held, strict=True)):
        axes.barh(row, capacity, height=0.72, color=look.padding)
        start, tree = 0, -1
        for length, shared in zip(lengths, before, strict=True):
            tree += not shared
            colour = CYCLE[tree % len(CYCLE)]
            style = {"color": colour, "alpha": _LIGHTER if shared else None}
            axes.barh(row, length, left=start, height=0.72, edgecolor=look.paper, linewidth=0.6, **style)
            start += length
    used, shared = sum(map(sum, stored)), sum(map(sum, held))
    filled = used / (capacity * len(packs)) if packs else 0.0
    title = f"{len(packs)} packs, {sum(map(len, packs)):,} sequences, {filled:.1%} filled"
    title += f", {shared / (used + shared):.1%} shared" if shared else ""
    dress(axes, theme, title=title, x="slot", y="pack", grid=False)
    axes.set_yticks(range(len(packs)))
    axes.set_ylim(max(len(packs), 1) - 0.5, -0.5)
    axes.set_xlim(0, capacity)
    return figure


def draw_work(before: Sequence[float], after: Sequence[float], *, theme: Theme = "light") -> Any:
    """Draw the work of each rank in a step, in any unit, before and after balancing."""
    if len(before) != len(after) or not len(after):
        raise ValueError(
            f"draw_work() got {len(before)} ranks before and {len(after)} after; wanted the same ranks twice."
        )
    figure = new_figure(8, 3.0, theme)
    axes = figure.add_subplot()
    ranks, mean = np.arange(len(after)), sum(after) / len(after) or 1.0
    for offset, values, colour, name in (
        (-0.2, before, CYCLE[1], "as it comes"),
        (0.2, after, CYCLE[0], "planned"),
    ):
        slowest = max(values) / (sum(values) / len(values) or 1.0)
        label = f"{name}: {slowest:.2f} x mean"
        axes.bar(ranks + offset, np.asarray(values) / mean, 0.4, color=colour, label=label)
    axes.axhline(1.0, color=look_of(theme).quiet, linewidth=1, linestyle="--")
    dress(axes, theme, title="work of each rank in one step", x="rank", y="work / mean")
    legend(axes, theme, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2)
    return figure
