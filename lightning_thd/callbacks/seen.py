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
from lightning_thd.batch.noted import unnoted
from lightning_thd.batch.thd_batch import THDBatch
from lightning_thd.boundaries import Boundaries
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

    def lengths(self, counts: np.ndarray[Any, Any]) -> OnHost:
        """Turn ``counts``, read to the host, into lengths; ``Dense`` if unknown or longer than the rows."""
        rows, slots = self.shape
        full = Dense((slots,) * rows)
        if (counts < 0).any():
            return full

        lengths = np.repeat(np.arange(len(counts)), counts) if self.by_length else counts
        if lengths.sum() > rows * slots:  # the counts belong to other rows
            return full
        return OnHost(lengths.tolist())


class OnHost(tuple[int, ...]):
    """The lengths of sequences."""

    held: tuple[int, ...] = ()  # for each, how many of its first tokens another stores; () if none does


class Dense(OnHost):
    """The lengths of rows that are counted as full, because their padding is unknown."""


Lengths: TypeAlias = OnHost | Rows | None
_Lookup: TypeAlias = Callable[[str], Any]  # a key or attribute of a batch -> its value
# The record of a microbatch: its stats, and its lengths, by which windows that the stats lack are counted.
Seen: TypeAlias = tuple[SeqStats, Lengths]


def microbatches(batch: Any, pad_id: int | None = None) -> list[Seen]:
    """Return a record for every pack and every padded batch in ``batch``, which may be a container."""
    # Packs know their lengths.
    if isinstance(batch, THDBatch):
        plain = unnoted(batch)
        return [(plain.stats, _lengths_of(plain))]
    several = getattr(batch, "microbatches", None)
    if isinstance(several, Sequence):
        return [seen for microbatch in several for seen in microbatches(microbatch, pad_id)]

    if isinstance(batch, SeqStats):
        return [(batch, None)]
    stats = getattr(batch, "stats", None)
    if isinstance(stats, SeqStats):
        return [(stats, _lengths_of(batch))]

    # Padded rows by key or attribute.
    look: _Lookup = partial(_attribute, batch)
    if isinstance(batch, Mapping):
        look = batch.get
    ids = look("input_ids")
    if ids is not None:
        return _rows(ids, look, pad_id)
    embeds = look("inputs_embeds")
    if isinstance(embeds, Tensor) and embeds.dim() == 3:
        return _rows(embeds[..., 0].long(), look, None)  # only the shape of these ids counts

    # Containers, and bare rows.
    if isinstance(batch, Mapping):
        return _inside(list(batch.values()), pad_id)
    if isinstance(batch, (list, tuple)):
        return _inside(batch, pad_id) or _tensors(batch)
    return _rows(batch, look, pad_id)


def _lengths_of(batch: Any) -> OnHost | None:
    """Return the lengths of a batch that knows its stats; None if it does not know its lengths."""
    boundaries = getattr(batch, "boundaries", None)
    if isinstance(boundaries, Boundaries):
        lengths, held = boundaries.pair_lengths()
    else:
        lengths = getattr(batch, "lengths", None)
        held = ()
    if lengths is None:
        return None

    on_host = OnHost(lengths)
    if held:
        on_host.held = held
    return on_host


def resolve(seen: Sequence[Seen], vision: Vision | None = None) -> list[tuple[SeqStats, OnHost | None]]:
    """Fill in the lengths and, with ``vision``, the images of padded rows, with one read per device."""
    padded = [lengths for _, lengths in seen if isinstance(lengths, Rows)]
    to_read = [rows.counts for rows in padded]
    if vision is not None:
        to_read += [image for rows in padded for image in rows.images.values() if not image.is_meta]
    on_host = _read(to_read)

    resolved: list[tuple[SeqStats, OnHost | None]] = []
    for stats, lengths in seen:
        if isinstance(lengths, Rows):
            images = {} if vision is None else _on_host(lengths.images, on_host)
            lengths = lengths.lengths(on_host[id(lengths.counts)])
            stats = SeqStats.from_lengths(lengths, slots=stats.slots, **counted(images, vision))
        resolved.append((stats, lengths))
    return resolved


def _read(tensors: Iterable[Tensor]) -> dict[int, np.ndarray[Any, Any]]:
    """Return the values of integer tensors, flat, by the tensor's id; one read per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)

    on_host: dict[int, np.ndarray[Any, Any]] = {}
    for of_device in by_device.values():
        values = torch.cat([tensor.flatten().long() for tensor in of_device]).cpu().numpy()
        ends = np.cumsum([tensor.numel() for tensor in of_device])[:-1]
        for tensor, part in zip(of_device, np.split(values, ends), strict=True):
            on_host[id(tensor)] = part
    return on_host


def _on_host(images: Mapping[str, Tensor], read: Mapping[int, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return the grids that were read, without rows of zeros, and the pixels' meta tensors unchanged."""
    on_host: dict[str, Any] = {}
    for name, image in images.items():
        if image.is_meta:
            on_host[name] = image
        else:
            grid = read[id(image)].reshape(-1, 3)
            on_host[name] = grid[(grid > 0).all(1)]
    return on_host


