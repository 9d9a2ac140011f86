"""A captured step -> whether its replay is worth it, measured on dummy batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.captured import CapturedStep, StepFunction
from lightning_thd.cuda_graph.limits.guards import guarded
from lightning_thd.cuda_graph.limits.module_state import restored
from lightning_thd.cuda_graph.shapes.buckets import Layout

# A replay has to win by this much: within it, eager is as good and has no second copy of the gradients.
_MARGIN = 0.02


class Comparison(NamedTuple):
    """Seconds of forward and backward on one dummy batch.

    Attributes:
        eager_s: eagerly, unpadded.
        replay_s: from the graph, padding and copies included.
    """

    eager_s: float
    replay_s: float

    @property
    def slower(self) -> bool:
        """Whether the graph does not win."""
        return self.replay_s > (1 - _MARGIN) * self.eager_s


def compare(
    backend: Backend,
    function: StepFunction,
    module: nn.Module,
    step: CapturedStep,
    layout: Layout,
    rest: tuple[Any, ...],
) -> Comparison | None:
    """Measure a bucket, or give None where the backend's times mean nothing.

    Args:
        backend: measures.
        function: the step.
        module: what it trains.
        step: captured.
        layout: of a real batch; used where the bucket would serve it, else the bucket's own size.
        rest: further arguments of the step.
    """
    bucket = step.inputs.bucket
    if bucket.misfit(layout) is not None:
        layout = Layout(bucket.slots, bucket.sequences, bucket.max_seqlen)
    batch = step.inputs.dummy(layout)
    with restored(module), guarded(module):
        eager_s = backend.time_s(lambda: _both_ways(lambda: function(module, batch, *rest), step))
        if eager_s is None:
            return None
        replay_s = backend.time_s(lambda: _both_ways(lambda: step.run(batch, *rest), step))
    assert replay_s is not None
    return Comparison(eager_s, replay_s)


def _both_ways(forward: Any, step: CapturedStep) -> None:
    loss = loss_of(forward())
    with torch.autocast(loss.device.type, enabled=False):
        torch.autograd.grad(loss, step.leaves, allow_unused=True)


def loss_of(output: Any) -> Tensor:
    """Find the loss in what a step returned."""
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return found[0] if len(found) == 1 else sum(x.sum() for x in found)  # type: ignore[return-value]
