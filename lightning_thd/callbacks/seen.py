"""A batch of any kind -> the lengths of its sequences: on the host for packs, on the device for padded rows.

B rows of N slots. Only ``resolve`` reads from a device, once per device for all records that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lightning_thd.batch.media import GRIDS, PIXELS, counted
from lightning_thd.stats import SeqStats, Vision

_OFFSETS = ("cu_seq_lens_q", "cu_seqlens")
_LENGTHS = ("lengths", "seq_lengths", "length")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Padded rows whose real lengths are on the device."""

    shape: tuple[int, int]  # (B, N)
    counts: Tensor  # the lengths of the rows' sequences; if any count is negative, lengths are unknown
    by_length: bool = False  # if True, ``counts[n]`` is the number of sequences with n tokens
    images: Mapping[str, Tensor] = field(default_factory=dict)  # by key: grids, shapes of pixels

    def lengths(self, counts: np.ndarray[Any, Any]) -> tuple[int, ...] | Dense:
        """Turn ``counts``, read to the host, into lengths; ``Dense`` if unknown or longer than the rows."""
        known = bool((counts >= 0).all())
        if known and self.by_length:
            counts = np.repeat(np.arange(len(counts)), counts)
        if not known or counts.sum() > self.shape[0] * self.shape[1]:  # the counts belong to other rows
            return Dense((self.shape[1],) * self.shape[0])
        return tuple(counts.tolist())


class Dense(tuple[int, ...]):
    """The lengths of rows that are counted as full, because their padding is unknown."""

    __slots__ = ()


class Shared(tuple[int, ...]):
    """The lengths of sequences that share prefixes, in the order of their slots."""

    held: tuple[int, ...]  # for each sequence, how many of its first tokens an earlier one stores

    @classmethod
    def of(cls, batch: Any) -> Shared:
        """Return the lengths of a batch's sequences; those without slots of their own come last."""
        prefixes = batch.prefixes
        pairs = list(zip(batch.lengths, prefixes.prefix_lengths, strict=True))
        rows = zip(prefixes.key_lengths, prefixes.query_lengths, strict=True)
        leaves = [(keys, keys - queries) for keys, queries in rows]
        leaves = leaves[: sum(held < length for length, held in pairs)]  # the last row may be padding
        ordered = [*leaves, *((length, held) for length, held in pairs if held == length)]
        found = cls(length for length, _ in ordered)
        found.held = tuple(held for _, held in ordered)
        return found


Lengths: TypeAlias = tuple[int, ...] | Rows | None
_Lookup: TypeAlias = Callable[[str], Any]  # a key or attribute of a batch -> its value
# The record of a microbatch: its stats, and its lengths, by which windows that the stats lack are counted.
Seen: TypeAlias = tuple[SeqStats, Lengths]


def microbatches(batch: Any, pad_id: int | None = None) -> list[Seen]:
    """Return a record for every pack and every padded batch in ``batch``, which may be a container."""
    if isinstance(several := getattr(batch, "microbatches", None), Sequence):
        return [seen for microbatch in several for seen in microbatches(microbatch, pad_id)]
    if isinstance(batch, SeqStats):
        return [(batch, None)]
    if isinstance(stats := getattr(batch, "stats", None), SeqStats):
        if getattr(batch, "prefixes", None) is not None:
            return [(stats, Shared.of(batch))]
        return [(stats, getattr(batch, "lengths", None))]
    look: _Lookup = batch.get if isinstance(batch, Mapping) else lambda name: getattr(batch, name, None)
    if (ids := look("input_ids")) is not None:
        return _rows(ids, look, pad_id)
    if isinstance(embeds := look("inputs_embeds"), Tensor) and embeds.dim() == 3:
        return _rows(embeds[..., 0].long(), look, None)
    if isinstance(batch, Mapping):
        return _inside(list(batch.values()), pad_id)
    if isinstance(batch, (list, tuple)):
        return _inside(batch, pad_id) or _tensors(batch)
    return _rows(batch, look, pad_id)


