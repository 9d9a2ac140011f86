"""A step and a bucket -> graphs of its forward and backward, captured on a dummy batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thd._static import static_shapes
from lightning_thd.batch import THDBatch
from lightning_thd.callbacks.cuda_graph.attribute_reads import constants_of, reads_of
from lightning_thd.callbacks.cuda_graph.backend import Backend
from lightning_thd.callbacks.cuda_graph.buckets import Bucket, Layout
from lightning_thd.callbacks.cuda_graph.captured import CapturedStep, StepFunction
from lightning_thd.callbacks.cuda_graph.checkpoint_rng import RandomUse, without_saved_states
from lightning_thd.callbacks.cuda_graph.errors import CaptureError
from lightning_thd.callbacks.cuda_graph.guards import HostValue, LoggedValue, check_numbers, guarded
from lightning_thd.callbacks.cuda_graph.layers import GraphedLayers
from lightning_thd.callbacks.cuda_graph.module_state import (
    Fingerprint,
    host_state,
    refuse_hooked_parameters,
    refuse_host_changes,
    refuse_sums_over_slots,
    restored,
)
from lightning_thd.callbacks.cuda_graph.pair import GraphPair, Turn
from lightning_thd.callbacks.cuda_graph.static_batch import StaticBatch, StaticInputs, dummy_batch


def capture_step(
    backend: Backend,
    function: StepFunction,
    module: nn.Module,
    bucket: Bucket,
    batch: THDBatch,
    rest: tuple[Any, ...],
    turn: Turn,
    layers: GraphedLayers | None,
) -> CapturedStep:
    """Warm up and capture, leaving the module, the random states and the Trainer's logs as they were.

    Args:
        backend: captures.
        function: the step.
        module: what it trains.
        bucket: the shape.
        batch: a real one, looked at for its device and the axes of its positions only.
        rest: further arguments of the step; a captured step gets stand-ins that raise when used.
        turn: shared by all graphs of one memory pool.
        layers: captures layers in place of the whole step.

    Raises:
        CaptureError: for whatever a replay could not repeat.
    """
    device = batch.input_ids.device
    axes = None if batch.position_ids.ndim == 1 else batch.position_ids.shape[0]
    leaves = Fingerprint(module).parameters
    refuse_hooked_parameters(leaves)
    refuse_sums_over_slots(module)
    wide = any(x.dtype == torch.float64 for x in leaves)
    inputs = StaticInputs(bucket, device, axes=axes, scale_dtype=torch.float64 if wide else torch.float32)
    dummy = dummy_batch(_full(bucket), device, axes=axes)
    inputs.fill(dummy)
    if layers is not None:
        return layers.capture(function, module, inputs, dummy, rest, turn, leaves)
    hidden = tuple(HostValue(f"argument {i + 2} of the step (batch_idx)") for i in range(len(rest)))
    with restored(module), static_shapes(), _uncached_autocast(device):
        runs = warm_up(backend, lambda b: function(module, b, *hidden), module, inputs, leaves)
        with guarded(module) as logged, without_saved_states(), reads_of(module) as reads:
            pair = GraphPair(backend, lambda: _checked(function(module, inputs.batch, *hidden)), leaves, turn)
    check_numbers([*runs, logged], {bucket.slots, bucket.sequences, bucket.max_seqlen})
    return CapturedStep(inputs, leaves, lambda *_: pair(leaves), logged, module, constants_of(module, reads))


def warm_up(
    backend: Backend,
    run: Callable[[StaticBatch], Any],
    module: nn.Module,
    inputs: StaticInputs,
    leaves: list[Tensor],
) -> list[list[LoggedValue]]:
    """Run forward and backward some times on copies of the buffers.

    Copies, as kernels may remember what they worked out for a tensor by its identity, and would then not
    work it out again for the graph.

    Returns:
        What each run logged.
    """
    runs = []
    before = host_state(module)
    for i in range(backend.warm_ups):
        if i == 1:  # the first run may build tables and fill caches
            before = host_state(module)
        use = RandomUse()
        copy = _copy_of(inputs.batch)
        with guarded(module) as logged, without_saved_states(use), use:
            backend.warm_up(lambda copy=copy: _forward_backward(run, copy, leaves))  # type: ignore[misc]
        use.refuse()
        runs.append(logged)
    refuse_host_changes(module, before)
    return runs


def _forward_backward(run: Callable[[StaticBatch], Any], batch: StaticBatch, leaves: list[Tensor]) -> None:
    output = _checked(run(batch))
    wanted = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    if wanted:
        with torch.autocast(wanted[0].device.type, enabled=False):
            torch.autograd.grad(wanted, leaves, [torch.ones_like(x) for x in wanted], allow_unused=True)


def _checked(output: Any) -> Any:
    """Refuse what a replay cannot give back."""
    if output is None:
        raise CaptureError("the step returned None, which skips a batch; a replay cannot decide that again.")
    others = [x for x in tree_leaves(output) if x is not None and not isinstance(x, Tensor)]
    if others:
        raise CaptureError(
            f"the step returned a {type(others[0]).__name__} beside its tensors, which a replay would return "
            "unchanged always. Return tensors only."
        )
    return output


def _copy_of(batch: StaticBatch) -> StaticBatch:
    names = ("input_ids", "targets", "position_ids", "cu_seqlens", "cu_seqlens_padded", "loss_scale")
    tensors: dict[str, Any] = {name: getattr(batch, name).clone() for name in names}
    return StaticBatch.build(max_seqlen=batch.max_seqlen, **tensors)


def _full(bucket: Bucket) -> Layout:
    return Layout(bucket.slots, bucket.sequences, bucket.max_seqlen)


@contextlib.contextmanager
def _uncached_autocast(device: torch.device) -> Iterator[None]:
    """Switch off autocast's cache of cast weights: it would outlive the graph, or hold memory of it."""
    kind = device.type
    with torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    ):
        yield
