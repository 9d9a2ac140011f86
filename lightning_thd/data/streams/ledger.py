"""What was read and what is planned -> the state of a stream, the same on every rank, and back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_thd.data.streams.schedule import POOL, IntArray, Planned, Table

_VERSION = 1


@dataclass(kw_only=True)
class Ledger:
    """Where a stream stands, by what all ranks agreed on.

    Attributes:
        cursors: int64 ``[K]``, rows of each shard that were read.
        pool: ``POOL`` of what was read and is not planned, in the order it will be used.
        planned: steps that are planned and not made, in order.
        number: of the pass over the shards, from 0.
        steps: made in this pass.
        pace: sequences each rank reads ahead a step.
    """

    cursors: IntArray
    pool: Table = field(default_factory=lambda: np.empty(0, POOL))
    planned: deque[Planned] = field(default_factory=deque)
    number: int = 0
    steps: int = 0
    pace: int = 0

    def state(self) -> dict[str, Any]:
        """Describe the position in plain numbers and tensors, for a checkpoint."""
        tables = [*(step.table for step in self.planned), self.pool]
        pending = np.concatenate([np.stack([table["shard"], table["row"]], 1) for table in tables])
        return {
            "version": _VERSION,
            "cursors": torch.from_numpy(self.cursors.copy()),
            "pending": torch.from_numpy(pending.astype(np.int64)),
            "planned": [step.offsets.tolist() for step in self.planned],
            "pass": self.number,
            "steps": self.steps,
            "pace": self.pace,
        }


def pending_rows(state: dict[str, Any]) -> dict[int, list[int]]:
    """List the rows of each shard that were read and not used."""
    rows: dict[int, list[int]] = {}
    for shard, row in state["pending"].tolist():
        rows.setdefault(shard, []).append(row)
    return rows


def restored(state: dict[str, Any], found: Table, *, dp: int, same: bool) -> Ledger:
    """Rebuild a ledger.

    Args:
        state: that :meth:`Ledger.state` gave.
        found: ``POOL`` of the pending sequences, read again by the ranks that hold them now, in any order.
        dp: data-parallel ranks now.
        same: the steps that were planned fit this job, on as many ranks.
    """
    keys = zip(found["shard"].tolist(), found["row"].tolist(), strict=True)
    places = {key: i for i, key in enumerate(keys)}
    order = [places[shard, row] for shard, row in state["pending"].tolist()]
    table = found[np.array(order, np.int64)]
    ledger = Ledger(
        cursors=state["cursors"].numpy().copy(),
        number=int(state["pass"]),
        steps=int(state["steps"]),
        pace=int(state["pace"]),
    )
    if same:
        for offsets in state["planned"]:
            ledger.planned.append(Planned(table[: offsets[-1]], np.array(offsets, np.int64), dp))
            table = table[offsets[-1] :]
    ledger.pool = table
    return ledger
