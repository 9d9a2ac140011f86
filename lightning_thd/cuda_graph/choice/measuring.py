"""A step on the device -> its costs, eager and replayed, for the choice of buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph.agree import all_agree
from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.capture.capture import capture_step
from lightning_thd.cuda_graph.capture.captured import CapturedStep, StepFunction
from lightning_thd.cuda_graph.capture.pair import Turn
from lightning_thd.cuda_graph.choice.costs import GraphCosts, IntArray
from lightning_thd.cuda_graph.choice.timing import compare
from lightning_thd.cuda_graph.shapes.buckets import Bucket, Layout


def measured_costs(
    backend: Backend,
    function: StepFunction,
    module: nn.Module,
    batch: THDBatch,
    rest: tuple[Any, ...],
    *,
    needs: IntArray,
    slots: int,
    max_seqlen: int,
) -> GraphCosts | None:
    """Capture a small and a large bucket, time both and eager, and drop them again.

    Args:
        backend: captures and measures.
        function: the step.
        module: what it trains.
        batch: a real one.
        rest: further arguments of the step.
        needs: int64 ``[N]``, sequences that batches need.
        slots: T.
        max_seqlen: of the buckets.

    Returns:
        The costs in seconds, rank 0's on every rank; None where times mean nothing or the capture fails,
        which the capture of the chosen buckets then explains.
    """
    if backend.time_s(lambda: None) is None:
        return None
    least = -(-slots // max_seqlen)
    small = max(least, int(np.quantile(needs, 0.5)))
    large = max(2 * small, int(needs.max()))
    layout, device = Layout.of_batch(batch), batch.input_ids.device
    eager_s, measured = 1.0, {}
    for count in (large, small):
        bucket = Bucket(slots=slots, sequences=count, max_seqlen=max_seqlen)
        step = _try_capture(backend, function, module, bucket, batch, rest)
        # Before it runs: ranks of a model-parallel group can only do so together.
        if not all_agree(step is not None, device):
            backend.release()
            return None
        assert step is not None
        found = compare(backend, function, module, step, layout, rest)
        assert found is not None
        eager_s, measured[count] = found.eager_s, found.replay_s
        del step  # before its pool is let go
        backend.release()
    return _from_rank_0(GraphCosts.from_replays(eager_s, measured), device)


def _try_capture(
    backend: Backend,
    function: StepFunction,
    module: nn.Module,
    bucket: Bucket,
    batch: THDBatch,
    rest: tuple[Any, ...],
) -> CapturedStep | None:
    try:
        return capture_step(backend, function, module, bucket, batch, rest, Turn(), None)
    except Exception:  # the capture of the chosen buckets meets it again, and says what it is
        return None


def _from_rank_0(costs: GraphCosts, device: torch.device) -> GraphCosts:
    """Let all ranks choose the same buckets."""
    if not (dist.is_available() and dist.is_initialized()):
        return costs
    values = torch.tensor([costs.eager, costs.graph, costs.per_sequence], dtype=torch.float64, device=device)
    dist.broadcast(values, 0)
    eager, graph, per_sequence = values.tolist()
    return GraphCosts(eager=eager, graph=graph, per_sequence=per_sequence)
