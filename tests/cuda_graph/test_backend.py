"""The CUDA backend's own work, on stand-ins for torch's: what it leaves behind when a capture breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_thd.cuda_graph.backend import CudaBackend


class FakeCuda:
    """Streams by name, one graph at a time.

    ``end_fails`` is how torch ends an invalidated capture; ``cleans`` is a torch that ends its pool then.
    """

    def __init__(self, *, end_fails: bool, cleans: bool) -> None:
        self.current, self.end_fails, self.cleans = "main", end_fails, cleans
        self.recording: Any = None
        self.calls: list[str] = []
        self.sync = 0

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.current, self.recording = stream, pool
        try:
            yield
        finally:
            if self.end_fails:
                if self.cleans:
                    self.recording = None
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current, self.recording = "main", None

    def end_allocate(self, device: int, pool: Any) -> None:
        if self.recording is None:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording = None
        self.calls.append(f"end {device} {pool}")

    def default_generators(self) -> list[Any]:
        class Generator:
            clone_state = staticmethod(lambda: "fresh")
            graphsafe_set_state = staticmethod(lambda state: self.calls.append(f"generator {state}"))

        return [Generator()]


@pytest.fixture(params=[(True, False), (True, True), (False, False)])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    end_fails, cleans = request.param
    fake = FakeCuda(end_fails=end_fails, cleans=cleans)
    names: dict[str, Any] = {
        "stream": fake.stream,
        "graph": fake.graph,
        "CUDAGraph": object,
        "Stream": lambda: "side",
        "current_stream": lambda: fake.current,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: "pool",
        "default_generators": fake.default_generators(),
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocate, raising=False)
    release = lambda device, pool: fake.calls.append(f"release {pool}")  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    return fake


def breaks() -> None:
    raise KeyError("mine")


def test_a_broken_capture_raises_the_steps_own_error_and_is_undone(fake: FakeCuda) -> None:
    backend = CudaBackend()
    with pytest.raises(KeyError, match="mine"):
        backend.capture(breaks)
    assert fake.current == "main"
    assert fake.recording is None
    if fake.end_fails:  # the generator refuses to draw until its state is renewed, whoever ended the pool
        ended = [] if fake.cleans else ["end 0 pool", "release pool"]
        assert fake.calls == [*ended, "generator fresh"]
        assert backend._pool is None
    else:  # what ended as it should is not given back twice
        assert fake.calls == []
        assert backend._pool == "pool"


def test_an_end_that_fails_by_itself_is_told(fake: FakeCuda) -> None:
    backend = CudaBackend()
    if fake.end_fails:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            backend.capture(lambda: 1)
        return
    _, result = backend.capture(lambda: fake.current)
    assert result == "side"
    assert fake.current == "main"


def test_only_the_last_warm_up_refuses_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]

    class Side:
        def wait_stream(self, other: Any) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Side)
    monkeypatch.setattr(torch.cuda, "current_stream", Side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    backend = CudaBackend()
    assert backend.warm_up(lambda: modes[-1], last=False) == 0
    assert backend.warm_up(lambda: modes[-1], last=True) == "error"
    assert modes[-1] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_device_it_says_so() -> None:
    assert CudaBackend().unavailable(torch.device("cuda")) == "there is no CUDA device"
