"""Lengths, the capacity of a rank, and degrees -> the plan of any step, in which ranks share long sequences.

The degree of a sequence is the number of ranks that share it. A step has the sequences that ``PackPlanner``
gives it. So a killed job resumes with the same sequences on any number of ranks that the largest degree
divides. The largest degree may change only with ``Sequences(n)``, if all sequences fit the old and new one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

import numpy as np

from lightning_thd.packing.bins import regrouped
from lightning_thd.packing.degrees import IntArray, Sharing, Waits, check_tiling
from lightning_thd.packing.entries import Lengths
from lightning_thd.packing.groups import DynamicBins, share_out
from lightning_thd.packing.plan import FloatArray, Packs, Sequences, StepPlan
from lightning_thd.packing.planner import PackPlanner

__all__ = ["DynamicBins", "Sharing", "Waits", "check_tiling", "share_out"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicStepPlan(StepPlan):
    """One optimizer step in which each microbatch has its own degree.

    The ranks of a group share one pack, and ``spans`` repeats its spans for each rank.
    """

    # int64 ``[dp, num_microbatches]``, the number of ranks that share the microbatch. A group of c ranks
    # begins at a multiple of c.
    degrees: IntArray
    load: FloatArray  # float64 ``[dp, num_microbatches]``, the work of one rank, exchanges included

    @cached_property
    def work(self) -> FloatArray:
        """Return the work of one rank in each microbatch, including its exchange of keys."""
        return self.load

    @property
    def degree_table(self) -> IntArray:
        """Return ``degrees``."""
        return self.degrees

    @cached_property
    def weights(self) -> FloatArray | None:
        """Return the weights of ``StepPlan``; ranks that share a pack get equal parts of its weight."""
        whole: FloatArray | None = super().weights
        return None if whole is None else whole / self.degrees

    @cached_property
    def tokens(self) -> FloatArray:
        """Return the tokens of ``StepPlan``; ranks that share a pack get equal parts of its tokens."""
        whole: FloatArray = super().tokens
        return whole / self.degrees


class DynamicPlanner(PackPlanner):
    """Plans the steps of every epoch: the degree, the ranks and the microbatch of each sequence.

    With ``Packs(n)`` a step takes the sequences of n packs, each as large as the largest group, so that all
    steps have about the same number of tokens. Then it distributes these sequences again.
    """

    sharing: Sharing

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,  # slots of one rank
        *,
        global_batch: Packs | Sequences,
        sharing: Sharing,
        **options: Any,  # those of ``PackPlanner``
    ) -> None:
        for name in ("align", "scheduler", "schedule", "patches", "max_patches"):
            if options.pop(name, None) is not None:
                raise ValueError(
                    f"{name}= cannot be given under context_parallel_size='dynamic'. Leave it out."
                )

        self.sharing = sharing
        self.rank_capacity = int(capacity)
        super().__init__(
            lengths,
            capacity * sharing.max_degree,
            global_batch=global_batch,
            align=sharing.align(sharing.max_degree),
            **options,
        )
        if self.settings["multiples"] is None:  # all sequences fit, so steps do not depend on the capacity
            self.settings["capacity"] = None

    def step(self, epoch: int, k: int, dp: int = 1) -> DynamicStepPlan:
        """Return the plan of a step without computing the steps before it; see ``PackPlanner.step``."""
        self._check_request(epoch, k, 1)  # not dp: n of Packs(n) need not be a multiple of it
        check_tiling(dp, self.sharing.max_degree)
        if self._packs is None:
            spans = self._sequences(epoch, k)
        else:
            n = self.global_batch.n
            spans, _ = self._packs.read(epoch, k * n, min((k + 1) * n, self._packs.total))
        bins = share_out(spans.lengths, self.rank_capacity, ranks=dp, sharing=self.sharing, cost=self.cost)

        # As if one rank ran all groups: this plan counts each sequence once. The fields below then repeat
        # what a group has for each of its ranks.
        whole = self._make_plan(epoch, k, 1, spans.take(bins.order), bins.offsets)
        group = _groups_of_ranks(bins, dp)
        repeated, offsets = regrouped(bins.offsets, group.ravel())
        values = {field.name: getattr(whole, field.name) for field in fields(StepPlan)}
        values.update(
            dp=dp,
            num_microbatches=bins.num_microbatches,
            spans=spans.take(bins.order[repeated]),
            offsets=offsets,
            measure=partial(np.take, whole.span_work, repeated),
            patches=whole.patches[repeated],
        )
        return DynamicStepPlan(**values, degrees=bins.degree[group], load=bins.load[group])


def _groups_of_ranks(bins: DynamicBins, dp: int) -> IntArray:
    """Return the index of the group that each rank runs in each microbatch, int64 ``[dp, M]``."""
    # One entry for each rank of each group: the group, and the rank's number inside the group.
    group = np.repeat(np.arange(len(bins.degree)), bins.degree)
    starts = np.cumsum(bins.degree) - bins.degree
    number = np.arange(len(group)) - np.repeat(starts, bins.degree)

    group_of = np.empty((dp, bins.num_microbatches), dtype=np.int64)
    group_of[bins.first[group] + number, bins.microbatch[group]] = group
    return group_of
