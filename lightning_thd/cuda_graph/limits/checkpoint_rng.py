"""Activation checkpointing inside a capture -> no saved random states, or an error where they are needed.

``torch.utils.checkpoint`` reads and sets the generator's state on the host. Without a random operator in the
step that changes nothing and is left out; with one, the recomputed mask would differ from the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_thd.cuda_graph.errors import CaptureError


class RandomUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether a step draws random numbers and whether it saves random states.

    Attributes:
        draws: a random operator ran.
        saves: a state was saved, by activation checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = False
        self.saves = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args):
            self.draws = True
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """Raise where checkpointing would have to restore a random state."""
        if self.draws and self.saves:
            raise CaptureError(
                "activation checkpointing saves random states (preserve_rng_state=True) in a step with "
                "dropout, and a graph cannot restore them. Set dropout to 0, or switch checkpointing off."
            )


def _drops_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.ops.aten.native_dropout.default and not (args[1] and args[2])


@contextlib.contextmanager
def without_saved_states(use: RandomUse | None = None) -> Iterator[None]:
    """Stop checkpointing from saving and setting random states inside this context."""
    checkpoint: Any = torch.utils.checkpoint
    namespace: Any = torch
    get, set_, devices = torch.get_rng_state, torch.set_rng_state, checkpoint.get_device_states
    empty = torch.empty(0, dtype=torch.uint8)

    def get_rng_state() -> Tensor:
        if use is not None:
            use.saves = True
        return empty

    namespace.get_rng_state = get_rng_state
    namespace.set_rng_state = lambda state: None
    checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        namespace.get_rng_state, namespace.set_rng_state = get, set_
        checkpoint.get_device_states = devices
