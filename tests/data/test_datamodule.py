"""THDDataModule: every sequence once, every switch of a Trainer, exact scales, the planner's own plans."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pandas import DataFrame
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

from lightning_thd import FlopsModel, Packs, Sequences, THDBatch, THDDataModule
from lightning_thd.alignment import Alignment
from lightning_thd.batch import THDStep
from lightning_thd.data import planning
from lightning_thd.data.loader import PlansAhead
from lightning_thd.data.read.sources import Opener
from lightning_thd.data.sets import open_mixture, open_set
from lightning_thd.data.store.index import build_index
from lightning_thd.data.trainer_link import Job
from lightning_thd.module import CausalLMModule
from lightning_thd.packing import Cost, PackPlanner, StepPlan, balance
from lightning_thd.packing.sharing import Sharing
from tests.data.support import CAPACITY, batches_of, flat, make_trainer
from tests.ranks import run_ranks
from tests.tiny import VOCAB, TinyModule, nll, sequences, tiny_llama


def test_an_epoch_uses_every_sequence_once_and_the_next_one_in_another_order() -> None:
    module = TinyModule()
    samples = sequences(60)
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, pickle.loads(ForkingPickler.dumps(THDDataModule(samples, capacity=CAPACITY))))
    half = len(module.seen) // 2
    first = flat(module.seen[:half])
    second = flat(module.seen[half:])
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
    assert trainer.estimated_stepping_batches == trainer.global_step == len(module.seen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_work_without_a_trainer(num_workers: int) -> None:
    samples = sequences(60, labels=True)
    before = set(mp.active_children())
    data = THDDataModule(samples, capacity=CAPACITY, num_workers=num_workers, seed=3)
    data.setup("fit")
    loader = data.train_dataloader()
    batches = list(loader)

    assert len(batches) == len(loader)
    assert all(isinstance(b, THDBatch) and len(b.input_ids) <= CAPACITY for b in batches)
    for batch in batches:
        for i, ids in zip(batch.sequence_ids, batch.unpack(batch.input_ids), strict=True):
            assert ids.tolist() == samples[i]["input_ids"].tolist()

    del loader, data
    assert set(mp.active_children()) <= before  # workers end with their loader, not when garbage is collected

    again = THDDataModule(samples, capacity=CAPACITY, seed=3)
    assert [b.sequence_ids for b in batches_of(again)] == [b.sequence_ids for b in batches]


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
    samples = sequences(40, labels=True)
    module = TinyModule()
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
    module = TinyModule()
    samples = sequences(60)
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


def model_with_window() -> nn.Module:
    """A tiny Mistral whose layers see 6 tokens."""
    sizes = {**TinyModule().model.config.to_dict(), "model_type": "mistral", "sliding_window": 6}
    model: nn.Module = AutoModelForCausalLM.from_config(MistralConfig(**sizes))
    return model


def test_the_models_window_counts_in_batches() -> None:
    data = THDDataModule(sequences(60), capacity=CAPACITY)
    data.attach(model=model_with_window())
    batches = batches_of(data)
    assert len(batches) > 2
    for batch in batches:
        expected = sum(min(i + 1, 6) for length in batch.lengths for i in range(length))
        assert batch.stats.window_pairs == ((6, expected),)


def test_a_cost_with_the_models_window_is_found_again_by_a_resume() -> None:
    model = model_with_window()
    one = open_set("train", sequences(8), Opener(), empty="error")
    settings = planning.DataSettings(capacity=32)
    jobs = [Job(ranks=4, sharing=Sharing(max_degree=degree), model=model) for degree in (2, 4)]
    settings = replace(settings, global_batch=Sequences(4))
    two, four = (planning.make_planner(one, settings, job, training=True) for job in jobs)
    assert four.resume(two.state(0, 1)) == (0, 1)


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


def test_what_would_train_on_less_than_was_meant_is_refused() -> None:
    for data, message in (
        (THDDataModule([], capacity=8), "The dataset is empty"),
        (THDDataModule(DataFrame({"input_ids": [[1]]}), capacity=8), r"DataFrame with .*its rows as a list"),
        (THDDataModule(val=sequences(9), capacity=8), "no data for 'train'"),
        (THDDataModule(sequences(60), capacity=8), r"tokens but at most 8 fit a pack.*oversize="),
        (THDDataModule([{"input_ids": [1, VOCAB]}], capacity=8), "Sequence 0 of the train data has"),
        (THDDataModule([{"text": "a"}], capacity=8, tokenizer=Tokenizer(WordLevel())), "is a Tokenizer"),
        (THDDataModule([{"input_ids": [1]}, {"input_ids": []}], capacity=8), "Sequence 1 has no tokens"),
    ):
        with pytest.raises((ValueError, TypeError, MisconfigurationException), match=message):
            make_trainer().fit(TinyModule(), data)
    for options, message in (
        ({"global_batch": 8}, r"8; wanted Packs or Sequences. Pass Sequences\(8\)"),
        ({"mixing": {"shares": "tokens"}}, "mixing is a dict.* wanted Mixing"),
    ):
        with pytest.raises(TypeError, match=message):
            THDDataModule(sequences(9), capacity=CAPACITY, **options)

    normed = TinyModule()
    normed.norm = nn.BatchNorm1d(4)

    for module, message in ((CausalLMModule(tiny_llama), "average nothing"), (normed, "one more epoch for")):
        data = THDDataModule(sequences(9), capacity=CAPACITY)
        averaging = StochasticWeightAveraging(1e-3)
        with pytest.raises(MisconfigurationException, match=f"StochasticWeightAveraging .*{message}"):
            make_trainer(callbacks=[averaging]).fit(module, data)


class Known(list[dict[str, Any]]):
    def __init__(self, rows: list[dict[str, Any]], fingerprint: str = "a") -> None:
        super().__init__(rows)
        self.fingerprint = fingerprint
        self.reads = 0

    def __getitem__(self, i: Any) -> Any:
        self.reads += 1
        return super().__getitem__(i)


def test_known_data_is_counted_once(tmp_path: Path) -> None:
    key = {"fingerprint": "a"}
    first = Known(sequences(50, labels=True))
    expected = build_index(list(first))

    for reads in (50, 0):
        data = Known(first)
        index = build_index(data, key=key, cache_dir=tmp_path)
        assert data.reads <= reads + 1  # one look at a sample tells what it holds
        assert index.lengths.tolist() == expected.lengths.tolist()
        assert index.loss_tokens.tolist() == expected.loss_tokens.tolist()

    assert isinstance(index.lengths, np.memmap)
    [folder] = tmp_path.iterdir()
    (folder / "lengths.npy").write_bytes(b"")

    with pytest.warns(UserWarning, match="It is built again now"):
        again = build_index(first, key=key, cache_dir=tmp_path)
    assert again.lengths.tolist() == expected.lengths.tolist()


def test_windows_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "COUNTS_FROM", 1)

    def order() -> list[tuple[int, ...]]:
        rows = Known(sequences(60))
        data = THDDataModule(rows, capacity=CAPACITY, window=16, cache_dir=tmp_path, val=sequences(9))
        return [batch.sequence_ids for batch in batches_of(data)]

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("windows were counted")

    first = order()
    monkeypatch.setattr("lightning_thd.packing.windows.count_windows", never)
    assert order() == first
    [folder] = tmp_path.glob("counts-*")
    shutil.rmtree(folder)
    with pytest.raises(AssertionError, match="windows were counted"):
        order()


@pytest.mark.parametrize("mine", [None, Cost(linear=1, quadratic=0)])
def test_the_cost_is_that_of_the_model_or_the_users(mine: Cost | None) -> None:
    seen: list[Cost] = []

    def spy(lengths: Any, capacity: int, *, dp: int, cost: Cost) -> Any:
        seen.append(cost)
        return balance(lengths, capacity, dp=dp, cost=cost)

    step = Sequences(10)
    data = THDDataModule(sequences(30), capacity=CAPACITY, global_batch=step, scheduler=spy, cost=mine)
    data.setup("fit")
    data.train_steps()  # without a model, so by the default cost
    make_trainer(strategy="thd").fit(TinyModule(), data)
    of_model = FlopsModel.from_config(TinyModule().model.config)
    assert seen[0] == (mine or Cost.from_flops(of_model, longest=CAPACITY))


def test_a_scheduler_of_ones_own_places_the_sequences() -> None:
    def one_by_one(lengths: Any, capacity: int, *, dp: int, cost: Cost) -> Any:
        return [[[i] for i in range(len(lengths))]]

    data = THDDataModule(sequences(12), capacity=CAPACITY, global_batch=Sequences(4), scheduler=one_by_one)
    data.setup("fit")
    for step in data.train_dataloader():
        assert isinstance(step, THDStep)
        assert [len(batch) for batch in step.microbatches] == [1] * 4


def test_a_ready_made_schedule_is_followed() -> None:
    data = THDDataModule(sequences(6, longest=5), capacity=20, schedule=[2, 0, 1, 0, 2, 1])
    data.setup("fit")
    packs = [b.sequence_ids for b in data.train_dataloader() if isinstance(b, THDBatch)]
    assert packs == [(1, 3), (2, 5), (0, 4)]
    data = THDDataModule(sequences(6), capacity=99, schedule=[1, 2])
    data.setup("fit")
    with pytest.raises(ValueError, match=r"schedule is int64 \(2,\) for 6 sequences"):
        data.train_dataloader()


def _fit_few(sequences_given: int, step: Any) -> tuple[list[tuple[int, ...]], int, list[float]]:
    module = TinyModule()
    trainer = make_trainer(max_epochs=2, devices=2, strategy="thd_ddp", num_sanity_val_steps=0)
    samples = sequences(sequences_given, longest=5)
    data = THDDataModule(samples, capacity=CAPACITY, global_batch=step, val=samples)
    trainer.fit(module, data)
    return module.seen, trainer.global_step, [float(p.detach().sum()) for p in module.model.parameters()]


@pytest.mark.parametrize("step", [None, Sequences(4)])
def test_fewer_sequences_than_ranks_give_every_rank_as_many_batches(step: Any) -> None:
    (seen, steps, weights), (other_seen, other_steps, other_weights) = run_ranks(_fit_few, 2, 1, step)
    assert len(seen) == len(other_seen) == steps == other_steps == 2
    assert sorted([*seen, *other_seen]) == [(), (), (0,), (0,)]
    assert weights == other_weights
    assert all(torch.isfinite(torch.tensor(weights)))


def test_what_is_not_planned_by_degrees() -> None:
    opener = Opener()
    settings = planning.DataSettings(capacity=CAPACITY)
    job = Job(ranks=2, sharing=Sharing(max_degree=2))
    mixture = open_mixture("train", {"a": (sequences(3), 1.0)}, opener, empty="error")
    with pytest.raises(ValueError, match="context_parallel_size='dynamic' cannot be used with a mixture"):
        planning.make_planner(mixture, settings, job, training=True)
    one = open_set("train", sequences(3), opener, empty="error")
    aligned = replace(job, alignment=Alignment(sequence_multiple=1, total_multiple=16))
    with pytest.raises(ValueError, match="with a precision that aligns packs"):
        planning.make_planner(one, settings, aligned, training=True)


def test_an_id_past_the_vocabulary_where_only_lengths_were_known() -> None:
    class Counted(list[dict[str, Any]]):
        lengths = (2, 3)

    rows = Counted([{"input_ids": [1, 2]}, {"input_ids": [3, 64, 5]}])
    data = THDDataModule(rows, capacity=CAPACITY, vocab_size=64)
    data.setup("fit")
    with pytest.raises(ValueError, match="has the token id or label 64, but the model's vocabulary has"):
        list(data.train_dataloader())


LENGTHS = np.random.default_rng(0).integers(1, 200, 500)


def same(a: StepPlan, b: StepPlan) -> bool:
    of_a, of_b = ([p.tolist() for r in plan.indices_by_rank() for p in r] for plan in (a, b))
    return of_a == of_b


@pytest.mark.parametrize("global_batch", [Packs(4), Sequences(32)])
def test_plans_are_the_planners_own_in_any_order(global_batch: Packs | Sequences) -> None:
    plain = PackPlanner(LENGTHS, 512, global_batch=global_batch, window=64)
    ahead = PlansAhead(PackPlanner(LENGTHS, 512, global_batch=global_batch, window=64), 2)
    steps = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 5), (0, 3), (1, 0), (0, len(plain) - 1), (1, 0), (1, 1)]
    for epoch, k in steps:
        assert same(ahead.step(epoch, k), plain.step(epoch, k, 2))


def test_a_copy_and_a_fork_leave_the_thread_behind() -> None:
    plain = PackPlanner(LENGTHS, 512, global_batch=Sequences(32))
    ahead = PlansAhead(plain, 1)
    ahead.step(0, 0)
    copy = pickle.loads(pickle.dumps(ahead))
    assert same(copy.step(0, 1), plain.step(0, 1))
    child = os.fork()
    if not child:
        right = same(ahead.step(0, 1), plain.step(0, 1)) and same(ahead.step(0, 2), plain.step(0, 2))
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


_WORKING = """
import sys, time
from lightning_thd import THDDataModule
kind, folder = sys.argv[1:]
short = [{"input_ids": [1, 2]}] * (3_000_000 if kind == "counting" else 100_000)
endless = lambda: iter(lambda: {"input_ids": [1] * 20_000}, None)
source = {"tokenising": folder + "/d.jsonl", "streaming": endless}.get(kind, short)
data = THDDataModule(source, capacity=50_000, num_workers=1, cache_dir=folder)
data.setup("fit")
print("ready", flush=True)
for batch in data.train_dataloader():
    time.sleep(1)
"""
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tokenising", "counting", "loading")]


@pytest.mark.parametrize("kind", ["streaming", *SLOW])
def test_workers_end_with_a_killed_process(kind: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"text": "{"a" * 2000}"}}\n' * 16_000)
    command = [sys.executable, "-W", "ignore", "-c", _WORKING, kind, str(tmp_path)]

    with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        if kind == "loading":
            job.stdout.readline()  # the workers that count have ended
        while not any("pt_data" in x.name() for x in psutil.Process(job.pid).children()):
            assert job.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        job.send_signal(signal.SIGSTOP)  # it reads no more, and the workers' queues fill up
        workers = psutil.Process(job.pid).children()
        time.sleep(1.5)
        job.kill()
        _, alive = psutil.wait_procs(workers, timeout=20)
        for worker in alive:
            worker.kill()

    assert not alive
