"""Jobs on one data set that start, stop, die and change -> every sequence counts once an epoch."""

from __future__ import annotations

import gc
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.data.lives.jobs import LocalJob, RanksJob
from tests.data.lives.line import Line
from tests.data.lives.setups import MOST, SMALLEST, Setup, StepOfRank, check_step, reference, setups, write

_EPOCHS = 6  # after which a line is long enough
_MOST_STEPS = 400  # of an epoch: more is a loader that does not end


class Lives(RuleBasedStateMachine):
    """The lives and deaths of jobs on one data set."""

    with_ranks: ClassVar[bool] = False  # ranks of a stream, in processes of their own
    with_workers: ClassVar[bool] = True
    tally: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="lives-"))
        self.job: LocalJob | RanksJob | None = None
        self.saved: tuple[Any, Line] | None = None  # the last state, and the line up to it
        self.number = 0  # of the saved state
        self.seen: dict[Any, list[StepOfRank]] = {}  # what was run from a position
        self.places: dict[tuple[int, int], int] = {}  # of the sequences of a stream, by shard and row
        self.known: dict[int, list[Any]] = {}  # by capacity, the epochs of an undisturbed run
        self._warnings = warnings.catch_warnings()

    @initialize(setup=setups())
    def begin(self, setup: Setup) -> None:
        gc.freeze()  # what a dropped job leaves is looked for among what came since
        self._warnings.__enter__()
        warnings.simplefilter("ignore")  # a stream without a position says so at every start
        torch.set_num_threads(1)
        write(setup, self.folder)
        self.setup = setup
        self.capacity = setup.capacity
        self.line = Line(setup)
        self.tally["lives"] += 1
        self.tally["of mixtures"] += setup.mixed
        self.tally["of streams"] += setup.stream is not None

    @precondition(lambda self: self.job is None)
    @rule(
        dp=st.sampled_from([1, 2, 4]),
        workers=st.sampled_from([0, 0, 2]),
        capacity=st.sampled_from([None, SMALLEST, 64]),
    )
    def start(self, dp: int, workers: int, capacity: int | None) -> None:
        """Start a job where the last state stands; a capacity that cannot be changed is refused."""
        self.dp = dp if self.setup.stream is None or self.with_ranks else 1
        self.workers = workers if self.with_workers else 0
        expected = self.capacity if capacity is None else capacity
        state = None if self.saved is None else self.saved[0]

        if state is not None and expected != self.capacity and self.setup.stream is None:
            with pytest.raises(ValueError, match=f"capacity was {self.capacity}, is {expected}"):
                self._start(expected, state)
            self.tally["changed capacities refused"] += 1
            return

        self.tally["changed capacities taken"] += state is not None and expected != self.capacity
        self.capacity = expected

        if self.saved is None:
            self.line = Line(self.setup)  # in as many parts as there are ranks
            self.places = {}
        else:
            self.line = self.saved[1].copy()

        self.line.capacities.add(expected)
        self.job = self._start(expected, state)
        self._begin_epoch()
        self.tally["starts"] += 1
        self.tally[f"on {self.dp} ranks"] += 1
        self.tally["with workers"] += self.workers > 0

    def _begin_epoch(self) -> None:
        """Begin where the job stands: a state saved after the last step of an epoch is of the next."""
        assert self.job is not None
        self.since = self.number, 0
        epoch = self.job.epoch()
        last_epoch = len(self.line.epochs) - 1
        assert epoch in (last_epoch, last_epoch + 1), (epoch, last_epoch)
        if epoch > last_epoch:
            self.line.end_epoch()

    def _start(self, capacity: int, state: Any) -> LocalJob | RanksJob:
        apart = self.setup.stream is not None and self.dp > 1
        return (RanksJob if apart else LocalJob)(
            self.setup, self.folder, capacity=capacity, dp=self.dp, workers=self.workers, state=state
        )

    @precondition(lambda self: self.job is not None)
    @rule(steps=st.integers(1, 5))
    def advance(self, steps: int) -> None:
        """Run some steps, over the end of an epoch if it comes."""
        self._advance(steps)

    @precondition(lambda self: self.job is not None and len(self.line.epochs) < _EPOCHS)
    @rule()
    def finish_epoch(self) -> None:
        """Run to the end of the epoch."""
        epoch = len(self.line.epochs)
        for _ in range(_MOST_STEPS):
            if len(self.line.epochs) > epoch:
                return
            self._advance(1)
        raise AssertionError(f"no end of the epoch in {_MOST_STEPS} steps")

    def _advance(self, steps: int) -> None:
        assert self.job is not None
        for of_ranks in self.job.advance(steps):
            if of_ranks is None:
                self.line.end_epoch()
                self.tally["epochs"] += 1
                continue
            check_step(self.setup, of_ranks, self.capacity)
            self._same_as_before(of_ranks)
            self._note_places(of_ranks)
            self.line.add([row for of_rank in of_ranks for rows in of_rank.rows for row in rows])
            self.tally["steps"] += 1

    def _note_places(self, of_ranks: list[StepOfRank]) -> None:
        for of_rank in of_ranks:
            for ids, rows in zip(of_rank.ids, of_rank.rows, strict=True):
                for place, row in zip(ids, rows, strict=True):
                    address = place >> 40, place & (1 << 40) - 1
                    assert self.places.setdefault(address, row[0] // MOST) == row[0] // MOST, (
                        "ids are mixed up"
                    )

    def _same_as_before(self, of_ranks: list[StepOfRank]) -> None:
        """Hold a step against the same one run before, and against that of an undisturbed run."""
        epoch = len(self.line.epochs) - 1
        step = len(self.line.epochs[-1])
        number, after = self.since
        self.since = number, after + 1
        planned = self.setup.stream is None
        place = (epoch, step) if planned else (number, after)
        key = (self.capacity, self.dp, place)
        if key in self.seen:
            self.tally["steps run again alike"] += 1
        assert self.seen.setdefault(key, of_ranks) == of_ranks, f"{key} was run otherwise before"
        if planned:
            whole = self._known(epoch)
            assert sorted(row for of_rank in of_ranks for rows in of_rank.rows for row in rows) == whole[step]

    def _known(self, epoch: int) -> list[Any]:
        if len(self.known.get(self.capacity, [])) <= epoch:
            self.known[self.capacity] = reference(self.setup, self.folder, self.capacity, 2 * epoch + 2)
        return self.known[self.capacity][epoch]

    @precondition(lambda self: self.job is not None)
    @rule()
    def save(self) -> None:
        """Save a state, the same on every rank."""
        assert self.job is not None
        states = self.job.states()
        assert all(_equal(state, states[0]) for state in states), "ranks save different states"
        if self.setup.stream is not None:
            self.line.check_state(states[0], self.places)
        self.number += 1
        self.saved = states[0], self.line.copy()
        self.since = self.number, 0
        self.tally["states saved"] += 1

    @precondition(lambda self: self.job is not None)
    @rule()
    def stop(self) -> None:
        """Save a state and end the job."""
        self.save()
        self._drop()
        self.tally["stops"] += 1

    @precondition(lambda self: self.job is not None)
    @rule(inside=st.booleans())
    def kill(self, inside: bool) -> None:
        """Kill the job without a word, perhaps inside a step."""
        assert self.job is not None
        if inside:
            self.job.begin_a_step()
        self._drop()
        self.tally["kills"] += 1

    @precondition(lambda self: self.job is not None and self.workers)
    @rule()
    def kill_worker(self) -> None:
        """Kill a process that reads: the job ends with a message, or did not need it any more.

        It is dropped in both cases: which one it is depends on time, and what rules may follow must not.
        """
        assert self.job is not None
        try:
            if self.job.kill_worker():
                self.tally["workers killed"] += 1
                self._advance(1)
                for _ in range(2):
                    self.finish_epoch()
        except (RuntimeError, ValueError) as err:
            if "worker" not in str(err):
                raise
            self.tally["jobs ended by a killed worker"] += 1
        self._drop()

    @precondition(lambda self: self.job is not None and self.saved is not None)
    @rule()
    def load_again(self) -> None:
        """Load the last state into the job that runs, and go on from there."""
        assert self.job is not None
        assert self.saved is not None
        if self.setup.stream is not None and self.dp > 1:
            return  # a stream's loader is a collective, and ranks would have to end theirs together
        self.job.load(self.saved[0])
        self.line = self.saved[1].copy()
        self.line.capacities.add(self.capacity)
        self._begin_epoch()
        self.tally["states loaded by a job that ran"] += 1

    def _drop(self) -> None:
        if self.job is not None:
            self.job.kill()
        self.job = None

    def teardown(self) -> None:
        try:
            if self.job is not None and len(self.line.epochs) < _EPOCHS:
                self.finish_epoch()
        finally:
            self._drop()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._warnings.__exit__(None, None, None)
            gc.unfreeze()


def _equal(one: Any, other: Any) -> bool:
    """Compare states, which hold tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


class LivesOfRanks(Lives):
    """The same for streams on ranks that are processes, too."""

    with_ranks = True
