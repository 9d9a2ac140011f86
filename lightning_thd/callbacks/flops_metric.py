"""SeqStats of every microbatch -> the FLOPs of all data-parallel ranks, as a torchmetrics Metric."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_thd._checks import choice, instance
from lightning_thd.batch.upload import uploaded
from lightning_thd.flops.model import FlopsModel, from_ints, num_ints, to_ints
from lightning_thd.flops.rates import Work, count
from lightning_thd.stats import SeqStats


class THDFlops(Metric):
    """FLOPs of the sequences seen since the last reset, over all data-parallel ranks.

    The state is int64 counts of tokens and pairs, because FLOPs would overflow int64 within hours on one GPU.
    Like other metrics, it is not saved in checkpoints. ``THDThroughputMonitor`` logs FLOPs of a whole run.

    Args:
        model: the model that counts the FLOPs.
        work: a training step, or a forward pass only.
        process_group: the data-parallel ranks, without other ranks that hold the same sequences.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False
    counts: Tensor

    def __init__(self, model: FlopsModel, *, work: Work = "training", process_group: Any = None) -> None:
        super().__init__(process_group=process_group)
        instance(model, "model", FlopsModel, advice="Pass FlopsModel.from_config(config).")
        choice(work, "work", *get_args(Work))
        self.model = model
        self.work = work
        self.add_state("counts", torch.zeros(num_ints(model), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, stats: SeqStats) -> None:
        """Count one microbatch or the sum of several; make ``stats`` with ``windows=model.windows``."""
        count(self.model, stats, work=self.work)  # refuses stats of another model before they are added
        self.counts += uploaded(np.array(to_ints(stats, self.model), np.int64), self.counts.device)

    def compute(self) -> Tensor:
        """Return the model's FLOPs of all counted sequences, float64."""
        stats = from_ints(self.counts.tolist(), self.model)
        flops = count(self.model, stats, work=self.work)
        return torch.tensor(float(flops.model), dtype=torch.float64)
