"""A step on the CPU -> its operators, run again on the same tensors: what a CUDA graph does, without a GPU.

Every dispatched operator is kept with its arguments and results. A replay calls each again and copies what it
gives into the tensors of the first run, so that addresses stay fixed. Values that Python worked out
from them at capture stay as they were. Both are as in a graph. What a graph cannot hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed import Work
from torch.futures import Future
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_thd.cuda_graph.errors import CaptureError, Report, calling_line
from lightning_thd.cuda_graph.fingerprint import plain_tensors
from lightning_thd.cuda_graph.host_reads import function_problem, operator_problem

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]  # None where nothing is to be copied
    fills: bool

    def run(self) -> None:
        given = tree_leaves(self.function(*self.args, **self.kwargs))
        _finish(self.function, given)
        for kept, new in zip(self.results, given, strict=True):
            if kept is not None:
                for target, source in zip(plain_tensors(kept), plain_tensors(new), strict=True):
                    target.copy_(source)

    def poison(self) -> None:
        """Fill the tensors that the recorded operator returns with NaN."""
        for kept in self.results:
            if kept is not None and kept.is_floating_point():
                for x in plain_tensors(kept):
                    x.fill_(torch.nan)


def _finish(function: Any, results: list[Any]) -> None:
    """Wait for a replayed collective, if the operator is one, so that its results are complete."""
    if function.namespace == "_c10d_functional":
        for x in results:
            if isinstance(x, Tensor):
                torch.ops._c10d_functional.wait_tensor(x)
    elif function.namespace == "c10d":
        for x in results:
            if isinstance(x, torch.ScriptObject):
                Work.unbox(x).wait()


def _finished(result: Any) -> Any:
    """Wait for a recorded collective, some of which copy their result then, and return a finished handle."""
    leaves, spec = tree_flatten(result)
    for i, x in enumerate(leaves):
        if isinstance(x, torch.ScriptObject):
            Work.unbox(x).wait()
            future: Any = Future()
            future.set_result(None)
            leaves[i] = _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
    return tree_unflatten(leaves, spec)


class Recording:
    """The operators of a step in order, with the tensors they work on.

    ``poison`` fills every result with NaN before a replay, so that a slot nobody writes shows.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.poison = False

    def replay(self) -> None:
        """Run every operator again; random ones draw from the generator's present state."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for call in self.calls if self.poison else ():
                call.poison()
            for call in self.calls:
                if not call.fills:
                    call.run()


def record(function: Callable[[], R], report: Report) -> tuple[Recording, R]:
    """Run a function and keep its operators; ``report`` gets every problem and its line."""
    tape, busy = Recording(), _Busy()
    with _Operators(tape, busy, report), _Functions(busy, report):
        return tape, function()


class RecordingBackend:
    """An engine that records on the CPU and refuses what a CUDA graph could not hold."""

    name = "recording"
    warm_ups = 2

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison

    def unavailable(self, device: torch.device) -> str | None:
        """Return why a step cannot be recorded (it runs on no CPU), or None."""
        return (
            None if device.type == "cpu" else f"the recording backend runs on the CPU, not on {device.type}"
        )

    def warm_up(self, function: Callable[[], R], *, last: bool) -> R:
        """Run the function once before it is recorded."""
        return function()

    def capture(self, function: Callable[[], R]) -> tuple[Recording, R]:
        """Run the function once and keep its operators; the first problem raises :class:`CaptureError`."""
        tape, result = record(function, self._refuse)
        tape.poison = self.poison
        return tape, result

    @staticmethod
    def _refuse(problem: str, where: str | None) -> None:
        raise CaptureError(problem, where)

    def time_s(self, function: Callable[[], object]) -> float | None:
        """Return None: a recording is always slower than eager, so its times mean nothing."""
        return None

    def release(self) -> None:
        """Do nothing, as recordings share no memory."""


class _Busy:
    """Counts the operators that are running: what a kernel calls in Python is not recorded."""

    def __init__(self) -> None:
        self.depth = 0


class _Functions(TorchFunctionMode):
    def __init__(self, busy: _Busy, report: Report) -> None:
        super().__init__()
        self._busy, self._report = busy, report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._busy.depth:
            problem = function_problem(func, args, kwargs)
            if problem is not None:
                self._report(problem, calling_line())
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tape: Recording, busy: _Busy, report: Report) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._busy, self._report = tape, busy, report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        problem = operator_problem(func, args, kwargs)
        if problem is not None:
            self._report(problem, calling_line())
        self._busy.depth += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._busy.depth -= 1
        call = _call(func, args, kwargs, result)
        if call is not None:
            self._tape.calls.append(call)
        return _finished(result) if func.namespace == "c10d" else result


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> _Call | None:
    """Return the record of an operator for replays, or None for a view, which needs none."""
    given = {s for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) for s in _storages(x)}
    results = tuple(
        x if isinstance(x, Tensor) and x.numel() and not given & _storages(x) else None
        for x in tree_leaves(result)
    )
    # Collectives write into what they are given, though their schemas do not say so.
    writes = func._schema.is_mutable or func.namespace == "c10d"
    if not writes and all(x is None for x in results):
        return None
    fills = func._schema.name in _UNFILLED
    return _Call(func, args, kwargs, results, fills)


def _storages(tensor: Tensor) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in plain_tensors(tensor)} - {0}


# Later operators write what these return; a second call would only bring other leftovers of memory.
_UNFILLED = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
