"""Rows packed offline, several sequences in each -> a dataset of the sequences, and the row each is in.

A row is ``input_ids`` (and ``labels``) with one of these beside it, the first that is there:

- ``lengths`` or ``seq_lengths``: tokens of each sequence;
- ``cu_seqlens``: offsets from 0, cumulative real lengths;
- ``position_ids``: one a token, counting up from 0 in every sequence.

If a row has several of them, they must agree.

``cu_seqlens_padded``, offsets in the row, says where each sequence begins when there is padding between them.
The slots left at the end of a row are padding, and so are the last ones whose ``attention_mask`` is 0. Where
only ``position_ids`` tell the sequences, the last slots whose position is 0 are padding, as is a last run of
one id whose labels are -100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm

from lightning_thd.batch.keys import IGNORE_INDEX, names
from lightning_thd.data.store.cache import cached_arrays
from lightning_thd.data.store.index import MapDataset
from lightning_thd.data.store.tokens import count_targets

IntArray = NDArray[np.int64]

_VERSION = 2
_BAR_FROM = 10_000  # rows
_LENGTHS = ("lengths", "seq_lengths")
_PADDING_FROM = 8  # times that one id is repeated at the end of a row
_READ = frozenset(names("token", "boundary"))


def holds_packs(dataset: MapDataset, *, sure: bool = False) -> bool:
    """Return whether rows hold several sequences, by the first row's keys; with ``sure`` raise if not."""
    row = dataset[0] if len(dataset) else {}
    found = any(_is_row(row.get(name)) for name in (*_LENGTHS, "cu_seqlens", "position_ids"))
    if sure and not found:
        raise ValueError(
            f"Rows have the keys {sorted(row)}, of which none tells where a sequence begins. Wanted one of "
            "lengths, seq_lengths, cu_seqlens or position_ids beside input_ids; or set packed='off'."
        )
    return found and "input_ids" in row


def _is_row(value: Any) -> bool:
    return value is not None and np.ndim(value) == 1


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
        if self._last[0] != number:  # neighbours of a row are often read together
            row = self._rows[number]
            names = [name for name in ("input_ids", "labels") if name in row]
            self._last = number, {name: np.array(row[name]) for name in names}  # the buffer may be used again
        part = slice(start, start + int(self.lengths[i]))
        return {name: values[part] for name, values in self._last[1].items()}


def open_packed(
    rows: MapDataset,
    *,
    progress: bool = False,
    key: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
) -> PackedRows:
    """Find the sequences in rows that were packed before; their places are kept under ``key``."""
    found = cached_arrays(
        "packed",
        None if key is None else {**key, "rows": len(rows)},
        lambda: _find(rows, progress),
        version=_VERSION,
        cache_dir=cache_dir,
    )
    return PackedRows(rows, **found)


