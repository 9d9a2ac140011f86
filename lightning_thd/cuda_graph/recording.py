"""A step on the CPU -> its operators, which a replay runs again on the same tensors, as a CUDA graph does.

A replay calls each operator again and copies its results into the tensors of the first run. Addresses stay
the same, and so do values that Python computed at capture. Operators that a CUDA graph cannot capture are
reported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future
from torch.overrides import TorchFunctionMode

from lightning_thd._modes import watch_operators
from lightning_thd._private import private, private_of
from lightning_thd._trees import tree_flatten, tree_leaves, tree_unflatten
from lightning_thd.cuda_graph.errors import CaptureError, Report, calling_line, refuse
from lightning_thd.cuda_graph.fingerprint import plain_tensors

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]  # None for results that need no copy

    def run(self) -> None:
        """Call the operator again, and copy its results into those of the first call."""
        results = tree_leaves(self.function(*self.args, **self.kwargs))
        _wait_for_replayed(self.function, results)
        for first, new in zip(self.results, results, strict=True):
            if first is not None:
                for target, source in zip(plain_tensors(first), plain_tensors(new), strict=True):
                    target.copy_(source)


def _wait_for_replayed(function: Any, results: list[Any]) -> None:
    """Wait for the results of a replayed operator, if it is a collective."""
    if function.namespace.endswith("c10d_functional"):
        for x in results:
            if isinstance(x, Tensor):
                getattr(torch.ops, function.namespace).wait_tensor(x)
    elif function.namespace == "c10d":
        for x in results:
            if isinstance(x, torch.ScriptObject):
                Work.unbox(x).wait()


def _wait_for_recorded(result: Any) -> Any:
    """Wait for a recorded collective, as some copy results only in ``wait``; return finished handles."""
    leaves, spec = tree_flatten(result)
    for i, x in enumerate(leaves):
        if isinstance(x, torch.ScriptObject):
            Work.unbox(x).wait()
            future: Any = Future()
            future.set_result(None)
            # A handle of Python's own class is freed while torch still waits for it, and never ends.
            finished: Any = private("torch._C._distributed_c10d._create_work_from_future")(future)
            leaves[i] = finished.boxed()

    return tree_unflatten(leaves, spec)


class Recording:
    """The operators of a step in order, with their tensors."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def replay(self) -> None:
        """Run every operator again; random operators draw from the generator's current state."""
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for call in self.calls:
                call.run()


def record(function: Callable[[], R], report: Report) -> tuple[Recording, R]:
    """Run a function and record its operators; ``report`` gets every problem and its line."""
    tape = Recording()
    watch = _Watch(tape, report)
    _Watch.running = watch
    try:
        with _uncompiled_frames(), watch:
            return tape, function()
    finally:
        _Watch.running = None


def _uncompiled_frames() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch compiles nothing: it would compile what runs inside an operator."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes seconds
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context