def resolve(
    seen: Sequence[Seen], vision: Vision | None = None
) -> list[tuple[SeqStats, tuple[int, ...] | None]]:
    """Fill in the lengths and, with ``vision``, the images of padded rows, with one read per device."""
    padded = [lengths for _, lengths in seen if isinstance(lengths, Rows)]
    wanted = [rows.counts for rows in padded]
    wanted += [x for rows in padded for x in rows.images.values() if vision is not None and not x.is_meta]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in wanted:
        by_device.setdefault(tensor.device, []).append(tensor)
    found: dict[int, np.ndarray[Any, Any]] = {}
    for several in by_device.values():
        values = torch.cat([x.flatten().long() for x in several]).cpu().numpy()
        ends = np.cumsum([x.numel() for x in several])[:-1]
        found |= {id(x): part for x, part in zip(several, np.split(values, ends), strict=True)}
    known: list[tuple[SeqStats, tuple[int, ...] | None]] = []
    for stats, lengths in seen:
        if isinstance(lengths, Rows):
            images = {} if vision is None else _on_host(lengths.images, found)
            lengths = lengths.lengths(found[id(lengths.counts)])
            stats = SeqStats.from_lengths(lengths, slots=stats.slots, **counted(images, vision))
        known.append((stats, lengths))
    return known


