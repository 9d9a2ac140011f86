"""A loop's loss function and its planner -> the same function, replayed from CUDA graphs where it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from lightning.fabric.wrappers import _FabricModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_thd.batch import THDBatch
from lightning_thd.cuda_graph import GraphCosts, GraphedStep
from lightning_thd.cuda_graph.capture.backend import Backend, CudaBackend
from lightning_thd.cuda_graph.choice.plan import (
    GraphPlan,
    needed_sequences,
    plan_graphs,
    problem_of,
    sequence_counts,
)
from lightning_thd.cuda_graph.choice.sampling import longest_sequence, sample_layouts
from lightning_thd.cuda_graph.limits.support import sharded_by
from lightning_thd.packing import PackPlanner

MaxSequences = int | Sequence[int] | Literal["auto"]


def graphed_loss(
    loss_fn: Callable[[nn.Module, THDBatch], Tensor],
    model: nn.Module,
    planner: object,
    *,
    ranks: int,
    device: torch.device,
    max_sequences: MaxSequences,
    costs: GraphCosts | None,
    require: bool,
    backend: Backend | None,
) -> GraphedStep | None:
    """Wrap a loss function into CUDA graphs, or return None, having said why that is not possible.

    Raises:
        ValueError: for numbers of sequences below 1, and with ``require`` where there can be no graphs.
    """
    given = sequence_counts(max_sequences)
    backend = CudaBackend() if backend is None else backend
    bare, precision = _unwrapped(model)
    reason = backend.unavailable(device) or _why_not(bare, planner)
    if reason is None:
        plan = _plan(cast("PackPlanner", planner), ranks, costs, given)
        rank_zero_info(plan.table())
        reason = problem_of(plan, given)
    if reason is not None:
        if require:
            raise ValueError(
                f"capture(require=True), but {reason}. Leave require out to train without graphs."
            )
        rank_zero_info(f"No CUDA graphs: {reason}.")
        return None

    def function(module: nn.Module, batch: Any, *rest: Any) -> Tensor:
        with precision():
            return loss_fn(module, batch)

    return GraphedStep(function, bare, buckets=plan.buckets(), backend=backend, require=require)


def _why_not(model: nn.Module, planner: object) -> str | None:
    if not isinstance(planner, PackPlanner):
        return f"the loader's plans come from a {type(planner).__name__}, which tells nothing of what comes"
    found = sharded_by(model)
    if found is None:
        return None
    return f"the model is sharded by {found}, whose gathered parameters have no fixed address"


def _plan(planner: PackPlanner, ranks: int, costs: GraphCosts | None, given: tuple[int, ...]) -> GraphPlan:
    slots, longest = planner.slots.usable, longest_sequence(planner)
    needs = needed_sequences(sample_layouts(planner, dp=ranks), slots, longest)
    return plan_graphs(needs, slots=slots, max_seqlen=longest, costs=costs, given=given)


def _unwrapped(model: nn.Module) -> tuple[nn.Module, Callable[[], AbstractContextManager[Any]]]:
    """Return the model without Fabric's wrapper, and the wrapper's autocast context."""
    if isinstance(model, _FabricModule):
        return model._forward_module, model._strategy.precision.forward_context
    return model, nullcontext
