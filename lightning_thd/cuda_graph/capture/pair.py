"""A function with gradients over fixed tensors -> forward and backward graphs behind one autograd.Function.

``torch.cuda.make_graphed_callables`` hands its gradient buffers out as they are, and a later replay
overwrites what was accumulated in them (pytorch#181723). Here every gradient and output is a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_thd.cuda_graph.capture.backend import Backend, Graph
from lightning_thd.cuda_graph.errors import CaptureError


class _Token:
    """Lives as long as a forward replay may still be asked for its gradients."""


class Turn:
    """Whose backward is outstanding. Graphs that share memory take turns: forward, then its own backward."""

    def __init__(self) -> None:
        self._holder: weakref.ref[_Token] | None = None

    @property
    def pending(self) -> bool:
        """Whether a forward was replayed whose backward has neither run nor become impossible."""
        return self._holder is not None and self._holder() is not None

    def take(self) -> _Token:
        """Begin a forward replay."""
        assert not self.pending
        token = _Token()
        self._holder = weakref.ref(token)
        return token

    def give_back(self, token: _Token) -> None:
        """End with the backward replay.

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
    """Forward and backward of one call.

    Args:
        backend: captures both.
        function: takes nothing, works on static tensors, returns tensors in any nesting.
        leaves: what gradients are wanted for: parameters, and static inputs that require a gradient.
        turn: shared by all pairs whose graphs share memory.
    """

    def __init__(
        self, backend: Backend, function: Callable[[], Any], leaves: Sequence[Tensor], turn: Turn
    ) -> None:
        self.turn = turn
        self.forward, outputs = backend.capture(function)
        flat, self._spec = _flatten(outputs)
        differentiable = [x for x in flat if isinstance(x, Tensor) and x.requires_grad]
        if not differentiable:
            raise CaptureError(
                "no output of the step requires a gradient. Return the loss, not detached, or train "
                "something that the loss depends on."
            )
        _refuse_foreign_leaves(differentiable, leaves)
        self.grad_outputs = [torch.zeros_like(x) for x in differentiable]
        self.backward, gradients = backend.capture(
            lambda: torch.autograd.grad(differentiable, list(leaves), self.grad_outputs, allow_unused=True)
        )
        self.is_differentiable = [isinstance(x, Tensor) and x.requires_grad for x in flat]
        # Without their history, so that what autograd saved is free for the next capture.
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in flat]
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        self.used = tuple(used)
        self.gradients = [gradients[i] for i in used]

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Replay on what the static tensors hold now.

        Args:
            leaves: as at capture, or the tensors that static inputs were filled from.
        """
        tensors = _Replay.apply(self, *(leaves[i] for i in self.used))  # type: ignore[no-untyped-call]
        flat, given = list(self.outputs), iter(tensors)
        for i, x in enumerate(flat):
            if isinstance(x, Tensor):
                flat[i] = next(given)
        return tree_unflatten(flat, self._spec)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: GraphPair, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.token = pair.turn.take()
        ctx.pair = pair
        pair.forward.replay()
        statics = [x for x in pair.outputs if isinstance(x, Tensor)]
        copies = _copies(statics)
        flags = [
            f for f, x in zip(pair.is_differentiable, pair.outputs, strict=True) if isinstance(x, Tensor)
        ]
        ctx.mark_non_differentiable(*(x for x, f in zip(copies, flags, strict=True) if not f))
        ctx.flags = flags
        return tuple(copies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pair: GraphPair = ctx.pair
        pair.turn.give_back(ctx.token)
        wanted = [g for g, flag in zip(grads, ctx.flags, strict=True) if flag]
        for static, grad in zip(pair.grad_outputs, wanted, strict=True):
            static.copy_(grad)
        pair.backward.replay()
        return (None, *_copies(pair.gradients))


def _refuse_foreign_leaves(outputs: list[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse a step that trains what it was not given: a replay would leave it without gradients."""
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


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copy all at once: hundreds of parameters in a few launches."""
    copies: list[Any] = [torch.empty_like(x) if _is_plain(x) else x.clone() for x in tensors]
    plain = [i for i, x in enumerate(tensors) if _is_plain(x)]
    if plain:
        torch._foreach_copy_([copies[i] for i in plain], [tensors[i] for i in plain])
    return copies


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter)


def _flatten(outputs: Any) -> tuple[list[Any], TreeSpec]:
    return tree_flatten(outputs)


__all__ = ["Graph", "GraphPair", "Turn"]
