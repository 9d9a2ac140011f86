"""Packs of an evaluation set -> the arrays a Trainer hands to ``compute_metrics``: a padded row a sequence.

S sequences, N tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_thd.batch import THDBatch

_PAD = -100  # what Trainer pads predictions and labels with

Preprocess = Callable[[Any, Tensor], Any]


class Rows:
    """Collects logits, labels and inputs of sequences over ranks, in the order of the dataset.

    Args:
        preprocess: Trainer's ``preprocess_logits_for_metrics``, of ``[S, N, V]`` and ``[S, N]``.
        inputs: whether ``input_ids`` are wanted too.
    """

    def __init__(self, preprocess: Preprocess | None, *, inputs: bool) -> None:
        self._preprocess, self._inputs = preprocess, inputs
        self._rows: list[tuple[int, Any, Any, Any]] = []

    def add(self, model: nn.Module, batch: THDBatch) -> None:
        """Run the model on a pack and store the results of its sequences on the host."""
        logits = _rows(batch, model(**batch.hf_kwargs()).logits[0])
        labels = torch.full_like(_rows(batch, batch.targets), _PAD)
        labels[:, 1:] = _rows(batch, batch.targets)[:, :-1]  # nothing predicts a first token
        kept = logits if self._preprocess is None else self._preprocess(logits, labels)
        ids = _rows(batch, batch.input_ids) if self._inputs else None
        columns = [_split(column, batch) for column in (kept, labels, ids)]
        self._rows.extend(zip(batch.sequence_ids, *columns, strict=True))

    def gather(self) -> tuple[Any, Any, Any]:
        """Return predictions, labels and inputs ``[S, N, ...]`` of all ranks as arrays, padded with -100."""
        rows = self._rows
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, rows)
            rows = [row for of_rank in everyone for row in of_rank]
        rows.sort(key=lambda row: row[0])
        predictions, labels, inputs = ([row[column] for row in rows] for column in (1, 2, 3))
        return _stack(predictions), _stack(labels), _stack(inputs) if self._inputs else None


def _rows(batch: THDBatch, values: Tensor) -> Tensor:
    return nn.utils.rnn.pad_sequence(batch.unpack(values), batch_first=True, padding_value=_PAD)


def _split(column: Any, batch: THDBatch) -> list[Any]:
    """Split a pack's values into one array a sequence, without padding."""
    if column is None:
        return [None] * len(batch.lengths)
    if isinstance(column, tuple | list):
        return list(zip(*(_split(part, batch) for part in column), strict=True))
    longest = max(batch.lengths)
    found = []
    for row, length in zip(column.detach().cpu(), batch.lengths, strict=True):
        values = row.float() if row.dtype == torch.bfloat16 else row
        found.append((values[:length] if row.ndim and row.shape[0] == longest else values).numpy())
    return found


def _stack(rows: list[Any]) -> Any:
    if not rows:
        return None
    if isinstance(rows[0], tuple):
        return tuple(_stack(list(part)) for part in zip(*rows, strict=True))
    if rows[0].ndim == 0:
        return np.stack(rows)
    longest = max(len(row) for row in rows)
    stacked = np.full((len(rows), longest, *rows[0].shape[1:]), _PAD, dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        stacked[i, : len(row)] = row
    return stacked
