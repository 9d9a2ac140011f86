"""A batch of any kind -> the host integers of its microbatches; nothing is read from the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from lightning_thd.stats import SeqStats

# what is kept of a microbatch: its stats, and its lengths for windows that the stats do not count
Seen: TypeAlias = tuple[SeqStats, tuple[int, ...] | None]


def microbatches(batch: Any) -> list[Seen]:
    """Find every pack in a batch, with its ``SeqStats`` and, where known, its lengths.

    Args:
        batch: a ``THDStep`` (each of its microbatches), a ``THDBatch``, bare ``SeqStats``, or rows of padded
            token ids ``[B, N]``, as a tensor or under ``"input_ids"``, which count as B dense sequences; or
            these inside dicts, tuples and lists: ``{"chosen": pack, "rejected": pack}``, ``(pack, tensor)``.

    Returns:
        One entry a pack; none for a batch of unknown kind.
    """
    if (several := getattr(batch, "microbatches", None)) is not None:
        return [seen for one in several for seen in microbatches(one)]
    if isinstance(batch, SeqStats):
        return [(batch, None)]
    if isinstance(stats := getattr(batch, "stats", None), SeqStats):
        return [(stats, getattr(batch, "lengths", None))]
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        return _dense(ids) if ids is not None else _inside(list(batch.values()))
    if isinstance(batch, (list, tuple)):
        return _inside(batch) or _dense(next(iter(batch), None))
    return _dense(getattr(batch, "input_ids", batch))


def _inside(values: list[Any] | tuple[Any, ...]) -> list[Seen]:
    """Return the packs among the members of a container; a bare tensor there may be anything."""
    return [seen for value in values if not isinstance(value, Tensor) for seen in microbatches(value)]


def _dense(ids: Any) -> list[Seen]:
    if isinstance(ids, (list, tuple)) and ids:
        ids = ids[0]
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return []
    rows, length = ids.shape
    return [(SeqStats.from_lengths([length] * rows), (length,) * rows)]
