"""Loaders of some ranks, in this process or in processes of their own -> steps, states, and deaths."""

from __future__ import annotations

import gc
import io
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.data.lives.setups import Setup, StepOfRank, loader_of, step_of_rank
from tests.ranks import forkserver

_TIMEOUT_S = 120.0  # of one order to the ranks of a job
_Step = list[StepOfRank] | None  # of every rank; None where an epoch ended


def saved(state: Any) -> Any:
    """Write a state and read it back as a checkpoint's is, without pickled objects."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class LocalJob:
    """Ranks in this process, one after the other."""

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        *,
        capacity: int,
        dp: int,
        workers: int,
        state: Any = None,
        ranks: list[int] | None = None,
    ) -> None:
        self._setup = setup
        self._per_step = setup.step.n // dp if setup.batches else 1
        ranks = list(range(dp)) if ranks is None else ranks
        how = {"capacity": capacity, "dp": dp, "workers": workers}
        self._loaders = [loader_of(setup, folder, rank=rank, **how) for rank in ranks]
        self._iterators: list[Any] | None = None
        if state is not None:
            self.load(state)

    def advance(self, steps: int) -> list[_Step]:
        """Run steps on all ranks; None stands for the end of an epoch, and counts as one."""
        steps_of_ranks: list[_Step] = []
        for _ in range(steps):
            if self._iterators is None:
                self._iterators = [iter(loader) for loader in self._loaders]
            of_ranks = [self._one(iterator) for iterator in self._iterators]
            ends = [one is None for one in of_ranks]
            assert all(ends) or not any(ends), f"some ranks ended their epoch: {ends}"
            steps_of_ranks.append(None if all(ends) else [one for one in of_ranks if one is not None])
            if all(ends):
                self._iterators = None
        return steps_of_ranks

    def _one(self, iterator: Any) -> StepOfRank | None:
        batches = [batch for _ in range(self._per_step) if (batch := next(iterator, None)) is not None]
        assert len(batches) in (0, self._per_step), (
            f"an epoch ended inside a step, after {len(batches)} batches"
        )
        if not batches:
            return None
        return step_of_rank(batches if self._setup.batches else batches[0].microbatches)

    def begin_a_step(self) -> None:
        """Run the first batch of the next step alone, where steps come batch by batch."""
        if self._setup.batches and self._per_step > 1 and self._iterators is not None:
            for iterator in self._iterators:
                next(iterator, None)

    def states(self) -> list[Any]:
        return [saved(loader.state_dict()) for loader in self._loaders]

    def epoch(self) -> int:
        """Return the epoch that comes next, or is under way."""
        [epoch] = {loader.epoch for loader in self._loaders}
        return epoch

    def load(self, state: Any) -> None:
        self._iterators = None
        for loader in self._loaders:
            loader.load_state_dict(state)

    def kill_worker(self) -> bool:
        """Kill a process that reads; False where there is none."""
        workers = mp.active_children()
        if not workers or workers[0].pid is None:
            return False
        os.kill(workers[0].pid, signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Leave everything where it is, without a word."""
        self._iterators = None
        self._loaders = []
        gc.collect()


class RanksJob:
    """Ranks in processes of their own, joined by gloo; arguments as for ``LocalJob``."""

    def __init__(
        self, setup: Setup, folder: Path, *, capacity: int, dp: int, workers: int, state: Any = None
    ) -> None:
        ctx = forkserver()
        self._place = tempfile.TemporaryDirectory()
        how = {"capacity": capacity, "dp": dp, "workers": workers, "state": state}
        self._pipes = []
        self._processes = []
        for rank in range(dp):
            here, there = ctx.Pipe()
            process = ctx.Process(target=_rank_main, args=(there, rank, self._place.name, setup, folder, how))
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()

    def advance(self, steps: int) -> list[_Step]:
        of_ranks = self._order("advance", steps)
        steps_of_ranks: list[_Step] = []
        for parts in zip(*of_ranks, strict=True):
            ends = [part is None for part in parts]
            assert all(ends) or not any(ends), f"some ranks ended their epoch: {ends}"
            steps_of_ranks.append(None if all(ends) else [part[0] for part in parts])
        return steps_of_ranks

    def begin_a_step(self) -> None:
        self._order("begin_a_step")

    def states(self) -> list[Any]:
        return [state for states in self._order("states") for state in states]

    def epoch(self) -> int:
        [epoch] = set(self._order("epoch"))
        return int(epoch)

    def load(self, state: Any) -> None:
        self._order("load", state)

    def kill_worker(self) -> bool:
        self._pipes[-1].send(("kill_worker",))
        return bool(self._answers([self._pipes[-1]])[0])

    def kill(self) -> None:
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                rank = psutil.Process(process.pid)
                for one in [*rank.children(recursive=True), rank]:
                    one.kill()
        for process in self._processes:
            process.join(30)
            assert process.exitcode is not None
        self._place.cleanup()

    def _order(self, *order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return self._answers()

    def _answers(self, pipes: list[Any] | None = None) -> list[Any]:
        answers = []
        for pipe in self._pipes if pipes is None else pipes:
            if not pipe.poll(_TIMEOUT_S):
                self.kill()
                raise AssertionError(f"a rank gave no answer in {_TIMEOUT_S:.0f} s")
            answers.append(pipe.recv())
        for kind, value in answers:
            if kind == "raised":
                raise value
        return [value for _, value in answers]


def _rank_main(pipe: Any, rank: int, place: str, setup: Setup, folder: Path, how: dict[str, Any]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=how["dp"])
        job = LocalJob(setup, folder, ranks=[rank], **how)
        pipe.send(("answered", True))
        while True:
            name, *arguments = pipe.recv()
            pipe.send(("answered", getattr(job, name)(*arguments)))
    except (ValueError, RuntimeError) as err:
        pipe.send(("raised", type(err)(str(err))))
    except EOFError:
        pass
    except BaseException:
        pipe.send(("raised", AssertionError(traceback.format_exc())))
    finally:
        time.sleep(60 if _is_open(pipe) else 0)  # until it is killed, as a rank that others may wait for
        os._exit(0)


def _is_open(pipe: Any) -> bool:
    try:
        return not pipe.poll(0)
    except (EOFError, OSError):
        return False
