"""A function over fixed tensors -> a recording that repeats its work, such as a CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from lightning_thd._private import private
from lightning_thd.cuda_graph.recording import refused_reads

R = TypeVar("R")


@runtime_checkable
class Backend(Protocol):
    """An engine that captures work and runs it again; ``warm_ups`` is the number of runs before a capture.

    A backend that can hold compiled layers also has ``compiled(function)``, which compiles for fixed shapes.
    """

    name: str
    warm_ups: int

    def unavailable(self, device: torch.device) -> str | None:
        """Return why nothing can be captured on a device, or None."""

    def warm_up(self, function: Callable[[], R], *, last: bool) -> R:
        """Run the function once before its capture; the ``last`` run may raise where a capture would."""

    def capture(self, function: Callable[[], R]) -> tuple[Any, R]:
        """Call the function once and record its work; ``replay()`` of the recording refills the result."""

    def time_s(self, function: Callable[[], object]) -> float | None:
        """Measure the seconds of a run, or return None if the backend's times are meaningless."""

    def release(self) -> None:
        """Free the memory that graphs shared; call this when all of them have been dropped."""


class CudaBackend:
    """Captures CUDA graphs on a side stream; graphs run one at a time, so they share a memory pool.

    Args:
        compiler: the backend of ``torch.compile`` for ``compile_layers``.
    """

    name = "cuda"
    # cuBLAS, autotuners and lazily built tables settle within two runs. The third run is captured.
    warm_ups = 2

    def __init__(self, *, compiler: str | Callable[..., Any] = "inductor") -> None:
        self.compiler = compiler
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []

    def unavailable(self, device: torch.device) -> str | None:
        """Return why nothing can be captured on a device, or None."""
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        if device.type != "cuda":
            return f"the module is on {device.type}, not on a CUDA device"
        return None

    def warm_up(self, function: Callable[[], R], *, last: bool) -> R:
        """Run the function on the side stream; in the ``last`` run, code that waits for the device raises."""
        stream = self._side()
        reads = refused_reads() if last else contextlib.nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), reads:
            result = function()
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def capture(self, function: Callable[[], R]) -> tuple[Any, R]:
        """Capture a run; garbage collection is off, because it could free memory of earlier graphs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()

        # "thread_local" lets other threads continue: NCCL's watchdog, and loaders that page-lock memory.
        context = torch.cuda.graph(
            graph, pool=self._pool, stream=self._side(), capture_error_mode="thread_local"
        )

        of_function: Exception | None = None
        try:
            # torch.cuda.graph does not restore the stream if the end of a capture raises.
            with torch.cuda.stream(torch.cuda.current_stream()), _no_collection(), context:
                try:
                    result = function()
                except Exception as error:
                    of_function = error
                    raise
        except Exception as error:
            if error is not of_function:  # the end of the capture raised it
                self._recover(graph)
            raise (of_function or error) from None
        finally:
            del of_function  # break the reference cycle of frame and error, which would keep the batch alive
        return graph, result

    def compiled(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function compiled for fixed shapes, in one graph."""
        return torch.compile(function, dynamic=False, fullgraph=True, backend=self.compiler)

    def time_s(self, function: Callable[[], object], *, runs: int = 5) -> float:
        """Return the median seconds of several runs, measured by CUDA events."""
        times_s: list[float] = []
        for _ in range(runs):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times_s.append(start.elapsed_time(stop) / 1000)  # elapsed_time is in milliseconds

        return float(statistics.median(times_s))

    def release(self) -> None:
        """Drop the memory pool; its memory is freed once no graph holds it."""
        self._pool = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._stream

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Reset state that torch (up to 2.13) leaves behind when the end of a capture raises."""
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # torch raises if it has already ended the pool
            private("torch._C._cuda_endAllocateToPool")(device, self._pool)
            private("torch._C._cuda_releasePool")(device, self._pool)
        self._pool = None
        self._failed.append(graph)  # keep it alive: the allocator of page-locked memory may query it

        # The generator's state still counts as captured. A clone of it does not.
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


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
