"""The boundaries of the pack that a model runs on, and the stack of running models for its layers.

Some families pass no keyword arguments to their layers. So a model pushes a ``Scope`` with its pack on a
stack when it starts, and pops the scope when it ends (see ``announce``). Layers read the top of the stack.
Legend: T slots in a pack, S sequences (a trailing pad included).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_thd._static import STATIC
from lightning_thd.batch import THDBatch
from lightning_thd.batch.prefixes import Prefixes, SharedBatch
from lightning_thd.batch.thd_batch import check_batch
from lightning_thd.batch.upload import host_offsets, uploaded
from lightning_thd.parallel.context import layout
from lightning_thd.parallel.context.layout import ShardLayout
from lightning_thd.parallel.shard import THDShard
from lightning_thd.seqlens import cu_seqlens_from_lengths, seq_idx_from_cu_seqlens

REAL: Final = "cu_seq_lens_real"
SHARED: Final = "shared_prefixes"
PACK_KWARGS: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", REAL)
# Attributes that note the window of a layer, and config values of a model, at their construction.
NOTES: Final = ("_thd_window", "_thd_construction")
CAUSAL: Final = "causal"
BIDIRECTIONAL: Final = "bidirectional"


class Pack:
    """The boundaries of the sequences in one row of T slots.

    ``cu_seqlens_real`` holds cumulative lengths without padding, None if no sequence is padded inside. If
    sequences share ``prefixes``, offsets and ``lengths`` belong to leaves of the prefix tree, and keys are
    gathered by ``prefixes.keys``. ``cache`` holds values that layers share, computed once per pack.
    """

    __slots__ = (
        *("_extent_k", "_extent_q", "_lengths", "_longest", "_sequences", "_slots", "cache"),
        *("cu_seqlens_k", "cu_seqlens_q", "cu_seqlens_real", "prefixes"),
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
        prefixes: Prefixes | None = None,
    ) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.prefixes = prefixes
        self.cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        # Integers are kept as shapes of empty tensors. torch.compile makes a changing size symbolic, but it
        # compiles again for every new value of an int attribute.
        self._extent_q = cu_seqlens_q.new_empty(max_length_q, 0)
        self._extent_k = cu_seqlens_q.new_empty(max_length_q if max_length_k is None else max_length_k, 0)
        self._longest = self._extent_k  # the longest sequence; without a batch, also the trailing pad
        self._slots = cu_seqlens_q.new_empty(slots, 0)
        self._lengths = None if lengths is None else tuple(lengths)
        self.cu_seqlens_real = cu_seqlens_real
        self._sequences: Tensor | None = None  # ``[S, 0]``, S without the trailing pad; None if unknown
        self.cache: dict[Any, Any] = {}

    @classmethod
    def from_batch(cls, batch: THDBatch) -> Pack:
        """Make the pack of a checked batch; all lengths are on the host, so no device is read."""
        if isinstance(batch, SharedBatch):
            return cls.of_prefixes(batch.prefixes, batch.input_ids.shape[-1])
        slots = batch.padded_lengths[: len(batch.lengths)]
        pack = cls(
            cu_seqlens_q=batch.cu_seqlens_padded,
            max_length_q=batch.max_seqlen,
            slots=batch.input_ids.shape[-1],
            lengths=batch.padded_lengths,
            cu_seqlens_real=batch.cu_seqlens if batch.lengths != slots else None,
        )
        pack._longest = batch.cu_seqlens_padded.new_empty(max(slots, default=1), 0)
        pack._sequences = batch.cu_seqlens_padded.new_empty(len(batch.lengths), 0)
        return pack

    @classmethod
    def of_prefixes(cls, prefixes: Prefixes, slots: int) -> Pack:
        """Make the pack of sequences that share prefixes."""
        return cls(
            cu_seqlens_q=prefixes.cu_seqlens_q,
            cu_seqlens_k=prefixes.cu_seqlens_kv,
            max_length_q=prefixes.max_seqlen_q,
            max_length_k=prefixes.max_seqlen_kv,
            slots=slots,
            lengths=prefixes.query_lengths,
            prefixes=prefixes,
        )

    def refuse_prefixes(self, layer: object, why: str) -> None:
        """Refuse a layer that cannot run on sequences that share prefixes."""
        if self.prefixes is not None:
            what = f"{type(layer).__name__} got a pack whose sequences share prefixes, and {why}"
            raise ValueError(f"{what}. Set share_prefixes=False for this model.")

    @property
    def shard(self) -> ShardLayout | None:
        """Return the layout of a pack that is cut over context-parallel ranks, else None."""
        return layout.layout_of(self.cu_seqlens_q) if layout.in_use else None

    def refuse_shard(self, layer: object, why: str) -> None:
        """Refuse a layer that cannot run on one rank's shard of a pack."""
        if self.shard is not None:
            what = f"{type(layer).__name__} got one rank's shard of a pack, and {why}"
            raise ValueError(f"{what}. Train this model without context parallelism.")

    @property
    def max_length_q(self) -> int:
        """Return the length of the longest query sequence."""
        return self._extent_q.shape[0]

    @property
    def max_length_k(self) -> int:
        """Return the length of the longest key sequence."""
        return self._extent_k.shape[0]

    @property
    def longest(self) -> int:
        """Return the slots of the longest sequence, even if this rank holds only a shard of it."""
        return self._longest.shape[0] if self.shard is None else self.shard.longest

    @property
    def slots(self) -> int:
        """Return the number of slots T."""
        return self._slots.shape[0]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the slots of every sequence; if they are unknown, read the offsets from the device once."""
        if self._lengths is None:
            offsets = list(host_offsets(self.cu_seqlens_q))
            lengths = [there - here for here, there in pairwise(offsets)]
            if offsets[:1] != [0] or offsets[-1] != self.slots or min(lengths, default=0) < 0:
                raise ValueError(
                    f"cu_seq_lens_q runs from {offsets[:1]} to {offsets[-1:]}, but must run from 0 to "
                    f"{self.slots}, the slots of the pack, and never decrease. Pass batch.hf_kwargs()."
                )
            self._lengths = tuple(lengths)
        return self._lengths

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """Return the number of real tokens of every sequence; a trailing pad counts with all its slots."""
        if self.cu_seqlens_real is None:
            return self.lengths
        return tuple(b - a for a, b in pairwise(host_offsets(self.cu_seqlens_real)))

    @property
    def token_bounds(self) -> Tensor:
        """Return offsets int32 ``[2 S + 1]`` of tokens and padding in turn; ``[S + 1]`` if none is padded."""
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


@dataclass(slots=True, eq=False)
class Scope:
    """One entry of the stack of running models: the model, its pack, and the entry below.

    ``pack`` is None for plain rows. ``module`` is None for a batch announced before any model runs.
    ``families`` holds the config types of the outermost model and its language model. An inner model whose
    config has another type, such as a vision tower, runs on the pack only if it gets embeddings of all slots.
    ``masks`` are the kinds of mask that the model has asked for.
    """

    pack: Pack | None
    outer: Scope | None
    _: KW_ONLY
    module: nn.Module | None = None
    families: tuple[type, ...] = ()
    masks: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Caller:
    """A running model without "thd", which may contain a model with "thd"."""

    labelled: str | None  # class name of the model that got labels: this one or an outer one
    pack: Pack | None = None  # the pack of an inner model with "thd"


# The top of the stack, one per thread, because backward recomputes checkpoints in its own threads. Not a
# subclass with defaults: torch.compile (2.13) loses values that a traced hook stores in one.
STATE = threading.local()
STATE.scope = None
STATE.caller = None


def real_slots(pack: Pack) -> Tensor | None:
    """Return which slots hold tokens, bool ``[T]``; None if the places of padding are unknown."""
    if "real_slots" not in pack.cache and pack.prefixes is not None:
        blank = torch.zeros(pack.slots, dtype=torch.bool, device=pack.cu_seqlens_q.device)
        pack.cache["real_slots"] = blank.index_fill(0, pack.prefixes.token_slots, True)
    known, shard = pack._sequences, pack.shard
    count = len(known) if known is not None else None if shard is None else shard.sequences
    if "real_slots" not in pack.cache and count is not None:
        found = sequence_of_slots(count, pack.slots, pack.cu_seqlens_q, pack.cu_seqlens_real)
        pack.cache["real_slots"] = found < count
    return pack.cache.get("real_slots")


def sequence_of_slots(count: int, slots: int, padded: Tensor, real: Tensor | None) -> Tensor:
    """Return the sequence index of each slot, int64 ``[T]``; padding, also in sequences, gets ``count``."""
    found = seq_idx_from_cu_seqlens(padded, slots).flatten().long()
    if real is not None:
        place = torch.arange(slots, device=found.device) - padded[found]
        found = torch.where(place < real.diff()[found], found, count)
    return found.clamp_max(count)


def current_scope() -> Scope | None:
    """Return the top entry of this thread's stack of running models, or None."""
    scope: Scope | None = getattr(STATE, "scope", None)
    return scope


