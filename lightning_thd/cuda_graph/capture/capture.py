"""A step and a bucket -> graphs of its forward and backward, captured on a dummy batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.gradients import GradientBuffers
from lightning_thd.cuda_graph.capture.layers import GraphedLayers
from lightning_thd.cuda_graph.capture.pair import GraphPair, Turn
from lightning_thd.cuda_graph.capture.stand_ins import StandIns
from lightning_thd.cuda_graph.capture.subject import Example, Subject, differentiable, differentiate
from lightning_thd.cuda_graph.errors import CaptureError
from lightning_thd.cuda_graph.limits.attribute_reads import reads_of
from lightning_thd.cuda_graph.limits.autocast import uncached_autocast
from lightning_thd.cuda_graph.limits.checkpoint_rng import RandomUse, without_saved_states
from lightning_thd.cuda_graph.limits.guards import HostValue, LoggedValue, check_numbers, guarded
from lightning_thd.cuda_graph.limits.module_state import (
    host_state,
    refuse_fp8,
    refuse_host_changes,
    refuse_sums_over_slots,
    restored,
)
from lightning_thd.cuda_graph.shapes.buckets import Bucket
from lightning_thd.cuda_graph.shapes.static_batch import StaticBatch, StaticInputs
from lightning_thd.cuda_graph.shapes.static_shard import Cut, refuse_cut
from lightning_thd.loss.watch import SlotLosses, recorded_losses, show


class Shared:
    """State that graphs of one memory pool share: the turn to use it, and the gradient buffers."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._parameters: list[int] = []
        self._buffers = GradientBuffers(0)

    def buffers_of(self, parameters: list[Tensor]) -> GradientBuffers:
        """Return gradient buffers for these parameters, new ones when the parameters have changed."""
        known = [id(x) for x in parameters]
        if known != self._parameters:
            self._parameters, self._buffers = known, GradientBuffers(len(known))
        return self._buffers


def capture_step(
    subject: Subject,
    bucket: Bucket,
    example: Example,
    shared: Shared,
    layers: GraphedLayers | None = None,
    *,
    piece_bytes: int | None = None,
) -> CapturedStep:
    """Warm up and capture, leaving the module, the random states and the Trainer's logs as they were.

    Args:
        subject: what is captured.
        bucket: the shape.
        example: a real call; a captured step gets stand-ins for its further arguments that raise when used.
        shared: with all graphs of the subject's memory pool.
        layers: captures layers in place of the whole step.
        piece_bytes: see ``GraphPair``.

    Raises:
        CaptureError: for whatever a replay could not repeat.
    """
    batch, module, backend = example.batch, subject.module, subject.backend
    refuse_cut(batch, bucket)
    refuse_sums_over_slots(module)
    refuse_fp8(module)
    parameters: list[Tensor] = [x for x in module.parameters() if x.requires_grad]
    inputs = _inputs(batch, bucket, wide=any(x.dtype == torch.float64 for x in parameters))
    if layers is not None:
        inputs.fill(inputs.dummy())
        return layers.capture(subject, inputs, example.rest, parameters)
    hidden = tuple(HostValue(f"argument {i + 2} of the step (batch_idx)") for i in range(len(example.rest)))
    stand_ins = StandIns(module, parameters)

    def run(static: StaticBatch) -> Any:
        with stand_ins.in_place():
            return _checked(subject(static, *hidden))

    def run_recorded() -> tuple[Any, list[Tensor]]:
        with recorded_losses() as found:
            output = run(inputs.batch)
        return output, [part for slots in found[-1:] for part in (slots.losses, slots.weights)]

    with restored(module), static_shapes(), uncached_autocast(example.device):
        runs = warm_up(backend, run, module, inputs, stand_ins.leaves)
        refuse_fp8(module)
        with guarded(module) as logged, without_saved_states(), reads_of(module) as reads, inputs.known():
            pair = GraphPair(
                backend,
                run_recorded,
                stand_ins.leaves,
                shared.turn,
                shared.buffers_of(parameters),
                piece_bytes=piece_bytes,
            )
    check_numbers([*runs, logged], {bucket.slots, bucket.sequences, bucket.max_seqlen})

    def replay(batch: THDBatch, *_: Any) -> Any:
        output, slots = pair(parameters)
        if slots:
            losses, weights = slots
            show(batch, SlotLosses(losses.flatten(), weights.flatten(), None))
        return output

    return CapturedStep(inputs, parameters, replay, logged, module, reads)


def _inputs(batch: THDBatch, bucket: Bucket, *, wide: bool) -> StaticInputs:
    return StaticInputs(
        bucket,
        batch.input_ids.device,
        axes=None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0],
        scale_dtype=torch.float64 if wide else torch.float32,
        cut=Cut.of(batch),
    )


def warm_up(
    backend: Backend,
    run: Callable[[StaticBatch], Any],
    module: nn.Module,
    inputs: StaticInputs,
    leaves: list[Tensor],
) -> list[list[LoggedValue]]:
    """Run forward and backward a few times, then ready ``inputs`` for capture; return what each run logged.

    Their own, as kernels may remember what they worked out for a tensor by its identity, and would then not
    work it out again for the graph.
    """
    runs = []
    before = host_state(module)
    for i in range(backend.warm_ups):
        if i == 1:  # the first run may build tables and fill caches
            before = host_state(module)
        use = RandomUse()
        own = inputs.again()
        own.fill(own.dummy())
        last = i == backend.warm_ups - 1
        with guarded(module) as logged, without_saved_states(use), use, own.known():
            backend.warm_up(functools.partial(_forward_backward, run, own.batch, leaves), last=last)
        use.refuse()
        own.learned()
        runs.append(logged)
    refuse_host_changes(module, before)
    inputs.prepare()
    inputs.fill(inputs.dummy())
    return runs


def _forward_backward(run: Callable[[StaticBatch], Any], batch: StaticBatch, leaves: list[Tensor]) -> None:
    outputs = differentiable(run(batch))
    if outputs:  # the capture refuses a step without, and says so
        differentiate(outputs, leaves)


def _checked(output: Any) -> Any:
    """Return the step's outputs, or raise for those that a replay could not return: None, non-tensors."""
    if output is None:
        raise CaptureError("the step returned None, which skips a batch; a replay cannot decide that again.")
    others = [x for x in tree_leaves(output) if x is not None and not isinstance(x, Tensor)]
    if others:
        raise CaptureError(
            f"the step returned a {type(others[0]).__name__} beside its tensors, which a replay would return "
            "unchanged always. Return tensors only."
        )
    return output