def _on_host(images: Mapping[str, Tensor], found: Mapping[int, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return the grids that were read, without rows of zeros, and the pixels' meta tensors unchanged."""
    grids = {name: found[id(x)].reshape(-1, 3) for name, x in images.items() if not x.is_meta}
    return {**images, **{name: grid[(grid > 0).all(1)] for name, grid in grids.items()}}


def _inside(values: Iterable[Any], pad_id: int | None) -> list[Seen]:
    """Return the records of a container's members, except bare tensors, which may be anything."""
    return [seen for value in values if not isinstance(value, Tensor) for seen in microbatches(value, pad_id)]


def _tensors(members: Sequence[Any]) -> list[Seen]:
    """Return the rows of a tuple of tensors: token ids come first, and a later tensor may be a mask."""
    if not members or not _are_rows(ids := members[0]):
        return []
    masks = [each.reshape(ids.shape) for each in members[1:] if _fits(each, ids)]
    if not masks:
        return _dense(ids)
    lengths = torch.full((ids.shape[0],), -1, device=ids.device)
    for mask in reversed(masks):
        real = mask.to(ids.device) == 1
        lengths = torch.where(_hides_padding(mask.to(ids.device), ids), real.sum(1), lengths)
    return _padded(ids, lengths)


def _hides_padding(mask: Tensor, ids: Tensor) -> Tensor:
    """Return whether a tensor is a mask: zeros and ones, with a one in each row, hiding at most one id."""
    # A tuple may also have token types and labels, whose zeros would hide several different ids.
    real = mask == 1
    ids = ids.long()
    largest = torch.iinfo(ids.dtype).max
    hidden_low, hidden_high = torch.where(real, largest, ids).amin(), torch.where(real, -1, ids).amax()
    one_id = (hidden_high < 0) | (hidden_low == hidden_high)
    return (real | (mask == 0)).all() & real.any(1).all() & one_id


def _rows(ids: Any, look: _Lookup, pad_id: int | None) -> list[Seen]:
    """Return padded rows, with lengths and images from the other tensors of the batch."""
    if isinstance(ids, (list, tuple)):  # lists have one tensor per microbatch for each key
        return [
            seen
            for i, part in enumerate(ids)
            for seen in _rows(part, partial(_part, look, i, len(ids)), pad_id)
        ]
    found = _rows_with_lengths(ids, look, pad_id)
    if not found or not (images := _images(look)):
        return found
    ((stats, lengths),) = found
    if not isinstance(lengths, Rows):
        lengths = Rows((stats.sequences, stats.slots // stats.sequences), torch.tensor([-1]))
    return [(stats, replace(lengths, images=images))]


def _images(look: _Lookup) -> dict[str, Tensor]:
    grids = {
        name: x.clone() for name in GRIDS if isinstance(x := look(name), Tensor) and x.shape[-1:] == (3,)
    }
    shapes = {name: x.to("meta") for name in PIXELS if isinstance(x := look(name), Tensor)}
    return {name: x for name, x in {**grids, **shapes}.items() if x.numel()}


def _rows_with_lengths(ids: Any, look: _Lookup, pad_id: int | None) -> list[Seen]:
    """Return the record of padded rows or of a pack ``[T]``, with lengths from the batch's other tensors."""
    ids = ids[None] if isinstance(ids, Tensor) and ids.dim() == 1 and look("input_ids") is ids else ids
    if not _are_rows(ids):
        return []
    mask, positions, labels = (look(name) for name in ("attention_mask", "position_ids", "labels"))
    mask = mask.reshape(ids.shape) if _fits(mask, ids) else None
    if _fits(positions, ids):
        return _padded(ids, _run_lengths(positions.long().reshape(ids.shape), mask), by_length=True)
    if mask is not None:
        return _padded(ids, _mask_lengths(mask), by_length=True)
    for name in _OFFSETS:
        if isinstance(offsets := look(name), Tensor) and offsets.dim() == 1:
            return _padded(ids, offsets.long().diff())
    for name in _LENGTHS:
        if (given := look(name)) is not None and (lengths := _one_per_row(given, len(ids))) is not None:
            return _padded(ids, lengths.clamp(max=ids.shape[1]))  # the rows may have been truncated later
    if pad_id is not None and _fits(labels, ids):
        real = ((ids != pad_id) | (labels != -100)).long()
        spans = ids.shape[1] - real.argmax(1) - real.flip(1).argmax(1)  # pad ids between tokens are tokens
        return _padded(ids, torch.where(real.any(1), spans, 0))
    return _dense(ids)


def _part(look: _Lookup, i: int, parts: int, name: str) -> Any:
    value = look(name)
    return value[i] if isinstance(value, (list, tuple)) and len(value) == parts else None


def _are_rows(ids: Any) -> bool:
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.layout is torch.strided
    return whole and ids.dim() == 2 and ids.numel() > 0


def _fits(value: Any, ids: Tensor) -> TypeGuard[Tensor]:
    whole = isinstance(value, Tensor) and value.layout is torch.strided
    return whole and value.shape in (ids.shape, ids.squeeze(0).shape)  # a single row also as [N]


def _one_per_row(lengths: Any, rows: int) -> Tensor | None:
    """Return integer lengths as a tensor, else None; several rows need one each, a single row any number."""
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.tensor(lengths)
        except (TypeError, ValueError, RuntimeError):  # a key "length" may have any values
            return None
    whole = not (lengths.is_floating_point() or lengths.is_complex())
    return lengths.long() if lengths.ndim == 1 and whole and rows in (1, len(lengths)) else None


def _padded(ids: Tensor, counts: Tensor, *, by_length: bool = False) -> list[Seen]:
    rows, length = ids.shape
    return [(SeqStats(slots=rows * length), Rows((rows, length), counts.detach().long(), by_length))]


def _dense(ids: Tensor) -> list[Seen]:
    rows, length = ids.shape
    return [(SeqStats.from_lengths([length] * rows), Dense((length,) * rows))]


def kept_slots(mask: Tensor) -> Tensor:
    """Return which slots a mask keeps: nonzero ones; if it is additive (floats, none above 0), its zeros."""
    return torch.where((mask > 0).any(), mask > 0, mask == 0) if mask.is_floating_point() else mask != 0


def _mask_lengths(mask: Tensor) -> Tensor:
    """Count the sequences of each length, ``[N + 1]``; equal numbers in a row's mask are one sequence."""
    rows, length = mask.shape
    numbers = torch.where(kept_slots(mask), mask.long().abs().clamp(1, length), 0)  # bools have no abs()
    slots = torch.zeros(rows, length + 1, dtype=torch.int64, device=mask.device)
    slots = slots.scatter_add(1, numbers, torch.ones_like(numbers))[:, 1:]
    return _histogram(slots, length)


def _histogram(lengths: Tensor, longest: int) -> Tensor:
    """Count how often each length above 0 occurs, ``[longest + 1]``."""
    counts = torch.zeros(longest + 1, dtype=torch.int64, device=lengths.device)
    counts = counts.scatter_add(0, lengths.flatten(), torch.ones_like(lengths).flatten())
    return torch.cat([torch.zeros_like(counts[:1]), counts[1:]])


def _run_lengths(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Count the sequences of each length, ``[N + 1]``; a sequence is a run of positions that count up.

    Without a mask, runs of one slot before and after all longer runs of a row are padding. If there are
    several rows and each is a single run, the end of a row may be padding with rising positions. The
    lengths are then unknown: entry 0 is -1.
    """
    rows, length = positions.shape
    index = torch.arange(length, device=positions.device).expand(rows, length)
    real = torch.ones_like(positions, dtype=torch.bool) if mask is None else kept_slots(mask)
    continues = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, 1:] & real[:, :-1]
    edge = torch.zeros_like(real[:, :1])
    starts, ends = (real & ~torch.cat(pair, 1) for pair in ((edge, continues), (continues, edge)))
    first = torch.where(starts, index, 0).cummax(1).values
    lengths = torch.where(ends, index - first + 1, 0)
    if mask is None and length > 1:
        longer = (lengths > 1).long()
        inside = (longer.cummax(1).values > 0) & (longer.flip(1).cummax(1).values.flip(1) > 0)
        lengths = torch.where((lengths == 1) & ~inside, 0, lengths)
    counts = _histogram(lengths, length)
    if mask is None and rows > 1:
        counts[0] = torch.where(starts.sum() > rows, 0, -1)
    return counts
