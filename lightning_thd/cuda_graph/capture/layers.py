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

from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.gradients import GradientBuffers
from lightning_thd.cuda_graph.capture.layer_call import LayerCall
from lightning_thd.cuda_graph.capture.pair import Turn
from lightning_thd.cuda_graph.capture.subject import Subject, differentiable, differentiate
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.limits.attribute_reads import reads_of
from lightning_thd.cuda_graph.limits.guards import guarded
from lightning_thd.cuda_graph.limits.module_state import restored
from lightning_thd.cuda_graph.shapes.padding import pad_batch
from lightning_thd.cuda_graph.shapes.static_batch import StaticInputs


class GraphedLayers:
    """The layers of a module that have one of the given names, captured one by one.

    Args:
        backend: captures.
        names: last parts of names of submodules, ``("self_attn", "mamba")``.
    """

    def __init__(self, backend: Backend, names: Sequence[str]) -> None:
        self.backend = backend
        self.names = tuple(names)
        self.active: dict[nn.Module, LayerCall] = {}
        self._chosen: list[tuple[nn.Module, Any]] = []
        self._own: dict[nn.Module, tuple[Backend, Turn, GradientBuffers]] = {}

    def capture(
        self, subject: Subject, inputs: StaticInputs, rest: tuple[Any, ...], leaves: list[Tensor]
    ) -> CapturedStep:
        """Run the step once on a dummy batch and capture every chosen layer as it is called."""
        if inputs.cut is not None:
            raise CaptureError(
                "scope='layers' pads whole packs, and context parallelism cuts them. Use scope='step', or "
                "context_parallel_size=1."
            )
        module = subject.module
        self._install(module)
        offsets = (inputs.batch.cu_seqlens, inputs.batch.cu_seqlens_padded)
        fixed = frozenset(x.data_ptr() for x in offsets)
        calls = {
            layer: LayerCall(backend, layer, turn, buffers, fixed)
            for layer, (backend, turn, buffers) in self._own.items()
        }
        batch = self._static(inputs.dummy(), inputs)
        with (
            restored(module),
            static_shapes(),
            guarded(module),
            self._using(calls),
            reads_of(module) as reads,
        ):
            differentiate(differentiable(subject(batch, *rest)), leaves)
        if not any(call.pair for call in calls.values()):
            raise CaptureError(
                f"no layer named {self.names} was called by the step. Name layers that the forward pass runs."
            )

        def run(batch: THDBatch, *rest: Any) -> Any:
            with self._using(calls), static_shapes():
                return subject(self._static(batch, inputs), *rest)

        inside = {id(child) for layer, _ in self._chosen for child in layer.modules()}
        return CapturedStep(inputs, leaves, run, [], module, reads.inside(inside))

    def remove(self) -> None:
        """Restore the layers' own forward."""
        for layer, before in self._chosen:
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before
        self._chosen.clear()
        for backend, _, _ in self._own.values():
            backend.release()
        self._own.clear()

    @property
    def pending(self) -> bool:
        """Return whether a backward of a replayed layer is outstanding, which still reads static offsets."""
        return any(turn.pending for _, turn, _ in self._own.values())

    @contextlib.contextmanager
    def _using(self, calls: dict[nn.Module, LayerCall]) -> Iterator[None]:
        self.active, before = calls, self.active
        try:
            yield
        finally:
            self.active = before

    def _static(self, batch: THDBatch, inputs: StaticInputs) -> THDBatch:
        """Return the batch padded to the bucket, its offsets in the static buffers that graphs read."""
        inputs.fill(batch)
        static = inputs.batch
        names = ("cu_seqlens", "cu_seqlens_padded")
        return pad_batch(batch, inputs.bucket).replace(**{name: getattr(static, name) for name in names})

    def _install(self, module: nn.Module) -> None:
        if self._chosen:
            return
        found = _outermost(module, self.names)
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
            trained = sum(p.requires_grad for p in layer.parameters())
            self._own[layer] = (self.backend.separate(), Turn(), GradientBuffers(trained))

    def _forward_of(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def graphed_forward(*args: Any, **kwargs: Any) -> Any:
            call = self.active.get(layer)
            if call is None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return call(forward, args, kwargs)

        return graphed_forward


def _outermost(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Find the submodules with one of the names, leaving out those inside another one found."""
    found: dict[str, nn.Module] = {}
    for path, layer in module.named_modules():
        parts = path.split(".")
        inside = any(".".join(parts[:i]) in found for i in range(1, len(parts)))
        if parts[-1] in names and not inside:
            found[path] = layer
    return list(found.values())
