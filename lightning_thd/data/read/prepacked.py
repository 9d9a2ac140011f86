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
    has_boundaries = any(row.get(name) is not None and np.ndim(row[name]) == 1 for name in _BOUNDARIES)
    is_packed = has_boundaries and "input_ids" in row
    if sure and not is_packed:
        wanted = f"input_ids and one of {', '.join(_BOUNDARIES)}"
        raise ValueError(f"Rows have the keys {sorted(row)}; wanted {wanted}.")
    return is_packed


class PackedRows(TorchDataset[dict[str, NDArray[np.integer]]]):
    """The sequences inside rows that were packed before."""

    def __init__(
        self, rows: MapDataset, *, row: IntArray, start: IntArray, lengths: IntArray, loss_tokens: IntArray
    ) -> None:
        self.row = row  # the row of each sequence, int64 ``[N]``
        self.lengths = lengths
        self.loss_tokens = loss_tokens
        self._rows = rows
        self._start = start  # the slot of the row in which each sequence begins, int64 ``[N]``
        # The row that was read last, and its number.
        self._last: tuple[int, dict[str, NDArray[np.integer]]] = (-1, {})

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, i: int) -> dict[str, NDArray[np.integer]]:
        number = int(self.row[i])
        last_number, values = self._last  # read once, because a thread that plans ahead may replace it
        if last_number != number:  # sequences of one row are often read together
            row = self._rows[number]
            names = [name for name in ("input_ids", "labels") if row.get(name) is not None]
            # Copy, because the dataset may overwrite this row's memory when it reads another.
            values = {name: np.array(row[name]) for name in names}
            self._last = number, values

        start = int(self._start[i])
        slots = slice(start, start + int(self.lengths[i]))
        return {name: array[slots] for name, array in values.items()}


def open_packed(
    rows: MapDataset, *, key: Mapping[str, Any] | None = None, cache_dir: str | Path | None = None
) -> PackedRows:
    """Find the sequences in rows that were packed before; their places are cached under ``key``."""
    key = None if key is None else {**key, "rows": len(rows)}
    arrays = cached_arrays(
        "packed", key, lambda: _find_sequences(rows), version=_VERSION, cache_dir=cache_dir
    )
    return PackedRows(rows, **arrays)


def _find_sequences(rows: MapDataset) -> dict[str, IntArray]:
    """Read every row; return for each sequence its row, first slot, length and number of loss tokens."""
    tables = [np.empty((4, 0), np.int64)]
    for i in range(len(rows)):
        row = rows[i]
        other = sorted(name for name in set(row) - _READ if row[name] is not None)
        if other:
            raise ValueError(
                f"Row {i} carries {', '.join(other)}, which cannot be divided among sequences. Drop them."
            )

        lengths = _lengths_of(row, i)
        starts = np.cumsum(lengths) - lengths
        tables.append(np.stack([np.full_like(lengths, i), starts, lengths, _loss_tokens_of(row, i, lengths)]))

    names = ("row", "start", "lengths", "loss_tokens")
    return dict(zip(names, np.concatenate(tables, axis=1), strict=True))


def _loss_tokens_of(row: Mapping[str, Any], i: int, lengths: IntArray) -> IntArray:
    """Count the loss tokens of each sequence of a row."""
    labels = row.get("labels")
    if labels is None:
        return lengths - 1
    slots = len(row["input_ids"])
    if np.shape(labels) != (slots,):
        raise ValueError(f"Row {i} has {slots} input_ids, but labels of shape {np.shape(labels)}.")
    return count_targets(np.asarray(labels)[: lengths.sum()], lengths)


def _lengths_of(row: Mapping[str, Any], i: int) -> IntArray:
    """Return the lengths of a row's sequences in the order of its slots, without empty ones."""
    given = [name for name in _BOUNDARIES if row.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"Row {i} has {' and '.join(given) or 'none'} of {', '.join(_BOUNDARIES)}; wanted exactly one. "
            "Keep one, or set packed='off' to make every row one sequence."
        )

    [name] = given
    lengths = host_ints(row[name], f"Row {i}: {name}")
    if name == "position_ids":
        lengths = _lengths_by_positions(row, i, positions=lengths)
    elif name == "cu_seqlens":
        lengths = _lengths_by_offsets(i, offsets=lengths)

    slots = len(row["input_ids"])
    end = int(lengths.sum())
    if (lengths < 0).any() or end > slots:
        raise ValueError(
            f"Row {i} has {slots} input_ids, but its {name} describe sequences of {lengths[:8].tolist()}."
        )
    mask = row.get("attention_mask")
    if mask is not None and not np.array_equal(np.flatnonzero(mask), np.arange(end)):
        raise ValueError(
            f"Row {i}: attention_mask must be 1 in the {end} slots that {name} covers, 0 in later ones."
        )
    return lengths[lengths > 0]


def _lengths_by_offsets(i: int, offsets: IntArray) -> IntArray:
    if offsets[:1].any():
        raise ValueError(f"Row {i}: cu_seqlens begins with {offsets[0]}. Offsets begin with 0.")
    return np.diff(offsets)


def _lengths_by_positions(row: Mapping[str, Any], i: int, positions: IntArray) -> IntArray:
    """Return the lengths of a row's sequences, each of which begins where ``positions`` is 0."""
    ids = np.asarray(row["input_ids"])
    mask = row.get("attention_mask")
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
        _refuse_learned_padding(i, ids[last], np.asarray(row.get("labels", ids))[last])
    return lengths


def _refuse_learned_padding(i: int, ids: NDArray[Any], labels: NDArray[Any]) -> None:
    """Raise if the last sequence of a row repeats one id and is learned, because it may be padding."""
    is_learned = (labels != IGNORE_INDEX).any()
    if (ids == ids[0]).all() and is_learned:
        raise ValueError(
            f"Row {i} ends with a sequence of {len(ids)} times the id {ids[0]}. If it is "
            "padding, it would be learned. Give attention_mask, or labels of -100."
        )
