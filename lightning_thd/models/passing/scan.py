"""Inputs of a recurrent layer on one rank's shard -> the layer's output, with states passed between ranks.

A stretch is a part of a sequence on one rank. All ranks run their stretches at the same time. Stretches that
continue on another rank run first. One exchange sends their final states and their changes (what a stretch
does to an entering state). From these each rank computes the states that enter its stretches.

The state decays by one number per head and slot (Mamba-2), or is multiplied by a matrix (gated delta rules).
So final state and output are linear in the entering state, and a stretch can run before that state arrives.
Its output is the output without an entering state, plus a term that is later computed from that state.
Legend: N slots of a shard, R rows, L slots of the longest row, H heads, K and V sizes of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_thd.models.families.padded_groups import padded_rows, places_in
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.context.partition import Ints, ranges
from lightning_thd.parallel.context.states import StatePlan, plan_states
from lightning_thd.parallel.exchange import exchange_rows, keep_path

Inputs = tuple[Tensor, ...]


class Spanned(NamedTuple):
    """The result of a stretch that ran before its entering state was known, and the effect of that state."""

    out: Tensor  # ``[R, L, H, ...]``, the output without an entering state
    state: Tensor  # ``[R, *state_shape]``, the final state without an entering state
    change: Tensor  # ``[R, H, ...]``, how the stretch changes an entering state; see ``carry``
    read: Callable[[Tensor], Tensor]  # entering state, shaped as ``state`` -> the term to add to ``out``


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """Mamba 2: x ``[R, L, H, P]``, dt ``[R, L, H]``, B and C ``[R, L, G, S]``; G groups, sizes P and S."""

    scan: Callable[..., Any]  # transformers' or mamba-ssm's function on rows
    decay: Tensor  # ``[H]``, the layer's A, below 0
    skip: Tensor | None  # ``[H]``, the layer's D: the output gets the term D x; None for no such term
    chunk_size: int  # slots that the scan processes at once
    state_shape: tuple[int, ...]  # H, P, S

    @property
    def change_shape(self) -> tuple[int, ...]:
        """Return the sizes of a change: one factor per head."""
        return self.state_shape[:1]

    def run(self, inputs: Inputs, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scan rows of a state-space layer; zero time steps in the padding do not change the state."""
        x, dt, b, c = inputs
        options: Any = {"chunk_size": self.chunk_size, "D": self.skip, "initial_states": entering}
        out, state = self.scan(x, dt, self.decay, b, c, **options, return_final_states=True)
        return out, state

    def span(self, inputs: Inputs) -> Spanned:
        """Scan rows before the entering state is known; each slot decays that state by ``exp(A dt)``."""
        out, state = self.run(inputs, None)
        _, dt, _, c = inputs
        fell = (dt * self.decay).cumsum(1).exp()

        def read(entering: Tensor) -> Tensor:
            heads = c.repeat_interleave(self.state_shape[0] // c.shape[2], dim=2).to(entering.dtype)
            seen = torch.einsum("rlhs,rhps->rlhp", heads, entering)
            return seen * fell[..., None].to(entering.dtype)

        return Spanned(out, state, fell[:, -1].to(state.dtype), read)

    def carry(self, change: Tensor, state: Tensor) -> Tensor:
        """Multiply states by the decay of their stretches."""
        return change[..., None, None] * state


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRule:
    """The gated delta rule: q, k ``[R, L, h, K]``, v ``[R, L, H, V]``, g and beta; h heads of keys."""

    rule: Callable[..., Any]  # transformers' or flash-linear-attention's function on rows
    options: dict[str, Any]  # further arguments, the same for all rows
    state_shape: tuple[int, ...]  # H, K, V

    @property
    def change_shape(self) -> tuple[int, ...]:
        """Return the sizes of a change: one matrix per head."""
        heads, keys, _ = self.state_shape
        return heads, keys, keys

    def run(self, inputs: Inputs, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run rows of the gated delta rule; zeros in the padding do not change the state."""
        q, k, v, g, beta = inputs
        out, state = self.rule(
            q, k, v, g=g, beta=beta, initial_state=entering, output_final_state=True, **self.options
        )
        return out, state

    def span(self, inputs: Inputs) -> Spanned:
        """Run rows without the entering state; columns that enter as an identity matrix end as the change."""
        q, k, v, g, beta = inputs
        heads, keys, values = self.state_shape
        wide = torch.cat([v, v.new_zeros(*v.shape[:-1], keys)], dim=-1)
        kept = torch.float64 if v.dtype == torch.float64 else torch.float32
        unit = torch.eye(keys, device=v.device, dtype=kept).expand(len(v), heads, keys, keys)
        entering = torch.cat([unit.new_zeros(len(v), heads, keys, values), unit], dim=-1)
        out, state = self.run((q, k, wide, g, beta), entering)
        response = out[..., values:]

        def read(entered: Tensor) -> Tensor:
            return torch.einsum("rlhk,rhkv->rlhv", response.to(entered.dtype), entered)

        return Spanned(out[..., :values], state[..., :values], state[..., values:], read)

    def carry(self, change: Tensor, state: Tensor) -> Tensor:
        """Multiply states by the change matrices of their stretches."""
        return change @ state


Recurrence: TypeAlias = StateSpace | DeltaRule


class Rows(NamedTuple):
    """Stretches of one kind, of similar length: their indices ``[R]`` and slots ``[R, L]``; N for padding."""

    members: Tensor
    slots: Tensor


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
    spanned = [recurrence.span(_gather(padded, rows)) for rows in plan.spanning]
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


def with_blank(inputs: Inputs) -> Inputs:
    """Return inputs ``[N, ...]`` with one more slot, the zeros of padding."""
    return tuple(torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs)


def _gather(padded: Inputs, rows: Rows) -> Inputs:
    """Gather the inputs of stretches as rows; slot N holds the zeros of padding."""
    flat = rows.slots.flatten()
    return tuple(x.index_select(0, flat).view(*rows.slots.shape, *x.shape[1:]) for x in padded)


def run_rows(
    recurrence: Recurrence, padded: Inputs, rows: Rows, entering: Tensor | None, outputs: list[Tensor]
) -> Tensor:
    """Run stretches from the states that enter them; append their outputs, and return their final states."""
    out, state = recurrence.run(_gather(padded, rows), entering)
    outputs.append(out.flatten(0, 1))
    return state


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


def rows_of_kind(kind: Ints, slots: int) -> list[tuple[Ints, Ints]]:
    """Group n stretches of similar length, on the host; ``kind``: first slots and lengths, ``[2, n]``."""
    first, lengths = kind
    rows = np.append(ranges(first, first + lengths), slots)
    return [(members, rows[grid]) for members, grid in padded_rows(lengths)]
