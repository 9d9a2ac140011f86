"""Figures that benchmarks record, with their goals -> the lines of one table.

A benchmark calls ``less``, ``keep``, ``faster`` or ``more`` once for every goal, beside what it prints;
``python -m benchmarks`` runs each in a process of its own and collects them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One goal.

    Attributes:
        what: was measured.
        ours: our figure.
        unit: of both figures.
        peer: the figure of the fastest peer, or of the one that is named; None without one.
        ratio: how many times better ours is; None without a peer.
        goal: as text.
        met: whether it is.
    """

    what: str
    ours: float
    unit: str
    peer: float | None
    ratio: float | None
    goal: str
    met: bool


FOUND: list[Result] = []


def less(what: str, ours: float, unit: str, limit: float, *, peer: float | None = None) -> Result:
    """Keep a figure that is to stay below a limit, perhaps beside a peer's."""
    ratio = peer / ours if peer is not None and ours else None
    return _keep(what, ours, unit, f"<= {limit:.4g} {unit}".rstrip(), ours <= limit, peer, ratio)


def faster(what: str, ours: float, peer: float, unit: str, times: float) -> Result:
    """Keep a cost, a time or bytes, that is to be so many times less than a peer's."""
    return _keep(what, ours, unit, f">= {times:.4g}x", peer / ours >= times, peer, peer / ours)


def more(what: str, ours: float, peer: float, unit: str, times: float) -> Result:
    """Keep a rate that is to be so many times a peer's."""
    return _keep(what, ours, unit, f">= {times:.4g}x", ours / peer >= times, peer, ours / peer)


def keep(
    what: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> Result:
    """Keep a figure with one limit or the other."""
    if at_least is not None:
        return _keep(what, value, unit, f">= {at_least:.4g}", value >= at_least, None, None)
    assert at_most is not None
    return less(what, value, unit, at_most)


def _keep(
    what: str, ours: float, unit: str, goal: str, met: bool, peer: float | None, ratio: float | None
) -> Result:
    values = [None if x is None else float(x) for x in (ours, peer, ratio)]
    found = Result(
        what=what, ours=values[0] or 0.0, unit=unit, peer=values[1], ratio=values[2], goal=goal, met=bool(met)
    )
    FOUND.append(found)
    return found


def table(rows: list[tuple[str, Result]]) -> list[str]:
    """Lines of a Markdown table; every row is the name of its benchmark and the result."""
    lines = [
        "| benchmark | what | ours | peer | ratio | goal | met |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for name, row in rows:
        peer = "" if row.peer is None else f"{row.peer:,.4g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        met = "yes" if row.met else "NO"
        lines.append(
            f"| {name} | {row.what} | {row.ours:,.4g} {row.unit} | {peer} | {ratio} | {row.goal} | {met} |"
        )
    return lines
