"""The boundaries of the pack that a model is running on -> any layer or function below that needs them.

Some families hand keyword arguments down to their attention, some do not, and state-space layers never see
any. So a model pushes a scope when it starts and pops it when it ends, and the layers look here when they
were told nothing.

Legend: T slots in a pack, S sequences (a trailing pad included).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.batch.thd_step import check_batch
from lightning_thd.seqlens import seq_idx_from_cu_seqlens


class Pack:
    """The boundaries of the sequences in one row of T slots.

    Attributes:
        cu_seqlens_q: int32 ``[S + 1]``, offsets in memory, last entry T.
        cu_seqlens_k: the same for keys; ``cu_seqlens_q`` itself in self-attention.
        cu_seqlens_real: int32 ``[S + 1]``, cumulative lengths without padding inside sequences; None where
            there is none.
        cache: what is worked out once a batch and shared by all layers (seq_idx, plans of padded groups).
    """

    __slots__ = (
        *("_extent_k", "_extent_q", "_lengths", "_real_lengths", "_slots", "cache"),
        *("cu_seqlens_k", "cu_seqlens_q", "cu_seqlens_real"),
    )

    def __init__(
        self,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        max_length_q: int,
        max_length_k: int | None = None,
        slots: int,
        lengths: Sequence[int] | None = None,
        cu_seqlens_real: Tensor | None = None,
        real_lengths: Sequence[int] | None = None,
    ) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        # Host integers as shapes of tensors without storage: torch.compile makes a size that changes
        # symbolic, while it compiles again for every new value of a plain int attribute.
        self._extent_q = cu_seqlens_q.new_empty(max_length_q, 0)
        self._extent_k = cu_seqlens_q.new_empty(max_length_q if max_length_k is None else max_length_k, 0)
        self._slots = cu_seqlens_q.new_empty(slots, 0)
        self._lengths = None if lengths is None else tuple(lengths)
        self.cu_seqlens_real = cu_seqlens_real
        self._real_lengths = None if real_lengths is None else tuple(real_lengths)
        self.cache: dict[Any, Any] = {}

    @classmethod
    def from_batch(cls, batch: THDBatch) -> Pack:
        """Build a pack from a batch, with all lengths on the host, so that no device is ever read."""
        check_batch(batch)
        padded = batch.lengths != batch.padded_lengths[: len(batch.lengths)]
        return cls(
            cu_seqlens_q=batch.cu_seqlens_padded,
            max_length_q=batch.max_seqlen,
            slots=batch.input_ids.shape[-1],
            lengths=batch.padded_lengths,
            cu_seqlens_real=batch.cu_seqlens if padded else None,
            real_lengths=(*batch.lengths, *batch.padded_lengths[len(batch.lengths) :]) if padded else None,
        )

    @property
    def max_length_q(self) -> int:
        """Return the length of the longest query sequence."""
        return self._extent_q.shape[0]

    @property
    def max_length_k(self) -> int:
        """Return the length of the longest key sequence."""
        return self._extent_k.shape[0]

    @property
    def slots(self) -> int:
        """Return the number of slots T."""
        return self._slots.shape[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the slots of every sequence, on the host.

        A pack that was not made from a batch knows only the device tensor and reads it here, once.
        """
        if self._lengths is None:
            offsets = self.cu_seqlens_q.tolist()
            lengths = [there - here for here, there in pairwise(offsets)]
            if offsets[:1] != [0] or offsets[-1] != self.slots or min(lengths, default=0) < 0:
                raise ValueError(
                    f"cu_seq_lens_q runs from {offsets[:1]} to {offsets[-1:]}, but must run from 0 to "
                    f"{self.slots}, the slots of the pack, and never decrease. Pass THDBatch.hf_kwargs()."
                )
            self._lengths = tuple(lengths)
        return self._lengths

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """Return the tokens of every sequence without padding inside it, on the host.

        Slots of 8 and 4 that hold 5 and 4 tokens give 5 and 4; a trailing pad counts as its slots.
        """
        if self.cu_seqlens_real is None:
            return self.lengths
        if self._real_lengths is None:
            self._real_lengths = tuple(self.cu_seqlens_real.diff().tolist())
        return self._real_lengths

    @property
    def token_bounds(self) -> Tensor:
        """Return offsets int32 ``[2 S + 1]`` that separate each sequence's tokens from its padding.

        For layers whose tokens see later ones. Slots of 8 and 4 that hold 5 and 4 tokens give
        ``[0, 5, 8, 12, 12]``; without padding inside sequences it is ``cu_seqlens_q``.
        """
        if self.cu_seqlens_real is None:
            return self.cu_seqlens_q
        if "token_bounds" not in self.cache:
            starts = self.cu_seqlens_q[:-1]
            ends = starts + self.cu_seqlens_real.diff()
            bounds = torch.cat([torch.stack([starts, ends], dim=1).flatten(), self.cu_seqlens_q[-1:]])
            self.cache["token_bounds"] = bounds.to(torch.int32)
        token_bounds: Tensor = self.cache["token_bounds"]
        return token_bounds

    @property
    def seq_idx(self) -> Tensor:
        """Return int32 ``[1, T]``, the sequence that every slot belongs to."""
        if "seq_idx" not in self.cache:
            self.cache["seq_idx"] = seq_idx_from_cu_seqlens(self.cu_seqlens_q, self.slots)[None]
        seq_idx: Tensor = self.cache["seq_idx"]
        return seq_idx


