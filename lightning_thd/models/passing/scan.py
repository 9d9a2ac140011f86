"""Inputs of a recurrent layer on one rank's shard -> its output, with states passed from rank to rank.

Every rank runs its stretches at the same time. Those whose state goes on elsewhere run first; their states
and changes are exchanged at once, and each rank joins what it received along the sequences.

Legend: N slots of a shard, R rows, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_thd.models.padded_groups import group_rows
from lightning_thd.models.passing.recurrences import Inputs, Recurrence, Spanned
from lightning_thd.parallel.context import traffic
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.context.partition import Ints, ranges
from lightning_thd.parallel.context.states import StatePlan, plan_states
from lightning_thd.parallel.exchange import exchange_rows, keep_path
from lightning_thd.parallel.shard import gather_pack


class _Rows(NamedTuple):
    """Rows of stretches of similar length: their numbers and their slots, N where there is padding."""

    members: Tensor
    slots: Tensor


class _At(NamedTuple):
    """The plan of a shard's stretches as index tensors on the device."""

    plan: StatePlan
    whole: list[_Rows]
    opening: list[_Rows]
    spanning: list[_Rows]
    closing: list[_Rows]
    back: Tensor
    send_states: list[Tensor]
    send_changes: list[Tensor]
    steps: list[tuple[Tensor, Tensor]]
    entering: Tensor


def scan_shard(recurrence: Recurrence, inputs: Inputs, layout: ShardLayout) -> Tensor:
    """Run a recurrent layer over the sequences of a pack of which this rank holds a shard; a collective.

    Where the states would be more bytes than the inputs of the pack, as with many short sequences in dual
    chunks, those are gathered instead, the same on every rank.
    """
    at = layout.once("states", lambda: _plan(layout))
    states, gathered = _received(recurrence, inputs, at.plan, layout)
    if states > gathered:
        traffic.count(gathered, "gathered")
        return _on_pack(recurrence, inputs, layout)
    padded = tuple(torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs)
    outputs: list[Tensor] = []
    opened = [_run(recurrence, padded, rows, None, outputs) for rows in at.opening]
    spanned = [recurrence.span(_take(padded, rows)) for rows in at.spanning]
    entering = _pass(recurrence, at, opened, spanned, inputs[0], layout)
    spans = sum(len(rows.members) for rows in at.spanning)
    for rows, one in zip(at.spanning, spanned, strict=True):
        read = one.read(entering.index_select(0, rows.members))
        outputs.append((one.out + read.to(one.out.dtype)).flatten(0, 1))
    for rows in at.closing:
        _run(recurrence, padded, rows, entering.index_select(0, rows.members + spans), outputs)
    for rows in at.whole:
        _run(recurrence, padded, rows, None, outputs)
    return keep_path(torch.cat(outputs).index_select(0, at.back), entering)


def _take(padded: Inputs, rows: _Rows) -> Inputs:
    flat = rows.slots.flatten()
    return tuple(x.index_select(0, flat).view(*rows.slots.shape, *x.shape[1:]) for x in padded)


def _run(
    recurrence: Recurrence, padded: Inputs, rows: _Rows, entering: Tensor | None, outputs: list[Tensor]
) -> Tensor:
    out, state = recurrence.run(_take(padded, rows), entering)
    outputs.append(out.flatten(0, 1))
    return state


def _pass(
    recurrence: Recurrence,
    at: _At,
    opened: list[Tensor],
    spanned: list[Spanned],
    some: Tensor,
    layout: ShardLayout,
) -> Tensor:
    """Exchange states and changes, and return the states that enter this rank's stretches; a collective."""
    kept = torch.float64 if some.dtype == torch.float64 else torch.float32  # on ranks without any, too
    none = some.new_zeros(0, dtype=kept)
    left = [*_in_order(opened, at.opening), *_in_order([one.state for one in spanned], at.spanning)]
    states = torch.cat([none.view(0, *recurrence.state_shape), *(x.to(kept) for x in left)])
    changed = _in_order([one.change for one in spanned], at.spanning)
    changes = torch.cat([none.view(0, *recurrence.change_shape), *(x.to(kept) for x in changed)])
    if at.plan.moved.any():  # the same on every rank
        more = _exchange(recurrence, at, states, changes, some, layout)
        states, changes = torch.cat([states, more[0]]), torch.cat([changes, more[1]])
    behind: list[Tensor] = []
    with torch.autocast(some.device.type, enabled=False):
        for which, through in at.steps:
            state = states.index_select(0, which)
            if behind:
                before = behind[-1][: len(which)]
                state = state + recurrence.carry(changes.index_select(0, through), before)
            behind.append(state)
    return torch.cat([*behind, states[:0]]).index_select(0, at.entering)


