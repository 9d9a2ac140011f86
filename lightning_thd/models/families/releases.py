"""The releases of transformers with which the families of this folder were checked."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from torch import nn

from lightning_thd._versions import SUPPORTED


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


OLDEST: Final = _numbers(SUPPORTED["transformers"].oldest)
NEWEST: Final = _numbers(SUPPORTED["transformers"].newest)


def installed() -> str:
    """Return the version of transformers, as text for messages."""
    try:
        return version("transformers")
    except PackageNotFoundError:  # transformers is a source tree on the path
        return "of unknown version"


def release() -> tuple[int, ...]:
    """Return the first two numbers of transformers' version; empty if it is unknown."""
    return _numbers(installed())


def is_checked() -> bool:
    """Return whether the installed release is among those that were checked."""
    return OLDEST <= release() <= NEWEST


def unknown_layer(module: nn.Module, does: str, difference: str) -> str:
    """Return the message for a layer that ``does`` something to a row, and of which nobody knows how."""
    return (
        f"{type(module).__name__} {does} and, in transformers {installed()}, {difference}. So 'thd' cannot "
        "do it inside the sequences of a pack. Use a release of transformers that `lightning-thd doctor` "
        "lists as tested, or padded rows with attn_implementation='eager'."
    )
