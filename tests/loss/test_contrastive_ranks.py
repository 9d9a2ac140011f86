"""Training on queries and documents under Lightning equals a loop over texts that run alone."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, THDThroughputMonitor, prepare_thd
from lightning_thd.batch import THDStep
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.loss.contrastive import embed, info_nce
from lightning_thd.strategies import THDModelParallelStrategy
from tests.loss.embedding_models import encoder, largest_difference, loss_by_hand, make_examples
from tests.ranks import run_ranks
from tests.tiny import quiet_trainer

EXAMPLES = make_examples(30)
LR = 0.5
OPTIONS: dict[str, Any] = {"temperature": 0.2, "symmetric": True}


class Embedder(L.LightningModule):
    """Trains an encoder by SGD, and records which examples each microbatch had."""

    def __init__(self, family: str = "qwen3", group: bool = False) -> None:
        super().__init__()
        self.model: nn.Module = encoder(family)
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.losses: list[float] = []
        self._group = group

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.seen.append((batch_idx, tuple(dict.fromkeys(batch.sequence_ids))))
        group = self.trainer.strategy.data_parallel_group if self._group else None
        loss = info_nce(self.model, batch, group=group, **OPTIONS)
        self.log("train/loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train/loss_step"]))

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", info_nce(self.model, batch, **OPTIONS), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def fit(strategy: str, step: Any, capacity: int, tensor: int = 1) -> dict[str, Any]:
    """Train for three steps; ``strategy`` "model_parallel" cuts weights by FSDP2 and tensor parallelism."""
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    chosen: Any = THDModelParallelStrategy(tensor_parallel_size=tensor) if "model" in strategy else strategy
    module = Embedder(group=tensor > 1)
    trainer = quiet_trainer(strategy=chosen, devices=world, max_steps=3, log_every_n_steps=1)
    trainer.fit(module, THDDataModule(EXAMPLES, capacity=capacity, global_batch=step))
    parameters = module.model.state_dict()
    whole = {k: x.full_tensor() if hasattr(x, "full_tensor") else x for k, x in parameters.items()}
    return {
        "parameters": {name: x.detach().clone() for name, x in whole.items()},
        "seen": module.seen,
        "losses": module.losses,
    }


def by_hand(seen: list[tuple[int, tuple[int, ...]]]) -> tuple[dict[str, Tensor], list[float]]:
    """Train on the examples of each step, of all ranks, in one process without packs."""
    model = encoder("qwen3", attention="sdpa")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(3):
        members = sorted({i for at, ids in seen if at == step for i in ids})
        loss = loss_by_hand(model, [EXAMPLES[i] for i in members], **OPTIONS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return dict(model.state_dict()), losses


def check(found: list[dict[str, Any]], *, microbatches: int) -> None:
    seen = [entry for rank in found for entry in rank["seen"]]
    assert max(sum(at == step for at, _ in found[0]["seen"]) for step in range(3)) >= microbatches
    parameters, losses = by_hand(seen)
    for rank in found:
        assert largest_difference(rank["parameters"], parameters) < 1e-9
        assert rank["losses"] == pytest.approx(losses, rel=1e-6)  # Lightning keeps logs in fp32


@pytest.mark.parametrize(
    ("strategy", "step", "capacity", "microbatches"),
    [
        ("thd", Sequences(8), 400, 1),
        ("thd", Sequences(8), 48, 3),
        ("thd", Packs(1), 100, 1),
        ("auto", Packs(1), 100, 1),
    ],
)
def test_one_process_equals_texts_alone(strategy: str, step: Any, capacity: int, microbatches: int) -> None:
    check([fit(strategy, step, capacity)], microbatches=microbatches)


@pytest.mark.parametrize(
    ("strategy", "step", "capacity", "microbatches"),
    [
        ("thd_ddp", Sequences(9), 400, 1),
        ("thd_ddp", Sequences(9), 40, 2),
        ("thd_ddp", Packs(2), 60, 1),
        ("ddp", Packs(2), 60, 1),
        ("model_parallel", Sequences(9), 40, 2),
    ],
)
def test_two_ranks_equal_texts_alone(strategy: str, step: Any, capacity: int, microbatches: int) -> None:
    check(run_ranks(fit, 2, strategy, step, capacity), microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "capacity", "tensor", "microbatches"),
    [("thd_ddp", 200, 1, 1), ("thd_ddp", 32, 1, 2), ("model_parallel", 40, 2, 2)],
)
def test_four_ranks_equal_texts_alone(strategy: str, capacity: int, tensor: int, microbatches: int) -> None:
    check(run_ranks(fit, 4, strategy, Sequences(10), capacity, tensor), microbatches=microbatches)


def one_rank_without_roles() -> str:
    sample: Any = EXAMPLES[0] if torch.distributed.get_rank() else {"input_ids": [1, 2]}
    try:
        info_nce(encoder("qwen3"), THDBatch.collate([sample]))
    except ValueError as error:
        return str(error)
    return ""


def test_a_bad_batch_of_one_rank_is_an_error_on_all() -> None:
    bad, good = run_ranks(one_rank_without_roles, 2, timeout_s=60)
    assert "2 sequences without roles" in bad or "1 sequences without roles" in bad
    assert "Rank 0 has a step of no queries" in good


def embeddings_of_one_rank_do_not_fit(fault: str, microbatches: int) -> str:
    """Run a step whose second rank has a row or half of the numbers too few."""
    model = encoder("qwen3")
    step = THDStep([THDBatch.collate(EXAMPLES[:3]) for _ in range(microbatches)])

    def encode(batch: THDBatch) -> Tensor:
        rows = embed(model, batch)
        if torch.distributed.get_rank() == 0:
            return rows
        return rows[:-1] if fault == "rows" else rows[:, :16]

    try:
        info_nce(encode, step.microbatches[0])
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("fault", "of_others", "of_its_own"),
    [
        ("rows", "Rank 1 has embeddings that do not fit its batch", r"wanted floats \[10, D\], one row for"),
        ("size", "Rank 1 has embeddings of 16 numbers of 8 bytes, this one of 32", "Rank 0 .* of 32 numbers"),
    ],
)
def test_embeddings_of_one_rank_that_do_not_fit_are_an_error_on_all(
    fault: str, of_others: str, of_its_own: str, microbatches: int
) -> None:
    """The other rank once waited for ever, or died in the exchange."""
    found = run_ranks(embeddings_of_one_rank_do_not_fit, 2, fault, microbatches, timeout_s=60)
    assert re.search(of_others, found[0]), found[0]
    assert re.search(of_its_own, found[1]), found[1]


def test_flops_and_epoch_means_count_each_microbatch_once() -> None:
    module = Embedder()
    monitor = THDThroughputMonitor(peak=1e12)
    trainer = quiet_trainer(
        strategy="thd", max_epochs=1, log_every_n_steps=1, callbacks=[monitor], num_sanity_val_steps=0
    )
    data = THDDataModule(EXAMPLES, capacity=48, global_batch=Sequences(10), val=EXAMPLES[:7])
    trainer.fit(module, data)
    texts = [[len(x["query"]), *map(len, x["positive"]), *map(len, x.get("negative", []))] for x in EXAMPLES]
    lengths = [length for each in texts for length in each]
    flops = FlopsModel.from_config(module.model.config)
    counted = flops.training_flops(SeqStats.from_lengths(lengths))
    expected = counted.model - counted.logits  # the model has no head

    assert len(module.seen) > 3  # several microbatches
    assert float(trainer.callback_metrics["train/total_flops"]) == pytest.approx(expected, rel=1e-6)

    mean = sum(module.losses) / 3  # all steps have ten queries
    assert float(trainer.callback_metrics["train/loss_epoch"]) == pytest.approx(mean, rel=1e-6)


@pytest.mark.filterwarnings("ignore:No peak FLOP")  # other warnings are errors here
def test_a_loop_of_accelerate_equals_texts_alone() -> None:
    from accelerate import Accelerator

    model = encoder("qwen3")
    data = THDDataModule(EXAMPLES, capacity=48, global_batch=Sequences(10), val=EXAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loop = prepare_thd(
        Accelerator(cpu=True),
        model,
        data,
        optimizer,
        loss_fn=lambda model, batch: info_nce(model, batch, **OPTIONS),
    )
    step = next(iter(loop.loader))
    assert len(step) > 1
    members = sorted({i for batch in step.microbatches for i in batch.sequence_ids})
    loss = loop.backward(step)
    stock = encoder("qwen3", attention="sdpa")
    expected = loss_by_hand(stock, [EXAMPLES[i] for i in members], **OPTIONS)
    expected.backward()
    of_loop = {name: p.grad for name, p in loop.model.named_parameters()}
    assert largest_difference(of_loop, {name: p.grad for name, p in stock.named_parameters()}) < 1e-9
    assert float(loss) == pytest.approx(expected.item(), rel=1e-6)


def validate(capacity: int) -> float:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = quiet_trainer(strategy="thd_ddp" if world > 1 else "thd", devices=world)
    data = THDDataModule(EXAMPLES, capacity=64, val=EXAMPLES, global_batch=Sequences(4))
    (metrics,) = trainer.validate(Embedder(), data)
    return float(metrics["val/loss"])


def test_validation_is_the_mean_over_queries_on_two_ranks() -> None:
    first, second = run_ranks(validate, 2, 64)
    assert first == pytest.approx(second, rel=1e-6)
    assert 0 < first < 20
