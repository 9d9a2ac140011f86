"""A torch module -> the hooks that code has registered on it.

torch has public methods that register hooks and none that lists them. Where a method puts a hook is found by
registering one on an empty module, so that no name of torch's own is written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

Kind: TypeAlias = Literal["forward", "forward_pre", "full_backward", "full_backward_pre"]
CALLED: Final[tuple[Kind, ...]] = ("forward", "forward_pre", "full_backward", "full_backward_pre")
_OF_STATES = (
    *("register_state_dict_pre_hook", "register_state_dict_post_hook"),
    *("register_load_state_dict_pre_hook", "register_load_state_dict_post_hook"),
)


def hooks_of(modules: Iterable[nn.Module], *kinds: Kind) -> list[Callable[..., Any]]:
    """Return the hooks of some kinds that are registered on modules, of each module in their order."""
    names = [registry_of(kind) for kind in kinds]
    return [hook for module in modules for name in names for hook in vars(module)[name].values()]


@cache
def registry_of(kind: Kind) -> str:
    """Return the attribute of a module in which torch keeps its hooks of a kind.

    Raises:
        RuntimeError: if the installed torch keeps them elsewhere.
    """
    module = nn.Module()
    getattr(module, f"register_{kind}_hook")(_hook)
    for name, value in vars(module).items():
        if isinstance(value, dict) and _hook in value.values():
            return name
    raise _nowhere(f"register_{kind}_hook")


@cache
def attributes_of_hooks() -> tuple[str, ...]:
    """Return the attributes of a module that change if hooks of any kind are registered on it.

    Raises:
        RuntimeError: if a kind of hook changes no attribute of the installed torch's modules.
    """
    changed: list[str] = []
    calls: list[tuple[str, dict[str, bool]]] = [(f"register_{kind}_hook", {}) for kind in CALLED]
    calls += [("register_forward_hook", {"with_kwargs": True, "always_call": True})]
    calls += [("register_forward_pre_hook", {"with_kwargs": True})]
    calls += [(register, {}) for register in _OF_STATES]
    for register, options in calls:
        module = nn.Module()
        before = {name: _plain(value) for name, value in vars(module).items()}
        getattr(module, register)(_hook, **options)
        here = [name for name, value in vars(module).items() if before.get(name) != _plain(value)]
        if not here:
            raise _nowhere(register)
        changed += here
    return tuple(dict.fromkeys(changed))


def _hook(*_: Any) -> None:
    """Do nothing; it stands for a user's hook."""


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _nowhere(register: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} keeps the hooks of {register} where this package does not find them. "
        "Install a tested release: see lightning-thd doctor."
    )
