"""Hugging Face's Trainer on packs equals the hand-written loop over sequences that were never packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from lightning_thd import Packs, Sequences
from lightning_thd.flops import FlopsModel
from lightning_thd.integrations import packed_trainer
from lightning_thd.stats import SeqStats
from tests.integrations.support import CAPACITY, RecordsSteps, by_hand, mean_nll, strip
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama

STEPS = 6


def make_trainer(out: str, accumulate: int, **kwargs: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **kwargs.pop("arguments", {}),
    )

    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    samples = sequences(60, labels=True)

    trainer = type("Seen", (RecordsSteps, packed_trainer()), {})(
        model=model,
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:20],
        optimizers=(optimizer, schedule),
        capacity=CAPACITY,
        peak=1e9,
        **kwargs,
    )
    trainer.seen = []
    return trainer


def train(
    out: str, accumulate: int, resume: str | None = None, step: Sequences | None = None
) -> dict[str, Any]:
    trainer = make_trainer(out, accumulate, data_kwargs={} if step is None else {"global_batch": step})
    trainer.train(resume_from_checkpoint=resume)
    return {
        "params": {n: p.detach() for n, p in trainer.model.named_parameters()},
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "logs": trainer.state.log_history,
        "seen": trainer.seen,
        "flos": trainer.state.total_flos,
        "eval": trainer.evaluate()["eval_loss"],
    }


def check_training(ranks: list[dict[str, Any]], step: Packs | Sequences) -> None:
    """Compare parameters, losses and evaluation with a loop over sequences that are never packed."""
    by_hand_parameters, losses = by_hand(step, len(ranks), STEPS)
    for of_rank in ranks:
        assert largest_error(strip(of_rank["params"]), by_hand_parameters) < 1e-12
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-4)  # Trainer rounds what it logs
    expected, _ = mean_nll(sequences(60, labels=True)[:20], params=ranks[0]["params"])
    assert ranks[0]["eval"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("world", "accumulate"), [pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_steps_of_packs_equal_the_hand_loop(tmp_path: Path, world: int, accumulate: int) -> None:
    ranks = run_ranks(train, world, str(tmp_path), accumulate)
    check_training(ranks, Packs(world * accumulate))
    logged = [row for row in ranks[0]["logs"] if "device/mfu" in row]
    assert all(0.0 < row["packing/fill"] <= 1.0 for row in logged)  # of the capacity
    assert len(logged) >= STEPS - 1
    # Slots without padding between sequences would be the same number again.
    assert not any("device/items_per_sec" in row for row in logged)
    assert all("device/real_items_per_sec" in row for row in logged)
    assert ranks[0]["flos"] > 0


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_of_n_sequences_equal_the_hand_loop(tmp_path: Path, world: int) -> None:
    ranks = run_ranks(train, world, str(tmp_path), 1, None, Sequences(10))
    check_training(ranks, Sequences(10))
    assert sum(len(ids) for of_rank in ranks for ids in of_rank["seen"]) == 60  # one epoch, each once
    assert len(ranks[0]["seen"]) > STEPS  # several packs a step
    [runtime] = [row for row in ranks[0]["logs"] if "train_samples_per_second" in row]
    assert runtime["train_samples_per_second"] == pytest.approx(60 / runtime["train_runtime"], rel=0.01)


class Thaws(TrainerCallback):
    """Freezes the first layer, and thaws it before the third step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].model.layers[0].requires_grad_(state.global_step >= 2)
        kwargs["model"].model.embed_tokens.requires_grad_(state.global_step >= 2)


def test_thawed_weights_count_from_their_step(tmp_path: Path) -> None:
    """One logging interval holds steps before and after."""
    trainer = make_trainer(str(tmp_path), 1, arguments={"lr_scheduler_type": "constant"})
    trainer.args.logging_steps = STEPS
    trainer.add_callback(Thaws())
    trainer.train()
    samples = sequences(60, labels=True)
    expected = 0
    model = tiny_llama()

    for step, ids in enumerate(trainer.seen):
        Thaws().on_step_begin(None, type("", (), {"global_step": step}), None, model=model)
        flops = FlopsModel.from_config(model.config).for_module(model)
        stats = SeqStats.from_lengths([len(samples[i]["input_ids"]) for i in ids], windows=flops.windows)
        expected += flops.training_flops(stats).model

    assert trainer.state.total_flos == pytest.approx(expected, rel=1e-9)
    metered = trainer._meter.state()["flops"]
    assert sum(metered.values()) - metered["recompute"] == pytest.approx(expected, rel=1e-9)


def test_resume_goes_on_with_what_was_left(tmp_path: Path) -> None:
    for step, accumulate, packs in ((None, 2, 8), (Sequences(10), 1, None)):
        out = str(tmp_path / f"{accumulate}")
        [whole] = run_ranks(train, 1, out, accumulate, None, step)
        [resumed] = run_ranks(train, 1, out, accumulate, f"{out}/checkpoint-2", step)
        assert 0 < len(resumed["seen"]) < len(whole["seen"])
        assert resumed["seen"] == whole["seen"][-len(resumed["seen"]) :]
        assert len(resumed["seen"]) == packs or sum(map(len, resumed["seen"])) == 40
        assert largest_error(resumed["params"], whole["params"]) < 1e-12
