"""Streams: work of the ranks beside Megatron-LM's scheduler, bytes moved, time of a plan, memory.

``python -m benchmarks.streams`` draws, for 1, 2 and 4 ranks that each read 256 sequences, Megatron-LM's mock
lengths (lognormal) and a heavy tail from skewed shards. It prints the work of the slowest rank of every
microbatch, summed, of the mean, for our schedule and for Megatron-LM's default scheduler simulated on the
same stream; the bytes that a token costs on the wire; the time of a plan for up to 4,096 ranks of 16
sequences; how much of a step of a small model waits for its stream, on one rank and on four; and the memory
over 2,000 steps, on one rank and on two.
"""

from __future__ import annotations

import os
import pickle
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from benchmarks.balance import megatron
from benchmarks.results import less
from lightning_thd import Sequences, THDDataModule
from lightning_thd.batch import THDStep
from lightning_thd.data.loader import RankStep
from lightning_thd.data.streams import Stream
from lightning_thd.data.streams.engine import Engine
from lightning_thd.data.streams.intake import Tally
from lightning_thd.data.streams.samples import META
from lightning_thd.data.streams.schedule import POOL, PlannedStep, Scheduling, Table, plan_steps, work_of
from lightning_thd.packing import Cost
from lightning_thd.packing.lengths import make_slots

IntArray = npt.NDArray[np.int64]
CAPACITY, WINDOW, ROUNDS = 8192, 256, 10
SAMPLE_BYTES = 180  # of a pickled sample beside its ids and labels
GOAL_WORK, GOAL_BYTES, GOAL_MS = 1.05, 9.0, 20.0


def mock(rng: np.random.Generator, count: int) -> IntArray:
    """Draw the lengths of Megatron-LM's mock data: mean 4096 before they are clipped to 1024 and 8192."""
    return np.clip(rng.lognormal(np.log(4096) - 1.1**2 / 2, 1.1, count), 1024, 8192).astype(np.int64)


def heavy(rng: np.random.Generator, count: int) -> IntArray:
    """Draw a heavy tail, sorted in parts, as shards that were written by source are."""
    lengths = np.clip(200 * (1 + rng.pareto(1.1, count)), 16, CAPACITY).astype(np.int64)
    return np.sort(lengths)


def pool_of(lengths: IntArray, dp: int) -> Table:
    """Let every rank hold a run of the sequences, as readers of skewed shards do."""
    pool = np.zeros(len(lengths), POOL)
    pool["length"], pool["row"] = lengths, np.arange(len(lengths))
    pool["bytes"] = 8 * lengths + SAMPLE_BYTES  # with labels
    pool["holder"] = np.arange(len(lengths)) * dp // len(lengths)
    return pool


def gathered(each: int) -> int:
    """Return the bytes of a message about some sequences of a rank, which all others receive."""
    table = np.zeros(each, META)
    return len(pickle.dumps((None, table, [False], [Tally()], {}, {0: {"label": ""}})))


def moved_bytes(step: PlannedStep) -> int:
    """Return the bytes that a step moves between all ranks together."""
    return int(step.table["bytes"][step.table["holder"] != step.targets()].sum())


def slowest(work: npt.NDArray[np.float64]) -> float:
    """Return the work of the slowest rank of every microbatch, summed, of the mean rank's."""
    return float(work.max(0).sum() * len(work) / work.sum())


def balance_of(dp: int, draw: Any) -> tuple[float, float, float]:
    """Return the slowest rank of ours and of Megatron-LM's, means of rounds, and bytes a token."""
    cost, rng = Cost(), np.random.default_rng(dp)
    how = Scheduling(step=Sequences(WINDOW * dp), slots=make_slots(CAPACITY, None), cost=cost, dp=dp)
    ours, peer, moved, tokens = [], [], 0, 0
    for _ in range(ROUNDS):
        lengths = draw(rng, WINDOW * dp)
        (step,), _ = plan_steps(pool_of(lengths, dp), how, ended=False)
        assert np.add.reduceat(step.table["length"], step.offsets[:-1]).max() <= CAPACITY
        ours.append(slowest(np.add.reduceat(work_of(step.table, cost), step.offsets[:-1]).reshape(dp, -1)))
        plan = megatron(lengths, CAPACITY, dp, cost)
        peer.append(slowest(np.array([[float(cost(lengths[ids]).sum()) for ids in rank] for rank in plan])))
        moved += moved_bytes(step) + dp * gathered(WINDOW) * (dp > 1)
        tokens += int(lengths.sum())
    return float(np.mean(ours)), float(np.mean(peer)), moved / tokens


