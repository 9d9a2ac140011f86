"""Rows that were packed offline -> a dataset of the sequences in them, and the row of each sequence.

A row is ``input_ids`` (and ``labels``) with one of these beside it:

- ``lengths`` or ``seq_lengths``: tokens of each sequence;
- ``cu_seqlens``: offsets from 0, cumulative lengths;
- ``position_ids``: one per token, counting up from 0 in every sequence.

The rest of a row is padding: slots at the end with ``attention_mask`` 0, or with position 0.
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
_PADDING_FROM = 8  # This many repeats of one id at the end of a row look like padding.


def holds_packs(dataset: MapDataset, *, sure: bool = False) -> bool:
    """Return whether the first row has a key of packed rows; with ``sure``, raise if it has none."""
    row = dataset[0] if len(dataset) else {}
    found = any(row.get(name) is not None and np.ndim(row[name]) == 1 for name in _BOUNDARIES)
    if sure and not found:
        raise ValueError(f"Rows have the keys {sorted(row)}; wanted one of {', '.join(_BOUNDARIES)}.")
    return found and "input_ids" in row


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
        if self._last[0] != number:  # sequences of one row are often read together
            row = self._rows[number]
            names = [name for name in ("input_ids", "labels") if name in row]
            # Copies, because a dataset may reuse one buffer for all rows.
            self._last = number, {name: np.array(row[name]) for name in names}
        part = slice(start, start + int(self.lengths[i]))
        return {name: values[part] for name, values in self._last[1].items()}


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
    """Find the row, first slot, length and loss tokens of every sequence."""
    parts = [np.empty((4, 0), np.int64)]
    for i in range(len(rows)):
        row = rows[i]
        if other := sorted(set(row) - _READ):
            raise ValueError(
                f"Row {i} holds several sequences and carries {', '.join(other)}, which cannot be divided "
                "among them. Remove it."
            )
        lengths = _lengths_of(row, i)
        labels, loss_tokens = row.get("labels"), lengths - 1
        if labels is not None:
            if len(labels) != len(row["input_ids"]):
                raise ValueError(f"Row {i} has {len(row['input_ids'])} input_ids but {len(labels)} labels.")
            loss_tokens = count_targets(np.asarray(labels)[: lengths.sum()], lengths)
        parts.append(np.stack([np.full_like(lengths, i), np.cumsum(lengths) - lengths, lengths, loss_tokens]))
    return dict(zip(("row", "start", "lengths", "loss_tokens"), np.concatenate(parts, axis=1), strict=True))


def _lengths_of(row: Mapping[str, Any], i: int) -> IntArray:
    """Return the lengths of the sequences in a row, from its first slot on, without empty sequences."""
    found = [name for name in _BOUNDARIES if row.get(name) is not None]
    if len(found) != 1:
        raise ValueError(
            f"Row {i} has {' and '.join(found) or 'none'}; give exactly one of {', '.join(_BOUNDARIES)}, or "
            "set packed='off'."
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
        raise ValueError(f"Row {i}: attention_mask is not 1 in the {end} slots that {name} describes.")
    return values[values > 0]


def _lengths_by_positions(row: Mapping[str, Any], i: int, positions: IntArray) -> IntArray:
    ids, mask = np.asarray(row["input_ids"]), row.get("attention_mask")
    if len(positions) != len(ids):
        raise ValueError(f"Row {i} has {len(ids)} input_ids but {len(positions)} position_ids.")
    # Without a mask, a 0 at the end is padding, because a sequence of one token has no target.
    positions = np.trim_zeros(positions, "b") if mask is None else positions[: np.count_nonzero(mask)]
    slots, begins = np.arange(len(positions)), positions == 0
    if (positions != slots - np.maximum.accumulate(np.where(begins, slots, 0))).any():
        raise ValueError(f"Row {i}: position_ids do not count up from 0. Set packed='off' to keep them.")
    lengths = np.diff(np.flatnonzero(begins), append=len(positions))
    last = slots[-lengths[-1] :] if len(lengths) > 1 else slots[:0]
    learned = np.asarray(row.get("labels", ids))[last] != IGNORE_INDEX
    if mask is None and len(last) >= _PADDING_FROM and (ids[last] == ids[last[0]]).all() and learned.any():
        raise ValueError(
            f"Row {i} ends with a sequence of {len(last)} times the id {ids[last[0]]}. If it is padding, it "
            "would be learned. Give attention_mask, or labels of -100."
        )
    return lengths
