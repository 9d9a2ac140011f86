"""Inputs of a recurrent layer on one rank's shard -> the layer's output, with states passed between ranks.

A stretch is a part of a sequence on one rank. All ranks run their stretches at the same time. Stretches that
continue on another rank run first. One exchange sends their final states and their changes (what a stretch
does to an entering state). From these each rank computes the states that enter its stretches.

A convolution of width W reads W - 1 earlier slots, like an attention with a window. So ``context.needs``
plans the exchange of slots, as for attention. Legend: N slots of a shard, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_thd.models.families.padded_groups import padded_rows, places_in
from lightning_thd.models.passing.stretches import (
    Inputs,
    Reach,
    Recurrence,
    Rows,
    Spanned,
    gather_rows,
    rows_of_kind,
    run_rows,
    with_blank,
)
from lightning_thd.parallel.context import needs, partition
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.context.states import StatePlan, plan_states
from lightning_thd.parallel.exchange import exchange_rows, keep_path


class OverRanks(NamedTuple):
    """The carrier of a context-parallel shard, by exchanges between ranks."""

    layout: ShardLayout
    where: str = "a context-parallel shard"
    instead: str = "Set context_parallel_size=1."

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Run a recurrence with the states of other ranks; a collective."""
        return scan_shard(recurrence, inputs, self.layout)

    def near(self, rows: Tensor, left: int) -> tuple[Tensor, Reach]:
        """Add the slots that other ranks send; a collective."""
        layout = self.layout
        plan = needs.exchanged(layout, causal=True, left=left)
        if plan.group_rows:  # the same on every rank, so all ranks exchange slots or none does
            assert layout.group is not None
            sent = rows.index_select(0, plan.send_rows)
            counts = (plan.send_counts, plan.receive_counts)
            received = exchange_rows(sent, *counts, layout.group, layout.traffic)
            layout.traffic.count("convolution")
            rows = keep_path(torch.cat([rows, received]), received)
        return rows, layout.once(("convolution", left), lambda: _reach(layout, left))


class _Plan(NamedTuple):
    """A ``StatePlan``, which explains the fields of the same names, as index tensors on the device."""

    host: StatePlan  # the plan in numpy arrays
    whole: list[Rows]  # whole sequences
    opening: list[Rows]  # first stretches of sequences
    spanning: list[Rows]  # stretches in the middle of sequences
    closing: list[Rows]  # last stretches of sequences
    back: Tensor  # ``[N]``, the place of each slot among the outputs laid end to end
    send_states: list[Tensor]
    send_changes: list[Tensor]
    steps: list[tuple[Tensor, Tensor]]
    entering: Tensor


def scan_shard(recurrence: Recurrence, inputs: Inputs, shard: ShardLayout) -> Tensor:
    """Run a recurrent layer on this rank's shard of a pack, with states of the other ranks; a collective."""
    plan = shard.once("states", lambda: _plan(shard))
    padded = with_blank(inputs)
    outputs: list[Tensor] = []
    opened = [run_rows(recurrence, padded, rows, None, outputs) for rows in plan.opening]
    spanned = [recurrence.span(gather_rows(padded, rows)) for rows in plan.spanning]
    entering = _entering_states(recurrence, plan, opened, spanned, inputs[0], shard)
    num_spanning = sum(len(rows.members) for rows in plan.spanning)  # their states come first in entering

    for rows, one in zip(plan.spanning, spanned, strict=True):
        with torch.autocast(inputs[0].device.type, enabled=False):  # states keep the precision of the kernel
            read = one.read(entering.index_select(0, rows.members))
        outputs.append((one.out + read.to(one.out.dtype)).flatten(0, 1))

    for rows in plan.closing:
        run_rows(recurrence, padded, rows, entering.index_select(0, rows.members + num_spanning), outputs)

    for rows in plan.whole:
        run_rows(recurrence, padded, rows, None, outputs)
    return keep_path(torch.cat(outputs).index_select(0, plan.back), entering)


