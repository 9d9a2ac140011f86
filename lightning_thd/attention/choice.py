"""A batch's layout, a layer's sizes and window -> how its keys reach other context-parallel ranks.

``auto`` costs every way that can run the layer (``parallel.costs``) and takes the cheapest, batch by batch
and for every kind of layer by itself.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_thd.attention.spec import AttentionSpec
from lightning_thd.parallel.context import needs, partition
from lightning_thd.parallel.context.costs import Choice, LayerSizes, compare_ways
from lightning_thd.parallel.context.layout import ShardLayout

Way = Literal["all_gather", "ulysses", "needed", "ring"]

_said: set[tuple[object, ...]] = set()


def choose_way(layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> Way:
    """Choose how a layer's keys reach other context-parallel ranks; all ranks of the group choose alike.

    Returns:
        What was asked for. With ``auto`` the cheapest way. A window under ``ring``, unless the shard is
        striped, is exchanged at once, as ``needed``: its keys are few and their distance differs from
        sequence to sequence.

    Raises:
        ValueError: when heads do not divide, or a window looks ahead, and what to ask for instead.
    """
    ahead = not spec.causal and spec.windowed
    divides = sizes.heads % layout.cp == 0
    asked = layout.communication
    if asked == "ulysses" or (ahead and asked == "auto"):
        if not divides:
            raise ValueError(_indivisible(sizes.heads, layout.cp, ahead=ahead))
        return "ulysses"
    if ahead:
        raise ValueError(
            f"A window of {spec.left} keys before and {spec.right} after a query looks ahead, which {asked} "
            "cannot express as one call of a kernel. Use context_parallel_communication='ulysses'."
        )
    if asked == "all_gather":
        return asked
    if asked == "auto":
        return _cheapest(layout, sizes, spec, divides=divides)
    layout.check_varying(asked)
    return "needed" if asked == "ring" and not _rings(layout, spec) else asked


def _rings(layout: ShardLayout, spec: AttentionSpec) -> bool:
    return layout.layout == "striped" or spec.left < 0


def _indivisible(heads: int, cp: int, *, ahead: bool) -> str:
    return (
        f"{heads} query heads cannot be shared out among {cp} context-parallel ranks; ulysses "
        f"wants a multiple of {cp}. Use context_parallel_communication='all_gather'"
        + (", and no window that looks ahead." if ahead else ".")
    )


def _cheapest(layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec, *, divides: bool) -> Way:
    if layout.fixed:  # a recorded graph: the sizes of an exchange must not follow the lengths
        return "ulysses" if divides else "all_gather"
    key = ("way", sizes, spec.causal, spec.left)
    if key not in layout.cache:
        choice = _compare(layout, sizes, spec, divides=divides)[0]
        layout.cache[key] = choice.name
        _say(choice, layout, sizes, spec)
    way: Way = layout.cache[key]
    return way


def _compare(layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec, *, divides: bool) -> list[Choice]:
    lengths = layout.padded_lengths
    counts = needs.need_counts(lengths, **layout.cut, causal=spec.causal, left=spec.left)
    most, pairs = _pairs(layout, spec)
    return compare_ways(
        sizes,
        layout.costs,
        cp=layout.cp,
        slots=layout.local_slots,
        needed_rows=int(max(counts.sum(0).max(), counts.sum(1).max())),
        pairs=pairs,
        most_pairs=most,
        ulysses=divides,
        ring=_rings(layout, spec),
    )


def _pairs(layout: ShardLayout, spec: AttentionSpec) -> tuple[float, float]:
    """Count the query-key pairs of the busiest rank and of all ranks; for windows an upper bound."""
    lengths = np.asarray(layout.padded_lengths, dtype=np.float64)
    if not spec.causal:
        held = [partition.held_lengths(layout.padded_lengths, **layout.cut, rank=r) for r in range(layout.cp)]
        work = np.array([float((own * lengths).sum()) for own in held])
    elif spec.left < 0:
        work = partition.causal_work(layout.padded_lengths, **layout.cut)
    else:  # about the same for every query
        seen = float(np.minimum(lengths, spec.left + 1) @ lengths)
        return seen / layout.cp, seen
    return float(work.max()), float(work.sum())


def _say(choice: Choice, layout: ShardLayout, sizes: LayerSizes, spec: AttentionSpec) -> None:
    """Print a chosen way of communicating the first time that a kind of layer uses it."""
    key = (choice.name, layout.cp, layout.layout, sizes, spec.causal, spec.left)
    if key in _said:
        return
    _said.add(key)
    kind = "causal" if spec.causal else "bidirectional"
    window = f", window {spec.left + 1}" if spec.left >= 0 else ""
    rank_zero_info(
        f"context parallelism of {layout.cp} ranks ({layout.layout}): {kind} attention, {sizes.heads} heads "
        f"on {sizes.kv_heads}{window} exchanges by {choice.name!r}: {choice.received_bytes / 1e6:.3g} MB a "
        f"layer and pass. Expected by CommCosts: {choice.exchange_s * 1e6:,.2f} us, beside "
        f"{choice.kernel_s * 1e6:,.2f} us of its kernel."
    )
