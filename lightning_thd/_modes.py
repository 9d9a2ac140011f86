"""The running code -> whether torch shows its operators to a mode, or transforms it; a mode of our own.

Fast paths call kernels that a mode such as ``FlopCounterMode`` cannot see. They are taken only without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, TypeAlias

from lightning_thd._private import private

Call: TypeAlias = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
# What a kernel of another package or release may raise in its first trial.
KERNEL_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def operators_are_watched() -> bool:
    """Return whether a dispatch mode sees the operators that this thread runs."""
    return bool(mode_counter()())


@cache
def mode_counter() -> Callable[[], int]:
    """Return torch's function that counts this thread's dispatch modes, for code that asks in each step."""
    number: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
    return number


@cache
def transform_test() -> Callable[[], bool]:
    """Return torch's function that says whether torch.func (``vmap``, ``grad``) transforms the code."""
    active: Callable[[], bool] = private("torch._C._are_functorch_transforms_active")
    return active


class MayNotCompare(Exception):
    """Two ways of computing cannot be compared where this was raised; no cache keeps it as a result."""


def may_compare_here(device: Any) -> bool:
    """Return whether code may read results on a torch device, to compare two ways of computing them.

    It may not while it is compiled or captured, or while a mode or transform sees its operators.
    """
    import torch  # this module loads without torch

    if torch.compiler.is_compiling() or operators_are_watched() or transform_test()():
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def watch_operators(call: Call) -> Any:
    """Return a context in which ``call(operator, args, kwargs)`` runs instead of each operator."""
    return _mode_class()(call)


@cache
def _mode_class() -> Any:
    # torch documents this class, in a module whose name is private.
    base = private("torch.utils._python_dispatch.TorchDispatchMode")

    class OperatorMode(base):  # type: ignore[misc, valid-type]
        def __init__(self, call: Call) -> None:
            super().__init__()
            self.call = call

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self.call(func, args, kwargs or {})

    return OperatorMode