@contextmanager
def scoped(scope: Scope) -> Generator[None]:
    """Put ``scope`` on top of the stack inside this context."""
    before = current_scope()
    STATE.scope = scope
    try:
        yield
    finally:
        STATE.scope = before


@contextmanager
def packed(batch: THDBatch) -> Generator[None]:
    """Announce a batch, on the device of the model, to all layers of models called inside this context."""
    check_batch(batch)
    with scoped(Scope(Pack.from_batch(batch), None)):
        yield


def announced(batch: THDBatch, kwargs: dict[str, Any]) -> Scope:
    """Return the scope in which a loss calls a model on a checked batch with ``kwargs``."""
    if not isinstance(batch, THDShard) and not getattr(STATIC, "on", False):
        return Scope(Pack.from_batch(batch), None)
    return Scope(_pack_from_kwargs(kwargs, kwargs["input_ids"], None), None)


def current_pack() -> Pack | None:
    """Return the pack of the running model or announced batch, or None; raise if a recomputation lost it."""
    scope: Scope | None = getattr(STATE, "scope", None)
    if scope is not None:
        return scope.pack
    if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "A layer is recomputed in backward and the boundaries of its pack are not known there. Use "
            "model.gradient_checkpointing_enable() or a CheckpointWrapper around layers of the model."
        )
    return None


