"""The random numbers of tensor-parallel ranks -> the same on all of them, however each was seeded.

Dropout between two tensor-parallel products works on activations that these ranks hold alike: with other
masks they would go on with other activations, and weights that they hold whole would drift apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor


class SharedDraws:
    """Gives every microbatch a random stream of its own, by its number alone.

    Args:
        seed: the same on all ranks.
        place: of this rank among those that see different tokens; ranks of one place draw alike.
    """

    def __init__(self, seed: int, place: int) -> None:
        self._seed, self._place, self._count = seed, place, 0

    @contextmanager
    def microbatch(self) -> Generator[None]:
        """Draw from the next microbatch's stream inside this context, and from the global one again after."""
        saved = states()
        self.begin()
        try:
            yield
        finally:
            restore(saved)

    def begin(self) -> None:
        """Seed the global stream for the next microbatch, or the next step of a pipeline."""
        self._count += 1
        named = f"{self._seed} {self._place} {self._count}".encode()
        number = int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big")
        torch.manual_seed(number >> 1)


def states() -> list[Tensor]:
    """Return the states of the global random streams: of the host, and of the current device if in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_device = [torch.cuda.get_rng_state()] if in_use else []
    return [torch.get_rng_state(), *on_device]


def restore(saved: list[Tensor]) -> None:
    """Set the global random streams to what ``states`` has returned."""
    torch.set_rng_state(saved[0])
    if len(saved) > 1:
        torch.cuda.set_rng_state(saved[1])
