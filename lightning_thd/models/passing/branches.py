"""Inputs of a recurrent layer on sequences that share prefixes -> its output, with every slot computed once.

The slots of a pack with shared prefixes form a tree. A stretch is a part of the tree without a branch point
inside it. Stretches run level by level: those without a parent first, then those whose parents have run. The
final state of a stretch enters all stretches that begin at its end, so autograd sums their gradients at the
branch point. Only the states of branch points are kept. Legend: T slots in a pack, S stretches, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries
from lightning_thd.models.families.padded_groups import of_tokens, padded_rows, places_in
from lightning_thd.models.pack import Scope, current_scope, scoped
from lightning_thd.models.passing.adopt import Reach
from lightning_thd.models.passing.scan import Inputs, Recurrence, Rows, rows_of_kind, run_rows, with_blank
from lightning_thd.parallel.context.partition import Ints, ranges


class Stretches(NamedTuple):
    """The stretches of a tree, in the order of their slots."""

    first: Ints  # ``[S]``, the first slot of each
    lengths: Ints  # ``[S]``, its slots
    parents: Ints  # ``[S]``, the stretch at whose end it begins; -1 for none
    levels: Ints  # ``[S]``, the number of stretches before it on its path from the root


def cut_at_branches(query_lengths: tuple[int, ...], branches: tuple[int, ...]) -> Stretches:
    """Cut the leaves of a tree at its branch points.

    Leaves of 5 and 2 slots, of which the second goes on from slot 2, give the first slots ``[0, 3, 5]`` and
    the parents ``[-1, 0, 0]``.
    """
    lengths = np.asarray(query_lengths, dtype=np.int64)
    from_slots = np.asarray(branches, dtype=np.int64)[lengths > 0]
    lengths = lengths[lengths > 0]
    slots = int(lengths.sum())
    begins = np.cumsum(lengths) - lengths

    first = np.union1d(begins, from_slots[from_slots >= 0] + 1)
    parents = np.arange(-1, len(first) - 1)  # inside a leaf, each goes on from the one before it
    ends = np.searchsorted(first, from_slots, side="right") - 1  # the stretches that end at branch points
    parents[np.searchsorted(first, begins)] = ends  # -1 for slot -1, which is before all

    levels = np.zeros(len(first), dtype=np.int64)

    for stretch, parent in enumerate(parents.tolist()):  # a parent comes before its children
        if parent >= 0:
            levels[stretch] = levels[parent] + 1
    return Stretches(first, np.diff(np.append(first, slots)), parents, levels)


class _Run(NamedTuple):
    """Stretches of one level and of similar length, and the places of their states among the kept ones."""

    rows: Rows
    entering: Tensor | None  # ``[R]``, the place of the state that enters each; None for zeros
    kept: Tensor | None  # the rows whose final states are kept, because stretches begin there; None for none


class _Plan(NamedTuple):
    runs: list[_Run]  # in the order of levels
    back: Tensor  # ``[T]``, the place of each slot among the outputs laid end to end


class Branches:
    """The carrier of sequences that share prefixes: states and slots come from the path to the root."""

    where = "sequences that share prefixes"
    instead = "Set share_prefixes=False."

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Run a recurrence over all slots, level by level."""
        plan = self._boundaries.once(_plan)
        padded = with_blank(inputs)
        outputs: list[Tensor] = []
        states: list[Tensor] = []  # those of the branch points so far

        for run in plan.runs:
            entering = None
            if run.entering is not None:
                entering = torch.cat(states).index_select(0, run.entering)
            state = run_rows(recurrence, padded, run.rows, entering, outputs)
            if run.kept is not None:
                states.append(state.index_select(0, run.kept))

        return torch.cat(outputs).index_select(0, plan.back)

    def near(self, rows: Tensor, left: int) -> tuple[Tensor, Reach]:
        """Return all slots, and the ``left`` slots before each leaf on its path."""
        by_reach = self._boundaries.once(_no_reaches)
        if left not in by_reach:
            by_reach[left] = _reach(self._boundaries, left)
        return rows, by_reach[left]


