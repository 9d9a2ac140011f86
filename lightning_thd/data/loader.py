"""Plans or a stream -> batches of one rank, and a position to resume from on any number of ranks."""

from __future__ import annotations

import atexit
import functools
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data import Dataset as TorchDataset

from lightning_thd._private import private
from lightning_thd._workers import begin_worker, own_generator
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.batch.collate import sequence_labels
from lightning_thd.batch.examples import PARTS
from lightning_thd.batch.noted import FirstUpdate
from lightning_thd.batch.samples import sequence_label
from lightning_thd.batch.thd_batch import collate_checked
from lightning_thd.data.store.index import (
    MapDataset,
    SequenceIndex,
    content_of_rows,
)
from lightning_thd.data.trainer_link import Progress
from lightning_thd.packing import Spans, StepPlan
from lightning_thd.packing.plan import join_spans
from lightning_thd.packing.planner import Planner
from lightning_thd.packing.sharing import Sharing
from lightning_thd.parallel.context.dynamic_step import DynamicStep, digest_of
from lightning_thd.warnings import DataWarning, warn

T = TypeVar("T")
Batch = THDBatch | THDStep
# What a batch is: one ``THDBatch`` of a training step ("pack"), a ``THDStep`` with all that this rank runs
# ("step"), or a ``THDBatch`` whose loss is the mean over its loss tokens ("eval").
Kind = Literal["pack", "step", "eval"]
# (epoch, step, microbatch of the rank, number of microbatches that a rank runs in this step)
Key = tuple[int, int, int, int]
# The loss scale, sequence scale and token scale of a step. With None, the loss is the mean over the batch.
Scales = tuple[float | None, float | None, float | None]

_REMEMBERED = 10_000  # most steps whose tokens are kept for ``tokens_of``, which only process 0 calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The next step, the same on every rank."""

    epoch: int = 0
    step: int = 0
    ended: bool = False  # whether the epoch before this step has ended, and this epoch has not begun
    stream: dict[str, Any] | None = None  # a stream's state, with the places of records read but unused


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step of this rank: its batches, and the state of the stream after the step."""

    batches: Iterable[Batch]
    last: bool  # whether the epoch, or the pass over a stream, ends with this step
    stream: dict[str, Any] | None = None
    tokens: npt.NDArray[np.int64] | None = None  # real tokens of each source of a stream, over all ranks


class _Steps(Protocol):
    """The interface of a loader's source of steps: ``PlannedSteps``, or ``StreamedSteps`` for a stream."""

    kind: Kind
    per_step: int  # batches of a rank per step
    steps_per_epoch: int | None  # if None, an epoch ends at the step that is marked ``last``
    resumes: bool  # whether an iteration continues after the last trained step, as a stream must
    names: Sequence[str]  # names of the sources of a mixture

    def source_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]: ...
    def length(self, epoch: int) -> int | None: ...
    def steps(self, position: Position, limit: int | None) -> Iterator[RankStep]: ...
    def state(self, position: Position) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> Position: ...


