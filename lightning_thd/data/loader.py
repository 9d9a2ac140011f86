"""A plan and a dataset -> batches of one rank, and a position to resume from on any number of ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDBatch, THDStep
from lightning_thd.data.mixing import MixedRows
from lightning_thd.data.plans_ahead import Planner, PlansAhead
from lightning_thd.data.progress import (
    Progress,
    refuse_lost_rest,
    refuse_other_trainer,
    running_trainer,
    settle_epoch,
)
from lightning_thd.data.shared import make_shared_step
from lightning_thd.data.store.index import SequenceIndex
from lightning_thd.data.store.measure import MapDataset, refuse_second_sequence
from lightning_thd.packing import Spans
from lightning_thd.packing.sharing.planner import SharedPlanner, SharedStepPlan
from lightning_thd.stats import Window

# (epoch, step, microbatch of the rank, microbatches a rank will run of this step)
Key = tuple[int, int, int, int]
# "pack": a microbatch of a training step; "step": all of a rank at once; "eval": the loss of a batch alone
Kind = Literal["pack", "step", "eval"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Reads the sequences of spans and collates them, in the main process or in a worker."""

    dataset: MapDataset
    index: SequenceIndex
    align: Alignment | None = None
    pad_to: int | None = None
    vocab_size: int | None = None
    windows: tuple[Window, ...] = ()
    one_each: bool = False  # refuse rows whose position_ids tell of several sequences

    def batch(
        self, spans: Spans, *, loss_scale: float | None = None, sequence_scale: float | None = None
    ) -> THDBatch:
        """Read and collate a pack; without scales its loss is the mean over this batch."""
        columns = (spans.index, spans.start, spans.stop, spans.continued)
        pieces = zip(*(column.tolist() for column in columns), strict=True)
        samples = [self._sample(*piece) for piece in pieces]
        collate = partial(THDBatch.collate, align=self.align, windows=self.windows)
        try:
            batch = collate(
                samples,
                pad_to=self.pad_to,
                sequence_ids=spans.index.tolist(),
                loss_scale=loss_scale,
                sequence_scale=sequence_scale,
            )
        except (ValueError, TypeError, RuntimeError):
            for i, sample in zip(spans.index.tolist(), samples, strict=True):
                self._name_row(collate, i, sample)
            raise
        largest = max(int(batch.input_ids.max()), int(batch.targets.max()))
        if self.vocab_size is not None and largest >= self.vocab_size:
            self._refuse(batch)
        return batch

    def _sample(self, i: int, start: int, stop: int, continued: bool) -> dict[str, Any]:
        try:
            sample = self.index.sample(self.dataset, i, start, stop, continued)
            if self.one_each and "position_ids" in sample:
                refuse_second_sequence(sample, i)
            return sample
        except ValueError as err:
            if not isinstance(self.dataset, MixedRows):
                raise
            raise ValueError(f"{err} It is {self.dataset.place(i)}.") from err

    def _name_row(self, collate: Callable[..., object], i: int, sample: dict[str, Any]) -> None:
        """Collate a sample alone, and raise an error naming its row if that fails."""
        try:
            collate([sample])
        except (ValueError, TypeError, RuntimeError) as err:
            why = re.sub(r"^Sample 0\b:?", "", str(err)).strip()
            where = f" ({self.dataset.place(i)})" if isinstance(self.dataset, MixedRows) else ""
            raise ValueError(
                f"Sequence {i}{where} {why if why.startswith('has ') else f'is bad: {why}'}"
            ) from err

    def _refuse(self, batch: THDBatch) -> None:
        for what, row, hint in (
            ("token id", batch.input_ids, ""),
            ("label", batch.targets, " In 16 bits without a sign -100 is 65436."),
        ):
            for i, ids in zip(batch.sequence_ids, batch.unpack(row), strict=True):
                if int(ids.max()) >= (self.vocab_size or 0):
                    raise ValueError(
                        f"Sequence {i} has the {what} {int(ids.max())}, but the model's vocabulary has "
                        f"{self.vocab_size} entries. Use the tokenizer the model was made for.{hint}"
                    )


