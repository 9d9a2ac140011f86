"""The monitor alone: in a loop of one's own, and under transformers' Trainer, on padded batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_thd import Packs, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.flops import FlopsModel, SeqStats
from lightning_thd.integrations import ThroughputCallback, packed_trainer, prepare_fabric
from tests.integrations.support import make_loop, run
from tests.tiny import sequences, tiny_llama

VOCAB = 31
N = 8
PEAK = 1e9
LENGTHS = [[5, 3], [1, 8], [4, 4], [8, 2]]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes))


def row(length: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(N) < length).long()
    ids = torch.where(mask == 1, torch.arange(1, N + 1), 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


def batch_of(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row(length)[key] for length in lengths]) for key in row(1)}


def by_hand(config: Any) -> int:
    flat = [length for lengths in LENGTHS for length in lengths]
    return FlopsModel.from_config(config).training_flops(SeqStats.from_lengths(flat)).model


def test_a_padded_loop_of_fabric() -> None:
    """The library's own set-up and its wrapped model: no pack anywhere."""
    host = L.Fabric(accelerator="cpu", devices=1)
    host.launch()
    bare = llama()
    logged = []
    model, optimizer = host.setup(bare, torch.optim.SGD(bare.parameters(), 0.1))
    batches: Any = torch.utils.data.DataLoader([batch_of(one) for one in LENGTHS], batch_size=None)
    monitor = THDThroughputMonitor(peak=PEAK, every_n_steps=3, warmup_steps=0)
    monitor.watch(model, log=lambda metrics, step: logged.append((step, metrics)))

    for batch in host.setup_dataloaders(batches):
        with monitor.step(batch):
            host.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    latest = monitor.finish()
    assert ([at for at, _ in logged], latest["train/total_flops"]) == ([3, 4], by_hand(bare.config))
    assert logged[0][1]["train/packing/fill"] == pytest.approx(25 / 48)
    assert {"train/device/mfu", "train/device/real_items_per_sec"} <= set(latest)
    assert (latest["train/samples"], latest["train/lengths"]) == (8, 64)


