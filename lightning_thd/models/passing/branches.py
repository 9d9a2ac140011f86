"""Inputs of a recurrent layer on sequences that share prefixes -> its output, with every slot computed once.

The slots of a pack with shared prefixes form a tree. A stretch is a part of the tree without a branch point
inside it. Stretches run level by level: those without a parent first, then those whose parents have run. The
final state of a stretch enters all stretches that begin at its end, so autograd sums their gradients at the
branch point. Only the states of branch points are kept. Legend: T slots in a pack, S stretches, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd.batch.upload import uploaded
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.models.families.padded_groups import padded_rows, places_in
from lightning_thd.models.passing.stretches import (
    Inputs,
    Reach,
    Recurrence,
    Rows,
    rows_of_kind,
    run_rows,
    with_blank,
)
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
    leaf_lengths = np.asarray(query_lengths, dtype=np.int64)
    branch_slots = np.asarray(branches, dtype=np.int64)[leaf_lengths > 0]
    leaf_lengths = leaf_lengths[leaf_lengths > 0]
    leaf_starts = np.cumsum(leaf_lengths) - leaf_lengths

    # A stretch begins where a leaf begins, and behind each branch point.
    first = np.union1d(leaf_starts, branch_slots[branch_slots >= 0] + 1)
    lengths = np.diff(np.append(first, leaf_lengths.sum()))

    parents = np.arange(-1, len(first) - 1)  # inside a leaf, each goes on from the one before it
    at_branches = np.searchsorted(first, branch_slots, side="right") - 1  # -1 for slot -1, before all others
    parents[np.searchsorted(first, leaf_starts)] = at_branches

    levels = np.zeros(len(first), dtype=np.int64)
    for stretch, parent in enumerate(parents.tolist()):  # a parent comes before its children
        if parent >= 0:
            levels[stretch] = levels[parent] + 1

    return Stretches(first, lengths, parents, levels)


class _Run(NamedTuple):
    """Stretches of one level and of similar length, and the places of their states among the kept ones."""

    rows: Rows
    entering: Tensor | None  # ``[R]``, the place of the state that enters each; None for zeros
    kept: Tensor | None  # the rows whose final states are kept, because stretches begin there; None for none


class _Plan(NamedTuple):
    """How a pack's stretches run, and how their outputs become the pack's."""

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
        branch_states: list[Tensor] = []  # those of the branch points so far

        for run in plan.runs:
            entering = None
            if run.entering is not None:
                entering = torch.cat(branch_states).index_select(0, run.entering)
            final = run_rows(recurrence, padded, run.rows, entering, outputs)
            if run.kept is not None:
                branch_states.append(final.index_select(0, run.kept))

        return torch.cat(outputs).index_select(0, plan.back)

    def near(self, rows: Tensor, left: int) -> tuple[Tensor, Reach]:
        """Return all slots, and the ``left`` slots before each leaf on its path."""
        reaches = self._boundaries.once(_no_reaches)
        if left not in reaches:
            reaches[left] = _reach(self._boundaries.call(), left)
        return rows, reaches[left]


class _HostRun(NamedTuple):
    """A ``_Run`` as arrays in the memory of the CPU."""

    stretches: Ints  # ``[R]``
    slots: Ints  # ``[R, L]``
    entering: Ints | None
    kept: Ints | None

    def arrays(self) -> list[Ints]:
        """Return the arrays that there are, in the order of the fields."""
        return [array for array in self if array is not None]


def _plan(boundaries: Boundaries) -> _Plan:
    """Plan the runs of a pack's stretches, with one upload."""
    runs = _runs_on_host(boundaries)
    back = places_in([run.slots for run in runs], boundaries.slots)
    arrays = [array for run in runs for array in run.arrays()]
    *uploads, back_on_device = uploaded([*arrays, back], boundaries.offsets.device)

    tensors = iter(uploads)
    runs_on_device: list[_Run] = []
    for run in runs:
        rows = Rows(next(tensors), next(tensors))
        entering = None if run.entering is None else next(tensors)
        kept = None if run.kept is None else next(tensors)
        runs_on_device.append(_Run(rows, entering, kept))

    return _Plan(runs_on_device, back_on_device)


def _runs_on_host(boundaries: Boundaries) -> list[_HostRun]:
    """Group the stretches of each level by length, and number the states that are kept for later levels."""
    call = boundaries.call()
    assert call.q_lengths is not None
    assert call.branches is not None
    stretches = cut_at_branches(call.q_lengths, call.branches)
    is_branch = np.isin(np.arange(len(stretches.first)), stretches.parents)
    state_of = np.full(len(stretches.first), -1)  # the number of each stretch's final state, if it is kept

    runs: list[_HostRun] = []
    for level in range(int(stretches.levels.max()) + 1):
        of_level = np.flatnonzero(stretches.levels == level)
        kind = np.stack([stretches.first[of_level], stretches.lengths[of_level]])
        for members, slots in rows_of_kind(kind, boundaries.slots):
            in_run = of_level[members]
            kept = np.flatnonzero(is_branch[in_run])
            state_of[in_run[kept]] = state_of.max() + 1 + np.arange(len(kept))

            entering = state_of[stretches.parents[in_run]] if level else None
            runs.append(_HostRun(in_run, slots, entering, kept if len(kept) else None))

    return runs


def _no_reaches(_: Boundaries) -> dict[int, Reach]:
    return {}


def _reach(call: KernelCall, left: int) -> Reach:
    """Plan a convolution: each leaf reads up to ``left`` slots of its path before its own slots."""
    assert call.keys is not None
    queries = np.asarray(call.q_lengths, dtype=np.int64)
    keys = np.asarray(call.kv_lengths, dtype=np.int64)
    lengths = np.minimum(queries + left, keys)

    key_ends = np.cumsum(keys)
    read = ranges(key_ends - lengths, key_ends)  # places among the keys of all leaves
    grids = [grid for _, grid in padded_rows(lengths)]
    ends = np.cumsum(lengths)
    of_queries = places_in(grids, int(lengths.sum()))[ranges(ends - queries, ends)]
    *sources, read_keys, back = uploaded([*grids, read, of_queries], call.keys.device)
    return Reach(call.keys.index_select(0, read_keys), tuple(sources), back)