class _Steps(TorchDataset[THDBatch | THDStep]):
    """Maps a key to a batch of one rank; a pure function, so any worker can make any batch."""

    def __init__(self, planner: Planner, maker: BatchMaker, rank: int, dp: int, kind: Kind) -> None:
        self._planner, self._maker, self._rank, self._dp, self._kind = planner, maker, rank, dp, kind
        self._plans = PlansAhead(planner, dp)

    def __getitem__(self, key: Key) -> THDBatch | THDStep:
        epoch, step, micro, counted = key
        plan = self._plans.step(epoch, step)
        if isinstance(plan, SharedStepPlan):
            assert isinstance(self._planner, SharedPlanner)
            return make_shared_step(plan, self._maker, self._planner.sharing, self._rank)
        own = plan.microbatches(self._rank)
        if self._kind == "eval":
            return self._maker.batch(own[micro])
        # Lightning divides by accumulate_grad_batches even where an epoch ends inside a step.
        found = plan.scales(None if self._kind == "step" else counted)
        assert found is not None, "a planner of training data knows its loss tokens"
        scales = {"loss_scale": found[0], "sequence_scale": found[1]}
        if self._kind == "step":
            return THDStep([self._maker.batch(spans, **scales) for spans in own])
        return self._maker.batch(own[micro], **scales)


