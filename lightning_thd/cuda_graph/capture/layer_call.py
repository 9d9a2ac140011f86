"""One layer of a model, in one bucket -> the same layer from graphs, in the middle of an eager step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.gradients import GradientBuffers
from lightning_thd.cuda_graph.capture.pair import GraphPair, Turn
from lightning_thd.cuda_graph.capture.stand_ins import StandIns
from lightning_thd.cuda_graph.capture.subject import differentiable, differentiate
from lightning_thd.cuda_graph.limits.autocast import uncached_autocast
from lightning_thd.cuda_graph.limits.checkpoint_rng import RandomUse, without_saved_states
from lightning_thd.models.pack import current_pack


class LayerCall:
    """A layer whose first call captures it and whose later calls replay it.

    Args:
        backend: the layer's own: between a layer's forward and its backward others run, and what it saved
            must not lie in memory that they use.
        layer: the layer.
        turn: shared by the buckets of a layer.
        buffers: of the layer's gradients, shared by the same.
        fixed: addresses of buffers that a graph may read where they are; other tensors are copied in.

    Attributes:
        replays: calls that ran from the graphs.
    """

    def __init__(
        self,
        backend: Backend,
        layer: nn.Module,
        turn: Turn,
        buffers: GradientBuffers,
        fixed: frozenset[int],
    ) -> None:
        self._backend, self._layer, self._turn = backend, layer, turn
        self._buffers, self._fixed = buffers, fixed
        self.pair: GraphPair | None = None
        self.replays = 0
        self._spec: TreeSpec | None = None
        self._statics: list[Tensor] = []
        self._constants: list[Any] = []
        self._moving: list[int] = []

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replay the layer on these arguments, or call its ``forward`` where they do not fit the graphs."""
        flat, spec = tree_flatten((args, kwargs))
        if self.pair is None:
            self._capture(forward, flat, spec)
        if self._turn.pending or not self._fits(flat, spec):
            return forward(*args, **kwargs)
        assert self.pair is not None
        self.replays += 1
        moving = [flat[i] for i in self._moving]
        with torch.no_grad():
            for static, new in zip(self._statics, moving, strict=True):
                static.copy_(new)
        wanted = [new for static, new in zip(self._statics, moving, strict=True) if static.requires_grad]
        return self.pair([*wanted, *self._parameters])

    def _capture(self, forward: Callable[..., Any], flat: list[Any], spec: TreeSpec) -> None:
        self._moving = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and not self._stays(x)]
        self._constants = [None if i in self._moving else x for i, x in enumerate(flat)]
        self._spec = spec
        self._statics = [flat[i].detach().clone().requires_grad_(flat[i].requires_grad) for i in self._moving]
        self._parameters = [p for p in self._layer.parameters() if p.requires_grad]
        static = list(self._constants)
        for i, tensor in zip(self._moving, self._statics, strict=True):
            static[i] = tensor
        args, kwargs = tree_unflatten(static, spec)
        stand_ins = StandIns(self._layer, self._parameters)
        leaves = [*(x for x in self._statics if x.requires_grad), *stand_ins.leaves]

        def run() -> Any:
            with stand_ins.in_place():
                return forward(*args, **kwargs)

        with uncached_autocast(self._statics[0].device):
            self._warm_up(run, leaves)
            with _fresh_pack():
                self.pair = GraphPair(self._backend, run, leaves, self._turn, self._buffers)

    def _warm_up(self, run: Callable[[], Any], leaves: list[Tensor]) -> None:
        for i in range(self._backend.warm_ups):
            use = RandomUse()
            with without_saved_states(use), use, _fresh_pack():
                last = i == self._backend.warm_ups - 1
                self._backend.warm_up(lambda: differentiate(differentiable(run()), leaves), last=last)
            use.refuse()

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._fixed

    def _fits(self, flat: list[Any], spec: TreeSpec) -> bool:
        if spec != self._spec:
            return False
        for i, (constant, x) in enumerate(zip(self._constants, flat, strict=True)):
            if i in self._moving:
                continue
            if isinstance(x, Tensor):
                if not self._stays(x) or x.data_ptr() != constant.data_ptr() or x.shape != constant.shape:
                    return False
            elif x != constant:
                return False
        return all(
            isinstance(flat[i], Tensor) and flat[i].shape == static.shape and flat[i].dtype == static.dtype
            for i, static in zip(self._moving, self._statics, strict=True)
        )


@contextlib.contextmanager
def _fresh_pack() -> Iterator[None]:
    """Empty the pack's cache inside this context, so that a layer's graph computes what it needs itself."""
    pack = current_pack()
    if pack is None:
        yield
        return
    pack.cache, before = {}, pack.cache
    try:
        yield
    finally:
        pack.cache = before
