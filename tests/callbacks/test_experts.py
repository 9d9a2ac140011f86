"""The load of experts in the metrics, and biases that even it out, against choices counted by hand."""

from __future__ import annotations

from typing import Any, get_args

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.alignment import Alignment, Layout
from lightning_thd.callbacks import ExpertBias
from lightning_thd.callbacks.experts import ExpertChoices
from lightning_thd.loss.router_balance import RouterBalance
from lightning_thd.parallel.shard import shard_batch
from tests.strategies.jobs import family_model
from tests.tiny import checkpoint_activations, quiet_trainer, sequences

SAMPLES = sequences(24)


class Module(L.LightningModule):
    """Counts its routers' choices by hand, in fp32."""

    def __init__(self, family: str = "deepseek_v3", balance: RouterBalance = "microbatch") -> None:
        super().__init__()
        self.model: Any = family_model(family, torch.float32)
        self.balance = balance
        self.chosen: list[Tensor] = []

    @property
    def bias(self) -> Tensor:
        bias: Tensor = self.model.model.layers[1].mlp.gate.e_score_correction_bias
        return bias

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        with torch.no_grad():
            real = batch.stats.real_tokens
            logits = self.model(**batch.hf_kwargs(), output_router_logits=True).router_logits[0][:real]
            if self.model.config.model_type == "deepseek_v3":
                logits = logits.sigmoid() + self.bias
            self.chosen.append(torch.bincount(logits.topk(2).indices.flatten(), minlength=4))
        return causal_lm_loss(self.model, batch, router_balance=self.balance)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(module: L.LightningModule, *callbacks: Any, data: Any = None, **options: Any) -> L.Trainer:
    trainer = quiet_trainer(callbacks=list(callbacks), **{"max_steps": 3, "log_every_n_steps": 1, **options})
    trainer.fit(module, data or THDDataModule(SAMPLES, capacity=64, global_batch=Sequences(8)))
    return trainer


def test_biases_move_by_the_choices_of_a_step() -> None:
    module = Module()
    # Its own call by hand has the hooks, too: choices count twice, and the signs stay.
    trainer = fit(module, ExpertBias(0.25), strategy="thd", max_steps=1)
    counts = torch.stack(module.chosen).sum(0)
    assert len(module.chosen) > 1
    expected = 0.25 * torch.sign(counts.double().mean() - counts)
    assert torch.equal(module.bias, expected.float())
    assert expected.abs().max() == 0.25
    assert float(trainer.callback_metrics["train/experts/bias"]) == 0.25


def test_a_monitor_that_watches_again_has_no_old_hooks() -> None:
    monitor = THDThroughputMonitor(peak=1e9)
    model = family_model("qwen3_moe", torch.float32)
    monitor.watch(model)
    old: Any = monitor._meters["train"].experts
    monitor.watch(model)
    assert old._handles == []


def test_the_load_of_an_interval() -> None:
    module = Module("qwen3_moe")
    monitor = THDThroughputMonitor(every_n_steps=2, peak=1e9)
    data = THDDataModule(SAMPLES, capacity=64, global_batch=Packs(1))
    fit(module, monitor, data=data, max_steps=2)
    assert monitor.latest.keys() >= {"train/experts/imbalance", "train/experts/worst_layer"}
    by_hand = torch.stack(module.chosen).sum(0).double()
    first = float(by_hand.max() / by_hand.mean())
    logged = monitor.latest
    assert logged["train/experts/worst_layer"] >= first - 1e-6
    assert 2 * logged["train/experts/imbalance"] - logged["train/experts/worst_layer"] <= first + 1e-6


def test_evaluations_and_recomputed_layers_count_nothing() -> None:
    model: Any = family_model("qwen3_moe", torch.float32)
    checkpoint_activations(model, use_reentrant=False)

    choices = ExpertChoices(model)
    batch = THDBatch.collate(SAMPLES[:4], pad_to=128)
    causal_lm_loss(model, batch).backward()

    assert choices.take().sum(1).tolist() == [2 * batch.stats.real_tokens] * 2
    model.eval()
    causal_lm_loss(model, batch)

    assert not choices.take().any()
    shared = [{"input_ids": np.arange(1, 9)}, {"input_ids": np.arange(1, 12)}]
    model.train()
    causal_lm_loss(model, THDBatch.collate(shared, share_prefixes=True, pad_to=32))

    assert choices.take().sum(1).tolist() == [2 * 11] * 2  # a shared slot is routed once
    model.set_attn_implementation("sdpa")
    rows = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "attention_mask": torch.ones(2, 4).tril(2)}
    model(**rows)

    assert choices.take().sum(1).tolist() == [2 * 7] * 2
    choices.stop()
    model(**rows)

    assert not choices.take().any()


def test_a_shard_of_a_pack_has_no_choices_of_padding() -> None:
    batch = THDBatch.collate(SAMPLES[:4], align=Alignment.for_(cp=2), pad_to=128)
    for kind in get_args(Layout):
        kept: list[Any] = []
        for rank in range(2):
            shard = shard_batch(batch, group=None, cp=2, rank=rank, layout=kind)
            kept += shard.input_ids[shard.boundaries.real_slots].tolist()
        assert sorted(kept) == sorted(i for sample in SAMPLES[:4] for i in sample["input_ids"])


def test_what_has_no_bias_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"layers.0.mlp.gate has none.*router_balance"):
        fit(Module("qwen3_moe"), ExpertBias(), strategy="thd")
    with pytest.raises(MisconfigurationException, match="the model has no known routers"):
        fit(Module("llama"), ExpertBias(), strategy="thd")
    module = Module()
    module.model.model.layers[1].mlp.gate.e_score_correction_bias = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(MisconfigurationException, match=r"is torch.bfloat16; wanted fp32. Set its .data"):
        fit(module, ExpertBias(), strategy="thd")


def test_routers_without_choices_do_not_lower_the_load() -> None:
    choices = ExpertChoices(torch.nn.Module())
    choices._sizes = [2, 4, 4]  # the last is a teacher's, in evaluation mode
    choices._counts = torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert choices.close() == {"experts/imbalance": 1.25, "experts/worst_layer": 1.5}