class THDLoader:
    """Iterates over the batches of one rank, epoch by epoch; its position is the same on every rank.

    Args:
        source: the steps, ``PlannedSteps`` or those of a stream.
        progress: how far a Trainer has come; None for a hand-written loop.
        capacity: slots of a pack, for the monitor; 0 if unknown.
        predicts: whether to note the sequences of each batch, for writers of predictions.
        judges: whether to refuse a model that asks its batches for no boundaries, in a hand-written loop.
    """

    def __init__(
        self,
        source: _Steps,
        *,
        progress: Progress | None = None,
        capacity: int = 0,
        predicts: bool = False,
        judges: bool = False,
    ) -> None:
        self.source = source
        self.capacity = capacity
        self.planner: Planner | None = source.planner if isinstance(source, PlannedSteps) else None
        self.per_step = source.per_step
        # Whether one rank reads packs for all ranks that share them, as in streams.
        self.reads_for_peers = source.resumes
        self.waited_s = 0.0  # seconds spent so far on reading and collating, or on waiting for workers
        self.tokens: deque[npt.NDArray[np.int64]] = deque(maxlen=_REMEMBERED)
        self._progress = progress
        # Steps of a stream that are not trained yet: (batches to its end, position before it, step).
        self._unfinished: deque[tuple[int, Position, RankStep]] = deque()
        self._to_repeat: deque[RankStep] = deque()  # steps that were handed out but not run
        self._reports = False  # whether a hand-written loop reports each batch that it ran
        self._not_run = 0  # batches that were handed out to such a loop, but are not reported
        # Refuses a hand-written loop whose model asks for no boundaries; None if others do, or nobody.
        self._first_update = FirstUpdate() if judges and progress is None and source.kind != "eval" else None
        self._predicts = predicts
        self._indices: list[list[int]] = []  # the sequences of each batch, for predictions
        self._set_position(Position())

    def _set_position(self, position: Position) -> None:
        """Set the position at which the next iteration begins, and which checkpoints hold until then."""
        self._position = position
        self._saved = position
        # For each step of this iteration: the batches up to its end, and the position there.
        self._step_ends: deque[tuple[int, Position]] = deque()
        self._handed_out = 0  # batches of this iteration
        self._not_run = 0
        self._iterating = False
        # Batches that the Trainer was done with when this iteration began.
        self._total_at_start = 0 if self._progress is None else self._progress.total()

    @property
    def batch_sampler(self) -> _SamplerForLightning:
        """Return the object in which Lightning looks for the loader's sampler and batch indices."""
        kind = _indices_for_lightning() if self._predicts else _SamplerForLightning
        return kind(self, self._indices)

    @property
    def counts(self) -> dict[str, int]:
        """Return how many records of a stream were unusable, or changed or dropped by a policy."""
        return getattr(self.source, "counts", {})

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch; between two epochs, of the next epoch."""
        return self._position.epoch

    def __len__(self) -> int:
        length = self.source.length(self._position.epoch)
        if length is None:
            raise TypeError("A stream has no length. Pass steps_per_epoch to give its epochs one.")
        return length

    def set_epoch(self, epoch: int) -> None:
        """Refuse a training loader without its data module, else call ``begin_epoch``."""
        if self._progress is None and self.source.kind != "eval":
            raise MisconfigurationException(
                "A training loader of THDDataModule was given to a Trainer by itself, so it does not know "
                "the ranks. Pass the data module: trainer.fit(module, datamodule=data)."
            )
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Begin another epoch at its first step; the current epoch and streams continue where they are."""
        if self.source.resumes:
            return
        if epoch != self._position.epoch:
            self._set_position(Position(epoch=epoch))
        has_other_length = self.planner is not None and not self.planner.epochs_alike
        if self._progress is not None and has_other_length:
            self._progress.resize(len(self))

    def tokens_of(self, epoch: int, step: int) -> npt.NDArray[np.int64]:
        """Return the real tokens of each source in a step; for a stream, each call gives the next step's."""
        if isinstance(self.source, PlannedSteps):
            limit = None if self._progress is None else self._progress.limit(self.source.length(epoch))
            return self.source.tokens_of(epoch, step, limit)
        return self.tokens.popleft() if self.tokens else np.zeros(len(self.source.names), np.int64)

    def __iter__(self) -> Iterator[Batch]:
        # This is a generator, so it starts at the first next(), which Lightning calls after set_epoch.
        self._requeue_dropped()
        position = replace(self._position, ended=False)
        self._saved = position
        self._step_ends.clear()
        self._handed_out = 0
        self._not_run = 0
        self._iterating = True
        self._total_at_start = 0 if self._progress is None else self._progress.total()
        self._indices.clear()

        limit = self._limit(position.epoch)
        num_batches = math.inf  # in this iteration
        if limit is not None:
            num_batches = limit - position.step * self.per_step
        steps = self._timed(self.source.steps(position, limit))
        end_of_step = 0.0  # batches of this iteration up to the end of the present step

        while not position.ended and end_of_step < num_batches:
            step = self._to_repeat.popleft() if self._to_repeat else next(steps, None)
            if step is None:  # an epoch without steps
                break

            end_of_step = min(end_of_step + self.per_step, num_batches)
            before = position
            position = self._position_behind(position, step, ended=end_of_step == num_batches)
            # The step is recorded before its first batch is handed out, because a checkpoint may be written
            # while the step runs.
            self._record_step(int(end_of_step), before, step)
            self._step_ends.append((int(end_of_step), position))
            if self.source.resumes:
                self._position = position
            yield from self._hand_out(step)

        if self._progress is not None:  # a stream's last batch is fetched ahead, and has not run yet
            self._progress.check_counts()
        self._iterating = False
        if not self.source.resumes:
            self._position = Position(epoch=self._position.epoch + 1, ended=True)

    def _limit(self, epoch: int) -> int | None:
        """Return the most batches that the Trainer takes of an epoch; None without a bound."""
        if self._progress is None:
            return None
        limit = self._progress.limit(self.source.length(epoch))
        if limit is not None and limit % self.per_step and self.source.resumes:
            raise MisconfigurationException(
                f"limit_train_batches (or fast_dev_run) takes {limit} batches of a stream, which would cut "
                f"the last step. Take a multiple of {self.per_step}."
            )
        return limit

    def _hand_out(self, step: RankStep) -> Iterator[Batch]:
        """Yield the batches of a step, and count them; raise if the position was set meanwhile."""
        ends = self._step_ends  # another object after ``_set_position``
        for batch in self._timed(step.batches):
            if self._progress is not None:
                self._progress.check_counts()
            self._handed_out += 1
            if self._predicts and isinstance(batch, THDBatch):
                self._indices.append(list(batch.sequence_ids))
            # A loop that reports its batches has not run this one yet. For any other loop, a batch that was
            # handed out counts as run.
            self._not_run = int(self._reports)
            if self._first_update is None or self._reports:
                yield batch
            else:
                with self._first_update.handing_out(batch) as noted:
                    yield noted
            if self._step_ends is not ends:
                raise ValueError(
                    "The loader was set to another position inside a loop over it, and the loop cannot "
                    "follow. Leave the loop after load_state(), and begin it again."
                )
            self._not_run = 0

    def _position_behind(self, position: Position, step: RankStep, *, ended: bool) -> Position:
        """Return the position behind a step that begins at a position."""
        number = position.step + 1
        steps_per_epoch = self.source.steps_per_epoch
        is_last = step.last if steps_per_epoch is None else number == steps_per_epoch
        if ended or is_last:
            return Position(epoch=position.epoch + 1, ended=True, stream=step.stream)
        return Position(epoch=position.epoch, step=number, stream=step.stream)

    def _timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and add the time until each comes to ``waited_s``."""
        iterator = iter(items)
        while True:
            began = time.perf_counter()
            item: T | None = next(iterator, None)
            self.waited_s += time.perf_counter() - began
            if item is None:
                return
            yield item

    def _num_done(self) -> int:
        """Return how many batches of this iteration are trained, or handed out if nothing reports that."""
        if self._progress is None:
            return self._handed_out - self._not_run
        return self._progress.total() - self._total_at_start

    def report_run(self) -> None:
        """Count the last batch as trained; from now on, one also counts when the next batch is asked for."""
        self._reports = True
        self._not_run = 0

    def _record_step(self, end: int, before: Position, step: RankStep) -> None:
        """Keep a stream's step, which ends behind ``end`` batches, until it is trained; forget past ones."""
        done = self._num_done()
        while len(self._step_ends) > 1 and self._step_ends[1][0] <= done:
            self._step_ends.popleft()
        if step.tokens is not None:
            self.tokens.append(step.tokens)
        if (self._progress is not None or self._reports) and self.source.resumes:
            self._unfinished.append((end, before, step))
            while self._unfinished[0][0] <= done:
                self._unfinished.popleft()

    def _requeue_dropped(self) -> None:
        """Queue a stream's steps that were handed out but not trained; warn if planned steps are repeated."""
        # A stream continues, and an evaluation is meant to be repeated.
        is_expected = self.source.resumes or getattr(self.source, "fixed_order", False)
        if self._iterating and self._progress is None and self._handed_out > 1 and not is_expected:
            warn(
                f"A loader of {len(self)} batches is iterated again after {self._handed_out} in epoch "
                f"{self.epoch}, and repeats them. To continue with the rest, keep one iterator.",
                DataWarning,
            )

        done = self._num_done()
        dropped = [(before, step) for end, before, step in self._unfinished if end > done]
        self._unfinished.clear()
        if dropped:
            self._position, _ = dropped[0]
            self._to_repeat.extendleft(reversed([step for _, step in dropped]))
            for _ in dropped[: len(self.tokens)]:  # their tokens are added when they are handed out again
                self.tokens.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last whole step that is trained, the same on every rank."""
        position = self.position_after(self._num_done())
        begins = self._progress is not None and self._progress.begins_epoch()
        return self.source.state(replace(position, ended=position.ended and not begins))

    def position_after(self, done: int) -> Position:
        """Return the position after the last whole step of the first ``done`` batches of this iteration."""
        position = self._saved
        for end, position_at_end in self._step_ends:
            if end <= done:
                position = position_at_end
        return position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last whole step of ``state``, on any number of ranks and workers."""
        position = self.source.load(state)
        self._unfinished.clear()
        self._to_repeat.clear()
        self.tokens.clear()
        self._set_position(position)
        if self._progress is not None and not position.ended:
            self._progress.match(position.step * self.per_step)
            self._total_at_start = self._progress.total()


