"""Parts of sequences that run at once (stretches) -> a recurrent layer's outputs and final states on them.

A carrier says where the states that enter stretches come from, and the slots before them: from other ranks
(``scan.OverRanks``), or from the branch points of shared prefixes (``branches.Branches``).

The state decays by one number per head and slot (Mamba-2), or is multiplied by a matrix (gated delta rules).
So final state and output are linear in the entering state, and a stretch can run before that state arrives.
Its output is the output without an entering state, plus a term that is later computed from that state.
Legend: N slots at hand, R rows, L slots of the longest row, H heads, K and V sizes of keys and values, C
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_thd.models.families.padded_groups import padded_rows
from lightning_thd.parallel.context.partition import Ints, ranges

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


def with_blank(inputs: Inputs) -> Inputs:
    """Return inputs ``[N, ...]`` with one more slot, the zeros of padding."""
    return tuple(torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in inputs)


def gather_rows(padded: Inputs, rows: Rows) -> Inputs:
    """Gather the inputs of stretches as rows; slot N holds the zeros of padding."""
    flat = rows.slots.flatten()
    return tuple(x.index_select(0, flat).view(*rows.slots.shape, *x.shape[1:]) for x in padded)


def run_rows(
    recurrence: Recurrence, padded: Inputs, rows: Rows, entering: Tensor | None, outputs: list[Tensor]
) -> Tensor:
    """Run stretches from the states that enter them; append their outputs, and return their final states."""
    out, state = recurrence.run(gather_rows(padded, rows), entering)
    outputs.append(out.flatten(0, 1))
    return state


def rows_of_kind(kind: Ints, slots: int) -> list[tuple[Ints, Ints]]:
    """Group n stretches of similar length, on the host; ``kind``: first slots and lengths, ``[2, n]``."""
    first, lengths = kind
    rows = np.append(ranges(first, first + lengths), slots)
    return [(members, rows[grid]) for members, grid in padded_rows(lengths)]


class Reach(NamedTuple):
    """The slots that a convolution reads, in groups of stretches of similar length."""

    rows: Tensor  # indices into the slots at hand: per stretch, up to W - 1 earlier slots, then its own
    sources: tuple[Tensor, ...]  # per group of stretches: ``[stretches, longest]``, indices into ``rows``
    own: Tensor  # ``[N]``, where the outputs of the own slots are in the groups laid end to end


class Carrier(Protocol):
    """Where the states and the earlier slots of stretches come from."""

    @property
    def where(self) -> str:
        """Return what the layer runs on, for messages."""

    @property
    def instead(self) -> str:
        """Return what to do without it, for messages."""

    def scan(self, recurrence: Recurrence, inputs: Inputs) -> Tensor:
        """Run a recurrence over the own slots, inputs ``[N, ...]``, with the states that enter stretches."""

    def near(self, rows: Tensor, left: int) -> tuple[Tensor, Reach]:
        """Return the slots at hand, from the own ones ``[N, C]``, and which of them a convolution reads."""
