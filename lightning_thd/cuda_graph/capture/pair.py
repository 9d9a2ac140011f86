"""A function with gradients over fixed tensors -> forward and backward graphs behind one autograd.Function.

``torch.cuda.make_graphed_callables`` hands its gradient buffers out as they are, and a later replay
overwrites what was accumulated in them (pytorch#181723). Here every gradient and output is a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.gradients import GradientBuffers, ReadyOrder, caught, copies
from lightning_thd.cuda_graph.capture.subject import differentiable, differentiate
from lightning_thd.cuda_graph.errors import CaptureError


class _Token:
    """A token that lives as long as autograd may still ask a replay for its gradients."""


class Turn:
    """The right to use memory that graphs share, from a forward replay until its own backward."""

    def __init__(self) -> None:
        self._holder: weakref.ref[_Token] | None = None

    @property
    def pending(self) -> bool:
        """Return whether a forward was replayed whose backward may still run."""
        return self._holder is not None and self._holder() is not None

    def take(self) -> _Token:
        """Take the right to the shared memory for a forward replay."""
        assert not self.pending
        token = _Token()
        self._holder = weakref.ref(token)
        return token

    def give_back(self, token: _Token) -> None:
        """Give the right to the shared memory back, at the backward replay.

        Raises:
            RuntimeError: when the forward's memory has gone to another one since.
        """
        if self._holder is None or self._holder() is not token:
            raise RuntimeError(
                "backward() ran a second time through a replayed step, whose intermediate results are gone. "
                "A captured step has one backward (no retain_graph): sum the losses inside the step instead."
            )
        self._holder = None


class GraphPair:
    """The forward graph and the backward graph of a call.

    Args:
        backend: captures both.
        function: takes nothing, works on static tensors, returns tensors in any nesting.
        leaves: what gradients are wanted for: static inputs that require a gradient, then parameters.
        turn: shared by all pairs whose graphs share memory.
        buffers: of the parameters' gradients, shared by the same pairs.
        piece_bytes: hand gradients over in pieces of at least this size, in the order in which they become
            ready, so that a distributed wrapper reduces the first while the last are still being worked
            out; None hands all over at the end.
    """

    def __init__(
        self,
        backend: Backend,
        function: Callable[[], Any],
        leaves: Sequence[Tensor],
        turn: Turn,
        buffers: GradientBuffers,
        *,
        piece_bytes: int | None = None,
    ) -> None:
        self.turn = turn
        self.forward, outputs = backend.capture(function)
        flat, self._spec = tree_flatten(outputs)
        found = differentiable(flat)
        if not found:
            raise CaptureError(
                "no output of the step requires a gradient. Return the loss, not detached, or train "
                "something that the loss depends on."
            )
        _refuse_foreign_leaves(found, leaves)
        self.grad_outputs = [torch.zeros_like(x) for x in found]
        order = ReadyOrder(backend.mark, piece_bytes)
        with caught(leaves, len(leaves) - buffers.count, buffers, order):
            self.backward, gradients = backend.capture(
                lambda: differentiate(found, leaves, self.grad_outputs)
            )
        self.is_differentiable = [isinstance(x, Tensor) and x.requires_grad for x in flat]
        # Without their history, so that what autograd saved is free for the next capture.
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in flat]
        self.gradients = gradients
        self.pieces = [tuple(piece) for piece in order.pieces]

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Replay the call on the present content of the static tensors, differentiably."""
        links: tuple[Tensor, ...] = ()
        for number in range(len(self.pieces) - 1, 0, -1):
            later = (leaves[i] for i in self.pieces[number])
            links = (_LaterPiece.apply(self, number, len(links), *links, *later),)  # type: ignore[no-untyped-call]
        first = (leaves[i] for i in self.pieces[0])
        tensors = _Replay.apply(self, len(links), *links, *first)  # type: ignore[no-untyped-call]
        flat, given = list(self.outputs), iter(tensors)
        for i, x in enumerate(flat):
            if isinstance(x, Tensor):
                flat[i] = next(given)
        return tree_unflatten(flat, self._spec)

    def take(self, number: int) -> list[Tensor]:
        """Wait for a piece of the backward graph and return copies of its gradients."""
        if len(self.pieces) > 1:
            self.backward.reach(number)
        found = [self.gradients[i] for i in self.pieces[number]]
        return copies([x for x in found if x is not None])


class _Replay(torch.autograd.Function):
    """Replays the forward graph; its backward starts the backward graph and returns the first gradients."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, num_links: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.token = pair.turn.take()
        ctx.pair, ctx.num_links = pair, num_links
        if num_links:  # a backward that broke half way may still be running
            pair.backward.reach(len(pair.pieces) - 1)
        pair.forward.replay()
        statics = [x for x in pair.outputs if isinstance(x, Tensor)]
        found = copies(statics)
        flags = [
            f for f, x in zip(pair.is_differentiable, pair.outputs, strict=True) if isinstance(x, Tensor)
        ]
        ctx.mark_non_differentiable(*(x for x, f in zip(found, flags, strict=True) if not f))
        ctx.flags = flags
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pair: GraphPair = ctx.pair
        pair.turn.give_back(ctx.token)
        wanted = [g for g, flag in zip(grads, ctx.flags, strict=True) if flag]
        for static, grad in zip(pair.grad_outputs, wanted, strict=True):
            static.copy_(grad)
        if ctx.num_links:
            pair.backward.start()
        else:
            pair.backward.replay()
        links = [torch.zeros((), device=wanted[0].device)] * ctx.num_links
        return (None, None, *links, *pair.take(0))


class _LaterPiece(torch.autograd.Function):
    """Returns, in its backward, a later piece of the backward graph's gradients."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, number: int, num_links: int, *leaves: Tensor) -> Tensor:
        ctx.pair, ctx.number, ctx.num_links = pair, number, num_links
        return torch.zeros((), device=leaves[-1].device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *[grad] * ctx.num_links, *ctx.pair.take(ctx.number))


def _refuse_foreign_leaves(outputs: list[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse a step that trains tensors other than its parameters: a replay gives them no gradient."""
    known = {id(leaf) for leaf in leaves}
    stack: list[Any] = [x.grad_fn for x in outputs]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in known:
            raise CaptureError(
                f"the step trains a tensor of shape {tuple(variable.shape)} that is no parameter of the "
                "module, or that it reaches past the module, and a replay would give it no gradient. Put it "
                "into the module as a Parameter, and use it from there."
            )
        stack += [parent for parent, _ in node.next_functions]
