"""A function over fixed tensors -> something that does the same work again, such as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch

R = TypeVar("R")
# cuBLAS, autotuners and lazily built tables settle within two runs; the third is what is captured.
_WARM_UPS = 2


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Do it again, on the same tensors."""


class Backend(Protocol):
    """Where graphs come from.

    Attributes:
        name: for messages.
        warm_ups: runs before a capture.
    """

    name: str
    warm_ups: int

    def unavailable(self, device: torch.device) -> str | None:
        """Say why nothing can be captured on a device, or None."""

    def warm_up(self, function: Callable[[], R]) -> R:
        """Run once the way a capture will."""

    def capture(self, function: Callable[[], R]) -> tuple[Graph, R]:
        """Run once and keep the work; the result's tensors are refilled by every replay."""

    def time_s(self, function: Callable[[], object]) -> float | None:
        """Measure seconds of a run, or give None where times mean nothing."""

    def release(self) -> None:
        """Let go of memory that graphs shared."""


class CudaBackend:
    """``torch.cuda.CUDAGraph``: all graphs of it share one memory pool and are captured on one side stream.

    They may share memory because they never run at the same time: see ``pair.Turn``.
    """

    name = "cuda"
    warm_ups = _WARM_UPS

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def unavailable(self, device: torch.device) -> str | None:
        """Say why nothing can be captured on a device, or None."""
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return None if device.type == "cuda" else f"the module is on {device.type}, not on a CUDA device"

    def warm_up(self, function: Callable[[], R]) -> R:
        """Run on the side stream."""
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = function()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def capture(self, function: Callable[[], R]) -> tuple[Graph, R]:
        """Capture with the garbage collector off: it would free memory of earlier graphs meanwhile."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # "thread_local": loader threads that page-lock memory and NCCL's watchdog go on meanwhile.
        context = torch.cuda.graph(
            graph, pool=self._pool, stream=self._side(), capture_error_mode="thread_local"
        )
        with _no_collection(), context:
            result = function()
        return graph, result

    def time_s(self, function: Callable[[], object], *, runs: int = 5) -> float:
        """Return the median of some runs, by events on the device."""
        times: list[float] = []
        for _ in range(runs):
            start, stop = _event(), _event()
            torch.cuda.synchronize()
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop) / 1000)
        return float(statistics.median(times))

    def release(self) -> None:
        """Forget the pool; its memory is free once no graph holds it."""
        self._pool = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
