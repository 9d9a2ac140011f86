"""Rows of a recurrent layer's inputs -> its outputs, last states, and how a row changes an entering state.

Two kinds. State-space duality (Mamba-2): the state decays by one number a head and slot. The gated delta
rule (Gated DeltaNet, Kimi Delta Attention): it is multiplied by a matrix a head and slot. Either is linear in
the state that enters, so that a stretch may run before that is known: its output is what it is without one,
plus what it reads of the state once that has come.

Legend: R rows, L slots of the longest, H heads, K and V sizes of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]


class Spanned(NamedTuple):
    """The result of a stretch run before its entering state is known, and how that state changes it.

    Attributes:
        out: ``[R, L, H, V]``, its output without one.
        state: ``[R, H, K, V]``, what it leaves without one.
        change: ``[R, H, ...]``, what it does to a state; see ``Recurrence.carry``.
        read: gives what the output reads of a state ``[R, H, K, V]``.
    """

    out: Tensor
    state: Tensor
    change: Tensor
    read: Callable[[Tensor], Tensor]


class Recurrence(Protocol):
    """The recurrence of a layer without its projections, on rows padded with zeros at their ends."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Return the sizes of one row's state."""

    @property
    def change_shape(self) -> tuple[int, ...]:
        """Return the sizes of one row's change of a state."""

    def run(self, inputs: Inputs, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output and last state of rows, from an entering state or none."""

    def span(self, inputs: Inputs) -> Spanned:
        """Run rows whose entering state comes later from another rank."""

    def carry(self, change: Tensor, state: Tensor) -> Tensor:
        """Return states ``[R, ...]`` as they leave stretches that change them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpace:
    """The recurrence of Mamba 2; inputs are x ``[R, L, H, P]``, dt ``[R, L, H]``, B and C ``[R, L, G, S]``.

    Attributes:
        scan: transformers' or mamba-ssm's, for rows.
        decay: ``[H]``, the layer's A, below 0.
        skip: ``[H]`` D, or None.
        chunk_size: of the scan.
        state_shape: H, P, S.
    """

    scan: Callable[..., Any]
    decay: Tensor
    skip: Tensor | None
    chunk_size: int
    state_shape: tuple[int, ...]

    @property
    def change_shape(self) -> tuple[int, ...]:
        """Return the sizes of a change: one factor a head."""
        return self.state_shape[:1]

    def run(self, inputs: Inputs, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scan rows of a state-space layer; zero time steps in the padding leave the state as it is."""
        x, dt, b, c = inputs
        out, state = self.scan(
            x,
            dt,
            self.decay,
            b,
            c,
            chunk_size=self.chunk_size,
            D=self.skip,
            initial_states=entering,
            return_final_states=True,
        )
        return out, state

    def span(self, inputs: Inputs) -> Spanned:
        """Scan rows whose entering state comes later and has decayed by ``exp(A dt)`` of each slot so far."""
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
    """The gated delta rule; inputs are q, k ``[R, L, h, K]``, v ``[R, L, H, V]``, gates and beta of H heads.

    Attributes:
        rule: transformers' or flash-linear-attention's, for rows.
        options: of it, the same for all rows.
        state_shape: H, K, V.
    """

    rule: Callable[..., Any]
    options: dict[str, Any]
    state_shape: tuple[int, ...]

    @property
    def change_shape(self) -> tuple[int, ...]:
        """Return the sizes of a change: one matrix a head."""
        heads, keys, _ = self.state_shape
        return heads, keys, keys

    def run(self, inputs: Inputs, entering: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run rows of the gated delta rule; zeros in the padding leave the state as it is."""
        q, k, v, g, beta = inputs
        out, state = self.rule(
            q, k, v, g=g, beta=beta, initial_state=entering, output_final_state=True, **self.options
        )
        return out, state

    def span(self, inputs: Inputs) -> Spanned:
        """Run rows whose entering state comes later, with an identity state that becomes their change."""
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
