"""Gradients are exchanged once a step, however many microbatches it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from lightning_thd import Packs, Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, make_trainer

STEPS = 3


def count(step: Packs | Sequences) -> tuple[int, int]:
    """Count the reduce-scatters of gradients in three steps, and the microbatches."""
    calls = 0
    kept: Any = collectives.foreach_reduce
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as users

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return kept(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users, "foreach_reduce", counting)
        accumulate = step.n // dist.get_world_size() if isinstance(step, Packs) else 1
        module = Job()
        trainer = make_trainer(Layout(dp=2), max_steps=STEPS, accumulate_grad_batches=accumulate)
        trainer.fit(module, data(step))
    return calls, module.microbatches


@pytest.mark.parametrize("step", [Sequences(24), Packs(6)], ids=["sequences", "packs"])
def test_fsdp2_reduces_once_a_step(step: Packs | Sequences) -> None:
    for calls, microbatches in run_ranks(count, 2, step):
        assert calls == STEPS * 3  # two layers, and the rest of the model
        assert microbatches >= 2 * STEPS
