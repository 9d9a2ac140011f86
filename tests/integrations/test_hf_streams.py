"""Hugging Face's Trainer on a stream: the hand-written loop's losses, checkpoints, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

from lightning_thd import Packs, THDDataModule
from lightning_thd.data.streams import Stream
from lightning_thd.integrations import packed_trainer
from lightning_thd.integrations.hf_data import is_streamed, streamed_dataset
from tests.data.streams.jobs import samples_of, write_samples
from tests.integrations.support import RecordsSteps
from tests.ranks import run_ranks
from tests.tiny import largest_error, sequences, tiny_llama, train_alone


def train(folder: str, accumulate: int, steps: int, resume: bool = False, callback: Any = None) -> Any:
    """Train up to ``steps``; return parameters and the sequences of every pack."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=steps,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.5,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = type("Seen", (RecordsSteps, packed_trainer()), {})(
        model=model,
        args=arguments,
        train_dataset=Stream(f"{folder}/*.jsonl", window=8, shuffle_buffer=10),
        optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0)),
        capacity=48,
        peak=1e12,
    )
    trainer.seen = []

    if callback is not None:
        callback.trainer = trainer
        trainer.add_callback(callback)

    trainer.train(resume_from_checkpoint=resume or None)
    return {name: p.detach() for name, p in model.named_parameters()}, trainer.seen


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_is_the_mean_over_its_tokens_and_resuming_reads_nothing_twice(
    tmp_path: Path, ranks: int
) -> None:
    samples = write_samples(tmp_path)
    accumulate = 2
    runs = run_ranks(train, ranks, str(tmp_path), accumulate, 3)
    more = run_ranks(train, ranks, str(tmp_path), accumulate, 6, True)
    packs = [[*one[1], *other[1]] for one, other in zip(runs, more, strict=True)]

    assert all(len(one) == 6 * accumulate for one in packs)
    steps = [
        [i for one in packs for pack in one[k * accumulate : (k + 1) * accumulate] for i in pack]
        for k in range(6)
    ]
    first = [i for ids in steps for i in ids][:60]

    assert len(set(first)) >= len(first) - 8  # a pass of 60 sequences, and the beginning of the next
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    expected, _ = train_alone(model, samples_of(samples, steps), optimizer)

    for parameters, _ in more:
        assert largest_error(parameters, expected) < 1e-10


def test_what_a_trainer_streams_and_its_masks_of_learned_tokens() -> None:
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}]
    source = Dataset.from_list(rows).to_iterable_dataset()
    trl_like = type("SFTTrainer", (), {"__module__": "trl.trainer.sft_trainer"})
    stream = streamed_dataset(source, trl_like)
    (record,) = list(stream)

    assert list(record["labels"]) == [-100, 6, 7]
    for row in ({"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [5, 6]}):  # without masks
        (record,) = list(streamed_dataset(Dataset.from_list([row]).to_iterable_dataset(), trl_like))
        assert record == row

    with pytest.raises(ValueError, match=r"cannot prepare a Stream. Give it a datasets.IterableDataset"):
        streamed_dataset(Stream("x"), trl_like)
    assert is_streamed({"a": (Stream("x"), 1), "b": ([], 2)})
    assert not any(map(is_streamed, ({"a": ("x.jsonl", 1)}, sequences(2), None)))

    (step,) = THDDataModule(stream, capacity=16, global_batch=Packs(1)).train_steps()
    assert step.microbatches[0].targets.tolist() == [6, 7, -100]


def interrupt(**_: Any) -> None:
    raise InterruptedError


class SavesInside(TrainerCallback):
    """Saves and ends before the third optimizer step, as transformers' JIT checkpoints do at a signal."""

    trainer: Any

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            raise InterruptedError


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_checkpoint_inside_a_step_resumes_at_the_step(tmp_path: Path, accumulate: int) -> None:
    write_samples(tmp_path)
    whole, seen = train(str(tmp_path), accumulate, 6)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(InterruptedError):
        train(str(tmp_path), accumulate, 6, callback=SavesInside())
    resumed, rest = train(str(tmp_path), accumulate, 6, resume=True)
    assert rest == seen[2 * accumulate :]
    assert largest_error(resumed, whole) == 0.0


class AsksForALoader(TrainerCallback):
    """Asks for another loader, as callbacks do that want the number of batches."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.get_train_dataloader()


def test_a_checkpoint_has_the_position_of_the_loader_that_trains(tmp_path: Path) -> None:
    write_samples(tmp_path)
    _, seen = train(str(tmp_path), 1, 6)
    shutil.rmtree(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:  # a kill inside the save, after older checkpoints are deleted
        patch.setattr("transformers.trainer.rotate_checkpoints", interrupt)
        with pytest.raises(InterruptedError):
            train(str(tmp_path), 1, 6, callback=AsksForALoader())
    assert train(str(tmp_path), 1, 6, resume=True)[1] == seen[3:]


CHANGES: dict[str, dict[str, Any]] = {
    "capacity": {"capacity": 96},
    "lengths": {"train_dataset": sequences(20)},
    "global_batch": {"gradient_accumulation_steps": 2},
}


def planned(out: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"train_dataset": sequences(30), "capacity": 48}
    arguments |= {name: changes.pop(name) for name in list(changes) if name in arguments}
    options: dict[str, Any] = {"max_steps": 3, "save_steps": 2, "report_to": [], "use_cpu": True, **changes}
    args = TrainingArguments(output_dir=str(out), disable_tqdm=True, **options)
    return packed_trainer()(model=tiny_llama(), args=args, peak=1e9, **arguments)


def test_a_plan_is_resumed_with_the_data_and_settings_it_was_made_of(tmp_path: Path) -> None:
    planned(tmp_path).train()
    checkpoint = tmp_path / "checkpoint-2"
    for name, change in CHANGES.items():
        with pytest.raises(ValueError, match=rf"checkpoint-2: The state was saved with other .*{name} was"):
            planned(tmp_path / "again", **change).train(str(checkpoint))
    freely = planned(tmp_path / "again", capacity=96, ignore_data_skip=True)
    assert freely.train(str(checkpoint)).global_step == 3
    assert planned(tmp_path / "again").train(str(checkpoint)).global_step == 3
    (checkpoint / "thd_data.pt").unlink()
    with pytest.raises(ValueError, match="has no thd_data.pt: packed_trainer did not write it"):
        planned(tmp_path / "again").train(str(checkpoint))


@pytest.mark.parametrize("steps", [0, 8, None])
def test_resuming_begins_in_the_epoch_of_the_checkpoint(steps: int | None, tmp_path: Path) -> None:
    write_samples(tmp_path)
    source = sequences(30) if steps == 0 else Stream(f"{tmp_path}/*.jsonl", steps_per_epoch=steps)
    trainer = planned(tmp_path, train_dataset=source, max_steps=12, save_steps=10, logging_steps=1)
    trainer.train()
    resumed = planned(tmp_path, train_dataset=source, max_steps=12, logging_steps=1)
    resumed.train(str(tmp_path / "checkpoint-10"))
    assert steps is None or len(resumed.get_train_dataloader()) <= 10  # the packs of an epoch
    first, second = ([row for row in x.state.log_history if "loss" in row] for x in (trainer, resumed))
    assert len(first) == len(second) == 12
    for key in ("epoch", "loss", "total_flops"):
        assert [row[key] for row in first] == [row[key] for row in second]