def _entering_states(
    recurrence: Recurrence,
    plan: _Plan,
    opened: list[Tensor],
    spanned: list[Spanned],
    like: Tensor,
    shard: ShardLayout,
) -> Tensor:
    """Exchange states and changes, and return the states that enter this rank's stretches; a collective."""
    # Ranks without stretches need empty tensors of the same dtype.
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    empty = like.new_zeros(0, dtype=dtype)
    final_states = _in_order(opened, plan.opening)
    final_states += _in_order([group.state for group in spanned], plan.spanning)
    states = torch.cat([empty.view(0, *recurrence.state_shape), *(x.to(dtype) for x in final_states)])
    all_changes = _in_order([group.change for group in spanned], plan.spanning)
    changes = torch.cat([empty.view(0, *recurrence.change_shape), *(x.to(dtype) for x in all_changes)])

    if plan.host.moved.any():  # the same on every rank, so all ranks exchange states or none does
        received_states, received_changes = _exchange(recurrence, plan, states, changes, like, shard)
        states = torch.cat([states, received_states])
        changes = torch.cat([changes, received_changes])

    carried: list[Tensor] = []  # the states after each step along the sequences
    with torch.autocast(like.device.type, enabled=False):
        for state_rows, change_rows in plan.steps:
            state = states.index_select(0, state_rows)
            if carried:
                entering = carried[-1][: len(state_rows)]
                state = state + recurrence.carry(changes.index_select(0, change_rows), entering)
            carried.append(state)

    return torch.cat([*carried, states[:0]]).index_select(0, plan.entering)


def _in_order(results: list[Tensor], groups: Sequence[Rows]) -> list[Tensor]:
    """Concatenate the results of groups in the order of their stretches; an empty list without groups."""
    if not results:
        return []
    members = torch.cat([group.members for group in groups])
    return [torch.cat(results).index_select(0, torch.argsort(members))]


def _exchange(
    recurrence: Recurrence, plan: _Plan, states: Tensor, changes: Tensor, like: Tensor, shard: ShardLayout
) -> tuple[Tensor, Tensor]:
    """Send states and changes to the ranks that need them; return those of other ranks, rank 0's first."""
    assert shard.group is not None
    sent_parts = []
    for state_rows, change_rows in zip(plan.send_states, plan.send_changes, strict=True):
        sent_states = states.index_select(0, state_rows).flatten()
        sent_changes = changes.index_select(0, change_rows).flatten()
        sent_parts.append(torch.cat([sent_states, sent_changes]))

    state_size = math.prod(recurrence.state_shape)
    change_size = math.prod(recurrence.change_shape)
    counts = list(zip(plan.host.receive_states, plan.host.receive_changes, strict=True))
    sizes = [num_states * state_size + num_changes * change_size for num_states, num_changes in counts]

    # keep_path: so that all ranks run the exchange of backward, or none does
    sent = keep_path(torch.cat(sent_parts), like)
    received = exchange_rows(sent, [len(part) for part in sent_parts], sizes, shard.group, shard.traffic)
    shard.traffic.count("states")

    all_states: list[Tensor] = []
    all_changes: list[Tensor] = []
    for part, (num_states, num_changes) in zip(torch.split(received, sizes), counts, strict=True):
        flat_states, flat_changes = torch.split(part, [num_states * state_size, num_changes * change_size])
        all_states.append(flat_states.view(num_states, *recurrence.state_shape))
        all_changes.append(flat_changes.view(num_changes, *recurrence.change_shape))
    return torch.cat(all_states), torch.cat(all_changes)


def _plan(shard: ShardLayout) -> _Plan:
    """Plan the stretches and exchanges of a shard; all arrays are uploaded at once."""
    plan = plan_states(shard.padded_lengths, **shard.cut, rank=shard.rank)
    slots = shard.local_slots
    kinds = [rows_of_kind(kind, slots) for kind in (plan.opening, plan.spanning, plan.closing, plan.whole)]
    steps = [(step.states, step.changes) for step in plan.steps]
    back = places_in([rows for kind in kinds for _, rows in kind], slots)

    on_host = (*kinds, back, [*plan.send_states], [*plan.send_changes], steps, plan.entering)
    *groups, back, send_states, send_changes, steps, entering = shard.put(on_host)
    opening, spanning, closing, whole = ([Rows(*group) for group in kind] for kind in groups)
    return _Plan(plan, whole, opening, spanning, closing, back, send_states, send_changes, steps, entering)


def _reach(layout: ShardLayout, left: int) -> Reach:
    """Plan a convolution that reads ``left`` earlier slots, in groups of stretches of similar length."""
    plan = partition.plan_keys(layout.padded_lengths, **layout.cut, rank=layout.rank, causal=True, left=left)
    grids = [grid for _, grid in padded_rows(plan.kv_lengths)]
    ends = np.cumsum(plan.kv_lengths)
    own_rows = partition.ranges(ends - plan.q_lengths, ends)
    own_places = places_in(grids, int(plan.kv_lengths.sum()))[own_rows]
    *sources, own = layout.put([*grids, own_places])

    keys = needs.needed_call(layout, causal=True, left=left).keys
    assert keys is not None
    return Reach(keys, tuple(sources), own)
