"""What was read and what is planned of a stream -> its state, the same on every rank, and back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_thd.data.streams.schedule import POOL, IntArray, Planned, Table

_VERSION = 2
_PLACE = ("shard", "row", "round")  # of a sequence


@dataclass(kw_only=True)
class Ledger:
    """The position of a stream, on which all ranks agree.

    Attributes:
        cursors: int64 ``[K]``, rows of each shard that were read in the present round of its source.
        rounds: int64 ``[N]``, the present pass over each source.
        drawn: int64 ``[N]``, sequences of each source that were planned since the same sources take part.
        out: bool ``[N]``, sources that ran dry and leave this pass to the others.
        pool: ``POOL`` of what was read and is not planned, in the order it will be used.
        planned: steps that are planned and not made, in order.
        number: of the pass over the stream, from 0.
        steps: made in this pass.
        pace: sequences each rank reads ahead a step.
    """

    cursors: IntArray
    rounds: IntArray
    drawn: IntArray
    out: npt.NDArray[np.bool_]
    pool: Table = field(default_factory=lambda: np.empty(0, POOL))
    planned: deque[Planned] = field(default_factory=deque)
    number: int = 0
    steps: int = 0
    pace: int = 0

    @classmethod
    def fresh(cls, shards: int, sources: int) -> Ledger:
        """Return the position at the start of a stream with so many shards and sources."""
        return cls(
            cursors=np.zeros(shards, np.int64),
            rounds=np.zeros(sources, np.int64),
            drawn=np.zeros(sources, np.int64),
            out=np.zeros(sources, bool),
        )

    def state(self) -> dict[str, Any]:
        """Return the position as plain numbers and tensors, for a checkpoint."""
        tables = [*(step.table for step in self.planned), self.pool]
        pending = np.concatenate([np.stack([table[name] for name in _PLACE], 1) for table in tables])
        return {
            "version": _VERSION,
            "cursors": torch.from_numpy(self.cursors.copy()),
            "rounds": self.rounds.tolist(),
            "drawn": self.drawn.tolist(),
            "out": self.out.tolist(),
            "pending": torch.from_numpy(pending.astype(np.int64)),
            "planned": [step.offsets.tolist() for step in self.planned],
            "pass": self.number,
            "steps": self.steps,
            "pace": self.pace,
        }


def begun(state: dict[str, Any]) -> Ledger:
    """Build a ledger from a saved state, without its pending sequences.

    Raises:
        ValueError: for the state of another version of this package.
    """
    if state.get("version") != _VERSION:
        raise ValueError(
            f"The checkpoint holds version {state.get('version')} of a stream's state, and this release "
            f"reads version {_VERSION}. Go on with the release that wrote it, or start the stream anew."
        )
    return Ledger(
        cursors=state["cursors"].numpy().copy(),
        rounds=np.array(state["rounds"], np.int64),
        drawn=np.array(state["drawn"], np.int64),
        out=np.array(state["out"], bool),
        number=int(state["pass"]),
        steps=int(state["steps"]),
        pace=int(state["pace"]),
    )


def pending_rows(state: dict[str, Any]) -> dict[int, dict[int, list[int]]]:
    """Return the records that were read but unused at the checkpoint, by shard, row and pass."""
    rows: dict[int, dict[int, list[int]]] = {}
    for shard, row, number in state["pending"].tolist():
        rows.setdefault(shard, {}).setdefault(row, []).append(number)
    return rows


def restored(state: dict[str, Any], found: Table, *, dp: int, same: bool, source_of: IntArray) -> Ledger:
    """Build a ledger from a saved state and the pending sequences, which were read again.

    Args:
        state: that :meth:`Ledger.state` gave.
        found: ``POOL`` of the pending sequences, read again by the ranks that hold them now, in any order.
        dp: data-parallel ranks now.
        same: the steps that were planned fit this job, on as many ranks.
        source_of: int64 ``[K]``, the source of each shard.
    """
    keys = zip(*(found[name].tolist() for name in _PLACE), strict=True)
    places = {key: i for i, key in enumerate(keys)}
    pending = state["pending"].tolist()
    order = [places.get(tuple(place), -1) for place in pending]  # policies may leave some out now
    table = found[np.array([i for i in order if i >= 0], np.int64)]
    ledger = begun(state)
    if same and len(table) == len(pending):
        for offsets in state["planned"]:
            ledger.planned.append(Planned(table[: offsets[-1]], np.array(offsets, np.int64), dp))
            table = table[offsets[-1] :]
    else:  # what was planned is to be drawn again
        unmade = pending[: sum(offsets[-1] for offsets in state["planned"])]
        shards = np.array([shard for shard, *_ in unmade], np.int64)
        again = np.bincount(source_of[shards], minlength=len(ledger.drawn))
        ledger.drawn = np.maximum(0, ledger.drawn - again)
    ledger.pool = table
    return ledger
