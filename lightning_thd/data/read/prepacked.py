"""Rows that were packed offline -> a dataset of the sequences in them, and the row of each sequence.

A row is ``input_ids`` (and ``labels``) with one of these beside it:

- ``lengths`` or ``seq_lengths``: tokens of each sequence;
- ``cu_seqlens``: offsets from 0, cumulative lengths;
- ``position_ids``: one per token, counting up from 0 in every sequence.

The rest of a row is padding: slots behind the last sequence, slots whose ``attention_mask`` is 0 or, without
a mask, zeros at the end of ``position_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset

from lightning_thd._checks import host_ints
from lightning_thd.batch.keys import IGNORE_INDEX
from lightning_thd.data.store.cache import cached_arrays
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.store.tokens import count_targets

IntArray = NDArray[np.int64]

_VERSION = 3
_BOUNDARIES = ("lengths", "seq_lengths", "cu_seqlens", "position_ids")
_READ = {"input_ids", "labels", "attention_mask", *_BOUNDARIES}
_PADDING_FROM = 8  # one id that is repeated this often at the end of a row looks like padding


def holds_packs(dataset: MapDataset, *, sure: bool = False) -> bool:
    """Return whether the first row has the keys of packed rows; with ``sure``, raise if it lacks them."""
    row = dataset[0] if len(dataset) else {}
    marked = any(row.get(name) is not None and np.ndim(row[name]) == 1 for name in _BOUNDARIES)
    found = marked and "input_ids" in row
    if sure and not found:
        wanted = f"input_ids and one of {', '.join(_BOUNDARIES)}"
        raise ValueError(f"Rows have the keys {sorted(row)}; wanted {wanted}.")
    return found


class PackedRows(TorchDataset[dict[str, NDArray[np.integer]]]):
    """The sequences inside rows that were packed before."""

    def __init__(
        self, rows: MapDataset, *, row: IntArray, start: IntArray, lengths: IntArray, loss_tokens: IntArray
    ) -> None:
        self.row, self.lengths, self.loss_tokens = row, lengths, loss_tokens
        self._rows, self._start = rows, start
        self._last: tuple[int, dict[str, NDArray[np.integer]]] = (-1, {})

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        number, start = int(self.row[i]), int(self._start[i])
        last = self._last  # read once, because a thread that plans ahead may replace it
        if last[0] != number:  # sequences of one row are often read together
            row = self._rows[number]
            names = [name for name in ("input_ids", "labels") if row.get(name) is not None]
            # Copy, because the dataset may overwrite this row's memory when it reads another.
            self._last = last = number, {name: np.array(row[name]) for name in names}
        part = slice(start, start + int(self.lengths[i]))
        return {name: values[part] for name, values in last[1].items()}


def open_packed(
    rows: MapDataset, *, key: Mapping[str, Any] | None = None, cache_dir: str | Path | None = None
) -> PackedRows:
    """Find the sequences in rows that were packed before; their places are cached under ``key``."""
    found = cached_arrays(
        "packed",
        None if key is None else {**key, "rows": len(rows)},
        lambda: _find(rows),
        version=_VERSION,
        cache_dir=cache_dir,
    )
    return PackedRows(rows, **found)


def _find(rows: MapDataset) -> dict[str, IntArray]:
    parts = [np.empty((4, 0), np.int64)]
    for i in range(len(rows)):
        row = rows[i]
        if other := sorted(name for name in set(row) - _READ if row[name] is not None):
            raise ValueError(
                f"Row {i} carries {', '.join(other)}, which cannot be divided among sequences. Drop them."
            )
        lengths = _lengths_of(row, i)
        slots, labels, loss_tokens = len(row["input_ids"]), row.get("labels"), lengths - 1
        if labels is not None:
            if np.shape(labels) != (slots,):
                raise ValueError(f"Row {i} has {slots} input_ids, but labels of shape {np.shape(labels)}.")
            loss_tokens = count_targets(np.asarray(labels)[: lengths.sum()], lengths)
        parts.append(np.stack([np.full_like(lengths, i), np.cumsum(lengths) - lengths, lengths, loss_tokens]))
    return dict(zip(("row", "start", "lengths", "loss_tokens"), np.concatenate(parts, axis=1), strict=True))


def _lengths_of(row: Mapping[str, Any], i: int) -> IntArray:
    """Return the lengths of a row's sequences in the order of its slots, without empty ones."""
    found = [name for name in _BOUNDARIES if row.get(name) is not None]
    if len(found) != 1:
        raise ValueError(
            f"Row {i} has {' and '.join(found) or 'none'} of {', '.join(_BOUNDARIES)}; wanted exactly one. "
            "Keep one, or set packed='off' to make every row one sequence."
        )
    [name] = found
    values = host_ints(row[name], f"Row {i}: {name}")
    if name == "position_ids":
        values = _lengths_by_positions(row, i, values)
    elif name == "cu_seqlens":
        if values[:1].any():
            raise ValueError(f"Row {i}: cu_seqlens begins with {values[0]}. Offsets begin with 0.")
        values = np.diff(values)
    slots, end = len(row["input_ids"]), int(values.sum())
    if (values < 0).any() or end > slots:
        raise ValueError(
            f"Row {i} has {slots} input_ids, but its {name} describe sequences of {values[:8].tolist()}."
        )
    mask = row.get("attention_mask")
    if mask is not None and not np.array_equal(np.flatnonzero(mask), np.arange(end)):
        raise ValueError(
            f"Row {i}: attention_mask must be 1 in the {end} slots that {name} covers, 0 in later ones."
        )
    return values[values > 0]


def _lengths_by_positions(row: Mapping[str, Any], i: int, positions: IntArray) -> IntArray:
    """Return the lengths of a row's sequences, each of which begins where ``positions`` is 0."""
    ids, mask = np.asarray(row["input_ids"]), row.get("attention_mask")
    if len(positions) != len(ids):
        raise ValueError(f"Row {i} has {len(ids)} input_ids but {len(positions)} position_ids.")
    # Without a mask, zeros at the end count as padding. They may be sequences of one token, but these have no
    # target, so no loss token is lost.
    positions = np.trim_zeros(positions, "b") if mask is None else positions[: np.count_nonzero(mask)]
    slots = np.arange(len(positions))
    start_of_slot = np.maximum.accumulate(np.where(positions == 0, slots, 0))
    if (positions != slots - start_of_slot).any():
        raise ValueError(f"Row {i}: position_ids do not count up from 0. Set packed='off' to keep them.")
    lengths = np.diff(np.flatnonzero(positions == 0), append=len(positions))
    if mask is None and len(lengths) > 1 and lengths[-1] >= _PADDING_FROM:
        last = slice(start_of_slot[-1], len(positions))
        learned = np.asarray(row.get("labels", ids))[last] != IGNORE_INDEX
        if (ids[last] == ids[last][0]).all() and learned.any():
            raise ValueError(
                f"Row {i} ends with a sequence of {lengths[-1]} times the id {ids[last][0]}. If it is "
                "padding, it would be learned. Give attention_mask, or labels of -100."
            )
    return lengths