def _in_order(found: list[Tensor], rows: Sequence[_Rows]) -> list[Tensor]:
    """Reorder the results of groups of rows to the order of their stretches."""
    if not found:
        return []
    members = torch.cat([one.members for one in rows])
    return [torch.cat(found).index_select(0, torch.argsort(members))]


def _exchange(
    recurrence: Recurrence, at: _At, states: Tensor, changes: Tensor, some: Tensor, layout: ShardLayout
) -> tuple[Tensor, Tensor]:
    """Send each rank its states and changes in one message, and return those received; a collective."""
    assert layout.group is not None
    parts = [
        torch.cat([states.index_select(0, s).flatten(), changes.index_select(0, c).flatten()])
        for s, c in zip(at.send_states, at.send_changes, strict=True)
    ]
    state, change = math.prod(recurrence.state_shape), math.prod(recurrence.change_shape)
    counted = list(zip(at.plan.receive_states, at.plan.receive_changes, strict=True))
    sizes = [states_of * state + changes_of * change for states_of, changes_of in counted]
    sent = keep_path(torch.cat(parts), some)  # the way back runs on every rank, or on none
    received = exchange_rows(sent, [len(part) for part in parts], sizes, layout.group)
    traffic.count(received.numel() * received.element_size(), "states")
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part, (states_of, changes_of) in zip(torch.split(received, sizes), counted, strict=True):
        first, second = torch.split(part, [states_of * state, changes_of * change])
        found[0].append(first.view(states_of, *recurrence.state_shape))
        found[1].append(second.view(changes_of, *recurrence.change_shape))
    return torch.cat(found[0]), torch.cat(found[1])


def _received(
    recurrence: Recurrence, inputs: Inputs, plan: StatePlan, layout: ShardLayout
) -> tuple[int, int]:
    """Return the bytes that passing states moves on the busiest rank, and those that gathering would."""
    sizes = np.array([math.prod(recurrence.state_shape), math.prod(recurrence.change_shape)])
    element = 8 if inputs[0].dtype == torch.float64 else 4
    moved = (plan.moved @ sizes) * element
    of_slot = sum(x[0].numel() * x.element_size() for x in inputs)
    return int(max(moved.sum(0).max(), moved.sum(1).max())), of_slot * (layout.slots - layout.local_slots)


def _on_pack(recurrence: Recurrence, inputs: Inputs, layout: ShardLayout) -> Tensor:
    """Gather the inputs, run whole sequences, and keep this rank's slots; a collective."""
    gathered = tuple(gather_pack(x, layout) for x in inputs)
    padded = tuple(torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in gathered)

    def make() -> tuple[list[_Rows], Tensor]:
        lengths = np.asarray([length for length in layout.padded_lengths if length], dtype=np.int64)
        found = _group(np.stack([np.cumsum(lengths) - lengths, lengths]), layout.slots)
        own = layout.put(_back([found], layout.slots)).index_select(0, layout.own)
        return _put(found, layout), own

    groups, back = layout.once("recurrences of the pack", make)
    outputs: list[Tensor] = []
    for rows in groups:
        _run(recurrence, padded, rows, None, outputs)
    return torch.cat(outputs).index_select(0, back)


def _plan(layout: ShardLayout) -> _At:
    plan, slots = plan_states(layout.padded_lengths, **layout.cut, rank=layout.rank), layout.local_slots
    kinds = [_group(kind, slots) for kind in (plan.opening, plan.spanning, plan.closing, plan.whole)]
    opening, spanning, closing, whole = (_put(kind, layout) for kind in kinds)
    return _At(
        plan=plan,
        whole=whole,
        opening=opening,
        spanning=spanning,
        closing=closing,
        back=layout.put(_back(kinds, slots)),
        send_states=[layout.put(i) for i in plan.send_states],
        send_changes=[layout.put(i) for i in plan.send_changes],
        steps=[(layout.put(step.states), layout.put(step.changes)) for step in plan.steps],
        entering=layout.put(plan.entering),
    )


_HostRows: TypeAlias = list[tuple[Ints, Ints]]


def _group(kind: Ints, slots: int) -> _HostRows:
    """Sort stretches, by first row and length ``[2, P]``, into groups of similar length, on the host."""
    first, lengths = kind
    rows = np.append(ranges(first, first + lengths), slots)
    return [
        (members.numpy(), rows[grid.numpy()])
        for members, grid in group_rows(lengths.tolist(), torch.device("cpu"))
    ]


def _put(groups: _HostRows, layout: ShardLayout) -> list[_Rows]:
    return [_Rows(layout.put(members), layout.put(slots)) for members, slots in groups]


def _back(kinds: list[_HostRows], slots: int) -> Ints:
    """Return the position of every slot's output when all groups are laid end to end."""
    flat = np.concatenate([rows.ravel() for kind in kinds for _, rows in kind])
    back = np.empty(slots, dtype=np.int64)
    real = flat < slots
    back[flat[real]] = np.flatnonzero(real)
    return back
