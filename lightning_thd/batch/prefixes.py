"""Sequences with common prefixes -> a batch that stores each distinct prefix once, and indices into it.

Sorted by their tokens, the sequences of a batch form a tree. The tokens of a sequence that follow the prefix
it shares with the sequences before it are a leaf, in adjacent slots. A leaf's queries attend, causal from the
bottom right, to the keys of the whole path from the root; an index gathers these keys. A shared token may
predict several next tokens. So the batch has rows of (slot, target, weight), not one target per slot.
T slots of the pack, N tokens of all sequences laid end to end, R rows of predictions, S sequences, K keys of
all leaves, C values by which tokens are compared (id, type, position, images).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_thd._checks import as_tensor
from lightning_thd.alignment import Alignment
from lightning_thd.batch.collate import cumulative, joined, lay_out, slots_of
from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.keys import IGNORE_INDEX, TYPES, inputs
from lightning_thd.batch.media import counted
from lightning_thd.boundaries import Boundaries, KernelCall
from lightning_thd.boundaries.core import ForThdOnly, Immutable, Need, PredictionRows, Unfolded
from lightning_thd.seqlens import seq_idx_from_cu_seqlens
from lightning_thd.stats import SeqStats

_Ints = NDArray[np.int64]


_INDICES = ("token_slots", "token_rows", "slots", "targets", "keys")
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "offsets")


class Prefixes(Immutable):
    """The mapping from sequences to the slots that they share; tensors are on the device of the batch.

    In your own model, call ``varlen_attention(q, k, v, batch.boundaries)``, which gathers the keys.

    Attributes:
        token_slots: int64 ``[N]``, the slot of each token of the sequences laid end to end.
        token_rows: int64 ``[N]``, the row of ``targets`` that each token predicts; R if it predicts none.
        slots: int64 ``[R]``, the slot of each row.
        targets: int64 ``[R]``, the target token of each row.
        keys: int64 ``[K]``, the slots of the keys of every leaf, root first, then a trailing pad's.
        cu_seqlens_q: int32, offsets of the slots of the leaves and of a trailing pad.
        cu_seqlens_kv: int32, offsets of their parts of ``keys``.
        offsets: int32 ``[S + 1]``, offsets of the sequences among the N tokens.
        lengths: on the host, the tokens of each sequence.
        prefix_lengths: on the host, how many of these tokens earlier leaves store.
        query_lengths: on the host, the slots of each leaf and of a trailing pad.
        key_lengths: on the host, the keys of each leaf and of a trailing pad.
        branches: on the host, the slot after which each leaf goes on; -1 for a leaf that begins a sequence,
            and for a trailing pad.
        prediction_slots: on the host, int64 ``[R]``, the slots in ``slots``.
    """

    __slots__ = (
        *_INDICES,
        *_OFFSETS,
        *("lengths", "query_lengths", "key_lengths", "prefix_lengths", "branches", "prediction_slots"),
    )

    token_slots: Tensor
    token_rows: Tensor
    slots: Tensor
    targets: Tensor
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    offsets: Tensor
    lengths: tuple[int, ...]
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    branches: tuple[int, ...]
    prediction_slots: _Ints

    def __init__(self, **parts: Tensor | tuple[int, ...] | _Ints) -> None:
        self._set(**parts)

    @property
    def max_seqlen_q(self) -> int:
        """Return the largest number of slots of a leaf or of the trailing pad."""
        return max(self.query_lengths)

    @property
    def max_seqlen_kv(self) -> int:
        """Return the largest number of keys of a leaf or of the trailing pad."""
        return max(self.key_lengths)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: getattr(self, name) for name in (*_INDICES, *_OFFSETS)}

    def slots_of(self, tokens: Tensor, pad: int) -> Tensor:
        """Return the slots of token indices, int64 of any shape; indices from N on give ``pad``."""
        slots_and_pad = torch.cat([self.token_slots, self.token_slots.new_full((1,), pad)])
        return slots_and_pad[tokens.clamp(max=len(self.token_slots))]

    def of_tokens(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Return values of rows ``[R, ...]`` by token, ``[N, ...]``; ``fill`` for tokens without a row."""
        rows_and_fill = torch.cat([rows, rows.new_full((1, *rows.shape[1:]), fill)])
        return rows_and_fill.index_select(0, self.token_rows)

    def of_rows(self, tokens: Tensor) -> Tensor:
        """Sum the tokens' values ``[N]`` per row of predictions, ``[R]``."""
        sums = tokens.new_zeros(self.targets.shape[0] + 1)  # the last takes tokens without a row
        return sums.index_add(0, self.token_rows, tokens)[:-1]


