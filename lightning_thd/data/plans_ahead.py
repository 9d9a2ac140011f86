"""A planner -> the plan of a step, made while the step before it runs."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import get_worker_info

from lightning_thd.packing import PackPlanner, StepPlan
from lightning_thd.packing.mixtures import MixturePlanner

Planner = PackPlanner | MixturePlanner


class PlansAhead:
    """Plans steps, each one ahead of its use in a thread, as soon as the step before it is asked for.

    A plan is a pure function of its epoch and step, so making it early changes nothing. Workers of a
    DataLoader make no plan ahead: their batches are ahead already, and the next step is another worker's.
    """

    def __init__(self, planner: Planner, dp: int) -> None:
        self._planner, self._dp = planner, dp
        self._last: tuple[tuple[int, int], StepPlan] | None = None
        self._next: tuple[tuple[int, int], Future[StepPlan]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def step(self, epoch: int, k: int) -> StepPlan:
        """Return the plan of a step; raises whatever the planner raised for it."""
        if self._last is None or self._last[0] != (epoch, k):
            self._last = (epoch, k), self._made(epoch, k)
            self._begin(epoch, k + 1)
        return self._last[1]

    def _made(self, epoch: int, k: int) -> StepPlan:
        ahead, self._next = self._next, None
        if ahead is None or self._process != os.getpid():  # the thread did not come along into a fork
            return self._planner.step(epoch, k, self._dp)
        found = ahead[1].exception()  # waits: one plan at a time is made, whoever makes it
        if ahead[0] == (epoch, k) and found is None:
            return ahead[1].result()
        return self._planner.step(epoch, k, self._dp)

    def _begin(self, epoch: int, k: int) -> None:
        if get_worker_info() is not None or k >= self._planner.num_steps(epoch):
            return
        if self._thread is None or self._process != os.getpid():
            self._process = os.getpid()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="plans_ahead")
        self._next = (epoch, k), self._thread.submit(self._planner.step, epoch, k, self._dp)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the thread and its plan out of a pickle: a worker is a process of its own."""
        return self.__dict__ | {"_thread": None, "_next": None}
