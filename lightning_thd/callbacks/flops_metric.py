"""SeqStats of every microbatch -> the FLOPs of all data-parallel ranks, as a torchmetrics Metric."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_thd._checks import choice, instance
from lightning_thd.flops.model import FlopsModel, from_ints, num_ints, to_ints
from lightning_thd.flops.rates import Work, count
from lightning_thd.flops.terms import COLUMNS, FlopsBreakdown
from lightning_thd.parallel.across_ranks import gather_ints
from lightning_thd.stats import SeqStats


class THDFlops(Metric):
    """FLOPs of the sequences seen since the last reset, over all data-parallel ranks.

    Counts are int64 until ``fold`` adds them to float64 totals, which are the same on all ranks and are what
    a checkpoint holds: FLOPs themselves would overflow int64 within hours on one GPU.

    Args:
        model: counts the FLOPs.
        work: a training step, or a forward pass only.
        process_group: the data-parallel ranks; peers with the same sequences must not be in it.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False
    counts: Tensor

    def __init__(
        self,
        model: FlopsModel,
        *,
        work: Work = "training",
        process_group: Any = None,
    ) -> None:
        super().__init__(process_group=process_group, dist_sync_fn=_gather)
        instance(model, "model", FlopsModel, advice="Pass FlopsModel.from_config(config).")
        choice(work, "work", *get_args(Work))
        self.model = model
        self.work = work
        self.totals = dict.fromkeys(COLUMNS, 0.0)
        self.add_state("counts", torch.zeros(num_ints(model), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, stats: SeqStats) -> None:
        """Count one microbatch, or the sum of several, given as ``SeqStats``.

        Args:
            stats: counted with ``model.windows``.
        """
        count(self.model, stats, work=self.work)  # refuses stats of another model before they are mixed in
        self.counts += torch.tensor(to_ints(stats, self.model), dtype=torch.int64, device=self.counts.device)

    def compute(self) -> Tensor:
        """Return the model's FLOPs of all counted sequences, float64."""
        return torch.tensor(float(self.breakdown().model), dtype=torch.float64)

    def breakdown(self) -> FlopsBreakdown:
        """Return the FLOPs by part: this rank's counts (in ``compute`` all ranks') plus folded totals."""
        return self._counted() + _breakdown(self.totals)

    @property
    def folded(self) -> float:
        """Return the model FLOPs in the folded totals, over all ranks."""
        return sum(self.totals.values()) - self.totals["recompute"]

    def fold(self) -> None:
        """Add the counts of all ranks to the totals and count from zero again; every rank has to call it."""
        with self.sync_context(should_sync=True, should_unsync=True, dist_sync_fn=_gather):
            self.add_total(self._counted())
        self.counts.zero_()

    def add_total(self, flops: FlopsBreakdown) -> None:
        """Add FLOPs that are summed over the ranks already, the same on each of them."""
        self.totals = {name: total + getattr(flops, name) for name, total in self.totals.items()}
        self._computed = None

    def reset(self) -> None:
        """Set counts and totals to zero."""
        super().reset()
        self.totals = dict.fromkeys(COLUMNS, 0.0)

    def get_extra_state(self) -> dict[str, float]:
        """Return the totals for a checkpoint; call ``fold`` first to include the latest counts."""
        return dict(self.totals)

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Restore the totals from a checkpoint."""
        self.totals = {name: float(state[name]) for name in COLUMNS}
        self._update_count = max(self._update_count, 1)  # or compute warns that nothing was counted

    def _counted(self) -> FlopsBreakdown:
        return count(self.model, from_ints(self.counts.tolist(), self.model), work=self.work)


def _breakdown(totals: dict[str, float]) -> FlopsBreakdown:
    whole: dict[str, Any] = {name: int(flops) for name, flops in totals.items()}
    return FlopsBreakdown(**whole)


def _gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Gather an integer tensor of known length from all ranks in one collective."""
    rows = gather_ints(tensor.tolist(), group=group, device=tensor.device)
    return [torch.tensor(row, dtype=tensor.dtype, device=tensor.device) for row in rows]
