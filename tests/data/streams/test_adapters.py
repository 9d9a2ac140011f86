"""torchdata nodes, MosaicML Streaming, iterables with a state, and datasets that split themselves by rank."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from lightning_thd.data.streams.shards import is_stream, open_shards
from lightning_thd.data.streams.shards.own_split import asked_rank
from tests.data.streams.jobs import counted, module, run
from tests.ranks import run_ranks

# The real ones where they are installed; else classes with what is used of them, written from their sources
# (torchdata 0.11, mosaicml-streaming 0.13).
try:
    from torchdata.nodes import BaseNode
except ImportError:

    class BaseNode(Iterator[Any]):  # type: ignore[no-redef]
        """A node: ``reset(state)`` before the first ``next``, ``state_dict()`` in between."""

        def __init__(self) -> None:
            self._begun = False

        def reset(self, initial_state: dict[str, Any] | None = None) -> None:
            self._begun = True

        def __next__(self) -> Any:
            if not self._begun:
                self.reset(None)
            return self.next()

        def state_dict(self) -> dict[str, Any]:
            return self.get_state()

        def next(self) -> Any:
            raise NotImplementedError

        def get_state(self) -> dict[str, Any]:
            raise NotImplementedError

    BaseNode.__module__ = "torchdata.nodes.base_node"


def wait_for_readers() -> None:
    """Wait until the readers of loaders that are gone have noticed it."""
    gc.collect()  # of other tests of this process too
    for thread in threading.enumerate():
        if thread.name == "thd-stream":
            thread.join(10.0)
            assert not thread.is_alive()


class Numbers(BaseNode):  # type: ignore[misc, valid-type]
    """Counts to 300, and how many records it ever made."""

    made = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.at = 0 if initial_state is None else int(initial_state["at"])

    def next(self) -> dict[str, Any]:
        if self.at == 300:
            raise StopIteration
        self.at += 1
        type(self).made += 1
        return {"input_ids": np.full(self.at % 7 + 2, self.at % 50)}

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}


class Stateless(Numbers):
    def get_state(self) -> dict[str, Any]:
        raise NotImplementedError(type(self))


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


@pytest.mark.parametrize("kind", [Numbers, Stateless, Resumable, Continuing])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:The stream is a generator", "ignore:.*forking the process")
def test_a_source_with_a_state_goes_on_without_what_it_gave(kind: Any, workers: int) -> None:
    assert is_stream(kind())
    kwargs: dict[str, Any] = {"n": 20, "window": 30, "num_workers": workers}
    whole, *_ = run(kind(), epochs=2, **kwargs)
    assert counted([(whole, None)]) == dict.fromkeys(range(300), 2)
    for cut in (1, 11, 18):
        first, state, _ = run(kind(), steps=cut, epochs=2, **kwargs)
        wait_for_readers()
        kind.made = 0
        rest, *_ = run(kind(), state=state, steps=1, **kwargs)
        assert first + rest == whole[: cut + 1]
        if kind is not Stateless and not workers:
            assert kind.made < 160  # not those before the last state, and each that was pending twice


@pytest.mark.filterwarnings("ignore:The stream is a generator")
@pytest.mark.parametrize("steps", [1, 2, 12])
def test_a_source_that_was_left_is_begun_anew(steps: int) -> None:
    source, kwargs = Continuing(), {"n": 20, "window": 30}
    whole, *_ = run(Continuing(), epochs=2, **kwargs)
    _, state, _ = run(Continuing(), steps=17, epochs=2, **kwargs)  # in the second pass, from which some wait
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


class Counted(Drawn):
    """One that reaches other processes, as it stands."""

    def __init__(self) -> None:
        self._records: Any = iter(list(records()))


class Reset(Drawn):
    """One that begins anew whenever it is iterated."""

    def __iter__(self) -> Reset:
        self._records = records()
        return self


def one_object(made: Iterator[Any]) -> Callable[[], Iterator[Any]]:
    return lambda: made


@pytest.mark.filterwarnings("ignore:The stream is a generator")
@pytest.mark.parametrize(
    "make",
    [records, lambda: map(dict, records()), Drawn, Reset, lambda: records, lambda: one_object(Drawn())],
)
def test_an_iterator_is_not_read_twice(make: Callable[[], Any]) -> None:
    kwargs: dict[str, Any] = {"n": 20, "window": 30}
    whole, state, _ = run(make(), steps=7, **kwargs)
    again = type(make()).__name__ == "Reset" or make() is records
    for how in ({"state": state, "steps": 2}, {"epochs": 2}):
        if again:
            rest, *_ = run(make(), **kwargs, **how)
            assert len(rest) == (2 if "state" in how else 30)
            assert "state" in how or rest[:7] == whole
        else:
            with pytest.raises(
                ValueError, match="object can be read one time, and it was. Pass the function"
            ):
                run(make(), **kwargs, **how)


def test_a_shard_that_was_read_reaches_spawned_workers() -> None:
    (shard,) = open_shards(records, parts=1).shards
    next(shard.read(0))
    again = pickle.loads(pickle.dumps(shard))
    assert next(again.read(0))[0] == 0  # a generator of its own
    (shard,) = open_shards(Counted(), parts=1).shards
    next(shard.read(0))
    with pytest.raises(ValueError, match="can be read one time, and it was"):
        next(pickle.loads(pickle.dumps(shard)).read(0))


def test_a_node_that_repeats_warns_only_where_it_has_no_state(recwarn: Any) -> None:
    for kind, warns in ((Numbers, False), (Stateless, True)):
        _, state, _ = run(kind(), steps=8, n=20, window=30)
        recwarn.clear()
        module(kind(), n=20).train_steps().load_state_dict(state)
        assert any("begins again" in str(one.message) for one in recwarn) == warns


class Mosaic:
    """What is used of ``streaming.StreamingDataset``, which refuses to be iterated here."""

    class _Stream:
        def __init__(self, choose: int) -> None:
            self.choose = choose

    def __init__(self, counts: list[int], choose: int | None = None) -> None:
        self.samples_per_shard = np.array(counts)
        self.samples_per_stream = np.array([sum(counts)])
        self.streams = [self._Stream(sum(counts) if choose is None else choose)]

    def __len__(self) -> int:
        return sum(self.samples_per_shard) // 2  # as its own: the part of this rank

    def __getitem__(self, i: int) -> dict[str, Any]:
        assert 0 <= i < sum(self.samples_per_shard)
        return {"input_ids": np.full(i % 7 + 2, i % 50)}

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("its own iterator splits by rank")


Mosaic.__module__, Mosaic.__name__ = "streaming.base.dataset", "StreamingDataset"


def mosaic_job(counts: list[int]) -> Any:
    return run(Mosaic(counts), n=10, window=8)


def test_mosaicml_shards_are_shared_out_and_read_by_number() -> None:
    counts = [30, 7, 12, 1]
    ranks = run_ranks(mosaic_job, 2, counts, timeout_s=60)
    used = counted(ranks)
    assert used == {shard << 40 | row: 1 for shard, count in enumerate(counts) for row in range(count)}
    assert is_stream(Mosaic(counts))
    with pytest.raises(ValueError, match=r"StreamingDataset draws \[99\] samples of its streams, which hold"):
        open_shards(Mosaic(counts, choose=99), parts=1)


def test_a_real_mosaicml_dataset(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    with streaming.MDSWriter(
        out=str(tmp_path), columns={"input_ids": "ndarray:int64"}, size_limit=400
    ) as out:
        for i in range(50):
            out.write({"input_ids": np.full(i % 7 + 2, i % 50)})
    seen, *_ = run(streaming.StreamingDataset(local=str(tmp_path), batch_size=1), n=10)
    rows = [row for step in seen for batch in step["tokens"] for row in batch]
    assert sorted(map(tuple, rows)) == sorted((i % 50,) * (i % 7 + 2) for i in range(50))


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
        yield from ({"input_ids": [1, 2]} for _ in range(dist.get_rank(), 20, dist.get_world_size()))


class WasSplit(IterableDataset):
    def __init__(self) -> None:
        self.files = ["a", "b"][dist.get_rank() :: 2]

    def __iter__(self) -> Iterator[Any]:
        return iter([{"input_ids": [1, 2]}] * 20)


def helper() -> int:
    return int(os.environ["WORLD_SIZE"])


def asks_environment() -> Iterator[Any]:
    yield from ({"input_ids": [1, 2]} for _ in range(20 // helper()))


def asks_nothing() -> Iterator[Any]:
    yield from ({"input_ids": [1, 2]} for _ in range(20))


def split_job() -> list[str]:
    rank = dist.get_rank()
    sources: list[Any] = [
        AsksTorch(),
        WasSplit(),
        asks_environment,
        lambda: iter([{"input_ids": [rank, 2]}] * 20),
        asks_nothing,
        lambda: AsksTorch(),
    ]
    found = []
    for source in sources:
        try:
            module(source, n=4).train_steps()
            found.append("taken")
        except ValueError as err:
            found.append(str(err))
    return found


def test_a_source_that_splits_itself_by_rank_is_refused() -> None:
    for found in run_ranks(split_job, 2, timeout_s=60):
        assert "AsksTorch uses 'get_rank', so it may split itself by rank" in found[0]
        assert "make(part, parts)" in found[0]
        assert "WasSplit holds files=['a'] on rank 0 and ['b'] on rank 1, so it was split" in found[1]
        assert "asks_environment uses 'WORLD_SIZE'" in found[2]
        assert "holds rank=0 on rank 0 and 1 on rank 1" in found[3]
        assert found[4:] == ["taken", "taken"]


def test_what_code_asks_for() -> None:
    assert asked_rank(AsksTorch()) in ("get_rank", "get_world_size")
    assert asked_rank(asks_nothing) is None
    assert asked_rank(partial(asks_environment)) is None  # arguments are compared, not followed
    assert asked_rank(iter([])) is None
