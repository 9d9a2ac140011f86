"""FLOPs that the user gives, a reference's passes, and the first step, in loops and transformers' Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

from lightning_thd import FlopsModel, Sequences, THDDataModule
from lightning_thd.integrations import packed_trainer
from lightning_thd.stats import SeqStats
from tests.data.chats import PLAIN, make_tokenizer
from tests.integrations.support import make_loop
from tests.integrations.test_hf_rows import model_of, needs_fused, rows, trl
from tests.integrations.test_unread import OwnTrainer
from tests.integrations.unported import SIZE, VOCAB, Own, loss_of
from tests.tiny import sequences, tiny_llama

LENGTHS = [len(row["input_ids"]) for row in sequences(40)]


def given() -> FlopsModel:
    """Return a model whose FLOPs no counter could guess."""
    return FlopsModel.from_config(tiny_llama().config, causal="exact")


def wanted(lengths: list[int]) -> float:
    return float(given().training_flops(SeqStats.from_lengths(lengths)).model)


@pytest.mark.parametrize("engine", ["accelerate", "fabric"])
def test_loops_count_what_they_are_given(engine: str) -> None:
    data = THDDataModule(sequences(40), capacity=48)
    options: Any = {"data": data, "loss_fn": loss_of, "flops_model": given(), "log_every_n_steps": 2}
    _, loop = make_loop(engine, None, model=Own(True).double(), **options)
    seen: list[int] = []
    for _, step in zip(range(2), loop.loader, strict=False):
        loop.backward(step)
        seen += [length for batch in step.microbatches for length in batch.lengths]
    assert loop.latest["train/total_flops"] == pytest.approx(wanted(seen), rel=1e-9)
    with pytest.raises(TypeError, match=r"flops_model .*FlopsModel.from_config"):
        make_loop(engine, None, **{**options, "flops_model": 3})


class Logs(TrainerCallback):  # type: ignore[misc]
    """Keeps every log of training."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows += [dict(logs)] if "loss" in logs else []


def test_packed_trainer_counts_what_it_is_given_and_leaves_out_the_first_step(tmp_path: Path) -> None:
    settings: Any = {"max_steps": 3, "logging_steps": 1, "use_cpu": True, "report_to": []}
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", **settings)
    options: Any = {"train_dataset": sequences(40), "capacity": 4096, "peak": 1e9, "flops_model": given()}
    logs = Logs()
    OwnTrainer(model=Own(True), args=arguments, callbacks=[logs], **options).train()
    assert logs.rows[-1]["total_flops"] == pytest.approx(3 * wanted(LENGTHS), rel=1e-9)
    rated = ["device/mfu" in row for row in logs.rows]
    assert rated == [False, True, True]


def by_hand(lengths: list[int]) -> float:
    """Count ``Own``: two linear layers and causal attention, whose backward costs twice the forward."""
    linear = sum(2 * length * (SIZE * 3 * SIZE + SIZE * VOCAB) for length in lengths)
    attention = sum(4 * SIZE * length**2 / 2 for length in lengths)
    return 3 * (linear + attention)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("whole_steps", [False, True])
def test_packed_trainer_counts_a_model_of_ones_own(
    tmp_path: Path, accumulate: int, whole_steps: bool
) -> None:
    """Every sequence of two epochs counts once, also those of the first step and of one that is counted."""
    rows = sequences(40)
    step: Any = {"global_batch": Sequences(10)} if whole_steps else {}
    settings: Any = {"num_train_epochs": 2, "logging_steps": 1, "use_cpu": True, "report_to": []}
    settings["gradient_accumulation_steps"] = 1 if whole_steps else accumulate
    arguments = TrainingArguments(str(tmp_path), save_strategy="no", disable_tqdm=True, **settings)
    options: Any = {"train_dataset": rows, "capacity": 48, "peak": 1e9, "data_kwargs": step}
    logs = Logs()
    trainer = OwnTrainer(model=Own(True), args=arguments, callbacks=[logs], **options)
    trainer.train()

    assert logs.rows[-1]["total_flops"] == pytest.approx(2 * by_hand(LENGTHS), rel=1e-9)
    assert trainer.state.total_flos == pytest.approx(2 * by_hand(LENGTHS), rel=1e-9)

    rated = [row for row in logs.rows if "device/mfu" in row]
    assert rated
    for row in rated:
        assert row["device/mfu"] == pytest.approx(row["device/flops_per_sec"] / 1e9, rel=1e-6)


@needs_fused
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
@pytest.mark.parametrize("precomputed", [False, True])
def test_dpo_counts_the_passes_of_a_frozen_reference(precomputed: bool, tmp_path: Path) -> None:
    """Its forward passes are a third of the policy's training; precomputed ones are no part of training."""
    tokenizer = make_tokenizer(PLAIN)
    policy = model_of("dpo", tokenizer, "thd")
    settings: Any = {"max_steps": 2, "logging_steps": 1, "use_cpu": True, "report_to": [], "bf16": False}
    settings |= {"precompute_ref_log_probs": precomputed, "per_device_train_batch_size": 4}
    arguments = trl.DPOConfig(str(tmp_path), save_strategy="no", **settings)
    options: Any = {"train_dataset": Dataset.from_list(rows("dpo")), "processing_class": tokenizer}
    reference = None if precomputed else copy.deepcopy(policy)
    logs = Logs()
    trainer = packed_trainer(trl.DPOTrainer)(
        model=policy, ref_model=reference, args=arguments, peak=1e9, callbacks=[logs], **options
    )
    seen: list[SeqStats] = []
    measure = policy._thd_throughput
    counted = measure.count
    measure.count = lambda module, batch: (seen.append(batch.stats), counted(module, batch))
    trainer.train()

    model = FlopsModel.from_config(policy.config)
    stats = sum(seen[1:], start=seen[0])
    total = float(model.training_flops(stats).model)
    if not precomputed:
        total += float(model.forward_flops(stats).model)
    assert logs.rows[-1]["total_flops"] == pytest.approx(total, rel=1e-9)