def _plan(boundaries: Boundaries) -> _Plan:
    prefixes = boundaries.prefixes
    device = boundaries.offsets.device
    stretches = cut_at_branches(prefixes.query_lengths, prefixes.branches)
    places = np.full(len(stretches.first), -1)  # each kept state has one, in the order of levels
    is_branch = np.isin(np.arange(len(places)), stretches.parents)

    runs: list[Any] = []

    for level in range(int(stretches.levels.max()) + 1):
        of_level = np.flatnonzero(stretches.levels == level)
        kind = np.stack([stretches.first[of_level], stretches.lengths[of_level]])
        for members, slots in rows_of_kind(kind, boundaries.slots):
            own = of_level[members]
            kept = np.flatnonzero(is_branch[own])
            places[own[kept]] = places.max() + 1 + np.arange(len(kept))
            entering = places[stretches.parents[own]] if level else None
            runs.append(((own, slots), entering, kept if len(kept) else None))

    back = places_in([slots for (_, slots), *_ in runs], boundaries.slots)
    arrays = [part for (own, slots), *others in runs for part in (own, slots, *others) if part is not None]
    *tensors, on_device = uploaded([*arrays, back], device)
    remaining = iter(tensors)
    on_runs = []

    for (_, _), entering, kept in runs:
        rows = Rows(next(remaining), next(remaining))
        enters = None if entering is None else next(remaining)
        on_runs.append(_Run(rows, enters, None if kept is None else next(remaining)))
    return _Plan(on_runs, on_device)


def _no_reaches(_: Boundaries) -> dict[int, Reach]:
    return {}


def _reach(boundaries: Boundaries, left: int) -> Reach:
    """Plan a convolution: each leaf reads up to ``left`` slots of its path before its own slots."""
    prefixes = boundaries.prefixes
    queries = np.asarray(prefixes.query_lengths, dtype=np.int64)
    keys = np.asarray(prefixes.key_lengths, dtype=np.int64)
    lengths = np.minimum(queries + left, keys)

    key_ends = np.cumsum(keys)
    read = ranges(key_ends - lengths, key_ends)  # places among the keys of all leaves
    grids = [grid for _, grid in padded_rows(lengths)]
    ends = np.cumsum(lengths)
    own = places_in(grids, int(lengths.sum()))[ranges(ends - queries, ends)]
    *sources, places, here = uploaded([*grids, read, own], boundaries.offsets.device)
    return Reach(prefixes.keys.index_select(0, places), tuple(sources), here)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_on_paths(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], boundaries: Boundaries
) -> Any:
    """Call a layer whose state cannot be carried on the whole path of every leaf, and keep the leaves' slots.

    This computes a prefix again for each leaf that goes on from it, in this layer only.
    """
    prefixes = boundaries.prefixes
    scope = current_scope()
    assert scope is not None
    keys = prefixes.keys.shape[0]
    paths = Boundaries(
        offsets=prefixes.cu_seqlens_kv,
        slots=keys,
        max_seqlen=prefixes.max_seqlen_kv,
        lengths=prefixes.key_lengths,
    )
    on_paths = Scope(paths, scope.outer, module=scope.module, families=scope.families, masks=scope.masks)

    with scoped(on_paths):
        gathered = of_tokens(lambda x: x.index_select(1, prefixes.keys), boundaries.slots)
        out = function(*map(gathered, args), **{name: gathered(value) for name, value in kwargs.items()})
        own = boundaries.once(_own_keys)
        return of_tokens(lambda x: x.index_select(1, own), keys)(out)


def _own_keys(boundaries: Boundaries) -> Tensor:
    """Return int64 ``[T]``, the place of every slot among the keys of its own leaf."""
    prefixes = boundaries.prefixes
    ends = np.cumsum(np.asarray(prefixes.key_lengths, dtype=np.int64))
    own = ranges(ends - np.asarray(prefixes.query_lengths, dtype=np.int64), ends)
    places: list[Tensor] = uploaded([own], boundaries.offsets.device)
    return places[0]