class _SamplerForLightning:
    """Holds the loader, for Lightning, and the indices of its batches, for ``BasePredictionWriter``."""

    def __init__(self, loader: THDLoader, indices: list[list[int]]) -> None:
        self.sampler = loader
        self.seen_batch_indices = indices


@functools.cache
def _indices_for_lightning() -> type[_SamplerForLightning]:
    """Return a class of samplers whose indices Lightning hands on, because it is of Lightning's wrapper."""
    wrapper = private("lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper")
    return type("IndicesForLightning", (_SamplerForLightning, wrapper), {})


_STOP_S = 30.0  # seconds to wait at the end for a running call, in which other ranks may take part
_Calls = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]


class _Caller(Thread):
    """A thread that runs queued calls one after another, until it is ended or the interpreter exits."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.calls: _Calls = SimpleQueue()  # None ends the thread

    def start(self) -> None:
        """Start the thread; an interpreter that exits while it is inside a collective would abort."""
        atexit.register(self.end)
        super().start()

    def run(self) -> None:
        """Run queued calls until None comes."""
        while (queued := self.calls.get()) is not None:
            future, call, args = queued
            try:
                future.set_result(call(*args))
            except BaseException as err:
                future.set_exception(err)
            del queued, future, call, args  # so that a waiting thread keeps no object alive
        atexit.unregister(self.end)

    def end(self) -> None:
        """Wait until the queued calls end, but at most ``_STOP_S`` seconds."""
        self.calls.put(None)
        self.join(_STOP_S)


class Ahead:
    """Calls functions one after another in a thread, before their results are needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.process = os.getpid()  # a fork of this process has no such thread
        self.pending: deque[Future[Any]] = deque()  # results of queued calls, the oldest first
        self._thread: _Caller | None = None

    def submit(self, call: Callable[..., Any], *args: Any) -> None:
        """Queue a call; the first call starts the thread."""
        if self._thread is None:
            self._thread = _Caller(self._name)
            weakref.finalize(self, self._thread.calls.put, None)
            self._thread.start()
        future: Future[Any] = Future()
        self.pending.append(future)
        self._thread.calls.put((future, call, args))

    def next_result(self) -> Any:
        """Wait for the oldest call and return its result, or raise its error."""
        future = self.pending.popleft()
        while not future.done():
            try:
                wait([future])
            except RuntimeError as err:
                # torch raises here when a worker dies. Keep waiting: the call then fails on every rank, with
                # an error that names the worker's files.
                if "DataLoader worker" not in str(err):
                    raise
        return future.result()

    def stop(self) -> None:
        """Drop the results of queued calls, and wait until the calls end, but at most ``_STOP_S`` seconds."""
        self.pending.clear()
        if self._thread is not None:
            self._thread.end()
        self._thread = None


