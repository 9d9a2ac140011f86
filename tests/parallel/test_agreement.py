"""Ranks about to run different things are told so, all of them, before any of them waits for the others."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_thd import THDBatch
from lightning_thd.batch import THDStep
from lightning_thd.parallel.agreement import check_agreement, digests
from lightning_thd.parallel.mesh import AxisSizes
from tests.ranks import run_ranks
from tests.strategies.jobs import Job, Layout, make_trainer
from tests.tiny import sequences


def batch(seed: int = 0, **fields: Any) -> THDBatch:
    return THDBatch.collate(sequences(3, seed=seed), align=Layout(cp=2).align, **fields)


def test_what_counts_as_the_same() -> None:
    assert digests(batch()) == digests(batch())
    own, shared = digests(batch())
    other, still_shared = digests(batch(seed=1))
    assert own != other
    assert shared == still_shared
    ids = batch().input_ids.clone()
    ids[0] += 1
    assert digests(batch().replace(input_ids=ids))[0] != own
    assert digests(batch(loss_scale=0.5))[0] != own
    one, two = THDStep([batch()]), THDStep([batch(), batch()])
    assert digests(one)[1] != digests(two)[1]
    assert digests(one)[1] != digests(THDStep([batch(loss_scale=0.5)]))[1]


def compare(case: str) -> str:
    rank = dist.get_rank()
    given: Any = {
        "same": batch(),
        "peers": batch(seed=rank),
        "microbatches": THDStep([batch(seed=rank // 2)] * (1 + rank // 2)),
        "data ranks": batch(seed=rank // 2),
    }[case]
    try:
        check_agreement(given, AxisSizes(data=2, context=2), torch.device("cpu"))
    except ValueError as err:
        return str(err)
    return ""


def compare_all() -> dict[str, str]:
    return {case: compare(case) for case in ("same", "peers", "microbatches", "data ranks")}


def test_messages_on_every_rank() -> None:
    for found in run_ranks(compare_all, 4):
        assert found["same"] == found["data ranks"] == ""
        assert found["peers"].startswith("Ranks 0, 1 share one pack (2 context-parallel x 1 tensor-parallel")
        assert "steps of different numbers of microbatches or loss scales" in found["microbatches"]


class LaterDifferent(L.LightningDataModule):
    """The same first batch everywhere; the second is of each rank's own."""

    def train_dataloader(self) -> DataLoader[Any]:
        samples = [*sequences(4), *sequences(4, seed=1 + dist.get_rank())]
        return DataLoader(
            samples, batch_size=4, collate_fn=lambda of: THDBatch.collate(of, align=Layout(cp=2).align)
        )


def later() -> tuple[str, int]:
    layout = Layout(strategy="thd_ddp", cp=2, options={"check_plans": True})
    module = Job()
    trainer = make_trainer(layout, gradient_clip_val=None, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="share one pack") as error:
        trainer.fit(module, LaterDifferent())
    return str(error.value), module.microbatches


def test_every_batch_is_compared_when_asked_for() -> None:
    for message, trained in run_ranks(later, 2):
        assert message.startswith("Ranks 0, 1 share one pack")
        assert trained == 1