def _find(rows: MapDataset, progress: bool) -> dict[str, IntArray]:
    """Find the row, first slot, length and loss tokens of every sequence."""
    parts = [np.empty((4, 0), np.int64)]
    numbers = range(len(rows))
    shown = tqdm(numbers, desc="Finding sequences in packs", disable=not progress or len(rows) < _BAR_FROM)
    for i in shown:
        row = rows[i]
        if other := sorted(set(row) - _READ):
            raise ValueError(
                f"Row {i} holds several sequences and carries {', '.join(other)}, of which nothing says what "
                "belongs to which. Drop these columns, give the sequences one by one, or set packed='off'."
            )
        start, lengths = boundaries(row, i)
        labels, loss_tokens = row.get("labels"), lengths - 1
        if labels is not None:
            if len(labels) != len(row["input_ids"]):
                raise ValueError(
                    f"Row {i} has {len(row['input_ids'])} input_ids but {len(labels)} labels. "
                    "Give one label a token, unshifted, with -100 where it is to be ignored."
                )
            inside = np.repeat(start - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
            loss_tokens = count_targets(np.asarray(labels)[inside], lengths)
        parts.append(np.stack([np.full_like(start, i), start, lengths, loss_tokens]))
    return dict(zip(("row", "start", "lengths", "loss_tokens"), np.concatenate(parts, axis=1), strict=True))


def boundaries(row: Mapping[str, Any], i: int = 0) -> tuple[IntArray, IntArray]:
    """Find where the sequences of a row begin and how long they are; empty ones are left out."""
    slots = len(row["input_ids"])
    name = next((name for name in (*_LENGTHS, "cu_seqlens") if _is_row(row.get(name))), "position_ids")
    if row.get(name) is None:
        raise ValueError(
            f"Row {i} carries none of lengths, seq_lengths, cu_seqlens and position_ids, and row 0 does. "
            "Give one of them to every row, or set packed='off'."
        )
    if name == "position_ids":
        start, lengths = _from_positions(row, i, slots)
    else:
        values = _integers(row[name], name, i)
        lengths = values if name in _LENGTHS else _steps(values, name, i)
        start = np.cumsum(lengths) - lengths
        if row.get("cu_seqlens_padded") is not None:
            room = _steps(_integers(row["cu_seqlens_padded"], "cu_seqlens_padded", i), "cu_seqlens_padded", i)
            if len(room) < len(lengths) or (room[: len(lengths)] < lengths).any():
                raise ValueError(
                    f"Row {i}: cu_seqlens_padded gives the slots {room[:8].tolist()} to sequences of "
                    f"{lengths[:8].tolist()} tokens by its {name}. None may have more tokens than slots."
                )
            start = (np.cumsum(room) - room)[: len(lengths)]
    if lengths.size and (lengths.min() < 0 or int((start + lengths).max()) > slots):
        raise ValueError(
            f"Row {i} has {slots} input_ids, but its {name} describe {int((start + lengths).max())} slots, "
            f"shortest {int(lengths.min())}. They must lie inside the row."
        )
    keep = lengths > 0
    start, lengths = start[keep], lengths[keep]
    _refuse_others(row, i, name, start, lengths)
    return start, lengths


def _refuse_others(row: Mapping[str, Any], i: int, name: str, start: IntArray, lengths: IntArray) -> None:
    """Refuse a row whose other keys describe other sequences, or other tokens in them."""
    counted = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    inside = np.repeat(start, lengths) + counted
    found: dict[str, bool] = {}
    for other in (*_LENGTHS, "cu_seqlens"):
        if other != name and _is_row(row.get(other)):
            values = _integers(row[other], other, i)
            values = values if other in _LENGTHS else _steps(values, other, i)
            found[other] = np.array_equal(values[values > 0], lengths)
    positions, mask = (np.asarray(row.get(key, ())) for key in ("position_ids", "attention_mask"))
    if name != "position_ids" and positions.ndim == 1 and positions.size:
        found["position_ids"] = len(positions) > inside.max(initial=-1) and np.array_equal(
            positions[inside], counted
        )
    if mask.ndim == 1 and mask.size:
        real = np.flatnonzero(mask)
        found["attention_mask"] = np.array_equal(real, np.sort(inside))
    if wrong := [other for other, agrees in found.items() if not agrees]:
        raise ValueError(
            f"Row {i}: {wrong[0]} tells of other sequences, or other tokens in them, than {name}, by which "
            f"it has {len(lengths)} of {lengths[:8].tolist()} tokens. Drop the one that is wrong."
        )


def _integers(values: Any, name: str, i: int) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"Row {i}: {name} has shape {array.shape} and type {array.dtype}. Give a row of integers."
        )
    return array.astype(np.int64)


def _steps(offsets: IntArray, name: str, i: int) -> IntArray:
    """Convert offsets to lengths, leaving out the negative entries that fill up rows of fixed size."""
    if (offsets < 0).any():
        offsets = offsets[: int(np.argmax(offsets < 0))]
    steps = np.diff(offsets)
    if not offsets.size or offsets[0] != 0 or (steps < 0).any():
        raise ValueError(
            f"Row {i}: {name} is {offsets[:8].tolist()}{'...' if len(offsets) > 8 else ''}. Offsets begin "
            "with 0 and never fall."
        )
    return steps


def _from_positions(row: Mapping[str, Any], i: int, slots: int) -> tuple[IntArray, IntArray]:
    positions = _integers(row["position_ids"], "position_ids", i)
    if len(positions) != slots:
        raise ValueError(
            f"Row {i} has {slots} input_ids but {len(positions)} position_ids. Give one a token."
        )
    positions = positions[: _end_of_tokens(row, i, positions)]
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(np.append(starts, len(positions)))
    counted = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if len(counted) != len(positions) or (counted != positions).any():
        raise ValueError(
            f"Row {i}: position_ids do not count up from 0 in every sequence, so they do not tell where one "
            "begins. Set packed='off' to give them to the model as they are."
        )
    return starts, lengths


def _end_of_tokens(row: Mapping[str, Any], i: int, positions: IntArray) -> int:
    """Return the slot of a row at which the padding at its end begins."""
    mask: Sequence[int] | None = row.get("attention_mask")
    if mask is None:
        stop = int(np.flatnonzero(positions)[-1]) + 1 if positions.any() else 0  # one token has no target
        start = max(np.flatnonzero(positions[:stop] == 0), default=0)
        last, labels = (np.asarray(row.get(key, ()))[start:stop] for key in ("input_ids", "labels"))
        if not start or (last != last[0]).any():
            return stop
        if labels.size and (labels == IGNORE_INDEX).all():
            return int(start)
        if len(last) >= _PADDING_FROM:
            raise ValueError(
                f"Row {i} ends with {len(last)} times the id {last[0]}, by its position_ids a sequence, and "
                "padding would be learned. Give attention_mask, lengths or cu_seqlens, or labels of -100."
            )
        return stop
    real = np.flatnonzero(np.asarray(mask))
    stop = int(real[-1]) + 1 if real.size else 0
    if len(real) != stop:
        raise ValueError(
            f"Row {i}: attention_mask is 0 before the end of the row. Give lengths or cu_seqlens with "
            "cu_seqlens_padded where there is padding between sequences."
        )
    return stop
