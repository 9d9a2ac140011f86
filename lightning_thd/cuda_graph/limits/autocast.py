"""Contexts for autocast in a capture: without its cache of casts, and defined on the meta device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NAMES = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


@contextlib.contextmanager
def uncached_autocast(device: torch.device) -> Iterator[None]:
    """Keep the present autocast state, but switch off its cache of cast weights.

    A cast found there is not part of a graph, whose weights would stay those of the capture; one that a graph
    puts there is memory of the graph.
    """
    kind = device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield


@contextlib.contextmanager
def autocast_knows_meta() -> Iterator[None]:
    """Give the meta device the CPU's autocast state inside this context."""
    available: Any = torch.amp.autocast_mode
    patched = [(torch, name) for name in _NAMES] + [(available, "is_autocast_available")]
    before = [getattr(owner, name) for owner, name in patched]
    for (owner, name), function in zip(patched, before, strict=True):
        setattr(owner, name, _with_meta(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(patched, before, strict=True):
            setattr(owner, name, function)


def _with_meta(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def known(*args: Any, **kwargs: Any) -> Any:
        return function(*("cpu" if x == "meta" else x for x in args), **kwargs)

    return known