class PlansAhead:
    """Plans steps; in the main process, a request for one step lets a thread plan the next."""

    def __init__(self, planner: Planner, dp: int) -> None:
        self._planner = planner
        self._dp = dp
        self._last: tuple[tuple[int, int], StepPlan] | None = None  # (epoch, step) and its plan
        self._next: tuple[int, int] | None = None  # (epoch, step) that the thread plans
        self._ahead = Ahead("plans_ahead")

    def step(self, epoch: int, k: int) -> StepPlan:
        """Return the plan of a step, or raise the planner's error."""
        if self._last is not None and self._last[0] == (epoch, k):
            return self._last[1]

        plan = self._take_plan(epoch, k)
        self._last = (epoch, k), plan
        is_main_process = get_worker_info() is None
        if is_main_process and k + 1 < self._planner.num_steps(epoch):
            self._next = epoch, k + 1
            self._ahead.submit(self._planner.step, epoch, k + 1, self._dp)
        return plan

    def _take_plan(self, epoch: int, k: int) -> StepPlan:
        """Return the plan that the thread has made, or make another one here."""
        is_planned = self._next == (epoch, k)
        self._next = None
        if self._ahead.process != os.getpid():  # this is a copy in a forked process, which has no thread
            self._ahead = Ahead("plans_ahead")
        if not self._ahead.pending:
            return self._planner.step(epoch, k, self._dp)

        try:  # wait for the plan of another step too, so that only one plan is made at a time
            plan: StepPlan = self._ahead.next_result()
        except Exception:  # this thread plans the step again and raises the error
            is_planned = False
        return plan if is_planned else self._planner.step(epoch, k, self._dp)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread and its plan out of a pickle: a worker process has no such thread."""
        return self.__dict__ | {"_ahead": Ahead("plans_ahead"), "_next": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Reads the sequences of spans and collates them, in the main process or in a worker."""

    dataset: MapDataset
    index: SequenceIndex
    collate: Callable[..., THDBatch] = collate_checked  # samples, their ids and scales -> batch
    vocab_size: int | None = None
    one_each: bool = False  # refuse rows whose position_ids mark several sequences

    def batch(self, spans: Spans, scales: Scales = (None, None, None), microbatch: int = 0) -> THDBatch:
        """Read and collate a pack; without scales, its loss is the mean over this batch."""
        samples = self.index.samples(self.dataset, spans, one_each=self.one_each)
        loss_scale, sequence_scale, token_scale = scales
        batch = self.collate(
            samples,
            sequence_ids=spans.index.tolist(),
            loss_scale=loss_scale,
            sequence_scale=sequence_scale,
            token_scale=token_scale,
            microbatch=microbatch,
        )
        if not samples:
            batch = self._like_others(batch)

        largest = max(int(batch.input_ids.max()), int(batch.prediction_rows.targets.max()))
        if self.vocab_size is not None and largest >= self.vocab_size:
            raise ValueError(
                f"One of the sequences {list(batch.sequence_ids)} has the token id or label {largest}, but "
                f"the model's vocabulary has {self.vocab_size} entries. Use the model's tokenizer."
            )
        return batch

    def _like_others(self, batch: THDBatch) -> THDBatch:
        """Give an empty batch the fields that batches with sequences have, such as labels of classifiers."""
        first = self.dataset[int((self.index.lengths > 0).argmax())]  # row 0 may be bad
        if sequence_label(first, "The first sequence"):
            batch = batch.replace(extras={"labels": sequence_labels([first])[:0]})
        if PARTS in first:
            batch = batch.replace(roles=())
        return batch