def _inside(values: Iterable[Any], pad_id: int | None) -> list[Seen]:
    """Return the records of a container's members, except bare tensors, which may be anything."""
    return [seen for value in values if not isinstance(value, Tensor) for seen in microbatches(value, pad_id)]


def _tensors(members: Sequence[Any]) -> list[Seen]:
    """Return the rows of a tuple of tensors: token ids come first, and a later tensor may be a mask."""
    if not members or not _are_rows(members[0]):
        return []
    ids = members[0]
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
    hidden_low = torch.where(real, largest, ids).amin()
    hidden_high = torch.where(real, -1, ids).amax()
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

    records = _rows_with_lengths(ids, look, pad_id)
    images = _images(look)
    if not records or not images:
        return records

    ((stats, lengths),) = records
    if not isinstance(lengths, Rows):
        lengths = Rows((stats.sequences, stats.slots // stats.sequences), torch.tensor([-1]))
    return [(stats, replace(lengths, images=images))]


def _images(look: _Lookup) -> dict[str, Tensor]:
    """Return a batch's image grids, on their device, and its pixels as meta tensors, which hold no memory."""
    images: dict[str, Tensor] = {}
    for name in GRIDS:
        grid = look(name)
        if isinstance(grid, Tensor) and grid.shape[-1:] == (3,) and grid.numel():
            images[name] = grid.clone()  # the batch may change before the interval ends
    for name in PIXELS:
        pixels = look(name)
        if isinstance(pixels, Tensor) and pixels.numel():
            images[name] = pixels.to("meta")
    return images


def _rows_with_lengths(ids: Any, look: _Lookup, pad_id: int | None) -> list[Seen]:
    """Return the record of padded rows or of a pack ``[T]``, with lengths from the batch's other tensors."""
    if isinstance(ids, Tensor) and ids.dim() == 1 and look("input_ids") is ids:
        ids = ids[None]
    if not _are_rows(ids):
        return []

    # In the order of how much they show: positions and numbered masks also tell sequences of one row apart.
    mask = look("attention_mask")
    mask = mask.reshape(ids.shape) if _fits(mask, ids) else None
    positions = look("position_ids")
    if _fits(positions, ids):
        return _padded(ids, _run_lengths(positions.long().reshape(ids.shape), mask), by_length=True)
    if mask is not None:
        return _padded(ids, _mask_lengths(mask), by_length=True)

    for name in _OFFSETS:
        offsets = look(name)
        if isinstance(offsets, Tensor) and offsets.dim() == 1:
            return _padded(ids, offsets.long().diff())
    for name in _LENGTHS:
        values = look(name)
        lengths = None if values is None else _one_per_row(values, len(ids))
        if lengths is not None:
            return _padded(ids, lengths.clamp(max=ids.shape[1]))  # the rows may have been truncated later

    labels = look("labels")
    if pad_id is not None and _fits(labels, ids):
        real = ((ids != pad_id) | (labels != -100)).long()
        spans = ids.shape[1] - real.argmax(1) - real.flip(1).argmax(1)  # pad ids between tokens are tokens
        return _padded(ids, torch.where(real.any(1), spans, 0))
    return _dense(ids)


def _attribute(batch: Any, name: str) -> Any:
    """Look up the value of a key in a batch that has attributes."""
    return getattr(batch, name, None)


def _part(look: _Lookup, i: int, parts: int, name: str) -> Any:
    """Look up the value of microbatch ``i`` in a list with one value for each of ``parts`` microbatches."""
    value = look(name)
    return value[i] if isinstance(value, (list, tuple)) and len(value) == parts else None


def _are_rows(ids: Any) -> bool:
    """Return whether a value is padded rows of token ids, ``[B, N]``."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.layout is not torch.strided:
        return False
    return ids.dim() == 2 and ids.numel() > 0


def _fits(value: Any, ids: Tensor) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor with an entry for each id; for a single row also as ``[N]``."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.shape in (ids.shape, ids.squeeze(0).shape)


def _one_per_row(lengths: Any, rows: int) -> Tensor | None:
    """Return integer lengths as a tensor, else None; several rows need one each, a single row any number."""
    if not isinstance(lengths, Tensor):
        try:
            lengths = torch.tensor(lengths)
        except (TypeError, ValueError, RuntimeError):  # a key "length" may have any values
            return None
    if lengths.is_floating_point() or lengths.is_complex():
        return None
    if lengths.ndim != 1 or rows not in (1, len(lengths)):
        return None
    whole: Tensor = lengths.long()
    return whole


def _padded(ids: Tensor, counts: Tensor, *, by_length: bool = False) -> list[Seen]:
    rows, length = ids.shape
    return [(SeqStats(slots=rows * length), Rows((rows, length), counts.detach().long(), by_length))]


def _dense(ids: Tensor) -> list[Seen]:
    rows, length = ids.shape
    return [(SeqStats.from_lengths([length] * rows), Dense((length,) * rows))]


def kept_slots(mask: Tensor) -> Tensor:
    """Return which slots a mask keeps: nonzero ones; if it is additive (floats, none above 0), its zeros."""
    if not mask.is_floating_point():
        return mask != 0
    return torch.where((mask > 0).any(), mask > 0, mask == 0)


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
    starts = real & ~torch.cat((edge, continues), 1)
    ends = real & ~torch.cat((continues, edge), 1)
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
