"""The size of an optimizer step, and its plan: the spans of sequences in each microbatch of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_thd._checks import whole_number

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class _StepSize:
    """The base of step sizes."""

    # Not a dataclass, so that a config must name the subclass by ``class_path``: jsonargparse would fill in a
    # dataclass from bare fields.
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Packs(_StepSize):
    """A step of ``n`` packs over all ranks; each is a microbatch, unless context parallelism is dynamic."""

    n: int

    def __post_init__(self) -> None:
        n = whole_number(self.n, "Packs.n", least=1, advice="Pass Packs(8), say.")
        object.__setattr__(self, "n", n)  # an int, also if numpy's was given


@dataclass(frozen=True, slots=True)
class Sequences(_StepSize):
    """A step of ``n`` sequences over all ranks (fewer in the last step), in the microbatches they need."""

    n: int

    def __post_init__(self) -> None:
        n = whole_number(self.n, "Sequences.n", least=1, advice="Pass Sequences(512), say.")
        object.__setattr__(self, "n", n)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots, because it keeps its lengths
class Spans:
    """Pieces of sequences: tokens ``start`` to ``stop`` of the sequence ``index`` of the dataset."""

    index: IntArray  # int64 ``[S]``, dataset indices
    start: IntArray  # int64 ``[S]``, first token of the piece; 0 unless the sequence was split
    stop: IntArray  # int64 ``[S]``, one past the last token of the piece
    # bool ``[S]``, True if the sequence continues in another piece. The last token of such a piece keeps its
    # target, the token at ``stop``, so that splitting loses no loss token.
    continued: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def lengths(self) -> IntArray:
        """Return the real tokens of each piece, int64 ``[S]``."""
        return self.stop - self.start

    def take(self, which: IntArray | slice) -> Spans:
        """Pick pieces by position."""
        return Spans(
            index=self.index[which],
            start=self.start[which],
            stop=self.stop[which],
            continued=self.continued[which],
        )


# Spans -> float64 [2, S]: the weights of their loss tokens and of their sequences; None if these are unknown.
Weigh = Callable[[Spans], FloatArray | None]


class StepScales(NamedTuple):
    """The factors of a step's losses: of sums over loss tokens, over sequences, and over input tokens."""

    loss: float
    sequence: float
    token: float

    @classmethod
    def of(cls, weights: Iterable[float], *, dp: int, num_microbatches: int) -> StepScales:
        """Return the factors that turn the mean of the microbatches' sums of losses into a mean loss.

        ``weights`` are those of all loss tokens, sequences and input tokens of the step. There are
        ``dp * num_microbatches`` sums. A weight of 0 gives the factor 0.
        """
        sums = dp * num_microbatches
        return cls(*(sums / weight if weight else 0.0 for weight in weights))


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The plan of one optimizer step, the same on every rank; all ranks run equally many microbatches."""

    epoch: int  # number of the epoch
    step: int  # number of the step in its epoch
    dp: int  # data-parallel ranks
    num_microbatches: int  # microbatches of each rank
    spans: Spans  # the pieces of all microbatches, rank after rank, microbatch after microbatch
    # int64 ``[dp * num_microbatches + 1]``, where each microbatch begins in ``spans``. Entry
    # ``r * num_microbatches + j`` is that of microbatch ``j`` of rank ``r``. A microbatch may be empty.
    offsets: IntArray
    measure: Callable[[], FloatArray]  # computes ``span_work``, for which training does not ask
    patches: IntArray  # int64 ``[S]``, the image patches of each piece
    real_tokens: int  # tokens of all pieces
    sequences: int  # sequences whose first piece is in the step
    weigh: Weigh | None = None  # computes the weights of spans; None if the planner was given no loss tokens

    @classmethod
    def of(
        cls,
        place: tuple[int, int, int],  # epoch, step and data-parallel ranks
        spans: Spans,
        offsets: IntArray,
        measure: Callable[[], FloatArray],
        patches: IntArray,
        weigh: Weigh | None,
    ) -> StepPlan:
        """Build the plan of a step from its pieces; ``measure`` computes their work, if it is asked for."""
        epoch, step, dp = place
        return cls(
            epoch=epoch,
            step=step,
            dp=dp,
            num_microbatches=(len(offsets) - 1) // dp,
            spans=spans,
            offsets=offsets,
            measure=measure,
            real_tokens=int(spans.lengths.sum()),
            sequences=int((spans.start == 0).sum()),
            patches=patches,
            weigh=weigh,
        )

    @cached_property
    def span_work(self) -> FloatArray:
        """Return the work of each piece, including its images, float64 ``[S]``."""
        return self.measure()

    @cached_property
    def work(self) -> FloatArray:
        """Return the work of each microbatch in the unit of the planner's ``Cost``, float64 ``[dp, M]``."""
        # Differences of running sums, because np.add.reduceat gives an empty microbatch its neighbour's work.
        sums = np.concatenate([[0.0], np.cumsum(self.span_work)])
        return np.diff(sums[self.offsets]).reshape(self.dp, -1)

    @cached_property
    def weights(self) -> FloatArray | None:
        """Return float64 ``[2, dp, num_microbatches]``, the weights of loss tokens and of sequences."""
        of_spans = None if self.weigh is None else self.weigh(self.spans)
        if of_spans is None:
            return None
        count = len(self.offsets) - 1
        microbatch = np.repeat(np.arange(count), np.diff(self.offsets))  # for each span
        sums = [np.bincount(microbatch, weights=row, minlength=count) for row in of_spans]
        return np.array(sums, np.float64).reshape(2, self.dp, -1)

    def scales(self, counted: int | None = None) -> tuple[float, float] | None:
        """Return the scales for sums over loss tokens and over sequences; None if weights are unknown.

        ``counted`` is as in ``step_scales``.
        """
        scales = self.step_scales(counted)
        return None if scales is None else (scales.loss, scales.sequence)

    def step_scales(self, counted: int | None = None) -> StepScales | None:
        """Return the scales of all losses of the step; None if the weights of loss tokens are unknown.

        If a Trainer ends the epoch inside the step, only the first ``counted`` microbatches of each rank run
        and count. Lightning divides by ``num_microbatches`` even then, so the scales keep that factor.
        """
        if self.weights is None:
            return None
        loss_tokens, sequences = self.weights[:, :, :counted].sum(axis=(1, 2)).tolist()
        tokens = float(self.tokens[:, :counted].sum())
        size = {"dp": self.dp, "num_microbatches": self.num_microbatches}
        return StepScales.of((loss_tokens, sequences, tokens), **size)

    @cached_property
    def tokens(self) -> FloatArray:
        """Return float64 ``[dp, num_microbatches]``, the input tokens of each microbatch."""
        before = np.concatenate([[0], np.cumsum(self.spans.lengths)])
        return np.diff(before[self.offsets]).reshape(self.dp, -1).astype(np.float64)

    @property
    def loss_tokens(self) -> float | None:
        """Return the summed weight of the loss tokens (their number if each weighs 1); None if unknown."""
        return None if self.weights is None else float(self.weights[0].sum())

    @property
    def microbatch_patches(self) -> IntArray:
        """Return the image patches of each microbatch, int64 ``[dp, num_microbatches]``."""
        sums = np.concatenate([[0], np.cumsum(self.patches)])
        return np.diff(sums[self.offsets]).reshape(self.dp, -1)

    @property
    def degree_table(self) -> IntArray:
        """Return how many ranks share each microbatch, int64 ``[dp, num_microbatches]``: here 1."""
        return np.ones((self.dp, self.num_microbatches), np.int64)

    def microbatches(self, rank: int) -> list[Spans]:
        """Return the spans of each microbatch that ``rank`` runs, in order."""
        if not isinstance(rank, int | np.integer) or not 0 <= rank < self.dp:
            raise ValueError(
                f"rank={rank} was asked of a plan for dp={self.dp}. Pass a rank in [0, {self.dp})."
            )
        first = rank * self.num_microbatches
        bounds = self.offsets[first : first + self.num_microbatches + 1].tolist()
        return [self.spans.take(slice(start, stop)) for start, stop in pairwise(bounds)]

    def spans_by_rank(self) -> list[list[Spans]]:
        """Return for each rank its microbatches, each as the spans that it holds."""
        return [self.microbatches(rank) for rank in range(self.dp)]

    def indices_by_rank(self) -> list[list[IntArray]]:
        """Return for each rank its microbatches, each as an int64 array of dataset indices."""
        return [[spans.index for spans in self.microbatches(rank)] for rank in range(self.dp)]


def join_spans(parts: list[Spans]) -> Spans:
    """Join spans end to end; an empty list gives empty spans."""
    empty = np.empty(0, np.int64)
    return Spans(
        index=np.concatenate([empty, *(part.index for part in parts)]),
        start=np.concatenate([empty, *(part.start for part in parts)]),
        stop=np.concatenate([empty, *(part.stop for part in parts)]),
        continued=np.concatenate([empty.astype(bool), *(part.continued for part in parts)]),
    )
