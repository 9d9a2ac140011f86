"""Start a few real ranks, of gloo or NCCL, in seconds and bring their results, or the first error, back."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

# "gloo" has CPUs, "nccl" GPUs; "imagined" has GPUs and an NCCL that do not exist: tests/imagined/README.md.
Kind: TypeAlias = Literal["gloo", "imagined", "nccl"]
_JOIN = {"gloo": ("tests.ranks", "join_ranks"), "imagined": ("tests.imagined.nccl", "join_gpus")}
_JOIN["nccl"] = ("tests.gpu.nccl", "join_gpus")
KIND: Kind = "imagined" if os.environ.get("IMAGINED_RANKS") else "gloo"  # of every rank of the session
_LAST_WORDS_S = 3.0  # after the first error, until the other ranks are killed


class RankError(AssertionError):
    """A rank raised, died, or did not finish in time."""


@contextmanager
def pretended_ranks(world_size: int, *, backend: str = "fake") -> Iterator[None]:
    """Make this process rank 0 of a job whose other ranks do not exist, in torchrun's environment."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group
    store = dist.HashStore() if backend == "gloo" else FakeStore()

    def group_of_that_backend(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": backend})

    with mock.patch.dict(os.environ, environment_of(0, world_size)):
        dist.init_process_group(backend, store=store, rank=0, world_size=world_size)
        try:
            with (
                mock.patch.object(dist, "new_group", group_of_that_backend),
                # It waits by a barrier that gloo alone has.
                mock.patch(
                    "lightning.fabric.utilities.distributed._InfiniteBarrier.__exit__", return_value=None
                ),
            ):
                yield
        finally:
            dist.destroy_process_group()


def environment_of(rank: int, world_size: int) -> dict[str, str]:
    """Return torchrun's environment of a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # never bound: the groups are made over a file, or over nothing
        "TORCHELASTIC_RUN_ID": "tests",
    }


def forkserver() -> Any:
    """Return the context whose processes have torch, lightning and transformers imported when they begin."""
    ctx = mp.get_context("forkserver")
    ctx.set_forkserver_preload(["tests.preload"])
    return ctx


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 180.0, kind: Kind = KIND
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` ranks and return the results in rank order.

    The process group is initialised before ``fn`` runs, and the environment is torchrun's, so a Lightning
    Trainer inside ``fn`` joins it without launching anything.
    """
    with tempfile.TemporaryDirectory() as folder, started(fn, world_size, args, folder, kind) as job:
        return _collect(*job, time.monotonic() + timeout_s)


@contextmanager
def started(
    fn: Callable[..., Any], world_size: int, args: tuple[object, ...], folder: str, kind: Kind = KIND
) -> Iterator[tuple[list[Any], Any]]:
    """Start ranks that meet in a folder, and kill them at the end; the processes and the queue of results."""
    ctx = forkserver()
    results: Any = ctx.Queue()
    common = (os.getpid(), world_size, folder, results, fn, args, kind)
    ranks = [ctx.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(world_size)]
    for process in ranks:
        process.start()
    try:
        yield ranks, results
    finally:
        for process in ranks:
            process.kill()
            process.join()


def join_ranks(rank: int, world_size: int, store: Path) -> None:
    """Make the process group of gloo that meets in a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def _collect(ranks: list[Any], results: mp.Queue[tuple[int, bool, Any]], deadline: float) -> list[Any]:
    collected: dict[int, Any] = {}
    errors: dict[int, str] = {}
    until = deadline

    while len(collected) + len(errors) < len(ranks):
        try:
            rank, ok, value = results.get(timeout=0.1)
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if process.exitcode not in (None, 0) and rank not in collected:
                    errors.setdefault(rank, f"ranks [{rank}] died with exit codes [{process.exitcode}]")
            if time.monotonic() > until:
                break
        else:
            if ok:
                collected[rank] = pickle.loads(value)
            else:
                errors[rank] = f"rank {rank} failed:\n{value}"
        if errors:  # what a rank says whose neighbour is gone may come before the cause
            until = min(until, time.monotonic() + _LAST_WORDS_S)

    if not errors and len(collected) < len(ranks):
        missing = [rank for rank in range(len(ranks)) if rank not in collected]
        raise RankError(f"ranks {missing} gave no result in time")

    if errors:
        raise RankError("\n".join(error for _, error in sorted(errors.items())))
    return [collected[rank] for rank in range(len(ranks))]


def _end_with(asking: int) -> None:
    """End this rank when the process that asked for it is gone, which a SIGKILL leaves no time."""
    with suppress(ProcessLookupError):
        while True:
            os.kill(asking, 0)
            time.sleep(1.0)
    os._exit(1)


def _rank_main(
    rank: int,
    asking: int,
    world_size: int,
    folder: str,
    results: mp.Queue[tuple[int, bool, Any]],
    fn: Callable[..., Any],
    args: tuple[object, ...],
    kind: Kind,
) -> None:
    import torch
    import torch.distributed as dist

    threading.Thread(target=_end_with, args=(asking,), daemon=True).start()
    os.environ.update(environment_of(rank, world_size))
    if kind == "gloo":  # several ranks of gloo have no GPU each
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    try:
        module, name = _JOIN[kind]
        getattr(importlib.import_module(module), name)(rank, world_size, Path(folder, "store"))
        value = fn(*args)
        save_coverage()  # the parent kills ranks once it has the results
        # Bytes, because a queue sends tensors as files that close when this process ends.
        results.put((rank, True, pickle.dumps(on_cpu(value))))
        dist.barrier()
    except BaseException:
        save_coverage()
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        os._exit(0)  # skips gloo's teardown, which may wait for peers that are gone


def on_cpu(value: Any) -> Any:
    """Return a result with its tensors on the CPU."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda x: x.detach().cpu() if x.is_cuda else x, value)


def save_coverage() -> None:
    """Write down which lines this process has met, where coverage is measured: what ends by a kill cannot."""
    measured = sys.modules.get("coverage")
    running = measured.Coverage.current() if measured is not None else None
    if running is not None:
        running.stop()
        running.save()
