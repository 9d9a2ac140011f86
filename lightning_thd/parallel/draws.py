"""A microbatch or a layer -> a random stream with the same numbers on all ranks that compute the same values.

With different dropout masks, copies of weights on tensor-parallel ranks would become different. If all
stages of a pipeline used the same stream from its start, their first layers would have equal masks. So in a
pipeline, each layer has a stream of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# torch's modules that drop out; it has no public class for all of them.
_DROPOUTS = (
    nn.AlphaDropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.FeatureAlphaDropout,
)


class SharedDraws:
    """Gives every microbatch a random stream, the same on all ranks that see the same tokens."""

    def __init__(self, seed: int, place: int) -> None:
        self._seed = seed
        self._place = place  # this rank's index among the ranks that see different tokens
        self._step = -1
        self._count = 0  # microbatches of the step that have begun

    @contextmanager
    def microbatch(self, step: int) -> Generator[None]:
        """In this context, draw from the stream of a step's next microbatch; then restore the global one."""
        saved = states()
        self.begin(step)
        try:
            yield
        finally:
            restore(saved)

    def begin(self, step: int) -> None:
        """Seed the global stream for the next microbatch of a step, or for a step of a pipeline."""
        if step == self._step:
            self._count += 1
        else:
            self._step = step
            self._count = 0
        name = f"{self._seed} {self._place} {step} {self._count}".encode()
        digest = hashlib.blake2b(name, digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)  # a seed is an int64, and not negative


def states() -> list[Tensor]:
    """Return the states of the global random streams: the CPU's, and the current GPU's if CUDA is in use."""
    of_streams = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # reading it would initialise CUDA
        of_streams.append(torch.cuda.get_rng_state())
    return of_streams


def restore(saved: list[Tensor]) -> None:
    """Set the global random streams to the result of ``states``."""
    torch.set_rng_state(saved[0])
    if len(saved) > 1:
        torch.cuda.set_rng_state(saved[1])


def has_dropout(model: Any) -> bool:
    """Return whether a model has dropout: in a module, or as an option above 0 of its config."""
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return True
    # Attention functions and residuals drop out by such options, without a module.
    options = model.config.get_text_config(decoder=True).to_dict()
    return any("drop" in name and isinstance(p, float) and p > 0 for name, p in options.items())


def draw_from_own_stream(layer: nn.Module, index: int) -> None:
    """Make a pipeline's layer draw from a stream that is seeded by its index and by the global stream."""
    saved: list[list[Tensor]] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        number = draw_number()
        saved.append(states())
        # 2**64 / golden ratio: seeds of neighbouring layers are far apart.
        torch.manual_seed((number + 0x9E3779B97F4A7C15 * (index + 1)) % 2**63)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        restore(saved.pop())

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)


def draw_number() -> int:
    """Draw an int64 from the CPU's stream; every stage draws for all layers, so their streams stay equal."""
    return int(torch.empty((), dtype=torch.int64).random_())
