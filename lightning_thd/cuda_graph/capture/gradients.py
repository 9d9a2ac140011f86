"""Gradients of a captured backward, as they become ready -> one set of buffers for all graphs of a module.

Memory, with G bytes of gradients and n buckets: the buffers hold G once, as the graphs take turns; a replay
hands out copies, another G, which become ``.grad`` or are added to it. n sets of their own would be n G.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# A DDP bucket holds 25 MiB (``bucket_cap_mb``); gradients handed over in smaller pieces start no earlier.
PIECE_BYTES = 25 << 20


class GradientBuffers:
    """Buffers for the gradients of a module's parameters, each allocated with its first gradient."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._held: list[Tensor | None] = [None] * count

    @property
    def nbytes(self) -> int:
        """Return the bytes of all buffers made so far."""
        return sum(x.nbytes for x in self._held if x is not None)

    def keep(self, index: int, leaf: Tensor, gradient: Tensor) -> Tensor:
        """Copy a dense gradient into its buffer and return the buffer; return any other as it is."""
        if not (is_plain(leaf) and is_plain(gradient)) or gradient.layout is not torch.strided:
            return gradient
        held = self._held[index]
        if held is None or held.shape != leaf.shape or held.dtype != gradient.dtype:
            held = self._held[index] = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False)
        return held.copy_(gradient)


class ReadyOrder:
    """Records the order in which a backward finishes gradients, cut into pieces of a given size.

    Args:
        mark: called at the end of a piece.
        piece_bytes: least size of a piece; None for one piece alone.

    Attributes:
        pieces: indices of leaves, in the order in which their gradients become ready.
    """

    def __init__(self, mark: Callable[[], None], piece_bytes: int | None) -> None:
        self.pieces: list[list[int]] = [[]]
        self._mark, self._piece_bytes, self._size = mark, piece_bytes, 0

    def ready(self, index: int, gradient: Tensor) -> None:
        """Append a gradient that is complete to the current piece, and begin a new one when it is full."""
        if self._piece_bytes is not None and self._size >= self._piece_bytes:
            self._mark()
            self.pieces.append([])
            self._size = 0
        self.pieces[-1].append(index)
        self._size += gradient.nbytes


@contextlib.contextmanager
def caught(
    leaves: Sequence[Tensor], first: int, buffers: GradientBuffers, order: ReadyOrder | None = None
) -> Iterator[None]:
    """Move every gradient of a backward into its buffer once it is complete, so that its memory is freed."""

    def hook_of(index: int, leaf: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            kept = gradient if index < first else buffers.keep(index - first, leaf, gradient)
            if order is not None:
                order.ready(index, kept)
            return kept

        return hook

    handles: list[Any] = [
        leaf.register_hook(hook_of(i, leaf))  # type: ignore[no-untyped-call]
        for i, leaf in enumerate(leaves)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made in a few kernel launches even for hundreds of parameters."""
    made: list[Tensor] = [torch.empty_like(x) if is_plain(x) else x.clone() for x in tensors]
    plain = [i for i, x in enumerate(tensors) if is_plain(x)]
    if plain:
        torch._foreach_copy_([made[i] for i in plain], [tensors[i] for i in plain])
    return made


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass, such as DTensor, which holds its memory in other tensors."""
    return type(tensor) in (Tensor, nn.Parameter)
