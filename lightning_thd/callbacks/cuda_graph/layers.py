"""Chosen layers of a model -> the same layers, replayed from graphs while the step around them runs eagerly.

For steps that read the host. The batch is padded to a bucket, so that the layers always see its shapes; all
layers read the offsets from the same static buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.cuda_graph.backend import Backend
from lightning_thd.callbacks.cuda_graph.captured import CapturedStep
from lightning_thd.callbacks.cuda_graph.checkpoint_rng import RandomUse, without_saved_states
from lightning_thd.callbacks.cuda_graph.errors import CaptureError
from lightning_thd.callbacks.cuda_graph.guards import guarded
from lightning_thd.callbacks.cuda_graph.module_state import restored
from lightning_thd.callbacks.cuda_graph.pair import GraphPair, Turn
from lightning_thd.callbacks.cuda_graph.static_batch import StaticInputs, pad_batch
from lightning_thd.models.pack import current_pack


class GraphedLayers:
    """Captures the layers whose name contains one of some parts.

    Args:
        backend: captures.
        names: parts of names of submodules.
    """

    def __init__(self, backend: Backend, names: Sequence[str]) -> None:
        self.backend = backend
        self.names = tuple(names)
        self._chosen: list[tuple[nn.Module, Any]] = []
        self.active: dict[nn.Module, _GraphedCall] = {}

    def capture(
        self,
        function: Callable[..., Any],
        module: nn.Module,
        inputs: StaticInputs,
        dummy: THDBatch,
        rest: tuple[Any, ...],
        turn: Turn,
        leaves: list[Tensor],
    ) -> CapturedStep:
        """Run the step once on a dummy batch and capture every chosen layer as it is called."""
        self._install(module)
        calls = {layer: _GraphedCall(self.backend, layer) for layer, _ in self._chosen}
        batch = self._static(dummy, inputs)
        kind = inputs.batch.input_ids.device.type
        with restored(module), static_shapes(), guarded(module), self._using(calls):
            loss = function(module, batch, *rest)
            found = [x for x in tree_leaves(loss) if isinstance(x, Tensor) and x.requires_grad]
            with torch.autocast(kind, enabled=False):
                torch.autograd.grad([x.sum() for x in found], leaves, allow_unused=True)
        if not any(call.pair for call in calls.values()):
            raise CaptureError(f"no layer named {self.names} was called by the step.")

        def run(batch: THDBatch, *rest: Any) -> Any:
            with self._using(calls), static_shapes():
                return function(module, self._static(batch, inputs), *rest)

        return CapturedStep(inputs, leaves, run, [], module, set())

    def remove(self) -> None:
        """Give the layers their forward back."""
        for layer, before in self._chosen:
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before
        self._chosen.clear()

    @contextlib.contextmanager
    def _using(self, calls: dict[nn.Module, _GraphedCall]) -> Iterator[None]:
        self.active, before = calls, self.active
        try:
            yield
        finally:
            self.active = before

    def _static(self, batch: THDBatch, inputs: StaticInputs) -> THDBatch:
        """Give the padded batch with offsets in the static buffers, where graphs look for them."""
        inputs.fill(batch)
        static = inputs.batch
        names = ("cu_seqlens", "cu_seqlens_padded")
        return pad_batch(batch, inputs.bucket).replace(**{name: getattr(static, name) for name in names})

    def _install(self, module: nn.Module) -> None:
        if self._chosen:
            return
        found = [
            layer
            for name, layer in module.named_modules()
            if any(part in name.split(".") for part in self.names)
        ]
        if not found:
            some = sorted({name.rpartition(".")[2] for name, _ in module.named_modules()} - {""})
            raise CaptureError(f"no submodule is named {self.names}. Names here: {', '.join(some)}.")
        if any(getattr(child, "gradient_checkpointing", False) for child in module.modules()):
            raise CaptureError(
                "scope='layers' cannot capture layers under activation checkpointing, which runs them twice "
                "a step. Use scope='step', or switch checkpointing off."
            )
        for layer in found:
            self._chosen.append((layer, layer.__dict__.get("forward")))
            layer.__dict__["forward"] = self._forward_of(layer, layer.forward)

    def _forward_of(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def graphed_forward(*args: Any, **kwargs: Any) -> Any:
            call = self.active.get(layer)
            if call is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return call(forward, args, kwargs)

        return graphed_forward


class _GraphedCall:
    """One layer in one bucket: the first call captures, later ones replay."""

    def __init__(self, backend: Backend, layer: nn.Module) -> None:
        self._backend, self._layer = backend, layer
        self._turn = Turn()
        self.pair: GraphPair | None = None
        self._spec: TreeSpec | None = None
        self._statics: list[Tensor] = []
        self._constants: list[Any] = []
        self._moving: list[int] = []

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        if self.pair is None:
            self._capture(forward, flat, spec)
        if self._turn.pending or not self._fits(flat, spec):
            return forward(*args, **kwargs)
        assert self.pair is not None
        moving = [flat[i] for i in self._moving]
        with torch.no_grad():
            for static, new in zip(self._statics, moving, strict=True):
                static.copy_(new)
        wanted = [new for static, new in zip(self._statics, moving, strict=True) if static.requires_grad]
        return self.pair([*wanted, *self._parameters])

    def _capture(self, forward: Callable[..., Any], flat: list[Any], spec: TreeSpec) -> None:
        # Offsets keep their address; what the layers before compute is copied in.
        self._moving = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.is_floating_point()]
        self._constants = [None if i in self._moving else x for i, x in enumerate(flat)]
        self._spec = spec
        self._statics = [flat[i].detach().clone().requires_grad_(flat[i].requires_grad) for i in self._moving]
        self._parameters = [p for p in self._layer.parameters() if p.requires_grad]
        static = list(self._constants)
        for i, tensor in zip(self._moving, self._statics, strict=True):
            static[i] = tensor
        args, kwargs = tree_unflatten(static, spec)
        leaves = [*(x for x in self._statics if x.requires_grad), *self._parameters]
        for _ in range(self._backend.warm_ups):
            use = RandomUse()
            with without_saved_states(use), use, _fresh_pack():
                self._backend.warm_up(lambda: _forward_backward(forward(*args, **kwargs), leaves))
            use.refuse()
        with _fresh_pack():
            self.pair = GraphPair(self._backend, lambda: forward(*args, **kwargs), leaves, self._turn)

    def _fits(self, flat: list[Any], spec: TreeSpec) -> bool:
        if spec != self._spec:
            return False
        for i, (constant, x) in enumerate(zip(self._constants, flat, strict=True)):
            if i not in self._moving and not (x is constant if isinstance(x, Tensor) else x == constant):
                return False
        return all(
            flat[i].shape == static.shape and flat[i].dtype == static.dtype
            for i, static in zip(self._moving, self._statics, strict=True)
        )


def _forward_backward(output: Any, leaves: list[Tensor]) -> None:
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found], allow_unused=True)


@contextlib.contextmanager
def _fresh_pack() -> Iterator[None]:
    """Let a layer work out again, inside its graph, what layers before it remembered for this batch."""
    pack = current_pack()
    if pack is None:
        yield
        return
    pack.cache, before = {}, pack.cache
    try:
        yield
    finally:
        pack.cache = before
