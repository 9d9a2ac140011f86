"""Plans made one step ahead are the planner's own, whoever asks and in whatever order."""

from __future__ import annotations

import os
import pickle
import threading
import time

import numpy as np
import pytest

from lightning_thd.data.loader import PlansAhead
from lightning_thd.packing import PackPlanner, Packs, Sequences, StepPlan

LENGTHS = np.random.default_rng(0).integers(1, 200, 500)


class Watched(PackPlanner):
    """Notes who made which plan, and may take its time or fail."""

    made: list[tuple[int, int, bool]]
    seconds = 0.0
    fails: frozenset[int] = frozenset()

    def step(self, epoch: int, k: int, dp: int = 1) -> StepPlan:
        self.made.append((epoch, k, threading.current_thread() is threading.main_thread()))
        time.sleep(self.seconds)
        if k in self.fails:
            raise ValueError(f"no plan {k}")
        return super().step(epoch, k, dp)


def watched(global_batch: Packs | Sequences) -> Watched:
    planner = Watched(LENGTHS, 512, global_batch=global_batch, window=64)
    planner.made = []
    return planner


def same(a: StepPlan, b: StepPlan) -> bool:
    of_a, of_b = ([p.tolist() for r in plan.indices_by_rank() for p in r] for plan in (a, b))
    return of_a == of_b


@pytest.mark.parametrize("global_batch", [Packs(4), Sequences(32)])
def test_plans_are_the_planners_own_in_any_order(global_batch: Packs | Sequences) -> None:
    planner = watched(global_batch)
    plain = PackPlanner(LENGTHS, 512, global_batch=global_batch, window=64)
    ahead = PlansAhead(planner, 2)
    asked = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 5), (0, 3), (1, 0), (0, len(plain) - 1), (1, 0), (1, 1)]
    for epoch, k in asked:
        assert same(ahead.step(epoch, k), plain.step(epoch, k, 2))


def test_the_next_plan_is_made_by_another_thread_while_the_step_runs() -> None:
    planner = watched(Sequences(32))
    planner.seconds = 0.2
    ahead = PlansAhead(planner, 2)
    ahead.step(0, 0)
    ahead.step(0, 0)
    until = time.monotonic() + 30  # the step
    while len(planner.made) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    ahead.step(0, 1)
    ahead.step(0, 2)
    assert planner.made[:3] == [(0, 0, True), (0, 1, False), (0, 2, False)]


def test_an_error_comes_with_the_step_that_has_it() -> None:
    planner = watched(Sequences(32))
    planner.fails = frozenset({1})
    ahead = PlansAhead(planner, 1)
    ahead.step(0, 0)
    assert same(ahead.step(0, 2), PackPlanner(LENGTHS, 512, global_batch=Sequences(32)).step(0, 2))
    ahead.step(0, 0)
    with pytest.raises(ValueError, match="no plan 1"):
        ahead.step(0, 1)


def test_a_copy_and_a_fork_leave_the_thread_behind() -> None:
    plain = PackPlanner(LENGTHS, 512, global_batch=Sequences(32))
    ahead = PlansAhead(plain, 1)
    ahead.step(0, 0)
    copy = pickle.loads(pickle.dumps(ahead))
    assert same(copy.step(0, 1), plain.step(0, 1))
    child = os.fork()
    if not child:
        right = same(ahead.step(0, 1), plain.step(0, 1)) and same(ahead.step(0, 2), plain.step(0, 2))
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