class PlannedSteps:
    """The steps of a planner, read and collated by one rank, in this process or in workers."""

    resumes = False
    steps_per_epoch: int | None = None

    def __init__(
        self,
        planner: Planner,
        maker: BatchMaker,
        *,
        rank: int = 0,
        dp: int = 1,
        per_step: int = 1,
        kind: Kind = "pack",
        fixed_order: bool = False,  # every epoch has the batches of the first epoch
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.planner = planner
        self.kind = kind
        self.per_step = per_step
        self.fixed_order = fixed_order
        self.names: Sequence[str] = planner.names
        self._keys = _KeySampler()
        self._maker = maker
        self._dp = dp
        self.loader: DataLoader[Batch] = DataLoader(
            Batches(planner, maker, rank, dp, kind),
            batch_size=None,
            sampler=self._keys,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=begin_worker,
        )

    @cached_property
    def _content(self) -> str | None:
        return content_of_rows(self._maker.dataset, self._maker.index)

    def _num_steps(self, epoch: int) -> int:
        return self.planner.num_steps(0 if self.fixed_order else epoch)

    def length(self, epoch: int) -> int:
        """Return the number of batches of an epoch."""
        return self._num_steps(epoch) * self.per_step

    def steps(self, position: Position, limit: int | None) -> Iterator[RankStep]:
        """Yield an epoch's steps from ``at`` on; a batch is read when ``RankStep.batches`` reaches it."""
        batches_in_epoch = self.length(position.epoch)
        stop = batches_in_epoch if limit is None else min(batches_in_epoch, limit)
        planned_epoch = 0 if self.fixed_order else position.epoch
        # With its own generator, the loader draws nothing from torch's, on which first weights may depend.
        self.loader.generator = own_generator(position.epoch)
        self._keys.left = _keys_of_epoch(planned_epoch, position.step, stop, self.per_step)
        batches = iter(self.loader)
        last_step = self._num_steps(position.epoch) - 1
        for step in range(position.step, -(-stop // self.per_step)):
            yield RankStep(batches=islice(batches, self.per_step), last=step == last_step)

    def source_of(self, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the index of each sequence's source."""
        return self.planner.source_of(ids)

    def tokens_of(self, epoch: int, step: int, limit: int | None = None) -> npt.NDArray[np.int64]:
        """Return the real tokens of each source in a step of all ranks, if an epoch has ``limit`` batches."""
        plan = self.planner.step(0 if self.fixed_order else epoch, step, self._dp)
        # Microbatches of each rank that run; None for all.
        run = None if limit is None or self.kind == "step" else limit - step * self.per_step
        spans = join_spans([part for rank in range(self._dp) for part in plan.microbatches(rank)[:run]])
        tokens = np.zeros(len(self.names), np.int64)
        np.add.at(tokens, self.source_of(spans.index), spans.lengths)
        return tokens

    def state(self, position: Position) -> dict[str, Any]:
        """Return the position, the settings of the plan, and a hash of a few rows."""
        return {
            **self.planner.state(position.epoch, position.step),
            "ended": position.ended,
            "content": self._content,
        }

    def load(self, state: Mapping[str, Any]) -> Position:
        """Return the position in a state; raise if other data or settings saved it."""
        epoch, step = self.planner.resume(state)
        content = state.get("content")
        if content is not None and self._content is not None and content != self._content:
            raise ValueError(
                "The checkpoint was written with other data: the lengths agree, but tokens or labels do not. "
                "Restore the data, or start without the loader's state."
            )
        if step and step == self._num_steps(epoch):
            return Position(epoch=epoch + 1, ended=True)
        return Position(epoch=epoch, step=step, ended=bool(state.get("ended")))


def _keys_of_epoch(epoch: int, first: int, stop: int, per_step: int) -> Iterator[Key]:
    """Yield the keys of an epoch's batches from step ``first`` up to batch ``stop``."""
    # This is a function, not a method, so that the iterator keeps neither loader nor workers alive.
    for batch in range(first * per_step, stop):
        step, microbatch = divmod(batch, per_step)
        yield epoch, step, microbatch, min(per_step, stop - step * per_step)


class _KeySampler(Sampler[Key]):
    """A sampler that gives the keys which are set before each iteration; workers stay between them."""

    def __init__(self) -> None:
        self.left: Iterator[Key] = iter(())

    def __iter__(self) -> Iterator[Key]:
        return self.left


class Batches(TorchDataset[Batch]):
    """Maps a key to a batch of one rank; a pure function, so any worker can make any batch."""

    def __init__(self, planner: Planner, maker: BatchMaker, rank: int, dp: int, kind: Kind) -> None:
        self._planner = planner
        self._maker = maker
        self._rank = rank
        self._kind = kind
        self._plans = PlansAhead(planner, dp)

    def __getitem__(self, key: Key) -> Batch:
        epoch, step, microbatch, num_run = key
        plan = self._plans.step(epoch, step)
        microbatches = plan.microbatches(self._rank)
        if self._kind == "eval":
            return self._maker.batch(microbatches[microbatch])

        # If a Trainer ends the epoch inside a step, only some microbatches run. A ``THDStep`` runs whole.
        scales = plan.step_scales(None if self._kind == "step" else num_run)
        assert scales is not None, "a planner of training data knows its loss tokens"
        if self._planner.sharing is not None:
            return self._dynamic_step(plan, self._planner.sharing, scales)
        if self._kind == "step":
            return THDStep([self._maker.batch(spans, scales, k) for k, spans in enumerate(microbatches)])
        return self._maker.batch(microbatches[microbatch], scales, microbatch)

    def _dynamic_step(
        self, plan: StepPlan, sharing: Sharing, scales: tuple[float, float, float]
    ) -> DynamicStep:
        """Read a step in which packs are shared by groups of ranks; every rank reads its whole packs."""
        microbatches = plan.microbatches(self._rank)
        degrees = plan.degree_table[self._rank].tolist()
        batches = []
        for number, (spans, degree) in enumerate(zip(microbatches, degrees, strict=True)):
            collate = partial(self._maker.collate, align=sharing.align(degree))
            maker = replace(self._maker, collate=collate)
            loss_scale, sequence_scale, token_scale = (scale / degree for scale in scales)
            batches.append(maker.batch(spans, (loss_scale, sequence_scale, token_scale), number))
        return DynamicStep(batches, degrees, digest_of(plan.degree_table))
