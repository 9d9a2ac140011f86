"""Mixtures and named validation sets under a real Trainer."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset, DatasetDict
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_thd import CUDAGraphCallback, Sequences, THDDataModule, causal_lm_loss
from lightning_thd.batch.upload import uploaded
from lightning_thd.data import source_log
from lightning_thd.loss import log_token_losses
from lightning_thd.module import CausalLMModule
from tests.data.support import CAPACITY, flat, make_trainer
from tests.ranks import run_ranks
from tests.tiny import TinyModule, nll, sequences, tiny_llama

ROWS = [*sequences(8), *sequences(14, labels=True, seed=1)]


def mixture(**options: Any) -> THDDataModule:
    sources = {"a": (ROWS[:8], np.float32(0.5)), "b": (ROWS[8:], 0.5)}
    return THDDataModule(sources, capacity=CAPACITY, window=16, **options)


@pytest.mark.parametrize("step", [None, Sequences(7)])
def test_epochs_of_a_mixture_use_each_source_as_often_as_it_says(step: Any) -> None:
    module = TinyModule()
    ends: list[int] = []

    class Ends(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
            ends.append(len(module.seen))

    strategy = "thd" if step else "auto"
    make_trainer(max_epochs=3, callbacks=[Ends()], strategy=strategy).fit(module, mixture(global_batch=step))
    total: Counter[int] = Counter()
    for first, last in zip([0, *ends], ends, strict=False):
        epoch = Counter(flat(module.seen[first:last]))
        assert sum(n for i, n in epoch.items() if i < 8) == 14
        assert all(epoch[i] == 1 for i in range(8, 22))
        total += epoch
        assert max(total[i] for i in range(8)) - min(total[i] for i in range(8)) <= 1


@pytest.mark.parametrize("cut", [{"limit_train_batches": 3}, {"overfit_batches": 2}, {}])
def test_the_tokens_of_a_source_are_those_that_ran(cut: dict[str, int]) -> None:
    data, lengths = mixture(), [len(row["input_ids"]) for row in ROWS]
    for module in (TinyModule(), TinyModule()):  # the second fit begins at zero
        make_trainer(max_epochs=3, accumulate_grad_batches=2, **cut).fit(module, data)
    tokens = Counter[bool]()
    for i in flat(module.seen):
        tokens[i < 8] += lengths[i]
    assert data._source_log is not None
    assert data._source_log._tokens.tolist() == [tokens[True], tokens[False]]


def test_the_sources_of_a_batch_are_uploaded_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(source_log, "uploaded", lambda x, to: (sizes.append(len(x)), uploaded(x, to))[1])
    module = TinyModule()
    make_trainer(max_steps=3).fit(module, mixture())
    assert len(sizes) == 3
    assert all(n == len(batch) + 1 for n, batch in zip(sizes, module.seen, strict=True)), sizes


def test_named_validation_sets_have_a_metric_each() -> None:
    a, b = sequences(9, labels=True), sequences(12, labels=True, seed=3)
    module = CausalLMModule(tiny_llama())
    labelled = {"a": [{**row, "label": 1} for row in a], "b": b}  # labels of sequences change no weight
    data = THDDataModule(val=labelled, capacity=CAPACITY)
    stop = L.callbacks.LambdaCallback(on_validation_batch_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what was evaluated until then counts in no later mean
        make_trainer(callbacks=[stop]).validate(module, data, verbose=False)
    found = make_trainer().validate(module, data, verbose=False)
    metrics = {name: value for part in found for name, value in part.items()}
    for name, rows in (("a", a), ("b", b)):
        [alone] = make_trainer().validate(module, THDDataModule(val=rows, capacity=CAPACITY), verbose=False)
        assert metrics[f"val/loss/{name}"] == pytest.approx(alone["val/loss"], rel=1e-6)
    [both] = make_trainer().validate(module, THDDataModule(val=[*a, *b], capacity=CAPACITY), verbose=False)
    assert metrics["val/loss"] == pytest.approx(both["val/loss"], rel=1e-6)


@pytest.mark.parametrize("names", [("a", "b"), ("text", "messages")])
def test_sets_of_hugging_face_have_names_too(names: tuple[str, str]) -> None:
    sets = {name: Dataset.from_list(sequences(3)) for name in names}
    data = THDDataModule(sequences(9), capacity=CAPACITY, val=sets)
    data.setup("fit")
    assert [next(iter(loader)).set_name for loader in data.val_dataloader()] == list(names)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": (sequences(3), 0.5)}, r"val\['a'\] is a tuple.*no weight"),
        ({"a": None}, r"val\['a'\] is None"),
        ({"": sequences(3)}, r"val\[''\].*wanted a named source"),
        ({"a": lambda: iter([])}, "val/a is a stream; only train may be one"),
        (DatasetDict(a=Dataset.from_list(sequences(3))), r"keys \['a'\] is not a dataset"),
    ],
)
def test_bad_named_sets_are_refused(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        THDDataModule(capacity=CAPACITY, val=given).setup("validate")


def validate_sets(strategy: str, together: bool) -> float:
    warnings.filterwarnings("ignore", ".*accelerator.*")
    sets = {name: sequences(n, seed=n, labels=True) for name, n in (("a", 7), ("b", 11), ("c", 1))}
    for row, weight in zip(sets["b"], (0.5, 2.0, 1.25), strict=False):
        row["weights"] = weight
    val = [row for rows in sets.values() for row in rows] if together else sets
    trainer = make_trainer(strategy=strategy, devices=dist.get_world_size())
    data = THDDataModule(val=val, capacity=64)
    found = trainer.validate(CausalLMModule(tiny_llama().double()), data, verbose=False)
    return float({name: value for part in found for name, value in part.items()}["val/loss"])


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "thd_ddp"])
def test_the_mean_over_sets_is_that_over_all_their_tokens_on_every_rank(strategy: str) -> None:
    [wanted] = run_ranks(validate_sets, 1, "ddp", True)
    for found in run_ranks(validate_sets, 2, strategy, False):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({"a": sequences(3)}, {}, r"train\['a'\] is a list, wanted \(source, weight\)"),
        ({"a": (sequences(3), "x")}, {}, r"train\['a'\] is a tuple, wanted \(source, weight\)"),
        ({"a": (sequences(3), -1)}, {}, "The weight of 'a' is -1.0"),
        ({"a": (sequences(3), 1)}, {"schedule": [0, 0, 1]}, "schedule= uses each sequence"),
        ({"a": ([{"input_ids": [1] * 99}], 1)}, {}, "Sequence 0 has 99 tokens but at most 48 fit a pack"),
        ({"a": ([{"input_ids": [1, 2], "lengths": [1, 1]}], 1)}, {"packed": "packs"}, "holds ready packs"),
    ],
)
def test_bad_mixtures_are_refused(sources: Any, options: Any, message: str) -> None:
    data = THDDataModule(sources, capacity=CAPACITY, **options)
    with pytest.raises((ValueError, TypeError), match=message):
        make_trainer().fit(TinyModule(), data)


def own_loss(model: Any, batch: Any) -> Any:
    """A loss that a user writes: the mean over the batch's tokens of what they say themselves."""
    logits = model(**batch.hf_kwargs()).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    log_token_losses(batch, losses)
    return losses.sum() * batch.loss_scale