# What a model can ask of a mask.
CAUSAL: Final = "causal"
BIDIRECTIONAL: Final = "bidirectional"


class Scope:
    """One entry of the stack of running models: the model, its pack, and the entry below.

    Attributes:
        pack: the pack, or None for plain rows of equal length.
        outer: the entry below.
        module: the model that pushed it; None for ``packed``.
        families: types of the configs that mean the language model; an inner model with another config (a
            vision tower) does not work on the pack.
        masks: the kinds of mask that the model has asked for so far, each once.
    """

    __slots__ = ("families", "masks", "module", "outer", "pack")

    def __init__(
        self,
        pack: Pack | None,
        outer: Scope | None,
        *,
        module: nn.Module | None = None,
        families: tuple[type, ...] = (),
        masks: tuple[str, ...] = (),
    ) -> None:
        self.pack = pack
        self.outer = outer
        self.module = module
        self.families = families
        self.masks = masks


class Caller:
    """A running model without "thd", and what a model with it that runs inside has told it.

    Attributes:
        labelled: the model, this one or one around it, that was given labels to make a loss of.
        pack: what a model inside worked on, once it has run.
    """

    __slots__ = ("labelled", "pack")

    def __init__(self, labelled: str | None) -> None:
        self.labelled = labelled
        self.pack: Pack | None = None


# The top of the stack, one a thread, as backward recomputes checkpoints in threads of its own. No subclass
# with a default: torch.compile (2.13) loses what a traced hook stores in one.
_STATE = threading.local()
_STATE.scope = None
_STATE.caller = None


def current_scope() -> Scope | None:
    """Return the top entry of this thread's stack of running models, or None."""
    scope: Scope | None = getattr(_STATE, "scope", None)
    return scope


def set_scope(scope: Scope | None) -> None:
    """Replace the top of this thread's stack; the caller restores it."""
    _STATE.scope = scope


def current_caller() -> Caller | None:
    """Return the innermost running model of this thread that has no "thd", or None."""
    caller: Caller | None = getattr(_STATE, "caller", None)
    return caller


def set_caller(caller: Caller | None) -> None:
    """Replace the innermost running model without "thd"; the caller of this function restores it."""
    _STATE.caller = caller


@contextmanager
def scoped(scope: Scope) -> Generator[None]:
    """Put ``scope`` on top of the stack inside this context."""
    before = current_scope()
    set_scope(scope)
    try:
        yield
    finally:
        set_scope(before)


@contextmanager
def packed(batch: THDBatch) -> Generator[None]:
    """Announce the sequences of ``batch`` to all layers of models called inside this context.

    ``model(**batch.hf_kwargs())`` is right without it; with it, what the host knows is not read back from
    the device (state-space layers need the lengths there).

    Args:
        batch: on the device of the model.
    """
    with scoped(Scope(Pack.from_batch(batch), None)):
        yield


def current_pack() -> Pack | None:
    """Return the pack that the running model works on; None outside of one.

    Raises:
        RuntimeError: inside a backward pass that recomputes a layer nobody told about the pack.
    """
    scope = current_scope()
    if scope is not None:
        return scope.pack
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "A layer is recomputed in backward and the boundaries of its pack are not known there: its "
            "activation checkpointing does not carry them. Use model.gradient_checkpointing_enable() or a "
            "CheckpointWrapper around layers of the model, or call the layers with cu_seq_lens_q and "
            "max_length_q."
        )
    return None
