"""A step on the device -> its costs, eager and replayed, for the choice of buckets."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from lightning_thd.cuda_graph.capture.capture import Shared, capture_step
from lightning_thd.cuda_graph.capture.captured import CapturedStep
from lightning_thd.cuda_graph.capture.subject import Example, Subject
from lightning_thd.cuda_graph.choice.costs import GraphCosts, IntArray
from lightning_thd.cuda_graph.choice.timing import compare
from lightning_thd.cuda_graph.shapes.buckets import Bucket
from lightning_thd.parallel.agreement import all_agree


def measured_costs(
    subject: Subject, example: Example, *, needs: IntArray, slots: int, max_seqlen: int
) -> GraphCosts | None:
    """Capture a small and a large bucket, time both against eager steps, and drop them.

    Returns:
        The costs in seconds, rank 0's on every rank; None where times mean nothing or the capture fails,
        which the capture of the chosen buckets then explains.
    """
    backend = subject.backend
    if backend.time_s(lambda: None) is None:
        return None
    least = -(-slots // max_seqlen)
    small = max(least, int(np.quantile(needs, 0.5)))
    large = max(2 * small, int(needs.max()))
    eager_s, measured = 1.0, {}
    for count in (large, small):
        step = _try_capture(subject, Bucket(slots=slots, sequences=count, max_seqlen=max_seqlen), example)
        # Before it runs: ranks of a model-parallel group can only do so together.
        if not all_agree(step is not None, example.device):
            backend.release()
            return None
        assert step is not None
        found = compare(subject, step, example)
        assert found is not None
        eager_s, measured[count] = found.eager_s, found.replay_s
        del step  # before its pool is let go
        backend.release()
    return _from_rank_0(GraphCosts.from_replays(eager_s, measured), example.device)


def _try_capture(subject: Subject, bucket: Bucket, example: Example) -> CapturedStep | None:
    try:
        return capture_step(subject, bucket, example, Shared())
    except Exception:  # the capture of the chosen buckets meets it again, and says what it is
        return None


def _from_rank_0(costs: GraphCosts, device: torch.device) -> GraphCosts:
    """Return rank 0's costs on every rank, so that all choose the same buckets."""
    if not (dist.is_available() and dist.is_initialized()):
        return costs
    values = torch.tensor([costs.eager, costs.graph, costs.per_sequence], dtype=torch.float64, device=device)
    dist.broadcast(values, 0)
    eager, graph, per_sequence = values.tolist()
    return GraphCosts(eager=eager, graph=graph, per_sequence=per_sequence)
