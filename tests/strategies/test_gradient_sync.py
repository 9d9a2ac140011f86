"""Gradients are exchanged once a step, however many microbatches it has, and weights too if they may."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as users

from lightning_thd import Packs, Sequences
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, data, full_parameters, make_trainer
from tests.tiny import largest_error

STEPS = 2


def count(name: str, step: Packs | Sequences, **options: Any) -> tuple[int, int, dict[str, Tensor]]:
    """Count the calls of a collective of FSDP2 in three steps, and the microbatches; return the weights."""
    calls = 0
    original: Any = getattr(users, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(users, name, counting)
        accumulate = step.n // dist.get_world_size() if isinstance(step, Packs) else 1
        module, layout = Job(), Layout(dp=2, options=options)
        trainer = make_trainer(layout, max_steps=STEPS, accumulate_grad_batches=accumulate)
        trainer.fit(module, data(step))
    return calls, module.microbatches, full_parameters(module.model)


def count_all() -> list[tuple[int, int, dict[str, Tensor]]]:
    reduced = [count("foreach_reduce", step) for step in (Sequences(24), Packs(6))]
    gathered = [
        count("foreach_all_gather", Sequences(24), reshard_after_forward=free) for free in (False, True)
    ]
    return [*reduced, *gathered]


def test_fsdp2_reduces_once_a_step_and_gathers_once_what_it_does_not_free() -> None:
    for *found, (more, _, wanted) in run_ranks(count_all, 2):
        for calls, microbatches, _ in found:
            assert calls == STEPS * 3  # two layers, and the rest of the model
            assert microbatches >= 2 * STEPS
        (_, microbatches, weights) = found[-1]
        assert more > microbatches * 3
        assert largest_error(weights, wanted) == 0.0
