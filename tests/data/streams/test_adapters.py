"""Iterables with a state, iterators that are read once, and datasets that split themselves by rank."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from lightning_thd.data.streams.shards import is_stream
from tests.data.streams.jobs import counted, module, run
from tests.ranks import run_ranks


def wait_for_readers() -> None:
    """Wait until the readers of loaders that are gone have noticed it."""
    gc.collect()  # of other tests of this process too
    for thread in threading.enumerate():
        if thread.name == "thd-stream":
            thread.join(10.0)
            assert not thread.is_alive()


class Resumable(IterableDataset):
    """An iterable with the two methods that torchdata's loaders call."""

    made = 0

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        first, self._at = self._at, 0
        for i in range(first, 300):
            self._now = i + 1
            type(self).made += 1
            yield {"input_ids": np.full(i % 7 + 2, i % 50)}

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


class Continuing(Resumable):
    """One that goes on where it was left, however that was."""

    def __iter__(self) -> Iterator[Any]:
        while self._at < 300:
            self._at += 1
            type(self).made += 1
            yield {"input_ids": np.full((self._at - 1) % 7 + 2, (self._at - 1) % 50)}
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}


@pytest.mark.parametrize("kind", [Resumable, Continuing])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:The stream is a generator", "ignore:.*forking the process")
def test_a_source_with_a_state_goes_on_without_what_it_gave(kind: Any, workers: int) -> None:
    assert is_stream(kind())
    kwargs: dict[str, Any] = {"n": 20, "window": 30, "num_workers": workers}
    whole, *_ = run(kind(), epochs=2, **kwargs)
    assert counted([(whole, None)]) == dict.fromkeys(range(300), 2)
    for cut in (1, 11, 18) if workers else (11,):
        first, state = run(kind(), steps=cut, epochs=2, **kwargs)
        wait_for_readers()
        kind.made = 0
        rest, *_ = run(kind(), state=state, steps=1, **kwargs)
        assert first + rest == whole[: cut + 1]
        if not workers:
            assert kind.made < 160  # not those before the last state, and each that was pending twice


@pytest.mark.filterwarnings("ignore:The stream is a generator")
@pytest.mark.parametrize("steps", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_a_source_that_was_left_is_begun_anew(steps: int) -> None:
    source, kwargs = Continuing(), {"n": 20, "window": 30}
    whole, *_ = run(Continuing(), epochs=2, **kwargs)
    _, state = run(Continuing(), steps=17, epochs=2, **kwargs)  # in the second pass, from which some wait
    for _ in range(2):  # the same object again: first as it came, then where it was left
        rest, *_ = run(source, state=state, steps=steps, **kwargs)
        assert rest == whole[17 : 17 + steps]
        wait_for_readers()
    begun, *_ = run(source, steps=5, **kwargs)
    assert begun == whole[:5]


def records() -> Iterator[dict[str, Any]]:
    return ({"input_ids": np.full(i % 7 + 2, i % 50)} for i in range(300))


class Drawn:
    """An iterator of a class of its own."""

    def __init__(self) -> None:
        self._records = records()

    def __iter__(self) -> Drawn:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._records)


def one_object(made: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    return lambda: made


@pytest.mark.filterwarnings("ignore:The stream is a generator")
def test_a_function_is_read_again_and_an_iterator_is_not() -> None:
    kwargs: dict[str, Any] = {"n": 20, "window": 30}
    whole, state = run(records, steps=7, **kwargs)
    assert len(run(records, state=state, steps=2, **kwargs)[0]) == 2
    assert run(records, epochs=2, **kwargs)[0][:7] == whole
    generator = records()
    for made in (lambda: generator, Drawn, lambda: map(dict, records()), lambda: one_object(Drawn())):
        with pytest.raises(ValueError, match="object can be read one time, and it was. Pass the"):
            run(made(), epochs=2, **kwargs)


class OfWorker(IterableDataset):
    """Splits itself by worker, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, 20, every):
            yield {"input_ids": [i, i + 1]}


@pytest.mark.filterwarnings("ignore:.*forking the process")
def test_datasets_that_split_themselves_by_worker_give_all(tmp_path: Path) -> None:
    seen, *_ = run([OfWorker(), OfWorker()], n=10, num_workers=2)
    rows = sorted(row[0] for step in seen for batch in step["tokens"] for row in batch)
    assert rows == sorted([*range(20), *range(20)])


class AsksTorch(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": [i, 2]} for i in range(dist.get_rank(), 20, dist.get_world_size()))


def asks_nothing() -> Iterator[Any]:
    yield from ({"input_ids": [1, 2]} for _ in range(20))


def split_job() -> list[str]:
    found = []
    rank, once = dist.get_rank(), asks_nothing()
    for source in (AsksTorch(), lambda: iter([{"input_ids": [rank, 2]}] * 20), asks_nothing, lambda: once):
        try:
            list(module(source, n=4).train_steps())
            found.append("taken")
        except ValueError as err:
            found.append(str(err))
    return found


def test_a_source_that_splits_itself_by_rank_is_refused() -> None:
    for found in run_ranks(split_job, 2, timeout_s=60):
        assert "AsksTorch has other first records on rank 1 than on rank 0, so it splits" in found[0]
        assert "make(part, parts)" in found[0]
        assert "has other first records on rank 1" in found[1]
        assert found[2] == "taken"
        assert "can be read one time, and it was" in found[3]  # compared between ranks, it is read