def model_pack() -> Pack | None:
    """Return the pack that a running model with "thd" has announced; None in all other models."""
    scope: Scope | None = getattr(STATE, "scope", None)
    return None if scope is None or scope.module is None else scope.pack


def find_pack(outer: Scope | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pack | None:
    """Return the pack that a model is called on, or None for plain rows."""
    tokens: Tensor | None = None
    for value in (*args[:1], kwargs.get("inputs_embeds"), kwargs.get("input_ids")):
        tokens = value if isinstance(value, Tensor) and value.ndim >= 2 else tokens
    known = None if outer is None else outer.pack
    offsets, shared = kwargs.get("cu_seq_lens_q"), kwargs.get(SHARED)
    if shared is not None:
        if offsets is not None or tokens is None or tokens.shape[0] != 1:
            raise ValueError("Sequences share prefixes: call the model with batch.hf_kwargs() only.")
        same = known is not None and known.prefixes is shared
        return known if same else Pack.of_prefixes(shared, tokens.shape[1])
    if offsets is not None:
        if known is not None and known.cu_seqlens_q is offsets:
            return known
        return _pack_from_kwargs(kwargs, tokens, known)
    if outer is not None:
        if outer.module is not None:
            return known
        # While a batch is announced, another model may be called on other rows.
        if known and (tokens is None or (tokens.shape[0] == 1 and tokens.shape[1] == known.slots)):
            return known
    return pack_from_positions(kwargs.get("position_ids"))


def _pack_from_kwargs(kwargs: dict[str, Any], tokens: Tensor | None, outer: Pack | None) -> Pack:
    missing = [name for name in ("max_length_q", "position_ids") if kwargs.get(name) is None]
    if missing or tokens is None:
        raise ValueError(
            "A pack came with cu_seq_lens_q but without "
            f"{', '.join(missing) or 'input_ids or inputs_embeds'}. Call model(**batch.hf_kwargs())."
        )
    if tokens.shape[0] != 1:
        raise ValueError(
            f"A pack is one row, [1, T], but the input has shape {tuple(tokens.shape)}. Lay all sequences "
            "end to end in one row, THDBatch.collate or THDBatch.from_padded."
        )
    _check_offsets(kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k"))
    real = kwargs.get(REAL)
    if real is None and outer is not None and outer.slots == tokens.shape[1]:
        real = outer.cu_seqlens_real  # an inner model does not get this argument
    return Pack(
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        max_length_q=kwargs["max_length_q"],
        max_length_k=kwargs.get("max_length_k"),
        slots=tokens.shape[1],
        cu_seqlens_real=real,
    )


def _check_offsets(offsets: Any, offsets_k: Any) -> None:
    for name, value in (("cu_seq_lens_q", offsets), ("cu_seq_lens_k", offsets_k)):
        is_tensor = isinstance(value, Tensor)
        if (is_tensor and value.ndim == 1 and value.dtype == torch.int32) or value is None:
            continue
        got = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value).__name__
        raise ValueError(f"{name} is {got}; wanted int32 offsets [S + 1], as batch.hf_kwargs() gives.")
    if offsets_k is None or offsets_k is offsets:
        return
    message = "cu_seq_lens_k is not cu_seq_lens_q. Pass the same offsets for both: batch.hf_kwargs()."
    if offsets_k.shape != offsets.shape:
        raise ValueError(message)
    same = (offsets_k == offsets).all()
    if same.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(same, message)  # a read would wait for the device, or break the graph
    elif not same:
        raise ValueError(message)


def pack_from_positions(position_ids: Tensor | None) -> Pack | None:
    """Build a pack from positions ``[T]`` or ``[1, T]`` that restart; refuse M-RoPE or rows that do."""
    if position_ids is None or position_ids.shape[-1] < 2:
        return None
    position_ids = position_ids[None] if position_ids.ndim == 1 else position_ids
    steps = position_ids.long().diff(dim=-1)  # int64, because uint8 has no differences below 0
    if torch.compiler.is_compiling():
        # A read would break the graph, and a pack that is taken for one sequence would leak: assert instead.
        torch._assert_async(
            (steps[0] >= 0).all() if position_ids.ndim == 3 else (steps == 1).all(),
            "positions restart inside a row, but a compiled model cannot see where: pass batch.hf_kwargs().",
        )
        return None
    if position_ids.ndim == 3:
        if bool((steps[0] < 0).any()):
            raise ValueError(
                f"M-RoPE position_ids of shape {tuple(position_ids.shape)} go back inside a row, so this is "
                "a pack, but they do not mark its boundaries. Pass batch.hf_kwargs()."
            )
        return None
    continues = (steps == 1).tolist()
    if all(all(row) for row in continues):
        return None
    if len(continues) != 1:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} restart inside a row. Lay all sequences end "
            "to end in one row, or pass rows that are one sequence each."
        )
    slots = position_ids.shape[-1]
    starts = [0, *(i + 1 for i, goes_on in enumerate(continues[0]) if not goes_on), slots]
    lengths = [end - start for start, end in pairwise(starts)]
    offsets = uploaded(cu_seqlens_from_lengths(lengths).numpy(), position_ids.device)
    return Pack(cu_seqlens_q=offsets, max_length_q=max(lengths), slots=slots, lengths=lengths)