def source_losses(
    folder: Path,
    *,
    devices: int = 1,
    reduction: str = "tokens",
    own: bool = False,
    graphs: Any = None,
    data: Any = None,
    epochs: int = 2,
    **options: Any,
) -> Path:
    """Train at a rate of zero, logging every third step to TensorBoard."""

    class Still(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if own:
                return own_loss(self.model, batch)
            return causal_lm_loss(self.model, batch, reduction=reduction)  # type: ignore[call-overload]

    torch.manual_seed(0)
    logger = TensorBoardLogger(folder, name="", version="")
    trainer = make_trainer(
        max_epochs=epochs,
        devices=devices,
        strategy="thd" if devices == 1 else "thd_ddp",
        log_every_n_steps=3,
        logger=logger,
        callbacks=[] if graphs is None else [graphs],
    )
    trainer.fit(Still(lr=0.0), mixture(global_batch=Sequences(5), **options) if data is None else data)
    return folder


def logged_losses(folder: Path) -> dict[str, list[float]]:
    reader = EventAccumulator(str(folder))
    reader.Reload()
    names = ("data/a/loss", "data/b/loss", "data/a/tokens", "data/b/tokens")
    every = {name: reader.Scalars(name) for name in names}
    last = every[names[0]][-1].step
    for events in every.values():  # the steps after which Lightning logs every third loss, and the last step
        assert [event.step for event in events] == [*range(2, last, 3), last][: len(events)]
    return {name: [event.value for event in events] for name, events in every.items()}


def losses_by_hand(*, weigh_sequences: bool = False, epochs: int = 2) -> dict[str, list[float]]:
    """Run every sequence of the plan alone and average by source over three steps at a time."""
    data = mixture(global_batch=Sequences(5))
    data.setup("fit")
    planner: Any = data.train_steps().planner
    model = TinyModule(lr=0.0).model
    alone = [nll(model, row) for row in ROWS]
    plans = [planner.step(epoch, k, 1) for epoch in range(epochs) for k in range(planner.num_steps(epoch))]
    found: dict[str, list[float]] = {f"data/{n}/{what}": [] for n in "ab" for what in ("loss", "tokens")}
    tokens = Counter[str]()
    for at in range(0, len(plans), 3):
        sums = Counter[tuple[str, str]]()
        for plan in plans[at : at + 3]:
            for i in plan.spans.index.tolist():
                name, (loss, count) = "a" if i < 8 else "b", alone[i]
                tokens[name] += len(ROWS[i]["input_ids"])
                if count:
                    share = 1 / count if weigh_sequences else 1
                    sums[name, "loss"] += float(loss.detach()) * share
                    sums[name, "weight"] += count * share
        for name in "ab":
            found[f"data/{name}/loss"].append(sums[name, "loss"] / sums[name, "weight"])
            found[f"data/{name}/tokens"].append(tokens[name])
    return found


def on_two_ranks(folder: Path) -> None:
    source_losses(folder, devices=2)


@pytest.mark.parametrize("reduction", ["tokens", "sequences"])
def test_the_loss_of_each_source_is_that_of_its_sequences_alone(tmp_path: Path, reduction: str) -> None:
    found = logged_losses(source_losses(tmp_path, reduction=reduction))
    wanted = losses_by_hand(weigh_sequences=reduction == "sequences")
    assert len(wanted["data/a/loss"]) > 2
    for name, values in wanted.items():  # the tail of the last epoch too
        assert found[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps fp32


def test_two_ranks_log_the_same_losses_of_sources(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, tmp_path)
    found = logged_losses(tmp_path)
    for name, values in losses_by_hand().items():
        assert found[name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_replayed_from_graphs_log_the_same_losses_of_sources(tmp_path: Path, own: bool) -> None:
    graphs = CUDAGraphCallback(max_sequences=(6, 12), backend="recording", require=True)
    found = logged_losses(source_losses(tmp_path, own=own, graphs=graphs, epochs=5))
    assert graphs.stats.replays > 5  # of those after the 32 that are observed
    for name, values in losses_by_hand(epochs=5).items():
        assert found[name] == pytest.approx(values, rel=1e-6), name
