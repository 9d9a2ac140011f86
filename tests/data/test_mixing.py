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
    """A mixture of two sources, 8 and 14 sequences, in equal shares."""
    sources = {"a": (ROWS[:8], np.float32(0.5)), "b": (ROWS[8:], 0.5)}
    return THDDataModule(sources, capacity=CAPACITY, window=16, **options)


@pytest.mark.parametrize("step", [None, Sequences(7)])
def test_epochs_of_a_mixture_use_each_source_as_often_as_it_says(step: Any) -> None:
    """In every epoch, source b is used once, and source a as many tokens, its sequences in turn."""
    module = TinyModule()
    ends: list[int] = []

    class Ends(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
            ends.append(len(module.seen))

    trainer = make_trainer(max_epochs=3, callbacks=[Ends()], strategy="thd" if step else "auto")
    trainer.fit(module, mixture(global_batch=step))
    uses: Counter[int] = Counter()
    for first, last in zip([0, *ends], ends, strict=False):
        uses_in_epoch = Counter(flat(module.seen[first:last]))
        assert sum(n for i, n in uses_in_epoch.items() if i < 8) == 14
        assert all(uses_in_epoch[i] == 1 for i in range(8, 22))
        uses += uses_in_epoch
        uses_of_a = [uses[i] for i in range(8)]
        assert max(uses_of_a) - min(uses_of_a) <= 1


@pytest.mark.parametrize("limit", [{"limit_train_batches": 3}, {"overfit_batches": 2}, {}])
def test_the_tokens_of_a_source_are_those_that_ran(limit: dict[str, int]) -> None:
    """The counted tokens of each source are those of the last fit's batches, also under a limit."""
    data = mixture()
    for module in (TinyModule(), TinyModule()):  # the second fit begins at zero
        make_trainer(max_epochs=3, accumulate_grad_batches=2, **limit).fit(module, data)

    tokens = [0, 0]
    for i in flat(module.seen):
        source = 0 if i < 8 else 1
        tokens[source] += len(ROWS[i]["input_ids"])
    assert data._source_log is not None
    assert data._source_log._tokens.tolist() == tokens


def test_the_sources_of_a_batch_are_uploaded_by_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch uploads one number for each sequence and one for padding, not one for each token."""
    sizes: list[int] = []

    def uploaded_with_size(values: Any, device: torch.device) -> Any:
        sizes.append(len(values))
        return uploaded(values, device)

    monkeypatch.setattr(source_log, "uploaded", uploaded_with_size)
    module = TinyModule()
    make_trainer(max_steps=3).fit(module, mixture())
    assert len(sizes) == 3
    assert all(n == len(batch) + 1 for n, batch in zip(sizes, module.seen, strict=True)), sizes


def test_named_validation_sets_have_a_metric_each() -> None:
    """Each set's loss is that of a validation of this set, and ``val/loss`` that of all rows together."""
    a = sequences(9, labels=True)
    b = sequences(12, labels=True, seed=3)
    module = CausalLMModule(tiny_llama())
    labelled = {"a": [{**row, "label": 1} for row in a], "b": b}  # labels of sequences change no weight
    data = THDDataModule(val=labelled, capacity=CAPACITY)
    stop = L.callbacks.LambdaCallback(on_validation_batch_end=lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):  # what was evaluated until then counts in no later mean
        make_trainer(callbacks=[stop]).validate(module, data, verbose=False)
    of_sets = make_trainer().validate(module, data, verbose=False)
    metrics = {name: value for of_set in of_sets for name, value in of_set.items()}

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
    of_sets = trainer.validate(CausalLMModule(tiny_llama().double()), data, verbose=False)
    metrics = {name: value for of_set in of_sets for name, value in of_set.items()}
    return float(metrics["val/loss"])


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "thd_ddp"])
def test_the_mean_over_sets_is_that_over_all_their_tokens_on_every_rank(strategy: str) -> None:
    """Two ranks with three sets log the loss of one rank with all rows in one set."""
    [expected] = run_ranks(validate_sets, 1, "ddp", True)
    for loss in run_ranks(validate_sets, 2, strategy, False):
        assert loss == pytest.approx(expected, rel=1e-12)


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
    scalars = {name: reader.Scalars(name) for name in names}
    last = scalars[names[0]][-1].step
    steps = [*range(2, last, 3), last]  # after which Lightning logs every third loss, and the last step
    for name, events in scalars.items():
        assert [event.step for event in events] == steps[: len(events)], name
    return {name: [event.value for event in events] for name, events in scalars.items()}


def losses_by_hand(*, weigh_sequences: bool = False, epochs: int = 2) -> dict[str, list[float]]:
    """Run every sequence of the plan alone and average by source over three steps at a time."""
    data = mixture(global_batch=Sequences(5))
    data.setup("fit")
    planner: Any = data.train_steps().planner
    model = TinyModule(lr=0.0).model
    of_rows = [nll(model, row) for row in ROWS]  # (summed loss, number of loss tokens)
    plans = [planner.step(epoch, k, 1) for epoch in range(epochs) for k in range(planner.num_steps(epoch))]

    logged: dict[str, list[float]] = {
        f"data/{name}/{kind}": [] for name in "ab" for kind in ("loss", "tokens")
    }
    tokens = Counter[str]()
    for first in range(0, len(plans), 3):
        losses = Counter[str]()
        weights = Counter[str]()
        for plan in plans[first : first + 3]:
            for i in plan.spans.index.tolist():
                name = "a" if i < 8 else "b"
                tokens[name] += len(ROWS[i]["input_ids"])
                loss, loss_tokens = of_rows[i]
                if loss_tokens:
                    share = 1 / loss_tokens if weigh_sequences else 1
                    losses[name] += float(loss.detach()) * share
                    weights[name] += loss_tokens * share
        for name in "ab":
            logged[f"data/{name}/loss"].append(losses[name] / weights[name])
            logged[f"data/{name}/tokens"].append(tokens[name])
    return logged


def on_two_ranks(folder: Path) -> None:
    source_losses(folder, devices=2)


@pytest.mark.parametrize("reduction", ["tokens", "sequences"])
def test_the_loss_of_each_source_is_that_of_its_sequences_alone(tmp_path: Path, reduction: str) -> None:
    """Logged losses and tokens are those of each sequence alone, in both reductions."""
    logged = logged_losses(source_losses(tmp_path, reduction=reduction))
    expected = losses_by_hand(weigh_sequences=reduction == "sequences")
    assert len(expected["data/a/loss"]) > 2
    for name, values in expected.items():  # the tail of the last epoch too
        assert logged[name] == pytest.approx(values, rel=1e-6), name  # TensorBoard keeps fp32


def test_two_ranks_log_the_same_losses_of_sources(tmp_path: Path) -> None:
    """The losses of sources are over all ranks."""
    run_ranks(on_two_ranks, 2, tmp_path)
    logged = logged_losses(tmp_path)
    for name, values in losses_by_hand().items():
        assert logged[name] == pytest.approx(values, rel=1e-6), name


@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_replayed_from_graphs_log_the_same_losses_of_sources(tmp_path: Path, own: bool) -> None:
    """Replayed steps log the losses of sources too, by our loss and by a user's."""
    graphs = CUDAGraphCallback(max_sequences=(6, 12), backend="recording", require=True)
    logged = logged_losses(source_losses(tmp_path, own=own, graphs=graphs, epochs=5))
    assert graphs.stats.replays > 5  # of those after the 32 that are observed
    for name, values in losses_by_hand(epochs=5).items():
        assert logged[name] == pytest.approx(values, rel=1e-6), name