def plan_ms(dp: int, each: int) -> float:
    """Return the CPU time of a plan for ranks that read some sequences each."""
    how = Scheduling(step=Sequences(dp * each), slots=make_slots(CAPACITY, None), cost=Cost(), dp=dp)
    pool = pool_of(mock(np.random.default_rng(0), dp * each), dp)
    found = []
    for _ in range(3):
        started = time.process_time()
        plan_steps(pool, how, ended=False)
        found.append(time.process_time() - started)
    return 1e3 * min(found)


def endless(part: int, parts: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(part)
    while True:
        yield {"input_ids": rng.integers(0, 1000, int(rng.integers(16, 512)))}


def steps_of(rank: int, ranks: int, each: int) -> Iterator[THDStep]:
    """Iterate over the steps of an endless stream that every rank reads a part of."""
    data = THDDataModule(
        Stream(source=endless, window=64), capacity=2048, global_batch=Sequences(each * ranks)
    )
    data.attach(rank=rank, ranks=ranks)
    return iter(data.train_steps())


def train(rank: int, ranks: int, count: int) -> tuple[float, float, float, float]:
    """Train a small model; return a step's seconds, those that waited, its CPU seconds, the stream's."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 256), *layers, torch.nn.Linear(256, 1000))
    stream_s, made = [0.0], Engine.make

    def timed(engine: Engine) -> RankStep | None:
        started = time.thread_time()
        step = made(engine)
        stream_s[0] += time.thread_time() - started
        return step

    Engine.make = timed  # type: ignore[method-assign]
    steps, waited, spent, cpu = steps_of(rank, ranks, 16), 0.0, 0.0, 0.0
    for number in range(count + 2):
        if number == 2:
            stream_s[0], cpu = 0.0, time.process_time()
        started = time.perf_counter()
        step = next(steps)
        got = time.perf_counter()
        for batch in step.microbatches:
            torch.nn.functional.cross_entropy(model(batch.input_ids), batch.targets).backward()
        for parameter in model.parameters():
            if ranks > 1:
                dist.all_reduce(parameter.grad)
            parameter.grad = None
        if number >= 2:
            waited, spent = waited + got - started, spent + time.perf_counter() - started
    return spent / count, waited / count, (time.process_time() - cpu) / count, stream_s[0] / count


def grow(rank: int, ranks: int, count: int) -> float:
    """Return by how many MiB the largest memory of the process grows over steps, after a tenth of them."""
    steps, before = steps_of(rank, ranks, 16), 0.0
    for number in range(count):
        next(steps)
        if number == count // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before


def on_ranks(work: Callable[[int, int, int], Any], ranks: int, count: int) -> list[Any]:
    """Run a measurement on gloo ranks of one thread each, and return what each found."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, folder, work, count), nprocs=ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def _rank(rank: int, ranks: int, folder: str, work: Callable[[int, int, int], Any], count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found = work(rank, ranks, count)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # the thread that reads ahead waits in a collective


def main(argv: list[str] | None = None) -> None:
    for name, draw in (("mock", mock), ("heavy tail", heavy)):
        for dp in (1, 2, 4):
            ours, peer, cost = balance_of(dp, draw)
            print(
                f"{name:10} dp {dp}: slowest rank {ours:.3f}, Megatron-LM {peer:.3f}, {cost:.2f} bytes/token"
            )
            less(f"slowest rank, {name}, dp {dp}", ours, "", GOAL_WORK, peer=peer)
            less(f"bytes a token, {name}, dp {dp}", cost, "B", GOAL_BYTES)
    for dp in (64, 512, 4096):
        took = plan_ms(dp, 16)
        told = dp * gathered(16) / 1e6
        print(f"plan for {dp} ranks x 16 sequences: {took:.1f} ms, {told:.2f} MB of lengths")
        less(f"plan, {dp} ranks x 16", took, "ms", GOAL_MS)
    for dp in (1, 4):
        spent, waited, cpu, stream = np.max(on_ranks(train, dp, 30), axis=0).tolist()
        print(
            f"dp {dp}: step {spent * 1e3:.0f} ms, {waited * 1e3:.1f} ms of it wait for the stream; "
            f"CPU {cpu * 1e3:.0f} ms a step, {stream * 1e3:.1f} ms of it the stream's"
        )
        less(f"share of a step that waits for its stream, dp {dp}", waited / spent, "", 0.02)
        less(f"share of a step's CPU seconds that its stream takes, dp {dp}", stream / cpu, "", 0.2)
    for dp in (1, 2):
        grown = max(on_ranks(grow, dp, 2000))
        print(f"memory grown over 2,000 steps, dp {dp}: {grown:.1f} MiB")
        less(f"memory grown over 2,000 steps, dp {dp}", grown, "MiB", 20)


if __name__ == "__main__":
    main()
