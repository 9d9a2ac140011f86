"""THDDataModule under a real Trainer: every sequence once, every switch, exact resume."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import AutoModelForCausalLM, MistralConfig

from lightning_thd import Sequences, THDBatch, THDDataModule
from lightning_thd.batch import THDStep
from lightning_thd.data import TokenStore
from lightning_thd.module import CausalLMModule
from tests.data.support import CAPACITY, flat, make_trainer
from tests.tiny import VOCAB, TinyModule, nll, sequences, tiny_llama


def test_an_epoch_uses_every_sequence_once_and_the_next_one_in_another_order() -> None:
    module, samples = TinyModule(), sequences(60)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, THDDataModule(samples, capacity=CAPACITY))
    half = len(module.seen) // 2
    first, second = flat(module.seen[:half]), flat(module.seen[half:])
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert trainer.estimated_stepping_batches == trainer.global_step == len(module.seen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_work_without_a_trainer(num_workers: int) -> None:
    samples, before = sequences(60, labels=True), set(mp.active_children())
    data = THDDataModule(samples, capacity=CAPACITY, num_workers=num_workers, seed=3)
    data.setup("fit")
    loader = data.train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader)
    assert all(isinstance(b, THDBatch) and len(b.input_ids) <= CAPACITY for b in batches)
    for batch in batches:
        assert isinstance(batch, THDBatch)
        for i, ids in zip(batch.sequence_ids, batch.unpack(batch.input_ids), strict=True):
            assert ids.tolist() == samples[i]["input_ids"].tolist()
    del loader, data
    assert set(mp.active_children()) <= before  # workers end with their loader, not when garbage is collected
    again = THDDataModule(samples, capacity=CAPACITY, seed=3)
    again.setup("fit")
    assert [b.sequence_ids for b in again.train_dataloader() if isinstance(b, THDBatch)] == [
        b.sequence_ids for b in batches if isinstance(b, THDBatch)
    ]


def test_the_last_step_of_a_limited_epoch_is_still_the_mean_over_its_tokens() -> None:
    samples = sequences(60, labels=True)
    module = TinyModule(lr=0.0)
    trainer = make_trainer(accumulate_grad_batches=4, limit_train_batches=6)
    trainer.fit(module, THDDataModule(samples, capacity=CAPACITY))
    with torch.no_grad():
        results = [nll(module.model, samples[i]) for i in flat(module.seen[4:])]
    expected = float(sum(total for total, _ in results) / sum(count for _, count in results))
    assert sum(module.outputs[4:]) == pytest.approx(expected, rel=1e-12)


def test_validation_and_prediction_come_back_per_sequence() -> None:
    samples, module = sequences(40, labels=True), TinyModule()
    data = THDDataModule(capacity=CAPACITY, val=samples, predict=samples)
    [metrics] = make_trainer().validate(module, data, verbose=False)
    with torch.no_grad():
        results = [nll(module.model, sample) for sample in samples]
    expected = float(sum(total for total, _ in results) / sum(count for _, count in results))
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-6)
    predicted = {i: x for batch in make_trainer().predict(module, data) or [] for i, x in batch}
    assert sorted(predicted) == list(range(40))
    for i, logits in predicted.items():
        ids = torch.as_tensor(samples[i]["input_ids"])[None]
        with torch.no_grad():
            alone = module.model(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(logits, alone)


@pytest.mark.parametrize(
    ("switch", "batches"),
    [
        ({"limit_train_batches": 3}, 3),
        ({"fast_dev_run": 2}, 2),
        ({"max_steps": 4}, 4),
        ({"max_epochs": 2, "overfit_batches": 2}, 4),
        ({"max_epochs": 2, "limit_train_batches": 2, "reload_dataloaders_every_n_epochs": 1}, 4),
        ({"val_check_interval": 2, "limit_train_batches": 5}, 5),
        ({"max_time": {"seconds": 0}}, 0),
    ],
)
def test_trainer_switches(switch: dict[str, Any], batches: int) -> None:
    module, samples = TinyModule(), sequences(60)
    trainer = make_trainer(**switch)
    trainer.fit(module, THDDataModule(samples, capacity=CAPACITY, val=samples[:9]))
    if "max_time" in switch:
        assert len(module.seen) < 60
        return
    assert len(module.seen) == batches
    if "overfit_batches" in switch:
        assert module.seen[:2] == module.seen[2:]
    elif switch.get("max_epochs") == 2:
        assert module.seen[:2] != module.seen[2:]
    if "val_check_interval" in switch:
        assert "val/loss" in trainer.callback_metrics


def test_changed_data_is_refused_on_resume(tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=3)
    trainer.fit(TinyModule(), THDDataModule(sequences(60), capacity=CAPACITY))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    for samples, capacity in ((sequences(61), CAPACITY), (sequences(60), CAPACITY + 1)):
        with pytest.raises(ValueError, match="saved with other data or settings"):
            make_trainer(max_steps=5).fit(
                TinyModule(), THDDataModule(samples, capacity=capacity), ckpt_path=tmp_path / "a.ckpt"
            )


@pytest.mark.parametrize("oversize", ["truncate", "split", "drop", "own_pack"])
@pytest.mark.parametrize("labels", [False, True])
def test_the_scale_counts_just_the_targets_that_are_there(oversize: Any, labels: bool) -> None:
    data = THDDataModule(
        sequences(60, labels=labels), capacity=10, global_batch=Sequences(7), oversize=oversize
    )
    data.setup("fit")
    for step in data.train_dataloader():
        assert isinstance(step, THDStep)
        targets = sum(int((batch.targets != -100).sum()) for batch in step.microbatches)
        assert targets == sum(batch.loss_tokens for batch in step.microbatches)
        assert step.microbatches[0].loss_scale == (len(step) / targets if targets else 0.0)


class Windowed(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        config = MistralConfig(
            **{**self.model.config.to_dict(), "model_type": "mistral", "sliding_window": 6}
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="thd").double()
        self.pairs: list[tuple[Any, ...]] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.pairs.append(batch.stats.window_pairs)
        expected = sum(min(i + 1, 6) for length in batch.lengths for i in range(length))
        assert batch.stats.window_pairs == ((6, expected),)
        return super().training_step(batch, batch_idx)


def test_batches_count_the_pairs_of_the_models_window() -> None:
    module = Windowed()
    make_trainer(limit_train_batches=2).fit(module, THDDataModule(sequences(60), capacity=CAPACITY))
    assert len(module.pairs) == 2


def test_policies_are_counted_and_logged(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"input_ids": np.ones(n, int)} for n in (5, 0, 9, 2, 4, 30)]
    logger = L.loggers.CSVLogger(tmp_path)
    data = THDDataModule(samples, capacity=8, oversize="truncate", empty="drop")
    make_trainer(logger=logger).fit(TinyModule(), data)
    expected = {"empty": 1, "dropped": 0, "truncated": 2, "split": 0, "own_pack": 0, "tokens_lost": 1 + 22}
    assert data.counts["train"] == expected
    logged = Path(logger.log_dir, "metrics.csv").read_text()
    assert "data/train_truncated" in logged
    assert "data/train_tokens_lost" in logged


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: THDDataModule([], capacity=8), "The dataset is empty"),
        (lambda: THDDataModule(sequences(9), capacity=0), "capacity=0; wanted"),
        (lambda: THDDataModule(sequences(9), capacity=9, pad_to=3), "pad_to=3 is less than capacity=9"),
        (lambda: THDDataModule(sequences(60), capacity=8), r"tokens but at most 8 fit a pack.*oversize="),
        (lambda: THDDataModule([{"input_ids": [1, VOCAB]}], capacity=8), "Sequence 0 of the train data has"),
    ],
)
def test_bad_input_is_refused(make: Any, message: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match=message):
        make_trainer().fit(TinyModule(), make())


def test_trainer_clashes_are_refused() -> None:
    data = THDDataModule(sequences(9), capacity=CAPACITY)
    averaging = StochasticWeightAveraging(1e-3)  # its copy of this module has no weights yet
    with pytest.raises(MisconfigurationException, match="StochasticWeightAveraging .* average nothing"):
        make_trainer(callbacks=[averaging]).fit(CausalLMModule(tiny_llama), data)
    with pytest.raises(MisconfigurationException, match="no data for 'train'"):
        make_trainer().fit(TinyModule(), THDDataModule(val=sequences(9), capacity=CAPACITY))


def test_a_dead_worker_ends_the_run() -> None:
    class Dies(TokenStore):
        def __getitem__(self, i: int) -> Any:
            if torch.utils.data.get_worker_info() is not None:
                import os

                os._exit(3)
            return super().__getitem__(i)

    store = Dies.from_rows([s["input_ids"] for s in sequences(30)])
    with pytest.raises(RuntimeError, match="worker"):
        make_trainer().fit(TinyModule(), THDDataModule(store, capacity=CAPACITY, num_workers=1))