def test_a_packed_loop_counts_what_its_loss_runs_and_what_is_trained() -> None:
    """A reference pass under no_grad in the first interval, and frozen weights in the third."""

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            model(**batch.hf_kwargs())
        return causal_lm_loss(model, batch)

    host = L.Fabric(accelerator="cpu", devices=1)
    host.launch()
    model = tiny_llama(torch.float32)
    data = THDDataModule(sequences(30), capacity=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = prepare_fabric(host, model, data, optimizer, loss_fn=loss_fn, peak=PEAK, log_every_n_steps=1)
    flops = FlopsModel.from_config(model.config)
    expected = 0
    for number, step in zip(range(4), loop.loader, strict=False):
        loop.backward(step)
        stats = step.stats
        expected += (flops if number < 2 else flops.for_module(model)).training_flops(stats).model
        expected += flops.forward_flops(stats).model
        assert loop.latest["train/total_flops"] == expected, number
        if number == 1:
            model.model.requires_grad_(False)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("in_front", [False, True])
@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_transformers_trainer_resumes_totals_and_leaves_out_saves(
    tmp_path: Path, strategy: str, in_front: bool
) -> None:
    """A step takes 1 s, a save and an evaluation 100 s; the checkpoint of step 2 lies between two logs."""
    now = [0.0]
    errors = list[Exception]()

    class Slow(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if errors:
                raise errors.pop()
            now[0] += 1
            return super().training_step(*args, **kwargs)

        def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
            now[0] += 100
            return super()._evaluate(*args, **kwargs)  # type: ignore[no-untyped-call]

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            now[0] += 100
            super()._save_checkpoint(*args, **kwargs)

    def latest(resume: str | None) -> tuple[dict[str, float], Any]:
        callback = ThroughputCallback(peak=PEAK, warmup_steps=0)
        callback.monitor._clock = lambda: now[0]
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, num_train_epochs=2, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy=strategy, logging_steps=3, save_steps=2,
            eval_strategy=strategy, eval_steps=2, save_strategy=strategy,
        )  # fmt: skip

        rows: Any = [row(length) for lengths in LENGTHS for length in lengths]
        model = llama()
        trainer = Slow(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
        if in_front:
            callback.add_to(trainer)
            errors.append(ValueError("stop"))
            with pytest.raises(ValueError, match="stop"):
                trainer.train()
        else:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)

        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert all(entry["device/items_per_sec"] == 16 and "device/mfu" in entry for entry in logs)
        assert not model._forward_pre_hooks
        return callback.monitor.latest, logs[-1]["total_flops"]

    whole, flops = latest(None)
    first = tmp_path / f"checkpoint-{2 if strategy == 'steps' else 4}"
    resumed, again = latest(str(first))
    for key in ("time", "batches", "samples", "lengths", "total_flops"):
        assert resumed[f"train/{key}"] == whole[f"train/{key}"], key
    assert (whole["train/time"], whole["train/lengths"]) == (8, 128)
    assert flops == again
    assert strategy == "steps" or flops == 2 * by_hand(llama().config)


@pytest.mark.parametrize("engine", ["accelerate", "fabric"])
def test_a_loop_saved_between_two_logs_keeps_its_totals(tmp_path: Path, engine: str) -> None:
    """The checkpoint of step 3 lies between the logs of steps 2 and 4; saving takes 100 s."""
    now = [0.0]

    def loop_of() -> Any:
        host, loop = make_loop(engine, Packs(1), log_every_n_steps=2, loss_fn=loss_of)
        loop._meter.clock = lambda: now[0]
        return host, loop

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        now[0] += 1
        return causal_lm_loss(model, batch)

    def parts(loop: Any) -> dict[str, Any]:
        return {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, "loop": loop}

    host, loop = loop_of()
    steps = iter(loop.loader)
    run(loop, 3, steps)
    host.save_state(str(tmp_path)) if engine == "accelerate" else host.save(tmp_path / "x", parts(loop))
    now[0] += 100
    run(loop, 3, steps)
    host, resumed = loop_of()
    host.load_state(str(tmp_path)) if engine == "accelerate" else host.load(tmp_path / "x", parts(resumed))
    run(resumed, 3)
    for key in ("batches", "samples", "lengths", "total_flops"):
        assert resumed.latest[f"train/{key}"] == loop.latest[f"train/{key}"], key
    assert loop.latest["train/time"] == 5  # without the first step
    assert resumed.latest["train/time"] == 4  # also without the first step after the resume


def test_a_packed_trainer_counts_a_shared_prefix_once(tmp_path: Path) -> None:
    """Every sample begins with the same 12 tokens, which a pack computes once."""
    data = [{"input_ids": [1] * 12 + list(sample["input_ids"])} for sample in sequences(24)]
    seen = SeqStats()

    class Counting(packed_trainer()):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += inputs["batch"].stats
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings: dict[str, Any] = {"max_steps": 4, "logging_steps": 2, "report_to": "none", "use_cpu": True}
    model = tiny_llama(torch.float32)
    trainer = Counting(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path), save_strategy="no", **settings),
        train_dataset=data,
        capacity=96,
        peak=PEAK,
        data_kwargs={"share_prefixes": True},
    )
    trainer.train()
    expected = FlopsModel.from_config(model.config).training_flops(seen).model
    assert seen.shared_tokens
    assert [entry["total_flops"] for entry in trainer.state.log_history if "loss" in entry][-1] == expected
    assert trainer.state.total_flos == expected


class OwnModel(torch.nn.Module):
    """A model without a config, as transformers' Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, 16)
        self.layer = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, VOCAB)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
        logits = self.head(self.layer(self.tokens(input_ids)).relu())
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_transformers_trainer_counts_a_model_of_ones_own(tmp_path: Path, accumulate: int) -> None:
    """On padded rows, whose real tokens count."""
    flat = [length for lengths in LENGTHS for length in lengths]
    settings: Any = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulate}
    settings |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), num_train_epochs=2, logging_steps=1, **settings)
    measure = ThroughputCallback(peak=PEAK)
    rows = [row(length) for length in flat]
    Trainer(model=OwnModel(), args=arguments, train_dataset=rows, callbacks=[measure]).train()
    expected = 2 * 6 * (16 * 16 + 16 * VOCAB) * sum(flat)
    assert measure.monitor.latest["train/total_flops"] == pytest.approx(expected, rel=1e-9)