class _Cursor(Sampler[Key]):
    """The position in an epoch: yields the keys of batches from the next unconsumed one on."""

    def __init__(
        self,
        num_steps: Callable[[int], int],
        per_step: int,
        fixed_order: bool,
        on_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self._num_steps, self.per_step, self.fixed_order = num_steps, per_step, fixed_order
        self._on_epoch = on_epoch
        self.epoch, self.start = 0, 0
        self.limit: int | None = None

    @property
    def num_steps(self) -> int:
        return self._num_steps(0 if self.fixed_order else self.epoch)

    def __len__(self) -> int:
        return self.num_steps * self.per_step

    def __iter__(self) -> Iterator[Key]:
        stop = len(self) if self.limit is None else min(len(self), self.limit)
        epoch = 0 if self.fixed_order else self.epoch
        for batch in range(self.start, stop):
            step, micro = divmod(batch, self.per_step)
            counted = min(self.per_step, stop - step * self.per_step)
            yield (epoch, step, micro, counted)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch from its start, unless it is the one under way."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0
        if self._on_epoch is not None:
            self._on_epoch(len(self))


@dataclass(frozen=True, slots=True)
class _EpochTarget:
    """Offers ``set_epoch`` where Lightning looks for it, without a sampler that Lightning may replace."""

    sampler: _Cursor


class THDLoader:
    """Batches of one rank, epoch after epoch, with a position that is the same number on every rank.

    Args:
        planner: ``packing.PackPlanner`` or anything with its ``len`` and ``step``.
        maker: reads and collates.
        rank: data-parallel rank.
        dp: number of data-parallel ranks.
        per_step: batches a rank hands out for one step; 1 with ``THDStep``.
        kind: ``"pack"`` hands out one ``THDBatch`` after the other, ``"step"`` a ``THDStep``; ``"eval"`` is
            ``"pack"`` with the loss of each batch by itself.
        fixed_order: give the first epoch's batches in every epoch, for evaluation and ``overfit_batches``.
        consumed: number of batches the trainer is done with in this epoch; counts what was handed out when
            absent. What workers have prefetched never counts.
        limit: most batches the trainer takes of an epoch; asked when an epoch begins.
        on_epoch: told the batches of an epoch when it begins; those of a mixture differ.
        on_load: told the batch of the epoch at which a restored loader goes on.
        check: called before each batch; raises where the trainer no longer fits the plan.
        num_workers, prefetch_factor, pin_memory: as in ``torch.utils.data.DataLoader``.
    """

    def __init__(
        self,
        planner: Planner,
        maker: BatchMaker,
        *,
        rank: int = 0,
        dp: int = 1,
        per_step: int = 1,
        kind: Kind = "pack",
        fixed_order: bool = False,
        consumed: Callable[[], int] | None = None,
        limit: Callable[[], int | None] | None = None,
        on_load: Callable[[int], None] | None = None,
        on_epoch: Callable[[int], None] | None = None,
        check: Callable[[], None] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self._cursor = _Cursor(planner.num_steps, per_step, fixed_order, on_epoch)
        self.batch_sampler = _EpochTarget(self._cursor)
        self.planner, self.per_step = planner, per_step
        self._rank, self._dp, self._kind = rank, dp, kind
        self._consumed, self._limit, self._on_load, self._check = consumed, limit, on_load, check
        self._handed_out = 0
        self._began = 0  # the epoch that was iterated last
        self.waited_s = 0.0  # spent so far on reading and collating, or on waiting for workers that do
        self._loader: DataLoader[THDBatch | THDStep] = DataLoader(
            _Steps(planner, maker, rank, dp, kind),
            batch_size=None,
            sampler=self._cursor,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
        )

    @property
    def dataset(self) -> Any:
        """Refuse to be taken apart, as loaders are that are to skip batches or be dealt out to processes.

        Raises:
            AttributeError: saying how a loader of packs goes on.
        """
        raise AttributeError(
            "A THDLoader has no dataset to take batches of: it gives this rank's packs, and its state_dict() "
            "is where it stands. To skip what was used, load that state, as accelerator.load_state and "
            "fabric.load do."
        )

    @property
    def epoch(self) -> int:
        """Return the number of the epoch that is under way, or comes next."""
        return self._cursor.epoch

    def __len__(self) -> int:
        return len(self._cursor)

    def __iter__(self) -> Iterator[THDBatch | THDStep]:
        # A generator starts at the first next(), which Lightning calls after set_epoch.
        cursor, limit, check = self._cursor, self._limit, self._check
        self._tell_of_repeats()
        if self._consumed is None and (followed := self._follow_caller()) is not None:
            limit, check = followed.limit, followed.refuse_other_accumulation
            self._refuse_lost_rest(followed)
        cursor.limit = limit() if limit is not None else None
        self._handed_out = cursor.start
        batches = iter(self._loader)
        while True:
            began = time.perf_counter()
            batch = _take(batches)
            self.waited_s += time.perf_counter() - began
            if batch is None:
                break
            if check is not None:
                check()
            self._handed_out += 1
            yield batch
        cursor.epoch, cursor.start = cursor.epoch + 1, 0
        self._handed_out = 0

    def _follow_caller(self) -> Progress | None:
        """Return the position of the Trainer that was given this loader alone, if one iterates it to train.

        Raises:
            MisconfigurationException: when the loader was made for another.
        """
        trainer = None if self._kind == "eval" else running_trainer(self)
        if trainer is None or self._kind == "eval":
            return None
        refuse_other_trainer(
            trainer, kind=self._kind, rank=self._rank, ranks=self._dp, per_step=self._cursor.per_step
        )
        self._cursor.fixed_order = getattr(trainer, "overfit_batches", 0) > 0
        settle_epoch(trainer)  # while it restores this loader
        return Progress(trainer)

    def _refuse_lost_rest(self, followed: Progress) -> None:
        for state in followed.unread_states():
            if isinstance(state, dict) and "settings" in state:
                epoch, step = self.planner.resume(state)
                batches = self.planner.num_steps(epoch) * self._cursor.per_step
                limit = followed.limit()
                refuse_lost_rest(
                    epoch, step * self._cursor.per_step, batches if limit is None else min(batches, limit)
                )

    def _tell_of_repeats(self) -> None:
        """Warn that an iteration which was broken off begins again, unless it only looked at one batch.

        Lightning ends epochs early by itself, and begins the next one.
        """
        again = self._handed_out - self._cursor.start if self._began == self._cursor.epoch else 0
        self._began = self._cursor.epoch
        if self._consumed is None and not self._cursor.fixed_order and again > 1:
            rank_zero_warn(
                f"A loader of {len(self)} batches is iterated anew after {again} of epoch {self.epoch}, and "
                "gives them again. To go on with the rest, keep one iterator over it, or call "
                "loader.load_state_dict(loader.state_dict()) before; to begin the next epoch, finish this."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in whole steps, the same on every rank and for every number of ranks."""
        consumed = self._handed_out if self._consumed is None else self._consumed()
        return self.planner.state(self._cursor.epoch, consumed // self._cursor.per_step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last whole step of ``state``.

        Raises:
            ValueError: when the data or a setting that decides the plan has changed since.
        """
        epoch, step = self.planner.resume(state)
        self._cursor.epoch, self._cursor.start = epoch, step * self._cursor.per_step
        if step == self._cursor.num_steps:
            self._cursor.epoch, self._cursor.start = epoch + 1, 0
        self._handed_out = self._cursor.start  # saved again before the next batch, it is the same position
        if step and not self._cursor.start:
            return
        followed = self._follow_caller() if self._consumed is None else None
        on_load = self._on_load if followed is None else followed.match
        if on_load is not None:
            on_load(self._cursor.start)


def _take(batches: Iterator[Any]) -> Any:
    """Return the next batch, None at the end.

    Raises:
        RuntimeError: when a worker died while torch read a tensor of it, which names a socket alone.
    """
    try:
        return next(batches, None)
    except ConnectionError as err:
        if "in DataLoader worker" in str(err):  # the data set's own
            raise
        raise RuntimeError(
            f"A DataLoader worker died while its batch was read ({err}), often for want of memory. Lower "
            "num_workers, prefetch_factor or capacity; the system's log may say why."
        ) from err
