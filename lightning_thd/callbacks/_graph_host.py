"""A Trainer and its module -> whether CUDA graphs can run there, its planner, its throughput callbacks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L

from lightning_thd.callbacks.monitor import THDThroughputMonitor
from lightning_thd.cuda_graph.capture.backend import Backend
from lightning_thd.cuda_graph.limits.support import sharded_by
from lightning_thd.packing import PackPlanner


def unsupported(trainer: L.Trainer, module: L.LightningModule, backend: Backend) -> str | None:
    """Return why a fit can have no CUDA graphs, or None."""
    missing = backend.unavailable(trainer.strategy.root_device)
    if missing is not None:
        return missing
    if not module.automatic_optimization:
        return (
            "the module has automatic_optimization=False, so training_step contains the optimizer. Wrap the "
            "part that makes the loss: GraphedStep(function, module, buckets=...)"
        )
    if getattr(trainer.strategy, "sharing", None) is not None:
        return (
            "context_parallel_size='dynamic' gives microbatches other degrees from step to step, so that "
            "ranks would replay and run eagerly at the same time. Set a fixed context_parallel_size"
        )
    wrapped = trainer.strategy.model
    found = sharded_by(module) or (None if wrapped is None else sharded_by(wrapped))
    if found is not None:
        return f"the module is sharded by {found}, whose gathered parameters have no fixed address"
    return None


def leave_out_of_rates(trainer: L.Trainer) -> None:
    """Tell throughput callbacks to leave this step, which also captured graphs, out of their rates."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set outside __init__
        if isinstance(callback, THDThroughputMonitor):
            callback.exclude_step()


def planner_of(trainer: L.Trainer) -> tuple[PackPlanner, int] | None:
    """Return the planner of the training data and the number of ranks that read different data."""
    planner = getattr(trainer.train_dataloader, "planner", None)
    if not isinstance(planner, PackPlanner):
        return None
    sampler: Any = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return planner, int(sampler.get("num_replicas", 1))
