"""Several sources with weights -> one dataset, the source of each sequence, and a description of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
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
            raise IndexError(
                f"Sequence {i} was asked of {len(self)}. Pass a number from 0 to {len(self) - 1}."
            )
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
        checked=all(index.checked for index in indices),
    )


def _weights(index: SequenceIndex) -> Any:
    return index.weights if len(index.weights) else index.loss_tokens.astype(np.float64)


def _of_sequences(index: SequenceIndex) -> Any:
    return index.sequence_weights if len(index.weights) else np.ones(len(index.lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The sources of a mixture, for logs of what was trained of each.

    Attributes:
        of: the planner or loader that they are of.
        names: of the sources.
        source_of: ids of sequences -> the number of the source of each, int64 ``[S]``.
        tokens_of: epoch, step and data ranks -> real tokens of each source in the step, int64 ``[N]``; called
            once for each step, in order.
        per_step: batches of a rank to a step.
    """

    of: object
    names: Sequence[str]
    source_of: Callable[[npt.ArrayLike], IntArray]
    tokens_of: Callable[[int, int, int], IntArray]
    per_step: int


def planned_sources(planner: MixturePlanner, per_step: int) -> Sources:
    """Describe the sources of a planned mixture."""
    mixture = planner.mixture
    return Sources(
        of=planner,
        names=mixture.names,
        source_of=mixture.source_of,
        tokens_of=partial(_planned_tokens, planner),
        per_step=per_step,
    )


def _planned_tokens(planner: MixturePlanner, epoch: int, step: int, dp: int) -> IntArray:
    """Count the real tokens of each source of a mixture in a planned step, int64 ``[N]``."""
    mixture = planner.mixture
    spans = planner.step(epoch, step, dp).spans
    tokens = np.zeros(len(mixture.names), np.int64)
    np.add.at(tokens, mixture.source_of(spans.index), spans.lengths)
    return tokens