_REASONS: dict[Need, str] = {
    "both_ways": "lets tokens see later tokens, which differ between the sequences",
    "chunked": "attends in chunks, which differ between the sequences",
    "pooled": "its pooler reads the first token of every sequence",
    "own_loss": "its own loss would count the slots of a prefix only once",
    "own_balance": "its own balancing loss would count the slots of a prefix only once; 'sequence' would not",
    "later_targets": "predicts tokens beyond the next one, which differ between the sequences",
}


class PrefixBoundaries(Boundaries):
    """The boundaries of sequences that share the slots of their common prefixes, on one rank or several.

    The tokens of all sequences, laid end to end, are more than the slots. So a slot may predict several rows.
    """

    __slots__ = ()

    prefixes: Prefixes
    own_slots = False
    rows_are_tokens = False

    def require(self, need: Need, layer: object) -> None:
        """Raise ValueError if what needs something does not run on shared prefixes."""
        if need in _REASONS:
            self.require_own_slots(layer, _REASONS[need])

    def require_own_slots(self, layer: object, why: str) -> None:
        """Raise ValueError, because a layer cannot run on sequences that share prefixes."""
        what = layer if isinstance(layer, str) else type(layer).__name__
        raise ValueError(
            f"{what} got a pack whose sequences share prefixes, and {why}. Set share_prefixes=False for this "
            "model."
        )

    def refuse_field(self, name: str) -> NoReturn:
        """Raise ValueError, because a field of the batch has no meaning if sequences share slots."""
        raise ValueError(
            f"batch.{name} was read, but sequences of this batch share prefixes: a slot may have several "
            "targets, and sequences have no slots of their own. Read batch.predictions, batch.prefixes or "
            "batch.unpack(...), pass batch.boundaries, or collate with share_prefixes=False."
        )

    def require_field(self, name: str) -> None:
        """Raise ValueError, because sequences have no slots of their own."""
        self.refuse_field(name)

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """Refuse: sequences have no slots of their own."""
        self.refuse_field("padded_lengths")

    def prediction_rows(self, targets: Tensor | None, most: int | None) -> PredictionRows:
        """Return the distinct pairs of a slot and a target."""
        rows = self.prefixes.targets
        return PredictionRows(self.prefixes.slots, rows, rows.shape[0])

    def of_tokens(self, rows: Tensor, fill: float = 0.0) -> Tensor:
        """Return values of rows ``[R, ...]`` by token, ``[N, ...]``; ``fill`` for tokens without a row."""
        return self.prefixes.of_tokens(rows, fill)

    def of_rows(self, tokens: Tensor) -> Tensor:
        """Sum the tokens' values ``[N]`` per row of predictions, ``[R]``."""
        return self.prefixes.of_rows(tokens)

    def members(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return every token's sequence, and its slot, int64 ``[N]``."""
        sequences = seq_idx_from_cu_seqlens(self.token_offsets, self.token_slots).flatten().long()
        return sequences, self.prefixes.token_slots

    def slots_of(self, tokens: Tensor) -> Tensor:
        """Return the slots of indices of tokens, int64 of any shape; indices from N on give T."""
        return self.prefixes.slots_of(tokens, self.slots)

    @property
    def token_offsets(self) -> Tensor:
        """Return the offsets of the sequences among all tokens, int32 ``[S + 1]``."""
        return self.prefixes.offsets

    @property
    def token_slots(self) -> int:
        """Return the number N of tokens of all sequences."""
        return sum(self.prefixes.lengths)

    @property
    def token_lengths(self) -> tuple[int, ...]:
        """Return the tokens of every sequence."""
        return self.prefixes.lengths

    @property
    def real_token_lengths(self) -> tuple[int, ...]:
        """Return the tokens of every sequence."""
        return self.prefixes.lengths

    def pair_lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the keys of every leaf, and how many of them other leaves hold, in the order of the slots.

        Sequences whose tokens are all in leaves of others come last.
        """
        prefixes = self.prefixes
        sequences = list(zip(prefixes.lengths, prefixes.prefix_lengths, strict=True))
        num_leaves = sum(held < length for length, held in sequences)

        rows = zip(prefixes.key_lengths, prefixes.query_lengths, strict=True)
        leaves = [(keys, keys - queries) for keys, queries in rows]
        leaves = leaves[:num_leaves]  # the last row may be padding
        without_leaf = [(length, held) for length, held in sequences if held == length]

        ordered = [*leaves, *without_leaf]
        return tuple(length for length, _ in ordered), tuple(held for _, held in ordered)


def prefixes_of(boundaries: Boundaries) -> Prefixes | None:
    """Return the ``Prefixes`` that sequences share; None if they share none."""
    return boundaries.prefixes if isinstance(boundaries, PrefixBoundaries) else None


class SharedBoundaries(PrefixBoundaries):
    """The boundaries of a whole pack of sequences that share the slots of their common prefixes.

    Entries are the leaves of the prefix tree, and a trailing pad. Their queries attend to the keys of the
    path from the root, which ``prefixes.keys`` gathers.
    """

    __slots__ = ("prefixes",)

    prefixes: Prefixes
    eager = "shared_prefixes"  # the number of gathered keys differs between batches

    @classmethod
    def of(cls, prefixes: Prefixes, slots: int) -> SharedBoundaries:
        """Make the boundaries of a row of slots that sequences share."""
        boundaries = cls(
            offsets=prefixes.cu_seqlens_q,
            slots=slots,
            max_seqlen=prefixes.max_seqlen_q,
            lengths=prefixes.query_lengths,
            sequence_lengths=prefixes.lengths,
            longest=prefixes.max_seqlen_kv,
        )
        boundaries._set(prefixes=prefixes)
        return boundaries

    def call(self, layer: object = None, *, causal: bool = True, chunk: int | None = None) -> KernelCall:
        """Return the kernel call of a kind of attention layer; see ``Boundaries.call``."""
        if chunk is not None:
            self.require("chunked", layer)
        if not causal:
            self.require("both_ways", layer)
        prefixes = self.prefixes
        return KernelCall(
            prefixes.cu_seqlens_q,
            prefixes.cu_seqlens_kv,
            prefixes.max_seqlen_q,
            prefixes.max_seqlen_kv,
            keys=prefixes.keys,
            q_lengths=prefixes.query_lengths,
            kv_lengths=prefixes.key_lengths,
            branches=prefixes.branches,
        )

    def unfolded(self) -> Unfolded:
        """Return the row of the whole paths of all leaves; it holds a prefix once for each of its leaves."""
        prefixes = self.prefixes
        paths = Boundaries(
            offsets=prefixes.cu_seqlens_kv,
            slots=prefixes.keys.shape[0],
            max_seqlen=prefixes.max_seqlen_kv,
            lengths=prefixes.key_lengths,
        )
        return Unfolded(
            paths,
            gather=lambda rows: rows.index_select(0, prefixes.keys),
            keep=lambda rows: rows.index_select(0, self.once(_own_keys)),
        )

    @property
    def filled_lengths(self) -> tuple[int, ...]:
        """Return the slots of every leaf, and of the pad at the end, whose keys are listed too."""
        return self.lengths

    @property
    def cu_seqlens(self) -> Tensor:
        """Refuse: sequences have no slots of their own."""
        self.refuse_field("cu_seqlens")

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Refuse: sequences have no slots of their own."""
        self.refuse_field("cu_seqlens_padded")

    @property
    def longest_entry(self) -> int:
        """Return the keys of the longest leaf, or the slots of the pad at the end."""
        return self.prefixes.max_seqlen_kv

    @property
    def positions(self) -> Tensor:
        """Return int64 ``[T]``, the place of every slot in its sequences, prefixes included."""
        return self.once(_positions)

    @property
    def real_slots(self) -> Tensor:
        """Return which slots hold tokens, bool ``[T]``."""
        return self.once(_token_slots)

    @property
    def counted_lengths(self) -> tuple[int, ...]:
        """Return no lengths, because a leaf's positions go on from its prefix."""
        return ()

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return self.prefixes.tensors()

    def with_tensors(self, tensors: dict[str, Tensor]) -> SharedBoundaries:
        """Return a copy with other tensors of the same values."""
        return SharedBoundaries.of(Prefixes(**{**self.prefixes.__getstate__(), **tensors}), self.slots)

    def hf_kwargs(self) -> dict[str, Any]:
        """Return the boundaries only: transformers has no name for the keys of shared prefixes."""
        only = ForThdOnly("sequences that share prefixes")
        return {"boundaries": self, "attention_mask": only}

    def unpack(self, rows: Tensor, *, single: bool) -> list[Tensor]:
        """Split values of slots or of tokens into tensors ``[length, ...]``, in order of the sequences."""
        slots, tokens = self.slots, sum(self.prefixes.lengths)
        if slots == tokens and not single and rows.shape[:1] == (slots,):
            raise ValueError(
                f"unpack() got a tensor of shape {tuple(rows.shape)}, but padding made slots and tokens "
                "equally many. Pass values of slots as [1, T, ...], or collate with another pad_to."
            )
        if rows.ndim == 0 or rows.shape[0] not in (slots, tokens):
            raise ValueError(
                f"unpack() got a tensor of shape {tuple(rows.shape)}, but the batch has {slots} slots for "
                f"{tokens} tokens. Pass [{slots}, ...], [1, {slots}, ...] or [{tokens}, ...]."
            )

        values = rows
        if rows.shape[0] == slots:
            values = rows.index_select(0, self.prefixes.token_slots)
        return list(torch.split(values, list(self.prefixes.lengths)))


def _positions(boundaries: SharedBoundaries) -> Tensor:
    """Return ``SharedBoundaries.positions``: a leaf counts on from the length of its prefix."""
    prefixes = boundaries.prefixes
    prefix_lengths = prefixes.cu_seqlens_kv.diff() - prefixes.cu_seqlens_q.diff()
    starts = (prefixes.cu_seqlens_q[:-1] - prefix_lengths).long()  # where position 0 would be
    slots = torch.arange(boundaries.slots, device=starts.device)
    return slots - starts.index_select(0, boundaries.seq_idx[0].long())


def _own_keys(boundaries: SharedBoundaries) -> Tensor:
    """Return int64 ``[T]``, the place of every slot among the keys of its own leaf."""
    prefixes = boundaries.prefixes
    keys_before = (prefixes.cu_seqlens_kv - prefixes.cu_seqlens_q)[1:]  # in slots of other leaves
    slots = torch.arange(boundaries.slots, device=keys_before.device)
    return slots + keys_before.index_select(0, boundaries.seq_idx[0].long())


def _token_slots(boundaries: SharedBoundaries) -> Tensor:
    """Return ``SharedBoundaries.real_slots``."""
    is_real = torch.zeros(boundaries.slots, dtype=torch.bool, device=boundaries.offsets.device)
    return is_real.index_fill(0, boundaries.prefixes.token_slots, True)


class _Tree(NamedTuple):
    """The prefix tree of a batch's sequences, and the slots of its tokens."""

    leaves: list[int]  # sequences with tokens that no earlier leaf has, in the order of their slots
    shared: list[int]  # the number of first tokens of each sequence that an earlier leaf stores
    slots: _Ints  # int64 ``[N]``, the slot of each token
    tokens: _Ints  # int64 ``[T]``, the token in each slot


def prefix_tree(keys: _Ints, lengths: Sequence[int]) -> _Tree | None:
    """Build the prefix tree from keys of tokens, ``[N]`` or ``[N, C]``; None if no prefix is shared."""
    starts = [0, *accumulate(lengths)]
    order, shared = _shared_prefixes(keys, starts, lengths)
    if not any(shared):
        return None

    # A sequence that shares nothing with the one before is the root of a group of sequences.
    roots = [place for place, sequence in enumerate(order) if not shared[sequence]]
    groups = [order[start:stop] for start, stop in pairwise([*roots, len(order)])]

    slots = np.empty(starts[-1], np.int64)
    leaves = list[int]()
    tokens = list[_Ints]()
    used_slots = 0
    for group in sorted(groups, key=min):
        previous = group[0]  # the root shares nothing, so it copies nothing from itself
        for sequence in group:
            start = starts[sequence]
            stop = starts[sequence + 1]
            leaf_start = start + shared[sequence]
            slots[start:leaf_start] = slots[starts[previous] : starts[previous] + shared[sequence]]

            num_new = stop - leaf_start
            if num_new:
                slots[leaf_start:stop] = np.arange(used_slots, used_slots + num_new)
                tokens.append(np.arange(leaf_start, stop))
                leaves.append(sequence)
                used_slots += num_new
            previous = sequence
    return _Tree(leaves, shared, slots, np.concatenate(tokens))


def _shared_prefixes(
    keys: _Ints, starts: Sequence[int], lengths: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the sequences in an order, and how many first tokens each shares with the one before it.

    In byte order, of all earlier sequences the one right before shares the longest prefix. In descending
    order, a sequence comes before those that are its prefixes.
    """
    raw = keys.tobytes()
    width = keys.strides[0]  # bytes per token
    rows = [raw[start * width : stop * width] for start, stop in pairwise(starts)]
    order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)

    shared = [0] * len(rows)
    for previous, sequence in pairwise(order):
        most = min(lengths[previous], lengths[sequence])
        if most and rows[previous][:width] == rows[sequence][:width]:
            shared[sequence] = _common(keys, starts[previous], starts[sequence], most)
    return order, shared


def _common(keys: _Ints, a: int, b: int, most: int) -> int:
    """Count the leading tokens that are equal from ``a`` and from ``b`` on, up to ``most``."""
    differ = keys[a : a + most] != keys[b : b + most]
    if differ.ndim > 1:
        differ = differ.any(1)
    first = int(differ.argmax())
    return first if differ[first] else most


def lay_out_shared(
    samples: Sequence[Mapping[str, Any]],
    *,
    align: Alignment | None = None,
    pad_to: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Lay out checked samples with every distinct prefix once, as ``lay_out`` does if none is shared."""
    if any(PARTS in sample for sample in samples):
        raise ValueError("share_prefixes=True with queries and documents. Set share_prefixes=False.")
    plain = lay_out(samples, **options)
    lengths = list(plain["boundaries"].sequence_lengths)
    tree, media_holders = _tree_of(samples, plain)
    if tree is None:
        if align is not None or pad_to is not None:
            plain = lay_out(samples, align=align, pad_to=pad_to, **options)
        return plain

    leaf_lengths = [lengths[leaf] - tree.shared[leaf] for leaf in tree.leaves]
    # Context-parallel ranks share the row of slots, and not every sequence: only the row is padded for them.
    of_row = None if align is None else Alignment(total_multiple=align.total_multiple)
    query_lengths, slots = slots_of(leaf_lengths, of_row, pad_to)
    pad = slots - len(tree.tokens)
    prefixes = _prefixes_of(tree, plain, query_lengths, slots)

    positions = plain["position_ids"][..., torch.from_numpy(tree.tokens)]
    pad_positions = torch.arange(pad, device="cpu") % max(lengths)  # all that a table of positions may hold
    pad_positions = pad_positions.expand(*positions.shape[:-1], pad)
    extras = _extras(samples, plain["extras"], tree, media_holders, slots)
    stats = SeqStats.from_lengths(
        lengths,
        prefix_lengths=tree.shared,
        slots=slots,
        loss_tokens=plain["stats"].loss_tokens,
        windows=options.get("windows", ()),
        **counted(extras, options.get("vision")),
    )
    return {
        **plain,
        "input_ids": _padded(plain["input_ids"].numpy()[tree.tokens], pad),
        "targets": None,
        "position_ids": torch.cat([positions, pad_positions], dim=-1),
        "boundaries": SharedBoundaries.of(prefixes, slots),
        "stats": stats,
        "extras": extras,
        "max_targets": None,
    }


def _prefixes_of(tree: _Tree, plain: dict[str, Any], query_lengths: Sequence[int], slots: int) -> Prefixes:
    """Make the ``Prefixes`` of a tree; ``plain`` are the fields of the batch that shares nothing."""
    lengths = list(plain["boundaries"].sequence_lengths)
    starts = [0, *accumulate(lengths)]
    keys = []
    branches = []
    for leaf in tree.leaves:
        path = tree.slots[starts[leaf] : starts[leaf + 1]]
        prefix_length = tree.shared[leaf]
        keys.append(path)
        branches.append(int(path[prefix_length - 1]) if prefix_length else -1)
    if slots > len(tree.tokens):  # a trailing pad attends to itself
        keys.append(np.arange(len(tree.tokens), slots))
        branches.append(-1)
    key_lengths = [len(part) for part in keys]

    row_slots, row_targets, token_rows = _rows(plain["targets"].numpy(), tree.slots)
    return Prefixes(
        token_slots=torch.from_numpy(tree.slots),
        token_rows=torch.from_numpy(token_rows),
        slots=torch.from_numpy(row_slots),
        targets=torch.from_numpy(row_targets),
        keys=torch.from_numpy(np.concatenate(keys)),
        cu_seqlens_q=cumulative(query_lengths),
        cu_seqlens_kv=cumulative(key_lengths),
        offsets=plain["boundaries"].cu_seqlens,
        lengths=tuple(lengths),
        query_lengths=tuple(query_lengths),
        key_lengths=tuple(key_lengths),
        prefix_lengths=tuple(tree.shared),
        branches=tuple(branches),
        prediction_slots=row_slots,
    )


def _padded(row: NDArray[Any], pad: int) -> Tensor:
    """Return a row with ``pad`` zeros behind it."""
    return torch.from_numpy(np.concatenate([row, np.zeros(pad, row.dtype)]))


def _rows(targets: _Ints, slots: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Return the slot and the target ``[R]`` of every distinct prediction, and each token's row ``[N]``."""
    learned = np.flatnonzero(targets != IGNORE_INDEX)
    if not learned.size:  # one row, whose target is ignored
        return np.zeros(1, np.int64), np.full(1, IGNORE_INDEX), np.ones(len(targets), np.int64)

    # A slot and a target, both below 2**32, are one int64, by which np.unique sorts and compares.
    pairs = (slots[learned] << 32) | targets[learned]
    rows, row_of_learned = np.unique(pairs, return_inverse=True)
    token_rows = np.full(len(targets), len(rows))
    token_rows[learned] = row_of_learned
    return rows >> 32, rows & 0xFFFFFFFF, token_rows


def _tree_of(samples: Sequence[Mapping[str, Any]], plain: dict[str, Any]) -> tuple[_Tree | None, list[int]]:
    """Return the tree over ids, types, given positions and images, and the leaves that keep their images."""
    lengths = list(plain["boundaries"].sequence_lengths)
    columns = [plain["input_ids"].numpy()]
    columns += [plain["extras"][key][0].numpy() for key in TYPES if key in plain["extras"]]
    if any("position_ids" in sample for sample in samples):
        columns += list(np.atleast_2d(plain["position_ids"].numpy()))

    media = _same_media(samples)
    if media is None:
        keys = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
        return prefix_tree(np.ascontiguousarray(keys), lengths), []

    is_media = np.zeros(len(columns[0]), np.int64)
    types = plain["extras"].get("mm_token_type_ids")
    if types is not None:
        is_media = (types[0].numpy() != 0).astype(np.int64)
    media_before = np.concatenate([[0], np.cumsum(is_media)])  # media tokens before each token
    starts = [0, *accumulate(lengths)]
    in_sequence = [int(media_before[stop] - media_before[start]) for start, stop in pairwise(starts)]
    while True:
        keys = np.stack([*columns, np.repeat(np.asarray(media, np.int64), lengths)], axis=1)
        tree = prefix_tree(keys, lengths)
        if tree is None:
            return None, []

        in_prefix = [
            int(media_before[start + length] - media_before[start])
            for start, length in zip(starts, tree.shared, strict=False)
        ]
        cut = [leaf for leaf in tree.leaves if 0 < in_prefix[leaf] < in_sequence[leaf]]
        if not cut:
            return tree, [leaf for leaf in tree.leaves if not in_prefix[leaf]]
        # A leaf that shares only some of its images gets its own image number, so that it shares nothing.
        for leaf in cut:
            media[leaf] = -1 - leaf


def _same_media(samples: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Give samples with equal extra inputs the same number; return None if no sample has extra inputs."""
    if not any(inputs(sample) for sample in samples):
        return None
    number_of_digest: dict[bytes, int] = {}
    numbers = []
    for i, sample in enumerate(samples):
        if not inputs(sample):
            numbers.append(0)
        elif "mm_token_type_ids" not in sample:  # its image tokens are unknown, so it shares nothing
            numbers.append(-1 - i)
        else:
            digest = _digest_of_inputs(sample)
            numbers.append(number_of_digest.setdefault(digest, len(number_of_digest) + 1))
    return numbers


def _digest_of_inputs(sample: Mapping[str, Any]) -> bytes:
    """Return a hash of a sample's extra inputs: their names, dtypes, shapes and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name in inputs(sample):
        value = as_tensor(sample[name]).contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _extras(
    samples: Sequence[Mapping[str, Any]],
    plain: dict[str, Tensor],
    tree: _Tree,
    media_holders: list[int],
    slots: int,
) -> dict[str, Tensor]:
    """Return the extras of a shared batch: types per slot, shared images once, labels of all sequences."""
    samples_with_media = [samples[i] for i in media_holders]
    extras = {}
    for key, value in plain.items():
        if key in TYPES:
            extras[key] = _padded(value[0].numpy()[tree.tokens], slots - len(tree.tokens))[None]
        elif key == "labels":
            extras[key] = value
        else:
            extras[key] = joined(samples_with_media, key)
    return extras
