"""Jobs on one data set that start, stop, die and change, in any order: nothing is lost or doubled."""

from __future__ import annotations

import gc
import multiprocessing as mp
import threading

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.data.lives.machine import Lives, LivesOfRanks


def test_lives_and_deaths_of_jobs() -> None:
    class Sample(Lives):
        with_workers = False

    sharp = settings(max_examples=20, stateful_step_count=12, derandomize=True, database=None, deadline=None)
    run_state_machine_as_test(Sample, settings=sharp)
    assert Sample.tally["steps run again alike"] > 0
    assert Sample.tally["changed capacities refused"] > 0
    gc.collect()  # a loader that was dropped may stand in a cycle
    readers = [thread for thread in threading.enumerate() if thread.name == "thd-stream"]
    for reader in readers:  # each makes the steps it was allowed, and ends
        reader.join(30.0)
    assert not [reader for reader in readers if reader.is_alive()]


# A worker's death reaches the process as a signal, wherever it is: some places drop what is raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_long_lives_with_workers_and_ranks() -> None:
    long = settings(max_examples=150, stateful_step_count=25, database=None, deadline=None)
    run_state_machine_as_test(LivesOfRanks, settings=long)
    assert LivesOfRanks.tally["workers killed"] > 0
    assert not mp.active_children()