class _Watch:
    """The modes of a recording, which can be taken off while torch's compiler needs none."""

    running: ClassVar[_Watch | None] = None  # that of the recording under way

    def __init__(self, tape: Recording, report: Report) -> None:
        self._operators = _Operators(tape, report)
        self._functions = _Functions(self._operators, report)
        self.on = False

    def __enter__(self) -> _Watch:
        self._switch(on=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._switch(on=False)

    @contextlib.contextmanager
    def turned(self, *, on: bool) -> Iterator[None]:
        """Put the modes on, or take them off, inside this context."""
        if on == self.on:
            yield
            return
        self._switch(on=on)
        try:
            yield
        finally:
            self._switch(on=not on)

    def _switch(self, *, on: bool) -> None:
        modes = [self._operators.mode]
        # While the mode of functions handles a call, torch has taken it off by itself. A checkpoint around a
        # compiled layer meets that: it recomputes the layer inside of torch.autograd.grad.
        if not self._functions.handling:
            modes.append(self._functions)

        for mode in modes:
            if on:
                mode.__enter__()
            else:
                mode.__exit__(None, None, None)
        self.on = on


@functools.cache
def _compiler() -> Any:
    """Return a compiler whose graphs, forward and backward, run operator by operator; one for the process."""
    importlib.import_module("torch._dynamo.backends.common")
    return private("torch._dynamo").backends.common.aot_autograd(
        fw_compiler=_watched_graph, bw_compiler=_watched_graph
    )


def _watched_graph(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Return a compiled graph that runs under the modes of a recording, if one is under way."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    def run(*args: Any) -> Any:
        watch = _Watch.running
        if watch is None:
            return graph(*args)
        with watch.turned(on=True):
            return graph(*args)

    boxed: Callable[..., Any] = make_boxed_func(run)
    return boxed


class RecordingBackend:
    """A capture engine that records on the CPU, and raises for operators that CUDA graphs cannot capture."""

    name = "recording"
    warm_ups = 2
    runs_captures = True  # what is recorded runs, too

    def unavailable(self, device: torch.device) -> str | None:
        """Return why a step cannot be recorded (it does not run on the CPU), or None."""
        return None if device.type == "cpu" else f"RecordingBackend runs on the CPU, not on {device.type}"

    def warm_up(self, function: Callable[[], R], *, last: bool) -> R:
        """Run the function once before it is recorded."""
        return function()

    def capture(self, function: Callable[[], R]) -> tuple[Recording, R]:
        """Run the function once and record its operators; the first problem raises :class:`CaptureError`."""
        return record(function, refuse)

    def compiled(self, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function compiled for fixed shapes; recordings hold the operators of its graphs."""
        compiled = torch.compile(function, dynamic=False, fullgraph=True, backend=_compiler())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R:
            watch = _Watch.running
            if watch is None:
                return compiled(*args, **kwargs)
            # The modes would keep the compiler from its work. They are on again inside of the graphs.
            with watch.turned(on=False), torch.compiler.set_stance("default"):
                return compiled(*args, **kwargs)

        return call

    def time_s(self, function: Callable[[], object]) -> float | None:
        """Return None: a recording replays from Python, so its times say nothing about CUDA graphs."""
        return None

    def release(self) -> None:
        """Do nothing, because recordings share no memory."""


class _Functions(TorchFunctionMode):
    """Reports calls of torch in Python that cannot be captured."""

    def __init__(self, operators: _Operators, report: Report) -> None:
        super().__init__()
        self._operators = operators
        self._report = report
        self.handling = 0  # the number of calls that it handles

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._operators.running:  # calls inside a kernel are the operator's business
            problem = function_problem(func, args, kwargs)
            if problem is not None:
                self._report(problem, calling_line())

        self.handling += 1
        try:
            return func(*args, **kwargs)
        finally:
            self.handling -= 1


class _Operators:
    """Records operators, and reports those that cannot be captured."""

    def __init__(self, tape: Recording, report: Report) -> None:
        self._tape = tape
        self._report = report
        self.running = 0  # the number of running operators
        self.mode = watch_operators(self._call)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        problem = operator_problem(func, args, kwargs)
        if problem is not None:
            self._report(problem, calling_line())

        self.running += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self.running -= 1

        call = _call(func, args, kwargs, result)
        if call is not None:
            self._tape.calls.append(call)
        if func.namespace == "c10d":
            return _wait_for_recorded(result)
        return result


def refused_reads() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which this thread may not wait for the device.

    torch's sync debug mode would raise in all threads.
    """
    mode: contextlib.AbstractContextManager[Any] = watch_operators(_refuse_read)
    return mode


def _refuse_read(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator, or raise if it cannot be captured."""
    problem = operator_problem(func, args, kwargs)
    if problem is not None:
        raise CaptureError(problem, calling_line())
    return func(*args, **kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> _Call | None:
    """Return the record of an operator, or None if replays need not run it: for views and empty tensors."""
    if _schema_of(func).name in _UNFILLED:
        return None

    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    storages = {storage for x in inputs for storage in _storages(x)}

    def is_new(x: Any) -> bool:
        return isinstance(x, Tensor) and x.numel() > 0 and not storages & _storages(x)

    results = tuple(x if is_new(x) else None for x in tree_leaves(result))
    # Collectives write into their arguments, although their schemas do not declare it.
    writes = _schema_of(func).is_mutable or func.namespace == "c10d"
    if not writes and all(x is None for x in results):
        return None
    return _Call(func, args, dict(kwargs), results)


def _schema_of(func: Any) -> Any:
    """Return the names and kinds of an operator's arguments."""
    return private_of(func, "torch.ops.operator._schema")


def _storages(tensor: Tensor) -> set[int]:
    """Return the addresses of the memory that holds a tensor's values; none for a tensor without memory."""
    return {x.untyped_storage().data_ptr() for x in plain_tensors(tensor)} - {0}


# Later operators fill the results of these, so a replay needs no new results.
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_UNFILLED = tuple(f"aten::{name}" for name in _EMPTY)

# Calls are checked, too: the dispatcher sees no ``tolist``, and sees ``if x > 0`` only as a scalar read.
_READ = "reads a value back to the host, which waits for the device and fixes the value it had at capture"
_SHAPE = "makes a shape that depends on values"
_CONSTANT = (
    "copies host values to the device, which fixes the values they had at capture. Make the tensor once, "
    "outside of the step, or fill it on the device (torch.full, torch.arange)"
)
_FUNCTIONS: Final[dict[Any, str]] = {
    Tensor.item: f".item() {_READ}",
    Tensor.tolist: f".tolist() {_READ}",
    Tensor.numpy: f".numpy() {_READ}",
    Tensor.cpu: f".cpu() {_READ}",
    Tensor.__bool__: f"a branch on a tensor {_READ}. Use torch.where",
    Tensor.__int__: f"int() of a tensor {_READ}",
    Tensor.__float__: f"float() of a tensor {_READ}",
    Tensor.__index__: f"a tensor used as an index of Python {_READ}",
    Tensor.__array__: f"a tensor given to numpy {_READ}",
    Tensor.__repr__: f"printing a tensor {_READ}",
    torch.tensor: f"torch.tensor(...) {_CONSTANT}",
    torch.from_numpy: f"torch.from_numpy(...) {_CONSTANT}",
    Tensor.new_tensor: f".new_tensor(...) {_CONSTANT}",
}
aten = torch.ops.aten
_OPERATORS: Final[dict[Any, str]] = {
    aten._local_scalar_dense.default: f"it {_READ}",
    aten.equal.default: f"torch.equal {_READ}",
    aten.nonzero.default: f"nonzero() {_SHAPE}. Use torch.where, or nonzero_static(size=...)",
    aten.masked_select.default: f"masked_select {_SHAPE}. Multiply by the mask, or use torch.where",
    **dict.fromkeys((aten._unique.default, aten._unique2.default), f"unique() {_SHAPE}"),
    aten.unique_consecutive.default: f"unique_consecutive() {_SHAPE}",
    aten.unique_dim.default: f"unique() {_SHAPE}",
    aten.bincount.default: f"bincount() {_SHAPE}. Use scatter_add into a tensor of fixed size",
}
_BOOLEAN = f"indexing with a boolean mask {_SHAPE}. Multiply by the mask, or use torch.where"


def function_problem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a Python call such as ``Tensor.tolist`` cannot be captured, or None."""
    if func in (torch.as_tensor, torch.asarray) and args and not isinstance(args[0], Tensor):
        return f"torch.{func.__name__}(...) {_CONSTANT}"
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(x, list) for x in indices):
            return f"indexing with a list {_CONSTANT}"
        return None

    if not func.__hash__:  # an unhashable callable is not in the table
        return None
    return _FUNCTIONS.get(func)


def operator_problem(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why a dispatched operator cannot be captured, or None."""
    if func in _OPERATORS:
        return _OPERATORS[func]

    if func is aten.repeat_interleave.Tensor:
        output_size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
        if output_size is None:
            return f"repeat_interleave without output_size {_SHAPE}. Pass output_size="
        return None

    if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return _BOOLEAN if _has_mask(args[1]) else None

    if func in (aten.index_put.default, aten.index_put_.default):
        # Writing one value under one mask is a masked_fill on every device, which can be captured.
        is_fill = args[2].numel() == 1 and len(args[1]) == 1
        return _BOOLEAN if _has_mask(args[1]) and not is_fill else None

    if func is aten._to_copy.default:
        target = kwargs.get("device")
        source = args[0].device.type
        if target is not None and torch.device(target).type != source:
            return f"a copy to another device {_CONSTANT if source == 'cpu' else _READ}"
    return None


def _has_mask(indices: Any) -> bool:
    """Return whether one of an operator's indices is a boolean mask."""
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
