"""Torchmetrics objects of a user's module -> counted once a token and rank, and one value a step.

Lightning leaves the synchronisation of a ``torchmetrics.Metric`` to the metric itself, which gathers from all
ranks of the job, and takes what it returned last for the value of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

# Reductions by which the state of several updates is that of their parts.
_JOINED = (dim_zero_sum, dim_zero_cat, dim_zero_max, dim_zero_min)


class SyncedMetrics:
    """Makes metrics gather from the ranks that see different tokens, until it is closed.

    Args:
        metrics: of the user's module; one with a ``process_group`` of its own keeps it.
        group: these ranks; tensor-parallel ranks all see the same tokens and would count them again.
    """

    def __init__(self, metrics: Sequence[Metric], group: dist.ProcessGroup) -> None:
        self._metrics = [metric for metric in metrics if metric.process_group is None]
        for metric in self._metrics:
            metric.process_group = group

    def close(self) -> None:
        """Take the group from the metrics: it ends with the job, and no copy of a module can hold it."""
        for metric in self._metrics:
            metric.process_group = None


def metrics_in(module: nn.Module) -> list[Metric]:
    """Return the metrics among the children of a module."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def refuse_sums(module: nn.Module, *, dynamic: bool) -> None:
    """Refuse sums over ranks that share packs, where a number may be the pack's or this rank's slots'.

    Args:
        module: of the user, trained under context parallelism.
        dynamic: other ranks share each microbatch.

    Raises:
        MisconfigurationException: naming the metric, unless its ``process_group`` says which it is.
    """
    for name, child in module.named_modules():
        if isinstance(child, SumMetric) and child.process_group is None:
            raise MisconfigurationException(
                f"{type(module).__name__}.{name} is a {type(child).__name__} while ranks share packs: what "
                "is the pack's would count on each of them. In setup(), set its process_group to "
                f"{groups_of_sums(dynamic=dynamic)}"
            )


def groups_of_sums(*, dynamic: bool) -> str:
    """Return the end of a message: the groups that sums are to be made over.

    Args:
        dynamic: other ranks share each microbatch, so that no group has each pack once.
    """
    own = "torch.distributed.group.WORLD for what this rank has counted of its own slots"
    if dynamic:
        return f"{own}; with context_parallel_size='dynamic' no group has every pack once."
    return f"self.trainer.strategy.data_parallel_group for what is the pack's, or to {own}."


class _Held(NamedTuple):
    """A metric, its state before a step, and the updates in that."""

    metric: Metric
    state: dict[str, Any]
    updates: int


class StepMetrics:
    """Gives metrics that ``training_step`` logs on_step the value of all microbatches of a step.

    Between ``begin`` and ``finish`` a metric known to be logged so holds the step alone; then it is joined
    with what it held before. Maxima and minima are those of the microbatches.

    Args:
        metrics: of the user's module.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._before: dict[int, int] = {}  # by id: a metric's hash is of its state
        self._held: dict[int, _Held] = {}
        self._values: dict[int, list[Tensor]] = {}

    def begin(self, logged: Iterable[Any]) -> None:
        """Set the metrics that earlier steps logged on_step apart from those steps.

        Args:
            logged: Lightning's results that are metrics logged on_step.
        """
        self._before = {id(metric): metric._update_count for metric in self._metrics}
        for metric in {id(result.value): result.value for result in logged}.values():
            if can_join(metric) and metric._update_count:
                state = {name: _copied(getattr(metric, name)) for name in metric._defaults}
                self._held[id(metric)] = _Held(metric, state, metric._update_count)
                metric.reset()

    def end(self, logged: Iterable[Any], *, several: bool) -> None:
        """Collect what a microbatch has given.

        Args:
            logged: Lightning's results that are metrics logged on_step.
            several: the step has more than one microbatch.

        Raises:
            MisconfigurationException: for a metric that cannot tell the value of several microbatches.
        """
        for result in logged:
            metric: Any = result.value
            if isinstance(metric, MaxMetric | MinMetric):
                told: Any = metric._forward_cache
                if told is not None:
                    self._values.setdefault(id(metric), []).append(told)
            elif several and not can_join(metric):
                raise MisconfigurationException(
                    f"self.log({result.meta.name!r}, {type(metric).__name__}, on_step=True) in a step of "
                    "several microbatches, but this metric tells the value of the last one alone. Log it "
                    "with on_step=False, on_epoch=True, or, if its states are sums, concatenations, maxima "
                    "or minima of those of its batches, set full_state_update = False in its class."
                )

    def finish(self, logged: Iterable[Any]) -> None:
        """Write the values of the step where Lightning reads them, and join the metrics with their past."""
        for result in logged:
            metric = result.value
            if id(metric) in self._values:
                values = torch.stack(self._values[id(metric)])
                result._forward_cache = values.max() if isinstance(metric, MaxMetric) else values.min()
            elif metric._update_count and metric._forward_cache is not None:
                alone = id(metric) in self._held or self._before.get(id(metric)) == 0
                # Without: logged for the first time, long after its first update. The next steps tell it.
                result._forward_cache = _own_value(metric) if alone else None
        for held in self._held.values():
            _join(held)
        self._held.clear()
        self._values.clear()


def _join(held: _Held) -> None:
    metric = held.metric
    updates = metric._update_count
    if updates:
        with torch.no_grad():
            metric._reduce_states(held.state)
    else:
        for name, value in held.state.items():
            setattr(metric, name, value)
    metric._update_count = held.updates + updates
    metric._computed = None


def can_join(metric: Metric) -> bool:
    """Return whether the states of a metric's batches add up to that of all of them."""
    return (
        metric.full_state_update is False
        and not metric.dist_sync_on_step
        and not isinstance(metric, WrapperMetric)
        and all(reduction in _JOINED for reduction in metric._reductions.values())
    )


def _own_value(metric: Metric) -> Any:
    """Compute a metric of this rank alone, as its ``forward`` does."""
    metric._to_sync, metric._should_unsync = False, False
    try:
        return metric.compute()
    finally:
        metric._to_sync, metric._should_unsync = metric.sync_on_compute, True
        metric._computed = None


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state
