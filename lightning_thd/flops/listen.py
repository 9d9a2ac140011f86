"""Our attention and loss functions -> the counters that listen to them, if there are any.

A counter sees torch's functions by itself. It cannot see how many query-key pairs a kernel computes, or which
of a loss's products a model needs. So these functions say it. They pay one test of an empty list otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from lightning_thd.boundaries import KernelCall

R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One call of attention on a pack: which pairs it computes, and what a pair costs."""

    cu_seqlens_q: Tensor  # on the device of the call; read only when the FLOPs are wanted
    cu_seqlens_kv: Tensor
    left: int  # keys before its own that a query sees; -1 for all. The last query is at the last key
    right: int  # keys after its own; 0 hides later keys, -1 shows all
    forward: int  # FLOPs of a pair
    backward: int
    whole: tuple[int, ...] | None = None  # lengths of the whole pack, if this rank holds a shard of it
    shards: int = 1  # the number of ranks that share the pack
    q_lengths: tuple[int, ...] | None = None  # on the host, if they are known there
    kv_lengths: tuple[int, ...] | None = None
    again: int = 0  # FLOPs of a pair that activation checkpointing runs again

    @classmethod
    def of(cls, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, call: KernelCall, spec: Any) -> AttentionCall:
        """Describe a call from its tensors, its boundaries and its ``AttentionSpec``."""
        forward, backward = pair_flops(q_THD.shape[1], q_THD, k_THD, v_THD)
        return cls(
            call.cu_seqlens_q,
            call.cu_seqlens_kv,
            left=spec.left,
            right=spec.right,
            forward=forward,
            backward=backward,
            whole=call.exchanged_lengths,
            shards=call.ranks,
            q_lengths=call.q_lengths,
            kv_lengths=call.kv_lengths,
        )


def pair_flops(heads: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the FLOPs of a query-key pair forward and backward, by the tensors that need gradients."""
    scores = 2 * heads * q.shape[-1]  # FLOPs of a score
    values = 2 * heads * v.shape[-1]  # FLOPs of adding a value
    backward = scores * q.requires_grad + scores * k.requires_grad + values * v.requires_grad
    if q.requires_grad or k.requires_grad:
        backward += values  # the gradient of the probabilities
    return scores + values, backward


class Listener(Protocol):
    """A counter that our functions report to; each method returns a context for the work itself."""

    needs_calls: bool  # whether graphs must wait in this step, because a replay makes no calls
    missed_calls: bool  # whether something ran whose calls it cannot see

    def attention(self, call: AttentionCall) -> AbstractContextManager[Any]:
        """Count a call of attention; torch's functions inside the context are its kernel."""

    def ignoring(self) -> AbstractContextManager[Any]:
        """Count nothing inside the context, because it is part of what was counted."""

    def heads(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> AbstractContextManager[Any]:
        """Count output projections ``hidden @ weight.T``, however a fused loss computes them."""


LISTENERS: list[Listener] = []
_NOTHING = nullcontext()


def calls_are_needed() -> bool:
    """Return whether a counter learns from this step, so that no part of it may run from a graph."""
    return any(listener.needs_calls for listener in LISTENERS)


def report_unseen() -> None:
    """Report that a graph is replayed, whose calls no counter sees."""
    for listener in LISTENERS:
        listener.missed_calls = True


def attending(call: AttentionCall) -> AbstractContextManager[Any]:
    """Report a call of attention; its kernel must run inside the returned context."""
    return _together([listener.attention(call) for listener in LISTENERS])


def projecting(*pairs: tuple[Tensor, Tensor | None]) -> AbstractContextManager[Any]:
    """Report a fused loss's pairs of hidden states and head (None: logits); it must run in the context."""
    if not LISTENERS:
        return _NOTHING
    return _together([listener.heads(pairs) for listener in LISTENERS])


def unreported() -> AbstractContextManager[Any]:
    """Return a context in which no counter counts, for work that is no part of a step's FLOPs."""
    return _together([listener.ignoring() for listener in LISTENERS])


def reported(backward: Callable[..., R]) -> Callable[..., R]:
    """Decorate the backward of a function that reports its FLOPs, gradients included, when it is called."""

    @functools.wraps(backward)
    def run(*args: Any) -> R:
        if not LISTENERS:
            return backward(*args)
        with unreported():
            return backward(*args)

    return run


def _together(contexts: list[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Enter all contexts, and return one that leaves them."""
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack
