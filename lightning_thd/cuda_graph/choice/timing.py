"""A captured step -> whether its replay is worth it, measured on dummy batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.subject import Example, Subject, differentiable, differentiate
from lightning_thd.cuda_graph.limits.guards import guarded
from lightning_thd.cuda_graph.limits.module_state import restored
from lightning_thd.cuda_graph.shapes.buckets import Layout

# A replay has to win by this much: within it, eager is as good and has no second copy of the gradients.
_MARGIN = 0.02


class Comparison(NamedTuple):
    """Seconds of forward and backward on one dummy batch, eager and replayed.

    Attributes:
        eager_s: eagerly, unpadded.
        replay_s: from the graph, padding and copies included.
    """

    eager_s: float
    replay_s: float

    @property
    def slower(self) -> bool:
        """Return whether a replay is not clearly faster than eager."""
        return self.replay_s > (1 - _MARGIN) * self.eager_s


def compare(subject: Subject, step: CapturedStep, example: Example) -> Comparison | None:
    """Time a bucket's replay against eager; return None where the backend's times mean nothing.

    Args:
        subject: what was captured.
        step: of one bucket.
        example: a real call; its layout is used where the bucket would serve it, else the bucket's own size.
    """
    backend, bucket, layout = subject.backend, step.inputs.bucket, Layout.of_batch(example.batch)
    if bucket.misfit(layout) is not None:
        layout = Layout(bucket.slots, bucket.sequences, bucket.max_seqlen)
    batch = step.inputs.dummy(layout)
    with restored(subject.module), guarded(subject.module):
        eager_s = backend.time_s(lambda: _both_ways(subject(batch, *example.rest), step))
        if eager_s is None:
            return None
        replay_s = backend.time_s(lambda: _both_ways(step.run(batch, *example.rest), step))
    assert replay_s is not None
    return Comparison(eager_s, replay_s)


def _both_ways(output: Any, step: CapturedStep) -> None:
    differentiate(differentiable(output), step.leaves)
