"""A user's hooks -> an error naming the line where one takes the norm of the gradients of one stage alone."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch.utilities as lightning_utilities
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_thd._user_code import described, is_users

# Where gradients are, between a backward pass and the next step.
_HOOKS = (
    *("training_step", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad"),
)
_NORMS: set[Any] = {
    torch.nn.utils.clip_grad_norm_,
    torch.nn.utils.get_total_norm,
    lightning_utilities.grad_norm,
}
_NAMES = {"clip_grad_norm_", "get_total_norm"}
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def refuse_own_norms(owners: Iterable[object]) -> None:
    """Refuse hooks that clip by, or read, a norm over gradients by functions that know nothing of stages.

    Looks through the hooks of the module and of callbacks, and the methods and functions that they call.

    Args:
        owners: the LightningModule and the Trainer's callbacks.

    Raises:
        MisconfigurationException: naming the line.
    """
    for owner in owners:
        seen: set[CodeType] = set()
        for hook in _HOOKS:
            for name, place in _norms_in(getattr(owner, hook, None), type(owner), seen):
                raise MisconfigurationException(
                    f"{place}: {name} sees the gradients of this pipeline stage alone, so its norm would be "
                    "another one on every rank. To clip, set Trainer(gradient_clip_val=...) or call "
                    "self.clip_gradients(...) in configure_gradient_clipping; to read norms, use "
                    "lightning_thd.strategies.norms.grad_norm; or set pipeline_parallel_size=1."
                )


def _norms_in(function: Any, kind: type, seen: set[CodeType]) -> Iterator[tuple[str, str]]:
    """Yield the norms that a user's function takes, itself or by what it calls, and their lines."""
    function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
    if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
        return
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for found in dis.get_instructions(code):
            if found.opname not in _READS or not isinstance(found.argval, str):
                continue
            known = function.__globals__.get(found.argval)
            if _is_norm(found.opname, found.argval, known, code):
                number = found.positions.lineno if found.positions else None
                place = described(code.co_filename, number or code.co_firstlineno)
                yield getattr(known, "__name__", found.argval), place
            for called in (known, getattr(kind, found.argval, None)):
                yield from _norms_in(called, kind, seen)


def _is_norm(read: str, name: str, known: Any, code: CodeType) -> bool:
    if read in ("LOAD_GLOBAL", "LOAD_NAME"):
        return isinstance(known, FunctionType) and known in _NORMS
    lightnings = "utilities" in code.co_names or any(
        module.startswith(("lightning.", "pytorch_lightning")) for module in code.co_names
    )
    return name in _NAMES or (name == "grad_norm" and lightnings)
