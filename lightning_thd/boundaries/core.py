"""Lengths of the sequences of a pack -> all that a layer, a kernel or a loss asks about their boundaries.

A pack is one row of T slots. Every slot belongs to one of S entries: the sequences in order, each perhaps
with padding at its end, and one more entry for the padding at the end of the pack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any, Literal, NamedTuple, NoReturn, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_thd._checks import described, host_ints
from lightning_thd.boundaries.kernel_call import KernelCall
from lightning_thd.seqlens import INT32_MAX, position_ids_from_cu_seqlens, seq_idx_from_cu_seqlens

_T = TypeVar("_T")

# What a layer, a model or a loss does that not all boundaries allow.
Need = Literal[
    "both_ways",  # lets tokens see later tokens
    "chunked",  # attends in chunks
    "pooled",  # reads one token of every sequence
    "own_loss",  # computes a loss over the row of slots
    "own_balance",  # balances experts over the row of slots
    "next_label",  # takes the target of a slot from the label of the next slot
    "later_targets",  # predicts tokens beyond the next one
    "all_tokens",  # returns a value for every token of every sequence
]

# What layers have computed on the boundaries, which a copy or another process computes again.
_OF_LAYERS = ("_answers", "kernels", "shown_mask")


class Immutable:
    """Base of immutable classes with slots.

    They are no dataclasses, because Lightning's precision plugins and FSDP rebuild dataclasses that they
    find in the arguments of a module, and set their fields.
    """

    __slots__ = ()

    def _set(self, **fields: object) -> None:
        # Every step copies batches of many fields, and ``map`` is twice as fast as a loop in Python.
        deque(map(object.__setattr__, repeat(self), fields, fields.values()), maxlen=0)

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned or deleted: batches are immutable. "
            "Make a changed copy of a THDBatch with .replace(...)."
        )

    __delattr__ = __setattr__

    def __getstate__(self) -> dict[str, Any]:
        names: tuple[str, ...] = self.__slots__
        return dict(zip(names, map(getattr, repeat(self), names), strict=True))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state)


class ForThdOnly:
    """Stands in for ``attention_mask`` where only models with "thd" know the boundaries of a batch.

    Those models take it away. Another attention asks it for its shape, and gets an error, where it would
    else attend over the row of slots without a word.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f'The batch has {self._what}, and a model without "thd" got it, which cannot share them. '
            "Build it with attn_implementation='thd', or collate with share_prefixes=False and train without "
            "context parallelism."
        )

    ndim = shape = dtype = property(_refuse)
    dim = size = __getitem__ = __bool__ = __len__ = _refuse


class PredictionRows(NamedTuple):
    """The predictions of a pack, in rows: ``[R]`` targets, and the slots whose outputs predict them.

    Attributes:
        slots: int64 ``[R]``, the slot of each row; None if every slot is a row, in order.
        targets: int64 ``[R]``, the target of each row, -100 where there is none.
        most: an upper bound of the rows with a target; None if it is unknown.
    """

    slots: Tensor | None
    targets: Tensor
    most: int | None


class Unfolded(NamedTuple):
    """A row that holds more of every sequence than a pack, with the ways there and back.

    Attributes:
        boundaries: those of the row, which has U slots.
        gather: returns rows ``[U, ...]`` of that row from rows ``[T, ...]`` of this rank's slots.
        keep: returns rows ``[T, ...]`` of this rank's slots from rows ``[U, ...]``.
    """

    boundaries: Boundaries
    gather: Callable[[Tensor], Tensor]
    keep: Callable[[Tensor], Tensor]


