"""Figures that benchmarks record, with their goals -> the lines of one table.

A benchmark calls ``less``, ``keep``, ``faster``, ``more`` or ``pair`` once for every goal, beside what it
prints; ``python -m benchmarks`` runs each in a process of its own and collects them.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.clock import Times

# Precision of work on the host alone: plans, lengths, files.
HOST = "host"


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
        precision: of the products measured: fp32, bf16, ...; "host" where there are none.
        cpu_s: CPU seconds of ours beside the wall seconds; None where it was not measured.
        peer_cpu_s: of the peer.
        spread: half the distance between the quartiles of our rounds, as a share of their median.
    """

    what: str
    ours: float
    unit: str
    peer: float | None
    ratio: float | None
    goal: str
    met: bool
    precision: str = HOST
    cpu_s: float | None = None
    peer_cpu_s: float | None = None
    spread: float | None = None


FOUND: list[Result] = []


def less(
    what: str, ours: float, unit: str, limit: float, *, peer: float | None = None, precision: str = HOST
) -> Result:
    """Keep a figure that is to stay below a limit, perhaps beside a peer's."""
    ratio = peer / ours if peer is not None and ours else None
    return _keep(what, ours, unit, f"<= {limit:.4g} {unit}".rstrip(), ours <= limit, peer, ratio, precision)


def faster(what: str, ours: float, peer: float, unit: str, times: float, *, precision: str = HOST) -> Result:
    """Keep a cost, a time or bytes, that is to be so many times less than a peer's."""
    return _keep(what, ours, unit, f">= {times:.4g}x", peer / ours >= times, peer, peer / ours, precision)


def more(what: str, ours: float, peer: float, unit: str, times: float, *, precision: str = HOST) -> Result:
    """Keep a rate that is to be so many times a peer's."""
    return _keep(what, ours, unit, f">= {times:.4g}x", ours / peer >= times, peer, ours / peer, precision)


def pair(what: str, ours: Times, peer: Times, times: float, *, precision: str, work: float = 1.0) -> Result:
    """Keep the times of two ways that took turns; ours is to be so many times faster.

    Args:
        what: was measured.
        ours: seconds of our rounds.
        peer: of the peer's, in the same rounds.
        times: the goal.
        precision: of the products.
        work: units done in a round; the figures are then units a second instead of seconds.
    """
    ratio = ours.times(peer)
    rate = work != 1.0
    found = Result(
        what=what,
        ours=work / ours.wall_s if rate else ours.wall_s,
        unit="tokens/s" if rate else "s",
        peer=work / peer.wall_s if rate else peer.wall_s,
        ratio=ratio,
        goal=f">= {times:.4g}x",
        met=ratio >= times,
        precision=precision,
        cpu_s=ours.cpu_s,
        peer_cpu_s=peer.cpu_s,
        spread=ours.spread,
    )
    FOUND.append(found)
    return found


def keep(
    what: str,
    value: float,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    precision: str = HOST,
) -> Result:
    """Keep a figure with one limit or the other."""
    if at_least is not None:
        goal = f">= {at_least:.4g}"
        return _keep(what, value, unit, goal, value >= at_least, None, None, precision)
    assert at_most is not None
    return less(what, value, unit, at_most, precision=precision)


def _keep(
    what: str,
    ours: float,
    unit: str,
    goal: str,
    met: bool,
    peer: float | None,
    ratio: float | None,
    precision: str,
) -> Result:
    values = [None if x is None else float(x) for x in (ours, peer, ratio)]
    found = Result(
        what=what,
        ours=values[0] or 0.0,
        unit=unit,
        peer=values[1],
        ratio=values[2],
        goal=goal,
        met=bool(met),
        precision=precision,
    )
    FOUND.append(found)
    return found


def _figure(value: float) -> str:
    """Write four digits, and all of a number of more: 10,012, not 1e+04."""
    return f"{value:,.0f}" if 9_999.5 <= abs(value) < 1e12 else f"{value:,.4g}"


def table(rows: list[tuple[str, Result]]) -> list[str]:
    """Lines of a Markdown table; every row is the name of its benchmark and the result."""
    lines = [
        "| benchmark | what | precision | ours | peer | ratio | CPU s, ours / peer | spread | goal | met |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for name, row in rows:
        peer = "" if row.peer is None else f"{_figure(row.peer)} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}x"
        cpu = "" if row.cpu_s is None else f"{row.cpu_s:.3g} / {row.peer_cpu_s or 0:.3g}"
        spread = "" if row.spread is None else f"{row.spread:.0%}"
        cells = (
            name,
            row.what,
            row.precision,
            f"{_figure(row.ours)} {row.unit}",
            peer,
            ratio,
            cpu,
            spread,
            row.goal,
            "yes" if row.met else "NO",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines
