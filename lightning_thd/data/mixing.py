"""Several sources with weights -> one dataset, the source of each sequence, and logs of their shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as L
import numpy as np
from torch.utils.data import Dataset

from lightning_thd.data.store.index import SequenceIndex
from lightning_thd.packing.mixtures import MixturePlanner

IntArray = np.ndarray[Any, np.dtype[np.int64]]


class MixedRows(Dataset[dict[str, Any]]):
    """A dataset made of several datasets laid end to end."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.names = tuple(datasets)
        self._datasets = list(datasets.values())
        self._ends = np.cumsum([len(dataset) for dataset in self._datasets])
        self.skipped = sum(int(getattr(dataset, "skipped", 0)) for dataset in self._datasets)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> dict[str, Any]:
        source, row = self._find(i)
        return self._datasets[source][row]  # type: ignore[no-any-return]

    def place(self, i: int) -> str:
        """Return the source and row of a sequence as text, for messages."""
        source, row = self._find(i)
        return f"row {row} of {self.names[source]!r}"

    def _find(self, i: int) -> tuple[int, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"Sequence {i} was asked of {len(self)}. Pass a number below that.")
        source = int(np.searchsorted(self._ends, i, side="right"))
        return source, i - (int(self._ends[source - 1]) if source else 0)


def join_indices(indices: list[SequenceIndex]) -> SequenceIndex:
    """Join the sequence indices of datasets end to end, as ``MixedRows`` joins the datasets."""
    sizes = [len(index.lengths) for index in indices]
    starts = np.cumsum(sizes) - sizes
    pairs = list(zip(indices, starts.tolist(), strict=True))
    weighted = any(len(index.weights) for index in indices)
    most = max(pairs, key=lambda pair: int(pair[0].largest[0]))
    return SequenceIndex(
        lengths=np.concatenate([index.lengths for index in indices]),
        loss_tokens=np.concatenate([index.loss_tokens for index in indices]),
        media=np.concatenate([index.media + start for index, start in pairs]),
        weights=np.concatenate([_weights(index) for index in indices]) if weighted else np.empty(0),
        sequence_weights=np.concatenate([_of_sequences(index) for index in indices])
        if weighted
        else np.empty(0),
        largest=np.array([most[0].largest[0], most[0].largest[1] + most[1]]),
        bad=np.concatenate([index.bad + start for index, start in pairs]),
    )


def _weights(index: SequenceIndex) -> Any:
    return index.weights if len(index.weights) else index.loss_tokens.astype(np.float64)


def _of_sequences(index: SequenceIndex) -> Any:
    return index.sequence_weights if len(index.weights) else np.ones(len(index.lengths))


@dataclass(kw_only=True, slots=True)
class ShareLog:
    """Logs how much of what was trained on came from each source, for the whole job.

    The numbers come from the plan, on the first process, so that no device and no other rank is asked.

    Attributes:
        names: of the sources.
        tokens_of: real tokens of each source in a step of an epoch on so many ranks, int64 ``[N]``; called
            once for each step, in order.
        per_step: batches of a rank to a step of the plan.
        done: the epoch and step up to which it was logged.
        tokens: real tokens of each source so far, since the run began or was resumed.
    """

    names: Sequence[str]
    tokens_of: Callable[[int, int, int], IntArray]
    per_step: int
    done: tuple[int, int] | None = None
    tokens: IntArray | None = None

    def update(self, trainer: L.Trainer, epoch: int, dp: int) -> None:
        """Log the shares at steps at which the Trainer logs; called before each batch."""
        batches = int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
        step = batches // self.per_step
        if self.done is None or self.done[0] != epoch:
            self.done = (epoch, step if self.done is None else 0)
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.is_global_zero or step - self.done[1] < max(1, every):
            return
        tokens = np.zeros(len(self.names), np.int64)
        for k in range(self.done[1], step):
            tokens += self.tokens_of(epoch, k, dp)
        self.done = (epoch, step)
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        logged = {f"data/{name}/tokens": float(n) for name, n in zip(self.names, self.tokens, strict=True)}
        part = tokens / max(1, int(tokens.sum()))
        logged |= {f"data/{name}/share": float(x) for name, x in zip(self.names, part, strict=True)}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step)


def planned_tokens(planner: MixturePlanner, epoch: int, step: int, dp: int) -> IntArray:
    """Count the real tokens of each source of a mixture in a planned step, int64 ``[N]``."""
    mixture = planner.mixture
    spans = planner.step(epoch, step, dp).spans
    tokens = np.zeros(len(mixture.names), np.int64)
    np.add.at(tokens, mixture.source_of(spans.index), spans.lengths)
    return tokens
