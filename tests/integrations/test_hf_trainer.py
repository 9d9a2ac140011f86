"""Hugging Face's Trainer on packs equals the hand-written loop over sequences that were never packed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_thd import Packs, Sequences
from lightning_thd.flops import FlopsModel
from lightning_thd.integrations import packed_trainer
from lightning_thd.packing import PackPlanner
from lightning_thd.stats import SeqStats
from tests.integrations.support import RecordsSteps
from tests.ranks import run_ranks
from tests.tiny import largest_error, nll, sequences, tiny_llama, train_by_hand
from tests.trackers import read_tensorboard

CAPACITY, STEPS = 48, 6


def make_trainer(out: str, accumulate: int, *, report_to: Sequence[str] = (), **kwargs: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        report_to=list(report_to),
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


def by_hand(step: Packs | Sequences, dp: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    samples = sequences(60, labels=True)
    planner = PackPlanner([len(s["input_ids"]) for s in samples], CAPACITY, global_batch=step)
    params, losses = train_by_hand(samples, planner, STEPS, dp=dp)
    return params, losses


@pytest.mark.parametrize(("world", "accumulate"), [pytest.param(1, 3, marks=pytest.mark.slow), (2, 2)])
def test_parameters_and_losses_equal_the_hand_loop(tmp_path: Path, world: int, accumulate: int) -> None:
    ranks = run_ranks(train, world, str(tmp_path), accumulate)
    wanted, losses = by_hand(Packs(world * accumulate), world)
    samples = sequences(60, labels=True)[:20]
    for found in ranks:
        assert largest_error(found["params"], wanted) < 1e-12
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-4)  # Trainer rounds what it logs
    logged = [row for row in ranks[0]["logs"] if "device/mfu" in row]
    assert all(0.0 < row["packing/fill"] <= 1.0 for row in logged)  # of the capacity
    assert len(logged) >= STEPS - 1
    model = tiny_llama()
    model.load_state_dict(ranks[0]["params"], strict=False)
    with torch.no_grad():
        results = [nll(model, sample) for sample in samples]
    expected = float(sum(total for total, _ in results) / sum(count for _, count in results))
    assert ranks[0]["eval"] == pytest.approx(expected, rel=1e-9)
    assert ranks[0]["flos"] > 0


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_of_n_sequences_equal_the_hand_loop(tmp_path: Path, world: int) -> None:
    ranks = run_ranks(train, world, str(tmp_path), 1, None, Sequences(10))
    wanted, losses = by_hand(Sequences(10), world)
    for found in ranks:
        assert largest_error(found["params"], wanted) < 1e-12
    assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-4)
    assert sum(len(ids) for found in ranks for ids in found["seen"]) == 60  # one epoch, each once
    assert len(ranks[0]["seen"]) > STEPS  # several packs a step
    [runtime] = [row for row in ranks[0]["logs"] if "train_samples_per_second" in row]
    assert runtime["train_samples_per_second"] == pytest.approx(60 / runtime["train_runtime"], rel=0.01)


def train_twice(out: str) -> list[tuple[float, int]]:
    trainer, found = make_trainer(out, 1), []
    for _ in range(2):
        trainer.seen.clear()
        metrics = trainer.train().metrics
        counted = metrics["train_samples_per_second"] * metrics["train_runtime"]
        found.append((counted, sum(map(len, trainer.seen))))
        assert not trainer._meter.pause()  # what is between two calls is no time of training
    return found


def test_a_second_call_counts_its_own_sequences(tmp_path: Path) -> None:
    [found] = run_ranks(train_twice, 1, str(tmp_path))
    for counted, sequences_run in found:
        assert counted == pytest.approx(sequences_run, rel=0.01)


@pytest.mark.slow
def test_steps_of_n_sequences_resume(tmp_path: Path) -> None:
    [whole] = run_ranks(train, 1, str(tmp_path), 1, None, Sequences(10))
    path = str(tmp_path / "checkpoint-4")
    [resumed] = run_ranks(train, 1, str(tmp_path), 1, path, Sequences(10))
    assert resumed["seen"] == whole["seen"][-len(resumed["seen"]) :]
    assert sum(map(len, resumed["seen"])) == 20
    assert largest_error(resumed["params"], whole["params"]) < 1e-12


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
    samples, wanted, model = sequences(60, labels=True), 0, tiny_llama()
    for step, ids in enumerate(trainer.seen):
        Thaws().on_step_begin(None, type("", (), {"global_step": step}), None, model=model)
        flops = FlopsModel.from_config(model.config).for_module(model)
        stats = SeqStats.from_lengths([len(samples[i]["input_ids"]) for i in ids], windows=flops.windows)
        wanted += flops.training_flops(stats).model
    assert trainer.state.total_flos == pytest.approx(wanted, rel=1e-9)
    metered = trainer._meter.state()["flops"]
    assert sum(metered.values()) - metered["recompute"] == pytest.approx(wanted, rel=1e-9)


def _report(out: str) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{out}/board"
    make_trainer(out, 1, report_to=["tensorboard"]).train()


def test_reporters_get_the_keys_of_the_other_hosts(tmp_path: Path) -> None:
    run_ranks(_report, 1, str(tmp_path))
    board = read_tensorboard(tmp_path / "board")
    assert len(board["train/device/mfu"]) >= STEPS - 1
    assert all(value > 0 for _, value in board["train/device/tflops_per_gpu"])
    assert not [key for key in board if key.startswith("train/train/")]


def test_resume_goes_on_with_what_was_left(tmp_path: Path) -> None:
    [whole] = run_ranks(train, 1, str(tmp_path), 2)
    [resumed] = run_ranks(train, 1, str(tmp_path), 2, str(tmp_path / "checkpoint-2"))
    assert resumed["seen"] == whole["seen"][4:]
    assert largest_error(resumed["params"], whole["params"]) < 1e-12


def refuse_all(out: str) -> dict[str, str]:
    return {kind: refuse(kind, out) for kind in REFUSED}


def refuse(kind: str, out: str) -> str:
    try:
        if kind == "collator":
            make_trainer(out, 1, data_collator=lambda rows: rows)
        elif kind == "sequences":
            make_trainer(out, 3, data_kwargs={"global_batch": Sequences(4)})
        elif kind == "layerwise":
            optim = {"optim": "lomo"}
            make_trainer(out, 1, data_kwargs={"global_batch": Sequences(4)}, arguments=optim)
        elif kind == "iterable":
            trainer = make_trainer(out, 1)
            trainer.train_dataset = 3.5
            trainer.get_train_dataloader()
        elif kind == "nothing":
            trainer = make_trainer(out, 1)
            trainer.train_dataset = None
            trainer.get_train_dataloader()
        elif kind == "mesh":
            trainer = make_trainer(out, 1)
            trainer.accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
            trainer._refuse_settings()
        elif kind == "packs":
            make_trainer(out, 2, data_kwargs={"global_batch": Packs(3)}).get_train_dataloader()
    except Exception as err:
        return str(err)
    return ""


REFUSED = {
    "collator": "would pad or stack what is packed",
    "sequences": "with gradient_accumulation_steps=3: a step of n sequences has",
    "layerwise": "with optim='lomo', which steps in every backward pass: once a microbatch here",
    "iterable": "float is no dataset: it has no length",
    "nothing": "has no dataset to pack. Pass train_dataset",
    "packs": "make 2 packs a step",
    "mesh": "packed_trainer runs data parallel, but the accelerator has ParallelismConfig",
}


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    [found] = run_ranks(refuse_all, 1, str(tmp_path))
    assert [kind for kind, message in REFUSED.items() if message not in found[kind]] == [], found


def test_the_class_keeps_its_base() -> None:
    assert issubclass(packed_trainer(), Trainer)
    assert packed_trainer().__name__ == "PackedTrainer"


COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": [1, 1, 1, 0]}, "4 input_ids and an attention_mask .* that is not all ones"),
    ({"position_ids": [0, 1, 0, 1]}, "Row 1 .* position_ids that do not count from 0 to 3"),
    ({"position_ids": [[0, 1, 2, 3]] * 3}, "Row 1 .* position_ids that do not count from 0 to 3"),
    ({"token_type_ids": [0, 1, 1, 0]}, "Row 1 .* has token_type_ids, which the model takes"),
    ({"inputs_embeds": [[0.0]] * 4}, "Row 1 .* has inputs_embeds, which the model takes"),
]


def test_what_is_no_dataset_of_ids_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    trainer, rows = make_trainer(str(tmp_path), 1), datasets.Dataset.from_list([{"input_ids": [5, 6]}])
    for given, message in (
        (datasets.DatasetDict(train=rows, test=rows), r"keys \['train', 'test'\] is no dataset"),
        ({"input_ids": [[5, 6]]}, r"A dict with the keys \['input_ids'\] is no dataset"),
        ([{"text": "a"}], r"Row 0 of the dataset has the keys \['text'\] and no 'input_ids'\. Tokenise it"),
    ):
        trainer.train_dataset = given
        with pytest.raises((TypeError, ValueError), match=message):
            trainer.train()


def test_columns_that_the_model_would_get_from_trainer_are_not_left_out_silently(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path), 1)
    for further, message in COLUMNS:
        rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 8], **further}]
        trainer.train_dataset = trainer.eval_dataset = rows
        for run in (trainer.evaluate, trainer.train):
            with pytest.raises(ValueError, match=message):
                run()


def test_columns_that_say_nothing_more_are_left_out(tmp_path: Path) -> None:
    plain = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 5]}]
    rows = [
        {
            **row,
            "attention_mask": [1] * len(row["input_ids"]),
            "position_ids": list(range(len(row["input_ids"]))),
            "token_type_ids": [0] * len(row["input_ids"]),
            "inputs_embeds": None,
            "text": "a",
        }
        for row in plain
    ]
    trainer = make_trainer(str(tmp_path), 1)
    assert trainer.evaluate(rows)["eval_loss"] == trainer.evaluate(plain)["eval_loss"]