class Boundaries(Immutable):
    """Where every sequence of a pack begins: lengths on the host, offsets on the device.

    ``lengths`` are slots here, of all entries, padding included, because kernels run on slots. What a batch
    calls ``lengths``, the real tokens of every sequence, is ``sequence_lengths``.

    Attributes:
        offsets: int32 ``[S + 1]``, the first slot of every entry, and T.
        real_offsets: int32 ``[S + 1]``, cumulative lengths without the padding inside entries; None if no
            sequence is padded.
        slots: the number of slots T.
        longest: slots of the longest sequence of the whole pack.
        max_seqlen: slots of the longest entry, or more. Kernels get it.
        sequence_lengths: real tokens of every sequence, on the host; None if the host does not know them.
    """

    __slots__ = (
        "_answers",
        "_lengths",
        "kernels",
        "longest",
        "max_seqlen",
        "offsets",
        "real_offsets",
        "sequence_lengths",
        "shown_mask",
        "slots",
    )

    offsets: Tensor
    real_offsets: Tensor | None
    slots: int
    longest: int
    max_seqlen: int
    sequence_lengths: tuple[int, ...] | None
    _lengths: tuple[int, ...] | None  # what ``lengths`` returns; None until it is read from the device
    _answers: dict[Any, Any]  # what ``once`` has computed, by the function that did
    kernels: dict[Any, Any]  # bound attention kernels by kind of layer; ``models.attend`` fills it
    shown_mask: Tensor | None  # a mask known to hide no token; ``models.masks`` notes it

    ranks: int = 1  # the ranks that share this pack
    group: Any = None  # the process group of these ranks, if they communicate
    used: bool = True  # whether a layer has asked how rows come from these ranks, or none has to come
    own_slots: bool = True  # whether every sequence has slots for itself, all on this rank
    rows_are_tokens: bool = True  # whether every row of predictions is one token; else ``of_rows`` adds up
    eager: str | None = None  # why a CUDA graph cannot hold these boundaries, in the words of its counters
    row = "batch"  # what has these slots, for messages

    def __init__(
        self,
        *,
        offsets: Tensor,
        slots: int,
        max_seqlen: int,
        lengths: Sequence[int] | None = None,
        sequence_lengths: Sequence[int] | None = None,
        real_offsets: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        self._set(
            offsets=offsets,
            real_offsets=real_offsets,
            slots=slots,
            max_seqlen=max_seqlen,
            longest=max_seqlen if longest is None else longest,
            sequence_lengths=None if sequence_lengths is None else tuple(sequence_lengths),
            _lengths=None if lengths is None else tuple(lengths),
            _answers={},
            kernels={},
            shown_mask=None,
        )

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Boundaries:
        """Make the boundaries of sequences laid end to end without padding.

        Args:
            lengths: tokens of every sequence, ints of at least 0: a list, array or tensor.
            device: where ``offsets`` go.

        Returns:
            The boundaries. ``[3, 2]`` gives the offsets ``[0, 3, 5]``, 5 slots and the longest, 3.
        """
        tokens: list[int] = host_ints(lengths, "lengths", advice="Example: (24, 80).").tolist()
        if not tokens or min(tokens) < 0:
            raise ValueError(
                f"lengths is {described(lengths)}; wanted the tokens of one sequence or more, 0 or more."
            )
        slots = sum(tokens)
        if slots > INT32_MAX:
            raise ValueError(
                f"{len(tokens)} lengths add up to {slots} tokens; wanted at most {INT32_MAX}. "
                "Make smaller packs."
            )
        offsets = torch.from_numpy(np.array([0, *accumulate(tokens)], np.int32))
        return cls(
            offsets=offsets.to(checked_device(device)),
            slots=slots,
            max_seqlen=max(1, *tokens),  # kernels refuse 0
            lengths=tokens,
            sequence_lengths=tokens,
        )

    @classmethod
    def laid_out(
        cls, cu_seqlens: Tensor, cu_seqlens_padded: Tensor, lengths: Sequence[int], padded: Sequence[int]
    ) -> Boundaries:
        """Make the boundaries of a collated batch from its offsets, real lengths and padded lengths."""
        slots_of_sequences = padded[: len(lengths)]
        is_padded = tuple(lengths) != tuple(slots_of_sequences)
        return cls(
            offsets=cu_seqlens_padded,
            slots=sum(padded),
            max_seqlen=max(1, max(padded, default=1)),
            lengths=padded,
            sequence_lengths=lengths,
            real_offsets=cu_seqlens if is_padded else None,
            longest=max(slots_of_sequences, default=1),
        )

    # ---- The offsets and lengths of a batch

    @property
    def cu_seqlens(self) -> Tensor:
        """Return the cumulative real lengths, int32 ``[S + 1]``."""
        return self.offsets if self.real_offsets is None else self.real_offsets

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Return the offsets in memory, int32 ``[S + 1]``."""
        return self.offsets

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the slots of every entry; if the host does not know them, read the device once."""
        if self._lengths is None:
            offsets = self.offsets.tolist()
            lengths = [stop - start for start, stop in pairwise(offsets)]
            if offsets[:1] != [0] or offsets[-1] != self.slots or min(lengths, default=0) < 0:
                raise ValueError(
                    f"cu_seq_lens_q runs from {offsets[:1]} to {offsets[-1:]}, but must run from 0 to "
                    f"{self.slots}, the slots of the pack, and never decrease. Pass batch.hf_kwargs()."
                )
            self._set(_lengths=tuple(lengths))
        assert self._lengths is not None
        return self._lengths

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Return the slots of every entry of the whole pack, a trailing pad included."""
        return self.lengths

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """Return the real tokens of every entry; a trailing pad counts with all its slots."""
        if self.real_offsets is None:
            return self.lengths
        return self.once(_real_lengths)

    @property
    def filled_lengths(self) -> tuple[int, ...]:
        """Return the slots of every entry that holds tokens, so without a pad at the end."""
        return self.lengths[: self.sequences]

    @property
    def sequences(self) -> int | None:
        """Return the number of sequences without the pad at the end; None if the host does not know it."""
        return None if self.sequence_lengths is None else len(self.sequence_lengths)

    # ---- What layers ask

    def call(self, layer: object = None, *, causal: bool = True, chunk: int | None = None) -> KernelCall:
        """Return the kernel call of a kind of attention layer.

        Args:
            layer: the layer, for messages.
            causal: whether later keys are hidden. Else padding inside a sequence becomes an entry of its own,
                because real tokens must not see it.
            chunk: tokens of the chunks into which a layer cuts every sequence; None for whole sequences.
        """
        offsets = self.offsets
        # A compiled model would be compiled again for every batch with other lengths.
        lengths = None if torch.compiler.is_compiling() else self._lengths
        if not causal and self.real_offsets is not None:
            offsets = self.token_bounds
            lengths = None
        if chunk is None:
            return KernelCall(
                offsets, offsets, self.max_seqlen, self.max_seqlen, q_lengths=lengths, kv_lengths=lengths
            )

        longest = min(chunk, self.max_seqlen)
        offsets = self.chunks(chunk) if causal else chunk_offsets(offsets, self.slots, chunk)
        return KernelCall(offsets, offsets, longest, longest)

    def require(self, need: Need, layer: object) -> None:
        """Raise ValueError if what needs something does not run on these boundaries.

        Args:
            need: what it does.
            layer: the layer or model, or a name, for messages.
        """

    def require_own_slots(self, layer: object, why: str) -> None:
        """Raise ValueError unless ``own_slots``; ``why`` says what a layer does with whole sequences."""

    def unfolded(self) -> Unfolded | None:
        """Return a row that holds more of every sequence, for layers that read all of it, or None.

        None means that the slots of every sequence are adjacent in this pack. The row may have an unfolded
        one too.
        """
        return None

    @property
    def longest_entry(self) -> int:
        """Return the slots of the longest entry of the whole pack, a pad at the end included."""
        return self.max_seqlen

    # ---- Values that layers share

    def once(self, make: Callable[[Any], _T]) -> _T:
        """Return ``make(self)``, which is called once; all layers share the result.

        A compiled model computes it in every layer, and torch merges what is equal. A stored tensor could be
        memory of a graph that runs again.
        """
        if torch.compiler.is_compiling():
            return make(self)
        answers = self._answers
        if make not in answers:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # a training step may use the tensors later
                    answers[make] = make(self)
            else:
                answers[make] = make(self)
        answer: _T = answers[make]
        return answer

    def all_shown(self, ndim: int) -> Tensor:
        """Return a mask of ``ndim`` dimensions, bool ``[1, ..., 1, T]``, that hides no slot."""
        ones = (1,) * (ndim - 1)
        shown = torch.ones(*ones, 1, dtype=torch.bool, device=self.offsets.device)
        return shown.expand(*ones, self.slots)

    def note_shown(self, mask: Tensor) -> None:
        """Note that a mask, which all layers get, hides no token of the pack."""
        self._set(shown_mask=mask)

    @property
    def seq_idx(self) -> Tensor:
        """Return int32 ``[1, T]``, the entry that every slot belongs to."""
        return self.once(_seq_idx)

    @property
    def positions(self) -> Tensor:
        """Return int64 ``[T]``, the place of every slot in its sequence."""
        return self.once(_positions)

    @property
    def token_bounds(self) -> Tensor:
        """Return int32 ``[2 S + 1]``, offsets of tokens and padding in turn; ``[S + 1]`` without padding."""
        return self.offsets if self.real_offsets is None else self.once(_token_bounds)

    @property
    def real_slots(self) -> Tensor | None:
        """Return which slots hold tokens, bool ``[T]``; None if the places of padding are unknown."""
        return None if self.sequences is None else self.once(_real_slots)

    def chunks(self, size: int) -> Tensor:
        """Return offsets int32 of entries that are cut into chunks of at most ``size`` slots."""
        if torch.compiler.is_compiling():
            return chunk_offsets(self.offsets, self.slots, size)
        by_size = self.once(_no_chunks)
        if size not in by_size:
            by_size[size] = chunk_offsets(self.offsets, self.slots, size)
        return by_size[size]

    # ---- What losses ask. The tokens of a pack are its slots, or those of all sequences laid end to end.

    def prediction_rows(self, targets: Tensor | None, most: int | None) -> PredictionRows:
        """Return the rows of predictions of a batch with these targets and its upper bound of them."""
        if targets is None:
            self.refuse_field("targets")
        return PredictionRows(None, targets, most)

    def of_tokens(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Return values of rows ``[R, ...]`` by token; ``fill`` for tokens without a row."""
        return rows

    def of_rows(self, tokens: Tensor) -> Tensor:
        """Sum values of tokens per row of predictions, ``[R]``."""
        return tokens

    def members(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return every token's sequence, ``count`` for padding; and its slot, None if tokens are slots."""
        return sequence_of_slots(count, self.slots, self.offsets, self.real_offsets), None

    def slots_of(self, tokens: Tensor) -> Tensor:
        """Return the slots of indices of tokens, int64 of any shape; one behind all tokens gives T."""
        return tokens

    @property
    def token_offsets(self) -> Tensor:
        """Return the offsets of the sequences among the tokens, int32 ``[S + 1]``."""
        return self.offsets

    @property
    def token_slots(self) -> int:
        """Return the number of tokens of this rank."""
        return self.slots

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """Return the tokens of every entry of the whole pack, padding included."""
        return self.padded_lengths

    @property
    def real_token_lengths(self) -> tuple[int, ...]:
        """Return the tokens of every entry, without padding inside entries."""
        return self.real_lengths

    def pair_lengths(self) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
        """Return the lengths by which query-key pairs are counted, and how many first tokens others hold.

        The pairs among the first tokens that another sequence holds are computed once, there. If no sequence
        does that, the second tuple is empty.
        """
        return self.sequence_lengths, ()

    def pack_value(self, loss: Tensor) -> Tensor:
        """Return a loss with the value of the whole pack, for logs, and the gradient of this rank's slots."""
        return loss

    # ---- What a batch does with them

    def require_field(self, name: str) -> None:
        """Raise ValueError if a batch with these boundaries has no such field."""

    def refuse_field(self, name: str) -> NoReturn:
        """Raise ValueError, because a batch with these boundaries has no such field."""
        raise ValueError(f"batch.{name} was read, but this batch was made without it.")

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, to copy them to another device together with the batch's."""
        if self.real_offsets is None:
            return {"offsets": self.offsets}
        return {"offsets": self.offsets, "real_offsets": self.real_offsets}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """Return a copy with other tensors of the same values."""
        copy = object.__new__(type(self))
        copy.__setstate__({**self.__getstate__(), **tensors})
        return copy

    def stays(self, device: torch.device) -> bool:
        """Return whether these boundaries cannot leave their device and are on ``device``; raise if not."""
        return False

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """Return the boundaries with their tensors on a device."""
        tensors = self.tensors()
        if all(tensor.device == torch.device(device) for tensor in tensors.values()):
            return self  # keeps what layers have computed on it
        moved = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in tensors.items()}
        return self.with_tensors(moved)

    @property
    def counted_lengths(self) -> tuple[int, ...]:
        """Return the lengths in which default positions count from 0; empty if they do not."""
        return self.lengths

    def hf_kwargs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model: these boundaries, and transformers' own names."""
        return {
            "cu_seq_lens_q": self.offsets,
            "cu_seq_lens_k": self.offsets,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "boundaries": self,
        }

    def unpack(self, rows: Tensor, *, single: bool) -> list[Tensor]:
        """Split rows of slots ``[T, ...]`` into one view per sequence, without padding."""
        self.check_rows(rows)
        assert self.sequence_lengths is not None
        parts = torch.split(rows, list(self.padded_lengths))
        if self.padded_lengths == self.sequence_lengths:
            return list(parts)
        # Not strict: the padding at the end of the pack is one more part.
        return [part[:length] for part, length in zip(parts, self.sequence_lengths, strict=False)]

    def check_rows(self, rows: Tensor) -> None:
        """Raise ValueError unless there is one row per slot."""
        if rows.ndim == 0 or rows.shape[0] != self.slots:
            raise ValueError(
                f"unpack() got a tensor of shape {tuple(rows.shape)}, but the {self.row} has {self.slots} "
                f"slots. Pass [{self.slots}, ...] or [1, {self.slots}, ...]."
            )

    def whole(self, rows: Tensor) -> Tensor:
        """Return rows of all slots of the pack from rows of this rank's slots, ``[..., T]``."""
        return rows

    def part(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of rows of all slots of the pack."""
        return rows

    @property
    def whole_offsets(self) -> Tensor:
        """Return the offsets of the whole pack, int32 ``[S + 1]``."""
        return self.offsets

    def __getstate__(self) -> dict[str, Any]:
        names = [name for name in self._names() if name not in _OF_LAYERS]
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(**state, _answers={}, kernels={}, shown_mask=None)

    @classmethod
    def _names(cls) -> list[str]:
        """Return the names of all slots, those of parent classes included."""
        return [name for kind in cls.__mro__ for name in getattr(kind, "__slots__", ())]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.offsets.shape[0] - 1} entries in {self.slots} slots)"


# What ``Boundaries.once`` computes: module functions, which are the keys of the answers.


def _seq_idx(boundaries: Boundaries) -> Tensor:
    return seq_idx_from_cu_seqlens(boundaries.offsets, boundaries.slots)[None]


def _positions(boundaries: Boundaries) -> Tensor:
    return position_ids_from_cu_seqlens(boundaries.offsets, boundaries.slots)


def _real_lengths(boundaries: Boundaries) -> tuple[int, ...]:
    of_sequences = boundaries.sequence_lengths
    if of_sequences is not None:
        pads = boundaries.lengths[len(of_sequences) :]
        return (*of_sequences, *pads)
    assert boundaries.real_offsets is not None
    return tuple(boundaries.real_offsets.diff().tolist())


def _token_bounds(boundaries: Boundaries) -> Tensor:
    assert boundaries.real_offsets is not None
    starts = boundaries.offsets[:-1]
    ends_of_tokens = starts + boundaries.real_offsets.diff()
    in_turn = torch.stack([starts, ends_of_tokens], dim=1).flatten()
    return torch.cat([in_turn, boundaries.offsets[-1:]]).to(torch.int32)


def _real_slots(boundaries: Boundaries) -> Tensor:
    count = boundaries.sequences
    assert count is not None
    sequence = sequence_of_slots(count, boundaries.slots, boundaries.offsets, boundaries.real_offsets)
    return sequence < count


def _no_chunks(_: Boundaries) -> dict[int, Tensor]:
    return {}


def checked_device(device: torch.device | str) -> torch.device:
    """Return a torch device; raise ValueError or TypeError for any other value."""
    try:
        return torch.device(device)
    except RuntimeError as err:
        raise ValueError(f"{device!r} is not a device ({err}). Pass 'cpu' or 'cuda', for example.") from err


def sequence_of_slots(count: int, slots: int, padded: Tensor, real: Tensor | None) -> Tensor:
    """Return the sequence index of each slot, int64 ``[T]``; padding, also in sequences, gets ``count``."""
    sequence = seq_idx_from_cu_seqlens(padded, slots).flatten().long()
    if real is not None:
        place = torch.arange(slots, device=sequence.device) - padded[sequence]
        sequence = torch.where(place < real.diff()[sequence], sequence, count)
    return sequence.clamp_max(count)


def chunk_offsets(cu_seqlens: Tensor, slots: int, chunk: int) -> Tensor:
    """Cut sequences into chunks of at most ``chunk`` slots, with fixed shapes and no read of the device.

    ``[0, 5, 7]``, 7 and 4 give ``[0, 4, 5, 7]``; empty chunks are at the end.
    """
    places = torch.arange(slots, device=cu_seqlens.device)
    sequence = seq_idx_from_cu_seqlens(cu_seqlens, slots).long()
    starts = cu_seqlens[:-1].long().index_select(0, sequence)  # where each slot's sequence begins
    # Slots that begin a chunk come first after sorting; all others count as ``slots``.
    begins = torch.where((places - starts) % chunk == 0, places, slots).sort().values
    most_chunks = cu_seqlens.shape[0] - 1 + slots // chunk
    return torch.cat([begins[:most_chunks], cu_seqlens[-1:]]).to(torch.int32)
