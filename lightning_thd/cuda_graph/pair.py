"""A function with gradients over fixed tensors -> forward and backward graphs behind one autograd.Function.

``torch.cuda.make_graphed_callables`` hands its gradient buffers out as they are, and a later replay
overwrites what was accumulated in them (pytorch#181723). Here every gradient and output is a copy.

Memory, with G bytes of gradients and n buckets: the buffers hold G once, as the graphs take turns; a replay
hands out copies, another G, which become ``.grad`` or are added to it. n sets of their own would be n G.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_thd.cuda_graph.backend import Backend
from lightning_thd.cuda_graph.errors import CaptureError


def differentiable(output: Any) -> list[Tensor]:
    """List the tensors in a step's output that require gradients."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]


def differentiate(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_outputs: Sequence[Tensor] | None = None
) -> tuple[Tensor | None, ...]:
    """Compute gradients, None for a leaf no output depends on, with autocast off as in ``backward()``."""
    # Under autocast the backward of an operator that ran in fp32 would be cast again.
    starts = [torch.ones_like(x) for x in outputs] if grad_outputs is None else grad_outputs
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, leaves, starts, allow_unused=True)


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
        """Give the right to the shared memory back, at the backward replay."""
        if self._holder is None or self._holder() is not token:
            raise RuntimeError(
                "backward() ran a second time through a replayed step, whose intermediate results are gone. "
                "A captured step has one backward (no retain_graph): sum the losses inside the step instead."
            )
        self._holder = None


class GraphPair:
    """The forward and backward graphs of a call that takes nothing and works on static tensors.

    All pairs whose graphs share memory share ``turn`` and ``buffers``.
    """

    def __init__(
        self,
        backend: Backend,
        function: Callable[[], Any],
        leaves: Sequence[Tensor],
        turn: Turn,
        buffers: GradientBuffers,
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
        with caught(leaves, buffers):
            self.backward, self.gradients = backend.capture(
                lambda: differentiate(found, leaves, self.grad_outputs)
            )
        self.is_differentiable = [isinstance(x, Tensor) and x.requires_grad for x in flat]
        # Without their history, so that what autograd saved is free for the next capture.
        self.outputs = [x.detach() if isinstance(x, Tensor) else x for x in flat]

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Replay the call on the present content of the static tensors, differentiably."""
        tensors = _Replay.apply(self, *leaves)  # type: ignore[no-untyped-call]
        flat, given = list(self.outputs), iter(tensors)
        for i, x in enumerate(flat):
            if isinstance(x, Tensor):
                flat[i] = next(given)
        return tree_unflatten(flat, self._spec)


class _Replay(torch.autograd.Function):
    """Replays the forward graph, and in its backward the backward graph."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.token, ctx.pair = pair.turn.take(), pair
        pair.forward.replay()
        tensors = [x for x in pair.outputs if isinstance(x, Tensor)]
        kinds = zip(pair.is_differentiable, pair.outputs, strict=True)
        ctx.flags = [flag for flag, x in kinds if isinstance(x, Tensor)]
        found = copies(tensors)
        ctx.mark_non_differentiable(*(x for x, f in zip(found, ctx.flags, strict=True) if not f))
        return tuple(found)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pair: GraphPair = ctx.pair
        pair.turn.give_back(ctx.token)
        wanted = [g for g, flag in zip(grads, ctx.flags, strict=True) if flag]
        for static, grad in zip(pair.grad_outputs, wanted, strict=True):
            static.copy_(grad)
        pair.backward.replay()
        given = iter(copies([x for x in pair.gradients if x is not None]))
        return None, *(None if x is None else next(given) for x in pair.gradients)


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


class GradientBuffers:
    """Buffers for the gradients of a module's parameters, each allocated with its first gradient."""

    def __init__(self, count: int) -> None:
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


@contextlib.contextmanager
def caught(leaves: Sequence[Tensor], buffers: GradientBuffers) -> Iterator[None]:
    """Move every gradient of a backward into its buffer once it is complete, so that its memory is freed."""
    handles: list[Any] = [
        leaf.register_hook(functools.partial(buffers.keep, i, leaf))  # type: ignore[no-untyped-call]
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


class StandIns:
    """Leaf tensors that share the memory of a module's parameters, one for each of ``parameters``.

    DDP keeps the node that accumulates a parameter's gradient, and a node remembers the stream it was made
    on. A capture that meets one made on the default stream makes that stream part of the graph, which CUDA
    refuses. Hooks that users put on parameters would run at capture, and once more at every replay. So what
    is captured never touches the parameters; gradients reach them when a replay is differentiated.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.leaves: list[Tensor] = [nn.Parameter(parameter.detach()) for parameter in parameters]
        for leaf, parameter in zip(self.leaves, parameters, strict=True):
            leaf.__dict__.update(parameter.__dict__)  # marks that libraries leave on parameters
        by_id = {id(p): leaf for p, leaf in zip(parameters, self.leaves, strict=True)}
        self._places: list[tuple[dict[str, Any], str, Tensor]] = [
            (child._parameters, name, by_id[id(parameter)])
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in by_id
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the stand-ins into the module inside this context."""
        before = [(held, name, held[name]) for held, name, _ in self._places]
        for held, name, leaf in self._places:
            held[name] = leaf
        try:
            yield
        finally:
            for held, name, parameter in before:
                held[name] = parameter
